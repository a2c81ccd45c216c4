//! Processes that a command waits for: `compare` for its trainers, `campaign` for the commands of its parts, `fidelity` for the
//! runner.
//!
//! Each is the leader of a group of its own, so that a signal to this program ends it with all that it has started.

use crate::study::process::{Group, POLL};
use anyhow::{Context, Result};
use std::process::{Command, ExitStatus};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use terminal::RuntimeFailure;
use terminal::signals::{self, Signals};

/// Time that a process has after a signal, to close its record.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts processes, one at a time, and passes on the signals that end this program.
#[derive(Debug)]
pub(crate) struct Children {
    signals: Signals,
}

impl Children {
    /// Starts handling signals: from here on the first one ends this program by an error of [`Children::run`] or
    /// [`Children::check`].
    ///
    /// # Errors
    ///
    /// The system refuses the handler.
    pub(crate) fn listen() -> Result<Self> {
        signals::record_begins();
        Ok(Self { signals: Signals::listen().context("cannot listen for signals")? })
    }

    /// Runs a command to its end. The inner error is that of a command that cannot be started. `during` is what a signal
    /// interrupts.
    ///
    /// # Errors
    ///
    /// A signal has arrived; then the process and all that it started have ended.
    pub(crate) fn run(&self, command: &mut Command, during: &str) -> Result<std::io::Result<ExitStatus>> {
        self.check(during)?;
        let mut group = match Group::start(command) {
            Ok(group) => group,
            Err(error) => return Ok(Err(error)),
        };
        let mut asked: Option<Instant> = None;
        let status = loop {
            if self.signals.stop().load(SeqCst) {
                match asked {
                    None => {
                        ask(&mut group, self.signals.exit_code());
                        asked = Some(Instant::now());
                    }
                    Some(since) if since.elapsed() >= PATIENCE => group.kill(),
                    Some(_) => {}
                }
            }
            match group.ended()? {
                Some(status) => break status,
                None => std::thread::sleep(POLL),
            }
        };
        self.check(during)?;
        Ok(Ok(status))
    }

    /// Whether this program may go on.
    ///
    /// # Errors
    ///
    /// A signal has arrived.
    pub(crate) fn check(&self, during: &str) -> Result<()> {
        if !self.signals.stop().load(SeqCst) {
            return Ok(());
        }
        Err(RuntimeFailure::with_code(self.signals.exit_code(), format!("interrupted {during}")).into())
    }
}

/// Passes the signal of an exit code on to a process and all that it has started.
#[cfg(unix)]
fn ask(group: &mut Group, exit_code: u8) {
    use rustix::process::{Pid, Signal, kill_process_group};
    let signal = match exit_code {
        129 => Signal::HUP,
        130 => Signal::INT,
        _ => Signal::TERM,
    };
    // This fails only if there is nothing left to end.
    let _ = kill_process_group(Pid::from_child(&group.leader), signal);
}

/// Elsewhere a process cannot be asked.
#[cfg(not(unix))]
fn ask(group: &mut Group, _: u8) {
    group.kill();
}
