//! One pass over a history: where its peaks are, which requests missed, when memory went back, what waited.

use super::causes::cause;
use super::checkpoints::Checkpoints;
use super::explanation::{Cause, Point, Refused, Retry, Shape};
use super::lines::Lines;
use super::moments::{Glance, moment};
use super::peaks::Peaks;
use crate::recording::{Recording, START};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use vramlab::budget::OverBudget;
use vramlab::histories::formats::{Action, StackId};
use vramlab::histories::memory::{BEFORE, Memory, Recorded, Totals};

/// Points of the curves.
const POINTS: usize = 512;
/// Refused requests and retries that are described, of more the last, and peaks, of more the highest.
pub(super) const MOST: usize = 100;

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Event after which active memory was highest, and its level.
    pub(super) peak_active: (usize, u64),
    /// Event after which a request had taken reserved memory to its peak.
    pub(super) peak_reserved: (usize, u64),
    /// Peak of active memory less what waited.
    pub(super) peak_allocated: u64,
    /// Peaks, the highest first.
    pub(super) peaks: Vec<Glance>,
    /// The lowest level of requested bytes in the second quarter and in the last one.
    pub(super) low_early: Option<(usize, u64)>,
    pub(super) low_late: Option<(usize, u64)>,
    pub(super) refused: VecDeque<(usize, Refused)>,
    pub(super) num_refused: u64,
    pub(super) retries: VecDeque<(usize, Retry)>,
    pub(super) num_retries: u64,
    pub(super) num_releases: u64,
    pub(super) timeline: Vec<Point>,
    pub(super) shapes: Vec<Shape>,
    pub(super) allocations: u64,
    /// By stream, the event of its last request.
    pub(super) last_request: BTreeMap<u64, usize>,
    pub(super) deferred: u64,
    pub(super) pending_peak: (usize, u64),
    pub(super) waits: BTreeMap<u64, Waits>,
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

/// A request that the events before it belong to.
#[derive(Clone, Copy, Debug)]
struct Probe {
    cause: Cause,
    reserved: u64,
}

/// What came and went since the program's last event.
#[derive(Debug, Default)]
struct Window {
    /// Whether the request was looked for.
    probed: bool,
    probe: Option<Probe>,
    taken: u64,
    released: u64,
    segments: u64,
    by_name: bool,
}

/// Requests of one size that missed.
#[derive(Debug, Default)]
struct Tally {
    misses: u64,
    taken: u64,
    causes: BTreeMap<Cause, u64>,
}

/// Requests by their size and stack.
type Requests = HashMap<(u64, StackId), u64>;

