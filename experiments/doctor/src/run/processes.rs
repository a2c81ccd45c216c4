//! What each Python process of a run that used CUDA wrote of itself.

use super::folder::Folder;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use terminal::around::Signalled;
use vramlab::Selection;

/// A process of the run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Process {
    run: Option<String>,
    /// `running`, where it was ended before it could say more, or `ended`.
    pub(crate) state: String,
    pub(crate) pid: u32,
    /// Which of a job's processes it was.
    pub(crate) rank: Option<u32>,
    pub(crate) command: Vec<String>,
    /// PyTorch's version.
    pub(crate) torch: String,
    /// What was put under PyTorch; `null`: its own.
    pub(crate) allocator: Option<String>,
    takes_signal: bool,
    /// First use of CUDA.
    pub(crate) began_ns: u64,
    /// When this was written.
    pub(crate) until_ns: u64,
    /// In the order in which they were taken.
    pub(crate) snapshots: Vec<Snapshot>,
    /// GPUs on which PyTorch reserved memory.
    pub(crate) devices: Vec<Gpu>,
    /// Most bytes of pinned memory of the host, which PyTorch rounds to powers of two; `null` where it does not count them.
    pub(crate) pinned_bytes: Option<u64>,
    /// Times between the steps of the optimizer that stepped most often.
    pub(crate) step_ns: Vec<u64>,
    /// What an allocator says that PyTorch has no word for.
    pub(crate) allocator_stats: Option<Value>,
}

/// A file of a process.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Snapshot {
    pub(crate) file: String,
    /// `exit`, `out-of-memory`, `signal` or `every`.
    pub(crate) why: String,
    time_ns: u64,
    /// How long the program was held up by it.
    took_s: f64,
}

/// A GPU as PyTorch numbers it, and its statistics.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Gpu {
    pub(crate) index: u32,
    pub(crate) uuid: Option<String>,
    stats: BTreeMap<String, Value>,
}

impl Gpu {
    /// One of PyTorch's statistics.
    pub(crate) fn stat(&self, key: &str) -> Option<u64> {
        self.stats.get(key)?.as_u64()
    }
}

impl Process {
    /// What its files begin with.
    pub(crate) fn name(&self) -> String {
        match self.rank {
            Some(rank) => format!("rank{rank}-pid{}", self.pid),
            None => format!("pid{}", self.pid),
        }
    }

    /// How people name it.
    pub(crate) fn shown(&self) -> String {
        self.rank.map_or_else(|| format!("pid {}", self.pid), |rank| format!("rank {rank}"))
    }

    /// The snapshot that says most: that of the end, else the newest.
    pub(crate) fn best(&self) -> Option<&Snapshot> {
        let exit = self.snapshots.iter().find(|snapshot| snapshot.why == "exit");
        exit.or_else(|| self.snapshots.last())
    }

    /// Most bytes of a statistic over its GPUs.
    pub(crate) fn peak(&self, of: &str) -> Option<u64> {
        let key = format!("{of}.all.peak");
        self.devices.iter().filter_map(|gpu| gpu.stat(&key)).max()
    }

    /// Whether its allocator has PyTorch's settings, so that these can be advised for it.
    pub(crate) fn follows_pytorch(&self) -> bool {
        let follows = |text: &str| text.parse::<Selection>().is_ok_and(|one| one.capabilities().follows_pytorch);
        self.allocator.as_deref().is_none_or(follows)
    }

    /// Calls of the driver with their time, as an allocator of ours counts them.
    pub(crate) fn calls(&self) -> Option<(u64, u64)> {
        let gpus = self.allocator_stats.as_ref()?.as_object()?;
        let kinds: Vec<&Value> =
            gpus.values().filter_map(|gpu| gpu["calls"].as_object()).flat_map(|all| all.values()).collect();
        let sum = |key: &str| kinds.iter().filter_map(|kind| kind[key].as_u64()).sum();
        (!kinds.is_empty()).then(|| (sum("count"), sum("total_ns")))
    }

    /// Calls of the driver that an allocator of ours counted.
    pub(crate) fn driver_calls(&self) -> Option<u64> {
        self.calls().map(|(count, _)| count)
    }

    /// A count over its GPUs.
    pub(crate) fn count(&self, key: &str) -> u64 {
        self.devices.iter().filter_map(|gpu| gpu.stat(key)).sum()
    }
}

/// The processes of a run, in the order of their ranks.
///
/// # Errors
/// The folder, or a record in it, cannot be read.
pub(crate) fn processes(folder: &Folder) -> Result<Vec<Process>> {
    let mut out = Vec::new();
    for file in records(&folder.path) {
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let process: Process = serde_json::from_str(&text).with_context(|| file.display().to_string())?;
        if process.run.as_deref() == Some(&folder.run) {
            out.push(process);
        }
    }
    out.sort_by_key(|process| (process.rank.is_none(), process.rank, process.began_ns, process.pid));
    Ok(out)
}

fn records(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_record = |path: &PathBuf| path.to_string_lossy().ends_with(".process.json");
    entries.map(|entry| entry.path()).filter(is_record).collect()
}

/// SIGUSR1 is for the processes that take it for a request; where there is none, it is the program's.
pub(super) fn ask_for_snapshots(signal: i32, folder: &Path, run: &str) -> Signalled {
    #[cfg(unix)]
    {
        use rustix::process::{Pid, Signal, kill_process};
        if signal != Signal::USR1.as_raw() {
            return Signalled::PassOn;
        }
        let mut asked = false;
        for file in records(folder) {
            let process =
                std::fs::read_to_string(file).ok().and_then(|text| serde_json::from_str::<Process>(&text).ok());
            let Some(process) = process else { continue };
            let takes = process.run.as_deref() == Some(run) && process.takes_signal && process.state == "running";
            let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
            if let Some(pid) = pid.filter(|_| takes && is_of(process.pid, run)) {
                asked |= kill_process(pid, Signal::USR1).is_ok();
            }
        }
        if asked { Signalled::Taken } else { Signalled::PassOn }
    }
    #[cfg(not(unix))]
    {
        let _ = (signal, folder, run);
        Signalled::PassOn
    }
}

/// Whether a process is the run's: its number may have been given to another one since.
#[cfg(unix)]
fn is_of(pid: u32, run: &str) -> bool {
    let entry = format!("VRAMLAB_RUN={run}");
    match std::fs::read(format!("/proc/{pid}/environ")) {
        Ok(environment) => environment.split(|byte| *byte == 0).any(|one| one == entry.as_bytes()),
        // Without /proc there is no better way to know.
        Err(_) => !Path::new("/proc/self").exists(),
    }
}
