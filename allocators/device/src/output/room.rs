//! Disk space: an error that contains the missing amount, and reserved space.

use super::OutputProblem;
use crate::bytes::Bytes;
use fs4::FileExt;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::path::Path;

/// The required space of a file that does not fit.
#[derive(Debug)]
pub struct NoRoom {
    /// Required bytes.
    pub needed: u64,
    /// Whether this is the exact size; otherwise it is a minimum.
    pub whole: bool,
    /// Available bytes, where that is known and less than required.
    pub room: Option<u64>,
    /// The operating system's error.
    pub error: io::Error,
}

impl NoRoom {
    /// The problem for an error of a write, which may not be a full disk. `held` bytes will become free.
    pub(super) fn problem(folder: &Path, needed: u64, whole: bool, held: u64, error: io::Error) -> OutputProblem {
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

/// Space that is reserved for a later file, so that it can be written when the disk is full. Dropping it frees the space; so does
/// the end of the process in any way, because the reserving file has no name.
///
/// On file systems that cannot reserve space, such as NFS before version 4.2, it reserves none.
#[derive(Debug)]
pub struct Reserve {
    file: File,
    bytes: u64,
}

impl Reserve {
    /// Reserves space in a directory.
    ///
    /// # Errors
    /// When there is not enough space, or no file can be created there.
    pub fn keep(folder: &Path, bytes: u64) -> io::Result<Self> {
        let mut reserve = Self { file: tempfile::tempfile_in(folder)?, bytes: 0 };
        reserve.extend(bytes)?;
        Ok(reserve)
    }

    /// Reserves at least `bytes`.
    ///
    /// # Errors
    /// When there is not enough space; the earlier reservation stays.
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

/// Whether there is no space, or a limit does not allow it.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

/// Bytes that a file uses on the disk.
pub(super) fn held(file: &Metadata) -> u64 {
    #[cfg(unix)]
    return std::os::unix::fs::MetadataExt::blocks(file) * 512;
    #[cfg(not(unix))]
    return file.len();
}
