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
    small: FreeIndex,
    large: FreeIndex,
}

impl BlockCache {
    #[inline]
    fn pool(&mut self, pool: PoolKind) -> (&mut FreeIndex, &mut BlockSlab) {
        match pool {
            PoolKind::Small => (&mut self.small, &mut self.blocks),
            PoolKind::Large => (&mut self.large, &mut self.blocks),
        }
    }

    /// The free blocks of a pool by (size, address). Allocates.
    #[must_use]
    pub fn free_blocks(&self, pool: PoolKind) -> Vec<BlockIndex> {
        match pool {
            PoolKind::Small => self.small.in_order(&self.blocks),
            PoolKind::Large => self.large.in_order(&self.blocks),
        }
    }

    #[inline]
    fn insert_free(&mut self, index: BlockIndex, pool: PoolKind, now: u64) {
        let record = self.blocks.get_mut(index);
        record.set_state(BlockState::Free);
        record.freed_at = now;
        let (free, blocks) = self.pool(pool);
        free.insert(blocks, index);
    }

    /// Makes a block reusable and joins it with free neighbours; true when it was joined. `now` counts lookups.
    #[inline]
    pub fn release_to_cache(&mut self, index: BlockIndex, now: u64) -> bool {
        let BlockRecord { pool, prev, next, .. } = *self.blocks.get(index);
        let (mut split_count, mut split_bytes, mut joined) = (0i64, 0i64, false);
        for neighbour in [prev, next] {
            if neighbour == NONE || !self.blocks.get(neighbour).is_free() {
                continue;
            }
            let (free, blocks) = self.pool(pool);
            free.remove(blocks, neighbour);
            let gained = blocks.join(index, neighbour);
            split_count -= 1;
            split_bytes -= gained.cast_signed();
            joined = true;
        }
        self.insert_free(index, pool, now);
        let block = self.blocks.get(index);
        if block.is_split() {
            split_count += 1;
            split_bytes += block.bytes.cast_signed();
        }
        self.tally.change_split(pool, split_count, split_bytes);
        joined
    }

    /// PyTorch's `get_free_block`.
    #[inline]
    pub fn take_best_fit(&mut self, pool: PoolKind, bytes: u64, rules: &SplitRules) -> Option<BlockIndex> {
        let (free, blocks) = self.pool(pool);
        let found = free.best_fit(blocks, bytes)?;
        let size = blocks.get(found).bytes;
        let oversize_for_small_request = bytes < rules.max_split && size >= rules.max_split;
        let too_large_for_oversize_request =
            bytes >= rules.max_split && size >= bytes.saturating_add(rules.max_non_split_rounding);
        if oversize_for_small_request || too_large_for_oversize_request {
            return None;
        }
        free.remove(blocks, found);
        Some(found)
    }

    /// PyTorch's `alloc_found_block`: splits if the rest is worth it and accounts for the block. The block is in no
    /// index.
    #[inline]
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
        let rest = bytes - rounded;
        let split = match pool {
            PoolKind::Small => rest >= MIN_BLOCK,
            PoolKind::Large => rounded < rules.max_split && rest > SMALL_MAX,
        };
        let index = if split {
            let front = self.blocks.split_front(found, rounded);
            self.insert_free(found, pool, now);
            front
        } else {
            found
        };
        let (split_count, split_bytes) = match (split, was_split) {
            (true, true) => (0, -rounded.cast_signed()),
            (true, false) => (1, rest.cast_signed()),
            (false, true) => (-1, -bytes.cast_signed()),
            (false, false) => (0, 0),
        };
        self.tally.change_split(pool, split_count, split_bytes);
        let block = self.blocks.get_mut(index);
        block.set_state(BlockState::Allocated);
        block.requested = requested;
        let bytes = block.bytes;
        self.tally.hand_out(pool, bytes, requested);
        (index, split)
    }

    /// Takes a block back from the client: reusable at once, and joined with free neighbours; true when it was joined.
    #[inline]
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
        let (free, blocks) = self.pool(block.pool);
        free.remove(blocks, index);
        blocks.remove(index);
        Some(block)
    }

    /// Puts back what [`remove_segment`](Self::remove_segment) took out.
    pub fn restore_segment(&mut self, segment: BlockRecord) {
        let index = self.blocks.insert(segment);
        self.insert_free(index, segment.pool, segment.freed_at);
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
