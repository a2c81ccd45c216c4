//! `vramlab replay --host`: recordings of pinned memory under allocators of host memory.

use super::holders::{HostMemoryUse, describe};
use super::{HostRecording, read};
use crate::history::failed;
use crate::reading::ReadArgs;
use crate::words::{counted, size};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terminal::arguments::heading;
use terminal::provenance::Provenance;
use terminal::{Bar, Cell, Comparison, Page, seconds};
use vramlab::backends::{MemoryKind, SelectionError, hosts, parse_host_list, parse_list};
use vramlab::histories::host::{HostReplay, HostReport, HostTrace, Overruns, Side, Sizes, replay_host};
use vramlab::{Bytes, CudaDriver, DeviceKind, DeviceName, Driver, HostCosts, Selection};

/// The allocators of one option of `replay`: of a GPU's memory, or with `--host` of pinned memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HostLists(pub(crate) Vec<Selection>);

impl std::str::FromStr for HostLists {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<Self, SelectionError> {
        let list = match parse_list(text) {
            Err(SelectionError::HostMemory(_)) => parse_host_list(text),
            other => other,
        };
        list.map(Self)
    }
}

/// One file under one allocator; the keys are described in `schema.md`.
#[derive(Debug, Serialize)]
struct HostRow {
    trace: String,
    /// In the syntax of `--alloc`, with the chosen settings.
    alloc: Selection,
    allocator_settings: serde_json::Value,
    /// What the sizes of the file are. Of `blocks`, requests are known within a factor of two: values are those of the largest
    /// possible requests, and the keys with `least` those of the smallest.
    sizes: Sizes,
    /// Attempted allocations, and blocks from before recording started.
    allocations: u64,
    /// Blocks that were pinned before recording started.
    prologue_allocations: u32,
    /// Frees that completed later than they were requested, or never.
    deferred_frees: u64,
    /// Events that contradict earlier ones and were left out.
    contradictions: u64,
    /// Allocations that ran out of memory; the replay continues without them.
    failed_allocations: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_failure: Option<String>,
    /// Requests that PyTorch would serve with a block that is too small; the replay continues without them.
    overruns: Overruns,
    /// Most bytes that were requested and live at once: a lower bound for every allocator.
    peak_live_bytes: u64,
    /// The same of the smallest possible requests; `null` if the requests are known.
    peak_live_least_bytes: Option<u64>,
    /// Most bytes that were pinned at once.
    peak_reserved_bytes: u64,
    /// The same under the smallest possible requests; `null` if the requests are known.
    peak_reserved_least_bytes: Option<u64>,
    /// Most bytes that the recorded allocator had pinned at once; `null` if the file does not have its segments.
    recorded_peak_reserved_bytes: Option<u64>,
    /// Most bytes that the program had registered in place beside, as far as the file tells.
    registered_peak_bytes: u64,
    /// Peak bytes in blocks that are allocated, or freed and still used by a stream.
    peak_active_bytes: u64,
    /// At the peak of pinned bytes, bytes of live blocks beyond their requests; `null` if the requests are not known.
    rounding_bytes: Option<u64>,
    /// At the same moment, bytes of deferred frees.
    pending_bytes: u64,
    /// At the same moment, free bytes.
    free_bytes: u64,
    /// Requests that the cache served otherwise than in the recording; `null` if the file does not show it.
    differences: Option<u64>,
    /// Requests by the path that served them.
    requests: BTreeMap<&'static str, u64>,
    /// Calls that pinned memory, and calls that released it.
    pin_calls: u64,
    release_calls: u64,
    /// How memory was pinned: `cudaHostAlloc`, or `cudaHostRegister` with a number of threads.
    pinning: String,
    /// Seconds in the calls that pinned memory; `null` where no cost was measured.
    pin_s: Option<f64>,
    /// `cuda`: memory of this machine was pinned; `sim`: the time is by published costs.
    device: DeviceKind,
    /// Machine of these costs, and the measurement; `measured` where memory was pinned.
    costs: String,
    costs_source: String,
    provenance: Provenance,
    /// Whether every size is a power of two.
    #[serde(skip)]
    powers_of_two: bool,
}

/// Arguments of `replay --host`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostArgs<'a> {
    pub(crate) files: &'a [PathBuf],
    pub(crate) alloc: &'a [HostLists],
    pub(crate) limit: Option<Bytes>,
    pub(crate) costs: Option<&'a str>,
    pub(crate) device: &'a DeviceName,
    pub(crate) read: &'a ReadArgs,
    pub(crate) json: bool,
}

