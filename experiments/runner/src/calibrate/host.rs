//! What pinned host memory costs: pinning by way of doing it, copies from and to each kind of memory, and a pool's operations.
//!
//! On a GPU everything is timed on the machine's clock. On the simulated device the time to pin is that of the built-in costs, which
//! calibration gives back, and copies and the pool take virtual time.

use super::CalibrateArgs;
use crate::table::table;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use terminal::provenance::command_line;
use terminal::{Bar, Cell, Column, Page, command, duration, quoted};
use trainer::provenance::Provenance;
use vramlab::backends::host_exact;
use vramlab::device::{Clock, HostPages};
use vramlab::output::{Existing, OutputFile};
use vramlab::{
    Bytes, CudaDriver, DeviceAddr, DeviceDescription, DeviceName, Driver, HostCosts, HostDriver, HostRoom, NullDriver,
    Pinning, Profile, Request, Selection, SimDriver, SimMemory, StreamId,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Work on more bytes takes long and is repeated less.
const LONG: u64 = 100 * MIB;
/// Sizes that are pinned by `cudaHostAlloc`: those of copies too. The last one gives the costs of a GiB.
const ALLOC_SIZES: [u64; 8] = [4 * KIB, 64 * KIB, MIB, 2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB];
/// Sizes that are registered.
const REGISTER_SIZES: [u64; 3] = [2 * MIB, 64 * MIB, GIB];
/// Threads that touch memory before it is registered.
const THREADS: [u32; 6] = [1, 2, 4, 8, 16, 32];
const COPY_SIZES: [u64; 5] = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB];
const POOL_SIZES: [u64; 3] = [64 * KIB, MIB, 16 * MIB];

/// How memory was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    /// `cudaHostAlloc`
    Alloc,
    /// Ordinary memory, touched page by page, then `cudaHostRegister`
    Register,
    /// The same after the system was asked for huge pages (`madvise`)
    RegisterHuge,
}

/// Host memory that is copied from or to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Ordinary memory: the driver copies through a buffer of its own
    Pageable,
    /// Memory of `cudaHostAlloc`
    Alloc,
    /// Ordinary memory that was registered
    Register,
    /// The same in huge pages
    RegisterHuge,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Direction {
    /// To the device
    ToDevice,
    /// To the host
    ToHost,
}

/// The time to pin memory once.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PinTime {
    /// How memory was pinned
    way: Way,
    /// Threads that touched it; absent for `alloc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<u32>,
    bytes: u64,
    /// Number of times; each value is their median.
    samples: usize,
    /// Time to touch every page.
    #[serde(skip_serializing_if = "Option::is_none")]
    touch_ns: Option<u64>,
    /// Time of the call that pins. This program's `alloc` writes zeros behind it, whose time is taken off.
    pin_ns: u64,
    /// Time of the call that releases; absent where no cost was published.
    #[serde(skip_serializing_if = "Option::is_none")]
    release_ns: Option<u64>,
    /// Bytes in huge pages, as the system reports them; absent without huge pages and where it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    huge_bytes: Option<u64>,
}

impl PinTime {
    /// Time until the memory can be copied from.
    fn total_ns(&self) -> u64 {
        self.touch_ns.unwrap_or(0) + self.pin_ns
    }
}

/// The time of a copy, until it has completed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CopyTime {
    /// Direction
    direction: Direction,
    /// The host's side
    memory: Kind,
    bytes: u64,
    /// Number of copies.
    samples: usize,
    /// Median.
    p50_ns: u64,
}

/// The time of a pool's operations that find a free block.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolTime {
    /// Allocator of pinned memory.
    allocator: &'static str,
    bytes: u64,
    /// Number of pairs.
    samples: usize,
    /// Median of an allocation, the announcement of a copy and the deferred free.
    p50_ns: u64,
}

/// The machine that was measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct HostMachine {
    /// Processors that this program may use.
    processors: usize,
    /// Memory that this program might still have allocated; absent where the system does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    available_bytes: Option<u64>,
    /// The system's setting of transparent huge pages, as `/sys/kernel/mm/transparent_hugepage/enabled` has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    huge_pages: Option<String>,
}

