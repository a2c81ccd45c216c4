//! Makes small SQLite exports with the columns of old and new versions of Nsight Systems.

use rusqlite::{Connection, ToSql, params_from_iter};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use vramlab_nsight::{Attribution, Capture, attribute, read};

pub(crate) const PROCESS: i64 = 1234;
pub(crate) const THREAD: i64 = (PROCESS << 24) | 77;
/// A thread of the process that makes no calls.
const PROCESS_THREAD: i64 = (PROCESS << 24) | 1;
pub(crate) const OTHER_THREAD: i64 = (PROCESS << 24) | 78;
const NO_STREAM: i64 = 0xFFFF_FFFF;

/// The columns of schema 2023.4, and those that 2025.6 adds.
const TABLES: [(&str, &str, &str); 14] = [
    ("StringIds", "id INTEGER PRIMARY KEY, value TEXT", ""),
    ("META_DATA_EXPORT", "name TEXT, value TEXT", ""),
    (
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "start, end, eventClass, globalTid, correlationId, nameId, returnValue, callchainId",
        "",
    ),
    (
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "start, end, deviceId, contextId, streamId, correlationId, globalPid, demangledName, shortName",
        ", greenContextId, graphNodeId",
    ),
    (
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "start, end, deviceId, contextId, streamId, correlationId, globalPid, bytes, copyKind, srcKind, dstKind",
        ", greenContextId, copyCount",
    ),
    (
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "start, end, deviceId, graphId, contextId, streamId, correlationId, globalPid",
        ", graphExecId",
    ),
    (
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        "start, end, deviceId, contextId, streamId, correlationId, globalPid, syncType, eventId",
        ", eventSyncId",
    ),
    (
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
        "deviceId, contextId, streamId, correlationId, globalPid, eventId",
        ", eventSyncId, timestamp",
    ),
    (
        "CUDA_GPU_MEMORY_USAGE_EVENTS",
        "start, globalPid, deviceId, bytes, memKind, memoryOperationType, correlationId",
        ", streamId",
    ),
    ("CUDA_CALLCHAINS", "id, symbol, module, unresolved, originalIP, stackDepth", ""),
    (
        "NVTX_EVENTS",
        "start, end, eventType, text, globalTid, endGlobalTid, textId, domainId, uint64Value",
        ", binaryData",
    ),
    ("PROFILER_OVERHEAD", "start, end, globalTid, nameId", ", overheadType"),
    ("TARGET_INFO_NVTX_CUDA_STREAM", "name, deviceId, contextId, streamId", ""),
    ("DIAGNOSTIC_EVENT", "timestamp, severity, text, globalPid", ""),
];

/// Versions whose columns are made.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Version {
    Old,
    New,
}

/// An export that is being written. A table without rows does not exist.
pub(crate) struct Export {
    pub(crate) path: PathBuf,
    pub(crate) db: Connection,
    version: Version,
    tables: BTreeSet<String>,
    strings: BTreeMap<String, i64>,
    correlation: i64,
    _directory: tempfile::TempDir,
}

