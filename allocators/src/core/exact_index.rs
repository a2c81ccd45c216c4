//! Free blocks of a small pool and one stream, and exact best fit among them.
//!
//! Each size has a bin of its own, and a bitmap of two levels finds the first that holds a block in a few instructions.
//! The blocks of one size hang in a pairing heap by address (Fredman, Sedgewick, Sleator and Tarjan, *The Pairing Heap*,
//! 1986), so the lowest is at hand. Most blocks leave it from the middle, because a neighbour was freed, and that is
//! where a pairing heap is at its best: only the neighbours in its list are touched. Its links live in the block
//! records.
//!
//! Cost: search and insertion O(1); removal amortised O(log k) in the k blocks of one size, and O(1) for most. 16 KiB for
//! the bins, of which the system backs the pages that are used.

use super::blocks::{BlockIndex, BlockRecord, Links, NONE, record, record_mut};
use super::free_index::{Fit, FreeIndex};
use super::rounding::{MIN_BLOCK, SMALL_SEGMENT};

const WORD: usize = 64;
/// Sizes from one unit to a whole segment of the pool.
const BINS: usize = WORD * WORD;
const _: () = assert!(BINS as u64 == SMALL_SEGMENT / MIN_BLOCK, "the bitmap has two levels");

/// The free blocks of a small pool and one stream.
#[derive(Clone, Debug)]
pub struct ExactIndex {
    /// Root of each bin's heap.
    roots: Box<[BlockIndex; BINS]>,
    /// A bit for each bin that holds a block.
    words: [u64; WORD],
    /// A bit for each word that is not zero.
    summary: u64,
}

impl Default for ExactIndex {
    fn default() -> Self {
        // By way of a vector, so that it is the system that zeroes the memory, when it is used.
        let roots = vec![NONE; BINS].try_into().expect("the vector should have as many elements");
        Self { roots, words: [0; WORD], summary: 0 }
    }
}

/// The bit of a number below 64.
#[inline(always)]
fn bit(slot: usize) -> u64 {
    1 << (slot % WORD)
}

/// Number of the bin for a size in bytes, a multiple of [`MIN_BLOCK`].
#[inline(always)]
fn bin_of(bytes: u64) -> usize {
    // CAST: at most 2^12.
    let bin = (bytes / MIN_BLOCK) as usize - 1;
    debug_assert!(bin < BINS);
    // A small pool has no larger blocks, so the remainder changes nothing; it saves checks.
    bin % BINS
}

impl ExactIndex {
    /// Takes a block out of a bin; its links are not reset, but those of a block that was alone are alone.
    #[inline(always)]
    fn take_out(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, bin: usize) {
        if !record(blocks, index).links().are_alone() {
            self.roots[bin] = without(blocks, self.roots[bin], index);
            return;
        }
        debug_assert_eq!(self.roots[bin], index, "a free block should be in the index");
        self.mark_empty(bin);
    }

    /// Takes the first block out of a bin. Its links are not reset.
    #[inline(always)]
    fn take_first(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, bin: usize) {
        debug_assert_eq!(self.roots[bin], index);
        // A root has nothing but children.
        let children = record(blocks, index).links().left;
        if children == NONE {
            self.mark_empty(bin);
        } else {
            self.roots[bin] = meld_siblings(blocks, children);
        }
    }

    #[inline(always)]
    fn mark_empty(&mut self, bin: usize) {
        self.roots[bin] = NONE;
        let word = self.words[bin / WORD] ^ bit(bin);
        self.words[bin / WORD] = word;
        // Whether it was the word's last is anybody's guess, so this is written without a branch.
        let without = self.summary & !bit(bin / WORD);
        self.summary = std::hint::select_unpredictable(word == 0, without, self.summary);
    }

    /// Puts a block, whose links are alone, into a bin.
    #[inline(always)]
    fn put_in(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, bin: usize) {
        debug_assert_eq!(bin, bin_of(record(blocks, index).bytes()));
        // Whether the bin holds a block is anybody's guess, so nobody asks: no block comes after every block.
        self.roots[bin] = meld(blocks, self.roots[bin], index);
        self.words[bin / WORD] |= bit(bin);
        self.summary |= bit(bin / WORD);
    }
}

impl FreeIndex for ExactIndex {
    #[inline(always)]
    fn insert(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, bytes: u64) {
        *record_mut(blocks, index).links_mut() = Links::ALONE;
        self.put_in(blocks, index, bin_of(bytes));
    }

    #[inline(always)]
    fn remove(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, bytes: u64) {
        self.take_out(blocks, index, bin_of(bytes));
    }