/// What pinned memory costs on one machine; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
pub(crate) struct HostMeasurements {
    schema_version: u32,
    code_version: &'static str,
    /// Commit, build and machine of this program.
    provenance: Provenance,
    /// The command line, without directories of this machine.
    command: Vec<String>,
    /// Source of the values, in words.
    source: String,
    started_at: String,
    /// The device that copied.
    device: DeviceDescription,
    /// `virtual` or `monotonic`, as in the run record.
    clock: &'static str,
    /// The host
    machine: HostMachine,
    /// The time to pin memory.
    pins: Vec<PinTime>,
    /// The time of copies on an idle device.
    copies: Vec<CopyTime>,
    /// The time of a pool's operations.
    pool: Vec<PoolTime>,
}

/// Measures, writes the costs for `replay --host --pin-costs` and the measurements, and prints them.
pub(super) fn calibrate(args: &CalibrateArgs) -> Result<()> {
    let begin = |path: &std::path::PathBuf| OutputFile::create(path, Existing::Replace);
    let (out, measurements) = (begin(&args.out)?, args.measurements.as_ref().map(begin).transpose()?);
    let (costs, measured) = measure_host(&args.device, &args.source)?;
    out.fill(serde_json::to_string_pretty(&costs)? + "\n")?;
    if let Some(file) = measurements {
        file.fill(serde_json::to_string_pretty(&measured)? + "\n")?;
    }
    measured.page(&args.out).print()
}

/// A machine, or the costs of one.
struct Host {
    driver: Arc<dyn Driver>,
    stream: StreamId,
    clock: Arc<dyn Clock>,
    /// Costs of a simulated host.
    simulated: Option<HostCosts>,
}

fn measure_host(device: &DeviceName, source: &str) -> Result<(HostCosts, HostMeasurements)> {
    let (driver, simulated): (Arc<dyn Driver>, _) = match device {
        DeviceName::Cuda(number) => {
            let driver = CudaDriver::new(*number)?;
            driver.bind_to_thread()?;
            (Arc::new(driver), None)
        }
        DeviceName::Sim(path) => {
            let profile = path.as_deref().map_or_else(|| Ok(Profile::h200()), Profile::read)?;
            (Arc::new(SimDriver::new(profile, SimMemory::Host)), Some(HostCosts::h100x8()))
        }
        DeviceName::Null => bail!("the device without costs cannot be calibrated: write cuda or sim"),
    };
    let started_at = trainer::provenance::now();
    let device = driver.describe();
    let host = Host { stream: driver.stream_create()?, clock: driver.clock(), driver, simulated };
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    bar.message("pinning");
    let pins = host.pins().context("pinning")?;
    bar.message("copies");
    let copies = host.copies().context("copies")?;
    bar.message("a pool");
    let pool = host.pool().context("a pool")?;
    bar.clear();
    let name = host.simulated.as_ref().map_or_else(|| format!("host of {}", device.name), |costs| costs.name.clone());
    let costs = costs(&pins, name, source)?;
    let measured = HostMeasurements {
        schema_version: 1,
        code_version: env!("CARGO_PKG_VERSION"),
        provenance: crate::study::record::provenance(),
        command: command_line(),
        source: source.to_owned(),
        started_at,
        clock: if device.virtual_time { "virtual" } else { "monotonic" },
        device,
        machine: HostMachine::now(),
        pins,
        copies,
        pool,
    };
    Ok((costs, measured))
}

