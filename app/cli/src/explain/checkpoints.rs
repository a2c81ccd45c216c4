//! Copies of the memory map that the walk over a history leaves behind, so that the few moments that are looked at closely
//! are reached without a second walk from the beginning.

use super::moments::Sample;
use crate::recording::Recording;
use std::cmp::Reverse;
use vramlab::budget::OverBudget;
use vramlab::histories::memory::Memory;

/// Refused requests and retries that are described, of more the last, and peaks, of more the highest.
pub(super) const MOST: usize = 100;

/// Into how many stretches a history is cut.
const STRETCHES: usize = 128;

/// Few copies at a time: the last one, and for each moment that may be looked at the last one before it.
pub(super) struct Checkpoints<'r> {
    recording: &'r Recording,
    kept: Vec<Checkpoint>,
    /// Number of events after which the next copy is made.
    next: usize,
}

struct Checkpoint {
    /// Events that it has seen.
    seen: usize,
    memory: Memory,
}

/// How many events are seen at a moment: those up to this one.
fn seen_at(index: usize) -> usize {
    // START is the last number there is, and nothing is seen there.
    index.wrapping_add(1)
}

impl<'r> Checkpoints<'r> {
    pub(super) fn new(recording: &'r Recording) -> Self {
        Self { recording, kept: Vec::new(), next: 0 }
    }

    /// Whether it is time for a copy when so many events were seen.
    pub(super) fn is_due(&self, seen: usize) -> bool {
        seen >= self.next
    }

    /// Copies the map as it is after so many events. `wanted` are the moments that would be looked at by what is known so
    /// far. Those that take their place lie further on, or are among them.
    pub(super) fn keep(&mut self, seen: usize, memory: &Memory, wanted: &[usize]) {
        let last = |index: usize| self.kept.iter().rposition(|kept| kept.seen <= seen_at(index));
        let needed: Vec<usize> = wanted.iter().filter_map(|index| last(*index)).collect();
        let mut at = 0..;
        self.kept.retain(|_| at.next().is_some_and(|at| needed.contains(&at)));
        // Copies together cost no more than a part of the walk, however many blocks there are.
        self.next = seen + (self.recording.events.len() / STRETCHES).max(4 * memory.blocks().len()).max(1);
        // Without room for a copy the walk begins further back.
        self.kept.extend(memory.copy().ok().map(|memory| Checkpoint { seen, memory }));
    }

    /// The map as it is after an event, or at the beginning.
    ///
    /// # Errors
    /// [`OverBudget`] when it takes more memory than there is.
    pub(super) fn memory_at(&self, index: usize) -> Result<Memory, OverBudget> {
        let seen = seen_at(index);
        let last = self.kept.iter().rfind(|kept| kept.seen <= seen);
        let (from, mut memory) = match last {
            Some(kept) => (kept.seen, kept.memory.copy()?),
            None => (0, self.recording.memory()?),
        };
        for (index, event, at_once) in self.recording.events.walk(from).take(seen - from) {
            // CAST: bounded when the history was read.
            memory.apply(&event, index as u32, at_once)?;
        }
        Ok(memory)
    }
}

/// A peak counts as one of its own when active memory fell below this share of it before it rose again.
const DIP: f64 = 0.8;

/// Finds peaks that stand apart.
#[derive(Debug)]
pub(super) struct Peaks {
    best: Sample,
    /// The lowest level since the last peak, while it falls.
    falling: Option<u64>,
    found: Vec<Sample>,
}

impl Peaks {
    /// From what was there before the first event.
    pub(super) fn new(start: Sample) -> Self {
        Self { best: start, falling: None, found: Vec::new() }
    }

