//! `experiments replay`: recorded histories under each allocator, one object or row for each.

use crate::history::{DeviceName, Devices, Recorded, backend, failed, load};
use crate::reading::ReadArgs;
use allocators::replay::{Addresses, ReplayReport, ReplaySettings};
use allocators::{BackendKind, Bytes, Ledger, PoolSettings};
use anyhow::Result;
use clap::{Args, ValueEnum};
use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, LineStyle, Table, presets};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trainer::cli::{parse_switch, parse_threshold};
use trainer::report::duration;
use trainer::terminal::Bar;

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Histories: PyTorch snapshots and the other formats of `convert`, plain, .gz or .xz
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Allocators, separated by commas [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    alloc: Vec<BackendKind>,
    /// sim, sim:PROFILE.json, null (no costs), cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    device: DeviceName,
    /// Where segments lie: where the device puts them, or where they lay when the history was recorded
    #[arg(long, default_value = "own")]
    addresses: AddressChoice,
    /// Memory limit, such as 11900MiB: that of the recording, which tells a retry from empty_cache. caching reserves
    /// no more; others get a device of that size (on a GPU: no more bytes in live blocks)
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// Which GPU's events are replayed, where a history holds several
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// stream-ordered: bytes that the pool keeps at a synchronise; 'max' keeps everything
    #[arg(long, value_name = "BYTES|max", default_value = "max", value_parser = parse_threshold)]
    release_threshold: u64,
    /// stream-ordered: reuse memory whose free is ordered before by an event
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set)]
    reuse_follow_event_dependencies: bool,
    /// stream-ordered: reuse memory of another stream whose free has completed by chance
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set)]
    reuse_allow_opportunistic: bool,
    /// stream-ordered: reuse memory of another stream behind a hidden wait
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set)]
    reuse_allow_internal_dependencies: bool,
    /// Fill each block on every stream that uses it
    #[arg(long)]
    touch: bool,
    /// Replays of each pair; host time is their median, everything else is the first's
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Print one JSON array with an object for each file and allocator
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum AddressChoice {
    Own,
    Recorded,
}

