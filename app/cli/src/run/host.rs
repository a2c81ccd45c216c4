//! Samples of the host's memory while a program runs: its processes, the limit of its control group, and the machine. A warning comes
//! before the kernel ends the program for lack of memory.

use super::report_problem;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use vramlab::{Bytes, HostRoom};

/// Time between samples.
const EVERY: Duration = Duration::from_millis(500);
/// Time for the thread to end.
const PATIENCE: Duration = Duration::from_secs(2);
/// Share of the host's memory below which the warning comes.
const SHORT: f64 = 0.05;
/// Processes that are sampled at most.
const MOST_PROCESSES: usize = 4096;

/// The host's memory during a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct HostUse {
    /// Memory of the machine, which in a container is the host's (`MemTotal` of `/proc/meminfo`).
    pub(crate) total_bytes: u64,
    /// Most bytes resident in the program's processes at once (`VmRSS`); memory that they share counts in each.
    pub(crate) peak_rss_bytes: u64,
    /// At the same moment, the part of it that is shared memory (`RssShmem`): memory of `cudaHostAlloc` is counted there.
    pub(crate) peak_rss_shmem_bytes: u64,
    /// Least bytes that the program could still allocate, by the machine, the control group and `ulimit -v`.
    pub(crate) least_room_bytes: Option<u64>,
    /// The limit that allowed no more at that moment.
    pub(crate) bound: Option<String>,
    /// Whether less than 5 % of the machine's memory, or of what the control group left at first, was left.
    pub(crate) short: bool,
    /// Samples.
    pub(crate) samples: u64,
}

/// Takes samples in a thread of its own.
pub(super) struct HostSampler {
    stop: Sender<()>,
    result: Receiver<HostUse>,
}

impl HostSampler {
    /// Takes samples from now on of the processes that this one starts.
    pub(super) fn start() -> Self {
        let (stop, stopped) = channel();
        let (sender, result) = channel();
        // Without the thread nothing is sampled.
        let _ = std::thread::Builder::new().name("host".to_owned()).spawn(move || {
            // Nobody waits for it any more where this fails.
            let _ = sender.send(sample(&stopped));
        });
        Self { stop, result }
    }

    /// The samples; `None` where the system has none.
    pub(super) fn stop(self) -> Option<HostUse> {
        // It may have ended already.
        let _ = self.stop.send(());
        self.result.recv_timeout(PATIENCE).ok().filter(|host| host.samples > 0 && host.total_bytes > 0)
    }
}

/// The text of a file of the system.
pub(super) fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn sample(stopped: &Receiver<()>) -> HostUse {
    let mut host = HostUse { total_bytes: total(&read).unwrap_or(0), ..HostUse::default() };
    let first = HostRoom::now().map_or(host.total_bytes, |room| room.bytes.min(host.total_bytes));
    loop {
        let room = HostRoom::now();
        let warned = host.short;
        host.take(resident(std::process::id(), &read), room, first);
        if host.short && !warned {
            report_problem(host.warning());
        }
        match stopped.recv_timeout(EVERY) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return host,
        }
    }
}

/// The number of kibibytes behind a key at the start of a line, in bytes.
fn field(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(rest.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()?.saturating_mul(1024))
}

/// The machine's memory.
pub(super) fn total(read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    field(&read("/proc/meminfo")?, "MemTotal")
}

/// The machine's memory that is in use.
pub(super) fn used(read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let text = read("/proc/meminfo")?;
    Some(field(&text, "MemTotal")?.saturating_sub(field(&text, "MemAvailable")?))
}

/// Resident bytes of the processes below one, and the shared part.
fn resident(parent: u32, read: &dyn Fn(&str) -> Option<String>) -> (u64, u64) {
    let (mut sum, mut shared) = (0_u64, 0_u64);
    let mut known = BTreeSet::from([parent]);
    let mut left = vec![parent];
    while let Some(process) = left.pop() {
        // Each thread has its own children; a program that starts others usually does so from its first.
        let children = read(&format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|number| number.parse::<u32>().ok());
        for child in children {
            if known.len() >= MOST_PROCESSES || !known.insert(child) {
                continue;
            }
            left.push(child);
            let Some(status) = read(&format!("/proc/{child}/status")) else { continue };
            sum = sum.saturating_add(field(&status, "VmRSS").unwrap_or(0));
            shared = shared.saturating_add(field(&status, "RssShmem").unwrap_or(0));
        }
    }
    (sum, shared)
}

