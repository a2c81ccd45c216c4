//! `experiments compare`: one table for all allocators, from one run of the trainer for each, in processes of their
//! own (a CUDA context and the allocators' caches belong to a process).

use anyhow::{Context, Result};
use clap::Args;
use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use std::ffi::OsString;
use std::fmt;
use std::process::{Command, Stdio};
use trainer::report::duration;

/// What is compared unless `--arm` says otherwise.
const ARMS: [&str; 4] = [
    "--alloc naive",
    "--alloc caching",
    "--alloc stream-ordered",
    "--alloc stream-ordered --release-threshold 0 --sync step",
];

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Trainer options of one run; may be given several times
    #[arg(long = "arm", value_name = "OPTIONS", allow_hyphen_values = true)]
    arms: Vec<String>,
    /// How many times each run is repeated, in turn
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Print the figures as one JSON document
    #[arg(long)]
    json: bool,
    /// Trainer options of every run, after `--`
    #[arg(last = true)]
    common: Vec<OsString>,
}

#[derive(Debug, serde::Serialize)]
struct Row {
    arm: String,
    device: String,
    dataset: String,
    /// Median over epochs but the first, and over repeats.
    epoch_s: f64,
    steps: u64,
    driver_allocations: u64,
    driver_frees: u64,
    blocked_ns: u64,
    blocked_in: String,
    allocate_p50_ns: u64,
    allocate_p99_ns: u64,
    peak_reserved_bytes: u64,
    peak_requested_bytes: u64,
    val_accuracy: f64,
    final_train_loss: f64,
    /// Driver calls of the last epoch by kind.
    driver_calls: Value,
}

/// A run of the trainer that ended with an error.
#[derive(Debug)]
pub(crate) struct ArmFailed {
    /// The trainer's exit code, which becomes this program's.
    pub(crate) code: u8,
    text: String,
}

impl ArmFailed {
    /// A failure that is not the input's fault.
    pub(crate) fn at_run_time(error: &impl fmt::Display) -> Self {
        Self { code: 1, text: error.to_string() }
    }

    /// A run that ended with `code`, and why.
    pub(crate) fn new(code: u8, text: String) -> Self {
        Self { code, text }
    }
}

impl fmt::Display for ArmFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for ArmFailed {}

