//! One pass over a recording: peaks, cache misses, cache releases and deferred frees.

use super::breakdown::{PoolId, PrivateSegments};
use super::causes::Cause;
use super::checkpoints::{Checkpoints, MOST, Peaks};
use super::explanation::{Explanation, LargestHole, Point, Refused, Retry, Shape};
use super::moments::{Sample, moment};
use super::{By, Lines, Releases, View, is_expandable};
use crate::recording::{Recording, START};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use vramlab::budget::OverBudget;
use vramlab::histories::formats::{Action, Origins, StackId};
use vramlab::histories::memory::{BEFORE, Memory, RecordedEvent, Totals};
use vramlab::histories::replay::MAX_BYTES;
use vramlab::policy::size::torch::{LARGE_SEGMENT, SMALL_SEGMENT, segment_size};

/// Points of the curves.
const POINTS: usize = 512;

/// The moments to describe, and the deferred frees; all other results go directly into the explanation.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Event with the highest active memory, and its level.
    pub(super) peak_active: (usize, u64),
    /// Peak of active memory without pending frees.
    pub(super) peak_allocated: u64,
    /// Separate peaks, the highest first.
    pub(super) peaks: Vec<Sample>,
    /// Requested bytes at the lows between peaks of similar height.
    pub(super) lows: Vec<(usize, u64)>,
    /// Requested bytes at the repetitions of an annotation.
    pub(super) repeats: Vec<(usize, u64)>,
    pub(super) last_refused: Option<usize>,
    /// Moments with reserved memory within half a percent of its peak, except those with no more reserved and no more active memory
    /// than another.
    near_peak: Vec<Level>,
    /// By stream, the event of its last request, and that request's number among all requests, from 1.
    pub(super) last_request: BTreeMap<u64, (usize, u64)>,
    pub(super) pending_peak: (usize, u64),
    /// Deferred frees by the stream of the blocks.
    pub(super) waits: BTreeMap<u64, Waits>,
    pub(super) misses: Misses,
}

/// Memory after an event.
#[derive(Clone, Copy, Debug)]
struct Level {
    index: usize,
    reserved: u64,
    active: u64,
}

/// Cache misses: requests that allocated a segment.
#[derive(Debug, Default)]
pub(crate) struct Misses {
    pub(crate) all: u64,
    /// By stack, the number and requested bytes of misses for which another stream had a fitting free block.
    pub(crate) other_streams: HashMap<StackId, (u64, u64)>,
}

/// Deferred frees of one stream's blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    pub(super) frees: u64,
    now: u64,
    pub(super) peak: u64,
    pub(super) longest: u64,
    /// Frees that had not completed by the end.
    pub(super) unfinished: u64,
    /// Bytes by the stack of the allocation.
    pub(super) stacks: HashMap<StackId, u64>,
}

/// Segment events since the last event of the program itself.
#[derive(Debug, Default)]
struct Window {
    /// Whether the request that caused these events was searched.
    probed: bool,
    /// Whether deferred frees completed.
    completed: bool,
    /// The cause of that request's miss, and the reserved bytes before it.
    request: Option<(Cause, u64)>,
    taken: u64,
    released: u64,
    segments: u64,
    /// Whether a call of `empty_cache` released the segments, before the request.
    by_call: bool,
    /// Whether frames show that the request released segments.
    by_request: bool,
}

