//! `experiments compare`: one table for all allocators, from one run of the trainer for each, in separate processes (a
//! CUDA context and the allocators' caches belong to a process).

use crate::child::Children;
use crate::repository;
use crate::study::ended;
use crate::study::figures::{median, of_summary, steady_epochs, step_time};
use anyhow::{Context, Result, bail};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, FromArgMatches};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::process::{Command, Stdio};
use terminal::arguments::{self, Selections};
use terminal::provenance::command_line;
use terminal::{Bar, Cell, Comparison, Page, command, duration, quoted, say, seconds};
use trainer::ranks::{RankSpread, Spread};
use vramlab::Bytes;
use vramlab::input::{DOCUMENT, read_bytes, read_end};

/// The variants compared unless `--arm` is given.
const ARMS: [&str; 4] = [
    "--alloc naive",
    "--alloc caching",
    "--alloc stream-ordered",
    "--alloc stream-ordered:release_threshold=0 --sync step",
];

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Trainer options of one run, which override those of every run; may be given several times
    #[arg(long = "arm", value_name = "OPTIONS", allow_hyphen_values = true)]
    arms: Vec<String>,
    /// Allocators with their settings, separated by commas: a run of each, instead of --arm
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocators(), conflicts_with = "arms")]
    alloc: Vec<Selections>,
    /// Number of times that each run is repeated, in turn
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Print the values as one JSON document
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    common: CommonArgs,
    /// Other trainer options of every run, after `--`. The runs' records are removed; of a single run `--out DIR` keeps
    /// it
    #[arg(last = true)]
    rest: Vec<OsString>,
}

/// The trainer's most frequently used options.
const COMMON: [&str; 12] =
    ["device", "dataset", "data-dir", "hidden", "layers", "batch", "epochs", "steps", "lr", "seed", "sync", "loader"];

/// The given ones of these, for every run: with values and help from the trainer.
#[derive(Clone, Debug)]
struct CommonArgs(Vec<OsString>);

impl CommonArgs {
    fn options() -> Vec<Arg> {
        let trainer = trainer::cli::command();
        let common = trainer.get_arguments().filter(|arg| arg.get_long().is_some_and(|name| COMMON.contains(&name)));
        common.map(|arg| arg.clone().help_heading("Of every run, as the trainer's")).collect()
    }
}

