//! The list of formats; each file that reads or writes a format has an entry.
//!
//! To add a format, add a file with its entry, and its name here.

use super::input::Input;
use super::summary::Receiver;
use super::{
    Action, ReadError, ReadOptions, Summary, TraceWriter, WriteError, jsonl, minimalloc, pickle, rmm, snapshot_json,
    stalloc, write_perfetto, write_snapshot,
};
use serde::Serialize;
use std::path::Path;
use vramlab_device::output::{Existing, OutputFile};

/// A reader.
pub(super) struct Reader {
    /// Name in reports.
    pub(super) name: &'static str,
    /// Whether a file with this beginning is of the format.
    pub(super) begins: fn(&Start<'_>) -> bool,
    /// Reads a file.
    pub(super) read: fn(&mut Input<'_>, &ReadOptions, &mut Receiver<'_>) -> Result<Summary, ReadError>,
    /// Whether it is PyTorch's snapshot: it contains the segments at the end, and a truncated one is read as far as possible.
    pub(super) snapshot: bool,
}

/// The beginning of a file.
pub(super) struct Start<'a> {
    /// Raw bytes.
    pub(super) bytes: &'a [u8],
    /// As text, without leading white space; the last line may be truncated.
    pub(super) text: &'a str,
}

impl<'a> Start<'a> {
    /// The first line.
    pub(super) fn header(&self) -> &'a str {
        self.text.lines().next().unwrap_or_default()
    }
}

/// Formats of recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// PyTorch's memory snapshot of `torch.cuda.memory._dump_snapshot`.
    SnapshotPickle,
    /// Our own trace, of `trainer --trace`.
    Jsonl,
    /// PyTorch's memory snapshot as JSON.
    SnapshotJson,
    /// RMM's log.
    RmmCsv,
    /// minimalloc's table of buffers, which is read completely before the first event.
    MinimallocCsv,
    /// STAlloc's trace.
    Stalloc,
}

impl Format {
    /// Every format, in the order of detection.
    pub const ALL: [Format; 6] = [
        Format::SnapshotPickle,
        Format::Jsonl,
        Format::SnapshotJson,
        Format::RmmCsv,
        Format::MinimallocCsv,
        Format::Stalloc,
    ];

    pub(super) fn reader(self) -> &'static Reader {
        match self {
            Format::SnapshotPickle => &pickle::READER,
            Format::Jsonl => &jsonl::READER,
            Format::SnapshotJson => &snapshot_json::READER,
            Format::RmmCsv => &rmm::READER,
            Format::MinimallocCsv => &minimalloc::READER,
            Format::Stalloc => &stalloc::READER,
        }
    }

    /// Name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.reader().name
    }

    /// Whether it is PyTorch's memory snapshot.
    #[must_use]
    pub fn is_snapshot(self) -> bool {
        self.reader().snapshot
    }
}

/// A writer.
pub(super) struct Writer {
    /// Name on the command line.
    pub(super) name: &'static str,
    /// Name of the file in a run record.
    pub(super) file_name: &'static str,
    /// One line of help.
    pub(super) summary: &'static str,
    /// Whether the format has events of an action.
    pub(super) holds: fn(Action) -> bool,
    /// Begins a recording in a file.
    pub(super) begin: fn(OutputFile) -> Result<Box<dyn TraceWriter>, WriteError>,
}

/// Formats for export.
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

    fn writer(self) -> &'static Writer {
        match self {
            Export::Snapshot => &write_snapshot::PICKLE,
            Export::SnapshotJson => &write_snapshot::JSON,
            Export::Perfetto => &write_perfetto::WRITER,
            Export::Rmm => &rmm::WRITER,
            Export::Minimalloc => &minimalloc::WRITER,
        }
    }

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.writer().name
    }

    /// Name of the file in a run record.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        self.writer().file_name
    }

    /// One line of help.
    #[must_use]
    pub fn summary(self) -> &'static str {
        self.writer().summary
    }

    /// Whether the format has events of an action; writers skip the others.
    #[must_use]
    pub fn holds(self, action: Action) -> bool {
        (self.writer().holds)(action)
    }

    /// Begins a file at `path`, which appears when the writer has finished, and replaces an existing one.
    ///
    /// # Errors
    /// [`WriteError`] when the file cannot be created.
    pub fn create(self, path: &Path) -> Result<Box<dyn TraceWriter>, WriteError> {
        self.begin(OutputFile::create(path, Existing::Replace)?)
    }

    /// Begins a recording in a file.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn begin(self, file: OutputFile) -> Result<Box<dyn TraceWriter>, WriteError> {
        (self.writer().begin)(file)
    }
}
