//! Free ranges in bins by size, so that a search for the lowest sufficient range skips the smaller ones.

use super::FreeBlocks;
use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::BTreeMap;

/// Free ranges by list, then by the power of two below their size, then by address: their sizes and values.
#[derive(Clone, Debug)]
pub struct Lowest<List, Kept>(BTreeMap<(List, u32), BTreeMap<u64, (u64, Kept)>>);

impl<List, Kept> Default for Lowest<List, Kept> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

fn bin(bytes: u64) -> u32 {
    bytes.max(1).ilog2()
}

impl<List: Copy + Ord, Kept: Copy + PartialEq> Lowest<List, Kept> {
    /// Adds a range.
    pub fn insert(&mut self, list: List, addr: u64, bytes: u64, kept: Kept) {
        self.0.entry((list, bin(bytes))).or_default().insert(addr, (bytes, kept));
    }

    /// Removes a range; false when it is not in the index.
    pub fn remove(&mut self, list: List, addr: u64, bytes: u64, kept: Kept) -> bool {
        let key = (list, bin(bytes));
        let Some(ranges) = self.0.get_mut(&key) else { return false };
        let known = ranges.remove(&addr).is_some_and(|known| known == (bytes, kept));
        if ranges.is_empty() {
            self.0.remove(&key);
        }
        known
    }

    /// The address and value of the lowest range that has `bytes` to `largest`. In all bins but the first and the last the lowest
    /// range fits.
    pub fn find(&self, list: List, bytes: u64, largest: u64) -> Option<(u64, Kept)> {
        let mut lowest: Option<(u64, Kept)> = None;
        for ranges in self.0.range((list, bin(bytes))..=(list, bin(largest))).map(|(_, ranges)| ranges) {
            let below = ranges.iter().take_while(|(addr, _)| lowest.is_none_or(|(lowest, _)| **addr < lowest));
            let mut fits = below.filter(|(_, (size, _))| (bytes..=largest).contains(size));
            lowest = fits.next().map(|(addr, (_, kept))| (*addr, *kept)).or(lowest);
        }
        lowest
    }

    /// The ranges of a list: address, size, and value.
    pub fn of(&self, list: List) -> impl Iterator<Item = (u64, u64, Kept)> {
        let bins = self.0.range((list, 0)..=(list, u32::MAX)).flat_map(|(_, ranges)| ranges);
        bins.map(|(&addr, &(bytes, kept))| (addr, bytes, kept))
    }
}

impl FreeBlocks for Lowest<FreeList, BlockId> {
    fn insert(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) {
        Lowest::insert(self, list, addr, bytes, id);
    }

    fn remove(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) -> bool {
        Lowest::remove(self, list, addr, bytes, id)
    }

    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        Lowest::find(self, list, bytes, largest).map(|(_, id)| id)
    }

    fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        Lowest::of(self, list).map(|(addr, bytes, id)| FreeBlock { list, addr, bytes, id }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_lowest_that_fits_is_found(steps in prop::collection::vec((any::<bool>(), 0..2u8, 0..40u64, 1..300u64), 1..200)) {
            let (mut lowest, mut all) = (Lowest::default(), Vec::<(u8, u64, u64)>::new());
            for (adds, list, addr, bytes) in steps {
                let there = all.iter().position(|range| (range.0, range.1) == (list, addr));
                match there {
                    Some(at) if !adds => {
                        let (_, _, known) = all.swap_remove(at);
                        prop_assert!(lowest.remove(list, addr, known, known));
                    }
                    None if adds => {
                        all.push((list, addr, bytes));
                        lowest.insert(list, addr, bytes, bytes);
                    }
                    None => prop_assert!(!lowest.remove(list, addr, bytes, bytes)),
                    Some(_) => {}
                }
                for (list, least, largest) in [(0, bytes, bytes + addr), (1, bytes, u64::MAX), (list, 1, bytes)] {
                    let fits = all.iter().filter(|range| range.0 == list && (least..=largest).contains(&range.2));
                    let expected = fits.map(|&(_, addr, bytes)| (addr, bytes)).min();
                    prop_assert_eq!(lowest.find(list, least, largest), expected);
                }
                prop_assert_eq!(lowest.of(list).count(), all.iter().filter(|range| range.0 == list).count());
            }
        }
    }
}
