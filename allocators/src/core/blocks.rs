//! Block records in a slab, linked by 32-bit indices: to their address neighbours inside one segment, and inside the
//! index of free blocks.

use crate::snapshot::BlockState;
use crate::stats::PoolKind;

/// Index of a record in its [`BlockSlab`].
pub type BlockIndex = u32;
/// No block.
pub const NONE: BlockIndex = u32::MAX;

/// A block of a segment; one cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(64))]
pub struct BlockRecord {
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes that the client asked for; meaningful unless free.
    pub requested: u64,
    /// Lookups in the pool when the block became free (for its age).
    pub freed_at: u64,
    /// Neighbour at the lower address in the same segment, or [`NONE`].
    pub prev: BlockIndex,
    /// Neighbour at the higher address in the same segment, or [`NONE`]; the next vacant record of a vacant one.
    pub next: BlockIndex,
    /// Links of the index of free blocks.
    pub(super) links: TreeLinks,
    /// Bin of the index of free blocks.
    pub(super) bin: u16,
    /// Events that a pending free waits for.
    pub events: u32,
    /// Pool of its segment.
    pub pool: PoolKind,
    /// Whether other streams were announced to use the block.
    pub shared: bool,
    /// State; `None` for a vacant record.
    state: Option<BlockState>,
}

/// Where a free block hangs in the tree of its bin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TreeLinks {
    pub(super) left: BlockIndex,
    pub(super) right: BlockIndex,
    pub(super) parent: BlockIndex,
}

impl TreeLinks {
    pub(super) const ALONE: Self = Self { left: NONE, right: NONE, parent: NONE };
}

impl BlockRecord {
    /// A whole segment as one block that nobody holds and no index knows yet.
    #[must_use]
    pub fn segment(addr: u64, bytes: u64, pool: PoolKind) -> Self {
        Self {
            addr,
            bytes,
            requested: 0,
            freed_at: 0,
            prev: NONE,
            next: NONE,
            links: TreeLinks::ALONE,
            bin: 0,
            events: 0,
            pool,
            shared: false,
            state: Some(BlockState::Free),
        }
    }

    /// Whether the block is only a part of its segment.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    /// State.
    ///
    /// # Panics
    /// For a vacant record, which no link leads to.
    #[must_use]
    pub fn state(&self) -> BlockState {
        self.state.expect("a linked block should be live")
    }

    /// Whether the client holds the block.
    #[must_use]
    pub fn is_allocated(&self) -> bool {
        self.state == Some(BlockState::Allocated)
    }

    /// Whether the block is free.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.state == Some(BlockState::Free)
    }

    /// Changes the state of a live record.
    pub fn set_state(&mut self, state: BlockState) {
        debug_assert!(self.state.is_some(), "a vacant record should stay vacant");
        self.state = Some(state);
    }
}

/// Records with stable indices; vacant ones are used again, the last first.
#[derive(Clone, Debug)]
pub struct BlockSlab {
    records: Vec<BlockRecord>,
    vacant: BlockIndex,
}

impl Default for BlockSlab {
    fn default() -> Self {
        Self { records: Vec::new(), vacant: NONE }
    }
}

impl BlockSlab {
    /// Stores a record.
    ///
    /// # Panics
    /// With 2^32 - 1 live records.
    #[inline]
    pub fn insert(&mut self, record: BlockRecord) -> BlockIndex {
        let index = self.vacant;
        if let Some(slot) = self.records.get_mut(index as usize) {
            self.vacant = slot.next;
            *slot = record;
            return index;
        }
        self.push(record)
    }

    #[cold]
    fn push(&mut self, record: BlockRecord) -> BlockIndex {
        let index = BlockIndex::try_from(self.records.len()).ok().filter(|index| *index != NONE);
        self.records.push(record);
        index.expect("there should be fewer than 2^32 - 1 blocks")
    }

