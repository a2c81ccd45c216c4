//! `--gpus N`: this program starts itself once for each rank, waits for all, and lets none outlive the others.

use super::environment::LAUNCHED;
use crate::error::{Result, TrainError};
use crate::settings::{DeviceChoice, Settings};
use std::ffi::OsString;
use std::io::{self, Read};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};
use terminal::signals::Signals;
use terminal::{exit, fail};
use vramlab::{CudaDriver, DeviceName};

/// Ranks that have not ended this long after the first that failed are killed.
const GRACE: Duration = Duration::from_secs(8);
/// Pause between two looks at the ranks.
const PAUSE: Duration = Duration::from_millis(10);
/// Most that is kept of what a rank writes to standard error.
const MOST_TEXT: u64 = 64 << 10;

/// The socket that listens, which the starting process gave to rank 0 as its standard input.
///
/// # Errors
/// [`TrainError::Input`] when it is none.
pub(super) fn inherited_socket() -> Result<TcpListener> {
    let socket = io::stdin().as_fd().try_clone_to_owned().map(TcpListener::from);
    socket.and_then(|socket| socket.local_addr().map(|_| socket)).map_err(|error| {
        TrainError::Input(format!("{LAUNCHED} is set and standard input is not a socket: {error}; unset it"))
    })
}

/// Checks that this machine has a GPU for each rank.
fn enough_gpus(settings: &Settings, count: u32) -> Result<()> {
    let (first, gpus) = match settings.device {
        DeviceChoice::Named(DeviceName::Cuda(first)) => (first, CudaDriver::probe()?.len()),
        DeviceChoice::Named(_) => return Ok(()),
        DeviceChoice::Auto => match CudaDriver::probe() {
            Ok(gpus) => (0, gpus.len()),
            Err(_) => return Ok(()),
        },
    };
    // CAST: a number of GPUs.
    compare(count as usize, first, gpus)
}

/// Refuses `count` ranks from GPU `first` on, on a machine with this many GPUs, if there are too few.
fn compare(count: usize, first: usize, gpus: usize) -> Result<()> {
    let plural = if gpus == 1 { "" } else { "s" };
    if count <= gpus.saturating_sub(first) {
        return Ok(());
    }
    let from = if first > 0 { format!(" from cuda:{first} on") } else { String::new() };
    Err(TrainError::Input(format!(
        "--gpus {count} needs {count} GPUs{from}, and this machine has {gpus} GPU{plural}; lower --gpus, or use --device sim"
    )))
}

/// A rank that was started.
#[derive(Debug)]
struct Rank {
    child: Child,
    /// Collects what it writes to standard error; rank 0 writes to that of this process.
    errors: Option<JoinHandle<String>>,
    ended: Option<ExitStatus>,
    /// True once this process has killed it.
    killed: bool,
}

