//! The segments of one stream, their blocks, which of them are free, and what they add up to: what `caching` knows of a
//! stream without asking a device.

use super::blocks::{BlockIndex, BlockRecord, BlockSlab, NONE};
use super::exact_index::ExactIndex;
use super::free_index::FreeIndex;
use super::ranged_index::RangedIndex;
use super::rounding::{MIN_BLOCK, SMALL_MAX};
use super::tally::Tally;
use crate::device::{DeviceAddr, StreamId};
use crate::snapshot::{BlockInfo, SegmentInfo};
use crate::stats::PoolKind;

/// When a block may be split, and by whom it may be taken.
#[derive(Clone, Copy, Debug)]
pub struct SplitRules {
    /// Blocks of at least this many bytes are never split, and smaller requests never take them; `u64::MAX` for no
    /// bound.
    pub max_split: u64,
    /// How much larger than the request such a block may be.
    pub max_non_split_rounding: u64,
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
}

/// The blocks of one stream.
#[derive(Debug, Default)]
pub struct BlockCache {
    /// What they add up to.
    pub tally: Tally,
    /// Every block.
    pub blocks: BlockSlab,
    /// Free blocks of the small pool.
    small: ExactIndex,
    /// Free blocks of the large pool.
    large: RangedIndex,
}

/// Calls an index of free blocks by pool.
macro_rules! with_index {
    ($cache:ident, $pool:expr, |$free:ident, $blocks:ident| $call:expr) => {{
        let $blocks = &mut $cache.blocks;
        match $pool {
            PoolKind::Small => {
                let $free = &mut $cache.small;
                $call
            }
            PoolKind::Large => {
                let $free = &mut $cache.large;
                $call
            }
        }
    }};
}

impl BlockCache {
    /// The free blocks of a pool by (size, address). Allocates.
    #[must_use]
    pub fn free_blocks(&self, pool: PoolKind) -> Vec<BlockIndex> {
        match pool {
            PoolKind::Small => self.small.in_order(&self.blocks),
            PoolKind::Large => self.large.in_order(&self.blocks),
        }
    }

    /// Makes a block reusable and joins it with free neighbours; true when it was joined. `now` counts lookups.
    #[inline(always)]
    pub fn release_to_cache(&mut self, index: BlockIndex, now: u64) -> bool {
        let block = *self.blocks.get(index);
        match block.pool() {
            PoolKind::Small => join(&mut self.small, &mut self.blocks, &mut self.tally, index, block, now),
            PoolKind::Large => join(&mut self.large, &mut self.blocks, &mut self.tally, index, block, now),
        }
    }

    /// PyTorch's `get_free_block`; the block stays in the index.
    #[inline(always)]
    pub fn best_fit(&self, pool: PoolKind, bytes: u64, rules: &SplitRules) -> Option<BlockIndex> {
        let found = match pool {
            PoolKind::Small => self.small.best_fit(&self.blocks, bytes)?,
            PoolKind::Large => self.large.best_fit(&self.blocks, bytes)?,
        };
        rules.allow(bytes, self.blocks.get(found).bytes()).then_some(found)
    }

    /// PyTorch's `alloc_found_block` for a block of the index: splits it if the rest is worth it and accounts for what
    /// is handed out. Returns that, and whether it was split.
    #[inline(always)]
    pub fn hand_out(
        &mut self,
        found: BlockIndex,
        rounded: u64,
        requested: u64,
        now: u64,
        rules: &SplitRules,
    ) -> (BlockIndex, bool) {
        let whole = self.blocks.get(found);
        let (pool, was_split, bytes) = (whole.pool(), whole.is_split(), whole.bytes());
        let rest = bytes - rounded;
        let split = match pool {
            PoolKind::Small => rest >= MIN_BLOCK,
            PoolKind::Large => rounded < rules.max_split && rest > SMALL_MAX,
        };
        if split {
            let front = self.blocks.split_front(found, rounded, requested);
            self.blocks.set_freed_at(found, now);
            with_index!(self, pool, |free, blocks| free.resized(blocks, found, bytes));
            self.tally.split_off(pool, was_split, rounded, rest);
            self.tally.hand_out(pool, rounded, requested);
            return (front, true);
        }
        with_index!(self, pool, |free, blocks| free.remove(blocks, found));
        self.blocks.get_mut(found).set_allocated(requested);
        if was_split {
            self.tally.change_split(pool, -1, -bytes.cast_signed());
        }
        self.tally.hand_out(pool, bytes, requested);
        (found, false)
    }

