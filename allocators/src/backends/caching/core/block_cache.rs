//! The segments of one stream, cut into blocks: what `caching` does without asking a device.
//!
//! [`BlockCache::serve`] hands a free block out, and [`BlockCache::take_back`] makes one free again. Both are PyTorch's rules
//! in PyTorch's order. Freed blocks are joined with their free neighbours at once, so every free list is complete at all
//! times: there is no deferred coalescing, and nothing that a search could miss.

mod holes;

pub(crate) use holes::Cut;

use super::blocks::{BlockIndex, BlockRecord, BlockSlab, List, NONE};
use super::free_index::FreeIndex;
use super::ranged_index::RangedIndex;
use super::small_index::SmallIndex;
use super::tally::Tally;
use crate::contract::{BlockInfo, Path, PoolKind, SegmentInfo};
use crate::device::{DeviceAddr, StreamId};
use crate::policy::size::torch::MIN_BLOCK;
use crate::policy::split::Split;

/// The blocks of one stream.
#[derive(Debug, Default)]
pub(crate) struct BlockCache {
    /// What they add up to.
    tally: Tally,
    /// Every block.
    blocks: BlockSlab,
    /// Free blocks of the small pool.
    small: SmallIndex,
    /// Free blocks of the large pool.
    large: RangedIndex,
}

/// A block that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Served {
    /// Its record.
    pub(crate) index: BlockIndex,
    /// First address.
    pub(crate) addr: u64,
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// Whether it was cut off a larger block.
    pub(crate) split: bool,
}

impl Served {
    /// How the client is told that it was served.
    #[inline(always)]
    pub(crate) fn path(&self) -> Path {
        if self.split { Path::Split } else { Path::Hit }
    }
}

/// A request as the cache sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Pool that serves it.
    pub(crate) pool: PoolKind,
    /// Bytes, rounded.
    pub(crate) rounded: u64,
    /// Bytes as the client asked for them.
    pub(crate) requested: u64,
    /// Searches so far, for the age of free blocks.
    pub(crate) now: u64,
}

impl BlockCache {
    /// What the blocks add up to.
    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Every block.
    pub(crate) fn blocks(&self) -> &BlockSlab {
        &self.blocks
    }

    /// The free blocks of a pool by (size, address). Allocates.
    #[must_use]
    pub(crate) fn free_blocks(&self, pool: PoolKind) -> Vec<BlockIndex> {
        match pool {
            PoolKind::Small => self.small.in_order(self.blocks.records()),
            PoolKind::Large => self.large.in_order(self.blocks.records()),
        }
    }

    /// PyTorch's `get_free_block` and `alloc_found_block`: hands out the best fit of the request's pool, if there is one.
    #[inline(always)]
    pub(crate) fn serve(&mut self, wanted: Wanted, split: &Split) -> Option<Served> {
        match wanted.pool {
            PoolKind::Small => {
                serve(&mut self.small.exact, &mut self.blocks, &mut self.tally, PoolKind::Small, wanted, split)
            }
            PoolKind::Large => {
                serve(&mut self.large, &mut self.blocks, &mut self.tally, PoolKind::Large, wanted, split)
            }
        }
    }

    /// Hands out the first part of a segment that is new. The segment goes into no free list first, where it need not be the
    /// best fit: another one may have become free meanwhile.
    pub(crate) fn serve_from_segment(&mut self, segment: BlockRecord, wanted: Wanted, split: &Split) -> Served {
        let whole = self.blocks.insert(segment);
        self.tally.add_segment(segment.bytes());
        let served = hand_out(&mut self.blocks, &mut self.tally, segment.pool(), whole, wanted, split);
        if served.split {
            self.insert_free(whole, wanted.now);
        }
        served
    }

    /// Takes a block back from the client: reusable at once, and joined with free neighbours; true when there were any.
    /// `requested` is what the client had asked for, `now` counts searches.
    #[inline]
    pub(crate) fn take_back(&mut self, index: BlockIndex, requested: u64, now: u64) -> bool {
        let block = self.blocks.get(index);
        self.tally.take_back(block.pool(), block.bytes(), requested);
        self.make_free(index, now)
    }

    /// Takes a block back from the client that streams still use: it waits for `events`.
    pub(crate) fn defer(&mut self, index: BlockIndex, events: u32) {
        let block = self.blocks.get_mut(index);
        self.tally.take_back(block.pool(), block.bytes(), block.requested());
        self.tally.add_pending(block.bytes());
        block.set_pending(events);
    }

