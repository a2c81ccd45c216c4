//! Measurement of the memory that NCCL can register: one rank's part. The ranks are processes, because NCCL treats GPUs of one
//! process differently; they meet in a directory.

mod memory;

pub use memory::BufferMemory;

use super::links::SumTime;
use super::nccl::{Collective, Communicator, Id, Nccl, Registering, Registration};
use crate::error::{Result, TrainError};
use memory::Memory;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use vramlab::{CudaDriver, DeviceAddr, Driver, StreamId};

/// Timed series of each size.
const SAMPLES: usize = 5;
/// Collectives in a series, of sizes up to [`LARGE`] and above.
const COLLECTIVES: (u64, u64) = (20, 6);
const LARGE: u64 = 64 << 20;
/// Values of the check of a sum, whose size every protocol of NCCL can have.
const CHECKED: u64 = 4 << 20;
/// Ranks that have not met after this time are given up.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);

vramlab::device::named! {
    /// A collective over some memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Operation {
        /// The sum replaces the values.
        AllReduceInPlace "all-reduce-in-place",
        /// The sum is written elsewhere.
        AllReduce "all-reduce",
        /// The values of all ranks are written elsewhere.
        AllGather "all-gather",
    }
}

vramlab::device::named! {
    /// How memory is made known to NCCL.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Mode {
        /// It is not, except by NCCL itself in a capture.
        None "none",
        /// `ncclCommRegister`.
        Register "register",
        /// `ncclCommWindowRegister`, symmetric.
        Window "window",
    }
}

/// The result of a registration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegistrationResult {
    /// Kind of registration.
    pub mode: Mode,
    /// Whether NCCL returned a handle.
    pub registered: bool,
    /// NCCL's reason for a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Host time of the call in nanoseconds.
    pub call_ns: u64,
    /// Whether sums over registered memory were correct; absent where nothing was registered or the values cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correct: Option<bool>,
}

/// Device time of one collective.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CollectiveTime {
    /// The collective.
    pub operation: Operation,
    /// How its memory is known to NCCL.
    pub mode: Mode,
    /// `eager` or `graph`.
    pub launch: String,
    /// Blocks of its kernel, each of which occupies a part of a multiprocessor; absent where the driver does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
    /// Size and times; of an all-gather the size of the result.
    #[serde(flatten)]
    pub time: SumTime,
}

/// One kind of memory, as rank 0 measured it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindMeasurement {
    /// Version of NCCL.
    pub nccl: String,
    /// Name of the GPU.
    pub gpu: String,
    /// Results of registering the memory.
    pub registrations: Vec<RegistrationResult>,
    /// Times of collectives over it.
    pub times: Vec<CollectiveTime>,
}

/// Device memory that communicators take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommunicatorMemory {
    /// Number of communicators.
    pub count: u64,
    /// Decrease of the device's free memory since before the first, after an all-reduce of each.
    pub device_bytes: u64,
    /// The sum of NCCL's own counts; absent where its version has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted_bytes: Option<u64>,
}

/// A process as one rank of a measurement.
#[derive(Clone, Debug)]
pub struct MeasuringRank {
    /// The rank, and the number of its GPU.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// A directory in which the ranks find each other, new for each measurement.
    pub meeting: PathBuf,
}

/// A rank with its GPU and NCCL.
struct Rank {
    of: MeasuringRank,
    driver: Arc<CudaDriver>,
    stream: StreamId,
    nccl: Arc<Nccl>,
}

impl Rank {
    fn new(of: &MeasuringRank) -> Result<Self> {
        let driver = Arc::new(CudaDriver::new(of.rank as usize)?);
        driver.bind_to_thread()?;
        let stream = driver.stream_create()?;
        Ok(Self { of: of.clone(), driver, stream, nccl: Nccl::load()? })
    }

    /// The communicator of this number, which all ranks join.
    fn communicator(&self, number: u64) -> Result<Communicator> {
        let MeasuringRank { rank, ranks, meeting } = &self.of;
        let file = meeting.join(format!("id{number}"));
        let failed = |error: std::io::Error| TrainError::Input(format!("{}: {error}", file.display()));
        let id = if *rank == 0 {
            let id = self.nccl.new_id()?;
            // Written elsewhere and renamed, so that no rank reads a part of it.
            let begun = meeting.join(format!("id{number}.new"));
            std::fs::write(&begun, id.bytes()).and_then(|()| std::fs::rename(&begun, &file)).map_err(failed)?;
            id
        } else {
            let until = Instant::now() + LIMIT;
            let bytes = loop {
                match std::fs::read(&file) {
                    Ok(bytes) => break bytes,
                    Err(error) if Instant::now() >= until => return Err(failed(error)),
                    Err(_) => thread::sleep(PAUSE),
                }
            };
            Id::from_bytes(&bytes)
                .ok_or_else(|| TrainError::Input(format!("{} is not an id of NCCL", file.display())))?
        };
        Communicator::new(Arc::clone(&self.nccl), id, *rank, *ranks)
    }

