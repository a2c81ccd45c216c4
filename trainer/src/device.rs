//! The device of a run: a driver whose calls are counted, and the means to run kernels on it.

mod cuda;
mod executor;
mod graph;
mod sim;
mod streams;

pub use graph::StepGraphs;
pub(crate) use streams::OwnedEvent;
pub use streams::Role;

use crate::error::{Result, TrainError};
use crate::export::CallLog;
use crate::settings::{DeviceChoice, SyncMode};
use executor::{Executor, Parts};
use kernels::{CudaKernels, Operation};
use std::fmt;
use std::sync::Arc;
use streams::Streams;
use vramlab::device::CallObserver;
use vramlab::device::Clock;
use vramlab::instruments::nvtx::{RangeGuard, Ranges};
use vramlab::{
    CallCounts, CallKind, CudaDriver, DeviceDescription, DeviceName, Driver, IdleCosts, MeteredDriver, Profile,
    StreamId,
};

/// A device that allocates, copies and computes, with one compute stream.
#[derive(Debug)]
pub struct Device {
    /// Dropped before the driver, whose context holds the kernels.
    executor: Arc<dyn Executor>,
    driver: Arc<dyn Driver>,
    /// Counts that driver's calls and the launches.
    meter: Arc<MeteredDriver>,
    streams: Streams,
    sync: SyncMode,
    ranges: Ranges,
    name: DeviceName,
    /// Why `auto` chose this device; empty when the device was asked for by name.
    reason: String,
    idle: Option<IdleCosts>,
    /// Who wants to know the names of the kernels that are launched.
    log: Option<Arc<CallLog>>,
}

impl Device {
    /// Opens the device that was asked for.
    ///
    /// # Errors
    /// [`TrainError::Cuda`] when a GPU was asked for and there is none, [`TrainError::Input`] for a profile that
    /// cannot be read, and whatever setting the device up runs into.
    pub fn open(choice: &DeviceChoice, sync: SyncMode, ranges: Ranges, observer: Option<CallObserver>) -> Result<Self> {
        let (name, reason) = match choice {
            DeviceChoice::Named(name) => (name.clone(), String::new()),
            DeviceChoice::Auto => match CudaDriver::probe() {
                Ok(found) => {
                    let reason = format!("found {}", found.first().map_or("a GPU", |gpu| gpu.name.as_str()));
                    (DeviceName::Cuda(0), reason)
                }
                Err(missing) => {
                    let reason = missing.to_string();
                    let reason = reason.split([';', ':']).next().unwrap_or_default().trim().to_owned();
                    (DeviceName::Sim(None), reason)
                }
            },
        };
        let refused = |why: String| TrainError::Input(why);
        let parts = match &name {
            DeviceName::Cuda(number) => cuda::open(*number, observer)?,
            DeviceName::Sim(None) => sim::open(Profile::h200(), observer)?,
            DeviceName::Sim(Some(path)) => {
                sim::open(Profile::read(path).map_err(|error| refused(error.to_string()))?, observer)?
            }
            DeviceName::Null => return Err(refused("a device without memory cannot train".into())),
        };
        let Parts { executor, driver, meter, stream, idle } = parts;
        let streams = Streams::alone(stream);
        let device = Self { executor, driver, meter, streams, sync, ranges, name, reason, idle, log: None };
        device.name_in_profiler();
        Ok(device)
    }

    /// The driver, metered.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.driver)
    }

    /// Calls made so far.
    #[must_use]
    pub fn calls(&self) -> CallCounts {
        self.meter.counts()
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

    /// The name by which it can be asked for.
    #[must_use]
    pub fn name(&self) -> &DeviceName {
        &self.name
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
        if self.driver.blocked_ns().is_some() { "exact" } else { "beyond_idle_cost" }
    }

    /// What calls cost on this device when it is idle, if that was measured.
    #[must_use]
    pub fn idle_costs(&self) -> Option<&IdleCosts> {
        self.idle.as_ref()
    }

    /// Device time in kernels and copies so far; `None` on a device that cannot tell.
    #[must_use]
    pub fn busy_ns(&self) -> Option<u64> {
        self.executor.busy_ns()
    }

    /// The kernels, where they run on a GPU.
    pub(crate) fn kernels(&self) -> Option<&CudaKernels> {
        self.executor.kernels()
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
        let stream = self.stream();
        let _range = self.range(format_args!("{}", operation.name()));
        if let Some(log) = &self.log {
            log.launching(operation.name());
        }
        // SAFETY: the caller vouches for the addresses, and the stream is one of this device's driver.
        let launch = || unsafe { self.executor.launch(operation, stream) };
        let launched = self.meter.count(CallKind::KernelLaunch, stream, launch);
        self.executor.between_calls();
        launched?;
        if self.sync == SyncMode::Op {
            self.synchronize()?;
        }
        Ok(())
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
            // SAFETY: the device's own streams, which live as long as it does.
            unsafe { self.executor.name_stream(self.ranges, stream, name) };
        }
    }

    /// Starts and stops what a profiler captures; nothing on the simulated device.
    pub fn profile(&self, on: bool) {
        self.executor.profile(on);
        if on {
            // Again, because a capture may hold only the names that were given while it ran.
            self.name_in_profiler();
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
