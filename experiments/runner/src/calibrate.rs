//! `experiments calibrate`: measures the cost of driver calls on a device and writes a profile for the simulated one.
//!
//! Every value of the profile is the median of repeated calls on the machine's clock, or device time between events.
//! Kernel costs, the L2 cache's size and the program's host time are kept from the base profile; `fit-kernels` and
//! `fit-program` replace them with a GPU's. Calibration on the simulated device reproduces the profile that it runs
//! on; the tests rely on that. In addition to the profile it reports the percentiles of every call, on the idle device
//! and concurrent with a running kernel, and the bandwidth and rate of kernels. On a machine with several GPUs all-reduces
//! of them give the latency and bandwidth of the links. `--only-host` measures pinned host memory instead.

mod costs;
mod host;
mod kernels;
mod links;
mod measure;
mod measurements;

use crate::profile;
use ::kernels::{CudaKernels, Fill, Operation};
use anyhow::{Context, Result, bail};
use clap::Args;
use measurements::Measurements;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terminal::Bar;
use vramlab::device::Clock;
use vramlab::output::{Existing, OutputFile};
use vramlab::{CudaDriver, DeviceAddr, DeviceName, Driver, DriverResult, Profile, SimDriver, SimMemory, StreamId};

const MIB: u64 = 1 << 20;

#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// cuda, cuda:N, or sim or sim:PROFILE.json to see that calibration gives back the profile it runs on
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    device: DeviceName,
    /// Profile that supplies the kernel costs [default: the built-in H200]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Machine and date, for the profile
    #[arg(long, value_name = "TEXT")]
    source: String,
    /// GPUs whose links are measured by all-reduces through NCCL [default: all of the machine; none on the simulated device]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    gpus: Option<u32>,
    /// Measure only the links; all other costs are those of --profile
    #[arg(long)]
    only_links: bool,
    /// Measure only pinned host memory: calls that pin, copies, a pool; --out is then a file for vramlab replay --host --pin-costs
    #[arg(long, conflicts_with_all = ["only_links", "gpus", "profile"])]
    only_host: bool,
    /// Write the new profile to this file
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Write every call's percentiles and the kernels' rates to this file, as JSON
    #[arg(short, long, value_name = "FILE")]
    measurements: Option<PathBuf>,
}

/// Launches the work that runs while calls are measured.
enum Engine {
    Cuda(Box<CudaKernels>, Arc<CudaDriver>),
    Sim(Arc<SimDriver>),
}

impl Engine {
    fn driver(&self) -> &dyn Driver {
        match self {
            Self::Cuda(_, driver) => driver.as_ref(),
            Self::Sim(driver) => driver.as_ref(),
        }
    }
}

struct Bench {
    engine: Engine,
    clock: Arc<dyn Clock>,
    stream: StreamId,
    /// A buffer that takes long to fill, and its length in f32.
    large: (DeviceAddr, u64),
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

impl Bench {
    fn new(engine: Engine) -> Result<Self> {
        let driver = engine.driver();
        let stream = driver.stream_create()?;
        let most = if matches!(engine, Engine::Cuda(..)) { 16 << 30 } else { 4 << 30 };
        let bytes = (driver.mem_info()?.free / 16).min(most).next_multiple_of(2 * MIB);
        let large = (driver.mem_alloc(bytes)?, bytes / 4);
        let clock = driver.clock();
        let bench = Self { engine, clock, stream, large };
        // The first launch of a kernel loads it.
        bench.fill(1)?;
        bench.driver().device_synchronize()?;
        Ok(bench)
    }

    fn driver(&self) -> &dyn Driver {
        self.engine.driver()
    }

    /// Queues a kernel that writes `len` values.
    fn fill(&self, len: u64) -> Result<()> {
        self.launch(&Fill { len, value: 1.0, out: self.large.0.get() })
    }

    /// Queues an operation on memory in the buffer.
    fn launch(&self, operation: &dyn Operation) -> Result<()> {
        match &self.engine {
            // SAFETY: the kernels belong to this driver's context, and all operations here work inside the buffer.
            Engine::Cuda(kernels, driver) => unsafe { operation.launch(kernels, driver.raw_stream(self.stream)?) }?,
            Engine::Sim(driver) => {
                let work = operation.work();
                driver.launch(
                    self.stream,
                    operation.name(),
                    (work.blocks, work.iterations),
                    work.bytes,
                    &operation.buffers(),
                )?;
            }
        }
        Ok(())
    }

