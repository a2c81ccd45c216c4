//! Signals and processes of Unix.

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

/// Those that end a program unless it says otherwise, but for the ones that tell of its own faults.
const PASSED_ON: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
/// One signal may arrive twice: `timeout` sends it to a process and then to the process's group.
const SENT_ONCE: Duration = Duration::from_millis(100);
/// Time for the system to end what was killed.
const TO_DIE: Duration = Duration::from_secs(5);

/// The command that runs.
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

/// What the thread waits for that runs a command.
#[derive(Debug)]
enum Event {
    Exit,
    /// A signal asks for the end.
    Asked(i32),
}

/// Why a command is killed.
#[derive(Debug, PartialEq, Eq)]
struct Reason {
    signal: i32,
    patience: Option<Duration>,
}

impl Listening {
    /// Starts the command and waits for its end, or kills it. A signal that comes before it has started waits, and
    /// goes to the command then. `ended` is called before a signal is no longer the command's.
    pub(super) fn run(&self, command: &mut Command, ended: impl FnOnce(ExitStatus)) -> std::io::Result<Outcome> {
        if signals::children_were_ignored() {
            ignore_children(command);
        }
        let (events, heard) = channel();
        let (hand_over, pids) = channel();
        let exit = events.clone();
        // Before anything runs: a system that has no thread to spare refuses it here.
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
        // The thread is there: it waits for this.
        let _ = hand_over.send(pid);
        let outcome = match watch(&heard, self.patience) {
            None => child.wait().map(|status| Outcome { status, kill: None }),
            Some(reason) => Ok(kill(pid, &heard, &reason)),
        };
        // It was not collected before, or its number could be another process's by now.
        let mut running = lock(&self.command);
        // Whatever the system says of a command that was started, it is no failure to start it.
        let outcome = outcome.unwrap_or_else(|error| {
            crate::fail(format_args!("the end of the command is not known: {error}"));
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

/// Until a process has ended. It is not collected: until then its number is no other process's.
fn wait_for(pid: Pid) {
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {}
}

/// Until the command has ended, or is to be killed.
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
        // Programs live on after an interrupt, and may get another one much later.
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

/// Kills a command with what it has started.
fn kill(pid: Pid, heard: &Receiver<Event>, reason: &Reason) -> Outcome {
    #[cfg(target_os = "linux")]
    let processes = super::tree::stop(pid);
    #[cfg(not(target_os = "linux"))]
    let processes = Vec::new();
    let pids = processes.iter().filter_map(|process| Pid::from_raw(i32::try_from(process.pid).ok()?));
    // The command last: while it is there, it is the parent of the others.
    for pid in pids.filter(|other| *other != pid).chain([pid]) {
        // It may have ended meanwhile.
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
    // What this process was hand_over to ignore, as under `nohup`, the command ignores, too.
    let wanted = PASSED_ON.into_iter().filter(|signal| !is_ignored(*signal));
    let mut signals = SignalsInfo::<WithOrigin>::new(wanted)?;
    let mut take = move |Origin { signal, cause, .. }: Origin| {
        let child = lock(&running).as_ref().map(|child| (child.pid, child.events.clone()));
        let Some((pid, events)) = child else {
            vramlab::output::discard_unfinished();
            match COMMAND_STATUS.get() {
                Some(status) => {
                    crate::say(&format!("signal {signal} came after the command's end; what follows it is left out"));
                    end_alike(*status)
                }
                None => std::process::exit(128 + signal),
            }
        };
        // Those of the terminal go to all processes in its foreground.
        if matches!(cause, Cause::Kernel) || heard(signal) == Signalled::Taken {
            return;
        }
        if let Some(signal) = Signal::from_named_raw(signal) {
            // It may have ended meanwhile.
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
        // The core of this process tells nothing of the one that died.
        let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
        let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
        // The first process of a container gets no signal that would end it; a shell would show this code.
        if std::process::id() != 1 && signal_hook::low_level::emulate_default_handler(signal).is_err() {
            // The library knows the usual signals, and no other has a handler here.
            let _ = signal_hook::low_level::raise(signal);
        }
        std::process::exit(128 + signal)
    }
    std::process::exit(status.code().unwrap_or(crate::exit::FAILED.into()))
}

/// Has the system kill a process when the thread that starts it is gone, also when that was killed and could end nothing
/// itself.
#[cfg(target_os = "linux")]
pub fn end_with_parent(command: &mut Command) {
    use rustix::process::{getppid, set_parent_process_death_signal};
    let parent = i32::try_from(std::process::id()).ok().and_then(Pid::from_raw);
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // A parent that ended before this was asked for sends nothing.
        if getppid() == parent { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec only what is safe in a signal's handler may be done; `ask` makes two system calls and
    // allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// Has a command ignore SIGCHLD, as this process was hand_over to.
fn ignore_children(command: &mut Command) {
    let ignore = || {
        // SAFETY: `signal` sets a disposition, which no pointer is needed for.
        let before = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        if before == libc::SIG_ERR { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: between fork and exec only what is safe in a signal's handler may be done, as `signal` is; nothing is allocated.
    unsafe { command.pre_exec(ignore) };
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
    fn sigterm_kills_when_the_patience_is_over() {
        let patience = Duration::from_millis(1);
        let expected = Reason { signal: SIGTERM, patience: Some(patience) };
        assert_eq!(after([Event::Asked(SIGTERM)], patience), Some(expected));
        assert_eq!(after([Event::Asked(SIGTERM), Event::Exit], LONG), None);
    }

    #[test]
    fn a_signal_that_arrives_twice_at_once_was_sent_once() {
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
            // The usual order of those who ask more and more firmly: the command may still end by itself.
            (SIGINT, SIGTERM, false),
        ] {
            let (sender, heard) = channel();
            sender.send(Event::Asked(first)).unwrap();
            let late = std::thread::spawn(move || {
                std::thread::sleep(2 * SENT_ONCE);
                sender.send(Event::Asked(second)).unwrap();
                // Is heard where the second did not kill.
                let _ = sender.send(Event::Exit);
            });
            let expected = kills.then_some(Reason { signal: second, patience: None });
            assert_eq!(watch(&heard, LONG), expected, "{first}, {second}");
            late.join().unwrap();
        }
    }

    #[test]
    fn interrupts_far_apart_leave_the_command_alone() {
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
