//! The segments of one stream, their blocks, which of them are free, and what they add up to: what `caching` knows of a
//! stream without asking a device.

use super::blocks::{BlockIndex, BlockRecord, BlockSlab, NONE, record, record_mut, split_front};
use super::exact_index::ExactIndex;
use super::free_index::{Fit, FreeIndex};
use super::join::join;
use super::ranged_index::RangedIndex;
use super::tally::Tally;
use crate::contract::PoolKind;
use crate::contract::{BlockInfo, SegmentInfo};
use crate::device::{DeviceAddr, StreamId};
use crate::policy::rounding::{MIN_BLOCK, SMALL_MAX};

/// When a block may be split, and by whom it may be taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitRules {
    /// Blocks of at least this many bytes are never split, and smaller requests never take them; `u64::MAX` for no
    /// bound.
    pub(crate) max_split: u64,
    /// How much larger than the request such a block may be.
    pub(crate) max_non_split_rounding: u64,
}

impl SplitRules {
    /// Whether a request may take a block of `size`.
    #[inline(always)]
    fn allow(&self, bytes: u64, size: u64) -> bool {
        if self.max_split == u64::MAX {
            return true;
        }
        let oversize_for_small_request = bytes < self.max_split && size >= self.max_split;
        let too_large_for_oversize_request =
            bytes >= self.max_split && size >= bytes.saturating_add(self.max_non_split_rounding);
        !oversize_for_small_request && !too_large_for_oversize_request
    }

    /// Whether a request for `bytes` leaves a rest of a block of `size` that is worth keeping.
    #[inline(always)]
    fn split(&self, pool: PoolKind, bytes: u64, size: u64) -> bool {
        match pool {
            PoolKind::Small => size - bytes >= MIN_BLOCK,
            PoolKind::Large => bytes < self.max_split && size - bytes > SMALL_MAX,
        }
    }
}

/// The blocks of one stream.
#[derive(Debug, Default)]
pub(crate) struct BlockCache {
    /// What they add up to.
    pub(crate) tally: Tally,
    /// Every block.
    pub(crate) blocks: BlockSlab,
    /// Free blocks of the small pool.
    small: ExactIndex,
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

/// A request as the cache sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Bytes, rounded.
    pub(crate) rounded: u64,
    /// Bytes as the client asked for them.
    pub(crate) requested: u64,
    /// Lookups so far, for the age of free blocks.
    pub(crate) now: u64,
}

impl BlockCache {
    /// The free blocks of a pool by (size, address). Allocates.
    #[must_use]
    pub(crate) fn free_blocks(&self, pool: PoolKind) -> Vec<BlockIndex> {
        match pool {
            PoolKind::Small => self.small.in_order(self.blocks.records()),
            PoolKind::Large => self.large.in_order(self.blocks.records()),
        }
    }

    /// PyTorch's `get_free_block` and `alloc_found_block`: hands out the best fit of a pool, if there is one.
    #[inline]
    pub(crate) fn serve(&mut self, pool: PoolKind, wanted: Wanted, rules: &SplitRules) -> Option<Served> {
        match pool {
            PoolKind::Small => serve(&mut self.small, &mut self.blocks, &mut self.tally, pool, wanted, rules),
            PoolKind::Large => serve(&mut self.large, &mut self.blocks, &mut self.tally, pool, wanted, rules),
        }
    }

