//! # `stream-ordered`: the CUDA memory pool
//!
//! *Policy.* Each request is one `cuMemAllocFromPoolAsync` on a pool of this allocator's own, each free one `cuMemFreeAsync` on the
//! block's stream. The release threshold sets how much memory the pool keeps (here everything by default; CUDA's default is
//! nothing), its three reuse policies the reuse across streams.
//!
//! *Cost.* Allocate and free: one driver call each, 0.4 us on an H200 while the pool has room; 29 us more for each 32 MiB that the
//! pool allocates from the device. With a low threshold each synchronise releases free memory, at 36 us for 32 MiB (`experiments
//! calibrate`).
//!
//! *Graph capture.* The driver captures allocations and frees as nodes of the graph. That memory belongs to the graph, not to the
//! pool, and the device counts it ([`Stats::graph_memory`]). Reserved bytes and the breakdown do not contain it, so that in a
//! capture active bytes can exceed reserved ones. While any capture is open a refused request is not repeated, because that would
//! take a synchronise. The driver is asked whether a block is the graph's or the pool's: a capture that only this allocator knows
//! of takes from the pool. Memory of graphs that it does not know stays with the driver, which keeps it for the next graph;
//! [`trim`](DeviceAllocator::trim) does not release it, which would take calls without effect in most programs.
//!
//! *Limit.* The driver does not report by how much a request would let the pool grow. Under a limit the counters are read before
//! and after each request; a pool that grew too far is trimmed before the request is repeated or refused, so the limit is exceeded
//! at most inside of a call. Memory of graphs is not the pool's and not counted.
//!
//! *Destroyed streams.* A block whose stream was [forgotten](DeviceAllocator::forget_stream) is freed on a stream of this
//! allocator.
//!
//! *Good at* sharing memory between streams and with libraries that use the same pool, and at releasing memory. *Bad at* diagnosis:
//! there are two counters and no visible blocks.
//!
//! *Source.* CUDA programming guide, "Stream-Ordered Memory Allocator":
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>.

mod frees;

use super::captures::{Captures, need_graphs};
use super::registry::{Backend, Capabilities, GraphCapture, Needs, SegmentUse, StreamUse, With};
use super::{foreign, not_held};
use crate::contract::{
    AllocError, Attribution, Block, CaptureId, DeviceAllocator, Gauge, GraphMemory, Ledger, MemoryLimit, OomReport,
    Parts, Path, PeakKind, PoolKind, Request, Snapshot, Stats, Tokens,
};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use vramlab_device::ranges::Ranges;
use vramlab_device::{
    CallKind, DeviceAddr, Driver, DriverError, GraphDriver, PoolCounters, PoolDriver, PoolId, PoolSettings, StreamId,
};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "stream-ordered",
    summary: "a CUDA memory pool (cuMemAllocFromPoolAsync, cuMemFreeAsync)",
    capabilities: Capabilities {
        graph_capture: GraphCapture::DriverNodes,
        streams: StreamUse::Any,
        segments: SegmentUse::Hidden,
        needs: Needs::Pools,
        caches: true,
        sets_aside: true,
        retries: true,
        used_elsewhere: Path::WaitInserted,
        ..Capabilities::LEAST
    },
    compared: true,
    constructor: &With(|driver, settings: &PoolSettings| Ok(Arc::new(StreamOrdered::new(driver, *settings)?))),
};

/// See the [module](self).
#[derive(Debug)]
pub struct StreamOrdered {
    tokens: Tokens,
    driver: Arc<dyn Driver>,
    pool: PoolId,
    settings: PoolSettings,
    state: Mutex<State>,
    /// Maximum of the pool's reserved bytes, `u64::MAX` for no limit.
    limit: AtomicU64,
    /// Locked by requests under a limit, so that each sees by how much it lets the pool grow.
    growing: Mutex<()>,
    /// Locked for reading while a block is in no list and the driver gets its streams, for writing when a stream is forgotten.
    streams: RwLock<()>,
}

