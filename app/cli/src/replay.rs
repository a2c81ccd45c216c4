//! `vramlab replay`: recordings under each allocator, one object or column for each.

pub(crate) mod bound;
mod table;

use crate::history::{Devices, Trace, adopted, failed, load};
use crate::host::{self, HostLists};
use crate::reading::ReadArgs;
use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use terminal::arguments::{self, Selections};
use terminal::provenance::Provenance;
use terminal::{Bar, Page};
use vramlab::backends::{MemoryKind, TorchAllocator, all, of_torch};
use vramlab::histories::formats::Placements;
use vramlab::histories::memory::Peaks;
use vramlab::histories::replay::{
    Addresses, ImpossibleRequests, OutOfMemory, ReplayReport, ReplaySettings, Requests, replay_against,
};
use vramlab::{Bytes, DeviceKind, DeviceName, Ledger, Selection};

pub(crate) use bound::{Bounds, Search};

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Recordings: PyTorch snapshots and the other formats of `convert`, plain, .gz or .xz
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Allocators with their settings, separated by commas [default: those that place blocks differently; "all" is every one]; other settings are as recorded
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocators_as::<HostLists>())]
    alloc: Vec<HostLists>,
    /// Replay pinned host memory under host-pytorch, host-exact, host-cupy and host-rmm-pool: that of a snapshot of PyTorch 2.14 and
    /// newer, or any other recording read as requests of host memory
    #[arg(long, conflicts_with_all = ["against", "addresses", "completion", "gpu", "touch", "repeats", "plan"])]
    host: bool,
    /// What pinning costs with --host: h100x8, g6.4xlarge or a JSON file [default: h100x8]
    #[arg(long, value_name = "MACHINE", requires = "host")]
    pin_costs: Option<String>,
    /// sim, sim:PROFILE.json, null (no costs), cuda or cuda:N; with --host sim, or cuda for pinned memory of this machine
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    device: DeviceName,
    /// Segment addresses: chosen by the device (own); as recorded; or of the next recorded segment of the same size, others below
    /// (near), to predict other settings
    #[arg(long, default_value = "own")]
    addresses: AddressChoice,
    /// When deferred frees complete: as recorded, or immediately, as if no stream had used another's blocks
    #[arg(long, default_value = "recorded", conflicts_with = "against")]
    completion: Completion,
    /// Compare with RMM's placements of the recording's blocks: a file of them, plain, .gz or .xz
    #[arg(long, value_name = "FILE", conflicts_with = "addresses")]
    against: Option<PathBuf>,
    /// Memory limit, such as 11900MiB: that of the recording, to distinguish retries from empty_cache. Allocators with a limit
    /// reserve no more; others get a device of that size (on a GPU: no more bytes in live blocks)
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// GPU to replay, if the recording contains several
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// Fill each block on every stream that uses it
    #[arg(long)]
    touch: bool,
    /// Search for an offline placement, an upper bound on the memory needed: about a second; `plan` searches longer
    #[arg(long, default_value = "on")]
    plan: Search,
    /// Replays per file and allocator; host time is their median, other values are of the first
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Print one JSON array with an object for each file and allocator
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum AddressChoice {
    /// The device chooses segment addresses.
    Own,
    /// Recorded addresses.
    Recorded,
    /// The address of the next recorded segment of the same size, others below.
    Near,
    /// Addresses of another allocator, from a file.
    #[value(skip)]
    Against,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Completion {
    /// Deferred frees complete as recorded.
    Recorded,
    /// Every free completes immediately.
    Instant,
}

/// One file under one allocator; the keys are described in `schema.md`.
#[derive(Debug, Serialize)]
struct Row {
    trace: String,
    /// Name in the list of `trainer allocators`.
    allocator: &'static str,
    /// In the syntax of `--alloc`, with the chosen settings.
    alloc: Selection,
    device: DeviceKind,
    /// Name of the GPU, or of the simulated device's profile.
    device_name: String,
    /// Source of segment addresses.
    addresses: AddressChoice,
    /// When deferred frees complete.
    completion: Completion,
    /// File with the placements to compare with, as given on the command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<String>,
    /// The allocator's own `memory_limit`, else `--limit`, or the limit that the recording contains.
    limit_bytes: Option<u64>,
    allocator_settings: serde_json::Value,
    events: u64,
    /// Replayed allocations, frees, announced uses and cache flushes.
    operations: u64,
    /// Attempted allocations, and blocks from before recording started.
    allocations: u64,
    /// Blocks that were active before recording started.
    prologue_allocations: u64,
    /// Segments that were reserved before recording started; 0 if unknown.
    prologue_segments: u64,
    /// Their bytes.
    prologue_reserved_bytes: u64,
    /// Why they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    prologue_problem: Option<String>,
    /// Blocks from before recording started whose size is unknown; each may be up to 1 MiB larger.
    undetermined_blocks: u64,
    /// Private pools of the program (CUDA graphs, `MemPool`) that the recording shows.
    private_pools: u64,
    /// Whether the allocator has private pools.
    private_pools_kept: bool,
    /// Allocations from private pools.
    private_pool_allocations: u64,
    /// Allocations whose pool is ambiguous; they are replayed in the likeliest one.
    undetermined_pool_allocations: u64,
    /// Requests that failed in the recording.
    refused_allocations: u64,
    /// Those of a size that no device has.
    #[serde(skip)]
    impossible: Option<ImpossibleRequests>,
    /// State at those failures; at most the last hundred.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    out_of_memory: Vec<OutOfMemory>,
    /// Frees that complete late, or never, in the recording.
    deferred_frees: u64,
    /// Allocations that ran out of memory; the replay continues without them.
    failed_allocations: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_failure: Option<Failure>,
    /// Blocks at another address than recorded, or with `--against` in another device block or at another offset; failed
    /// allocations included. `null` if `addresses` is `own` or `near`.
    address_mismatches: Option<u64>,
    /// Segments allocated; `null` for `stream-ordered`.
    segment_allocs: Option<u64>,
    /// Segments released.
    segment_frees: Option<u64>,
    /// Segments allocated or released in another order, or with another address or size, than in the same operation of the
    /// recording (with `--against`: than in the file's header), and missing ones.
    segment_mismatches: Option<u64>,
    /// Device allocations retried after a cache flush.
    num_alloc_retries: u64,
    peak_reserved_bytes: u64,
    /// Peak bytes in blocks that are allocated, or freed and still used by a stream.
    peak_active_bytes: u64,
    /// Peak bytes in allocated blocks.
    peak_allocated_bytes: u64,
    /// Peak requested bytes in active blocks, before rounding.
    peak_requested_bytes: u64,
    /// Peak live bytes as requested: a lower bound for every allocator.
    max_live_bytes: u64,
    #[serde(flatten)]
    bounds: Bounds,
    /// `peak_active_bytes / peak_reserved_bytes`.
    utilisation: Option<f64>,
    /// Allocations at their planned address.
    #[serde(skip_serializing_if = "Option::is_none")]
    planned_allocations: Option<u64>,
    /// Allocations at another address.
    #[serde(skip_serializing_if = "Option::is_none")]
    unplanned_allocations: Option<u64>,
    /// Breakdown of reserved memory at its peak.
    ledger: Ledger,
    /// Driver calls by kind, from the first operation to the last.
    driver_calls: BTreeMap<&'static str, u64>,
    /// Host time in those calls by the device's clock, waits included; `null` on the device `null`.
    driver_s: Option<f64>,
    /// Requests by the path that served them, without blocks from before recording started.
    requests: BTreeMap<&'static str, ByPath>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    steals: Option<Moved>,
    /// Virtual time of the calls, waits included; `null` unless `device` is `sim`.
    simulated_s: Option<f64>,
    /// Real time of the replay divided by the number of operations, without reading the file; median of `--repeats`.
    host_ns_per_op: Option<f64>,
    provenance: Provenance,
}

/// Requests that one path served.
#[derive(Clone, Copy, Debug, Serialize)]
struct ByPath {
    count: u64,
    /// Driver calls inside them.
    driver_calls: u64,
    /// Host time in these calls.
    driver_s: Option<f64>,
}

/// Free pages that were remapped.
#[derive(Clone, Copy, Debug, Serialize)]
struct Moved {
    /// Requests that remapped free pages.
    num_steals: u64,
    /// Pages remapped.
    num_stolen_pages: u64,
    num_stolen_bytes: u64,
}

/// A failed request.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Failure {
    /// Its number among the allocations, from 1.
    pub(crate) allocation: u64,
    /// The allocator's error.
    pub(crate) error: String,
}

