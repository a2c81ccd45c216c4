//! What some policies do with blocks beside cutting their front off: cut their end off.

use super::{BlockId, Record, Space, State};

/// What a free block adds to the count and bytes of blocks that are parts of their segments.
fn counted(split: bool, bytes: u64) -> (i64, i64) {
    if split { (1, bytes.cast_signed()) } else { (0, 0) }
}

impl Space {
    /// Counts a change of the free blocks of a segment from `before` to `after`.
    fn recount(&mut self, block: BlockId, before: (i64, i64), after: (i64, i64)) {
        let Record { segment, list, .. } = self[block];
        if !self[segment].expandable {
            self.account.split_changed(list, after.0 - before.0, after.1 - before.1);
        }
    }

    /// Hands the last `bytes` of a free block to the client, who asked for `requested` bytes; what lies in front of them stays
    /// free. Returns the block that is held.
    ///
    /// # Panics
    /// When the block is not free or too small.
    pub fn take_end(&mut self, block: BlockId, bytes: u64, requested: u64) -> BlockId {
        let Record { state, bytes: size, .. } = self[block];
        assert!(state == State::Free && bytes <= size, "a block should be free and large enough to be taken");
        let before = counted(self[block].is_split(), size);
        let held = if bytes < size { self.cut(block, size - bytes) } else { block };
        let after = if held == block { (0, 0) } else { counted(true, size - bytes) };
        self.recount(block, before, after);
        self.hold(held, requested);
        held
    }
}
