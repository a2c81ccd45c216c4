//! Blocks at chosen places of a segment.

use super::{BlockId, Space, State};

impl Space {
    /// Lets a held or pending block belong to the owner of its segment again, so that it joins what is free there.
    pub fn hand_back(&mut self, block: BlockId) {
        let list = self[self[block].segment].list;
        let record = self.record(block);
        debug_assert!(matches!(record.state, State::Held | State::Pending));
        record.list = list;
    }
}
