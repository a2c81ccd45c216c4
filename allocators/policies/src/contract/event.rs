//! What can happen to blocks and segments, as every log of an allocator has it: our traces and the histories of others.

use serde::Serialize;

vramlab_device::named! {
    /// What happened. The names are those of PyTorch's snapshots, and `record_use`, which they lack.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
    #[serde(rename_all = "snake_case")]
    #[repr(u8)]
    pub enum Action {
        /// A block was handed out; `bytes` were asked for.
        Alloc "alloc",
        /// The client let go of a block.
        FreeRequested "free_requested",
        /// The block became reusable: with the request, or later when streams still used it.
        FreeCompleted "free_completed",
        /// Work queued on `stream`, not the stream of the allocation, uses the block at `addr`; `bytes` is 0 in histories.
        RecordUse "record_use",
        /// A segment was obtained from the device.
        SegmentAlloc "segment_alloc",
        /// A segment went back to the device.
        SegmentFree "segment_free",
        /// A part of an expandable segment was mapped.
        SegmentMap "segment_map",
        /// A part of an expandable segment was unmapped.
        SegmentUnmap "segment_unmap",
        /// A snapshot was taken; `bytes` are active.
        Snapshot "snapshot",
        /// A request of `bytes` was refused; `addr` holds the bytes that were free on the device, 0 where the log does not
        /// say.
        Oom "oom",
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
            assert_eq!(Action::named(action.name()), Some(action));
            assert_eq!(Action::ALL[action as usize], action);
        }
    }
}
