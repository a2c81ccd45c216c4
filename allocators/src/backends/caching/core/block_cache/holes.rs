//! Expandable segments: ranges of addresses, parts of which have no memory. They are *holes*.
//!
//! A range begins with a head, a hole of no size that is joined with nothing. So every other block of it has a neighbour in
//! front, counts as a part of its segment, and takes the paths that blocks take in segments of fixed size.
//!
//! Memory comes and goes while no lock is held, so others must not see what is on its way. What a request gathers is *claimed*:
//! out of the index and flagged as a hole, until there is enough of it or no more comes. What is to go is flagged so before it
//! goes. The free blocks beside them are joined with nothing meanwhile.

use super::{BlockCache, Served, Wanted, hand_out};
use crate::backends::caching::core::blocks::{BlockIndex, BlockRecord, BlockSlab, NONE, record};
use crate::backends::caching::core::free_index::{Fit, FreeIndex};
use crate::backends::caching::core::tally::Tally;
use crate::contract::PoolKind;
use crate::policy::size::torch::MIN_BLOCK;
use crate::policy::split::Split;

/// A part of a free block whose memory is to go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// Its record.
    pub(crate) index: BlockIndex,
    /// First address.
    pub(crate) addr: u64,
    /// Size in bytes.
    pub(crate) bytes: u64,
}

impl BlockCache {
    /// Adds a range of addresses. Returns its head, and the hole that is the rest of it.
    pub(crate) fn add_range(&mut self, addr: u64, bytes: u64, pool: PoolKind) -> (BlockIndex, BlockIndex) {
        let head = self.blocks.insert(BlockRecord::hole(addr, 0, pool));
        let hole = self.blocks.insert(BlockRecord::hole(addr, bytes, pool));
        self.blocks.link(head, hole);
        (head, hole)
    }

    /// Takes out a range that is one hole.
    pub(crate) fn remove_range(&mut self, head: BlockIndex) {
        let hole = self.blocks.get(head).next();
        debug_assert!(self.blocks.get(hole).is_hole() && self.blocks.get(hole).next() == NONE);
        self.blocks.remove(hole);
        self.blocks.remove(head);
    }

    /// Free bytes of a range of which nothing is held or pending; 0 where something is.
    pub(crate) fn idle_in(&self, head: BlockIndex) -> u64 {
        let (mut at, mut free) = (head, 0);
        while at != NONE {
            let block = self.blocks.get(at);
            match (block.is_free(), block.is_hole()) {
                (true, _) => free += block.bytes(),
                (_, true) => {}
                _ => return 0,
            }
            at = block.next();
        }
        free
    }

    /// [`serve`](Self::serve) from expandable segments.
    #[inline(always)]
    pub(crate) fn serve_expandable(&mut self, wanted: Wanted, split: &Split) -> Option<Served> {
        match wanted.pool {
            PoolKind::Small => {
                serve(&mut self.small, &mut self.blocks, &mut self.tally, PoolKind::Small, wanted, split)
            }
            PoolKind::Large => {
                serve(&mut self.large, &mut self.blocks, &mut self.tally, PoolKind::Large, wanted, split)
            }
        }
    }

    // Memory comes.

    /// Claims the first block of the run of free blocks and holes around a hole, if they have `bytes` together: PyTorch's
    /// `find_expandable_block`. Where that is the hole itself, what is claimed has no size yet.
    pub(crate) fn claim(&mut self, hole: BlockIndex, bytes: u64) -> Option<BlockIndex> {
        let first = Some(self.blocks.get(hole).prev()).filter(|prev| self.blocks.get(*prev).is_free()).unwrap_or(hole);
        let (mut at, mut room) = (first, 0);
        while room < bytes {
            let block = self.blocks.get(at);
            if !block.is_free() && !block.is_hole() {
                return None;
            }
            (at, room) = (block.next(), room + block.bytes());
        }
        let block = *self.blocks.get(first);
        if block.is_free() {
            self.remove_free(first);
            self.tally.remove_splits(block.pool(), 1, block.bytes());
            self.blocks.get_mut(first).set_hole();
            return Some(first);
        }
        let claimed = self.blocks.insert(BlockRecord::hole(block.addr(), 0, block.pool()));
        self.blocks.link(block.prev(), claimed);
        self.blocks.link(claimed, first);
        Some(claimed)
    }

