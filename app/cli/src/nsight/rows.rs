//! Every call, piece of work and range of a capture, for programs that draw or compare them. The keys are described in `schema.md`.

use serde::Serialize;
use std::collections::BTreeMap;
use vramlab_nsight::{Attribution, Capture, WorkKind};

/// The contents of a capture, each list in the order of starts. Times count from the capture's first event.
#[derive(Debug, Serialize)]
pub(crate) struct CaptureRows {
    calls: Vec<CallItem>,
    work: Vec<WorkItem>,
    ranges: Vec<RangeItem>,
    /// Names of threads by number.
    threads: BTreeMap<i64, String>,
    /// Names of streams by number.
    streams: BTreeMap<i64, String>,
}

/// A call of the CUDA driver or runtime.
#[derive(Debug, Serialize)]
struct CallItem {
    start_ns: i64,
    duration_ns: i64,
    call: String,
    /// As in a run's `driver_calls`, or the name.
    kind: String,
    process: i64,
    thread: i64,
    bytes: Option<i64>,
    /// The innermost range in which the call starts: its place in `ranges`.
    range: Option<usize>,
    /// The work behind which the call waited: its place in `work`.
    waited_for: Option<usize>,
    /// Until that work was over, by timestamps.
    waited_ns: i64,
    /// Host time lost.
    blocked_ns: i64,
}

/// A kernel, a copy, a fill, or a launch of a graph.
#[derive(Debug, Serialize)]
struct WorkItem {
    start_ns: i64,
    duration_ns: i64,
    name: String,
    kind: WorkKind,
    process: i64,
    device: i64,
    stream: i64,
    bytes: Option<i64>,
    /// The call that queued it: its place in `calls`.
    call: Option<usize>,
}

/// An NVTX range.
#[derive(Debug, Serialize)]
struct RangeItem {
    start_ns: i64,
    duration_ns: i64,
    text: String,
    thread: i64,
    /// The number of ranges around it.
    level: usize,
    /// The range around it: its place in `ranges`.
    parent: Option<usize>,
}

impl CaptureRows {
    pub(crate) fn new(capture: &Capture, attribution: &Attribution) -> Self {
        let (zero, _) = capture.span();
        let call = |call: &vramlab_nsight::Call| {
            let name = capture.call_name(call);
            CallItem {
                start_ns: call.start - zero,
                duration_ns: call.duration(),
                call: name.name.clone(),
                kind: name.kind.clone(),
                process: call.process,
                thread: call.thread,
                bytes: call.bytes,
                range: call.range,
                waited_for: None,
                waited_ns: 0,
                blocked_ns: 0,
            }
        };
        let mut calls: Vec<CallItem> = capture.calls.iter().map(call).collect();
        for wait in &attribution.waits {
            let call = &mut calls[wait.call];
            (call.waited_for, call.waited_ns, call.blocked_ns) = (Some(wait.work), wait.waited_ns, wait.blocked_ns);
        }
        let work = |work: &vramlab_nsight::Work| WorkItem {
            start_ns: work.start - zero,
            duration_ns: work.end - work.start,
            name: capture.work_name(work).to_owned(),
            kind: work.kind,
            process: work.process,
            device: work.device,
            stream: work.stream,
            bytes: work.bytes,
            call: work.call,
        };
        let range = |range: &vramlab_nsight::Range| RangeItem {
            start_ns: range.start - zero,
            duration_ns: range.end - range.start,
            text: range.text.clone(),
            thread: range.thread,
            level: range.level,
            parent: range.parent,
        };
        Self {
            calls,
            work: capture.work.iter().map(work).collect(),
            ranges: capture.ranges.iter().map(range).collect(),
            threads: capture.threads.clone(),
            streams: capture.streams.clone(),
        }
    }
}