/// Replays every file under every allocator.
pub(crate) fn replay(args: HostArgs<'_>) -> Result<()> {
    let chosen: Vec<Selection> = match args.alloc {
        [] => hosts().into_iter().map(Selection::of).collect(),
        lists => lists.iter().flat_map(|list| list.0.iter().cloned()).collect(),
    };
    if let Some(device) = chosen.iter().find(|alloc| alloc.capabilities().memory == MemoryKind::Device) {
        let names: Vec<&str> = hosts().iter().map(|backend| backend.name).collect();
        bail!("{} allocates a GPU's memory; with --host choose among {}", device.name(), names.join(", "));
    }
    chosen.iter().try_for_each(Selection::check)?;
    let device = device(&args)?;
    let costs = costs(args.costs)?;
    let bar = Bar::new(
        (args.files.len() * chosen.len()) as u64,
        "{bar:30} replay {pos}/{len} {wide_msg} [{elapsed} left {eta}]",
    );
    let (mut rows, mut uses) = (Vec::new(), Vec::new());
    for file in args.files {
        bar.message(format!("reading {}", file.display()));
        let recording = read(file, args.read)?;
        uses.push(describe(&recording.trace, &recording.origins));
        for alloc in &chosen {
            bar.message(format!("{} under {alloc}", file.display()));
            rows.push(run(file, &recording, alloc, (&costs, device.as_ref()), args.limit)?);
            bar.advance(1);
        }
    }
    bar.clear();
    if args.json {
        return terminal::print_json(&rows);
    }
    let mut page = Page::stdout();
    for (rows, held) in rows.chunks(chosen.len().max(1)).zip(&uses) {
        report(rows, held, &mut page);
    }
    page.print()
}

/// The GPU whose driver pins memory of this machine; `None` for a simulated host.
fn device(args: &HostArgs<'_>) -> Result<Option<Arc<dyn Driver>>> {
    let number = match args.device {
        DeviceName::Sim(None) => return Ok(None),
        DeviceName::Cuda(number) => *number,
        other => bail!(
            "--device {other}: with --host write sim, whose costs --pin-costs chooses, or cuda for this machine's memory"
        ),
    };
    for (given, option) in [(args.limit.is_some(), "--limit"), (args.costs.is_some(), "--pin-costs")] {
        if given {
            bail!("{option} is for a simulated host; leave it out, or --device {}", args.device);
        }
    }
    let driver = CudaDriver::new(number)?;
    driver.bind_to_thread()?;
    Ok(Some(Arc::new(driver)))
}

/// The costs of a built-in machine, or of a file.
fn costs(name: Option<&str>) -> Result<HostCosts> {
    let built_in = HostCosts::built_in();
    let Some(name) = name else { return Ok(HostCosts::h100x8()) };
    if let Some(costs) = built_in.iter().find(|costs| costs.name == name) {
        return Ok(costs.clone());
    }
    let names: Vec<&str> = built_in.iter().map(|costs| costs.name.as_str()).collect();
    if !Path::new(name).exists() {
        bail!("--pin-costs {name}: neither a machine ({}) nor a file", names.join(", "));
    }
    let text = vramlab::input::read_text(Path::new(name), MOST_COSTS).with_context(|| format!("--pin-costs {name}"))?;
    HostCosts::from_json(&text).with_context(|| format!("--pin-costs {name}"))
}

/// Largest file of costs.
const MOST_COSTS: u64 = 1 << 20;

fn run(
    file: &Path,
    recording: &HostRecording,
    alloc: &Selection,
    (costs, device): (&HostCosts, Option<&Arc<dyn Driver>>),
    limit: Option<Bytes>,
) -> Result<HostRow> {
    let trace = &recording.trace;
    let mut selection = alloc.clone();
    selection.adopt(&recording.settings);
    selection.check()?;
    let replayed = |side| -> Result<HostReport> {
        let (device, limit) = (device.map(Arc::clone), limit.map(|limit| limit.0));
        let options = HostReplay { device, costs: costs.clone(), limit, side };
        replay_host(trace, &selection, &options).map_err(|error| failed(file, error))
    };
    let report = replayed(Side::Most)?;
    let least = (trace.sizes == Sizes::Blocks).then(|| replayed(Side::Least)).transpose()?;
    let ledger = report.ledger;
    Ok(HostRow {
        trace: file.display().to_string(),
        alloc: alloc.clone(),
        sizes: trace.sizes,
        allocations: trace.requests() as u64,
        prologue_allocations: trace.prologue,
        deferred_frees: trace.deferred + trace.stuck.len() as u64,
        contradictions: trace.contradictions,
        failed_allocations: report.failed,
        first_failure: report.first_failure.clone(),
        overruns: report.overruns,
        peak_live_bytes: trace.peak_live,
        peak_live_least_bytes: least.as_ref().map(|_| peak_live_least(trace)),
        peak_reserved_bytes: report.stats.reserved_bytes.all.peak,
        peak_reserved_least_bytes: least.map(|least| least.stats.reserved_bytes.all.peak),
        recorded_peak_reserved_bytes: trace.recorded_peak,
        registered_peak_bytes: trace.peak_registered,
        peak_active_bytes: report.stats.active_bytes.all.peak,
        rounding_bytes: report.rounding_bytes(trace),
        pending_bytes: ledger.pending,
        free_bytes: ledger.soft + ledger.hard + ledger.stream,
        differences: report.differences,
        requests: report.paths,
        pin_calls: report.account.pins,
        release_calls: report.account.releases,
        pinning: report.pinning.to_string(),
        // CAST: nanoseconds far below 2^53.
        pin_s: report.account.pin_ns.map(|ns| ns as f64 / 1e9),
        device: device.map_or(DeviceKind::Sim, |device| device.describe().kind),
        costs: device.map_or_else(|| costs.name.clone(), |_| "measured".to_owned()),
        costs_source: device
            .map_or_else(|| costs.source.clone(), |device| format!("the host of {}", device.describe().name)),
        provenance: Provenance::of(terminal::built!()),
        powers_of_two: trace.blocks.iter().all(|block| block.bytes.is_power_of_two()),
        allocator_settings: report.settings,
    })
}

