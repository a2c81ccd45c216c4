//! `experiments compare`: one table for all allocators, from one run of the trainer for each, in processes of their
//! own (a CUDA context and the allocators' caches belong to a process).

use crate::study::figures::{batches, blocked_share, median, steady_epochs, step_time};
use allocators::BackendKind;
use anyhow::{Context, Result};
use clap::Args;
use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, presets};
use serde_json::Value;
use std::ffi::OsString;
use std::fmt;
use std::process::{Command, Stdio};
use trainer::report::duration;
use trainer::terminal::Bar;

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
    /// Allocators, separated by commas: a run of each, instead of --arm
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', conflicts_with = "arms")]
    alloc: Vec<BackendKind>,
    /// How many times each run is repeated, in turn
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Print the figures as one JSON document
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    common: CommonArgs,
    /// Other trainer options of every run, after `--`
    #[arg(last = true)]
    rest: Vec<OsString>,
}

/// The trainer's options that are wanted most, for every run. The trainer says what is wrong with a value.
#[derive(Debug, Args)]
#[command(next_help_heading = "Of every run, as the trainer's")]
struct CommonArgs {
    /// auto, cuda, cuda:N, sim or sim:PROFILE.json
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// auto, mnist, iris or digits
    #[arg(long, value_name = "NAME")]
    dataset: Option<String>,
    /// Directory with MNIST's four files
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,
    /// Width of the hidden layers
    #[arg(long, value_name = "N")]
    hidden: Option<String>,
    /// Number of linear layers
    #[arg(long, value_name = "N")]
    layers: Option<String>,
    /// Rows in a batch
    #[arg(long, value_name = "N")]
    batch: Option<String>,
    /// Passes over the training set
    #[arg(long, value_name = "N")]
    epochs: Option<String>,
    /// Stop after this many steps in all
    #[arg(long, value_name = "N")]
    steps: Option<String>,
    /// Learning rate
    #[arg(long, value_name = "RATE")]
    lr: Option<String>,
    /// Seed of weights, order and generated data
    #[arg(long, value_name = "N")]
    seed: Option<String>,
    /// When the host waits for the device: never, step or op
    #[arg(long, value_name = "WHEN")]
    sync: Option<String>,
    /// How batches reach the device: copy, pinned or resident
    #[arg(long, value_name = "HOW")]
    loader: Option<String>,
}

impl CompareArgs {
    fn arms(&self) -> Vec<String> {
        if !self.alloc.is_empty() {
            return self.alloc.iter().map(|kind| format!("--alloc {kind}")).collect();
        }
        if self.arms.is_empty() { ARMS.map(str::to_owned).to_vec() } else { self.arms.clone() }
    }

    /// Options of every run; what stands after `--` comes last, so it counts.
    fn common(&self) -> Vec<OsString> {
        let common = &self.common;
        let named = [
            ("device", &common.device),
            ("dataset", &common.dataset),
            ("data-dir", &common.data_dir),
            ("hidden", &common.hidden),
            ("layers", &common.layers),
            ("batch", &common.batch),
            ("epochs", &common.epochs),
            ("steps", &common.steps),
            ("lr", &common.lr),
            ("seed", &common.seed),
            ("sync", &common.sync),
            ("loader", &common.loader),
        ];
        let given = named.into_iter().filter_map(|(name, value)| Some(format!("--{name}={}", value.as_ref()?).into()));
        given.chain(self.rest.iter().cloned()).collect()
    }
}