impl Args for CommonArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(Self::options())
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for CommonArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |option: &Arg| {
            let id = option.get_id().as_str();
            let value = matches.get_raw(id).filter(|_| matches.value_source(id) == Some(ValueSource::CommandLine));
            let mut text = OsString::from(format!("--{}=", option.get_long()?));
            text.push(value?.next_back()?);
            Some(text)
        };
        Ok(Self(Self::options().iter().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl CompareArgs {
    fn arms(&self) -> Vec<String> {
        if !self.alloc.is_empty() {
            return arguments::chosen(&self.alloc).iter().map(|alloc| format!("--alloc {alloc}")).collect();
        }
        if self.arms.is_empty() { ARMS.map(str::to_owned).to_vec() } else { self.arms.clone() }
    }

    /// Options of every run; those after `--` come last, so they take precedence.
    fn common(&self) -> Vec<OsString> {
        self.common.0.iter().chain(&self.rest).cloned().collect()
    }
}

/// Of several runs each number is the median over them.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    arm: String,
    device: String,
    dataset: String,
    /// Median over epochs, the first excluded.
    epoch_s: f64,
    /// Median time of a training step, validation excluded.
    step_s: f64,
    steps: u64,
    driver_allocations: u64,
    driver_frees: u64,
    blocked_ns: u64,
    /// Share of the epoch during which the host was blocked.
    blocked_share: Option<f64>,
    blocked_in: String,
    /// Percentiles of the most frequent path; absent where the simulated device has no cost for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    allocate_p50_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    allocate_p99_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deallocate_p50_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deallocate_p99_ns: Option<u64>,
    peak_reserved_bytes: u64,
    peak_requested_bytes: u64,
    /// Peak of active over peak of reserved; absent where nothing was reserved.
    utilisation: Option<f64>,
    /// Number of ranks; absent of a run without ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ranks: Option<u64>,
    /// The least and the most of the ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rank_spread: Option<RankSpread>,
    val_accuracy: f64,
    final_train_loss: f64,
    /// Driver calls of the last epoch, validation included, divided by its batches.
    driver_calls_per_batch: Option<f64>,
    /// Driver calls of the last epoch by kind.
    driver_calls: Value,
    /// Number of runs behind the medians.
    repeats: usize,
    /// The middle half of the runs, by the name of a number: its first and third quartile.
    middle_half: BTreeMap<String, [f64; 2]>,
    /// Start of the first run, UTC.
    started_at: String,
    /// The command line, without directories of this machine.
    command: Vec<String>,
    /// The trainer's commit, build and machine, as in its record.
    provenance: Value,
}

/// Runs all variants and prints the table.
pub(crate) fn compare(args: &CompareArgs) -> Result<()> {
    let (arms, common) = (args.arms(), args.common());
    check(&arms, &common)?;
    let children = Children::listen()?;
    let runs = u64::from(args.repeats) * arms.len() as u64;
    let bar = Bar::new(runs, "{bar:30} run {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
    let mut records: Vec<Vec<Value>> = vec![Vec::new(); arms.len()];
    // Repeats are interleaved, so that a drift of the machine affects all variants equally.
    for _ in 0..args.repeats {
        for (arm, records) in arms.iter().zip(&mut records) {
            bar.message(arm);
            records.push(run(arm, &common, &children)?);
            bar.advance(1);
        }
    }
    bar.clear();
    let rows = arms.iter().zip(&records).map(|(arm, records)| row(arm, records)).collect::<Result<Vec<Row>>>()?;
    if args.json { terminal::print_json(&rows) } else { report(&rows, &common).print() }
}

/// Options that an arm cannot have: the device, whose name is above all rows, and what this program reads.
const NOT_OF_AN_ARM: [&str; 3] = ["device", "out", "json"];

/// Refuses what is no training run, and says which options of every run an arm overrides.
fn check(arms: &[String], common: &[OsString]) -> Result<()> {
    let of_all = given(common.iter().cloned(), "--")?;
    for arm in arms {
        let of_arm = given(arm.split_whitespace().map(OsString::from), &format!("--arm '{arm}'"))?;
        if let Some(name) = NOT_OF_AN_ARM.into_iter().find(|name| of_arm.contains(*name)) {
            match name {
                "device" => bail!("--arm '{arm}': all arms have one device; give --device outside of it"),
                name => bail!("--arm '{arm}': --{name} is not an option of an arm; leave it out"),
            }
        }
        for name in of_all.intersection(&of_arm) {
            say(&format!("note     '{arm}' keeps its own --{name}"));
        }
    }
    Ok(())
}

/// The names of the options among the words of a training run. Words that the trainer refuses are left to it.
fn given(words: impl Iterator<Item = OsString>, place: &str) -> Result<BTreeSet<String>> {
    let trainer = trainer::cli::command();
    let matches = match trainer.clone().try_get_matches_from(std::iter::once("trainer".into()).chain(words)) {
        Ok(matches) => matches,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            bail!("{place}: --help and --version are not options of a training run; `trainer --help` lists those")
        }
        Err(_) => return Ok(BTreeSet::new()),
    };
    if let Some(name) = matches.subcommand_name() {
        bail!("{place}: {name} is a command of the trainer, not an option of a training run; leave it out");
    }
    let is_given = |option: &&Arg| matches.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
    Ok(trainer.get_arguments().filter(is_given).filter_map(|option| option.get_long().map(str::to_owned)).collect())
}

/// Runs the trainer once and returns its record. An arm's own options come last, so they take precedence.
fn run(arm: &str, common: &[OsString], children: &Children) -> Result<Value> {
    /// Bytes read from the end of what the trainer prints on standard error.
    const MOST_STDERR: u64 = 64 << 10;
    let fails = "cannot write to the directory of temporary files; set TMPDIR to another one";
    let temp_dir = tempfile::tempdir().context(fails)?;
    let [stdout, stderr] = ["stdout", "stderr"].map(|name| temp_dir.path().join(name));
    let mut command = Command::new(repository::this_program()?);
    command.args(["trainer", "--json", "--out"]).arg(temp_dir.path().join("record"));
    command.args(common).args(arm.split_whitespace()).stdin(Stdio::null());
    command.stdout(File::create(&stdout).context(fails)?).stderr(File::create(&stderr).context(fails)?);
    let status = children.run(&mut command, &format!("in a run under '{arm}'"))?.context("cannot start the trainer")?;
    if !status.success() {
        let text = read_end(&stderr, MOST_STDERR).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let last = text.lines().rev().find_map(|line| line.strip_prefix("error: ")).unwrap_or("it printed no error");
        return Err(ended(status, format!("the trainer failed under '{arm}': {last}")));
    }
    let text = read_bytes(&stdout, DOCUMENT).context("cannot read the trainer's record")?;
    serde_json::from_slice(&text).context("the trainer printed something other than a run record")
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

/// The row of a variant: of each number the median over the runs.
fn row(arm: &str, records: &[Value]) -> Result<Row> {
    let runs = records.iter().map(|record| row_of_run(arm, record)).collect::<Result<Vec<Row>>>()?;
    let runs = runs.iter().map(serde_json::to_value).collect::<Result<Vec<Value>, _>>()?;
    let mut row: Row = serde_json::from_value(medians(&runs.iter().collect::<Vec<_>>()))?;
    row.blocked_in = most_blocked(&row.driver_calls);
    row.repeats = records.len();
    let names = runs.iter().filter_map(Value::as_object).flat_map(|run| run.keys());
    let half = |name: &String| {
        let sorted = sorted_numbers(&runs.iter().filter_map(|run| run.get(name)).collect::<Vec<_>>());
        let at = |quarter: usize| sorted.get(quarter * sorted.len() / 4).and_then(|value| value.as_f64());
        Some((name.clone(), [at(1)?, at(3)?]))
    };
    row.middle_half = names.filter_map(half).collect();
    row.middle_half.remove("repeats");
    Ok(row)
}

/// The numbers among values, in order.
fn sorted_numbers<'a>(values: &[&'a Value]) -> Vec<&'a Value> {
    let mut numbers: Vec<&Value> = values.iter().copied().filter(|value| value.is_number()).collect();
    numbers.sort_by(|a, b| a.as_f64().unwrap_or(f64::NAN).total_cmp(&b.as_f64().unwrap_or(f64::NAN)));
    numbers
}

