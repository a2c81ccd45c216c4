//! A process and those that it has started, from `/proc`.

use super::Process;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::{BTreeMap, BTreeSet};

/// Most times that the processes are listed anew: each new one was started before its parent was stopped.
const ROUNDS: usize = 32;

/// Stops a process and all that it has started, and those have, so that none starts another one or ends meanwhile; they are
/// to be killed next. A process that left its parent is not found.
pub(super) fn stop(root: Pid) -> Vec<Process> {
    let mut tree = BTreeMap::new();
    for _ in 0..ROUNDS {
        let new: Vec<Process> = descendants(root).into_iter().filter(|one| !tree.contains_key(&one.pid)).collect();
        if new.is_empty() {
            break;
        }
        for process in new {
            if let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) {
                // It may have ended meanwhile.
                let _ = kill_process(pid, Signal::STOP);
            }
            tree.insert(process.pid, process);
        }
    }
    tree.into_values().collect()
}

/// A process and those below it that have not ended.
fn descendants(root: Pid) -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let all: Vec<(Process, u32)> = numbers.filter_map(read).collect();
    // CAST: a process's number is above 0.
    let mut pids = BTreeSet::from([root.as_raw_nonzero().get() as u32]);
    loop {
        let more: Vec<u32> = all
            .iter()
            .filter(|(one, parent)| pids.contains(parent) && !pids.contains(&one.pid))
            .map(|(one, _)| one.pid)
            .collect();
        if more.is_empty() {
            break;
        }
        pids.extend(more);
    }
    all.into_iter().map(|(one, _)| one).filter(|one| pids.contains(&one.pid)).collect()
}

/// A process with its parent's number, unless it has ended and only waits to be collected.
fn read(pid: u32) -> Option<(Process, u32)> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse(pid, &String::from_utf8_lossy(&stat))
}

/// `PID (NAME) STATE PARENT …`, where a name may hold anything.
fn parse(pid: u32, stat: &str) -> Option<(Process, u32)> {
    let (before, after) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    let mut fields = after.split_ascii_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X" | "x");
    let parent = fields.next()?.parse().ok()?;
    (!ended).then(|| (Process { pid, name: name.to_owned() }, parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_look_like_what_follows_it() {
        let read = parse(7, "7 (a) Z (b) 1) S 3 7 7 0").map(|(one, parent)| (one.to_string(), parent));
        assert_eq!(read, Some(("7 (a) Z (b) 1)".to_owned(), 3)));
        assert_eq!(parse(7, "7 (python) Z 3 7"), None);
        assert_eq!(parse(7, ""), None);
    }
}