impl Failure {
    /// The first failure of a replay.
    pub(crate) fn of(report: &ReplayReport) -> Option<Self> {
        report.first_failure.clone().map(|(allocation, error)| Self { allocation, error })
    }
}

fn is_host(alloc: &Selection) -> bool {
    alloc.capabilities().memory == MemoryKind::Host
}

/// Replays every file under every allocator.
pub(crate) fn replay(args: &ReplayArgs) -> Result<()> {
    if args.host {
        return host::replay(host::HostArgs {
            files: &args.files,
            alloc: &args.alloc,
            limit: args.limit,
            costs: args.pin_costs.as_deref(),
            device: &args.device,
            read: &args.read,
            json: args.json,
        });
    }
    let named: Vec<Selections> = args.alloc.iter().map(|list| Selections(list.0.clone())).collect();
    if let Some(alloc) = named.iter().flat_map(|list| &list.0).find(|alloc| is_host(alloc)) {
        bail!("{} allocates pinned host memory; write --host", alloc.name());
    }
    let against = args.against.as_deref().map(|path| Against::read(path, args)).transpose()?;
    let chosen = match &against {
        Some(against) => against.chosen(&named)?,
        None => arguments::chosen(&named),
    };
    chosen.iter().try_for_each(Selection::check)?;
    let devices = Devices::open(&args.device)?;
    let form = "{bar:30} replay {pos}/{len} {wide_msg} [{elapsed} left {eta}]";
    let bar = Bar::new((args.files.len() * chosen.len()) as u64, form);
    let (mut rows, mut peaks): (Vec<Row>, Vec<Option<Peaks>>) = (Vec::new(), Vec::new());
    for file in &args.files {
        bar.message(format!("reading {}", file.display()));
        let mut trace = load(file, args.gpu, args.limit, &args.read)?;
        if args.completion == Completion::Instant {
            trace.history.complete_at_once();
        }
        let bounds = Bounds::of(&trace, args.plan, |progress| {
            bar.message(format!("planning {}: {progress}", file.display()));
        })
        .with_context(|| file.display().to_string())?;
        // Where segment events are missing, reserved memory is unknown.
        peaks.push(trace.recorded_peaks.filter(|peaks| bounds.check("", peaks.reserved).is_ok()));
        for alloc in &chosen {
            bar.message(format!("{} under {alloc}", file.display()));
            rows.push(run(args, file, &trace, alloc, &devices, bounds, against.as_ref())?);
            bar.advance(1);
        }
    }
    bar.clear();
    rows.iter().try_for_each(Row::check)?;
    if args.json {
        return terminal::print_json(&rows);
    }
    let mut page = Page::stdout();
    for (rows, peaks) in rows.chunks(chosen.len()).zip(&peaks) {
        table::report(rows, peaks.as_ref(), &mut page);
    }
    if let Some((rows, peaks)) = rows.chunks(chosen.len()).next_back().zip(peaks.last()) {
        table::end(rows, peaks.as_ref(), args.gpu, &mut page);
    }
    page.print()
}

