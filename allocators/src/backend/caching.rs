//! # `caching`: PyTorch's native policy
//!
//! *Policy.* Requests are rounded to 512 bytes and served from a small pool (up to 1 MiB, 2 MiB segments) or a
//! large pool (20 MiB segments, or 2 MiB multiples from 10 MiB on) by best fit over (stream, size, address).
//! Blocks are split and coalesced inside their segment; segments go back to the driver only under pressure.
//!
//! *Cost.* Allocate and free: O(log n) in the free blocks of the pool, no driver call on a hit. A miss costs a
//! `cuMemAlloc`; a refused miss costs a synchronise and the release of every idle segment.
//!
//! *Good at* repeating workloads: after the first step there are no driver calls. *Bad at* sizes that keep
//! changing (hard fragmentation), and at memory used on several streams (each stream keeps its own blocks).
//!
//! *Source.* PyTorch, `c10/cuda/CUDACachingAllocator.cpp` (2.11), whose rules this follows address for address.

use crate::allocator::{Block, DeviceAllocator, Path, Request};
use crate::core::block_cache::{BlockCache, SplitRules, address};
use crate::core::blocks::{BlockIndex, BlockRecord, NONE};
use crate::core::free_index::FreeKey;
use crate::core::rounding::{Divisions, pool_of, round_size, segment_size};
use crate::device::{Driver, EventId, StreamId};
use crate::error::{AllocError, DriverError, OomReport};
use crate::snapshot::{BlockState, Ledger, Snapshot};
use crate::stats::{PoolKind, Stats};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Settings under PyTorch's names (`PYTORCH_ALLOC_CONF`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CachingSettings {
    /// Blocks of at least this size are never split, and smaller requests never take them. `None`: no bound.
    pub max_split_size: Option<u64>,
    /// How much larger than the request an unsplittable block may be.
    pub max_non_split_rounding: u64,
    /// Fraction of the limit above which idle segments are released before new ones are taken; 0 turns it off.
    /// Needs `memory_limit`.
    pub garbage_collection_threshold: f64,
    /// Rounding to equal steps between powers of two, by size.
    pub roundup_power2_divisions: Divisions,
    /// Most bytes that may be reserved (`set_per_process_memory_fraction`).
    pub memory_limit: Option<u64>,
    /// After the release of the whole cache has waited for pending frees, look for a free block again before
    /// asking the device. PyTorch does not, so a block that became free in that wait is missed; off follows it.
    pub retry_fit_after_sync: bool,
}

impl Default for CachingSettings {
    fn default() -> Self {
        Self {
            max_split_size: None,
            max_non_split_rounding: 20 << 20,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: Divisions::default(),
            memory_limit: None,
            retry_fit_after_sync: false,
        }
    }
}

impl CachingSettings {
    fn max_split(&self) -> u64 {
        self.max_split_size.unwrap_or(u64::MAX)
    }

