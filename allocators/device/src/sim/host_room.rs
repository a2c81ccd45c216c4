//! The memory that this process may still allocate: of the machine, of its control groups, and of its address space.
//!
//! Linux grants memory that it does not have, and kills a process that then uses it. The simulated device therefore checks before
//! it allocates.
#![forbid(unsafe_code)]

use crate::bytes::Bytes;
use std::fmt;

/// The limit of this process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostBound {
    /// The machine's available memory (`MemAvailable` of `/proc/meminfo`).
    Machine,
    /// The limit of a control group, as set by containers and Slurm (`memory.max`, `memory.limit_in_bytes`).
    ControlGroup,
    /// The limit on the address space (`ulimit -v`).
    AddressSpace,
    /// A limit that this program set.
    Program,
}

impl fmt::Display for HostBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Machine => "what this machine has left",
            Self::ControlGroup => "what the memory limit of this control group leaves",
            Self::AddressSpace => "what ulimit -v leaves",
            Self::Program => "what the program allows",
        })
    }
}

/// Memory that this process may still allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRoom {
    /// Bytes.
    pub bytes: u64,
    /// The limit that allows no more.
    pub bound: HostBound,
}

impl fmt::Display for HostRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", Bytes(self.bytes), self.bound)
    }
}

impl HostRoom {
    /// The memory that the process may still allocate now; `None` where the system does not report it. Reads a few small files.
    #[must_use]
    pub fn now() -> Option<Self> {
        Self::new(0, &|path| std::fs::read_to_string(path).ok())
    }

    /// The room after `promised` bytes that the system does not count before they are written. `read` returns the text of a file.
    fn new(promised: u64, read: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let physical = [(machine(read), HostBound::Machine), (control_groups(read), HostBound::ControlGroup)];
        let physical = physical.map(|(bytes, bound)| (bytes.map(|bytes| bytes.saturating_sub(promised)), bound));
        let rooms = physical.into_iter().chain([(address_space(read), HostBound::AddressSpace)]);
        rooms.filter_map(|(bytes, bound)| Some(Self { bytes: bytes?, bound })).min_by_key(|room| room.bytes)
    }
}

/// The first number behind `key` at the start of a line.
fn field(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.trim_start_matches(':').split_whitespace().next()?.parse().ok()
}

fn machine(read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    Some(field(&read("/proc/meminfo")?, "MemAvailable")?.saturating_mul(1024))
}

fn address_space(read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let limit = field(&read("/proc/self/limits")?, "Max address space")?;
    let used = field(&read("/proc/self/status")?, "VmSize")?.saturating_mul(1024);
    Some(limit.saturating_sub(used))
}

/// The minimum over the process's control groups. File memory of a group is reclaimable.
fn control_groups(read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let groups = read("/proc/self/cgroup")?;
    let rooms = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let files: [&str; 4] = if controllers.is_empty() {
            ["/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"]
        } else if controllers.split(',').any(|name| name == "memory") {
            ["/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"]
        } else {
            return None;
        };
        ancestors(path).filter_map(|group| room_of(read, group, files)).min()
    });
    rooms.min()
}

/// A group and its ancestors. Inside a container the path may be that of the host, where only the last of these exists.
/// there.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let start = path.trim_end_matches('/');
    std::iter::successors(Some(start), |group| group.rfind('/').map(|end| &group[..end]))
}

fn room_of(read: &dyn Fn(&str) -> Option<String>, group: &str, files: [&str; 4]) -> Option<u64> {
    let [root, limit, usage, droppable] = files;
    let number = |name: &str| read(&format!("{root}{group}/{name}"))?.trim().parse::<u64>().ok();
    // `max` is not a number: there is no limit.
    let (limit, used) = (number(limit)?, number(usage)?);
    let files = read(&format!("{root}{group}/memory.stat")).and_then(|text| field(&text, droppable));
    Some(limit.saturating_sub(used.saturating_sub(files.unwrap_or(0))))
}

/// Bytes that may be taken between two checks of the system.
const STEP: u64 = 64 << 20;

/// Memory that a device has taken, and how much more it may take without another check.
#[derive(Debug, Default)]
pub(super) struct Allowance {
    /// A limit on all taken memory.
    limit: Option<u64>,
    taken: u64,
    /// Highest `taken` that needs no check.
    granted: u64,
}

impl Allowance {
    /// At most `limit` bytes at a time, even where the system has more.
    pub(super) fn limited(limit: u64) -> Self {
        Self { limit: Some(limit), ..Self::default() }
    }

    /// Takes `bytes`, unless the system may not have them: the error is its remaining memory.
    pub(super) fn take(&mut self, bytes: u64) -> Result<(), HostRoom> {
        self.take_from(bytes, &|path| std::fs::read_to_string(path).ok())
    }

    fn take_from(&mut self, bytes: u64, read: &dyn Fn(&str) -> Option<String>) -> Result<(), HostRoom> {
        let total = self.taken.saturating_add(bytes);
        if let Some(limit) = self.limit.filter(|limit| total > *limit) {
            return Err(HostRoom { bytes: limit - self.taken, bound: HostBound::Program });
        }
        if total > self.granted {
            // Zeroed memory becomes resident when it is written; at least the non-resident part is still to be allocated.
            let resident = read("/proc/self/status").and_then(|text| field(&text, "VmRSS"));
            let promised = self.taken.saturating_sub(resident.unwrap_or(0).saturating_mul(1024));
            if let Some(room) = HostRoom::new(promised, read).filter(|room| room.bytes < bytes.saturating_add(STEP)) {
                return Err(room);
            }
            self.granted = total.saturating_add(STEP);
        }
        self.taken = total;
        Ok(())
    }