impl Export {
    pub(crate) fn new(version: Version) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("capture.sqlite");
        let db = open(&path);
        let (tables, strings) = (BTreeSet::new(), BTreeMap::new());
        Self { path, db, version, tables, strings, correlation: 100, _directory: directory }
    }

    pub(crate) fn insert(&mut self, table: &str, values: &[(&str, &dyn ToSql)]) {
        if self.tables.insert(table.to_owned()) {
            let (_, old, new) = TABLES.iter().find(|(name, _, _)| *name == table).unwrap();
            let new = if self.version == Version::New { new } else { "" };
            self.db.execute(&format!("CREATE TABLE {table} ({old}{new})"), []).unwrap();
        }
        let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        let marks = vec!["?"; values.len()].join(", ");
        let sql = format!("INSERT INTO {table} ({}) VALUES ({marks})", names.join(", "));
        self.db.execute(&sql, params_from_iter(values.iter().map(|(_, value)| *value))).unwrap();
    }

    pub(crate) fn string(&mut self, text: &str) -> i64 {
        if let Some(&id) = self.strings.get(text) {
            return id;
        }
        let id = self.strings.len() as i64 + 1;
        self.strings.insert(text.to_owned(), id);
        self.insert("StringIds", &[("id", &id), ("value", &text)]);
        id
    }

    pub(crate) fn call_on(&mut self, thread: i64, name: &str, start: i64, end: i64) -> i64 {
        self.correlation += 1;
        let (name, correlation) = (self.string(name), self.correlation);
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            &[
                ("start", &start),
                ("end", &end),
                ("globalTid", &thread),
                ("correlationId", &correlation),
                ("nameId", &name),
                ("returnValue", &0),
            ],
        );
        correlation
    }

    pub(crate) fn call(&mut self, name: &str, start: i64, end: i64) -> i64 {
        self.call_on(THREAD, name, start, end)
    }

    /// A call that allocates or frees device memory.
    pub(crate) fn memory_call(&mut self, name: &str, start: i64, end: i64, bytes: i64) -> i64 {
        let correlation = self.call(name, start, end);
        let process = PROCESS << 24;
        self.insert(
            "CUDA_GPU_MEMORY_USAGE_EVENTS",
            &[
                ("start", &end),
                ("globalPid", &process),
                ("deviceId", &0),
                ("bytes", &bytes),
                ("memKind", &2),
                ("memoryOperationType", &1),
                ("correlationId", &correlation),
            ],
        );
        correlation
    }

    pub(crate) fn run(&mut self, name: &str, correlation: i64, span: (i64, i64), stream: i64) {
        let (short, process) = (self.string(name), PROCESS << 24);
        self.insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            &[
                ("start", &span.0),
                ("end", &span.1),
                ("deviceId", &0),
                ("streamId", &stream),
                ("correlationId", &correlation),
                ("globalPid", &process),
                ("shortName", &short),
            ],
        );
    }

    /// A launch and its kernel on stream 7.
    pub(crate) fn kernel(&mut self, name: &str, launch: (i64, i64), span: (i64, i64)) -> i64 {
        self.kernel_on(7, name, launch, span)
    }

    pub(crate) fn kernel_on(&mut self, stream: i64, name: &str, launch: (i64, i64), span: (i64, i64)) -> i64 {
        let correlation = self.call("cuLaunchKernel", launch.0, launch.1);
        self.run(name, correlation, span, stream);
        correlation
    }

    /// A copy to the host; `host` is the kind of the host's memory: 0 pageable, 1 pinned.
    pub(crate) fn copy(&mut self, call: &str, span: (i64, i64), run: (i64, i64), host: i64) {
        let (correlation, process) = (self.call(call, span.0, span.1), PROCESS << 24);
        self.insert(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            &[
                ("start", &run.0),
                ("end", &run.1),
                ("deviceId", &0),
                ("streamId", &7),
                ("correlationId", &correlation),
                ("globalPid", &process),
                ("bytes", &4096),
                ("copyKind", &2),
                ("srcKind", &2),
                ("dstKind", &host),
            ],
        );
    }

    pub(crate) fn graph(&mut self, correlation: i64, span: (i64, i64)) {
        let process = PROCESS << 24;
        self.insert(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
            &[
                ("start", &span.0),
                ("end", &span.1),
                ("deviceId", &0),
                ("graphId", &3),
                ("streamId", &7),
                ("correlationId", &correlation),
                ("globalPid", &process),
            ],
        );
    }

    /// Says what a synchronise call, or the record of an event, is about.
    pub(crate) fn detail(&mut self, table: &str, correlation: i64, stream: Option<i64>, event: i64, usage: i64) {
        let (process, stream) = (PROCESS << 24, stream.unwrap_or(NO_STREAM));
        let mut values: Vec<(&str, &dyn ToSql)> = vec![
            ("deviceId", &0),
            ("streamId", &stream),
            ("correlationId", &correlation),
            ("globalPid", &process),
            ("eventId", &event),
        ];
        if self.version == Version::New {
            values.push(("eventSyncId", &usage));
        }
        self.insert(table, &values);
    }

    pub(crate) fn range_on(&mut self, thread: i64, text: &str, start: i64, end: i64) {
        self.insert(
            "NVTX_EVENTS",
            &[("start", &start), ("end", &end), ("eventType", &59), ("globalTid", &thread), ("text", &text)],
        );
    }

    pub(crate) fn range(&mut self, text: &str, start: i64, end: i64) {
        self.range_on(THREAD, text, start, end);
    }

    /// A Python stack as `--python-backtrace=cuda` (source 2) and `--python-sampling=true` (1) collect it; old exports lose the frames.
    pub(crate) fn python(&mut self, thread: i64, time: i64, source: u32, frames: &[(&str, &str, u64)]) {
        const DOMAIN: u32 = 4;
        let created: [(&str, &dyn ToSql); 5] = [
            ("start", &0),
            ("eventType", &75),
            ("text", &"Python Backtrace"),
            ("globalTid", &PROCESS_THREAD),
            ("domainId", &DOMAIN),
        ];
        self.insert("NVTX_EVENTS", &created);
        let mut payload = [1_u32.to_le_bytes(), source.to_le_bytes()].concat();
        payload.extend((frames.len() as u64).to_le_bytes());
        for (function, file, line) in frames {
            let [function, file] = [function, file].map(|text| self.string(text) as u64);
            payload.extend([function, file, *line].iter().flat_map(|word| word.to_le_bytes()));
        }
        // Domain, schema, the size of the payload, the size of both.
        let words = [u64::from(DOMAIN), 3, payload.len() as u64, payload.len() as u64 + 32];
        let data: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).chain(payload).collect();
        let mut values: Vec<(&str, &dyn ToSql)> =
            vec![("start", &time), ("eventType", &34), ("text", &""), ("globalTid", &thread), ("domainId", &DOMAIN)];
        if self.version == Version::New {
            values.push(("binaryData", &data));
        }
        self.insert("NVTX_EVENTS", &values);
    }

    pub(crate) fn capture(&self) -> Capture {
        read(&self.path).unwrap()
    }

    pub(crate) fn attribution(&self) -> (Capture, Attribution) {
        let capture = self.capture();
        let attribution = attribute(&capture);
        (capture, attribution)
    }

    /// The calls that waited: name, work, time until the end of the work.
    pub(crate) fn waits(&self) -> Vec<(String, String, i64)> {
        let (capture, attribution) = self.attribution();
        let wait = |wait: &vramlab_nsight::Wait| {
            let (call, work) = (&capture.calls[wait.call], &capture.work[wait.work]);
            (capture.call_name(call).name.clone(), capture.work_name(work).to_owned(), wait.waited_ns)
        };
        attribution.waits.iter().map(wait).collect()
    }
}

