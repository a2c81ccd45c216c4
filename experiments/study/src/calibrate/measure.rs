//! Every driver call by size, on the idle device and beside a kernel of about two milliseconds, with percentiles.
//!
//! A pair of calls (an allocation and its free) is timed call by call: what runs beside it is queued before each of the
//! two, so that neither finds the device idle because of the other.

use super::Bench;
use anyhow::{Context, Result};
use serde::Serialize;
use vramlab::device::{PoolDriver, PoolId, PoolSettings, VmmDriver};
use vramlab::{DeviceAddr, DriverResult};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const PLAIN_SIZES: [u64; 5] = [KIB, 64 * KIB, 2 * MIB, 32 * MIB, 256 * MIB];
/// Below a page: these fit into one that is held.
const IN_PAGE_SIZES: [u64; 2] = [KIB, 64 * KIB];
const BUSY_SIZES: [u64; 2] = [64 * KIB, 64 * MIB];
const POOL_SIZES: [u64; 4] = [KIB, 2 * MIB, 32 * MIB, 256 * MIB];
const MAPPING_SIZES: [u64; 3] = [2 * MIB, 20 * MIB, 256 * MIB];
const COPY_SIZES: [u64; 4] = [256, 4 * KIB, 196 * KIB, 12 * MIB];

/// Samples on the idle device, enough for a 99th percentile; calls that take long are sampled less.
const IDLE: usize = 301;
const IDLE_LONG: usize = 101;
/// Samples beside a kernel of milliseconds.
const BUSY: usize = 41;

/// How one call was timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Condition {
    /// Nothing is queued.
    Idle,
    /// Nothing is queued, and the page is held by another block.
    IdleInPage,
    /// A kernel of about two milliseconds runs.
    Busy,
    /// Pool with threshold 0, nothing synchronises between.
    ThresholdZero,
    /// Pool with threshold 0, the stream is synchronised after every free.
    ThresholdZeroSynchronised,
    /// Pool that keeps everything, nothing synchronises between.
    ThresholdMax,
    /// Pool that keeps everything, the stream is synchronised after every free.
    ThresholdMaxSynchronised,
    /// Behind one launch of a shortest kernel.
    AfterLaunch,
}

impl Condition {
    /// As a table has it.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::IdleInPage => "idle, in a page",
            Self::Busy => "a kernel runs",
            Self::ThresholdZero => "threshold 0",
            Self::ThresholdZeroSynchronised => "threshold 0, synchronised",
            Self::ThresholdMax => "threshold max",
            Self::ThresholdMaxSynchronised => "threshold max, synchronised",
            Self::AfterLaunch => "after a launch",
        }
    }
}

/// Host time of one kind of call.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measurement {
    /// Kind of call; `copy_to_device_async` is from page-locked memory.
    pub(crate) call: &'static str,
    /// How it was timed.
    pub(crate) condition: Condition,
    /// Size, if the call has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    pub(crate) samples: usize,
    pub(crate) min_ns: u64,
    pub(crate) p50_ns: u64,
    pub(crate) p90_ns: u64,
    pub(crate) p99_ns: u64,
    pub(crate) max_ns: u64,
}

impl Measurement {
    fn new(call: &'static str, condition: Condition, bytes: Option<u64>, mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        // The smallest value that at least this share of the samples does not exceed.
        let at = |percent: usize| {
            let rank = (times.len() * percent).div_ceil(100).max(1);
            times.get(rank - 1).copied().unwrap_or(0)
        };
        Self {
            call,
            condition,
            bytes,
            samples: times.len(),
            min_ns: at(0),
            p50_ns: at(50),
            p90_ns: at(90),
            p99_ns: at(99),
            max_ns: at(100),
        }
    }
}

/// What surrounds the timed calls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// Nothing; all is done before a call.
    Idle,
    /// A long kernel is queued right before a call.
    Kernel,
    /// Calls follow each other, whatever is queued.
    Nothing,
}

/// Collects measurements of one device.
pub(crate) struct Calls<'a> {
    bench: &'a Bench,
    /// Length of a fill of about two milliseconds.
    long: u64,
    pub(crate) found: Vec<Measurement>,
}

impl<'a> Calls<'a> {
    pub(crate) fn new(bench: &'a Bench) -> Result<Self> {
        /// What the reference measurements were taken beside.
        const WANTED_NS: u64 = 2_000_000;
        let whole = bench.fill_ns(bench.large.1)?.max(1);
        // CAST: a share of a length; the product is below 2^53 by far.
        let long = (bench.large.1 as f64 * (WANTED_NS as f64 / whole as f64).min(1.0)) as u64;
        Ok(Self { bench, long: long.max(1), found: Vec::new() })
    }

