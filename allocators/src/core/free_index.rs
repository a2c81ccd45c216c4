//! Free blocks of one pool and stream, and exact best fit among them.
//!
//! Blocks lie in bins by size: one bin for each multiple of 512 bytes up to 16 KiB, then 32 bins for each doubling. A
//! bitmap of two levels finds the first bin that holds a block; inside a bin the blocks hang in a tree ordered by
//! (size, address), so the block that is found is the smallest that fits, the lowest of those, as in PyTorch's ordered
//! set. The tree is a treap (Seidel and Aragon, *Randomized Search Trees*, 1996) whose priorities are a hash of the
//! record's index, so the same history builds the same tree; its links live in the block records.
//!
//! Cost: search, insertion and removal O(1) in the number of bins and expected O(log k) in the k blocks of one bin,
//! which seldom holds more than a few. No allocation but for the table of bins, made with the first block.

use super::blocks::{BlockIndex, BlockSlab, NONE, TreeLinks};
use super::rounding::MIN_BLOCK;

/// Bits of the size below its leading one that tell bins apart.
const STEPS_LOG2: u32 = 5;
const WORD: usize = 64;

/// The bin of a block of `bytes`, a multiple of [`MIN_BLOCK`] and not 0. Bins are open below and closed above, so that a
/// whole segment is in one bin with what is left of it when a little is cut off.
///
/// A float's exponent and first bits of mantissa are this very scale, so the conversion to one does the work.
#[inline(always)]
fn bin_of(bytes: u64) -> u16 {
    let units = bytes / MIN_BLOCK;
    // CAST: at most 2^53, where floats are exact; an `i64` converts in one instruction.
    let float = (units.cast_signed() as f64 - 0.5).to_bits();
    const ONE_HALF: u64 = 0.5f64.to_bits() >> (f64::MANTISSA_DIGITS - 1 - STEPS_LOG2);
    // CAST: below 2,000, see the test.
    ((float >> (f64::MANTISSA_DIGITS - 1 - STEPS_LOG2)) - ONE_HALF) as u16
}

/// The free blocks of one pool and stream. The blocks' records are in a slab that every call is given.
#[derive(Clone, Debug, Default)]
pub struct FreeIndex {
    /// Root of each bin's tree.
    roots: Vec<BlockIndex>,
    /// A bit for each bin that holds a block.
    words: Vec<u64>,
    /// A bit for each word that is not zero.
    summary: u64,
}

fn priority(index: BlockIndex) -> u32 {
    // A bijection, so priorities are distinct.
    let mixed = index.wrapping_mul(0x9E37_79B1);
    (mixed ^ (mixed >> 15)).wrapping_mul(0x85EB_CA6B)
}

/// Whether block `a` comes before block `b`.
#[inline]
fn before(blocks: &BlockSlab, a: BlockIndex, b: BlockIndex) -> bool {
    let (a, b) = (blocks.get(a), blocks.get(b));
    (a.bytes, a.addr) < (b.bytes, b.addr)
}

impl FreeIndex {
    /// Adds a block.
    #[inline]
    pub fn insert(&mut self, blocks: &mut BlockSlab, index: BlockIndex) {
        let record = blocks.get_mut(index);
        record.bin = bin_of(record.bytes);
        record.links = TreeLinks::ALONE;
        let bin = usize::from(record.bin);
        match self.roots.get_mut(bin) {
            Some(root) if *root == NONE => *root = index,
            Some(root) => {
                *root = insert_below(blocks, *root, index);
                return;
            }
            None => self.grow(bin, index),
        }
        self.words[bin / WORD] |= 1 << (bin % WORD);
        self.summary |= 1 << (bin / WORD);
    }

    /// Makes room for a bin and those below, and puts its first block there.
    #[cold]
    fn grow(&mut self, bin: usize, first: BlockIndex) {
        let words = (bin / WORD + 1).next_power_of_two();
        debug_assert!(words <= WORD);
        self.words.resize(words, 0);
        self.roots.resize(words * WORD, NONE);
        self.roots[bin] = first;
    }

