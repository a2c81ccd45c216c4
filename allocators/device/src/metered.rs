//! Counts and times driver calls, and the part of the time that the host spent waiting.
//!
//! The simulated device knows exactly how long a call waited. CUDA does not report it, so there the wait is the time of a call
//! *beyond the same call's cost on an idle device*, which [`IdleCosts::measure`] measures at the start of the run. Plain memory has
//! two such costs, because the driver packs small blocks into 2 MiB pages: a low one when the block's page is already mapped, and
//! one about thirty times as high when pages are mapped or released. The meter tracks the pages by address to distinguish the two.

use super::calls::SharedCounts;
use super::hooked::{CallArguments, CallOutcome, Hook, HookedDriver};
use super::{CallCounts, CallKind, DeviceAddr, Driver, DriverResult, NullDriver, StreamId};
use crate::Clock;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

// `experiments calibrate` on an H200 with driver 580.159: about 1 us in a mapped page, 33 us where pages are mapped or released.
/// Pages in which drivers pack plain memory.
const PAGE: u64 = 2 << 20;
/// A call counts as waiting when it took this multiple of its idle cost and `SLACK_NS` more, so that the variation of calls on an
/// idle device does not.
const SCATTER: f64 = 1.5;
const SLACK_NS: f64 = 2_000.0;

/// The cost of an instrument itself, measured at the start of the run on this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstrumentCost {
    /// Name of the instrument.
    pub instrument: String,
    /// Host nanoseconds that it adds to one operation; negative when it is below the noise.
    pub ns_per_operation: f64,
    /// The method of measurement.
    pub method: String,
}

/// A driver call, for observers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallEvent {
    /// Kind of call.
    pub kind: CallKind,
    /// Size in bytes; 0 for calls without one.
    pub bytes: u64,
    /// Address that the call took or returned.
    pub addr: Option<DeviceAddr>,
    /// Stream on which the call queued work, or for which it waited; none for calls that affect the whole device.
    pub stream: Option<StreamId>,
    /// Start on the device's clock.
    pub start_ns: u64,
    /// Host time in the call.
    pub total_ns: u64,
    /// Part of it spent waiting for the device.
    pub blocked_ns: u64,
    /// Whether it succeeded.
    pub ok: bool,
}

/// Called after each driver call.
pub type CallObserver = Box<dyn Fn(&CallEvent) + Send + Sync>;

/// Costs of calls on the idle device, in nanoseconds (medians).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IdleCosts {
    /// Allocation that maps new pages, by bytes.
    pub mem_alloc: Vec<(u64, u64)>,
    /// Allocation in a mapped page.
    pub mem_alloc_in_page: u64,
    /// Free that releases pages, by bytes.
    pub mem_free: Vec<(u64, u64)>,
    /// Free that leaves its page in use.
    pub mem_free_in_page: u64,
    /// Stream synchronise.
    pub stream_synchronize: u64,
    /// Device synchronise.
    pub device_synchronize: u64,
    /// Kernel launch into an empty queue; set by the program, which can launch kernels.
    pub kernel_launch: u64,
}

impl IdleCosts {
    /// Measures a device that is otherwise idle; takes some milliseconds.
    ///
    /// # Errors
    /// The first driver call that fails.
    pub fn measure(driver: &dyn Driver, stream: StreamId) -> DriverResult<Self> {
        const REPEATS: usize = 15;
        let clock = driver.clock();
        let timed = |call: &mut dyn FnMut() -> DriverResult<()>| -> DriverResult<u64> {
            let start = clock.now_ns();
            call()?;
            Ok(clock.now_ns() - start)
        };
        let pair = |bytes: u64| -> DriverResult<(u64, u64)> {
            let (mut allocs, mut frees) = (Vec::new(), Vec::new());
            for _ in 0..REPEATS {
                let mut addr = None;
                allocs.push(timed(&mut || driver.mem_alloc(bytes).map(|fresh| addr = Some(fresh)))?);
                let Some(addr) = addr else { break };
                // SAFETY: just allocated, never used, freed once.
                frees.push(timed(&mut || unsafe { driver.mem_free(addr) })?);
            }
            Ok((median(allocs), median(frees)))
        };
        let mut costs = Self::default();
        driver.device_synchronize()?;
        for bytes in [PAGE, 16 * PAGE, 128 * PAGE] {
            // A device without room for the larger sizes is measured at the smaller ones.
            let Ok((alloc, free)) = pair(bytes) else { break };
            costs.mem_alloc.push((bytes, alloc));
            costs.mem_free.push((bytes, free));
        }
        let neighbour = driver.mem_alloc(1024)?;
        let small = pair(1024);
        // SAFETY: just allocated, never used, freed once.
        unsafe { driver.mem_free(neighbour)? };
        (costs.mem_alloc_in_page, costs.mem_free_in_page) = small?;
        let mut streams = Vec::new();
        let mut devices = Vec::new();
        for _ in 0..REPEATS {
            streams.push(timed(&mut || driver.stream_synchronize(stream))?);
            devices.push(timed(&mut || driver.device_synchronize())?);
        }
        costs.stream_synchronize = median(streams);
        costs.device_synchronize = median(devices);
        Ok(costs)
    }

