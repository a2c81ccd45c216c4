//! The memory calls of a run's processes at the driver's boundary: what they cost, and a history of each GPU's memory.

mod nccl;
mod pinned;

use super::driver::UNVERSIONED;
use super::folder::{Folder, create_private};
use super::symbols::{self, Place, Symbols};
use crate::words::counted;
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use terminal::duration;
use vramlab::Bytes;
use vramlab::histories::calls::{Call, CallRecord, Calls, Counter, NO_STACK, Notes, Served};
use vramlab::output::{Existing, OutputFile};

pub(crate) use nccl::NcclUse;
pub(crate) use pinned::PinnedUse;

/// Calls of one kind.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct CallCost {
    pub(crate) call: &'static str,
    pub(crate) count: u64,
    /// Those that did not succeed.
    pub(crate) failed: u64,
    /// Those that an allocator served.
    pub(crate) served: u64,
    /// Bytes that were requested in all.
    pub(crate) bytes: u64,
    pub(crate) total_ns: u64,
    /// The part of `total_ns` that waited for the device.
    pub(crate) blocked_ns: u64,
}

/// Calls of one kind from one place of the program.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SiteCost {
    pub(crate) call: &'static str,
    /// `FILE:LINE`, or the function where lines are unknown; `null` without a call stack.
    pub(crate) site: Option<String>,
    /// What was queued last before the call that waited longest: a kernel, or a function of the driver.
    pub(crate) behind: Option<String>,
    pub(crate) count: u64,
    pub(crate) total_ns: u64,
    pub(crate) blocked_ns: u64,
}

/// A process that used CUDA, as the driver's boundary saw it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CudaProcess {
    pub(crate) pid: u32,
    /// In the order of their time.
    pub(crate) calls: Vec<CallCost>,
    /// Places in the program that spent most time in memory calls.
    pub(crate) sites: Vec<SiteCost>,
    pub(crate) count: u64,
    pub(crate) total_ns: u64,
    pub(crate) blocked_ns: u64,
    /// From the first memory call to the end of the last.
    pub(crate) span_ns: u64,
    pub(crate) threads: usize,
    /// Most bytes of device memory that were requested at once.
    pub(crate) peak_bytes: u64,
    /// Device memory that was not freed.
    pub(crate) left_bytes: u64,
    /// What the allocator between needed of the driver; `null` where none served.
    pub(crate) allocator: Option<AllocatorUse>,
    /// Calls that were under way when the process ended.
    pub(crate) incomplete: u64,
    /// Calls that had no room in the record.
    pub(crate) dropped: u64,
    /// Histories of device memory, one a GPU.
    pub(crate) histories: Vec<PathBuf>,
    /// Pinned host memory; `null` where none was pinned.
    pub(crate) pinned: Option<PinnedUse>,
    /// Device memory that NCCL allocated; `null` where it allocated none, or with `--stacks off`.
    pub(crate) nccl: Option<NcclUse>,
}

/// The allocator's own calls of the driver.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct AllocatorUse {
    pub(crate) driver_calls: u64,
    pub(crate) driver_ns: u64,
    pub(crate) reserved_peak_bytes: u64,
    /// Requests that were left to the driver.
    pub(crate) passed: u64,
    pub(crate) several_streams: bool,
    pub(crate) refused_exports: u64,
}

/// Reads what the processes of a run left, writes their histories, and takes the raw files away. Problems are said.
pub(super) fn read(folder: &Folder) -> Vec<CudaProcess> {
    let own = folder.own();
    let entries = std::fs::read_dir(&own).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_record(path)).collect();
    files.sort();
    let mut out = Vec::new();
    for file in files {
        match process(&file, folder) {
            Ok(process) => {
                // It is as long as the longest run could need, with holes.
                let _ = std::fs::remove_file(&file);
                let _ = std::fs::remove_file(file.with_extension("txt"));
                out.extend(process);
            }
            Err(error) => super::report_problem(format_args!("{}: {error:#}", file.display())),
        }
    }
    let _ = std::fs::remove_file(own.join(UNVERSIONED));
    // What could not be read stays.
    let _ = std::fs::remove_dir(own);
    out.sort_by_key(|process| std::cmp::Reverse(process.total_ns));
    out
}

fn is_record(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("calls-") && name.ends_with(".bin")
}