/// Surveys all events. The checkpoints cover the selected moments and `points`. `repeats`: ascending indices of the repetitions of
/// an annotation.
///
/// # Errors
/// [`OverBudget`] if the memory budget is exceeded.
pub(super) fn survey<'r>(
    view: &mut View<'r>,
    points: &[usize],
    repeats: &[usize],
    explanation: &mut Explanation,
) -> Result<(Survey, Checkpoints<'r>), OverBudget> {
    let recording = view.recording;
    let mut memory = recording.memory()?;
    let mut checkpoints = Checkpoints::new(recording);
    let (count, start) = (recording.events.len(), memory.totals());
    let mut out = Survey {
        peak_active: (START, start.active),
        near_peak: vec![Level { index: START, reserved: start.reserved, active: start.active }],
        pending_peak: (START, start.pending),
        peak_allocated: start.allocated(),
        ..Survey::default()
    };
    // Requests by size and stack, and the misses by size.
    let mut requests: HashMap<(u64, StackId), u64> = HashMap::new();
    let mut missed: BTreeMap<u64, Shape> = BTreeMap::new();
    let mut window = Window::default();
    let range = count.div_ceil(POINTS).max(1);
    let mut repeats = repeats.iter().copied().peekable();
    let mut last = Sample::at(&memory, START, 0);
    let mut peaks = Peaks::new(last);
    if start.reserved > 0 {
        explanation.largest_hole = Some(LargestHole::new(0, last.largest_hole));
    }
    let releases = Releases::of(recording);
    let private_pools = has_private_pools(recording);
    let private = PrivateSegments::new(recording, count.checked_sub(1).unwrap_or(START));
    let cause = |memory: &Memory, bytes, stream, completed, in_pool: Option<PoolId>| {
        let pool = memory.pool_of(stream, bytes);
        if let Some(id) = in_pool {
            return Cause::in_private_pool(memory, bytes, private.free_in(memory, pool, id));
        }
        match Cause::new(memory, bytes, stream, completed, private_pools) {
            // Free memory of private pools serves only their own requests.
            Cause::Pieces
                if memory.free_bytes(pool).saturating_sub(private.free_bytes(memory, pool))
                    < memory.rules().rounded(bytes) =>
            {
                Cause::Growth
            }
            cause => cause,
        }
    };
    // The pool of each stream's last allocation: PyTorch does not record that of a failed request.
    let mut last_pool: HashMap<u64, Option<PoolId>> = HashMap::new();
    let mut streams: BTreeSet<u64> = memory.segments().values().map(|segment| segment.stream).collect();
    streams.extend(memory.blocks().values().map(|block| block.stream));
    for (index, event, immediate) in recording.events.walk(0) {
        // CAST: Recording::read limits the number of events.
        let number = index as u32;
        if checkpoints.is_due(index) {
            checkpoints.copy(index, &memory, &out.candidates(points));
        }
        let by = is_release(event.action).then(|| releases.by(index));
        window.by_call |= by.is_some_and(By::is_call);
        let of_call = by.is_some() && window.by_call;
        if is_of_segments(event.action) && !window.probed && !of_call {
            let cause = next_request(recording, index).map(|RecordedEvent { bytes, stream, .. }| {
                cause(&memory, bytes, stream, window.completed, private.pool(event.addr))
            });
            // A request with a fitting free block releases nothing, so a call preceded it.
            window.by_call |= by == Some(By::Unknown) && cause == Some(Cause::Unexplained);
            if by.is_none() || !window.by_call {
                window.probed = true;
                window.request = cause.map(|cause| (cause, memory.totals().reserved));
            }
        }
        match event.action {
            Action::FreeRequested if !immediate => out.begin_wait(&memory, &event),
            Action::FreeCompleted if !immediate => {
                out.end_wait(&memory, &event, number);
                window.completed = true;
            }
            _ => {}
        }
        if event.action != Action::Oom {
            streams.insert(event.stream);
        }
        memory.apply(&event, number, immediate)?;
        match event.action {
            action if is_new_segment(action) => window.taken += event.bytes,
            action if is_release(action) => {
                window.released += event.bytes;
                window.segments += 1;
                window.by_request |= by == Some(By::Request);
            }
            Action::Alloc if event.bytes > 0 => {
                explanation.allocations += 1;
                out.last_request.insert(event.stream, (index, explanation.allocations));
                if private_pools {
                    last_pool.insert(event.stream, private.pool(event.addr));
                }
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
                add_release(view, explanation, &memory, (index, &event), &window);
            }
            Action::Oom => {
                let window = std::mem::take(&mut window);
                add_release(view, explanation, &memory, (index, &event), &window);
                explanation.refused += 1;
                out.last_refused = Some(index);
                // The size of an impossible request is its cause, whatever is reserved.
                let (pool, rounded) = (memory.pool_of(event.stream, event.bytes), memory.rules().rounded(event.bytes));
                // A pool with a block for the request would have served it.
                let in_pool = last_pool.get(&event.stream).copied().flatten();
                let in_pool = in_pool.filter(|id| private.free_in(&memory, pool, *id).1 < rounded);
                let known = event.bytes > MAX_BYTES || recording.reserved(memory.totals()).is_some();
                let cause = known.then(|| cause(&memory, event.bytes, event.stream, window.completed, in_pool));
                let request = Request { index, event: &event, cause, in_pool };
                push_last(&mut explanation.out_of_memory, refused(view, &memory, &private, &request));
            }
            Action::FreeCompleted => {}
            _ => explanation.num_releases += u64::from(std::mem::take(&mut window).released > 0),
        }
        out.add_levels(&event, index, memory.totals());
        if repeats.next_if_eq(&index).is_some() {
            out.repeats.push((index, memory.totals().requested));
        }
        let mut sample = Sample::at(&memory, index, event.stream);
        if is_new_segment(event.action) {
            // Its request is about to use it.
            sample.largest_hole = last.largest_hole;
        } else if recording.reserved(sample.totals).is_some() {
            let (event, bytes) = (recording.number(index), sample.largest_hole);
            explanation.largest_hole.get_or_insert(LargestHole::new(event, bytes)).take(event, bytes);
        }
        last = sample;
        peaks.take(sample);
        if index % range == 0 {
            explanation.timeline.push(Point::default());
        }
        add_to_curve(&mut explanation.timeline, recording, &sample);
    }
    out.end_waits(&memory, count);
    // Segments that no recorded request uses count at the end.
    if let Some(index) = count.checked_sub(1) {
        out.add_near_peak(Level { index, reserved: memory.totals().reserved, active: memory.totals().active });
    }
    explanation.num_releases += u64::from(window.released > 0);
    explanation.streams = streams.len() as u64;
    explanation.shapes = shapes(missed, &requests, &memory, &mut view.lines);
    out.lows = peaks.lows().iter().map(|low| (low.index, low.requested)).collect();
    out.peaks = peaks.finish();
    checkpoints.copy(count, &memory, &out.candidates(points));
    Ok((out, checkpoints))
}

