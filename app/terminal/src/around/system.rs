//! Signals and processes on Unix.

use super::{COMMAND_STATUS, Kill, Outcome, Signalled};
use crate::signals::{self, is_ignored};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Signals that end a program by default, except those that report its own faults.
const PASSED_ON: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
/// A signal may arrive twice: `timeout` sends it to a process and then to its group.
const SENT_ONCE: Duration = Duration::from_millis(100);
/// Time limit for killed processes to end.
const TO_DIE: Duration = Duration::from_secs(5);

/// The running command.
#[derive(Debug)]
pub(super) struct Listening {
    command: Arc<Mutex<Option<Child>>>,
    patience: Duration,
}

#[derive(Debug)]
struct Child {
    pid: Pid,
    events: Sender<Event>,
}

/// An event for the thread that runs a command.
#[derive(Debug)]
enum Event {
    Exit,
    /// A signal requested the end.
    Asked(i32),
}

/// The reason for killing a command.
#[derive(Debug, PartialEq, Eq)]
struct Reason {
    signal: i32,
    patience: Option<Duration>,
}

impl Listening {
    /// Starts the command and waits for its end, or kills it. A signal that arrives before the start is delivered after it. `ended`
    /// is called while signals are still passed to the command.
    pub(super) fn run(&self, command: &mut Command, ended: impl FnOnce(ExitStatus)) -> std::io::Result<Outcome> {
        for signal in signals::ignored_on_start() {
            ignore(command, signal);
        }
        if let Some(mask) = signals::mask_on_start() {
            set_mask(command, mask);
        }
        let (events, heard) = channel();
        let (hand_over, pids) = channel();
        let exit = events.clone();
        // Started before the command, so that a system without free threads refuses it here.
        std::thread::Builder::new().name("waits".to_owned()).spawn(move || {
            if let Ok(pid) = pids.recv() {
                wait_for(pid);
                let _ = exit.send(Event::Exit);
            }
        })?;
        let (mut child, pid) = {
            let mut running = lock(&self.command);
            let child = command.spawn()?;
            let pid = Pid::from_child(&child);
            *running = Some(Child { pid, events });
            (child, pid)
        };
        // The thread waits for this.
        let _ = hand_over.send(pid);
        let outcome = match watch(&heard, self.patience) {
            None => child.wait().map(|status| Outcome { status, kill: None }),
            Some(reason) => Ok(kill(pid, &heard, &reason)),
        };
        // The command is collected only now; earlier its process ID could have been reused.
        let mut running = lock(&self.command);
        // The command was started, so an error here is not a failure to start it.
        let outcome = outcome.unwrap_or_else(|error| {
            crate::fail(format_args!("the exit status of the command is unknown: {error}"));
            Outcome { status: ExitStatus::from_raw(i32::from(crate::exit::FAILED) << 8), kill: None }
        });
        ended(outcome.status);
        *running = None;
        Ok(outcome)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the end of a process without collecting it, so that its process ID is not reused.
fn wait_for(pid: Pid) {
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {}
}

/// Waits until the command has ended (`None`), or must be killed.
fn watch(heard: &Receiver<Event>, patience: Duration) -> Option<Reason> {
    let (mut term, mut int): (Option<Instant>, Option<Instant>) = (None, None);
    loop {
        let event = match term {
            Some(first) => heard.recv_timeout(patience.saturating_sub(first.elapsed())),
            None => heard.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let signal = match event {
            Ok(Event::Asked(signal)) => signal,
            Ok(Event::Exit) | Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => return Some(Reason { signal: SIGTERM, patience: Some(patience) }),
        };
        let again = |first: Option<Instant>| first.is_some_and(|first| first.elapsed() >= SENT_ONCE);
        // Programs may survive an interrupt, and get another one much later.
        let insists = int.is_some_and(|first| first.elapsed() <= patience);
        if again(term) || signal == SIGINT && insists && again(int) {
            return Some(Reason { signal, patience: None });
        }
        match signal {
            SIGTERM => term = term.or_else(|| Some(Instant::now())),
            _ if insists => {}
            _ => int = Some(Instant::now()),
        }
    }
}

/// Kills a command and its descendants.
fn kill(pid: Pid, heard: &Receiver<Event>, reason: &Reason) -> Outcome {
    #[cfg(target_os = "linux")]
    let processes = super::tree::stop(pid);
    #[cfg(not(target_os = "linux"))]
    let processes = Vec::new();
    let pids = processes.iter().filter_map(|process| Pid::from_raw(i32::try_from(process.pid).ok()?));
    // The command last: while it exists, it is the parent of the others.
    for pid in pids.filter(|other| *other != pid).chain([pid]) {
        // The process may have ended.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
    let until = Instant::now() + TO_DIE;
    let ended = loop {
        match heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Event::Asked(_)) => {}
            Ok(Event::Exit) => break true,
            Err(_) => break false,
        }
    };
    let kill = Kill { signal: reason.signal, patience: reason.patience, processes, ended };
    Outcome { status: ExitStatus::from_raw(reason.signal), kill: Some(kill) }
}

pub(super) fn listen(
    patience: Duration,
    mut heard: impl FnMut(i32) -> Signalled + Send + 'static,
) -> std::io::Result<Listening> {
    let command: Arc<Mutex<Option<Child>>> = Arc::default();
    let running = Arc::clone(&command);
    // Signals ignored on start, as under `nohup`, stay ignored in the command.
    let handled = PASSED_ON.into_iter().filter(|signal| !is_ignored(*signal));
    let mut signals = SignalsInfo::<WithOrigin>::new(handled)?;
    let mut take = move |Origin { signal, cause, .. }: Origin| {
        let child = lock(&running).as_ref().map(|child| (child.pid, child.events.clone()));
        let Some((pid, events)) = child else {
            vramlab::output::discard_unfinished();
            match COMMAND_STATUS.get() {
                Some(status) => {
                    crate::say(&format!(
                        "signal {signal} arrived after the command's end; remaining steps are skipped"
                    ));
                    end_alike(*status)
                }
                None => std::process::exit(128 + signal),
            }
        };
        // The terminal sends its signals to all processes in the foreground.
        if matches!(cause, Cause::Kernel) || heard(signal) == Signalled::Taken {
            return;
        }
        if let Some(signal) = Signal::from_named_raw(signal) {
            // The process may have ended.
            let _ = rustix::process::kill_process(pid, signal);
        }
        if [SIGTERM, SIGINT].contains(&signal) {
            let _ = events.send(Event::Asked(signal));
        }
    };
    let listener = std::thread::Builder::new().name("signals".to_owned());
    listener.spawn(move || signals.forever().for_each(&mut take))?;
    Ok(Listening { command, patience })
}

pub(super) fn end_alike(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        // A core dump of this process would not describe the command.
        let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
        let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
        // The first process of a container does not receive fatal signals; use the code that a shell would show.
        if std::process::id() != 1 && signal_hook::low_level::emulate_default_handler(signal).is_err() {
            // The library emulates the usual signals; others have no handler here.
            let _ = signal_hook::low_level::raise(signal);
        }
        std::process::exit(128 + signal)
    }
    std::process::exit(status.code().unwrap_or(crate::exit::FAILED.into()))
}

/// Makes the system kill a process when the thread that started it ends, even if that thread was killed.
#[cfg(target_os = "linux")]
pub fn end_with_parent(command: &mut Command) {
    use rustix::process::{getppid, set_parent_process_death_signal};
    let parent = i32::try_from(std::process::id()).ok().and_then(Pid::from_raw);
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // A parent that ended earlier sends no signal.
        if getppid() == parent { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    // SAFETY: code between fork and exec must be async-signal-safe; `ask` makes two system calls and allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// Makes a command ignore a signal, as this process did on start.
fn ignore(command: &mut Command, signal: i32) {
    let ignore = move || {
        // SAFETY: `signal` sets a disposition and takes no pointer.
        let before = unsafe { libc::signal(signal, libc::SIG_IGN) };
        if before == libc::SIG_ERR { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: code between fork and exec must be async-signal-safe; `signal` is, and nothing is allocated.
    unsafe { command.pre_exec(ignore) };
}

/// Unblocks signals in the calling thread. Returns the mask from before.
pub(crate) fn unblock(signals: &[i32]) -> std::io::Result<libc::sigset_t> {
    let mut open = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` writes a complete set to the place that the pointer names, which is this function's own.
    unsafe { libc::sigemptyset(open.as_mut_ptr()) };
    // SAFETY: `sigemptyset` initialised the set.
    let mut open = unsafe { open.assume_init() };
    for signal in signals {
        // SAFETY: the set is initialised and this function's own.
        unsafe { libc::sigaddset(&raw mut open, *signal) };
    }
    let mut before = open;
    // SAFETY: both sets are initialised and this function's own.
    let error = unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const open, &raw mut before) };
    if error != 0 {
        return Err(std::io::Error::from_raw_os_error(error));
    }
    Ok(before)
}

/// Starts a command with a signal mask: that of this process on start. Rust's library would unblock all.
fn set_mask(command: &mut Command, mask: libc::sigset_t) {
    let set = move || {
        // SAFETY: the set is initialised and the closure's own; a null pointer requests no previous mask.
        let error = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut()) };
        if error == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(error)) }
    };
    // SAFETY: code between fork and exec must be async-signal-safe; the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(set) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn after(events: impl IntoIterator<Item = Event>, patience: Duration) -> Option<Reason> {
        let (sender, heard) = channel();
        events.into_iter().for_each(|event| sender.send(event).unwrap());
        watch(&heard, patience)
    }

    #[test]
    fn sigterm_kills_after_the_time_limit() {
        let patience = Duration::from_millis(1);
        let expected = Reason { signal: SIGTERM, patience: Some(patience) };
        assert_eq!(after([Event::Asked(SIGTERM)], patience), Some(expected));
        assert_eq!(after([Event::Asked(SIGTERM), Event::Exit], LONG), None);
    }

    #[test]
    fn a_signal_that_immediately_repeats_counts_once() {
        for signal in [SIGTERM, SIGINT] {
            assert_eq!(after([Event::Asked(signal), Event::Asked(signal), Event::Exit], LONG), None);
        }
    }

    #[test]
    fn the_second_signal_kills() {
        for (first, second, kills) in [
            (SIGTERM, SIGTERM, true),
            (SIGTERM, SIGINT, true),
            (SIGINT, SIGINT, true),
            // The usual order of escalation: the command may still end by itself.
            (SIGINT, SIGTERM, false),
        ] {
            let (sender, heard) = channel();
            sender.send(Event::Asked(first)).unwrap();
            let late = std::thread::spawn(move || {
                std::thread::sleep(2 * SENT_ONCE);
                sender.send(Event::Asked(second)).unwrap();
                // Received if the second signal did not kill.
                let _ = sender.send(Event::Exit);
            });
            let expected = kills.then_some(Reason { signal: second, patience: None });
            assert_eq!(watch(&heard, LONG), expected, "{first}, {second}");
            late.join().unwrap();
        }
    }

    #[test]
    fn interrupts_far_apart_do_not_kill_the_command() {
        let (sender, heard) = channel();
        sender.send(Event::Asked(SIGINT)).unwrap();
        let late = std::thread::spawn(move || {
            std::thread::sleep(2 * SENT_ONCE);
            sender.send(Event::Asked(SIGINT)).unwrap();
            let _ = sender.send(Event::Exit);
        });
        assert_eq!(watch(&heard, Duration::from_millis(1)), None);
        late.join().unwrap();
    }
}
