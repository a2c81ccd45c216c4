//! What is done when no free block fits: a segment from the device, and what PyTorch releases when the device refuses one.
//!
//! One thread at a time is here. It holds no shard's lock while it calls the device, so that others go on with hits.

use super::shard::Shard;
use super::{Caching, CachingSettings, hand_out};
use crate::backends::caching::block_cache::Wanted;
use crate::backends::caching::blocks::{BlockIndex, BlockRecord};
use crate::backends::{TorchAllocator, of_torch};
use crate::contract::{AllocError, CaptureId, OomReport};
use crate::contract::{Block, DeviceAllocator, Path};
use crate::contract::{Gauge, PoolKind, PooledGauge, Stats};
use crate::contract::{Ledger, Snapshot};
use crate::policy::size::torch::segment_size;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use vramlab_device::{DeviceAddr, DriverError, StreamId};

/// What is known of the segments as a whole.
#[derive(Debug)]
pub(super) struct Growth {
    reserved: PooledGauge,
    segments: PooledGauge,
    oversize_segments: Gauge,
    retries: u64,
    ooms: u64,
    synchronizations: u64,
    device_allocs: u64,
    device_frees: u64,
    /// The ledger when reserved last reached a new peak.
    pub(super) peak: Ledger,
    /// Stream of the request that took it there.
    grown_by: StreamId,
}

/// A free block that is a whole segment, as it was seen.
pub(super) struct Idle<'a> {
    pub(super) shard: &'a Shard,
    pub(super) index: BlockIndex,
    pub(super) addr: u64,
    bytes: u64,
    freed_at: u64,
}

impl Default for Growth {
    fn default() -> Self {
        Self {
            reserved: PooledGauge::with_pools(),
            segments: PooledGauge::with_pools(),
            oversize_segments: Gauge::default(),
            retries: 0,
            ooms: 0,
            synchronizations: 0,
            device_allocs: 0,
            device_frees: 0,
            peak: Ledger::default(),
            grown_by: StreamId::NONE,
        }
    }
}

impl Growth {
    /// Bytes held from the device.
    pub(super) fn held(&self) -> u64 {
        self.reserved.all.current
    }

    /// Fills in the gauges of segments and the counters.
    pub(super) fn report(&self, stats: &mut Stats) {
        stats.reserved_bytes = self.reserved;
        stats.segment = Some(self.segments);
        stats.oversize_segments = Some(self.oversize_segments);
        stats.num_alloc_retries = self.retries;
        stats.num_ooms = self.ooms;
        stats.num_sync_all_streams = self.synchronizations;
        stats.num_device_alloc = self.device_allocs;
        stats.num_device_free = self.device_frees;
    }

    fn added(&mut self, settings: &CachingSettings, pool: PoolKind, bytes: u64) {
        self.device_allocs += 1;
        self.reserved.increase(pool, bytes);
        self.segments.increase(pool, 1);
        if bytes >= settings.max_split() {
            self.oversize_segments.increase(1);
        }
    }

    pub(super) fn removed(&mut self, settings: &CachingSettings, pool: PoolKind, bytes: u64) {
        self.device_frees += 1;
        self.reserved.decrease(pool, bytes);
        self.segments.decrease(pool, 1);
        if bytes >= settings.max_split() {
            self.oversize_segments.decrease(1);
        }
    }
}

impl Caching {
    /// Every segment at this moment, in address order. The caller holds `growth`, so none comes or goes meanwhile.
    pub(super) fn all_segments(&self) -> Snapshot {
        let shards = self.shards.by_stream();
        let mut segments: Vec<_> =
            shards.into_iter().flat_map(|shard| shard.lock().cache().segments(shard.stream)).collect();
        segments.sort_unstable_by_key(|segment| segment.addr);
        Snapshot { segments }
    }

    /// The ledger of this moment as seen by a request on `stream`: what [`Snapshot::ledger`] says of
    /// [`all_segments`](Self::all_segments), from what each shard counts. The caller holds `growth`.
    fn ledger(&self, stream: StreamId) -> Ledger {
        let ledger_of = |shard: &Shard| shard.lock().cache().tally().ledger(shard.stream == stream);
        self.shards.by_stream().into_iter().map(ledger_of).sum()
    }

