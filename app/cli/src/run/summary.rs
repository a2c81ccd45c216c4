//! The end of a run: some ten lines on standard error, and the same for programs in the run's directory.

use super::calls::CudaProcess;
use super::folder::Folder;
use super::host::HostUse;
use super::launch::Launch;
use super::processes::Process;
use super::{Started, advice_for, replay};
use crate::advise::First;
use crate::words::counted;
use serde::Serialize;
use std::path::PathBuf;
use terminal::{command, duration, quoted};
use vramlab::{Bytes, Selection};

/// Processes that get a line of their own.
const LINES: usize = 4;
/// Why there may be no process.
const NOT_RECORDED: &str = "no PyTorch process loaded the recorder (python -I, -E and -S switch it off)";

/// A GPU without memory of its own.
const DEVICE_SHARES_HOST: &str = "device   the GPU shares the host's memory: what it uses, pinned memory and the programs' own memory are one budget";

/// Inputs of the summary.
pub(super) struct Told<'a> {
    pub(super) launch: &'a Launch<'a>,
    pub(super) folder: &'a Folder,
    pub(super) started: &'a Started,
    /// Whether settings are compared.
    pub(super) advise: bool,
}

/// A run as its folder keeps it (`program.json`).
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    command: String,
    /// Of the program; `null` where a signal ended it.
    exit_code: Option<i32>,
    signal: Option<i32>,
    wall_s: f64,
    /// What `--alloc` asked for.
    allocator: Option<String>,
    /// Whether every process that is recorded ran under it, and there was one; `null` where none was asked for.
    allocator_installed: Option<bool>,
    limit_bytes: Option<u64>,
    processes: Vec<Process>,
    /// Processes of which memory calls were recorded at the driver's boundary.
    cuda: Vec<CudaProcess>,
    /// Why nothing is known from there.
    cuda_missing: Option<String>,
    /// What the first of them would have needed under the allocator that is suggested.
    cuda_under: Option<UnderAllocator>,
    /// Why the devices' own figures are missing.
    device_missing: Option<String>,
    /// Most bytes used on a GPU by all processes, as the driver counts them.
    device_peak_bytes: Option<u64>,
    /// Whether a GPU has no memory of its own: samples of it are of the host's memory, which programs on both share.
    device_shares_host: bool,
    /// The host's memory; `null` where the system does not report it.
    host: Option<HostUse>,
    /// The snapshot of which most is told.
    worst: Option<PathBuf>,
    /// What is advised for it.
    advice: Option<First>,
    /// Why nothing is advised.
    no_advice: Option<String>,
    #[serde(skip)]
    folder: PathBuf,
    #[serde(skip)]
    folder_removed: bool,
}

/// A history replayed under an allocator.
#[derive(Debug, Serialize)]
struct UnderAllocator {
    allocator: &'static str,
    driver_calls: u64,
    reserved_bytes: u64,
}

impl UnderAllocator {
    /// The history of the process that spent most time in memory calls, under the allocator that commands use by default.
    fn of(launch: &Launch<'_>, folder: &Folder, calls: &[CudaProcess]) -> Option<Self> {
        let backend = vramlab::backends::find("caching").ok()?;
        let history = calls.first()?.histories.first()?.file_name()?;
        let replayed = replay(&folder.path.join(history), launch.limit, Some(&Selection::of(backend))).ok()??;
        let (driver_calls, reserved_bytes) = (replayed.driver_calls, replayed.reserved_bytes);
        Some(Self { allocator: backend.name, driver_calls, reserved_bytes })
    }
}

