//! Records of blocks: address, state and neighbours.
//!
//! Records are in one array and linked by 32-bit indices: to their address neighbours inside one segment, and inside the index of
//! free blocks. An allocated block carries the index of its record, so a free needs no search. Index 0 stands for no block. Its
//! record exists, so that a link may be followed, and its links be written, without a branch.
#![forbid(unsafe_code)]

use crate::contract::{BlockState, PoolKind};
use std::ops::{Index, IndexMut};

/// Index of a record in its [`BlockSlab`].
pub(super) type BlockIndex = u32;
/// No block. Its address is above every block.
pub(super) const NONE: BlockIndex = 0;

/// The state of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Vacant; the record will be reused.
    Vacant,
    /// A reusable block.
    Free,
    /// A live block.
    Allocated,
    /// A block that the client freed and other streams still use.
    Pending,
}

/// A block of a segment. A record fills one cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(64))]
pub(super) struct BlockRecord {
    /// First address.
    pub(super) addr: u64,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// Requested bytes; 0 when the block is free.
    pub(super) requested: u64,
    /// Number of searches of the large pool before the block became free.
    pub(super) freed_at: u64,
    /// Neighbour at the lower address in the same segment, or [`NONE`].
    pub(super) prev: BlockIndex,
    /// Neighbour at the higher address in the same segment, or [`NONE`]. Of a vacant record: the next vacant one.
    pub(super) next: BlockIndex,
    /// The links of a free block in its index.
    pub(super) links: Links,
    pub(super) state: State,
    /// Pool of its segment.
    pub(super) pool: PoolKind,
    /// Whether a free of the block has to search for streams that use it, and for graph captures.
    pub(super) shared: bool,
}

/// Links of a free block. The index that contains the block defines their meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Links {
    pub(super) left: BlockIndex,
    pub(super) right: BlockIndex,
    pub(super) up: BlockIndex,
}

impl BlockRecord {
    /// A segment as one free block that is in no index yet.
    pub(super) fn segment(addr: u64, bytes: u64, pool: PoolKind) -> Self {
        let links = Links::default();
        let (requested, freed_at, prev, next) = (0, 0, NONE, NONE);
        Self { addr, bytes, requested, freed_at, prev, next, links, state: State::Free, pool, shared: false }
    }

    /// Whether the block is only a part of its segment.
    #[inline]
    pub(super) fn is_split(&self) -> bool {
        self.prev | self.next != NONE
    }

    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.state == State::Free
    }

    /// State of a block, as snapshots name it.
    pub(super) fn reported_state(&self) -> BlockState {
        match self.state {
            State::Allocated => BlockState::Allocated,
            State::Pending => BlockState::PendingFree,
            State::Free | State::Vacant => BlockState::Free,
        }
    }
}

/// Records with stable indices; vacant ones are reused, the last first.
#[derive(Clone, Debug)]
pub(super) struct BlockSlab {
    records: Vec<BlockRecord>,
    vacant: BlockIndex,
}

impl Default for BlockSlab {
    fn default() -> Self {
        let nothing = BlockRecord { state: State::Vacant, ..BlockRecord::segment(u64::MAX, 0, PoolKind::Small) };
        Self { records: vec![nothing], vacant: NONE }
    }
}

impl Index<BlockIndex> for BlockSlab {
    type Output = BlockRecord;

    #[inline(always)]
    fn index(&self, index: BlockIndex) -> &BlockRecord {
        &self.records[index as usize]
    }
}

impl IndexMut<BlockIndex> for BlockSlab {
    #[inline(always)]
    fn index_mut(&mut self, index: BlockIndex) -> &mut BlockRecord {
        &mut self.records[index as usize]
    }
}

impl BlockSlab {
    /// Stores a record.
    ///
    /// # Panics
    /// With 2^32 live records.
    pub(super) fn insert(&mut self, record: BlockRecord) -> BlockIndex {
        let index = self.vacant;
        if index != NONE {
            self.vacant = self[index].next;
            self[index] = record;
            return index;
        }
        self.records.push(record);
        BlockIndex::try_from(self.records.len() - 1).expect("there should be fewer than 2^32 blocks")
    }

