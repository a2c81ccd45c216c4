//! Events of blocks and segments, as every log of an allocator has them: our traces and recordings of other allocators.

use serde::Serialize;

vramlab_device::named! {
    /// The kind of an event. The names are those of PyTorch's snapshots, and `record_use`, which they lack.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
    #[serde(rename_all = "snake_case")]
    #[repr(u8)]
    pub enum Action {
        /// A block was allocated; `bytes` is the requested size.
        Alloc "alloc",
        /// The client freed a block.
        FreeRequested "free_requested",
        /// The block became reusable: with the free request, or later when other streams still used it.
        FreeCompleted "free_completed",
        /// Work queued on `stream`, not the stream of the allocation, uses the block at `addr`; `bytes` is 0 in recordings.
        RecordUse "record_use",
        /// A segment was allocated by the device.
        SegmentAlloc "segment_alloc",
        /// A segment was released to the device.
        SegmentFree "segment_free",
        /// A range of an expandable segment was mapped.
        SegmentMap "segment_map",
        /// A range of an expandable segment was unmapped.
        SegmentUnmap "segment_unmap",
        /// A snapshot was taken; `bytes` are active.
        Snapshot "snapshot",
        /// A request of `bytes` was refused; `addr` contains the bytes that were free on the device, 0 where the log does not
        /// contain them.
        Oom "oom",
    }
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The kind.
    pub action: Action,
    /// Device, counted from 0.
    pub device: u16,
    /// First address.
    pub addr: u64,
    /// Requested bytes, or bytes of the segment.
    pub bytes: u64,
    /// Stream handle as in the log.
    pub stream: u64,
    /// Nanoseconds since an arbitrary start; 0 throughout in logs without times.
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
