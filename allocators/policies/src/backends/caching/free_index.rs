//! The interface of an index of a pool's free blocks, and the bins of both indices.
#![forbid(unsafe_code)]

use super::blocks::{BlockIndex, BlockSlab, NONE};
use std::hint::select_unpredictable;

/// The free blocks of one pool and one stream. The links of an index are in the blocks' records, which every call gets.
pub(super) trait FreeIndex {
    /// Adds a free block.
    fn insert(&mut self, blocks: &mut BlockSlab, index: BlockIndex);

    /// Removes a block that is in the index and has the size that it was inserted with.
    fn remove(&mut self, blocks: &mut BlockSlab, index: BlockIndex);

    /// Best fit: the smallest block with at least `bytes`, ties to the lowest address, as in PyTorch's ordered set.
    fn best_fit(&mut self, blocks: &mut BlockSlab, bytes: u64) -> Option<BlockIndex>;
}

const WORD: usize = 64;
/// Number of bins.
pub(super) const BINS: usize = WORD * WORD;

/// Bins of blocks, and a bitmap of two levels that finds the first non-empty bin from a number on.
#[derive(Clone, Debug)]
pub(super) struct Bins {
    /// The block of each bin that leads to the others, or [`NONE`].
    heads: Box<[BlockIndex; BINS]>,
    /// A bit for each non-empty bin.
    words: [u64; WORD],
    /// A bit for each word that is not zero.
    summary: u64,
}

impl Default for Bins {
    fn default() -> Self {
        // By way of a vector, so that the system zeroes the memory when it is used.
        let heads = vec![NONE; BINS].try_into().expect("the vector should have as many elements");
        Self { heads, words: [0; WORD], summary: 0 }
    }
}

impl Bins {
    /// The head of a bin, or [`NONE`].
    #[inline(always)]
    pub(super) fn head(&self, bin: usize) -> BlockIndex {
        self.heads[bin]
    }

    /// Makes a block the head of a bin.
    #[inline(always)]
    pub(super) fn set_head(&mut self, bin: usize, head: BlockIndex) {
        self.heads[bin] = head;
        self.words[bin / WORD] |= 1 << (bin % WORD);
        self.summary |= 1 << (bin / WORD);
    }

    /// Empties a bin.
    #[inline(always)]
    pub(super) fn clear(&mut self, bin: usize) {
        self.heads[bin] = NONE;
        let word = self.words[bin / WORD] & !(1 << (bin % WORD));
        self.words[bin / WORD] = word;
        // Whether it was the word's last bin is hard to predict, so this is written without a branch.
        self.summary ^= u64::from(word == 0) << (bin / WORD);
    }

