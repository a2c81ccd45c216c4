//! One pass over a history: where its peaks are, which requests missed, when memory went back, what waited.

use super::causes::cause;
use super::events::Recorded;
use super::explanation::{Cause, Point, Refused, Retry, Shape};
use super::lines::Lines;
use super::memory::{BEFORE, Memory, Pool, Totals};
use super::moments::moment;
use super::recording::{Recording, START};
use std::collections::{BTreeMap, HashMap, VecDeque};
use vramlab::histories::trace::{Action, StackId};

/// Points of the curves.
const POINTS: usize = 512;
/// Refused requests and retries that are described; of more the last.
const MOST: usize = 100;
/// A peak counts as one of its own when active memory fell below this share of it before it rose again.
const DIP: f64 = 0.8;

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
    pub(super) peaks: Vec<usize>,
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
    probe: Option<Probe>,
    taken: u64,
    released: u64,
    segments: u64,
    by_name: bool,
}

#[derive(Debug, Default)]
struct Tally {
    requests: u64,
    misses: u64,
    taken: u64,
    causes: BTreeMap<Cause, u64>,
    stacks: HashMap<StackId, u64>,
}

/// Looks at every event.
pub(super) fn survey(recording: &Recording, lines: &mut Lines<'_>) -> Survey {
    let mut memory = Memory::new(recording);
    let mut out = Survey::default();
    let mut shapes: BTreeMap<u64, Tally> = BTreeMap::new();
    let mut window = Window::default();
    let (count, start) = (recording.events.len(), memory.totals);
    out.peak_active = (START, start.active);
    out.peak_reserved = (START, start.reserved);
    out.pending_peak = (START, start.pending);
    out.peak_allocated = start.active - start.pending;
    let stretch = count.div_ceil(POINTS).max(1);
    let mut climb = Climb { best: (START, start.active), ..Climb::default() };
    let empties = empty_cache_stacks(recording);
    for (index, event) in recording.events.iter().enumerate() {
        // CAST: bounded when the history was read.
        let number = index as u32;
        let segments = matches!(
            event.action,
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap
        );
        if segments && window.probe.is_none() {
            window.probe = next_request(recording, index).map(|request| Probe {
                cause: cause(&memory, &recording.settings, request.bytes, request.stream),
                reserved: memory.totals.reserved,
            });
        }
        if event.action == Action::FreeRequested && !recording.completes_at_once(index) {
            out.waits_begin(&memory, &event);
        }
        if event.action == Action::FreeCompleted {
            out.waits_end(&memory, &event, number);
        }
        memory.apply(recording, &event, number, recording.completes_at_once(index));
        let totals = memory.totals;
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
                let tally = shapes.entry(event.bytes).or_default();
                tally.requests += 1;
                *tally.stacks.entry(event.origin.stack).or_default() += 1;
                let window = std::mem::take(&mut window);
                if let Some(probe) = window.probe.filter(|_| window.taken > 0) {
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
        climb.take(index, totals.active);
        if index % stretch == 0 {
            out.timeline.push(Point::default());
        }
        let now = recording.since_start(index).unwrap_or(0);
        out.draw(recording.number(index), now, totals, memory.largest(Pool { stream: event.stream, small: false }));
    }
    out.num_releases += u64::from(window.released > 0);
    out.peaks = climb.finish();
    out.shapes = shapes.into_iter().filter(|(_, tally)| tally.misses > 0).map(|of| shape(of, &memory, lines)).collect();
    out.shapes.sort_by_key(|shape| (std::cmp::Reverse(shape.taken_bytes), shape.requested_bytes));
    out
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

fn shape((bytes, tally): (u64, Tally), memory: &Memory, lines: &mut Lines<'_>) -> Shape {
    let mut causes: Vec<(Cause, u64)> = tally.causes.into_iter().collect();
    causes.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let most =
        tally.stacks.into_iter().filter(|(stack, _)| !stack.is_empty()).max_by_key(|(stack, count)| (*count, *stack));
    Shape {
        requested_bytes: bytes,
        rounded_bytes: memory.rounded(bytes),
        requests: tally.requests,
        misses: tally.misses,
        taken_bytes: tally.taken,
        cause: causes.first().map_or(Cause::Growth, |(cause, _)| *cause),
        causes,
        line: most.and_then(|(stack, _)| lines.line_of(stack)),
    }
}

impl Survey {
    fn take_levels(&mut self, event: &Recorded, index: usize, count: usize, totals: Totals) {
        if totals.active > self.peak_active.1 {
            self.peak_active = (index, totals.active);
        }
        // A segment that comes is not used before its request is done.
        let settled = !matches!(event.action, Action::SegmentAlloc | Action::SegmentMap);
        if settled && totals.reserved > self.peak_reserved.1 {
            self.peak_reserved = (index, totals.reserved);
        }
        self.peak_allocated = self.peak_allocated.max(totals.active - totals.pending);
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

    fn draw(&mut self, event: u64, time_ns: u64, totals: Totals, hole: u64) {
        let Some(point) = self.timeline.last_mut() else { return };
        let first = point.event == 0;
        let least = if first { hole } else { point.largest_hole_bytes.min(hole) };
        if first || totals.active > point.active_bytes {
            *point = Point {
                event,
                time_ns,
                reserved_bytes: totals.reserved,
                active_bytes: totals.active,
                requested_bytes: totals.requested,
                largest_hole_bytes: least,
            };
        }
        point.largest_hole_bytes = least;
    }

    fn waits_begin(&mut self, memory: &Memory, event: &Recorded) {
        let Some(block) = memory.blocks.get(&event.addr).filter(|block| block.pending.is_none()) else { return };
        self.deferred += 1;
        let waits = self.waits.entry(block.stream).or_default();
        waits.frees += 1;
        waits.now += block.bytes;
        waits.peak = waits.peak.max(waits.now);
        let stack = if block.origin.stack.is_empty() { block.near } else { block.origin.stack };
        *waits.stacks.entry(stack).or_default() += block.bytes;
    }

    fn waits_end(&mut self, memory: &Memory, event: &Recorded, number: u32) {
        let Some(block) = memory.blocks.get(&event.addr) else { return };
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
            cause: cause(memory, &recording.settings, event.bytes, event.stream),
            free_bytes: memory.free_in(memory.pool_of(event.stream, event.bytes)),
            moment: moment(recording, memory, lines, index),
        };
        self.refused.push_back((index, refused));
    }
}

/// Finds peaks that stand apart.
#[derive(Debug, Default)]
struct Climb {
    best: (usize, u64),
    /// The lowest level since the last peak, while it falls.
    falling: Option<u64>,
    found: Vec<(usize, u64)>,
}

impl Climb {
    fn take(&mut self, index: usize, level: u64) {
        // CAST: a share of bytes.
        let dips = |of: u64, level: u64| level < (of as f64 * DIP) as u64;
        match &mut self.falling {
            None if level > self.best.1 => self.best = (index, level),
            None if dips(self.best.1, level) => {
                self.found.push(self.best);
                self.falling = Some(level);
            }
            None => {}
            Some(lowest) if dips(level, *lowest) => (self.best, self.falling) = ((index, level), None),
            Some(lowest) => *lowest = (*lowest).min(level),
        }
    }

    fn finish(mut self) -> Vec<usize> {
        if self.falling.is_none() {
            self.found.push(self.best);
        }
        self.found.retain(|(_, level)| *level > 0);
        self.found.sort_by_key(|(index, level)| (std::cmp::Reverse(*level), *index));
        self.found.into_iter().map(|(index, _)| index).take(MOST).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_stand_apart() {
        let mut climb = Climb::default();
        for (index, level) in [10, 100, 90, 40, 30, 35, 60, 120, 110, 115, 0, 50].into_iter().enumerate() {
            climb.take(index, level);
        }
        // 115 is no peak of its own, and the fall is none either.
        assert_eq!(climb.finish(), [7, 1, 11]);
    }
}
