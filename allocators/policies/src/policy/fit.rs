//! Part `fit`: which free block serves a request.
//!
//! Each kind has its own index of free blocks. A search uses the blocks of one [`FreeList`] and never returns a block of another.
#![forbid(unsafe_code)]

mod best;
pub mod lowest;
mod next;
mod oldest;
pub mod tlsf;

use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::BTreeMap;
use std::fmt;

/// An index of free blocks, with a rule for choosing one: a kind of [`Fit`]. It contains exactly the blocks that were inserted and
/// not removed since, and a search returns one of them of the requested size.
pub trait FreeBlocks: fmt::Debug + Send {
    /// Called before the insertion of a new block, from the device or from a split.
    fn made(&mut self, _block: BlockId) {}

    /// Adds a block that became free.
    fn insert(&mut self, block: FreeBlock);

    /// Removes a block that is no longer free or changed its size; false when it is not in the index.
    fn remove(&mut self, block: FreeBlock) -> bool;

    /// Removes a block and inserts its successor; false when the first is not in the index.
    fn replace(&mut self, removed: FreeBlock, block: FreeBlock) -> bool {
        let known = self.remove(removed);
        self.insert(block);
        known
    }

    /// A block of a list that has at least `bytes` and at most `largest`, where `largest` is not less than `bytes`.
    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId>;

    /// The size from which on a free block is always found for a request of `bytes`: a new segment for the request has at least
    /// this size.
    fn surely_found(&self, bytes: u64) -> u64 {
        bytes
    }

    /// The next block of the list in the order of best fit.
    fn next_larger(&self, _block: FreeBlock) -> Option<BlockId> {
        None
    }

    /// The blocks of a list.
    fn of(&self, list: FreeList) -> Vec<FreeBlock>;
}

/// The free blocks, with a rule for choosing one.
#[derive(Debug)]
pub struct Fit {
    blocks: Box<dyn FreeBlocks>,
    /// The same blocks by address, for policies that search by address.
    by_address: Option<BTreeMap<u64, FreeBlock>>,
}

impl Fit {
    /// Another rule, with the index that it searches.
    pub fn by(blocks: impl FreeBlocks + 'static) -> Self {
        Self { blocks: Box::new(blocks), by_address: None }
    }

    /// The smallest block that fits; of equal blocks the one with the lowest address (PyTorch, RMM's pool, BFC). Insert, remove and
    /// search take O(log n).
    #[must_use]
    pub fn best() -> Self {
        Self::by(best::Best::default())
    }

    /// The block with the lowest address that fits. A search visits one block of each larger power of two, and those blocks of its
    /// own power that precede the result.
    #[must_use]
    pub fn first() -> Self {
        Self::by(lowest::Lowest::<FreeList, BlockId>::default())
    }

    /// The smallest block that fits; of equal blocks the oldest one (CuPy). O(log n).
    #[must_use]
    pub fn oldest() -> Self {
        Self::by(oldest::Oldest::default())
    }

    /// Two-level segregated fit: any block of the first class in which all fit. See [`tlsf`]. O(log n).
    #[must_use]
    pub fn tlsf() -> Self {
        Self::by(tlsf::Tlsf::default())
    }

    /// The first block that fits behind the last chosen one, continuing from the lowest address when the end is reached. A search
    /// visits the blocks in between.
    #[must_use]
    pub fn next() -> Self {
        Self::by(next::Next::default())
    }

    /// See [`FreeBlocks::surely_found`].
    #[must_use]
    pub fn surely_found(&self, bytes: u64) -> u64 {
        self.blocks.surely_found(bytes)
    }

    /// Inserts a new block, from the device or from a split.
    pub fn insert_new(&mut self, block: FreeBlock) {
        self.blocks.made(block.id);
        self.insert(block);
    }

    /// Removes a block and inserts the block that a split left of it.
    pub fn replace_by_new(&mut self, removed: FreeBlock, block: FreeBlock) {
        self.blocks.made(block.id);
        self.replace(removed, block);
    }

    /// Inserts a block that became free.
    pub fn insert(&mut self, block: FreeBlock) {
        self.blocks.insert(block);
        if let Some(by_address) = &mut self.by_address {
            by_address.insert(block.addr, block);
        }
    }