/// `None` for a process without a memory call.
fn process(path: &Path, folder: &Folder) -> Result<Option<CudaProcess>> {
    let calls = Calls::read(BufReader::new(File::open(path)?))?;
    if calls.records.is_empty() {
        return Ok(None);
    }
    let notes = match File::open(path.with_extension("txt")) {
        Ok(file) => Notes::read(BufReader::new(file))?,
        Err(_) => Notes::default(),
    };
    let stacks = Stacks::of(&calls, &notes);
    let mut kinds: BTreeMap<Call, CallCost> = BTreeMap::new();
    for record in &calls.records {
        let kind =
            kinds.entry(record.call).or_insert_with(|| CallCost { call: record.call.name(), ..CallCost::default() });
        kind.count += 1;
        kind.failed += u64::from(record.code != 0);
        kind.served += u64::from(record.served == Served::Allocator);
        kind.bytes = kind.bytes.saturating_add(record.bytes);
        kind.total_ns += record.total_ns;
        kind.blocked_ns += record.blocked_ns;
    }
    let mut kinds: Vec<CallCost> = kinds.into_values().collect();
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.total_ns));
    let sum = |of: fn(&CallCost) -> u64| kinds.iter().map(of).sum();
    let first = calls.records.iter().map(|record| record.start_ns).min().unwrap_or(0);
    let last = calls.records.iter().map(|record| record.start_ns + record.total_ns).max().unwrap_or(0);
    let threads: std::collections::BTreeSet<u32> = calls.records.iter().map(|record| record.thread).collect();
    // A process that executes another program leaves a record of each: `calls-PID` and `calls-PID-2`.
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let written = Memory::write(&calls, &stacks, &notes, (folder, &name))?;
    let pinned = pinned::Pinned::write(&calls, &stacks, &notes, (folder, &name))?;
    let counter = |counter| calls.counter(counter);
    // Pinned memory has an allocator of its own.
    let of_host = |call: &str| [Call::HostAlloc, Call::HostFree].iter().any(|host| host.name() == call);
    let any_served = kinds.iter().any(|kind| kind.served > 0 && !of_host(kind.call));
    Ok(Some(CudaProcess {
        pid: calls.pid,
        count: sum(|kind| kind.count),
        total_ns: sum(|kind| kind.total_ns),
        blocked_ns: sum(|kind| kind.blocked_ns),
        calls: kinds,
        sites: stacks.sites(&calls, &notes),
        span_ns: last - first,
        threads: threads.len(),
        peak_bytes: written.peak,
        left_bytes: written.live_bytes,
        allocator: any_served.then(|| AllocatorUse {
            driver_calls: counter(Counter::DriverCalls),
            driver_ns: counter(Counter::DriverNs),
            reserved_peak_bytes: counter(Counter::ReservedPeak),
            passed: counter(Counter::Passed),
            several_streams: counter(Counter::Streams) > 0,
            refused_exports: counter(Counter::Refused),
        }),
        incomplete: calls.incomplete,
        dropped: counter(Counter::Dropped),
        histories: written.files,
        pinned,
        nccl: NcclUse::new(&calls, &stacks),
    }))
}

/// Call stacks with functions and lines, by number.
#[derive(Default)]
struct Stacks(BTreeMap<u32, Vec<Place>>);

impl Stacks {
    fn of(calls: &Calls, notes: &Notes) -> Self {
        let symbols = Symbols::of(notes);
        let numbers: std::collections::BTreeSet<u32> = calls.records.iter().map(|record| record.stack).collect();
        let numbers = numbers.into_iter().filter(|number| *number != NO_STACK);
        Self(
            numbers
                .map(|number| (number, symbols.stack(notes, number)))
                .filter(|(_, stack)| !stack.is_empty())
                .collect(),
        )
    }