/// Looks at every event. The checkpoints reach the moments that were found, and `points`.
///
/// # Errors
/// [`OverBudget`] when the recorded memory takes more than there is.
pub(super) fn survey<'r>(
    recording: &'r Recording,
    lines: &mut Lines<'_>,
    points: &[usize],
) -> Result<(Survey, Checkpoints<'r>), OverBudget> {
    let mut memory = recording.memory()?;
    let mut checkpoints = Checkpoints::new(recording);
    let mut out = Survey::default();
    let (mut requests, mut missed): (Requests, BTreeMap<u64, Tally>) = Default::default();
    let mut window = Window::default();
    let (count, start) = (recording.events.len(), memory.totals());
    out.peak_active = (START, start.active);
    out.peak_reserved = (START, start.reserved);
    out.pending_peak = (START, start.pending);
    out.peak_allocated = start.allocated();
    let stretch = count.div_ceil(POINTS).max(1);
    let mut climb = Peaks::new(Glance::at(&memory, START, 0));
    let empties = empty_cache_stacks(recording);
    for (index, event, at_once) in recording.events.walk(0) {
        // CAST: bounded when the history was read.
        let number = index as u32;
        if checkpoints.is_due(index) {
            checkpoints.keep(index, &memory, &out.wanted(points));
        }
        let segments = matches!(
            event.action,
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap
        );
        if segments && !window.probed {
            window.probed = true;
            window.probe = next_request(recording, index).map(|request| Probe {
                cause: cause(&memory, request.bytes, request.stream),
                reserved: memory.totals().reserved,
            });
        }
        match event.action {
            Action::FreeRequested if !at_once => out.waits_begin(&memory, &event),
            Action::FreeCompleted if !at_once => out.waits_end(&memory, &event, number),
            _ => {}
        }
        memory.apply(&event, number, at_once)?;
        let totals = memory.totals();
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => window.taken += event.bytes,
            Action::SegmentFree | Action::SegmentUnmap => {
                window.released += event.bytes;
                window.segments += 1;
                window.by_name |= empties.get(event.origin.stack.index()).copied().unwrap_or(false);
            }
            Action::Alloc if event.bytes > 0 => {
                out.allocations += 1;
                out.last_request.insert(event.stream, index);
                *requests.entry((event.bytes, event.origin.stack)).or_default() += 1;
                let window = std::mem::take(&mut window);
                if let Some(probe) = window.probe.filter(|_| window.taken > 0) {
                    let tally = missed.entry(event.bytes).or_default();
                    tally.misses += 1;
                    tally.taken += window.taken;
                    *tally.causes.entry(probe.cause).or_default() += 1;
                }
                out.went_back(recording, lines, &memory, index, &window, true);
            }
            Action::Oom => {
                let window = std::mem::take(&mut window);
                out.went_back(recording, lines, &memory, index, &window, false);
                out.refuse(recording, lines, &memory, index);
            }
            Action::FreeCompleted => {}
            _ => {
                let window = std::mem::take(&mut window);
                out.num_releases += u64::from(window.released > 0);
            }
        }
        out.take_levels(&event, index, count, totals);
        let glance = Glance::at(&memory, index, event.stream);
        climb.take(glance);
        if index % stretch == 0 {
            out.timeline.push(Point::default());
        }
        out.draw(recording, &glance);
    }
    out.num_releases += u64::from(window.released > 0);
    out.peaks = climb.finish();
    out.shapes = shapes(missed, &requests, &memory, lines);
    checkpoints.keep(count, &memory, &out.wanted(points));
    Ok((out, checkpoints))
}

/// The request in whose course segments come and go at an event.
fn next_request(recording: &Recording, index: usize) -> Option<Recorded> {
    let next = recording.events.iter_from(index).find(|event| {
        !matches!(
            event.action,
            Action::SegmentAlloc
                | Action::SegmentFree
                | Action::SegmentMap
                | Action::SegmentUnmap
                | Action::FreeCompleted
        )
    })?;
    matches!(next.action, Action::Alloc | Action::Oom).then_some(next)
}

/// Which stacks call `empty_cache`.
fn empty_cache_stacks(recording: &Recording) -> Vec<bool> {
    let origins = &recording.origins;
    let mut out = vec![false; origins.stacks()];
    for event in recording.events.iter().filter(|event| event.action == Action::SegmentFree) {
        let mut frames = origins.frames(event.origin.stack);
        out[event.origin.stack.index()] = frames.any(|frame| origins.spelt(frame.name).contains("empty_cache"));
    }
    out
}

fn shapes(missed: BTreeMap<u64, Tally>, requests: &Requests, memory: &Memory, lines: &mut Lines<'_>) -> Vec<Shape> {
    // For each size how many requests there were, and the stack that made most.
    let mut sums: HashMap<u64, (u64, (u64, StackId))> =
        missed.keys().map(|bytes| (*bytes, Default::default())).collect();
    for ((bytes, stack), count) in requests {
        if let Some((sum, most)) = sums.get_mut(bytes) {
            *sum += count;
            if !stack.is_empty() {
                *most = (*most).max((*count, *stack));
            }
        }
    }
    let shape = |(bytes, tally): (u64, Tally)| {
        let mut causes: Vec<(Cause, u64)> = tally.causes.into_iter().collect();
        causes.sort_by_key(|(_, count)| Reverse(*count));
        let (requests, (_, most)) = sums[&bytes];
        Shape {
            requested_bytes: bytes,
            rounded_bytes: memory.rules().rounded(bytes),
            requests,
            misses: tally.misses,
            taken_bytes: tally.taken,
            cause: causes.first().map_or(Cause::Growth, |(cause, _)| *cause),
            causes,
            line: if most.is_empty() { None } else { lines.line_of(most) },
        }
    };
    let mut out: Vec<Shape> = missed.into_iter().map(shape).collect();
    out.sort_by_key(|shape| (Reverse(shape.taken_bytes), shape.requested_bytes));
    out
}

