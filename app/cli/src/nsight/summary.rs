//! The tables of a capture. The keys are described in `schema.md`.

use super::rows::CaptureRows;
use super::sites::{self, SiteRow};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use vramlab_nsight::{Attribution, Capture, Source, Wait, WorkKind, idle, names, places};

/// Everything that `--json` prints. Times are nanoseconds.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    schema_version: u32,
    #[serde(flatten)]
    source: Source,
    /// From the first call, range or work to the end of the last.
    pub(crate) span_ns: i64,
    /// Training steps that NVTX ranges name.
    pub(crate) steps: u64,
    /// Processes that made CUDA calls.
    pub(crate) processes: usize,
    /// What the capture lacks.
    pub(crate) notes: Vec<String>,
    pub(crate) memory: MemoryCalls,
    /// Time in which a device worked.
    pub(crate) busy_ns: i64,
    pub(crate) tables: Tables,
    /// With `--rows`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rows: Option<CaptureRows>,
}

/// All calls that manage memory, together.
#[derive(Debug, Default, Serialize)]
pub(crate) struct MemoryCalls {
    pub(crate) calls: u64,
    pub(crate) total_ns: i64,
    /// Host time lost waiting for the device.
    pub(crate) blocked_ns: i64,
    /// Time of the profiler inside these calls.
    pub(crate) profiler_ns: i64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Tables {
    pub(crate) calls: Vec<CallRow>,
    pub(crate) blocked_calls: Vec<WaitRow>,
    pub(crate) waited_for: Vec<BehindRow>,
    pub(crate) blocked_by_range: Vec<RangeRow>,
    /// Call stacks of memory calls and of calls that may wait, where they were captured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) stacks: Vec<StackRow>,
    /// The same by the line of the program that made the calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) sites: Vec<SiteRow>,
    pub(crate) gpu_idle: Vec<IdleRow>,
    pub(crate) launch_gaps: Vec<LaunchRow>,
    pub(crate) allocator: Vec<PlaceRow>,
}

/// All calls of one name.
#[derive(Debug, Serialize)]
pub(crate) struct CallRow {
    pub(crate) call: String,
    /// As in a run's `driver_calls`, or the name.
    pub(crate) kind: String,
    pub(crate) count: u64,
    pub(crate) total_ns: i64,
    /// Calls that waited.
    pub(crate) waited: u64,
    /// Until the work was over, by timestamps.
    pub(crate) waited_ns: i64,
    /// Host time lost: with the return beyond the idle cost.
    pub(crate) blocked_ns: i64,
    /// Median of the calls that had nothing to wait for.
    pub(crate) idle_cost_ns: Option<i64>,
    /// Calls that began with work outstanding that they could wait for.
    pub(crate) outstanding: u64,
    /// Of those: returned while that work still ran.
    pub(crate) returned_before: u64,
    /// `device`, `stream`, `event`, `own` (the copy itself), `room` (in the queue of launches) or `nothing`.
    pub(crate) waits_for: String,
    /// `seen` in this capture, or `documented`.
    pub(crate) grounds: &'static str,
}

/// A call that waited.
#[derive(Debug, Serialize)]
pub(crate) struct WaitRow {
    pub(crate) start_ns: i64,
    pub(crate) duration_ns: i64,
    pub(crate) waited_ns: i64,
    pub(crate) blocked_ns: i64,
    pub(crate) call: String,
    pub(crate) kind: String,
    pub(crate) path: String,
    pub(crate) bytes: Option<i64>,
    pub(crate) waited_for: String,
    pub(crate) work_kind: WorkKind,
    pub(crate) stream: i64,
    pub(crate) device: i64,
    pub(crate) process: i64,
    pub(crate) thread: i64,
    pub(crate) work_start_ns: i64,
    pub(crate) work_end_ns: i64,
    pub(crate) launched_ns: Option<i64>,
    pub(crate) launch_path: String,
    /// The line of the program that made the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) site: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) stack: Vec<String>,
}

/// The waits of calls of one name behind work of one name.
#[derive(Debug, Serialize)]
pub(crate) struct BehindRow {
    pub(crate) call: String,
    pub(crate) waited_for: String,
    pub(crate) count: u64,
    pub(crate) waited_ns: i64,
    pub(crate) blocked_ns: i64,
}

/// The waits in one place of the run.
#[derive(Debug, Serialize)]
pub(crate) struct RangeRow {
    pub(crate) place: String,
    pub(crate) count: u64,
    pub(crate) blocked_ns: i64,
    pub(crate) blocked_ns_per_step: Option<i64>,
}

/// The calls with one stack.
#[derive(Debug, Serialize)]
pub(crate) struct StackRow {
    pub(crate) call: String,
    /// From the innermost out.
    pub(crate) frames: Vec<String>,
    pub(crate) count: u64,
    pub(crate) total_ns: i64,
    pub(crate) blocked_ns: i64,
}

/// Idle time of the device with one cause.
#[derive(Debug, Serialize)]
pub(crate) struct IdleRow {
    pub(crate) cause: String,
    pub(crate) gaps: u64,
    pub(crate) total_ns: i64,
    pub(crate) longest_ns: i64,
}

/// Kernels and copies of one name.
#[derive(Debug, Serialize)]
pub(crate) struct LaunchRow {
    pub(crate) work: String,
    pub(crate) count: u64,
    pub(crate) total_ns: i64,
    pub(crate) median_ns: i64,
    /// From the end of the work before on the stream.
    pub(crate) median_gap_ns: Option<i64>,
    /// From the start of the launching call.
    pub(crate) median_latency_ns: Option<i64>,
    pub(crate) queued_behind: u64,
}

/// Memory calls in one place of the run.
#[derive(Debug, Serialize)]
pub(crate) struct PlaceRow {
    pub(crate) place: String,
    pub(crate) operations: u64,
    pub(crate) operations_ns: i64,
    pub(crate) paths: BTreeMap<String, u64>,
    pub(crate) driver_calls: BTreeMap<String, u64>,
    pub(crate) driver_ns: i64,
    pub(crate) blocked_ns: i64,
}

/// The name of a place without a range.
const NO_RANGE: &str = "(no range)";

impl Summary {
    pub(crate) fn new(capture: &Capture, attribution: &Attribution) -> Self {
        let (first, last) = capture.span();
        let processes: std::collections::BTreeSet<i64> = capture.calls.iter().map(|call| call.process).collect();
        Self {
            schema_version: 1,
            source: capture.source.clone(),
            span_ns: last - first,
            steps: capture.step_count(),
            processes: processes.len(),
            notes: capture.notes.clone(),
            memory: memory(capture, attribution),
            busy_ns: idle::busy_ns(capture),
            rows: None,
            tables: Tables {
                calls: calls(capture, attribution),
                blocked_calls: attribution.waits.iter().map(|wait| blocked(capture, wait)).collect(),
                waited_for: behind(capture, &attribution.waits),
                blocked_by_range: by_range(capture, &attribution.waits),
                stacks: stacks(capture, &attribution.waits),
                sites: sites::rows(capture, attribution),
                gpu_idle: idle::by_cause(capture, None)
                    .into_iter()
                    .map(|row| IdleRow {
                        cause: row.cause,
                        gaps: row.gaps,
                        total_ns: row.total_ns,
                        longest_ns: row.longest_ns,
                    })
                    .collect(),
                launch_gaps: idle::launches(capture)
                    .into_iter()
                    .map(|row| LaunchRow {
                        work: row.name,
                        count: row.count,
                        total_ns: row.total_ns,
                        median_ns: row.median_ns,
                        median_gap_ns: row.median_gap_ns,
                        median_latency_ns: row.median_latency_ns,
                        queued_behind: row.queued_behind,
                    })
                    .collect(),
                allocator: places::memory(capture, attribution)
                    .into_iter()
                    .map(|place| PlaceRow {
                        place: named(place.path),
                        operations: place.operations,
                        operations_ns: place.operations_ns,
                        paths: place.paths,
                        driver_calls: place.calls,
                        driver_ns: place.calls_ns,
                        blocked_ns: place.blocked_ns,
                    })
                    .collect(),
            },
        }
    }
}

fn named(path: String) -> String {
    if path.is_empty() { NO_RANGE.to_owned() } else { path }
}

fn memory(capture: &Capture, attribution: &Attribution) -> MemoryCalls {
    let mut memory = MemoryCalls::default();
    let mut overhead: HashMap<i64, Vec<(i64, i64)>> = HashMap::new();
    for one in &capture.overhead {
        overhead.entry(one.thread).or_default().push((one.start, one.end));
    }
    for call in capture.calls.iter().filter(|call| names::manages_memory(&capture.call_name(call).kind)) {
        memory.calls += 1;
        memory.total_ns += call.duration();
        let inside = overhead.get(&call.thread).into_iter().flatten();
        memory.profiler_ns +=
            inside.map(|(start, end)| ((*end).min(call.end) - (*start).max(call.start)).max(0)).sum::<i64>();
    }
    let waits = attribution.waits.iter();
    let of_memory = waits.filter(|wait| names::manages_memory(&capture.call_name(&capture.calls[wait.call]).kind));
    memory.blocked_ns = of_memory.map(|wait| wait.blocked_ns).sum();
    memory
}

fn calls(capture: &Capture, attribution: &Attribution) -> Vec<CallRow> {
    let rows = capture.call_names.iter().zip(&attribution.evidence).map(|(name, evidence)| CallRow {
        call: name.name.clone(),
        kind: name.kind.clone(),
        count: evidence.calls,
        total_ns: evidence.total_ns,
        waited: evidence.waited,
        waited_ns: evidence.waited_ns,
        blocked_ns: evidence.blocked_ns,
        idle_cost_ns: evidence.idle_cost_ns,
        outstanding: evidence.outstanding,
        returned_before: evidence.returned_before,
        waits_for: evidence.waits_for.to_string(),
        grounds: evidence.grounds(),
    });
    let mut rows: Vec<CallRow> = rows.collect();
    rows.sort_by_key(|row| std::cmp::Reverse((row.blocked_ns, row.total_ns)));
    rows
}

fn blocked(capture: &Capture, wait: &Wait) -> WaitRow {
    let (call, work) = (&capture.calls[wait.call], &capture.work[wait.work]);
    let name = capture.call_name(call);
    WaitRow {
        start_ns: call.start,
        duration_ns: call.duration(),
        waited_ns: wait.waited_ns,
        blocked_ns: wait.blocked_ns,
        call: name.name.clone(),
        kind: name.kind.clone(),
        path: capture.path(call.range),
        bytes: call.bytes,
        waited_for: capture.work_name(work).to_owned(),
        work_kind: work.kind,
        stream: work.stream,
        device: work.device,
        process: call.process,
        thread: call.thread,
        work_start_ns: work.start,
        work_end_ns: work.end,
        launched_ns: work.call.map(|launch| capture.calls[launch].start),
        launch_path: capture.launch_path(work),
        site: call.stack.and_then(|stack| sites::site(&capture.stacks[stack])),
        stack: call.stack.map(|stack| capture.stacks[stack].clone()).unwrap_or_default(),
    }
}

fn behind(capture: &Capture, waits: &[Wait]) -> Vec<BehindRow> {
    let mut rows: BTreeMap<(usize, usize), BehindRow> = BTreeMap::new();
    for wait in waits {
        let (call, work) = (&capture.calls[wait.call], &capture.work[wait.work]);
        let row = rows.entry((call.name, work.name)).or_insert_with(|| BehindRow {
            call: capture.call_name(call).name.clone(),
            waited_for: capture.work_name(work).to_owned(),
            count: 0,
            waited_ns: 0,
            blocked_ns: 0,
        });
        row.count += 1;
        row.waited_ns += wait.waited_ns;
        row.blocked_ns += wait.blocked_ns;
    }
    let mut rows: Vec<BehindRow> = rows.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.blocked_ns));
    rows
}