    /// The most expensive places.
    fn sites(&self, calls: &Calls, notes: &Notes) -> Vec<SiteCost> {
        const MOST: usize = 20;
        let names: BTreeMap<u32, Option<String>> =
            self.0.iter().map(|(number, stack)| (*number, symbols::call_site(stack))).collect();
        let mut sites: BTreeMap<(Call, Option<&str>), (SiteCost, u64)> = BTreeMap::new();
        for record in &calls.records {
            let site = names.get(&record.stack).and_then(Option::as_deref);
            let (cost, longest) = sites.entry((record.call, site)).or_insert_with(|| {
                let (call, site) = (record.call.name(), site.map(str::to_owned));
                (SiteCost { call, site, behind: None, count: 0, total_ns: 0, blocked_ns: 0 }, 0)
            });
            cost.count += 1;
            cost.total_ns += record.total_ns;
            cost.blocked_ns += record.blocked_ns;
            if record.blocked_ns > *longest {
                *longest = record.blocked_ns;
                cost.behind = notes.behind(record.behind).map(symbols::short);
            }
        }
        let mut sites: Vec<SiteCost> = sites.into_values().map(|(cost, _)| cost).collect();
        sites.sort_by_key(|site| std::cmp::Reverse((site.blocked_ns, site.total_ns)));
        sites.truncate(MOST);
        sites
    }
}

/// Device memory over the calls.
#[derive(Default)]
struct Memory {
    /// Bytes and device by address.
    live: BTreeMap<u64, (u64, u8)>,
    live_bytes: u64,
    peak: u64,
    files: Vec<PathBuf>,
}

/// A line of a history: the fields of a trace, and where the call was made and what it took.
#[derive(Serialize)]
struct Line<'c> {
    time_ns: u64,
    action: &'static str,
    addr: u64,
    size: u64,
    stream: u64,
    call: &'static str,
    thread: u32,
    took_ns: u64,
    blocked_ns: u64,
    /// What the call waited behind.
    #[serde(skip_serializing_if = "Option::is_none")]
    behind: Option<&'c str>,
    /// Number of the call stack.
    #[serde(skip_serializing_if = "Option::is_none")]
    stack: Option<u32>,
    /// Its frames, the innermost first, in the first line that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    frames: Option<&'c [Place]>,
}

impl<'c> Line<'c> {
    /// The line of a call, with its action and bytes. `is_first` says whether no line has had the stack.
    fn new(
        record: &CallRecord,
        (action, size): (&'static str, u64),
        time_ns: u64,
        stacks: &'c Stacks,
        notes: &'c Notes,
        is_first: &mut dyn FnMut(u32) -> bool,
    ) -> Self {
        let frames = stacks.0.get(&record.stack);
        Self {
            time_ns,
            action,
            addr: record.addr,
            size,
            stream: record.stream,
            call: record.call.name(),
            thread: record.thread,
            took_ns: record.total_ns,
            blocked_ns: record.blocked_ns,
            behind: notes.behind(record.behind),
            stack: frames.is_some().then_some(record.stack),
            frames: frames.filter(|_| is_first(record.stack)).map(Vec::as_slice),
        }
    }
}

impl Memory {
    /// Writes a history for each GPU, whose names begin as that of the record.
    fn write(calls: &Calls, stacks: &Stacks, notes: &Notes, (folder, name): (&Folder, &str)) -> Result<Self> {
        let mut out = Self::default();
        let mut written: std::collections::BTreeSet<(u8, u32)> = std::collections::BTreeSet::new();
        let mut files: BTreeMap<u8, (PathBuf, OutputFile)> = BTreeMap::new();
        let mut time = 0;
        for record in &calls.records {
            let Some((action, size)) = out.apply(record) else { continue };
            let (path, file) = match files.entry(record.device) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    let name = format!("{name}-gpu{}.jsonl", record.device);
                    let path = folder.path.join(&name);
                    entry.insert((folder.shown.join(name), create_private(&path, Existing::Replace)?))
                }
            };
            // Threads take their places in the record in another order than their calls began.
            time = record.start_ns.max(time);
            let line =
                Line::new(record, (action, size), time.wrapping_add(calls.epoch_ns), stacks, notes, &mut |stack| {
                    written.insert((record.device, stack))
                });
            serde_json::to_writer(&mut *file, &line).with_context(|| path.display().to_string())?;
            file.write_all(b"\n").with_context(|| path.display().to_string())?;
        }
        for (path, file) in files.into_values() {
            file.finish()?;
            out.files.push(path);
        }
        Ok(out)
    }

    /// The effect of a call on device memory: the action in a recording and its bytes.
    fn apply(&mut self, record: &CallRecord) -> Option<(&'static str, u64)> {
        const OUT_OF_MEMORY: u16 = 2;
        match record.call {
            Call::Alloc | Call::Pitch | Call::AllocAsync | Call::FromPool => match record.code {
                0 => {
                    self.live.insert(record.addr, (record.bytes, record.device));
                    self.live_bytes += record.bytes;
                    self.peak = self.peak.max(self.live_bytes);
                    Some(("alloc", record.bytes))
                }
                OUT_OF_MEMORY => Some(("oom", record.bytes)),
                _ => None,
            },
            Call::Free | Call::FreeAsync if record.code == 0 => {
                let (bytes, _) = self.live.remove(&record.addr)?;
                self.live_bytes -= bytes;
                Some(("free_requested", bytes))
            }
            _ => None,
        }
    }
}

