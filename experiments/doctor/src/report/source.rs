//! What the page is made from: histories, and the folders of runs that recorded one.

use super::run::{Figure, Record, Steps, read_json};
use super::timeline::{Known, Mark, Stacks, Timeline};
use crate::history::Compiled;
use crate::recording::Recording;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use vramlab::Selection;
use vramlab::histories::formats::jsonl_placements;
use vramlab::histories::replay::BlockPlace;

/// The events of a run in its folder, best first: an export names segments, the trace does not.
const LOGS: [&str; 4] = ["snapshot.pickle", "snapshot.json", "trace.jsonl", "trace.jsonl.gz"];

/// A history that the command line names.
#[derive(Debug)]
pub(super) struct Input {
    /// The file with the events.
    pub(super) file: PathBuf,
    /// The folder of the run that recorded them.
    pub(super) run: Option<PathBuf>,
}

/// The first of these files that is in a folder.
fn first_of(names: &[&str], folder: &Path) -> Option<PathBuf> {
    names.iter().map(|name| folder.join(name)).find(|file| file.is_file())
}

/// Whether a run recorded its events.
pub(super) fn has_events(folder: &Path) -> bool {
    first_of(&LOGS, folder).is_some()
}

impl Input {
    /// What a path stands for; `None` for a folder without events.
    pub(super) fn of(path: &Path) -> Option<Self> {
        if !path.is_dir() {
            return Some(Self { file: path.to_owned(), run: None });
        }
        first_of(&LOGS, path).map(|file| Self { file, run: Some(path.to_owned()) })
    }
}

/// A history, ready to be shown and replayed.
pub(super) struct Source {
    /// As the command line names it.
    pub(super) name: String,
    pub(super) file: PathBuf,
    pub(super) timeline: Timeline,
    /// Events of actions that are not known, which were left out.
    pub(super) unknown_actions: u64,
    /// What is replayed; `None` where no events were recorded.
    pub(super) compiled: Option<Compiled>,
    /// Which GPU it is, and what the others came to; empty where there are no others.
    pub(super) gpus: Vec<String>,
    pub(super) places: Stacks,
    /// The numbers of what blocks come from.
    pub(super) known: Known,
    /// What the record of a run says of it.
    pub(super) figures: Vec<Figure>,
    /// The allocator that a run had.
    pub(super) allocator: Option<Selection>,
    /// How each allocation was served, in order, where the log says it.
    pub(super) served: Option<Vec<BlockPlace>>,
}

impl Source {
    /// What is to be shown of an input, which was read.
    ///
    /// # Errors
    /// Those of compiling a history; what is wrong with a run's record.
    pub(super) fn of(input: &Input, recording: &Recording, limit: Option<u64>) -> Result<Self> {
        let mut known = Known::default();
        let mut out = Self {
            name: input.run.as_ref().unwrap_or(&input.file).display().to_string(),
            file: input.file.clone(),
            compiled: (!recording.events.is_empty()).then(|| recording.compiled(|_| limit)).transpose()?,
            gpus: recording.gpus.lines(),
            timeline: Timeline::of(recording, &mut known),
            unknown_actions: recording.summary.unknown_actions,
            places: Stacks::of(&recording.origins, &known),
            known,
            figures: Vec::new(),
            allocator: None,
            served: None,
        };
        if let Some(folder) = &input.run {
            out.add_record(folder)?;
        }
        Ok(out)
    }

    /// Takes over what a run's record says.
    fn add_record(&mut self, folder: &Path) -> Result<()> {
        let record = Record::read(folder)?;
        self.allocator = record.text("alloc").and_then(|text| text.parse().ok());
        self.figures = record.figures();
        for (text, host_ns) in Steps::read(folder, &record)?.iter().flat_map(Steps::ends) {
            // CAST: a history that can be replayed has fewer than 2^32 events.
            let start = self.timeline.times_ns.partition_point(|time| *time <= host_ns) as u32;
            self.timeline.marks.push(Mark { kind: "step", text, start, end: None });
        }
        if let Some(trace) = first_of(&LOGS[2..], folder) {
            let served = jsonl_placements(&trace).with_context(|| trace.display().to_string())?;
            self.served = (served.len() == self.timeline.blocks.len()).then_some(served);
        }
        Ok(())
    }
}

// Replays and capacities of an experiment: a figure for each allocator and history, as `replays.js` draws them.

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