impl Survey {
    /// The refused request that is looked at closely.
    pub(super) fn last_refused(&self) -> Option<usize> {
        self.refused.back().map(|(index, _)| *index)
    }

    /// The moments that are looked at closely by what is known so far, and `points`.
    fn wanted(&self, points: &[usize]) -> Vec<usize> {
        let found = [Some(self.peak_active), Some(self.peak_reserved), self.low_early, self.low_late];
        let found = found.into_iter().flatten().map(|(index, _)| index);
        found.chain(self.last_refused()).chain(points.iter().copied()).collect()
    }

    fn take_levels(&mut self, event: &Recorded, index: usize, count: usize, totals: Totals) {
        if totals.active > self.peak_active.1 {
            self.peak_active = (index, totals.active);
        }
        // A segment that comes is not used before its request is done.
        let settled = !matches!(event.action, Action::SegmentAlloc | Action::SegmentMap);
        if settled && totals.reserved > self.peak_reserved.1 {
            self.peak_reserved = (index, totals.reserved);
        }
        self.peak_allocated = self.peak_allocated.max(totals.allocated());
        if totals.pending > self.pending_peak.1 {
            self.pending_peak = (index, totals.pending);
        }
        let low = match 4 * index / count.max(1) {
            1 => &mut self.low_early,
            3 => &mut self.low_late,
            _ => return,
        };
        if low.is_none_or(|(_, least)| totals.requested < least) {
            *low = Some((index, totals.requested));
        }
    }

    fn draw(&mut self, recording: &Recording, glance: &Glance) {
        let Glance { index, totals, largest_hole: hole, .. } = *glance;
        let Some(point) = self.timeline.last_mut() else { return };
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
            };
        }
        point.largest_hole_bytes = least;
    }

    fn waits_begin(&mut self, memory: &Memory, event: &Recorded) {
        let Some(block) = memory.blocks().get(&event.addr).filter(|block| block.pending.is_none()) else { return };
        self.deferred += 1;
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

    /// Takes note of segments that went back in the course of a request.
    fn went_back(
        &mut self,
        recording: &Recording,
        lines: &mut Lines<'_>,
        memory: &Memory,
        index: usize,
        window: &Window,
        succeeded: bool,
    ) {
        let Some(probe) = window.probe.filter(|_| window.released > 0) else { return };
        if succeeded && window.taken == 0 {
            self.num_releases += 1;
            return;
        }
        let Some(event) = recording.events.get(index) else { return };
        let settings = &recording.settings;
        let over = settings.memory_limit.map(|limit| probe.reserved + window.taken.max(event.bytes) > limit);
        let kind = match over {
            _ if window.by_name => "empty_cache",
            Some(true) => "retry",
            _ if !succeeded => "retry",
            _ if settings.garbage_collection_threshold > 0.0 => "garbage_collection",
            Some(false) => "empty_cache",
            None => "retry_or_empty_cache",
        };
        if kind == "empty_cache" {
            self.num_releases += 1;
            return;
        }
        self.num_retries += 1;
        if self.retries.len() == MOST {
            self.retries.pop_front();
        }
        let retry = Retry {
            asked_bytes: event.bytes,
            stream: event.stream,
            released_bytes: window.released,
            released_segments: window.segments,
            kind,
            cause: probe.cause,
            succeeded,
            moment: moment(recording, memory, lines, index),
        };
        self.retries.push_back((index, retry));
    }

    fn refuse(&mut self, recording: &Recording, lines: &mut Lines<'_>, memory: &Memory, index: usize) {
        let Some(event) = recording.events.get(index) else { return };
        self.num_refused += 1;
        if self.refused.len() == MOST {
            self.refused.pop_front();
        }
        let refused = Refused {
            asked_bytes: event.bytes,
            stream: event.stream,
            device_free_bytes: Some(event.addr).filter(|free| *free > 0),
            cause: cause(memory, event.bytes, event.stream),
            free_bytes: memory.free_bytes(memory.pool_of(event.stream, event.bytes)),
            moment: moment(recording, memory, lines, index),
        };
        self.refused.push_back((index, refused));
    }
}