    /// Notes the ledger if a request of `stream`, which has been served, finds more held than there ever was.
    pub(super) fn note_peak(&self, growth: &mut Growth, stream: StreamId) {
        if growth.held() > growth.peak.reserved {
            growth.peak = self.ledger(stream);
            debug_assert_eq!(growth.peak.wasted(), growth.peak.reserved - growth.peak.requested);
            growth.grown_by = stream;
        }
    }

    /// Peaks start again; see [`DeviceAllocator::reset_peaks`].
    pub(super) fn restart_growth_peaks(&self, growth: &mut Growth) {
        growth.reserved.reset_peak();
        growth.segments.reset_peak();
        growth.oversize_segments.reset_peak();
        growth.peak = self.ledger(growth.grown_by);
    }

    /// PyTorch's `alloc_block`: the address of a new segment; `None` when the limit or the device refuses.
    pub(super) fn new_segment(
        &self,
        growth: &mut Growth,
        pool: PoolKind,
        bytes: u64,
        retry: bool,
    ) -> Result<Option<u64>, DriverError> {
        growth.retries += u64::from(retry);
        let limit = self.settings.memory_limit.unwrap_or(u64::MAX);
        if growth.held().saturating_add(bytes) > limit {
            return Ok(None);
        }
        match self.driver.mem_alloc(bytes) {
            Ok(addr) => {
                growth.added(&self.settings, pool, bytes);
                Ok(Some(addr.get()))
            }
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// PyTorch's `release_block`: gives an idle segment back and says how many bytes that were; none when another thread
    /// took it meanwhile.
    fn release_segment(&self, growth: &mut Growth, idle: &Idle<'_>) -> Result<u64, DriverError> {
        // The record goes before the memory: another thread may be given the address at once.
        let removed = self.totals.enter(idle.shard, &self.shards).remove_segment(idle.index, idle.addr);
        let Some(segment) = removed else { return Ok(0) };
        // SAFETY: the block is a whole segment, so its address came from `mem_alloc`; it was free and no thread can take it
        // any more, and no queued work of its own stream or of recorded streams uses it later than the device-wide wait
        // inside the call.
        if let Err(error) = unsafe { self.driver.mem_free(DeviceAddr::handed_out(segment.addr)) } {
            self.totals.enter(idle.shard, &self.shards).restore_segment(segment, idle.freed_at);
            return Err(error);
        }
        growth.removed(&self.settings, segment.pool, segment.bytes);
        Ok(segment.bytes)
    }

    /// Idle segments of a shard's pool, by (size, address); none where a graph may use them.
    fn idle<'a>(&self, shard: &'a Shard, pool: PoolKind) -> Vec<Idle<'a>> {
        let shard_now = shard.lock();
        let (cache, blocks) = (shard_now.cache(), shard_now.cache().blocks());
        if shard_now.is_pinned() {
            return Vec::new();
        }
        let free = cache.free_blocks(pool).into_iter().map(|index| (index, &blocks[index]));
        let whole = free.filter(|(_, block)| !block.is_split());
        let seen = |(index, block): (BlockIndex, &BlockRecord)| Idle {
            shard,
            index,
            addr: block.addr,
            bytes: block.bytes,
            freed_at: block.freed_at,
        };
        whole.map(seen).collect()
    }

