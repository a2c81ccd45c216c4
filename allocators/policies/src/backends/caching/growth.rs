//! Steps when no free block fits: the segments on which [`pytorch`](crate::backends::pytorch)'s ladder works.
//!
//! One thread at a time is here. It holds no shard's lock while it calls the device, so that other threads continue with hits.

use super::shard::{Locked, Shard, ShardTable};
use super::{Caching, hand_out};
use crate::backends::caching::block_cache::{CacheRequest, Served};
use crate::backends::caching::blocks::{BlockIndex, BlockRecord};
use crate::backends::{TorchAllocator, of_torch, pytorch};
use crate::contract::{AllocError, Block, DeviceAllocator, Ledger, OomReport, PoolKind, Snapshot, Stats};
use crate::policy::grow::{Idle, Miss, Segments, release_order};
use crate::policy::size::torch::segment_size;
use crate::space::{FreeList, Owner};
use crate::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;
use vramlab_device::{DeviceAddr, DriverError, StreamId};

/// State of the segments of all shards.
#[derive(Debug)]
pub(super) struct Growth {
    /// The gauges of segments and the counters; those of blocks are the [totals](super::totals)'.
    pub(super) stats: Stats,
    /// The breakdown when reserved memory last reached a new peak.
    pub(super) peak: Ledger,
    /// Stream of the request that raised it.
    grown_by: StreamId,
}

impl Default for Growth {
    fn default() -> Self {
        Self { stats: Stats::with_pools(), peak: Ledger::default(), grown_by: StreamId::NONE }
    }
}

/// The segments of every shard. While it lives none is added or removed.
pub(super) struct Grown<'a> {
    pub(super) caching: &'a Caching,
    growth: MutexGuard<'a, Growth>,
}

/// A block for a request that no free block fitted.
pub(super) enum Found {
    /// A block that became free meanwhile.
    Served(Served),
    /// A segment that is in no shard yet, so that no other thread takes it.
    New(BlockRecord),
}

/// A free block that was a whole segment when it was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole<'a> {
    shard: &'a Shard,
    index: BlockIndex,
    addr: u64,
    freed_at: u64,
}

impl Caching {
    /// Every current segment at one moment, in address order. The caller holds `growth`, so none is added or removed meanwhile.
    pub(super) fn all_segments(&self) -> Snapshot {
        let shards = self.shards.by_stream();
        let locked = ShardTable::lock_all(&shards);
        let of_shard =
            |(shard, locked): (&&Shard, &Locked<'_>)| locked.cache().segments(shard.stream, locked.private());
        let mut segments: Vec<_> = shards.iter().zip(&locked).flat_map(of_shard).collect();
        drop(locked);
        segments.sort_unstable_by_key(|segment| segment.addr);
        Snapshot { segments }
    }

    /// The current breakdown as seen by a request on `stream`: that of [`Snapshot::ledger`] for
    /// [`all_segments`](Self::all_segments), from the counts of each shard. The caller holds `growth`.
    fn ledger(&self, stream: StreamId) -> Ledger {
        let ledger_of = |shard: &Shard| shard.lock().cache().tally().ledger(shard.stream == stream);
        self.shards.by_stream().into_iter().map(ledger_of).sum()
    }

    /// Restarts peaks; see [`DeviceAllocator::reset_peaks`].
    pub(super) fn restart_growth_peaks(&self, growth: &mut Growth) {
        growth.stats.reset_peaks();
        growth.peak = self.ledger(growth.grown_by);
    }

    /// The segments, for one thread at a time.
    pub(super) fn grown(&self) -> Grown<'_> {
        Grown { caching: self, growth: self.lock_growth() }
    }

