//! The device between its work: idle times with their causes, and how long launches take to arrive.

use crate::attribution::median;
use crate::capture::Capture;
use std::collections::{BTreeMap, HashMap};

/// The cause of idle time in which the host was in no driver call.
pub const HOST_CODE: &str = "host code outside the driver";
/// The cause of idle time after the launching call began.
pub const ARRIVING: &str = "launch on its way to the device";
/// The cause of idle time that the profiler took.
pub const PROFILER: &str = "the profiler itself";

/// Idle time of one cause.
#[derive(Clone, Debug)]
pub struct Idleness {
    /// The kind of the driver call, or one of the constants above.
    pub cause: String,
    /// Gaps in which it has a part.
    pub gaps: u64,
    /// Its time.
    pub total_ns: i64,
    /// Its longest part of one gap.
    pub longest_ns: i64,
}

/// Idle time between the device's work by cause, the largest first.
///
/// A gap ends when the next work begins. From the start of the call that queued that work, the gap is [`ARRIVING`]: the device could
/// not have begun sooner. The time before goes to the driver calls of the thread that then launches. What none of them covers is
/// [`PROFILER`] where the profiler says so, and else [`HOST_CODE`]. Without a launching call in the capture all of a gap is
/// [`HOST_CODE`].
///
/// `device` is the device with the most work unless one is named. O(work + calls in gaps).
#[must_use]
pub fn by_cause(capture: &Capture, device: Option<i64>) -> Vec<Idleness> {
    let mut counts: BTreeMap<i64, u64> = BTreeMap::new();
    for work in &capture.work {
        *counts.entry(work.device).or_default() += 1;
    }
    let most = counts.iter().rev().max_by_key(|&(_, count)| count).map(|(&device, _)| device);
    let Some(device) = device.or(most) else { return Vec::new() };
    let mut threads: HashMap<i64, Vec<usize>> = HashMap::new();
    for (index, call) in capture.calls.iter().enumerate() {
        threads.entry(call.thread).or_default().push(index);
    }
    let mut causes: BTreeMap<String, Idleness> = BTreeMap::new();
    let mut reached: Option<i64> = None;
    for work in capture.work.iter().filter(|work| work.device == device) {
        if let Some(end) = reached.filter(|&end| work.start > end) {
            for (cause, part) in gap(capture, &threads, end, work.start, work.call) {
                let none = Idleness { cause: cause.clone(), gaps: 0, total_ns: 0, longest_ns: 0 };
                let row = causes.entry(cause).or_insert(none);
                row.gaps += 1;
                row.total_ns += part;
                row.longest_ns = row.longest_ns.max(part);
            }
        }
        reached = Some(reached.map_or(work.end, |end| end.max(work.end)));
    }
    let mut rows: Vec<Idleness> = causes.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.total_ns));
    rows
}

/// The parts of one gap; they add up to it.
fn gap(
    capture: &Capture,
    threads: &HashMap<i64, Vec<usize>>,
    start: i64,
    end: i64,
    launch: Option<usize>,
) -> BTreeMap<String, i64> {
    let mut parts: BTreeMap<String, i64> = BTreeMap::new();
    let Some(launch) = launch.map(|launch| &capture.calls[launch]) else {
        parts.insert(HOST_CODE.to_owned(), end - start);
        return parts;
    };
    let requested = launch.start.clamp(start, end);
    if end > requested {
        parts.insert(ARRIVING.to_owned(), end - requested);
    }
    let own = threads.get(&launch.thread).map_or(&[][..], Vec::as_slice);
    let place = own.partition_point(|&index| capture.calls[index].start <= start).saturating_sub(1);
    let mut covered = 0;
    for call in own[place..].iter().map(|&index| &capture.calls[index]).take_while(|call| call.start < requested) {
        let overlap = call.end.min(requested) - call.start.max(start);
        if overlap > 0 {
            *parts.entry(capture.call_name(call).kind.clone()).or_default() += overlap;
            covered += overlap;
        }
    }
    let remainder = (requested - start - covered).max(0);
    let taken = |one: &crate::Overhead| (one.end.min(requested) - one.start.max(start)).max(0);
    let profiler: i64 = capture.overhead.iter().filter(|one| one.thread == launch.thread).map(taken).sum();
    let profiler = profiler.min(remainder);
    if profiler > 0 {
        parts.insert(PROFILER.to_owned(), profiler);
    }
    if remainder > profiler {
        parts.insert(HOST_CODE.to_owned(), remainder - profiler);
    }
    parts
}

/// Time in which any device did any work: the union of the intervals.
#[must_use]
pub fn busy_ns(capture: &Capture) -> i64 {
    let (mut total, mut reached) = (0, i64::MIN);
    for work in &capture.work {
        total += (work.end - work.start.max(reached)).max(0);
        reached = reached.max(work.end);
    }
    total
}

/// How work of one name follows the work before it on its stream.
#[derive(Clone, Debug)]
pub struct Launches {
    /// Name of the work.
    pub name: String,
    /// Pieces of work.
    pub count: u64,
    /// Device time in them.
    pub total_ns: i64,
    /// Median device time of one.
    pub median_ns: i64,
    /// Median from the end of the work before on the stream to the start.
    pub median_gap_ns: Option<i64>,
    /// Median from the start of the call that queued it to the start.
    pub median_latency_ns: Option<i64>,
    /// How many were queued while the work before still ran.
    pub queued_behind: u64,
}

/// Gaps and latencies of kernels and copies by name, most device time first. O(work · log work).
#[must_use]
pub fn launches(capture: &Capture) -> Vec<Launches> {
    #[derive(Default)]
    struct Times {
        durations: Vec<i64>,
        gaps: Vec<i64>,
        latencies: Vec<i64>,
        behind: u64,
    }
    let mut names: Vec<Times> = capture.work_names.iter().map(|_| Times::default()).collect();
    let mut before: HashMap<(i64, i64, i64), i64> = HashMap::new();
    for work in &capture.work {
        let times = &mut names[work.name];
        times.durations.push(work.end - work.start);
        if work.call.is_some() {
            times.latencies.push(work.start - work.queued);
        }
        let lane = before.entry((work.process, work.device, work.stream));
        lane.and_modify(|end| {
            times.gaps.push(work.start - *end);
            times.behind += u64::from(work.call.is_some() && work.queued < *end);
            *end = work.end.max(*end);
        })
        .or_insert(work.end);
    }
    let mut rows: Vec<Launches> = names
        .into_iter()
        .zip(&capture.work_names)
        .filter(|(times, _)| !times.durations.is_empty())
        .map(|(mut times, name)| Launches {
            name: name.clone(),
            count: times.durations.len() as u64,
            total_ns: times.durations.iter().sum(),
            median_ns: median(&mut times.durations).unwrap_or(0),
            median_gap_ns: median(&mut times.gaps),
            median_latency_ns: median(&mut times.latencies),
            queued_behind: times.behind,
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.total_ns));
    rows
}