    /// Removes a block that is no longer free or changed its size.
    pub fn remove(&mut self, block: FreeBlock) {
        let known = self.blocks.remove(block);
        debug_assert!(known, "{block:?} should be in the index");
        if let Some(by_address) = &mut self.by_address {
            by_address.remove(&block.addr);
        }
    }

    /// Removes a block and inserts its successor: the remainder of a split, or the coalesced block.
    pub fn replace(&mut self, removed: FreeBlock, block: FreeBlock) {
        let known = self.blocks.replace(removed, block);
        debug_assert!(known, "{removed:?} should be in the index");
        if let Some(by_address) = &mut self.by_address {
            by_address.remove(&removed.addr);
            by_address.insert(block.addr, block);
        }
    }

    /// A block of a list that has at least `bytes` and at most `largest`.
    pub fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        if bytes > largest { None } else { self.blocks.find(list, bytes, largest) }
    }

    /// The next free block of the list in the order of best fit: the next in size, then in address. `None` after the last, and for
    /// other rules.
    #[must_use]
    pub fn next_larger(&self, block: FreeBlock) -> Option<BlockId> {
        self.blocks.next_larger(block)
    }

    /// Starts an index by address, which [`at`](Self::at) searches. `all` are the blocks in the index now. From then on each insert
    /// and remove takes O(log n) more, until [`forget_addresses`](Self::forget_addresses).
    pub fn list_addresses(&mut self, all: impl Iterator<Item = FreeBlock>) {
        if self.by_address.is_none() {
            self.by_address = Some(all.map(|block| (block.addr, block)).collect());
        }
    }

    /// Drops the index by address.
    pub fn forget_addresses(&mut self) {
        self.by_address = None;
    }

    /// The free block that contains an address, while the [index by address](Self::list_addresses) exists. O(log n).
    #[must_use]
    pub fn at(&self, addr: u64) -> Option<FreeBlock> {
        let (_, block) = self.by_address.as_ref()?.range(..=addr).next_back()?;
        (addr < block.addr + block.bytes).then_some(*block)
    }

    /// Removes every block of a list and returns them in the order of the index.
    pub fn drain(&mut self, list: FreeList) -> Vec<FreeBlock> {
        let blocks = self.blocks.of(list);
        blocks.iter().for_each(|block| self.remove(*block));
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Owner;

    fn list(stream: u64) -> FreeList {
        FreeList { owner: Owner::of(crate::stream(stream)), pool: None }
    }

    /// Blocks of stream 1 by (address, size), and one of stream 2 that would fit best of all.
    fn filled(mut fit: Fit) -> Fit {
        for (stream, addr, bytes) in [(1, 40, 8), (1, 10, 4), (1, 30, 6), (1, 20, 8), (2, 5, 5)] {
            // CAST: small numbers.
            fit.insert(FreeBlock { list: list(stream), addr, bytes, id: BlockId::numbered(addr as u32) });
        }
        fit
    }

    fn found(fit: &mut Fit, bytes: u64, largest: u64) -> Option<u32> {
        fit.find(list(1), bytes, largest).map(BlockId::number)
    }

    #[test]
    fn best_takes_the_smallest_and_then_the_lowest() {
        let mut fit = filled(Fit::best());
        assert_eq!([1, 5, 7].map(|bytes| found(&mut fit, bytes, 99)), [Some(10), Some(30), Some(20)]);
        assert_eq!((found(&mut fit, 7, 7), found(&mut fit, 9, 99)), (None, None));
    }

    #[test]
    fn first_takes_the_lowest() {
        let mut fit = filled(Fit::first());
        assert_eq!([1, 5, 9].map(|bytes| found(&mut fit, bytes, 99)), [Some(10), Some(20), None]);
        assert_eq!(found(&mut fit, 5, 6), Some(30), "what is too large is passed over");
    }

    #[test]
    fn next_goes_on_where_it_stopped() {
        let mut fit = filled(Fit::next());
        assert_eq!([8, 8, 8, 1].map(|bytes| found(&mut fit, bytes, 99)), [Some(20), Some(40), Some(20), Some(30)]);
    }

    #[test]
    fn a_removed_block_is_not_found() {
        for fit in [Fit::best(), Fit::oldest(), Fit::first(), Fit::next()] {
            let mut fit = filled(fit);
            fit.remove(FreeBlock { list: list(1), addr: 30, bytes: 6, id: BlockId::numbered(30) });
            assert_eq!(found(&mut fit, 5, 6), None);
        }
    }

    #[test]
    fn blocks_are_found_by_address_once_they_are_listed() {
        let mut fit = filled(Fit::best());
        let block = |addr: u64, bytes| {
            // CAST: a small number.
            FreeBlock { list: list(1), addr, bytes, id: BlockId::numbered(addr as u32) }
        };
        assert_eq!(fit.at(10), None);
        fit.list_addresses([block(40, 8), block(10, 4), block(30, 6), block(20, 8)].into_iter());
        let at = |fit: &Fit, addr| fit.at(addr).map(|block| block.addr);
        assert_eq!(
            [9, 10, 13, 14, 35, 36].map(|addr| at(&fit, addr)),
            [None, Some(10), Some(10), None, Some(30), None]
        );
        fit.remove(block(30, 6));
        fit.insert(block(30, 2));
        fit.insert_new(block(50, 1));
        assert_eq!([31, 32, 50].map(|addr| at(&fit, addr)), [Some(30), None, Some(50)]);
        fit.drain(list(1));
        assert_eq!(at(&fit, 10), None);
        fit.forget_addresses();
        fit.insert(block(10, 4));
        assert_eq!(at(&fit, 10), None);
    }

    #[test]
    fn a_drained_list_is_empty_and_the_others_are_not() {
        for fit in [Fit::best(), Fit::oldest(), Fit::first(), Fit::next()] {
            let mut fit = filled(fit);
            let mut drained: Vec<u64> = fit.drain(list(1)).iter().map(|block| block.addr).collect();
            drained.sort_unstable();
            assert_eq!((drained, found(&mut fit, 1, 99)), (vec![10, 20, 30, 40], None));
            assert_eq!(fit.find(list(2), 1, 99).map(BlockId::number), Some(5));
        }
    }

    #[test]
    fn the_oldest_of_equal_blocks_is_taken() {
        let block = |addr: u64, bytes| {
            // CAST: a small number.
            FreeBlock { list: list(1), addr, bytes, id: BlockId::numbered(addr as u32) }
        };
        let mut fit = Fit::oldest();
        for at in [30, 10, 20] {
            fit.insert_new(block(at, 8));
        }
        assert_eq!(found(&mut fit, 8, 99), Some(30));
        // A block that is taken and freed keeps its age, whatever its size was in between.
        fit.remove(block(30, 8));
        assert_eq!(found(&mut fit, 8, 99), Some(10));
        fit.insert(block(30, 9));
        assert_eq!(found(&mut fit, 9, 99), Some(30));
        fit.remove(block(30, 9));
        fit.insert(block(30, 8));
        assert_eq!(found(&mut fit, 8, 99), Some(30));
        // An id that is reused for another block makes it the youngest.
        fit.remove(block(30, 8));
        fit.insert_new(block(30, 8));
        assert_eq!(found(&mut fit, 8, 99), Some(10));
    }

    #[test]
    fn tlsf_takes_the_last_freed_of_the_first_sufficient_class() {
        let unit = tlsf::UNIT;
        let block = |addr: u64, units: u64| {
            // CAST: a small number.
            FreeBlock { list: list(1), addr, bytes: units * unit, id: BlockId::numbered(addr as u32) }
        };
        let mut fit = Fit::tlsf();
        // 64 and 65 units are of one class, 66 and 67 of the next.
        for (at, units) in [(10, 64), (20, 65), (30, 66), (40, 67), (50, 1000)] {
            fit.insert(block(at, units));
        }
        let mut of = |units: u64, largest: u64| found(&mut fit, units * unit, largest * unit);
        assert_eq!(of(64, 5000), Some(20), "the last of its class");
        assert_eq!(of(65, 5000), Some(40), "65 units are there, and missed");
        assert_eq!(of(67, 5000), Some(50), "and so are 67");
        assert_eq!((of(64, 64), of(66, 66), of(1001, 5000)), (Some(10), Some(30), None));
    }
}
