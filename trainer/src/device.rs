//! The device of a run: a driver whose calls are counted, and the means to run kernels on it.

mod bucket_memory;
mod cuda;
mod sim;
mod streams;

use crate::arithmetic::Arithmetic;
use crate::calls::CallLog;
use crate::error::{Result, TrainError};
use crate::pinned::HostMemory;
use crate::ranks::Group;
use crate::settings::{DeviceChoice, PinMode, Settings, SyncMode};
use kernels::{CudaKernels, Operation};
use std::fmt;
use std::sync::Arc;
use streams::Streams;
use vramlab::device::{CallObserver, Clock};
use vramlab::instruments::nvtx::{RangeGuard, Ranges};
use vramlab::{
    CallCounts, CallKind, Capture, CudaDriver, DeviceAddr, DeviceDescription, DeviceName, Driver, Graph, IdleCosts,
    Memory, MeteredDriver, Profile, StreamId,
};

pub(crate) use bucket_memory::KeptBuffer;
pub(crate) use streams::OwnedEvent;
pub use streams::Role;

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
    /// Pinned memory.
    host: Arc<HostMemory>,
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
                Ok(gpus) => {
                    let reason = format!("found {}", gpus.first().map_or("a GPU", |gpu| gpu.name.as_str()));
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
        let host = HostMemory::new(Arc::clone(&driver), PinMode::Plain)?;
        let device = Self { executor, driver, meter, streams, sync, ranges, name, reason, idle, host, log: None };
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

    /// Description of the device.
    #[must_use]
    pub fn describe(&self) -> DeviceDescription {
        self.driver.describe()
    }

    /// Pinned memory.
    pub(crate) fn host_memory(&self) -> &Arc<HostMemory> {
        &self.host
    }

    /// Replaces the pinned memory of later buffers.
    pub(crate) fn set_host_memory(&mut self, host: Arc<HostMemory>) {
        self.host = host;
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

    /// Derivation of `blocked_ns` of driver calls: `exact`, or `beyond_idle_cost` (time beyond what the same call
    /// takes on the idle device).
    #[must_use]
    pub fn blocked_method(&self) -> &'static str {
        if self.driver.blocked_ns().is_some() { "exact" } else { "beyond_idle_cost" }
    }

    /// The cost of each driver call on this device when idle, if measured.
    #[must_use]
    pub fn idle_costs(&self) -> Option<&IdleCosts> {
        self.idle.as_ref()
    }

    /// Device time in kernels and copies so far; `None` on a device that cannot tell.
    #[must_use]
    pub fn busy_ns(&self) -> Option<u64> {
        self.executor.busy_ns()
    }

    /// Names of the kernels launched so far that the simulated device's profile has no cost of, sorted; none on a GPU.
    #[must_use]
    pub fn kernels_without_cost(&self) -> Vec<&'static str> {
        self.executor.kernels_without_cost()
    }

    /// The kernels, where they run on a GPU.
    pub(crate) fn kernels(&self) -> Option<&CudaKernels> {
        self.executor.kernels()
    }

    /// Reports the names of launched kernels to `log`, which is notified of the launches as of every call.
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
        self.executor.between_calls(CallKind::KernelLaunch);
        launched?;
        if self.sync == SyncMode::Op {
            self.synchronize()?;
        }
        Ok(())
    }

    /// Connects the device to those of the other ranks, with as many communication streams as the settings say. Returns when all
    /// have done so.
    ///
    /// # Errors
    /// [`TrainError::Input`] without NCCL, or where the ranks have different versions of it; [`TrainError::Nccl`]; the failure of a
    /// rank.
    pub(crate) fn join(&mut self, group: &Arc<Group>, settings: &Settings) -> Result<Backend> {
        if settings.peer_access == Some(true) {
            self.executor.open_to_peers()?;
        }
        let streams = settings.comm_streams.unwrap_or(1);
        self.open_communication(streams)?;
        self.executor.join(group, streams)
    }

    /// Queues the sum over all ranks of `values` f32 at `addr` on a communication stream, in place. Every rank queues the same sums
    /// in the same order on the same streams.
    ///
    /// # Errors
    /// [`TrainError::Nccl`]; on simulated devices the failure of a rank.
    ///
    /// # Safety
    /// The memory is valid for the values until that stream has passed the call.
    pub(crate) unsafe fn all_reduce(&self, addr: DeviceAddr, values: u64, number: usize) -> Result<()> {
        const NAME: &str = "all_reduce";
        let stream = self.communication(number);
        if let Some(log) = &self.log {
            log.launching(NAME);
        }
        // SAFETY: the caller vouches for the memory, and the stream is one of this device's driver.
        let sum = || unsafe { self.executor.all_reduce(addr, values, (number, stream)) };
        let queued = self.meter.count(CallKind::KernelLaunch, stream, sum);
        self.executor.between_calls(CallKind::KernelLaunch);
        queued?;
        if self.sync == SyncMode::Op {
            self.driver.stream_synchronize(stream)?;
        }
        Ok(())
    }

    /// Sums as much as each of these numbers of f32 over all ranks some times, in memory of its own, so that connections exist before
    /// the first step; what the connections took and how long the sums take. Every rank calls this with the same numbers.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and errors of the driver.
    pub(crate) fn warm_up_sums(&self, values: &[u64]) -> Result<Option<SumCosts>> {
        self.executor.warm_up_sums(values, self.communication_streams())
    }

    /// Waits for the stream of the work that is under way.
    ///
    /// # Errors
    /// Errors of the driver, which may stem from earlier work.
    pub fn synchronize(&self) -> Result<()> {
        let _range = self.range(format_args!("synchronize"));
        Ok(self.driver.stream_synchronize(self.stream())?)
    }

    /// Names objects on a profiler's timeline.
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