/// One value for several runs: the median of numbers, objects by key, and the first one's text.
fn medians(runs: &[&Value]) -> Value {
    let numbers = sorted_numbers(runs);
    if let Some(median) = numbers.get(numbers.len() / 2) {
        return (*median).clone();
    }
    let objects: Vec<_> = runs.iter().filter_map(|run| run.as_object()).collect();
    if objects.is_empty() {
        return runs.first().map_or(Value::Null, |first| (*first).clone());
    }
    let names: BTreeSet<&String> = objects.iter().flat_map(|object| object.keys()).collect();
    let of = |name: &String| objects.iter().filter_map(|object| object.get(name)).collect::<Vec<_>>();
    Value::Object(names.into_iter().map(|name| (name.clone(), medians(&of(name)))).collect())
}

fn blocked_ns(totals: &Value) -> u64 {
    totals["blocked_ns"].as_u64().unwrap_or(0)
}

/// The call in which the host was blocked longest; empty if it never was.
fn most_blocked(calls: &Value) -> String {
    let calls = calls.as_object().into_iter().flatten();
    let most = calls.max_by_key(|(_, totals)| blocked_ns(totals)).filter(|(_, totals)| blocked_ns(totals) > 0);
    most.map_or_else(String::new, |(name, _)| name.clone())
}