    /// Makes a live record vacant.
    #[inline]
    pub fn remove(&mut self, index: BlockIndex) {
        let vacant = std::mem::replace(&mut self.vacant, index);
        let record = self.get_mut(index);
        debug_assert!(record.state.is_some(), "a record should be removed once");
        record.state = None;
        record.next = vacant;
    }

    /// A record, if the index is live.
    #[must_use]
    pub fn find(&self, index: BlockIndex) -> Option<&BlockRecord> {
        self.records.get(index as usize).filter(|record| record.state.is_some())
    }

    /// A record.
    ///
    /// # Panics
    /// When the index was never given out, which is a bug in the caller.
    #[must_use]
    #[inline]
    pub fn get(&self, index: BlockIndex) -> &BlockRecord {
        &self.records[index as usize]
    }

    /// A record to change.
    ///
    /// # Panics
    /// When the index was never given out, which is a bug in the caller.
    #[inline]
    pub fn get_mut(&mut self, index: BlockIndex) -> &mut BlockRecord {
        &mut self.records[index as usize]
    }

    /// All live records with their indices, in index order.
    pub fn iter(&self) -> impl Iterator<Item = (BlockIndex, &BlockRecord)> {
        let live = self.records.iter().enumerate().filter(|(_, record)| record.state.is_some());
        // CAST: `insert` keeps the length below 2^32.
        live.map(|(index, record)| (index as BlockIndex, record))
    }

    /// Cuts the first `bytes` off a free block for the client. Returns the new block at the front, which is allocated;
    /// the rest keeps its index.
    #[inline(always)]
    pub fn split_front(&mut self, index: BlockIndex, bytes: u64, requested: u64) -> BlockIndex {
        let rest = self.get_mut(index);
        debug_assert!(bytes > 0 && bytes < rest.bytes);
        let front = BlockRecord {
            addr: rest.addr,
            bytes,
            requested,
            freed_at: 0,
            prev: rest.prev,
            next: index,
            links: TreeLinks::ALONE,
            bin: 0,
            events: 0,
            pool: rest.pool,
            shared: false,
            state: Some(BlockState::Allocated),
        };
        rest.addr += bytes;
        rest.bytes -= bytes;
        let before = front.prev;
        let front = self.insert(front);
        self.get_mut(index).prev = front;
        if before != NONE {
            self.get_mut(before).next = front;
        }
        front
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of the segment that contains `index`, in address order.
    fn layout(slab: &BlockSlab, mut index: BlockIndex) -> Vec<(u64, u64)> {
        while slab.get(index).prev != NONE {
            index = slab.get(index).prev;
        }
        let mut out = Vec::new();
        while index != NONE {
            let block = slab.get(index);
            if block.next != NONE {
                assert_eq!(slab.get(block.next).prev, index);
            }
            out.push((block.addr, block.bytes));
            index = block.next;
        }
        out
    }

    #[test]
    fn a_record_is_a_cache_line() {
        assert_eq!(size_of::<BlockRecord>(), 64);
    }

    #[test]
    fn splitting_keeps_the_segment_tiled() {
        let mut slab = BlockSlab::default();
        let whole = slab.insert(BlockRecord::segment(1000, 100, PoolKind::Small));
        assert!(!slab.get(whole).is_split());
        slab.split_front(whole, 10, 7);
        let middle = slab.split_front(whole, 20, 20);
        assert_eq!(layout(&slab, middle), [(1000, 10), (1010, 20), (1030, 70)]);
        assert!(slab.get(whole).is_split() && slab.get(whole).is_free() && slab.get(middle).is_allocated());
        assert_eq!(slab.iter().count(), 3);
        assert!(slab.find(7).is_none());
    }

    #[test]
    fn vacant_records_are_used_again() {
        let mut slab = BlockSlab::default();
        let record = BlockRecord::segment(512, 512, PoolKind::Small);
        let indices: Vec<BlockIndex> = (0..4).map(|_| slab.insert(record)).collect();
        for index in [indices[1], indices[3]] {
            slab.remove(index);
        }
        assert_eq!([slab.insert(record), slab.insert(record), slab.insert(record)], [indices[3], indices[1], 4]);
    }
}
