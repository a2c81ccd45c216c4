//! Runs, as their records tell them: the figures by which they are compared, and the curves over their steps.

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

/// Runs on one page. A chart of more lines cannot be read, and a browser takes long to draw it.
const MOST: usize = 200;

/// A run as `runs.js` draws it. Times are in ns, memory in bytes; what a record does not say is absent.
#[derive(Debug, Serialize)]
pub(super) struct RunData {
    /// Its allocator, and where runs share one, the settings in which they differ.
    pub(super) name: String,
    pub(super) folder: String,
    device: String,
    settings: Vec<(String, String)>,
    notes: Vec<String>,
    /// Median time of a training step, and the times that a tenth and nine tenths of the steps stay below.
    step: Option<f64>,
    step_spread: Option<[f64; 2]>,
    /// Driver calls of one training step, and of one epoch with its validation; epochs after the first.
    per_step: Option<Account>,
    per_epoch: Option<Account>,
    /// Median and 99th percentile by operation, on the path that it takes most often.
    allocate: Option<[f64; 2]>,
    free: Option<[f64; 2]>,
    peak_reserved: Option<u64>,
    peak_requested: Option<u64>,
    /// The largest share of peak reserved memory that was in blocks.
    utilisation: Option<f64>,
    accuracy: Option<f64>,
    /// What the host did in the last epoch: parts that add up to it.
    host: Option<[f64; 5]>,
    /// Parts of reserved memory when it was at its peak, by name.
    ledger: BTreeMap<&'static str, u64>,
    steps: Option<steps::Curves>,
    spectra: Vec<steps::Spectrum>,
    /// What its losses say beside those of the first run of the same work.
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

/// The folders of runs that folders on the command line stand for: an experiment's are the first repeats of its training programs.
///
/// # Errors
/// An experiment that is damaged.
pub(super) fn folders(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.join("experiment.json").is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let runs = path.join("runs");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&runs).with_context(|| runs.display().to_string())? {
        let folder = entry.with_context(|| runs.display().to_string())?.path();
        let about = folder.join("run.json");
        if !about.is_file() {
            continue;
        }
        let about: Value = read_json(&about, "a run of an experiment")?;
        let trains = matches!(about["program"].as_str(), Some("trainer" | "pytorch"));
        if trains && about["status"] == "done" && about["repeat"] == 0 {
            found.push(folder);
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the records in these folders.
///
/// # Errors
/// One line that names the file and what is wrong with it.
pub(super) fn read(folders: &[PathBuf]) -> Result<Vec<RunData>> {
    anyhow::ensure!(
        folders.len() <= MOST,
        "{} runs are more than one page can show; name at most {MOST}",
        folders.len()
    );
    let records: Vec<Record> = folders.iter().map(|folder| Record::read(folder)).collect::<Result<_>>()?;
    let names = names(&records);
    let tables: Vec<Option<Steps>> =
        (folders.iter().zip(&records)).map(|(folder, record)| Steps::read(folder, record)).collect::<Result<_>>()?;
    let mut out = Vec::new();
    for (number, ((folder, record), steps)) in folders.iter().zip(&records).zip(&tables).enumerate() {
        let mut run = shown(folder, record, steps.as_ref(), names[number].clone())?;
        let first = (0..number).find(|first| records[*first].work() == record.work());
        if let Some((first, [ours, theirs])) =
            first.zip(steps.as_ref().zip(first.and_then(|at| tables[at].as_ref())).map(<[_; 2]>::from))
        {
            run.losses = ours.apart(theirs).map(|apart| format!("{} and {}: {apart}", run.name, names[first]));
        }
        out.push(run);
    }
    Ok(out)
}

/// A JSON document that a program wrote, plain or with `.gz` behind its name.
pub(super) fn read_json<T: serde::de::DeserializeOwned>(path: &Path, what: &str) -> Result<T> {
    let path = plain_or_packed(path);
    let text = input::read_unpacked(&path, input::DOCUMENT).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| format!("{}: not {what}; it was cut short or damaged", path.display()))
}

fn plain_or_packed(path: &Path) -> PathBuf {
    let mut packed = path.as_os_str().to_owned();
    packed.push(".gz");
    if !path.is_file() && Path::new(&packed).is_file() { packed.into() } else { path.to_owned() }
}

fn shown(folder: &Path, record: &Record, steps: Option<&Steps>, name: String) -> Result<RunData> {
    let peak = |level: &str| record.stat(&format!("{level}_bytes.all.peak"));
    let peak_reserved = peak("reserved").filter(|bytes| *bytes > 0);
    let single = steps.filter(|_| record.text("sync") != Some("never")).map(|steps| steps.times()).unwrap_or_default();
    Ok(RunData {
        device: record.device.name.clone(),
        settings: record.said(),
        notes: notes(folder, record, steps),
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
        spectra: steps::read(&folder.join("latency.hlog"), record.simulated())?,
        losses: None,
        folder: folder.display().to_string(),
        name,
    })
}

/// The events of a run in its folder, best first: an export names segments, the trace does not.
const LOGS: [&str; 4] = ["snapshot.pickle", "snapshot.json", "trace.jsonl", "trace.jsonl.gz"];

/// The file with the events of a run, if it recorded them.
pub(super) fn events_of(folder: &Path) -> Option<PathBuf> {
    first_of(&LOGS, folder)
}

/// The trace of a run, if it is there.
pub(super) fn trace_of(folder: &Path) -> Option<PathBuf> {
    first_of(&LOGS[2..], folder)
}

fn first_of(names: &[&str], folder: &Path) -> Option<PathBuf> {
    names.iter().map(|name| folder.join(name)).find(|file| file.is_file())
}

fn notes(folder: &Path, record: &Record, steps: Option<&Steps>) -> Vec<String> {
    let mut out = Vec::new();
    if record.status != "finished" {
        let why = if record.status == "running" { "killed, or is still running," } else { &record.status };
        let epochs = record.epochs.len();
        out.push(format!("The run was {why} after epoch {epochs}; this is what it recorded."));
        out.extend(record.error.clone());
    }
    if steps.is_none() {
        out.push(format!("{} was not kept, so there are no curves over its steps.", record.step_losses));
    }
    if events_of(folder).is_none() {
        out.push("Its operations were not recorded, so there is no block map: run it with --trace.".to_owned());
    }
    out
}

/// The epochs that figures are taken from: those after the first, or the only one.
fn warm(epochs: &[Epoch]) -> &[Epoch] {
    if epochs.len() > 1 { &epochs[1..] } else { epochs }
}

/// Driver calls per period of the epochs after the first; `None` where an epoch does not count them.
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

/// Calls that take memory from the device or give it back.
const MEMORY: [&str; 12] = [
    "mem_alloc",
    "mem_free",
    "mem_alloc_async",
    "mem_free_async",
    "pool_trim",
    "mem_address_reserve",
    "mem_address_free",
    "mem_create",
    "mem_map",
    "mem_set_access",
    "mem_unmap",
    "mem_release",
];
/// Calls that do nothing but wait, or that wait for what they read.
const WAITS: [&str; 4] = ["stream_synchronize", "device_synchronize", "event_synchronize", "copy_to_host"];

/// What the host did in a span of `wall` ns: waiting in calls for memory, these calls themselves, waiting elsewhere,
/// launching kernels, everything else.
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

/// The value that a share of the numbers stays at or below.
fn quantile(numbers: &[f64], share: f64) -> Option<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    // CAST: a position in the list.
    sorted.get((share * sorted.len().saturating_sub(1) as f64).round() as usize).copied()
}

/// A name for each run: its allocator, and where runs share one, the settings in which they differ.
fn names(records: &[Record]) -> Vec<String> {
    let arms: Vec<String> = records.iter().map(Record::arm).collect();
    let shared = |arm: &String| arms.iter().filter(|other| *other == arm).count() > 1;
    let said: Vec<Vec<(String, String)>> = records.iter().map(Record::said).collect();
    let value = |run: usize, key: &str| said[run].iter().find(|(known, _)| known == key).map(|(_, value)| value);
    let mut out: Vec<String> = Vec::new();
    for (run, arm) in arms.iter().enumerate() {
        let mut name = arm.clone();
        if shared(arm) {
            for (key, own) in said[run].iter().filter(|(key, _)| record::TELLING.contains(&key.as_str())) {
                let differs = (0..records.len()).any(|other| arms[other] == *arm && value(other, key) != Some(own));
                if differs {
                    name += &format!(", {} {own}", key.replace('_', " "));
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
