//! The cause of each segment release: a call of `empty_cache`, or a request that needed memory.
//!
//! No event records it. This project's recorder stores the frames at the time of the release. PyTorch stores the request's
//! frames, or the call's if frees have frames (`context="all"`), else the frames of the segment's allocation. So frames that
//! differ from those of the allocation were gathered at the release. The next event decides the other cases: a request's event
//! directly follows the releases that it caused.

use crate::recording::Recording;
use std::collections::HashMap;
use vramlab::histories::formats::{Action, StackId};

/// The cause of a segment release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// A call of `empty_cache`, named by its frames.
    NamedCall,
    /// A call of `empty_cache`, inferred because no request follows.
    Call,
    /// The following request.
    Request,
    /// Unknown from the recording.
    Unknown,
}

impl By {
    pub(crate) fn is_call(self) -> bool {
        matches!(self, Self::NamedCall | Self::Call)
    }
}

/// The causes of all segment releases of a recording, by event index.
#[derive(Debug)]
pub(crate) struct Releases(HashMap<usize, By>);

/// A release: its frames, and the frames of the segment's allocation if recorded.
#[derive(Clone, Copy, Debug)]
struct Release {
    index: usize,
    stack: StackId,
    allocation: Option<StackId>,
}

impl Releases {
    /// Infers the causes. Linear in the events.
    pub(crate) fn of(recording: &Recording) -> Self {
        let origins = &recording.origins;
        let names_call =
            |stack: StackId| origins.frames(stack).any(|frame| origins.spelt(frame.name).contains("empty_cache"));
        let exact_frames = recording.summary.keys.has("recorder") && origins.has_frames();
        let mut out = HashMap::new();
        let mut allocations = HashMap::new();
        let mut run: Vec<Release> = Vec::new();
        let mut end = |run: &mut Vec<Release>, request: Option<StackId>| {
            if run.is_empty() {
                return;
            }
            let named = run.iter().any(|release| names_call(release.stack));
            let by = if named { By::NamedCall } else { by(run, request, exact_frames) };
            out.extend(run.drain(..).map(|release| (release.index, by)));
        };
        for (index, event) in recording.events.iter().enumerate() {
            let stack = event.origin.stack;
            match event.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    run.push(Release { index, stack, allocation: allocations.remove(&event.addr) });
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    allocations.insert(event.addr, stack);
                }
                Action::FreeCompleted => {}
                Action::Alloc | Action::Oom => end(&mut run, Some(stack)),
                _ => end(&mut run, None),
            }
        }
        end(&mut run, None);
        Self(out)
    }

    /// The cause of the release at an event.
    pub(crate) fn by(&self, index: usize) -> By {
        self.0.get(&index).copied().unwrap_or(By::Unknown)
    }
}

/// The cause of consecutive releases. `request`: the frames of the next event if it is a request. `exact_frames`: the frames were
/// gathered at the release.
fn by(run: &[Release], request: Option<StackId>, exact_frames: bool) -> By {
    let Some(request) = request else { return By::Call };
    let as_requested = run.iter().all(|release| release.stack == request);
    let at_release = run.iter().any(|release| release.allocation.is_some_and(|stack| stack != release.stack));
    let as_allocated = run.iter().all(|release| release.allocation == Some(release.stack) && !release.stack.is_empty());
    match () {
        () if exact_frames || at_release => {
            if as_requested {
                By::Request
            } else {
                By::Unknown
            }
        }
        // A request would have stored its own frames.
        () if as_allocated && !as_requested && !request.is_empty() => By::Call,
        () if !as_allocated && as_requested && !request.is_empty() => By::Request,
        () => By::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::histories::formats::Origins;

    #[test]
    fn frames_and_the_next_event_determine_the_cause() {
        let mut origins = Origins::new(&vramlab::budget::Budget::default());
        let [none, first, second] = [&[][..], &[0], &[1]].map(|frames| origins.stack(frames).unwrap());
        let run = |stack, allocation| [Release { index: 0, stack, allocation }];
        // No request follows.
        assert_eq!(by(&run(none, None), None, false), By::Call);
        // The recorder's frames are those of the release; the backward pass has none.
        assert_eq!(by(&run(none, Some(first)), Some(none), true), By::Request);
        assert_eq!(by(&run(second, Some(first)), Some(second), true), By::Request);
        assert_eq!(by(&run(none, Some(first)), Some(second), true), By::Unknown);
        // PyTorch's may be those of the segment's allocation, also in the backward pass.
        assert_eq!(by(&run(second, Some(first)), Some(second), false), By::Request);
        assert_eq!(by(&run(none, Some(first)), Some(none), false), By::Request);
        assert_eq!(by(&run(first, Some(first)), Some(second), false), By::Call);
        for (stack, allocation, request) in
            [(first, Some(first), first), (first, Some(first), none), (none, Some(none), second), (none, None, none)]
        {
            assert_eq!(by(&run(stack, allocation), Some(request), false), By::Unknown);
        }
    }
}