    /// Device time from before the first to after the last operation that `work` queues.
    fn device_ns(&self, work: impl FnOnce() -> Result<()>) -> Result<u64> {
        let driver = self.driver();
        let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
        driver.event_record(start, self.stream)?;
        work()?;
        driver.event_record(end, self.stream)?;
        self.settle()?;
        let ns = driver.event_elapsed_ns(start, end)?;
        for event in [start, end] {
            // SAFETY: both have completed and are used nowhere else.
            unsafe { driver.event_destroy(event)? };
        }
        Ok(ns)
    }

    /// Device time of `work` queued behind a long kernel, so that it excludes the host's time.
    fn queued_ns(&self, work: impl FnOnce() -> Result<()>) -> Result<u64> {
        self.fill(self.large.1)?;
        self.device_ns(work)
    }

    /// Host time of a call.
    fn time<T, E>(&self, call: impl FnOnce() -> Result<T, E>) -> Result<(u64, T)>
    where
        anyhow::Error: From<E>,
    {
        let start = self.clock.now_ns();
        let value = call()?;
        Ok((self.clock.now_ns() - start, value))
    }

    /// Host times of repeated calls.
    fn times<T, E>(&self, repeats: usize, mut call: impl FnMut() -> Result<T, E>) -> Result<Vec<u64>>
    where
        anyhow::Error: From<E>,
    {
        (0..repeats).map(|_| Ok(self.time(&mut call)?.0)).collect()
    }

    fn settle(&self) -> Result<()> {
        Ok(self.driver().device_synchronize()?)
    }

    /// Host times of repeated pairs of calls, each preceded by `prepare`.
    fn pairs<T: Copy>(
        &self,
        repeats: usize,
        prepare: impl Fn() -> Result<()>,
        first: impl Fn() -> DriverResult<T>,
        second: impl Fn(T) -> DriverResult<()>,
    ) -> Result<(Vec<u64>, Vec<u64>)> {
        let (mut firsts, mut seconds) = (Vec::with_capacity(repeats), Vec::with_capacity(repeats));
        for _ in 0..repeats {
            prepare()?;
            let (ns, value) = self.time(&first)?;
            firsts.push(ns);
            prepare()?;
            seconds.push(self.time(|| second(value))?.0);
        }
        Ok((firsts, seconds))
    }
}

/// Result of a calibration.
#[derive(Debug)]
struct Calibration {
    /// The base profile with this device's costs, except those of kernels and of the program.
    profile: Profile,
    /// Percentiles of every call, and rates of kernels.
    measurements: Measurements,
}

/// Measures a device, writes its profile and prints the measurements.
pub(crate) fn calibrate(args: &CalibrateArgs) -> Result<()> {
    if let Some(measurements) = args.measurements.as_ref().filter(|path| is_same(path, &args.out)) {
        bail!("--out and --measurements name the same file, {}; give each its own", measurements.display());
    }
    if args.only_host {
        return host::calibrate(args);
    }
    // Open the outputs before the minutes that measuring takes.
    let begin = |path: &PathBuf| OutputFile::create(path, Existing::Replace);
    let (out, measurements) = (begin(&args.out)?, args.measurements.as_ref().map(begin).transpose()?);
    let base = profile::read(args.profile.as_deref())?;
    let counts = match args.device {
        DeviceName::Null => Vec::new(),
        _ => links::counts(&args.device, args.gpus)?,
    };
    if args.only_links && counts.is_empty() {
        bail!("--only-links needs several GPUs; on the simulated device add --gpus 2");
    }
    let calibration = measure_device(&args.device, base, &args.source, (&counts, args.only_links))?;
    profile::write(&calibration.profile, out)?;
    measurements.map_or(Ok(()), |out| calibration.measurements.write(out))?;
    calibration.measurements.page(&args.out, calibration.profile.links).print()
}

/// Whether two paths of files, which may not exist, are of one.
fn is_same(one: &Path, other: &Path) -> bool {
    // A path whose directory is missing is refused later.
    let resolve = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        path.canonicalize()
            .or_else(|_| folder.canonicalize().map(|folder| folder.join(path.file_name().unwrap_or_default())))
    };
    matches!((resolve(one), resolve(other)), (Ok(one), Ok(other)) if one == other)
}