    /// Hands out the first part of a segment that is not known yet.
    pub(crate) fn serve_from_segment(&mut self, segment: BlockRecord, wanted: Wanted, rules: &SplitRules) -> Served {
        let whole = self.blocks.insert(segment);
        self.tally.add_segment(segment.bytes());
        let (pool, fit) = (segment.pool(), Fit { index: whole, units: segment.units() });
        // It is not put into the index, where it need not be the first: another segment may have become free meanwhile.
        let split = rules.split(pool, wanted.rounded, segment.bytes());
        self.blocks.reserve();
        let (records, vacant) = self.blocks.parts();
        let served = hand_out(records, vacant, &mut self.tally, pool, fit, split, wanted);
        if split {
            let rest = record(records, whole).units();
            match pool {
                PoolKind::Small => self.small.insert(records, whole, rest),
                PoolKind::Large => self.large.insert(records, whole, rest),
            }
            self.blocks.set_freed_at(whole, wanted.now);
        }
        served
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
            self.blocks.get_mut(index).set_prev(last);
            if last != NONE {
                self.blocks.get_mut(last).set_next(index);
            }
            (last, at) = (index, at + bytes);
            match requested {
                Some(requested) => {
                    self.blocks.get_mut(index).set_allocated(requested);
                    self.tally.hand_out(pool, bytes, requested);
                    used.push(index);
                }
                None => {
                    self.tally.add_split(pool, bytes);
                    self.insert_free(pool, index);
                }
            }
        }
        used
    }

    fn insert_free(&mut self, pool: PoolKind, index: BlockIndex) {
        let units = self.blocks.get(index).units();
        match pool {
            PoolKind::Small => self.small.insert(self.blocks.parts().0, index, units),
            PoolKind::Large => self.large.insert(self.blocks.parts().0, index, units),
        }
    }

    /// Takes a block back from the client: reusable at once, and joined with free neighbours; true when it was joined.
    /// `requested` is what the client had asked for, `now` counts lookups.
    #[inline]
    pub(crate) fn take_back(&mut self, index: BlockIndex, requested: u64, now: u64) -> bool {
        let block = self.blocks.get(index);
        self.tally.take_back(block.pool(), block.bytes(), requested);
        self.make_free(index, now)
    }

    /// Makes a block free and joins it with free neighbours; true when there were any.
    #[inline]
    fn make_free(&mut self, index: BlockIndex, now: u64) -> bool {
        let block = self.blocks.get(index);
        let (pool, block) = (block.pool(), block.extent());
        match pool {
            PoolKind::Small => join(&mut self.small, &mut self.blocks, &mut self.tally, pool, index, block, now),
            PoolKind::Large => join(&mut self.large, &mut self.blocks, &mut self.tally, pool, index, block, now),
        }
    }

    /// Takes a block back from the client that streams still use: it waits for `events`.
    pub(crate) fn defer(&mut self, index: BlockIndex, events: u32) {
        let block = self.blocks.get_mut(index);
        self.tally.take_back(block.pool(), block.bytes(), block.requested());
        self.tally.add_pending(block.bytes());
        block.set_pending(events);
    }

    /// Makes a block that waited reusable.
    pub(crate) fn release_pending(&mut self, index: BlockIndex, now: u64) {
        let block = self.blocks.get(index);
        self.tally.remove_pending(block.bytes());
        self.make_free(index, now);
    }

    /// Takes a free block that is a whole segment out, record and all; `None` when it is in use by now.
    pub(crate) fn remove_segment(&mut self, index: BlockIndex, addr: u64) -> Option<BlockRecord> {
        let block = *self.blocks.find(index)?;
        if block.addr() != addr || !block.is_free() || block.is_split() {
            return None;
        }
        match block.pool() {
            PoolKind::Small => self.small.remove(self.blocks.parts().0, index, block.units()),
            PoolKind::Large => self.large.remove(self.blocks.parts().0, index, block.units()),
        }
        self.blocks.remove(index);
        self.tally.remove_segment(block.bytes());
        Some(block)
    }

    /// Puts back what [`remove_segment`](Self::remove_segment) took out, as it was when there had been `freed_at`
    /// lookups.
    pub(crate) fn restore_segment(&mut self, segment: BlockRecord, freed_at: u64) {
        let index = self.blocks.insert(segment);
        self.blocks.set_freed_at(index, freed_at);
        self.tally.add_segment(segment.bytes());
        self.insert_free(segment.pool(), index);
    }

    /// Segments and blocks at this moment, in no order. Allocates.
    #[must_use]
    pub(crate) fn segments(&self, stream: StreamId) -> Vec<SegmentInfo> {
        let heads = self.blocks.iter().filter(|(_, block)| block.prev() == NONE);
        let segment = |(head, first): (BlockIndex, &BlockRecord)| {
            let (mut blocks, mut at, mut bytes) = (Vec::new(), head, 0);
            while at != NONE {
                let block = self.blocks.get(at);
                blocks.push(BlockInfo {
                    addr: address(block.addr()),
                    bytes: block.bytes(),
                    requested: block.requested(),
                    state: block.state(),
                });
                bytes += block.bytes();
                at = block.next();
            }
            SegmentInfo { addr: address(first.addr()), bytes, stream, pool: Some(first.pool()), blocks }
        };
        heads.map(segment).collect()
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
    rules: &SplitRules,
) -> Option<Served> {
    // Nothing is larger than the largest number of units.
    let units = u32::try_from(wanted.rounded / MIN_BLOCK).ok()?;
    // Before anything else, so that the records stay where they are.
    blocks.reserve();
    let (records, vacant) = blocks.parts();
    let fit = free.best_fit(records, units)?;
    let bytes = u64::from(fit.units) * MIN_BLOCK;
    if !rules.allow(wanted.rounded, bytes) {
        return None;
    }
    let split = rules.split(pool, wanted.rounded, bytes);
    if !split {
        free.take(records, fit);
    }
    let served = hand_out(records, vacant, tally, pool, fit, split, wanted);
    if split {
        free.cut(records, fit, fit.units - units);
        blocks.set_freed_at(fit.index, wanted.now);
    }
    Some(served)
}

/// PyTorch's `alloc_found_block`: cuts the request off a free block if it is to be split, for which there has to be a
/// vacant record, and accounts for what is handed out. The index is the caller's affair.
#[inline(always)]
fn hand_out(
    records: &mut [BlockRecord],
    vacant: &mut BlockIndex,
    tally: &mut Tally,
    pool: PoolKind,
    fit: Fit,
    split: bool,
    wanted: Wanted,
) -> Served {
    let Wanted { rounded, requested, .. } = wanted;
    let found = fit.index;
    let whole = record_mut(records, found);
    debug_assert_eq!(whole.units(), fit.units);
    let (addr, bytes, was_split) = (whole.addr(), u64::from(fit.units) * MIN_BLOCK, whole.is_split());
    if split {
        // CAST: less than the block has.
        let front = split_front(records, vacant, found, (rounded / MIN_BLOCK) as u32, requested);
        if was_split {
            tally.shrink_split(pool, rounded);
        } else {
            tally.begin_segment(bytes);
            tally.add_split(pool, bytes - rounded);
        }
        tally.hand_out(pool, rounded, requested);
        return Served { index: front, addr, bytes: rounded, split };
    }
    whole.set_allocated(requested);
    if was_split {
        tally.remove_splits(pool, 1, bytes);
    } else {
        tally.begin_segment(bytes);
    }
    tally.hand_out(pool, bytes, requested);
    Served { index: found, addr, bytes, split }
}

/// An address out of a record.
///
/// # Panics
/// When it is zero, where no segment lies.
#[must_use]
#[inline]
pub(crate) fn address(addr: u64) -> DeviceAddr {
    DeviceAddr::new(addr).expect("blocks lie in segments, whose addresses are not zero")
}
