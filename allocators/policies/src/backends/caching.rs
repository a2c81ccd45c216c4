//! # `caching`: PyTorch's native caching allocator, for speed
//!
//! The policy is that of [`pytorch`], which is the one to read. Tests require the same addresses, paths, statistics and snapshots.
//! This version is written so that threads on streams of their own do not wait for each other and a hit takes one short lock.
//!
//! *Policy.* Requests are rounded to 512 bytes and served from a small pool (up to 1 MiB, 2 MiB segments) or a large pool (20 MiB
//! segments, or 2 MiB multiples from 10 MiB on) by best fit over (stream, size, address). Blocks are split and coalesced inside
//! their segment; segments are released to the driver only under pressure.
//!
//! *Structure.* `Caching::serve` and `Caching::free` below are the two paths. `growth` has the segments for `pytorch`'s steps on a
//! miss, `pending` uses on other streams, `capture` graph captures, `pool` private pools. Each technique for speed is one file,
//! with a paragraph on its idea and its effect:
//!
//! | file | technique |
//! |---|---|
//! | `shard` | each stream has its own lock, blocks and counts |
//! | `totals` | exact peaks over all streams without a counter that all write |
//! | `exact_index` | free blocks of the small pool: a bin for each size |
//! | `ranged_index` | free blocks of the large pool: 128 bins a doubling |
//! | `pool` | a private pool has shards of its own |
//! | `blocks` | one cache line a block, linked by indices |
//!
//! *Cost.* Allocate and free on a hit: one short lock that only users of the same stream share, O(1) in the number of
//! blocks but for the few of one size bin, no driver call, no allocation. A miss costs a `cuMemAlloc`; a refused miss
//! costs a synchronise and the release of every idle segment.
//!
//! *Graph capture.* A capture has blocks and segments of its own under the same policy, as PyTorch's private pools; the segments
//! are released after the capture. It costs nothing while no capture is open.
//!
//! *Good at* repeating workloads: after the first step there are no driver calls. *Bad at* sizes that keep changing
//! (fragmentation), and at memory used on several streams (each stream keeps its own blocks).
//!
//! *Threads.* Misses take turns and hold no shard's lock while they call the device. A block contains the numbers of its shard and
//! record, so a free from any thread needs no search by address.
//!
//! *Source.* PyTorch, `c10/cuda/CUDACachingAllocator.cpp` (2.11), whose rules this follows address for address.

mod block_cache;
mod blocks;
mod capture;
mod exact_index;
mod free_index;
mod growth;
#[cfg(all(test, loom))]
mod models;
mod pending;
mod pool;
mod ranged_index;
mod restore;
mod shard;
mod tally;
mod totals;
mod watched_lock;

pub use super::pytorch::PyTorchSettings as CachingSettings;

use super::captures::Captures;
use super::pooled::Pooled;
use super::pytorch::PyTorch;
use super::registry::{Backend, Capabilities, Varying};
use super::{foreign, not_held, pytorch};
use crate::backends::caching::block_cache::{BlockCache, CacheRequest, Served};
use crate::backends::caching::blocks::{BlockIndex, State};
use crate::contract::{
    AllocError, Block, CaptureId, Completions, DeviceAllocator, Gauge, GraphMemory, Ledger, MemoryLimit, Parts, Path,
    PoolKind, PrivatePool, PrivatePools, Request, RestoreError, Snapshot, Stats, Takeover, Token,
};
use crate::policy::grow::{release_cached, release_private};
use crate::policy::size::torch::{pool_of, round_size};
use crate::policy::split::Split;
use crate::sync::{AtomicU64, AtomicUsize, Mutex, MutexGuard, lock};
use capture::Pool;
use growth::Growth;
use pending::Pending;
use pool::Pools;
use shard::{Shard, ShardTable};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use totals::Totals;
use vramlab_device::settings::Settings as _;
use vramlab_device::{DeviceAddr, Driver, StreamId};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "caching",
    summary: "PyTorch's native policy: keeps segments, best fit by stream, size and address",
    capabilities: Capabilities { follows_pytorch: true, ..Pooled::<PyTorch>::CAPABILITIES },
    compared: true,
    constructor: &Varying {
        capabilities: |native, settings: &CachingSettings| Capabilities {
            follows_pytorch: settings.follows_pytorch(),
            ..native
        },
        build: |driver, settings| Ok(Arc::new(Caching::new(driver, *settings))),
    },
};

/// No device has this many bytes.
const NO_LIMIT: u64 = u64::MAX;

