//! Writers: each takes events in order and ends with the final segments.
//!
//! Files are written through [`output`](vramlab_device::output), so that no partial file appears.

use super::{BlockPlace, Event, Origin, Origins, Segment};
use std::path::PathBuf;
use vramlab_device::output::{OutputError, OutputFile, OutputProblem};

/// A file that cannot be written, or events that its format cannot hold.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct WriteError {
    /// The file.
    pub path: PathBuf,
    /// The fault. Part of the message, so not a source of its own.
    pub problem: WriteProblem,
}

/// The fault in writing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteProblem {
    /// The file could not be written.
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

/// The end of a recording.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ending<'a> {
    /// Segments at the end.
    pub segments: &'a [Segment],
    /// Settings of the allocator.
    pub allocator_settings: Option<&'a serde_json::Map<String, serde_json::Value>>,
    /// Number of devices, if more than had events.
    pub devices: u16,
    /// Annotations, and origins of blocks and segments at the end, for formats that have them.
    pub origins: Option<&'a Origins>,
}

/// Takes the events of a recording in order and writes a file.
pub trait TraceWriter {
    /// Takes the next event.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written or the format cannot hold it.
    fn event(&mut self, event: &Event) -> Result<(), WriteError>;

    /// Takes the next event with its origin, for formats that have it; others ignore it.
    ///
    /// # Errors
    /// Those of [`event`](Self::event).
    fn event_from(&mut self, event: &Event, _origin: Origin, _origins: &Origins) -> Result<(), WriteError> {
        self.event(event)
    }

    /// Takes an action of the host, such as a driver call, for formats that show it; others ignore it. Slices of one track must
    /// be disjoint or nested.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written.
    fn slice(&mut self, _track: &str, _name: &str, _start_ns: u64, _total_ns: u64) -> Result<(), WriteError> {
        Ok(())
    }

    /// Sets the origin of the next event, for formats that show it: a name, and arguments such as step and layer. Others ignore
    /// it.
    fn say(&mut self, _name: &str, _arguments: &[(&'static str, &str)]) {}

    /// Describes a stack that the next event is the first to have, for formats that show stacks once; others ignore it. The
    /// arguments of [`say`](Self::say) refer to it by its number.
    fn describe_stack(&mut self, _number: usize, _line: &str, _frames: &str) {}

    /// Sets how each allocation of a device was served, in order, for formats that show it; others ignore it.
    fn served(&mut self, _device: u16, _places: Vec<BlockPlace>) {}

    /// Number of events so far that the format [holds](super::Export::holds) but that did not fit this file: frees of blocks from
    /// before recording started, in a log that must begin with its program.
    fn passed_over(&self) -> u64 {
        0
    }

    /// Number of events so far of an action that the format does not [hold](super::Export::holds) and that were written all the
    /// same: completions of frees whose request was not recorded.
    fn stood_in(&self) -> u64 {
        0
    }

    /// Completes the file.
    ///
    /// # Errors
    /// [`WriteError`] when it cannot be written.
    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<(), WriteError>;
}

/// A recording's file; its errors are those of a writer.
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