    fn add(&mut self, call: &'static str, condition: Condition, bytes: Option<u64>, times: Vec<u64>) {
        self.found.push(Measurement::new(call, condition, bytes, times));
    }

    fn prepare(&self, beside: Beside) -> Result<()> {
        match beside {
            Beside::Idle => self.bench.settle(),
            Beside::Kernel => {
                self.bench.settle()?;
                self.bench.fill(self.long)
            }
            Beside::Nothing => Ok(()),
        }
    }

    fn once(&self, samples: usize, beside: Beside, mut call: impl FnMut() -> DriverResult<()>) -> Result<Vec<u64>> {
        let mut times = Vec::with_capacity(samples);
        for _ in 0..samples {
            self.prepare(beside)?;
            times.push(self.bench.time(&mut call)?.0);
        }
        self.bench.settle()?;
        Ok(times)
    }

    fn pair<T: Copy>(
        &self,
        samples: usize,
        beside: Beside,
        first: impl Fn() -> DriverResult<T>,
        second: impl Fn(T) -> DriverResult<()>,
    ) -> Result<(Vec<u64>, Vec<u64>)> {
        let (mut firsts, mut seconds) = (Vec::with_capacity(samples), Vec::with_capacity(samples));
        for _ in 0..samples {
            self.prepare(beside)?;
            let (ns, value) = self.bench.time(&first)?;
            firsts.push(ns);
            self.prepare(beside)?;
            seconds.push(self.bench.time(|| second(value))?.0);
        }
        self.bench.settle()?;
        Ok((firsts, seconds))
    }

    /// `cuMemAlloc` and `cuMemFree`.
    pub(crate) fn plain(&mut self) -> Result<()> {
        let bench = self.bench;
        let driver = bench.driver();
        // SAFETY: every address freed here was just allocated here and is used by nothing.
        let free = |addr: DeviceAddr| unsafe { driver.mem_free(addr) };
        let mut cases: Vec<(Condition, Beside, usize, u64)> = Vec::new();
        let samples = |bytes: u64| if bytes > 2 * MIB { IDLE_LONG } else { IDLE };
        cases.extend(PLAIN_SIZES.map(|bytes| (Condition::Idle, Beside::Idle, samples(bytes), bytes)));
        cases.extend(BUSY_SIZES.map(|bytes| (Condition::Busy, Beside::Kernel, BUSY, bytes)));
        for (condition, beside, samples, bytes) in cases {
            let (taken, given) = self.pair(samples, beside, || driver.mem_alloc(bytes), free)?;
            self.add("mem_alloc", condition, Some(bytes), taken);
            self.add("mem_free", condition, Some(bytes), given);
        }
        let keep = driver.mem_alloc(KIB)?;
        for bytes in IN_PAGE_SIZES {
            let (taken, given) = self.pair(IDLE, Beside::Idle, || driver.mem_alloc(bytes), free)?;
            self.add("mem_alloc", Condition::IdleInPage, Some(bytes), taken);
            self.add("mem_free", Condition::IdleInPage, Some(bytes), given);
        }
        Ok(free(keep)?)
    }

    /// `cuMemAllocFromPoolAsync` and `cuMemFreeAsync`, and the synchronise behind them.
    pub(crate) fn pools(&mut self) -> Result<()> {
        let bench = self.bench;
        let Some(pools) = bench.driver().pools() else { return Ok(()) };
        let before = self.found.len();
        for (threshold, apart, together) in [
            (0, Condition::ThresholdZero, Condition::ThresholdZeroSynchronised),
            (u64::MAX, Condition::ThresholdMax, Condition::ThresholdMaxSynchronised),
        ] {
            let settings = PoolSettings { release_threshold: threshold, ..PoolSettings::default() };
            let (create, pool) = bench.time(|| pools.pool_create(settings))?;
            if before == self.found.len() {
                self.add("pool_create", Condition::Idle, None, vec![create]);
            }
            for bytes in POOL_SIZES {
                self.pool_pairs(pools, pool, bytes, (apart, Beside::Nothing))?;
                self.pool_synchronised(pools, pool, bytes, together)?;
            }
            if threshold == u64::MAX {
                for bytes in BUSY_SIZES {
                    self.pool_pairs(pools, pool, bytes, (Condition::Busy, Beside::Kernel))?;
                }
            }
            bench.settle()?;
            // SAFETY: every block of the pool was given back, and the device is idle.
            unsafe { pools.pool_destroy(pool)? };
        }
        Ok(())
    }