/// A capture in which each step launches a kernel, allocates while it runs, frees and waits, and frees again.
///
/// In each step of 1,000 ns: launch 0..10, kernel 20..200, `cuMemAlloc` 30..40, `cuMemFree` 50..210 (waits 150, returns in 10),
/// `cuMemFree` 300..304 (nothing is queued). So a wait is 150, and 150 + 10 - 4 = 156 are lost.
pub(crate) fn training(version: Version, steps: i64) -> Export {
    let mut export = Export::new(version);
    export.range("epoch 1", 0, steps * 1000);
    for step in 0..steps {
        let at = step * 1000;
        export.range(&format!("step {}", step + 1), at, at + 900);
        export.range("forward", at, at + 400);
        export.range("free 4 KiB", at + 45, at + 215);
        let mark = at + 213;
        export.insert(
            "NVTX_EVENTS",
            &[("start", &mark), ("eventType", &34), ("globalTid", &THREAD), ("text", &"driver_free")],
        );
        export.kernel("relu", (at, at + 10), (at + 20, at + 200));
        export.memory_call("cuMemAlloc_v2", at + 30, at + 40, 4096);
        export.memory_call("cuMemFree_v2", at + 50, at + 210, 4096);
        export.memory_call("cuMemFree_v2", at + 300, at + 304, 512);
    }
    export
}

/// A database that does not wait for the disk.
pub(crate) fn open(path: &Path) -> Connection {
    let db = Connection::open(path).unwrap();
    db.execute_batch("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY").unwrap();
    db
}

/// A file with these bytes.
pub(crate) fn file(directory: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}