#[derive(Debug, serde::Serialize)]
struct Row {
    arm: String,
    device: String,
    dataset: String,
    /// Median over epochs but the first, and over repeats.
    epoch_s: f64,
    /// The same for a training step, validation left out.
    step_s: f64,
    steps: u64,
    driver_allocations: u64,
    driver_frees: u64,
    blocked_ns: u64,
    /// The same over the epoch's time.
    blocked_share: f64,
    blocked_in: String,
    allocate_p50_ns: u64,
    allocate_p99_ns: u64,
    deallocate_p50_ns: u64,
    deallocate_p99_ns: u64,
    peak_reserved_bytes: u64,
    peak_requested_bytes: u64,
    /// Peak of active over peak of reserved; absent where nothing was reserved.
    utilisation: Option<f64>,
    val_accuracy: f64,
    final_train_loss: f64,
    /// Driver calls of the last epoch over its batches, those of the validation included.
    driver_calls_per_batch: f64,
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
    let (arms, common) = (args.arms(), args.common());
    let runs = u64::from(args.repeats) * arms.len() as u64;
    let bar = Bar::new(runs, "{bar:30} run {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
    let mut records: Vec<Vec<Value>> = vec![Vec::new(); arms.len()];
    // Repeats are interleaved, so that a drift of the machine meets every arm alike.
    for _ in 0..args.repeats {
        for (arm, records) in arms.iter().zip(&mut records) {
            bar.message(arm);
            records.push(run(arm, &common)?);
            bar.advance(1);
        }
    }
    bar.clear();
    let rows = arms.iter().zip(&records).map(|(arm, records)| row(arm, records)).collect::<Result<Vec<Row>>>()?;
    if args.json { crate::print_json(&rows) } else { crate::print(&report(&rows)) }
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

fn row(arm: &str, records: &[Value]) -> Result<Row> {
    let record = records.last().context("there was no run")?;
    let last = steady_epochs(record).last().cloned().context("the run has no finished epoch")?;
    let epochs = records.iter().flat_map(steady_epochs);
    let epoch_s = median(&epochs.filter_map(|epoch| epoch["wall_s"].as_f64()).collect::<Vec<f64>>());
    let step_s = median(&records.iter().filter_map(step_time).collect::<Vec<f64>>());
    let calls = last["driver_calls"].as_object().context("the epoch has no driver calls")?;
    let of = |names: &[&str]| names.iter().map(|name| count(&last, &format!("/driver_calls/{name}/count"))).sum();
    let blocked = |totals: &Value| totals["blocked_ns"].as_u64().unwrap_or(0);
    let most = calls.iter().max_by_key(|(_, totals)| blocked(totals)).filter(|(_, totals)| blocked(totals) > 0);
    // Paths have their own percentiles; the most frequent one stands for the steady state.
    let rows = record["latency"].as_array().cloned().unwrap_or_default();
    let steady = |operation: &str| {
        let rows = rows.iter().filter(|row| row["operation"] == operation);
        rows.max_by_key(|row| count(row, "/count")).cloned().unwrap_or_default()
    };
    let (allocate, deallocate) = (steady("allocate"), steady("deallocate"));
    let [active, reserved] =
        ["active", "reserved"].map(|name| count(record, &format!("/allocator_stats/{name}_bytes.all.peak")));
    Ok(Row {
        arm: arm.replace("--alloc ", ""),
        device: text(record, "/device/name"),
        dataset: text(record, "/dataset/name"),
        epoch_s,
        step_s,
        steps: count(&last, "/steps"),
        driver_allocations: of(&["mem_alloc", "mem_alloc_async", "mem_create"]),
        driver_frees: of(&["mem_free", "mem_free_async", "mem_release"]),
        blocked_ns: calls.values().map(blocked).sum(),
        blocked_share: blocked_share(&last).unwrap_or(f64::NAN),
        blocked_in: most.map_or_else(String::new, |(name, _)| name.clone()),
        allocate_p50_ns: count(&allocate, "/p50_ns"),
        allocate_p99_ns: count(&allocate, "/p99_ns"),
        deallocate_p50_ns: count(&deallocate, "/p50_ns"),
        deallocate_p99_ns: count(&deallocate, "/p99_ns"),
        peak_reserved_bytes: reserved,
        peak_requested_bytes: count(record, "/allocator_stats/requested_bytes.all.peak"),
        // CAST: bytes of a device, below 2^53.
        utilisation: (reserved > 0).then(|| active as f64 / reserved as f64),
        val_accuracy: number(&last, "/val_accuracy")?,
        final_train_loss: number(&last, "/train_loss")?,
        driver_calls_per_batch: calls.values().filter_map(|totals| totals["count"].as_f64()).sum::<f64>()
            / batches(record, &last),
        driver_calls: last["driver_calls"].clone(),
    })
}

fn report(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let title = format!("{}, data set {}, {} steps an epoch", first.device, first.dataset, first.steps);
    let best = rows.iter().map(|row| row.step_s).fold(f64::INFINITY, f64::min);
    let mut table = Table::new();
    table.force_no_tty();
    let style = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header([
        "allocator",
        "step",
        "to the best",
        "host blocked",
        "most in",
        "driver calls",
        "alloc p50",
        "p99",
        "free p50",
        "p99",
        "peak reserved",
        "utilisation",
        "loss",
    ]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for row in rows {
        // CAST: a display value.
        let time = duration((row.step_s * 1e9).round() as u64);
        table.add_row([
            row.arm.clone(),
            time,
            format!("{:.2} x", row.step_s / best),
            format!("{:.0} %", 100.0 * row.blocked_share),
            row.blocked_in.clone(),
            format!("{:.1}", row.driver_calls_per_batch),
            duration(row.allocate_p50_ns),
            duration(row.allocate_p99_ns),
            duration(row.deallocate_p50_ns),
            duration(row.deallocate_p99_ns),
            allocators::Bytes(row.peak_reserved_bytes).to_string(),
            row.utilisation.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", 100.0 * share)),
            format!("{:.6}", row.final_train_loss),
        ]);
    }
    let note = "step: a training step, median over the epochs without the first; host blocked: of the last epoch's time, \
                driver calls: a batch of it, both with the validation; alloc, free: most frequent path; utilisation: \
                peak active of peak reserved";
    format!("{title}\n{table}\n{note}")
}