    /// How much is claimed, and the addresses and size of the hole behind it; `None` where somebody took what lay there.
    pub(crate) fn claimed(&self, claimed: BlockIndex) -> (u64, Option<(u64, u64)>) {
        let block = self.blocks.get(claimed);
        let next = Some(self.blocks.get(block.next())).filter(|next| next.is_hole());
        (block.bytes(), next.map(|hole| (hole.addr(), hole.bytes())))
    }

    /// The front `bytes` of the hole behind what is claimed have memory now, PyTorch's `map_block`. Returns what is left of the
    /// hole; where nothing is, a free block behind it is claimed as well.
    pub(crate) fn extend_claim(&mut self, claimed: BlockIndex, bytes: u64) -> Option<BlockIndex> {
        self.tally.map(bytes);
        let hole = self.blocks.get(claimed).next();
        let rest = (bytes < self.blocks.get(hole).bytes()).then(|| self.blocks.cut(hole, bytes));
        self.blocks.absorb(claimed, hole);
        self.claim_free_behind(claimed);
        rest
    }

    /// Claims the free block behind what is claimed, if there is one.
    fn claim_free_behind(&mut self, claimed: BlockIndex) {
        let next = self.blocks.get(claimed).next();
        let free = *self.blocks.get(next);
        if free.is_free() {
            self.remove_free(next);
            self.tally.remove_splits(free.pool(), 1, free.bytes());
            self.blocks.absorb(claimed, next);
        }
    }

    /// Hands out the front of what is claimed; the rest is free.
    pub(crate) fn serve_claim(&mut self, claimed: BlockIndex, wanted: Wanted, split: &Split) -> Served {
        // Freed since the last memory came, and joined with nothing then.
        self.claim_free_behind(claimed);
        self.blocks.get_mut(claimed).set_free();
        let bytes = self.blocks.get(claimed).bytes();
        self.tally.add_split(wanted.pool, bytes);
        let served = hand_out(&mut self.blocks, &mut self.tally, wanted.pool, claimed, wanted, split);
        if served.split {
            self.insert_free(claimed, 0);
        }
        served
    }

    /// Lets go of what is claimed: it is free.
    pub(crate) fn drop_claim(&mut self, claimed: BlockIndex) {
        let block = *self.blocks.get(claimed);
        if block.bytes() == 0 {
            self.blocks.link(block.prev(), block.next());
            self.blocks.remove(claimed);
        } else {
            self.make_free(claimed, 0);
        }
    }

    // Memory goes.

    /// Cuts whole handles of `unit` bytes out of a free block at `addr`, those at its end, until there are `most` bytes. `None`
    /// where there are none, or somebody took the block. Handles are counted from `base` on, where the range begins.
    pub(crate) fn cut_out(&mut self, index: BlockIndex, addr: u64, base: u64, unit: u64, most: u64) -> Option<Cut> {
        let block = *self.blocks.find(index).filter(|block| block.is_free() && block.addr() == addr)?;
        let offset = addr - base;
        let (first, end) = (offset.next_multiple_of(unit), (offset + block.bytes()) / unit * unit);
        if first >= end {
            return None;
        }
        let (start, end) = (base + first.max(end.saturating_sub(most.next_multiple_of(unit))), base + end);
        self.remove_free(index);
        self.tally.remove_splits(block.pool(), 1, block.bytes());
        let middle = if addr < start { self.blocks.cut(index, start - addr) } else { index };
        let behind = (end < addr + block.bytes()).then(|| self.blocks.cut(middle, end - start));
        for left in [(addr < start).then_some(index), behind].into_iter().flatten() {
            self.tally.add_split(block.pool(), self.blocks.get(left).bytes());
            self.insert_free(left, 0);
        }
        self.blocks.get_mut(middle).set_hole();
        Some(Cut { index: middle, addr: start, bytes: end - start })
    }

