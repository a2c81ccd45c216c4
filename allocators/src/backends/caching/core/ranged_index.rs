//! Free blocks of the large pool of one stream: best fit through bins by size, 128 for each doubling.
//!
//! A bitmap of two levels finds the first bin that holds a block; inside a bin the blocks hang in a tree ordered by (size,
//! address), so the block that is found is the smallest that fits, the lowest of those, as in PyTorch's ordered set. The tree
//! is a treap (Seidel and Aragon, *Randomized Search Trees*, 1996) whose priorities are a hash of the record's index, so the
//! same history builds the same tree; its links live in the block records.
//!
//! *Worth.* With an ordered set (`BTreeSet`) in its place the recorded histories take 3 % (`mlp`) to 51 % (`gpt2`) more
//! instructions (`experiments/notes/caching.md`).
//!
//! *Cost.* Search, insertion and removal O(1) in the number of bins and expected O(log k) in the k blocks of one bin,
//! which seldom holds more than a few. No allocation but for the table of bins, made with the first block.

use super::blocks::{BlockIndex, BlockRecord, Links, NONE, record, record_mut};
use super::free_index::{Fit, FreeIndex};
use crate::policy::size::torch::{MIN_BLOCK, SMALL_MAX};

/// Bits of the size below its leading one that tell bins apart: as many as the bitmap has room for, because every block
/// in the bin of one that is looked for costs a look at its record.
const STEPS_LOG2: u32 = 7;
const WORD: usize = 64;

/// The bin of a block of `units`, which are not 0. Bins are open below and closed above, so that a
/// whole segment is in one bin with what is left of it when a little is cut off. Sizes up to [`SMALL_MAX`], which a large
/// pool does not have, share the first.
///
/// A float's exponent and first bits of mantissa are this very scale, so the conversion to one does the work.
#[inline(always)]
fn bin_of(units: u32) -> usize {
    // An `i64` converts in one instruction.
    let float = (i64::from(units) as f64 - 0.5).to_bits();
    // CAST: a constant of 2^11.
    const LEAST: u64 = ((SMALL_MAX / MIN_BLOCK) as f64).to_bits() >> (f64::MANTISSA_DIGITS - 1 - STEPS_LOG2);
    // CAST: below 2,700, see the test.
    (float >> (f64::MANTISSA_DIGITS - 1 - STEPS_LOG2)).saturating_sub(LEAST) as usize
}

/// The free blocks of one pool and stream. The blocks' records are in a slab that every call is given.
#[derive(Clone, Debug, Default)]
pub(crate) struct RangedIndex {
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
fn before(blocks: &[BlockRecord], a: BlockIndex, b: BlockIndex) -> bool {
    let (a, b) = (record(blocks, a), record(blocks, b));
    (a.units(), a.addr()) < (b.units(), b.addr())
}

impl RangedIndex {
    /// Makes room for a bin and those below, and puts its first block there.
    #[cold]
    fn grow(&mut self, bin: usize, first: BlockIndex) {
        let words = (bin / WORD + 1).next_power_of_two();
        debug_assert!(words <= WORD);
        self.words.resize(words, 0);
        self.roots.resize(words * WORD, NONE);
        self.roots[bin] = first;
    }

