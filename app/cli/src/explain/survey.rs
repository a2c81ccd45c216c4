//! One pass over a history: where its peaks are, which requests missed, when memory went back, what waited.

use super::causes::Cause;
use super::checkpoints::{Checkpoints, MOST, Peaks};
use super::explanation::{Explanation, Point, Refused, Retry, Shape};
use super::moments::{Sample, moment};
use super::{Lines, Releases, View};
use crate::recording::{Recording, START};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use vramlab::budget::OverBudget;
use vramlab::histories::formats::{Action, Origins, StackId};
use vramlab::histories::memory::{BEFORE, Memory, Recorded, Totals};

/// Points of the curves.
const POINTS: usize = 512;

/// Where to look closely, and what waited; all else goes into the explanation itself.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Event after which active memory was highest, and its level.
    pub(super) peak_active: (usize, u64),
    /// Event after which a request had taken reserved memory to its peak.
    pub(super) peak_reserved: (usize, u64),
    /// Peak of active memory less what waited.
    pub(super) peak_allocated: u64,
    /// Peaks, the highest first.
    pub(super) peaks: Vec<Sample>,
    /// The lowest level of requested bytes in the second quarter and in the last one.
    pub(super) low_early: Option<(usize, u64)>,
    pub(super) low_late: Option<(usize, u64)>,
    pub(super) last_refused: Option<usize>,
    /// The moments at which reserved memory rose to more than ever before, those within half a percent of its peak.
    pub(super) near_peak: VecDeque<(usize, u64)>,
    /// By stream, the event of its last request, and which of all requests that is, from 1.
    pub(super) last_request: BTreeMap<u64, (usize, u64)>,
    pub(super) pending_peak: (usize, u64),
    /// By stream, what waited of its blocks.
    pub(super) waits: BTreeMap<u64, Waits>,
    pub(super) misses: Misses,
}

/// Requests for which memory was taken from the device.
#[derive(Debug, Default)]
pub(crate) struct Misses {
    pub(crate) all: u64,
    /// By stack, those for which a block of another stream was free, and the bytes that they asked for.
    pub(crate) other_streams: HashMap<StackId, (u64, u64)>,
}

/// What waited of a stream's blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    pub(super) frees: u64,
    now: u64,
    pub(super) peak: u64,
    pub(super) longest: u64,
    /// Bytes by the stack of their allocation.
    pub(super) stacks: HashMap<StackId, u64>,
}

/// What came and went since the program's last event.
#[derive(Debug, Default)]
struct Window {
    /// Whether the request was looked for that these events belong to.
    probed: bool,
    /// Whether frees completed that had waited.
    completed: bool,
    /// Why that request missed, and what was reserved before.
    request: Option<(Cause, u64)>,
    taken: u64,
    released: u64,
    segments: u64,
    /// Whether a call of `empty_cache` gave them back.
    by_call: bool,
}