    /// Removes a block that is in the index, whatever its size has become.
    #[inline]
    pub fn remove(&mut self, blocks: &mut BlockSlab, index: BlockIndex) {
        let (links, bin) = (blocks.get(index).links, usize::from(blocks.get(index).bin));
        let heir = if links == TreeLinks::ALONE { NONE } else { replace(blocks, index, links) };
        if links.parent != NONE {
            return;
        }
        debug_assert_eq!(self.roots[bin], index, "a free block should be in the index");
        self.roots[bin] = heir;
        if heir == NONE {
            let word = &mut self.words[bin / WORD];
            *word &= !(1 << (bin % WORD));
            if *word == 0 {
                self.summary &= !(1 << (bin / WORD));
            }
        }
    }

    /// Puts a block that is in the index where its address and size of today belong.
    #[inline(always)]
    pub fn resized(&mut self, blocks: &mut BlockSlab, index: BlockIndex) {
        let record = blocks.get(index);
        // Alone in its bin it stays where it is.
        if record.links != TreeLinks::ALONE || bin_of(record.bytes) != record.bin {
            self.relocate(blocks, index);
        }
    }

    fn relocate(&mut self, blocks: &mut BlockSlab, index: BlockIndex) {
        self.remove(blocks, index);
        self.insert(blocks, index);
    }

    /// Best fit: the smallest block with at least `bytes`, ties to the lowest address.
    #[must_use]
    #[inline(always)]
    pub fn best_fit(&self, blocks: &BlockSlab, bytes: u64) -> Option<BlockIndex> {
        let bin = usize::from(bin_of(bytes));
        let own = self.roots.get(bin).map_or(NONE, |root| first_of_at_least(blocks, *root, bytes));
        if own != NONE {
            return Some(own);
        }
        let bin = self.bin_after(bin)?;
        Some(first_of_at_least(blocks, self.roots[bin], 0))
    }

    /// The first bin above `bin` that holds a block.
    #[inline(always)]
    fn bin_after(&self, bin: usize) -> Option<usize> {
        let start = bin + 1;
        let word = start / WORD;
        let rest = self.words.get(word).map_or(0, |bits| bits & (u64::MAX << (start % WORD)));
        if rest != 0 {
            return Some(word * WORD + rest.trailing_zeros() as usize);
        }
        // Twice, because all 64 bits may have to go.
        let above = self.summary & (u64::MAX << (word % WORD) << 1);
        let word = (above != 0).then(|| above.trailing_zeros() as usize)?;
        Some(word * WORD + self.words[word].trailing_zeros() as usize)
    }

    /// Every block by (size, address). Allocates.
    #[must_use]
    pub fn in_order(&self, blocks: &BlockSlab) -> Vec<BlockIndex> {
        let mut out = Vec::new();
        for root in self.roots.iter().copied().filter(|root| *root != NONE) {
            let mut at = first_of_at_least(blocks, root, 0);
            while at != NONE {
                out.push(at);
                at = next_in_order(blocks, at);
            }
        }
        out
    }
}

/// The first block of a tree with at least `bytes`, or [`NONE`].
#[inline(always)]
fn first_of_at_least(blocks: &BlockSlab, root: BlockIndex, bytes: u64) -> BlockIndex {
    let (mut at, mut found) = (root, NONE);
    while at != NONE {
        let record = blocks.get(at);
        if record.bytes >= bytes {
            found = at;
            at = record.links.left;
        } else {
            at = record.links.right;
        }
    }
    found
}

fn next_in_order(blocks: &BlockSlab, index: BlockIndex) -> BlockIndex {
    let links = blocks.get(index).links;
    if links.right != NONE {
        return first_of_at_least(blocks, links.right, 0);
    }
    let (mut child, mut at) = (index, links.parent);
    while at != NONE && blocks.get(at).links.right == child {
        (child, at) = (at, blocks.get(at).links.parent);
    }
    at
}

/// Where a subtree hangs.
#[derive(Clone, Copy)]
enum Hook {
    /// Nowhere: it is the root that the caller stores.
    Root,
    LeftOf(BlockIndex),
    RightOf(BlockIndex),
}