    /// One of the events that a block waits for is over; true when it was the last, and the block is reusable now.
    pub(crate) fn event_done(&mut self, index: BlockIndex, now: u64) -> bool {
        let block = self.blocks.get_mut(index);
        if block.event_done() > 0 {
            return false;
        }
        self.tally.remove_pending(block.bytes());
        self.make_free(index, now);
        true
    }

    /// Flags a block as used by other streams, so that its free looks at them; or takes that back.
    pub(crate) fn set_shared(&mut self, index: BlockIndex, shared: bool) {
        self.blocks.get_mut(index).set_shared(shared);
    }

    /// Lets the peaks of the counts start again.
    pub(crate) fn restart_peaks(&mut self) {
        self.tally.restart_peaks();
    }

    /// Makes a block free and joins it with free neighbours; true when there were any.
    #[inline(always)]
    fn make_free(&mut self, index: BlockIndex, now: u64) -> bool {
        match self.blocks.get(index).list() {
            List::Small => {
                make_free(&mut self.small.exact, &mut self.blocks, &mut self.tally, PoolKind::Small, index, now)
            }
            List::Large => make_free(&mut self.large, &mut self.blocks, &mut self.tally, PoolKind::Large, index, now),
            List::ExpandableSmall => {
                make_free(&mut self.small, &mut self.blocks, &mut self.tally, PoolKind::Small, index, now)
            }
        }
    }

    fn insert_free(&mut self, index: BlockIndex, freed_at: u64) {
        let (pool, units) = (self.blocks.get(index).pool(), self.blocks.get(index).units());
        match pool {
            PoolKind::Small => self.small.insert(self.blocks.records_mut(), index, units),
            PoolKind::Large => self.large.insert(self.blocks.records_mut(), index, units),
        }
        self.blocks.set_freed_at(index, freed_at);
    }

    fn remove_free(&mut self, index: BlockIndex) {
        let (pool, units) = (self.blocks.get(index).pool(), self.blocks.get(index).units());
        match pool {
            PoolKind::Small => self.small.remove(self.blocks.records_mut(), index, units),
            PoolKind::Large => self.large.remove(self.blocks.records_mut(), index, units),
        }
    }

    /// Adds a segment whose blocks are known, of which at least one is in use: sizes in order that add up to it, no two
    /// free ones beside each other, each with the bytes that the client asked for if it is in use. Returns the records of
    /// those in use.
    pub(crate) fn add_segment(&mut self, segment: BlockRecord, parts: &[(u64, Option<u64>)]) -> Vec<BlockIndex> {
        let (pool, whole) = (segment.pool(), segment.bytes());
        self.tally.add_segment(whole);
        self.tally.begin_segment(whole);
        let (mut used, mut last, mut at) = (Vec::new(), NONE, segment.addr());
        for &(bytes, requested) in parts {
            let index = self.blocks.insert(BlockRecord::segment(at, bytes, pool));
            self.blocks.link(last, index);
            (last, at) = (index, at + bytes);
            match requested {
                Some(requested) => {
                    self.blocks.get_mut(index).set_allocated(requested);
                    self.tally.hand_out(pool, bytes, requested);
                    used.push(index);
                }
                None => {
                    self.tally.add_split(pool, bytes);
                    self.insert_free(index, 0);
                }
            }
        }
        used
    }

    /// Takes a free block that is a whole segment out, record and all; `None` when it is in use by now.
    pub(crate) fn remove_segment(&mut self, index: BlockIndex, addr: u64) -> Option<BlockRecord> {
        let block = *self.blocks.find(index)?;
        if block.addr() != addr || !block.is_free() || block.is_split() {
            return None;
        }
        self.remove_free(index);
        self.blocks.remove(index);
        self.tally.remove_segment(block.bytes());
        Some(block)
    }

    /// Puts back what [`remove_segment`](Self::remove_segment) took out, as it was when there had been `freed_at`
    /// searches.
    pub(crate) fn restore_segment(&mut self, segment: BlockRecord, freed_at: u64) {
        let index = self.blocks.insert(segment);
        self.tally.add_segment(segment.bytes());
        self.insert_free(index, freed_at);
    }