    /// Queues a collective whose larger side has `bytes` bytes, over memory whose halves begin at these addresses.
    fn queue(
        &self,
        communicator: &Communicator,
        operation: Operation,
        (from, to): (u64, u64),
        bytes: u64,
    ) -> Result<()> {
        let stream = self.driver.raw_stream(self.stream)?.cast();
        let (collective, to, values) = match operation {
            Operation::AllReduceInPlace => (Collective::AllReduce, from, bytes / 4),
            Operation::AllReduce => (Collective::AllReduce, to, bytes / 4),
            Operation::AllGather => (Collective::AllGather, to, bytes / 4 / u64::from(self.of.ranks)),
        };
        // SAFETY: both halves have room for the largest size, and are freed after the stream has been waited for.
        unsafe { communicator.collect(collective, (from, to), values, stream) }
    }

    /// The means of series on the device, each of which `work` queues; it returns the number of collectives.
    fn series(&self, work: impl Fn() -> Result<u64>) -> Result<Vec<u64>> {
        let driver = self.driver.as_ref();
        let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
        let mut means = Vec::with_capacity(SAMPLES);
        for _ in 0..SAMPLES {
            // Ahead of the start, so that the host's time for the first launch is not in the series.
            work()?;
            driver.event_record(start, self.stream)?;
            let collectives = work()?;
            driver.event_record(end, self.stream)?;
            driver.event_synchronize(end)?;
            means.push(driver.event_elapsed_ns(start, end)? / collectives.max(1));
        }
        for event in [start, end] {
            // SAFETY: created above, completed and used nowhere else.
            unsafe { driver.event_destroy(event)? };
        }
        Ok(means)
    }

    /// Times one collective in both launches.
    fn times(
        &self,
        communicator: &Communicator,
        (operation, mode): (Operation, Mode),
        places: (u64, u64),
        bytes: u64,
    ) -> Result<[CollectiveTime; 2]> {
        let (driver, stream) = (self.driver.as_ref(), self.stream);
        let count = if bytes <= LARGE { COLLECTIVES.0 } else { COLLECTIVES.1 };
        let queue = || (0..count).try_for_each(|_| self.queue(communicator, operation, places, bytes)).map(|()| count);
        let time = |launch: &str, means, blocks| CollectiveTime {
            operation,
            mode,
            launch: launch.to_owned(),
            blocks,
            time: SumTime::from_means(self.of.ranks.into(), bytes, means),
        };
        let eager = time("eager", self.series(queue)?, None);
        let graphs = driver.graphs().ok_or_else(|| TrainError::Input("this device has no graphs".into()))?;
        graphs.capture_begin(stream)?;
        let queued = queue();
        // The most of its kernels: with a capture NCCL may add small ones of its own.
        let blocks = driver.captured_blocks(stream).ok().and_then(|blocks| blocks.into_iter().max());
        let graph = graphs.capture_end(stream)?;
        queued?;
        let launch = || {
            // SAFETY: the captured memory stays until the graph has been destroyed.
            unsafe { graphs.graph_launch(graph, stream)? };
            Ok(count)
        };
        let means = self.series(launch)?;
        // SAFETY: made above, not used afterwards, and the series have completed.
        unsafe { graphs.graph_destroy(graph)? };
        Ok([eager, time("graph", means, blocks)])
    }

    /// Whether a sum over this memory is correct; `None` where the values cannot be written or read.
    fn is_correct(&self, communicator: &Communicator, (from, to): (u64, u64)) -> Result<Option<bool>> {
        let value = |index: u64, rank: u32| (index % 7) as f32 + rank as f32;
        let values: Vec<f32> = (0..CHECKED).map(|index| value(index, self.of.rank)).collect();
        let (Some(source), Some(target)) = (DeviceAddr::new(from), DeviceAddr::new(to)) else { return Ok(None) };
        // SAFETY: the half has room for the values.
        let written = unsafe { self.driver.copy_to_device(source, bytemuck::cast_slice(&values), self.stream) };
        // Every rank sums, whatever its own copy did.
        self.queue(communicator, Operation::AllReduce, (from, to), 4 * CHECKED)?;
        let mut sums = vec![0f32; values.len()];
        // SAFETY: as above; the call waits for the stream.
        let read = unsafe { self.driver.copy_to_host(bytemuck::cast_slice_mut(&mut sums), target, self.stream) };
        self.driver.stream_synchronize(self.stream)?;
        let expected = |index: u64| (0..self.of.ranks).map(|rank| value(index, rank)).sum::<f32>();
        Ok((written.is_ok() && read.is_ok()).then(|| (0..).zip(&sums).all(|(index, sum)| *sum == expected(index))))
    }