/// Looks at what a run left.
pub(super) fn of(told: &Told<'_>) -> Summary {
    let Told { launch, folder, started, advise } = told;
    let worst = started.processes.iter().filter(|process| process.best().is_some());
    let worst = worst.max_by_key(|process| (process.count("num_ooms") > 0, process.peak("reserved_bytes")));
    let file = worst.and_then(|process| Some(folder.path.join(&process.best()?.file)));
    let (mut advice, mut no_advice) = (None, None);
    match (&file, worst.and_then(|process| process.allocator.as_deref())) {
        (None, _) => no_advice = Some("no snapshot was taken".to_owned()),
        _ if !advise => no_advice = Some("not asked".to_owned()),
        (Some(_), Some(name)) if worst.is_some_and(|process| !process.follows_pytorch()) => {
            no_advice = Some(format!("{name} has none of PyTorch's settings"));
        }
        // The one that wrote it says that it is a file; the program may have put something else there.
        (Some(file), _) if !file.symlink_metadata().is_ok_and(|file| file.is_file()) => {
            no_advice = Some(format!("{} is no file any more", file.display()));
        }
        (Some(file), _) => match advice_for(file, launch.limit) {
            Ok(found) => advice = Some(found),
            Err(error) => no_advice = Some(error),
        },
    }
    let calls = started.calls.as_deref().unwrap_or_default();
    let cuda_under = (*advise && launch.alloc.is_none()).then(|| UnderAllocator::of(launch, folder, calls)).flatten();
    Summary {
        command: launch.shown(),
        exit_code: started.status.code(),
        signal: signal(started),
        wall_s: started.seconds,
        allocator: launch.alloc.map(ToString::to_string),
        allocator_installed: launch
            .alloc
            .map(|alloc| missing_allocator(&alloc.to_string(), &started.processes).is_none()),
        limit_bytes: launch.limit,
        processes: started.processes.clone(),
        cuda: started.calls.clone().unwrap_or_default(),
        cuda_missing: started.calls.clone().err(),
        cuda_under,
        device_missing: started.device.missing.clone(),
        device_peak_bytes: started.device.peak(&started.processes),
        device_shares_host: started.device.shares_host(),
        host: started.host.clone(),
        worst: worst.and_then(|process| Some(folder.shown.join(&process.best()?.file))),
        advice,
        no_advice,
        folder: folder.shown.clone(),
        folder_removed: !folder.still_exists(),
    }
}

fn signal(started: &Started) -> Option<i32> {
    #[cfg(unix)]
    {
        std::os::unix::process::ExitStatusExt::signal(&started.status)
    }
    #[cfg(not(unix))]
    {
        let _ = started;
        None
    }
}

impl Summary {
    /// The lines of the screen.
    pub(super) fn lines(&self) -> Vec<String> {
        let asked = self.allocator.as_ref().filter(|_| !self.folder_removed);
        let not_in = asked.filter(|_| self.others().next().is_none() || !self.processes.is_empty());
        let not_in = not_in.and_then(|name| missing_allocator(name, &self.processes));
        let mut out: Vec<String> = not_in.map(|line| format!("vramlab  {line}")).into_iter().collect();
        out.push(self.head());
        if self.folder_removed {
            return out;
        }
        out.extend(self.cuda_lines());
        if self.processes.is_empty() {
            return out;
        }
        let shown = if self.processes.len() > LINES + 1 { LINES } else { self.processes.len() };
        out.extend(self.processes[..shown].iter().map(of_process));
        if let rest @ 1.. = self.processes.len() - shown {
            let peaks = self.processes[shown..].iter().filter_map(|process| process.peak("reserved_bytes"));
            let most = peaks.max().map_or(String::new(), |bytes| format!(", reserved {} at most", Bytes(bytes)));
            out.push(format!("         and {} more{most}", many(rest)));
        }
        out.extend(self.processes[..shown].iter().filter_map(|process| self.pinned_line(process)));
        let of_torch = self.cuda.iter().filter(|cuda| self.processes.iter().any(|process| process.pid == cuda.pid));
        out.extend(of_torch.flat_map(CudaProcess::library_lines));
        out.extend(self.host_line());
        out.extend(self.device_shares_host.then(|| DEVICE_SHARES_HOST.to_owned()));
        out.push(match (&self.device_missing, self.device_peak_bytes) {
            (Some(why), _) => format!("device   not sampled: {why}"),
            (None, Some(bytes)) => {
                let reserved = self.processes.iter().filter_map(|process| process.peak("reserved_bytes")).max();
                let reserved = reserved.map_or(String::new(), |bytes| format!("; PyTorch reserved {}", Bytes(bytes)));
                format!("device   {} used on a GPU at most, by all processes{reserved}", Bytes(bytes))
            }
            (None, None) => "device   not sampled: the driver does not know the GPUs that PyTorch used".to_owned(),
        });
        let snapshots: usize = self.processes.iter().map(|process| process.snapshots.len()).sum();
        out.push(format!("files    {} in {}", counted(snapshots as u64, "snapshot"), self.folder.display()));
        out.push(match (&self.advice, &self.no_advice) {
            (Some(advice), _) => format!("advise   {}", advice.sentence),
            (None, Some(why)) => format!("advise   {why}"),
            (None, None) => "advise   not asked".to_owned(),
        });
        if let Some(worst) = &self.worst {
            let asks = self.advice.is_none() && self.processes.iter().all(|one| one.follows_pytorch());
            let question = if asks { "advise" } else { "explain" };
            let next = command("vramlab", &format!("{question} {}", quoted(&worst.to_string_lossy())));
            out.push(format!("Next: {next}"));
        }
        out
    }

