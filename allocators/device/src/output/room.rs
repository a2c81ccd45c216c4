//! Room on the disk: an error that says how much is missing, and room that is reserved.

use super::OutputProblem;
use crate::bytes::Bytes;
use fs4::FileExt;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::path::Path;

/// How much a file needs where there is less.
#[derive(Debug)]
pub struct NoRoom {
    /// Bytes that it needs.
    pub needed: u64,
    /// Whether it needs exactly these; otherwise more would have followed.
    pub whole: bool,
    /// Bytes that there is room for, where that is known and fewer than are needed.
    pub room: Option<u64>,
    /// The operating system's error.
    pub error: io::Error,
}

impl NoRoom {
    /// The problem that an error of a write is, which need not be a full disk. `held` bytes will come free.
    pub(super) fn of(folder: &Path, needed: u64, whole: bool, held: u64, error: io::Error) -> OutputProblem {
        if !is_full(&error) {
            return OutputProblem::Io(error);
        }
        let free = || fs4::available_space(folder).ok().map(|free| free.saturating_add(held));
        let room = if error.kind() == ErrorKind::StorageFull { free() } else { None };
        OutputProblem::NoRoom(Self { needed, whole, room: room.filter(|room| *room < needed), error })
    }
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let least = if self.whole { "" } else { "at least " };
        write!(f, "{}; it needs {least}{}", self.error, Bytes(self.needed))?;
        if let Some(room) = self.room {
            write!(f, ", and there is room for {}", Bytes(room))?;
        }
        let mend = if self.error.kind() == ErrorKind::StorageFull { "make room there" } else { "raise the limit" };
        write!(f, "; {mend}, or name another place")
    }
}

/// Room that is kept for a file to come, so that something can be written when the disk is full. Dropping it gives the
/// room back; so does the end of the process, however it ends, because the file that keeps it has no name.
///
/// On file systems that cannot take room ahead, such as NFS before version 4.2, it keeps none.
#[derive(Debug)]
pub struct Reserve {
    file: File,
    bytes: u64,
}

impl Reserve {
    /// Keeps room in a folder.
    ///
    /// # Errors
    /// When there is not so much, or no file can be made there.
    pub fn keep(folder: &Path, bytes: u64) -> io::Result<Self> {
        let mut reserve = Self { file: tempfile::tempfile_in(folder)?, bytes: 0 };
        reserve.extend(bytes)?;
        Ok(reserve)
    }

    /// Keeps at least so much.
    ///
    /// # Errors
    /// When there is not so much; what was kept before stays.
    pub fn extend(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > self.bytes {
            match self.file.allocate(bytes) {
                Err(error) if is_full(&error) => return Err(error),
                _ => self.bytes = bytes,
            }
        }
        Ok(())
    }
}

/// Whether there is no room, or not so much is allowed.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

/// Bytes that a file takes from the disk.
pub(super) fn held(file: &Metadata) -> u64 {
    #[cfg(unix)]
    return std::os::unix::fs::MetadataExt::blocks(file) * 512;
    #[cfg(not(unix))]
    return file.len();
}