impl Row {
    /// Checks that the values are consistent.
    ///
    /// # Errors
    /// The contradiction, in one line.
    fn check(&self) -> Result<()> {
        let (active, reserved) = (self.peak_active_bytes, self.peak_reserved_bytes);
        if active > reserved {
            let (active, reserved) = (Bytes(active), Bytes(reserved));
            bail!("{}: {} has {active} active, but only {reserved} reserved", self.trace, self.alloc);
        }
        // A retry waits for frees that completed later in the recording; other allocators wait in other ways.
        let expandable = self.alloc.backend() == of_torch(TorchAllocator::Expandable);
        let waits = self.num_alloc_retries + self.failed_allocations > 0;
        if waits || !(expandable || self.alloc.capabilities().follows_pytorch) {
            return Ok(());
        }
        let checked = self.bounds.check(&self.alloc.to_string(), reserved);
        checked.map_err(|problem| anyhow!("{}: the events contradict each other: {problem}", self.trace))
    }
}

fn run(
    args: &ReplayArgs,
    file: &Path,
    trace: &Trace,
    alloc: &Selection,
    devices: &Devices,
    bounds: Bounds,
    against: Option<&Against>,
) -> Result<Row> {
    let Trace { history, settings, .. } = trace;
    let (backend, outside) = adopted(alloc, settings);
    let addresses = match args.addresses {
        AddressChoice::Own | AddressChoice::Against => Addresses::Own,
        AddressChoice::Recorded => Addresses::Recorded,
        AddressChoice::Near => Addresses::Near,
    };
    let on_gpu = args.device.kind() == DeviceKind::Cuda;
    let options =
        ReplaySettings { addresses, touch: args.touch, limit: outside.filter(|_| on_gpu), ..ReplaySettings::default() };
    let once = || -> Result<(ReplayReport, String)> {
        let driver = devices.make(outside)?;
        let report = match against {
            Some(against) => replay_against(history, &backend, &driver, &options, &against.placements),
            None => vramlab::histories::replay::replay(history, &backend, &driver, &options),
        };
        let report = report.map_err(|error| failed(file, error))?;
        Ok((report, driver.describe().name))
    };
    let (report, device_name) = once()?;
    let mut times: Vec<Option<f64>> = vec![report.host_ns_per_op()];
    for _ in 1..args.repeats {
        times.push(once()?.0.host_ns_per_op());
    }
    times.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    let stats = &report.stats;
    // CAST: nanoseconds far below 2^53.
    let seconds = |ns: u64| report.driver_ns.map(|_| ns as f64 / 1e9);
    let by_path = |requests: &Requests| {
        let &Requests { count, driver_calls, driver_ns } = requests;
        ByPath { count, driver_calls, driver_s: seconds(driver_ns) }
    };
    let segments = stats.segment.map(|gauge| (gauge.all.allocated, gauge.all.freed));
    Ok(Row {
        trace: file.display().to_string(),
        allocator: alloc.name(),
        alloc: alloc.clone(),
        device: args.device.kind(),
        device_name,
        addresses: if against.is_some() { AddressChoice::Against } else { args.addresses },
        completion: args.completion,
        against: against.map(|against| against.path.display().to_string()),
        limit_bytes: backend.memory_limit().or(settings.memory_limit),
        events: history.events(),
        operations: report.operations,
        allocations: report.allocations,
        prologue_allocations: history.prologue_allocations(),
        prologue_segments: history.prologue_segments().0,
        prologue_reserved_bytes: history.prologue_segments().1,
        prologue_problem: history.prologue_problem().map(str::to_owned),
        undetermined_blocks: history.undetermined_blocks(),
        private_pools: history.private_pools(),
        private_pools_kept: report.private_pools,
        private_pool_allocations: history.private_pool_allocations(),
        undetermined_pool_allocations: history.undetermined_pool_allocations(),
        refused_allocations: history.refused_allocations(),
        impossible: history.impossible_requests(),
        out_of_memory: history.out_of_memory().to_vec(),
        deferred_frees: history.deferred_frees(),
        failed_allocations: report.failed_allocations,
        address_mismatches: report.address_mismatches,
        segment_allocs: segments.map(|(made, _)| made),
        segment_frees: segments.map(|(_, released)| released),
        segment_mismatches: report.segment_mismatches,
        num_alloc_retries: stats.num_alloc_retries,
        peak_reserved_bytes: stats.reserved_bytes.all.peak,
        peak_active_bytes: stats.active_bytes.all.peak,
        peak_allocated_bytes: stats.allocated_bytes.all.peak,
        peak_requested_bytes: stats.requested_bytes.all.peak,
        max_live_bytes: history.max_live_bytes(),
        bounds,
        utilisation: report.utilisation(),
        planned_allocations: stats.num_planned,
        unplanned_allocations: stats.num_unplanned,
        ledger: report.ledger,
        // CAST: nanoseconds far below 2^53.
        simulated_s: report.simulated_ns.map(|ns| ns as f64 / 1e9),
        host_ns_per_op: times[times.len() / 2],
        provenance: Provenance::of(terminal::built!()),
        first_failure: Failure::of(&report),
        driver_s: report.driver_ns.and_then(seconds),
        requests: report.requests.iter().map(|(path, requests)| (*path, by_path(requests))).collect(),
        steals: stats.steals.map(|moved| Moved {
            num_steals: moved.requests,
            num_stolen_pages: moved.pages,
            num_stolen_bytes: moved.bytes,
        }),
        driver_calls: report.driver_calls,
        allocator_settings: report.settings,
    })
}