    /// The front `gone` bytes of what was cut out have no memory any more; the rest is free again. Returns the hole, and where
    /// those began that are a part of it now.
    pub(crate) fn close_cut(&mut self, cut: Cut, gone: u64) -> Option<(Cut, [Option<u64>; 2])> {
        if gone == 0 {
            self.make_free(cut.index, 0);
            return None;
        }
        if gone < cut.bytes {
            let rest = self.blocks.cut(cut.index, gone);
            self.make_free(rest, 0);
        }
        self.tally.unmap(gone);
        let block = self.blocks.get(cut.index);
        let absorbed = [block.prev(), block.next()].map(|beside| {
            let beside = Some(beside).filter(|beside| self.blocks.get(*beside).is_hole_of_some_size())?;
            let addr = self.blocks.get(beside).addr();
            self.blocks.absorb(cut.index, beside);
            Some(addr)
        });
        let hole = self.blocks.get(cut.index);
        Some((Cut { index: cut.index, addr: hole.addr(), bytes: hole.bytes() }, absorbed))
    }
}

/// See [`BlockCache::serve`].
#[inline(always)]
fn serve(
    free: &mut impl FreeIndex,
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    pool: PoolKind,
    wanted: Wanted,
    split: &Split,
) -> Option<Served> {
    // Nothing is larger than the largest number of units.
    let units = u32::try_from(wanted.rounded / MIN_BLOCK).ok()?;
    let mut fit = free.best_fit(blocks.records_mut(), units)?;
    free.remove(blocks.records_mut(), fit.index, fit.units);
    let hole = hole_behind(blocks, fit);
    if hole > 0 {
        fit = pass_over(free, blocks, fit, hole);
    }
    if u64::from(fit.units) * MIN_BLOCK > split.largest(wanted.rounded) {
        free.insert(blocks.records_mut(), fit.index, fit.units);
        return None;
    }
    let served = hand_out(blocks, tally, pool, fit.index, wanted, split);
    if served.split {
        free.insert(blocks.records_mut(), fit.index, fit.units - units);
    }
    Some(served)
}

/// Units of the hole behind a block; 0 where there is none.
#[inline(always)]
fn hole_behind(blocks: &BlockSlab, fit: Fit) -> u32 {
    let records = blocks.records();
    let next = record(records, record(records, fit.index).next());
    if next.is_hole() { next.units() } else { 0 }
}

/// A block in front of a hole counts as large as both. From the best fit, which is out of the index, goes on to the next larger
/// one while that counts for less; what it ends at is out of the index, and what it passed over is back. PyTorch's
/// `get_free_block`.
#[inline(never)]
fn pass_over(free: &mut impl FreeIndex, blocks: &mut BlockSlab, mut fit: Fit, hole: u32) -> Fit {
    let mut counts_for = u64::from(fit.units) + u64::from(hole);
    // Linked as lists are in an index, which they are in no more.
    let mut passed = NONE;
    // What is smaller than those that are out of the index was too small from the start.
    while let Some(next) = free.best_fit(blocks.records_mut(), fit.units)
        && let next_counts_for = u64::from(next.units) + u64::from(hole_behind(blocks, next))
        && next_counts_for < counts_for
    {
        free.remove(blocks.records_mut(), next.index, next.units);
        blocks.get_mut(fit.index).links_mut().right = passed;
        (passed, fit, counts_for) = (fit.index, next, next_counts_for);
    }
    while passed != NONE {
        let (index, block) = (passed, blocks.get(passed));
        let units = block.units();
        passed = block.links().right;
        free.insert(blocks.records_mut(), index, units);
    }
    fit
}
