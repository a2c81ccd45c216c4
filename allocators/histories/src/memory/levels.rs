//! How much was held, as far as the events alone tell it: sums that go up and down from a start that only the end tells.

use super::limit::{Collections, LimitBound};
use crate::formats::{Action, Event, Summary};
use vramlab_policies::backends::CachingSettings;

/// A sum that goes up and down from an unknown start.
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

    /// The least that the peak can have been: no sum was ever negative.
    fn least_peak(self) -> u64 {
        u64::try_from(self.highest - self.lowest).unwrap_or(u64::MAX)
    }

    /// What the sum was before the first event if it was `end` after the last; `None` where the events do not add up to it.
    fn start(self, end: u64) -> Option<i128> {
        Some(i128::from(end) - self.now).filter(|start| start + self.lowest >= 0)
    }

    /// The peak of a sum that was `start` at first.
    fn peak(self, start: i128) -> u64 {
        u64::try_from(start + self.highest).unwrap_or(0)
    }
}

/// Adds up the events of one GPU, in constant memory but for what tells of the [limit](LimitBound). O(1) an event.
#[derive(Clone, Debug)]
pub struct Levels {
    gpu: Option<u16>,
    reserved: Level,
    requested: Level,
    segments: (u64, u64),
    expandable: bool,
    collections: Collections,
}

/// What the allocator of the recorded program came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peaks {
    /// Peak of the bytes held from the device.
    pub reserved: u64,
    /// Peak of the bytes asked for in active blocks.
    pub requested: u64,
    /// Segments obtained from the device and given back to it.
    pub segments: (u64, u64),
    /// Whether its segments were expandable, so that it was another policy.
    pub expandable: bool,
}

impl Levels {
    /// Takes the events of a GPU (`None`: of the only one).
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

    /// Takes the next event.
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

    /// The least that was held from the device at the peak, as far as the events alone say it: what was asked for lay in it.
    #[must_use]
    pub fn least_reserved(&self) -> u64 {
        self.reserved.least_peak().max(self.requested.least_peak())
    }

    /// The peaks, counted back from what was held at the end: a history may begin late. Only PyTorch's snapshots tell
    /// that, and only those that lost no event in between add up. Where more was asked for than was held, events of segments are
    /// missing.
    #[must_use]
    pub fn peaks(&self, summary: &Summary) -> Option<Peaks> {
        let held = summary.ending()?;
        let mine = || held.iter().filter(|segment| self.gpu.is_none_or(|gpu| gpu == segment.device));
        let reserved = self.reserved.start(mine().map(|segment| segment.total_size).sum())?;
        let requested = self.requested.start(mine().map(|segment| segment.requested_size()).sum())?;
        let peaks = Peaks {
            reserved: self.reserved.peak(reserved),
            requested: self.requested.peak(requested),
            segments: self.segments,
            expandable: self.expandable,
        };
        Some(peaks).filter(|peaks| peaks.requested <= peaks.reserved)
    }

    /// What the collections of garbage under `settings` say of the memory limit.
    #[must_use]
    pub fn limit(&self, summary: &Summary, settings: &CachingSettings) -> LimitBound {
        let mine = |device: u16| self.gpu.is_none_or(|gpu| gpu == device);
        let held =
            summary.ending().map(|held| held.iter().filter(|one| mine(one.device)).map(|one| one.total_size).sum());
        self.limit_from(held.and_then(|held| self.reserved.start(held)), settings)
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
        // Where the end is not known, with as little as there can have been.
        assert_eq!(sum.least_peak(), 20);
        let mut up = Level::default();
        up.add(9);
        assert_eq!(peak(up, 3), None, "more was taken than is there");
        let mut down = Level::default();
        down.add(-9);
        assert_eq!(peak(down, 1), Some(10), "the start may be the peak");
    }
}
