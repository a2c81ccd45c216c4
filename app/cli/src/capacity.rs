//! `vramlab capacity`: the minimum memory in which a recording runs, by bisection.

use crate::gpus::chosen;
use crate::history::{Devices, Trace, adopted, failed, load};
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

/// End of the search, more than any device has.
const HIGHEST: u64 = 1 << 48;

#[derive(Debug, Args)]
pub(crate) struct CapacityArgs {
    /// Recording: a PyTorch snapshot or another format of `convert`, plain, .gz or .xz
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Allocators with their settings, separated by commas [default: those that place blocks differently; "all" is every one]
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocators())]
    alloc: Vec<Selections>,
    /// sim or sim:PROFILE.json (memory in pages and granules, as on a GPU), or null (byte by byte)
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    device: DeviceName,
    /// Granularity of the search
    #[arg(long, value_name = "BYTES", default_value = "2MiB")]
    granularity: Bytes,
    /// Memory limit during recording, to distinguish retries from empty_cache
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// GPU to replay, if the recording contains several
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON array with an object for each allocator
    #[arg(long)]
    json: bool,
}

/// One allocator; the keys are described in `schema.md`.
#[derive(Debug, Serialize)]
struct Row {
    trace: String,
    /// Name in the list of `trainer allocators`.
    allocator: &'static str,
    /// In the syntax of `--alloc`.
    alloc: Selection,
    device: DeviceKind,
    /// Granularity of the search.
    granularity_bytes: u64,
    /// Peak live bytes: a lower bound for every allocator.
    max_live_bytes: u64,
    /// Minimum memory.
    capacity_bytes: u64,
    /// `capacity_bytes / max_live_bytes`; `null` if no block is ever live.
    ratio: Option<f64>,
    /// Peak reserved bytes on a device of that size.
    peak_reserved_bytes: u64,
    /// Cache flushes on a device of that size.
    num_alloc_retries: u64,
    /// Tested sizes, in order.
    probes: Vec<SizeProbe>,
    provenance: Provenance,
}

#[derive(Debug, Serialize)]
struct SizeProbe {
    bytes: u64,
    /// Whether every allocation succeeded.
    runs: bool,
}

/// Searches the minimum memory for each allocator.
pub(crate) fn capacity(args: &CapacityArgs) -> Result<()> {
    if args.granularity.0 == 0 || args.granularity.0 > HIGHEST {
        bail!("--granularity {}: steps are at least one byte and at most {}", args.granularity, Bytes(HIGHEST));
    }
    if args.device.kind() == DeviceKind::Cuda {
        bail!("--device cuda: a real GPU's memory size is fixed; use sim or null");
    }
    let chosen = arguments::chosen(&args.alloc);
    chosen.iter().try_for_each(Selection::check)?;
    let devices = Devices::open(&args.device)?;
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    bar.message(format!("reading {}", args.file.display()));
    let Trace { history, mut settings, .. } = load(&args.file, args.gpu, args.limit, &args.read)?;
    // The search varies the device's size, so a limit must not apply as well.
    settings.memory_limit = None;
    let mut rows = Vec::new();
    for alloc in &chosen {
        let (backend, _) = adopted(alloc, &settings);
        let mut probes = 0;
        let progress = |probe: Probe| {
            probes += 1;
            let outcome = if probe.runs { "runs" } else { "out of memory" };
            bar.message(format!("{alloc}, {}: {outcome} (probe {probes})", Bytes(probe.bytes)));
        };
        let capacity = smallest_memory(
            &history,
            &backend,
            args.granularity.0,
            HIGHEST,
            |bytes| devices.with_memory(bytes),
            progress,
        );
        let capacity = capacity.map_err(|error| failed(&args.file, error))?;
        let bound = history.max_live_bytes();
        if capacity.bytes < bound {
            let (file, size, bound) = (args.file.display(), Bytes(capacity.bytes), Bytes(bound));
            bail!("{file}: {alloc} runs in {size}, below the peak live bytes of {bound}");
        }
        rows.push(Row {
            trace: args.file.display().to_string(),
            allocator: alloc.name(),
            alloc: alloc.clone(),
            device: args.device.kind(),
            granularity_bytes: capacity.granularity,
            max_live_bytes: bound,
            capacity_bytes: capacity.bytes,
            // CAST: bytes of a device, below 2^53.
            ratio: (bound > 0).then(|| capacity.bytes as f64 / bound as f64),
            peak_reserved_bytes: capacity.report.stats.reserved_bytes.all.peak,
            num_alloc_retries: capacity.report.stats.num_alloc_retries,
            probes: capacity.probes.iter().map(|probe| SizeProbe { bytes: probe.bytes, runs: probe.runs }).collect(),
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
        "minimum memory",
        rows.iter().map(|row| (Bytes(row.capacity_bytes).to_string(), Some(row.capacity_bytes as f64))),
    );
    table.metric("peak live", rows.iter().map(|row| Bytes(row.max_live_bytes).to_string()));
    table.metric("ratio", rows.iter().map(|row| Cell::or_dash(row.ratio.map(|ratio| format!("{ratio:.3}")))));
    table.metric("retries", rows.iter().map(|row| row.num_alloc_retries.to_string()));
    table.metric("sizes tested", rows.iter().map(|row| row.probes.len().to_string()));
    page.line(format!("{} on {}, in steps of {}", first.trace, first.device, Bytes(first.granularity_bytes)));
    page.comparison(&table);
    page.note("ratio: minimum memory over peak live; retries: at that size");
    let best = rows.iter().min_by_key(|row| row.capacity_bytes).unwrap_or(first);
    let worst = rows.iter().max_by_key(|row| row.capacity_bytes).unwrap_or(first);
    let size = Bytes(best.capacity_bytes);
    let with_minimum = rows.iter().filter(|row| row.capacity_bytes == best.capacity_bytes);
    let names: Vec<String> = with_minimum.map(|row| row.alloc.to_string()).collect();
    let answer = if worst.capacity_bytes == best.capacity_bytes {
        format!("Minimum memory: {size}")
    } else {
        let (name, most) = (&worst.alloc, Bytes(worst.capacity_bytes));
        format!("Minimum memory: {size} for {}, {most} for {name}", names.join(" and "))
    };
    let live = Bytes(best.max_live_bytes);
    // Only the allocators with that minimum: others may need more.
    let alloc = if names.len() == rows.len() && args.alloc.is_empty() {
        String::new()
    } else {
        format!(" --alloc {}", quoted(&names.join(",")))
    };
    let device = quoted(&args.device.to_string());
    let gpu = chosen(args.gpu);
    let arguments =
        format!("replay {}{alloc} --limit {}B --device {device}{gpu}", quoted(&first.trace), best.capacity_bytes);
    page.end(format!("{answer}; peak live {live}."), &command("vramlab", &arguments));
    page
}