    /// Serves a request that no free block fitted. `processed` is true when this thread has processed deferred frees for it.
    #[cold]
    pub(super) fn grow(&self, shard: &Shard, request: CacheRequest, processed: bool) -> Result<Block, AllocError> {
        let grown = &mut self.grown();
        if !processed {
            self.wait_and_process_events(Some(shard.stream))?;
        }
        // Another thread may have grown this stream's cache, or freed into it, while this one waited.
        let (served, path) = match self.serve_cached(shard, request) {
            Some(served) => (served, served.path()),
            None => {
                let list = shard.list(request.pool);
                let miss = Miss { list, bytes: request.rounded, segment: segment_size(request.rounded) };
                let again = |_: &mut Grown<'_>| Ok(self.serve_cached(shard, request).map(Found::Served));
                let ladder = pytorch::ladder(&self.settings_now());
                let mut served = ladder.climb(grown, &miss, again)?;
                while served.is_none() && grown.was_freed_into(&miss) {
                    served = ladder.climb(grown, &miss, again)?;
                }
                let refused = || grown.out_of_memory(self.name(), &miss, request.requested);
                let (served, path) = served.ok_or_else(refused)?;
                (self.take(shard, served, request), path)
            }
        };
        let growth = &mut *grown.growth;
        let reserved = growth.stats.reserved_bytes.all.current;
        if reserved > growth.peak.reserved {
            growth.peak = self.ledger(shard.stream);
            debug_assert_eq!(growth.peak.wasted(), growth.peak.reserved - growth.peak.requested);
            growth.grown_by = shard.stream;
        }
        Ok(hand_out(shard, served, request.requested, path))
    }

    /// The block that serves a request; a new segment is split for it.
    fn take(&self, shard: &Shard, found: Found, request: CacheRequest) -> Served {
        match found {
            Found::Served(served) => served,
            Found::New(segment) => {
                let cache = &mut self.totals.enter(shard, &self.shards);
                let served = cache.serve_from_segment(segment, request, &self.split);
                self.count_oversize(served);
                served
            }
        }
    }

    /// The shard of a free list.
    pub(super) fn shard_of_list(&self, list: FreeList) -> &Shard {
        let Owner { stream, private } = list.owner;
        let of_pool = |shard: &&Shard| shard.stream == stream && shard.lock().private() == private;
        let private = private.and_then(|_| self.shards.private().into_iter().find(of_pool));
        private.unwrap_or_else(|| self.shards.of_stream(stream))
    }
}

impl Grown<'_> {
    /// Whether other threads freed segments while a request released the cache in vain. Then the steps are taken again: otherwise a
    /// request would be refused for which there was enough memory at every moment. PyTorch allows no free meanwhile, as it holds its
    /// lock.
    fn was_freed_into(&self, miss: &Miss) -> bool {
        // Other requests release no cache.
        let releases = !self.is_capturing() && miss.list.owner.private.is_none();
        releases && !self.idle_segments().is_empty()
    }

    /// Releases a segment to the device.
    ///
    /// # Safety
    /// It came from `mem_alloc`, is released once, and only queued work still uses it.
    pub(super) unsafe fn give_back(&mut self, segment: &BlockRecord) -> Result<(), DriverError> {
        // SAFETY: the caller promises it, and the call itself waits for queued work.
        unsafe { self.caching.driver.mem_free(DeviceAddr::handed_out(segment.addr)) }?;
        self.growth.stats.count_segment_released(segment.pool, segment.bytes, self.caching.max_split);
        Ok(())
    }
}

impl<'a> Segments for Grown<'a> {
    type Block = Found;
    type Segment = Whole<'a>;

    fn reserved(&self) -> u64 {
        self.growth.stats.reserved_bytes.all.current
    }

    fn limit(&self) -> Option<u64> {
        self.caching.settings_now().memory_limit
    }

    fn is_capturing(&self) -> bool {
        self.caching.is_capturing()
    }

