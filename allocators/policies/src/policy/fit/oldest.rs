//! The smallest block that fits, and of equal blocks the oldest.

use super::FreeBlocks;
use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::{BTreeMap, BTreeSet};

/// Free blocks by list, size and creation number.
#[derive(Clone, Debug, Default)]
pub(super) struct Oldest {
    blocks: BTreeSet<(FreeList, u64, u64, BlockId, u64)>,
    /// Creation number of each block: counted for each driver call and each split.
    made: BTreeMap<BlockId, u64>,
    count: u64,
}

impl Oldest {
    fn number(&mut self, id: BlockId) -> u64 {
        if !self.made.contains_key(&id) {
            self.made(id);
        }
        self.made[&id]
    }
}

impl FreeBlocks for Oldest {
    /// It keeps its number until its id is reused.
    fn made(&mut self, id: BlockId) {
        self.count += 1;
        self.made.insert(id, self.count);
    }

    fn insert(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) {
        let number = self.number(id);
        self.blocks.insert((list, bytes, number, id, addr));
    }

    fn remove(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) -> bool {
        let number = self.number(id);
        self.blocks.remove(&(list, bytes, number, id, addr))
    }

    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let (found, size, _, id, _) = self.blocks.range((list, bytes, 0, BlockId::LOWEST, 0)..).next()?;
        (*found == list && *size <= largest).then_some(*id)
    }

    fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        let blocks = self.blocks.range((list, 0, 0, BlockId::LOWEST, 0)..).take_while(|(of, ..)| *of == list);
        blocks.map(|&(list, bytes, _, id, addr)| FreeBlock { list, addr, bytes, id }).collect()
    }
}
