//! How a program is started so that its Python processes are recorded: where the package lies, and the environment.

use super::folder::Folder;
use super::secrets;
use anyhow::{Result, anyhow};
use clap::ValueEnum;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use vramlab::Selection;

/// Which events have stack frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Frames {
    /// All but frees
    #[value(alias = "all")]
    Alloc,
    /// No event
    None,
}

/// Whether Python's start hook is put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Python {
    /// Without the package the program is not started.
    Needed,
    /// Without the package the program runs, and its memory calls are recorded at the driver's boundary, if that is possible.
    IfInstalled,
    /// All is served and recorded at the driver's boundary.
    LeftOut,
}

/// A program and how it is to run.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) command: &'a [OsString],
    pub(crate) alloc: Option<&'a Selection>,
    pub(crate) limit: Option<u64>,
    pub(crate) every: Option<f64>,
    pub(crate) frames: Frames,
    /// Smallest block that gets frames.
    pub(crate) frames_from: Option<u64>,
    pub(crate) events: u32,
    /// Whether steps of optimizers are timed.
    pub(crate) steps: bool,
    /// `PYTORCH_CUDA_ALLOC_CONF` in place of the user's.
    pub(crate) conf: Option<&'a str>,
    pub(crate) output: Output<'a>,
}

/// Where a program's standard output goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Output<'a> {
    /// To this program's.
    Same,
    /// To standard error, so that standard output is one JSON document.
    Stderr,
    Pipe(&'a std::io::PipeWriter),
}

impl Launch<'_> {
    /// The command with the environment in which Python loads `vramlab._start`, in it and in what it starts. `python` says whether
    /// that has to be.
    pub(super) fn command(&self, folder: &Folder, python: Python) -> Result<Command> {
        let (program, arguments) = self.command.split_first().ok_or_else(|| anyhow!("no command is given"))?;
        let mut command = Command::new(program);
        command.args(arguments);
        command.env("VRAMLAB_OUTPUT", &folder.path).env("VRAMLAB_RUN", &folder.run);
        match python {
            Python::Needed => self.prepare_python(&mut command, &package()?)?,
            Python::IfInstalled => package().map_or(Ok(()), |package| self.prepare_python(&mut command, &package))?,
            Python::LeftOut => {}
        }
        self.direct_output(&mut command)?;
        Ok(command)
    }

    /// The command without the recorder and the library for CUDA's driver.
    pub(super) fn unchanged(&self) -> Result<Command> {
        let (program, arguments) = self.command.split_first().ok_or_else(|| anyhow!("no command is given"))?;
        let mut command = Command::new(program);
        command.args(arguments);
        self.direct_output(&mut command)?;
        Ok(command)
    }

    fn direct_output(&self, command: &mut Command) -> Result<()> {
        match self.output {
            Output::Same => {}
            Output::Stderr => _ = command.stdout(std::io::stderr()),
            Output::Pipe(writer) => _ = command.stdout(writer.try_clone()?),
        }
        Ok(())
    }

    fn prepare_python(&self, command: &mut Command, package: &Path) -> Result<()> {
        let site = package.join("_site");
        let theirs = std::env::var_os("PYTHONPATH").filter(|path| !path.is_empty());
        let path = std::env::join_paths(
            [site.clone()].into_iter().chain(theirs.iter().flat_map(|path| std::env::split_paths(path))),
        );
        command.env("PYTHONPATH", path.map_err(|error| anyhow!("PYTHONPATH: {error}"))?);
        command.env("VRAMLAB_EVENTS", self.events.to_string());
        let frames = self.frames.to_possible_value();
        command.env("VRAMLAB_FRAMES", frames.as_ref().map_or("alloc", |value| value.get_name()));
        if let Some(bytes) = self.frames_from {
            command.env("VRAMLAB_FRAMES_FROM", bytes.to_string());
        }
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
        Ok(())
    }

    /// The command as the user would type it, without what looks like a secret.
    pub(crate) fn shown(&self) -> String {
        let words: Vec<_> = self.command.iter().map(|word| word.to_string_lossy()).collect();
        let words = secrets::redact(words.iter().map(AsRef::as_ref));
        words.iter().map(|word| terminal::quoted(word)).collect::<Vec<_>>().join(" ")
    }
}

/// The Python package `vramlab`: beside this program in its environment, else in the checkout that it was built from.
///
/// # Errors
/// It is in neither.
pub(super) fn package() -> Result<PathBuf> {
    let exe = std::env::current_exe().unwrap_or_default();
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/src/vramlab");
    let installed = exe.parent().and_then(Path::parent).map(installed_under).unwrap_or_default();
    let mut places = installed.into_iter().chain([checkout]);
    let found = places.find(|place| place.join("_site").join("sitecustomize.py").is_file());
    let found = found.and_then(|place| place.canonicalize().ok());
    found.ok_or_else(|| {
        anyhow!("the Python package vramlab is not beside {}; pip install ./app/python brings both", exe.display())
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