/// The event with the highest active memory.
///
/// # Errors
/// [`OverBudget`] if the memory budget is exceeded.
pub(super) fn active_peak(recording: &Recording) -> Result<usize, OverBudget> {
    let mut memory = recording.memory()?;
    let mut peak = (START, memory.totals().active);
    for (index, event, immediate) in recording.events.walk(0) {
        // CAST: Recording::read limits the number of events.
        memory.apply(&event, index as u32, immediate)?;
        if memory.totals().active > peak.1 {
            peak = (index, memory.totals().active);
        }
    }
    Ok(peak.0)
}

fn is_of_segments(action: Action) -> bool {
    is_new_segment(action) || is_release(action)
}

fn is_new_segment(action: Action) -> bool {
    matches!(action, Action::SegmentAlloc | Action::SegmentMap)
}

fn is_release(action: Action) -> bool {
    matches!(action, Action::SegmentFree | Action::SegmentUnmap)
}

/// The request that causes the segment event at an index.
fn next_request(recording: &Recording, index: usize) -> Option<RecordedEvent> {
    let skipped = |action| is_of_segments(action) || action == Action::FreeCompleted;
    let next = recording.events.iter_from(index).find(|event| !skipped(event.action))?;
    matches!(next.action, Action::Alloc | Action::Oom).then_some(next)
}

/// Whether the recording shows private pools, such as those of CUDA graphs, in its segments or frames.
pub(super) fn has_private_pools(recording: &Recording) -> bool {
    let segments = recording.summary.ending().unwrap_or_default().iter();
    let mut segments = segments.filter(|segment| segment.device == recording.device);
    let origins = &recording.origins;
    let mut events = recording.summary.segment_pools.iter().filter(|named| named.device == recording.device);
    segments.any(|segment| segment.pool_id.is_some_and(|pool| pool != (0, 0)))
        || events.any(|named| named.pool != (0, 0))
        || captures_graphs(origins)
        || origins.all_frames().any(|frame| origins.spelt(frame.name) == "use_mem_pool")
}

/// Whether frames show captures of CUDA graphs.
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