/// Sums gradients over the ranks.
#[derive(Clone, Debug)]
pub(crate) struct Backend {
    /// Its name in the record.
    pub(crate) name: &'static str,
    /// Version and file of the library, where there is one.
    pub(crate) library: Option<(String, String)>,
}

/// Times of sums over all ranks before any other work.
#[derive(Clone, Debug)]
pub(crate) struct SumCosts {
    /// Device memory in use before the ranks connected.
    pub(crate) context_bytes: u64,
    /// Device memory that connecting took.
    pub(crate) library_bytes: u64,
    /// The library's own count of it, where its version has one.
    pub(crate) counted_bytes: Option<u64>,
    /// Mean device time of the sums of each number of values, one behind the other.
    pub(crate) sum_ns: Vec<u64>,
}

/// Work that a launch of a graph leaves to the host, on devices that compute there.
#[derive(Debug)]
enum HostWork {
    Kernel(Box<dyn Operation>),
    /// A sum over all ranks of so many f32 at this address.
    Sum(DeviceAddr, u64),
}

/// Runs kernels on the streams of one driver. [`Device`] counts and times the launches.
trait Executor: fmt::Debug + Send + Sync {
    /// Queues an operation.
    ///
    /// # Errors
    /// [`TrainError::Kernel`](crate::TrainError::Kernel) for shapes or addresses that cannot be,
    /// [`TrainError::Driver`](crate::TrainError::Driver) when the driver refuses.
    ///
    /// # Safety
    /// Every address in the operation is valid for its shape until the stream has passed it, and no output overlaps another
    /// buffer of it. The stream is one of this executor's driver.
    unsafe fn launch(&self, operation: &dyn Operation, stream: StreamId) -> Result<()>;

    /// The host's own work after a call of this kind to the driver and before the next, where the device's clock is a model of
    /// it too. Called outside of what is measured of a call.
    fn between_calls(&self, _call: CallKind) {}

    /// Has the kernels of linear layers ready, which cannot be loaded while a stream is captured.
    ///
    /// # Errors
    /// Errors of loading them.
    fn prepare(&self, _arithmetic: &Arithmetic) -> Result<()> {
        Ok(())
    }

    /// Adds later launches to a graph without running them. A driver that captures does this itself.
    fn begin_graph(&self) {}

    /// Ends that; what a launch of the graph has to compute on the host.
    fn end_graph(&self) -> Vec<HostWork> {
        Vec::new()
    }

    /// Computes what [`end_graph`](Self::end_graph) gave: call it after each launch of that graph.
    ///
    /// # Errors
    /// Errors of the operations.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch), of every operation.
    unsafe fn run_graph(&self, _work: &[HostWork]) -> Result<()> {
        Ok(())
    }

    /// Opens memory from now on to the other GPUs; nothing where devices do not share addresses.
    ///
    /// # Errors
    /// Errors of the driver.
    fn open_to_peers(&self) -> Result<()> {
        Ok(())
    }

    /// Connects the device to those of the other ranks, with a communicator for each stream of sums.
    ///
    /// # Errors
    /// As for [`Device::join`].
    fn join(&self, group: &Arc<Group>, communicators: u32) -> Result<Backend>;

    /// Memory for a bucket that does not come from the allocator.
    ///
    /// # Errors
    /// Errors of the driver and of NCCL.
    fn bucket_alloc(&self, bytes: u64) -> Result<DeviceAddr>;

    /// Waits for the device and frees memory of a bucket. An error is of no use: the memory goes with the process.
    ///
    /// # Safety
    /// The memory came from [`bucket_alloc`](Self::bucket_alloc), is freed once and not used by later work.
    unsafe fn bucket_free(&self, addr: DeviceAddr);