/// Looks at every event. The checkpoints reach the moments that were found, and `points`.
///
/// # Errors
/// [`OverBudget`] when the recorded memory takes more than there is.
pub(super) fn survey<'r>(
    view: &mut View<'r>,
    points: &[usize],
    found: &mut Explanation,
) -> Result<(Survey, Checkpoints<'r>), OverBudget> {
    let recording = view.recording;
    let mut memory = recording.memory()?;
    let mut checkpoints = Checkpoints::new(recording);
    let (count, start) = (recording.events.len(), memory.totals());
    let mut out = Survey {
        peak_active: (START, start.active),
        peak_reserved: (START, start.reserved),
        near_peak: VecDeque::from([(START, start.reserved)]),
        pending_peak: (START, start.pending),
        peak_allocated: start.allocated(),
        ..Survey::default()
    };
    // Requests by their size and stack, and those of each size that missed.
    let mut requests: HashMap<(u64, StackId), u64> = HashMap::new();
    let mut missed: BTreeMap<u64, Shape> = BTreeMap::new();
    let mut window = Window::default();
    let stretch = count.div_ceil(POINTS).max(1);
    let mut peaks = Peaks::new(Sample::at(&memory, START, 0));
    let releases = Releases::of(recording);
    let private_pools = has_private_pools(recording);
    let mut streams: BTreeSet<u64> = memory.segments().values().map(|segment| segment.stream).collect();
    streams.extend(memory.blocks().values().map(|block| block.stream));
    for (index, event, at_once) in recording.events.walk(0) {
        // CAST: bounded when the history was read.
        let number = index as u32;
        if checkpoints.is_due(index) {
            checkpoints.keep(index, &memory, &out.wanted(points));
        }
        if is_of_segments(event.action) && !window.probed {
            window.probed = true;
            window.request = next_request(recording, index)
                .map(|Recorded { bytes, stream, .. }| {
                    Cause::of(&memory, bytes, stream, window.completed, private_pools)
                })
                .map(|cause| (cause, memory.totals().reserved));
        }
        match event.action {
            Action::FreeRequested if !at_once => out.waits_begin(&memory, &event),
            Action::FreeCompleted if !at_once => {
                out.waits_end(&memory, &event, number);
                window.completed = true;
            }
            _ => {}
        }
        if event.action != Action::Oom {
            streams.insert(event.stream);
        }
        memory.apply(&event, number, at_once)?;
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => window.taken += event.bytes,
            Action::SegmentFree | Action::SegmentUnmap => {
                window.released += event.bytes;
                window.segments += 1;
                window.by_call |= releases.by(index).is_call();
            }
            Action::Alloc if event.bytes > 0 => {
                found.allocations += 1;
                out.last_request.insert(event.stream, (index, found.allocations));
                *requests.entry((event.bytes, event.origin.stack)).or_default() += 1;
                let window = std::mem::take(&mut window);
                if let Some((cause, _)) = window.request.filter(|_| window.taken > 0) {
                    let shape = missed.entry(event.bytes).or_default();
                    out.misses.all += 1;
                    if cause == Cause::Stream {
                        let (times, bytes) = out.misses.other_streams.entry(event.origin.stack).or_default();
                        (*times, *bytes) = (*times + 1, *bytes + event.bytes);
                    }
                    shape.misses += 1;
                    shape.taken_bytes += window.taken;
                    match shape.causes.iter_mut().find(|(other, _)| *other == cause) {
                        Some((_, count)) => *count += 1,
                        None => shape.causes.push((cause, 1)),
                    }
                }
                went_back(view, found, &memory, (index, &event), &window);
            }
            Action::Oom => {
                let window = std::mem::take(&mut window);
                went_back(view, found, &memory, (index, &event), &window);
                found.refused += 1;
                out.last_refused = Some(index);
                let cause = Cause::of(&memory, event.bytes, event.stream, window.completed, private_pools);
                push_last(&mut found.out_of_memory, refused(view, &memory, index, &event, cause));
            }
            Action::FreeCompleted => {}
            _ => found.num_releases += u64::from(std::mem::take(&mut window).released > 0),
        }
        out.take_levels(&event, index, count, memory.totals());
        let sample = Sample::at(&memory, index, event.stream);
        peaks.take(sample);
        if index % stretch == 0 {
            found.timeline.push(Point::default());
        }
        draw(&mut found.timeline, recording, &sample);
    }
    found.num_releases += u64::from(window.released > 0);
    found.streams = streams.len() as u64;
    found.shapes = shapes(missed, &requests, &memory, &mut view.lines);
    out.peaks = peaks.finish();
    checkpoints.keep(count, &memory, &out.wanted(points));
    Ok((out, checkpoints))
}

/// The event after which active memory is highest.
///
/// # Errors
/// [`OverBudget`] when the recorded memory takes more than there is.
pub(super) fn peak_of_use(recording: &Recording) -> Result<usize, OverBudget> {
    let mut memory = recording.memory()?;
    let mut peak = (START, memory.totals().active);
    for (index, event, at_once) in recording.events.walk(0) {
        // CAST: bounded when the history was read.
        memory.apply(&event, index as u32, at_once)?;
        if memory.totals().active > peak.1 {
            peak = (index, memory.totals().active);
        }
    }
    Ok(peak.0)
}

