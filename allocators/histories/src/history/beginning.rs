//! The state from which a replay starts: what was held before the first event.

use super::op::Op;
use super::{History, SegmentEvent};
use vramlab_device::{DeviceAddr, StreamId};
use vramlab_policies::contract::{BlockInfo, BlockState, PoolKind, SegmentInfo, Snapshot};

/// A segment that was held before the first event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartSegment {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: u32,
    pub(crate) pool: PoolKind,
    /// For how many searches of the large pool it had been idle, as far as that matters.
    pub(crate) age: u64,
    /// The private pool that it serves, by number from 1; 0 for none, or where that is not told.
    pub(crate) private: u32,
}

/// A block that was in use before the first event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartBlock {
    pub(crate) addr: u64,
    pub(crate) requested: u64,
    /// Size, where the end of the history or the layout tells it.
    pub(crate) bytes: Option<u64>,
    pub(crate) stream: u32,
    pub(crate) slot: u32,
    /// Number of its free, if that had been requested.
    pub(crate) freed: Option<usize>,
}

/// The state from which a replay starts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beginning {
    /// In address order; none if they are not known.
    pub(crate) segments: Vec<StartSegment>,
    /// In address order; those whose free is pending come with their segments only.
    pub(crate) blocks: Vec<StartBlock>,
    /// Frees that had been requested, in order.
    pub(crate) frees: Vec<Op>,
    /// Blocks whose size the history does not tell.
    pub(crate) undetermined: u64,
    /// Why the segments are not known, if something was held.
    pub(crate) unknown: Option<String>,
    /// Whether a replay allocates the blocks anew instead of taking over their segments.
    pub(crate) anew: bool,
}

impl Beginning {
    /// Bytes that the client held.
    pub(crate) fn requested(&self) -> u64 {
        self.blocks.iter().filter(|block| block.freed.is_none()).map(|block| block.requested).sum()
    }

    /// Bytes of the segments.
    pub(crate) fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// The segments as the allocator's first events: from the highest address downwards, as allocators restore them, and where
    /// those of private pools are `apart` one pool after another.
    pub(crate) fn segment_events(&self, apart: bool) -> impl Iterator<Item = SegmentEvent> + use<> {
        let mut segments = self.segments.clone();
        segments.sort_by_key(|segment| (if apart { segment.private } else { 0 }, std::cmp::Reverse(segment.addr)));
        segments.into_iter().map(|segment| SegmentEvent::made(segment.addr, segment.bytes, 0))
    }

    /// For how many searches the segment at an address had been idle.
    pub(crate) fn age(&self, addr: u64) -> u64 {
        let found = self.segments.binary_search_by_key(&addr, |segment| segment.addr);
        found.map_or(0, |number| self.segments[number].age)
    }

    /// The private pool of what lies at an address.
    pub(crate) fn private_at(&self, addr: u64) -> u32 {
        let before = self.segments.partition_point(|segment| segment.addr <= addr);
        before.checked_sub(1).map_or(0, |number| self.segments[number].private)
    }

    /// The segments of a private pool (`None`: all of them) and their blocks with the streams of a replay; `None` if there are
    /// none that are known.
    pub(crate) fn snapshot(&self, streams: &[StreamId], private: Option<u32>) -> Option<Snapshot> {
        let taken_over =
            |segment: &&StartSegment| !self.anew && private.is_none_or(|private| private == segment.private);
        let own = || self.segments.iter().filter(taken_over);
        own().next()?;
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
                addr: DeviceAddr::handed_out(segment.addr),
                bytes: segment.bytes,
                stream: streams[segment.stream as usize],
                pool: Some(segment.pool),
                blocks: parts,
            }
        };
        Some(Snapshot { segments: own().map(segment).collect() })
    }

    /// Whether something was held.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.blocks.is_empty()
    }

    /// Whether an address lies in one of the segments. O(log n).
    pub(crate) fn has_segment_at(&self, addr: u64) -> bool {
        let before = self.segments.partition_point(|segment| segment.addr <= addr);
        before.checked_sub(1).is_some_and(|at| addr - self.segments[at].addr < self.segments[at].bytes)
    }
}

impl History {
    /// Leaves out what was cached before the first event: a replay then allocates the blocks anew that were in use, in the order of
    /// their addresses, and begins with no other memory. What a setting reserves is then compared with what another one does from the
    /// same start. Recorded addresses can no longer be compared.
    pub fn begin_without_cache(&mut self) {
        self.beginning.anew = true;
        self.beginning.blocks.retain(|block| block.freed.is_none());
        self.beginning.frees.clear();
        self.not_comparable = Some("what was cached before the first event is left out".into());
    }
}
