//! One entry for every format.

use super::input::{self, Input};
use super::list::Start;
use super::summary::Receiver;
use super::{Format, OriginSink, Origins, ReadOptions, Sink, Summary};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use vramlab_device::budget::OverBudget;

/// Reads a file of events, plain or compressed with gzip or xz, and hands them to `sink` in the order of the file:
/// those of one device after those of another in a snapshot of several.
///
/// The format and the compression are told by the content. Events pass through bounded memory; the sink has got all
/// events before an error by the time it is returned. A snapshot that was cut short is read as far as it is whole, and
/// [`Summary::cut`] says so.
///
/// # Errors
/// [`ReadError`] for what cannot be opened, understood or kept within `options`, and what the sink returns.
pub fn read(path: &Path, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    named(path, || read_from(Box::new(open(path)?), options, sink))
}

/// As [`read`], from any source; the error names no file.
///
/// # Errors
/// Those of [`read`].
pub fn read_from(source: Box<dyn Read + '_>, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    Ok(run(source, options, &mut |event, _, _| sink(event), false)?.0)
}

/// As [`read`], with where each event came from: stack frames, categories, annotations. Only snapshots say that.
///
/// # Errors
/// Those of [`read`].
pub fn read_origins(
    path: &Path,
    options: &ReadOptions,
    sink: &mut OriginSink<'_>,
) -> Result<(Summary, Origins), ReadError> {
    named(path, || read_origins_from(Box::new(open(path)?), options, sink))
}

/// As [`read_origins`], from any source; the error names no file.
///
/// # Errors
/// Those of [`read`].
pub fn read_origins_from(
    source: Box<dyn Read + '_>,
    options: &ReadOptions,
    sink: &mut OriginSink<'_>,
) -> Result<(Summary, Origins), ReadError> {
    run(source, options, sink, true)
}

pub(super) fn open(path: &Path) -> Result<std::fs::File, ReadError> {
    let file = std::fs::File::open(path).map_err(|error| ReadError::at(Place::Whole, Problem::Io(error)))?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(ReadError::at(Place::Whole, Problem::Directory));
    }
    Ok(file)
}

/// Puts the file into the error of a reading.
pub(super) fn named<T>(path: &Path, read: impl FnOnce() -> Result<T, ReadError>) -> Result<T, ReadError> {
    read().map_err(|error| ReadError { path: path.to_owned(), ..error })
}

fn run<'s>(
    source: Box<dyn Read + '_>,
    options: &ReadOptions,
    sink: &'s mut OriginSink<'s>,
    wants_origins: bool,
) -> Result<(Summary, Origins), ReadError> {
    let mut input = Input::new(source, &options.budget)?;
    let format = match options.format {
        Some(format) => format,
        None => detect(&mut input)?,
    };
    let mut receiver = Receiver { sink, origins: Origins::new(&options.budget), wants_origins };
    let reader = format.reader();
    let result = (reader.read)(&mut input, options, &mut receiver);
    if !reader.snapshot {
        input.check_whole()?;
    }
    let mut summary = result?;
    summary.bytes = input.offset();
    Ok((summary, receiver.origins))
}

fn detect(input: &mut Input<'_>) -> Result<Format, ReadError> {
    if !input.ensure(1)? {
        return Err(ReadError::at(Place::Whole, Problem::Empty));
    }
    // However little a pipe gives at once; less is there when the file is shorter.
    input.ensure(input::LONGEST_LINE)?;
    let bytes = &input.buffered()[..input.buffered().len().min(input::LONGEST_LINE)];
    let text = bytes.trim_ascii_start();
    if text.starts_with(b"[") {
        return Err(ReadError::content(
            Place::Byte(0),
            "the JSON document is a list, not a snapshot: dump torch.cuda.memory._snapshot(), not memory_snapshot()",
        ));
    }
    let start = Start { bytes, text: &String::from_utf8_lossy(text) };
    let found = Format::ALL.into_iter().find(|format| (format.reader().begins)(&start));
    found.ok_or_else(|| ReadError::at(Place::Whole, Problem::UnknownFormat))
}

// What is wrong with a file of events, where, and how to mend it.

/// A file that cannot be read, in one line: the file, the place, what is wrong and how to mend it.
#[derive(Debug, thiserror::Error)]
#[error("{}{place}: {problem}", path.display())]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Where in the file; in what was unpacked from it, if it is compressed.
    pub place: Place,
    /// What is wrong. Part of the message, so not a source of its own.
    pub problem: Problem,
}

impl ReadError {
    /// An error at a place; [`read`](super::read) enters the file.
    pub(crate) fn at(place: Place, problem: Problem) -> Self {
        Self { path: PathBuf::new(), place, problem }
    }

    /// A refused claim at a place.
    pub(crate) fn over(place: Place, over: OverBudget) -> Self {
        Self::at(place, Problem::TooLarge(over))
    }

    /// An error of the content at a place.
    pub(crate) fn content(place: Place, text: impl Into<String>) -> Self {
        Self::at(place, Problem::Content(text.into()))
    }

    /// What a sink returns to end the reading.
    #[must_use]
    pub fn stop(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::at(Place::Whole, Problem::Stopped(reason.into()))
    }
}

/// Where in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// The file as a whole.
    #[default]
    Whole,
    /// A byte, counted from 0.
    Byte(u64),
    /// A line, counted from 1.
    Line(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Whole => Ok(()),
            Place::Byte(byte) => write!(f, ": byte {byte}"),
            Place::Line(line) => write!(f, ":{line}"),
        }
    }
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The operating system or a decoder of compressed data refused.
    #[error("cannot be read: {0}; see whether the file is there and complete")]
    Io(std::io::Error),
    /// A folder.
    #[error("is a directory; name a file in it")]
    Directory,
    /// Nothing in it.
    #[error("is empty; record the history again")]
    Empty,
    /// No format begins like this.
    #[error(
        "is in no known format: expected a PyTorch snapshot (pickle or JSON), an RMM log, an STAlloc trace, a \
         minimalloc CSV or a trace.jsonl, plain, .gz or .xz"
    )]
    UnknownFormat,
    /// The file ends too early.
    #[error("the file ends within {0}; it was cut short, so copy or record it again")]
    Truncated(&'static str),
    /// An opcode that would run code, or that no snapshot needs.
    #[error("the pickle opcode {name} is refused, because {why}; a snapshot holds only data, so dump it again")]
    Refused {
        /// Name, as in Python's `pickletools`.
        name: &'static str,
        /// Why.
        why: &'static str,
    },
    /// A byte that is no opcode.
    #[error("0x{0:02x} is no pickle opcode; the file is damaged or no pickle")]
    UnknownOpcode(u8),
    /// The content does not hold together.
    #[error("{0}")]
    Content(String),
    /// More than the reader may keep in memory.
    #[error(transparent)]
    TooLarge(#[from] OverBudget),
    /// The sink wants no more events.
    #[error("{0}")]
    Stopped(Box<dyn std::error::Error + Send + Sync>),
}
