//! # `naive`: a driver call for every request
//!
//! *Policy.* Each request is one `cuMemAlloc` of exactly the requested bytes, each free one `cuMemFree`. Nothing is cached.
//!
//! *Cost.* Allocate: one driver call (1 us on an H200 in a page that is already mapped, 33 us for a new page; `experiments
//! calibrate`). Free: one driver call that waits until the whole device is idle, so its cost is the work that is still queued.
//!
//! *Good at* wasting only what the driver itself wastes, and at finding use after free: memory is released immediately. *Bad at*
//! everything else: the host can never run ahead of the device.
//!
//! *Graph capture.* Memory that is freed in a capture stays reserved for the graph until the capture is released. Meanwhile it
//! serves the capture's next request of exactly its size, so that several steps in one graph need no more than one; every other
//! request is a `cuMemAlloc` as usual.
//!
//! *Source.* `cuMemAlloc`, `cuMemFree`:
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html>; what "raw CUDA" programs do.

use super::captures::{Captures, need_graphs};
use super::registry::{Backend, Capabilities, GraphCapture, SegmentUse, StreamUse, With};
use super::{foreign, not_held};
use crate::contract::{
    AllocError, Block, BlockInfo, BlockState, CaptureId, DeviceAllocator, GraphMemory, Ledger, OomReport, Parts, Path,
    PoolKind, PooledGauge, Request, SegmentInfo, Snapshot, Stats, Tokens,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::settings::NoSettings;
use vramlab_device::{DeviceAddr, Driver, DriverError, StreamId};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "naive",
    summary: "one driver allocation and one driver free for each tensor (cuMemAlloc, cuMemFree)",
    capabilities: Capabilities {
        graph_capture: GraphCapture::Pinned,
        streams: StreamUse::Any,
        segments: SegmentUse::One,
        slow_calls: true,
        snapshot: true,
        used_elsewhere: Path::DriverFree,
        ..Capabilities::LEAST
    },
    compared: true,
    constructor: &With(|driver, _: &NoSettings| Ok(Arc::new(Naive::new(driver)))),
};

/// See the [module](self).
#[derive(Debug)]
pub struct Naive {
    tokens: Tokens,
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stats: Stats,
    live: BTreeMap<DeviceAddr, (u64, StreamId)>,
    /// Blocks whose free the driver refused: freed by the client, still reserved.
    refused: BTreeMap<DeviceAddr, (u64, StreamId)>,
    captures: Captures<Kept>,
    peak: Ledger,
}

/// The state of a capture.
#[derive(Debug, Default)]
struct Kept {
    /// Live blocks that were allocated in it.
    own: BTreeSet<DeviceAddr>,
    /// Those that work on other streams was announced for.
    shared: BTreeSet<DeviceAddr>,
    /// Blocks that were allocated in it and freed: pinned.
    pinned: BTreeMap<DeviceAddr, (u64, StreamId)>,
    /// Those that later requests of the capture can have, by size.
    idle: BTreeMap<u64, Vec<DeviceAddr>>,
    /// Blocks from before whose free is deferred to its end.
    waiting: BTreeMap<DeviceAddr, (u64, StreamId)>,
}

/// The pool argument of gauges without pools.
const ANY: PoolKind = PoolKind::Large;

impl State {
    fn ledger(&self) -> Ledger {
        let reserved = self.stats.reserved_bytes.all.current;
        let pending = self.unreleased().map(|(_, (bytes, _))| bytes).sum();
        Ledger { reserved, requested: reserved - pending, pending, ..Ledger::default() }
    }

    /// Blocks that the client freed and that are still reserved.
    fn unreleased(&self) -> impl Iterator<Item = (&DeviceAddr, &(u64, StreamId))> {
        let pinned = self.captures.kept().flat_map(|kept| kept.pinned.iter().chain(&kept.waiting));
        self.refused.iter().chain(pinned)
    }