    /// Returns taken bytes.
    pub(super) fn give(&mut self, bytes: u64) {
        self.taken -= bytes;
        // Another process may have taken the returned memory.
        self.granted = self.granted.min(self.taken + STEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const GIB: u64 = 1 << 30;

    fn files(list: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        let map: BTreeMap<String, String> = list.iter().map(|(path, text)| ((*path).into(), (*text).into())).collect();
        move |path| map.get(path).cloned()
    }

    const MEMINFO: (&str, &str) =
        ("/proc/meminfo", "MemTotal:       16000000 kB\nMemFree:  100 kB\nMemAvailable:    8388608 kB\n");
    const STATUS: (&str, &str) = ("/proc/self/status", "Name:\ttrainer\nVmSize:\t 1048576 kB\nVmRSS:\t  524288 kB\n");

    fn room(list: &[(&str, &str)]) -> Option<(u64, HostBound)> {
        HostRoom::new(0, &files(list)).map(|room| (room.bytes, room.bound))
    }

    #[test]
    fn the_least_room_counts() {
        assert_eq!(room(&[]), None, "a system that does not tell bounds nothing");
        assert_eq!(room(&[MEMINFO]), Some((8 * GIB, HostBound::Machine)));
        let limits = (
            "/proc/self/limits",
            "Max cpu time  unlimited unlimited seconds\nMax address space         3221225472           unlimited            bytes\n",
        );
        assert_eq!(room(&[MEMINFO, STATUS, limits]), Some((2 * GIB, HostBound::AddressSpace)));
        let unlimited =
            ("/proc/self/limits", "Max address space         unlimited            unlimited            bytes\n");
        assert_eq!(room(&[MEMINFO, STATUS, unlimited]), Some((8 * GIB, HostBound::Machine)));
    }

    #[test]
    fn control_group_counts_with_ancestors_without_file_cache() {
        let group = ("/proc/self/cgroup", "0::/slurm/job_7/step_0\n");
        let outer = [
            ("/sys/fs/cgroup/slurm/job_7/memory.max", "3221225472\n"),
            ("/sys/fs/cgroup/slurm/job_7/memory.current", "2147483648\n"),
            ("/sys/fs/cgroup/slurm/job_7/memory.stat", "anon 5\ninactive_file 536870912\n"),
        ];
        let inner = [
            ("/sys/fs/cgroup/slurm/job_7/step_0/memory.max", "max\n"),
            ("/sys/fs/cgroup/slurm/job_7/step_0/memory.current", "5\n"),
        ];
        let all: Vec<_> = [MEMINFO, group].into_iter().chain(outer).chain(inner).collect();
        assert_eq!(room(&all), Some((GIB + GIB / 2, HostBound::ControlGroup)));
        // Inside a container the group's own folder is the root.
        let inside = [
            MEMINFO,
            group,
            ("/sys/fs/cgroup/memory.max", "1073741824"),
            ("/sys/fs/cgroup/memory.current", "73741824"),
        ];
        assert_eq!(room(&inside), Some((1_000_000_000, HostBound::ControlGroup)));
        // The first version has a folder for each controller.
        let first = [
            MEMINFO,
            ("/proc/self/cgroup", "4:cpu,memory:/a\n1:name=systemd:/\n"),
            ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2147483648"),
            ("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1073741824"),
            ("/sys/fs/cgroup/memory/a/memory.stat", "inactive_file 7\ntotal_inactive_file 1048576\n"),
        ];
        assert_eq!(room(&first), Some((GIB + (1 << 20), HostBound::ControlGroup)));
    }

    #[test]
    fn memory_is_taken_only_while_there_is_room() {
        let read = files(&[MEMINFO, STATUS]);
        let mut allowance = Allowance::default();
        allowance.take_from(6 * GIB, &read).unwrap();
        // Half a GiB of the process is resident, so at least 5.5 of those 6 are still to come.
        let refused = allowance.take_from(3 * GIB, &read).unwrap_err();
        assert_eq!(refused, HostRoom { bytes: 8 * GIB - 6 * GIB + GIB / 2, bound: HostBound::Machine });
        assert_eq!(refused.to_string(), "2.50 GiB (what this machine has left)");
        allowance.take_from(2 * GIB, &read).unwrap();
        // Slightly more needs no check.
        let nothing_left = files(&[("/proc/meminfo", "MemAvailable: 0 kB")]);
        allowance.take_from(STEP, &nothing_left).unwrap();
        allowance.take_from(1, &nothing_left).unwrap_err();
        // Another process may have what is given back by the time that it is wanted again.
        allowance.give(8 * GIB);
        allowance.take_from(2 * STEP, &nothing_left).unwrap_err();
        allowance.take_from(GIB, &read).unwrap();
    }

    #[test]
    fn a_limit_of_the_program_holds_to_the_byte() {
        let mut allowance = Allowance::limited(1000);
        allowance.take(1000).unwrap();
        assert_eq!(allowance.take(1).unwrap_err(), HostRoom { bytes: 0, bound: HostBound::Program });
        allowance.give(10);
        allowance.take(10).unwrap();
        assert_eq!(allowance.take(u64::MAX).unwrap_err().bound, HostBound::Program);
    }
}