/// Costs of a GiB by the largest size that was pinned.
fn costs(pins: &[PinTime], name: String, source: &str) -> Result<HostCosts> {
    let largest = pins.iter().map(|pin| pin.bytes).max().context("this machine has no memory to pin")?;
    // CAST: a size is at most 2^30, a time below 2^64.
    let per_gib = |pin: &PinTime| (u128::from(pin.total_ns()) * u128::from(GIB) / u128::from(largest)) as u64;
    let of = |way: Way| pins.iter().filter(move |pin| pin.bytes == largest && pin.way == way);
    let alloc_ns_per_gib = of(Way::Alloc).next().map(per_gib).context("nothing was pinned")?;
    let registered: BTreeMap<u32, u64> =
        of(Way::Register).filter_map(|pin| Some((pin.threads?, per_gib(pin)))).collect();
    Ok(HostCosts { name, source: source.to_owned(), alloc_ns_per_gib, register_ns_per_gib: registered })
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

// CAST: sizes of the lists above are below the address space.
fn length(bytes: u64) -> usize {
    bytes as usize
}

impl Host {
    /// Repeats for work on this many bytes; on virtual time each is the same.
    fn samples(&self, bytes: u64) -> usize {
        match bytes {
            _ if self.simulated.is_some() => 1,
            _ if bytes <= MIB => 51,
            _ if bytes <= LONG => 11,
            _ => 3,
        }
    }

    fn time<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<(u64, T)> {
        let start = self.clock.now_ns();
        let value = call()?;
        Ok((self.clock.now_ns().saturating_sub(start), value))
    }

    /// Sizes that leave most of the machine's memory to others, which a simulated host does not take.
    fn fitting(&self, sizes: &[u64]) -> Vec<u64> {
        let room = HostRoom::now().filter(|_| self.simulated.is_none());
        sizes.iter().copied().filter(|bytes| room.is_none_or(|room| *bytes <= room.bytes / 4)).collect()
    }

    fn pins(&self) -> Result<Vec<PinTime>> {
        let mut out = Vec::new();
        for bytes in self.fitting(&ALLOC_SIZES) {
            out.extend(self.alloc(bytes)?);
        }
        for bytes in self.fitting(&REGISTER_SIZES) {
            for way in [Way::Register, Way::RegisterHuge] {
                for threads in THREADS {
                    out.extend(self.register(bytes, way, threads)?);
                }
            }
        }
        Ok(out)
    }

    /// The time by the costs of a simulated host, through its driver.
    fn published(costs: &HostCosts, bytes: u64, pinning: Pinning) -> Result<Option<u64>> {
        let host = HostDriver::simulated(Arc::new(NullDriver::new(2 * bytes)), costs.clone(), pinning);
        host.mem_alloc(bytes)?;
        Ok(host.account().pin_ns)
    }

    fn alloc(&self, bytes: u64) -> Result<Option<PinTime>> {
        let (way, threads, touch_ns, huge_bytes) = (Way::Alloc, None, None, None);
        if let Some(costs) = &self.simulated {
            let ns = Self::published(costs, bytes, Pinning::Alloc)?;
            let row =
                |pin_ns| PinTime { way, threads, bytes, samples: 1, touch_ns, pin_ns, release_ns: None, huge_bytes };
            return Ok(ns.map(row));
        }
        let (mut pins, mut releases, samples) = (Vec::new(), Vec::new(), self.samples(bytes));
        for _ in 0..samples {
            let (ns, memory) = self.time(|| Ok(self.driver.host_alloc(length(bytes))?))?;
            let (fill_ns, ()) = self.time(|| {
                // SAFETY: the memory was just allocated with this size, and only this function knows of it.
                unsafe { memory.write_bytes(std::hint::black_box(0), length(bytes)) };
                Ok(())
            })?;
            pins.push(ns.saturating_sub(fill_ns));
            // SAFETY: allocated above with this size, freed once, and no copy uses it.
            releases.push(self.time(|| Ok(unsafe { self.driver.host_free(memory, length(bytes)) }?))?.0);
        }
        let (pin_ns, release_ns) = (median(pins), Some(median(releases)));
        Ok(Some(PinTime { way, threads, bytes, samples, touch_ns, pin_ns, release_ns, huge_bytes }))
    }

    fn register(&self, bytes: u64, way: Way, count: u32) -> Result<Option<PinTime>> {
        let threads = Some(count);
        if let Some(costs) = &self.simulated {
            // Published times are of these numbers of threads, without huge pages.
            let known = way == Way::Register && costs.register_ns_per_gib.contains_key(&count);
            let ns = if known { Self::published(costs, bytes, Pinning::Register { threads: count })? } else { None };
            let row = |pin_ns| PinTime {
                way,
                threads,
                bytes,
                samples: 1,
                touch_ns: None,
                pin_ns,
                release_ns: None,
                huge_bytes: None,
            };
            return Ok(ns.map(row));
        }
        let samples = self.samples(bytes);
        let (mut touches, mut pins, mut releases, mut huge) = (Vec::new(), Vec::new(), Vec::new(), None);
        for sample in 0..samples {
            let before = huge_bytes().filter(|_| sample == 0 && way == Way::RegisterHuge);
            let mut pages = pages(bytes, way == Way::RegisterHuge)?;
            let touch = || -> Result<()> {
                pages.touch(count);
                Ok(())
            };
            touches.push(self.time(touch)?.0);
            huge = huge.or(before.and_then(|before| Some(huge_bytes()?.saturating_sub(before))));
            // SAFETY: the pages are this function's and live until they are unregistered below.
            pins.push(self.time(|| Ok(unsafe { self.driver.host_register(pages.addr(), length(bytes)) }?))?.0);
            // SAFETY: no copy uses the memory.
            releases.push(self.time(|| Ok(unsafe { self.driver.host_unregister(pages.addr()) }?))?.0);
        }
        Ok(Some(PinTime {
            way,
            threads,
            bytes,
            samples,
            touch_ns: Some(median(touches)),
            pin_ns: median(pins),
            release_ns: Some(median(releases)),
            huge_bytes: huge,
        }))
    }

    fn copies(&self) -> Result<Vec<CopyTime>> {
        let driver = &self.driver;
        let largest = COPY_SIZES.into_iter().max().unwrap_or(0);
        let target = driver.mem_alloc(largest)?;
        let mut out = Vec::new();
        let mut pageable = vec![1_u8; length(largest)];
        for bytes in COPY_SIZES {
            let part = &mut pageable[..length(bytes)];
            out.push(self.copy((Direction::ToDevice, Kind::Pageable, bytes), || {
                // SAFETY: the target holds `largest` bytes and lives until all is done, at the end of this function.
                unsafe { driver.copy_to_device(target, part, self.stream) }
            })?);
            // SAFETY: the target is at least as large.
            let read = || unsafe { driver.copy_to_host(part, target, self.stream) };
            out.push(self.copy((Direction::ToHost, Kind::Pageable, bytes), read)?);
        }
        let pinned = HostDriver::real(Arc::clone(driver));
        let registered = HostDriver::registered(Arc::clone(driver), THREADS[2], false);
        let huge = HostDriver::registered(Arc::clone(driver), THREADS[2], true);
        for (kind, host) in [(Kind::Alloc, pinned), (Kind::Register, registered), (Kind::RegisterHuge, huge)] {
            let memory = host.mem_alloc(largest)?;
            out.extend(self.pinned_copies(kind, target, memory)?);
            // SAFETY: allocated above, freed once; each copy was waited for.
            unsafe { host.mem_free(memory)? };
        }
        // SAFETY: allocated above, freed once; each copy was waited for.
        unsafe { driver.mem_free(target)? };
        Ok(out)
    }

    /// Copies between `target` and pinned memory at this address, both of the largest size.
    fn pinned_copies(&self, kind: Kind, target: DeviceAddr, memory: DeviceAddr) -> Result<Vec<CopyTime>> {
        let start = std::ptr::NonNull::new(memory.get() as *mut u8).context("memory without an address")?;
        let mut out = Vec::new();
        for bytes in COPY_SIZES {
            out.push(self.copy((Direction::ToDevice, kind, bytes), || {
                // SAFETY: both sides hold `bytes` until the copy has been waited for; the host's is pinned.
                unsafe { self.driver.copy_to_device_async(target, start, length(bytes), self.stream) }
            })?);
            out.push(self.copy((Direction::ToHost, kind, bytes), || {
                // SAFETY: as above.
                unsafe { self.driver.copy_to_host_async(start, target, length(bytes), self.stream) }
            })?);
        }
        Ok(out)
    }

    /// Times of a copy until the stream has passed it.
    fn copy(
        &self,
        (direction, memory, bytes): (Direction, Kind, u64),
        mut queue: impl FnMut() -> vramlab::DriverResult<()>,
    ) -> Result<CopyTime> {
        let samples = self.samples(bytes);
        let mut once = || -> Result<u64> {
            let copied = || -> Result<()> {
                queue()?;
                Ok(self.driver.stream_synchronize(self.stream)?)
            };
            Ok(self.time(copied)?.0)
        };
        // The first copy of a size may set the driver's own buffers up.
        once()?;
        let times = (0..samples).map(|_| once()).collect::<Result<Vec<u64>>>()?;
        Ok(CopyTime { direction, memory, bytes, samples, p50_ns: median(times) })
    }

    fn pool(&self) -> Result<Vec<PoolTime>> {
        let host: Arc<dyn Driver> = Arc::new(HostDriver::real(Arc::clone(&self.driver)));
        let pool = Selection::of(&host_exact::BACKEND).build(&host)?;
        let own = self.driver.stream_create()?;
        let mut out = Vec::new();
        for bytes in POOL_SIZES {
            let pair = || -> Result<()> {
                let block = pool.allocate(Request::new(bytes), own)?;
                pool.record_use(&block, self.stream)?;
                // SAFETY: no work uses the block.
                unsafe { pool.deallocate(block, own) }?;
                Ok(())
            };
            // The first one pins.
            pair()?;
            let samples = self.samples(0);
            let times = (0..samples).map(|_| Ok(self.time(pair)?.0)).collect::<Result<Vec<u64>>>()?;
            out.push(PoolTime { allocator: host_exact::BACKEND.name, bytes, samples, p50_ns: median(times) });
        }
        drop(pool);
        // SAFETY: the pool was its only user.
        unsafe { self.driver.stream_destroy(own)? };
        Ok(out)
    }
}

fn pages(bytes: u64, huge: bool) -> Result<HostPages> {
    HostPages::new(length(bytes), huge).with_context(|| format!("this machine refused {} of memory", Bytes(bytes)))
}

/// Bytes of this process in transparent huge pages.
fn huge_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("AnonHugePages:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * KIB)
}

impl HostMachine {
    fn now() -> Self {
        let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok();
        Self {
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            available_bytes: HostRoom::now().map(|room| room.bytes),
            huge_pages: setting.map(|text| text.trim().to_owned()),
        }
    }
}

/// Uses after which memory that is pinned once is cheaper than pageable memory, by the time of a copy to the device; `None` where a
/// pinned copy is not faster.
fn pays_after(pin_ns: u64, pageable_ns: u64, pinned_ns: u64) -> Option<u64> {
    let saved = pageable_ns.checked_sub(pinned_ns).filter(|saved| *saved > 0)?;
    Some(pin_ns.div_ceil(saved))
}

impl HostMeasurements {
    fn copy_ns(&self, direction: Direction, memory: Kind, bytes: u64) -> Option<u64> {
        let same = |copy: &&CopyTime| (copy.direction, copy.memory, copy.bytes) == (direction, memory, bytes);
        self.copies.iter().find(same).map(|copy| copy.p50_ns)
    }

    /// Time to pin and release a buffer by `cudaHostAlloc`, in proportion to the nearest size that was measured.
    fn alloc_ns(&self, bytes: u64) -> Option<u64> {
        let allocs = self.pins.iter().filter(|pin| pin.way == Way::Alloc);
        let nearest = allocs.min_by_key(|pin| pin.bytes.abs_diff(bytes))?;
        let ns = nearest.pin_ns + nearest.release_ns.unwrap_or(0);
        // CAST: times of sizes up to a GiB.
        Some((u128::from(ns) * u128::from(bytes) / u128::from(nearest.bytes)) as u64)
    }

    fn page(&self, out: &std::path::Path) -> Page {
        let mut page = Page::stdout();
        let time = |ns: Option<u64>| Cell::or_dash(ns.map(duration));
        let name = &self.device.name;
        page.title(format!("Host of {name}: time to pin memory"));
        page.table(&table(
            &self.pins,
            &[
                (Column::left("by"), &|row| Cell::from(row.way.text())),
                (Column::right("threads"), &|row| Cell::or_dash(row.threads.map(|threads| threads.to_string()))),
                (Column::right("size"), &|row| Cell::from(Bytes(row.bytes).to_string())),
                (Column::right("touch").priority(2), &|row| time(row.touch_ns)),
                (Column::right("pin"), &|row| time(Some(row.pin_ns))),
                (Column::right("release").priority(1), &|row| time(row.release_ns)),
                (Column::right("a GiB"), &|row| {
                    // CAST: times of sizes up to a GiB.
                    time(Some((u128::from(row.total_ns()) * u128::from(GIB) / u128::from(row.bytes.max(1))) as u64))
                }),
            ],
        ));
        page.title(format!("Host of {name}: time of a copy to the device, and of a pool"));
        page.table(&table(
            &COPY_SIZES,
            &[
                (Column::right("size"), &|bytes| Cell::from(Bytes(*bytes).to_string())),
                (Column::right("pageable"), &|bytes| time(self.copy_ns(Direction::ToDevice, Kind::Pageable, *bytes))),
                (Column::right("pinned"), &|bytes| time(self.copy_ns(Direction::ToDevice, Kind::Alloc, *bytes))),
                (Column::right("registered").priority(1), &|bytes| {
                    time(self.copy_ns(Direction::ToDevice, Kind::Register, *bytes))
                }),
                (Column::right("pin and release"), &|bytes| time(self.alloc_ns(*bytes))),
                (Column::right("pays after"), &|bytes| {
                    let copies =
                        [Kind::Pageable, Kind::Alloc].map(|kind| self.copy_ns(Direction::ToDevice, kind, *bytes));
                    let uses = self.alloc_ns(*bytes).and_then(|pin| pays_after(pin, copies[0]?, copies[1]?));
                    Cell::or_dash(uses.map(|uses| format!("{uses} uses")))
                }),
                (Column::right("pool").priority(2), &|bytes| {
                    time(self.pool.iter().find(|pool| pool.bytes == *bytes).map(|pool| pool.p50_ns))
                }),
            ],
        ));
        page.note(
            "pays after: copies to the device for which a buffer that is pinned once is cheaper than pageable memory",
        );
        let next = format!("replay --host snapshot.pickle --pin-costs {}", quoted(&out.to_string_lossy()));
        page.end(format!("The costs went to {}.", out.display()), &command("vramlab", &next));
        page
    }
}

impl Way {
    fn text(self) -> &'static str {
        match self {
            Self::Alloc => "cudaHostAlloc",
            Self::Register => "cudaHostRegister",
            Self::RegisterHuge => "cudaHostRegister, huge pages",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_host_gives_back_its_costs() {
        let built_in = HostCosts::h100x8();
        let (costs, measured) = measure_host(&DeviceName::Sim(None), "test").unwrap();
        assert_eq!(costs, HostCosts { source: "test".to_owned(), ..built_in });
        let copies = Profile::h200().copies;
        for bytes in COPY_SIZES {
            let [pageable, pinned] =
                [Kind::Pageable, Kind::Alloc].map(|kind| measured.copy_ns(Direction::ToDevice, kind, bytes).unwrap());
            assert!(pinned >= copies.to_device_ns.at(bytes) && pageable > pinned, "{bytes}: {pageable} {pinned}");
        }
        assert_eq!(measured.pool.len(), POOL_SIZES.len());
        // A hit pins nothing: it costs much less than the call.
        for pool in &measured.pool {
            assert!(pool.p50_ns < copies.host_alloc_ns.at(pool.bytes), "{pool:?}");
        }
        let again = measure_host(&DeviceName::Sim(None), "test").unwrap().1;
        let rows = |of: &HostMeasurements| serde_json::to_string(&(&of.pins, &of.copies, &of.pool)).unwrap();
        assert_eq!(rows(&measured), rows(&again), "virtual time repeats");
    }

    #[test]
    fn pinning_pays_when_its_cost_is_saved() {
        assert_eq!(pays_after(100, 30, 20), Some(10));
        assert_eq!(pays_after(101, 30, 20), Some(11));
        assert_eq!(pays_after(0, 30, 20), Some(0));
        assert_eq!((pays_after(100, 20, 20), pays_after(100, 10, 20)), (None, None));
    }
}