/// Measures a device, and its links over these numbers of ranks, possibly only them; `sim` is the one of the base profile.
fn measure_device(
    device: &DeviceName,
    base: Profile,
    source: &str,
    (counts, only_links): (&[u32], bool),
) -> Result<Calibration> {
    let simulated = match device {
        DeviceName::Sim(Some(path)) => Profile::read(path)?,
        _ => base.clone(),
    };
    let (engine, name) = match device {
        DeviceName::Cuda(number) => {
            let driver = Arc::new(CudaDriver::new(*number)?);
            driver.bind_to_thread()?;
            let name = driver.info().name.clone();
            (Engine::Cuda(Box::new(CudaKernels::load()?), driver), name)
        }
        DeviceName::Sim(_) => {
            let name = simulated.name.clone();
            (Engine::Sim(Arc::new(SimDriver::new(simulated.clone(), SimMemory::Host))), name)
        }
        DeviceName::Null => bail!("the device without costs cannot be calibrated: write cuda or sim"),
    };
    let started_at = trainer::provenance::now();
    let bench = Bench::new(engine)?;
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    let progress = |what: &str| bar.message(what);
    let memory = bench.driver().mem_info()?;
    let (calls, profile, kernels) = if only_links {
        (Vec::new(), base, Vec::new())
    } else {
        let calls = measure::measure(&bench, &progress)?;
        progress("costs of the profile");
        let profile = costs::costs(&bench, memory, &calls, base)?;
        progress("kernels");
        (calls, profile, kernels::rates(&bench).context("kernels")?)
    };
    progress("links");
    let times = links::times(&bench.engine, &simulated, counts).context("links")?;
    let profile = Profile { name, source: source.to_owned(), links: links::costs(&times, profile.links), ..profile };
    bar.clear();
    let device = bench.driver().describe();
    let measurements = Measurements {
        schema_version: 1,
        code_version: env!("CARGO_PKG_VERSION"),
        provenance: crate::study::record::provenance(),
        command: terminal::provenance::command_line(),
        source: source.to_owned(),
        started_at,
        clock: if device.virtual_time { "virtual" } else { "monotonic" },
        device,
        calls,
        kernels,
        links: times,
    };
    Ok(Calibration { profile, measurements })
}

#[cfg(test)]
mod tests {
    use super::costs::{COPY_SIZES, PAGE_SIZES};
    use super::measure::MAPPING_SIZES;
    use super::*;

    #[test]
    fn the_simulated_device_gives_back_its_profile() {
        // No call contains the program's host time, so calibration cannot measure it and keeps it.
        let base = Profile { program_ns_per_call: 500, ..Profile::h200() };
        let calibration = measure_device(&DeviceName::Sim(None), base.clone(), "test", (&[], false)).unwrap();
        let profile = calibration.profile;
        assert_eq!((profile.program_ns_per_call, profile.l2_bytes), (500, base.l2_bytes));
        let near = |what: &str, actual: u64, truth: u64| {
            assert!(actual.abs_diff(truth) <= truth / 50 + 2, "{what}: {actual} instead of {truth}");
        };
        assert!(profile.plain.free_drains_device);
        near("alloc in page", profile.plain.alloc_in_page_ns, base.plain.alloc_in_page_ns);
        near("free in page", profile.plain.free_in_page_ns, base.plain.free_in_page_ns);
        for bytes in PAGE_SIZES {
            near("alloc", profile.plain.alloc_ns.at(bytes), base.plain.alloc_ns.at(bytes));
            near("free", profile.plain.free_ns.at(bytes), base.plain.free_ns.at(bytes));
        }
        let (pool, truth) = (profile.pool.unwrap(), base.pool.unwrap());
        assert_eq!(pool.granule_bytes, truth.granule_bytes);
        near("pool alloc", pool.alloc_ns, truth.alloc_ns);
        near("pool free", pool.free_ns, truth.free_ns);
        near("pool stream time", pool.stream_ns, truth.stream_ns);
        near("grow", pool.grow_ns_per_granule, truth.grow_ns_per_granule);
        near("release", pool.release_ns_per_granule, truth.release_ns_per_granule);
        let (queues, truth) = (profile.queues, base.queues);
        near("launch", queues.launch_ns, truth.launch_ns);
        near("start latency", queues.start_latency_ns, truth.start_latency_ns);
        near("synchronise", queues.stream_synchronize_ns, truth.stream_synchronize_ns);
        assert!(queues.depth.abs_diff(truth.depth) <= 1, "depth {}", queues.depth);
        let (copies, truth) = (profile.copies, base.copies);
        for bytes in COPY_SIZES {
            near("pageable", copies.pageable_to_device_ns.at(bytes), truth.pageable_to_device_ns.at(bytes));
            near("copy", copies.to_device_ns.at(bytes), truth.to_device_ns.at(bytes));
            near("to host", copies.to_host_ns.at(bytes), truth.to_host_ns.at(bytes));
        }
        for bytes in MAPPING_SIZES {
            near(
                "create",
                profile.vmm.as_ref().unwrap().create_ns.at(bytes),
                base.vmm.as_ref().unwrap().create_ns.at(bytes),
            );
        }
    }

