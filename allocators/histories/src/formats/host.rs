//! Pinned host memory in a snapshot: `host_segments` and `host_traces`, which PyTorch 2.14 and newer write with
//! `record_pinned_host_memory`.
//!
//! A segment contains one block. PyTorch rounds requests up to a power of two, and records only the rounded size.

use super::{Action, StackId};
use vramlab_policies::contract::BlockState;

/// An event of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostEvent {
    /// The kind: the kinds of device memory, without maps and out-of-memory errors.
    pub action: Action,
    /// Address of the block.
    pub addr: u64,
    /// Bytes: of the block in a snapshot, of the request elsewhere.
    pub bytes: u64,
    /// Stream that uses the block, for [`Action::RecordUse`]; else 0.
    pub stream: u64,
    /// Nanoseconds since an arbitrary start.
    pub time_ns: u64,
    /// Frames, if the reader keeps them.
    pub stack: StackId,
}

/// A segment of pinned memory at the end of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSegment {
    /// Its address, if the snapshot has it.
    pub addr: Option<u64>,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it is allocated or still used by a stream.
    pub active: bool,
}

/// Events and segments of pinned memory in a snapshot, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostRecord {
    /// Events.
    pub events: Vec<HostEvent>,
    /// Segments at the end.
    pub segments: Vec<HostSegment>,
}

/// Totals of the pinned memory in a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Number of segments at the end.
    pub segments: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Of these, bytes in segments that are allocated or still used by a stream.
    pub active_bytes: u64,
    /// Of `bytes`, bytes in segments whose size is a power of two.
    pub rounded_bytes: u64,
    /// Number of events.
    pub events: u64,
    /// Bytes allocated minus bytes released by the events, and the maximum of that.
    level: i128,
    highest: i128,
}

impl HostMemory {
    /// Peak bytes as far as the recording shows: memory from before is assumed to remain.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        let before = (i128::from(self.bytes) - self.level).max(0);
        u64::try_from(before + self.highest).unwrap_or(u64::MAX).max(self.bytes)
    }

    /// Whether a segment is in use, from its dictionary.
    pub(super) fn is_active(active: Option<u64>, allocated: Option<u64>, state: Option<BlockState>) -> bool {
        active.or(allocated).is_some_and(|bytes| bytes > 0) || state.is_some_and(|state| state != BlockState::Free)
    }

    /// Adds a segment at the end.
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
        // 50 were allocated and remained, 8 from before were freed, 30 from before remained.
        host.segment(50, true);
        host.segment(30, false);
        assert_eq!((host.peak_bytes(), host.active_bytes, host.segments), (150 + 38, 50, 2));
        // Without events only the end is known.
        let mut memory = HostMemory::default();
        memory.segment(64, true);
        memory.segment(48, true);
        assert_eq!((memory.peak_bytes(), memory.rounded_bytes), (112, 64));
    }
}
