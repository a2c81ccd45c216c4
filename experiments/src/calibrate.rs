//! `experiments calibrate`: measures what driver calls cost on a device and writes a profile for the simulated one.
//!
//! Every figure of the profile is the median of repeated calls on the machine's clock, or device time by events. Kernel costs are
//! kept from the base profile; `fit-kernels` puts in those of a GPU. Run on the simulated device, calibration gives
//! back the profile that it runs on, which is how it is tested. Beside the profile it gives the percentiles of every
//! call, on the idle device and beside a running kernel, and what kernels reach.

mod kernels;
mod measure;
mod report;

use ::kernels::{CudaKernels, Fill, Operation};
use allocators::device::PoolSettings;
use allocators::device::sim::{Copies, CostBySize, PlainMemory, PoolMemory, Queues, VirtualMemory};
use allocators::instrument::Clock;
use allocators::{CudaDriver, DeviceAddr, Driver, DriverResult, Profile, SimDriver, StreamId};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use report::Measurements;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// Sizes at which calls that take whole pages are measured.
const PAGE_SIZES: [u64; 3] = [2 * MIB, 32 * MIB, 256 * MIB];
const MAPPING_SIZES: [u64; 3] = [2 * MIB, 20 * MIB, 256 * MIB];
const COPY_SIZES: [u64; 6] = [256, 4096, 64 << 10, 196 << 10, 1568 << 10, 12544 << 10];
const REPEATS: usize = 51;