    /// Keeps a freed block where a capture needs it.
    fn keep(&mut self, addr: DeviceAddr, block: (u64, StreamId)) -> bool {
        if self.captures.is_empty() {
            return false;
        }
        if let Some((_, kept)) = self.captures.each().find(|(_, kept)| kept.own.contains(&addr)) {
            kept.own.remove(&addr);
            kept.pinned.insert(addr, block);
            // A block that another stream may still use is not reused: nothing shows when its use has completed.
            if !kept.shared.remove(&addr) {
                kept.idle.entry(block.0).or_default().push(addr);
            }
            return true;
        }
        // Any capture may use the block, whatever stream it is freed on, and a graph cannot be made of released addresses.
        let open = self.captures.each().find(|(is_open, _)| *is_open);
        open.map(|(_, kept)| kept.waiting.insert(addr, block)).is_some()
    }

    /// A block that the open capture of a stream has freed, of exactly this size, for its next request.
    fn reuse(&mut self, bytes: u64, stream: StreamId) -> Option<DeviceAddr> {
        let capture = self.captures.open_on(stream)?;
        let addr = capture.idle.get_mut(&bytes)?.pop()?;
        capture.pinned.remove(&addr);
        capture.own.insert(addr);
        self.live.insert(addr, (bytes, stream));
        // It was reserved all the time; only its state for the client changes.
        self.stats.count_held(ANY, bytes);
        Some(addr)
    }
}

