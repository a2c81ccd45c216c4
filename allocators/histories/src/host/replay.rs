//! Replays of pinned memory: the client is replayed, the allocator is checked.
//!
//! Requests come on one stream, the host's. Each free of a block that streams use records its events on streams of the replay, and they
//! complete where the trace says so.

use super::trace::{HostOp, HostTrace, Sizes};
use crate::replay::ReplayError;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::{
    CallArguments, CallKind, CallOutcome, Driver, DriverError, DriverResult, EventId, Hook, HookedDriver, HostAccount,
    HostCosts, HostDriver, NullDriver, Pinning, StreamId,
};
use vramlab_policies::Selection;
use vramlab_policies::contract::{AllocError, Block, DeviceAllocator, Ledger, Path, Request, Stats};

/// More than any host has.
const UNLIMITED: u64 = 1 << 50;

/// How a trace is replayed.
#[derive(Clone, Debug)]
pub struct HostReplay {
    /// The device by whose driver memory of this machine is pinned; `None` for a simulated host. It needs as much memory as the
    /// allocator reserves.
    pub device: Option<Arc<dyn Driver>>,
    /// What pinning costs on a simulated host.
    pub costs: HostCosts,
    /// Bytes that a simulated host can pin; `None` for no limit.
    pub limit: Option<u64>,
    /// Which bound of each request is replayed, where the trace has blocks.
    pub side: Side,
}

impl Default for HostReplay {
    fn default() -> Self {
        Self { device: None, costs: HostCosts::h100x8(), limit: None, side: Side::Most }
    }
}

/// A bound of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The least that each request can have been.
    Least,
    /// The most: the size of its block.
    Most,
}

/// Requests that the modelled allocator would have served with too small a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Overruns {
    /// Number of requests.
    pub count: u64,
    /// Bytes behind the ends of their blocks.
    pub bytes: u64,
}

/// The result of a replay.
#[derive(Clone, Debug)]
pub struct HostReport {
    /// The allocator's settings.
    pub settings: serde_json::Value,
    /// How segments were pinned.
    pub pinning: Pinning,
    /// Statistics at the end.
    pub stats: Stats,
    /// Breakdown at the peak of pinned bytes.
    pub ledger: Ledger,
    /// Calls that pinned and released memory, and their time.
    pub account: HostAccount,
    /// Requests by the path that served them.
    pub paths: BTreeMap<&'static str, u64>,
    /// Requests that ran out of memory.
    pub failed: u64,
    /// The first of them.
    pub first_failure: Option<String>,
    /// Requests that would overrun their block.
    pub overruns: Overruns,
    /// Requests that were served from the cache here and not in the recording, or the other way round, or from another block;
    /// `None` if the trace does not show this.
    pub differences: Option<u64>,
}

/// Which events have completed.
#[derive(Debug, Default)]
struct Events {
    /// The block that is being freed.
    freeing: Option<u32>,
    /// The block whose free recorded an event last.
    of: HashMap<EventId, u32>,
    /// Whether each block's uses have completed.
    completed: Vec<bool>,
    /// Whether a wait is refused, as in PyTorch's `empty_cache`, which does not wait.
    refuses_waits: bool,
}

/// The hook of the replay's device.
#[derive(Debug)]
struct Completing(Mutex<Events>);

impl Completing {
    fn lock(&self) -> MutexGuard<'_, Events> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, block: u32) {
        let events = &mut *self.lock();
        // CAST: a number of a block.
        let index = block as usize;
        if events.completed.len() <= index {
            events.completed.resize(index + 1, false);
        }
        events.completed[index] = true;
    }
}

// SAFETY: changes the answers of queries only. There is no work on this device, so nothing runs after an event that is not complete.
unsafe impl Hook for Completing {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments) -> DriverResult<()> {
        let events = self.lock();
        let open =
            arguments.event.and_then(|event| events.of.get(&event)).is_some_and(|block| !events.is_completed(*block));
        if kind == CallKind::EventSynchronize && open && events.refuses_waits {
            return Err(DriverError::new(kind, DriverError::ILLEGAL_STATE, "emptying the cache does not wait"));
        }
        Ok(())
    }

    fn after(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments, _before: (), outcome: CallOutcome) {
        if kind == CallKind::EventRecord && outcome.ok {
            let events = &mut *self.lock();
            if let (Some(event), Some(block)) = (arguments.event, events.freeing) {
                events.of.insert(event, block);
            }
        }
    }

    fn event_query(&self, _inner: &dyn Driver, event: EventId) -> DriverResult<bool> {
        let events = self.lock();
        Ok(events.of.get(&event).is_none_or(|block| events.is_completed(*block)))
    }
}