    /// Registers memory in one mode.
    fn register(
        &self,
        communicator: &Communicator,
        memory: &Memory,
        mode: Mode,
    ) -> Result<(RegistrationResult, Option<Registration>)> {
        let by = match mode {
            Mode::None => None,
            Mode::Register => Some(Registering::Buffer),
            Mode::Window => Some(Registering::Window),
        };
        let start = Instant::now();
        // SAFETY: the memory is freed after the registration has ended.
        let registered = by.map(|by| unsafe { communicator.register(by, memory.addr(), memory.bytes()) });
        // CAST: the duration of a call.
        let call_ns = start.elapsed().as_nanos() as u64;
        let (registration, error) = match registered {
            None => (None, None),
            Some(Ok(registration)) => (registration, None),
            Some(Err(error)) => (None, Some(error.to_string())),
        };
        let correct = match (&registration, mode) {
            (None, Mode::Register | Mode::Window) => None,
            _ => self.is_correct(communicator, memory.halves())?,
        };
        Ok((RegistrationResult { mode, registered: registration.is_some(), error, call_ns, correct }, registration))
    }
}

/// Measures one kind of memory as one of several ranks: whether NCCL registers it, and the time of collectives of these sizes in
/// bytes. Takes seconds. `report` gets all results so far after each mode, because a later one may never end.
///
/// # Errors
/// [`TrainError::Input`] without NCCL, or when the ranks do not meet; errors of the driver and of NCCL; memory of this kind that
/// cannot be allocated.
pub fn measure_registration(
    of: &MeasuringRank,
    kind: BufferMemory,
    sizes: &[u64],
    mut report: impl FnMut(&KindMeasurement),
) -> Result<()> {
    let rank = Rank::new(of)?;
    let sizes: Vec<u64> = sizes.iter().copied().filter(|bytes| *bytes <= kind.largest()).collect();
    let half = sizes.iter().copied().max().unwrap_or(0).max(4 * CHECKED);
    let memory = Memory::new(kind, 2 * half, &rank.driver, (&rank.nccl, rank.stream))?;
    let communicator = rank.communicator(0)?;
    let (nccl, gpu) = (rank.nccl.version.clone(), rank.driver.info().name.clone());
    let mut measured = KindMeasurement { nccl, gpu, registrations: Vec::new(), times: Vec::new() };
    for mode in Mode::ALL {
        let (result, registration) = rank.register(&communicator, &memory, mode)?;
        let registered = mode == Mode::None || result.registered;
        measured.registrations.push(result);
        if registered {
            for operation in Operation::ALL {
                for bytes in &sizes {
                    let times = rank.times(&communicator, (operation, mode), memory.halves(), *bytes)?;
                    measured.times.extend(times);
                }
            }
        }
        rank.driver.stream_synchronize(rank.stream)?;
        report(&measured);
        if let Some(registration) = registration {
            communicator.deregister(&registration)?;
        }
    }
    drop(communicator);
    memory.free(&rank.driver, (&rank.nccl, rank.stream))
}

/// Measures the memory of growing numbers of communicators as one of several ranks. Takes seconds.
///
/// # Errors
/// As for [`measure_registration`].
pub fn measure_communicators(of: &MeasuringRank, counts: &[u64]) -> Result<Vec<CommunicatorMemory>> {
    const BYTES: u64 = 32 << 20;
    let rank = Rank::new(of)?;
    let memory = Memory::new(BufferMemory::Device, 2 * BYTES, &rank.driver, (&rank.nccl, rank.stream))?;
    let before = rank.driver.mem_info()?.free;
    let (mut communicators, mut out) = (Vec::new(), Vec::new());
    for count in counts {
        // CAST: a number of communicators.
        while (communicators.len() as u64) < *count {
            let communicator = rank.communicator(communicators.len() as u64)?;
            for operation in Operation::ALL {
                rank.queue(&communicator, operation, memory.halves(), BYTES)?;
            }
            rank.driver.stream_synchronize(rank.stream)?;
            communicators.push(communicator);
        }
        let counted = communicators.iter().map(Communicator::memory).sum::<Option<u64>>();
        let device_bytes = before.saturating_sub(rank.driver.mem_info()?.free);
        out.push(CommunicatorMemory { count: *count, device_bytes, counted_bytes: counted });
    }
    drop(communicators);
    memory.free(&rank.driver, (&rank.nccl, rank.stream))?;
    Ok(out)
}