fn row_of_run(arm: &str, record: &Value) -> Result<Row> {
    let last = steady_epochs(record).last().cloned().context("the run has no finished epoch")?;
    let epoch_s =
        median(&steady_epochs(record).iter().filter_map(|epoch| epoch["wall_s"].as_f64()).collect::<Vec<f64>>());
    let step_s = step_time(record).unwrap_or(f64::NAN);
    let calls = last["driver_calls"].as_object().context("the epoch has no driver calls")?;
    let of = |names: &[&str]| names.iter().map(|name| count(&last, &format!("/driver_calls/{name}/count"))).sum();
    // Paths have separate percentiles; the most frequent one stands for the steady state.
    let rows = record["latency"].as_array().cloned().unwrap_or_default();
    let steady = |operation: &str| {
        let rows = rows.iter().filter(|row| row["operation"] == operation);
        rows.max_by_key(|row| count(row, "/count")).cloned().unwrap_or_default()
    };
    let (allocate, deallocate) = (steady("allocate"), steady("deallocate"));
    let figures = of_summary(record).context("the run has no step whose time is known")?;
    Ok(Row {
        arm: arm.replace("--alloc ", ""),
        device: text(record, "/device/name"),
        dataset: text(record, "/dataset/name"),
        epoch_s,
        step_s,
        steps: count(&last, "/steps"),
        driver_allocations: of(&["mem_alloc", "mem_alloc_async", "mem_create"]),
        driver_frees: of(&["mem_free", "mem_free_async", "mem_release"]),
        blocked_ns: calls.values().map(blocked_ns).sum(),
        blocked_share: figures.blocked_share,
        blocked_in: most_blocked(&last["driver_calls"]),
        allocate_p50_ns: allocate["p50_ns"].as_u64(),
        allocate_p99_ns: allocate["p99_ns"].as_u64(),
        deallocate_p50_ns: deallocate["p50_ns"].as_u64(),
        deallocate_p99_ns: deallocate["p99_ns"].as_u64(),
        peak_reserved_bytes: count(record, "/allocator_stats/reserved_bytes.all.peak"),
        peak_requested_bytes: count(record, "/allocator_stats/requested_bytes.all.peak"),
        utilisation: figures.utilisation,
        ranks: record["ranks"].as_array().map(|ranks| ranks.len() as u64).filter(|ranks| *ranks > 0),
        rank_spread: serde_json::from_value(record["rank_spread"].clone()).ok(),
        val_accuracy: number(&last, "/val_accuracy")?,
        final_train_loss: number(&last, "/train_loss")?,
        driver_calls_per_batch: figures.driver_calls,
        driver_calls: last["driver_calls"].clone(),
        repeats: 1,
        middle_half: BTreeMap::new(),
        started_at: text(record, "/started_at"),
        command: command_line(),
        provenance: record["provenance"].clone(),
    })
}