    /// The first non-empty bin from `bin` on.
    #[inline(always)]
    pub(super) fn first_from(&self, bin: usize) -> Option<usize> {
        let (page, slot) = (bin / WORD, bin % WORD);
        let word = self.words[page] & (u64::MAX << slot);
        // Shifted twice, because all 64 bits may be shifted out. Both words are read, so that no branch is mispredicted.
        let above = self.summary & (u64::MAX << page << 1);
        if word == 0 && above == 0 {
            return None;
        }
        let next = above.trailing_zeros() as usize % WORD;
        let other = self.words[next];
        let page = select_unpredictable(word != 0, page, next);
        let word = select_unpredictable(word != 0, word, other);
        Some(page * WORD + word.trailing_zeros() as usize % WORD)
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::BlockRecord;
    use super::super::exact_index::ExactIndex;
    use super::super::ranged_index::RangedIndex;
    use super::*;
    use crate::contract::PoolKind;
    use crate::policy::size::torch::MIN_BLOCK;
    use std::collections::BTreeSet;

    /// An index with its slab.
    #[derive(Default)]
    struct Bench<I> {
        blocks: BlockSlab,
        index: I,
    }

    impl<I: FreeIndex + Default> Bench<I> {
        /// A free block.
        fn add(&mut self, bytes: u64, addr: u64) -> BlockIndex {
            let block = self.blocks.insert(BlockRecord::segment(addr, bytes, PoolKind::Small));
            self.index.insert(&mut self.blocks, block);
            block
        }

        fn drop(&mut self, block: BlockIndex) {
            self.index.remove(&mut self.blocks, block);
            self.blocks.remove(block);
        }

        fn best_fit(&mut self, bytes: u64) -> Option<BlockIndex> {
            self.index.best_fit(&mut self.blocks, bytes)
        }
    }

    fn smallest_then_lowest<I: FreeIndex + Default>() {
        let mut bench = Bench::<I>::default();
        assert_eq!(bench.best_fit(MIN_BLOCK), None);
        let large = bench.add(3 * MIN_BLOCK, 1 << 20);
        let high = bench.add(2 * MIN_BLOCK, 3 << 20);
        let low = bench.add(2 * MIN_BLOCK, 2 << 20);
        let expected = [Some(low), Some(low), Some(large), None];
        assert_eq!([1, 2, 3, 4].map(|units| bench.best_fit(units * MIN_BLOCK)), expected);
        bench.drop(low);
        assert_eq!(bench.best_fit(MIN_BLOCK), Some(high));
    }

    /// Compares with an ordered set, with sizes in few bins and sizes over all bins.
    fn agrees_with_an_ordered_set<I: FreeIndex + Default>(spread: u64) {
        let mut bench = Bench::<I>::default();
        let mut model: BTreeSet<(u64, u64, BlockIndex)> = BTreeSet::new();
        let mut seed = spread;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 11) % below
        };
        // Miri is some thousand times slower, and there is no unsafe code in here.
        let steps: u64 = if cfg!(miri) { 200 } else { 20_000 };
        for step in 0..steps {
            // Grows, then shrinks, and so on.
            if model.is_empty() || random(8) < if (step / (steps / 5)).is_multiple_of(2) { 5 } else { 3 } {
                // One address a step, so that no two blocks share one.
                let (bytes, addr) = ((1 + random(spread)) * MIN_BLOCK, (((1 + random(1 << 20)) << 15) | step) << 13);
                let block = bench.add(bytes, addr);
                model.insert((bytes, addr, block));
            } else {
                let pick = (random(spread + 1) * MIN_BLOCK, random(1 << 31) << 17, 0);
                let key = *model.range(pick..).next().or(model.first()).expect("the model should not be empty");
                model.remove(&key);
                bench.drop(key.2);
            }
            // Splits off the front of one.
            if let Some(key) = model.range(((2 + random(spread)) * MIN_BLOCK, 0, 0)..).next().copied() {
                let cut = MIN_BLOCK * if random(2) == 0 { 1 } else { 1 + random(key.0 / MIN_BLOCK - 1) };
                bench.index.remove(&mut bench.blocks, key.2);
                let front = bench.blocks.split_front(key.2, cut);
                bench.index.insert(&mut bench.blocks, key.2);
                bench.blocks.remove(front);
                bench.blocks.link(NONE, key.2);
                model.remove(&key);
                model.insert((key.0 - cut, key.1 + cut, key.2));
            }
            let bytes = (1 + random(spread)) * MIN_BLOCK;
            let expected = model.range((bytes, 0, 0)..).next().copied();
            assert_eq!(bench.best_fit(bytes), expected.map(|key| key.2), "{bytes} bytes at step {step}");
            if let Some(key) = expected.filter(|_| random(4) == 0) {
                bench.drop(key.2);
                model.remove(&key);
            }
        }
    }

    #[test]
    fn best_fit_is_smallest_then_lowest() {
        smallest_then_lowest::<ExactIndex>();
        smallest_then_lowest::<RangedIndex>();
    }

    #[test]
    fn exact_index_agrees_with_an_ordered_set() {
        for spread in [1, 40, 1 << 12] {
            agrees_with_an_ordered_set::<ExactIndex>(spread);
        }
    }

    #[test]
    fn ranged_index_agrees_with_an_ordered_set() {
        for spread in [1, 40, 1 << 12, 1 << 31, 1 << 45] {
            agrees_with_an_ordered_set::<RangedIndex>(spread);
        }
    }
}
