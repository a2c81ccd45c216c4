//! A program that runs another one and is not noticed: the other's input, output, signals and exit code are untouched.

use crate::RuntimeFailure;
use anyhow::Result;
use std::io::ErrorKind;
use std::process::{Command, ExitStatus};

/// A shell's code for a command that is not there.
const NOT_FOUND: u8 = 127;
/// A shell's code for a file that cannot be run.
const NOT_RUNNABLE: u8 = 126;

/// What may be done with a signal before it is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signalled {
    /// The command gets it.
    PassOn,
    /// It was for this program.
    Taken,
}

/// Runs commands, one at a time, in the place of this process: signals sent to it go to the command that runs. Without one a
/// signal ends this process.
#[derive(Debug)]
pub struct Around(system::Listening);

impl Around {
    /// Listens to signals from now on. `heard` is asked before one is passed on.
    ///
    /// # Errors
    /// When the system refuses the handler.
    pub fn listen(heard: impl FnMut(i32) -> Signalled + Send + 'static) -> std::io::Result<Self> {
        system::listen(heard).map(Self)
    }

    /// Runs a command to its end. It is killed where this process is, or the calling thread ends.
    ///
    /// # Errors
    /// The command cannot be started: a [`RuntimeFailure`] with the codes of a shell, 127 and 126.
    pub fn run(&self, command: &mut Command) -> Result<ExitStatus> {
        let name = command.get_program().to_string_lossy().into_owned();
        #[cfg(target_os = "linux")]
        end_with_parent(command);
        let mut child = self.0.start(|| command.spawn()).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                RuntimeFailure::with_code(NOT_FOUND, format_args!("{name}: there is no such command"))
            }
            _ => RuntimeFailure::with_code(NOT_RUNNABLE, format_args!("{name}: {error}")),
        })?;
        let status = child.wait();
        self.0.ended();
        status.map_err(|error| RuntimeFailure::new(format_args!("{name}: {error}")).into())
    }
}

/// Ends this process as the command ended: with its exit code, or by its signal.
pub fn end_alike(status: ExitStatus) -> ! {
    vramlab::output::discard_unfinished();
    system::end_alike(status)
}

#[cfg(target_os = "linux")]
pub use system::end_with_parent;

#[cfg(unix)]
mod system {
    use super::Signalled;
    use crate::signals::is_ignored;
    use rustix::process::Pid;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    use signal_hook::iterator::SignalsInfo;
    use signal_hook::iterator::exfiltrator::WithOrigin;
    use signal_hook::low_level::siginfo::{Cause, Origin};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, ExitStatus};
    use std::sync::{Arc, Mutex, PoisonError};

    /// Those that end a program unless it says otherwise, but for the ones that tell of its own faults.
    const PASSED_ON: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

    /// The command that runs.
    #[derive(Debug, Default)]
    pub(super) struct Listening {
        pid: Arc<Mutex<Option<Pid>>>,
    }

    impl Listening {
        /// Starts the command. A signal that comes meanwhile waits, and goes to the command then.
        pub(super) fn start(&self, spawn: impl FnOnce() -> std::io::Result<Child>) -> std::io::Result<Child> {
            let mut pid = self.pid.lock().unwrap_or_else(PoisonError::into_inner);
            let child = spawn()?;
            *pid = Some(Pid::from_child(&child));
            Ok(child)
        }

        pub(super) fn ended(&self) {
            *self.pid.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    pub(super) fn listen(mut heard: impl FnMut(i32) -> Signalled + Send + 'static) -> std::io::Result<Listening> {
        let listening = Listening::default();
        let pid = Arc::clone(&listening.pid);
        // What this process was told to ignore, as under `nohup`, the command ignores, too.
        let wanted = PASSED_ON.into_iter().filter(|signal| !is_ignored(*signal));
        let mut signals = SignalsInfo::<WithOrigin>::new(wanted)?;
        let mut take = move |Origin { signal, cause, .. }: Origin| {
            let running = *pid.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(pid) = running else {
                vramlab::output::discard_unfinished();
                std::process::exit(128 + signal)
            };
            // Those of the terminal go to all processes in its foreground.
            if matches!(cause, Cause::Kernel) || heard(signal) == Signalled::Taken {
                return;
            }
            if let Some(signal) = rustix::process::Signal::from_named_raw(signal) {
                // It may have ended meanwhile.
                let _ = rustix::process::kill_process(pid, signal);
            }
        };
        let listener = std::thread::Builder::new().name("signals".to_owned());
        listener.spawn(move || signals.forever().for_each(&mut take))?;
        Ok(listening)
    }

    pub(super) fn end_alike(status: ExitStatus) -> ! {
        if let Some(signal) = status.signal() {
            // The core of this process tells nothing of the one that died.
            let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
            let _ = signal_hook::low_level::emulate_default_handler(signal);
            std::process::exit(128 + signal)
        }
        std::process::exit(status.code().unwrap_or(crate::exit::FAILED.into()))
    }

    /// Has the system kill a process when the thread that starts it is gone, also when that was killed and could end nothing
    /// itself.
    #[cfg(target_os = "linux")]
    pub fn end_with_parent(command: &mut std::process::Command) {
        use rustix::process::{Signal, getppid, set_parent_process_death_signal};
        use std::os::unix::process::CommandExt;
        let parent = i32::try_from(std::process::id()).ok().and_then(rustix::process::Pid::from_raw);
        let ask = move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // A parent that ended before this was asked for sends nothing.
            if getppid() == parent { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
        };
        // SAFETY: between fork and exec only what is safe in a signal's handler may be done; `ask` makes two system calls and
        // allocates nothing.
        unsafe { command.pre_exec(ask) };
    }
}

#[cfg(not(unix))]
mod system {
    use super::Signalled;
    use std::process::ExitStatus;

    /// A key press goes to all processes of the console.
    #[derive(Debug)]
    pub(super) struct Listening;

    impl Listening {
        pub(super) fn start(
            &self,
            spawn: impl FnOnce() -> std::io::Result<std::process::Child>,
        ) -> std::io::Result<std::process::Child> {
            spawn()
        }

        pub(super) fn ended(&self) {}
    }

    pub(super) fn listen(_: impl FnMut(i32) -> Signalled + Send + 'static) -> std::io::Result<Listening> {
        ctrlc::set_handler(|| {}).map_err(std::io::Error::other)?;
        Ok(Listening)
    }

    pub(super) fn end_alike(status: ExitStatus) -> ! {
        std::process::exit(status.code().unwrap_or(crate::exit::FAILED.into()))
    }
}