/// One file under one allocator; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
struct Row {
    trace: String,
    allocator: BackendKind,
    device: &'static str,
    device_name: String,
    addresses: AddressChoice,
    limit_bytes: Option<u64>,
    allocator_settings: serde_json::Value,
    events: u64,
    operations: u64,
    allocations: u64,
    prologue_allocations: u64,
    prologue_segments: u64,
    prologue_reserved_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prologue_problem: Option<String>,
    undetermined_blocks: u64,
    refused_allocations: u64,
    deferred_frees: u64,
    failed_allocations: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_failure: Option<Failure>,
    address_mismatches: Option<u64>,
    segment_allocs: Option<u64>,
    segment_frees: Option<u64>,
    segment_mismatches: Option<u64>,
    num_alloc_retries: u64,
    peak_reserved_bytes: u64,
    peak_active_bytes: u64,
    peak_allocated_bytes: u64,
    peak_requested_bytes: u64,
    max_live_bytes: u64,
    utilisation: Option<f64>,
    ledger: Ledger,
    driver_calls: BTreeMap<&'static str, u64>,
    simulated_s: Option<f64>,
    host_ns_per_op: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Failure {
    allocation: u64,
    error: String,
}

/// Replays every file under every allocator.
pub(crate) fn replay(args: &ReplayArgs) -> Result<()> {
    let kinds = if args.alloc.is_empty() { BackendKind::ALL.to_vec() } else { args.alloc.clone() };
    let devices = Devices::open(&args.device)?;
    let form = "{bar:30} replay {pos}/{len} {wide_msg} [{elapsed} left {eta}]";
    let bar = Bar::new((args.files.len() * kinds.len()) as u64, form);
    let mut rows = Vec::new();
    for file in &args.files {
        bar.message(format!("reading {}", file.display()));
        let recorded = load(file, args.gpu, args.limit.map(|limit| limit.0), &args.read)?;
        for &kind in &kinds {
            bar.message(format!("{} under {kind}", file.display()));
            rows.push(run(args, file, &recorded, kind, &devices)?);
            bar.advance(1);
        }
    }
    bar.clear();
    if args.json {
        return crate::print_json(&rows);
    }
    let tables: Vec<String> = rows.chunks(kinds.len()).map(report).collect();
    crate::print(&tables.join("\n\n"))
}

fn run(args: &ReplayArgs, file: &Path, recorded: &Recorded, kind: BackendKind, devices: &Devices) -> Result<Row> {
    let Recorded { history, settings } = recorded;
    // A run of ours says its limit; PyTorch does not.
    let limit = settings.memory_limit;
    // `caching` keeps its limit itself, on a device that would have more, as PyTorch does.
    let outside = limit.filter(|_| kind != BackendKind::Caching);
    let addresses = match args.addresses {
        AddressChoice::Own => Addresses::Own,
        AddressChoice::Recorded => Addresses::Recorded,
    };
    let on_gpu = matches!(devices, Devices::Cuda(_));
    let how =
        ReplaySettings { addresses, touch: args.touch, limit: outside.filter(|_| on_gpu), stop_at_failure: false };
    let pool = PoolSettings {
        release_threshold: args.release_threshold,
        reuse_follow_event_dependencies: args.reuse_follow_event_dependencies,
        reuse_allow_opportunistic: args.reuse_allow_opportunistic,
        reuse_allow_internal_dependencies: args.reuse_allow_internal_dependencies,
    };
    let backend = backend(kind, *settings, pool);
    let once = || -> Result<(ReplayReport, String)> {
        let driver = devices.make(outside)?;
        let report =
            allocators::replay::replay(history, &backend, &driver, &how).map_err(|error| failed(file, error))?;
        Ok((report, driver.describe().name))
    };
    let (report, device_name) = once()?;
    let mut times: Vec<Option<f64>> = vec![report.host_ns_per_op()];
    for _ in 1..args.repeats {
        times.push(once()?.0.host_ns_per_op());
    }
    times.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    let stats = &report.stats;
    let segments = stats.segment.map(|gauge| (gauge.all.allocated, gauge.all.freed));
    Ok(Row {
        trace: file.display().to_string(),
        allocator: kind,
        device: devices.kind(),
        device_name,
        addresses: args.addresses,
        limit_bytes: limit,
        events: history.events(),
        operations: report.operations,
        allocations: report.allocations,
        prologue_allocations: history.prologue_allocations(),
        prologue_segments: history.prologue_segments().0,
        prologue_reserved_bytes: history.prologue_segments().1,
        prologue_problem: history.prologue_problem().map(str::to_owned),
        undetermined_blocks: history.undetermined_blocks(),
        refused_allocations: history.refused_allocations(),
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
        utilisation: report.utilisation(),
        ledger: report.ledger,
        // CAST: nanoseconds far below 2^53.
        simulated_s: report.simulated_ns.map(|ns| ns as f64 / 1e9),
        host_ns_per_op: times[times.len() / 2],
        first_failure: report.first_failure.map(|(allocation, error)| Failure { allocation, error }),
        driver_calls: report.driver_calls,
        allocator_settings: report.settings,
    })
}

/// What is said of a history that began late.
fn beginning(row: &Row) -> Option<String> {
    let (blocks, segments) = (row.prologue_allocations, row.prologue_segments);
    if segments == 0 {
        let why = row.prologue_problem.as_ref().map_or(String::new(), |why| format!(": {why}"));
        let note = format!("{blocks} blocks were live before the first event; they are allocated first{why}");
        return (blocks > 0).then_some(note);
    }
    let reserved = Bytes(row.prologue_reserved_bytes);
    let mut note = format!(
        "{blocks} blocks in {segments} segments ({reserved}) were there before the first event, by what was held at the end"
    );
    if row.undetermined_blocks > 0 {
        note += &format!("; {} of them may be larger, each by up to 1 MiB", row.undetermined_blocks);
    }
    Some(note)
}

/// A column: its title, each row's text, and the row with the best value if there is one.
struct Column {
    title: &'static str,
    texts: Vec<String>,
    best: Option<f64>,
    values: Vec<f64>,
}

impl Column {
    fn plain(title: &'static str, rows: &[Row], text: impl Fn(&Row) -> String) -> Self {
        Self { title, texts: rows.iter().map(text).collect(), best: None, values: Vec::new() }
    }

