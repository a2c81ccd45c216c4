//! The peaks of active memory that stand apart.

use super::moments::Sample;
use super::survey::MOST;
use std::cmp::Reverse;

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
    use vramlab::histories::memory::Totals;

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
