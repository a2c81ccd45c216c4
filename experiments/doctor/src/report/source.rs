//! What the page is made from: histories, and the folders of runs that recorded one.

use super::stacks::{Known, Stacks};
use super::timeline::{Mark, Timeline};
use crate::recording::Recording;
use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use vramlab::backends::CachingSettings;
use vramlab::histories::formats::jsonl_placements;
use vramlab::histories::memory::Peaks;
use vramlab::histories::replay::{BlockPlace, History};
use vramlab::{Bytes, Selection};

/// The events of a run in its folder, best first: an export names segments, the trace does not.
const LOGS: [&str; 4] = ["snapshot.pickle", "snapshot.json", "trace.jsonl", "trace.jsonl.gz"];

/// Something that the command line names.
#[derive(Debug)]
pub(super) enum Input {
    /// A file with a history.
    History(PathBuf),
    /// A run that recorded its events, and the file that has them.
    Run { folder: PathBuf, log: PathBuf },
}

/// The events in the folder of a run, if it recorded them.
fn log_of(folder: &Path) -> Option<PathBuf> {
    LOGS.iter().map(|name| folder.join(name)).find(|log| log.is_file())
}

/// Whether a run recorded its events.
pub(super) fn has_events(folder: &Path) -> bool {
    log_of(folder).is_some()
}

impl Input {
    /// What a path stands for; `None` for a folder without events.
    pub(super) fn of(path: &Path) -> Option<Self> {
        if !path.is_dir() {
            return Some(Self::History(path.to_owned()));
        }
        log_of(path).map(|log| Self::Run { folder: path.to_owned(), log })
    }

    /// The file with the events.
    pub(super) fn file(&self) -> &Path {
        match self {
            Self::History(file) | Self::Run { log: file, .. } => file,
        }
    }
}

/// A figure with its name, for the table over all histories.
pub(super) type Figure = (&'static str, String);

/// A history, ready to be shown and replayed.
pub(super) struct Source {
    /// As the command line names it.
    pub(super) name: String,
    pub(super) file: PathBuf,
    pub(super) timeline: Timeline,
    /// Events of actions that are not known, which were left out.
    pub(super) unknown_actions: u64,
    pub(super) history: History,
    pub(super) settings: CachingSettings,
    pub(super) as_recorded: Option<Peaks>,
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
        let mut source = history(input.file(), recording, limit)?;
        if let Input::Run { folder, .. } = input {
            source.name = folder.display().to_string();
            source.add_record(folder)?;
        }
        Ok(source)
    }

    /// Takes over what a run's record says.
    fn add_record(&mut self, folder: &Path) -> Result<()> {
        let path = folder.join("summary.json");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let record: Value = serde_json::from_str(&text)
            .with_context(|| format!("{}: is no record of a run; it was cut short or damaged", path.display()))?;
        self.allocator = record["settings"]["alloc"].as_str().and_then(|text| text.parse().ok());
        self.figures = record_figures(&record);
        self.timeline.marks.extend(steps(&folder.join("steps.csv"), &self.timeline)?);
        let trace = LOGS[2..].iter().map(|name| folder.join(name)).find(|trace| trace.is_file());
        if let Some(trace) = trace {
            let served = jsonl_placements(&trace).with_context(|| trace.display().to_string())?;
            self.served = (served.len() == self.timeline.blocks.len()).then_some(served);
        }
        Ok(())
    }
}

fn history(file: &Path, recording: &Recording, limit: Option<u64>) -> Result<Source> {
    let compiled = recording.compiled(|_| limit)?;
    let mut known = Known::default();
    let timeline = Timeline::of(recording, &mut known);
    Ok(Source {
        name: file.display().to_string(),
        file: file.to_owned(),
        timeline,
        as_recorded: compiled.as_recorded,
        unknown_actions: recording.summary.unknown_actions,
        history: compiled.history,
        settings: compiled.settings,
        places: Stacks::of(&recording.origins, &known),
        known,
        figures: Vec::new(),
        allocator: None,
        served: None,
    })
}

/// The headline figures of a run's record. What it does not say is left out.
fn record_figures(record: &Value) -> Vec<Figure> {
    let mut out: Vec<Figure> = Vec::new();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let bytes = |value: &Value| value.as_u64().map(|bytes| Bytes(bytes).to_string());
    let mut add = |name, value: Option<String>| out.extend(value.map(|value| (name, value)));
    add("allocator", text(&record["settings"]["alloc"]).or_else(|| text(&record["settings"]["allocator"])));
    add("device", text(&record["device"]["name"]));
    add("data", text(&record["dataset"]["name"]));
    add("status", text(&record["status"]));
    let epochs = record["epochs"].as_array().map_or(&[][..], Vec::as_slice);
    if let Some(last) = epochs.last() {
        add("epochs", Some(epochs.len().to_string()));
        let step = last["wall_s"].as_f64().zip(last["steps"].as_f64().filter(|steps| *steps > 0.0));
        add("mean step, last epoch", step.map(|(wall, steps)| format!("{:.1} us", 1e6 * wall / steps)));
        add("validation accuracy", last["val_accuracy"].as_f64().map(|share| format!("{:.2} %", 100.0 * share)));
    }
    let stats = &record["allocator_stats"];
    add("peak reserved, whole run", bytes(&stats["reserved_bytes.all.peak"]));
    add("peak active, whole run", bytes(&stats["active_bytes.all.peak"]));
    add("peak requested, whole run", bytes(&stats["requested_bytes.all.peak"]));
    out
}

/// A line where each step ends, by the run's clock.
fn steps(path: &Path, timeline: &Timeline) -> Result<Vec<Mark>> {
    #[derive(Deserialize)]
    struct Row {
        epoch: u64,
        step: u64,
        host_ns: u64,
    }
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let mut rows = csv::Reader::from_path(path).with_context(|| path.display().to_string())?;
    let mut out = Vec::new();
    for row in rows.deserialize() {
        let Row { epoch, step, host_ns } = row.with_context(|| path.display().to_string())?;
        // CAST: a history that can be replayed has fewer than 2^32 events.
        let start = timeline.times_ns.partition_point(|time| *time <= host_ns) as u32;
        out.push(Mark { kind: "step", text: format!("end of step {step} of epoch {epoch}"), start, end: None });
    }
    Ok(out)
}
