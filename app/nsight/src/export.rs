//! Reads an SQLite export of Nsight Systems, schema of 2021.5 to 2026.
//!
//! A table exists only if something was recorded for it, and columns differ between versions, so both are looked up first.
//!
//! Source: "SQLite Schema Reference" of the Nsight Systems user guide <https://docs.nvidia.com/nsight-systems/UserGuide/>.

use crate::capture::{Call, CallName, CallNames, Capture, Mark, Overhead, Range, Texts, Work, WorkKind};
use crate::extracted;
use crate::names::{self, Scope};
use crate::python;
use crate::tables::{Strings, Tables, blob, integer, interval, text};
use rusqlite::{Connection, OpenFlags};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

const RUNTIME: &str = "CUPTI_ACTIVITY_KIND_RUNTIME";
const KERNEL: &str = "CUPTI_ACTIVITY_KIND_KERNEL";
const MEMCPY: &str = "CUPTI_ACTIVITY_KIND_MEMCPY";
const MEMSET: &str = "CUPTI_ACTIVITY_KIND_MEMSET";
const GRAPH: &str = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
const SYNC: &str = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION";
const EVENT: &str = "CUPTI_ACTIVITY_KIND_CUDA_EVENT";
const MEMORY: &str = "CUDA_GPU_MEMORY_USAGE_EVENTS";
const CALLCHAINS: &str = "CUDA_CALLCHAINS";
const NVTX: &str = "NVTX_EVENTS";
const NVTX_STREAMS: &str = "TARGET_INFO_NVTX_CUDA_STREAM";
const CONTEXTS: &str = "TARGET_INFO_CUDA_CONTEXT_INFO";
const OVERHEAD: &str = "PROFILER_OVERHEAD";
const DIAGNOSTICS: &str = "DIAGNOSTIC_EVENT";
const CLASSES: &str = "ENUM_NSYS_EVENT_CLASS";

