//! The device of a run: a driver whose calls are counted, and the means to run kernels on it.

mod graph;
mod recording;
mod streams;

pub use graph::StepGraphs;
pub use streams::Role;

use crate::error::{Result, TrainError};
use crate::export::CallLog;
use crate::settings::{DeviceChoice, SyncMode};
use kernels::{CudaKernels, Fill, HostMemory, Operation};
use recording::Recording;
use std::fmt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use streams::Streams;
use vramlab::device::CallObserver;
use vramlab::device::Clock;
use vramlab::input::{WRITTEN, read_text};
use vramlab::instruments::nvtx::{RangeGuard, Ranges};
use vramlab::{
    CallCounts, CallKind, CudaDriver, DeviceDescription, Driver, IdleCosts, MeteredDriver, Profile, SimDriver,
    SimMemory, StreamId,
};

/// How long driver calls waited is known exactly, or estimated; see [`Device::blocked_method`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocked {
    Exact,
    BeyondIdleCost,
}

#[derive(Debug)]
enum Engine {
    /// Kernels are dropped before the driver, whose context holds them.
    Cuda {
        kernels: Box<CudaKernels>,
        driver: Arc<CudaDriver>,
    },
    Sim(Arc<SimDriver>),
}

/// A device that allocates, copies and computes, with one compute stream.
#[derive(Debug)]
pub struct Device {
    engine: Engine,
    driver: Arc<MeteredDriver>,
    streams: Streams,
    /// Launches of the capture that is under way, where the host computes them.
    recorded: Mutex<Option<Vec<Box<dyn Operation>>>>,
    /// Launches that are only described.
    recording: Recording,
    sync: SyncMode,
    ranges: Ranges,
    blocked: Blocked,
    /// Why `auto` chose this device; empty when the device was asked for by name.
    reason: String,
    idle: Option<IdleCosts>,
    /// Who wants to know the names of the kernels that are launched.
    log: Option<Arc<CallLog>>,
}

/// Simulated addresses as kernels on the host see them.
struct SimView<'a>(&'a SimDriver);

impl HostMemory for SimView<'_> {
    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        self.0.translate(addr, bytes)
    }
}

impl Device {
    /// Opens the device that was asked for.
    ///
    /// # Errors
    /// [`TrainError::Cuda`] when a GPU was asked for and there is none, [`TrainError::Input`] for a profile that
    /// cannot be read, and whatever setting the device up runs into.
    pub fn open(choice: &DeviceChoice, sync: SyncMode, ranges: Ranges, observer: Option<CallObserver>) -> Result<Self> {
        match choice {
            DeviceChoice::Cuda(number) => Self::open_cuda(*number, String::new(), sync, ranges, observer),
            DeviceChoice::Sim => Self::open_sim(Profile::h200(), String::new(), sync, ranges, observer),
            DeviceChoice::SimProfile(path) => {
                Self::open_sim(read_profile(path)?, String::new(), sync, ranges, observer)
            }
            DeviceChoice::Auto => match CudaDriver::probe() {
                Ok(found) => {
                    let reason = format!("found {}", found.first().map_or("a GPU", |gpu| gpu.name.as_str()));
                    Self::open_cuda(0, reason, sync, ranges, observer)
                }
                Err(missing) => {
                    let reason = missing.to_string();
                    let reason = reason.split([';', ':']).next().unwrap_or_default().trim().to_owned();
                    Self::open_sim(Profile::h200(), reason, sync, ranges, observer)
                }
            },
        }
    }

    fn open_cuda(
        number: usize,
        reason: String,
        sync: SyncMode,
        ranges: Ranges,
        observer: Option<CallObserver>,
    ) -> Result<Self> {
        let driver = Arc::new(CudaDriver::new(number)?);
        driver.bind_to_thread()?;
        let kernels = CudaKernels::load()?;
        let stream = driver.stream_create()?;
        let mut idle = IdleCosts::measure(driver.as_ref(), stream)?;
        idle.kernel_launch = launch_cost(&driver, &kernels, stream)?;
        let metered = MeteredDriver::new(Arc::clone(&driver) as Arc<dyn Driver>, Some(idle.clone()), observer);
        let device = Self {
            engine: Engine::Cuda { kernels: Box::new(kernels), driver },
            driver: Arc::new(metered),
            streams: Streams::alone(stream),
            recorded: Mutex::default(),
            recording: Recording::default(),
            sync,
            ranges,
            blocked: Blocked::BeyondIdleCost,
            reason,
            idle: Some(idle),
            log: None,
        };
        device.name_in_profiler();
        Ok(device)
    }

