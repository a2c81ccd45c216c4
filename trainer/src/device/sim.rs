//! The simulated GPU: a launch is charged to its clocks and computed on the host.

use super::{Backend, Executor, HostWork, Parts};
use crate::error::Result;
use crate::ranks::{Clocks, Group};
use kernels::{HostMemory, Operation};
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use vramlab::device::{CallArguments, CallObserver, CallOutcome, DriverResult, Hook, HookedDriver};
use vramlab::{CallKind, DeviceAddr, Driver, DriverError, MeteredDriver, Profile, SimDriver, SimMemory, StreamId};

/// Computes on the host what the simulated GPU is said to compute.
#[derive(Debug)]
struct SimExecutor {
    driver: Arc<SimDriver>,
    /// Launches of the graph that is being captured.
    graph: Mutex<Option<Vec<HostWork>>>,
    /// Launched kernels that the profile has no cost of.
    without_cost: Mutex<BTreeSet<&'static str>>,
    /// The other ranks, where there are several.
    group: OnceLock<Arc<Group>>,
}

/// Opens a simulated GPU.
///
/// # Errors
/// Errors of the driver.
pub(super) fn open(profile: Profile, observer: Option<CallObserver>) -> Result<Parts> {
    let driver = Arc::new(SimDriver::new(profile, SimMemory::Host));
    let stream = driver.stream_create()?;
    let meter = Arc::new(MeteredDriver::new(Arc::clone(&driver) as Arc<dyn Driver>, None, observer));
    let (graph, without_cost) = (Mutex::default(), Mutex::default());
    let executor = Arc::new(SimExecutor { driver, graph, without_cost, group: OnceLock::new() });
    let program = Program(Arc::clone(&executor));
    let with_program = HookedDriver::with_hook(Arc::clone(&meter) as Arc<dyn Driver>, program);
    Ok(Parts { executor, driver: Arc::new(with_program), meter, stream, idle: None })
}

/// The program that calls the driver: it takes time of its own after each call, outside of what the meter measures.
#[derive(Debug)]
struct Program(Arc<SimExecutor>);

// SAFETY: changes no call.
unsafe impl Hook for Program {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, _kind: CallKind, _arguments: CallArguments) -> DriverResult<()> {
        Ok(())
    }

    fn after(&self, _inner: &dyn Driver, kind: CallKind, _arguments: CallArguments, (): (), _outcome: CallOutcome) {
        self.0.between_calls(kind);
    }
}

/// Simulated addresses as kernels on the host see them.
struct SimView<'a>(&'a SimDriver);

impl HostMemory for SimView<'_> {
    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        self.0.translate(addr, bytes)
    }
}

impl SimExecutor {
    fn graph(&self) -> MutexGuard<'_, Option<Vec<HostWork>>> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn without_cost(&self) -> MutexGuard<'_, BTreeSet<&'static str>> {
        self.without_cost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes a sum over all ranks.
    fn sum(&self, addr: DeviceAddr, values: u64) -> Result<()> {
        let Some(group) = self.group.get() else { return Ok(()) };
        let memory = self.driver.translate(addr.get(), 4 * values).ok_or_else(|| {
            let why = format!("{:#x} + {} is not inside one live block", addr.get(), 4 * values);
            DriverError::new(CallKind::KernelLaunch, DriverError::ILLEGAL_ADDRESS, why)
        })?;
        // CAST: a size in memory fits.
        // SAFETY: `translate` gives a range of a live block, which begins at a multiple of 256 bytes; nothing else touches it,
        // because this executor computes on the calling thread alone. Any bytes are an f32.
        let values = unsafe { std::slice::from_raw_parts_mut(memory.cast::<f32>().as_ptr(), values as usize) };
        group.sum(values)
    }
}