    fn pool_pairs(
        &mut self,
        pools: &dyn PoolDriver,
        pool: PoolId,
        bytes: u64,
        (condition, beside): (Condition, Beside),
    ) -> Result<()> {
        let stream = self.bench.stream;
        // SAFETY: every address freed here was just allocated from this pool and is used by nothing.
        let free = |addr: DeviceAddr| unsafe { pools.mem_free_async(addr, stream) };
        let samples = if beside == Beside::Kernel { BUSY } else { IDLE };
        let (taken, given) = self.pair(samples, beside, || pools.mem_alloc_async(pool, bytes, stream), free)?;
        self.add("mem_alloc_async", condition, Some(bytes), taken);
        self.add("mem_free_async", condition, Some(bytes), given);
        Ok(())
    }

    fn pool_synchronised(
        &mut self,
        pools: &dyn PoolDriver,
        pool: PoolId,
        bytes: u64,
        condition: Condition,
    ) -> Result<()> {
        let (bench, stream) = (self.bench, self.bench.stream);
        let mut times: [Vec<u64>; 3] = Default::default();
        for _ in 0..IDLE_LONG {
            let (taken, addr) = bench.time(|| pools.mem_alloc_async(pool, bytes, stream))?;
            // SAFETY: just allocated from this pool and used by nothing.
            let (given, ()) = bench.time(|| unsafe { pools.mem_free_async(addr, stream) })?;
            let (waited, ()) = bench.time(|| bench.driver().stream_synchronize(stream))?;
            for (list, ns) in times.iter_mut().zip([taken, given, waited]) {
                list.push(ns);
            }
        }
        for (call, times) in ["mem_alloc_async", "mem_free_async", "stream_synchronize"].into_iter().zip(times) {
            self.add(call, condition, Some(bytes), times);
        }
        Ok(())
    }

    /// Reserving, creating, mapping and back.
    pub(crate) fn mappings(&mut self) -> Result<()> {
        let bench = self.bench;
        let Some(vmm) = bench.driver().vmm() else { return Ok(()) };
        let granularity = vmm.granularity()?;
        for bytes in MAPPING_SIZES.map(|bytes| bytes.next_multiple_of(granularity)) {
            self.mapping(vmm, bytes, Condition::Idle, Beside::Idle, IDLE_LONG)?;
        }
        for bytes in [2 * MIB, 256 * MIB].map(|bytes| bytes.next_multiple_of(granularity)) {
            self.mapping(vmm, bytes, Condition::Busy, Beside::Kernel, BUSY / 2)?;
        }
        Ok(())
    }

    fn mapping(
        &mut self,
        vmm: &dyn VmmDriver,
        bytes: u64,
        condition: Condition,
        beside: Beside,
        samples: usize,
    ) -> Result<()> {
        let bench = self.bench;
        const CALLS: [&str; 7] = [
            "mem_address_reserve",
            "mem_create",
            "mem_map",
            "mem_set_access",
            "mem_unmap",
            "mem_release",
            "mem_address_free",
        ];
        let mut times: [Vec<u64>; 7] = Default::default();
        for _ in 0..samples {
            self.prepare(beside)?;
            let (reserve, addr) = bench.time(|| vmm.address_reserve(bytes))?;
            self.prepare(beside)?;
            let (create, handle) = bench.time(|| vmm.create(bytes))?;
            self.prepare(beside)?;
            // SAFETY: a fresh reservation and a fresh handle of the same size; what is mapped is unmapped below.
            let (map, ()) = bench.time(|| unsafe { vmm.map(addr, bytes, handle) })?;
            self.prepare(beside)?;
            // SAFETY: just mapped.
            let (access, ()) = bench.time(|| unsafe { vmm.set_access(addr, bytes) })?;
            self.prepare(beside)?;
            // SAFETY: mapped above and used by nothing.
            let (unmap, ()) = bench.time(|| unsafe { vmm.unmap(addr, bytes) })?;
            self.prepare(beside)?;
            // SAFETY: created above and released once.
            let (release, ()) = bench.time(|| unsafe { vmm.release(handle) })?;
            self.prepare(beside)?;
            // SAFETY: reserved above with this size; nothing is mapped in it.
            let (back, ()) = bench.time(|| unsafe { vmm.address_free(addr, bytes) })?;
            for (list, ns) in times.iter_mut().zip([reserve, create, map, access, unmap, release, back]) {
                list.push(ns);
            }
        }
        bench.settle()?;
        for (call, times) in CALLS.into_iter().zip(times) {
            self.add(call, condition, Some(bytes), times);
        }
        Ok(())
    }