    fn open_sim(
        profile: Profile,
        reason: String,
        sync: SyncMode,
        ranges: Ranges,
        observer: Option<CallObserver>,
    ) -> Result<Self> {
        let driver = Arc::new(SimDriver::new(profile, SimMemory::Host));
        let stream = driver.stream_create()?;
        // The observer is called after each call, so the program's own time lies between calls and in none of them.
        let program = Arc::clone(&driver);
        let between: CallObserver = Box::new(move |event| {
            program.run_program();
            if let Some(observer) = &observer {
                observer(event);
            }
        });
        let metered = MeteredDriver::new(Arc::clone(&driver) as Arc<dyn Driver>, None, Some(between));
        Ok(Self {
            engine: Engine::Sim(driver),
            driver: Arc::new(metered),
            streams: Streams::alone(stream),
            recorded: Mutex::default(),
            recording: Recording::default(),
            sync,
            ranges,
            blocked: Blocked::Exact,
            reason,
            idle: None,
            log: None,
        })
    }

    /// The driver, metered.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.driver) as Arc<dyn Driver>
    }

    /// Calls made so far.
    #[must_use]
    pub fn calls(&self) -> CallCounts {
        self.driver.counts()
    }

    /// The device's clock.
    #[must_use]
    pub fn clock(&self) -> Arc<dyn Clock> {
        self.driver.clock()
    }

    /// What the device is.
    #[must_use]
    pub fn describe(&self) -> DeviceDescription {
        self.driver.describe()
    }

    /// The stream of the work that is under way: the compute stream, but for what has one of its own.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.streams.current()
    }

    /// Emits NVTX ranges, or not.
    #[must_use]
    pub fn ranges(&self) -> Ranges {
        self.ranges
    }

    /// Opens a range inside the one that is open, for a profiler and for the log of driver calls; the name is only
    /// formatted when one of them is there.
    pub fn range(&self, name: fmt::Arguments<'_>) -> DeviceRange {
        if let Some(log) = &self.log {
            log.enter(name);
        }
        DeviceRange { _range: self.ranges.range(name), log: self.log.clone() }
    }

    /// Why `auto` chose this device; empty when it was asked for by name.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// How `blocked_ns` of driver calls came about: `exact`, or `beyond_idle_cost` (time beyond what the same call
    /// takes on the idle device).
    #[must_use]
    pub fn blocked_method(&self) -> &'static str {
        match self.blocked {
            Blocked::Exact => "exact",
            Blocked::BeyondIdleCost => "beyond_idle_cost",
        }
    }

    /// What calls cost on this device when it is idle, if that was measured.
    #[must_use]
    pub fn idle_costs(&self) -> Option<&IdleCosts> {
        self.idle.as_ref()
    }

    /// Device time in kernels and copies so far; `None` on a device that cannot tell.
    #[must_use]
    pub fn busy_ns(&self) -> Option<u64> {
        match &self.engine {
            Engine::Cuda { .. } => None,
            Engine::Sim(driver) => Some(driver.busy_ns()),
        }
    }

    /// The kernels, where they run on a GPU.
    pub(crate) fn kernels(&self) -> Option<&CudaKernels> {
        match &self.engine {
            Engine::Cuda { kernels, .. } => Some(kernels),
            Engine::Sim(_) => None,
        }
    }

    /// Tells `log` the names of the kernels that are launched; it hears of the launches themselves as of every call.
    pub fn name_launches(&mut self, log: Arc<CallLog>) {
        self.log = Some(log);
    }

    /// Queues an operation on the stream of the work that is under way.
    ///
    /// # Errors
    /// [`TrainError::Kernel`] for shapes or addresses that cannot be, [`TrainError::Driver`] when the driver
    /// refuses.
    ///
    /// # Safety
    /// Every address in the operation is valid for its shape until the stream has passed it, and no output
    /// overlaps another buffer of it.
    pub unsafe fn run(&self, operation: &dyn Operation) -> Result<()> {
        if self.recording.takes(operation) {
            return Ok(());
        }
        let stream = self.stream();
        let _range = self.range(format_args!("{}", operation.name()));
        if let Some(log) = &self.log {
            log.launching(operation.name());
        }
        self.driver.count(CallKind::KernelLaunch, stream, || -> Result<()> {
            match &self.engine {
                Engine::Cuda { kernels, driver } => {
                    // SAFETY: the kernels were loaded in the context that this stream belongs to; the caller keeps the
                    // addresses valid.
                    unsafe { operation.launch(kernels, driver.raw_stream(stream)?) }?;
                }
                Engine::Sim(driver) => {
                    let work = operation.work();
                    driver.launch(
                        stream,
                        work.kernel,
                        (work.blocks, work.iterations),
                        work.bytes,
                        &operation.buffers(),
                    )?;
                    if let Some(recorded) = self.recorded().as_mut() {
                        recorded.push(operation.boxed());
                        return Ok(());
                    }
                    // SAFETY: `translate` only yields ranges of live blocks; nothing else touches them, because this
                    // device computes on the calling thread alone.
                    unsafe { operation.run_on_host(&SimView(driver)) }?;
                }
            }
            Ok(())
        })?;
        if self.sync == SyncMode::Op {
            self.synchronize()?;
        }
        Ok(())
    }

    fn recorded(&self) -> MutexGuard<'_, Option<Vec<Box<dyn Operation>>>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the stream of the work that is under way.
    ///
    /// # Errors
    /// Those of the driver, which may stem from earlier work.
    pub fn synchronize(&self) -> Result<()> {
        let _range = self.range(format_args!("synchronize"));
        Ok(self.driver.stream_synchronize(self.stream())?)
    }

    /// Says what is what on a profiler's timeline.
    fn name_in_profiler(&self) {
        self.ranges.name_thread("trainer");
        for (stream, name) in self.streams.names() {
            // SAFETY: streams of the CUDA driver, which this is called for alone, as long as the device lives.
            unsafe { self.ranges.name_stream(stream, name) };
        }
    }

    /// Starts and stops what a profiler captures; nothing on the simulated device.
    pub fn profile(&self, on: bool) {
        if let Engine::Cuda { driver, .. } = &self.engine {
            // Without a profiler these calls do nothing, and with one a failure only widens its capture.
            let _ = if on { driver.profiler_start() } else { driver.profiler_stop() };
            if on {
                // Again, because a capture may hold only the names that were given while it ran.
                self.name_in_profiler();
            }
        }
    }
}