    /// Segments and blocks at this moment, in no order; of an expandable segment each part that has memory is one. Allocates.
    #[must_use]
    pub(crate) fn segments(&self, stream: StreamId) -> Vec<SegmentInfo> {
        let heads = self.blocks.iter().filter(|(_, block)| block.prev() == NONE);
        let mut segments = Vec::new();
        for (head, first) in heads {
            let chain = std::iter::successors(Some(head), |at| Some(self.blocks.get(*at).next()));
            let blocks: Vec<&BlockRecord> = chain.take_while(|at| *at != NONE).map(|at| self.blocks.get(at)).collect();
            for run in blocks.split(|block| block.is_hole()).filter(|run| !run.is_empty()) {
                let info = |block: &&BlockRecord| BlockInfo {
                    addr: DeviceAddr::handed_out(block.addr()),
                    bytes: block.bytes(),
                    requested: block.requested(),
                    state: block.state(),
                };
                segments.push(SegmentInfo {
                    addr: DeviceAddr::handed_out(run[0].addr()),
                    bytes: run.iter().map(|block| block.bytes()).sum(),
                    stream,
                    pool: Some(first.pool()),
                    blocks: run.iter().map(info).collect(),
                });
            }
        }
        segments
    }
}

/// See [`BlockCache::serve`]. `pool` is a constant for the compiler, which makes one function for each pool.
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
    let fit = free.best_fit(blocks.records_mut(), units)?;
    if u64::from(fit.units) * MIN_BLOCK > split.largest(wanted.rounded) {
        return None;
    }
    free.remove(blocks.records_mut(), fit.index, fit.units);
    let served = hand_out(blocks, tally, pool, fit.index, wanted, split);
    if served.split {
        free.insert(blocks.records_mut(), fit.index, fit.units - units);
        blocks.set_freed_at(fit.index, wanted.now);
    }
    Some(served)
}

/// PyTorch's `alloc_found_block`: hands out a block that is in no free list, without what is worth keeping of it. The rest
/// keeps the record; the caller puts it into a free list.
#[inline(always)]
fn hand_out(
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    pool: PoolKind,
    found: BlockIndex,
    wanted: Wanted,
    split: &Split,
) -> Served {
    let Wanted { rounded, requested, .. } = wanted;
    let whole = blocks.get(found);
    let (addr, bytes, was_part) = (whole.addr(), whole.bytes(), whole.is_split());
    if !split.cuts(Some(pool), rounded, bytes) {
        if was_part {
            tally.remove_splits(pool, 1, bytes);
        } else {
            tally.begin_segment(bytes);
        }
        tally.hand_out(pool, bytes, requested);
        blocks.get_mut(found).set_allocated(requested);
        return Served { index: found, addr, bytes, split: false };
    }
    if was_part {
        tally.shrink_split(pool, rounded);
    } else {
        tally.begin_segment(bytes);
        tally.add_split(pool, bytes - rounded);
    }
    tally.hand_out(pool, rounded, requested);
    // CAST: less than the block has.
    let index = blocks.split_front(found, (rounded / MIN_BLOCK) as u32, requested);
    Served { index, addr, bytes: rounded, split: true }
}

/// PyTorch's `free_block` and `try_merge_blocks`: makes a block free, and one with the free blocks beside it.
#[inline(always)]
fn make_free(
    free: &mut impl FreeIndex,
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    pool: PoolKind,
    index: BlockIndex,
    now: u64,
) -> bool {
    let block = blocks.get(index);
    let (freed, prev, next) = (block.bytes(), block.prev(), block.next());
    let (below, above) = (blocks.get(prev).is_free(), blocks.get(next).is_free());
    for (neighbour, joins) in [(prev, below), (next, above)] {
        if joins {
            let units = blocks.get(neighbour).units();
            free.remove(blocks.records_mut(), neighbour, units);
            blocks.absorb(index, neighbour);
        }
    }
    blocks.get_mut(index).set_free();
    let whole = blocks.get(index);
    let (units, bytes, is_part) = (whole.units(), whole.bytes(), whole.is_split());
    free.insert(blocks.records_mut(), index, units);
    blocks.set_freed_at(index, now);
    // As PyTorch counts it: the neighbours were free parts and are gone, the whole is one if it is still a part.
    let joined = u64::from(below) + u64::from(above);
    if is_part {
        tally.join_splits(pool, freed, joined);
    } else {
        tally.remove_splits(pool, joined, bytes - freed);
        tally.end_segment(bytes);
    }
    joined > 0
}
