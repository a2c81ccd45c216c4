//! One entry for every format.

use super::error::{Place, Problem, ReadError};
use super::input::Input;
use super::{Event, Segment, pickle};
use std::io::Read;
use std::path::Path;

/// Formats of histories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// PyTorch's memory snapshot as `torch.cuda.memory._dump_snapshot` writes it.
    SnapshotPickle,
}

impl Format {
    /// Name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Format::SnapshotPickle => "snapshot",
        }
    }
}

/// How to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadOptions {
    /// The format; `None` tells it by the content.
    pub format: Option<Format>,
    /// Most bytes that a reader may keep besides its buffers. A snapshot's events are not kept, but what it may refer
    /// back to is: some 50 bytes an event. Default 1 GiB.
    pub memory_limit: u64,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { format: None, memory_limit: 1 << 30 }
    }
}

/// What a file held besides its events.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Format it was read as.
    pub format: Format,
    /// Events of each device.
    pub events: Vec<u64>,
    /// Events left out because their action has no counterpart in [`Action`](super::Action).
    pub unknown_actions: u64,
    /// What was held when the history ended; empty for formats that do not say.
    pub segments: Vec<Segment>,
    /// PyTorch's `allocator_settings`; empty for other formats.
    pub allocator_settings: serde_json::Map<String, serde_json::Value>,
    /// Number of PyTorch's `external_annotations`.
    pub external_annotations: u64,
    /// Bytes read, after unpacking.
    pub bytes: u64,
}

impl Summary {
    pub(super) fn new(format: Format) -> Self {
        Self {
            format,
            events: Vec::new(),
            unknown_actions: 0,
            segments: Vec::new(),
            allocator_settings: serde_json::Map::new(),
            external_annotations: 0,
            bytes: 0,
        }
    }

    /// Counts an event of a device.
    pub(super) fn count(&mut self, device: u16) {
        let device = usize::from(device);
        if self.events.len() <= device {
            self.events.resize(device + 1, 0);
        }
        self.events[device] += 1;
    }

    /// Events of all devices.
    #[must_use]
    pub fn all_events(&self) -> u64 {
        self.events.iter().sum()
    }
}

/// Takes events as they are read; its error ends the reading ([`ReadError::stop`]).
pub type Sink<'a> = dyn FnMut(Event) -> Result<(), ReadError> + 'a;

/// Reads a file of events, plain or compressed with gzip or xz, and hands them to `sink` in the order of the file:
/// those of one device after those of another in a snapshot of several.
///
/// The format and the compression are told by the content. Events pass through bounded memory; the sink has got all
/// events before an error by the time it is returned.
///
/// # Errors
/// [`ReadError`] for what cannot be opened, understood or kept within `options`, and what the sink returns.
pub fn read(path: &Path, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    let mut open = || {
        let file = std::fs::File::open(path).map_err(|error| ReadError::at(Place::Whole, Problem::Io(error)))?;
        if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
            return Err(ReadError::at(Place::Whole, Problem::Directory));
        }
        read_from(Box::new(file), options, sink)
    };
    open().map_err(|error| ReadError { path: path.to_owned(), ..error })
}

/// As [`read`], from any source; the error names no file.
///
/// # Errors
/// Those of [`read`].
pub fn read_from(source: Box<dyn Read + '_>, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    let mut input = Input::new(source)?;
    let format = match options.format {
        Some(format) => format,
        None => detect(&mut input)?,
    };
    let mut summary = match format {
        Format::SnapshotPickle => pickle::read(&mut input, options, sink),
    }?;
    summary.bytes = input.offset();
    Ok(summary)
}

fn detect(input: &mut Input<'_>) -> Result<Format, ReadError> {
    if !input.ensure(1)? {
        return Err(ReadError::at(Place::Whole, Problem::Empty));
    }
    match input.buffered()[0] {
        0x80 => Ok(Format::SnapshotPickle),
        _ => Err(ReadError::at(Place::Whole, Problem::UnknownFormat)),
    }
}
