//! Copies of the memory map, made during the pass over a recording, so that the few moments described in detail can be reached
//! without a second pass from the start.

use super::moments::Sample;
use crate::recording::Recording;
use std::cmp::Reverse;
use vramlab::budget::OverBudget;
use vramlab::histories::memory::Memory;

/// Maximum number of refused requests and retries described (the last ones), and of peaks (the highest).
pub(super) const MOST: usize = 100;

/// Copies are at least one part in this many of the recording apart.
const STRETCHES: usize = 128;

/// The copies: the latest one, and for each candidate moment the last one before it.
pub(super) struct Checkpoints<'r> {
    recording: &'r Recording,
    copies: Vec<Checkpoint>,
    /// Number of events at which the next copy is made.
    next: usize,
}

struct Checkpoint {
    /// Number of events applied to it.
    events: usize,
    memory: Memory,
}

/// The number of events applied at a moment: all up to this index.
fn events_at(index: usize) -> usize {
    // START is the largest index; no event has been applied there.
    index.wrapping_add(1)
}

impl<'r> Checkpoints<'r> {
    pub(super) fn new(recording: &'r Recording) -> Self {
        Self { recording, copies: Vec::new(), next: 0 }
    }

    /// Whether a copy is due after this number of events.
    pub(super) fn is_due(&self, events: usize) -> bool {
        events >= self.next
    }

    /// Copies the map as it is after this number of events. `candidates` are the moments selected so far; a moment that replaces
    /// one of them follows later or is among them.
    pub(super) fn copy(&mut self, events: usize, memory: &Memory, candidates: &[usize]) {
        let last = |index: usize| self.copies.iter().rposition(|copy| copy.events <= events_at(index));
        let needed: Vec<usize> = candidates.iter().filter_map(|index| last(*index)).collect();
        let mut at = 0..;
        self.copies.retain(|_| at.next().is_some_and(|at| needed.contains(&at)));
        // All copies together cost at most a fraction of the pass, for any number of blocks.
        self.next = events + (self.recording.events.len() / STRETCHES).max(4 * memory.blocks().len()).max(1);
        // Without memory for a copy, memory_at starts from an earlier one.
        self.copies.extend(memory.copy().ok().map(|memory| Checkpoint { events, memory }));
    }

    /// The map after an event, or at [`START`](crate::recording::START).
    ///
    /// # Errors
    /// [`OverBudget`] if the memory budget is exceeded.
    pub(super) fn memory_at(&self, index: usize) -> Result<Memory, OverBudget> {
        let events = events_at(index);
        let last = self.copies.iter().rfind(|copy| copy.events <= events);
        let (from, mut memory) = match last {
            Some(copy) => (copy.events, copy.memory.copy()?),
            None => (0, self.recording.memory()?),
        };
        for (index, event, immediate) in self.recording.events.walk(from).take(events - from) {
            // CAST: Recording::read limits the number of events.
            memory.apply(&event, index as u32, immediate)?;
        }
        Ok(memory)
    }
}

/// A peak is separate if active memory fell below this share of it before it rose again.
const DIP: f64 = 0.8;

/// Maximum number of lows kept.
const LOWS: usize = 1 << 16;

/// The lowest point between two separate peaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Low {
    pub(super) index: usize,
    pub(super) requested: u64,
    active: u64,
    /// Active bytes at the peak before it.
    peak: u64,
}

/// Finds separate peaks, and the lows between them.
#[derive(Debug)]
pub(super) struct Peaks {
    best: Sample,
    /// The low since the last peak; `None` while memory rises.
    falling: Option<Low>,
    peaks: Vec<Sample>,
    lows: Vec<Low>,
}

impl Peaks {
    /// Starts from the memory before recording started.
    pub(super) fn new(start: Sample) -> Self {
        Self { best: start, falling: None, peaks: Vec::new(), lows: Vec::new() }
    }

    pub(super) fn take(&mut self, now: Sample) {
        // CAST: a share of bytes.
        let dips = |of: u64, level: u64| level < (of as f64 * DIP) as u64;
        let (level, best) = (now.totals.active, self.best.totals.active);
        match &mut self.falling {
            None if level > best => self.best = now,
            None if dips(best, level) => {
                self.peaks.push(self.best);
                self.falling = Some(Low::new(now, best));
                if self.peaks.len() > 2 * MOST {
                    self.keep_highest();
                }
            }
            None => {}
            Some(low) if dips(level, low.active) => {
                self.lows.push(*low);
                if self.lows.len() > LOWS {
                    let half = self.lows.iter().map(|low| low.peak).max().unwrap_or(0) / 2;
                    self.lows.retain(|low| low.peak >= half);
                    self.lows.truncate(LOWS);
                }
                (self.best, self.falling) = (now, None);
            }
            Some(low) if level < low.active => *low = Low::new(now, low.peak),
            Some(_) => {}
        }
    }

