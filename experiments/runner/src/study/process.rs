//! The process of a run: its group, its end, and the message of its failure.

#[cfg(unix)]
use super::forks::Forked;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};
use std::time::Duration;
use vramlab::input::read_end;

/// Interval between checks of a running process.
pub(crate) const POLL: Duration = Duration::from_millis(5);
/// Why an exit status is not known.
const WAITS: &str = "cannot wait for a run";
/// Bytes read from the end of a program's output.
const MOST_STDERR: u64 = 64 << 10;

/// The process of a run. Dropping it ends the process and all that it has started.
#[derive(Debug)]
pub(super) enum Process {
    /// Started by this program.
    Started(Group),
    #[cfg(unix)]
    Forked(Forked),
}

impl Process {
    /// The exit status of the process, if it has ended; processes that it left running are ended then.
    pub(super) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        match self {
            Self::Started(group) => group.ended(),
            #[cfg(unix)]
            Self::Forked(forked) => forked.ended(),
        }
    }

    /// Ends the process and all that it has started.
    pub(super) fn kill(&mut self) {
        match self {
            Self::Started(group) => group.kill(),
            #[cfg(unix)]
            Self::Forked(forked) => forked.kill(),
        }
    }

    /// Number of the group of a started process, which is its own number; `None` for a forked one.
    pub(super) fn group(&self) -> Option<u32> {
        match self {
            Self::Started(group) => Some(group.leader.id()),
            #[cfg(unix)]
            Self::Forked(_) => None,
        }
    }

    /// Whether a started process has ended; it is not collected, so its number remains its own.
    pub(super) fn has_ended(&self) -> Result<bool> {
        match self {
            Self::Started(group) => group.has_ended(),
            #[cfg(unix)]
            Self::Forked(_) => Ok(false),
        }
    }

    /// The reason why the process ended, if it is not the program's.
    pub(super) fn failure(&self) -> Option<String> {
        match self {
            #[cfg(unix)]
            Self::Forked(forked) if forked.is_lost() => {
                Some("the process that it was forked from has ended, and with it this run".to_owned())
            }
            _ => None,
        }
    }
}

/// The input and the output of a process.
pub(super) type Pipes = (ChildStdin, ChildStdout);

/// Sets the variables of a process, and removes those without a value.
pub(super) fn set_variables(command: &mut Command, variables: &[(String, Option<OsString>)]) {
    for (name, value) in variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
}

/// The last error in a program's output, without the word before it, else the last line.
pub(super) fn last_message(path: &Path) -> Option<String> {
    let end = read_end(path, MOST_STDERR).unwrap_or_default();
    let text = String::from_utf8_lossy(&end);
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    text.lines().rev().find_map(|line| line.strip_prefix("error: ")).or(last).map(str::to_owned)
}

/// A running process and its group. Dropping it ends the whole group.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) leader: Child,
    over: bool,
}

impl Group {
    /// Starts a process in its own group. The process ends when the thread that started it ends for any reason, so
    /// this thread should wait for it.
    pub(crate) fn start(command: &mut Command) -> std::io::Result<Self> {
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(command, 0);
        #[cfg(target_os = "linux")]
        terminal::around::end_with_parent(command);
        Ok(Self { leader: command.spawn()?, over: false })
    }

    /// The input and the output of the process, if both are pipes.
    pub(super) fn pipes(&mut self) -> Option<Pipes> {
        self.leader.stdin.take().zip(self.leader.stdout.take())
    }

    /// Whether the process has ended. It is not collected: until then no other process can have its number, which is
    /// also its group's. Elsewhere than on Unix false until [`Group::ended`] has collected it.
    fn has_ended(&self) -> Result<bool> {
        #[cfg(unix)]
        {
            use rustix::process::{WaitId, WaitIdOptions, waitid};
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            let ended = waitid(WaitId::Pid(rustix::process::Pid::from_child(&self.leader)), options);
            Ok(ended.context(WAITS)?.is_some())
        }
        #[cfg(not(unix))]
        Ok(self.over)
    }

    /// The exit status of the process, if it has ended; processes that it left running are ended then.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        #[cfg(unix)]
        {
            if !self.has_ended()? {
                return Ok(None);
            }
            self.kill();
        }
        let status = self.leader.try_wait().context(WAITS)?;
        self.over = status.is_some();
        Ok(status)
    }

    /// Ends it and all processes that it has started.
    pub(crate) fn kill(&mut self) {
        // Both fail only if there is nothing left to end.
        #[cfg(unix)]
        let _ = rustix::process::kill_process_group(
            rustix::process::Pid::from_child(&self.leader),
            rustix::process::Signal::KILL,
        );
        #[cfg(not(unix))]
        let _ = self.leader.kill();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.over {
            self.kill();
            // It was killed, so this wait is short.
            let _ = self.leader.wait();
        }
    }
}
