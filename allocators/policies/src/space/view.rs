//! Read access: blocks by number, idle segments, snapshots.

use super::{BlockId, FreeBlock, FreeList, Segment, SegmentId, Space, State};
use crate::contract::{BlockInfo, BlockState, SegmentInfo, Snapshot};
use vramlab_device::DeviceAddr;

impl Space {
    /// The live block with this number, if it begins at this address.
    #[must_use]
    pub fn find_held(&self, number: u32, addr: u64) -> Option<BlockId> {
        let record = self.blocks.get(BlockId(number).key())?;
        (record.addr == addr && record.state == State::Held).then_some(BlockId(number))
    }

    /// A free block as an index of free blocks keeps it.
    ///
    /// # Panics
    /// When the block does not exist any more.
    #[must_use]
    pub fn as_free(&self, block: BlockId) -> FreeBlock {
        FreeBlock::of(block, &self[block])
    }

    /// Every segment, in no order.
    pub fn segments(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        self.segments.iter().map(|(key, segment)| (SegmentId(key), segment))
    }

    /// The segment with this number; `None` after its removal, until a new segment gets the number.
    pub(crate) fn find_segment(&self, segment: SegmentId) -> Option<&Segment> {
        self.segments.get(segment.0)
    }

    /// The blocks of a segment in address order.
    pub fn blocks_of(&self, segment: SegmentId) -> impl Iterator<Item = BlockId> {
        std::iter::successors(Some(self[segment].first), |block| self[*block].next)
    }

    /// Every block that is free, in no order.
    pub fn free_blocks(&self) -> impl Iterator<Item = FreeBlock> {
        let free = self.blocks.iter().filter(|(_, record)| record.state == State::Free);
        free.map(|(key, record)| FreeBlock::of(BlockId::of(key), record))
    }

    /// The number and bytes of an owner's live blocks in some free lists.
    #[must_use]
    pub fn held_where(&self, filter: impl Fn(&FreeList) -> bool) -> (usize, u64) {
        let live = self.blocks.iter().filter(|(_, block)| block.state == State::Held && filter(&block.list));
        live.fold((0, 0), |(blocks, bytes), (_, block)| (blocks + 1, bytes + block.bytes))
    }

    /// Segments and blocks in address order. Each mapped range of an expandable segment is a segment of its own, as PyTorch shows
    /// it.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.snapshot_where(|_| true)
    }

    /// As [`snapshot`](Self::snapshot), for segments of some free lists.
    pub(crate) fn snapshot_where(&self, filter: impl Fn(&FreeList) -> bool) -> Snapshot {
        let mut segments = Vec::new();
        for (id, segment) in self.segments().filter(|(_, segment)| filter(&segment.list)) {
            let mut open: Option<SegmentInfo> = None;
            for block in self.blocks_of(id) {
                let block = &self[block];
                let state = match block.state {
                    State::Free => BlockState::Free,
                    State::Held => BlockState::Allocated,
                    State::Pending => BlockState::PendingFree,
                    State::Unmapped => {
                        segments.extend(open.take());
                        continue;
                    }
                };
                let info = open.get_or_insert_with(|| SegmentInfo {
                    addr: DeviceAddr::handed_out(block.addr),
                    bytes: 0,
                    stream: segment.list.owner.stream,
                    pool: segment.list.pool,
                    private: segment.list.owner.private,
                    expandable: segment.expandable,
                    page: segment.page,
                    blocks: Vec::new(),
                });
                info.bytes += block.bytes;
                let (addr, bytes, requested) = (DeviceAddr::handed_out(block.addr), block.bytes, block.requested);
                info.blocks.push(BlockInfo { addr, bytes, requested, state });
            }
            segments.extend(open);
        }
        segments.sort_unstable_by_key(|segment| segment.addr);
        Snapshot { segments }
    }
}