impl Executor for SimExecutor {
    unsafe fn launch(&self, operation: &dyn Operation, stream: StreamId) -> Result<()> {
        let work = operation.work();
        let (name, geometry) = (operation.name(), (work.blocks, work.iterations));
        self.driver.launch(stream, name, geometry, work.bytes, &operation.buffers())?;
        if !self.driver.profile().kernels.contains_key(name) {
            self.without_cost().insert(name);
        }
        if let Some(graph) = self.graph().as_mut() {
            graph.push(HostWork::Kernel(operation.boxed()));
            return Ok(());
        }
        // SAFETY: `translate` only yields ranges of live blocks; nothing else touches them, because this executor computes on
        // the calling thread alone.
        Ok(unsafe { operation.run_on_host(&SimView(&self.driver)) }?)
    }

    fn between_calls(&self, call: CallKind) {
        self.driver.run_program(call);
    }

    fn begin_graph(&self) {
        *self.graph() = Some(Vec::new());
    }

    fn end_graph(&self) -> Vec<HostWork> {
        self.graph().take().unwrap_or_default()
    }

    unsafe fn run_graph(&self, work: &[HostWork]) -> Result<()> {
        for work in work {
            match work {
                // SAFETY: the caller vouches for the addresses; this executor computes on the calling thread alone.
                HostWork::Kernel(operation) => unsafe { operation.run_on_host(&SimView(&self.driver)) }?,
                HostWork::Sum(addr, values) => self.sum(*addr, *values)?,
            }
        }
        Ok(())
    }

    fn join(&self, group: &Arc<Group>, _communicators: u32) -> Result<Backend> {
        self.driver.join(Arc::new(Clocks(Arc::clone(group))));
        let _ = self.group.set(Arc::clone(group));
        Ok(Backend { name: "simulated", library: None })
    }

    fn bucket_alloc(&self, bytes: u64) -> Result<DeviceAddr> {
        Ok(self.driver.mem_alloc(bytes)?)
    }

    unsafe fn bucket_free(&self, addr: DeviceAddr) {
        // SAFETY: the caller promises the memory; the call waits for the device.
        let _ = unsafe { self.driver.mem_free(addr) };
    }

    unsafe fn all_reduce(&self, addr: DeviceAddr, values: u64, (_, stream): (usize, StreamId)) -> Result<()> {
        self.driver.all_reduce(stream, addr, 4 * values)?;
        if let Some(graph) = self.graph().as_mut() {
            graph.push(HostWork::Sum(addr, values));
            return Ok(());
        }
        self.sum(addr, values)
    }

    fn busy_ns(&self) -> Option<u64> {
        Some(self.driver.busy_ns())
    }

    fn kernels_without_cost(&self) -> Vec<&'static str> {
        self.without_cost().iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    /// Time between two calls is the program's own, with or without a listener, and is not in any call.
    #[test]
    fn the_program_takes_its_time_between_calls_and_in_none_of_them() {
        let ended = |listens: bool| {
            let gap = Arc::new(AtomicU64::new(0));
            let last = Arc::clone(&gap);
            let end = AtomicU64::new(0);
            let observer: CallObserver = Box::new(move |event| {
                let before = end.swap(event.start_ns + event.total_ns, Relaxed);
                last.store(event.start_ns - before, Relaxed);
            });
            let parts =
                open(Profile { program_ns_per_call: 500, ..Profile::h200() }, listens.then_some(observer)).unwrap();
            let clock = parts.driver.clock();
            let costs = |calls: u64| {
                let start = clock.now_ns();
                (0..calls).for_each(|_| assert!(parts.driver.event_create(false).is_ok()));
                clock.now_ns() - start
            };
            assert_eq!(costs(1), Profile::h200().queues.event_create_ns + 500);
            assert_eq!(costs(3), 3 * (Profile::h200().queues.event_create_ns + 500));
            assert_eq!(gap.load(Relaxed), if listens { 500 } else { 0 });
            clock.now_ns()
        };
        assert_eq!(ended(true), ended(false));
    }
}
