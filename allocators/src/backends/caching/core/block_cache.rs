//! The segments of one stream, their blocks, which of them are free, and what they add up to: what `caching` knows of a
//! stream without asking a device.

use super::blocks::{BlockIndex, BlockRecord, BlockSlab, NONE, record, record_mut, split_front};
use super::exact_index::ExactIndex;
use super::free_index::{Fit, FreeIndex};
use super::join::{FEW, join, join_blindly};
use super::ranged_index::RangedIndex;
use super::repeat::Repeat;
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
    /// Every block may be split, and taken by any request.
    pub(crate) const NONE: Self = Self { max_split: u64::MAX, max_non_split_rounding: 0 };

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
    /// What is not on the books; nothing but [`serve_small`](Self::serve_small) and
    /// [`take_back_small`](Self::take_back_small) may be called, nor anything read, before it was
    /// [settled](Self::settle).
    repeat: Repeat,
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

// Each operation is compiled once for each pool. The small pool's is part of its caller; the large pool's is a call, so
// that it takes no registers and no room where it is not needed.
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
    #[inline(always)]
    pub(crate) fn serve(&mut self, pool: PoolKind, wanted: Wanted, rules: &SplitRules) -> Option<Served> {
        debug_assert!(!self.repeat.owes());
        match pool {
            PoolKind::Small => {
                serve(&mut self.small, &mut self.blocks, &mut self.tally, PoolKind::Small, wanted, rules)
            }
            PoolKind::Large => self.serve_large(wanted, rules),
        }
    }

    /// The same for the small pool, without rules and without a count of lookups. `rounded` must follow from `requested`.
    #[inline(always)]
    pub(crate) fn serve_small(&mut self, rounded: u64, requested: u64) -> Option<Served> {
        if self.repeat.owes() {
            if let Some((index, split)) = self.repeat.give_again(requested) {
                let addr = self.blocks.get(index).addr();
                return Some(Served { index, addr, bytes: rounded, split });
            }
            self.carry_out();
        }
        let wanted = Wanted { rounded, requested, now: 0 };
        let rules = &SplitRules::NONE;
        let served = serve(&mut self.small, &mut self.blocks, &mut self.tally, PoolKind::Small, wanted, rules)?;
        self.repeat.served(served.index, served.split, requested);
        Some(served)
    }

    /// Puts on the books what was only counted. Cheap when there is nothing.
    #[inline(always)]
    pub(crate) fn settle(&mut self) {
        if self.repeat.owes() {
            self.carry_out();
        }
        self.repeat.forget();
    }

    /// All rounds are alike, so one is carried out and the sums of the others are added to it.
    #[cold]
    #[inline(never)]
    fn carry_out(&mut self) {
        let Some(outstanding) = self.repeat.settle() else { return };
        let index = outstanding.index;
        let block = *self.blocks.get(index);
        let requested = block.requested();
        if outstanding.rounds > 0 {
            let before = self.tally.increases();
            self.take_back(index, requested, 0);
            let wanted = Wanted { rounded: block.bytes(), requested, now: 0 };
            let served = self.serve(PoolKind::Small, wanted, &SplitRules::NONE);
            debug_assert_eq!(served.map(|served| (served.index, served.addr)), Some((index, block.addr())));
            self.tally.repeat_increases(&before, outstanding.rounds - 1);
        }
        if outstanding.held {
            self.take_back(index, requested, 0);
        }
    }

    /// The same for the large pool.
    #[inline(never)]
    pub(crate) fn serve_large(&mut self, wanted: Wanted, rules: &SplitRules) -> Option<Served> {
        debug_assert!(!self.repeat.owes());
        serve(&mut self.large, &mut self.blocks, &mut self.tally, PoolKind::Large, wanted, rules)
    }

    /// Hands out the first part of a segment that is not known yet.
    pub(crate) fn serve_from_segment(&mut self, segment: BlockRecord, wanted: Wanted, rules: &SplitRules) -> Served {
        debug_assert!(!self.repeat.owes());
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
        debug_assert!(!self.repeat.owes());
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
    pub(crate) fn take_back(&mut self, index: BlockIndex, requested: u64, now: u64) -> bool {
        debug_assert!(!self.repeat.owes());
        let block = self.blocks.get(index);
        self.tally.take_back(block.pool(), block.bytes(), requested);
        match block.pool() {
            PoolKind::Small => self.join_small(index, now),
            PoolKind::Large => self.join_large(index, now),
        }
    }

    // They read the record themselves: to be given what it says, it would have to be written to the stack.
    #[inline(never)]
    fn join_small(&mut self, index: BlockIndex, now: u64) -> bool {
        let block = self.blocks.get(index).extent();
        join(&mut self.small, &mut self.blocks, &mut self.tally, PoolKind::Small, index, block, now)
    }

    #[inline(never)]
    fn join_large(&mut self, index: BlockIndex, now: u64) -> bool {
        let block = self.blocks.get(index).extent();
        join(&mut self.large, &mut self.blocks, &mut self.tally, PoolKind::Large, index, block, now)
    }

    /// The same for a block of the small pool that the client holds at `addr` and that no other stream was announced to
    /// use, without a count of lookups; `None` when there is no such block, and nothing was done.
    #[inline(always)]
    pub(crate) fn take_back_small(&mut self, index: BlockIndex, addr: u64, requested: u64) -> Option<bool> {
        if self.repeat.can_hold(index) {
            self.blocks.find_unshared(PoolKind::Small, index, addr)?;
            // A block that was cut off lies beside the rest, with which it would be joined.
            return Some(self.repeat.hold());
        }
        if self.repeat.owes() {
            self.carry_out();
        }
        let block = self.blocks.find_unshared(PoolKind::Small, index, addr)?;
        self.tally.take_back(PoolKind::Small, block.bytes(), requested);
        let joined = if self.blocks.records().len() <= FEW {
            join_blindly(&mut self.small, &mut self.blocks, &mut self.tally, index, block)
        } else {
            self.join_small(index, 0)
        };
        self.repeat.returned(index, requested);
        Some(joined)
    }

    /// The same for the large pool, [settled](Self::settle).
    #[inline(always)]
    pub(crate) fn take_back_large(&mut self, index: BlockIndex, addr: u64, requested: u64) -> Option<bool> {
        debug_assert!(!self.repeat.owes());
        let block = self.blocks.find_unshared(PoolKind::Large, index, addr)?;
        self.tally.take_back(PoolKind::Large, block.bytes(), requested);
        Some(join(&mut self.large, &mut self.blocks, &mut self.tally, PoolKind::Large, index, block, 0))
    }

    /// Takes a block back from the client that streams still use: it waits for `events`.
    pub(crate) fn defer(&mut self, index: BlockIndex, events: u32) {
        debug_assert!(!self.repeat.owes());
        let block = self.blocks.get_mut(index);
        self.tally.take_back(block.pool(), block.bytes(), block.requested());
        self.tally.add_pending(block.bytes());
        block.set_pending(events);
    }

    /// Makes a block that waited reusable.
    pub(crate) fn release_pending(&mut self, index: BlockIndex, now: u64) {
        debug_assert!(!self.repeat.owes());
        let block = self.blocks.get(index);
        self.tally.remove_pending(block.bytes());
        match block.pool() {
            PoolKind::Small => self.join_small(index, now),
            PoolKind::Large => self.join_large(index, now),
        };
    }

    /// Takes a free block that is a whole segment out, record and all; `None` when it is in use by now.
    pub(crate) fn remove_segment(&mut self, index: BlockIndex, addr: u64) -> Option<BlockRecord> {
        debug_assert!(!self.repeat.owes());
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
        debug_assert!(!self.repeat.owes());
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