    /// Registers memory of a bucket with every communicator; whether all of them did, and the first refusal.
    ///
    /// # Safety
    /// The memory has this size and stays until [`deregister`](Self::deregister).
    unsafe fn register(&self, _addr: DeviceAddr, _bytes: u64) -> (bool, Option<String>) {
        (false, None)
    }

    /// Waits for the device and ends the registrations of this address.
    fn deregister(&self, _addr: DeviceAddr) {}

    /// Makes sums before the first step; `None` where that costs nothing that can be measured.
    ///
    /// # Errors
    /// As for [`Device::warm_up_sums`].
    fn warm_up_sums(&self, _values: &[u64], _streams: &[StreamId]) -> Result<Option<SumCosts>> {
        Ok(None)
    }

    /// Queues the sum over all ranks of `values` f32 at `addr`, in place, by the communicator of this number on its stream.
    ///
    /// # Errors
    /// As for [`Device::all_reduce`].
    ///
    /// # Safety
    /// The memory is valid for the values until the stream, one of this executor's driver, has passed the call.
    unsafe fn all_reduce(&self, addr: DeviceAddr, values: u64, on: (usize, StreamId)) -> Result<()>;

    /// The kernels, where they run on a GPU.
    fn kernels(&self) -> Option<&CudaKernels> {
        None
    }

    /// Device time in kernels and copies so far; `None` on a device that cannot tell.
    fn busy_ns(&self) -> Option<u64> {
        None
    }

    /// As [`Device::kernels_without_cost`].
    fn kernels_without_cost(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Names a stream on a profiler's timeline, if a profiler can see it.
    ///
    /// # Safety
    /// The stream is a live one of this executor's driver.
    unsafe fn name_stream(&self, _ranges: Ranges, _stream: StreamId, _name: &str) {}

    /// Starts or stops what a profiler captures, if a profiler can see the device.
    fn profile(&self, _on: bool) {}
}

/// The components of a device.
#[derive(Debug)]
struct Parts {
    executor: Arc<dyn Executor>,
    /// Driver called by allocators and copies.
    driver: Arc<dyn Driver>,
    /// The meter of that driver's calls; launches are counted by it too.
    meter: Arc<MeteredDriver>,
    /// The first stream.
    stream: StreamId,
    /// The cost of each driver call on the idle device, if measured.
    idle: Option<IdleCosts>,
}

/// Graphs that were captured one after the other, with the memory that they share.
#[derive(Debug)]
pub struct StepGraphs {
    graph: Graph,
    /// Work of each graph, for devices whose launches the host computes.
    operations: Vec<Vec<HostWork>>,
}

impl StepGraphs {
    /// Waits for the last launch and gives up the memory.
    ///
    /// # Errors
    /// Errors of the driver and of the allocator.
    pub fn release(self) -> Result<()> {
        Ok(self.graph.release()?)
    }
}

impl Device {
    /// Captures the work that `queue` queues on the stream that is under way, as one graph for each number below `count`;
    /// nothing of it runs. All buffers that a call of it allocates are gone when that returns, so that graphs, which run one
    /// after another, can share their memory.
    ///
    /// # Errors
    /// Errors of the driver, of the allocator and of `queue`.
    pub fn capture(
        &self,
        memory: &Arc<Memory>,
        count: usize,
        mut queue: impl FnMut(usize) -> Result<()>,
    ) -> Result<StepGraphs> {
        let _range = self.range(format_args!("capture"));
        let mut capture = Capture::begin(memory, &self.driver(), self.stream())?;
        let mut operations = Vec::with_capacity(count);
        for number in 0..count {
            if number > 0 {
                capture.cut()?;
            }
            self.executor.begin_graph();
            let queued = queue(number);
            operations.push(self.executor.end_graph());
            queued?;
        }
        Ok(StepGraphs { graph: capture.end()?, operations })
    }

    /// Queues the graph of this number on the stream that is under way.
    ///
    /// # Errors
    /// Errors of the driver and, on the simulated device, of the operations.
    pub fn launch(&self, graphs: &mut StepGraphs, number: usize) -> Result<()> {
        graphs.graph.launch_nth(number, self.stream())?;
        // SAFETY: the memory is pinned as long as the graphs live; buffers from outside are live by the contract of the
        // capture.
        unsafe { self.executor.run_graph(&graphs.operations[number]) }
    }

    /// Has the kernels of linear layers ready, which cannot be loaded while a stream is captured.
    ///
    /// # Errors
    /// Errors of loading them.
    pub(crate) fn prepare(&self, arithmetic: &Arithmetic) -> Result<()> {
        self.executor.prepare(arithmetic)
    }
}
