//! A GPU: kernels are launched through the CUDA driver.

use super::streams::OwnedEvent;
use super::{Backend, Executor, Parts, SumCosts};
use crate::arithmetic::Arithmetic;
use crate::error::{Result, TrainError};
use crate::ranks::Group;
use crate::ranks::nccl::{Communicator, Id, Nccl, Registering, Registration};
use kernels::{CudaKernels, Fill, Operation};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;
use vramlab::device::CallObserver;
use vramlab::instruments::nvtx::Ranges;
use vramlab::{CudaDriver, DeviceAddr, Driver, IdleCosts, MeteredDriver, StreamId};

/// Launches kernels on a GPU.
#[derive(Debug)]
struct CudaExecutor {
    /// The other ranks, where there are several. Dropped first, because it uses the context.
    joined: OnceLock<Joined>,
    /// Dropped before the driver, whose context holds them.
    kernels: CudaKernels,
    driver: Arc<CudaDriver>,
}

/// The connection to the other ranks.
#[derive(Debug)]
struct Joined {
    nccl: Arc<Nccl>,
    /// One for each stream of sums.
    communicators: Vec<Arc<Communicator>>,
    /// Registered memory by its address, of each communicator.
    registrations: Mutex<Vec<(DeviceAddr, usize, Registration)>>,
    /// Free device memory before and after the ranks were connected.
    free: [u64; 2],
}

impl Joined {
    fn registrations(&self) -> std::sync::MutexGuard<'_, Vec<(DeviceAddr, usize, Registration)>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens the GPU of this number and measures what calls cost on it while it is idle.
///
/// # Errors
/// Errors of the driver and of loading the kernels.
pub(super) fn open(number: usize, observer: Option<CallObserver>) -> Result<Parts> {
    let driver = Arc::new(CudaDriver::new(number)?);
    driver.bind_to_thread()?;
    let kernels = CudaKernels::load()?;
    let stream = driver.stream_create()?;
    let mut idle = IdleCosts::measure(driver.as_ref(), stream)?;
    idle.kernel_launch = launch_cost(&driver, &kernels, stream)?;
    let bare = Arc::clone(&driver) as Arc<dyn Driver>;
    let meter = Arc::new(MeteredDriver::new(bare, Some(idle.clone()), observer));
    Ok(Parts {
        executor: Arc::new(CudaExecutor { joined: OnceLock::new(), kernels, driver }),
        driver: Arc::clone(&meter) as Arc<dyn Driver>,
        meter,
        stream,
        idle: Some(idle),
    })
}

impl Executor for CudaExecutor {
    unsafe fn launch(&self, operation: &dyn Operation, stream: StreamId) -> Result<()> {
        // SAFETY: the kernels were loaded in the context that this driver's streams belong to; the caller keeps the addresses
        // valid.
        Ok(unsafe { operation.launch(&self.kernels, self.driver.raw_stream(stream)?) }?)
    }

    fn prepare(&self, arithmetic: &Arithmetic) -> Result<()> {
        if !arithmetic.is_plain() {
            self.kernels.prepare(arithmetic.precision())?;
        }
        Ok(())
    }

    fn open_to_peers(&self) -> Result<()> {
        self.driver.open_to_peers()?;
        Ok(())
    }

    fn join(&self, group: &Arc<Group>, communicators: u32) -> Result<Backend> {
        let nccl = Nccl::load()?;
        let free_before = self.driver.mem_info()?.free;
        let one = |_| connect(group, &nccl, agree(group, &nccl)?, &self.driver);
        let communicators = (0..communicators).map(one).collect::<Result<Vec<Arc<Communicator>>>>()?;
        let library = Some((nccl.version.clone(), nccl.path.clone()));
        let free = [free_before, self.driver.mem_info()?.free];
        let joined = Joined { nccl, communicators, registrations: Mutex::default(), free };
        // A second call has no effect.
        let _ = self.joined.set(joined);
        Ok(Backend { name: "nccl", library })
    }

