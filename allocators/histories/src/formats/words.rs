//! The strings of a snapshot's structure, and its events.

use super::{Action, Event};
use vramlab_policies::contract::{BlockState, PoolKind};

vramlab_device::named! {
    /// A string with a meaning.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[repr(u8)]
    pub(crate) enum Word {
        Segments "segments",
        DeviceTraces "device_traces",
        AllocatorSettings "allocator_settings",
        ExternalAnnotations "external_annotations",
        TraceEvents "traceEvents",
        Action "action",
        Addr "addr",
        Size "size",
        Stream "stream",
        TimeUs "time_us",
        DeviceFree "device_free",
        Frames "frames",
        ForwardFrames "forward_frames",
        Name "name",
        Filename "filename",
        Line "line",
        Category "category",
        UserMetadata "user_metadata",
        CompileContext "compile_context",
        InternalMetadata "internal_metadata",
        PoolId "pool_id",
        Recorder "recorder",
        HostSegments "host_segments",
        HostTraces "host_traces",
        AllocatedSize "allocated_size",
        ActiveSize "active_size",
        Stage "stage",
        Start "START",
        Device "device",
        Address "address",
        TotalSize "total_size",
        RequestedSize "requested_size",
        SegmentType "segment_type",
        SegmentPoolId "segment_pool_id",
        IsExpandable "is_expandable",
        Blocks "blocks",
        State "state",
        Alloc "alloc",
        FreeRequested "free_requested",
        FreeCompleted "free_completed",
        RecordUse "record_use",
        SegmentAlloc "segment_alloc",
        SegmentFree "segment_free",
        SegmentMap "segment_map",
        SegmentUnmap "segment_unmap",
        Snapshot "snapshot",
        Oom "oom",
        Small "small",
        Large "large",
        ActiveAllocated "active_allocated",
        ActivePendingFree "active_pending_free",
        ActiveAwaitingFree "active_awaiting_free",
        Inactive "inactive",
    }
}

impl Word {
    /// The action of this name.
    pub(crate) fn action(self) -> Option<Action> {
        // CAST: numbers of words; actions have the same order.
        Action::ALL.get((self as usize).checked_sub(Word::Alloc as usize)?).copied()
    }

    /// The pool of a segment; all others are large.
    pub(crate) fn pool(word: Option<Word>) -> PoolKind {
        if word == Some(Word::Small) { PoolKind::Small } else { PoolKind::Large }
    }

    /// The block state of this name. PyTorch's documentation has `active_awaiting_free`, its code `active_pending_free`.
    pub(crate) fn block_state(self) -> Option<BlockState> {
        Some(match self {
            Word::ActiveAllocated => BlockState::Allocated,
            Word::ActivePendingFree | Word::ActiveAwaitingFree => BlockState::PendingFree,
            Word::Inactive => BlockState::Free,
            _ => return None,
        })
    }

    /// Whether the value of this key is skipped.
    pub(crate) fn is_opaque(self) -> bool {
        matches!(self, Word::Frames | Word::ForwardFrames | Word::CompileContext)
    }

    /// Whether it is a key of an event that the reader needs.
    pub(crate) fn is_event_key(self) -> bool {
        matches!(
            self,
            Word::Action | Word::Addr | Word::Size | Word::Stream | Word::TimeUs | Word::DeviceFree | Word::PoolId
        )
    }

    /// Whether the value of this key is the name of a pool: a pair of numbers.
    pub(crate) fn is_pool_key(self) -> bool {
        matches!(self, Word::SegmentPoolId | Word::PoolId)
    }

    /// Whether it is a key of an event's origin.
    pub(crate) fn is_origin_key(self) -> bool {
        matches!(self, Word::Frames | Word::ForwardFrames | Word::Category | Word::UserMetadata)
    }
}

/// The fields of an event in a snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawEvent {
    pub(super) action: Option<Action>,
    pub(super) addr: Option<u64>,
    pub(super) device_free: Option<u64>,
    pub(super) size: Option<u64>,
    pub(super) stream: u64,
    pub(super) time_us: u64,
}

impl RawEvent {
    /// The event.
    ///
    /// # Errors
    /// The name of a field that is missing or too large.
    pub(super) fn event(&self, device: u16) -> Result<Event, &'static str> {
        let action = self.action.ok_or("action")?;
        let addr = match action {
            // 0 stands for unknown: a device without a free byte is as rare.
            Action::Oom => self.device_free.or(self.addr).unwrap_or(0),
            _ => self.addr.ok_or("addr")?,
        };
        Ok(Event {
            action,
            device,
            addr,
            bytes: self.size.ok_or("size")?,
            stream: self.stream,
            time_ns: self.time_us.checked_mul(1000).ok_or("time_us below 2^64 ns")?,
        })
    }
}

// Keys of a snapshot's dictionaries. Each release of PyTorch adds some, so they indicate the version.

/// The known keys of a snapshot, anywhere in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keys(u64);

// A bit for each word.
const _: () = assert!(Word::ALL.len() <= u64::BITS as usize);

impl Keys {
    pub(super) fn add(&mut self, key: Word) {
        self.0 |= Self::bit(key);
    }

    /// Whether any key was found: other formats have none.
    #[must_use]
    pub fn any(self) -> bool {
        self.0 != 0
    }

    /// Whether the snapshot has this key.
    #[must_use]
    pub fn has(self, key: &str) -> bool {
        Word::named(key).is_some_and(|word| self.0 & Self::bit(word) != 0)
    }

    fn bit(key: Word) -> u64 {
        1 << (key as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_spelt_as_words() {
        for action in Action::ALL {
            assert_eq!(Word::named(action.name()).and_then(Word::action), Some(action));
        }
        let others = Word::ALL.iter().filter(|word| Action::ALL.iter().all(|action| action.name() != word.name()));
        assert!(others.copied().all(|word| word.action().is_none()));
    }
}