    /// The same for a segment that is not known yet: its first part is handed out.
    pub fn hand_out_new(
        &mut self,
        segment: BlockRecord,
        rounded: u64,
        requested: u64,
        now: u64,
        rules: &SplitRules,
    ) -> BlockIndex {
        let whole = self.blocks.insert(segment);
        with_index!(self, segment.pool(), |free, blocks| free.insert(blocks, whole));
        self.hand_out(whole, rounded, requested, now, rules).0
    }

    /// Takes a block back from the client: reusable at once, and joined with free neighbours; true when it was joined.
    /// `requested` is what the client had asked for.
    #[inline(always)]
    pub fn take_back(&mut self, index: BlockIndex, requested: u64, now: u64) -> bool {
        let block = self.blocks.get(index);
        self.tally.take_back(block.pool(), block.bytes(), requested);
        self.release_to_cache(index, now)
    }

    /// Takes a block back from the client that streams still use: it waits for `events`.
    pub fn defer(&mut self, index: BlockIndex, events: u32) {
        let block = self.blocks.get_mut(index);
        self.tally.take_back(block.pool(), block.bytes(), block.requested());
        block.set_pending(events);
    }

    /// Takes a free block that is a whole segment out, record and all; `None` when it is in use by now.
    pub fn remove_segment(&mut self, index: BlockIndex, addr: u64) -> Option<BlockRecord> {
        let block = *self.blocks.find(index)?;
        if block.addr() != addr || !block.is_free() || block.is_split() {
            return None;
        }
        with_index!(self, block.pool(), |free, blocks| free.remove(blocks, index));
        self.blocks.remove(index);
        Some(block)
    }

    /// Puts back what [`remove_segment`](Self::remove_segment) took out, as it was when there had been `freed_at`
    /// lookups.
    pub fn restore_segment(&mut self, segment: BlockRecord, freed_at: u64) {
        let index = self.blocks.insert(segment);
        self.blocks.set_freed_at(index, freed_at);
        with_index!(self, segment.pool(), |free, blocks| free.insert(blocks, index));
    }

    /// Segments and blocks at this moment, in no order. Allocates.
    #[must_use]
    pub fn segments(&self, stream: StreamId) -> Vec<SegmentInfo> {
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

/// Makes a block free and joins it with free neighbours; true when there were any.
#[inline(always)]
fn join(
    free: &mut impl FreeIndex,
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    index: BlockIndex,
    block: BlockRecord,
    now: u64,
) -> bool {
    let (pool, prev, next) = (block.pool(), block.prev(), block.next());
    let below = blocks.get(prev).is_free();
    let above = blocks.get(next).is_free();
    // A free neighbour takes the block in and keeps its record and, if it can, its place in the index.
    let (keeper, old_bytes) = if below {
        let (mut units, mut beyond) = (block.units(), next);
        if above {
            free.remove(blocks, next);
            let gone = blocks.get(next);
            (units, beyond) = (units + gone.units(), gone.next());
            blocks.remove(next);
        }
        let keeper = blocks.get_mut(prev);
        let old_bytes = keeper.bytes();
        keeper.extend_up(units, beyond);
        blocks.get_mut(beyond).set_prev(prev);
        (prev, old_bytes)
    } else if above {
        let keeper = blocks.get_mut(next);
        let old_bytes = keeper.bytes();
        keeper.extend_down(block.units(), prev);
        blocks.get_mut(prev).set_next(next);
        (next, old_bytes)
    } else {
        blocks.get_mut(index).set_free();
        blocks.set_freed_at(index, now);
        free.insert(blocks, index);
        if block.is_split() {
            tally.change_split(pool, 1, block.bytes().cast_signed());
        }
        return false;
    };
    blocks.remove(index);
    blocks.set_freed_at(keeper, now);
    free.resized(blocks, keeper, old_bytes);
    // As PyTorch counts it: each neighbour was a free part and is gone, the whole is one if it is still a part.
    let (joined, keeper) = (i64::from(below) + i64::from(above), blocks.get(keeper));
    let (whole, bytes) = (keeper.bytes().cast_signed(), block.bytes().cast_signed());
    if keeper.is_split() {
        tally.change_split(pool, 1 - joined, bytes);
    } else {
        tally.change_split(pool, -joined, bytes - whole);
    }
    true
}

/// An address out of a record.
///
/// # Panics
/// When it is zero, where no segment lies.
#[must_use]
#[inline]
pub fn address(addr: u64) -> DeviceAddr {
    DeviceAddr::new(addr).expect("blocks lie in segments, whose addresses are not zero")
}
