//! What an index of free blocks can do: the exact best fit of PyTorch's ordered set.

use super::blocks::{BlockIndex, BlockRecord};

/// The free blocks of one pool and one stream. Their records are in a slab, which every call is given; an index keeps its
/// links there.
pub trait FreeIndex {
    /// Adds a free block.
    fn insert(&mut self, blocks: &mut [BlockRecord], index: BlockIndex);

    /// Removes a block that is in the index.
    fn remove(&mut self, blocks: &mut [BlockRecord], index: BlockIndex);

    /// Puts a block that is in the index, and that had `bytes` before, where its address and size of today belong.
    fn resized(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, bytes: u64);

    /// Best fit: the smallest block with at least `bytes`, ties to the lowest address.
    fn best_fit(&self, blocks: &[BlockRecord], bytes: u64) -> Option<BlockIndex>;

    /// Every block by (size, address). Allocates.
    fn in_order(&self, blocks: &[BlockRecord]) -> Vec<BlockIndex>;
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{BlockSlab, NONE};
    use super::super::exact_index::ExactIndex;
    use super::super::ranged_index::RangedIndex;
    use super::super::rounding::MIN_BLOCK;
    use super::*;
    use crate::stats::PoolKind;
    use std::collections::BTreeSet;

    /// An index with its slab.
    #[derive(Default)]
    struct Bench<I> {
        blocks: BlockSlab,
        index: I,
    }

    impl<I: FreeIndex + Default> Bench<I> {
        /// A free block.
        fn add(&mut self, units: u64, addr: u64) -> BlockIndex {
            let block = self.blocks.insert(BlockRecord::segment(addr, units * MIN_BLOCK, PoolKind::Small));
            self.index.insert(self.blocks.parts().0, block);
            block
        }

        fn seen(&self, block: BlockIndex) -> (u64, u64) {
            let record = self.blocks.get(block);
            (record.bytes() / MIN_BLOCK, record.addr())
        }
    }

    fn smallest_then_lowest<I: FreeIndex + Default>() {
        let mut bench = Bench::<I>::default();
        assert_eq!(bench.index.best_fit(bench.blocks.records(), MIN_BLOCK), None);
        let large = bench.add(3, 1 << 20);
        let high = bench.add(2, 3 << 20);
        let low = bench.add(2, 2 << 20);
        let fit = |bench: &Bench<I>, units: u64| bench.index.best_fit(bench.blocks.records(), units * MIN_BLOCK);
        assert_eq!([1, 2, 3, 4].map(|units| fit(&bench, units)), [Some(low), Some(low), Some(large), None]);
        assert_eq!(bench.index.in_order(bench.blocks.records()), [low, high, large]);
        bench.index.remove(bench.blocks.parts().0, low);
        assert_eq!(fit(&bench, 1), Some(high));
    }

    /// Against an ordered set, with sizes that crowd into few bins and sizes that spread over all.
    fn agrees_with_an_ordered_set<I: FreeIndex + Default>(spread: u64) {
        let mut bench = Bench::<I>::default();
        let mut model: BTreeSet<(u64, u64, BlockIndex)> = BTreeSet::new();
        let mut seed = spread;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 11) % below
        };
        for step in 0..20_000u64 {
            // Grows, then shrinks, and so on.
            if model.is_empty() || random(8) < if step / 4_000 % 2 == 0 { 5 } else { 3 } {
                // One address a step, so that no two blocks share one.
                let (units, addr) = (1 + random(spread), (((1 + random(1 << 20)) << 15) | step) << 13);
                let block = bench.add(units, addr);
                model.insert((units, addr, block));
            } else {
                let pick = (random(spread + 1), random(1 << 48), 0);
                let key = *model.range(pick..).next().or(model.first()).expect("the model should not be empty");
                model.remove(&key);
                bench.index.remove(bench.blocks.parts().0, key.2);
                bench.blocks.remove(key.2);
            }
            // Something is cut off the front of one, as a split does.
            let pick = (2 + random(spread), 0, 0);
            if let Some(key) = model.range(pick..).next().copied() {
                let cut = if random(2) == 0 { 1 } else { 1 + random(key.0 - 1) };
                let front = bench.blocks.split_front(key.2, cut * MIN_BLOCK, 1);
                bench.index.resized(bench.blocks.parts().0, key.2, key.0 * MIN_BLOCK);
                bench.blocks.remove(front);
                bench.blocks.get_mut(key.2).set_prev(NONE);
                model.remove(&key);
                model.insert((key.0 - cut, key.1 + cut * MIN_BLOCK, key.2));
            }
            let units = 1 + random(spread);
            let expected = model.range((units, 0, 0)..).next().map(|key| (key.0, key.1));
            let found = bench.index.best_fit(bench.blocks.records(), units * MIN_BLOCK).map(|block| bench.seen(block));
            assert_eq!(found, expected, "{units} units at step {step}");
            if step % 1_000 == 0 {
                let order = bench.index.in_order(bench.blocks.records());
                let order: Vec<(u64, u64)> = order.into_iter().map(|block| bench.seen(block)).collect();
                let expected: Vec<(u64, u64)> = model.iter().map(|key| (key.0, key.1)).collect();
                assert_eq!(order, expected);
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
        for spread in [1, 40, 1 << 12, 1 << 31] {
            agrees_with_an_ordered_set::<RangedIndex>(spread);
        }
    }
}
