//! What the page is made from: histories, and the folders of runs that recorded one.

use super::run::{Figure, Record, Steps, events_of, trace_of};
use super::timeline::{Known, Mark, Stacks, Timeline};
use crate::history::Compiled;
use crate::recording::Recording;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use vramlab::Selection;
use vramlab::histories::formats::jsonl_placements;
use vramlab::histories::replay::BlockPlace;

/// A history that the command line names.
#[derive(Debug)]
pub(super) struct Input {
    /// The file with the events.
    pub(super) file: PathBuf,
    /// The folder of the run that recorded them.
    pub(super) run: Option<PathBuf>,
}

impl Input {
    /// What a path stands for; `None` for a folder without events.
    pub(super) fn of(path: &Path) -> Option<Self> {
        if !path.is_dir() {
            return Some(Self { file: path.to_owned(), run: None });
        }
        events_of(path).map(|file| Self { file, run: Some(path.to_owned()) })
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
        if let Some(trace) = trace_of(folder) {
            let served = jsonl_placements(&trace).with_context(|| trace.display().to_string())?;
            self.served = (served.len() == self.timeline.blocks.len()).then_some(served);
        }
        Ok(())
    }
}
