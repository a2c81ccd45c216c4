//! The first block that fits behind the last chosen one.

use super::FreeBlocks;
use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included};

/// Free blocks by list and address.
#[derive(Debug, Default)]
pub(super) struct Next {
    /// Their sizes and ids.
    blocks: BTreeMap<(FreeList, u64), (u64, BlockId)>,
    /// Address of the last chosen block, by list.
    last: BTreeMap<FreeList, u64>,
}

impl FreeBlocks for Next {
    fn insert(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) {
        self.blocks.insert((list, addr), (bytes, id));
    }

    fn remove(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) -> bool {
        self.blocks.remove(&(list, addr)) == Some((bytes, id))
    }

    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let at = self.last.get(&list).copied().unwrap_or(0);
        let behind = self.blocks.range((Excluded((list, at)), Included((list, u64::MAX))));
        let before = self.blocks.range((list, 0)..=(list, at));
        let (&(_, addr), &(_, id)) = behind.chain(before).find(|(_, (size, _))| (bytes..=largest).contains(size))?;
        self.last.insert(list, addr);
        Some(id)
    }

    fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        let blocks = self.blocks.range((list, 0)..=(list, u64::MAX));
        blocks.map(|(&(list, addr), &(bytes, id))| FreeBlock { list, addr, bytes, id }).collect()
    }
}
