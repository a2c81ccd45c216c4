//! What a free list can do: insert, remove, and the best fit by (size, address) of PyTorch's ordered set.

use super::blocks::{BlockIndex, BlockRecord};

/// A block that fits best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// Its record.
    pub(crate) index: BlockIndex,
    /// Its size, which an index may know without a look at the record.
    pub(crate) units: u32,
}

/// The free blocks of one pool and one stream. Their records are in a slab, which every call is given; an index keeps its
/// links there. Sizes are in units of [`MIN_BLOCK`](crate::policy::size::torch::MIN_BLOCK) and are those of the records; callers have
/// them at hand, and a record may be far.
pub(crate) trait FreeIndex {
    /// Adds a free block of `units`.
    fn insert(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, units: u32);

    /// Removes a block of `units` that is in the index.
    fn remove(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, units: u32);

    /// Best fit: the smallest block with at least `units`, ties to the lowest address.
    fn best_fit(&mut self, blocks: &mut [BlockRecord], units: u32) -> Option<Fit>;

    /// Every block by (size, address). Allocates.
    fn in_order(&self, blocks: &[BlockRecord]) -> Vec<BlockIndex>;
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{BlockSlab, NONE};
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
        fn add(&mut self, units: u32, addr: u64) -> BlockIndex {
            let block = self.blocks.insert(BlockRecord::segment(addr, u64::from(units) * MIN_BLOCK, PoolKind::Small));
            self.index.insert(self.blocks.records_mut(), block, units);
            block
        }

        fn best_fit(&mut self, units: u32) -> Option<Fit> {
            self.index.best_fit(self.blocks.records_mut(), units)
        }

        fn seen(&self, block: BlockIndex) -> (u32, u64) {
            let record = self.blocks.get(block);
            (record.units(), record.addr())
        }
    }

    fn smallest_then_lowest<I: FreeIndex + Default>() {
        let mut bench = Bench::<I>::default();
        assert_eq!(bench.best_fit(1), None);
        let large = bench.add(3, 1 << 20);
        let high = bench.add(2, 3 << 20);
        let low = bench.add(2, 2 << 20);
        let found = |index: BlockIndex, units: u32| Some(Fit { index, units });
        let expected = [found(low, 2), found(low, 2), found(large, 3), None];
        assert_eq!([1, 2, 3, 4].map(|units| bench.best_fit(units)), expected);
        assert_eq!(bench.index.in_order(bench.blocks.records()), [low, high, large]);
        bench.index.remove(bench.blocks.records_mut(), low, 2);
        assert_eq!(bench.best_fit(1), found(high, 2));
    }

    /// Against an ordered set, with sizes that crowd into few bins and sizes that spread over all.
    fn agrees_with_an_ordered_set<I: FreeIndex + Default>(spread: u32) {
        let mut bench = Bench::<I>::default();
        let mut model: BTreeSet<(u32, u64, BlockIndex)> = BTreeSet::new();
        let mut seed = u64::from(spread);
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // CAST: below a `u32`.
            ((seed >> 11) % u64::from(below)) as u32
        };
        // Miri is some thousand times slower, and there is no unsafe code in here.
        let steps: u64 = if cfg!(miri) { 200 } else { 20_000 };
        for step in 0..steps {
            // Grows, then shrinks, and so on.
            if model.is_empty() || random(8) < if (step / (steps / 5)).is_multiple_of(2) { 5 } else { 3 } {
                // One address a step, so that no two blocks share one.
                let (units, addr) = (1 + random(spread), ((u64::from(1 + random(1 << 20)) << 15) | step) << 13);
                let block = bench.add(units, addr);
                model.insert((units, addr, block));
            } else {
                let pick = (random(spread + 1), u64::from(random(1 << 31)) << 17, 0);
                let key = *model.range(pick..).next().or(model.first()).expect("the model should not be empty");
                model.remove(&key);
                bench.index.remove(bench.blocks.records_mut(), key.2, key.0);
                bench.blocks.remove(key.2);
            }
            // Something is cut off the front of one, as a split does.
            if let Some(key) = model.range((2 + random(spread), 0, 0)..).next().copied() {
                let cut = if random(2) == 0 { 1 } else { 1 + random(key.0 - 1) };
                bench.index.remove(bench.blocks.records_mut(), key.2, key.0);
                let front = bench.blocks.split_front(key.2, cut, 1);
                bench.index.insert(bench.blocks.records_mut(), key.2, key.0 - cut);
                bench.blocks.remove(front);
                bench.blocks.link(NONE, key.2);
                model.remove(&key);
                model.insert((key.0 - cut, key.1 + u64::from(cut) * MIN_BLOCK, key.2));
            }
            let units = 1 + random(spread);
            let expected = model.range((units, 0, 0)..).next().copied();
            let found = bench.best_fit(units);
            let seen = found.map(|fit| (bench.seen(fit.index), fit.units));
            assert_eq!(seen, expected.map(|key| ((key.0, key.1), key.0)), "{units} units at step {step}");
            if let Some((fit, key)) = found.zip(expected).filter(|_| random(4) == 0) {
                bench.index.remove(bench.blocks.records_mut(), fit.index, fit.units);
                bench.blocks.remove(fit.index);
                model.remove(&key);
            }
            if step.is_multiple_of(1_000) || step + 1 == steps {
                let order = bench.index.in_order(bench.blocks.records());
                let order: Vec<(u32, u64)> = order.into_iter().map(|block| bench.seen(block)).collect();
                let expected: Vec<(u32, u64)> = model.iter().map(|key| (key.0, key.1)).collect();
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