/// Runs all arms and prints the table.
pub(crate) fn compare(args: &CompareArgs) -> Result<()> {
    let arms: Vec<String> = if args.arms.is_empty() { ARMS.map(str::to_owned).to_vec() } else { args.arms.clone() };
    let runs = u64::from(args.repeats) * arms.len() as u64;
    let bar = ProgressBar::new(runs);
    bar.set_style(ProgressStyle::with_template("{bar:30} run {pos}/{len} {msg} [{elapsed} left {eta}]")?);
    let mut records: Vec<Vec<Value>> = vec![Vec::new(); arms.len()];
    // Repeats are interleaved, so that a drift of the machine meets every arm alike.
    for _ in 0..args.repeats {
        for (arm, records) in arms.iter().zip(&mut records) {
            bar.set_message(arm.clone());
            records.push(run(arm, &args.common)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let rows = arms.iter().zip(&records).map(|(arm, records)| row(arm, records)).collect::<Result<Vec<Row>>>()?;
    if args.json { crate::print(&serde_json::to_string_pretty(&rows)?) } else { crate::print(&report(&rows)) }
}

/// One run of the trainer; its record.
fn run(arm: &str, common: &[OsString]) -> Result<Value> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let output = Command::new(program)
        .args(["trainer", "--json"])
        .args(arm.split_whitespace())
        .args(common)
        .stderr(Stdio::piped())
        .output()
        .context("cannot start the trainer")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.lines().rev().find_map(|line| line.strip_prefix("error: ")).unwrap_or("it printed no error");
        // A trainer that a signal ended has no exit code.
        let code = output.status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        return Err(ArmFailed { code, text: format!("the trainer failed under '{arm}': {last}") }.into());
    }
    serde_json::from_slice(&output.stdout).context("the trainer printed something other than a run record")
}

fn number(value: &Value, path: &str) -> Result<f64> {
    value.pointer(path).and_then(Value::as_f64).with_context(|| format!("the run record has no number at {path}"))
}

fn count(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}

fn text(value: &Value, path: &str) -> String {
    value.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn row(arm: &str, records: &[Value]) -> Result<Row> {
    let record = records.last().context("there was no run")?;
    let epochs = |record: &Value| record["epochs"].as_array().cloned().unwrap_or_default();
    let last = epochs(record).pop().context("the run has no finished epoch; use --epochs instead of --steps")?;
    // The first epoch holds the warm-up; it counts only when there is no other.
    let times = records.iter().flat_map(|record| {
        let all = epochs(record);
        let skip = usize::from(all.len() > 1);
        all.into_iter().skip(skip).filter_map(|epoch| epoch["wall_s"].as_f64())
    });
    let epoch_s = median(times.collect());
    let calls = last["driver_calls"].as_object().context("the epoch has no driver calls")?;
    let of = |names: &[&str]| names.iter().map(|name| count(&last, &format!("/driver_calls/{name}/count"))).sum();
    let blocked = |totals: &Value| totals["blocked_ns"].as_u64().unwrap_or(0);
    let most = calls.iter().max_by_key(|(_, totals)| blocked(totals)).filter(|(_, totals)| blocked(totals) > 0);
    // Paths have their own percentiles; the most frequent one stands for the steady state.
    let rows = record["latency"].as_array().cloned().unwrap_or_default();
    let allocate = rows.into_iter().filter(|row| row["operation"] == "allocate");
    let steady = allocate.max_by_key(|row| count(row, "/count")).unwrap_or_default();
    Ok(Row {
        arm: arm.replace("--alloc ", ""),
        device: text(record, "/device/name"),
        dataset: text(record, "/dataset/name"),
        epoch_s,
        steps: count(&last, "/steps"),
        driver_allocations: of(&["mem_alloc", "mem_alloc_async", "mem_create"]),
        driver_frees: of(&["mem_free", "mem_free_async", "mem_release"]),
        blocked_ns: calls.values().map(blocked).sum(),
        blocked_in: most.map_or_else(String::new, |(name, _)| name.clone()),
        allocate_p50_ns: count(&steady, "/p50_ns"),
        allocate_p99_ns: count(&steady, "/p99_ns"),
        peak_reserved_bytes: count(record, "/allocator_stats/reserved_bytes.all.peak"),
        peak_requested_bytes: count(record, "/allocator_stats/requested_bytes.all.peak"),
        val_accuracy: number(&last, "/val_accuracy")?,
        final_train_loss: number(&last, "/train_loss")?,
        driver_calls: last["driver_calls"].clone(),
    })
}

fn report(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let title = format!("{}, data set {}, {} steps an epoch", first.device, first.dataset, first.steps);
    let best = rows.iter().map(|row| row.epoch_s).fold(f64::INFINITY, f64::min);
    let mut table = Table::new();
    let style = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header([
        "allocator",
        "epoch",
        "to the best",
        "driver allocs",
        "driver frees",
        "host blocked",
        "most in",
        "alloc p50",
        "alloc p99",
        "peak reserved",
        "in use at peak",
        "loss",
    ]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for row in rows {
        // CAST: display values.
        let share = 100.0 * row.peak_requested_bytes as f64 / row.peak_reserved_bytes.max(1) as f64;
        table.add_row([
            row.arm.clone(),
            duration((row.epoch_s * 1e9) as u64),
            format!("{:.2} x", row.epoch_s / best),
            row.driver_allocations.to_string(),
            row.driver_frees.to_string(),
            duration(row.blocked_ns),
            row.blocked_in.clone(),
            duration(row.allocate_p50_ns),
            duration(row.allocate_p99_ns),
            allocators::Bytes(row.peak_reserved_bytes).to_string(),
            format!("{share:.0} %"),
            format!("{:.6}", row.final_train_loss),
        ]);
    }
    let note = "times and calls of the last epoch; epoch: median without the first; alloc: most frequent path";
    format!("{title}\n{table}\n{note}")
}
