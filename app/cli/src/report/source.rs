//! Inputs of the page: recordings, and directories of runs that recorded their events.

use super::run::{Figure, Record, Steps, events_of, trace_of};
use super::timeline::{Mark, OriginNumbers, Stacks, Timeline};
use crate::history::Trace;
use crate::recording::Recording;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use vramlab::Selection;
use vramlab::histories::formats::jsonl_placements;
use vramlab::histories::replay::BlockPlace;

/// An input from the command line.
#[derive(Debug)]
pub(super) struct Input {
    /// The file with the events.
    pub(super) file: PathBuf,
    /// The directory of the run that recorded them.
    pub(super) run: Option<PathBuf>,
}

impl Input {
    /// The input at a path; `None` for a directory without events.
    pub(super) fn new(path: &Path) -> Option<Self> {
        if !path.is_dir() {
            return Some(Self { file: path.to_owned(), run: None });
        }
        events_of(path).map(|file| Self { file, run: Some(path.to_owned()) })
    }
}

/// A recording, ready for display and replay.
pub(super) struct Source {
    /// Its name on the command line.
    pub(super) name: String,
    pub(super) file: PathBuf,
    pub(super) timeline: Timeline,
    /// Number of events with unknown actions; they are omitted.
    pub(super) unknown_actions: u64,
    /// The trace to replay; `None` without events.
    pub(super) compiled: Option<Trace>,
    /// The analyzed GPU and the others' peaks, as lines; empty with one GPU.
    pub(super) gpus: Vec<String>,
    pub(super) stacks: Stacks,
    /// The numbers of the blocks' stacks and categories.
    pub(super) origins: OriginNumbers,
    /// Values from the record of a run.
    pub(super) figures: Vec<Figure>,
    /// The run's allocator.
    pub(super) allocator: Option<Selection>,
    /// The placement of each allocation, in order, if the log contains it.
    pub(super) served: Option<Vec<BlockPlace>>,
}

impl Source {
    /// From an input and its recording.
    ///
    /// # Errors
    /// The recording cannot be replayed, or the run's record is damaged.
    pub(super) fn new(input: &Input, recording: &Recording, limit: Option<u64>) -> Result<Self> {
        let mut origins = OriginNumbers::default();
        let mut out = Self {
            name: input.run.as_ref().unwrap_or(&input.file).display().to_string(),
            file: input.file.clone(),
            compiled: (!recording.events.is_empty()).then(|| recording.trace(limit)).transpose()?,
            gpus: recording.gpus.lines(),
            timeline: Timeline::new(recording, &mut origins),
            unknown_actions: recording.summary.unknown_actions,
            stacks: Stacks::new(&recording.origins, &origins),
            origins,
            figures: Vec::new(),
            allocator: None,
            served: None,
        };
        if let Some(directory) = &input.run {
            out.add_record(directory)?;
        }
        Ok(out)
    }

    /// Adds the values of a run's record.
    fn add_record(&mut self, directory: &Path) -> Result<()> {
        let record = Record::read(directory)?;
        self.allocator = record.text("alloc").and_then(|text| text.parse().ok());
        self.figures = record.figures();
        for (text, host_ns) in Steps::read(directory, &record)?.iter().flat_map(Steps::ends) {
            // CAST: a replayable recording has fewer than 2^32 events.
            let start = self.timeline.times_ns.partition_point(|time| *time <= host_ns) as u32;
            self.timeline.marks.push(Mark { kind: "step", text, start, end: None });
        }
        if let Some(trace) = trace_of(directory) {
            let served = jsonl_placements(&trace).with_context(|| trace.display().to_string())?;
            self.served = (served.len() == self.timeline.blocks.len()).then_some(served);
        }
        Ok(())
    }
}