    #[test]
    fn the_simulated_device_waits_where_its_profile_says_so() {
        use super::measure::Condition;
        let profile = Profile::h200();
        let engine = Engine::Sim(Arc::new(SimDriver::new(profile.clone(), vramlab::SimMemory::Host)));
        let calls = measure::measure(&Bench::new(engine).unwrap(), &|_| ()).unwrap();
        let of = |call: &str, condition: Condition, bytes: Option<u64>| {
            let call_row = calls.iter().find(|row| (row.call, row.condition, row.bytes) == (call, condition, bytes));
            call_row.unwrap_or_else(|| panic!("{call} {condition:?} {bytes:?} is missing"))
        };
        for row in &calls {
            let ordered = [row.min_ns, row.p50_ns, row.p90_ns, row.p99_ns, row.max_ns].is_sorted();
            assert!(ordered && row.samples > 0, "{row:?}");
        }
        // A free behind a kernel waits for the kernel to end; an allocation does not.
        let small = Some(64 << 10);
        assert!(of("mem_free", Condition::Busy, small).p50_ns > 1_000_000);
        assert!(of("mem_free", Condition::IdleInPage, small).p50_ns == profile.plain.free_in_page_ns);
        assert!(of("mem_alloc", Condition::Busy, small).p99_ns < 100_000);
        for bytes in [2 * MIB, 32 * MIB, 256 * MIB] {
            assert_eq!(of("mem_alloc", Condition::Idle, Some(bytes)).p50_ns, profile.plain.alloc_ns.at(bytes));
            assert_eq!(of("mem_free", Condition::Idle, Some(bytes)).p99_ns, profile.plain.free_ns.at(bytes));
        }
        let pool = profile.pool.unwrap();
        let granule = pool.granule_bytes;
        assert_eq!(of("mem_alloc_async", Condition::ThresholdMax, Some(granule)).p50_ns, pool.alloc_ns);
        // With a threshold of 0 a synchronise releases the granule, and the next allocation maps it again.
        let taken = of("mem_alloc_async", Condition::ThresholdZeroSynchronised, Some(granule)).p50_ns;
        assert_eq!(taken, pool.alloc_ns + pool.grow_ns_per_granule);
        assert!(
            of("stream_synchronize", Condition::ThresholdZeroSynchronised, Some(granule)).p50_ns
                >= pool.release_ns_per_granule
        );
        let vmm = profile.vmm.unwrap();
        assert_eq!(of("mem_create", Condition::Idle, Some(256 * MIB)).p50_ns, vmm.create_ns.at(256 * MIB));
        assert_eq!(of("mem_set_access", Condition::Busy, Some(2 * MIB)).p50_ns, vmm.set_access_ns.at(2 * MIB));
        assert_eq!(of("event_record", Condition::Idle, None).p50_ns, profile.queues.event_record_ns);
        assert_eq!(of("kernel_launch", Condition::Idle, None).p50_ns, profile.queues.launch_ns);
    }

    #[test]
    fn rates_are_those_of_the_profile() {
        let profile = Profile::h200();
        assert!(profile.l2_bytes.is_some(), "the profile should tell cache and memory apart");
        let engine = Engine::Sim(Arc::new(SimDriver::new(profile.clone(), vramlab::SimMemory::Host)));
        let rates = kernels::rates(&Bench::new(engine).unwrap()).unwrap();
        assert!(rates.iter().any(|rate| rate.gflop_per_s.is_some()));
        for rate in &rates {
            let cost = profile.kernels.get(rate.kernel).unwrap_or(&profile.default_kernel);
            let time = |missed: f64| cost.ns(rate.blocks, rate.iterations, rate.bytes, missed);
            // The first launch of a series reads its data from memory, because the fill before it evicted them; so
            // does every launch on more data than the cache holds.
            let (cache, memory) = (time(0.0), time(1.0));
            let between = 0.98 * cache <= rate.median_ns && rate.median_ns <= 1.02 * memory;
            assert!(between, "{rate:?} should take {cache} to {memory}");
        }
    }
}
