//! The segments of one stream, their blocks, which of them are free, and what they add up to: what `caching` knows of a
//! stream without asking a device.

use super::blocks::{BlockIndex, BlockRecord, BlockSlab, NONE};
use super::free_index::FreeIndex;
use super::rounding::{MIN_BLOCK, SMALL_MAX};
use super::tally::Tally;
use crate::device::{DeviceAddr, StreamId};
use crate::snapshot::{BlockInfo, BlockState, SegmentInfo};
use crate::stats::PoolKind;

/// When a block may be split, and by whom it may be taken.
#[derive(Clone, Copy, Debug)]
pub struct SplitRules {
    /// Blocks of at least this many bytes are never split, and smaller requests never take them.
    pub max_split: u64,
    /// How much larger than the request such a block may be.
    pub max_non_split_rounding: u64,
}

/// The blocks of one stream.
#[derive(Debug, Default)]
pub struct BlockCache {
    /// What they add up to.
    pub tally: Tally,
    /// Every block.
    pub blocks: BlockSlab,
    /// Its free blocks, by pool.
    free: [FreeIndex; 2],
}

impl BlockCache {
    /// The free blocks of a pool by (size, address). Allocates.
    #[must_use]
    pub fn free_blocks(&self, pool: PoolKind) -> Vec<BlockIndex> {
        self.free[pool as usize].in_order(&self.blocks)
    }

    /// Makes a block reusable and joins it with free neighbours; true when it was joined. `now` counts lookups.
    #[inline(always)]
    pub fn release_to_cache(&mut self, index: BlockIndex, now: u64) -> bool {
        let BlockRecord { pool, prev, next, addr, bytes, .. } = *self.blocks.get(index);
        let free = &mut self.free[pool as usize];
        let blocks = &mut self.blocks;
        let below = (prev != NONE && blocks.get(prev).is_free()).then_some(prev);
        let above = (next != NONE && blocks.get(next).is_free()).then_some(next);
        // A free neighbour takes the block in and keeps its record and, if it can, its place in the index.
        let keeper = match (below, above) {
            (Some(below), Some(above)) => {
                free.remove(blocks, above);
                let gone = *blocks.get(above);
                blocks.remove(above);
                let keeper = blocks.get_mut(below);
                keeper.bytes += bytes + gone.bytes;
                keeper.next = gone.next;
                if gone.next != NONE {
                    blocks.get_mut(gone.next).prev = below;
                }
                below
            }
            (Some(below), None) => {
                let keeper = blocks.get_mut(below);
                keeper.bytes += bytes;
                keeper.next = next;
                if next != NONE {
                    blocks.get_mut(next).prev = below;
                }
                below
            }
            (None, Some(above)) => {
                let keeper = blocks.get_mut(above);
                keeper.addr = addr;
                keeper.bytes += bytes;
                keeper.prev = prev;
                if prev != NONE {
                    blocks.get_mut(prev).next = above;
                }
                above
            }
            (None, None) => {
                let block = blocks.get_mut(index);
                block.set_state(BlockState::Free);
                block.freed_at = now;
                free.insert(blocks, index);
                if prev != NONE || next != NONE {
                    self.tally.change_split(pool, 1, bytes.cast_signed());
                }
                return false;
            }
        };
        blocks.remove(index);
        free.resized(blocks, keeper);
        let keeper = blocks.get_mut(keeper);
        keeper.freed_at = now;
        // As PyTorch counts it: each neighbour was a free part and is gone, the whole is one if it is still a part.
        let whole = keeper.bytes.cast_signed();
        let neighbours = i64::from(below.is_some()) + i64::from(above.is_some());
        let (count, gained) = if keeper.is_split() { (1, whole) } else { (0, 0) };
        self.tally.change_split(pool, count - neighbours, gained - (whole - bytes.cast_signed()));
        true
    }

