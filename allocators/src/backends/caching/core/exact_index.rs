//! Free blocks of the small pool of one stream: best fit in a few instructions, as each size has a bin of its own.
//!
//! A small pool knows 4,096 sizes, from 512 bytes to 2 MiB. A bitmap of two levels finds the first bin from a size on that
//! holds a block. The blocks of one size hang in pairing heaps by address (Fredman, Sedgewick, Sleator and Tarjan, *The
//! Pairing Heap*, 1986), linked through their records. A block that comes is a heap of its own before the others of its bin;
//! they are melded into one, whose root is the lowest block, when somebody asks for that. Most blocks leave from the middle
//! instead, because a neighbour was freed, and there only the links beside them are touched.
//!
//! *Worth.* With the index of the large pool here as well, the recorded histories take 5 to 18 % longer, in 17 to 31 % more
//! instructions; with an ordered set (`BTreeSet`) in both pools 1.5 to 2.1 times as many (`experiments/notes/caching.md`). That
//! heaps are melded late is the pairing heap's own rule. It gains nothing on the histories, and 6 to 8 % on mixed sizes.
//!
//! *Cost.* Insertion O(1); search and removal amortised O(log k) in the k blocks of one size, and O(1) for most. 16 KiB for
//! the bins, of which the system backs the pages that are used.

use super::blocks::{BlockIndex, BlockRecord, Links, NONE, record, record_mut};
use super::free_index::{Fit, FreeIndex};
use crate::policy::size::torch::{MIN_BLOCK, SMALL_SEGMENT};
use std::hint::select_unpredictable;

const WORD: usize = 64;
/// Sizes from one unit to a whole segment of the pool.
pub(super) const BINS: usize = WORD * WORD;
const _: () = assert!(BINS as u64 == SMALL_SEGMENT / MIN_BLOCK, "the bitmap has two levels");

/// The free blocks of a small pool and one stream.
#[derive(Clone, Debug)]
pub(crate) struct ExactIndex {
    /// First heap of each bin.
    heaps: Box<[BlockIndex; BINS]>,
    /// A bit for each bin that holds a block.
    words: [u64; WORD],
    /// A bit for each word that is not zero.
    summary: u64,
}

impl Default for ExactIndex {
    fn default() -> Self {
        // By way of a vector, so that it is the system that zeroes the memory, when it is used.
        let heaps = vec![NONE; BINS].try_into().expect("the vector should have as many elements");
        Self { heaps, words: [0; WORD], summary: 0 }
    }
}

/// The bit of a number below 64.
#[inline(always)]
fn bit(slot: usize) -> u64 {
    1 << (slot % WORD)
}

/// Number of the bin for a size.
#[inline(always)]
fn bin_of(units: u32) -> usize {
    // CAST: widening.
    let bin = units.wrapping_sub(1) as usize;
    // A small pool has no larger blocks, so the remainder changes nothing but for no block, of no units; it saves checks.
    bin % BINS
}

impl ExactIndex {
    /// The first bin from `bin` on that holds a block.
    #[inline(always)]
    fn first_from(&self, bin: usize) -> Option<usize> {
        let (page, slot) = (bin / WORD, bin % WORD);
        let own = self.words[page] & (u64::MAX << slot);
        // Shifted twice, because all 64 bits may have to go. Both words are read, so that no branch is predicted wrongly.
        let above = self.summary & (u64::MAX << page << 1);
        if own == 0 && above == 0 {
            return None;
        }
        let next = above.trailing_zeros() as usize % WORD;
        let other = self.words[next];
        let page = select_unpredictable(own != 0, page, next);
        let word = select_unpredictable(own != 0, own, other);
        Some(page * WORD + word.trailing_zeros() as usize % WORD)
    }

    /// The lowest block of a bin that holds one.
    #[inline(always)]
    fn lowest(&mut self, blocks: &mut [BlockRecord], bin: usize) -> BlockIndex {
        let first = self.heaps[bin];
        if record(blocks, first).links().right == NONE {
            return first;
        }
        let lowest = meld_siblings(blocks, first);
        self.heaps[bin] = lowest;
        lowest
    }
}

impl FreeIndex for ExactIndex {
    /// Puts a block into its bin, as a heap of its own before all others.
    #[inline(always)]
    fn insert(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, units: u32) {
        let bin = bin_of(units);
        // Whether the bin holds a block is hard to predict, so there is no branch: the links of no block may be written.
        let next = std::mem::replace(&mut self.heaps[bin], index);
        *record_mut(blocks, index).links_mut() = Links { left: NONE, right: next, up: NONE };
        record_mut(blocks, next).set_up(index);
        self.words[bin / WORD] |= bit(bin);
        self.summary |= bit(bin / WORD);
    }

    #[inline(always)]
    fn remove(&mut self, blocks: &mut [BlockRecord], index: BlockIndex, units: u32) {
        let bin = bin_of(units);
        if !record(blocks, index).links().are_alone() {
            self.heaps[bin] = without(blocks, self.heaps[bin], index);
            return;
        }
        debug_assert_eq!(self.heaps[bin], index, "a free block should be in the index");
        self.heaps[bin] = NONE;
        let word = self.words[bin / WORD] ^ bit(bin);
        self.words[bin / WORD] = word;
        // Whether it was the word's last is hard to predict, so this is written without a branch.
        self.summary ^= u64::from(word == 0) << (bin / WORD);
    }

    /// The bin tells the size, so whether the block has to be cut is known before its record is read.
    #[inline(always)]
    fn best_fit(&mut self, blocks: &mut [BlockRecord], units: u32) -> Option<Fit> {
        let bin = self.first_from(bin_of(units))?;
        // CAST: at most 2^12.
        Some(Fit { index: self.lowest(blocks, bin), units: bin as u32 + 1 })
    }

    fn in_order(&self, blocks: &[BlockRecord]) -> Vec<BlockIndex> {
        let mut out = Vec::new();
        for (page, word) in self.words.iter().enumerate() {
            for slot in (0..WORD).filter(|slot| word & (1 << slot) != 0) {
                let start = out.len();
                let mut open = vec![self.heaps[page * WORD + slot]];
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
// a first child. The roots of a bin's heaps are siblings; the first has no `up`.

/// Joins two heaps; returns the root.
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

/// The bin's heaps without a block that is not alone there; returns the first.
fn without(blocks: &mut [BlockRecord], first: BlockIndex, index: BlockIndex) -> BlockIndex {
    let links = record(blocks, index).links();
    let mut first = first;
    if links.up == NONE {
        first = links.right;
    } else {
        let before = record_mut(blocks, links.up).links_mut();
        if before.left == index {
            before.left = links.right;
        } else {
            debug_assert_eq!(before.right, index);
            before.right = links.right;
        }
    }
    record_mut(blocks, links.right).set_up(links.up);
    if links.left == NONE {
        return first;
    }
    let heap = meld_siblings(blocks, links.left);
    record_mut(blocks, heap).links_mut().right = first;
    record_mut(blocks, first).set_up(heap);
    heap
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