    #[inline(always)]
    fn resized(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, before: u64, bytes: u64) {
        self.take_out(blocks, index, bin_of(before));
        self.insert(blocks, index, bytes);
    }

    #[inline(always)]
    fn take(&mut self, blocks: &mut [BlockRecord], fit: Fit) {
        self.take_first(blocks, fit.index, bin_of(fit.bytes));
    }

    #[inline(always)]
    fn cut(&mut self, blocks: &mut [BlockRecord], fit: Fit, rest: u64) {
        self.take_first(blocks, fit.index, bin_of(fit.bytes));
        self.insert(blocks, fit.index, rest);
    }

    /// The bin tells the size, so whether the block has to be cut is known before its record is read.
    #[inline(always)]
    fn best_fit(&self, _blocks: &[BlockRecord], bytes: u64) -> Option<Fit> {
        debug_assert!(bytes > 0 && bytes <= SMALL_SEGMENT);
        let found = |bin: usize| Fit { index: self.roots[bin], bytes: (bin as u64 + 1) * MIN_BLOCK };
        let bin = bin_of(bytes);
        let (page, slot) = (bin / WORD, bin % WORD);
        let rest = self.words[page] & (u64::MAX << slot);
        if rest != 0 {
            return Some(found(page * WORD + rest.trailing_zeros() as usize % WORD));
        }
        // Twice, because all 64 bits may have to go.
        let above = self.summary & (u64::MAX << page << 1);
        if above == 0 {
            return None;
        }
        let page = above.trailing_zeros() as usize % WORD;
        Some(found(page * WORD + self.words[page].trailing_zeros() as usize % WORD))
    }

    fn in_order(&self, blocks: &[BlockRecord]) -> Vec<BlockIndex> {
        let mut out = Vec::new();
        for (page, word) in self.words.iter().enumerate() {
            for slot in (0..WORD).filter(|slot| word & (1 << slot) != 0) {
                let start = out.len();
                let mut open = vec![self.roots[page * WORD + slot]];
                while let Some(at) = open.pop() {
                    out.push(at);
                    let links = record(blocks, at).links();
                    open.extend([links.left, links.right].into_iter().filter(|link| *link != NONE));
                }
                out[start..].sort_unstable_by_key(|index| record(blocks, *index).addr());
            }
        }
        out
    }
}

// Links of a heap: `left` is the first child, `right` the next sibling, and `up` the sibling before, or the parent for
// a first child. A root has neither sibling nor `up`.

/// Joins two heaps, of which one may be empty; returns the root.
#[inline(always)]
fn meld(blocks: &mut [BlockRecord], a: BlockIndex, b: BlockIndex) -> BlockIndex {
    let (root, child) = if record(blocks, a).addr() < record(blocks, b).addr() { (a, b) } else { (b, a) };
    let sibling = std::mem::replace(&mut record_mut(blocks, root).links_mut().left, child);
    let links = record_mut(blocks, child).links_mut();
    links.right = sibling;
    links.up = root;
    record_mut(blocks, sibling).set_up(child);
    root
}

/// The heap without a block; returns the root, or [`NONE`].
fn without(blocks: &mut [BlockRecord], root: BlockIndex, index: BlockIndex) -> BlockIndex {
    let links = record(blocks, index).links();
    if index == root {
        return meld_siblings(blocks, links.left);
    }
    let before = record_mut(blocks, links.up).links_mut();
    if before.left == index {
        before.left = links.right;
    } else {
        debug_assert_eq!(before.right, index);
        before.right = links.right;
    }
    record_mut(blocks, links.right).set_up(links.up);
    if links.left == NONE {
        return root;
    }
    let orphans = meld_siblings(blocks, links.left);
    meld(blocks, root, orphans)
}

/// Joins a list of siblings to one heap: in pairs from the first to the last, and then the pairs from the last to the
/// first, which is what makes removal logarithmic.
fn meld_siblings(blocks: &mut [BlockRecord], first: BlockIndex) -> BlockIndex {
    let (mut at, mut pairs) = (first, NONE);
    while at != NONE {
        let a = at;
        let b = record(blocks, a).links().right;
        let pair = if b == NONE {
            at = NONE;
            a
        } else {
            at = record(blocks, b).links().right;
            meld(blocks, a, b)
        };
        // A list of pairs, last first.
        record_mut(blocks, pair).links_mut().right = pairs;
        pairs = pair;
    }
    let mut root = pairs;
    if root == NONE {
        return NONE;
    }
    let mut rest = record(blocks, root).links().right;
    while rest != NONE {
        let next = record(blocks, rest).links().right;
        root = meld(blocks, root, rest);
        rest = next;
    }
    let links = record_mut(blocks, root).links_mut();
    links.right = NONE;
    links.up = NONE;
    root
}