/// See the [module](self).
///
/// Locks are taken in the order `growth`, `pending`, `captures`, `pools`, the sums of `totals`, one shard; after these only
/// `oversize_allocations` or `completed`, or the table's numbers and then its further ones, during which no other lock is taken.
#[derive(Debug)]
pub struct Caching {
    driver: Arc<dyn Driver>,
    settings: CachingSettings,
    /// The rule for the blocks that a request may take or split.
    split: Split,
    /// Blocks of at least this size are counted as oversize.
    max_split: u64,
    /// Maximum of reserved bytes, or [`NO_LIMIT`].
    memory_limit: AtomicU64,
    /// Whether idle segments are collected when there is a limit, so that searches are counted.
    collects: bool,
    shards: ShardTable,
    totals: Totals,
    growth: Mutex<Growth>,
    pending: Mutex<Pending>,
    /// Entries in `pending`, open captures and streams in private pools, so that a request knows without a lock whether there are
    /// any.
    waiting: AtomicUsize,
    captures: Mutex<Captures<Pool>>,
    /// Open captures.
    capturing: AtomicUsize,
    pools: Mutex<Pools>,
    /// Number of searches of the free blocks of the large pool, counted only if garbage is collected; the age of a free block is
    /// the increase since it became free.
    searches: AtomicU64,
    oversize_allocations: Mutex<Gauge>,
    /// Addresses of completed deferred frees, if requested.
    completed: Mutex<Option<Vec<DeviceAddr>>>,
}

impl Caching {
    /// A caching allocator on `driver`.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: CachingSettings) -> Self {
        Self {
            driver,
            settings,
            split: pytorch::split(&settings),
            max_split: settings.max_split(),
            memory_limit: AtomicU64::new(settings.memory_limit.unwrap_or(NO_LIMIT)),
            collects: settings.garbage_collection_threshold > 0.0,
            shards: ShardTable::new(),
            totals: Totals::new(),
            waiting: AtomicUsize::new(0),
            growth: Mutex::new(Growth::default()),
            pending: Mutex::new(Pending::default()),
            captures: Mutex::new(Captures::default()),
            capturing: AtomicUsize::new(0),
            pools: Mutex::new(Pools::default()),
            searches: AtomicU64::new(0),
            oversize_allocations: Mutex::new(Gauge::default()),
            completed: Mutex::new(None),
        }
    }

    /// The settings with the limit in effect.
    fn settings_now(&self) -> CachingSettings {
        let limit = self.memory_limit.load(Relaxed);
        CachingSettings { memory_limit: (limit != NO_LIMIT).then_some(limit), ..self.settings }
    }

    fn lock_growth(&self) -> MutexGuard<'_, Growth> {
        lock(&self.growth)
    }

    /// PyTorch's `malloc`.
    fn serve(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        // Blocks whose events have completed are free again before the search. The same check finds captures and pools.
        let (processed, shard) = match self.waiting.load(Acquire) {
            0 => (true, self.shards.of_stream(stream)),
            _ => (self.process_events_for(stream)?, self.shard_for(stream)),
        };
        self.serve_from(shard, request, processed)
    }

    /// Serves a request from one shard. `processed` is true when deferred frees were processed for it.
    #[inline(always)]
    fn serve_from(&self, shard: &Shard, request: Request, processed: bool) -> Result<Block, AllocError> {
        let cache_request = self.cache_request(request);
        match self.serve_cached(shard, cache_request) {
            Some(served) => Ok(hand_out(shard, served, request.bytes, served.path())),
            None => self.grow(shard, cache_request, processed),
        }
    }

    #[inline(always)]
    fn cache_request(&self, request: Request) -> CacheRequest {
        let rounded = round_size(request.bytes, &self.settings.roundup_power2_divisions);
        let pool = pool_of(rounded);
        CacheRequest { pool, rounded, requested: request.bytes, now: self.count_search(pool) }
    }

    /// Takes the best fit from a stream's cache; `None` when nothing fits.
    #[inline(always)]
    fn serve_cached(&self, shard: &Shard, request: CacheRequest) -> Option<Served> {
        let served = self.totals.enter(shard, &self.shards).serve(request, &self.split)?;
        self.count_oversize(served);
        Some(served)
    }

    /// PyTorch's `free`.
    fn free(&self, block: Block) -> Result<Path, AllocError> {
        let Some(shard) = self.shard_of(&block) else { return Err(foreign(self.name(), block)) };
        let mut cache = self.totals.enter(shard, &self.shards);
        let Some(index) = Self::find(&cache, &block) else {
            drop(cache);
            return Err(foreign(self.name(), block));
        };
        if block.bytes() >= self.max_split {
            lock(&self.oversize_allocations).decrease(1);
        }
        // Used by other streams, or live when a capture began.
        if cache.blocks()[index].shared {
            drop(cache);
            return self.defer(shard.id, index);
        }
        let joined = cache.take_back(index, self.searches.load(Relaxed));
        Ok(if joined { Path::Coalesce } else { Path::Hit })
    }

    /// Counts a search of the free blocks of the large pool, if garbage is collected; returns the number before.
    #[inline]
    fn count_search(&self, pool: PoolKind) -> u64 {
        if self.collects && pool == PoolKind::Large {
            return self.searches.fetch_add(1, Relaxed) + 1;
        }
        self.searches.load(Relaxed)
    }

    /// Counts a block that is oversize by `max_split_size`.
    #[inline(always)]
    fn count_oversize(&self, served: Served) {
        if served.bytes >= self.max_split {
            lock(&self.oversize_allocations).increase(1);
        }
    }

    /// The shard in a block's token; `None` if it belongs to another allocator.
    fn shard_of(&self, block: &Block) -> Option<&Shard> {
        self.shards.by_id(block.token().parts().0)
    }

    /// The live record of a block, if there is one.
    #[inline]
    fn find(cache: &BlockCache, block: &Block) -> Option<BlockIndex> {
        let (_, index): (_, BlockIndex) = block.token().parts();
        let record = cache.blocks().find(index, block.addr().get());
        record.filter(|record| record.state == State::Allocated).map(|_| index)
    }
}

