//! The blocks of all segments, which of them are free, and the statistics of both: what `caching` knows without
//! asking a device.

use super::blocks::{BlockIndex, BlockRecord, BlockSlab, NONE};
use super::free_index::{FreeIndex, FreeKey};
use super::rounding::{MIN_BLOCK, SMALL_MAX};
use crate::device::{DeviceAddr, StreamId};
use crate::snapshot::{BlockInfo, BlockState, SegmentInfo, Snapshot};
use crate::stats::{PoolKind, Stats};

/// When a block may be split, and by whom it may be taken.
#[derive(Clone, Copy, Debug)]
pub struct SplitRules {
    /// Blocks of at least this many bytes are never split, and smaller requests never take them.
    pub max_split: u64,
    /// How much larger than the request such a block may be.
    pub max_non_split_rounding: u64,
    /// Whether searches are counted, for the age of free blocks.
    pub count_searches: bool,
}

/// The blocks of all segments.
#[derive(Debug)]
pub struct BlockCache {
    /// Statistics; the caller counts what it does with the device.
    pub stats: Stats,
    /// Every block.
    pub blocks: BlockSlab,
    /// Free blocks of the small pool.
    pub small: FreePool,
    /// Free blocks of the large pool.
    pub large: FreePool,
    rules: SplitRules,
}

/// The free blocks of a pool.
#[derive(Debug, Default)]
pub struct FreePool {
    /// Its free blocks.
    pub free: FreeIndex,
    /// Searches so far; a free block's age is what was added since it became free.
    pub searches: u64,
}

impl BlockCache {
    /// Nothing yet.
    #[must_use]
    pub fn new(rules: SplitRules) -> Self {
        Self {
            stats: Stats::with_pools(),
            blocks: BlockSlab::default(),
            small: FreePool::default(),
            large: FreePool::default(),
            rules,
        }
    }

    /// The free blocks of one pool.
    pub fn pool(&mut self, pool: PoolKind) -> &mut FreePool {
        match pool {
            PoolKind::Small => &mut self.small,
            PoolKind::Large => &mut self.large,
        }
    }

    /// A block as the index of free blocks orders it.
    #[must_use]
    pub fn key(&self, index: BlockIndex) -> FreeKey {
        let block = self.blocks.get(index);
        FreeKey { stream: block.stream, bytes: block.bytes, addr: block.addr, index }
    }

    fn insert_free(&mut self, index: BlockIndex) {
        let (key, pool) = (self.key(index), self.blocks.get(index).pool);
        let searches = self.pool(pool).searches;
        let block = self.blocks.get_mut(index);
        block.state = BlockState::Free;
        block.freed_at = searches;
        self.pool(pool).free.insert(key);
    }