    fn new_segment(&mut self, list: FreeList, bytes: u64) -> Result<Option<Found>, DriverError> {
        if self.limit().is_some_and(|limit| self.reserved().saturating_add(bytes) > limit) {
            return Ok(None);
        }
        let addr = match self.caching.driver.mem_alloc(bytes) {
            Ok(addr) => addr.get(),
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let pool = list.pool.unwrap_or(PoolKind::Large);
        self.growth.stats.count_segment(pool, bytes, self.caching.max_split);
        Ok(Some(Found::New(BlockRecord::segment(addr, bytes, pool))))
    }

    fn idle_segments(&self) -> Vec<Idle<Whole<'a>>> {
        let searches = self.caching.searches.load(Relaxed);
        let mut segments = Vec::new();
        for shard in self.caching.shards.by_stream() {
            let locked = shard.lock();
            if locked.is_pinned() {
                continue;
            }
            let owner = Owner { stream: shard.stream, private: locked.private() };
            let blocks = locked.cache().blocks().iter().filter(|(_, block)| block.is_free() && !block.is_split());
            segments.extend(blocks.map(|(index, &BlockRecord { addr, bytes, pool, freed_at, .. })| {
                let (segment, list) = (Whole { shard, index, addr, freed_at }, FreeList { owner, pool: Some(pool) });
                Idle { segment, list, addr, bytes, age: searches.saturating_sub(freed_at) }
            }));
        }
        segments.sort_unstable_by_key(|idle| release_order(idle.list, idle.bytes, idle.addr));
        segments
    }

    fn segment_that_fits(&mut self, list: FreeList, bytes: u64) -> Option<u64> {
        let shard = self.caching.shard_of_list(list).lock();
        let fits = shard.cache().free_blocks(list.pool).filter(|block| block.bytes >= bytes);
        fits.min_by_key(|block| (block.bytes, block.addr)).map(|block| block.addr)
    }

    fn release(&mut self, whole: Whole<'a>) -> Result<u64, DriverError> {
        let enter = || self.caching.totals.enter(whole.shard, &self.caching.shards);
        // The record is removed before the memory is released: another thread may be given the address immediately.
        let Some(segment) = enter().remove_segment(whole.index, whole.addr) else { return Ok(0) };
        // SAFETY: the block is a whole segment, so its address came from `mem_alloc`; it was free and no thread can take it any
        // more, and queued work of its own stream or of recorded streams completes in the device-wide wait inside the call.
        if let Err(error) = unsafe { self.give_back(&segment) } {
            self.caching.totals.enter(whole.shard, &self.caching.shards).restore_segment(segment, whole.freed_at);
            return Err(error);
        }
        Ok(segment.bytes)
    }

    fn synchronize(&mut self) -> Result<(), DriverError> {
        self.growth.stats.num_sync_all_streams += 1;
        self.caching.synchronize_pending()
    }

    fn count_retry(&mut self) {
        self.growth.stats.num_alloc_retries += 1;
    }

    fn count_refusal(&mut self) {
        self.growth.stats.num_ooms += 1;
    }

    fn refusal(&self, allocator: &str, list: FreeList, requested: u64, needed: u64) -> OomReport {
        let caching = self.caching;
        let shard = caching.shard_of_list(list);
        let largest = shard.lock().cache().free_blocks(list.pool).map(|block| block.bytes).max();
        // A graph's free blocks serve no other request, even after a trim.
        let others = caching.shards.by_stream().into_iter();
        let others = others.filter(|other| other.id != shard.id && !other.lock().is_pinned());
        let free = others.map(|other| other.lock().cache().tally().ledger(false).stream).sum();
        let mut stats = Stats::with_pools();
        caching.totals.report(&caching.shards, &mut stats);
        OomReport::new(allocator, requested)
            .needing(needed)
            .with_memory(self.reserved(), stats.active_bytes.all.current)
            .with_free(largest.unwrap_or(0), free)
            .with_limit(self.limit())
            .with_device(caching.driver.as_ref())
            .with_setting(caching.settings.against_fragmentation(Some(of_torch(TorchAllocator::Expandable).name)))
    }
}