    /// Launches, synchronises, events.
    pub(crate) fn queues(&mut self) -> Result<()> {
        let bench = self.bench;
        let (driver, stream) = (bench.driver(), bench.stream);
        let launch = |calls: &Self, beside: Beside, samples: usize| -> Result<Vec<u64>> {
            let mut times = Vec::new();
            for _ in 0..samples {
                calls.prepare(beside)?;
                times.push(bench.time_launch()?);
            }
            bench.settle()?;
            Ok(times)
        };
        let times = launch(self, Beside::Idle, IDLE)?;
        self.add("kernel_launch", Condition::Idle, None, times);
        let times = launch(self, Beside::Kernel, BUSY)?;
        self.add("kernel_launch", Condition::Busy, None, times);
        for (call, device) in [("stream_synchronize", false), ("device_synchronize", true)] {
            let wait = || if device { driver.device_synchronize() } else { driver.stream_synchronize(stream) };
            let times = self.once(IDLE, Beside::Idle, wait)?;
            self.add(call, Condition::Idle, None, times);
            let mut times = Vec::new();
            for _ in 0..IDLE {
                bench.fill(1)?;
                times.push(bench.time(wait)?.0);
            }
            self.add(call, Condition::AfterLaunch, None, times);
        }
        let event = driver.event_create(false)?;
        for (condition, beside, samples) in
            [(Condition::Idle, Beside::Idle, IDLE), (Condition::Busy, Beside::Kernel, BUSY)]
        {
            let times = self.once(samples, beside, || driver.event_record(event, stream))?;
            self.add("event_record", condition, None, times);
            let times = self.once(samples, beside, || driver.event_query(event).map(|_| ()))?;
            self.add("event_query", condition, None, times);
            let times = self.once(samples, beside, || driver.stream_wait_event(stream, event))?;
            self.add("stream_wait_event", condition, None, times);
        }
        // SAFETY: completed, and used nowhere else.
        unsafe { driver.event_destroy(event)? };
        let times = self.once(IDLE_LONG, Beside::Idle, || driver.mem_info().map(|_| ()))?;
        self.add("mem_get_info", Condition::Idle, None, times);
        Ok(())
    }

    /// Copies from pageable and page-locked memory and back, and taking page-locked memory.
    pub(crate) fn copies(&mut self) -> Result<()> {
        let bench = self.bench;
        let (driver, stream) = (bench.driver(), bench.stream);
        let largest = COPY_SIZES.into_iter().max().unwrap_or(0);
        // CAST: sizes of this list are far below the address space.
        let len = |bytes: u64| bytes as usize;
        let mut pageable = vec![1u8; len(largest)];
        let target = driver.mem_alloc(largest)?;
        let pinned = driver.host_alloc(len(largest))?;
        for bytes in COPY_SIZES {
            let part = &mut pageable[..len(bytes)];
            // SAFETY: the target holds `largest` bytes and lives until all is done, at the end of this function.
            let times =
                self.once(IDLE_LONG, Beside::Idle, || unsafe { driver.copy_to_device(target, part, stream) })?;
            self.add("copy_to_device", Condition::Idle, Some(bytes), times);
            // SAFETY: as above; the page-locked memory is as large and lives as long.
            let copy = || unsafe { driver.copy_to_device_async(target, pinned, len(bytes), stream) };
            let times = self.once(IDLE_LONG, Beside::Idle, copy)?;
            self.add("copy_to_device_async", Condition::Idle, Some(bytes), times);
            // SAFETY: the target holds as many bytes.
            let times = self.once(IDLE_LONG, Beside::Idle, || unsafe { driver.copy_to_host(part, target, stream) })?;
            self.add("copy_to_host", Condition::Idle, Some(bytes), times);
        }
        bench.settle()?;
        // SAFETY: all work on it is done, and it is given back once, with its size.
        unsafe { driver.host_free(pinned, len(largest))? };
        // SAFETY: as above.
        unsafe { driver.mem_free(target)? };
        for bytes in [MIB, 16 * MIB] {
            // SAFETY: just allocated with this size and used by nothing.
            let free = |ptr| unsafe { driver.host_free(ptr, len(bytes)) };
            let (taken, given) = self.pair(BUSY / 2, Beside::Idle, || driver.host_alloc(len(bytes)), free)?;
            self.add("host_alloc", Condition::Idle, Some(bytes), taken);
            self.add("host_free", Condition::Idle, Some(bytes), given);
        }
        Ok(())
    }
}

/// Measures every call of a device.
pub(crate) fn measure(bench: &Bench, progress: &dyn Fn(&str)) -> Result<Vec<Measurement>> {
    let mut calls = Calls::new(bench)?;
    progress("plain memory");
    calls.plain().context("plain memory")?;
    progress("pools");
    calls.pools().context("pools")?;
    progress("virtual memory");
    calls.mappings().context("virtual memory")?;
    progress("queues");
    calls.queues().context("queues")?;
    progress("copies");
    calls.copies().context("copies")?;
    Ok(calls.found)
}
