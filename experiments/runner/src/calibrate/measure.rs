//! Every driver call by size, on the idle device and concurrent with a kernel of about two milliseconds, with
//! percentiles.
//!
//! A pair of calls (an allocation and its free) is timed call by call: the concurrent work is queued before each of
//! the two, so that neither finds the device idle because of the other.

use super::{Bench, MIB};
use anyhow::{Context, Result};
use serde::Serialize;
use vramlab::device::{PoolDriver, PoolId, PoolSettings, VmmDriver};
use vramlab::{DeviceAddr, DriverResult};

const KIB: u64 = 1 << 10;
const PLAIN_SIZES: [u64; 5] = [KIB, 64 * KIB, 2 * MIB, 32 * MIB, 256 * MIB];
/// Less than a page: these fit into a page that is already allocated.
const IN_PAGE_SIZES: [u64; 2] = [KIB, 64 * KIB];
const BUSY_SIZES: [u64; 2] = [64 * KIB, 64 * MIB];
const POOL_SIZES: [u64; 4] = [KIB, 2 * MIB, 32 * MIB, 256 * MIB];
pub(super) const MAPPING_SIZES: [u64; 3] = [2 * MIB, 20 * MIB, 256 * MIB];
const COPY_SIZES: [u64; 4] = [256, 4 * KIB, 196 * KIB, 12 * MIB];

/// Samples on the idle device, enough for a 99th percentile; long calls are sampled less.
const IDLE: usize = 301;
const IDLE_LONG: usize = 101;
/// Samples concurrent with a kernel of milliseconds.
const BUSY: usize = 41;

/// Condition under which a call was timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Condition {
    /// Nothing is queued.
    Idle,
    /// Nothing is queued, and another block keeps the page allocated.
    IdleInPage,
    /// A kernel of about two milliseconds runs.
    Busy,
    /// Pool with threshold 0; nothing synchronises between calls.
    ThresholdZero,
    /// Pool with threshold 0; the stream is synchronised after every free.
    ThresholdZeroSynchronised,
    /// Pool that keeps all memory; nothing synchronises between calls.
    ThresholdMax,
    /// Pool that keeps all memory; the stream is synchronised after every free.
    ThresholdMaxSynchronised,
    /// Behind one launch of the shortest kernel.
    AfterLaunch,
}

