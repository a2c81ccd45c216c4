//! A program that runs another one and is not noticed: the other's input, output, signals and exit code are untouched.

#[cfg(unix)]
mod system;
#[cfg(target_os = "linux")]
mod tree;

use crate::RuntimeFailure;
use anyhow::Result;
use std::fmt;
use std::io::ErrorKind;
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// A shell's code for a command that is not there.
const NOT_FOUND: u8 = 127;
/// A shell's code for a file that cannot be run.
const NOT_RUNNABLE: u8 = 126;

/// Whether a command runs now.
static COMMAND_RUNS: AtomicBool = AtomicBool::new(false);
/// How the command ended in whose place this process was.
static COMMAND_STATUS: OnceLock<ExitStatus> = OnceLock::new();

/// What may be done with a signal before it is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signalled {
    /// The command gets it.
    PassOn,
    /// It was for this program.
    Taken,
}

/// Whose exit code this process has at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command's: once that has ended, this process ends as it did, also when a signal or a fault of its own ends it.
    OfCommand,
    /// Its own.
    Own,
}

/// How a command ended.
#[derive(Debug)]
pub struct Outcome {
    /// As it ended, or as the signal ends a process that had it killed.
    pub status: ExitStatus,
    /// Where it was killed, since it did not end after a signal that asked it to.
    pub kill: Option<Kill>,
}

/// A command that did not end by itself.
#[derive(Debug)]
pub struct Kill {
    /// The signal that was sent a second time, or whose patience is over.
    pub signal: i32,
    /// How long the command had; `None` where a second signal came.
    pub patience: Option<Duration>,
    /// The command and what it had started, as far as that still ran.
    pub processes: Vec<Process>,
    /// Whether the command ended then. A process that waits in the kernel, for a device, does not.
    pub ended: bool,
}

/// A process that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// The name of what it runs.
    pub name: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.pid, self.name)
    }
}

/// Runs commands, one at a time: signals sent to this process go to the command that runs. Without one a signal ends this
/// process.
///
/// A command that does not end does not keep this process for ever. A second SIGTERM, or SIGINT, kills it and all that it
/// has started, and so does the end of the patience that it has after the first SIGTERM. Key presses in a terminal do not count:
/// they go to the command, which has it out with the user.
#[derive(Debug)]
pub struct Around {
    listening: system::Listening,
    exit: Exit,
}

impl Around {
    /// Listens to signals from now on. `heard` is asked before one is passed on; it must not block. After SIGTERM a command has
    /// `patience` to end.
    ///
    /// # Errors
    /// When the system refuses the handler.
    pub fn listen(
        exit: Exit,
        patience: Duration,
        heard: impl FnMut(i32) -> Signalled + Send + 'static,
    ) -> std::io::Result<Self> {
        Ok(Self { listening: system::listen(patience, heard)?, exit })
    }

    /// Runs a command to its end. It is killed where this process is, or the calling thread ends.
    ///
    /// # Errors
    /// The command cannot be started: a [`RuntimeFailure`] with the codes of a shell, 127 and 126.
    pub fn run(&self, command: &mut Command) -> Result<Outcome> {
        let name = command.get_program().to_string_lossy().into_owned();
        #[cfg(target_os = "linux")]
        end_with_parent(command);
        COMMAND_RUNS.store(true, SeqCst);
        let outcome = self.listening.run(command, |status| {
            if self.exit == Exit::OfCommand {
                let _ = COMMAND_STATUS.set(status);
            }
        });
        COMMAND_RUNS.store(false, SeqCst);
        outcome.map_err(|error| {
            let failure = match error.kind() {
                ErrorKind::NotFound => {
                    RuntimeFailure::with_code(NOT_FOUND, format_args!("{name}: there is no such command"))
                }
                _ => RuntimeFailure::with_code(NOT_RUNNABLE, format_args!("{name}: {error}")),
            };
            failure.into()
        })
    }
}

/// Ends this process as the command ended: with its exit code, or by its signal.
pub fn end_alike(status: ExitStatus) -> ! {
    vramlab::output::discard_unfinished();
    system::end_alike(status)
}

/// Keeps a fault of this program, in a thread that has told of it, from the command and from its exit code. Returns where
/// neither is in danger.
pub(crate) fn contain_fault() {
    if let Some(status) = COMMAND_STATUS.get() {
        end_alike(*status);
    }
    // The end of this process would end the command. The thread that runs it is needed.
    while COMMAND_RUNS.load(SeqCst) && std::thread::current().name() != Some("main") {
        std::thread::park();
    }
}

#[cfg(target_os = "linux")]
pub use system::end_with_parent;

#[cfg(not(unix))]
mod system {
    use super::{Outcome, Signalled};
    use std::process::{Command, ExitStatus};
    use std::time::Duration;

    /// A key press goes to all processes of the console.
    #[derive(Debug)]
    pub(super) struct Listening;

    impl Listening {
        pub(super) fn run(&self, command: &mut Command, ended: impl FnOnce(ExitStatus)) -> std::io::Result<Outcome> {
            let status = command.spawn()?.wait()?;
            ended(status);
            Ok(Outcome { status, kill: None })
        }
    }

    pub(super) fn listen(_: Duration, _: impl FnMut(i32) -> Signalled + Send + 'static) -> std::io::Result<Listening> {
        ctrlc::set_handler(|| {}).map_err(std::io::Error::other)?;
        Ok(Listening)
    }

    pub(super) fn end_alike(status: ExitStatus) -> ! {
        std::process::exit(status.code().unwrap_or(crate::exit::FAILED.into()))
    }
}
