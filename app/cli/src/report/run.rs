//! Runs, from their records: the values by which they are compared, and curves over their steps.

mod record;
mod steps;

use anyhow::{Context, Result};
use record::{Call, Calls, Epoch};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use vramlab::input;

pub(super) use record::{Figure, Record};
pub(super) use steps::Steps;

/// Maximum number of runs on one page. Charts with more lines are unreadable and slow to draw.
const MOST: usize = 200;

/// A run for `runs.js`. Times are in ns, memory in bytes; values missing from the record are absent.
#[derive(Debug, Serialize)]
pub(super) struct RunData {
    /// Its allocator, plus the settings that differ among runs with the same allocator.
    pub(super) name: String,
    pub(super) folder: String,
    device: String,
    settings: Vec<(String, String)>,
    notes: Vec<String>,
    /// Median time of a training step, and the 10th and 90th percentile.
    step: Option<f64>,
    step_spread: Option<[f64; 2]>,
    /// Driver calls of one training step, and of one epoch including validation; epochs after the first.
    per_step: Option<Account>,
    per_epoch: Option<Account>,
    /// Median and 99th percentile of each operation on its most frequent path.
    allocate: Option<[f64; 2]>,
    free: Option<[f64; 2]>,
    peak_reserved: Option<u64>,
    peak_requested: Option<u64>,
    /// Peak active memory as a share of peak reserved memory.
    utilisation: Option<f64>,
    accuracy: Option<f64>,
    /// The host's time in the last epoch, in five parts.
    host: Option<[f64; 5]>,
    /// Reserved-memory breakdown at its peak, by name.
    ledger: BTreeMap<&'static str, u64>,
    steps: Option<steps::Curves>,
    spectra: Vec<steps::Spectrum>,
    /// Comparison of its losses with those of the first run of the same work.
    losses: Option<String>,
}

/// Driver calls per period, longest first.
#[derive(Debug, Serialize)]
struct Account {
    calls: f64,
    blocked: f64,
    by_call: Vec<AccountRow>,
}

#[derive(Debug, Serialize)]
struct AccountRow {
    call: String,
    calls: f64,
    total: f64,
    blocked: f64,
}

/// The run directories of a directory on the command line: itself with those of its other ranks, or the first repetitions of an
/// experiment's training programs.
///
/// # Errors
/// The experiment is damaged.
pub(super) fn directories(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.join("experiment.json").is_file() {
        return Ok(ranks(path));
    }
    let runs = path.join("runs");
    let mut directories = Vec::new();
    for entry in std::fs::read_dir(&runs).with_context(|| runs.display().to_string())? {
        let directory = entry.with_context(|| runs.display().to_string())?.path();
        let record = directory.join("run.json");
        if !record.is_file() {
            continue;
        }
        let record: Value = read_json(&record, "a run of an experiment")?;
        let trains = matches!(record["program"].as_str(), Some("trainer" | "pytorch"));
        if trains && record["status"] == "done" && record["repeat"] == 0 {
            directories.push(directory);
        }
    }
    directories.sort();
    Ok(directories)
}

/// The directory of a run, and those of its other ranks in their order, so that each rank has a lane of its own.
fn ranks(run: &Path) -> Vec<PathBuf> {
    let others = (1..).map(|rank| run.join(format!("rank{rank}")));
    let recorded = others.take_while(|directory| plain_or_packed(&directory.join("summary.json")).is_file());
    std::iter::once(run.to_owned()).chain(recorded).collect()
}

/// Reads the records in these directories.
///
/// # Errors
/// One line with the file and its fault.
pub(super) fn read(directories: &[PathBuf]) -> Result<Vec<RunData>> {
    anyhow::ensure!(
        directories.len() <= MOST,
        "{} runs are too many for one page; name at most {MOST}",
        directories.len()
    );
    let records: Vec<Record> = directories.iter().map(|directory| Record::read(directory)).collect::<Result<_>>()?;
    let names = names(&records);
    let tables: Vec<Option<Steps>> = (directories.iter().zip(&records))
        .map(|(directory, record)| Steps::read(directory, record))
        .collect::<Result<_>>()?;
    let mut out = Vec::new();
    for (number, ((directory, record), steps)) in directories.iter().zip(&records).zip(&tables).enumerate() {
        let mut run = run_data(directory, record, steps.as_ref(), names[number].clone())?;
        let first = (0..number).find(|first| records[*first].work() == record.work());
        if let Some((first, [actual, baseline])) =
            first.zip(steps.as_ref().zip(first.and_then(|at| tables[at].as_ref())).map(<[_; 2]>::from))
        {
            run.losses =
                actual.compare_losses(baseline).map(|text| format!("{} and {}: {text}", run.name, names[first]));
        }
        out.push(run);
    }
    Ok(out)
}