/// What launches the work that calls are measured beside.
enum Engine {
    Cuda(Box<CudaKernels>, Arc<CudaDriver>),
    Sim(Arc<SimDriver>),
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
        let driver: &dyn Driver = match &engine {
            Engine::Cuda(_, driver) => driver.as_ref(),
            Engine::Sim(driver) => driver.as_ref(),
        };
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
        match &self.engine {
            Engine::Cuda(_, driver) => driver.as_ref(),
            Engine::Sim(driver) => driver.as_ref(),
        }
    }

    /// Queues a kernel that writes `len` values.
    fn fill(&self, len: u64) -> Result<()> {
        self.launch(&Fill { len, value: 1.0, out: self.large.0.get() })
    }

    /// Queues an operation on memory in the buffer.
    fn launch(&self, operation: &dyn Operation) -> Result<()> {
        match &self.engine {
            // SAFETY: the kernels belong to this driver's context, and all operations here work inside the buffer.
            Engine::Cuda(kernels, _) => unsafe { operation.launch(kernels, CudaDriver::raw_stream(self.stream)) }?,
            Engine::Sim(driver) => {
                let work = operation.work();
                driver.launch(self.stream, work.kernel, work.blocks, work.iterations, work.bytes)?;
            }
        }
        Ok(())
    }

    /// Device time of a fill of `len` values.
    fn fill_ns(&self, len: u64) -> Result<u64> {
        let driver = self.driver();
        let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
        driver.event_record(start, self.stream)?;
        self.fill(len)?;
        driver.event_record(end, self.stream)?;
        self.settle()?;
        let ns = driver.event_elapsed_ns(start, end)?;
        for event in [start, end] {
            // SAFETY: both have completed and are used nowhere else.
            unsafe { driver.event_destroy(event)? };
        }
        Ok(ns)
    }

    fn time<T>(&self, call: impl FnOnce() -> DriverResult<T>) -> Result<(u64, T)> {
        let start = self.clock.now_ns();
        let value = call()?;
        Ok((self.clock.now_ns() - start, value))
    }

    fn median_of(&self, mut call: impl FnMut() -> DriverResult<()>) -> Result<u64> {
        let times = (0..REPEATS).map(|_| Ok(self.time(&mut call)?.0)).collect::<Result<Vec<u64>>>()?;
        Ok(median(times))
    }

    fn settle(&self) -> Result<()> {
        Ok(self.driver().device_synchronize()?)
    }

    /// Medians of the first and the second call of pairs, on an idle device.
    fn pairs<T: Copy>(
        &self,
        first: impl Fn() -> DriverResult<T>,
        second: impl Fn(T) -> DriverResult<()>,
    ) -> Result<(u64, u64)> {
        let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let (ns, value) = self.time(&first)?;
            firsts.push(ns);
            seconds.push(self.time(|| second(value))?.0);
        }
        Ok((median(firsts), median(seconds)))
    }

    fn plain(&self, base: &PlainMemory) -> Result<PlainMemory> {
        let driver = self.driver();
        // SAFETY: every address freed here was just allocated here and is used by nothing.
        let free = |addr: DeviceAddr| unsafe { driver.mem_free(addr) };
        let (mut alloc, mut freed) = (Vec::new(), Vec::new());
        for bytes in PAGE_SIZES {
            let (first, second) = self.pairs(|| driver.mem_alloc(bytes), free)?;
            alloc.push((bytes, first));
            freed.push((bytes, second));
        }
        // Blocks of a step, several at a time and with launches between, as a program asks for them; in a tight loop
        // of pairs the driver's code and data stay in the nearest caches, and a call takes half as long.
        const BLOCK: u64 = 196 << 10;
        let keep = driver.mem_alloc(1024)?;
        let (mut allocs, mut frees) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let mut held = Vec::new();
            for _ in 0..8 {
                self.fill(1)?;
                let (ns, addr) = self.time(|| driver.mem_alloc(BLOCK))?;
                allocs.push(ns);
                held.push(addr);
            }
            for addr in held {
                self.fill(1)?;
                self.settle()?;
                frees.push(self.time(|| free(addr))?.0);
            }
        }
        free(keep)?;
        // Behind a kernel that runs for milliseconds, a free that waits takes as long.
        let addr = driver.mem_alloc(BLOCK)?;
        self.fill(self.large.1)?;
        let (behind, ()) = self.time(|| free(addr))?;
        let (rest, ()) = self.time(|| driver.device_synchronize())?;
        Ok(PlainMemory {
            page_bytes: base.page_bytes,
            align_bytes: base.align_bytes,
            alloc_ns: CostBySize::new(alloc),
            alloc_in_page_ns: median(allocs),
            free_ns: CostBySize::new(freed),
            free_in_page_ns: median(frees),
            free_drains_device: behind > rest,
        })
    }

    fn pool(&self, base: &PoolMemory) -> Result<Option<PoolMemory>> {
        let driver = self.driver();
        let Some(pools) = driver.pools() else { return Ok(None) };
        let keep = PoolSettings::default();
        let (create_ns, pool) = self.time(|| pools.pool_create(keep))?;
        // SAFETY: every address given to this closure was just allocated from this pool and is used by nothing later.
        let free = |addr: DeviceAddr| unsafe { pools.mem_free_async(addr, self.stream) };
        let first = pools.mem_alloc_async(pool, 512, self.stream)?;
        let granule_bytes = pools.pool_counters(pool)?.reserved;
        let (mut allocs, mut frees) = (Vec::new(), Vec::new());
        for _ in 0..4 * REPEATS {
            self.fill(1)?;
            let (ns, addr) = self.time(|| pools.mem_alloc_async(pool, 196 << 10, self.stream))?;
            allocs.push(ns);
            self.fill(1)?;
            frees.push(self.time(|| free(addr))?.0);
        }
        self.settle()?;
        let (alloc_ns, free_ns) = (median(allocs), median(frees));
        let attribute_ns = self.median_of(|| pools.pool_counters(pool).map(|_| ()))? / 4;
        // Device time: pairs of pool operations between kernels, against the kernels alone, queued behind a long one.
        const QUEUED: u64 = 200;
        let stretch = |with_pool: bool| -> Result<u64> {
            let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
            self.fill(self.large.1)?;
            driver.event_record(start, self.stream)?;
            for _ in 0..QUEUED {
                if with_pool {
                    let addr = pools.mem_alloc_async(pool, 196 << 10, self.stream)?;
                    self.fill(1)?;
                    free(addr)?;
                } else {
                    self.fill(1)?;
                }
            }
            driver.event_record(end, self.stream)?;
            self.settle()?;
            let ns = driver.event_elapsed_ns(start, end)?;
            for event in [start, end] {
                // SAFETY: both have completed and are used nowhere else.
                unsafe { driver.event_destroy(event)? };
            }
            Ok(ns)
        };
        let with = median((0..5).map(|_| stretch(true)).collect::<Result<_>>()?);
        let without = median((0..5).map(|_| stretch(false)).collect::<Result<_>>()?);
        free(first)?;
        self.settle()?;
        // SAFETY: nothing of the pool is in use.
        unsafe { pools.pool_destroy(pool)? };
        // Growth and release: a pool that keeps nothing, and blocks of eight granules.
        const GRANULES: u64 = 8;
        let pool = pools.pool_create(PoolSettings { release_threshold: 0, ..keep })?;
        let idle = self.median_of(|| driver.stream_synchronize(self.stream))?;
        let (mut grow, mut release) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let (ns, addr) = self.time(|| pools.mem_alloc_async(pool, GRANULES * granule_bytes, self.stream))?;
            grow.push(ns.saturating_sub(alloc_ns) / GRANULES);
            // SAFETY: just allocated from this pool and used by nothing.
            unsafe { pools.mem_free_async(addr, self.stream)? };
            let (ns, ()) = self.time(|| driver.stream_synchronize(self.stream))?;
            release.push(ns.saturating_sub(idle) / GRANULES);
        }
        // SAFETY: nothing of the pool is in use.
        unsafe { pools.pool_destroy(pool)? };
        Ok(Some(PoolMemory {
            granule_bytes,
            align_bytes: base.align_bytes,
            create_ns,
            alloc_ns,
            grow_ns_per_granule: median(grow),
            free_ns,
            stream_ns: with.saturating_sub(without) / (2 * QUEUED),
            release_ns_per_granule: median(release),
            attribute_ns,
        }))
    }

    fn vmm(&self) -> Result<Option<VirtualMemory>> {
        let Some(vmm) = self.driver().vmm() else { return Ok(None) };
        let granularity_bytes = vmm.granularity()?;
        let mut costs: [Vec<(u64, u64)>; 6] = Default::default();
        for bytes in MAPPING_SIZES {
            let bytes = bytes.next_multiple_of(granularity_bytes);
            let mut times: [Vec<u64>; 6] = Default::default();
            for _ in 0..REPEATS / 3 {
                let (reserve, addr) = self.time(|| vmm.address_reserve(bytes))?;
                let (create, handle) = self.time(|| vmm.create(bytes))?;
                // SAFETY: a fresh reservation and a fresh handle of the same size; what is mapped is unmapped below.
                let (map, ()) = self.time(|| unsafe { vmm.map(addr, bytes, handle) })?;
                // SAFETY: just mapped.
                let (access, ()) = self.time(|| unsafe { vmm.set_access(addr, bytes) })?;
                // SAFETY: mapped above and used by nothing.
                let (unmap, ()) = self.time(|| unsafe { vmm.unmap(addr, bytes) })?;
                // SAFETY: released once.
                let (release, ()) = self.time(|| unsafe { vmm.release(handle) })?;
                // SAFETY: reserved above with this size; nothing is mapped in it.
                unsafe { vmm.address_free(addr, bytes)? };
                for (list, ns) in times.iter_mut().zip([reserve, create, map, access, unmap, release]) {
                    list.push(ns);
                }
            }
            for (list, ns) in costs.iter_mut().zip(times.map(median)) {
                list.push((bytes, ns));
            }
        }
        let [reserve_ns, create_ns, map_ns, set_access_ns, unmap_ns, release_ns] = costs.map(CostBySize::new);
        Ok(Some(VirtualMemory {
            granularity_bytes,
            reserve_ns,
            create_ns,
            map_ns,
            set_access_ns,
            unmap_ns,
            release_ns,
        }))
    }

    fn queues(&self) -> Result<Queues> {
        let driver = self.driver();
        let launches = (0..REPEATS).map(|_| self.time_launch()).collect::<Result<_>>()?;
        self.settle()?;
        let stream_synchronize_ns = self.median_of(|| driver.stream_synchronize(self.stream))?;
        let device_synchronize_ns = self.median_of(|| driver.device_synchronize())?;
        // Launch, then wait: what the wait takes beyond the kernel and an idle wait is the way to the device and back.
        let mut waits = Vec::new();
        for _ in 0..REPEATS {
            self.fill(1)?;
            waits.push(self.time(|| driver.stream_synchronize(self.stream))?.0);
        }
        let kernel_ns = self.queued_kernel_ns()?;
        let start_latency_ns = median(waits).saturating_sub(kernel_ns + stream_synchronize_ns);
        let (event_create_ns, event_destroy_ns) = self.pairs(
            || driver.event_create(false),
            // SAFETY: just created and used by nothing.
            |event| unsafe { driver.event_destroy(event) },
        )?;
        let event = driver.event_create(false)?;
        let event_record_ns = self.median_of(|| driver.event_record(event, self.stream))?;
        self.settle()?;
        let event_query_ns = self.median_of(|| driver.event_query(event).map(|_| ()))?;
        let event_wait_ns = self.median_of(|| driver.stream_wait_event(self.stream, event))?;
        self.settle()?;
        // SAFETY: completed and used nowhere else.
        unsafe { driver.event_destroy(event)? };
        let (stream_create_ns, _) = self.pairs(
            || driver.stream_create(),
            // SAFETY: just created and used by nothing.
            |stream| unsafe { driver.stream_destroy(stream) },
        )?;
        Ok(Queues {
            launch_ns: median(launches),
            start_latency_ns,
            depth: self.queue_depth()?,
            stream_synchronize_ns,
            device_synchronize_ns,
            stream_create_ns,
            event_create_ns,
            event_destroy_ns,
            event_record_ns,
            event_query_ns,
            event_wait_ns,
            mem_get_info_ns: self.median_of(|| driver.mem_info().map(|_| ()))?,
        })
    }

    fn time_launch(&self) -> Result<u64> {
        let start = self.clock.now_ns();
        self.fill(1)?;
        Ok(self.clock.now_ns() - start)
    }

    /// Device time of a shortest kernel among others of its kind.
    fn queued_kernel_ns(&self) -> Result<u64> {
        const QUEUED: u64 = 400;
        let driver = self.driver();
        let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
        self.fill(self.large.1)?;
        driver.event_record(start, self.stream)?;
        for _ in 0..QUEUED {
            self.fill(1)?;
        }
        driver.event_record(end, self.stream)?;
        self.settle()?;
        let ns = driver.event_elapsed_ns(start, end)? / QUEUED;
        for event in [start, end] {
            // SAFETY: both have completed and are used nowhere else.
            unsafe { driver.event_destroy(event)? };
        }
        Ok(ns)
    }

    /// How many operations a stream takes before a launch waits: the first launch that takes a hundred times as long
    /// as the median behind long kernels.
    fn queue_depth(&self) -> Result<usize> {
        const MOST: usize = 20_000;
        // Enough work that none of it ends while the queue fills up.
        const LONG: usize = 8;
        self.settle()?;
        for _ in 0..LONG {
            self.fill(self.large.1)?;
        }
        let mut times = Vec::new();
        while times.len() < MOST {
            let ns = self.time_launch()?;
            let usual = median(times.iter().copied().take(50).collect());
            if times.len() > 50 && ns > 100 * usual {
                break;
            }
            times.push(ns);
        }
        self.settle()?;
        // The long kernels are in the queue too.
        Ok(times.len() + LONG)
    }

    fn copies(&self) -> Result<Copies> {
        let driver = self.driver();
        let largest = COPY_SIZES.into_iter().max().unwrap_or(0) as usize;
        let mut pageable = vec![1u8; largest];
        let target = driver.mem_alloc(largest as u64)?;
        let pinned = driver.host_alloc(largest)?;
        let (mut from_pageable, mut on_device, mut to_host) = (Vec::new(), Vec::new(), Vec::new());
        let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
        let mut pinned_ns = Vec::new();
        for bytes in COPY_SIZES {
            // CAST: sizes of this list are far below the address space.
            let len = bytes as usize;
            let mut times: [Vec<u64>; 3] = Default::default();
            for _ in 0..REPEATS {
                // SAFETY: the target holds `largest` bytes and lives to the end of this function, after a synchronise.
                let copy = || unsafe { driver.copy_to_device(target, &pageable[..len], self.stream) };
                times[0].push(self.time(copy)?.0);
                // Behind a kernel, so that the events enclose the copy and not the way of its launch to the device.
                self.fill(self.large.1 / 16)?;
                driver.event_record(start, self.stream)?;
                // SAFETY: as above; the page-locked memory is as large and lives as long.
                let copy = || unsafe { driver.copy_to_device_async(target, pinned, len, self.stream) };
                pinned_ns.push(self.time(copy)?.0);
                driver.event_record(end, self.stream)?;
                self.settle()?;
                times[1].push(driver.event_elapsed_ns(start, end)?);
                // SAFETY: the target holds `len` bytes.
                let copy = || unsafe { driver.copy_to_host(&mut pageable[..len], target, self.stream) };
                times[2].push(self.time(copy)?.0);
            }
            let [first, second, third] = times.map(median);
            from_pageable.push((bytes, first));
            on_device.push((bytes, second));
            to_host.push((bytes, third));
        }
        // SAFETY: the target holds one byte and more.
        let memset_ns = self.median_of(|| unsafe { driver.fill_bytes(target, 0, 4096, self.stream) })?;
        self.settle()?;
        let (mut host_alloc, mut host_free) = (Vec::new(), Vec::new());
        for bytes in [MIB, 16 * MIB] {
            let free = |ptr| {
                // SAFETY: just allocated with this size and used by nothing.
                unsafe { driver.host_free(ptr, bytes as usize) }
            };
            let (first, second) = self.pairs(|| driver.host_alloc(bytes as usize), free)?;
            host_alloc.push((bytes, first));
            host_free.push((bytes, second));
        }
        // SAFETY: all work on them is done (`settle`), and each is given back once.
        unsafe {
            driver.host_free(pinned, largest)?;
        }
        // SAFETY: as above.
        unsafe {
            driver.mem_free(target)?;
        }
        Ok(Copies {
            pageable_to_device_ns: CostBySize::new(from_pageable),
            pinned_to_device_ns: median(pinned_ns),
            to_device_ns: CostBySize::new(on_device),
            to_host_ns: CostBySize::new(to_host),
            memset_ns,
            host_alloc_ns: CostBySize::new(host_alloc),
            host_free_ns: CostBySize::new(host_free),
        })
    }
}