#[derive(Debug, Default)]
struct State {
    /// A stream of this allocator's own, for frees of blocks whose stream was destroyed.
    heir: Option<StreamId>,
    stats: Stats,
    live: HashMap<DeviceAddr, LiveBlock>,
    /// Blocks whose free the driver refused: freed by the client, still reserved in the pool.
    refused: VecDeque<(DeviceAddr, LiveBlock)>,
    /// Their bytes.
    stranded: Gauge,
    /// Blocks that are in no list because their free is being queued.
    leaving: Leaving,
    captures: Captures<Kept>,
    /// Bytes of live blocks that were allocated in captures.
    captured: u64,
    /// The counters of graphs' memory when last read; absent until the first capture.
    graph_memory: Option<PoolCounters>,
    /// The breakdown when reserved was last seen at a new peak.
    peak: Ledger,
    /// The counters when last read, for when the driver does not respond.
    counters: PoolCounters,
    /// Addresses of blocks since the pool last may have released memory: it has the memory behind them.
    held: Ranges,
    /// Whether the driver refused to restart its peaks.
    stale_peaks: bool,
}

/// Blocks whose free is being queued, which the pool may have already. The account contains them until the call returns; the
/// statistics do not, since the pool's counters are read together with them.
#[derive(Clone, Copy, Debug, Default)]
struct Leaving {
    blocks: u64,
    bytes: u64,
}

#[derive(Debug)]
struct LiveBlock {
    bytes: u64,
    stream: StreamId,
    uses: Vec<StreamId>,
}

/// The state of a capture.
#[derive(Debug, Default)]
struct Kept {
    /// Whether the driver captures the stream too.
    begun: bool,
    /// Live blocks that were allocated in it.
    own: BTreeSet<DeviceAddr>,
    /// Blocks from before whose free is deferred to its end.
    waiting: Vec<(DeviceAddr, LiveBlock)>,
}

/// The owner of a freed block.
enum Owner {
    Pool,
    /// An open capture.
    Capture,
    /// A graph.
    Graph,
}

/// Number of address ranges that are remembered. A CUDA memory pool has a few.
const MOST_RANGES: usize = 4_096;

const ANY: PoolKind = PoolKind::Large;

impl State {
    /// A block is in no list from here on, until its free has been queued or refused.
    fn leave(&mut self, bytes: u64) {
        self.leaving.blocks += 1;
        self.leaving.bytes += bytes;
    }

    /// The free was queued or refused.
    fn decided(&mut self, bytes: u64) {
        self.leaving.blocks -= 1;
        self.leaving.bytes -= bytes;
    }

    /// The statistics without the blocks whose free is being queued.
    fn stats_now(&self) -> Stats {
        let Leaving { blocks, bytes } = self.leaving;
        let mut stats = self.stats.clone();
        stats.active.decrease(ANY, blocks);
        stats.active_bytes.decrease(ANY, bytes);
        stats.requested_bytes.decrease(ANY, bytes);
        stats
    }

    /// Requested bytes of blocks that the pool has not got back.
    fn requested_of_pool(&self) -> u64 {
        self.stats.requested_bytes.all.current - self.leaving.bytes - self.captured
    }

    /// The breakdown by the counters when last read.
    fn ledger(&self) -> Ledger {
        let PoolCounters { reserved, used, .. } = self.counters;
        // A driver reads one counter after the other.
        let used = used.min(reserved);
        let requested = self.requested_of_pool();
        let waiting = self.captures.kept().flat_map(|kept| &kept.waiting);
        let pending: u64 = self.refused.iter().chain(waiting).map(|(_, block)| block.bytes).sum();
        Ledger {
            internal: used.saturating_sub(requested),
            soft: reserved.saturating_sub(used.max(requested)),
            pending,
            reserved,
            requested: requested - pending,
            attribution: Attribution::PoolCounters,
            ..Ledger::default()
        }
    }