fn by_range(capture: &Capture, waits: &[Wait]) -> Vec<RangeRow> {
    let mut general: HashMap<Option<usize>, String> = HashMap::new();
    let mut rows: BTreeMap<String, (u64, i64)> = BTreeMap::new();
    for wait in waits {
        let range = capture.calls[wait.call].range;
        let place = general.entry(range).or_insert_with(|| places::general(&capture.path(range)));
        let row = rows.entry(place.clone()).or_default();
        row.0 += 1;
        row.1 += wait.blocked_ns;
    }
    let steps = i64::try_from(capture.step_count()).unwrap_or(0);
    let mut rows: Vec<RangeRow> = rows
        .into_iter()
        .map(|(place, (count, blocked_ns))| RangeRow {
            place: named(place),
            count,
            blocked_ns,
            blocked_ns_per_step: (steps > 0).then(|| (blocked_ns + steps / 2) / steps.max(1)),
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.blocked_ns));
    rows
}

fn stacks(capture: &Capture, waits: &[Wait]) -> Vec<StackRow> {
    let blocked: HashMap<usize, i64> = waits.iter().map(|wait| (wait.call, wait.blocked_ns)).collect();
    let mut rows: BTreeMap<(usize, &[String]), StackRow> = BTreeMap::new();
    for (index, call) in capture.calls.iter().enumerate() {
        let Some(frames) = call.stack.map(|stack| capture.stacks[stack].as_slice()) else { continue };
        let row = rows.entry((call.name, frames)).or_insert_with(|| StackRow {
            call: capture.call_name(call).name.clone(),
            frames: frames.to_vec(),
            count: 0,
            total_ns: 0,
            blocked_ns: 0,
        });
        row.count += 1;
        row.total_ns += call.duration();
        row.blocked_ns += blocked.get(&index).copied().unwrap_or(0);
    }
    let mut rows: Vec<StackRow> = rows.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse((row.blocked_ns, row.total_ns)));
    rows
}