/// Most bytes that were live at once if each request was as small as its block allows.
pub(super) fn peak_live_least(trace: &HostTrace) -> u64 {
    use vramlab::histories::host::HostOp;
    let (mut live, mut peak) = (0_u64, 0);
    for op in &trace.ops {
        // CAST: numbers of blocks.
        match op {
            HostOp::Allocate(block) => live += trace.least(&trace.blocks[*block as usize]),
            HostOp::Free(block) => live -= trace.least(&trace.blocks[*block as usize]),
            HostOp::Use { .. } | HostOp::Complete(_) | HostOp::Empty => {}
        }
        peak = peak.max(live);
    }
    peak
}

/// A size, or the range of it.
pub(super) fn range(least: Option<u64>, most: u64) -> String {
    match least.filter(|least| *least < most) {
        Some(least) => format!("{} to {}", size(least), size(most)),
        None => size(most),
    }
}

/// Adds the table of one recording's rows.
fn report(rows: &[HostRow], held: &HostMemoryUse, page: &mut Page) {
    let Some(first) = rows.first() else { return };
    page.title(format!(
        "{}: pinned host memory, {}, peak live {}",
        first.trace,
        counted(first.allocations, "allocation"),
        range(first.peak_live_least_bytes, first.peak_live_bytes)
    ));
    let mut table = Comparison::new("", rows.iter().map(|row| heading(&row.alloc.to_string())));
    let plain = |table: &mut Comparison, name: &str, cell: &dyn Fn(&HostRow) -> Option<String>| {
        table.metric(name, rows.iter().map(|row| Cell::or_dash(cell(row))).collect::<Vec<_>>());
    };
    plain(&mut table, "failed allocations", &|row| Some(row.failed_allocations.to_string()));
    if rows.iter().any(|row| row.overruns.count > 0) {
        let overruns = |row: &HostRow| format!("{} ({})", row.overruns.count, size(row.overruns.bytes));
        plain(&mut table, "overruns", &|row| Some(overruns(row)));
    }
    let peaks = rows.iter().map(|row| {
        // CAST: bytes for ranking, below 2^53.
        let bytes = row.peak_reserved_bytes as f64;
        let fits = row.failed_allocations + row.overruns.count == 0;
        (range(row.peak_reserved_least_bytes, row.peak_reserved_bytes), fits.then_some(bytes))
    });
    table.ranked("peak pinned", peaks.collect::<Vec<_>>());
    if first.sizes == Sizes::Requested {
        // CAST: a ratio for display.
        let ratio = |row: &HostRow| row.peak_reserved_bytes as f64 / row.peak_live_bytes.max(1) as f64;
        plain(&mut table, "pinned / peak live", &|row| Some(format!("{:.2}", ratio(row))));
    }
    plain(&mut table, "rounding at peak", &|row| row.rounding_bytes.map(size));
    plain(&mut table, "pending at peak", &|row| Some(size(row.pending_bytes)));
    plain(&mut table, "free at peak", &|row| Some(size(row.free_bytes)));
    plain(&mut table, "calls that pin", &|row| Some(row.pin_calls.to_string()));
    plain(&mut table, "calls that release", &|row| Some(row.release_calls.to_string()));
    plain(&mut table, "time to pin", &|row| row.pin_s.map(seconds));
    if rows.iter().any(|row| row.differences.is_some()) {
        plain(&mut table, "not as recorded", &|row| row.differences.map(|count| count.to_string()));
    }
    page.comparison(&table);
    if let Some(recorded) = first.recorded_peak_reserved_bytes {
        page.note(format!("recorded: {} pinned at most", size(recorded)));
    }
    if first.sizes == Sizes::Blocks {
        page.note("the recording has the sizes of blocks only: each request was more than half of its block");
    }
    if first.sizes == Sizes::Requested && first.powers_of_two {
        page.note(
            "every request is a power of two, as those of PyTorch's host allocator to CUDA are: if it made them, what the program \
             requested of it is more than half of each",
        );
    }
    if first.registered_peak_bytes > 0 {
        page.note(format!("{} were registered in place beside these blocks", size(first.registered_peak_bytes)));
    }
    if first.contradictions > 0 {
        page.note(format!("{} left out: earlier events contradict them", counted(first.contradictions, "event")));
    }
    held.sentences().iter().for_each(|sentence| page.note(sentence));
    page.note(format!("time to pin: {}", first.costs_source));
}
