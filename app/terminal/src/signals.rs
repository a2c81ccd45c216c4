//! Signals that end the program: SIGINT (Ctrl-C), SIGTERM (`kill`, and schedulers when a job's time is over) and SIGHUP
//! (the terminal was closed).
//!
//! The first asks a run to end after its step, with its record closed. Where there is no record yet, and with the second,
//! the process ends at once. The exit code is 128 and the signal's number. Where SIGHUP is ignored, as under `nohup`, it
//! stays so.

use crate::{exit, fail};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::time::{Duration, Instant};
use vramlab::output;

/// Whether there is a record that a run will close.
static RECORDING: AtomicBool = AtomicBool::new(false);

/// Says that there is a record from now on, so that the first signal is left to the run that closes it.
pub fn record_begins() {
    RECORDING.store(true, SeqCst);
}

/// What was heard.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    stop: Arc<AtomicBool>,
    first: Arc<AtomicI32>,
}

impl Signals {
    /// Listens from now on, in a thread of its own.
    ///
    /// # Errors
    /// When the system refuses the handler.
    pub fn listen() -> std::io::Result<Self> {
        let signals = Self::default();
        let mut heard = Heard { signals: signals.clone(), since: None };
        outlive_file_limits()?;
        listen(move |signal| heard.signal(signal))?;
        Ok(signals)
    }

    /// Is set by the first signal; a run looks at it between steps.
    #[must_use]
    pub fn stop(&self) -> &AtomicBool {
        &self.stop
    }

    /// Exit code for what was heard first.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        u8::try_from(128 + self.first.load(SeqCst)).unwrap_or(exit::FAILED)
    }
}

/// Makes a write to a file that grows past the process's limit (`ulimit -f`) an error, which otherwise would end the
/// process.
///
/// # Errors
/// When the system refuses the handler.
pub fn outlive_file_limits() -> std::io::Result<()> {
    #[cfg(unix)]
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())?;
    Ok(())
}

/// Whether the parent of this process had it ignore SIGCHLD.
#[cfg(unix)]
static CHILDREN_WERE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Has the system keep how children ended until they are asked, also where this process was started with SIGCHLD ignored:
/// then it forgets that, and nobody can wait for them.
///
/// # Errors
/// When the system refuses the handler.
pub fn collect_children() -> std::io::Result<()> {
    #[cfg(unix)]
    if is_ignored(signal_hook::consts::SIGCHLD) {
        CHILDREN_WERE_IGNORED.store(true, SeqCst);
        signal_hook::flag::register(signal_hook::consts::SIGCHLD, Arc::default())?;
    }
    Ok(())
}

#[cfg(unix)]
pub(crate) fn children_were_ignored() -> bool {
    CHILDREN_WERE_IGNORED.load(SeqCst)
}

/// Has the first signal end the process at once, with the parts of unfinished files removed: for programs that keep no
/// record. Where the system refuses the handler, a signal ends the process as it would anyway.
pub fn end_at_once() {
    let _ = listen(|signal| {
        output::discard_unfinished();
        std::process::exit(128 + signal);
    });
}

#[derive(Debug)]
struct Heard {
    signals: Signals,
    since: Option<Instant>,
}

impl Heard {
    fn signal(&mut self, signal: i32) {
        /// One key press may arrive twice, from the terminal and from a parent that passes it on.
        const ONE_PRESS: Duration = Duration::from_millis(500);
        let Signals { stop, first } = &self.signals;
        match self.since {
            None => {
                self.since = Some(Instant::now());
                first.store(signal, SeqCst);
                stop.store(true, SeqCst);
                if !RECORDING.load(SeqCst) {
                    output::discard_unfinished();
                    fail("interrupted before there was anything to record");
                    std::process::exit(self.signals.exit_code().into());
                }
            }
            Some(since) if signal == first.load(SeqCst) && since.elapsed() <= ONE_PRESS => {}
            // For the case that a step does not end.
            Some(_) => {
                output::discard_unfinished();
                std::process::exit(128 + signal);
            }
        }
    }
}

#[cfg(unix)]
fn listen(mut heard: impl FnMut(i32) + Send + 'static) -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| *signal != SIGHUP || !is_ignored(SIGHUP));
    let mut signals = signal_hook::iterator::Signals::new(wanted)?;
    let listener = std::thread::Builder::new().name("signals".to_owned());
    listener.spawn(move || signals.forever().for_each(&mut heard)).map(drop)
}

/// Whether the parent of this process had it ignore a signal; no where the system does not say.
#[cfg(unix)]
pub(crate) fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(not(unix))]
fn listen(mut heard: impl FnMut(i32) + Send + 'static) -> std::io::Result<()> {
    const SIGINT: i32 = 2;
    ctrlc::set_handler(move || heard(SIGINT)).map_err(std::io::Error::other)
}
