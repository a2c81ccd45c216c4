//! Writers: each takes events in order and ends with what was held.
//!
//! A file is written under another name and renamed when it is whole, so that nothing half-written looks whole.

use super::{Action, Event, MinimallocWriter, PerfettoWriter, RmmWriter, Segment, SnapshotWriter};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// A file that cannot be written, or events that its format cannot hold.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct WriteError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong. Part of the message, so not a source of its own.
    pub problem: WriteProblem,
}

/// What is wrong with writing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteProblem {
    /// The operating system refused.
    #[error("cannot be written: {0}")]
    Io(#[from] std::io::Error),
    /// Events that the format cannot hold.
    #[error("{0}")]
    Unfit(String),
}

/// Formats that histories are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Export {
    /// PyTorch's memory snapshot, for pytorch.org/memory_viz and `torch/cuda/_memory_viz.py`.
    Snapshot,
    /// The same as JSON.
    SnapshotJson,
    /// Chrome's trace events, for ui.perfetto.dev.
    Perfetto,
    /// RMM's log, for its replay benchmark.
    Rmm,
    /// minimalloc's table of buffers.
    Minimalloc,
}

impl Export {
    /// Every format.
    pub const ALL: [Export; 5] =
        [Export::Snapshot, Export::SnapshotJson, Export::Perfetto, Export::Rmm, Export::Minimalloc];

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Export::Snapshot => "snapshot",
            Export::SnapshotJson => "snapshot-json",
            Export::Perfetto => "perfetto",
            Export::Rmm => "rmm",
            Export::Minimalloc => "minimalloc",
        }
    }

    /// Name of the file in a run record.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Export::Snapshot => "snapshot.pickle",
            Export::SnapshotJson => "snapshot.json",
            Export::Perfetto => "perfetto.json",
            Export::Rmm => "rmm.csv",
            Export::Minimalloc => "minimalloc.csv",
        }
    }

    /// One line of help.
    #[must_use]
    pub fn summary(self) -> &'static str {
        match self {
            Export::Snapshot => "pickle for pytorch.org/memory_viz",
            Export::SnapshotJson => "the same as JSON",
            Export::Perfetto => "timeline for ui.perfetto.dev",
            Export::Rmm => "log for RMM's replay",
            Export::Minimalloc => "buffers and their lives for minimalloc",
        }
    }

    /// Whether the format has a place for such events; writers pass over the others.
    #[must_use]
    pub fn holds(self, action: Action) -> bool {
        match self {
            Export::Perfetto => true,
            Export::Snapshot | Export::SnapshotJson => action != Action::RecordUse,
            Export::Rmm => matches!(action, Action::Alloc | Action::FreeRequested | Action::Oom),
            Export::Minimalloc => matches!(action, Action::Alloc | Action::FreeCompleted),
        }
    }

    /// Begins a file at `path`, which is there once the writer has finished.
    ///
    /// # Errors
    /// [`WriteError`] when the file cannot be made.
    pub fn create(self, path: &Path) -> Result<Box<dyn TraceWriter>, WriteError> {
        Ok(match self {
            Export::Snapshot => Box::new(SnapshotWriter::pickle(path)?),
            Export::SnapshotJson => Box::new(SnapshotWriter::json(path)?),
            Export::Perfetto => Box::new(PerfettoWriter::create(path)?),
            Export::Rmm => Box::new(RmmWriter::create(path)?),
            Export::Minimalloc => Box::new(MinimallocWriter::create(path)?),
        })
    }
}

/// What a history ends with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ending<'a> {
    /// What was held.
    pub segments: &'a [Segment],
    /// Settings of the allocator.
    pub allocator_settings: Option<&'a serde_json::Map<String, serde_json::Value>>,
    /// Number of devices, if more than those that had events.
    pub devices: u16,
}

/// Takes the events of a history in order and makes a file of them.
pub trait TraceWriter {
    /// Takes the next event.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written or the format cannot hold it.
    fn event(&mut self, event: &Event) -> Result<(), WriteError>;

    /// Takes something that the host did, such as a driver call, for formats that show it; the others pass over it.
    /// Slices of one track must not overlap unless one holds the other.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written.
    fn slice(&mut self, _track: &str, _name: &str, _start_ns: u64, _total_ns: u64) -> Result<(), WriteError> {
        Ok(())
    }

    /// Completes the file.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written.
    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<(), WriteError>;
}

/// A file that appears when it is whole.
#[derive(Debug)]
pub(super) struct Fresh {
    path: PathBuf,
    part: PathBuf,
    /// `None` once it is renamed.
    out: Option<BufWriter<File>>,
}

impl Fresh {
    pub(super) fn create(path: &Path) -> Result<Self, WriteError> {
        let failed = |error: std::io::Error| WriteError { path: path.to_owned(), problem: error.into() };
        let name = path.file_name().ok_or_else(|| failed(std::io::ErrorKind::InvalidFilename.into()))?;
        let part = path.with_file_name(format!(".{}.part", name.to_string_lossy()));
        let file = File::create(&part).map_err(failed)?;
        Ok(Self { path: path.to_owned(), part, out: Some(BufWriter::with_capacity(1 << 16, file)) })
    }

    pub(super) fn error(&self, problem: impl Into<WriteProblem>) -> WriteError {
        WriteError { path: self.path.clone(), problem: problem.into() }
    }

    pub(super) fn unfit(&self, text: impl Into<String>) -> WriteError {
        self.error(WriteProblem::Unfit(text.into()))
    }

    /// Writes with a closure whose error gets the file's name.
    pub(super) fn put(
        &mut self,
        write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
    ) -> Result<(), WriteError> {
        let result = match &mut self.out {
            Some(out) => write(out),
            None => Ok(()),
        };
        result.map_err(|error| self.error(error))
    }

    /// Gives the file its name.
    pub(super) fn finish(mut self) -> Result<(), WriteError> {
        self.put(|out| out.flush())?;
        self.out = None;
        std::fs::rename(&self.part, &self.path).map_err(|error| self.error(error))
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            // Nobody is left to hear of a failure; the name says that it is a part.
            let _ = std::fs::remove_file(&self.part);
        }
    }
}