    pub(super) fn take(&mut self, now: Sample) {
        // CAST: a share of bytes.
        let dips = |of: u64, level: u64| level < (of as f64 * DIP) as u64;
        let (level, best) = (now.totals.active, self.best.totals.active);
        match &mut self.falling {
            None if level > best => self.best = now,
            None if dips(best, level) => {
                self.found.push(self.best);
                self.falling = Some(level);
                if self.found.len() > 2 * MOST {
                    self.keep_highest();
                }
            }
            None => {}
            Some(lowest) if dips(level, *lowest) => (self.best, self.falling) = (now, None),
            Some(lowest) => *lowest = (*lowest).min(level),
        }
    }

    fn keep_highest(&mut self) {
        self.found.sort_by_key(|peak| (Reverse(peak.totals.active), peak.index));
        self.found.truncate(MOST);
    }

    /// The highest first.
    pub(super) fn finish(mut self) -> Vec<Sample> {
        if self.falling.is_none() {
            self.found.push(self.best);
        }
        self.found.retain(|peak| peak.totals.active > 0);
        self.keep_highest();
        self.found
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
    fn the_map_at_a_moment_is_that_of_a_walk_from_the_beginning() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../allocators/histories/tests/fixtures/resnet50.limit.pickle.xz");
        let recording = Recording::read(&file, None, None, &ReadArgs::default()).unwrap();
        let count = recording.events.len();
        let points: Vec<usize> = (0..5).map(|at| at * count / 5 + 3).chain([count - 1]).collect();
        let (mut checkpoints, mut memory) = (Checkpoints::new(&recording), recording.memory().unwrap());
        let shown = |memory: &Memory| format!("{:?} {:?}", memory.segments(), memory.blocks());
        let (mut there, mut blocks) = (vec![shown(&memory)], 0);
        for (index, event, at_once) in recording.events.walk(0) {
            if checkpoints.is_due(index) {
                checkpoints.keep(index, &memory, &points);
            }
            assert!(checkpoints.kept.len() <= points.len() + 1);
            memory.apply(&event, index as u32, at_once).unwrap();
            blocks = blocks.max(memory.blocks().len());
            if points.contains(&index) {
                there.push(shown(&memory));
            }
        }
        let without = Checkpoints::new(&recording);
        for (index, there) in [START].iter().chain(&points).zip(there) {
            assert_eq!(shown(&checkpoints.memory_at(*index).unwrap()), there, "{index}");
            assert_eq!(shown(&without.memory_at(*index).unwrap()), there, "{index}");
        }
        // And nearly nothing is walked again.
        for index in points {
            let last = checkpoints.kept.iter().rfind(|kept| kept.seen <= seen_at(index)).unwrap();
            let again = seen_at(index) - last.seen;
            assert!(again <= (count / STRETCHES).max(4 * blocks), "{again} events of {count}");
        }
    }

    fn sample(index: usize, active: u64) -> Sample {
        Sample { index, totals: Totals { active, ..Totals::default() }, ..Sample::default() }
    }

    #[test]
    fn peaks_stand_apart() {
        let mut peaks = Peaks::new(Sample::default());
        for (index, level) in [10, 100, 90, 40, 30, 35, 60, 120, 110, 115, 0, 50].into_iter().enumerate() {
            peaks.take(sample(index, level));
        }
        // 115 is no peak of its own, and the fall is none either.
        assert_eq!(peaks.finish().iter().map(|peak| peak.index).collect::<Vec<_>>(), [7, 1, 11]);
    }

    #[test]
    fn of_many_peaks_the_highest_are_kept() {
        let level = |number: u64| 1000 + number * 7919 % 1009 / 2;
        let mut peaks = Peaks::new(Sample::default());
        let mut all = Vec::new();
        for number in 0..1000 {
            let index = 2 * number as usize;
            peaks.take(sample(index, level(number)));
            peaks.take(sample(index + 1, 0));
            assert!(peaks.found.len() <= 2 * MOST);
            all.push((Reverse(level(number)), index));
        }
        all.sort_unstable();
        let found: Vec<usize> = peaks.finish().iter().map(|peak| peak.index).collect();
        assert_eq!(found, all.iter().map(|(_, index)| *index).take(MOST).collect::<Vec<_>>());
    }
}