/// What calibration gives.
#[derive(Debug)]
pub(crate) struct Calibration {
    /// The base profile with this device's costs, kernels excepted.
    pub(crate) profile: Profile,
    /// Percentiles of every call, and what kernels reach.
    pub(crate) measurements: Measurements,
}

/// Measures the device, `cuda` or `sim`.
pub(crate) fn calibrate(device: &str, base: Profile, source: &str) -> Result<Calibration> {
    let (engine, name) = match device {
        "cuda" => {
            let driver = Arc::new(CudaDriver::new(0)?);
            driver.bind_to_thread()?;
            let name = driver.info().name.clone();
            (Engine::Cuda(Box::new(CudaKernels::load()?), driver), name)
        }
        "sim" => (Engine::Sim(Arc::new(SimDriver::new(base.clone(), allocators::SimMemory::Host))), base.name.clone()),
        _ => bail!("'{device}' cannot be calibrated: write cuda or sim"),
    };
    let started_at = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let bench = Bench::new(engine)?;
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {msg} [{elapsed}]")?);
    let progress = |what: &str| {
        bar.set_message(what.to_owned());
        bar.tick();
    };
    progress("costs of the profile");
    let profile = costs(&bench, name, base, source)?;
    let calls = measure::measure(&bench, &progress)?;
    progress("kernels");
    let kernels = kernels::rates(&bench).context("kernels")?;
    bar.finish_and_clear();
    let device = bench.driver().describe();
    let measurements = Measurements {
        schema_version: 1,
        code_version: env!("CARGO_PKG_VERSION"),
        source: source.to_owned(),
        started_at,
        clock: if device.virtual_time { "virtual" } else { "monotonic" },
        device,
        calls,
        kernels,
    };
    Ok(Calibration { profile, measurements })
}