    /// The owner of a block that is freed now; a capture's block is removed from it.
    fn owner_of(&mut self, addr: DeviceAddr, bytes: u64) -> Owner {
        let Some(open) = self.captures.each().find_map(|(open, kept)| kept.own.remove(&addr).then_some(open)) else {
            return Owner::Pool;
        };
        self.captured -= bytes;
        if open { Owner::Capture } else { Owner::Graph }
    }
}

impl StreamOrdered {
    /// A new pool on `driver`.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] on a device without stream-ordered pools; [`AllocError::Driver`] when the pool could not be
    /// created.
    pub fn new(driver: Arc<dyn Driver>, settings: PoolSettings) -> Result<Self, AllocError> {
        let Some(pools) = driver.pools() else {
            return Err(AllocError::Unsupported {
                allocator: BACKEND.name,
                capability: "stream-ordered memory pools (pytorch and caching do without them)",
                device: driver.describe().name,
            });
        };
        let pool = pools.pool_create(settings)?;
        // The settings in effect count, not the requested ones.
        let settings = pools.pool_settings(pool).inspect_err(|_| {
            // SAFETY: just created, nothing was allocated from it, and no other code has the id.
            let _ = unsafe { pools.pool_destroy(pool) };
        })?;
        let (limit, growing, streams) = (AtomicU64::new(u64::MAX), Mutex::default(), RwLock::default());
        Ok(Self { tokens: Tokens::next(), driver, pool, settings, state: Mutex::default(), limit, growing, streams })
    }

