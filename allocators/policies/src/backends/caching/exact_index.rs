//! Free blocks of the small pool of one stream: best fit in a few instructions, as each size has a bin of its own.
//!
//! A small pool has 4,096 sizes, from 512 bytes to 2 MiB. The blocks of one size are in pairing heaps by address (Fredman,
//! Sedgewick, Sleator and Tarjan, *The Pairing Heap*, 1986), linked through their records. A new block is a heap of its own before
//! the others of its bin. A search for the lowest block melds the heaps of its bin into one, whose root that block is. Most blocks
//! are removed from the middle instead, because a neighbour was freed, which changes only the adjacent links.
//!
//! *Effect.* With the index of the large pool here as well, replays of recorded traces take 5 to 18 % longer
//! (`experiments/notes/caching.md`).
//!
//! *Cost.* Insertion O(1); search and removal amortised O(log k) in the k blocks of one size, and O(1) for most. 16 KiB for the
//! bins, of which the system backs the used pages.
#![forbid(unsafe_code)]

use super::blocks::{BlockIndex, BlockSlab, Links, NONE};
use super::free_index::{BINS, Bins, FreeIndex};
use crate::policy::size::torch::{MIN_BLOCK, SMALL_SEGMENT};

const _: () = assert!(BINS as u64 == SMALL_SEGMENT / MIN_BLOCK, "each size should have a bin");

/// The free blocks of a small pool and one stream.
#[derive(Clone, Debug, Default)]
pub(super) struct ExactIndex(Bins);

/// Number of the bin for a size.
#[inline(always)]
fn bin_of(bytes: u64) -> usize {
    // CAST: a small pool has no block larger than its segments, so the remainder changes nothing; it saves checks.
    (bytes / MIN_BLOCK).wrapping_sub(1) as usize % BINS
}

impl FreeIndex for ExactIndex {
    /// Puts a block into its bin, as a heap of its own before all others.
    #[inline(always)]
    fn insert(&mut self, blocks: &mut BlockSlab, index: BlockIndex) {
        let bin = bin_of(blocks[index].bytes);
        // Whether the bin has a block is hard to predict, so there is no branch: the links of record 0 may be written.
        let next = self.0.head(bin);
        blocks[index].links = Links { left: NONE, right: next, up: NONE };
        blocks[next].links.up = index;
        self.0.set_head(bin, index);
    }

    #[inline(always)]
    fn remove(&mut self, blocks: &mut BlockSlab, index: BlockIndex) {
        let bin = bin_of(blocks[index].bytes);
        if blocks[index].links == Links::default() {
            debug_assert_eq!(self.0.head(bin), index, "a free block should be in the index");
            self.0.clear(bin);
        } else {
            self.0.set_head(bin, without(blocks, self.0.head(bin), index));
        }
    }

    #[inline(always)]
    fn best_fit(&mut self, blocks: &mut BlockSlab, bytes: u64) -> Option<BlockIndex> {
        let bin = self.0.first_from(bin_of(bytes))?;
        let first = self.0.head(bin);
        if blocks[first].links.right == NONE {
            return Some(first);
        }
        let lowest = meld_siblings(blocks, first);
        self.0.set_head(bin, lowest);
        Some(lowest)
    }
}

// Links of a heap: `left` is the first child, `right` the next sibling, and `up` the sibling before, or the parent for
// a first child. The roots of a bin's heaps are siblings; the first has no `up`.

/// Melds two heaps; returns the root.
#[inline]
fn meld(blocks: &mut BlockSlab, a: BlockIndex, b: BlockIndex) -> BlockIndex {
    let (root, child) = if blocks[a].addr < blocks[b].addr { (a, b) } else { (b, a) };
    let sibling = std::mem::replace(&mut blocks[root].links.left, child);
    (blocks[child].links.right, blocks[child].links.up) = (sibling, root);
    blocks[sibling].links.up = child;
    root
}

/// The bin's heaps without a block that has siblings; returns the first.
fn without(blocks: &mut BlockSlab, mut first: BlockIndex, index: BlockIndex) -> BlockIndex {
    let Links { left, right, up } = blocks[index].links;
    if up == NONE {
        first = right;
    } else if blocks[up].links.left == index {
        blocks[up].links.left = right;
    } else {
        debug_assert_eq!(blocks[up].links.right, index);
        blocks[up].links.right = right;
    }
    blocks[right].links.up = up;
    if left == NONE {
        return first;
    }
    let heap = meld_siblings(blocks, left);
    blocks[heap].links.right = first;
    blocks[first].links.up = heap;
    heap
}

/// Melds a list of siblings to one heap: in pairs from the first to the last, and then the pairs from the last to the first, which
/// makes removal logarithmic.
fn meld_siblings(blocks: &mut BlockSlab, first: BlockIndex) -> BlockIndex {
    let (mut at, mut pairs) = (first, NONE);
    while at != NONE {
        let (a, b) = (at, blocks[at].links.right);
        let pair = if b == NONE {
            at = NONE;
            a
        } else {
            at = blocks[b].links.right;
            meld(blocks, a, b)
        };
        // A list of pairs, last first.
        blocks[pair].links.right = pairs;
        pairs = pair;
    }
    let mut root = pairs;
    let mut rest = blocks[root].links.right;
    while rest != NONE {
        let next = blocks[rest].links.right;
        root = meld(blocks, root, rest);
        rest = next;
    }
    (blocks[root].links.right, blocks[root].links.up) = (NONE, NONE);
    root
}
