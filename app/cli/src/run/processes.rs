//! Records that each Python process of a run wrote about itself, if it used CUDA.

use super::folder::Folder;
use super::secrets;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{Error, Read};
use std::path::{Path, PathBuf};
use terminal::around::{self, Signalled};
use vramlab::input::DOCUMENT;
use vramlab::{Bytes, Selection};

/// How the names of their files end.
const ENDING: &str = ".process.json";

/// A process of the run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Process {
    /// The beginning of its files' names.
    #[serde(skip)]
    pub(super) name: String,
    run: Option<String>,
    /// `running`, where it was ended before it could say more, or `ended`.
    pub(crate) state: String,
    pub(crate) pid: u32,
    /// Which of a job's processes it was.
    #[serde(default, deserialize_with = "rank")]
    pub(crate) rank: Option<u32>,
    /// Without what looks like a secret.
    #[serde(default)]
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
    /// Most bytes of it that the program requested at once, before rounding; `null` where nothing counted them.
    #[serde(default)]
    pub(crate) pinned_requested_bytes: Option<u64>,
    /// File of the requests, for `vramlab replay --host`; `null` without one.
    #[serde(default)]
    pub(crate) pinned_history: Option<String>,
    /// Times between the steps of the optimizer that stepped most often.
    pub(crate) step_ns: Vec<u64>,
    /// What an allocator says that PyTorch has no word for.
    pub(crate) allocator_stats: Option<Value>,
}

/// A file of a process.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Snapshot {
    pub(crate) file: String,
    /// `exit`, `out-of-memory`, `signal`, `every`, or `running` for what a process that was killed had recorded.
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
        let sum = |key: &str| sum_of(kinds.iter().filter_map(|kind| kind[key].as_u64()));
        (!kinds.is_empty()).then(|| (sum("count"), sum("total_ns")))
    }

    /// Calls of the driver that an allocator of ours counted.
    pub(crate) fn driver_calls(&self) -> Option<u64> {
        self.calls().map(|(count, _)| count)
    }

    /// A count over its GPUs.
    pub(crate) fn count(&self, key: &str) -> u64 {
        sum_of(self.devices.iter().filter_map(|gpu| gpu.stat(key)))
    }
}

/// Text of a file as far as it fits a line.
fn short(text: &str) -> String {
    text.chars().take(200).collect()
}

/// A sum of what a file says, which may be anything.
fn sum_of(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

/// A rank as launchers number their processes; what is none counts as not given.
fn rank<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let rank = Option::<Value>::deserialize(deserializer)?;
    Ok(rank.and_then(|rank| u32::try_from(rank.as_u64()?).ok()))
}

/// Records of a run's processes.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// In the order of their ranks.
    pub(super) processes: Vec<Process>,
    /// Files that are called like records and are none, each with the reason.
    pub(super) unreadable: Vec<String>,
}

/// Reads the records of a run. Those of other runs are left out.
pub(super) fn read_records(folder: &Folder) -> Records {
    let mut out = Records::default();
    if !folder.still_exists() {
        return out;
    }
    for file in record_files(&folder.path) {
        match read(&file, &folder.run) {
            Ok(Some(mut process)) => {
                let (unfinished, written): (Vec<Snapshot>, Vec<Snapshot>) =
                    process.snapshots.into_iter().partition(|one| one.why == "running");
                process.snapshots = written;
                process.snapshots.extend(unfinished.iter().flat_map(|one| left_behind(&folder.path, one)));
                // It is made at the first request.
                let is_there =
                    |file: &String| folder.path.join(file).symlink_metadata().is_ok_and(|file| file.is_file());
                process.pinned_history = process.pinned_history.filter(is_there);
                out.processes.push(process);
            }
            Ok(None) => {}
            Err(error) => {
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                out.unreadable.push(format!("{name} ({})", short(&error.to_string())));
            }
        }
    }
    out.processes.sort_by_key(|process| (process.rank.is_none(), process.rank, process.began_ns, process.pid));
    out.unreadable.sort();
    out
}

/// The files of a recording that a process was killed in: that of the first GPU on which memory was asked for, if any was, and those
/// of others.
fn left_behind(folder: &Path, recording: &Snapshot) -> Vec<Snapshot> {
    const MOST_GPUS: usize = 128;
    let stem = recording.file.strip_suffix(".pickle").unwrap_or(&recording.file);
    let others = (0..MOST_GPUS).map(|gpu| format!("{stem}.gpu{gpu}.pickle"));
    let names = others.chain([recording.file.clone()]).filter(|name| folder.join(name).is_file());
    names.map(|file| Snapshot { file, ..recording.clone() }).collect()
}

fn record_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_record = |path: &PathBuf| path.as_os_str().as_encoded_bytes().ends_with(ENDING.as_bytes());
    entries.map(|entry| entry.path()).filter(is_record).collect()
}

/// The process that a file tells of, if that is of this run.
///
/// # Errors
/// It is no regular file, a link, too long, or no such record.
fn read(path: &Path, run: &str) -> Result<Option<Process>, Error> {
    #[derive(Deserialize)]
    struct Whose {
        run: Option<String>,
    }
    let bytes = read_regular(path, DOCUMENT)?;
    let damaged = |error: serde_json::Error| Error::other(format!("no record of a process: {error}"));
    let whose: Whose = serde_json::from_slice(&bytes).map_err(damaged)?;
    if whose.run.as_deref().is_some_and(|word| word != run) {
        return Ok(None);
    }
    let mut process: Process = serde_json::from_slice(&bytes).map_err(damaged)?;
    if process.run.is_none() {
        return Ok(None);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    process.name = name.strip_suffix(ENDING).unwrap_or(&name).to_owned();
    process.command = secrets::redact(process.command.iter().map(String::as_str));
    process.torch = short(&process.torch);
    process.allocator = process.allocator.as_deref().map(short);
    // Its snapshots lie beside it.
    let is_beside = |file: &String| Path::new(file).file_name() == Some(file.as_ref());
    process.snapshots.retain(|snapshot| is_beside(&snapshot.file));
    process.pinned_history = process.pinned_history.filter(is_beside);
    Ok(Some(process))
}

/// The bytes of a regular file. No link is followed and no pipe waited for: any program may put something in the folder.
fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        // CAST: the flags of the system, which takes them as signed.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags);
    }
    let file = options.open(path).map_err(|error| match path.is_symlink() {
        true => Error::other("a link"),
        false => error,
    })?;
    if !file.metadata()?.is_file() {
        return Err(Error::other("no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    // CAST: a length in memory.
    if bytes.len() as u64 > most {
        return Err(Error::other(format!("longer than {}", Bytes(most))));
    }
    Ok(bytes)
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
        for file in record_files(folder) {
            // A file that is not a record is named at the end.
            let Ok(Some(process)) = read(&file, run) else { continue };
            let takes = process.takes_signal && process.state == "running";
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

/// Processes of a run that have not ended; none where the system does not list them.
pub(super) fn list_running(run: &str) -> Vec<around::Process> {
    #[cfg(unix)]
    {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let name = |pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned();
        pids.filter(|pid| is_of(*pid, run)).map(|pid| around::Process { pid, name: name(pid) }).collect()
    }
    #[cfg(not(unix))]
    {
        let _ = run;
        Vec::new()
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