    fn collects(&self) -> bool {
        self.memory_limit.is_some() && self.garbage_collection_threshold > 0.0
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct Caching {
    driver: Arc<dyn Driver>,
    settings: CachingSettings,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    cache: BlockCache,
    /// By stream, frees that wait for that stream, oldest first. An event is missing where recording it failed;
    /// it is recorded later, which is late but safe.
    pending: BTreeMap<StreamId, VecDeque<(Option<EventId>, BlockIndex)>>,
    /// Events to use again.
    events: Vec<EventId>,
    peak: Ledger,
    /// Stream of the last request that was served by a new segment.
    grown_by: StreamId,
}

impl Caching {
    /// A caching allocator on `driver`.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: CachingSettings) -> Self {
        let state = State {
            cache: BlockCache::new(SplitRules {
                max_split: settings.max_split(),
                max_non_split_rounding: settings.max_non_split_rounding,
                count_searches: settings.collects(),
            }),
            pending: BTreeMap::new(),
            events: Vec::new(),
            peak: Ledger::default(),
            grown_by: StreamId(0),
        };
        Self { driver, settings, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// PyTorch's `alloc_block`: `None` when the limit or the device refuses.
    fn new_segment(
        &self,
        state: &mut State,
        pool: PoolKind,
        rounded: u64,
        stream: StreamId,
        retry: bool,
    ) -> Result<Option<BlockIndex>, DriverError> {
        let bytes = segment_size(rounded);
        if retry {
            state.cache.stats.num_alloc_retries += 1;
        }
        if self.settings.memory_limit.is_some_and(|limit| state.cache.reserved().saturating_add(bytes) > limit) {
            return Ok(None);
        }
        let addr = match self.driver.mem_alloc(bytes) {
            Ok(addr) => addr,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let stats = &mut state.cache.stats;
        stats.num_device_alloc += 1;
        stats.reserved_bytes.increase(pool, bytes);
        if let Some(gauge) = &mut stats.segment {
            gauge.increase(pool, 1);
        }
        if let Some(gauge) = stats.oversize_segments.as_mut().filter(|_| bytes >= self.settings.max_split()) {
            gauge.increase(1);
        }
        Ok(Some(state.cache.blocks.insert(BlockRecord::segment(addr.get(), bytes, stream, pool))))
    }

    /// PyTorch's `release_block`: gives a whole free segment back.
    fn release_segment(&self, state: &mut State, index: BlockIndex) -> Result<u64, DriverError> {
        let key = state.cache.key(index);
        let pool = state.cache.blocks.get(index).pool;
        // The record goes before the memory: another thread may be given the address at once.
        state.cache.pool(pool).free.remove(key);
        // SAFETY: the block is a whole segment (the callers check that it is not split), so its address came from
        // `mem_alloc`; it is free, so no queued work of its own stream or of recorded streams uses it later than the
        // device-wide wait inside the call.
        if let Err(error) = unsafe { self.driver.mem_free(address(key.addr)) } {
            state.cache.pool(pool).free.insert(key);
            return Err(error);
        }
        state.cache.blocks.remove(index);
        let stats = &mut state.cache.stats;
        stats.num_device_free += 1;
        stats.reserved_bytes.decrease(pool, key.bytes);
        if let Some(gauge) = &mut stats.segment {
            gauge.decrease(pool, 1);
        }
        if let Some(gauge) = stats.oversize_segments.as_mut().filter(|_| key.bytes >= self.settings.max_split()) {
            gauge.decrease(1);
        }
        Ok(key.bytes)
    }

    /// PyTorch's `release_available_cached_blocks`: under `max_split_size`, gives back just enough oversize
    /// segments of this stream; true when that freed at least the bytes asked for.
    fn release_oversize(
        &self,
        state: &mut State,
        pool: PoolKind,
        rounded: u64,
        stream: StreamId,
    ) -> Result<bool, DriverError> {
        let Some(max_split) = self.settings.max_split_size else { return Ok(false) };
        let wanted = rounded.max(max_split);
        // Only whole segments can go back. Under PyTorch's bounds on the setting (above 20 MiB, whole MiB) no part of
        // a segment is oversize; under a smaller one it may be.
        let whole = |state: &State, key: &FreeKey| !state.cache.blocks.get(key.index).is_split();
        if let Some(found) = state.cache.pool(pool).free.best_fit(stream, wanted).filter(|key| whole(state, key)) {
            self.release_segment(state, found.index)?;
            return Ok(true);
        }
        let mut candidates: Vec<FreeKey> =
            state.cache.pool(pool).free.below(stream, wanted).take_while(|key| key.bytes >= max_split).collect();
        candidates.retain(|key| whole(state, key));
        let mut released = 0;
        for key in candidates {
            if released >= wanted {
                break;
            }
            released += self.release_segment(state, key.index)?;
        }
        Ok(released >= wanted)
    }

    /// PyTorch's `garbage_collect_cached_blocks`: gives back idle large segments that are older than the average,
    /// until reserved is below the threshold or none is left; true when any went.
    fn collect_garbage(&self, state: &mut State) -> Result<bool, DriverError> {
        let Some(limit) = self.settings.memory_limit else { return Ok(false) };
        // CAST: PyTorch computes the threshold in the same way, in a double cut to an integer.
        let threshold = (self.settings.garbage_collection_threshold * limit as f64) as u64;
        let Some(target) = state.cache.reserved().checked_sub(threshold).filter(|excess| *excess > 0) else {
            return Ok(false);
        };
        let searches = state.cache.large.searches;
        let age = |state: &State, index: BlockIndex| searches - state.cache.blocks.get(index).freed_at;
        let mut idle: Vec<BlockIndex> = state
            .cache
            .large
            .free
            .iter()
            .map(|key| key.index)
            .filter(|&index| !state.cache.blocks.get(index).is_split())
            .collect();
        let mut total_age: u64 = idle.iter().map(|&index| age(state, index)).sum();
        let (mut reclaimed, mut any) = (0, false);
        while reclaimed < target && !idle.is_empty() {
            let mean = total_age as f64 / idle.len() as f64;
            let (old, young): (Vec<_>, Vec<_>) = idle.iter().partition(|&&index| age(state, index) as f64 >= mean);
            if old.is_empty() {
                break;
            }
            for index in old {
                total_age -= age(state, index);
                reclaimed += self.release_segment(state, index)?;
                any = true;
            }
            idle = young;
        }
        Ok(any)
    }

    /// PyTorch's `release_cached_blocks`: waits for pending frees, then gives back idle segments, large pool
    /// first, each pool by (stream, size, address), until at most `keep` bytes are reserved.
    fn release_cached(&self, state: &mut State, keep: u64) -> Result<u64, DriverError> {
        self.synchronize_pending(state)?;
        let mut released = 0;
        for pool in [PoolKind::Large, PoolKind::Small] {
            let keys: Vec<FreeKey> = state.cache.pool(pool).free.iter().collect();
            for key in keys {
                if state.cache.reserved() <= keep {
                    return Ok(released);
                }
                if !state.cache.blocks.get(key.index).is_split() {
                    released += self.release_segment(state, key.index)?;
                }
            }
        }
        Ok(released)
    }

    /// Queues an event behind the work that a pending free waits for.
    fn record_event(&self, state: &mut State, stream: StreamId) -> Result<EventId, DriverError> {
        let event = match state.events.pop() {
            Some(event) => event,
            None => self.driver.event_create(false)?,
        };
        match self.driver.event_record(event, stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                state.events.push(event);
                Err(error)
            }
        }
    }

    /// PyTorch's `process_events`: frees blocks whose events have completed. Each stream's queue is looked at
    /// until its first event that has not.
    fn process_events(&self, state: &mut State) -> Result<(), DriverError> {
        if state.pending.is_empty() {
            return Ok(());
        }
        let streams: Vec<StreamId> = state.pending.keys().copied().collect();
        for stream in streams {
            while let Some(&(event, index)) = state.pending.get(&stream).and_then(VecDeque::front) {
                let event = match event {
                    Some(event) => event,
                    None => {
                        let event = self.record_event(state, stream)?;
                        if let Some(front) = state.pending.get_mut(&stream).and_then(VecDeque::front_mut) {
                            front.0 = Some(event);
                        }
                        event
                    }
                };
                if !self.driver.event_query(event)? {
                    break;
                }
                self.complete(state, stream, event, index);
            }
        }
        state.pending.retain(|_, queue| !queue.is_empty());
        Ok(())
    }

    /// Takes the first entry off a queue and frees its block once no event is left.
    fn complete(&self, state: &mut State, stream: StreamId, event: EventId, index: BlockIndex) {
        if let Some(queue) = state.pending.get_mut(&stream) {
            queue.pop_front();
        }
        state.events.push(event);
        let block = state.cache.blocks.get_mut(index);
        block.events -= 1;
        if block.events == 0 {
            state.cache.release_to_cache(index);
        }
    }

    fn synchronize_pending(&self, state: &mut State) -> Result<(), DriverError> {
        state.cache.stats.num_sync_all_streams += 1;
        let streams: Vec<StreamId> = state.pending.keys().copied().collect();
        for stream in streams {
            while let Some(&(event, index)) = state.pending.get(&stream).and_then(VecDeque::front) {
                let event = match event {
                    Some(event) => event,
                    None => self.record_event(state, stream)?,
                };
                if let Some(front) = state.pending.get_mut(&stream).and_then(VecDeque::front_mut) {
                    front.0 = Some(event);
                }
                self.driver.event_synchronize(event)?;
                self.complete(state, stream, event, index);
            }
        }
        state.pending.clear();
        Ok(())
    }

    fn out_of_memory(&self, state: &mut State, requested: u64, rounded: u64, stream: StreamId) -> AllocError {
        state.cache.stats.num_ooms += 1;
        let pool = pool_of(rounded);
        let mine = |key: &FreeKey| key.stream == stream;
        let largest = state.cache.pool(pool).free.iter().filter(mine).map(|key| key.bytes).max().unwrap_or(0);
        let all = state.cache.small.free.iter().chain(state.cache.large.free.iter());
        let others = all.filter(|key| !mine(key)).map(|key| key.bytes).sum();
        AllocError::OutOfMemory(Box::new(OomReport {
            allocator: self.name().into(),
            requested_bytes: requested,
            needed_bytes: segment_size(rounded),
            reserved_bytes: state.cache.reserved(),
            active_bytes: state.cache.stats.active_bytes.all.current,
            largest_free_bytes: Some(largest),
            other_streams_free_bytes: Some(others),
            limit_bytes: self.settings.memory_limit,
            device_bytes: self.driver.mem_info().ok().map(|info| (info.free, info.total)),
        }))
    }

    /// Takes memory from the device, releasing cached memory as PyTorch does when that is refused.
    fn grow(
        &self,
        state: &mut State,
        requested: u64,
        rounded: u64,
        stream: StreamId,
    ) -> Result<(BlockIndex, Path), AllocError> {
        let pool = pool_of(rounded);
        let collected = self.settings.collects() && self.collect_garbage(state)?;
        let path = if collected { Path::Collect } else { Path::DriverAlloc };
        if let Some(index) = self.new_segment(state, pool, rounded, stream, false)? {
            return Ok((index, path));
        }
        if self.release_oversize(state, pool, rounded, stream)?
            && let Some(index) = self.new_segment(state, pool, rounded, stream, false)?
        {
            return Ok((index, Path::Retry));
        }
        self.release_cached(state, 0)?;
        if self.settings.retry_fit_after_sync
            && let Some(index) = state.cache.take_best_fit(pool, rounded, stream)
        {
            return Ok((index, Path::Retry));
        }
        if let Some(index) = self.new_segment(state, pool, rounded, stream, true)? {
            return Ok((index, Path::Retry));
        }
        Err(self.out_of_memory(state, requested, rounded, stream))
    }

    /// The live record behind a block.
    fn find<'a>(&self, state: &'a mut State, block: &Block) -> Result<(BlockIndex, &'a mut BlockRecord), AllocError> {
        let index = BlockIndex::try_from(block.token()).unwrap_or(NONE);
        let known = state.cache.blocks.find(index);
        if known.is_none_or(|record| record.addr != block.addr().get() || record.state != BlockState::Allocated) {
            return Err(AllocError::ForeignBlock {
                addr: block.addr().get(),
                bytes: block.bytes(),
                allocator: self.name().into(),
                reason: "it is not among the live blocks",
            });
        }
        Ok((index, state.cache.blocks.get_mut(index)))
    }
}

impl DeviceAllocator for Caching {
    fn name(&self) -> &'static str {
        "caching"
    }

    fn settings(&self) -> serde_json::Value {
        let settings = &self.settings;
        serde_json::json!({
            "max_split_size": settings.max_split_size,
            "max_non_split_rounding": settings.max_non_split_rounding,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "roundup_power2_divisions": settings.roundup_power2_divisions.0,
            "memory_limit": settings.memory_limit,
            "retry_fit_after_sync": settings.retry_fit_after_sync,
        })
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        let rounded = round_size(request.bytes, &self.settings.roundup_power2_divisions);
        let state = &mut *self.lock();
        self.process_events(state)?;
        let pool = pool_of(rounded);
        let (found, mut path) = match state.cache.take_best_fit(pool, rounded, stream) {
            Some(index) => (index, Path::Hit),
            None => self.grow(state, request.bytes, rounded, stream)?,
        };
        let (index, split) = state.cache.hand_out(found, rounded, request.bytes);
        if split && path == Path::Hit {
            path = Path::Split;
        }
        if path != Path::Hit && path != Path::Split && state.cache.reserved() > state.peak.reserved {
            state.peak = state.cache.snapshot().ledger(stream);
            state.grown_by = stream;
        }
        let record = state.cache.blocks.get(index);
        Ok(Block::new(address(record.addr), record.bytes, request.bytes, path, u64::from(index)))
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        let state = &mut *self.lock();
        let (index, record) = self.find(state, &block)?;
        let (pool, bytes) = (record.pool, record.bytes);
        let uses = std::mem::take(&mut record.uses);
        record.state = BlockState::PendingFree;
        state.cache.stats.allocation.decrease(pool, 1);
        state.cache.stats.allocated_bytes.decrease(pool, bytes);
        if let Some(gauge) =
            state.cache.stats.oversize_allocations.as_mut().filter(|_| bytes >= self.settings.max_split())
        {
            gauge.decrease(1);
        }
        if uses.is_empty() {
            let joined = state.cache.release_to_cache(index);
            return Ok(if joined { Path::Coalesce } else { Path::Hit });
        }
        // CAST: one entry for each stream.
        state.cache.blocks.get_mut(index).events = uses.len() as u32;
        let mut failed = None;
        for user in uses {
            let event = self.record_event(state, user).map_err(|error| failed = Some(error)).ok();
            state.pending.entry(user).or_default().push_back((event, index));
        }
        failed.map_or(Ok(Path::Deferred), |error| Err(error.into()))
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let state = &mut *self.lock();
        let (_, record) = self.find(state, block)?;
        if stream != record.stream && !record.uses.contains(&stream) {
            record.uses.push(stream);
        }
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.lock().cache.stats.clone()
    }

    fn reset_peaks(&self) {
        let state = &mut *self.lock();
        state.cache.stats.reset_peaks();
        state.peak = state.cache.snapshot().ledger(state.grown_by);
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(self.lock().cache.snapshot())
    }

    fn ledger_at_peak(&self) -> Ledger {
        self.lock().peak
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        Ok(self.release_cached(&mut self.lock(), keep_bytes)?)
    }
}

impl Drop for Caching {
    fn drop(&mut self) {
        let state = &mut *self.lock();
        // Errors have nobody to go to. An error ends a round, so one call that fails once does not keep the rest;
        // what stays goes with the device context.
        for _ in 0..2 {
            if self.release_cached(state, 0).is_ok() {
                break;
            }
        }
        for event in std::mem::take(&mut state.events) {
            // SAFETY: the event is in no queue any more and belongs to this allocator alone.
            let _ = unsafe { self.driver.event_destroy(event) };
        }
    }
}