/// Placements of another allocator, to compare a replay with.
#[derive(Debug)]
struct Against {
    path: PathBuf,
    placements: Placements,
}

impl Against {
    /// Reads the file.
    fn read(path: &Path, args: &ReplayArgs) -> Result<Self> {
        ensure!(args.files.len() == 1, "--against compares one recording; {} are named", args.files.len());
        let placements = Placements::read(path, &args.read.options().budget)?;
        Ok(Self { path: path.to_owned(), placements })
    }

    /// The named allocators, or the one that the file belongs to, with the settings from the file's header.
    fn chosen(&self, named: &[Selections]) -> Result<Vec<Selection>> {
        let (name, bytes) = self.placements.setting();
        let (path, other) = (self.path.display(), self.placements.allocator());
        let expected = all().into_iter().find(|backend| backend.has_setting(name));
        let expected = expected.with_context(|| format!("{path} is of {other}, which has no counterpart here"))?;
        let mut chosen: Vec<Selection> = named.iter().flat_map(|list| list.0.iter().cloned()).collect();
        if chosen.is_empty() {
            chosen.push(Selection::of(expected));
        }
        for alloc in &mut chosen {
            ensure!(
                alloc.backend() == expected,
                "{path} has the placements of {other}, not of {}; write --alloc {expected}",
                alloc.name()
            );
            if alloc.settings().json()[name].as_u64() == Some(bytes) {
                continue;
            }
            ensure!(
                !alloc.is_given(name),
                "{path}: its header begins with a block of {}, which contradicts {name}; leave {name} out",
                Bytes(bytes)
            );
            alloc.set(name, &bytes.to_string()).with_context(|| path.to_string())?;
            alloc.check()?;
        }
        Ok(chosen)
    }
}