    /// The lows between peaks of at least half the highest peak's level: similar moments of a program that repeats its work.
    pub(super) fn lows(&self) -> Vec<Low> {
        let last = if self.falling.is_none() { self.best.totals.active } else { 0 };
        let half = self.lows.iter().map(|low| low.peak).chain([last]).max().unwrap_or(0) / 2;
        let mut out = Vec::new();
        let mut lowest: Option<Low> = None;
        for low in &self.lows {
            if low.peak >= half {
                out.extend(lowest.replace(*low));
            } else if lowest.is_some_and(|lowest| low.active < lowest.active) {
                lowest = Some(*low);
            }
        }
        if last >= half {
            out.extend(lowest);
        }
        out
    }

    fn keep_highest(&mut self) {
        self.peaks.sort_by_key(|peak| (Reverse(peak.totals.active), peak.index));
        self.peaks.truncate(MOST);
    }

    /// The peaks, the highest first.
    pub(super) fn finish(mut self) -> Vec<Sample> {
        if self.falling.is_none() {
            self.peaks.push(self.best);
        }
        self.peaks.retain(|peak| peak.totals.active > 0);
        self.keep_highest();
        self.peaks
    }
}

impl Low {
    fn new(sample: Sample, peak: u64) -> Self {
        let Sample { index, totals, .. } = sample;
        Self { index, requested: totals.requested, active: totals.active, peak }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reading::ReadArgs;
    use crate::recording::START;
    use std::path::Path;
    use vramlab::histories::memory::Totals;

    #[test]
    fn memory_at_equals_a_full_pass() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../allocators/histories/tests/fixtures/resnet50.limit.pickle.xz");
        let recording = Recording::read(&file, None, None, &ReadArgs::default()).unwrap();
        let count = recording.events.len();
        let points: Vec<usize> = (0..5).map(|at| at * count / 5 + 3).chain([count - 1]).collect();
        let (mut checkpoints, mut memory) = (Checkpoints::new(&recording), recording.memory().unwrap());
        let shown = |memory: &Memory| format!("{:?} {:?}", memory.segments(), memory.blocks());
        let (mut expected, mut blocks) = (vec![shown(&memory)], 0);
        for (index, event, immediate) in recording.events.walk(0) {
            if checkpoints.is_due(index) {
                checkpoints.copy(index, &memory, &points);
            }
            assert!(checkpoints.copies.len() <= points.len() + 1);
            memory.apply(&event, index as u32, immediate).unwrap();
            blocks = blocks.max(memory.blocks().len());
            if points.contains(&index) {
                expected.push(shown(&memory));
            }
        }
        let without = Checkpoints::new(&recording);
        for (index, expected) in [START].iter().chain(&points).zip(expected) {
            assert_eq!(shown(&checkpoints.memory_at(*index).unwrap()), expected, "{index}");
            assert_eq!(shown(&without.memory_at(*index).unwrap()), expected, "{index}");
        }
        // Few events are applied a second time.
        for index in points {
            let last = checkpoints.copies.iter().rfind(|copy| copy.events <= events_at(index)).unwrap();
            let again = events_at(index) - last.events;
            assert!(again <= (count / STRETCHES).max(4 * blocks), "{again} events of {count}");
        }
    }

    fn sample(index: usize, active: u64) -> Sample {
        Sample { index, totals: Totals { active, ..Totals::default() }, ..Sample::default() }
    }

    #[test]
    fn a_peak_is_separate_after_a_dip() {
        let mut peaks = Peaks::new(Sample::default());
        for (index, level) in [10, 100, 90, 40, 30, 35, 60, 120, 110, 115, 0, 50].into_iter().enumerate() {
            peaks.take(sample(index, level));
        }
        // 115 follows too small a dip.
        assert_eq!(peaks.finish().iter().map(|peak| peak.index).collect::<Vec<_>>(), [7, 1, 11]);
    }

    #[test]
    fn the_highest_of_many_peaks_are_kept() {
        let level = |number: u64| 1000 + number * 7919 % 1009 / 2;
        let mut peaks = Peaks::new(Sample::default());
        let mut all = Vec::new();
        for number in 0..1000 {
            let index = 2 * number as usize;
            peaks.take(sample(index, level(number)));
            peaks.take(sample(index + 1, 0));
            assert!(peaks.peaks.len() <= 2 * MOST);
            all.push((Reverse(level(number)), index));
        }
        all.sort_unstable();
        let indices: Vec<usize> = peaks.finish().iter().map(|peak| peak.index).collect();
        assert_eq!(indices, all.iter().map(|(_, index)| *index).take(MOST).collect::<Vec<_>>());
    }
}
