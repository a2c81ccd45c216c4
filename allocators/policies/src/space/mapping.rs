//! Expandable segments: ranges of addresses whose memory comes and goes in parts.

use super::{BlockId, FreeBlock, FreeList, Joined, Record, Space, State};

/// What became of a free block, a part of which has no memory any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmapped {
    /// What is left of it in front and behind.
    pub left: [Option<FreeBlock>; 2],
    /// The unmapped block, and those beside it that are a part of it now.
    pub hole: Joined,
}

impl Space {
    /// Adds a range of addresses without memory behind it: one unmapped block, which is returned.
    pub fn add_addresses(&mut self, list: FreeList, addr: u64, bytes: u64) -> BlockId {
        self.add_whole(list, addr, bytes, State::Unmapped)
    }

    /// Cuts an unmapped block in two: its front of `bytes`, and the rest, which is returned.
    ///
    /// # Panics
    /// When the block is not unmapped, or nothing would be left on a side.
    pub fn cut_hole(&mut self, block: BlockId, bytes: u64) -> BlockId {
        let Record { state, bytes: size, .. } = self[block];
        assert!(state == State::Unmapped && 0 < bytes && bytes < size, "a cut should leave a hole on both sides");
        self.cut(block, bytes)
    }

    /// Notes that the front `bytes` of an unmapped block have memory now. They are free, and joined with free memory in
    /// front of them.
    ///
    /// # Panics
    /// When the block is not unmapped or too small.
    pub fn map(&mut self, block: BlockId, bytes: u64) -> Joined {
        let Record { state, bytes: size, list, segment, .. } = self[block];
        assert!(state == State::Unmapped && bytes <= size, "memory should come where there is none");
        if bytes < size {
            self.cut(block, bytes);
        }
        let now = self.now();
        let record = self.record(block);
        (record.state, record.idle_since) = (State::Free, now);
        let owner = self.segment(segment);
        owner.mapped += bytes;
        let owner = *owner;
        debug_assert_eq!(owner.list, list);
        self.account.mapped(list, bytes, owner.busy > 0);
        self.join_around(block).0
    }

    /// Notes that `bytes` of a free block, from `offset` on, have no memory any more.
    ///
    /// # Panics
    /// When the block is not free, too small, or not of an expandable segment.
    pub fn unmap(&mut self, block: BlockId, offset: u64, bytes: u64) -> Unmapped {
        let Record { state, bytes: size, segment, .. } = self[block];
        assert!(self[segment].expandable, "memory should go in parts only where it came in parts");
        assert!(state == State::Free && 0 < bytes && offset + bytes <= size, "only free memory should go");
        let age = self[block].idle_since;
        let middle = if offset > 0 { self.cut(block, offset) } else { block };
        let behind = (offset + bytes < size).then(|| self.cut(middle, bytes));
        if let Some(behind) = behind {
            self.record(behind).idle_since = age;
        }
        let owner = self.segment(segment);
        owner.mapped -= bytes;
        let owner = *owner;
        // Addresses are the segment's, wherever the memory was before.
        let record = self.record(middle);
        (record.state, record.list) = (State::Unmapped, owner.list);
        self.account.unmapped_part(owner.list, bytes, owner.busy > 0);
        let left = [(offset > 0).then_some(block), behind].map(|left| left.map(|id| FreeBlock::of(id, &self[id])));
        Unmapped { left, hole: self.join_around(middle).0 }
    }
}