    /// Pinned memory that a process requested, and the way to its replay.
    fn pinned_line(&self, process: &Process) -> Option<String> {
        let file = process.pinned_history.as_ref()?;
        let bytes = match (process.pinned_bytes, process.pinned_requested_bytes) {
            (Some(pinned), Some(requested)) => format!("{} pinned for {} requested", Bytes(pinned), Bytes(requested)),
            _ => "requests of pinned memory until it was ended".to_owned(),
        };
        let file = quoted(&self.folder.join(file).to_string_lossy());
        let replay = command("vramlab", &format!("replay {file} --host --alloc host-pytorch,host-exact"));
        Some(format!("pinned   {}: {bytes}; {replay}", process.shown()))
    }

    /// The host's memory, where the program pinned some or it ran short.
    fn host_line(&self) -> Option<String> {
        let pinned = self.cuda.iter().any(|cuda| cuda.pinned.is_some())
            || self.processes.iter().any(|process| process.pinned_bytes.is_some_and(|bytes| bytes > 0));
        let host = self.host.as_ref()?;
        // One sample is of the moment before the program began.
        (host.short || pinned && host.samples > 1).then(|| host.line())
    }

    /// The processes that did not use CUDA through PyTorch, or whose PyTorch was not recorded.
    fn others(&self) -> impl Iterator<Item = &CudaProcess> {
        self.cuda.iter().filter(|cuda| self.processes.iter().all(|process| process.pid != cuda.pid))
    }

    /// What the driver's boundary saw of them.
    fn cuda_lines(&self) -> Vec<String> {
        let mut out: Vec<String> = self.others().take(LINES).flat_map(CudaProcess::lines).collect();
        let Some(first) = self.others().next() else { return out };
        if self.processes.is_empty() {
            out.extend(self.host_line());
        }
        if let more @ 1.. = self.others().count().saturating_sub(LINES) {
            out.push(format!("         and {} more", many(more)));
        }
        let Some(history) = first.histories.first() else { return out };
        let history = quoted(&history.to_string_lossy());
        out.push(format!("files    {} in {}", counted(1, "record"), self.folder.display()));
        if let Some(UnderAllocator { allocator, driver_calls, reserved_bytes }) = &self.cuda_under {
            let calls = counted(*driver_calls, "driver call");
            out.push(format!("replay   under {allocator}: {calls}, {} reserved at most", Bytes(*reserved_bytes)));
        }
        let next = match &self.allocator {
            None => format!("run --alloc caching -- {}", self.command),
            Some(_) => format!("replay {history}"),
        };
        if self.processes.is_empty() {
            out.push(format!("Next: {}", command("vramlab", &next)));
        }
        out
    }

