//! Who gave segments back: a call of `empty_cache`, or a request that needed memory.
//!
//! No event says so. This project's recorder gives each release the frames at that time. PyTorch gives it the request's frames,
//! those of the call where frees have frames (`context="all"`), and else those with which the segment was allocated. So frames
//! that a segment was not allocated with were gathered when it was released. What follows tells the rest: a request's own event
//! comes right after what it releases.

use crate::recording::Recording;
use std::collections::HashMap;
use vramlab::histories::formats::{Action, StackId};

/// Who gave a segment back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// A call of `empty_cache`, which its frames name.
    NamedCall,
    /// A call of `empty_cache`, which nothing else can have been.
    Call,
    /// The request that follows.
    Request,
    /// The recording does not tell.
    Unknown,
}

impl By {
    pub(crate) fn is_call(self) -> bool {
        matches!(self, Self::NamedCall | Self::Call)
    }
}

/// Who gave back each segment of a recording.
#[derive(Debug)]
pub(crate) struct Releases(HashMap<usize, By>);

/// A release: its frames, and those with which the segment was allocated, where the recording has that.
#[derive(Clone, Copy, Debug)]
struct Release {
    index: usize,
    stack: StackId,
    birth: Option<StackId>,
}

impl Releases {
    /// Linear in the events.
    pub(crate) fn of(recording: &Recording) -> Self {
        let origins = &recording.origins;
        let names_call =
            |stack: StackId| origins.frames(stack).any(|frame| origins.spelt(frame.name).contains("empty_cache"));
        let own = recording.summary.keys.has("recorder") && origins.has_frames();
        let mut out = HashMap::new();
        let mut births = HashMap::new();
        let mut run: Vec<Release> = Vec::new();
        let mut end = |run: &mut Vec<Release>, request: Option<StackId>| {
            if run.is_empty() {
                return;
            }
            let named = run.iter().any(|release| names_call(release.stack));
            let by = if named { By::NamedCall } else { by(run, request, own) };
            out.extend(run.drain(..).map(|release| (release.index, by)));
        };
        for (index, event) in recording.events.iter().enumerate() {
            let stack = event.origin.stack;
            match event.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    run.push(Release { index, stack, birth: births.remove(&event.addr) });
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    births.insert(event.addr, stack);
                }
                Action::FreeCompleted => {}
                Action::Alloc | Action::Oom => end(&mut run, Some(stack)),
                _ => end(&mut run, None),
            }
        }
        end(&mut run, None);
        Self(out)
    }

    /// Who gave back the segment of an event.
    pub(crate) fn by(&self, index: usize) -> By {
        self.0.get(&index).copied().unwrap_or(By::Unknown)
    }
}

/// Who released segments one after another, before an event that is a request with these frames, or is none. `own`: the frames
/// are those at that time.
fn by(run: &[Release], request: Option<StackId>, own: bool) -> By {
    let Some(request) = request else { return By::Call };
    let as_requested = run.iter().all(|release| release.stack == request);
    let gathered = run.iter().any(|release| release.birth.is_some_and(|birth| birth != release.stack));
    let born = run.iter().all(|release| release.birth == Some(release.stack) && !release.stack.is_empty());
    match () {
        () if own || gathered => {
            if as_requested {
                By::Request
            } else {
                By::Unknown
            }
        }
        // A request would have given them its own.
        () if born && !as_requested && !request.is_empty() => By::Call,
        () if !born && as_requested && !request.is_empty() => By::Request,
        () => By::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::histories::formats::Origins;

    #[test]
    fn frames_and_order_tell_who_released() {
        let mut origins = Origins::new(&vramlab::budget::Budget::default());
        let [none, first, second] = [&[][..], &[0], &[1]].map(|frames| origins.stack(frames).unwrap());
        let run = |stack, birth| [Release { index: 0, stack, birth }];
        // Nothing was requested.
        assert_eq!(by(&run(none, None), None, false), By::Call);
        // The recorder's frames are those at that time; the backward pass has none.
        assert_eq!(by(&run(none, Some(first)), Some(none), true), By::Request);
        assert_eq!(by(&run(second, Some(first)), Some(second), true), By::Request);
        assert_eq!(by(&run(none, Some(first)), Some(second), true), By::Unknown);
        // PyTorch's may be those of the segment's birth, in the backward pass too.
        assert_eq!(by(&run(second, Some(first)), Some(second), false), By::Request);
        assert_eq!(by(&run(none, Some(first)), Some(none), false), By::Request);
        assert_eq!(by(&run(first, Some(first)), Some(second), false), By::Call);
        for (stack, birth, request) in
            [(first, Some(first), first), (first, Some(first), none), (none, Some(none), second), (none, None, none)]
        {
            assert_eq!(by(&run(stack, birth), Some(request), false), By::Unknown);
        }
    }
}
