//! Directories for one program: one that appears complete, and one that is filled in place.
//!
//! A system call that only one program can win decides which program gets a directory, never a check beforehand. A loser removes
//! only its own files.

use super::{END, Listed, OutputError, OutputProblem, RANDOM, abandoned, prefix};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A directory that is being written. Its contents are written to its [part](Self::part), which is renamed at the end.
///
/// Dropping it removes the part; a process that is killed leaves the part.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
    part: TempDir,
    /// Its lock, on systems that open directories.
    _lock: Option<File>,
    /// Dropped after the part is removed.
    listed: Listed,
}

impl OutputFolder {
    /// Begins a directory that will have the name `path`.
    ///
    /// # Errors
    /// [`OutputProblem::Denied`] where none can be created.
    pub fn create(path: &Path) -> Result<Self, OutputError> {
        let prefix = prefix(path);
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(END).rand_bytes(RANDOM);
        // By default the library denies read access to others, as is right for temporary files.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        loop {
            let part = Listed::create(|| builder.tempdir_in(super::folder(path)));
            let (part, listed) =
                part.map_err(|error| OutputError { path: path.to_owned(), problem: OutputProblem::Denied(error) })?;
            let lock = File::open(part.path()).ok();
            if lock.as_ref().map_or_else(|| part.path().exists(), |lock| abandoned::claim(lock, part.path())) {
                return Ok(Self { path: path.to_owned(), part, _lock: lock, listed });
            }
        }
    }

    /// The final name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path for its contents.
    #[must_use]
    pub fn part(&self) -> &Path {
        self.part.path()
    }

    /// Renames the directory, which is not empty.
    ///
    /// # Errors
    /// [`OutputProblem::Exists`] where the name exists; then nothing is left of this one.
    pub fn finish(self) -> Result<(), OutputError> {
        let Self { path, part, listed, .. } = self;
        // The system replaces an empty folder at most.
        let named = fs::rename(part.path(), &path);
        if named.is_ok() {
            drop(listed);
            let _ = part.keep();
        }
        named.map_err(|error| {
            let there = [ErrorKind::DirectoryNotEmpty, ErrorKind::AlreadyExists, ErrorKind::NotADirectory];
            let exists = there.contains(&error.kind());
            OutputError { path, problem: if exists { OutputProblem::Exists } else { OutputProblem::Io(error) } }
        })
    }
}

/// A directory that a program fills in place. It belongs to the program that created its first file.
#[derive(Debug)]
pub struct OwnFolder {
    path: PathBuf,
    first: PathBuf,
    /// Whether this program created it.
    made: bool,
}

impl OwnFolder {
    /// Creates a directory with its parents, or takes an empty one. Its first file is new and open for writing.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] where it is not empty, or another program has taken it at the same time; else the system's
    /// error. Only created parents are left then.
    pub fn take(path: &Path, first: &str) -> io::Result<(Self, File)> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|error| match error.kind() {
                // The existing entry is not this directory.
                ErrorKind::AlreadyExists => ErrorKind::NotADirectory.into(),
                _ => error,
            })?;
        }
        let made = match fs::create_dir(path) {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                if !path.is_dir() || fs::read_dir(path)?.next().is_some() {
                    return Err(error);
                }
                false
            }
            Err(error) => return Err(error),
        };
        let folder = Self { path: path.to_owned(), first: path.join(first), made };
        match OpenOptions::new().write(true).create_new(true).open(&folder.first) {
            Ok(file) => Ok((folder, file)),
            Err(error) => {
                // The file belongs to another program; the directory is removed only if it is empty.
                folder.remove();
                Err(error)
            }
        }
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the first file, and the directory if this program created it and it is empty.
    pub fn give_back(&self) {
        // A part that cannot be removed is empty; the error that led here is the one to report.
        let _ = fs::remove_file(&self.first);
        self.remove();
    }

    fn remove(&self) {
        if self.made {
            let _ = fs::remove_dir(&self.path);
        }
    }
}