/// Reads a JSON document, plain or with `.gz` appended to its name.
pub(super) fn read_json<T: serde::de::DeserializeOwned>(path: &Path, what: &str) -> Result<T> {
    let path = plain_or_packed(path);
    let text = input::read_unpacked(&path, input::DOCUMENT).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text)
        .with_context(|| format!("{}: not {what}; the file is truncated or damaged", path.display()))
}

fn plain_or_packed(path: &Path) -> PathBuf {
    let mut packed = path.as_os_str().to_owned();
    packed.push(".gz");
    if !path.is_file() && Path::new(&packed).is_file() { packed.into() } else { path.to_owned() }
}

fn run_data(directory: &Path, record: &Record, steps: Option<&Steps>, name: String) -> Result<RunData> {
    let peak = |level: &str| record.stat(&format!("{level}_bytes.all.peak"));
    let peak_reserved = peak("reserved").filter(|bytes| *bytes > 0);
    let single = steps.filter(|_| record.text("sync") != Some("never")).map(|steps| steps.times()).unwrap_or_default();
    Ok(RunData {
        device: record.device.name.clone(),
        settings: record.settings_text(),
        notes: notes(directory, record, steps),
        step: record.pace().or_else(|| steps.and_then(|steps| steps.pace(record.text("sync") == Some("never")))),
        step_spread: quantile(&single, 0.1).zip(quantile(&single, 0.9)).map(<[f64; 2]>::from),
        per_step: account(record, |epoch| epoch.train_driver_calls.as_ref(), |epoch| epoch.steps as f64),
        per_epoch: account(record, |epoch| epoch.driver_calls.as_ref(), |_| 1.0),
        allocate: record.latency_of("allocate"),
        free: record.latency_of("deallocate"),
        peak_reserved,
        peak_requested: peak("requested"),
        utilisation: peak("active").zip(peak_reserved).map(|(active, reserved)| active as f64 / reserved as f64),
        accuracy: record.epochs.last().and_then(|epoch| epoch.val_accuracy),
        host: record.epochs.last().and_then(|last| Some(host(last.driver_calls.as_ref()?, last.wall_s * 1e9))),
        ledger: record.ledger(),
        steps: steps.map(Steps::curves),
        spectra: steps::read(&directory.join("latency.hlog"), record.simulated())?,
        losses: None,
        folder: directory.display().to_string(),
        name,
    })
}

/// Files with the events of a run, best first: an export contains segments, the trace does not.
const LOGS: [&str; 4] = ["snapshot.pickle", "snapshot.json", "trace.jsonl", "trace.jsonl.gz"];

/// The file with the events of a run, if it recorded them.
pub(super) fn events_of(directory: &Path) -> Option<PathBuf> {
    first_of(&LOGS, directory)
}

/// The trace of a run, if it exists.
pub(super) fn trace_of(directory: &Path) -> Option<PathBuf> {
    first_of(&LOGS[2..], directory)
}

fn first_of(names: &[&str], directory: &Path) -> Option<PathBuf> {
    names.iter().map(|name| directory.join(name)).find(|file| file.is_file())
}

fn notes(directory: &Path, record: &Record, steps: Option<&Steps>) -> Vec<String> {
    let mut out = Vec::new();
    if record.status != "finished" {
        let why = if record.status == "running" { "killed, or is still running," } else { &record.status };
        let epochs = record.epochs.len();
        out.push(format!("The run was {why} after epoch {epochs}; its record is incomplete."));
        out.extend(record.error.clone());
    }
    if steps.is_none() {
        out.push(format!("{} does not exist, so there are no curves over the steps.", record.step_losses));
    }
    if events_of(directory).is_none() {
        out.push("The run has no recorded operations, so there is no block map; run it with --trace.".to_owned());
    }
    out
}

/// The epochs from which values are computed: all after the first, or the only one.
fn warm(epochs: &[Epoch]) -> &[Epoch] {
    if epochs.len() > 1 { &epochs[1..] } else { epochs }
}

