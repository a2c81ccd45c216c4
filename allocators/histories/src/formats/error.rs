//! What is wrong with a file of events, where, and how to mend it.

use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use vramlab_device::budget::OverBudget;

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

    /// The end of a file within `what`, after so many bytes.
    pub(crate) fn truncated(what: &'static str, end: u64) -> Self {
        Self::at(Place::Byte(end), Problem::Truncated(what))
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
    /// A device or a socket.
    #[error("cannot be read: {0}")]
    Special(std::io::Error),
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

impl Problem {
    /// What [`open_stream`](vramlab_device::input::open_stream) refused.
    #[must_use]
    pub fn of_opening(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::IsADirectory => Self::Directory,
            ErrorKind::InvalidInput => Self::Special(error),
            _ => Self::Io(error),
        }
    }
}