/// The block for the client. Its token is the shard's number and the record's index. No other allocator has the number, so the
/// search for the shard in a free also detects a block of another allocator.
#[inline(always)]
fn hand_out(shard: &Shard, served: Served, requested: u64, path: Path) -> Block {
    let token = Token::new(shard.id, served.index);
    // SAFETY: a shard allocates a part of a segment that no other record has, until it is freed in that shard.
    unsafe { Block::new(DeviceAddr::handed_out(served.addr), served.bytes, requested, path, token) }
}

impl DeviceAllocator for Caching {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        self.settings_now().json()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.serve(request, stream)
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        self.free(block)
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.announce(block, stream)
    }

    fn forget_stream(&self, stream: StreamId) {
        for shard in self.shards.by_stream() {
            shard.lock().uses().values_mut().for_each(|users| users.retain(|user| *user != stream));
        }
        // A free that found the stream before holds the queues until its event is recorded.
        self.end_pending_of(stream);
    }

    fn stats(&self) -> Stats {
        let growth = self.lock_growth();
        let mut stats = growth.stats.clone();
        self.totals.report(&self.shards, &mut stats);
        stats.stranded_bytes = lock(&self.pending).stranded_bytes();
        stats.oversize_allocations = Some(*lock(&self.oversize_allocations));
        stats
    }

    fn reset_peaks(&self) {
        let growth = &mut *self.lock_growth();
        self.restart_growth_peaks(growth);
        lock(&self.pending).reset_peaks();
        self.totals.restart_peaks(&self.shards);
        lock(&self.oversize_allocations).reset_peak();
    }

    fn snapshot(&self) -> Option<Snapshot> {
        let _growth = self.lock_growth();
        Some(self.all_segments())
    }

    fn ledger_at_peak(&self) -> Ledger {
        self.lock_growth().peak
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        let released = release_cached(&mut self.grown(), keep_bytes);
        lock(&self.pending).take_error().map_or(Ok(()), Err)?;
        Ok(released?)
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            graphs: Some(self),
            private_pools: Some(self),
            limit: Some(self),
            takeover: Some(self),
            completions: Some(self),
            ..Parts::NONE
        }
    }
}

impl GraphMemory for Caching {
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        self.begin_capture(stream)
    }

    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.end_capture(capture)
    }

    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.release_capture(capture)
    }

    fn set_reuse_in_captures(&self, on: bool) -> bool {
        lock(&self.pending).reuse_in_captures(on);
        true
    }
}

impl PrivatePools for Caching {
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        request.validate()?;
        let processed = self.waiting.load(Acquire) == 0 || self.process_events_for(stream)?;
        self.serve_from(self.shard_of_pool(pool, stream)?, request, processed)
    }

    fn pool_create(&self) -> Result<PrivatePool, AllocError> {
        Ok(lock(&self.pools).known.create())
    }

    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        self.begin_pool(pool, stream)
    }

    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
        lock(&self.pools).known.end(self.name(), stream)?;
        self.waiting.fetch_sub(1, Release);
        Ok(())
    }

    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError> {
        self.release_pool(pool)
    }

    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        lock(&self.pools).known.need_released(self.name(), pool)?;
        self.wait_and_process_events(None)?;
        Ok(release_private(&mut self.grown(), pool.id())?)
    }

    fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError> {
        let _growth = self.lock_growth();
        let mut snapshot = self.all_segments();
        snapshot.segments.retain(|segment| segment.private == Some(pool.id()));
        Ok(snapshot)
    }

    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        self.restore_pool(pool, checkpoint, held)
    }
}

impl MemoryLimit for Caching {
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        self.memory_limit.store(bytes.unwrap_or(NO_LIMIT), Relaxed);
        true
    }
}

impl Takeover for Caching {
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        self.take_over(snapshot, age).map(Some)
    }
}

impl Completions for Caching {
    fn tell_completed(&self, on: bool) {
        *lock(&self.completed) = on.then(Vec::new);
    }

    fn take_completed(&self) -> Vec<DeviceAddr> {
        lock(&self.completed).as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Drop for Caching {
    fn drop(&mut self) {
        self.unpin_all();
        // An error cannot be returned here, and it ends a release, so that is tried twice: one call that fails once does not keep
        // the remainder reserved. Segments that remain are released with the device context.
        for _ in 0..2 {
            if release_cached(&mut self.grown(), 0).is_ok() {
                break;
            }
        }
        for event in lock(&self.pending).events().take() {
            // SAFETY: the event is in no queue any more and belongs to this allocator only.
            let _ = unsafe { self.driver.event_destroy(event) };
        }
    }
}
