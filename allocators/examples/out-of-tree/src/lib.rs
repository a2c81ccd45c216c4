//! # `bump`: segments that are filled from front to back
//!
//! *Policy.* Requests of at most 1 MiB are put one behind the other in segments that they share; a larger one gets a segment of
//! its own, or the smallest idle one that it fits. What is freed is not used again before its whole segment is idle. An idle
//! segment begins at its front again. When the device has no memory left, idle segments go back to it, and it is asked once
//! more.
//!
//! *Good at* speed and at phases that end with nothing held. *Bad at* a block that stays: it pins its whole segment.
//!
//! *Streams.* A segment belongs to the stream that it was made for. If another stream was announced to use a block, the owner
//! is made to wait for that stream when the block is freed.

pub mod snug;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab::backends::{Backend, Capabilities, SegmentUse, StreamUse, With};
use vramlab::settings::{Settings, bytes};
use vramlab::{
    AllocError, Block, BlockInfo, BlockState, DeviceAddr, DeviceAllocator, Driver, DriverError, Ledger, OomReport,
    Path, PoolKind, PooledGauge, Request, SegmentInfo, Snapshot, Stats, StreamId, Tokens,
};

vramlab::settings! {
    /// Settings of [`Bump`].
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct BumpSettings {
        /// Bytes of a segment that requests of at most 1 MiB share.
        pub segment: u64 = 8 << 20, bytes().at_least(1 << 20);
    }
}

/// The entry: what lists, help and tests know of this backend.
pub static BACKEND: Backend = Backend {
    name: "bump",
    summary: "fills segments from front to back and starts again when one is idle",
    capabilities: Capabilities {
        streams: StreamUse::Own,
        segments: SegmentUse::Many,
        caches: true,
        retries: true,
        snapshot: true,
        used_elsewhere: Path::WaitInserted,
        ..Capabilities::LEAST
    },
    compared: true,
    constructor: &With(|driver, settings: &BumpSettings| Ok(Arc::new(Bump::new(driver, *settings)))),
};

/// Blocks are multiples of this, as PyTorch's are.
const ROUND: u64 = 512;
/// The largest request that shares a segment.
const SHARED: u64 = 1 << 20;
/// There is one pool.
const POOL: PoolKind = PoolKind::Large;

/// See the [crate](self).
#[derive(Debug)]
pub struct Bump {
    /// They tell its blocks from those of others.
    tokens: Tokens,
    driver: Arc<dyn Driver>,
    settings: BumpSettings,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By address.
    segments: BTreeMap<DeviceAddr, Segment>,
    stats: Stats,
    peak: Ledger,
}

#[derive(Debug)]
struct Segment {
    bytes: u64,
    stream: StreamId,
    shared: bool,
    /// Where the next block goes.
    top: u64,
    /// Blocks that are not reusable yet, by address.
    blocks: BTreeMap<DeviceAddr, Held>,
}

#[derive(Debug)]
struct Held {
    bytes: u64,
    requested: u64,
    /// Other streams that use it.
    users: Vec<StreamId>,
    /// Freed by the client, but its uses could not be ordered before later ones.
    stranded: bool,
}

impl State {
    /// The segment that holds a block at `addr`.
    fn of(&mut self, addr: DeviceAddr) -> Option<&mut Segment> {
        let (_, segment) = self.segments.range_mut(..=addr).next_back()?;
        segment.blocks.get(&addr).is_some_and(|held| !held.stranded).then_some(segment)
    }

    /// Where a request fits: for one that shares, the first place; for a large one, the smallest idle segment.
    fn fit(&self, bytes: u64, stream: StreamId) -> Option<DeviceAddr> {
        let shared = bytes <= SHARED;
        let fits = self.segments.iter().filter(|(_, segment)| {
            segment.stream == stream && segment.shared == shared && segment.bytes - segment.top >= bytes
        });
        if shared {
            fits.map(|(addr, _)| *addr).next()
        } else {
            fits.min_by_key(|(_, s)| s.bytes).map(|(addr, _)| *addr)
        }
    }

    /// Puts a block at the top of a segment.
    fn place(&mut self, at: DeviceAddr, bytes: u64, requested: u64) -> Option<DeviceAddr> {
        let segment = self.segments.get_mut(&at)?;
        let addr = at.offset(segment.top);
        segment.top += bytes;
        segment.blocks.insert(addr, Held { bytes, requested, users: Vec::new(), stranded: false });
        for (gauge, amount) in self.held(bytes, requested) {
            gauge.increase(POOL, amount);
        }
        self.stats.allocation.increase(POOL, 1);
        self.stats.allocated_bytes.increase(POOL, bytes);
        Some(addr)
    }

