//! How a program is started so that its Python processes are recorded: where the package lies, and the environment.

use anyhow::{Context, Result, anyhow};
use clap::ValueEnum;
use serde::Serialize;
use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use terminal::RuntimeFailure;
use vramlab::Selection;
use vramlab::output::{Existing, OutputFile};

/// Which events have stack frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Frames {
    /// Allocations, frees and releases of the cache
    All,
    /// Allocations
    Alloc,
    /// No event
    None,
}

/// A program and how it is to run.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) command: &'a [OsString],
    pub(crate) alloc: Option<&'a Selection>,
    pub(crate) limit: Option<u64>,
    pub(crate) every: Option<f64>,
    pub(crate) frames: Frames,
    pub(crate) events: u32,
    /// Whether steps of optimizers are timed.
    pub(crate) steps: bool,
    /// `PYTORCH_CUDA_ALLOC_CONF` in place of the user's.
    pub(crate) conf: Option<&'a str>,
    /// Whether what it prints goes to standard error, so that standard output is one JSON document.
    pub(crate) output_to_stderr: bool,
}

impl Launch<'_> {
    /// The command with the environment in which Python loads `vramlab._start`, in it and in what it starts.
    pub(super) fn command(&self, folder: &Folder) -> Result<Command> {
        let (program, arguments) = self.command.split_first().ok_or_else(|| anyhow!("no command is given"))?;
        let site = package()?.join("_site");
        let mut command = Command::new(program);
        command.args(arguments);
        let theirs = std::env::var_os("PYTHONPATH").filter(|path| !path.is_empty());
        let path = std::env::join_paths(
            [site.clone()].into_iter().chain(theirs.iter().flat_map(|path| std::env::split_paths(path))),
        );
        command.env("PYTHONPATH", path.map_err(|error| anyhow!("PYTHONPATH: {error}"))?);
        command.env("VRAMLAB_OUTPUT", &folder.path).env("VRAMLAB_RUN", &folder.run);
        command.env("VRAMLAB_EVENTS", self.events.to_string());
        let frames = self.frames.to_possible_value();
        command.env("VRAMLAB_FRAMES", frames.as_ref().map_or("all", |value| value.get_name()));
        if let Some(alloc) = self.alloc {
            command.env("VRAMLAB_ALLOC", alloc.to_string());
        }
        if let Some(limit) = self.limit {
            command.env("VRAMLAB_LIMIT", limit.to_string());
        }
        if let Some(every) = self.every {
            command.env("VRAMLAB_EVERY", every.to_string());
        }
        if self.steps {
            command.env("VRAMLAB_STEPS", "1");
        }
        if let Some(conf) = self.conf {
            // The newer name means the same, and counts where the older is not set.
            command.env("PYTORCH_CUDA_ALLOC_CONF", conf).env_remove("PYTORCH_ALLOC_CONF");
        }
        if self.output_to_stderr {
            command.stdout(std::io::stderr());
        }
        Ok(command)
    }

    /// The command as the user would type it.
    pub(crate) fn shown(&self) -> String {
        let words: Vec<String> = self.command.iter().map(|word| terminal::quoted(&word.to_string_lossy())).collect();
        words.join(" ")
    }
}

/// The Python package `vramlab`: beside this program in its environment, else in the checkout that it was built from.
///
/// # Errors
/// It is in neither.
fn package() -> Result<PathBuf> {
    let exe = std::env::current_exe().unwrap_or_default();
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inside/src/vramlab");
    let installed = exe.parent().and_then(Path::parent).map(installed_under).unwrap_or_default();
    let mut places = installed.into_iter().chain([checkout]);
    let found = places.find(|place| place.join("_site").join("sitecustomize.py").is_file());
    let found = found.and_then(|place| place.canonicalize().ok());
    found.ok_or_else(|| {
        anyhow!("the Python package vramlab is not beside {}; pip install ./experiments brings both", exe.display())
    })
}

/// Where environments have packages, for each Python in this one.
fn installed_under(prefix: &Path) -> Vec<PathBuf> {
    let mut out = vec![prefix.join("Lib").join("site-packages").join("vramlab")];
    for lib in ["lib", "lib64"] {
        let entries = std::fs::read_dir(prefix.join(lib)).into_iter().flatten().flatten();
        let mut pythons: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_python(path)).collect();
        pythons.sort();
        for python in pythons {
            out.extend(["site-packages", "dist-packages"].map(|packages| python.join(packages).join("vramlab")));
        }
    }
    out
}

fn is_python(path: &Path) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python"))
}

// The folder that a run leaves.

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
            if pid.is_some_and(|pid| !super::processes::lives(pid)) {
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
