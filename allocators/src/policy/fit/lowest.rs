//! Free blocks in bins by size, so that the lowest one that is large enough is found without passing over all smaller ones.

use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::BTreeMap;

/// Free blocks by list, then by the power of two below their size, then by address: their sizes and names.
#[derive(Clone, Debug, Default)]
pub struct Lowest(BTreeMap<(FreeList, u32), BTreeMap<u64, (u64, BlockId)>>);

fn bin(bytes: u64) -> u32 {
    bytes.max(1).ilog2()
}

impl Lowest {
    pub(super) fn insert(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) {
        self.0.entry((list, bin(bytes))).or_default().insert(addr, (bytes, id));
    }

    /// False when it is not there.
    pub(super) fn remove(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) -> bool {
        let key = (list, bin(bytes));
        let Some(blocks) = self.0.get_mut(&key) else { return false };
        let known = blocks.remove(&addr).is_some_and(|known| known == (bytes, id));
        if blocks.is_empty() {
            self.0.remove(&key);
        }
        known
    }

    /// The block with the lowest address of those that have `bytes` to `largest`. In all bins but the first and the last the
    /// lowest block will do.
    pub(super) fn find(&self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let mut lowest: Option<(u64, BlockId)> = None;
        for blocks in self.0.range((list, bin(bytes))..=(list, bin(largest))).map(|(_, blocks)| blocks) {
            let below = blocks.iter().take_while(|(addr, _)| lowest.is_none_or(|(lowest, _)| **addr < lowest));
            let mut fits = below.filter(|(_, (size, _))| (bytes..=largest).contains(size));
            lowest = fits.next().map(|(addr, (_, id))| (*addr, *id)).or(lowest);
        }
        lowest.map(|(_, id)| id)
    }

    /// The blocks of a list.
    pub(super) fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        let bins = self.0.range((list, 0)..=(list, u32::MAX)).flat_map(|(_, blocks)| blocks);
        bins.map(|(&addr, &(bytes, id))| FreeBlock { list, addr, bytes, id }).collect()
    }
}
