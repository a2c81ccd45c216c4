//! Free blocks of the large pool of one stream: best fit through bins by size, 128 for each doubling.
//!
//! Inside a bin the blocks are in a tree ordered by (size, address). The tree is a treap (Seidel and Aragon, *Randomized Search
//! Trees*, 1996) whose priorities are a hash of the record's index, so the same operations build the same tree; its links are in
//! the block records.
//!
//! *Effect.* With an ordered set (`BTreeSet`) in its place replays of recorded traces take 3 % (`mlp`) to 51 % (`gpt2`) more
//! instructions (`experiments/notes/caching.md`).
//!
//! *Cost.* Search, insertion and removal O(1) in the number of bins and expected O(log k) in the k blocks of one bin, which seldom
//! has more than a few. 16 KiB for the bins, of which the system backs the used pages.
#![forbid(unsafe_code)]

use super::blocks::{BlockIndex, BlockSlab, Links, NONE};
use super::free_index::{BINS, Bins, FreeIndex};
use crate::policy::size::torch::{MIN_BLOCK, SMALL_MAX};

/// Bits of the size below its leading one that select the bin: as many as the number of bins allows, because every block in the
/// searched bin costs a read of its record.
const STEPS_LOG2: u32 = 7;

/// The bin of a block. Bins are open below and closed above, so that a segment is in one bin with its remainder after a small
/// split. Sizes up to [`SMALL_MAX`], which a large pool does not have, share the first, and those from 4 PiB on the last but one;
/// the last stays empty.
///
/// A float's exponent and first bits of mantissa are exactly this scale, so the conversion to one does the work.
#[inline(always)]
fn bin_of(bytes: u64) -> usize {
    const DROPPED: u32 = f64::MANTISSA_DIGITS - 1 - STEPS_LOG2;
    const LEAST: u64 = (SMALL_MAX as f64).to_bits() >> DROPPED;
    let middle = bytes as f64 - (MIN_BLOCK / 2) as f64;
    // CAST: below 4,096.
    (middle.to_bits() >> DROPPED).saturating_sub(LEAST).min(BINS as u64 - 2) as usize
}

/// The free blocks of one pool and stream.
#[derive(Clone, Debug, Default)]
pub(super) struct RangedIndex(Bins);

impl FreeIndex for RangedIndex {
    #[inline]
    fn insert(&mut self, blocks: &mut BlockSlab, index: BlockIndex) {
        let bin = bin_of(blocks[index].bytes);
        self.0.set_head(bin, insert(blocks, self.0.head(bin), index));
    }

    #[inline]
    fn remove(&mut self, blocks: &mut BlockSlab, index: BlockIndex) {
        let bin = bin_of(blocks[index].bytes);
        match remove(blocks, self.0.head(bin), index) {
            NONE => self.0.clear(bin),
            root => self.0.set_head(bin, root),
        }
    }

    #[inline]
    fn best_fit(&mut self, blocks: &mut BlockSlab, bytes: u64) -> Option<BlockIndex> {
        let bin = bin_of(bytes);
        match first_of_at_least(blocks, self.0.head(bin), bytes) {
            NONE => Some(first_of_at_least(blocks, self.0.head(self.0.first_from(bin + 1)?), 0)),
            own => Some(own),
        }
    }
}

fn priority(index: BlockIndex) -> u32 {
    // A bijection, so priorities are distinct.
    let mixed = index.wrapping_mul(0x9E37_79B1);
    (mixed ^ (mixed >> 15)).wrapping_mul(0x85EB_CA6B)
}

/// Whether block `a` comes before block `b`.
fn before(blocks: &BlockSlab, a: BlockIndex, b: BlockIndex) -> bool {
    (blocks[a].bytes, blocks[a].addr) < (blocks[b].bytes, blocks[b].addr)
}

/// The first block of a tree with at least `bytes`, or [`NONE`].
#[inline(always)]
fn first_of_at_least(blocks: &BlockSlab, root: BlockIndex, bytes: u64) -> BlockIndex {
    let (mut at, mut found) = (root, NONE);
    while at != NONE {
        if blocks[at].bytes >= bytes {
            found = at;
            at = blocks[at].links.left;
        } else {
            at = blocks[at].links.right;
        }
    }
    found
}

/// Adds a block to a tree; returns the root.
#[inline]
fn insert(blocks: &mut BlockSlab, root: BlockIndex, index: BlockIndex) -> BlockIndex {
    if root == NONE {
        blocks[index].links = Links::default();
        return index;
    }
    insert_below(blocks, root, index)
}

fn insert_below(blocks: &mut BlockSlab, root: BlockIndex, index: BlockIndex) -> BlockIndex {
    if priority(index) > priority(root) {
        let (left, right) = split(blocks, root, index);
        blocks[index].links = Links { left, right, up: NONE };
        return index;
    }
    let Links { left, right, .. } = blocks[root].links;
    if before(blocks, index, root) {
        blocks[root].links.left = insert(blocks, left, index);
    } else {
        blocks[root].links.right = insert(blocks, right, index);
    }
    root
}

/// Splits a tree into the blocks before and after one that is not in it.
fn split(blocks: &mut BlockSlab, root: BlockIndex, at: BlockIndex) -> (BlockIndex, BlockIndex) {
    if root == NONE {
        return (NONE, NONE);
    }
    let Links { left, right, .. } = blocks[root].links;
    if before(blocks, root, at) {
        let (low, high) = split(blocks, right, at);
        blocks[root].links.right = low;
        (root, high)
    } else {
        let (low, high) = split(blocks, left, at);
        blocks[root].links.left = high;
        (low, root)
    }
}

/// Removes a block from a tree; returns the root.
#[inline]
fn remove(blocks: &mut BlockSlab, root: BlockIndex, index: BlockIndex) -> BlockIndex {
    let Links { left, right, .. } = blocks[root].links;
    if root == index {
        return merge(blocks, left, right);
    }
    remove_below(blocks, root, index);
    root
}

fn remove_below(blocks: &mut BlockSlab, root: BlockIndex, index: BlockIndex) {
    debug_assert_ne!(root, NONE, "a free block should be in the index");
    let Links { left, right, .. } = blocks[root].links;
    if before(blocks, index, root) {
        blocks[root].links.left = remove(blocks, left, index);
    } else {
        blocks[root].links.right = remove(blocks, right, index);
    }
}

/// Joins two trees, every block of `low` before every block of `high`; returns the root.
fn merge(blocks: &mut BlockSlab, low: BlockIndex, high: BlockIndex) -> BlockIndex {
    if low == NONE || high == NONE {
        return low | high;
    }
    if priority(low) > priority(high) {
        let right = blocks[low].links.right;
        blocks[low].links.right = merge(blocks, right, high);
        low
    } else {
        let left = blocks[high].links.left;
        blocks[high].links.left = merge(blocks, low, left);
        high
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_ascend_with_the_size_and_end_below_the_last() {
        let large = (16..54).flat_map(|log2| (0..64u64).map(move |part| (64 + part) << (log2 - 6)));
        let mut last = 0;
        for units in (1..70_000).chain(large.filter(|units| *units > 70_000)) {
            let bin = bin_of(units * MIN_BLOCK);
            assert!(bin >= last, "{units}");
            last = bin;
        }
        assert!(last < BINS - 1 && bin_of(u64::MAX) < BINS - 1);
        assert_eq!(bin_of(MIN_BLOCK), 0);
        assert_eq!(bin_of(20 << 20), bin_of((20 << 20) - MIN_BLOCK));
    }
}