/// Ends its range when dropped.
#[must_use = "the range ends when this is dropped"]
#[derive(Debug)]
pub struct DeviceRange {
    _range: RangeGuard,
    log: Option<Arc<CallLog>>,
}

impl Drop for DeviceRange {
    fn drop(&mut self) {
        if let Some(log) = &self.log {
            log.leave();
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.streams.destroy(self.driver.as_ref());
    }
}

/// Host cost of a launch into an empty queue: the median of some.
fn launch_cost(driver: &Arc<CudaDriver>, kernels: &CudaKernels, stream: StreamId) -> Result<u64> {
    const LAUNCHES: usize = 101;
    let target = driver.mem_alloc(256)?;
    let fill = Fill { len: 1, value: 0.0, out: target.get() };
    let clock = driver.clock();
    let timed = |_| -> Result<u64> {
        let start = clock.now_ns();
        // SAFETY: the kernels belong to this driver's context; the target holds the one value and is freed below,
        // after the synchronise.
        unsafe { fill.launch(kernels, driver.raw_stream(stream)?) }?;
        Ok(clock.now_ns() - start)
    };
    let mut times = (0..LAUNCHES).map(timed).collect::<Result<Vec<u64>>>()?;
    driver.stream_synchronize(stream)?;
    // SAFETY: allocated above, freed once, and its work is done.
    unsafe { driver.mem_free(target)? };
    times.sort_unstable();
    Ok(times[LAUNCHES / 2])
}

fn read_profile(path: &Path) -> Result<Profile> {
    let text = read_text(path, WRITTEN)
        .map_err(|error| TrainError::Input(format!("{}: cannot read the device profile: {error}", path.display())))?;
    Profile::from_json(&text).map_err(|error| TrainError::Input(format!("{}: {error}", path.display())))
}
