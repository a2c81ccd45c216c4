//! Recorded runs of an experiment, cell by cell.

use crate::study::figures::{batches, blocked_share, read_summary, read_text, steady_epochs, step_time};
use crate::study::record::{EXPERIMENT, RUN, RUNS, read_json};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use vramlab::input::TABLE;

/// Calls of one kind, per batch.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Call {
    pub(crate) count: f64,
    /// Host time in them.
    pub(crate) total_s: f64,
    /// Seconds of it during which the host was blocked.
    pub(crate) blocked_s: f64,
}

/// A complete epoch.
#[derive(Clone, Debug)]
pub(crate) struct Epoch {
    pub(crate) wall_s: f64,
    /// Totals of the epoch.
    pub(crate) calls: BTreeMap<String, Call>,
}

/// One run.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) step_s: f64,
    /// Share of the last epoch during which the host was blocked.
    pub(crate) blocked_share: f64,
    /// Calls of the last epoch, per batch.
    pub(crate) calls: BTreeMap<String, Call>,
    /// The complete steady epochs, validation included.
    pub(crate) epochs: Vec<Epoch>,
    /// Driver allocations by epoch and step.
    pub(crate) allocations: Vec<((u64, u64), u64)>,
}

/// The finished runs of an experiment.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) name: String,
    /// Name of its spec.
    pub(crate) spec: String,
    /// Options in which the runs differ; their values name a cell.
    pub(crate) axes: Vec<String>,
    pub(crate) cells: BTreeMap<String, Vec<Measured>>,
}

impl Recorded {
    /// Reads an experiment's directory.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let name = folder.display().to_string();
        if !folder.join(EXPERIMENT).is_file() {
            bail!("{name} has no {EXPERIMENT}; name a directory that `experiments run` made");
        }
        let experiment = read_json(&folder.join(EXPERIMENT))?;
        let runs = experiment["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
        let axes = axes(runs);
        let mut cells: BTreeMap<String, Vec<Measured>> = BTreeMap::new();
        for run in runs {
            let id = run["id"].as_str().unwrap_or_default();
            let run_folder = folder.join(RUNS).join(id);
            if !run_folder.is_dir() || read_json(&run_folder.join(RUN))?["status"] != "done" {
                continue;
            }
            let label = axes.iter().map(|axis| text(&run["options"][axis])).collect::<Vec<String>>().join(" ");
            cells.entry(label).or_default().push(measured(&run_folder)?);
        }
        if cells.is_empty() {
            bail!("{name} has no finished run");
        }
        let spec = experiment["name"].as_str().unwrap_or_default().to_owned();
        Ok(Self { name, spec, axes, cells })
    }
}

/// Options for the length of a run. A step does not depend on them, and the simulated runs are shorter.
const LENGTH: [&str; 2] = ["epochs", "steps"];

/// Options that differ between runs, sorted, except the run's length. An option that only some runs have counts as
/// different.
fn axes(runs: &[Value]) -> Vec<String> {
    let mut values: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for run in runs {
        for (name, value) in run["options"].as_object().into_iter().flatten() {
            values.entry(name).or_default().push(text(value));
        }
    }
    values.retain(|name, _| !LENGTH.contains(name));
    for values in values.values_mut().filter(|values| values.len() < runs.len()) {
        values.push(text(&Value::Null));
    }
    let differs = |values: &Vec<String>| values.iter().any(|value| *value != values[0]);
    values.into_iter().filter(|(_, values)| differs(values)).map(|(name, _)| name.to_owned()).collect()
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn measured(folder: &Path) -> Result<Measured> {
    let summary = read_summary(folder)?;
    let here = || format!("{}: the summary has no finished epoch", folder.display());
    let last = steady_epochs(&summary).last().with_context(here)?;
    let batches = Some(batches(&summary, last)).filter(|batches| *batches > 0.0).with_context(here)?;
    let epoch = |epoch: &Value| Some(Epoch { wall_s: epoch["wall_s"].as_f64()?, calls: calls(epoch, 1.0) });
    Ok(Measured {
        step_s: step_time(&summary).with_context(here)?,
        blocked_share: blocked_share(last).with_context(here)?,
        calls: calls(last, batches),
        epochs: steady_epochs(&summary).iter().filter_map(epoch).collect(),
        allocations: allocations(folder)?,
    })
}

/// The calls of an epoch, each value divided by `parts`.
fn calls(epoch: &Value, parts: f64) -> BTreeMap<String, Call> {
    let call = |(name, totals): (&String, &Value)| {
        let of = |key: &str| totals[key].as_f64().unwrap_or(0.0) / parts;
        let call = Call { count: of("count"), total_s: of("total_ns") / 1e9, blocked_s: of("blocked_ns") / 1e9 };
        (name.clone(), call)
    };
    let calls = epoch["driver_calls"].as_object().into_iter().flatten().map(call);
    calls.filter(|(_, call)| call.count > 0.0).collect()
}

/// Driver allocations of every step; empty where the table of steps was not kept.
fn allocations(folder: &Path) -> Result<Vec<((u64, u64), u64)>> {
    if !["steps.csv", "steps.csv.gz"].iter().any(|name| folder.join(name).is_file()) {
        return Ok(Vec::new());
    }
    let text = read_text(folder, "steps.csv", TABLE)?;
    let step = |row: csv::Result<Step>| row.map(|step| ((step.epoch, step.step), step.driver_allocations));
    let steps: csv::Result<Vec<((u64, u64), u64)>> =
        csv::Reader::from_reader(text.as_bytes()).deserialize().map(step).collect();
    steps.with_context(|| format!("{}: the table of steps cannot be read", folder.display()))
}

/// The columns read from the table of steps.
#[derive(Deserialize)]
struct Step {
    epoch: u64,
    step: u64,
    driver_allocations: u64,
}