impl Naive {
    /// A naive allocator on `driver`.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        // Segments are counted from the start: a zero is a value, an absent one is not.
        let stats = Stats { segment: Some(PooledGauge::default()), ..Stats::default() };
        Self { tokens: Tokens::next(), driver, state: Mutex::new(State { stats, ..State::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases a block that is in no list to the driver, or puts it among the refused ones.
    fn give_back(&self, addr: DeviceAddr, bytes: u64, owner: StreamId) -> Result<(), DriverError> {
        // SAFETY: the address was live here, so it came from this driver and is freed once. The driver itself waits for the device,
        // so work queued on any stream completes first.
        let freed = unsafe { self.driver.mem_free(addr) };
        let mut state = self.lock();
        if freed.is_err() {
            state.refused.insert(addr, (bytes, owner));
            return freed;
        }
        // A block is a segment, without rounding.
        state.stats.count_reusable(ANY, bytes, bytes);
        state.stats.count_segment_released(ANY, bytes, u64::MAX);
        Ok(())
    }

    /// Repeats the frees that the driver refused; returns the released bytes, or the first error.
    fn retry_refused(&self) -> Result<u64, DriverError> {
        let refused = std::mem::take(&mut self.lock().refused);
        self.give_all_back(refused)
    }

    /// Releases blocks that are in no list; returns the released bytes, or the first error.
    fn give_all_back(&self, blocks: BTreeMap<DeviceAddr, (u64, StreamId)>) -> Result<u64, DriverError> {
        let (mut released, mut outcome) = (0, Ok(()));
        for (addr, (bytes, owner)) in blocks {
            match self.give_back(addr, bytes, owner) {
                Ok(()) => released += bytes,
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome.map(|()| released)
    }
}

impl DeviceAllocator for Naive {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        serde_json::json!({})
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        let bytes = request.bytes;
        if let Some(addr) = self.lock().reuse(bytes, stream) {
            // SAFETY: the driver's memory of this size, whose last block was freed in this capture.
            return Ok(unsafe { Block::new(addr, bytes, bytes, Path::Hit, self.tokens.token()) });
        }
        let addr = match self.driver.mem_alloc(bytes) {
            Ok(addr) => addr,
            Err(error) if error.is_out_of_memory() => {
                let mut state = self.lock();
                state.stats.num_ooms += 1;
                let (reserved, active) = (&state.stats.reserved_bytes.all, &state.stats.active_bytes.all);
                let report = OomReport::new(self.name(), bytes).with_memory(reserved.current, active.current);
                return Err(report.with_free(0, 0).with_device(self.driver.as_ref()).into());
            }
            Err(error) => return Err(error.into()),
        };
        let mut state = self.lock();
        state.live.insert(addr, (bytes, stream));
        if let Some(kept) = state.captures.open_on(stream) {
            kept.own.insert(addr);
        }
        state.stats.count_segment(ANY, bytes, u64::MAX);
        state.stats.count_taken(ANY, bytes, bytes);
        if state.stats.reserved_bytes.all.current > state.peak.reserved {
            state.peak = state.ledger();
        }
        // SAFETY: the driver has just allocated this memory, and it is released with the block.
        Ok(unsafe { Block::new(addr, bytes, bytes, Path::DriverAlloc, self.tokens.token()) })
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        let addr = block.addr();
        if block.token() != self.tokens.token() {
            return Err(foreign(self.name(), block));
        }
        // The record is removed before the memory is released: afterwards another thread may be given the address.
        let mut state = self.lock();
        let Some((bytes, owner)) = state.live.remove(&addr) else { return Err(foreign(self.name(), block)) };
        state.stats.count_let_go(ANY, bytes);
        if state.keep(addr, (bytes, owner)) {
            return Ok(Path::Deferred);
        }
        drop(state);
        self.give_back(addr, bytes, owner)?;
        Ok(Path::DriverFree)
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let addr = block.addr();
        let state = &mut *self.lock();
        if let Some((_, owner)) = state.live.get(&addr).filter(|_| block.token() == self.tokens.token()) {
            // The driver's free waits for every stream, so uses need not be remembered outside of captures.
            if *owner != stream
                && let Some((_, kept)) = state.captures.each().find(|(_, kept)| kept.own.contains(&addr))
            {
                kept.shared.insert(addr);
            }
            return Ok(());
        }
        Err(not_held(self.name(), block))
    }

    /// No block waits for a stream: the driver's free waits for the whole device.
    fn forget_stream(&self, _stream: StreamId) {}

    fn stats(&self) -> Stats {
        self.lock().stats.clone()
    }

    fn reset_peaks(&self) {
        let mut state = self.lock();
        state.stats.reset_peaks();
        state.peak = state.ledger();
    }

    fn snapshot(&self) -> Option<Snapshot> {
        let segment = |(&addr, &(bytes, stream)): (&DeviceAddr, &(u64, StreamId)), state| SegmentInfo {
            private: None,
            expandable: false,
            page: bytes,
            addr,
            bytes,
            stream,
            pool: None,
            blocks: vec![BlockInfo { addr, bytes, requested: bytes, state }],
        };
        let state = self.lock();
        let live = state.live.iter().map(|entry| segment(entry, BlockState::Allocated));
        let unreleased = state.unreleased().map(|entry| segment(entry, BlockState::PendingFree));
        let mut segments: Vec<SegmentInfo> = live.chain(unreleased).collect();
        segments.sort_unstable_by_key(|segment| segment.addr);
        Some(Snapshot { segments })
    }

    fn ledger_at_peak(&self) -> Ledger {
        self.lock().peak
    }

    /// Nothing is cached, so only frees that the driver refused are repeated.
    fn trim(&self, _keep_bytes: u64) -> Result<u64, AllocError> {
        Ok(self.retry_refused()?)
    }

    fn parts(&self) -> Parts<'_> {
        Parts { graphs: Some(self), ..Parts::NONE }
    }
}

impl GraphMemory for Naive {
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        need_graphs(self.name(), self.driver.as_ref())?;
        let captures = &mut self.lock().captures;
        captures.need_none_on(self.name(), stream)?;
        Ok(captures.begin(stream, |_| Kept::default()))
    }

    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let (stream, kept) = state.captures.find_open(self.name(), capture)?;
        let waiting = std::mem::take(&mut kept.waiting);
        let (blocks, bytes) = (kept.own.len(), kept.own.iter().map(|addr| state.live[addr].0).sum());
        state.captures.end(stream);
        drop(guard);
        let freed = self.give_all_back(waiting);
        if blocks > 0 {
            return Err(AllocError::CaptureLive { allocator: self.name(), blocks, bytes });
        }
        Ok(freed.map(|_| ())?)
    }

    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        let capture = self.lock().captures.release(self.name(), capture)?;
        Ok(self.give_all_back(capture.pinned).map(|_| ())?)
    }

    /// A block that is freed after other streams used it becomes reusable at the end of the capture.
    fn set_reuse_in_captures(&self, _on: bool) -> bool {
        false
    }
}

impl Drop for Naive {
    fn drop(&mut self) {
        // Captures that were not released: without their memory their graphs are useless.
        let mut captures = std::mem::take(&mut self.lock().captures);
        for (_, kept) in captures.each() {
            for blocks in [&mut kept.waiting, &mut kept.pinned] {
                let _ = self.give_all_back(std::mem::take(blocks));
            }
        }
        // An error cannot be returned here; memory that is refused again is released with the device context.
        let _ = self.retry_refused();
    }
}