    fn pools(&self) -> &dyn PoolDriver {
        self.driver.pools().expect("the constructor found pools")
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pool's counters, or the last values when the driver does not respond.
    fn counters(&self, state: &mut State) -> PoolCounters {
        if let Ok(counters) = self.pools().pool_counters(self.pool) {
            state.counters = counters;
        }
        state.counters
    }

    /// Takes the breakdown when the pool has grown to a new peak.
    ///
    /// A pool that keeps its memory grows only for new addresses, of which there are none after the first steps: so its counters
    /// are read without a driver call for each request. One with a release threshold releases memory when any thread synchronises,
    /// so there one counter is read each time.
    fn watch_growth(&self, state: &mut State, addr: DeviceAddr, bytes: u64) {
        let (start, end) = (addr.get(), addr.get() + bytes);
        let may_have_grown = match self.settings.release_threshold {
            u64::MAX => !state.held.contains(start, end),
            _ => self.pools().pool_reserved_high(self.pool).is_ok_and(|high| high > state.peak.reserved),
        };
        if !may_have_grown {
            return;
        }
        let Ok(counters) = self.pools().pool_counters(self.pool) else { return };
        state.counters = counters;
        if state.held.len() == MOST_RANGES {
            // A forgotten range is only read again.
            state.held = Ranges::default();
        }
        state.held.insert(start, end);
        if counters.reserved > state.peak.reserved {
            state.peak = state.ledger();
        }
    }

    fn out_of_memory(&self, bytes: u64) -> AllocError {
        let mut state = self.lock();
        let counters = self.counters(&mut state);
        state.stats.num_ooms += 1;
        OomReport::new(self.name(), bytes)
            .with_memory(counters.reserved, state.stats.active_bytes.all.current - state.leaving.bytes)
            .with_limit(self.limit())
            .with_device(self.driver.as_ref())
            .into()
    }

    /// The limit, if there is one.
    fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Relaxed)).filter(|limit| *limit != u64::MAX)
    }

    /// Keeps streams from being forgotten, while a block that is in no list names some.
    fn naming_streams(&self) -> RwLockReadGuard<'_, ()> {
        self.streams.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of the pool, which grows to `limit` at most. Its growth is known only afterwards, so excess memory is released
    /// immediately.
    fn take_within(&self, limit: Option<u64>, bytes: u64, stream: StreamId) -> Result<DeviceAddr, DriverError> {
        let Some(limit) = limit else { return self.pools().mem_alloc_async(self.pool, bytes, stream) };
        let beyond =
            || DriverError::new(CallKind::MemAllocAsync, DriverError::OUT_OF_MEMORY, "the limit of this allocator");
        let before = self.pools().pool_counters(self.pool)?;
        if before.used.saturating_add(bytes) > limit.max(before.reserved) {
            return Err(beyond());
        }
        let addr = self.pools().mem_alloc_async(self.pool, bytes, stream)?;
        let reserved = self.pools().pool_counters(self.pool)?.reserved;
        if reserved <= limit.max(before.reserved) {
            return Ok(addr);
        }
        // SAFETY: the pool has just allocated it, and no other code knows of it.
        unsafe { self.pools().mem_free_async(addr, stream) }?;
        // The host has to know that it is free before it can be released. A trim keeps at least the requested size, in whole
        // granules.
        if self.lock().captures.all_ended() {
            self.driver.stream_synchronize(stream)?;
            self.trim_pool(before.reserved)?;
        }
        Err(beyond())
    }

    /// Whether a request on `stream` becomes a part of a graph: the driver is asked until it confirms, once for each capture.
    fn is_of_graph(&self, stream: StreamId) -> Result<bool, DriverError> {
        let mut state = self.lock();
        let Some(kept) = state.captures.open_on(stream) else { return Ok(false) };
        kept.begun = kept.begun || self.driver.stream_is_capturing(stream)?;
        Ok(kept.begun)
    }

    /// The counters of graphs' memory, once there has been a capture.
    fn read_graph_memory(&self, state: &mut State) {
        if state.graph_memory.is_some()
            && let Some(Ok(memory)) = self.driver.graphs().map(GraphDriver::graph_memory)
        {
            state.graph_memory = Some(memory);
        }
    }

    /// Releases memory that no graph uses any more; returns the bytes.
    fn trim_graph_memory(&self) -> Result<u64, DriverError> {
        let graphs = self.driver.graphs().filter(|_| self.lock().graph_memory.is_some());
        let Some(graphs) = graphs else { return Ok(0) };
        let before = graphs.graph_memory()?.reserved;
        graphs.graph_trim()?;
        Ok(before.saturating_sub(graphs.graph_memory()?.reserved))
    }

    /// Lets the pool release memory.
    fn trim_pool(&self, keep_bytes: u64) -> Result<(), DriverError> {
        self.pools().pool_trim_to(self.pool, keep_bytes)?;
        self.lock().held = Ranges::default();
        Ok(())
    }
}