    /// Idle segments of every stream, by (stream, size, address). Those of private pools are not among them.
    pub(super) fn all_idle(&self, pool: PoolKind) -> Vec<Idle<'_>> {
        self.shards.of_streams().into_iter().flat_map(|shard| self.idle(shard, pool)).collect()
    }

    /// Idle segments of private pools, one pool after another, each by (small pool before large, stream, size, address).
    pub(super) fn private_idle(&self) -> Vec<Idle<'_>> {
        let mut pools: BTreeMap<_, Vec<&Shard>> = BTreeMap::new();
        for shard in self.shards.private() {
            let private = shard.lock().private();
            pools.entry(private).or_default().push(shard);
        }
        let mut idle = Vec::new();
        for shards in pools.values_mut() {
            shards.sort_unstable_by_key(|shard| shard.stream);
            for pool in [PoolKind::Small, PoolKind::Large] {
                idle.extend(shards.iter().flat_map(|shard| self.idle(shard, pool)));
            }
        }
        idle
    }

    /// PyTorch's `release_available_cached_blocks`: under `max_split_size`, gives back just enough oversize segments of
    /// this stream; true when that freed at least the bytes asked for.
    fn release_oversize(
        &self,
        growth: &mut Growth,
        shard: &Shard,
        pool: PoolKind,
        rounded: u64,
    ) -> Result<bool, DriverError> {
        let Some(max_split) = self.settings.max_split_size else { return Ok(false) };
        let wanted = rounded.max(max_split);
        // Only whole segments can go back. Under PyTorch's bounds on the setting (above 20 MiB, whole MiB) no part of a
        // segment is oversize; under a smaller one it may be.
        let idle = self.idle(shard, pool);
        let fit = {
            let shard = shard.lock();
            let free = shard.cache().free_blocks(pool);
            free.into_iter().find(|index| shard.cache().blocks()[*index].bytes >= wanted)
        };
        if let Some(found) = idle.iter().find(|idle| Some(idle.index) == fit) {
            self.release_segment(growth, found)?;
            return Ok(true);
        }
        let smaller = idle.iter().rev().filter(|idle| idle.bytes < wanted).take_while(|idle| idle.bytes >= max_split);
        let mut released = 0;
        for idle in smaller {
            if released >= wanted {
                break;
            }
            released += self.release_segment(growth, idle)?;
        }
        Ok(released >= wanted)
    }

    /// PyTorch's `garbage_collect_cached_blocks`: gives back idle large segments that are older than the average, until
    /// reserved is below the threshold or none is left; true when any went.
    fn collect_garbage(&self, growth: &mut Growth) -> Result<bool, DriverError> {
        let Some(limit) = self.settings.memory_limit else { return Ok(false) };
        // CAST: PyTorch computes the threshold in the same way, in a double cut to an integer.
        let threshold = (self.settings.garbage_collection_threshold * limit as f64) as u64;
        let Some(target) = growth.held().checked_sub(threshold).filter(|excess| *excess > 0) else {
            return Ok(false);
        };
        let searches = self.searches.load(Relaxed);
        let age = |idle: &Idle<'_>| searches.saturating_sub(idle.freed_at);
        let mut idle = self.all_idle(PoolKind::Large);
        let mut total_age: u64 = idle.iter().map(age).sum();
        let (mut reclaimed, mut any) = (0, false);
        while reclaimed < target && !idle.is_empty() {
            let mean = total_age as f64 / idle.len() as f64;
            let (old, young): (Vec<_>, Vec<_>) = idle.into_iter().partition(|idle| age(idle) as f64 >= mean);
            if old.is_empty() {
                break;
            }
            for idle in old {
                total_age -= age(&idle);
                let bytes = self.release_segment(growth, &idle)?;
                reclaimed += bytes;
                any |= bytes > 0;
            }
            idle = young;
        }
        Ok(any)
    }

    /// PyTorch's `release_cached_blocks`: waits for pending frees, then gives back idle segments, large pool first, each
    /// pool by (stream, size, address), then those of private pools, until at most `keep` bytes are reserved.
    pub(super) fn release_cached(&self, growth: &mut Growth, keep: u64) -> Result<u64, DriverError> {
        growth.synchronizations += 1;
        self.synchronize_pending()?;
        let mut released = 0;
        // Each is looked for when those before it are gone.
        let large: fn(&Self) -> Vec<Idle<'_>> = |caching| caching.all_idle(PoolKind::Large);
        let small: fn(&Self) -> Vec<Idle<'_>> = |caching| caching.all_idle(PoolKind::Small);
        for of in [large, small, Self::private_idle] {
            for idle in of(self) {
                if growth.held() <= keep {
                    return Ok(released);
                }
                released += self.release_segment(growth, &idle)?;
            }
        }
        Ok(released)
    }

    /// Gives back what is idle of a private pool, and says how many bytes went.
    pub(super) fn release_private(&self, growth: &mut Growth, private: CaptureId) -> Result<u64, DriverError> {
        let mut released = 0;
        for idle in self.private_idle() {
            if idle.shard.lock().private() == Some(private) {
                released += self.release_segment(growth, &idle)?;
            }
        }
        Ok(released)
    }

    /// Serves a request that no free block fitted: takes memory from the device, releasing cached memory as PyTorch does when
    /// that is refused. `processed` says whether this thread has looked at the pending frees for this request.
    #[cold]
    pub(super) fn grow(&self, shard: &Shard, wanted: Wanted, processed: bool) -> Result<Block, AllocError> {
        let growth = &mut *self.lock_growth();
        if !processed {
            self.wait_and_process_events()?;
        }
        // Another thread may have grown this stream's cache, or freed into it, while this one waited.
        let block = match self.serve_cached(shard, wanted) {
            Some(served) => Ok(hand_out(shard, served, wanted.requested, served.path())),
            None => self.climb(growth, shard, wanted),
        };
        if block.is_ok() {
            self.note_peak(growth, shard.stream);
        }
        block
    }

    /// The steps that PyTorch takes, in order, until one of them gives a block.
    fn climb(&self, growth: &mut Growth, shard: &Shard, wanted: Wanted) -> Result<Block, AllocError> {
        let (pool, bytes) = (wanted.pool, segment_size(wanted.rounded));
        let collected = self.collects && self.collect_garbage(growth)?;
        if let Some(addr) = self.new_segment(growth, pool, bytes, false)? {
            let path = if collected { Path::Collect } else { Path::DriverAlloc };
            return Ok(self.serve_from_segment(shard, addr, bytes, wanted, path));
        }
        if self.release_oversize(growth, shard, pool, wanted.rounded)?
            && let Some(addr) = self.new_segment(growth, pool, bytes, false)?
        {
            return Ok(self.serve_from_segment(shard, addr, bytes, wanted, Path::Retry));
        }
        // `captures_underway`
        if self.any_capture() || shard.lock().private().is_some() {
            growth.ooms += 1;
            return Err(self.out_of_memory(growth, shard, wanted));
        }
        self.release_cached(growth, 0)?;
        if self.settings.retry_fit_after_sync
            && let Some(served) = self.serve_cached(shard, wanted)
        {
            return Ok(hand_out(shard, served, wanted.requested, Path::Retry));
        }
        if let Some(addr) = self.new_segment(growth, pool, bytes, true)? {
            return Ok(self.serve_from_segment(shard, addr, bytes, wanted, Path::Retry));
        }
        growth.ooms += 1;
        Err(self.out_of_memory(growth, shard, wanted))
    }

    /// Cuts a block out of a segment that is new.
    fn serve_from_segment(&self, shard: &Shard, addr: u64, bytes: u64, wanted: Wanted, path: Path) -> Block {
        let segment = BlockRecord::segment(addr, bytes, wanted.pool);
        let served = self.totals.enter(shard, &self.shards).serve_from_segment(segment, wanted, &self.split);
        self.count_oversize(served);
        hand_out(shard, served, wanted.requested, path)
    }

    pub(super) fn out_of_memory(&self, growth: &Growth, shard: &Shard, wanted: Wanted) -> AllocError {
        let Wanted { pool, rounded, requested, .. } = wanted;
        let sizes = |shard: &Shard, pool: PoolKind| {
            let shard = shard.lock();
            let free = shard.cache().free_blocks(pool);
            free.into_iter().map(|index| shard.cache().blocks()[index].bytes).collect::<Vec<u64>>()
        };
        // A graph's free blocks serve no other request, even after a trim.
        let others = self.shards.by_stream().into_iter();
        let others = others.filter(|other| other.id != shard.id && !other.lock().is_pinned());
        let others =
            others.map(|other| sizes(other, PoolKind::Small).iter().chain(&sizes(other, PoolKind::Large)).sum::<u64>());
        let others = others.sum();
        let mut stats = Stats::with_pools();
        self.totals.report(&self.shards, &mut stats);
        AllocError::OutOfMemory(Box::new(OomReport {
            allocator: self.name().into(),
            requested_bytes: requested,
            needed_bytes: segment_size(rounded),
            reserved_bytes: growth.held(),
            active_bytes: stats.active_bytes.all.current,
            largest_free_bytes: Some(sizes(shard, pool).last().copied().unwrap_or(0)),
            other_streams_free_bytes: Some(others),
            limit_bytes: self.settings.memory_limit,
            device_bytes: self.driver.mem_info().ok().map(|info| (info.free, info.total)),
            against_fragmentation: self.settings.against_fragmentation(Some(of_torch(TorchAllocator::Expandable).name)),
        }))
    }
}