impl HostUse {
    fn take(&mut self, (rss, shared): (u64, u64), room: Option<HostRoom>, first: u64) {
        self.samples += 1;
        if rss > self.peak_rss_bytes {
            (self.peak_rss_bytes, self.peak_rss_shmem_bytes) = (rss, shared);
        }
        if let Some(room) = room.filter(|room| self.least_room_bytes.is_none_or(|least| room.bytes < least)) {
            (self.least_room_bytes, self.bound) = (Some(room.bytes), Some(room.bound.to_string()));
        }
        // CAST: a share.
        let short = |room: u64| (room as f64) < SHORT * first as f64;
        self.short |= room.is_some_and(|room| short(room.bytes));
    }

    /// One line before the kernel ends the program.
    fn warning(&self) -> String {
        let room = Bytes(self.least_room_bytes.unwrap_or(0));
        let bound = self.bound.as_deref().unwrap_or("the host's limit");
        let pinned = match self.peak_rss_shmem_bytes {
            0 => String::new(),
            shared => format!(", {} of it shared, as pinned memory is", Bytes(shared)),
        };
        format!(
            "warning: the host's memory is nearly used up: {room} is {bound}; the program has {}{pinned}; the system ends it when \
             there is none",
            Bytes(self.peak_rss_bytes)
        )
    }

    /// The line of the screen.
    pub(super) fn line(&self) -> String {
        let mut out = format!("host     {} resident at most", Bytes(self.peak_rss_bytes));
        if self.peak_rss_shmem_bytes > 0 {
            out += &format!(", {} of it shared (pinned memory is)", Bytes(self.peak_rss_shmem_bytes));
        }
        if let (Some(room), Some(bound)) = (self.least_room_bytes, &self.bound) {
            out += &format!("; {} was {bound}", Bytes(room));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::device::sim::HostBound;

    const GIB: u64 = 1 << 30;

    #[test]
    fn processes_below_one_are_added_up_once() {
        let read = |path: &str| {
            let text = match path {
                "/proc/1/task/1/children" => "2 3 ",
                // A process that has just ended, and one that names an ancestor.
                "/proc/2/task/2/children" => "4 1",
                "/proc/2/status" => "Name:\tpython\nVmRSS:\t  100 kB\nRssAnon:\t 40 kB\nRssShmem:\t  60 kB\n",
                "/proc/4/status" => "VmRSS:\t10 kB\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(resident(1, &read), (110 * 1024, 60 * 1024));
        assert_eq!(resident(9, &read), (0, 0));
    }

    #[test]
    fn the_warning_comes_once_and_names_the_limit() {
        let mut host = HostUse { total_bytes: 100 * GIB, ..HostUse::default() };
        let room = |gib: u64| Some(HostRoom { bytes: gib * GIB, bound: HostBound::ControlGroup });
        host.take((GIB, 0), room(60), 64 * GIB);
        assert!(!host.short);
        host.take((61 * GIB, 32 * GIB), room(3), 64 * GIB);
        assert!(host.short);
        let warning = host.warning();
        for part in ["3 GiB is what the memory limit of this control group leaves", "61 GiB", "32 GiB of it shared"] {
            assert!(warning.contains(part), "{warning}");
        }
        // What was left later does not take the peaks away.
        host.take((GIB, 0), room(60), 64 * GIB);
        assert_eq!((host.peak_rss_bytes, host.least_room_bytes, host.samples), (61 * GIB, Some(3 * GIB), 3));
        assert!(!warning.contains('\n') && host.line().contains("resident at most"), "{}", host.line());
    }

    #[test]
    fn a_system_that_does_not_tell_is_no_warning() {
        let mut host = HostUse::default();
        host.take((0, 0), None, 0);
        assert_eq!((host.short, host.least_room_bytes, &host.bound), (false, None, &None));
        assert_eq!((total(&|_| None), used(&|_| Some("MemTotal: 5 kB\n".into()))), (None, None));
        assert_eq!(used(&|_| Some("MemTotal: 5 kB\nMemAvailable:  2 kB\n".into())), Some(3 * 1024));
    }
}
