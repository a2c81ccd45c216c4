//! What can happen to blocks and segments, as every log of an allocator has it: our traces and the histories of others.

use serde::Serialize;
use std::fmt;

/// What happened. The names are those of PyTorch's snapshots, and `record_use`, which they lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Action {
    /// A block was handed out; `bytes` were asked for.
    Alloc,
    /// The client let go of a block.
    FreeRequested,
    /// The block became reusable: with the request, or later when streams still used it.
    FreeCompleted,
    /// Work queued on `stream`, not the stream of the allocation, uses the block at `addr`; `bytes` is 0 in histories.
    RecordUse,
    /// A segment was obtained from the device.
    SegmentAlloc,
    /// A segment went back to the device.
    SegmentFree,
    /// A part of an expandable segment was mapped.
    SegmentMap,
    /// A part of an expandable segment was unmapped.
    SegmentUnmap,
    /// A snapshot was taken; `bytes` are active.
    Snapshot,
    /// A request of `bytes` was refused; `addr` holds the bytes that were free on the device, 0 where the log does not
    /// say.
    Oom,
}

impl Action {
    /// Every action, each at the place of its number.
    pub const ALL: [Action; 10] = [
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::RecordUse,
        Action::SegmentAlloc,
        Action::SegmentFree,
        Action::SegmentMap,
        Action::SegmentUnmap,
        Action::Snapshot,
        Action::Oom,
    ];

    /// Name in PyTorch's snapshots and in our own traces.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::RecordUse => "record_use",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Snapshot => "snapshot",
            Action::Oom => "oom",
        }
    }
}

impl std::str::FromStr for Action {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Action::ALL.into_iter().find(|action| action.name() == name).ok_or(())
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// Device, counted from 0.
    pub device: u16,
    /// First address.
    pub addr: u64,
    /// Bytes: those asked for, or the segment's.
    pub bytes: u64,
    /// Stream handle as the log has it.
    pub stream: u64,
    /// Nanoseconds from a start of the log's own choice; 0 throughout in logs without times.
    pub time_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_has_one_name() {
        for action in Action::ALL {
            assert_eq!(serde_json::to_value(action).unwrap(), action.name());
            assert_eq!(action.name().parse(), Ok(action));
            assert_eq!(Action::ALL[action as usize], action);
        }
    }
}
