//! The segments of one stream, split into blocks: the part of `caching` that needs no device.
//!
//! [`BlockCache::serve`] allocates a free block, and [`BlockCache::take_back`] frees one. Both are PyTorch's rules in PyTorch's
//! order. Freed blocks are coalesced with their free neighbours immediately, so every free list is complete at all times.
#![forbid(unsafe_code)]

use super::blocks::{BlockIndex, BlockRecord, BlockSlab, NONE, State};
use super::exact_index::ExactIndex;
use super::free_index::FreeIndex;
use super::ranged_index::RangedIndex;
use super::tally::Tally;
use crate::contract::{BlockInfo, CaptureId, Path, PoolKind, SegmentInfo};
use crate::policy::split::Split;
use vramlab_device::{DeviceAddr, StreamId};

/// The blocks of one stream.
#[derive(Debug, Default)]
pub(super) struct BlockCache {
    /// Their counts.
    tally: Tally,
    /// Every block.
    blocks: BlockSlab,
    /// Free blocks of the small pool.
    small: ExactIndex,
    /// Free blocks of the large pool.
    large: RangedIndex,
}

/// An allocated block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Served {
    /// Its record.
    pub(super) index: BlockIndex,
    /// First address.
    pub(super) addr: u64,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// Whether it was split off a larger block.
    pub(super) split: bool,
}

impl Served {
    /// The path of the allocation.
    pub(super) fn path(&self) -> Path {
        if self.split { Path::Split } else { Path::Hit }
    }
}

/// A request to the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheRequest {
    /// Pool that serves it.
    pub(super) pool: PoolKind,
    /// Bytes, rounded.
    pub(super) rounded: u64,
    /// Requested bytes.
    pub(super) requested: u64,
    /// Number of searches, for the age of free blocks.
    pub(super) now: u64,
}

impl BlockCache {
    /// The counts of the blocks.
    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Every block.
    pub(super) fn blocks(&self) -> &BlockSlab {
        &self.blocks
    }

    /// The free blocks of a pool, in no order. O(n) in all blocks.
    pub(super) fn free_blocks(&self, pool: Option<PoolKind>) -> impl Iterator<Item = &BlockRecord> {
        let free = self.blocks.iter().filter(move |(_, block)| block.is_free() && Some(block.pool) == pool);
        free.map(|(_, block)| block)
    }

    /// PyTorch's `get_free_block` and `alloc_found_block`: allocates the best fit of the request's pool, if there is one.
    #[inline(always)]
    pub(super) fn serve(&mut self, request: CacheRequest, split: &Split) -> Option<Served> {
        let Self { tally, blocks, small, large } = self;
        match request.pool {
            PoolKind::Small => serve(small, blocks, tally, PoolKind::Small, request, split),
            PoolKind::Large => serve(large, blocks, tally, PoolKind::Large, request, split),
        }
    }

    /// Allocates the first part of a new segment. The segment does not enter a free list first: it may not be the best fit, because
    /// another block may have become free meanwhile.
    pub(super) fn serve_from_segment(&mut self, segment: BlockRecord, request: CacheRequest, split: &Split) -> Served {
        let segment_block = self.blocks.insert(segment);
        self.tally.add_segment(segment.bytes);
        let served = hand_out(&mut self.blocks, &mut self.tally, segment.pool, segment_block, request, split);
        if served.split {
            self.insert_free(segment_block, request.now);
        }
        served
    }

    /// Frees a live block: reusable immediately, and coalesced with free neighbours; true when there were any. `now` is the number
    /// of searches.
    #[inline(always)]
    pub(super) fn take_back(&mut self, index: BlockIndex, now: u64) -> bool {
        let block = &self.blocks[index];
        self.tally.take_back(block.pool, block.bytes, block.requested);
        self.make_free(index, now)
    }

    /// Defers the free of a live block that streams still use.
    pub(super) fn defer(&mut self, index: BlockIndex) {
        let block = &mut self.blocks[index];
        self.tally.take_back(block.pool, block.bytes, block.requested);
        self.tally.add_pending(block.bytes);
        (block.state, block.shared) = (State::Pending, false);
    }

    /// Makes a pending block that no stream uses any more reusable.
    pub(super) fn end_pending(&mut self, index: BlockIndex, now: u64) {
        self.tally.remove_pending(self.blocks[index].bytes);
        self.make_free(index, now);
    }

    /// Sets or clears the flag of a block that other streams use it, so that its free searches for them.
    pub(super) fn set_shared(&mut self, index: BlockIndex, shared: bool) {
        self.blocks[index].shared = shared;
    }

    /// Restarts the peaks of the counts.
    pub(super) fn restart_peaks(&mut self) {
        self.tally.restart_peaks();
    }

    /// Makes a block free and coalesces it with free neighbours; true when there were any.
    #[inline(always)]
    fn make_free(&mut self, index: BlockIndex, now: u64) -> bool {
        let Self { tally, blocks, small, large } = self;
        match blocks[index].pool {
            PoolKind::Small => make_free(small, blocks, tally, PoolKind::Small, index, now),
            PoolKind::Large => make_free(large, blocks, tally, PoolKind::Large, index, now),
        }
    }

    fn insert_free(&mut self, index: BlockIndex, freed_at: u64) {
        self.blocks[index].freed_at = freed_at;
        match self.blocks[index].pool {
            PoolKind::Small => self.small.insert(&mut self.blocks, index),
            PoolKind::Large => self.large.insert(&mut self.blocks, index),
        }
    }

