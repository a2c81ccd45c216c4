//! The allocator under study with the instruments around it.

use crate::device::Device;
use crate::error::{Result, TrainError};
use crate::settings::Settings;
use std::sync::Arc;
use vramlab::device::{InstrumentCost, MonotonicClock};
use vramlab::instruments::nvtx::memory::{Heaps, NvtxMemory};
use vramlab::instruments::{Checker, EventTrace, Limit, Nvtx, NvtxMode, Timed, measure_cost, measure_cost_on};
use vramlab::{DeviceAllocator, MeteredDriver};

/// Pairs of operations from which an instrument's cost is measured.
const PAIRS: u32 = 10_000;

/// A backend and its instruments, from the inside out: notifications to a memory checker, latency, NVTX, trace, limit,
/// checker. Notifications exist only under such a tool. The latency histograms come next, so that they record the
/// backend's time and not the time of the other instruments.
#[derive(Debug)]
pub(crate) struct Stack {
    /// The allocator that the trainer uses.
    pub(crate) top: Arc<dyn DeviceAllocator>,
    /// Latency histograms.
    pub(crate) timed: Option<Arc<Timed>>,
    /// Trace.
    pub(crate) trace: Option<Arc<EventTrace>>,
    /// Checker.
    pub(crate) checker: Option<Arc<Checker>>,
    /// True if a memory checker is notified of blocks.
    pub(crate) nvtx_heaps: bool,
    /// The cost of the enabled instruments.
    pub(crate) costs: Vec<InstrumentCost>,
}

impl Stack {
    /// Builds the backend on the device and wraps it in the requested instruments.
    ///
    /// # Errors
    /// Errors of building the backend.
    pub(crate) fn build(settings: &Settings, device: &Device) -> Result<Self> {
        let mut allocator = settings.allocator.clone();
        let keeps_limit = allocator.set_memory_limit(settings.memory_limit);
        let heaps = if settings.nvtx_memory == NvtxMode::Off { None } else { Heaps::of_attached_tool() };
        let nvtx_heaps = heaps.is_some();
        if settings.nvtx_memory == NvtxMode::On && !nvtx_heaps {
            return Err(TrainError::Input(
                "--nvtx-memory on: no memory checker is attached to this process; start it with `compute-sanitizer \
                 --force-blocking-launches trainer …`, or leave the option out"
                    .into(),
            ));
        }
        let driver = heaps.as_ref().map_or_else(|| device.driver(), |heaps| heaps.watch(device.driver()));
        let mut top = allocator.build(&driver)?;
        if let Some(heaps) = heaps {
            top = Arc::new(NvtxMemory::new(top, heaps));
        }
        let mut costs = vec![MeteredDriver::own_cost()?];
        let mut timed = None;
        if settings.latency {
            let layer = Arc::new(Timed::new(top, device.clock()));
            timed = Some(Arc::clone(&layer));
            top = layer;
            costs.push(measure_cost("latency", PAIRS, &|inner| {
                Arc::new(Timed::new(inner, Arc::new(MonotonicClock::new())))
            })?);
        }
        if device.ranges().is_on() {
            top = Arc::new(Nvtx::new(top, device.ranges()));
            let ranges = device.ranges();
            // Few, because each pair appears on the profiler's timeline.
            let _range = ranges.range(format_args!("measure what NVTX costs"));
            costs.push(measure_cost("nvtx", 50, &|inner| Arc::new(Nvtx::new(inner, ranges)))?);
        }
        let mut trace = None;
        if settings.trace || !settings.exports.is_empty() {
            let layer = Arc::new(EventTrace::new(top, device.clock()));
            trace = Some(Arc::clone(&layer));
            top = layer;
            costs.push(measure_cost("trace", PAIRS, &|inner| {
                Arc::new(EventTrace::new(inner, Arc::new(MonotonicClock::new())))
            })?);
        }
        // An allocator that enforces a limit itself releases its cache first.
        if let Some(limit) = settings.memory_limit.filter(|_| !keeps_limit) {
            top = Arc::new(Limit::new(top, limit));
            costs.push(measure_cost("limit", PAIRS, &|inner| Arc::new(Limit::new(inner, u64::MAX)))?);
        }
        let mut checker = None;
        if settings.check {
            // SAFETY: the backend was built on this device's driver.
            let layer = Arc::new(unsafe { Checker::new(top, device.driver()) });
            checker = Some(Arc::clone(&layer));
            top = layer;
            // It fills and reads memory, so its cost is the device's.
            let driver = device.driver();
            costs.push(measure_cost_on("check", 100, &driver, device.stream(), &|inner| {
                // SAFETY: the measured stack is built on this driver.
                Arc::new(unsafe { Checker::new(inner, Arc::clone(&driver)) })
            })?);
        }
        Ok(Self { top, timed, trace, checker, nvtx_heaps, costs })
    }
}