/// Completes the rows of the sizes with misses.
fn shapes(
    mut missed: BTreeMap<u64, Shape>,
    requests: &HashMap<(u64, StackId), u64>,
    memory: &Memory,
    lines: &mut Lines<'_>,
) -> Vec<Shape> {
    // For each size the stack with the most requests.
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

/// Appends to a list that keeps only the last entries.
fn push_last<T>(list: &mut Vec<T>, value: T) {
    if list.len() == MOST {
        list.remove(0);
    }
    list.push(value);
}

/// Adds an event to the last point of the curves, which shows the event with the most active memory.
fn add_to_curve(timeline: &mut [Point], recording: &Recording, sample: &Sample) {
    let Sample { index, totals, largest_hole, .. } = *sample;
    let Some(point) = timeline.last_mut() else { return };
    let reserved = recording.reserved(totals);
    let least = point.largest_hole_bytes.into_iter().chain(reserved.map(|_| largest_hole)).min();
    if point.event == 0 || totals.active > point.active_bytes {
        *point = Point {
            event: recording.number(index),
            time_ns: recording.since_start(index),
            reserved_bytes: reserved,
            active_bytes: totals.active,
            requested_bytes: totals.requested,
            largest_hole_bytes: least,
            device_used_bytes: None,
        };
    }
    point.largest_hole_bytes = least;
}

/// Adds the release of cached segments during a request.
fn add_release(
    view: &mut View<'_>,
    explanation: &mut Explanation,
    memory: &Memory,
    (index, event): (usize, &RecordedEvent),
    window: &Window,
) {
    if window.released == 0 {
        return;
    }
    let Some((cause, reserved)) = window.request.filter(|_| !window.by_call) else {
        explanation.num_releases += 1;
        return;
    };
    let succeeded = event.action != Action::Oom;
    let settings = &view.recording.settings;
    let over = settings.memory_limit.map(|limit| reserved.saturating_add(window.taken.max(event.bytes)) > limit);
    let kind = match over {
        _ if succeeded && window.taken == 0 => "empty_cache",
        Some(true) => "retry",
        _ if !succeeded => "retry",
        _ if settings.garbage_collection_threshold > 0.0 => "garbage_collection",
        Some(false) => "empty_cache",
        None if window.by_request => "retry",
        None => "retry_or_empty_cache",
    };
    if kind == "empty_cache" {
        explanation.num_releases += 1;
        return;
    }
    explanation.num_retries += 1;
    explanation.num_unclear_retries += u64::from(kind == "retry_or_empty_cache");
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
    push_last(&mut explanation.retries, retry);
}

/// The memory that the driver must allocate for a request that finds no free memory: a segment, or whole pages of an expandable one.
fn segment_bytes(recording: &Recording, memory: &Memory, bytes: u64) -> u64 {
    let rules = memory.rules();
    let rounded = rules.rounded(bytes);
    match () {
        () if !recording.summary.format.is_snapshot() || bytes > MAX_BYTES => rounded,
        () if !is_expandable(recording) => segment_size(rounded),
        () if rules.is_small(rounded) => rounded.next_multiple_of(SMALL_SEGMENT),
        () => rounded.next_multiple_of(LARGE_SEGMENT),
    }
}

/// A failed request.
struct Request<'a> {
    index: usize,
    event: &'a RecordedEvent,
    cause: Option<Cause>,
    /// Its private pool.
    in_pool: Option<PoolId>,
}

fn refused(view: &mut View<'_>, memory: &Memory, private: &PrivateSegments, request: &Request<'_>) -> Refused {
    let Request { index, event, cause, in_pool } = *request;
    let moment = moment(view, memory, index);
    let pool = memory.pool_of(event.stream, event.bytes);
    let (free, largest) = match in_pool {
        Some(id) => private.free_in(memory, pool, id),
        None => (memory.free_bytes(pool), private.largest_outside(memory, pool)),
    };
    Refused {
        asked_bytes: event.bytes,
        segment_bytes: segment_bytes(view.recording, memory, event.bytes),
        stream: event.stream,
        device_free_bytes: Some(event.addr).filter(|free| *free > 0),
        cause,
        private_pool: in_pool.map(|(major, minor)| format!("{major}.{minor}")),
        free_bytes: moment.reserved_bytes.map(|_| free),
        largest_free_bytes: moment.reserved_bytes.map(|_| largest),
        private_free_bytes: 0,
        moment,
    }
}