    fn take_out(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, bin: usize) {
        let links = record(blocks, index).links();
        let heir = if links.are_alone() { NONE } else { replace(blocks, index, links) };
        if links.up != NONE {
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
}

impl FreeIndex for RangedIndex {
    #[inline]
    fn insert(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, units: u32) {
        let bin = bin_of(units);
        *record_mut(blocks, index).links_mut() = Links::ALONE;
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

    #[inline]
    fn remove(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, units: u32) {
        self.take_out(blocks, index, bin_of(units));
    }

    #[inline]
    fn best_fit(&mut self, blocks: &mut [BlockRecord], units: u32) -> Option<Fit> {
        let found = |index: BlockIndex| Fit { index, units: record(blocks, index).units() };
        let bin = bin_of(units);
        let own = self.roots.get(bin).map_or(NONE, |root| first_of_at_least(blocks, *root, units));
        if own != NONE {
            return Some(found(own));
        }
        let bin = self.bin_after(bin)?;
        Some(found(first_of_at_least(blocks, self.roots[bin], 0)))
    }

    fn in_order(&self, blocks: &[BlockRecord]) -> Vec<BlockIndex> {
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

/// The first block of a tree with at least `units`, or [`NONE`].
#[inline(always)]
fn first_of_at_least(blocks: &[BlockRecord], root: BlockIndex, units: u32) -> BlockIndex {
    let (mut at, mut found) = (root, NONE);
    while at != NONE {
        let record = record(blocks, at);
        if record.units() >= units {
            found = at;
            at = record.links().left;
        } else {
            at = record.links().right;
        }
    }
    found
}

fn next_in_order(blocks: &[BlockRecord], index: BlockIndex) -> BlockIndex {
    let links = record(blocks, index).links();
    if links.right != NONE {
        return first_of_at_least(blocks, links.right, 0);
    }
    let (mut child, mut at) = (index, links.up);
    while at != NONE && record(blocks, at).links().right == child {
        (child, at) = (at, record(blocks, at).links().up);
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
fn hang(blocks: &mut [BlockRecord], root: &mut BlockIndex, hook: Hook, child: BlockIndex) {
    let parent = match hook {
        Hook::Root => {
            *root = child;
            NONE
        }
        Hook::LeftOf(parent) => {
            record_mut(blocks, parent).links_mut().left = child;
            parent
        }
        Hook::RightOf(parent) => {
            record_mut(blocks, parent).links_mut().right = child;
            parent
        }
    };
    record_mut(blocks, child).set_up(parent);
}

/// Puts what hangs below a block in its place, and returns that.
fn replace(blocks: &mut [BlockRecord], index: BlockIndex, links: Links) -> BlockIndex {
    let heir = merge(blocks, links.left, links.right);
    record_mut(blocks, heir).set_up(links.up);
    if links.up != NONE {
        let above = record_mut(blocks, links.up).links_mut();
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
fn insert_below(blocks: &mut [BlockRecord], mut root: BlockIndex, index: BlockIndex) -> BlockIndex {
    let rank = priority(index);
    let (mut at, mut hook) = (root, Hook::Root);
    while at != NONE && priority(at) > rank {
        let links = record(blocks, at).links();
        (at, hook) =
            if before(blocks, index, at) { (links.left, Hook::LeftOf(at)) } else { (links.right, Hook::RightOf(at)) };
    }
    // Its children are the blocks of the subtree before and after it.
    hang(blocks, &mut root, hook, index);
    let (mut low, mut high) = (Hook::LeftOf(index), Hook::RightOf(index));
    while at != NONE {
        let links = record(blocks, at).links();
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
fn merge(blocks: &mut [BlockRecord], mut low: BlockIndex, mut high: BlockIndex) -> BlockIndex {
    let (mut root, mut hook) = (NONE, Hook::Root);
    while low != NONE && high != NONE {
        if priority(low) > priority(high) {
            hang(blocks, &mut root, hook, low);
            (hook, low) = (Hook::RightOf(low), record(blocks, low).links().right);
        } else {
            hang(blocks, &mut root, hook, high);
            (hook, high) = (Hook::LeftOf(high), record(blocks, high).links().left);
        }
    }
    hang(blocks, &mut root, hook, if low == NONE { high } else { low });
    root
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_ascend_with_the_size_and_end_below_the_bitmap() {
        let large = (16..32).flat_map(|log2| (0..64u32).map(move |part| (64 + part) << (log2 - 6)));
        let mut last = 0;
        for units in (1..70_000).chain(large.filter(|units| *units > 70_000)) {
            let bin = bin_of(units);
            assert!(bin >= last, "{units}");
            last = bin;
        }
        assert!(bin_of(u32::MAX) < WORD * WORD);
        assert_eq!(bin_of(1), 0);
        assert_eq!(bin_of(40 << 10), bin_of((40 << 10) - 1));
    }
}
