//! Writers: each takes events in order and ends with what was held.
//!
//! Files are written by [`output`](vramlab_device::output), so that nothing half-written looks whole.

use super::{BlockPlace, Event, Origin, Origins, Segment};
use std::path::PathBuf;
use vramlab_device::output::{OutputError, OutputFile, OutputProblem};

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
    /// The file could not be written, or cannot be at all.
    #[error(transparent)]
    Output(OutputProblem),
    /// Events that the format cannot hold.
    #[error("{0}")]
    Unfit(String),
}

impl From<OutputError> for WriteError {
    fn from(error: OutputError) -> Self {
        Self { path: error.path, problem: WriteProblem::Output(error.problem) }
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
    /// Annotations, and where blocks and segments came from that were held, for formats that have a place for that.
    pub origins: Option<&'a Origins>,
}

/// Takes the events of a history in order and makes a file of them.
pub trait TraceWriter {
    /// Takes the next event.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written or the format cannot hold it.
    fn event(&mut self, event: &Event) -> Result<(), WriteError>;

    /// Takes the next event and where it came from, for formats that have a place for that; the others leave it out.
    ///
    /// # Errors
    /// Those of [`event`](Self::event).
    fn event_from(&mut self, event: &Event, _origin: Origin, _origins: &Origins) -> Result<(), WriteError> {
        self.event(event)
    }

    /// Takes something that the host did, such as a driver call, for formats that show it; the others pass over it.
    /// Slices of one track must not overlap unless one holds the other.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written.
    fn slice(&mut self, _track: &str, _name: &str, _start_ns: u64, _total_ns: u64) -> Result<(), WriteError> {
        Ok(())
    }

    /// Says where in the program the next event comes from, for formats that show it: a name, and arguments such as the step
    /// and the layer. The others pass over it.
    fn say(&mut self, _name: &str, _arguments: &[(&'static str, &str)]) {}

    /// Says how each allocation of a device was served, in their order, for formats that show it; the others pass over it.
    fn served(&mut self, _device: u16, _places: Vec<BlockPlace>) {}

    /// Events so far that the format [holds](super::Export::holds) but that had no place in this file: frees of blocks from
    /// before the first event, in a log that has to begin with its program.
    fn passed_over(&self) -> u64 {
        0
    }

    /// Events so far of an action that the format does not [hold](super::Export::holds) and that were written all the same: the
    /// completion of a free stands for a request that was not recorded.
    fn stood_in(&self) -> u64 {
        0
    }

    /// Completes the file.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written.
    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<(), WriteError>;
}

/// A history's file, whose errors are those of a writer.
#[derive(Debug)]
pub(super) struct HistoryFile(OutputFile);

impl HistoryFile {
    pub(super) fn new(file: OutputFile) -> Self {
        Self(file)
    }

    pub(super) fn unfit(&self, text: impl Into<String>) -> WriteError {
        WriteError { path: self.0.path().to_owned(), problem: WriteProblem::Unfit(text.into()) }
    }

    /// Writes with a closure whose error gets the file's name.
    pub(super) fn put(&mut self, write: impl FnOnce(&mut OutputFile) -> std::io::Result<()>) -> Result<(), WriteError> {
        write(&mut self.0).map_err(|error| self.0.failed(error).into())
    }

    /// Gives the file its name.
    pub(super) fn finish(self) -> Result<(), WriteError> {
        Ok(self.0.finish()?)
    }
}