fn report(rows: &[Row], common: &[OsString]) -> Page {
    let mut page = Page::stdout();
    let Some(first) = rows.first() else { return page };
    page.line(format!("{}, data set {}, {} steps an epoch", first.device, first.dataset, first.steps));
    let best = rows.iter().map(|row| row.step_s).fold(f64::INFINITY, f64::min);
    let ns = |of: fn(&Row) -> Option<u64>| rows.iter().map(move |row| Cell::or_dash(of(row).map(duration)));
    let mut table = Comparison::new("", rows.iter().map(|row| arguments::heading(&row.arm)));
    table.ranked("training step", rows.iter().map(|row| (seconds(row.step_s), Some(row.step_s))));
    table.metric("to the best", rows.iter().map(|row| format!("{:.2} x", row.step_s / best)));
    let blocked = |row: &Row| row.blocked_share.map(|share| format!("{:.0} %", 100.0 * share));
    table.metric("host blocked", rows.iter().map(|row| Cell::or_dash(blocked(row))));
    let blocked_in = |row: &Row| Some(row.blocked_in.replace('_', " ")).filter(|call| !call.is_empty());
    table.metric("most of it in", rows.iter().map(|row| Cell::or_dash(blocked_in(row))));
    let calls = |row: &Row| row.driver_calls_per_batch.map(|calls| format!("{calls:.1}"));
    table.metric("driver calls", rows.iter().map(|row| Cell::or_dash(calls(row))));
    table.metric("allocate p50", ns(|row| row.allocate_p50_ns));
    table.metric("allocate p99", ns(|row| row.allocate_p99_ns));
    table.metric("free p50", ns(|row| row.deallocate_p50_ns));
    table.metric("free p99", ns(|row| row.deallocate_p99_ns));
    table.ranked(
        "peak reserved",
        rows.iter().map(|row| (Bytes(row.peak_reserved_bytes).to_string(), Some(row.peak_reserved_bytes as f64))),
    );
    if rows.iter().any(|row| row.ranks.is_some()) {
        of_ranks(rows, &mut table);
    }
    let utilisation = |row: &Row| row.utilisation.map(|share| format!("{:.1} %", 100.0 * share));
    table.metric("utilisation", rows.iter().map(|row| Cell::or_dash(utilisation(row))));
    table.metric("training loss", rows.iter().map(|row| format!("{:.6}", row.final_train_loss)));
    page.comparison(&table);
    page.note("training step: median over the epochs without the first");
    if first.repeats > 1 {
        page.note(format!("every value: median over {} runs", first.repeats));
    }
    page.note("host blocked: of the last epoch's time; driver calls: a batch of it; both with the validation");
    page.note("allocate, free: on the most frequent path");
    if rows.iter().any(|row| row.allocate_p50_ns.is_none() || row.deallocate_p50_ns.is_none()) {
        page.note("-: not available; the simulator times only an allocator's driver calls");
    }
    page.note("utilisation: peak active of peak reserved");
    end(rows, common, &mut page);
    page
}

/// The number of ranks of each variant, and how far they differ.
fn of_ranks(rows: &[Row], table: &mut Comparison) {
    /// Both ends of a spread in words, or one where they are the same.
    fn span<T: Copy>(spread: &Spread<T>, words: impl Fn(T) -> String) -> String {
        let (least, most) = (words(spread.least), words(spread.most));
        if least == most { least } else { format!("{least} to {most}") }
    }
    let each = |of: fn(&RankSpread) -> String| {
        rows.iter().map(move |row| Cell::or_dash(row.rank_spread.as_ref().map(of))).collect::<Vec<Cell>>()
    };
    table.metric("ranks", rows.iter().map(|row| Cell::or_dash(row.ranks.map(|ranks| ranks.to_string()))));
    table.metric("mean step, ranks", each(|spread| span(&spread.step_s, seconds)));
    table.metric("blocked, ranks", each(|spread| span(&spread.blocked_s, seconds)));
    table.metric(
        "peak reserved, ranks",
        each(|spread| span(&spread.peak_reserved_bytes, |bytes| Bytes(bytes).to_string())),
    );
}

