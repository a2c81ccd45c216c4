//! Runs that are forked from a process that has imported PyTorch: its imports take longer than most runs.
//!
//! There is one server (`experiments/pytorch/programs/fork_server.py`) for each environment, as PyTorch reads variables when it
//! is imported. A run is a connection to its server: it carries the request, then the status of the ended process.
//! Closing it ends the process.

use super::execute::Interrupted;
use super::process::{Group, POLL, last_message, set_variables};
use super::programs::CommandLine;
use anyhow::{Context, Result};
use serde_json::json;
use std::collections::{BTreeMap, btree_map::Entry};
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use terminal::RuntimeFailure;

/// Wait status of a process that signal KILL ended.
const KILLED: i32 = 9;

/// Limit on the time until a server listens, which imports PyTorch before; a cold disk may take a minute.
const MOST_IMPORTING: Duration = Duration::from_secs(600);

/// The variables of a process.
type Environment = Vec<(String, Option<OsString>)>;

/// The servers of an experiment, by the variables of their environment. Dropping them ends their processes.
#[derive(Debug, Default)]
pub(super) struct Forks(Mutex<BTreeMap<Environment, Server>>);

/// A process from which runs are forked.
#[derive(Debug)]
struct Server {
    process: Group,
    /// Contains the socket and the log.
    folder: TempDir,
}

/// A run that was forked.
#[derive(Debug)]
pub(super) struct Forked {
    connection: UnixStream,
    reply: Vec<u8>,
}

impl Forks {
    /// Starts the servers of these commands and waits for them. They end with the calling thread.
    pub(super) fn prepare(&self, lines: &[CommandLine], stop: &AtomicBool) -> Result<()> {
        for connects in [false, true] {
            for line in lines {
                self.server(line, |server| if connects { server.connect(stop).map(drop) } else { Ok(()) })?;
            }
        }
        Ok(())
    }

    /// Forks a run in a directory. It prints to a file, standard output to `out` if that is given.
    pub(super) fn start(
        &self,
        line: &CommandLine,
        folder: &Path,
        log: &Path,
        out: Option<&Path>,
        stop: &AtomicBool,
    ) -> Result<Forked> {
        let variables: BTreeMap<&str, String> = line
            .variables
            .iter()
            .filter(|variable| !is_shared(variable))
            .filter_map(|(name, value)| Some((name.as_str(), value.as_ref()?.to_string_lossy().into_owned())))
            .collect();
        let arguments: Vec<_> = line.arguments.iter().map(|argument| argument.to_string_lossy()).collect();
        let [folder, log, out] = [folder, log, out.unwrap_or(log)].map(Path::to_string_lossy);
        let request =
            json!({"arguments": arguments, "variables": variables, "folder": folder, "log": log, "output": out});
        let mut connection = self.server(line, |server| server.connect(stop))?;
        // This fails if the server has ended, which `Forked::ended` notices.
        let _ = connection.write_all(format!("{request}\n").as_bytes());
        connection.set_nonblocking(true).context("cannot wait for a forked run")?;
        Ok(Forked { connection, reply: Vec::new() })
    }

    /// Calls a function with the server of a command, which is started if there is none or it has ended.
    fn server<T>(&self, line: &CommandLine, then: impl FnOnce(&mut Server) -> Result<T>) -> Result<T> {
        let shared: Environment = line.variables.iter().filter(|variable| is_shared(variable)).cloned().collect();
        let mut servers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = servers.get_mut(&shared)
            && server.process.ended()?.is_some()
        {
            servers.remove(&shared);
        }
        then(match servers.entry(shared) {
            Entry::Occupied(server) => server.into_mut(),
            Entry::Vacant(place) => {
                let server = Server::start(line, place.key())?;
                place.insert(server)
            }
        })
    }
}

/// Whether the runs of a server share a variable. VramLab's are set after the fork: they select the allocator.
fn is_shared((name, value): &(String, Option<OsString>)) -> bool {
    value.is_none() || !name.starts_with("VRAMLAB_")
}

impl Server {
    fn start(line: &CommandLine, variables: &[(String, Option<OsString>)]) -> Result<Self> {
        let fails = || format!("cannot start {}", Path::new(&line.program).display());
        let folder = tempfile::tempdir().with_context(fails)?;
        let mut command = Command::new(&line.program);
        command.arg(line.server.as_deref().unwrap_or(Path::new(""))).arg(folder.path().join("socket"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(folder.path().join("log")).with_context(fails)?);
        set_variables(&mut command, variables);
        Ok(Self { process: Group::start(&mut command).with_context(fails)?, folder })
    }

    /// A connection, once the server has imported PyTorch.
    fn connect(&mut self, stop: &AtomicBool) -> Result<UnixStream> {
        let began = Instant::now();
        loop {
            if let Ok(connection) = UnixStream::connect(self.folder.path().join("socket")) {
                return Ok(connection);
            }
            if stop.load(SeqCst) {
                return Err(Interrupted.into());
            }
            if began.elapsed() > MOST_IMPORTING {
                let seconds = MOST_IMPORTING.as_secs();
                let text = format!("the process from which runs are forked has not imported PyTorch in {seconds} s");
                return Err(RuntimeFailure::new(text).into());
            }
            if let Some(status) = self.process.ended()? {
                let message = last_message(&self.folder.path().join("log"));
                let message = message.unwrap_or_else(|| "it printed no error".to_owned());
                let text = format!("the process from which runs are forked ended with {status}: {message}");
                return Err(RuntimeFailure::new(text).into());
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Forked {
    /// The exit status of the process, if it has ended: that of a killed one if its server has ended.
    pub(super) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        match self.connection.read_to_end(&mut self.reply) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            _ => Ok(Some(self.status().unwrap_or(ExitStatus::from_raw(KILLED)))),
        }
    }

    fn status(&self) -> Option<ExitStatus> {
        std::str::from_utf8(&self.reply).ok()?.trim().parse().ok().map(ExitStatus::from_raw)
    }

    /// Whether the server ended before the run did.
    pub(super) fn is_lost(&self) -> bool {
        self.status().is_none()
    }

    /// Ends the process and all that it has started.
    pub(super) fn kill(&self) {
        // This fails only if the server has ended.
        let _ = self.connection.shutdown(Shutdown::Write);
    }
}