impl DeviceAllocator for StreamOrdered {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        serde_json::json!(self.settings)
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        let bytes = request.bytes;
        let captured = self.is_of_graph(stream)?;
        let limit = self.limit().filter(|_| !captured);
        let growing = limit.map(|_| self.growing.lock().unwrap_or_else(PoisonError::into_inner));
        let take = || self.take_within(limit, bytes, stream);
        let (addr, path) = match take() {
            Ok(addr) => (addr, Path::Pool),
            Err(error) if error.is_out_of_memory() && !self.lock().captures.all_ended() => {
                return Err(self.out_of_memory(bytes));
            }
            Err(error) if error.is_out_of_memory() => {
                // Frees that are still queued keep their memory; after a synchronise the pool can reuse or release it. RMM and
                // PyTorch retry in the same way.
                self.wait_and_reclaim()?;
                self.trim_pool(0)?;
                self.lock().stats.num_alloc_retries += 1;
                match take() {
                    Ok(addr) => (addr, Path::Retry),
                    Err(error) if error.is_out_of_memory() => return Err(self.out_of_memory(bytes)),
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        };
        drop(growing);
        let mut state = self.lock();
        state.live.insert(addr, LiveBlock { bytes, stream, uses: Vec::new() });
        if captured && let Some(kept) = state.captures.open_on(stream) {
            kept.own.insert(addr);
        }
        state.captured += if captured { bytes } else { 0 };
        state.stats.num_device_alloc += 1;
        // The pool's rounding is not visible, so active bytes are what was requested.
        state.stats.count_taken(ANY, bytes, bytes);
        if !captured {
            self.watch_growth(&mut state, addr, bytes);
        }
        // SAFETY: the pool has just allocated this memory, and it is released with the block.
        Ok(unsafe { Block::new(addr, bytes, bytes, path, self.tokens.token()) })
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        let addr = block.addr();
        // The record is removed before the memory: the pool may return the address again immediately.
        if block.token() != self.tokens.token() {
            return Err(foreign(self.name(), block));
        }
        let _streams = self.naming_streams();
        let mut state = self.lock();
        let Some(live) = state.live.remove(&addr) else { return Err(foreign(self.name(), block)) };
        state.stats.count_let_go(ANY, live.bytes);
        let owner = if state.captures.is_empty() { Owner::Pool } else { state.owner_of(addr, live.bytes) };
        if matches!(owner, Owner::Graph) {
            state.stats.count_reusable(ANY, live.bytes, live.bytes);
            return Ok(Path::Pool);
        }
        let nothing_captured = state.captures.all_ended();
        state.leave(live.bytes);
        drop(state);
        if matches!(owner, Owner::Capture) {
            return Ok(self.free_in_capture(addr, &live)?);
        }
        if !nothing_captured {
            return Ok(self.free_now_or_later(addr, live)?);
        }
        let path = if live.uses.is_empty() { Path::Pool } else { Path::WaitInserted };
        self.give_back(addr, live)?;
        Ok(path)
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let mut state = self.lock();
        let live = state.live.get_mut(&block.addr()).filter(|_| block.token() == self.tokens.token());
        let Some(live) = live else { return Err(not_held(self.name(), block)) };
        if stream != live.stream && !live.uses.contains(&stream) {
            live.uses.push(stream);
        }
        Ok(())
    }

    fn forget_stream(&self, stream: StreamId) {
        let _alone = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *self.lock();
        let waiting = state.captures.each().flat_map(|(_, kept)| kept.waiting.iter_mut().map(|(_, block)| block));
        let blocks = state.live.values_mut().chain(state.refused.iter_mut().map(|(_, block)| block)).chain(waiting);
        let mut streams = Vec::new();
        for block in blocks {
            block.uses.retain(|user| *user != stream);
            if block.stream == stream {
                streams.push(block);
            }
        }
        if streams.is_empty() {
            return;
        }
        // Without a stream of its own the frees are refused, and repeated on a new one.
        if state.heir.is_none() {
            state.heir = self.driver.stream_create().ok();
        }
        if let Some(heir) = state.heir {
            streams.into_iter().for_each(|block| block.stream = heir);
        }
    }

    fn stats(&self) -> Stats {
        let mut state = self.lock();
        let counters = self.counters(&mut state);
        self.read_graph_memory(&mut state);
        let mut stats = state.stats_now();
        stats.graph_memory = state.graph_memory;
        stats.stranded_bytes = Some(state.stranded).filter(|gauge| gauge.allocated > 0);
        // Only the level and its peak are known; the sums of increases and decreases are not.
        stats.reserved_totals_unknown = true;
        stats.reserved_bytes.all = Gauge {
            current: counters.reserved,
            peak: counters.reserved_high,
            peak_is: if state.stale_peaks { PeakKind::AtMost } else { PeakKind::Exact },
            ..Gauge::default()
        };
        stats
    }

    fn reset_peaks(&self) {
        let mut state = self.lock();
        state.stats.reset_peaks();
        state.stranded.reset_peak();
        state.stale_peaks = self.pools().pool_reset_peaks(self.pool).is_err();
        self.counters(&mut state);
        state.peak = state.ledger();
    }

    fn snapshot(&self) -> Option<Snapshot> {
        None
    }

    fn ledger_at_peak(&self) -> Ledger {
        let mut state = self.lock();
        let highest = self.counters(&mut state).reserved_high;
        let missed = highest > state.peak.reserved && !state.stale_peaks;
        Ledger { peak_reserved: missed.then_some(highest), ..state.peak }
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        // Read first: above its threshold the pool already releases memory at the synchronise.
        let before = self.pools().pool_counters(self.pool)?.reserved;
        // A capture cannot be waited for.
        let nothing_captured = self.lock().captures.all_ended();
        let refused = if nothing_captured { self.wait_and_reclaim() } else { self.retry_refused() };
        // Memory that the driver refuses to release, or that a destroyed stream may still use, does not keep the remainder
        // reserved.
        self.trim_pool(keep_bytes)?;
        let released = before.saturating_sub(self.pools().pool_counters(self.pool)?.reserved);
        let released = released + self.trim_graph_memory()?;
        refused.map_err(AllocError::from).map(|()| released)
    }

    fn parts(&self) -> Parts<'_> {
        Parts { graphs: Some(self), limit: Some(self), ..Parts::NONE }
    }
}