    /// PyTorch's `get_free_block`; the block stays in the index.
    #[inline(always)]
    pub fn best_fit(&self, pool: PoolKind, bytes: u64, rules: &SplitRules) -> Option<BlockIndex> {
        let found = self.free[pool as usize].best_fit(&self.blocks, bytes)?;
        let size = self.blocks.get(found).bytes;
        let oversize_for_small_request = bytes < rules.max_split && size >= rules.max_split;
        let too_large_for_oversize_request =
            bytes >= rules.max_split && size >= bytes.saturating_add(rules.max_non_split_rounding);
        (!oversize_for_small_request && !too_large_for_oversize_request).then_some(found)
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
        let (pool, was_split, bytes) = (whole.pool, whole.is_split(), whole.bytes);
        let free = &mut self.free[pool as usize];
        let rest = bytes - rounded;
        let split = match pool {
            PoolKind::Small => rest >= MIN_BLOCK,
            PoolKind::Large => rounded < rules.max_split && rest > SMALL_MAX,
        };
        if split {
            let front = self.blocks.split_front(found, rounded, requested);
            self.blocks.get_mut(found).freed_at = now;
            free.resized(&mut self.blocks, found);
            let (count, change) = if was_split { (0, -rounded.cast_signed()) } else { (1, rest.cast_signed()) };
            self.tally.change_split(pool, count, change);
            self.tally.hand_out(pool, rounded, requested);
            return (front, true);
        }
        free.remove(&mut self.blocks, found);
        let block = self.blocks.get_mut(found);
        block.set_state(BlockState::Allocated);
        block.requested = requested;
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
        self.free[segment.pool as usize].insert(&mut self.blocks, whole);
        self.hand_out(whole, rounded, requested, now, rules).0
    }

    /// Takes a block back from the client: reusable at once, and joined with free neighbours; true when it was joined.
    #[inline(always)]
    pub fn take_back(&mut self, index: BlockIndex, now: u64) -> bool {
        let BlockRecord { pool, bytes, requested, .. } = *self.blocks.get(index);
        self.tally.take_back(pool, bytes, requested);
        self.release_to_cache(index, now)
    }

    /// Takes a block back from the client that streams still use: it waits for `events`.
    pub fn defer(&mut self, index: BlockIndex, events: u32) {
        let block = self.blocks.get_mut(index);
        block.set_state(BlockState::PendingFree);
        block.events = events;
        let BlockRecord { pool, bytes, requested, .. } = *block;
        self.tally.take_back(pool, bytes, requested);
    }

    /// Takes a free block that is a whole segment out, record and all; `None` when it is in use by now.
    pub fn remove_segment(&mut self, index: BlockIndex, addr: u64) -> Option<BlockRecord> {
        let block = *self.blocks.find(index)?;
        if block.addr != addr || !block.is_free() || block.is_split() {
            return None;
        }
        self.free[block.pool as usize].remove(&mut self.blocks, index);
        self.blocks.remove(index);
        Some(block)
    }

    /// Puts back what [`remove_segment`](Self::remove_segment) took out.
    pub fn restore_segment(&mut self, segment: BlockRecord) {
        let index = self.blocks.insert(segment);
        self.free[segment.pool as usize].insert(&mut self.blocks, index);
    }

    /// Segments and blocks at this moment, in no order. Allocates.
    #[must_use]
    pub fn segments(&self, stream: StreamId) -> Vec<SegmentInfo> {
        let heads = self.blocks.iter().filter(|(_, block)| block.prev == NONE);
        let segment = |(head, first): (BlockIndex, &BlockRecord)| {
            let (mut blocks, mut at, mut bytes) = (Vec::new(), head, 0);
            while at != NONE {
                let block = self.blocks.get(at);
                let requested = if block.is_free() { 0 } else { block.requested };
                let state = block.state();
                blocks.push(BlockInfo { addr: address(block.addr), bytes: block.bytes, requested, state });
                bytes += block.bytes;
                at = block.next;
            }
            SegmentInfo { addr: address(first.addr), bytes, stream, pool: Some(first.pool), blocks }
        };
        heads.map(segment).collect()
    }
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