impl Survey {
    /// The moments selected so far, and `points`.
    fn candidates(&self, points: &[usize]) -> Vec<usize> {
        let near = self.near_peak.iter().map(|level| level.index);
        near.chain([self.peak_active.0]).chain(self.last_refused).chain(points.iter().copied()).collect()
    }

    /// The moment of peak reserved memory; if it lasts, the moment with the most active memory.
    pub(super) fn peak_reserved(&self) -> usize {
        let level = self.near_peak.iter().max_by_key(|level| (level.reserved, level.active));
        level.map_or(START, |level| level.index)
    }

    /// The moment with the most active memory within half a percent of the reserved peak: that of the peak itself, unless another
    /// has at least 2 % more active memory.
    pub(super) fn near_peak(&self) -> usize {
        let active =
            |index: usize| self.near_peak.iter().find(|level| level.index == index).map_or(0, |level| level.active);
        let peak = self.peak_reserved();
        let most = self.near_peak.iter().max_by_key(|level| (level.active, level.reserved));
        most.filter(|most| most.active > active(peak) + active(peak) / 50).map_or(peak, |most| most.index)
    }

    /// The moment whose breakdown is shown, and its kind: the last failed request, else the peak of reserved memory.
    pub(super) fn scene(&self) -> (usize, &'static str) {
        let (reserved, near) = (self.peak_reserved(), self.near_peak());
        match self.last_refused {
            Some(refused) => (refused, "out_of_memory"),
            None if near == reserved => (reserved, "peak_reserved"),
            None => (near, "near_peak_reserved"),
        }
    }

    /// Adds a moment to those near the reserved peak.
    fn add_near_peak(&mut self, level: Level) {
        let peak = self.near_peak.iter().map(|other| other.reserved).max().unwrap_or(0).max(level.reserved);
        let exceeds = |a: &Level, b: &Level| a.reserved >= b.reserved && a.active >= b.active;
        if !is_near(level.reserved, peak) || self.near_peak.iter().any(|other| exceeds(other, &level)) {
            return;
        }
        self.near_peak.retain(|other| is_near(other.reserved, peak) && !exceeds(&level, other));
        self.near_peak.push(level);
    }

    fn add_levels(&mut self, event: &RecordedEvent, index: usize, totals: Totals) {
        let raise = |peak: &mut (usize, u64), level| {
            if level > peak.1 {
                *peak = (index, level);
            }
        };
        raise(&mut self.peak_active, totals.active);
        // A new segment is not used before its request is served.
        if !is_new_segment(event.action) {
            self.add_near_peak(Level { index, reserved: totals.reserved, active: totals.active });
        }
        raise(&mut self.pending_peak, totals.pending);
        self.peak_allocated = self.peak_allocated.max(totals.allocated());
    }

    fn begin_wait(&mut self, memory: &Memory, event: &RecordedEvent) {
        let Some(block) = memory.blocks().get(&event.addr).filter(|block| block.pending.is_none()) else { return };
        let waits = self.waits.entry(block.stream).or_default();
        waits.frees += 1;
        waits.now += block.bytes;
        waits.peak = waits.peak.max(waits.now);
        let stack = if block.origin.stack.is_empty() { block.near } else { block.origin.stack };
        *waits.stacks.entry(stack).or_default() += block.bytes;
    }

    /// Counts the frees that have not completed after all `events`.
    fn end_waits(&mut self, memory: &Memory, events: usize) {
        for block in memory.blocks().values() {
            let Some(since) = block.pending.filter(|since| *since != BEFORE) else { continue };
            let waits = self.waits.entry(block.stream).or_default();
            waits.unfinished += 1;
            // CAST: a number of events.
            waits.longest = waits.longest.max((events as u64).saturating_sub(1 + u64::from(since)));
        }
    }

    fn end_wait(&mut self, memory: &Memory, event: &RecordedEvent, number: u32) {
        let Some(block) = memory.blocks().get(&event.addr) else { return };
        let Some(since) = block.pending.filter(|since| *since != BEFORE) else { return };
        let waits = self.waits.entry(block.stream).or_default();
        waits.now = waits.now.saturating_sub(block.bytes);
        waits.longest = waits.longest.max(u64::from(number - since));
    }
}
