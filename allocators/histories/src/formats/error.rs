//! Errors of reading a file of events: the fault, its location, and the fix.

use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use vramlab_device::budget::OverBudget;

/// A file that cannot be read, in one line: file, location, fault and fix.
#[derive(Debug, thiserror::Error)]
#[error("{}{place}: {problem}", path.display())]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Location in the file, after decompression.
    pub place: Place,
    /// The fault. Part of the message, so not a source of its own.
    pub problem: Problem,
}

impl ReadError {
    /// An error at a location; [`read`](super::read) adds the file.
    pub(crate) fn at(place: Place, problem: Problem) -> Self {
        Self { path: PathBuf::new(), place, problem }
    }

    /// A refused claim at a place.
    pub(crate) fn over(place: Place, over: OverBudget) -> Self {
        Self::at(place, Problem::TooLarge(over))
    }

    /// An error of the content at a location.
    pub(crate) fn content(place: Place, text: impl Into<String>) -> Self {
        Self::at(place, Problem::Content(text.into()))
    }

    /// The file ends within `part`, after this many bytes.
    pub(crate) fn truncated(part: &'static str, end: u64) -> Self {
        Self::at(Place::Byte(end), Problem::Truncated(part))
    }

    /// Returned by a sink to stop reading.
    #[must_use]
    pub fn stop(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::at(Place::Whole, Problem::Stopped(reason.into()))
    }
}

/// Location in a file.
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

/// The fault in a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The operating system or a decoder of compressed data refused.
    #[error("cannot be read: {0}; check that the file exists and is complete")]
    Io(std::io::Error),
    /// A directory.
    #[error("is a directory; name a file in it")]
    Directory,
    /// A device or a socket.
    #[error("cannot be read: {0}")]
    Special(std::io::Error),
    /// The file is empty.
    #[error("is empty; record again")]
    Empty,
    /// The content matches no format.
    #[error(
        "is in no known format: expected a PyTorch snapshot (pickle or JSON), an RMM log, an STAlloc trace, a \
         minimalloc CSV or a trace.jsonl, plain, .gz or .xz"
    )]
    UnknownFormat,
    /// A file in which or for which a recording has to be fetched first.
    #[error("{kind}; {fix}")]
    Foreign {
        /// What it is.
        kind: &'static str,
        /// The remedy, with its command.
        fix: &'static str,
    },
    /// The file ends too early.
    #[error("the file ends within {0}; it was truncated, so copy or record it again")]
    Truncated(&'static str),
    /// An opcode that would run code, or that no snapshot needs.
    #[error("the pickle opcode {name} is refused, because {why}; a snapshot contains only data, so dump it again")]
    Refused {
        /// Name, as in Python's `pickletools`.
        name: &'static str,
        /// Why.
        why: &'static str,
    },
    /// A byte that is not an opcode.
    #[error("0x{0:02x} is not a pickle opcode; the file is damaged or not a pickle")]
    UnknownOpcode(u8),
    /// The content is inconsistent.
    #[error("{0}")]
    Content(String),
    /// The reader's memory budget is used up.
    #[error(transparent)]
    TooLarge(#[from] OverBudget),
    /// The sink stopped the reading.
    #[error("{0}")]
    Stopped(Box<dyn std::error::Error + Send + Sync>),
}

impl Problem {
    /// The error of [`open_stream`](vramlab_device::input::open_stream).
    #[must_use]
    pub fn of_opening(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::IsADirectory => Self::Directory,
            ErrorKind::InvalidInput => Self::Special(error),
            _ => Self::Io(error),
        }
    }
}
