//! A process and its descendants, from `/proc`.

use super::Process;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of listings: a new process can appear if it was started before its parent was stopped.
const ROUNDS: usize = 32;

/// Stops a process and its descendants, so that none starts another process or ends before all are killed. A process that left its
/// parent is not found.
pub(super) fn stop(root: Pid) -> Vec<Process> {
    let mut tree = BTreeMap::new();
    for _ in 0..ROUNDS {
        let new: Vec<Process> =
            descendants(root).into_iter().filter(|process| !tree.contains_key(&process.pid)).collect();
        if new.is_empty() {
            break;
        }
        for process in new {
            if let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) {
                // The process may have ended.
                let _ = kill_process(pid, Signal::STOP);
            }
            tree.insert(process.pid, process);
        }
    }
    tree.into_values().collect()
}

/// A process and its descendants that have not ended.
fn descendants(root: Pid) -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let all: Vec<(Process, u32)> = numbers.filter_map(read).collect();
    // CAST: a process ID is positive.
    let mut pids = BTreeSet::from([root.as_raw_nonzero().get() as u32]);
    loop {
        let more: Vec<u32> = all
            .iter()
            .filter(|(process, parent)| pids.contains(parent) && !pids.contains(&process.pid))
            .map(|(process, _)| process.pid)
            .collect();
        if more.is_empty() {
            break;
        }
        pids.extend(more);
    }
    all.into_iter().map(|(process, _)| process).filter(|process| pids.contains(&process.pid)).collect()
}

/// A process and its parent's ID; `None` if it has ended and waits to be collected.
fn read(pid: u32) -> Option<(Process, u32)> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse(pid, &String::from_utf8_lossy(&stat))
}

/// Parses `PID (NAME) STATE PARENT …`; a name may contain any character.
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
    fn a_name_may_look_like_the_next_fields() {
        let read = parse(7, "7 (a) Z (b) 1) S 3 7 7 0").map(|(process, parent)| (process.to_string(), parent));
        assert_eq!(read, Some(("7 (a) Z (b) 1)".to_owned(), 3)));
        assert_eq!(parse(7, "7 (python) Z 3 7"), None);
        assert_eq!(parse(7, ""), None);
    }
}
