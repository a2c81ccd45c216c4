//! Pinned memory of the host in a snapshot: `host_segments` and `host_traces`, which PyTorch 2.14 and newer write where
//! `record_pinned_host_memory` is on.
//!
//! A segment holds one block. PyTorch rounds what is asked for to a power of two, and records the rounded size alone.

use super::Action;
use vramlab_policies::contract::BlockState;

/// What a snapshot holds of pinned memory, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Segments at the end.
    pub segments: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Of these, in segments that the program holds or that a stream still uses.
    pub active_bytes: u64,
    /// Of `bytes`, in segments whose size is a power of two.
    pub rounded_bytes: u64,
    /// Events.
    pub events: u64,
    /// Bytes that the events took and did not give back, and the most of these at any time.
    level: i128,
    highest: i128,
}

impl HostMemory {
    /// Most bytes that were held, as far as the recording shows: what was there before it began stayed.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        let before = (i128::from(self.bytes) - self.level).max(0);
        u64::try_from(before + self.highest).unwrap_or(u64::MAX).max(self.bytes)
    }

    /// Whether a segment is in use, by what its dictionary says.
    pub(super) fn is_active(active: Option<u64>, allocated: Option<u64>, state: Option<BlockState>) -> bool {
        active.or(allocated).is_some_and(|bytes| bytes > 0) || state.is_some_and(|state| state != BlockState::Free)
    }

    /// Adds a segment of the end.
    pub(super) fn segment(&mut self, bytes: u64, active: bool) {
        self.segments += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if active {
            self.active_bytes = self.active_bytes.saturating_add(bytes);
        }
        if bytes.is_power_of_two() {
            self.rounded_bytes = self.rounded_bytes.saturating_add(bytes);
        }
    }

    /// Adds the next event.
    pub(super) fn event(&mut self, action: Option<Action>, bytes: u64) {
        self.events += 1;
        match action {
            Some(Action::SegmentAlloc) => self.level += i128::from(bytes),
            Some(Action::SegmentFree) => self.level -= i128::from(bytes),
            _ => {}
        }
        self.highest = self.highest.max(self.level);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_counts_what_was_there_before() {
        let mut host = HostMemory::default();
        for (action, bytes) in [
            (Action::SegmentAlloc, 100),
            (Action::Alloc, 100),
            (Action::SegmentAlloc, 50),
            (Action::SegmentFree, 100),
            (Action::SegmentFree, 8),
        ] {
            host.event(Some(action), bytes);
        }
        // 50 came and stayed, 8 of before went, 30 of before stayed.
        host.segment(50, true);
        host.segment(30, false);
        assert_eq!((host.peak_bytes(), host.active_bytes, host.segments), (150 + 38, 50, 2));
        // Without events the end is all that is known.
        let mut held = HostMemory::default();
        held.segment(64, true);
        held.segment(48, true);
        assert_eq!((held.peak_bytes(), held.rounded_bytes), (112, 64));
    }
}