    fn at(points: &[(u64, u64)], bytes: u64) -> u64 {
        let point = points.iter().find(|(size, _)| *size >= bytes).or(points.last());
        point.map_or(0, |(_, ns)| *ns)
    }
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// Live bytes in each page of plain memory, as far as this meter observed them.
#[derive(Debug, Default)]
struct Pages {
    live: HashMap<u64, u64>,
    sizes: HashMap<u64, u64>,
}

impl Pages {
    fn pages(addr: u64, bytes: u64) -> std::ops::RangeInclusive<u64> {
        addr / PAGE..=(addr + bytes.max(1) - 1) / PAGE
    }

    /// Adds a new block; true when all its pages were mapped before.
    fn insert(&mut self, addr: u64, bytes: u64) -> bool {
        self.sizes.insert(addr, bytes);
        let mut is_mapped = true;
        for page in Self::pages(addr, bytes) {
            let live = self.live.entry(page).or_insert(0);
            is_mapped &= *live > 0;
            *live += 1;
        }
        is_mapped
    }

    /// Removes a block; returns its size, and whether all its pages stay mapped.
    fn remove(&mut self, addr: u64) -> (u64, bool) {
        let bytes = self.sizes.remove(&addr).unwrap_or(0);
        let mut is_mapped = true;
        for page in Self::pages(addr, bytes) {
            if let Some(live) = self.live.get_mut(&page) {
                *live -= 1;
                if *live == 0 {
                    self.live.remove(&page);
                    is_mapped = false;
                }
            }
        }
        (bytes, is_mapped)
    }
}

/// Counts, times and reports calls.
pub struct Meter {
    clock: Arc<dyn Clock>,
    counts: SharedCounts,
    idle: Option<(IdleCosts, Mutex<Pages>)>,
    observer: Option<CallObserver>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("counts", &self.counts.read()).field("idle", &self.idle).finish_non_exhaustive()
    }
}

impl Meter {
    /// Nanoseconds that the host has waited so far, where the device reports it, and the time.
    fn now(&self, inner: &dyn Driver) -> (Option<u64>, u64) {
        (inner.blocked_ns(), self.clock.now_ns())
    }

    /// Time beyond the idle cost, for a device that does not report how long a call waited.
    fn estimate(&self, kind: CallKind, arguments: CallArguments, addr: Option<DeviceAddr>, total: u64) -> (u64, u64) {
        let Some((idle, pages)) = &self.idle else { return (arguments.bytes, 0) };
        let mut bytes = arguments.bytes;
        let beyond = |cost: u64| {
            // CAST: nanoseconds of one call, far below 2^53.
            if total as f64 > SCATTER * cost as f64 + SLACK_NS { total.saturating_sub(cost) } else { 0 }
        };
        let pages = || pages.lock().unwrap_or_else(PoisonError::into_inner);
        let blocked = match (kind, addr) {
            (CallKind::MemAlloc, Some(addr)) => {
                let is_mapped = pages().insert(addr.get(), bytes);
                beyond(if is_mapped { idle.mem_alloc_in_page } else { IdleCosts::at(&idle.mem_alloc, bytes) })
            }
            (CallKind::MemFree, Some(addr)) => {
                let (size, held) = pages().remove(addr.get());
                bytes = size;
                beyond(if held { idle.mem_free_in_page } else { IdleCosts::at(&idle.mem_free, bytes) })
            }
            // These calls only wait, so any time beyond the idle cost is a wait.
            (CallKind::StreamSynchronize | CallKind::EventSynchronize, _) => {
                total.saturating_sub(idle.stream_synchronize)
            }
            (CallKind::DeviceSynchronize, _) => total.saturating_sub(idle.device_synchronize),
            (CallKind::KernelLaunch, _) => beyond_launch(idle.kernel_launch, total),
            _ => 0,
        };
        (bytes, blocked)
    }
}