    /// The smallest value is the best, where rows differ and nothing failed.
    fn ranked(title: &'static str, rows: &[Row], text: impl Fn(&Row) -> String, value: impl Fn(&Row) -> f64) -> Self {
        let worth = |row: &Row| if row.failed_allocations == 0 { value(row) } else { f64::INFINITY };
        let values: Vec<f64> = rows.iter().map(worth).collect();
        let best = values.iter().copied().fold(f64::INFINITY, f64::min);
        let differ = best.is_finite() && values.iter().any(|value| *value != best);
        Self { values, best: differ.then_some(best), ..Self::plain(title, rows, text) }
    }

    fn cell(&self, row: usize) -> Cell {
        let cell = Cell::new(&self.texts[row]);
        if self.best.is_some() && self.values.get(row).copied() == self.best {
            return cell.add_attribute(Attribute::Bold);
        }
        cell
    }
}

fn report(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let size = |bytes: u64| Bytes(bytes).to_string();
    let absent = || "-".to_owned();
    let mut columns = vec![
        Column::plain("allocator", rows, |row| row.allocator.to_string()),
        Column::ranked("failed", rows, |row| row.failed_allocations.to_string(), |row| row.failed_allocations as f64),
        Column::ranked(
            "peak reserved",
            rows,
            |row| size(row.peak_reserved_bytes),
            |row| row.peak_reserved_bytes as f64,
        ),
        Column::plain("peak active", rows, |row| size(row.peak_active_bytes)),
        Column::ranked(
            "utilisation",
            rows,
            |row| row.utilisation.map_or_else(absent, |share| format!("{:.1} %", 100.0 * share)),
            |row| -row.utilisation.unwrap_or(0.0),
        ),
        Column::plain("internal", rows, |row| size(row.ledger.internal)),
        Column::plain("soft", rows, |row| size(row.ledger.soft)),
        Column::plain("hard", rows, |row| size(row.ledger.hard)),
        Column::plain("stream", rows, |row| size(row.ledger.stream)),
        Column::plain("pending", rows, |row| size(row.ledger.pending)),
        Column::plain("segments +/-", rows, |row| {
            row.segment_allocs.zip(row.segment_frees).map_or_else(absent, |(made, freed)| format!("{made}/{freed}"))
        }),
        Column::plain("retries", rows, |row| row.num_alloc_retries.to_string()),
        Column::ranked(
            "driver calls",
            rows,
            |row| row.driver_calls.values().sum::<u64>().to_string(),
            |row| row.driver_calls.values().sum::<u64>() as f64,
        ),
    ];
    if rows.iter().any(|row| row.simulated_s.is_some()) {
        // CAST: seconds back to nanoseconds, for display.
        let ns = |row: &Row| row.simulated_s.map_or_else(absent, |seconds| duration((seconds * 1e9).round() as u64));
        columns.push(Column::ranked("simulated", rows, ns, |row| row.simulated_s.unwrap_or(f64::INFINITY)));
    }
    columns.push(Column::ranked(
        "host ns/op",
        rows,
        |row| row.host_ns_per_op.map_or_else(absent, |ns| format!("{ns:.0}")),
        |row| row.host_ns_per_op.unwrap_or(f64::INFINITY),
    ));
    if first.addresses == AddressChoice::Recorded {
        let count = |count: Option<u64>| count.map_or_else(absent, |count| count.to_string());
        columns.push(Column::plain("moved", rows, move |row| count(row.address_mismatches)));
        let count = |count: Option<u64>| count.map_or_else(absent, |count| count.to_string());
        columns.push(Column::plain("other segments", rows, move |row| count(row.segment_mismatches)));
    }
    let mut table = Table::new();
    table.force_no_tty();
    let style = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(columns.iter().map(|column| column.title));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for row in 0..rows.len() {
        table.add_row(columns.iter().map(|column| column.cell(row)));
    }
    let mut text = format!(
        "{} on {}: {} events, {} allocations, never more than {} live\n{table}",
        first.trace,
        first.device_name,
        first.events,
        first.allocations,
        size(first.max_live_bytes)
    );
    text.extend(beginning(first).map(|note| format!("\n{note}")));
    for (row, failure) in rows.iter().filter_map(|row| row.first_failure.as_ref().map(|failure| (row, failure))) {
        text += &format!("\n{}: allocation {} failed first: {}", row.allocator, failure.allocation, failure.error);
    }
    text
}