impl Events {
    fn is_completed(&self, block: u32) -> bool {
        // CAST: a number of a block.
        self.completed.get(block as usize).copied().unwrap_or(false)
    }
}

/// How the allocator with these settings pins memory.
fn pinning(settings: &serde_json::Value) -> Pinning {
    if settings["pinned_use_cuda_host_register"].as_bool() != Some(true) {
        return Pinning::Alloc;
    }
    let threads = settings["pinned_num_register_threads"].as_u64().unwrap_or(1);
    Pinning::Register { threads: u32::try_from(threads).unwrap_or(u32::MAX) }
}

/// A replay under way.
struct Run<'t> {
    trace: &'t HostTrace,
    options: &'t HostReplay,
    driver: Arc<dyn Driver>,
    events: Arc<HookedDriver<Completing>>,
    allocator: Arc<dyn DeviceAllocator>,
    host: StreamId,
    /// Streams of the replay, by those of the trace; the last one is for frees that complete late without a known stream.
    streams: BTreeMap<Option<u64>, StreamId>,
    blocks: HashMap<u32, Block>,
    /// The replay's address for each recorded one, and the other way round.
    places: HashMap<u64, u64>,
    report: HostReport,
}

/// Replays a trace under an allocator of host memory, on a simulated host or on this machine.
///
/// # Errors
/// [`ReplayError::Alloc`] when the allocator cannot be built or fails for another reason than lack of memory.
pub fn replay_host(trace: &HostTrace, alloc: &Selection, options: &HostReplay) -> Result<HostReport, ReplayError> {
    let settings = alloc.settings().json();
    let pinning = pinning(&settings);
    let host_driver = Arc::new(match (&options.device, pinning) {
        (Some(device), Pinning::Alloc) => HostDriver::real(Arc::clone(device)),
        (Some(device), Pinning::Register { threads }) => HostDriver::registered(Arc::clone(device), threads, false),
        (None, pinning) => {
            let device: Arc<dyn Driver> = Arc::new(NullDriver::new(options.limit.unwrap_or(UNLIMITED)));
            HostDriver::simulated(device, options.costs.clone(), pinning)
        }
    });
    let hook = Completing(Mutex::default());
    let events = Arc::new(HookedDriver::with_hook(Arc::clone(&host_driver) as Arc<dyn Driver>, hook));
    let driver: Arc<dyn Driver> = Arc::clone(&events) as Arc<dyn Driver>;
    let allocator = alloc.build(&driver)?;
    let host = driver.stream_create().map_err(AllocError::from)?;
    let report = HostReport {
        settings,
        pinning,
        stats: Stats::default(),
        ledger: Ledger::default(),
        account: HostAccount::default(),
        paths: BTreeMap::new(),
        failed: 0,
        first_failure: None,
        overruns: Overruns::default(),
        differences: trace.blocks.iter().any(|block| block.cached.is_some()).then_some(0),
    };
    let (streams, blocks, places) = (BTreeMap::new(), HashMap::new(), HashMap::new());
    let mut run = Run { trace, options, driver, events, allocator, host, streams, blocks, places, report };
    for (at, op) in trace.ops.iter().enumerate() {
        run.apply(at, *op)?;
    }
    run.report.stats = run.allocator.stats();
    run.report.ledger = run.allocator.ledger_at_peak();
    run.report.account = host_driver.account();
    Ok(run.end())
}