// SAFETY: changes no call.
unsafe impl Hook for Meter {
    type Before = (Option<u64>, u64);

    fn before(&self, inner: &dyn Driver, _kind: CallKind, _arguments: CallArguments) -> DriverResult<Self::Before> {
        Ok(self.now(inner))
    }

    fn after(
        &self,
        inner: &dyn Driver,
        kind: CallKind,
        arguments: CallArguments,
        (blocked_before, start_ns): Self::Before,
        outcome: CallOutcome,
    ) {
        let total_ns = self.clock.now_ns().saturating_sub(start_ns);
        let addr = arguments.addr.or(outcome.addr);
        let (bytes, blocked_ns) = match (blocked_before, inner.blocked_ns()) {
            (Some(before), Some(after)) => (arguments.bytes, after - before),
            _ => self.estimate(kind, arguments, addr, total_ns),
        };
        self.counts.add(kind, total_ns, blocked_ns);
        if let Some(observer) = &self.observer {
            let stream = arguments.stream;
            observer(&CallEvent { kind, bytes, addr, stream, start_ns, total_ns, blocked_ns, ok: outcome.ok });
        }
    }
}

/// A driver whose calls are counted and timed. Costs two clock reads per call; an allocator's hits make no driver call, so they
/// cost nothing more.
pub type MeteredDriver = HookedDriver<Meter>;

impl MeteredDriver {
    /// Wraps a driver. `idle` is needed on a device that does not report how long a call waited; without it such a device's waits
    /// count as zero. `observer` is called after each call.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>, idle: Option<IdleCosts>, observer: Option<CallObserver>) -> Self {
        let clock = inner.clock();
        let idle = idle.map(|costs| (costs, Mutex::default()));
        Self { inner, hook: Meter { clock, counts: SharedCounts::default(), idle, observer } }
    }

    /// The time that the meter itself adds to one driver call: the median of five rounds of 10,000 calls of the null device,
    /// alternately with and without it.
    ///
    /// # Errors
    /// Those of the null device, which has no reason to fail.
    pub fn own_cost() -> DriverResult<InstrumentCost> {
        const ROUNDS: usize = 5;
        const CALLS: u32 = 10_000;
        let bare: Arc<dyn Driver> = Arc::new(NullDriver::new(PAGE));
        let metered = Self::new(Arc::clone(&bare), None, None);
        let event = bare.event_create(false)?;
        let clock = bare.clock();
        let round = |driver: &dyn Driver| -> DriverResult<f64> {
            let start = clock.now_ns();
            for _ in 0..CALLS {
                driver.event_query(event)?;
            }
            // CAST: a duration in nanoseconds, far below 2^53.
            Ok((clock.now_ns() - start) as f64 / f64::from(CALLS))
        };
        let mut differences = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let without = round(bare.as_ref())?;
            differences.push(round(&metered)? - without);
        }
        differences.sort_by(f64::total_cmp);
        Ok(InstrumentCost {
            instrument: "driver_calls".to_owned(),
            ns_per_operation: differences[ROUNDS / 2],
            method: format!("median of {ROUNDS} rounds of {CALLS} driver calls of the null device, with and without"),
        })
    }

    /// Totals so far.
    #[must_use]
    pub fn counts(&self) -> CallCounts {
        self.hook.counts.read()
    }

    /// Counts and times work that is queued without the [`Driver`] trait, such as a kernel launch.
    ///
    /// # Errors
    /// Those of `call`.
    pub fn count<T, E>(&self, kind: CallKind, stream: StreamId, call: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let inner = self.inner.as_ref();
        let before = self.hook.now(inner);
        let result = call();
        let outcome = CallOutcome { ok: result.is_ok(), ..CallOutcome::default() };
        self.hook.after(
            inner,
            kind,
            CallArguments { stream: Some(stream), ..CallArguments::default() },
            before,
            outcome,
        );
        result
    }
}

/// Time of a launch beyond its cost into an empty queue. Where the queue is full a launch waits for one kernel to end, which may be
/// a few microseconds, so the slack is smaller than for memory calls.
fn beyond_launch(idle: u64, total: u64) -> u64 {
    if total > idle + idle / 3 + 500 { total - idle } else { 0 }
}