/// The fastest variant, the slowest one's main driver cost, and the command that shows it.
fn end(rows: &[Row], common: &[OsString], page: &mut Page) {
    let order = |a: &&Row, b: &&Row| a.step_s.total_cmp(&b.step_s);
    let (Some(fastest), Some(slowest)) = (rows.iter().min_by(order), rows.iter().max_by(order)) else { return };
    let waits = if slowest.blocked_in.is_empty() {
        "its host never waits".to_owned()
    } else {
        format!(
            "its host waits for {:.0} % of an epoch, most in {}",
            100.0 * slowest.blocked_share.unwrap_or(0.0),
            slowest.blocked_in
        )
    };
    let title = if rows.len() == 1 {
        format!(
            "'{}' takes {:.2} driver calls a batch; {waits}.",
            fastest.arm,
            fastest.driver_calls_per_batch.unwrap_or(0.0)
        )
    } else {
        let times = |row: &Row| format!("{:.2}", row.step_s / fastest.step_s);
        // Ties by the rounded value that the table prints.
        let ties = |row: &&Row| times(row) == "1.00";
        let first: Vec<String> = rows.iter().filter(ties).map(|row| format!("'{}'", row.arm)).collect();
        let (are, their) = if first.len() == 1 { ("is", "its") } else { ("are equally", "their") };
        let first_are = format!("{} {are}", first.join(" and "));
        if first.len() == rows.len() {
            format!("{first_are} fast; of '{}' {waits}.", slowest.arm)
        } else {
            let slowest_is = format!("'{}' takes {} times {their} step", slowest.arm, times(slowest));
            format!("{first_are} the fastest; {slowest_is}: {waits}.")
        }
    };
    let options = common.iter().map(|option| quoted(&option.to_string_lossy())).collect::<Vec<_>>().join(" ");
    // Only the allocator's name was removed from the variant's options.
    let arm = if slowest.arm.starts_with("--") { slowest.arm.clone() } else { format!("--alloc {}", slowest.arm) };
    page.end(title, &command("trainer", format!("{options} {arm} --log-driver-calls").replace("  ", " ").trim()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A run record with one epoch to be left out and one that counts.
    fn record(blocked_ns: u64, reserved: u64, p99_ns: u64, wall_s: f64) -> Value {
        let calls = |blocked: u64| json!({"mem_free": {"count": 4, "total_ns": blocked * 2, "blocked_ns": blocked}});
        let epoch = |blocked: u64| {
            json!({"epoch": 1, "steps": 10, "wall_s": wall_s, "train_s": wall_s, "val_s": 0.0, "val_steps": 2,
            "driver_calls": calls(blocked), "val_accuracy": 0.5, "train_loss": 1.0})
        };
        json!({"epochs": [epoch(9_000_000), epoch(blocked_ns)], "started_at": format!("run of {blocked_ns}"),
            "device": {"name": "a GPU"}, "dataset": {"name": "digits"}, "config": {"options": {"epochs": 2}},
            "latency": [{"operation": "allocate", "path": "hit", "count": 100, "p50_ns": p99_ns / 2, "p99_ns": p99_ns}],
            "allocator_stats": {"reserved_bytes.all.peak": reserved, "requested_bytes.all.peak": 10, "active_bytes.all.peak": 20}})
    }

    #[test]
    fn the_spread_of_ranks_is_the_median_over_the_runs() {
        let of_ranks = |most: f64| {
            let spread = json!({"least": 1.0, "most": most});
            let bytes = json!({"least": 5, "most": 10});
            let mut record = record(28, 100, 151, 1.0);
            record["ranks"] = json!([{"rank": 0}, {"rank": 1}]);
            record["rank_spread"] = json!({"step_s": spread, "blocked_s": spread, "peak_reserved_bytes": bytes});
            record
        };
        let row = row("--gpus 2", &[of_ranks(2.0), of_ranks(4.0), of_ranks(3.0)]).unwrap();
        let spread = row.rank_spread.unwrap();
        assert_eq!((row.ranks, spread.step_s.least, spread.step_s.most), (Some(2), 1.0, 3.0));
        assert_eq!(spread.peak_reserved_bytes.most, 10);
        let alone = super::row("--alloc caching", &[record(28, 100, 151, 1.0)]).unwrap();
        assert!(alone.ranks.is_none() && alone.rank_spread.is_none());
    }

    #[test]
    fn every_number_is_the_median_over_unequal_runs() {
        // The last run is an outlier in every number.
        let records = [
            record(28, 100, 151, 1.0),
            record(30, 120, 155, 1.2),
            record(32, 110, 153, 1.1),
            record(87, 900, 448, 9.0),
        ];
        let row = row("--alloc caching", &records[..3]).unwrap();
        assert_eq!((row.blocked_ns, row.peak_reserved_bytes, row.allocate_p99_ns), (30, 110, Some(153)));
        assert_eq!((row.epoch_s, row.repeats), (1.1, 3));
        assert_eq!(row.driver_calls["mem_free"]["blocked_ns"], 30);
        let with_outlier = super::row("--alloc caching", &records).unwrap();
        assert!(with_outlier.blocked_ns < 87 && with_outlier.peak_reserved_bytes < 900, "{with_outlier:?}");
        assert_eq!(with_outlier.middle_half["blocked_ns"], [30.0, 87.0]);
        assert_eq!(with_outlier.blocked_in, "mem_free");
    }
}
