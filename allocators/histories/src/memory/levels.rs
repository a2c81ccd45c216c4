//! Reserved and requested bytes from the events alone: sums relative to an unknown start, which only the end shows.

use super::limit::{Collections, LimitBound};
use crate::formats::{Action, Event, Segment, Summary};
use vramlab_policies::backends::CachingSettings;

/// A sum relative to an unknown start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Level {
    pub(super) now: i128,
    highest: i128,
    lowest: i128,
}

impl Level {
    fn add(&mut self, by: i128) {
        self.now += by;
        self.highest = self.highest.max(self.now);
        self.lowest = self.lowest.min(self.now);
    }

    /// Lower bound on the peak: no sum was ever negative.
    fn least_peak(self) -> u64 {
        u64::try_from(self.highest - self.lowest).unwrap_or(u64::MAX)
    }

    /// The sum before the first event if it was `end` after the last; `None` where the events contradict that.
    fn start(self, end: u64) -> Option<i128> {
        Some(i128::from(end) - self.now).filter(|start| start + self.lowest >= 0)
    }

    /// The lowest possible start.
    fn least_start(self) -> i128 {
        -self.lowest
    }

    /// The peak of a sum that started at `start`.
    fn peak(self, start: i128) -> u64 {
        u64::try_from(start + self.highest).unwrap_or(0)
    }
}

/// Sums over the events of one GPU, in constant memory except for evidence on the [limit](LimitBound). O(1) for each event.
#[derive(Clone, Debug)]
pub struct Levels {
    gpu: Option<u16>,
    reserved: Level,
    requested: Level,
    segments: (u64, u64),
    expandable: bool,
    collections: Collections,
}

/// Peaks and counts of the recorded allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peaks {
    /// Peak of reserved bytes.
    pub reserved: u64,
    /// Peak of requested bytes in active blocks; where the end has no requested sizes, the least possible.
    pub requested: u64,
    /// Segments allocated and released.
    pub segments: (u64, u64),
    /// Whether its segments were expandable, which is another policy.
    pub expandable: bool,
}

impl Levels {
    /// Sums over the events of a GPU (`None`: of the only one).
    #[must_use]
    pub fn new(gpu: Option<u16>) -> Self {
        Self {
            gpu,
            reserved: Level::default(),
            requested: Level::default(),
            segments: (0, 0),
            expandable: false,
            collections: Collections::default(),
        }
    }

    /// Adds the next event.
    pub fn take(&mut self, event: &Event) {
        if self.gpu.is_some_and(|gpu| gpu != event.device) {
            return;
        }
        self.collections.take(event, self.reserved.now);
        let bytes = i128::from(event.bytes);
        match event.action {
            Action::Alloc => self.requested.add(bytes),
            Action::FreeCompleted => self.requested.add(-bytes),
            Action::SegmentAlloc => self.segments.0 += 1,
            Action::SegmentFree => self.segments.1 += 1,
            Action::SegmentMap => self.expandable = true,
            _ => {}
        }
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => self.reserved.add(bytes),
            Action::SegmentFree | Action::SegmentUnmap => self.reserved.add(-bytes),
            _ => {}
        }
    }

    /// Lower bound on peak reserved bytes, from the events alone; requested bytes were in reserved memory.
    #[must_use]
    pub fn least_reserved(&self) -> u64 {
        self.reserved.least_peak().max(self.requested.least_peak())
    }

    /// The peaks, counted back from the segments at the end, since a recording may begin late. Only PyTorch's snapshots contain
    /// that end, and only those that lost no event add up. If more was requested than reserved, segment events are missing.
    #[must_use]
    pub fn peaks(&self, summary: &Summary) -> Option<Peaks> {
        let ending = summary.ending()?;
        let of_gpu = || ending.iter().filter(|segment| self.gpu.is_none_or(|gpu| gpu == segment.device));
        let reserved = self.reserved.start(of_gpu().map(|segment| segment.total_size).sum())?;
        let sum = |of: fn(&Segment) -> u64| of_gpu().map(of).fold(0, u64::saturating_add);
        let requested = match (sum(Segment::requested_size), sum(Segment::active_size)) {
            // PyTorch before 2.1 has no requested sizes at the end: the least that was requested before the first event.
            (0, active @ 1..) => {
                Some(self.requested.least_start()).filter(|start| start + self.requested.now <= i128::from(active))?
            }
            (requested, _) => self.requested.start(requested)?,
        };
        let peaks = Peaks {
            reserved: self.reserved.peak(reserved),
            requested: self.requested.peak(requested),
            segments: self.segments,
            expandable: self.expandable,
        };
        Some(peaks).filter(|peaks| peaks.requested <= peaks.reserved)
    }

    /// The bound on the memory limit from garbage collections under `settings`.
    #[must_use]
    pub fn limit(&self, summary: &Summary, settings: &CachingSettings) -> LimitBound {
        let of_gpu = |device: u16| self.gpu.is_none_or(|gpu| gpu == device);
        let reserved = summary.ending().map(|ending| {
            ending.iter().filter(|segment| of_gpu(segment.device)).map(|segment| segment.total_size).sum()
        });
        self.limit_from(reserved.and_then(|reserved| self.reserved.start(reserved)), settings)
    }

    pub(super) fn limit_from(&self, start: Option<i128>, settings: &CachingSettings) -> LimitBound {
        self.collections.limit(start.map(|start| (start, self.reserved.peak(start))), settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_is_counted_back_from_the_end() {
        let peak = |level: Level, end: u64| level.start(end).map(|start| level.peak(start));
        let mut sum = Level::default();
        for by in [5, -3, 10, -20] {
            sum.add(by);
        }
        // It began with 8: 8, 13, 10, 20, 0.
        assert_eq!(peak(sum, 0), Some(20));
        assert_eq!(peak(sum, 4), Some(24));
        // With an unknown end: the lowest possible start.
        assert_eq!(sum.least_peak(), 20);
        let mut up = Level::default();
        up.add(9);
        assert_eq!(peak(up, 3), None, "more was added than remains");
        let mut down = Level::default();
        down.add(-9);
        assert_eq!(peak(down, 1), Some(10), "the start may be the peak");
    }
}
