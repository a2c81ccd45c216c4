//! `experiments capacity`: the smallest memory in which a history still runs, by bisection.

use crate::history::{DeviceName, Devices, Recorded, backend, failed, load};
use crate::reading::ReadArgs;
use allocators::replay::{ReplayError, smallest_memory};
use allocators::{AllocError, BackendKind, Bytes, PoolSettings};
use anyhow::{Result, bail};
use clap::Args;
use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, LineStyle, Table, presets};
use serde::Serialize;
use std::path::PathBuf;
use trainer::terminal::Bar;

/// More than any device has; the search ends there.
const HIGHEST: u64 = 1 << 48;

#[derive(Debug, Args)]
pub(crate) struct CapacityArgs {
    /// History: a PyTorch snapshot or another format of `convert`, plain, .gz or .xz
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Allocators, separated by commas [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    alloc: Vec<BackendKind>,
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
    allocator: BackendKind,
    device: &'static str,
    granularity_bytes: u64,
    max_live_bytes: u64,
    capacity_bytes: u64,
    /// Capacity over the lower bound; absent where nothing lives.
    ratio: Option<f64>,
    peak_reserved_bytes: u64,
    num_alloc_retries: u64,
    probes: Vec<Tried>,
}

#[derive(Debug, Serialize)]
struct Tried {
    bytes: u64,
    runs: bool,
}

/// Searches for each allocator.
pub(crate) fn capacity(args: &CapacityArgs) -> Result<()> {
    if args.granularity.0 == 0 || args.granularity.0 > HIGHEST {
        bail!("--granularity {}: steps are at least one byte and at most {}", args.granularity, Bytes(HIGHEST));
    }
    if matches!(args.device, DeviceName::Cuda(_)) {
        bail!("--device cuda: a GPU's size is given; search on sim or null");
    }
    let kinds = if args.alloc.is_empty() { BackendKind::ALL.to_vec() } else { args.alloc.clone() };
    let devices = Devices::open(&args.device)?;
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    bar.message(format!("reading {}", args.file.display()));
    let Recorded { history, mut settings } = load(&args.file, args.gpu, args.limit.map(|limit| limit.0), &args.read)?;
    // The device's size is what is searched for; a limit on top of it would be another question.
    settings.memory_limit = None;
    let mut rows = Vec::new();
    for &kind in &kinds {
        let device = |bytes| {
            let made = devices.make(Some(bytes));
            made.map_err(|error| ReplayError::History(format!("cannot make a device: {error:#}")))
        };
        let mut tried = 0;
        let progress = |probe: allocators::replay::Probe| {
            tried += 1;
            let outcome = if probe.runs { "runs in" } else { "fails in" };
            bar.message(format!("{kind} {outcome} {} (probe {tried})", Bytes(probe.bytes)));
        };
        let found = smallest_memory(
            &history,
            &backend(kind, settings, PoolSettings::default()),
            args.granularity.0,
            HIGHEST,
            device,
            progress,
        );
        let found = found.map_err(|error| match error {
            // A device that lacks what a backend needs was chosen on the command line.
            ReplayError::Alloc(AllocError::Unsupported { .. }) => anyhow::Error::msg(error.to_string()),
            error => failed(&args.file, error),
        })?;
        let bound = history.max_live_bytes();
        rows.push(Row {
            trace: args.file.display().to_string(),
            allocator: kind,
            device: devices.kind(),
            granularity_bytes: found.granularity,
            max_live_bytes: bound,
            capacity_bytes: found.bytes,
            // CAST: bytes of a device, below 2^53.
            ratio: (bound > 0).then(|| found.bytes as f64 / bound as f64),
            peak_reserved_bytes: found.report.stats.reserved_bytes.all.peak,
            num_alloc_retries: found.report.stats.num_alloc_retries,
            probes: found.probes.iter().map(|probe| Tried { bytes: probe.bytes, runs: probe.runs }).collect(),
        });
    }
    bar.clear();
    if args.json { crate::print_json(&rows) } else { crate::print(&report(&rows)) }
}

fn report(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let best = rows.iter().map(|row| row.capacity_bytes).min().unwrap_or(0);
    let mut table = Table::new();
    table.force_no_tty();
    let style = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["allocator", "smallest memory", "lower bound", "ratio", "retries in it", "probes"]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for row in rows {
        let cells = [
            row.allocator.to_string(),
            Bytes(row.capacity_bytes).to_string(),
            Bytes(row.max_live_bytes).to_string(),
            row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")),
            row.num_alloc_retries.to_string(),
            row.probes.len().to_string(),
        ];
        let bold = rows.len() > 1 && row.capacity_bytes == best;
        table.add_row(
            cells.map(|text| if bold { Cell::new(text).add_attribute(Attribute::Bold) } else { Cell::new(text) }),
        );
    }
    let steps = Bytes(first.granularity_bytes);
    format!("{} on {}, in steps of {steps}\n{table}", first.trace, first.device)
}
