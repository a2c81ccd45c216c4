//! The formats that histories are written in.

use super::{Action, MinimallocWriter, PerfettoWriter, RmmWriter, SnapshotWriter, TraceWriter, WriteError};
use serde::Serialize;
use std::path::Path;
use vramlab_device::output::{Existing, OutputFile};

/// Formats that histories are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Export {
    /// PyTorch's memory snapshot, for pytorch.org/memory_viz and `torch/cuda/_memory_viz.py`.
    Snapshot,
    /// PyTorch's memory snapshot as JSON.
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

    /// Name on the command line, name of the file in a run record, and one line of help.
    fn texts(self) -> [&'static str; 3] {
        match self {
            Export::Snapshot => ["snapshot", "snapshot.pickle", "pickle for pytorch.org/memory_viz"],
            Export::SnapshotJson => ["snapshot-json", "snapshot.json", "the same as JSON"],
            Export::Perfetto => ["perfetto", "perfetto.json", "timeline for ui.perfetto.dev"],
            Export::Rmm => ["rmm", "rmm.csv", "log for RMM's replay"],
            Export::Minimalloc => ["minimalloc", "minimalloc.csv", "buffers and their lives for minimalloc"],
        }
    }

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.texts()[0]
    }

    /// Name of the file in a run record.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        self.texts()[1]
    }

    /// One line of help.
    #[must_use]
    pub fn summary(self) -> &'static str {
        self.texts()[2]
    }

    /// Whether the format has a place for such events; writers pass over the others.
    #[must_use]
    pub fn holds(self, action: Action) -> bool {
        match self {
            Export::Perfetto => true,
            Export::Snapshot | Export::SnapshotJson => SnapshotWriter::holds(action),
            Export::Rmm => matches!(action, Action::Alloc | Action::FreeRequested | Action::Oom),
            Export::Minimalloc => MinimallocWriter::holds(action),
        }
    }

    /// Begins a file at `path`, which is there once the writer has finished. One that is there is replaced.
    ///
    /// # Errors
    /// [`WriteError`] when the file cannot be made.
    pub fn create(self, path: &Path) -> Result<Box<dyn TraceWriter>, WriteError> {
        self.begin(OutputFile::create(path, Existing::Replace)?)
    }

    /// Begins a history in a file.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn begin(self, file: OutputFile) -> Result<Box<dyn TraceWriter>, WriteError> {
        Ok(match self {
            Export::Snapshot => Box::new(SnapshotWriter::pickle(file)?),
            Export::SnapshotJson => Box::new(SnapshotWriter::json(file)?),
            Export::Perfetto => Box::new(PerfettoWriter::begin(file)?),
            Export::Rmm => Box::new(RmmWriter::begin(file)?),
            Export::Minimalloc => Box::new(MinimallocWriter::begin(file)?),
        })
    }
}