    /// What moves when a block becomes reusable.
    fn held(&mut self, bytes: u64, requested: u64) -> [(&mut PooledGauge, u64); 3] {
        let stats = &mut self.stats;
        [(&mut stats.active, 1), (&mut stats.active_bytes, bytes), (&mut stats.requested_bytes, requested)]
    }

    /// Lets the place of a block be used again, once its segment is idle.
    fn reusable(&mut self, addr: DeviceAddr) {
        let Some((_, segment)) = self.segments.range_mut(..=addr).next_back() else { return };
        let Some(held) = segment.blocks.remove(&addr) else { return };
        if segment.blocks.is_empty() {
            segment.top = 0;
        }
        for (gauge, amount) in self.held(held.bytes, held.requested) {
            gauge.decrease(POOL, amount);
        }
    }

    fn snapshot(&self) -> Snapshot {
        let blocks = |(start, segment): (&DeviceAddr, &Segment)| {
            let mut out = Vec::new();
            let (mut at, end) = (*start, start.get() + segment.bytes);
            let gap = |out: &mut Vec<BlockInfo>, at: DeviceAddr, until: u64| {
                let bytes = until - at.get();
                if bytes > 0 {
                    out.push(BlockInfo { addr: at, bytes, requested: 0, state: BlockState::Free });
                }
            };
            for (addr, held) in &segment.blocks {
                gap(&mut out, at, addr.get());
                let state = if held.stranded { BlockState::PendingFree } else { BlockState::Allocated };
                out.push(BlockInfo { addr: *addr, bytes: held.bytes, requested: held.requested, state });
                at = addr.offset(held.bytes);
            }
            gap(&mut out, at, end);
            SegmentInfo { addr: *start, bytes: segment.bytes, stream: segment.stream, pool: None, blocks: out }
        };
        Snapshot { segments: self.segments.iter().map(blocks).collect() }
    }
}

impl Bump {
    /// A bump allocator on `driver`.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: BumpSettings) -> Self {
        let stats = Stats { segment: Some(PooledGauge::default()), ..Stats::default() };
        let state = Mutex::new(State { stats, ..State::default() });
        Self { tokens: Tokens::next(), driver, settings, state }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new segment.
    fn grow(&self, state: &mut State, bytes: u64, stream: StreamId) -> Result<DeviceAddr, DriverError> {
        let shared = bytes <= SHARED;
        let bytes = if shared { self.settings.segment } else { bytes };
        let addr = self.driver.mem_alloc(bytes)?;
        state.segments.insert(addr, Segment { bytes, stream, shared, top: 0, blocks: BTreeMap::new() });
        state.stats.num_device_alloc += 1;
        state.stats.reserved_bytes.increase(POOL, bytes);
        state.stats.segment.get_or_insert_default().increase(POOL, 1);
        Ok(addr)
    }

    /// Gives idle segments back while more than `keep` bytes stay; how many went.
    fn release(&self, state: &mut State, keep: u64) -> Result<u64, DriverError> {
        let stranded = |segment: &Segment| {
            segment.blocks.iter().filter(|(_, held)| held.stranded).map(|(addr, _)| *addr).collect()
        };
        let stranded: Vec<Vec<DeviceAddr>> = state.segments.values().map(stranded).collect();
        if stranded.iter().any(|blocks| !blocks.is_empty()) {
            self.driver.device_synchronize()?;
            stranded.into_iter().flatten().for_each(|addr| state.reusable(addr));
        }
        let idle: Vec<(DeviceAddr, u64)> = state
            .segments
            .iter()
            .filter(|(_, segment)| segment.blocks.is_empty())
            .map(|(addr, segment)| (*addr, segment.bytes))
            .collect();
        let mut released = 0;
        for (addr, bytes) in idle {
            if state.stats.reserved_bytes.all.current <= keep {
                break;
            }
            // SAFETY: from `mem_alloc` of this driver and forgotten below. No block of it is out, and the driver waits for
            // the device before it takes the memory.
            unsafe { self.driver.mem_free(addr) }?;
            state.segments.remove(&addr);
            state.stats.num_device_free += 1;
            state.stats.reserved_bytes.decrease(POOL, bytes);
            state.stats.segment.get_or_insert_default().decrease(POOL, 1);
            released += bytes;
        }
        Ok(released)
    }

    /// Lets later work of `owner` wait for what `user` has queued so far.
    fn order(&self, owner: StreamId, user: StreamId) -> Result<(), DriverError> {
        let event = self.driver.event_create(false)?;
        let ordered = self.driver.event_record(event, user).and_then(|()| self.driver.stream_wait_event(owner, event));
        // SAFETY: made above and used nowhere else; the driver keeps it while work waits for it.
        let destroyed = unsafe { self.driver.event_destroy(event) };
        // Should that fail, only the event is lost.
        let _ = destroyed;
        ordered
    }