impl GraphMemory for StreamOrdered {
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        need_graphs(self.name(), self.driver.as_ref())?;
        let state = &mut *self.lock();
        state.captures.need_none_on(self.name(), stream)?;
        state.graph_memory.get_or_insert_default();
        Ok(state.captures.begin(stream, |_| Kept::default()))
    }

    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        let _streams = self.naming_streams();
        let mut guard = self.lock();
        let state = &mut *guard;
        let (stream, kept) = state.captures.find_open(self.name(), capture)?;
        let waiting = std::mem::take(&mut kept.waiting);
        let (blocks, bytes) = (kept.own.len(), kept.own.iter().map(|addr| state.live[addr].bytes).sum());
        state.captures.end(stream);
        waiting.iter().for_each(|(_, block)| state.leave(block.bytes));
        drop(guard);
        let mut freed = Ok(());
        for (addr, block) in waiting {
            freed = freed.and(self.free_now_or_later(addr, block).map(|_| ()));
        }
        if blocks > 0 {
            return Err(AllocError::CaptureLive { allocator: self.name(), blocks, bytes });
        }
        Ok(freed?)
    }

    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        let state = &mut *self.lock();
        let capture = state.captures.release(self.name(), capture)?;
        // Live blocks of the capture were released with the graph.
        let released: Vec<LiveBlock> = capture.own.iter().filter_map(|addr| state.live.remove(addr)).collect();
        for block in released {
            state.captured -= block.bytes;
            state.stats.count_let_go(ANY, block.bytes);
            state.stats.count_reusable(ANY, block.bytes, block.bytes);
        }
        Ok(())
    }

    /// The driver decides.
    fn set_reuse_in_captures(&self, _on: bool) -> bool {
        false
    }
}

impl MemoryLimit for StreamOrdered {
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        self.limit.store(bytes.unwrap_or(u64::MAX), Relaxed);
        true
    }
}

impl Drop for StreamOrdered {
    fn drop(&mut self) {
        let waiting = {
            let mut captures = std::mem::take(&mut self.lock().captures);
            captures.each().flat_map(|(_, kept)| std::mem::take(&mut kept.waiting)).collect::<Vec<_>>()
        };
        self.lock().refused.extend(waiting);
        // An error cannot be returned here; memory that is refused again is released with the device context.
        let _ = self.wait_and_reclaim();
        for _ in 0..2 {
            // SAFETY: the pool belongs to this allocator only; blocks still live were leaked by their owners.
            if unsafe { self.pools().pool_destroy(self.pool) }.is_ok() {
                break;
            }
        }
        if let Some(heir) = self.lock().heir.take() {
            // SAFETY: made here and known to no other code. Work that remains on it completes first.
            let _ = unsafe { self.driver.stream_destroy(heir) };
        }
    }
}