    /// Bytes held from the device.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.stats.reserved_bytes.all.current
    }

    /// Makes a block reusable and joins it with free neighbours; true when it was joined.
    pub fn release_to_cache(&mut self, index: BlockIndex) -> bool {
        let BlockRecord { bytes, requested, pool, .. } = *self.blocks.get(index);
        let (mut split_count, mut split_bytes, mut joined) = (0i64, 0i64, false);
        for neighbour in [self.blocks.get(index).prev, self.blocks.get(index).next] {
            if neighbour == NONE || self.blocks.get(neighbour).state != BlockState::Free {
                continue;
            }
            let key = self.key(neighbour);
            self.pool(pool).free.remove(key);
            let gained = self.blocks.join(index, neighbour);
            split_count -= 1;
            split_bytes -= gained.cast_signed();
            joined = true;
        }
        self.insert_free(index);
        let block = self.blocks.get(index);
        if block.is_split() {
            split_count += 1;
            split_bytes += block.bytes.cast_signed();
        }
        let stats = &mut self.stats;
        if let Some(gauge) = &mut stats.inactive_split {
            gauge.change(pool, split_count);
        }
        if let Some(gauge) = &mut stats.inactive_split_bytes {
            gauge.change(pool, split_bytes);
        }
        stats.active.decrease(pool, 1);
        stats.active_bytes.decrease(pool, bytes);
        stats.requested_bytes.decrease(pool, requested);
        joined
    }

    /// Segments and blocks at this moment.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let heads = self.blocks.iter().filter(|(_, block)| block.prev == NONE);
        let mut segments: Vec<SegmentInfo> = heads
            .map(|(head, first)| {
                let (mut blocks, mut at, mut bytes) = (Vec::new(), head, 0);
                while at != NONE {
                    let block = self.blocks.get(at);
                    let free = block.state == BlockState::Free;
                    let requested = if free { 0 } else { block.requested };
                    blocks.push(BlockInfo {
                        addr: address(block.addr),
                        bytes: block.bytes,
                        requested,
                        state: block.state,
                    });
                    bytes += block.bytes;
                    at = block.next;
                }
                SegmentInfo { addr: address(first.addr), bytes, stream: first.stream, pool: Some(first.pool), blocks }
            })
            .collect();
        segments.sort_unstable_by_key(|segment| segment.addr);
        Snapshot { segments }
    }

    /// PyTorch's `get_free_block`.
    pub fn take_best_fit(&mut self, pool: PoolKind, bytes: u64, stream: StreamId) -> Option<BlockIndex> {
        let SplitRules { max_split, max_non_split_rounding, count_searches } = self.rules;
        let free_pool = self.pool(pool);
        if count_searches {
            free_pool.searches += 1;
        }
        let found = free_pool.free.best_fit(stream, bytes)?;
        let oversize_for_small_request = bytes < max_split && found.bytes >= max_split;
        let too_large_for_oversize_request =
            bytes >= max_split && found.bytes >= bytes.saturating_add(max_non_split_rounding);
        if oversize_for_small_request || too_large_for_oversize_request {
            return None;
        }
        free_pool.free.remove(found);
        Some(found.index)
    }

    /// PyTorch's `alloc_found_block`: splits if the rest is worth it and accounts for the block.
    pub fn hand_out(&mut self, found: BlockIndex, rounded: u64, requested: u64) -> (BlockIndex, bool) {
        let pool = self.blocks.get(found).pool;
        let was_split = self.blocks.get(found).is_split();
        let rest = self.blocks.get(found).bytes - rounded;
        let split = match pool {
            PoolKind::Small => rest >= MIN_BLOCK,
            PoolKind::Large => rounded < self.rules.max_split && rest > SMALL_MAX,
        };
        let (mut split_count, mut split_bytes) = (0i64, 0i64);
        let index = if split {
            let front = self.blocks.split_front(found, rounded);
            self.insert_free(found);
            if was_split {
                split_bytes -= rounded.cast_signed();
            } else {
                split_count += 1;
                split_bytes += rest.cast_signed();
            }
            front
        } else {
            if was_split {
                split_count -= 1;
                split_bytes -= self.blocks.get(found).bytes.cast_signed();
            }
            found
        };
        let block = self.blocks.get_mut(index);
        block.state = BlockState::Allocated;
        block.requested = requested;
        let bytes = block.bytes;
        let stats = &mut self.stats;
        if let Some(gauge) = &mut stats.inactive_split {
            gauge.change(pool, split_count);
        }
        if let Some(gauge) = &mut stats.inactive_split_bytes {
            gauge.change(pool, split_bytes);
        }
        for gauge in [&mut stats.allocation, &mut stats.active] {
            gauge.increase(pool, 1);
        }
        for gauge in [&mut stats.allocated_bytes, &mut stats.active_bytes] {
            gauge.increase(pool, bytes);
        }
        stats.requested_bytes.increase(pool, requested);
        if let Some(gauge) = stats.oversize_allocations.as_mut().filter(|_| bytes >= self.rules.max_split) {
            gauge.increase(1);
        }
        (index, split)
    }
}

/// An address out of a record.
///
/// # Panics
/// When it is zero, where no segment lies.
#[must_use]
pub fn address(addr: u64) -> DeviceAddr {
    DeviceAddr::new(addr).expect("blocks lie in segments, whose addresses are not zero")
}