fn is_of_segments(action: Action) -> bool {
    matches!(action, Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap)
}

/// The request in whose course segments come and go at an event.
fn next_request(recording: &Recording, index: usize) -> Option<Recorded> {
    let passed = |action| is_of_segments(action) || action == Action::FreeCompleted;
    let next = recording.events.iter_from(index).find(|event| !passed(event.action))?;
    matches!(next.action, Action::Alloc | Action::Oom).then_some(next)
}

/// Whether the history shows private pools, as those of CUDA graphs: its end or its frames name them.
fn has_private_pools(recording: &Recording) -> bool {
    let held = recording.summary.ending().unwrap_or_default().iter();
    let mut held = held.filter(|segment| segment.device == recording.device);
    let origins = &recording.origins;
    held.any(|segment| segment.pool_id.is_some_and(|pool| pool != (0, 0)))
        || captures_graphs(origins)
        || origins.all_frames().any(|frame| origins.spelt(frame.name) == "use_mem_pool")
}

/// Whether frames show that CUDA graphs are captured.
pub(crate) fn captures_graphs(origins: &Origins) -> bool {
    origins.all_frames().any(|frame| {
        let file = origins.spelt(frame.filename);
        file.ends_with("torch/cuda/graphs.py") || file.ends_with("cudagraph_trees.py")
    })
}

/// Whether a level is within half a percent of the peak.
fn is_near(level: u64, peak: u64) -> bool {
    peak - level <= peak / 200
}

/// Completes what is said of the sizes that missed.
fn shapes(
    mut missed: BTreeMap<u64, Shape>,
    requests: &HashMap<(u64, StackId), u64>,
    memory: &Memory,
    lines: &mut Lines<'_>,
) -> Vec<Shape> {
    // For each size the stack that made most requests.
    let mut most: HashMap<u64, (u64, StackId)> = HashMap::new();
    for (&(bytes, stack), &count) in requests {
        let Some(shape) = missed.get_mut(&bytes) else { continue };
        shape.requests += count;
        if !stack.is_empty() {
            let most = most.entry(bytes).or_default();
            *most = (*most).max((count, stack));
        }
    }
    for (bytes, shape) in &mut missed {
        shape.requested_bytes = *bytes;
        shape.rounded_bytes = memory.rules().rounded(*bytes);
        shape.causes.sort_by_key(|(cause, count)| (Reverse(*count), *cause));
        shape.cause = shape.causes[0].0;
        shape.line = most.get(bytes).and_then(|(_, stack)| lines.line_of(*stack));
    }
    let mut out: Vec<Shape> = missed.into_values().collect();
    out.sort_by_key(|shape| (Reverse(shape.taken_bytes), shape.requested_bytes));
    out
}

/// Adds to a list of which the last are kept.
fn push_last<T>(list: &mut Vec<T>, one: T) {
    if list.len() == MOST {
        list.remove(0);
    }
    list.push(one);
}

/// Draws a stretch of events by the one at which most was active.
fn draw(timeline: &mut [Point], recording: &Recording, sample: &Sample) {
    let Sample { index, totals, largest_hole: hole, .. } = *sample;
    let Some(point) = timeline.last_mut() else { return };
    let first = point.event == 0;
    let least = if first { hole } else { point.largest_hole_bytes.min(hole) };
    if first || totals.active > point.active_bytes {
        *point = Point {
            event: recording.number(index),
            time_ns: recording.since_start(index).unwrap_or(0),
            reserved_bytes: totals.reserved,
            active_bytes: totals.active,
            requested_bytes: totals.requested,
            largest_hole_bytes: least,
            device_used_bytes: None,
        };
    }
    point.largest_hole_bytes = least;
}

