//! Block records in a slab, linked by 32-bit indices to their address neighbours inside one segment.

use crate::device::StreamId;
use crate::snapshot::BlockState;
use crate::stats::PoolKind;

/// Index of a record in its [`BlockSlab`].
pub type BlockIndex = u32;
/// No block.
pub const NONE: BlockIndex = u32::MAX;

/// A block of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRecord {
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes that the client asked for; meaningful unless free.
    pub requested: u64,
    /// Stream that may reuse the block when it is free.
    pub stream: StreamId,
    /// Pool of its segment.
    pub pool: PoolKind,
    /// State.
    pub state: BlockState,
    /// Events that a pending free waits for.
    pub events: u32,
    /// Lookups in the pool when the block became free (for its age).
    pub freed_at: u64,
    /// Neighbour at the lower address in the same segment, or [`NONE`].
    pub prev: BlockIndex,
    /// Neighbour at the higher address in the same segment, or [`NONE`].
    pub next: BlockIndex,
    /// Other streams that were announced to use the block.
    pub uses: Vec<StreamId>,
}

impl BlockRecord {
    /// A whole segment as one free block.
    #[must_use]
    pub fn segment(addr: u64, bytes: u64, stream: StreamId, pool: PoolKind) -> Self {
        Self {
            addr,
            bytes,
            requested: 0,
            stream,
            pool,
            state: BlockState::Free,
            events: 0,
            freed_at: 0,
            prev: NONE,
            next: NONE,
            uses: Vec::new(),
        }
    }

    /// Whether the block is only a part of its segment.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }
}

/// Records with stable indices; freed ones are used again.
#[derive(Clone, Debug, Default)]
pub struct BlockSlab {
    records: Vec<Option<BlockRecord>>,
    vacant: Vec<BlockIndex>,
}

impl BlockSlab {
    /// Stores a record.
    ///
    /// # Panics
    /// With 2^32 - 1 live records.
    pub fn insert(&mut self, record: BlockRecord) -> BlockIndex {
        if let Some(index) = self.vacant.pop() {
            self.records[index as usize] = Some(record);
            return index;
        }
        let index = BlockIndex::try_from(self.records.len()).ok().filter(|index| *index != NONE);
        self.records.push(Some(record));
        index.expect("there should be fewer than 2^32 - 1 blocks")
    }

    /// Removes a record.
    pub fn remove(&mut self, index: BlockIndex) -> Option<BlockRecord> {
        let record = self.records.get_mut(index as usize)?.take()?;
        self.vacant.push(index);
        Some(record)
    }

    /// A record, if the index is live.
    #[must_use]
    pub fn find(&self, index: BlockIndex) -> Option<&BlockRecord> {
        self.records.get(index as usize)?.as_ref()
    }

    /// A live record.
    ///
    /// # Panics
    /// When the index is not live, which is a bug in the caller.
    #[must_use]
    pub fn get(&self, index: BlockIndex) -> &BlockRecord {
        self.find(index).expect("a linked block should be live")
    }

    /// A live record to change.
    ///
    /// # Panics
    /// When the index is not live, which is a bug in the caller.
    pub fn get_mut(&mut self, index: BlockIndex) -> &mut BlockRecord {
        self.records.get_mut(index as usize).and_then(Option::as_mut).expect("a linked block should be live")
    }

    /// All live records with their indices, in index order.
    pub fn iter(&self) -> impl Iterator<Item = (BlockIndex, &BlockRecord)> {
        // CAST: `insert` keeps the length below 2^32.
        self.records.iter().enumerate().filter_map(|(index, record)| Some((index as BlockIndex, record.as_ref()?)))
    }

    /// Cuts the first `bytes` off a block; returns the new block at the front. The rest keeps its index.
    pub fn split_front(&mut self, index: BlockIndex, bytes: u64) -> BlockIndex {
        let rest = self.get_mut(index);
        debug_assert!(bytes > 0 && bytes < rest.bytes);
        let front = BlockRecord { bytes, next: index, uses: Vec::new(), ..rest.clone() };
        let before = front.prev;
        rest.addr += bytes;
        rest.bytes -= bytes;
        let front = self.insert(front);
        self.get_mut(index).prev = front;
        if before != NONE {
            self.get_mut(before).next = front;
        }
        front
    }

    /// Joins `index` with its neighbour `other`, whose record goes away. Returns the neighbour's size.
    pub fn join(&mut self, index: BlockIndex, other: BlockIndex) -> u64 {
        let Some(gone) = self.remove(other) else { return 0 };
        let block = self.get_mut(index);
        block.bytes += gone.bytes;
        if block.prev == other {
            block.addr = gone.addr;
            block.prev = gone.prev;
            if gone.prev != NONE {
                self.get_mut(gone.prev).next = index;
            }
        } else {
            block.next = gone.next;
            if gone.next != NONE {
                self.get_mut(gone.next).prev = index;
            }
        }
        gone.bytes
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
    fn splitting_and_joining_keep_the_segment_tiled() {
        let mut slab = BlockSlab::default();
        let whole = slab.insert(BlockRecord::segment(1000, 100, StreamId(1), PoolKind::Small));
        assert!(!slab.get(whole).is_split());
        let a = slab.split_front(whole, 10);
        let b = slab.split_front(whole, 20);
        assert_eq!(layout(&slab, whole), [(1000, 10), (1010, 20), (1030, 70)]);
        assert_eq!(slab.join(a, b), 20);
        assert_eq!(layout(&slab, a), [(1000, 30), (1030, 70)]);
        assert_eq!(slab.join(whole, a), 30);
        assert_eq!(layout(&slab, whole), [(1000, 100)]);
        assert!(!slab.get(whole).is_split());
        assert_eq!(slab.iter().count(), 1);
    }
}