// Of ENUM_NSYS_EVENT_TYPE.
const MARK: i64 = 34;
const THREAD_NAME: i64 = 39;
const PUSH_POP: i64 = 59;
const STREAM_NAME: i64 = 99;
// Of ENUM_NSYS_EVENT_CLASS: the record of a backtrace, which has the interval and the name of its call, and its start and end.
const BACKTRACES: [i64; 3] = [67, 68, 69];
// Of ENUM_CUDA_MEM_KIND.
const PAGEABLE: i64 = 0;
const DEVICE_MEMORY: i64 = 2;
// The stream of a record that has none.
const NO_STREAM: i64 = 0xFFFF_FFFF;

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is missing or cannot be opened.
    #[error("{}: cannot be read: {problem}; check that the file exists and is complete", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error; not the `source`, as the message has it.
        problem: std::io::Error,
    },
    /// The file is not a database, or is damaged.
    #[error("{}: not a readable SQLite export of Nsight Systems ({problem}); `nsys export --type sqlite` writes one", path.display())]
    Database {
        /// The file.
        path: PathBuf,
        /// SQLite's error; not the `source`, as the message has it.
        problem: rusqlite::Error,
    },
    /// The directory does not contain the tables of a capture, or they are damaged.
    #[error("{}: {problem}; `vramlab nsight CAPTURE.sqlite --extract DIR` writes the tables of a capture", path.display())]
    Extracted {
        /// The directory, or the file in it.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// The database has no table of a capture.
    #[error(
        "{}: has neither CUDA calls nor kernels nor NVTX ranges; capture with `nsys profile --trace cuda,nvtx` and export with \
         `nsys export --type sqlite`",
        path.display()
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Reads an export, or a directory that [`extract`](crate::extract) wrote. Memory: about 150 bytes a call and a piece of work.
///
/// # Errors
/// [`Error`] in one line: the file is missing, is not an SQLite database, is damaged, or is not a capture.
pub fn read(path: &Path) -> Result<Capture, Error> {
    if path.is_dir() {
        return extracted::read(path);
    }
    let metadata = std::fs::metadata(path).map_err(|problem| Error::Io { path: path.to_owned(), problem })?;
    if !metadata.is_file() {
        let problem = std::io::Error::other("not a regular file");
        return Err(Error::Io { path: path.to_owned(), problem });
    }
    let database = |problem| Error::Database { path: path.to_owned(), problem };
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(database)?;
    let tables = Tables::new(&connection).map_err(database)?;
    if ![RUNTIME, KERNEL, MEMCPY, MEMSET, GRAPH, NVTX].iter().any(|table| tables.contains(table)) {
        return Err(Error::Empty { path: path.to_owned() });
    }
    Reader::new(&tables).and_then(Reader::read).map_err(database)
}

struct Reader<'t, 'c> {
    tables: &'t Tables<'c>,
    strings: Strings<'c>,
    capture: Capture,
    call_names: CallNames,
    work_names: Texts,
    /// Rows without valid times, by what they are of.
    untimed: BTreeMap<&'static str, u64>,
    /// Stacks of Python, and marks that should have had one.
    samples: Vec<python::Sample>,
    empty_samples: u64,
}

impl<'t, 'c> Reader<'t, 'c> {
    fn new(tables: &'t Tables<'c>) -> rusqlite::Result<Self> {
        let strings = Strings::new(tables)?;
        Ok(Self {
            tables,
            strings,
            capture: Capture::default(),
            call_names: CallNames::default(),
            work_names: Texts::default(),
            untimed: BTreeMap::new(),
            samples: Vec::new(),
            empty_samples: 0,
        })
    }

    fn read(mut self) -> rusqlite::Result<Capture> {
        self.source()?;
        self.calls()?;
        self.work(KERNEL, WorkKind::Kernel)?;
        self.work(MEMCPY, WorkKind::Memcpy)?;
        self.work(MEMSET, WorkKind::Memset)?;
        self.work(GRAPH, WorkKind::Graph)?;
        self.drop_graphs_with_nodes();
        self.streams()?;
        self.nvtx()?;
        self.overhead()?;
        self.diagnostics()?;
        let Self { mut capture, call_names, work_names, untimed, strings, tables, samples, empty_samples } = self;
        capture.call_names = call_names.list;
        capture.work_names = work_names.list;
        let missing = [
            (RUNTIME, "The capture has no CUDA calls; record with `nsys profile --trace cuda`."),
            (KERNEL, "The capture has no kernels, so a wait can only be seen behind copies, fills and graphs."),
            (
                SYNC,
                "The capture has no records of synchronise calls: a wait for one stream is taken for one for the device.",
            ),
        ];
        for (table, sentence) in missing {
            let graphs = table == KERNEL && tables.contains(GRAPH);
            if !tables.contains(table) && !graphs {
                capture.notes.push(sentence.to_owned());
            }
        }
        if !strings.present() {
            capture.notes.push("The export has no table StringIds, so calls and kernels have no names.".to_owned());
        }
        if tables.contains(NVTX) && capture.ranges.is_empty() {
            capture.notes.push("The capture has no NVTX ranges, so a call has no place in the run.".to_owned());
        }
        for (kind, count) in untimed {
            capture.notes.push(format!(
                "{count} {kind} have no valid times, because the profiler dropped them; they are left out."
            ));
        }
        if samples.is_empty() && empty_samples > 0 {
            capture.notes.push(
                "The capture has call stacks of Python, and the export does not; export it again with Nsight Systems 2024.6 or later."
                    .to_owned(),
            );
        }
        capture.join();
        python::attach(&mut capture, samples, |capture, call| has_stack(capture.call_name(call)));
        Ok(capture)
    }

    fn source(&mut self) -> rusqlite::Result<()> {
        let (tables, source) = (self.tables, &mut self.capture.source);
        if tables.has("META_DATA_EXPORT", "name") && tables.has("META_DATA_EXPORT", "value") {
            tables.each("META_DATA_EXPORT", &["name", "value"], "", |row| match text(row, 0).as_deref() {
                Some("EXPORT_PRODUCT_VERSION") => source.nsight_systems = text(row, 1),
                Some("EXPORT_SCHEMA_VERSION") => source.export_schema = text(row, 1),
                _ => {}
            })?;
        }
        if tables.has("TARGET_INFO_GPU", "name") {
            let order = if tables.has("TARGET_INFO_GPU", "id") { "ORDER BY id" } else { "" };
            tables.each("TARGET_INFO_GPU", &["name"], order, |row| source.devices.extend(text(row, 0)))?;
        }
        Ok(())
    }

    fn calls(&mut self) -> rusqlite::Result<()> {
        let tables = self.tables;
        if !tables.contains(RUNTIME) {
            return Ok(());
        }
        let name = tables.first(RUNTIME, &["nameId"]);
        let chain = tables.first(RUNTIME, &["callchainId"]);
        let class = tables.first(RUNTIME, &["eventClass"]);
        let backtraces = self.backtraces()?;
        let columns = ["start", "end", "globalTid", "correlationId", "returnValue"]
            .map(|column| tables.first(RUNTIME, &[column]));
        let [start, end, thread, correlation, result] = &columns;
        let mut chains: Vec<(usize, i64)> = Vec::new();
        let mut known: HashMap<(i64, i64, usize), usize> = HashMap::new();
        // Chains of records of backtraces, whose calls may come later.
        let mut records: Vec<((i64, i64, usize), i64)> = Vec::new();
        let (calls, untimed) = (&mut self.capture.calls, &mut self.untimed);
        let (strings, call_names) = (&mut self.strings, &mut self.call_names);
        tables.each(RUNTIME, &[start, end, thread, correlation, &name, &chain, result, &class], "", |row| {
            let Some((start, end)) = interval(row, 0, 1) else {
                *untimed.entry("CUDA calls").or_default() += 1;
                return;
            };
            let id = integer(row, 4).unwrap_or(-1);
            let number = match strings.get(id) {
                Some(name) => call_names.number(name),
                None => call_names.number(&format!("call {id}")),
            };
            let thread = integer(row, 2).unwrap_or(0);
            let correlation = integer(row, 3).unwrap_or(0);
            let chain = integer(row, 5).filter(|&chain| chain > 0).filter(|_| has_stack(&call_names.list[number]));
            if integer(row, 7).is_some_and(|class| backtraces.contains(&class)) {
                records.extend(chain.map(|chain| ((thread, correlation, number), chain)));
                return;
            }
            // Such a record may lack its class.
            let index = match known.entry((thread, correlation, number)) {
                Entry::Occupied(call) if correlation != 0 => {
                    chains.extend(chain.map(|chain| (*call.get(), chain)));
                    return;
                }
                Entry::Occupied(_) => calls.len(),
                Entry::Vacant(place) => *place.insert(calls.len()),
            };
            chains.extend(chain.map(|chain| (index, chain)));
            calls.push(Call {
                start,
                end,
                name: number,
                thread,
                process: thread >> 24,
                correlation,
                ok: integer(row, 6).unwrap_or(0) == 0,
                stream: None,
                device: None,
                bytes: None,
                event: None,
                range: None,
                stack: None,
            });
        })?;
        chains.extend(records.iter().filter_map(|(key, chain)| Some((*known.get(key)?, *chain))));
        self.stacks(&chains)?;
        self.details()
    }

    /// The classes of records of backtraces.
    fn backtraces(&self) -> rusqlite::Result<Vec<i64>> {
        let mut classes = Vec::new();
        if self.tables.has(CLASSES, "id") && self.tables.has(CLASSES, "name") {
            self.tables.each(CLASSES, &["id", "name"], "", |row| {
                let is_one = text(row, 1).is_some_and(|name| name.contains("CUDABACKTRACE"));
                classes.extend(integer(row, 0).filter(|_| is_one));
            })?;
        }
        Ok(if classes.is_empty() { BACKTRACES.to_vec() } else { classes })
    }

    /// Streams, events and sizes of calls, from other tables.
    fn details(&mut self) -> rusqlite::Result<()> {
        let tables = self.tables;
        let calls = &mut self.capture.calls;
        let at: HashMap<(i64, i64), usize> =
            calls.iter().enumerate().map(|(index, call)| ((call.process, call.correlation), index)).collect();
        // An event's handle is used again and again, so newer exports number its uses.
        for table in [EVENT, SYNC] {
            if !tables.contains(table) {
                continue;
            }
            let process = tables.process(table);
            let event = tables.first(table, &["eventSyncId", "eventId"]);
            let columns = ["correlationId", "streamId", "deviceId"].map(|column| tables.first(table, &[column]));
            let [correlation, stream, device] = &columns;
            tables.each(table, &[&process, correlation, stream, device, &event], "", |row| {
                let Some(key) = integer(row, 0).zip(integer(row, 1)) else { return };
                let Some(&index) = at.get(&key) else { return };
                calls[index].stream = integer(row, 2).filter(|&stream| stream != NO_STREAM);
                calls[index].device = integer(row, 3);
                calls[index].event = integer(row, 4);
            })?;
        }
        if tables.contains(MEMORY) {
            // One call may leave several records; the largest is the block.
            let process = tables.process(MEMORY);
            let columns =
                ["correlationId", "bytes", "deviceId", "memKind"].map(|column| tables.first(MEMORY, &[column]));
            let [correlation, bytes, device, kind] = &columns;
            tables.each(MEMORY, &[&process, correlation, bytes, device, kind], "", |row| {
                let Some(key) = integer(row, 0).zip(integer(row, 1)) else { return };
                let Some(&index) = at.get(&key).filter(|_| integer(row, 4) == Some(DEVICE_MEMORY)) else { return };
                let call = &mut calls[index];
                call.bytes = call.bytes.max(integer(row, 2));
                call.device = integer(row, 3).or(call.device);
            })?;
        }
        Ok(())
    }

    /// Stacks of these calls.
    fn stacks(&mut self, chains: &[(usize, i64)]) -> rusqlite::Result<()> {
        let tables = self.tables;
        let complete = ["id", "symbol", "stackDepth"].iter().all(|column| tables.has(CALLCHAINS, column));
        if chains.is_empty() || !complete {
            return Ok(());
        }
        let requested: HashSet<i64> = chains.iter().map(|(_, chain)| *chain).collect();
        let mut frames: BTreeMap<i64, Vec<(i64, i64)>> = BTreeMap::new();
        tables.each(CALLCHAINS, &["id", "stackDepth", "symbol"], "", |row| {
            let (Some(chain), Some(depth), Some(symbol)) = (integer(row, 0), integer(row, 1), integer(row, 2)) else {
                return;
            };
            if requested.contains(&chain) {
                frames.entry(chain).or_default().push((depth, symbol));
            }
        })?;
        let mut numbers = HashMap::new();
        for (chain, mut frames) in frames {
            frames.sort_unstable();
            let symbols = frames.iter().map(|(_, symbol)| self.strings.get(*symbol).unwrap_or("?").to_owned());
            numbers.insert(chain, self.capture.stacks.len());
            self.capture.stacks.push(symbols.collect());
        }
        for (call, chain) in chains {
            self.capture.calls[*call].stack = numbers.get(chain).copied();
        }
        Ok(())
    }

    fn work(&mut self, table: &str, kind: WorkKind) -> rusqlite::Result<()> {
        let tables = self.tables;
        if !tables.contains(table) {
            return Ok(());
        }
        let name = match kind {
            WorkKind::Kernel => tables.first(table, &["shortName", "demangledName"]),
            WorkKind::Graph => tables.first(table, &["graphId", "graphExecId"]),
            WorkKind::Memcpy => tables.first(table, &["copyKind"]),
            WorkKind::Memset => "NULL".to_owned(),
        };
        let process = tables.process(table);
        let columns = ["start", "end", "deviceId", "streamId", "correlationId", "bytes", "srcKind", "dstKind"]
            .map(|column| tables.first(table, &[column]));
        let [start, end, device, stream, correlation, bytes, source, target] = &columns;
        let Self { strings, work_names, capture, untimed, .. } = self;
        let columns =
            [start, end, device, stream, &process, correlation, bytes, &name, source, target].map(String::as_str);
        tables.each(table, &columns, "", |row| {
            let Some((start, end)) = interval(row, 0, 1) else {
                *untimed.entry("kernels and copies").or_default() += 1;
                return;
            };
            let id = integer(row, 7);
            let name = match kind {
                WorkKind::Kernel => match id.and_then(|id| strings.get(id)) {
                    Some(name) => work_names.number(name),
                    None => work_names.number(&id.map_or("kernel".to_owned(), |id| format!("kernel {id}"))),
                },
                WorkKind::Memcpy => work_names.number(copy(id)),
                WorkKind::Memset => work_names.number("memset"),
                WorkKind::Graph => work_names.number(&id.map_or("graph".to_owned(), |id| format!("graph {id}"))),
            };
            capture.work.push(Work {
                start,
                end,
                kind,
                name,
                device: integer(row, 2).unwrap_or(0),
                stream: integer(row, 3).unwrap_or(0),
                process: integer(row, 4).unwrap_or(0),
                correlation: integer(row, 5).unwrap_or(0),
                bytes: integer(row, 6),
                pageable: [8, 9].iter().any(|&column| integer(row, column) == Some(PAGEABLE)),
                call: None,
                queued: start,
            });
        })
    }

    /// Where the kernels of a graph's launch were captured one by one, its whole would count their time twice.
    fn drop_graphs_with_nodes(&mut self) {
        let work = &mut self.capture.work;
        let nodes: HashSet<(i64, i64)> = work
            .iter()
            .filter(|work| work.kind != WorkKind::Graph)
            .map(|work| (work.process, work.correlation))
            .collect();
        work.retain(|work| work.kind != WorkKind::Graph || !nodes.contains(&(work.process, work.correlation)));
    }

    fn streams(&mut self) -> rusqlite::Result<()> {
        let (tables, streams) = (self.tables, &mut self.capture.streams);
        if tables.has(CONTEXTS, "nullStreamId") {
            tables.each(CONTEXTS, &["nullStreamId"], "", |row| {
                if let Some(stream) = integer(row, 0) {
                    streams.insert(stream, "default stream".to_owned());
                }
            })?;
        }
        if tables.has(NVTX_STREAMS, "streamId") && tables.has(NVTX_STREAMS, "name") {
            tables.each(NVTX_STREAMS, &["streamId", "name"], "", |row| {
                if let Some((stream, name)) = integer(row, 0).zip(text(row, 1)) {
                    streams.insert(stream, name);
                }
            })?;
        }
        Ok(())
    }

    fn nvtx(&mut self) -> rusqlite::Result<()> {
        let tables = self.tables;
        let Self { strings, capture, samples, empty_samples, .. } = self;
        if tables.has("ThreadNames", "globalTid") && tables.has("ThreadNames", "nameId") {
            let callers: HashSet<i64> = capture.calls.iter().map(|call| call.thread).collect();
            tables.each("ThreadNames", &["globalTid", "nameId"], "", |row| {
                let Some((thread, name)) = integer(row, 0).zip(integer(row, 1)) else { return };
                if let Some(name) = strings.get(name).filter(|_| callers.contains(&thread)) {
                    capture.threads.insert(thread, name.to_owned());
                }
            })?;
        }
        if !tables.contains(NVTX) {
            return Ok(());
        }
        let python = python::domains(tables, NVTX, strings)?;
        let columns = [
            "start",
            "end",
            "eventType",
            "text",
            "textId",
            "globalTid",
            "endGlobalTid",
            "uint64Value",
            "domainId",
            "binaryData",
        ]
        .map(|column| tables.first(NVTX, &[column]));
        let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
        let wanted = format!("WHERE eventType IN ({MARK}, {THREAD_NAME}, {PUSH_POP}, {STREAM_NAME})");
        tables.each(NVTX, &columns, &wanted, |row| {
            let registered = integer(row, 4).and_then(|id| strings.get(id)).map(str::to_owned);
            let text = text(row, 3).or(registered).unwrap_or_else(|| "unnamed range".to_owned());
            let thread = integer(row, 5).unwrap_or(0);
            match integer(row, 2) {
                Some(THREAD_NAME) => {
                    capture.threads.insert(thread, text);
                }
                // A tool may give the handle instead of the number; no work has such a number.
                Some(STREAM_NAME) => {
                    capture.streams.insert(integer(row, 7).unwrap_or(0), text);
                }
                Some(MARK) => {
                    let Some(time) = integer(row, 0) else { return };
                    if integer(row, 8).is_some_and(|domain| python.contains(&(thread >> 24, domain))) {
                        let sample = blob(row, 9).and_then(|data| python::sample(time, thread, data, strings));
                        *empty_samples += u64::from(sample.is_none());
                        samples.extend(sample);
                    } else {
                        capture.marks.push(Mark { time, text, thread });
                    }
                }
                _ => {
                    let one_thread = integer(row, 6).is_none_or(|end| end == thread);
                    if let Some((start, end)) = interval(row, 0, 1).filter(|_| one_thread) {
                        capture.ranges.push(Range { start, end, text, thread, level: 0, parent: None });
                    }
                }
            }
        })
    }

    fn overhead(&mut self) -> rusqlite::Result<()> {
        let (tables, overhead) = (self.tables, &mut self.capture.overhead);
        if !["start", "end", "globalTid"].iter().all(|column| tables.has(OVERHEAD, column)) {
            return Ok(());
        }
        tables.each(OVERHEAD, &["start", "end", "globalTid"], "", |row| {
            if let Some((start, end)) = interval(row, 0, 1) {
                overhead.push(Overhead { start, end, thread: integer(row, 2).unwrap_or(0) });
            }
        })
    }

    /// The profiler's own warnings of events that it lost.
    fn diagnostics(&mut self) -> rusqlite::Result<()> {
        let (tables, notes) = (self.tables, &mut self.capture.notes);
        if !tables.has(DIAGNOSTICS, "text") {
            return Ok(());
        }
        let mut lost = Vec::new();
        tables.each(DIAGNOSTICS, &["text"], "", |row| {
            let Some(text) = text(row, 0) else { return };
            let lower = text.to_lowercase();
            if ["dropped", "were lost", "not all"].iter().any(|word| lower.contains(word)) && !lost.contains(&text) {
                lost.push(text);
            }
        })?;
        notes.extend(lost.into_iter().map(|text| format!("Nsight Systems warns: {}", text.trim())));
        Ok(())
    }
}

/// Whether the stacks of such calls are read: those of memory calls and of calls that may wait.
fn has_stack(name: &CallName) -> bool {
    names::manages_memory(&name.kind) || !matches!(name.scope, Scope::Nothing | Scope::Room)
}

/// Of ENUM_CUDA_MEMCPY_OPER.
fn copy(kind: Option<i64>) -> &'static str {
    match kind {
        Some(1) => "copy host to device",
        Some(2) => "copy device to host",
        Some(8) => "copy device to device",
        Some(10) => "copy between devices",
        _ => "copy",
    }
}