impl CudaProcess {
    /// Lines about pinned memory and NCCL's.
    pub(super) fn library_lines(&self) -> impl Iterator<Item = String> {
        let lines = [self.pinned.as_ref().map(PinnedUse::line), self.nccl.as_ref().map(NcclUse::line)];
        lines.into_iter().flatten().map(|line| format!("         {line}"))
    }

    /// The lines of the screen.
    pub(super) fn lines(&self) -> Vec<String> {
        let label = format!("{:8}", format!("pid {}", self.pid));
        let gap = if label.ends_with(' ') { "" } else { " " };
        let time = |ns: u64| duration(ns);
        let mut out = Vec::new();
        let waiting = match self.sites.first().filter(|site| site.blocked_ns > 0) {
            None => "none of it waiting for the device".to_owned(),
            Some(worst) => {
                let site = worst.site.as_ref().map_or(String::new(), |site| format!(" at {site}"));
                let behind = worst.behind.as_ref().map_or(String::new(), |name| format!(", behind {name}"));
                format!("{} waiting for the device, most in {}{site}{behind}", time(self.blocked_ns), name(worst.call))
            }
        };
        let work = if self.allocator.is_some() { "other work" } else { "the driver's own work" };
        out.push(format!(
            "{label}{gap}{} of {} in {}: {waiting}; {} {work}",
            time(self.total_ns),
            time(self.span_ns),
            counted(self.count, "memory call"),
            time(self.total_ns - self.blocked_ns),
        ));
        for kind in self.calls.iter().take(4) {
            let waited = match kind.blocked_ns {
                0 => String::new(),
                ns => format!(", {} of it waiting", time(ns)),
            };
            let failed = if kind.failed > 0 { format!(", {} refused", kind.failed) } else { String::new() };
            out.push(format!(
                "         {:>9} x {}: {}{waited}{failed}",
                kind.count,
                name(kind.call),
                time(kind.total_ns)
            ));
        }
        let streams = if self.threads > 1 { format!(", {} threads", self.threads) } else { String::new() };
        let mut memory = format!("         {} requested at most{streams}", Bytes(self.peak_bytes));
        if let Some(allocator) = &self.allocator {
            // A pool of the driver does not say.
            if allocator.reserved_peak_bytes > 0 {
                memory += &format!("; the allocator reserved {} at most", Bytes(allocator.reserved_peak_bytes));
            }
            memory += &format!(
                "; the allocator made {} in {}",
                counted(allocator.driver_calls, "driver call"),
                time(allocator.driver_ns)
            );
        }
        out.push(memory);
        if self.left_bytes > 0 {
            out.push(format!("         {} not freed at the end", Bytes(self.left_bytes)));
        }
        out.extend(self.library_lines());
        if self.dropped > 0 {
            out.push(format!("         {} not recorded: the file had no room", counted(self.dropped, "call")));
        }
        out
    }
}

/// A call under the names that programs use.
fn name(call: &str) -> String {
    let runtime = match call {
        "cuMemAlloc" => "cudaMalloc",
        "cuMemAllocPitch" => "cudaMallocPitch",
        "cuMemFree" => "cudaFree",
        "cuMemAllocAsync" => "cudaMallocAsync",
        "cuMemAllocFromPoolAsync" => "cudaMallocFromPoolAsync",
        "cuMemFreeAsync" => "cudaFreeAsync",
        "cuMemAllocManaged" => "cudaMallocManaged",
        "cuMemHostAlloc" => "cudaMallocHost",
        "cuMemFreeHost" => "cudaFreeHost",
        "cuMemHostRegister" => "cudaHostRegister",
        "cuMemHostUnregister" => "cudaHostUnregister",
        other => return other.to_owned(),
    };
    format!("{runtime} ({call})")
}
