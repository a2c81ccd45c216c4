//! The folder that a run leaves.

use anyhow::{Context, Result};
use serde::Serialize;
use std::cell::RefCell;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use terminal::RuntimeFailure;
use vramlab::output::{Existing, OutputFile};

/// Its record.
const RECORD: &str = "program.json";

/// A folder for one run, which can be written.
#[derive(Debug)]
pub(crate) struct Folder {
    /// From the root, for programs that change their directory.
    pub(crate) path: PathBuf,
    /// As the user knows it.
    pub(crate) shown: PathBuf,
    /// A word that is this run's: files of an earlier one may be there.
    pub(crate) run: String,
    record: RefCell<Option<OutputFile>>,
    /// Whether it was made for this run.
    made: bool,
}

impl Folder {
    /// Makes the folder that is named, or the first of a number that is not there.
    ///
    /// # Errors
    /// It cannot be made or written.
    pub(crate) fn make(named: Option<&Path>) -> Result<Self> {
        let made = named.is_none_or(|path| !path.exists());
        let shown = match named {
            Some(path) => {
                std::fs::create_dir_all(path).with_context(|| format!("--output {}", path.display()))?;
                path.to_owned()
            }
            None => numbered()?,
        };
        let path = shown.canonicalize().with_context(|| shown.display().to_string())?;
        // Before anything runs, what cannot be written is known.
        let record = OutputFile::create(&path.join(RECORD), Existing::Replace)?;
        let run = format!("{}-{}", std::process::id(), now_ns());
        Ok(Self { path, shown, run, record: RefCell::new(Some(record)), made })
    }

    /// Takes it away again, where nothing ran: it was made for this run and is empty.
    pub(crate) fn discard(&self) {
        drop(self.record.borrow_mut().take());
        if self.made {
            // What is in it stays, and so it does.
            let _ = std::fs::remove_dir(&self.path);
        }
    }

    /// Takes away what processes were writing when they were killed.
    pub(crate) fn sweep(&self) {
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let pid = name.strip_suffix(".partial").filter(|name| name.starts_with('.'));
            let pid = pid.and_then(|name| name.rsplit('.').next()?.parse::<u32>().ok());
            if pid.is_some_and(|pid| !lives(pid)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Writes the record of the run.
    ///
    /// # Errors
    /// As those of writing a file.
    pub(crate) fn finish(&self, record: &impl Serialize) -> Result<()> {
        match self.record.borrow_mut().take() {
            Some(file) => Ok(file.fill(serde_json::to_string_pretty(record)? + "\n")?),
            None => Ok(()),
        }
    }
}

/// Nanoseconds since 1970, which is how PyTorch's events are timed.
#[allow(clippy::cast_possible_truncation, reason = "they fit until the year 2554")]
pub(crate) fn now_ns() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}

fn numbered() -> Result<PathBuf> {
    for number in 1_u32.. {
        let path = PathBuf::from(format!("vramlab-run-{number}"));
        match std::fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| format!("{}; --output names another", path.display())),
        }
    }
    Err(RuntimeFailure::new("no number is left for a folder").into())
}

/// Whether there is a process of that number.
fn lives(pid: u32) -> bool {
    #[cfg(unix)]
    {
        let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        pid.is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
    }
    #[cfg(not(unix))]
    {
        let _ = pid;
        false
    }
}