/// Hangs a subtree on its hook.
#[inline]
fn hang(blocks: &mut BlockSlab, root: &mut BlockIndex, hook: Hook, child: BlockIndex) {
    let parent = match hook {
        Hook::Root => {
            *root = child;
            NONE
        }
        Hook::LeftOf(parent) => {
            blocks.get_mut(parent).links.left = child;
            parent
        }
        Hook::RightOf(parent) => {
            blocks.get_mut(parent).links.right = child;
            parent
        }
    };
    if child != NONE {
        blocks.get_mut(child).links.parent = parent;
    }
}

/// Puts what hangs below a block in its place, and returns that.
fn replace(blocks: &mut BlockSlab, index: BlockIndex, links: TreeLinks) -> BlockIndex {
    let heir = merge(blocks, links.left, links.right);
    if heir != NONE {
        blocks.get_mut(heir).links.parent = links.parent;
    }
    if links.parent != NONE {
        let above = &mut blocks.get_mut(links.parent).links;
        if above.left == index {
            above.left = heir;
        } else {
            debug_assert_eq!(above.right, index);
            above.right = heir;
        }
    }
    heir
}

/// Adds a block to a tree that is not empty; returns the root.
fn insert_below(blocks: &mut BlockSlab, mut root: BlockIndex, index: BlockIndex) -> BlockIndex {
    let rank = priority(index);
    let (mut at, mut hook) = (root, Hook::Root);
    while at != NONE && priority(at) > rank {
        let links = blocks.get(at).links;
        (at, hook) =
            if before(blocks, index, at) { (links.left, Hook::LeftOf(at)) } else { (links.right, Hook::RightOf(at)) };
    }
    // Its children are the blocks of the subtree before and after it.
    hang(blocks, &mut root, hook, index);
    let (mut low, mut high) = (Hook::LeftOf(index), Hook::RightOf(index));
    while at != NONE {
        let links = blocks.get(at).links;
        if before(blocks, at, index) {
            hang(blocks, &mut root, low, at);
            (low, at) = (Hook::RightOf(at), links.right);
        } else {
            hang(blocks, &mut root, high, at);
            (high, at) = (Hook::LeftOf(at), links.left);
        }
    }
    hang(blocks, &mut root, low, NONE);
    hang(blocks, &mut root, high, NONE);
    root
}

/// Joins two trees, every block of `low` before every block of `high`; returns the root.
#[inline]
fn merge(blocks: &mut BlockSlab, mut low: BlockIndex, mut high: BlockIndex) -> BlockIndex {
    let (mut root, mut hook) = (NONE, Hook::Root);
    while low != NONE && high != NONE {
        if priority(low) > priority(high) {
            hang(blocks, &mut root, hook, low);
            (hook, low) = (Hook::RightOf(low), blocks.get(low).links.right);
        } else {
            hang(blocks, &mut root, hook, high);
            (hook, high) = (Hook::LeftOf(high), blocks.get(high).links.left);
        }
    }
    hang(blocks, &mut root, hook, if low == NONE { high } else { low });
    root
}

#[cfg(test)]
mod tests {
    use super::super::blocks::BlockRecord;
    use super::*;
    use crate::stats::PoolKind;
    use std::collections::BTreeSet;

    fn add(blocks: &mut BlockSlab, index: &mut FreeIndex, bytes: u64, addr: u64) -> BlockIndex {
        let block = blocks.insert(BlockRecord::segment(addr, bytes, PoolKind::Large));
        index.insert(blocks, block);
        block
    }

