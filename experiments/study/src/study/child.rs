//! A process of a run, with all that it starts: a process group of its own, which ends with the runner.

use anyhow::{Context, Result};
use std::process::{Child, Command, ExitStatus};

/// A running process and its group. Dropped, all of it is ended.
#[derive(Debug)]
pub(crate) struct Group {
    leader: Child,
    over: bool,
}

impl Group {
    /// Starts a process in a group of its own. It ends when the thread that started it does, however that ends, so this thread
    /// should wait for it.
    pub(crate) fn start(command: &mut Command) -> std::io::Result<Self> {
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(command, 0);
        #[cfg(target_os = "linux")]
        terminal::around::end_with_parent(command);
        Ok(Self { leader: command.spawn()?, over: false })
    }

    /// How the process ended, if it has; what it left running is ended then.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        const FAILS: &str = "cannot wait for a run";
        #[cfg(unix)]
        {
            use rustix::process::{WaitId, WaitIdOptions, waitid};
            // It is looked at before it is collected: until then its number, which is its group's, is no other process's.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            if waitid(WaitId::Pid(rustix::process::Pid::from_child(&self.leader)), options).context(FAILS)?.is_none() {
                return Ok(None);
            }
            self.kill();
        }
        let status = self.leader.try_wait().context(FAILS)?;
        self.over = status.is_some();
        Ok(status)
    }

    /// Ends it, with all that it has started.
    pub(crate) fn kill(&mut self) {
        // Both fail only when there is nothing left to end.
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
            // It was killed, so this is short.
            let _ = self.leader.wait();
        }
    }
}