/// The costs of a profile, kernels excepted.
fn costs(bench: &Bench, name: String, base: Profile, source: &str) -> Result<Profile> {
    let info = bench.driver().mem_info()?;
    let held = bench.large.1 * 4;
    let pool = match &base.pool {
        Some(pool) => bench.pool(pool).context("pools")?,
        None => None,
    };
    Ok(Profile {
        name,
        source: source.to_owned(),
        total_bytes: info.total,
        context_bytes: info.total - info.free - held.next_multiple_of(base.plain.page_bytes),
        plain: bench.plain(&base.plain).context("plain memory")?,
        pool,
        vmm: bench.vmm().context("virtual memory")?,
        queues: bench.queues().context("queues")?,
        copies: bench.copies().context("copies")?,
        ..base
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_simulated_device_gives_back_its_profile() {
        let base = Profile::h200();
        let calibration = calibrate("sim", base.clone(), "test").unwrap();
        let found = calibration.profile;
        let near = |what: &str, found: u64, truth: u64| {
            assert!(found.abs_diff(truth) <= truth / 50 + 2, "{what}: {found} instead of {truth}");
        };
        assert!(found.plain.free_drains_device);
        near("alloc in page", found.plain.alloc_in_page_ns, base.plain.alloc_in_page_ns);
        near("free in page", found.plain.free_in_page_ns, base.plain.free_in_page_ns);
        for bytes in PAGE_SIZES {
            near("alloc", found.plain.alloc_ns.at(bytes), base.plain.alloc_ns.at(bytes));
            near("free", found.plain.free_ns.at(bytes), base.plain.free_ns.at(bytes));
        }
        let (pool, truth) = (found.pool.unwrap(), base.pool.unwrap());
        assert_eq!(pool.granule_bytes, truth.granule_bytes);
        near("pool alloc", pool.alloc_ns, truth.alloc_ns);
        near("pool free", pool.free_ns, truth.free_ns);
        near("pool stream time", pool.stream_ns, truth.stream_ns);
        near("grow", pool.grow_ns_per_granule, truth.grow_ns_per_granule);
        near("release", pool.release_ns_per_granule, truth.release_ns_per_granule);
        let (queues, truth) = (found.queues, base.queues);
        near("launch", queues.launch_ns, truth.launch_ns);
        near("start latency", queues.start_latency_ns, truth.start_latency_ns);
        near("synchronise", queues.stream_synchronize_ns, truth.stream_synchronize_ns);
        assert!(queues.depth.abs_diff(truth.depth) <= 1, "depth {}", queues.depth);
        let (copies, truth) = (found.copies, base.copies);
        for bytes in COPY_SIZES {
            near("pageable", copies.pageable_to_device_ns.at(bytes), truth.pageable_to_device_ns.at(bytes));
            near("copy", copies.to_device_ns.at(bytes), truth.to_device_ns.at(bytes));
            near("to host", copies.to_host_ns.at(bytes), truth.to_host_ns.at(bytes));
        }
        for bytes in MAPPING_SIZES {
            near(
                "create",
                found.vmm.as_ref().unwrap().create_ns.at(bytes),
                base.vmm.as_ref().unwrap().create_ns.at(bytes),
            );
        }
    }

    #[test]
    fn the_simulated_device_waits_where_its_profile_says_so() {
        use super::measure::Condition;
        let profile = Profile::h200();
        let engine = Engine::Sim(Arc::new(SimDriver::new(profile.clone(), allocators::SimMemory::Host)));
        let calls = measure::measure(&Bench::new(engine).unwrap(), &|_| ()).unwrap();
        let of = |call: &str, condition: Condition, bytes: Option<u64>| {
            let found = calls.iter().find(|row| (row.call, row.condition, row.bytes) == (call, condition, bytes));
            found.unwrap_or_else(|| panic!("{call} {condition:?} {bytes:?} is missing"))
        };
        for row in &calls {
            let ordered = [row.min_ns, row.p50_ns, row.p90_ns, row.p99_ns, row.max_ns].is_sorted();
            assert!(ordered && row.samples > 0, "{row:?}");
        }
        // A free behind a kernel waits for its rest, an allocation does not.
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
        // With a threshold of 0 a synchronise gives the granule back, and the next allocation takes it again.
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
        let engine = Engine::Sim(Arc::new(SimDriver::new(profile.clone(), allocators::SimMemory::Host)));
        let rates = kernels::rates(&Bench::new(engine).unwrap()).unwrap();
        assert!(rates.iter().any(|rate| rate.gflop_per_s.is_some()));
        for rate in &rates {
            let cost = profile.kernels.get(rate.kernel).unwrap_or(&profile.default_kernel);
            let compute =
                rate.blocks.div_ceil(cost.blocks_per_wave) as f64 * rate.iterations as f64 * cost.iteration_ns;
            let model = cost.fixed_ns + compute.max(rate.bytes as f64 / cost.bytes_per_ns);
            assert!((rate.median_ns / model - 1.0).abs() < 0.02, "{rate:?} should take {model}");
        }
    }
}
