//! How much was held, as far as the events alone tell it: sums that go up and down from a start that only the end tells.

use super::Rules;
use crate::formats::{Action, Event, Summary};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

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
#[derive(Debug)]
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

// Which memory limit a recorded program had, as its garbage collections tell.
//
// With `garbage_collection_threshold` PyTorch gives idle segments back right before it takes a new one, but only under a limit
// and while more is reserved than that share of it. So each such collection says that the limit is lower than what was reserved
// then, divided by the threshold; and it is at least the peak.

/// What a history's garbage collections tell of the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LimitBound {
    /// There are none.
    #[default]
    None,
    /// There was one, and so a limit. How much was reserved, which would tell it, is not known.
    Unknown,
    /// It was less than this.
    Below(u64),
}

/// Segments that went back right before a request was served by a new one.
#[derive(Clone, Debug, Default)]
struct Release {
    /// Reserved before, counted from what was reserved before the first event.
    reserved: i128,
    /// Bytes and stream of each, in order.
    segments: Vec<(u64, u64)>,
    /// Bytes of the new segment.
    taken: u64,
    /// Bytes that were asked for.
    requested: u64,
    stream: u64,
}

/// What may be collections of garbage among the events of one GPU.
#[derive(Debug, Default)]
pub(super) struct Collections {
    /// Since the last event of the program.
    open: Release,
    found: Vec<Release>,
}

impl Collections {
    /// Takes the next event, before which so much was reserved.
    pub(super) fn take(&mut self, event: &Event, reserved: i128) {
        match event.action {
            Action::SegmentFree => {
                if self.open.segments.is_empty() {
                    self.open.reserved = reserved;
                }
                self.open.segments.push((event.bytes, event.stream));
            }
            Action::SegmentAlloc => self.open.taken = event.bytes,
            // Parts of expandable segments are not collected.
            Action::SegmentMap | Action::SegmentUnmap | Action::FreeCompleted => {}
            action => {
                let open = std::mem::take(&mut self.open);
                if action == Action::Alloc && open.taken > 0 && !open.segments.is_empty() {
                    self.found.push(Release { requested: event.bytes, stream: event.stream, ..open });
                }
            }
        }
    }

    /// What they say where so many bytes were reserved before the first event and at the peak.
    pub(super) fn limit(&self, known: Option<(i128, u64)>, settings: &CachingSettings) -> LimitBound {
        if settings.garbage_collection_threshold <= 0.0 {
            return LimitBound::None;
        }
        let rules = Rules::pytorch(settings);
        let mut collections = self.found.iter().filter(|release| release.may_be_collection(&rules)).peekable();
        let Some((start, peak)) = known else {
            return collections.peek().map_or(LimitBound::None, |_| LimitBound::Unknown);
        };
        let below = collections.map(|release| {
            let reserved = u64::try_from(start + release.reserved).unwrap_or(0);
            release.limit_below(reserved, settings)
        });
        // What says that there was less than was reserved was a call of `empty_cache`.
        below.filter(|below| *below > peak).min().map_or(LimitBound::None, LimitBound::Below)
    }
}

impl Release {
    /// Whether garbage collection can have done it: it leaves the segments of the small pool alone, and a segment that would have
    /// served the request was found before.
    fn may_be_collection(&self, rules: &Rules) -> bool {
        let rounded = rules.rounded(self.requested);
        self.segments.iter().all(|&(bytes, stream)| {
            let serves = stream == self.stream && self.taken > SMALL_SEGMENT && rules.serves(bytes, rounded);
            bytes > SMALL_SEGMENT && !serves
        })
    }

    /// The limit was less than this when so many bytes were reserved before.
    fn limit_below(&self, reserved: u64, settings: &CachingSettings) -> u64 {
        // CAST: bytes of a device, below 2^53; the fraction is dropped.
        let by_threshold = (reserved as f64 / settings.garbage_collection_threshold) as u64;
        // Segments of that size go back for another reason as well: with the new one the limit would be passed.
        let oversize = |bound: u64| self.segments.iter().all(|(bytes, _)| *bytes >= bound);
        match settings.max_split_size.is_some_and(oversize) {
            true => by_threshold.max(reserved.saturating_add(self.taken)),
            false => by_threshold,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Levels;

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

    const MIB: u64 = 1 << 20;

    /// What the collections say, where `start` bytes were reserved before the first event.
    fn limit(events: &[(Action, u64)], start: Option<i128>, settings: &CachingSettings) -> LimitBound {
        let mut levels = Levels::new(None);
        for (action, mib) in events {
            levels.take(&Event { action: *action, device: 0, addr: 1, bytes: mib * MIB, stream: 0, time_ns: 0 });
        }
        levels.limit_from(start, settings)
    }

    fn threshold(garbage_collection_threshold: f64) -> CachingSettings {
        CachingSettings { garbage_collection_threshold, ..CachingSettings::default() }
    }

    #[test]
    fn the_limit_is_below_what_each_collection_allows_and_above_the_peak() {
        use Action::{Alloc, SegmentAlloc, SegmentFree};
        let collect = |reserved: u64| [(SegmentAlloc, reserved - 20), (Alloc, 1), (SegmentAlloc, 20), (Alloc, 1)];
        let served = [(SegmentFree, 20), (SegmentAlloc, 30), (Alloc, 30)];
        let told = |events: &[(Action, u64)], threshold: f64| limit(events, Some(0), &self::threshold(threshold));
        let events = [&collect(60)[..], &served].concat();
        assert_eq!(told(&events, 0.5), LimitBound::Below(120 * MIB));
        assert_eq!(told(&events, 0.75), LimitBound::Below(80 * MIB));
        // 60 / 0.9 is less than the 70 that were reserved.
        assert_eq!(told(&events, 0.9), LimitBound::None);
        assert_eq!(told(&events, 0.0), LimitBound::None, "nothing is collected");
        // With 40 more from before.
        assert_eq!(limit(&events, Some(40 * 1024 * 1024), &threshold(0.5)), LimitBound::Below(200 * MIB));
        assert_eq!(limit(&events, None, &threshold(0.5)), LimitBound::Unknown);
        // What would have served the request was gone before it; so was what collections leave alone.
        for released in [30, 2] {
            let events = [&collect(60)[..], &[(SegmentFree, released), (SegmentAlloc, 30), (Alloc, 30)]].concat();
            assert_eq!(told(&events, 0.5), LimitBound::None, "{released}");
        }
        // Nothing new was needed, so nothing was collected for it.
        let events = [&collect(60)[..], &[(SegmentFree, 20), (Alloc, 1)]].concat();
        assert_eq!(told(&events, 0.5), LimitBound::None);
    }

    #[test]
    fn oversize_segments_go_back_at_the_limit_too() {
        use Action::{Alloc, SegmentAlloc, SegmentFree};
        let events = [(SegmentAlloc, 80), (Alloc, 80), (SegmentFree, 40), (SegmentAlloc, 60), (Alloc, 60)];
        let told = |settings: CachingSettings| limit(&events, Some(0), &settings);
        assert_eq!(told(threshold(0.75)), LimitBound::Below(80 * MIB * 4 / 3));
        let split = CachingSettings { max_split_size: Some(32 * MIB), ..threshold(0.75) };
        assert_eq!(told(split), LimitBound::Below(140 * MIB));
    }
}
