//! Part `fit`: which free block serves a request.
//!
//! Each kind keeps the index of free blocks that it searches. Blocks are told apart by [`FreeList`]: a search looks at one
//! list and never hands out a block of another.
#![forbid(unsafe_code)]

mod best;
pub mod lowest;
mod next;
mod oldest;
pub mod tlsf;

use crate::space::{BlockId, FreeBlock, FreeList};
use std::fmt;

/// An index of free blocks, with a rule for choosing one: a kind of [`Fit`]. What it holds is what was inserted and not removed
/// since. It names no other block, and a found one has the size that was asked for.
pub trait FreeBlocks: fmt::Debug + Send {
    /// A block was just made: it came from the device, or a cut left it. Inserting it comes next.
    fn made(&mut self, _block: BlockId) {}

    /// Adds a block that became free.
    fn insert(&mut self, block: FreeBlock);

    /// Takes out a block that is no longer free, or no longer of this size; false when it is not there.
    fn remove(&mut self, block: FreeBlock) -> bool;

    /// A block of a list that has at least `bytes` and at most `largest`, which is no less.
    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId>;

    /// The block that comes after one of its list in the order of best fit.
    fn next_larger(&self, _block: FreeBlock) -> Option<BlockId> {
        None
    }

    /// The blocks of a list.
    fn of(&self, list: FreeList) -> Vec<FreeBlock>;
}

/// The free blocks, with a rule for choosing one.
#[derive(Debug)]
pub struct Fit(Box<dyn FreeBlocks>);

impl Fit {
    /// Another rule, with the index that it searches.
    pub fn by(blocks: impl FreeBlocks + 'static) -> Self {
        Self(Box::new(blocks))
    }

    /// The smallest block that fits; of equal ones that with the lowest address (PyTorch, RMM's pool, BFC). Insert, remove
    /// and search take O(log n).
    #[must_use]
    pub fn best() -> Self {
        Self(Box::<best::Best>::default())
    }

    /// The block with the lowest address that fits. A search looks at one block of each larger power of two, and
    /// at those of its own that lie in front of what it finds.
    #[must_use]
    pub fn first() -> Self {
        Self(Box::<lowest::Lowest<FreeList, BlockId>>::default())
    }

    /// The smallest block that fits; of equal ones that which was made first (CuPy). O(log n).
    #[must_use]
    pub fn oldest() -> Self {
        Self(Box::<oldest::Oldest>::default())
    }

    /// Two-level segregated fit: any block of the first class in which all fit. See [`tlsf`]. O(log n).
    #[must_use]
    pub fn tlsf() -> Self {
        Self(Box::<tlsf::Tlsf>::default())
    }

    /// The first block that fits behind the last one that was chosen, and from the lowest address on when the end is
    /// reached. A search looks at the blocks in between.
    #[must_use]
    pub fn next() -> Self {
        Self(Box::<next::Next>::default())
    }

    /// Adds a block that was just made: it came from the device, or a cut left it.
    pub fn insert_new(&mut self, block: FreeBlock) {
        self.0.made(block.id);
        self.insert(block);
    }

    /// Adds a block that became free.
    pub fn insert(&mut self, block: FreeBlock) {
        self.0.insert(block);
    }

    /// Takes out a block that is no longer free, or no longer of this size.
    pub fn remove(&mut self, block: FreeBlock) {
        let known = self.0.remove(block);
        debug_assert!(known, "{block:?} should be in the index");
    }

    /// A block of a list that has at least `bytes` and at most `largest`.
    pub fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        if bytes > largest { None } else { self.0.find(list, bytes, largest) }
    }

    /// The block that comes after a free one of its list in the order of best fit: the next in size, then in address.
    /// `None` after the last, and for other rules.
    #[must_use]
    pub fn next_larger(&self, block: FreeBlock) -> Option<BlockId> {
        self.0.next_larger(block)
    }

    /// Takes out every block of a list; they are returned in the order of the index.
    pub fn drain(&mut self, list: FreeList) -> Vec<FreeBlock> {
        let blocks = self.0.of(list);
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
    fn a_drained_list_is_empty_and_the_others_are_not() {
        for fit in [Fit::best(), Fit::oldest(), Fit::first(), Fit::next()] {
            let mut fit = filled(fit);
            let mut gone: Vec<u64> = fit.drain(list(1)).iter().map(|block| block.addr).collect();
            gone.sort_unstable();
            assert_eq!((gone, found(&mut fit, 1, 99)), (vec![10, 20, 30, 40], None));
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
        // What is taken and comes back keeps its age, whatever its size was in between.
        fit.remove(block(30, 8));
        assert_eq!(found(&mut fit, 8, 99), Some(10));
        fit.insert(block(30, 9));
        assert_eq!(found(&mut fit, 9, 99), Some(30));
        fit.remove(block(30, 9));
        fit.insert(block(30, 8));
        assert_eq!(found(&mut fit, 8, 99), Some(30));
        // A name that is given to another block makes it the youngest.
        fit.remove(block(30, 8));
        fit.insert_new(block(30, 8));
        assert_eq!(found(&mut fit, 8, 99), Some(10));
    }

    #[test]
    fn tlsf_takes_what_became_free_last_of_the_first_class_that_surely_fits() {
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