    /// Adds a segment with known blocks, of which at least one is in use: sizes in order that add up to it, no two free ones
    /// adjacent, each with the requested bytes if it is in use. Returns the records of those in use.
    pub(super) fn add_segment(&mut self, segment: BlockRecord, parts: &[(u64, Option<u64>)]) -> Vec<BlockIndex> {
        let (pool, whole) = (segment.pool, segment.bytes);
        self.tally.add_segment(whole);
        self.tally.begin_segment(whole);
        let (mut used, mut last, mut at) = (Vec::new(), NONE, segment.addr);
        for &(bytes, requested) in parts {
            let index = self.blocks.insert(BlockRecord::segment(at, bytes, pool));
            self.blocks.link(last, index);
            (last, at) = (index, at + bytes);
            match requested {
                Some(requested) => {
                    let block = &mut self.blocks[index];
                    (block.state, block.requested) = (State::Allocated, requested);
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

    /// Removes a free block that is a whole segment, with its record; `None` when it is in use by now.
    pub(super) fn remove_segment(&mut self, index: BlockIndex, addr: u64) -> Option<BlockRecord> {
        let block = *self.blocks.find(index, addr).filter(|block| block.is_free() && !block.is_split())?;
        match block.pool {
            PoolKind::Small => self.small.remove(&mut self.blocks, index),
            PoolKind::Large => self.large.remove(&mut self.blocks, index),
        }
        self.blocks.remove(index);
        self.tally.remove_segment(block.bytes);
        Some(block)
    }

    /// Adds a segment that is one free block, in the state after `freed_at` searches.
    pub(super) fn restore_segment(&mut self, segment: BlockRecord, freed_at: u64) {
        let index = self.blocks.insert(segment);
        self.tally.add_segment(segment.bytes);
        self.insert_free(index, freed_at);
    }

    /// Segments and blocks at this moment, in no order. Allocates.
    pub(super) fn segments(&self, stream: StreamId, private: Option<CaptureId>) -> Vec<SegmentInfo> {
        let heads = self.blocks.iter().filter(|(_, block)| block.prev == NONE);
        let info = |block: &BlockRecord| BlockInfo {
            addr: DeviceAddr::handed_out(block.addr),
            bytes: block.bytes,
            requested: block.requested,
            state: block.reported_state(),
        };
        let segment = |(head, first): (BlockIndex, &BlockRecord)| {
            let chain = std::iter::successors(Some(head), |at| Some(self.blocks[*at].next));
            let blocks: Vec<BlockInfo> = chain.take_while(|at| *at != NONE).map(|at| info(&self.blocks[at])).collect();
            let bytes = blocks.iter().map(|block| block.bytes).sum();
            let (addr, pool) = (DeviceAddr::handed_out(first.addr), Some(first.pool));
            SegmentInfo { addr, bytes, stream, pool, private, expandable: false, page: bytes, blocks }
        };
        heads.map(segment).collect()
    }
}

/// See [`BlockCache::serve`]. `pool` is a constant for the compiler, which makes one function for each pool.
#[inline(always)]
fn serve(
    free: &mut impl FreeIndex,
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    pool: PoolKind,
    request: CacheRequest,
    split: &Split,
) -> Option<Served> {
    let index = free.best_fit(blocks, request.rounded)?;
    if blocks[index].bytes > split.largest(request.rounded) {
        return None;
    }
    free.remove(blocks, index);
    let served = hand_out(blocks, tally, pool, index, request, split);
    if served.split {
        blocks[index].freed_at = request.now;
        free.insert(blocks, index);
    }
    Some(served)
}

/// PyTorch's `alloc_found_block`: allocates a block that is in no free list, and splits off its remainder. The remainder keeps the
/// record; the caller puts it into a free list.
#[inline(always)]
fn hand_out(
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    pool: PoolKind,
    found: BlockIndex,
    request: CacheRequest,
    split: &Split,
) -> Served {
    let CacheRequest { rounded, requested, .. } = request;
    let BlockRecord { addr, bytes: whole, .. } = blocks[found];
    let was_part = blocks[found].is_split();
    let cuts = split.cuts(Some(pool), rounded, whole);
    if !was_part {
        tally.begin_segment(whole);
    }
    let (index, bytes) = match (cuts, was_part) {
        (false, false) => (found, whole),
        (false, true) => {
            tally.remove_splits(pool, 1, whole);
            (found, whole)
        }
        (true, false) => {
            tally.add_split(pool, whole - rounded);
            (blocks.split_front(found, rounded), rounded)
        }
        (true, true) => {
            tally.shrink_split(pool, rounded);
            (blocks.split_front(found, rounded), rounded)
        }
    };
    tally.hand_out(pool, bytes, requested);
    let block = &mut blocks[index];
    (block.state, block.requested) = (State::Allocated, requested);
    Served { index, addr, bytes, split: cuts }
}

/// PyTorch's `free_block` and `try_merge_blocks`: frees a block and coalesces it with adjacent free blocks.
#[inline(always)]
fn make_free(
    free: &mut impl FreeIndex,
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    pool: PoolKind,
    index: BlockIndex,
    now: u64,
) -> bool {
    let BlockRecord { bytes: freed, prev, next, .. } = blocks[index];
    let (below, above) = (blocks[prev].is_free(), blocks[next].is_free());
    for (neighbour, joins) in [(prev, below), (next, above)] {
        if joins {
            free.remove(blocks, neighbour);
            blocks.absorb(index, neighbour);
        }
    }
    let block = &mut blocks[index];
    (block.state, block.requested, block.freed_at) = (State::Free, 0, now);
    let (bytes, is_part) = (block.bytes, block.is_split());
    free.insert(blocks, index);
    // As PyTorch counts it: the neighbours were free parts and are removed, the coalesced block is one if it is still a part.
    let joined = u64::from(below) + u64::from(above);
    if is_part {
        tally.join_splits(pool, freed, joined);
    } else {
        tally.remove_splits(pool, joined, bytes - freed);
        tally.end_segment(bytes);
    }
    joined > 0
}
