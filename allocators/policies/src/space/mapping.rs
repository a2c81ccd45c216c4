//! Expandable segments: ranges of addresses in which memory is mapped and unmapped.

use super::{BlockId, FreeBlock, FreeList, Joined, Record, Space, State};

/// The result of unmapping a part of a free block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmapped {
    /// Its mapped remainders in front and behind.
    pub left: [Option<FreeBlock>; 2],
    /// The unmapped block, and the former unmapped neighbours that are a part of it now.
    pub hole: Joined,
}

impl Space {
    /// Adds a range of unmapped addresses: one unmapped block, which is returned. Memory in it is mapped and unmapped in pages of
    /// `page` bytes.
    pub fn add_addresses(&mut self, list: FreeList, addr: u64, bytes: u64, page: u64) -> BlockId {
        self.add_whole(list, addr, bytes, State::Unmapped, page)
    }

    /// Splits an unmapped block in two: its front of `bytes`, and the remainder, which is returned.
    ///
    /// # Panics
    /// When the block is not unmapped, or one of the two would be empty.
    pub fn cut_hole(&mut self, block: BlockId, bytes: u64) -> BlockId {
        let Record { state, bytes: size, .. } = self[block];
        assert!(state == State::Unmapped && 0 < bytes && bytes < size, "both parts of a split should have bytes");
        self.cut(block, bytes)
    }

    /// Notes that the front `bytes` of an unmapped block are mapped now. They are free, and coalesced with free memory in front of
    /// them.
    ///
    /// # Panics
    /// When the block is not unmapped or too small.
    pub fn map(&mut self, block: BlockId, bytes: u64) -> Joined {
        let Record { state, bytes: size, list, segment, .. } = self[block];
        assert!(state == State::Unmapped && bytes <= size, "only unmapped addresses should be mapped");
        if bytes < size {
            self.cut(block, bytes);
        }
        let now = self.now();
        let record = self.record(block);
        (record.state, record.idle_since) = (State::Free, now);
        self.add_pages(block);
        let owner = self.segment(segment);
        owner.mapped += bytes;
        let owner = *owner;
        debug_assert_eq!(owner.list, list);
        self.account.mapped(list, bytes);
        self.join_around(block).0
    }

    /// Notes that `bytes` of a free block, from `offset` on, are unmapped now.
    ///
    /// # Panics
    /// When the block is not free, too small, or not of an expandable segment.
    pub fn unmap(&mut self, block: BlockId, offset: u64, bytes: u64) -> Unmapped {
        let Record { state, bytes: size, segment, .. } = self[block];
        assert!(self[segment].expandable, "only expandable segments should be unmapped in parts");
        assert!(state == State::Free && 0 < bytes && offset + bytes <= size, "only free memory should be unmapped");
        let age = self[block].idle_since;
        let middle = if offset > 0 { self.cut(block, offset) } else { block };
        let behind = (offset + bytes < size).then(|| self.cut(middle, bytes));
        if let Some(behind) = behind {
            self.record(behind).idle_since = age;
        }
        let owner = self.segment(segment);
        owner.mapped -= bytes;
        let owner = *owner;
        self.remove_pages(middle);
        // Addresses belong to the segment, whatever the state of the memory was.
        let record = self.record(middle);
        (record.state, record.list) = (State::Unmapped, owner.list);
        self.account.unmapped_part(owner.list, bytes);
        let left = [(offset > 0).then_some(block), behind].map(|left| left.map(|id| FreeBlock::of(id, &self[id])));
        Unmapped { left, hole: self.join_around(middle).0 }
    }
}
