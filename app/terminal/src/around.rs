//! Runs another program transparently: its input, output, signals and exit code stay unchanged.

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

/// A shell's exit code for a command that does not exist.
const NOT_FOUND: u8 = 127;
/// A shell's exit code for a file that cannot be executed.
const NOT_RUNNABLE: u8 = 126;

/// Whether a command runs now.
static COMMAND_RUNS: AtomicBool = AtomicBool::new(false);
/// The exit status of the command that this process replaces.
static COMMAND_STATUS: OnceLock<ExitStatus> = OnceLock::new();

/// The handling of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signalled {
    /// The command receives it.
    PassOn,
    /// This program handled it.
    Taken,
}

/// The exit code of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command's: after the command has ended, this process ends in the same way, even if a signal or a fault ends it.
    OfCommand,
    /// This process's own.
    Own,
}

/// The end of a command.
#[derive(Debug)]
pub struct Outcome {
    /// Its exit status; of a killed command that of the signal.
    pub status: ExitStatus,
    /// Set if it was killed because it did not end after a signal.
    pub kill: Option<Kill>,
}

/// A killed command.
#[derive(Debug)]
pub struct Kill {
    /// The signal that was sent twice, or whose time limit expired.
    pub signal: i32,
    /// The time limit; `None` after a second signal.
    pub patience: Option<Duration>,
    /// The command and its descendants that still ran.
    pub processes: Vec<Process>,
    /// Whether the command ended. A process that waits for a device in the kernel does not.
    pub ended: bool,
}

/// A running process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its process ID.
    pub pid: u32,
    /// The name of its program.
    pub name: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.pid, self.name)
    }
}

/// Runs commands, one at a time. Signals sent to this process are passed to the running command; without one they end this process.
///
/// A second SIGTERM or SIGINT kills the command and its descendants; so does the end of the time limit after the first SIGTERM. Key
/// presses in a terminal do not count, because the command receives them directly.
#[derive(Debug)]
pub struct Around {
    listening: system::Listening,
    exit: Exit,
}

impl Around {
    /// Starts handling signals. `heard` decides whether a signal is passed on; it must not block. After SIGTERM the command has
    /// `patience` to end.
    ///
    /// # Errors
    /// The system refuses the handler.
    pub fn listen(
        exit: Exit,
        patience: Duration,
        heard: impl FnMut(i32) -> Signalled + Send + 'static,
    ) -> std::io::Result<Self> {
        Ok(Self { listening: system::listen(patience, heard)?, exit })
    }

    /// Runs a command to its end. On Linux it is killed if this process is killed or the calling thread ends.
    ///
    /// # Errors
    /// The command cannot be started: a [`RuntimeFailure`] with a shell's exit codes, 127 and 126.
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
                ErrorKind::NotFound => RuntimeFailure::with_code(NOT_FOUND, format_args!("{name}: command not found")),
                _ => RuntimeFailure::with_code(NOT_RUNNABLE, format_args!("{name}: {error}")),
            };
            failure.into()
        })
    }
}

/// Ends this process in the same way as the command: with its exit code, or by its signal.
pub fn end_alike(status: ExitStatus) -> ! {
    vramlab::output::discard_unfinished();
    system::end_alike(status)
}

/// Protects the command and its exit code from a fault of this program, which the calling thread has reported. Returns if neither
/// is at risk.
pub(crate) fn contain_fault() {
    if let Some(status) = COMMAND_STATUS.get() {
        end_alike(*status);
    }
    // Exiting would end the command. The main thread runs it.
    while COMMAND_RUNS.load(SeqCst) && std::thread::current().name() != Some("main") {
        std::thread::park();
    }
}

#[cfg(target_os = "linux")]
pub use system::end_with_parent;
#[cfg(unix)]
pub(crate) use system::unblock;

#[cfg(not(unix))]
mod system {
    use super::{Outcome, Signalled};
    use std::process::{Command, ExitStatus};
    use std::time::Duration;

    /// The console sends key presses to all of its processes.
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