impl Run<'_> {
    fn apply(&mut self, at: usize, op: HostOp) -> Result<(), ReplayError> {
        match op {
            HostOp::Allocate(number) => self.allocate(number),
            HostOp::Use { block, stream } => {
                let stream = self.stream(Some(stream))?;
                if let Some(block) = self.blocks.get(&block) {
                    self.allocator.record_use(block, stream)?;
                }
                Ok(())
            }
            HostOp::Free(number) => self.free(at, number),
            HostOp::Complete(number) => {
                self.events.hook().set(number);
                Ok(())
            }
            HostOp::Empty => self.empty(),
        }
    }

    fn stream(&mut self, of: Option<u64>) -> Result<StreamId, ReplayError> {
        if let Some(stream) = self.streams.get(&of) {
            return Ok(*stream);
        }
        let stream = self.driver.stream_create().map_err(AllocError::from)?;
        self.streams.insert(of, stream);
        Ok(stream)
    }

    fn allocate(&mut self, number: u32) -> Result<(), ReplayError> {
        // CAST: a number of a block.
        let recorded = self.trace.blocks[number as usize];
        let bytes = match self.options.side {
            Side::Least => self.trace.least(&recorded),
            Side::Most => recorded.bytes,
        };
        // PyTorch makes no block of an empty tensor.
        let block = match self.allocator.allocate(Request::new(bytes.max(1)), self.host) {
            Ok(block) => block,
            Err(AllocError::Overrun { requested, bytes, .. }) => {
                self.report.overruns.count += 1;
                self.report.overruns.bytes += requested - bytes;
                return Ok(());
            }
            Err(error) if error.is_out_of_memory() => {
                self.report.failed += 1;
                self.report.first_failure.get_or_insert_with(|| error.to_string());
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        *self.report.paths.entry(block.path().name()).or_insert(0) += 1;
        let (place, cached) = (block.addr().get(), block.path() != Path::DriverAlloc);
        if let (Some(differences), Some(was_cached)) = (&mut self.report.differences, recorded.cached) {
            let same = was_cached == cached && (!cached || self.places.get(&recorded.addr) == Some(&place));
            *differences += u64::from(!same);
            self.places.insert(recorded.addr, place);
        }
        self.blocks.insert(number, block);
        Ok(())
    }

    fn free(&mut self, at: usize, number: u32) -> Result<(), ReplayError> {
        let Some(block) = self.blocks.remove(&number) else { return Ok(()) };
        // Without announced streams a free that completes later is one whose streams the file does not name.
        if self.trace.ops.get(at + 1) != Some(&HostOp::Complete(number)) {
            let unnamed = self.stream(None)?;
            self.allocator.record_use(&block, unnamed)?;
        } else {
            self.events.hook().set(number);
        }
        self.events.hook().lock().freeing = Some(number);
        // SAFETY: no work uses memory of this device; what the trace says of uses was announced.
        let freed = unsafe { self.allocator.deallocate(block, self.host) };
        self.events.hook().lock().freeing = None;
        freed?;
        Ok(())
    }

    /// PyTorch's `empty_cache` does not wait for deferred frees. A policy that only releases after a wait is let wait.
    fn empty(&mut self) -> Result<(), ReplayError> {
        self.events.hook().lock().refuses_waits = true;
        let trimmed = self.allocator.trim(0);
        self.events.hook().lock().refuses_waits = false;
        let stats = self.allocator.stats();
        let cached = stats.reserved_bytes.all.current > stats.active_bytes.all.current;
        match trimmed {
            Err(AllocError::Driver(error)) if error.call == CallKind::EventSynchronize && cached => {
                self.allocator.trim(0)?;
                Ok(())
            }
            Err(AllocError::Driver(error)) if error.call == CallKind::EventSynchronize => Ok(()),
            trimmed => Ok(trimmed.map(drop)?),
        }
    }

    /// Frees what is live, so that the allocator ends as after a program.
    fn end(mut self) -> HostReport {
        for (_, block) in self.blocks.drain() {
            // SAFETY: as in `free`. An error of this device is not of the program.
            let _ = unsafe { self.allocator.deallocate(block, self.host) };
        }
        self.report
    }
}

impl HostReport {
    /// Bytes that are lost to rounding in live blocks at the peak of pinned memory, if requests are known.
    #[must_use]
    pub fn rounding_bytes(&self, trace: &HostTrace) -> Option<u64> {
        (trace.sizes == Sizes::Requested).then_some(self.ledger.internal)
    }
}