    /// Makes a live record vacant.
    pub(super) fn remove(&mut self, index: BlockIndex) {
        let next = std::mem::replace(&mut self.vacant, index);
        let record = &mut self[index];
        debug_assert!(record.state != State::Vacant, "a record should be removed once");
        (record.state, record.next) = (State::Vacant, next);
    }

    /// The record at an index if it is that of a live block that begins at `addr`.
    #[inline]
    pub(super) fn find(&self, index: BlockIndex, addr: u64) -> Option<&BlockRecord> {
        self.records.get(index as usize).filter(|record| record.addr == addr && record.state != State::Vacant)
    }

    /// All live records with their indices, in index order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockIndex, &BlockRecord)> {
        // `insert` keeps the number of records below 2^32.
        (0..).zip(&self.records).filter(|(_, record)| record.state != State::Vacant)
    }

    /// Makes two blocks neighbours, the first at the lower address; either may be [`NONE`].
    pub(super) fn link(&mut self, low: BlockIndex, high: BlockIndex) {
        self[low].next = high;
        self[high].prev = low;
    }

    /// Splits the first `bytes` off a block. Returns the new block at the front; the remainder keeps its record.
    ///
    /// # Panics
    /// With 2^32 live records.
    #[inline]
    pub(super) fn split_front(&mut self, index: BlockIndex, bytes: u64) -> BlockIndex {
        let rest = &mut self[index];
        debug_assert!(bytes > 0 && bytes < rest.bytes);
        let first = BlockRecord { bytes, ..*rest };
        rest.addr += bytes;
        rest.bytes -= bytes;
        let front = self.insert(first);
        self.link(first.prev, front);
        self.link(front, index);
        front
    }

    /// Coalesces a block with a neighbour of the same segment; the neighbour's record becomes vacant.
    #[inline]
    pub(super) fn absorb(&mut self, index: BlockIndex, neighbour: BlockIndex) {
        let BlockRecord { addr, bytes, prev, next, .. } = self[neighbour];
        self[index].bytes += bytes;
        if next == index {
            self[index].addr = addr;
            self.link(prev, index);
        } else {
            debug_assert_eq!(prev, index, "only neighbours are joined");
            self.link(index, next);
        }
        self.remove(neighbour);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::size::torch::MIN_BLOCK;

    /// The blocks of the segment that contains `index`, in address order.
    fn layout(slab: &BlockSlab, mut index: BlockIndex) -> Vec<(u64, u64)> {
        while slab[index].prev != NONE {
            index = slab[index].prev;
        }
        let mut out = Vec::new();
        while index != NONE {
            let block = &slab[index];
            assert!(block.next == NONE || slab[block.next].prev == index);
            out.push((block.addr, block.bytes));
            index = block.next;
        }
        out
    }

    #[test]
    fn splitting_keeps_the_segment_tiled_and_joining_undoes_it() {
        let mut slab = BlockSlab::default();
        let at = |units: u64| (1 << 20) + units * MIN_BLOCK;
        let segment = slab.insert(BlockRecord::segment(at(0), 100 * MIN_BLOCK, PoolKind::Small));
        assert!(!slab[segment].is_split());
        let first = slab.split_front(segment, 10 * MIN_BLOCK);
        let middle = slab.split_front(segment, 20 * MIN_BLOCK);
        let expected = [(at(0), 10 * MIN_BLOCK), (at(10), 20 * MIN_BLOCK), (at(30), 70 * MIN_BLOCK)];
        assert_eq!(layout(&slab, middle), expected);
        assert!(slab[segment].is_split() && slab.iter().count() == 3);
        assert!(slab.find(middle, at(10)).is_some() && slab.find(middle, at(9)).is_none());
        assert!(slab.find(7, at(0)).is_none() && slab.find(NONE, u64::MAX).is_none());
        slab.absorb(middle, first);
        slab.absorb(middle, segment);
        assert_eq!(layout(&slab, middle), [(at(0), 100 * MIN_BLOCK)]);
    }

    #[test]
    fn vacant_records_are_used_again() {
        let mut slab = BlockSlab::default();
        let record = BlockRecord::segment(512, 512, PoolKind::Small);
        let indices: Vec<BlockIndex> = (0..4).map(|_| slab.insert(record)).collect();
        for index in [indices[1], indices[3]] {
            slab.remove(index);
        }
        assert_eq!([slab.insert(record), slab.insert(record), slab.insert(record)], [indices[3], indices[1], 5]);
    }
}
