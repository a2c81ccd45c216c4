//! The initial state of a replay: the memory before recording started.

use super::op::Op;
use super::{History, SegmentEvent};
use vramlab_device::{DeviceAddr, StreamId};
use vramlab_policies::contract::{BlockInfo, BlockState, PoolKind, SegmentInfo, Snapshot};

/// A segment from before recording started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartSegment {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: u32,
    pub(crate) pool: PoolKind,
    /// Number of searches of the large pool for which it had been idle, as far as that matters.
    pub(crate) age: u64,
    /// Number of its private pool, from 1; 0 if none or unknown.
    pub(crate) private: u32,
}

/// A block that was active before recording started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartBlock {
    pub(crate) addr: u64,
    pub(crate) requested: u64,
    /// Size, if the end of the recording or the layout shows it.
    pub(crate) bytes: Option<u64>,
    pub(crate) stream: u32,
    pub(crate) slot: u32,
    /// Number of its free, if that had been requested.
    pub(crate) freed: Option<usize>,
}

/// The initial state of a replay.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beginning {
    /// In address order; empty if unknown.
    pub(crate) segments: Vec<StartSegment>,
    /// In address order; blocks with a pending free are present only with their segments.
    pub(crate) blocks: Vec<StartBlock>,
    /// Requested frees, in order.
    pub(crate) frees: Vec<Op>,
    /// Number of blocks of unknown size.
    pub(crate) undetermined: u64,
    /// Why the segments are unknown, if something was reserved.
    pub(crate) unknown: Option<String>,
    /// Whether a replay allocates the blocks anew instead of adopting their segments.
    pub(crate) anew: bool,
}

impl Beginning {
    /// Requested bytes of its blocks.
    pub(crate) fn requested(&self) -> u64 {
        self.blocks.iter().filter(|block| block.freed.is_none()).map(|block| block.requested).sum()
    }

    /// Bytes of the segments.
    pub(crate) fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// The segments as the allocator's first events: from the highest address downwards, as allocators restore them, and if
    /// private pools are `separate`, one pool after another.
    pub(crate) fn segment_events(&self, separate: bool) -> impl Iterator<Item = SegmentEvent> + use<> {
        let mut segments = self.segments.clone();
        segments.sort_by_key(|segment| (if separate { segment.private } else { 0 }, std::cmp::Reverse(segment.addr)));
        segments.into_iter().map(|segment| SegmentEvent::made(segment.addr, segment.bytes, 0))
    }

    /// Number of searches for which the segment at an address had been idle.
    pub(crate) fn age(&self, addr: u64) -> u64 {
        let index = self.segments.binary_search_by_key(&addr, |segment| segment.addr);
        index.map_or(0, |number| self.segments[number].age)
    }

    /// The private pool of an address.
    pub(crate) fn private_at(&self, addr: u64) -> u32 {
        let before = self.segments.partition_point(|segment| segment.addr <= addr);
        before.checked_sub(1).map_or(0, |number| self.segments[number].private)
    }

    /// The segments of a private pool (`None`: all of them) and their blocks with the streams of a replay; `None` if no segments
    /// are known.
    pub(crate) fn snapshot(&self, streams: &[StreamId], private: Option<u32>) -> Option<Snapshot> {
        let is_adopted =
            |segment: &&StartSegment| !self.anew && private.is_none_or(|private| private == segment.private);
        let adopted = || self.segments.iter().filter(is_adopted);
        adopted().next()?;
        let mut blocks = self.blocks.iter().peekable();
        let segment = |segment: &StartSegment| {
            let (mut at, end) = (segment.addr, segment.addr + segment.bytes);
            while blocks.next_if(|block| block.addr < at).is_some() {}
            let mut parts = Vec::new();
            let mut part = |at: &mut u64, bytes: u64, requested: u64, state: BlockState| {
                parts.push(BlockInfo { addr: DeviceAddr::handed_out(*at), bytes, requested, state });
                *at += bytes;
            };
            while let Some(block) = blocks.next_if(|block| block.addr < end) {
                if block.addr > at {
                    let gap = block.addr - at;
                    part(&mut at, gap, 0, BlockState::Free);
                }
                part(&mut at, block.bytes.unwrap_or(block.requested), block.requested, BlockState::Allocated);
            }
            if end > at {
                let gap = end - at;
                part(&mut at, gap, 0, BlockState::Free);
            }
            SegmentInfo {
                private: None,
                expandable: false,
                page: segment.bytes,
                addr: DeviceAddr::handed_out(segment.addr),
                bytes: segment.bytes,
                stream: streams[segment.stream as usize],
                pool: Some(segment.pool),
                blocks: parts,
            }
        };
        Some(Snapshot { segments: adopted().map(segment).collect() })
    }

    /// Whether anything was reserved.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.blocks.is_empty()
    }

    /// Whether one of the segments contains an address. O(log n).
    pub(crate) fn has_segment_at(&self, addr: u64) -> bool {
        let before = self.segments.partition_point(|segment| segment.addr <= addr);
        before.checked_sub(1).is_some_and(|at| addr - self.segments[at].addr < self.segments[at].bytes)
    }
}

impl History {
    /// Removes memory that was cached before recording started: a replay then allocates the blocks that were active anew, in
    /// address order, and starts without other memory. So settings are compared from the same start. Recorded addresses can no
    /// longer be compared.
    pub fn begin_without_cache(&mut self) {
        self.beginning.anew = true;
        self.beginning.blocks.retain(|block| block.freed.is_none());
        self.beginning.frees.clear();
        self.not_comparable = Some("memory cached before recording started is removed".into());
    }
}
