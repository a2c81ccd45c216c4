//! Blocks at chosen places of a segment.

use super::{BlockId, Space, State};

impl Space {
    /// Cuts the front of `bytes` off a free block; both stay free. Returns the rest.
    ///
    /// # Panics
    /// When the block is not free, or nothing is left on one side.
    pub fn split(&mut self, block: BlockId, bytes: u64) -> BlockId {
        let (state, size, list, was_split) =
            (self[block].state, self[block].bytes, self[block].list, self[block].is_split());
        assert!(state == State::Free && 0 < bytes && bytes < size, "a free block should be split into two");
        let rest = self.cut(block, bytes);
        let (count, new) = if was_split { (1, 0) } else { (2, size.cast_signed()) };
        self.account.split_changed(list, count, new);
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
