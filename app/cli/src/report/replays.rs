//! Replays and capacities of an experiment: one value for each allocator and recording, for `runs.js`.

use super::run::read_json;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// The replays of one variant of an experiment.
#[derive(Debug, Serialize)]
pub(super) struct ReplaysData {
    pub(super) name: String,
    question: String,
    pub(super) rows: Vec<ReplayRow>,
}

/// The result of one replay or capacity search. Unknown values are absent.
#[derive(Debug, Serialize)]
pub(super) struct ReplayRow {
    /// The allocator with its settings, and the options that the spec varies.
    alloc: String,
    history: String,
    #[serde(flatten)]
    output: Output,
}

/// The displayed keys of `vramlab replay --json` and `vramlab capacity --json`.
#[derive(Debug, Serialize, Deserialize)]
struct Output {
    #[serde(skip_serializing)]
    alloc: Option<String>,
    #[serde(skip_serializing)]
    trace: String,
    allocator: String,
    peak_reserved_bytes: Option<u64>,
    lower_bound_bytes: Option<u64>,
    max_live_bytes: Option<u64>,
    /// The smallest memory.
    capacity_bytes: Option<u64>,
    num_alloc_retries: Option<u64>,
    failed_allocations: Option<u64>,
    simulated_s: Option<f64>,
    driver_calls: Option<Map<String, Value>>,
}

/// The keys of a run's record used here.
#[derive(Deserialize)]
struct Run {
    #[serde(default)]
    arm: String,
    program: String,
    status: String,
    repeat: u64,
    #[serde(default)]
    options: Map<String, Value>,
}

/// The first repetitions of an experiment's replays and capacity searches, by variant; empty for other directories.
///
/// # Errors
/// A file is damaged.
pub(super) fn read(experiment: &Path) -> Result<Vec<ReplaysData>> {
    let record = experiment.join("experiment.json");
    if !record.is_file() {
        return Ok(Vec::new());
    }
    let record: Value = read_json(&record, "an experiment")?;
    let runs = experiment.join("runs");
    let path = || runs.display().to_string();
    let entries = std::fs::read_dir(&runs).with_context(path)?;
    let mut directories = entries.map(|entry| Ok(entry.with_context(path)?.path())).collect::<Result<Vec<_>>>()?;
    directories.sort();
    let mut variants: Vec<ReplaysData> = Vec::new();
    for directory in directories.iter().filter(|directory| directory.join("run.json").is_file()) {
        let run: Run = read_json(&directory.join("run.json"), "a run of an experiment")?;
        if !matches!(run.program.as_str(), "replay" | "capacity") || run.status != "done" || run.repeat > 0 {
            continue;
        }
        let result = directory.join("result.json");
        let outputs = match read_json(&result, "the result of a replay")? {
            Value::Array(rows) => rows,
            row => vec![row],
        };
        let rows = outputs.into_iter().map(|output| Ok(row(serde_json::from_value(output)?, &run.options)));
        let rows: Vec<ReplayRow> = rows.collect::<Result<_>>().with_context(|| result.display().to_string())?;
        let name = format!("{}, {}", record["name"].as_str().unwrap_or("experiment"), run.arm);
        let variant = variants.iter().position(|variant| variant.name == name).unwrap_or_else(|| {
            let question = record["question"].as_str().unwrap_or_default().to_owned();
            variants.push(ReplaysData { name, question, rows: Vec::new() });
            variants.len() - 1
        });
        variants[variant].rows.extend(rows);
    }
    Ok(variants)
}

fn row(output: Output, options: &Map<String, Value>) -> ReplayRow {
    let mut alloc = output.alloc.clone().unwrap_or_else(|| output.allocator.clone());
    for (key, value) in options.iter().filter(|(key, _)| !["alloc", "history"].contains(&key.as_str())) {
        // The allocator's name contains its settings.
        if !alloc.contains(&format!("{}=", key.replace('-', "_"))) {
            alloc += &format!(", {key} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
    }
    let name = output.trace.strip_suffix(".xz").or_else(|| output.trace.strip_suffix(".gz")).unwrap_or(&output.trace);
    ReplayRow { alloc, history: name.strip_suffix(".pickle").unwrap_or(name).to_owned(), output }
}
