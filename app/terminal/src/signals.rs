//! Signals that end the program: SIGINT (Ctrl-C), SIGTERM (`kill`, and schedulers at a job's time limit) and SIGHUP (closed
//! terminal).
//!
//! The first signal requests a run to end after its step and to close its record. Without a record, and on the second signal, the
//! process ends immediately. The exit code is 128 plus the signal's number. If SIGHUP is ignored on start, as under `nohup`, it stays
//! ignored.

use crate::{exit, fail};
use std::sync::Arc;
#[cfg(unix)]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::time::{Duration, Instant};
use vramlab::output;

/// Whether a run has an open record.
static RECORDING: AtomicBool = AtomicBool::new(false);

/// Marks a record as open, so that the run can close it after the first signal.
pub fn record_begins() {
    RECORDING.store(true, SeqCst);
}

/// The received signals.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    stop: Arc<AtomicBool>,
    first: Arc<AtomicI32>,
}

impl Signals {
    /// Starts handling signals in a separate thread.
    ///
    /// # Errors
    /// The system refuses the handler.
    pub fn listen() -> std::io::Result<Self> {
        let signals = Self::default();
        let mut heard = Heard { signals: signals.clone(), since: None };
        outlive_file_limits()?;
        listen(move |signal| heard.signal(signal))?;
        Ok(signals)
    }

    /// A flag set by the first signal; a run checks it between steps.
    #[must_use]
    pub fn stop(&self) -> &AtomicBool {
        &self.stop
    }

    /// The exit code for the first signal.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        u8::try_from(128 + self.first.load(SeqCst)).unwrap_or(exit::FAILED)
    }
}

/// Makes a write beyond the process's file size limit (`ulimit -f`) return an error; by default it ends the process.
///
/// # Errors
/// The system refuses the handler.
pub fn outlive_file_limits() -> std::io::Result<()> {
    // A command inherits what is ignored, but no handler.
    #[cfg(unix)]
    if !is_ignored(signal_hook::consts::SIGXFSZ) {
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())?;
    }
    Ok(())
}

/// Whether this process was started with SIGCHLD ignored.
#[cfg(unix)]
static CHILDREN_WERE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Makes the system keep the exit status of child processes even if this process was started with SIGCHLD ignored; otherwise the
/// status is lost and waiting for children fails.
///
/// # Errors
/// The system refuses the handler.
pub fn collect_children() -> std::io::Result<()> {
    #[cfg(unix)]
    if is_ignored(signal_hook::consts::SIGCHLD) {
        CHILDREN_WERE_IGNORED.store(true, SeqCst);
        signal_hook::flag::register(signal_hook::consts::SIGCHLD, Arc::default())?;
    }
    Ok(())
}

/// Whether this process was started with SIGPIPE ignored. Rust's library ignores it before `main`, and gives commands the default.
#[cfg(target_os = "linux")]
static PIPES_WERE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Runs before Rust's library is initialised.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_AT_PIPES: extern "C" fn() = look_at_pipes;

#[cfg(target_os = "linux")]
extern "C" fn look_at_pipes() {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null pointer changes nothing, and the structure is this function's own.
    let asked = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: a structure of integers, which is filled or zero.
    let action = unsafe { action.assume_init() };
    PIPES_WERE_IGNORED.store(asked == 0 && action.sa_sigaction == libc::SIG_IGN, SeqCst);
}

/// Signals that this process was started to ignore, and a command would not.
#[cfg(unix)]
pub(crate) fn ignored_on_start() -> Vec<i32> {
    let mut out = Vec::new();
    if CHILDREN_WERE_IGNORED.load(SeqCst) {
        out.push(libc::SIGCHLD);
    }
    #[cfg(target_os = "linux")]
    if PIPES_WERE_IGNORED.load(SeqCst) {
        out.push(libc::SIGPIPE);
    }
    out
}

/// The signal mask of this process on start.
#[cfg(unix)]
static MASK_ON_START: OnceLock<libc::sigset_t> = OnceLock::new();

/// Unblocks the signals that the programs handle. A parent that starts this process with blocked signals, which are inherited, could
/// otherwise not end it except by SIGKILL. Later threads inherit the mask of the thread that calls this.
///
/// # Errors
/// The system refuses to change the mask.
#[cfg(unix)]
pub fn unblock() -> std::io::Result<()> {
    use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
    const HANDLED: [i32; 8] = [SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ];
    let _ = MASK_ON_START.set(crate::around::unblock(&HANDLED)?);
    Ok(())
}

#[cfg(unix)]
pub(crate) fn mask_on_start() -> Option<libc::sigset_t> {
    MASK_ON_START.get().copied()
}

/// Makes the first signal end the process immediately and remove unfinished files, for programs without a record. If the system refuses
/// the handler, a signal ends the process by default.
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
        /// A key press may arrive twice, from the terminal and from a parent that forwards it.
        const ONE_PRESS: Duration = Duration::from_millis(500);
        let Signals { stop, first } = &self.signals;
        match self.since {
            None => {
                self.since = Some(Instant::now());
                first.store(signal, SeqCst);
                stop.store(true, SeqCst);
                if !RECORDING.load(SeqCst) {
                    output::discard_unfinished();
                    fail("interrupted before the record was opened");
                    std::process::exit(self.signals.exit_code().into());
                }
            }
            Some(since) if signal == first.load(SeqCst) && since.elapsed() <= ONE_PRESS => {}
            // A step may not end.
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
    let handled = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| *signal != SIGHUP || !is_ignored(SIGHUP));
    let mut signals = signal_hook::iterator::Signals::new(handled)?;
    let listener = std::thread::Builder::new().name("signals".to_owned());
    listener.spawn(move || signals.forever().for_each(&mut heard)).map(drop)
}

/// Whether this process was started with a signal ignored; `false` if unknown.
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
