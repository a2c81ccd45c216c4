//! Folders that one program has to itself: one that appears whole, and one that is filled where it lies.
//!
//! Whose a folder is, is decided by a call that only one program can win, and never by looking beforehand. A loser takes
//! back what it made itself and nothing else.

use super::{Listed, OutputError, OutputProblem, prefix};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A folder under way. What goes into it is written to its [part](Self::part), which takes the name at the end.
///
/// Dropping it removes what was written; a process that is killed leaves the part.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
    part: TempDir,
    /// Dropped after the part is gone.
    listed: Listed,
}

impl OutputFolder {
    /// Begins a folder that will be at `path`.
    ///
    /// # Errors
    /// [`OutputProblem::Denied`] where none can be made.
    pub fn create(path: &Path) -> Result<Self, OutputError> {
        let prefix = prefix(path);
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(".part").rand_bytes(10);
        // The library's own keep others from reading, as suits what is only temporary.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        let part = builder.tempdir_in(super::folder(path));
        let part =
            part.map_err(|error| OutputError { path: path.to_owned(), problem: OutputProblem::Denied(error) })?;
        let listed = Listed::new(part.path());
        Ok(Self { path: path.to_owned(), part, listed })
    }

    /// The name that it will have.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where its contents go.
    #[must_use]
    pub fn part(&self) -> &Path {
        self.part.path()
    }

    /// Gives the folder, in which there is something, its name.
    ///
    /// # Errors
    /// [`OutputProblem::Exists`] where something has that name; then nothing is left of this one.
    pub fn finish(self) -> Result<(), OutputError> {
        let Self { path, part, listed } = self;
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

/// A folder that a program fills where it lies. It is the one's whose first file it holds.
#[derive(Debug)]
pub struct OwnFolder {
    path: PathBuf,
    first: PathBuf,
    /// Whether it was not there before.
    made: bool,
}

impl OwnFolder {
    /// Makes a folder, and those that it lies in, or takes one that is empty. Its first file is new and open for writing.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] where something is there, or another program has taken the folder at the same time; else
    /// what the system says. Nothing is left but folders that it would have lain in.
    pub fn take(path: &Path, first: &str) -> io::Result<(Self, File)> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|error| match error.kind() {
                // It is not this folder that is there.
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
        let own = Self { path: path.to_owned(), first: path.join(first), made };
        match OpenOptions::new().write(true).create_new(true).open(&own.first) {
            Ok(file) => Ok((own, file)),
            Err(error) => {
                // The file is another's; the folder goes only if it is empty.
                own.remove();
                Err(error)
            }
        }
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the first file, and the folder if it was made for it and holds nothing else.
    pub fn give_back(&self) {
        // Whatever of it cannot be removed is empty; the error that led here is the one to tell.
        let _ = fs::remove_file(&self.first);
        self.remove();
    }

    fn remove(&self) {
        if self.made {
            let _ = fs::remove_dir(&self.path);
        }
    }
}
