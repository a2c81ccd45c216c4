//! Blocks at chosen places of a segment.

use super::{BlockId, Record, Space, State, counted};

impl Space {
    /// Cuts the front of `bytes` off a free block; both stay free. Returns the rest.
    ///
    /// # Panics
    /// When the block is not free, or nothing is left on one side.
    pub fn split(&mut self, block: BlockId, bytes: u64) -> BlockId {
        let Record { state, bytes: size, .. } = self[block];
        assert!(state == State::Free && 0 < bytes && bytes < size, "a free block should be split into two");
        let before = counted(self[block].is_split(), size);
        let rest = self.cut(block, bytes);
        self.recount(block, before, (2, size.cast_signed()));
        rest
    }

    /// Lets a held or pending block belong to the owner of its segment again, so that it joins what is free there.
    pub fn hand_back(&mut self, block: BlockId) {
        let list = self[self[block].segment].list;
        let record = self.record(block);
        debug_assert!(matches!(record.state, State::Held | State::Pending));
        record.list = list;
    }
}
