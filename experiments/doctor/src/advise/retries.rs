//! A GPU or a limit that was full without a request being refused: PyTorch released its cache, asked again and was served. Nothing
//! names that in a snapshot, but its stack frames do: segments that go back during a request have the request's own stack, and those
//! of `empty_cache` have another.

use crate::recording::Recording;
use vramlab::histories::formats::{Action, StackId};

/// Requests during which the cache was released, and the memory that there was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Retries {
    /// How many stacks show.
    pub(super) count: u64,
    /// So much was reserved at least once.
    pub(super) least: u64,
    /// With so much more than this, no cache would have been released.
    pub(super) most: u64,
}

impl Retries {
    /// What stacks show; `None` where they show no release, where segments also go back to collections of garbage, or where the
    /// releases contradict what was reserved. Linear in the events.
    pub(super) fn of(recording: &Recording) -> Option<Self> {
        if recording.settings.garbage_collection_threshold > 0.0 {
            return None;
        }
        let mut reserved: u64 = recording.before.segments.iter().map(|one| one.segment.bytes).sum();
        let mut out = Self { count: 0, least: reserved, most: u64::MAX };
        // What was reserved before segments went back one after another, and their stack if they have the same.
        let mut going: Option<(u64, StackId)> = None;
        for event in recording.events.iter() {
            let stack = event.origin.stack;
            match event.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    going = Some(match going {
                        Some((held, first)) if first == stack => (held, first),
                        Some((held, _)) => (held, StackId::default()),
                        None => (reserved, stack),
                    });
                    reserved = reserved.saturating_sub(event.bytes);
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    if let Some((held, _)) = going.take().filter(|(_, first)| !first.is_empty() && *first == stack) {
                        out.count += 1;
                        out.most = out.most.min(held + event.bytes - 1);
                    }
                    reserved += event.bytes;
                    out.least = out.least.max(reserved);
                }
                _ => going = None,
            }
        }
        Some(out).filter(|out| out.count > 0 && out.least <= out.most)
    }
}
