//! Replays and capacities of an experiment: a figure for each allocator and history, as `replays.js` draws them.

use super::run::read_json;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// The replays of one arm of an experiment.
#[derive(Debug, Serialize)]
pub(super) struct ReplaysData {
    pub(super) name: String,
    question: String,
    pub(super) rows: Vec<ReplayRow>,
}

/// What one replay, or one search for a capacity, came to. What it does not say is absent.
#[derive(Debug, Serialize)]
pub(super) struct ReplayRow {
    /// The allocator with its settings, and how it was replayed where the spec varies that.
    alloc: String,
    history: String,
    #[serde(flatten)]
    told: Told,
}

/// The keys of `vramlab replay --json` and `vramlab capacity --json` that are shown.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
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

/// The record of a run, as far as it is looked at here.
#[derive(Deserialize)]
struct About {
    #[serde(default)]
    arm: String,
    program: String,
    status: String,
    repeat: u64,
    #[serde(default)]
    options: Map<String, Value>,
}

/// The first repeats of an experiment's replays and capacities, arm by arm; none in a folder of another kind.
///
/// # Errors
/// A file that is damaged.
pub(super) fn read(experiment: &Path) -> Result<Vec<ReplaysData>> {
    let about = experiment.join("experiment.json");
    if !about.is_file() {
        return Ok(Vec::new());
    }
    let about: Value = read_json(&about, "an experiment")?;
    let runs = experiment.join("runs");
    let said = || runs.display().to_string();
    let entries = std::fs::read_dir(&runs).with_context(said)?;
    let mut folders = entries.map(|entry| Ok(entry.with_context(said)?.path())).collect::<Result<Vec<_>>>()?;
    folders.sort();
    let mut arms: Vec<ReplaysData> = Vec::new();
    for folder in folders.iter().filter(|folder| folder.join("run.json").is_file()) {
        let run: About = read_json(&folder.join("run.json"), "a run of an experiment")?;
        if !matches!(run.program.as_str(), "replay" | "capacity") || run.status != "done" || run.repeat > 0 {
            continue;
        }
        let result = folder.join("result.json");
        let told = match read_json(&result, "what a replay came to")? {
            Value::Array(rows) => rows,
            row => vec![row],
        };
        let rows = told.into_iter().map(|one| Ok(row(serde_json::from_value(one)?, &run.options)));
        let rows: Vec<ReplayRow> = rows.collect::<Result<_>>().with_context(|| result.display().to_string())?;
        let name = format!("{}, {}", about["name"].as_str().unwrap_or("experiment"), run.arm);
        let found = arms.iter().position(|arm| arm.name == name).unwrap_or_else(|| {
            let question = about["question"].as_str().unwrap_or_default().to_owned();
            arms.push(ReplaysData { name, question, rows: Vec::new() });
            arms.len() - 1
        });
        arms[found].rows.extend(rows);
    }
    Ok(arms)
}

fn row(told: Told, options: &Map<String, Value>) -> ReplayRow {
    let mut alloc = told.alloc.clone().unwrap_or_else(|| told.allocator.clone());
    for (key, value) in options.iter().filter(|(key, _)| !["alloc", "history"].contains(&key.as_str())) {
        // Settings of the allocator stand in its name.
        if !alloc.contains(&format!("{}=", key.replace('-', "_"))) {
            alloc += &format!(", {key} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
    }
    let named = told.trace.strip_suffix(".xz").or_else(|| told.trace.strip_suffix(".gz")).unwrap_or(&told.trace);
    ReplayRow { alloc, history: named.strip_suffix(".pickle").unwrap_or(named).to_owned(), told }
}
