//! The folder that a run leaves.

use anyhow::{Context, Result, anyhow};
use ring::rand::{SecureRandom, SystemRandom};
use serde::Serialize;
use std::cell::RefCell;
use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use terminal::RuntimeFailure;
use vramlab::output::{Existing, OutputError, OutputFile, OutputProblem};

/// Its record. Where two runs share the folder, the second one's is `program-2.json`.
const RECORD: &str = "program";
/// Runs that may share a folder.
const RUNS: u32 = 10_000;

/// A folder for one run, which can be written.
#[derive(Debug)]
pub(crate) struct Folder {
    /// From the root, for programs that change their directory.
    pub(crate) path: PathBuf,
    /// As the user knows it.
    pub(crate) shown: PathBuf,
    /// A word that is this run's and that no other one can guess: files of an earlier one, or of the user, may be there.
    pub(crate) run: String,
    record: RefCell<Option<OutputFile>>,
    /// Whether it was made for this run.
    made: bool,
    /// The folder itself, whatever has its name later.
    #[cfg(unix)]
    handle: std::fs::File,
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
                private_folders()
                    .recursive(true)
                    .create(path)
                    .with_context(|| format!("--output {}", path.display()))?;
                path.to_owned()
            }
            None => numbered()?,
        };
        let path = shown.canonicalize().with_context(|| shown.display().to_string())?;
        // Before anything runs, what cannot be written is known.
        let record = begin(&path)?;
        let mut word = [0; 8];
        SystemRandom::new().fill(&mut word).map_err(|_| anyhow!("the system gives no random numbers"))?;
        let run = format!("{}-{:016x}", std::process::id(), u64::from_ne_bytes(word));
        #[cfg(unix)]
        let handle = std::fs::File::open(&path).with_context(|| shown.display().to_string())?;
        Ok(Self {
            path,
            shown,
            run,
            record: RefCell::new(Some(record)),
            made,
            #[cfg(unix)]
            handle,
        })
    }

    /// Makes the folder of this run alone within it: another run that shares it may end earlier.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn make_own(&self) -> std::io::Result<PathBuf> {
        let own = self.own();
        private_folders().create(&own)?;
        Ok(own)
    }

    /// The folder that [`make_own`](Self::make_own) makes.
    pub(super) fn own(&self) -> PathBuf {
        self.path.join(format!(".{}", self.run))
    }

    /// Takes it away again, where nothing ran: it was made for this run and is empty.
    pub(crate) fn discard(&self) {
        drop(self.record.borrow_mut().take());
        let _ = std::fs::remove_dir_all(self.own());
        if self.made {
            // A directory with files stays.
            let _ = std::fs::remove_dir(&self.path);
        }
    }

    /// Takes away what processes of this run were writing when they were killed: `.NAME.PID.RUN.partial`.
    pub(crate) fn sweep(&self) {
        if !self.still_exists() {
            return;
        }
        let ending = format!(".{}.partial", self.run);
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let pid = name.strip_suffix(&ending).filter(|name| name.starts_with('.'));
            let pid = pid.and_then(|name| name.rsplit('.').next()?.parse::<u32>().ok());
            if pid.is_some_and(|pid| !lives(pid)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Whether it is there still. What a link leads to is not it, nor is another folder, where the file system tells.
    pub(crate) fn still_exists(&self) -> bool {
        #[cfg(unix)]
        let linked = self.handle.metadata().is_ok_and(|folder| std::os::unix::fs::MetadataExt::nlink(&folder) > 0);
        #[cfg(not(unix))]
        let linked = true;
        linked && self.path.symlink_metadata().is_ok_and(|folder| folder.is_dir())
    }

    /// Writes the record of the run, and gives its name, where another run has taken the usual one.
    ///
    /// # Errors
    /// As those of writing a file.
    pub(crate) fn finish(&self, record: &impl Serialize) -> Result<Option<String>> {
        let Some(file) = self.record.borrow_mut().take() else { return Ok(None) };
        if !self.still_exists() {
            return Err(RuntimeFailure::new(format_args!("{} was removed meanwhile", self.shown.display())).into());
        }
        let text = serde_json::to_string_pretty(record)? + "\n";
        let mut path = file.path().to_owned();
        let mut written = file.fill(&text);
        for number in 2..=RUNS {
            let Err(OutputError { problem: OutputProblem::Taken | OutputProblem::Exists, .. }) = &written else {
                break;
            };
            path = self.path.join(name(number));
            written = create_private(&path, Existing::Refuse).and_then(|file| file.fill(&text));
        }
        written?;
        let name_of = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(name_of(&path).filter(|own| *own != name(1)))
    }
}

/// The record of the first, second, … run of a folder.
fn name(number: u32) -> String {
    if number == 1 { format!("{RECORD}.json") } else { format!("{RECORD}-{number}.json") }
}

/// Begins a run's record: in place of that of an earlier run, or beside that of one that goes on.
fn begin(folder: &Path) -> Result<OutputFile, OutputError> {
    let mut begun = create_private(&folder.join(name(1)), Existing::Replace);
    for number in 2..=RUNS {
        match &begun {
            Err(OutputError { problem: OutputProblem::Taken | OutputProblem::Exists, .. }) => {
                begun = create_private(&folder.join(name(number)), Existing::Refuse);
            }
            _ => break,
        }
    }
    begun
}

/// Begins a file that other users cannot read.
pub(super) fn create_private(path: &Path, existing: Existing) -> Result<OutputFile, OutputError> {
    let file = OutputFile::create(path, existing)?;
    file.keep_private()?;
    Ok(file)
}

/// Makes folders that other users cannot read.
fn private_folders() -> DirBuilder {
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
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
        match private_folders().create(&path) {
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