    fn warm_up_sums(&self, values: &[u64], streams: &[StreamId]) -> Result<Option<SumCosts>> {
        let (Some(most), Some(joined)) = (values.iter().max(), self.joined.get()) else { return Ok(None) };
        let driver = &self.driver;
        let start = driver.mem_info()?;
        let memory = driver.mem_alloc(4 * most)?;
        let on_each =
            streams.iter().enumerate().map(|(number, stream)| self.sum_costs(values, memory, (number, *stream)));
        let costs = on_each.collect::<Result<Vec<Vec<u64>>>>();
        // The streams have passed all sums, or the run ends.
        streams.iter().try_for_each(|stream| driver.stream_synchronize(*stream))?;
        // SAFETY: allocated above, freed once, and its work is done.
        unsafe { driver.mem_free(memory)? };
        // Each stream's sums were timed with the others idle, so those of the first stand for all.
        let sum_ns = costs?.into_iter().next().unwrap_or_default();
        let [before, connected] = joined.free;
        // The allocator has reserved memory between connecting and this call, which does not count.
        let [connecting, sums] = [(before, connected), (start.free, driver.mem_info()?.free)]
            .map(|(before, after)| before.saturating_sub(after));
        Ok(Some(SumCosts {
            context_bytes: start.total.saturating_sub(before),
            library_bytes: connecting + sums,
            counted_bytes: joined.communicators.iter().map(|communicator| communicator.memory()).sum(),
            sum_ns,
        }))
    }

    fn bucket_alloc(&self, bytes: u64) -> Result<DeviceAddr> {
        let joined = self.joined.get().ok_or_else(|| TrainError::Input("the ranks are not connected".into()))?;
        self.driver.bind_to_thread()?;
        joined.nccl.mem_alloc(bytes)
    }

    unsafe fn bucket_free(&self, addr: DeviceAddr) {
        let Some(joined) = self.joined.get() else { return };
        if self.driver.device_synchronize().is_ok() {
            // SAFETY: the caller promises the memory, and the device has completed all work.
            let _ = unsafe { joined.nccl.mem_free(addr) };
        }
    }

    unsafe fn register(&self, addr: DeviceAddr, bytes: u64) -> (bool, Option<String>) {
        let Some(joined) = self.joined.get() else { return (false, None) };
        let (mut all, mut refusal) = (true, None);
        for (number, communicator) in joined.communicators.iter().enumerate() {
            // SAFETY: the caller keeps the memory until the registration ends.
            match unsafe { communicator.register(Registering::Buffer, addr.get(), bytes) } {
                Ok(Some(registration)) => joined.registrations().push((addr, number, registration)),
                Ok(None) => all = false,
                Err(error) => {
                    all = false;
                    refusal.get_or_insert(error.to_string());
                }
            }
        }
        (all, refusal)
    }

    fn deregister(&self, addr: DeviceAddr) {
        let Some(joined) = self.joined.get() else { return };
        if self.driver.device_synchronize().is_err() {
            return;
        }
        let mut registrations = joined.registrations();
        registrations.retain(|(of, number, registration)| {
            if *of == addr {
                // An error is of no use: the communicator ends soon, and with it the registration.
                let _ = joined.communicators[*number].deregister(registration);
            }
            *of != addr
        });
    }

    unsafe fn all_reduce(&self, addr: DeviceAddr, values: u64, (number, stream): (usize, StreamId)) -> Result<()> {
        let communicator = self.joined.get().and_then(|joined| joined.communicators.get(number));
        let Some(communicator) = communicator else { return Ok(()) };
        // The methods of the driver make its context current; NCCL asks which one is.
        let stream = self.driver.raw_stream(stream)?;
        // SAFETY: the caller vouches for the memory; the stream is live, and this driver's context is current on its thread.
        unsafe { communicator.all_reduce(addr.get(), values, stream.cast()) }
    }

    fn kernels(&self) -> Option<&CudaKernels> {
        Some(&self.kernels)
    }

    unsafe fn name_stream(&self, ranges: Ranges, stream: StreamId, name: &str) {
        // SAFETY: the caller vouches that it is a live stream of this driver, which is CUDA's.
        unsafe { ranges.name_stream(stream, name) };
    }