impl Condition {
    /// Label in a table.
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
    /// Condition.
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

/// Device work around the timed calls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// None; all work has completed before a call.
    Idle,
    /// A long kernel is queued right before a call.
    Kernel,
    /// The shortest kernel is launched right before a call.
    Launch,
    /// Calls follow each other without regard to queued work.
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
        /// Duration of the kernel that ran during the reference measurements.
        const WANTED_NS: u64 = 2_000_000;
        let full_ns = bench.device_ns(|| bench.fill(bench.large.1))?.max(1);
        // CAST: a share of a length; the product is below 2^53 by far.
        let long = (bench.large.1 as f64 * (WANTED_NS as f64 / full_ns as f64).min(1.0)) as u64;
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
            Beside::Launch => self.bench.fill(1),
            Beside::Nothing => Ok(()),
        }
    }

    fn timed<T>(&self, beside: Beside, call: impl FnOnce() -> DriverResult<T>) -> Result<(u64, T)> {
        self.prepare(beside)?;
        self.bench.time(call)
    }

    /// Measures a single call.
    fn once<E>(
        &mut self,
        (call, condition, bytes): (&'static str, Condition, Option<u64>),
        (samples, beside): (usize, Beside),
        mut work: impl FnMut() -> Result<(), E>,
    ) -> Result<()>
    where
        anyhow::Error: From<E>,
    {
        let mut times = Vec::with_capacity(samples);
        for _ in 0..samples {
            self.prepare(beside)?;
            times.push(self.bench.time(&mut work)?.0);
        }
        self.bench.settle()?;
        self.add(call, condition, bytes, times);
        Ok(())
    }

    /// Measures an allocation and its free.
    fn pair<T: Copy>(
        &mut self,
        (taking, giving): (&'static str, &'static str),
        (condition, bytes): (Condition, u64),
        (samples, beside): (usize, Beside),
        first: impl Fn() -> DriverResult<T>,
        second: impl Fn(T) -> DriverResult<()>,
    ) -> Result<()> {
        let (taken, given) = self.bench.pairs(samples, || self.prepare(beside), first, second)?;
        self.bench.settle()?;
        self.add(taking, condition, Some(bytes), taken);
        self.add(giving, condition, Some(bytes), given);
        Ok(())
    }

    /// `cuMemAlloc` and `cuMemFree`.
    pub(crate) fn plain(&mut self) -> Result<()> {
        const PLAIN: (&str, &str) = ("mem_alloc", "mem_free");
        let bench = self.bench;
        let driver = bench.driver();
        // SAFETY: every address freed here was just allocated here and is used by nothing.
        let free = |addr: DeviceAddr| unsafe { driver.mem_free(addr) };
        let mut cases: Vec<(Condition, Beside, usize, u64)> = Vec::new();
        let samples = |bytes: u64| if bytes > 2 * MIB { IDLE_LONG } else { IDLE };
        cases.extend(PLAIN_SIZES.map(|bytes| (Condition::Idle, Beside::Idle, samples(bytes), bytes)));
        cases.extend(BUSY_SIZES.map(|bytes| (Condition::Busy, Beside::Kernel, BUSY, bytes)));
        for (condition, beside, samples, bytes) in cases {
            self.pair(PLAIN, (condition, bytes), (samples, beside), || driver.mem_alloc(bytes), free)?;
        }
        let keep = driver.mem_alloc(KIB)?;
        for bytes in IN_PAGE_SIZES {
            let in_page = (Condition::IdleInPage, bytes);
            self.pair(PLAIN, in_page, (IDLE, Beside::Idle), || driver.mem_alloc(bytes), free)?;
        }
        Ok(free(keep)?)
    }

    /// `cuMemAllocFromPoolAsync` and `cuMemFreeAsync`, and the synchronise after them.
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
            // SAFETY: every block of the pool was freed, and the device is idle.
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
        let take = || pools.mem_alloc_async(pool, bytes, stream);
        self.pair(("mem_alloc_async", "mem_free_async"), (condition, bytes), (samples, beside), take, free)
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

    /// Reserving addresses, creating and mapping memory, and the reverse.
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
            let (reserve, addr) = self.timed(beside, || vmm.address_reserve(bytes))?;
            let (create, handle) = self.timed(beside, || vmm.create(bytes))?;
            // SAFETY: a fresh reservation and a fresh handle of the same size; the mapping is removed below.
            let (map, ()) = self.timed(beside, || unsafe { vmm.map(addr, bytes, handle) })?;
            // SAFETY: just mapped.
            let (access, ()) = self.timed(beside, || unsafe { vmm.set_access(addr, bytes) })?;
            // SAFETY: mapped above and used by nothing.
            let (unmap, ()) = self.timed(beside, || unsafe { vmm.unmap(addr, bytes) })?;
            // SAFETY: created above and released once.
            let (release, ()) = self.timed(beside, || unsafe { vmm.release(handle) })?;
            // SAFETY: reserved above with this size; nothing is mapped in it.
            let (back, ()) = self.timed(beside, || unsafe { vmm.address_free(addr, bytes) })?;
            for (list, ns) in times.iter_mut().zip([reserve, create, map, access, unmap, release, back]) {
                list.push(ns);
            }
        }
        self.bench.settle()?;
        for (call, times) in CALLS.into_iter().zip(times) {
            self.add(call, condition, Some(bytes), times);
        }
        Ok(())
    }

    /// Launches, synchronises, events.
    pub(crate) fn queues(&mut self) -> Result<()> {
        let bench = self.bench;
        let (driver, stream) = (bench.driver(), bench.stream);
        const BOTH: [(Condition, (usize, Beside)); 2] =
            [(Condition::Idle, (IDLE, Beside::Idle)), (Condition::Busy, (BUSY, Beside::Kernel))];
        for (condition, how) in BOTH {
            self.once(("kernel_launch", condition, None), how, || bench.fill(1))?;
        }
        for (call, device) in [("stream_synchronize", false), ("device_synchronize", true)] {
            let wait = || if device { driver.device_synchronize() } else { driver.stream_synchronize(stream) };
            self.once((call, Condition::Idle, None), (IDLE, Beside::Idle), wait)?;
            self.once((call, Condition::AfterLaunch, None), (IDLE, Beside::Launch), wait)?;
        }
        let event = driver.event_create(false)?;
        for (condition, how) in BOTH {
            self.once(("event_record", condition, None), how, || driver.event_record(event, stream))?;
            self.once(("event_query", condition, None), how, || driver.event_query(event).map(|_| ()))?;
            self.once(("stream_wait_event", condition, None), how, || driver.stream_wait_event(stream, event))?;
        }
        // SAFETY: completed, and used nowhere else.
        unsafe { driver.event_destroy(event)? };
        self.once(("mem_get_info", Condition::Idle, None), (IDLE_LONG, Beside::Idle), || driver.mem_info().map(|_| ()))
    }

    /// Copies from and to pageable and page-locked memory, and allocation of page-locked memory.
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
            let (part, how) = (&mut pageable[..len(bytes)], (IDLE_LONG, Beside::Idle));
            let of = |call| (call, Condition::Idle, Some(bytes));
            // SAFETY: the target holds `largest` bytes and lives until all is done, at the end of this function.
            self.once(of("copy_to_device"), how, || unsafe { driver.copy_to_device(target, part, stream) })?;
            // SAFETY: as above; the page-locked memory is as large and lives as long.
            let copy = || unsafe { driver.copy_to_device_async(target, pinned, len(bytes), stream) };
            self.once(of("copy_to_device_async"), how, copy)?;
            // SAFETY: the target is at least as large.
            self.once(of("copy_to_host"), how, || unsafe { driver.copy_to_host(part, target, stream) })?;
        }
        bench.settle()?;
        // SAFETY: all work on it is done, and it is freed once, with its size.
        unsafe { driver.host_free(pinned, len(largest))? };
        // SAFETY: as above.
        unsafe { driver.mem_free(target)? };
        for bytes in [MIB, 16 * MIB] {
            // SAFETY: just allocated with this size and used by nothing.
            let free = |ptr| unsafe { driver.host_free(ptr, len(bytes)) };
            let (idle, how) = ((Condition::Idle, bytes), (BUSY / 2, Beside::Idle));
            self.pair(("host_alloc", "host_free"), idle, how, || driver.host_alloc(len(bytes)), free)?;
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
