//! What the program that recorded a history held itself: the row beside which replays stand.

use vramlab::histories::trace::{Action, Event, Summary};

/// A sum that goes up and down from an unknown start.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    now: i128,
    highest: i128,
    lowest: i128,
}

impl Running {
    fn add(&mut self, by: i128) {
        self.now += by;
        self.highest = self.highest.max(self.now);
        self.lowest = self.lowest.min(self.now);
    }

    /// The least that the peak can have been: no sum was ever negative.
    fn least_peak(self) -> u64 {
        u64::try_from(self.highest - self.lowest).unwrap_or(u64::MAX)
    }

    /// The peak of a sum that was `end` at last; `None` where the events do not add up to it.
    fn peak(self, end: u64) -> Option<u64> {
        let start = i128::from(end) - self.now;
        (start >= 0).then(|| u64::try_from(start + self.highest).ok()).flatten()
    }
}

/// Adds up the events of one GPU.
#[derive(Debug)]
pub(crate) struct Tally {
    gpu: Option<u16>,
    reserved: Running,
    requested: Running,
    segments: (u64, u64),
    /// Whether memory was mapped.
    expandable: bool,
}

/// What PyTorch did while it recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AsRecorded {
    /// Peak of the bytes held from the device.
    pub(crate) peak_reserved: u64,
    /// Peak of the bytes asked for in active blocks.
    pub(crate) peak_requested: u64,
    /// Segments obtained from the device and given back to it.
    pub(crate) segments: (u64, u64),
    /// Whether its segments were expandable, so that it was another policy.
    pub(crate) expandable: bool,
}

impl Tally {
    pub(crate) fn new(gpu: Option<u16>) -> Self {
        Self { gpu, reserved: Running::default(), requested: Running::default(), segments: (0, 0), expandable: false }
    }

    pub(crate) fn take(&mut self, event: &Event) {
        if self.gpu.is_some_and(|gpu| gpu != event.device) {
            return;
        }
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

    /// What was held from the device at the peak, as far as the events alone say it.
    pub(crate) fn seen_reserved(&self) -> u64 {
        self.reserved.least_peak()
    }

    /// The sums, counted back from what was held at the end: a history may begin late. Only PyTorch's snapshots tell
    /// that, and only those that lost no event in between add up.
    pub(crate) fn finish(self, summary: &Summary) -> Option<AsRecorded> {
        let held = summary.ending()?;
        let mine = || held.iter().filter(|segment| self.gpu.is_none_or(|gpu| gpu == segment.device));
        Some(AsRecorded {
            peak_reserved: self.reserved.peak(mine().map(|segment| segment.total_size).sum())?,
            peak_requested: self.requested.peak(mine().map(|segment| segment.requested_size()).sum())?,
            segments: self.segments,
            expandable: self.expandable,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_is_counted_back_from_the_end() {
        let mut sum = Running::default();
        for by in [5, -3, 10, -20] {
            sum.add(by);
        }
        // It began with 8: 8, 13, 10, 20, 0.
        assert_eq!(sum.peak(0), Some(20));
        assert_eq!(sum.peak(4), Some(24));
        // Where the end is not known, with as little as there can have been.
        assert_eq!(sum.least_peak(), 20);
        let mut up = Running::default();
        up.add(9);
        assert_eq!(up.peak(3), None, "more was taken than is there");
        let mut down = Running::default();
        down.add(-9);
        assert_eq!(down.peak(1), Some(10), "the start may be the peak");
    }
}