    fn out_of_memory(&self, state: &mut State, requested: u64, needed: u64, stream: StreamId) -> AllocError {
        state.stats.num_ooms += 1;
        let free = |s: &Segment| s.bytes - s.top;
        let largest = state.segments.values().filter(|s| s.stream == stream).map(free).max();
        let others = state.segments.values().filter(|s| s.stream != stream).map(free).sum();
        AllocError::OutOfMemory(Box::new(OomReport {
            allocator: BACKEND.name.into(),
            requested_bytes: requested,
            needed_bytes: needed,
            reserved_bytes: state.stats.reserved_bytes.all.current,
            active_bytes: state.stats.active_bytes.all.current,
            largest_free_bytes: Some(largest.unwrap_or(0)),
            other_streams_free_bytes: Some(others),
            limit_bytes: None,
            device_bytes: self.driver.mem_info().ok().map(|info| (info.free, info.total)),
            against_fragmentation: None,
        }))
    }
}

impl DeviceAllocator for Bump {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        self.settings.json()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        let bytes = request.bytes.next_multiple_of(ROUND);
        let state = &mut *self.lock();
        let (at, path) = match state.fit(bytes, stream) {
            Some(at) => (at, Path::Hit),
            None => match self.grow(state, bytes, stream) {
                Ok(at) => (at, Path::DriverAlloc),
                Err(error) if error.is_out_of_memory() => {
                    state.stats.num_alloc_retries += 1;
                    self.release(state, 0)?;
                    match self.grow(state, bytes, stream) {
                        Ok(at) => (at, Path::Retry),
                        Err(error) if error.is_out_of_memory() => {
                            return Err(self.out_of_memory(state, request.bytes, bytes, stream));
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            },
        };
        let addr = state.place(at, bytes, request.bytes).expect("the segment was just found or made");
        if state.stats.reserved_bytes.all.current > state.peak.reserved {
            state.peak = state.snapshot().ledger(stream);
        }
        // SAFETY: segments come from the driver at multiples of 256 and blocks are multiples of 512. `top` passes each byte of
        // a segment once between two moments at which it is idle, so no two live blocks share one; and a segment goes back to
        // the driver idle.
        Ok(unsafe { Block::new(addr, bytes, request.bytes, path, self.tokens.token()) })
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        let (addr, state) = (block.addr(), &mut *self.lock());
        let mine = state.of(addr).filter(|_| block.token() == self.tokens.token());
        let Some(segment) = mine else { return Err(AllocError::foreign(self.name(), "it is not live here", block)) };
        let owner = segment.stream;
        let users = segment.blocks.get_mut(&addr).map(|held| std::mem::take(&mut held.users)).unwrap_or_default();
        state.stats.allocation.decrease(POOL, 1);
        state.stats.allocated_bytes.decrease(POOL, block.bytes());
        let ordered = users.iter().try_for_each(|user| self.order(owner, *user));
        // A stream that cannot be waited for may be gone: then the whole device is waited for.
        if let Err(error) = ordered.or_else(|_| self.driver.device_synchronize()) {
            if let Some(held) = state.of(addr).and_then(|segment| segment.blocks.get_mut(&addr)) {
                held.stranded = true;
            }
            return Err(error.into());
        }
        state.reusable(addr);
        Ok(if users.is_empty() { Path::Hit } else { Path::WaitInserted })
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let state = &mut *self.lock();
        let mine = state.of(block.addr()).filter(|_| block.token() == self.tokens.token());
        let segment = mine.ok_or_else(|| AllocError::not_held(self.name(), "it is not live here", block))?;
        if let Some(held) = segment.blocks.get_mut(&block.addr())
            && segment.stream != stream
            && !held.users.contains(&stream)
        {
            held.users.push(stream);
        }
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.lock().stats.clone()
    }

    fn reset_peaks(&self) {
        let state = &mut *self.lock();
        state.stats.reset_peaks();
        let stream = state.segments.values().next().map(|segment| segment.stream);
        state.peak = stream.map_or_else(Ledger::default, |stream| state.snapshot().ledger(stream));
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(self.lock().snapshot())
    }

    fn ledger_at_peak(&self) -> Ledger {
        self.lock().peak
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        Ok(self.release(&mut self.lock(), keep_bytes)?)
    }
}

impl Drop for Bump {
    fn drop(&mut self) {
        // Once more where the driver refused; what it refuses again goes with the device.
        let state = &mut *self.lock();
        let _ = self.release(state, 0).or_else(|_| self.release(state, 0));
    }
}