/// Takes note of segments that went back in the course of a request.
fn went_back(
    view: &mut View<'_>,
    found: &mut Explanation,
    memory: &Memory,
    (index, event): (usize, &Recorded),
    window: &Window,
) {
    let Some((cause, reserved)) = window.request.filter(|_| window.released > 0) else { return };
    let succeeded = event.action != Action::Oom;
    let settings = &view.recording.settings;
    let over = settings.memory_limit.map(|limit| reserved + window.taken.max(event.bytes) > limit);
    let kind = match over {
        _ if succeeded && window.taken == 0 || window.by_call => "empty_cache",
        Some(true) => "retry",
        _ if !succeeded => "retry",
        _ if settings.garbage_collection_threshold > 0.0 => "garbage_collection",
        Some(false) => "empty_cache",
        None => "retry_or_empty_cache",
    };
    if kind == "empty_cache" {
        found.num_releases += 1;
        return;
    }
    found.num_retries += 1;
    let retry = Retry {
        asked_bytes: event.bytes,
        stream: event.stream,
        released_bytes: window.released,
        released_segments: window.segments,
        kind,
        cause,
        succeeded,
        moment: moment(view, memory, index),
    };
    push_last(&mut found.retries, retry);
}

fn refused(view: &mut View<'_>, memory: &Memory, index: usize, event: &Recorded, cause: Cause) -> Refused {
    Refused {
        asked_bytes: event.bytes,
        stream: event.stream,
        device_free_bytes: Some(event.addr).filter(|free| *free > 0),
        cause,
        free_bytes: memory.free_bytes(memory.pool_of(event.stream, event.bytes)),
        moment: moment(view, memory, index),
    }
}

impl Survey {
    /// The moments that are looked at closely by what is known so far, and `points`.
    fn wanted(&self, points: &[usize]) -> Vec<usize> {
        let found = [Some(self.peak_active), Some(self.peak_reserved), self.low_early, self.low_late];
        let found = found.into_iter().flatten().chain(self.near_peak.iter().copied()).map(|(index, _)| index);
        found.chain(self.last_refused).chain(points.iter().copied()).collect()
    }

    fn take_levels(&mut self, event: &Recorded, index: usize, count: usize, totals: Totals) {
        let raise = |peak: &mut (usize, u64), level| {
            if level > peak.1 {
                *peak = (index, level);
            }
        };
        raise(&mut self.peak_active, totals.active);
        // A segment that comes is not used before its request is done.
        if !matches!(event.action, Action::SegmentAlloc | Action::SegmentMap) {
            if totals.reserved > self.peak_reserved.1 {
                // They rise.
                while self.near_peak.front().is_some_and(|(_, level)| !is_near(*level, totals.reserved)) {
                    self.near_peak.pop_front();
                }
                self.near_peak.push_back((index, totals.reserved));
            }
            raise(&mut self.peak_reserved, totals.reserved);
        }
        raise(&mut self.pending_peak, totals.pending);
        self.peak_allocated = self.peak_allocated.max(totals.allocated());
        let low = match 4 * index / count.max(1) {
            1 => &mut self.low_early,
            3 => &mut self.low_late,
            _ => return,
        };
        if low.is_none_or(|(_, least)| totals.requested < least) {
            *low = Some((index, totals.requested));
        }
    }

    fn waits_begin(&mut self, memory: &Memory, event: &Recorded) {
        let Some(block) = memory.blocks().get(&event.addr).filter(|block| block.pending.is_none()) else { return };
        let waits = self.waits.entry(block.stream).or_default();
        waits.frees += 1;
        waits.now += block.bytes;
        waits.peak = waits.peak.max(waits.now);
        let stack = if block.origin.stack.is_empty() { block.near } else { block.origin.stack };
        *waits.stacks.entry(stack).or_default() += block.bytes;
    }

    fn waits_end(&mut self, memory: &Memory, event: &Recorded, number: u32) {
        let Some(block) = memory.blocks().get(&event.addr) else { return };
        let Some(since) = block.pending.filter(|since| *since != BEFORE) else { return };
        let waits = self.waits.entry(block.stream).or_default();
        waits.now = waits.now.saturating_sub(block.bytes);
        waits.longest = waits.longest.max(u64::from(number - since));
    }
}
