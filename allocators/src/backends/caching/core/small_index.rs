//! Free blocks of the small pool of one stream, whatever its segments are.
//!
//! In segments of 2 MiB no block is larger than that, so there is a bin for each size, and `exact` is all that is used. An
//! expandable segment has one free block over the borders of its handles, which may be of any size; the larger ones are in the
//! index of the large pool.

use super::blocks::{BlockIndex, BlockRecord};
use super::exact_index::{BINS, ExactIndex};
use super::free_index::{Fit, FreeIndex};
use super::ranged_index::RangedIndex;

/// See the [module](self).
#[derive(Clone, Debug, Default)]
pub(crate) struct SmallIndex {
    /// Those of at most 2 MiB.
    pub(super) exact: ExactIndex,
    /// Larger ones.
    larger: RangedIndex,
}

/// Whether blocks of so many units have a bin for their size.
fn is_exact(units: u32) -> bool {
    // CAST: widening.
    units as usize <= BINS
}

impl FreeIndex for SmallIndex {
    #[inline]
    fn insert(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, units: u32) {
        if is_exact(units) {
            self.exact.insert(blocks, index, units);
        } else {
            self.larger.insert(blocks, index, units);
        }
    }

    #[inline]
    fn remove(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, units: u32) {
        if is_exact(units) {
            self.exact.remove(blocks, index, units);
        } else {
            self.larger.remove(blocks, index, units);
        }
    }

    #[inline]
    fn best_fit(&mut self, blocks: &mut [BlockRecord], units: u32) -> Option<Fit> {
        let exact = if is_exact(units) { self.exact.best_fit(blocks, units) } else { None };
        exact.or_else(|| self.larger.best_fit(blocks, units))
    }

    fn in_order(&self, blocks: &[BlockRecord]) -> Vec<BlockIndex> {
        [self.exact.in_order(blocks), self.larger.in_order(blocks)].concat()
    }
}