    fn profile(&self, on: bool) {
        // Without a profiler these calls do nothing, and with one a failure only widens its capture.
        let _ = if on { self.driver.profiler_start() } else { self.driver.profiler_stop() };
    }
}

impl CudaExecutor {
    /// Mean device time of the sums of each number of values, in this memory.
    fn sum_costs(&self, values: &[u64], memory: DeviceAddr, (number, stream): (usize, StreamId)) -> Result<Vec<u64>> {
        const WARM_UP: u64 = 5;
        const TIMED: u64 = 20;
        let driver = Arc::clone(&self.driver) as Arc<dyn Driver>;
        let events = [OwnedEvent::new(&driver, true)?, OwnedEvent::new(&driver, true)?];
        let sum = |values: u64| {
            // SAFETY: the memory has room for the most values, and the caller frees it when the stream has passed.
            unsafe { self.all_reduce(memory, values, (number, stream)) }
        };
        let cost = |values: &u64| -> Result<u64> {
            (0..WARM_UP).try_for_each(|_| sum(*values))?;
            driver.event_record(events[0].id, stream)?;
            (0..TIMED).try_for_each(|_| sum(*values))?;
            driver.event_record(events[1].id, stream)?;
            driver.event_synchronize(events[1].id)?;
            Ok(driver.event_elapsed_ns(events[0].id, events[1].id)? / TIMED)
        };
        values.iter().map(cost).collect()
    }
}

/// Makes sure that all ranks have one version of NCCL; the id of their communicator.
fn agree(group: &Group, nccl: &Nccl) -> Result<Id> {
    let bytes = group.exchange(nccl.version.clone().into_bytes(), |versions| {
        one_version(&versions)?;
        Ok(nccl.new_id()?.bytes())
    })?;
    Id::from_bytes(&bytes).ok_or_else(|| TrainError::Input("rank 0 sent no id of NCCL".into()))
}

/// Refuses ranks whose versions differ.
fn one_version(versions: &[Vec<u8>]) -> Result<()> {
    let show = |rank: usize| String::from_utf8_lossy(&versions[rank]).into_owned();
    match versions.iter().position(|version| *version != versions[0]) {
        None => Ok(()),
        Some(rank) => Err(TrainError::Input(format!(
            "rank {rank} has NCCL {} and rank 0 {}; give all ranks one version (VRAMLAB_NCCL names the file)",
            show(rank),
            show(0)
        ))),
    }
}

/// Joins the communicator. That waits for all ranks and cannot be ended, so a thread does it, which a failure of a rank leaves behind
/// until the process ends.
fn connect(group: &Arc<Group>, nccl: &Arc<Nccl>, id: Id, driver: &Arc<CudaDriver>) -> Result<Arc<Communicator>> {
    const PAUSE: Duration = Duration::from_millis(20);
    let (sender, receiver) = mpsc::channel();
    let (rank, size) = (group.rank(), group.size());
    let (nccl, driver) = (Arc::clone(nccl), Arc::clone(driver));
    let join = move || -> Result<Communicator> {
        driver.bind_to_thread()?;
        Communicator::new(nccl, id, rank, size)
    };
    let thread = std::thread::Builder::new().name("nccl".to_owned());
    let started = thread.spawn(move || {
        // Nobody listens after a failure.
        let _ = sender.send(join());
    });
    started.map_err(|error| TrainError::Input(format!("cannot start a thread for NCCL: {error}")))?;
    let communicator = loop {
        match receiver.recv_timeout(PAUSE) {
            Ok(joined) => break Arc::new(joined?),
            Err(mpsc::RecvTimeoutError::Timeout) => group.check()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(TrainError::Nccl { call: "ncclCommInitRank", reason: "its thread ended".to_owned() });
            }
        }
    };
    let aborts = Arc::downgrade(&communicator);
    group.on_failure(move || {
        if let Some(communicator) = aborts.upgrade() {
            communicator.abort();
        }
    });
    Ok(communicator)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_other_versions_of_nccl_are_refused() {
        let check = |versions: &[&str]| {
            one_version(&versions.iter().map(|version| version.as_bytes().to_vec()).collect::<Vec<_>>())
        };
        assert!(check(&["2.28.9", "2.28.9"]).is_ok());
        let error = check(&["2.28.9", "2.28.9", "2.27.5"]).unwrap_err();
        assert_eq!(error.exit_code(), terminal::exit::BAD_INPUT);
        assert!(error.to_string().starts_with("rank 2 has NCCL 2.27.5 and rank 0 2.28.9; give all ranks one version"));
    }
}
