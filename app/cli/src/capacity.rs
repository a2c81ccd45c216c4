//! `vramlab capacity`: the smallest memory in which a history still runs, by bisection.

use crate::gpus::chosen;
use crate::history::{Compiled, Devices, adopted, failed, load};
use crate::reading::ReadArgs;
use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use terminal::arguments::{self, Selections};
use terminal::provenance::Provenance;
use terminal::{Bar, Cell, Comparison, Page, command, quoted};
use vramlab::histories::replay::{Probe, smallest_memory};
use vramlab::{Bytes, DeviceKind, DeviceName, Selection};

/// More than any device has; the search ends there.
const HIGHEST: u64 = 1 << 48;

#[derive(Debug, Args)]
pub(crate) struct CapacityArgs {
    /// History: a PyTorch snapshot or another format of `convert`, plain, .gz or .xz
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Allocators with their settings, separated by commas [default: those that place blocks differently; "all" is every one]
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocators())]
    alloc: Vec<Selections>,
    /// sim or sim:PROFILE.json (memory comes in pages and granules, as on a GPU), or null (byte by byte)
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    device: DeviceName,
    /// Steps in which sizes are tried
    #[arg(long, value_name = "BYTES", default_value = "2MiB")]
    granularity: Bytes,
    /// Memory limit of the recording, which tells a retry from empty_cache
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// Which GPU's events are replayed, where a history holds several
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON array with an object for each allocator
    #[arg(long)]
    json: bool,
}

/// One allocator; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
struct Row {
    trace: String,
    /// Name in the list of `trainer allocators`.
    allocator: &'static str,
    /// As `--alloc` names it.
    alloc: Selection,
    device: DeviceKind,
    /// Steps in which sizes were tried.
    granularity_bytes: u64,
    /// Most bytes that the client held at once; no allocator can do with less.
    max_live_bytes: u64,
    /// The size that was found.
    capacity_bytes: u64,
    /// `capacity_bytes / max_live_bytes`; `null` where nothing lives.
    ratio: Option<f64>,
    /// Most bytes held from a device of that size.
    peak_reserved_bytes: u64,
    /// Releases of the cache on a device of that size.
    num_alloc_retries: u64,
    /// Every size that was tried, in order.
    probes: Vec<Tried>,
    provenance: Provenance,
}

#[derive(Debug, Serialize)]
struct Tried {
    bytes: u64,
    /// Whether every allocation succeeded.
    runs: bool,
}

/// Searches for each allocator.
pub(crate) fn capacity(args: &CapacityArgs) -> Result<()> {
    if args.granularity.0 == 0 || args.granularity.0 > HIGHEST {
        bail!("--granularity {}: steps are at least one byte and at most {}", args.granularity, Bytes(HIGHEST));
    }
    if args.device.kind() == DeviceKind::Cuda {
        bail!("--device cuda: a GPU's size is given; search on sim or null");
    }
    let chosen = arguments::chosen(&args.alloc);
    chosen.iter().try_for_each(Selection::check)?;
    let devices = Devices::open(&args.device)?;
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    bar.message(format!("reading {}", args.file.display()));
    let Compiled { history, mut settings, .. } = load(&args.file, args.gpu, args.limit, &args.read)?;
    // The device's size is what is searched for; a limit on top of it would be another question.
    settings.memory_limit = None;
    let mut rows = Vec::new();
    for alloc in &chosen {
        let (backend, _) = adopted(alloc, &settings);
        let mut tried = 0;
        let progress = |probe: Probe| {
            tried += 1;
            let outcome = if probe.runs { "runs in" } else { "fails in" };
            bar.message(format!("{alloc} {outcome} {} (probe {tried})", Bytes(probe.bytes)));
        };
        let found =
            smallest_memory(&history, &backend, args.granularity.0, HIGHEST, |bytes| devices.made(bytes), progress);
        let found = found.map_err(|error| failed(&args.file, error))?;
        let bound = history.max_live_bytes();
        if found.bytes < bound {
            let (file, found, bound) = (args.file.display(), Bytes(found.bytes), Bytes(bound));
            bail!("{file}: {alloc} runs in {found}, less than the {bound} that are live at once");
        }
        rows.push(Row {
            trace: args.file.display().to_string(),
            allocator: alloc.name(),
            alloc: alloc.clone(),
            device: args.device.kind(),
            granularity_bytes: found.granularity,
            max_live_bytes: bound,
            capacity_bytes: found.bytes,
            // CAST: bytes of a device, below 2^53.
            ratio: (bound > 0).then(|| found.bytes as f64 / bound as f64),
            peak_reserved_bytes: found.report.stats.reserved_bytes.all.peak,
            num_alloc_retries: found.report.stats.num_alloc_retries,
            probes: found.probes.iter().map(|probe| Tried { bytes: probe.bytes, runs: probe.runs }).collect(),
            provenance: Provenance::of(terminal::built!()),
        });
    }
    bar.clear();
    if args.json { terminal::print_json(&rows) } else { report(&rows, args).print() }
}

fn report(rows: &[Row], args: &CapacityArgs) -> Page {
    let mut page = Page::stdout();
    let Some(first) = rows.first() else { return page };
    let mut table = Comparison::new("", rows.iter().map(|row| arguments::heading(&row.alloc.to_string())));
    // CAST: bytes of a device, below 2^53.
    table.ranked(
        "smallest memory",
        rows.iter().map(|row| (Bytes(row.capacity_bytes).to_string(), Some(row.capacity_bytes as f64))),
    );
    table.metric("most live at once", rows.iter().map(|row| Bytes(row.max_live_bytes).to_string()));
    table
        .metric("ratio of the two", rows.iter().map(|row| Cell::or_dash(row.ratio.map(|ratio| format!("{ratio:.3}")))));
    table.metric("retries in it", rows.iter().map(|row| row.num_alloc_retries.to_string()));
    table.metric("sizes tried", rows.iter().map(|row| row.probes.len().to_string()));
    page.line(format!("{} on {}, in steps of {}", first.trace, first.device, Bytes(first.granularity_bytes)));
    page.comparison(&table);
    page.note("nothing runs in less than is live at once");
    let best = rows.iter().min_by_key(|row| row.capacity_bytes).unwrap_or(first);
    let worst = rows.iter().max_by_key(|row| row.capacity_bytes).unwrap_or(first);
    let size = Bytes(best.capacity_bytes);
    let with_least = rows.iter().filter(|row| row.capacity_bytes == best.capacity_bytes);
    let names: Vec<String> = with_least.map(|row| row.alloc.to_string()).collect();
    let found = if worst.capacity_bytes == best.capacity_bytes {
        format!("The history runs in {size}")
    } else {
        let run = if names.len() == 1 { "runs" } else { "run" };
        let (name, most) = (&worst.alloc, Bytes(worst.capacity_bytes));
        format!("{} {run} the history in {size}, {name} needs {most}", names.join(" and "))
    };
    let least = Bytes(best.max_live_bytes);
    // The allocators that the figure is of: others may need more than that.
    let alloc = if names.len() == rows.len() && args.alloc.is_empty() {
        String::new()
    } else {
        format!(" --alloc {}", quoted(&names.join(",")))
    };
    let device = quoted(&args.device.to_string());
    let gpu = chosen(args.gpu);
    let arguments =
        format!("replay {}{alloc} --limit {}B --device {device}{gpu}", quoted(&first.trace), best.capacity_bytes);
    page.end(format!("{found}; {least} are live at once."), &command("vramlab", &arguments));
    page
}