    fn head(&self) -> String {
        // CAST: seconds to nanoseconds, for display.
        let time = duration((self.wall_s * 1e9) as u64);
        let how = match (self.exit_code, self.signal) {
            (Some(0), _) => String::new(),
            (Some(code), _) => format!(", exit code {code}"),
            (None, Some(signal)) => format!(", ended by signal {signal}"),
            (None, None) => String::new(),
        };
        if self.folder_removed {
            return format!("vramlab  {time}{how}; {} is gone, and what was recorded with it", self.folder.display());
        }
        if self.processes.is_empty() {
            if let many_cuda @ 1.. = self.others().count() {
                let served = self.others().any(|cuda| cuda.allocator.is_some());
                let under = match &self.allocator {
                    Some(name) if served => format!("under {name}"),
                    Some(name) => format!("under the driver: {name} served nothing"),
                    None => "under the driver".to_owned(),
                };
                return format!("vramlab  {time}{how}; {} used CUDA {under}", many(many_cuda));
            }
            let why = match &self.cuda_missing {
                Some(why) => format!("{NOT_RECORDED}; CUDA calls were not observed: {why}"),
                None => format!("{NOT_RECORDED}; no process called CUDA's driver for memory"),
            };
            return format!("vramlab  {time}{how}; nothing recorded: {why}");
        }
        let under = match &self.processes[0].allocator {
            Some(name) => name.clone(),
            None => "PyTorch's own allocator".to_owned(),
        };
        let limit = self.limit_bytes.map_or(String::new(), |bytes| format!(", limited to {}", Bytes(bytes)));
        let torch = &self.processes[0].torch;
        let count = self.processes.len();
        let used = many(count);
        format!("vramlab  {time}{how}; {used} used PyTorch {torch} under {under}{limit}")
    }
}

/// Says so where an allocator that was asked for is under none or not all of the processes.
pub(crate) fn missing_allocator(name: &str, processes: &[Process]) -> Option<String> {
    let without = processes.iter().filter(|process| process.allocator.is_none()).count();
    match (processes.len(), without) {
        (0, _) => Some(format!("{name} was NOT put under PyTorch: {NOT_RECORDED}")),
        (_, 0) => None,
        (all, _) => Some(format!("{name} was NOT put under PyTorch in {without} of {}", many(all))),
    }
}

fn many(processes: usize) -> String {
    if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") }
}

/// Memory of one process.
fn of_process(process: &Process) -> String {
    let label = format!("{:8}", process.shown());
    let gap = if label.ends_with(' ') { "" } else { " " };
    let figures: Vec<String> = ["reserved", "active", "requested"]
        .into_iter()
        .filter_map(|of| Some(format!("{of} {}", Bytes(process.peak(&format!("{of}_bytes"))?))))
        .collect();
    if figures.is_empty() {
        let newest = process.best().map_or("none".to_owned(), |snapshot| snapshot.file.clone());
        return format!("{label}{gap} ended before it could say what it took; its newest snapshot: {newest}");
    }
    let calls = match process.calls() {
        Some((count, ns)) => format!("{} in {}", counted(count, "driver call"), duration(ns)),
        None => counted(process.count("num_device_alloc") + process.count("num_device_free"), "driver call"),
    };
    let mut out = format!("{label}{gap} {} at most; {calls}", figures.join(", "));
    if let Some(bytes @ 1..) = process.pinned_bytes.filter(|_| process.pinned_history.is_none()) {
        out += &format!(", {} pinned on the host", Bytes(bytes));
    }
    for (key, what) in [("num_alloc_retries", "release of the cache"), ("num_ooms", "out-of-memory")] {
        match process.count(key) {
            0 => {}
            count => out += &format!(", {count} × {what}"),
        }
    }
    out
}