impl Rank {
    fn start(rank: u32, count: u32, arguments: &[OsString], run: &str, listener: &TcpListener) -> io::Result<Self> {
        let port = listener.local_addr()?.port();
        let mut command = Command::new(std::env::current_exe()?);
        command.args(with_word(arguments)).process_group(0);
        let variables = [("RANK", rank), ("WORLD_SIZE", count), ("LOCAL_RANK", rank), ("MASTER_PORT", port.into())];
        command.envs(variables.map(|(name, value)| (name, value.to_string())));
        command.env("MASTER_ADDR", "127.0.0.1").env(LAUNCHED, run);
        if rank == 0 {
            command.stdin(OwnedFd::from(listener.try_clone()?));
        } else {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        }
        #[cfg(target_os = "linux")]
        terminal::around::end_with_parent(&mut command);
        let mut child = command.spawn()?;
        let errors = child.stderr.take().map(|mut stderr| {
            thread::spawn(move || {
                let mut text = Vec::new();
                let _ = stderr.by_ref().take(MOST_TEXT).read_to_end(&mut text);
                // Goes on reading, so that the rank never waits for room.
                let _ = io::copy(&mut stderr, &mut io::sink());
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        Ok(Self { child, errors, ended: None, killed: false })
    }

    fn kill(&mut self) {
        if self.ended.is_none() {
            self.killed = self.child.kill().is_ok();
        }
    }

    /// Its error in one line.
    fn error(&mut self) -> String {
        let text = self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default();
        let line = text.lines().rev().find_map(|line| line.strip_prefix("error: ")).map(str::to_owned);
        match (line, self.ended) {
            (Some(line), _) => line,
            (None, Some(status)) => match status.signal() {
                Some(signal) => format!("was killed by signal {signal}"),
                None => format!("ended with exit code {}", status.code().unwrap_or_default()),
            },
            (None, None) => "did not end".to_owned(),
        }
    }
}

/// The arguments of a rank: those of this process. A program that contains the trainer has a word of its own before the trainer's.
fn with_word(arguments: &[OsString]) -> Vec<OsString> {
    let process: Vec<OsString> = std::env::args_os().skip(1).collect();
    let trainer = arguments.get(1..).unwrap_or_default();
    if process.ends_with(trainer) { process } else { trainer.to_vec() }
}

/// Kills all ranks when the launcher ends before them.
#[derive(Debug)]
struct Ranks(Vec<Rank>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            rank.kill();
            if rank.ended.is_none() {
                let _ = rank.child.wait();
            }
        }
    }
}

/// Starts `count` ranks with the arguments of this process and waits for them; the exit code. Signals are passed on to rank 0, with
/// which all ranks end. Rank 0 prints the account of the run and its error.
///
/// # Errors
/// [`TrainError::Input`] when the machine has too few GPUs, or a rank cannot be started.
pub(crate) fn launch(count: u32, settings: &Settings, arguments: &[OsString], signals: &Signals) -> Result<u8> {
    enough_gpus(settings, count)?;
    let started = |error: io::Error| TrainError::Input(format!("cannot start {count} ranks: {error}"));
    terminal::signals::collect_children().map_err(started)?;
    // From here on the first signal is passed on, and the second ends this process and with it the ranks.
    terminal::signals::record_begins();
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(started)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let run = format!("{}-{}", std::process::id(), now.as_nanos());
    let mut ranks = Ranks(Vec::new());
    for rank in 0..count {
        ranks.0.push(Rank::start(rank, count, arguments, &run, &listener).map_err(started)?);
    }
    drop(listener);
    let (mut first_failed, mut deadline, mut passed_on) = (None, None, false);
    while ranks.0.iter().any(|rank| rank.ended.is_none()) {
        for (number, rank) in ranks.0.iter_mut().enumerate().filter(|(_, rank)| rank.ended.is_none()) {
            rank.ended = rank.child.try_wait().map_err(started)?;
            if rank.ended.is_some_and(|status| !status.success()) {
                first_failed.get_or_insert(number);
                deadline.get_or_insert_with(|| Instant::now() + GRACE);
            }
        }
        if !passed_on && signals.stop().load(std::sync::atomic::Ordering::Relaxed) {
            passed_on = true;
            pass_on(&ranks.0[0], signals);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            ranks.0.iter_mut().for_each(Rank::kill);
        }
        thread::sleep(PAUSE);
    }
    let Some(failed) = first_failed else { return Ok(exit::OK) };
    let of_first = ranks.0[0].ended.and_then(|status| status.code());
    if let Some(code) = of_first.filter(|code| *code != 0) {
        // Rank 0 has printed why.
        return Ok(u8::try_from(code).unwrap_or(exit::FAILED));
    }
    let cause = &mut ranks.0[failed];
    fail(format_args!("rank {failed}: {}", cause.error()));
    Ok(cause.ended.and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok()).unwrap_or(exit::FAILED))
}

fn pass_on(rank: &Rank, signals: &Signals) {
    let signal = rustix::process::Signal::from_named_raw(i32::from(signals.exit_code()) - 128);
    let pid = i32::try_from(rank.child.id()).ok().and_then(rustix::process::Pid::from_raw);
    if let (Some(pid), Some(signal), None) = (pid, signal, rank.ended) {
        // A rank that has ended meanwhile is not waited for yet, so the number is still its own.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_ranks_than_gpus_are_refused() {
        for (count, first, gpus) in [(2, 0, 2), (1, 3, 4), (4, 0, 8)] {
            assert!(compare(count, first, gpus).is_ok());
        }
        let error = |count, first, gpus| compare(count, first, gpus).unwrap_err().to_string();
        let line = error(4, 0, 2);
        assert_eq!(line, "--gpus 4 needs 4 GPUs, and this machine has 2 GPUs; lower --gpus, or use --device sim");
        assert!(error(2, 1, 2).contains("2 GPUs from cuda:1 on, and this machine has 2 GPUs"));
        assert!(error(2, 5, 1).contains("has 1 GPU;"), "a first GPU that is not there");
    }
}