    #[test]
    fn bins_ascend_with_the_size_and_end_below_the_bitmap() {
        let sizes = (1..70_000u64).map(|units| units * MIN_BLOCK);
        let large = (16..53).flat_map(|log2| (0..64u64).map(move |part| ((64 + part) << (log2 - 6)) * MIN_BLOCK));
        let mut last = 0;
        for bytes in sizes.chain(large.filter(|bytes| *bytes > 70_000 * MIN_BLOCK)) {
            let bin = bin_of(bytes);
            assert!(bin >= last, "{bytes}");
            last = bin;
        }
        assert!(usize::from(bin_of(1 << 62)) < WORD * WORD);
        assert_eq!(bin_of(MIN_BLOCK), 0);
        let exact: Vec<u16> = (1..=32).map(|units| bin_of(units * MIN_BLOCK)).collect();
        assert!(exact.windows(2).all(|pair| pair[0] < pair[1]), "{exact:?}");
        assert_eq!(bin_of(2 << 20), bin_of((2 << 20) - MIN_BLOCK));
    }

    #[test]
    fn best_fit_is_smallest_then_lowest() {
        let (mut blocks, mut index) = (BlockSlab::default(), FreeIndex::default());
        assert_eq!(index.best_fit(&blocks, 512), None);
        let large = add(&mut blocks, &mut index, 3 * MIN_BLOCK, 10);
        let high = add(&mut blocks, &mut index, 2 * MIN_BLOCK, 30);
        let low = add(&mut blocks, &mut index, 2 * MIN_BLOCK, 20);
        assert_eq!(index.best_fit(&blocks, 2 * MIN_BLOCK), Some(low));
        assert_eq!(index.best_fit(&blocks, 3 * MIN_BLOCK), Some(large));
        assert_eq!(index.best_fit(&blocks, 4 * MIN_BLOCK), None);
        assert_eq!(index.in_order(&blocks), [low, high, large]);
        index.remove(&mut blocks, low);
        assert_eq!(index.best_fit(&blocks, MIN_BLOCK), Some(high));
    }

    /// Against an ordered set, with sizes that crowd into few bins and sizes that spread over all.
    #[test]
    fn agrees_with_an_ordered_set() {
        for spread in [1u64, 40, 1 << 12, 1 << 40] {
            let (mut blocks, mut index) = (BlockSlab::default(), FreeIndex::default());
            let mut model: BTreeSet<(u64, u64, BlockIndex)> = BTreeSet::new();
            let mut seed = spread;
            let mut random = |below: u64| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (seed >> 11) % below
            };
            for step in 0..20_000u64 {
                // Grows, then shrinks, and so on.
                if model.is_empty() || random(8) < if step / 4_000 % 2 == 0 { 5 } else { 3 } {
                    let (bytes, addr) = ((1 + random(spread)) * MIN_BLOCK, 1 + random(1 << 40));
                    let block = add(&mut blocks, &mut index, bytes, addr);
                    model.insert((bytes, addr, block));
                } else {
                    let pick = (random(spread + 1) * MIN_BLOCK, random(1 << 40), 0);
                    let key = *model.range(pick..).next().or(model.first()).expect("the model should not be empty");
                    model.remove(&key);
                    index.remove(&mut blocks, key.2);
                    blocks.remove(key.2);
                }
                // One of them grows or shrinks.
                if let Some(key) = model.range((random(spread) * MIN_BLOCK, 0, 0)..).next().copied() {
                    let bytes = if random(2) == 0 { key.0 + MIN_BLOCK } else { (1 + random(spread)) * MIN_BLOCK };
                    blocks.get_mut(key.2).bytes = bytes;
                    index.resized(&mut blocks, key.2);
                    model.remove(&key);
                    model.insert((bytes, key.1, key.2));
                }
                let bytes = (1 + random(spread)) * MIN_BLOCK;
                let expected = model.range((bytes, 0, 0)..).next().map(|key| (key.0, key.1));
                let found = index.best_fit(&blocks, bytes).map(|block| blocks.get(block));
                assert_eq!(found.map(|block| (block.bytes, block.addr)), expected, "{bytes} bytes at step {step}");
            }
            let order: Vec<(u64, u64)> = index
                .in_order(&blocks)
                .iter()
                .map(|block| (blocks.get(*block).bytes, blocks.get(*block).addr))
                .collect();
            let expected: Vec<(u64, u64)> = model.iter().map(|key| (key.0, key.1)).collect();
            assert_eq!(order, expected);
        }
    }
}