/// Driver calls per period in the epochs after the first; `None` if an epoch has no counts.
fn account<'r>(
    record: &'r Record,
    of: impl Fn(&'r Epoch) -> Option<&'r Calls>,
    periods: impl Fn(&Epoch) -> f64,
) -> Option<Account> {
    let epochs = warm(&record.epochs);
    let counted: Vec<&Calls> = epochs.iter().map(of).collect::<Option<_>>()?;
    if counted.iter().all(|calls| calls.is_empty()) {
        return None;
    }
    let periods = epochs.iter().map(periods).sum::<f64>().max(1.0);
    let mut sums: BTreeMap<&str, [f64; 3]> = BTreeMap::new();
    for (name, call) in counted.into_iter().flatten() {
        let sum = sums.entry(name).or_default();
        for (sum, value) in sum.iter_mut().zip([call.count, call.total_ns, call.blocked_ns]) {
            *sum += value as f64 / periods;
        }
    }
    let mut by_call: Vec<AccountRow> = (sums.into_iter().filter(|(_, [calls, ..])| *calls > 0.0))
        .map(|(call, [calls, total, blocked])| AccountRow { call: call.to_owned(), calls, total, blocked })
        .collect();
    by_call.sort_by(|a, b| b.total.total_cmp(&a.total));
    let sum = |value: fn(&AccountRow) -> f64| by_call.iter().map(value).sum();
    Some(Account { calls: sum(|row| row.calls), blocked: sum(|row| row.blocked), by_call })
}

/// Calls that reserve or release device memory. The analysis reads the same file.
const MEMORY: &[&str] = &include!("memory_calls.json");
/// Calls that only wait, or that wait for the data that they copy. The analysis reads the same file.
const WAITS: &[&str] = &include!("wait_calls.json");

/// The host's time in a span of `wall` ns: waiting in memory calls, working in memory calls, waiting elsewhere, launching kernels,
/// everything else.
fn host(calls: &Calls, wall: f64) -> [f64; 5] {
    let of = |name: &str, part: fn(&Call) -> u64| calls.get(name).map_or(0.0, |call| part(call) as f64);
    let total = |name: &str| of(name, |call| call.total_ns);
    let blocked = |name: &str| of(name, |call| call.blocked_ns);
    let in_memory: f64 = MEMORY.iter().map(|name| blocked(name)).sum();
    let memory: f64 = MEMORY.iter().map(|name| total(name) - blocked(name)).sum();
    let elsewhere = blocked("kernel_launch") + WAITS.iter().map(|name| total(name)).sum::<f64>();
    let launching = total("kernel_launch") - blocked("kernel_launch");
    let rest = (wall - in_memory - memory - elsewhere - launching).max(0.0);
    [in_memory, memory, elsewhere, launching, rest]
}

/// The quantile of some numbers at a share.
fn quantile(numbers: &[f64], share: f64) -> Option<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    // CAST: a position in the list.
    sorted.get((share * sorted.len().saturating_sub(1) as f64).round() as usize).copied()
}

/// A name for each run: its allocator, plus the settings that differ among runs with the same allocator.
fn names(records: &[Record]) -> Vec<String> {
    let allocators: Vec<String> = records.iter().map(Record::allocator).collect();
    let shared = |allocator: &String| allocators.iter().filter(|other| *other == allocator).count() > 1;
    let settings: Vec<Vec<(String, String)>> = records.iter().map(Record::settings_text).collect();
    let value = |run: usize, key: &str| settings[run].iter().find(|(known, _)| known == key).map(|(_, value)| value);
    let mut out: Vec<String> = Vec::new();
    for (run, allocator) in allocators.iter().enumerate() {
        let mut name = allocator.clone();
        if shared(allocator) {
            for (key, setting) in settings[run].iter().filter(|(key, _)| record::DISTINGUISHING.contains(&key.as_str()))
            {
                let differs = (0..records.len())
                    .any(|other| allocators[other] == *allocator && value(other, key) != Some(setting));
                if differs {
                    name += &format!(", {} {setting}", key.replace('_', " "));
                }
            }
        }
        let before = out.iter().filter(|other| **other == name || other.starts_with(&format!("{name} ("))).count();
        out.push(if before > 0 { format!("{name} ({})", before + 1) } else { name });
    }
    out
}

#[cfg(test)]
mod tests;
