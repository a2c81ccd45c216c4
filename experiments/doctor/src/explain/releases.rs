//! Who gave segments back: a call of `empty_cache`, or a request that needed memory.
//!
//! Nothing in a snapshot says so. Frames do where releases have them, and the order of events does where they have none: PyTorch's
//! `context="alloc"` gives a request's frames to the segments that it releases, and none to those of `empty_cache`; this project's
//! recorder gives both theirs, so that only the backward pass, which runs outside of Python, has none.

use crate::recording::Recording;
use std::collections::HashSet;
use vramlab::histories::formats::{Action, StackId};

/// Who gave segments back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// A call of `empty_cache`.
    Call,
    /// The request that follows.
    Request,
    /// The recording does not tell.
    Unknown,
}

/// What tells it in a recording.
#[derive(Debug)]
pub(crate) struct Releases {
    /// Which stacks name `empty_cache`, by index.
    named: Vec<bool>,
    /// Whether calls of `empty_cache` would have frames.
    calls_have_frames: bool,
    /// Whether any event has.
    has_frames: bool,
}

impl Releases {
    /// Linear in the events.
    pub(crate) fn of(recording: &Recording) -> Self {
        let origins = &recording.origins;
        let mut named = vec![false; origins.stacks()];
        let stacks: HashSet<StackId> = recording
            .events
            .iter()
            .filter(|event| matches!(event.action, Action::SegmentFree | Action::SegmentUnmap))
            .map(|event| event.origin.stack)
            .collect();
        for stack in stacks {
            named[stack.index()] = origins.frames(stack).any(|frame| origins.spelt(frame.name).contains("empty_cache"));
        }
        let has_frames = origins.has_frames();
        Self { named, calls_have_frames: has_frames && recording.summary.keys.has("recorder"), has_frames }
    }

    /// Whether the frames of a release name `empty_cache`.
    pub(crate) fn names_call(&self, stack: StackId) -> bool {
        self.named.get(stack.index()) == Some(&true)
    }

    /// Who gave segments back that have the frames `released` and are followed by a request with the frames `request`; `None` where
    /// what follows is no request.
    pub(crate) fn by(&self, released: StackId, request: Option<StackId>) -> By {
        match request {
            _ if self.names_call(released) => By::Call,
            // A request's own event comes right after what it releases.
            None => By::Call,
            Some(request) if !released.is_empty() => if released == request { By::Request } else { By::Unknown },
            Some(_) if self.calls_have_frames => By::Request,
            Some(request) if self.has_frames && !request.is_empty() => By::Call,
            Some(_) => By::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn releases(calls_have_frames: bool, stacks: [StackId; 3]) -> (Releases, [StackId; 3]) {
        (Releases { named: vec![false, true, false], calls_have_frames, has_frames: true }, stacks)
    }

    #[test]
    fn frames_and_order_tell_who_released() {
        let budget = vramlab::budget::Budget::default();
        let mut origins = vramlab::histories::formats::Origins::new(&budget);
        let [none, call, request] = [&[][..], &[0], &[1]].map(|frames| origins.stack(frames).unwrap());
        for own in [false, true] {
            let (releases, [none, call, request]) = releases(own, [none, call, request]);
            assert_eq!(releases.by(call, Some(request)), By::Call);
            assert_eq!(releases.by(none, None), By::Call);
            assert_eq!(releases.by(request, Some(request)), By::Request);
            // In the backward pass a request has no frames, nor has what it releases.
            assert_eq!(releases.by(none, Some(none)), if own { By::Request } else { By::Unknown });
        }
        let (pytorch, [none, _, request]) = releases(false, [none, call, request]);
        assert_eq!(pytorch.by(none, Some(request)), By::Call);
        let nothing = Releases { named: vec![false], calls_have_frames: false, has_frames: false };
        assert_eq!(nothing.by(none, Some(none)), By::Unknown);
    }
}
