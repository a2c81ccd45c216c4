//! Which memory limit a recorded program had, as its garbage collections tell.
//!
//! With `garbage_collection_threshold` PyTorch gives idle segments back right before it takes a new one, but only under a limit
//! and while more is reserved than that share of it. So each such collection says that the limit is lower than what was reserved
//! then, divided by the threshold; and it is at least the peak.

use vramlab::backends::CachingSettings;
use vramlab::histories::trace::{Action, Event, Summary};
use vramlab::policy::size::torch::{SMALL_SEGMENT, round_size};

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

/// Finds them among the events of one GPU.
#[derive(Debug)]
pub(super) struct Collections {
    gpu: Option<u16>,
    reserved: i128,
    highest: i128,
    lowest: i128,
    /// Since the last event of the program.
    open: Release,
    found: Vec<Release>,
}

impl Collections {
    pub(super) fn new(gpu: Option<u16>) -> Self {
        Self { gpu, reserved: 0, highest: 0, lowest: 0, open: Release::default(), found: Vec::new() }
    }

    pub(super) fn take(&mut self, event: &Event) {
        if self.gpu.is_some_and(|gpu| gpu != event.device) {
            return;
        }
        let bytes = i128::from(event.bytes);
        match event.action {
            Action::SegmentFree => {
                if self.open.segments.is_empty() {
                    self.open.reserved = self.reserved;
                }
                self.open.segments.push((event.bytes, event.stream));
                self.reserved -= bytes;
            }
            Action::SegmentAlloc => {
                self.open.taken = event.bytes;
                self.reserved += bytes;
            }
            // Parts of expandable segments are not collected.
            Action::SegmentMap => self.reserved += bytes,
            Action::SegmentUnmap => self.reserved -= bytes,
            Action::FreeCompleted => {}
            action => {
                let open = std::mem::take(&mut self.open);
                if action == Action::Alloc && open.taken > 0 && !open.segments.is_empty() {
                    self.found.push(Release { requested: event.bytes, stream: event.stream, ..open });
                }
            }
        }
        self.highest = self.highest.max(self.reserved);
        self.lowest = self.lowest.min(self.reserved);
    }

    /// What the collections under `settings` say of the limit.
    pub(super) fn finish(self, summary: &Summary, settings: &CachingSettings) -> LimitTold {
        let mine = |device: u16| self.gpu.is_none_or(|gpu| gpu == device);
        let held = summary
            .ending()
            .map(|held| i128::from(held.iter().filter(|one| mine(one.device)).map(|one| one.total_size).sum::<u64>()));
        let start = held.map(|held| held - self.reserved).filter(|start| start + self.lowest >= 0);
        self.told(start, settings)
    }

    /// The same where `start` bytes were reserved before the first event.
    fn told(&self, start: Option<i128>, settings: &CachingSettings) -> LimitTold {
        if settings.garbage_collection_threshold <= 0.0 {
            return LimitTold::Nothing;
        }
        let mut collections = self.found.iter().filter(|release| release.may_be_collection(settings)).peekable();
        let Some(start) = start else {
            return collections.peek().map_or(LimitTold::Nothing, |_| LimitTold::Some);
        };
        let reserved = |sum: i128| u64::try_from(start + sum).unwrap_or(0);
        let peak = reserved(self.highest);
        let below = collections.map(|release| release.limit_below(reserved(release.reserved), settings));
        // What says that there was less than was reserved was a call of `empty_cache`.
        below.filter(|below| *below > peak).min().map_or(LimitTold::Nothing, LimitTold::Below)
    }
}

/// What a history's garbage collections tell of the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LimitTold {
    /// There are none.
    #[default]
    Nothing,
    /// There was one, which cannot be computed, because the history does not say how much was reserved.
    Some,
    /// It was less than this.
    Below(u64),
}

impl Release {
    /// Whether garbage collection can have done it: it leaves the segments of the small pool alone, and a segment that would have
    /// served the request was found before.
    fn may_be_collection(&self, settings: &CachingSettings) -> bool {
        let rounded = round_size(self.requested, &settings.roundup_power2_divisions);
        let max_split = settings.max_split_size.unwrap_or(u64::MAX);
        self.segments.iter().all(|&(bytes, stream)| {
            let serves = stream == self.stream
                && self.taken > SMALL_SEGMENT
                && bytes >= rounded
                && (bytes < max_split || rounded >= max_split && bytes < rounded + settings.max_non_split_rounding);
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

    const MIB: u64 = 1 << 20;

    fn collections(events: &[(Action, u64)]) -> Collections {
        let mut out = Collections::new(None);
        for (action, mib) in events {
            out.take(&Event { action: *action, device: 0, addr: 1, bytes: mib * MIB, stream: 0, time_ns: 0 });
        }
        out
    }

    fn threshold(garbage_collection_threshold: f64) -> CachingSettings {
        CachingSettings { garbage_collection_threshold, ..CachingSettings::default() }
    }

    #[test]
    fn the_limit_is_below_what_each_collection_allows_and_above_the_peak() {
        use Action::{Alloc, SegmentAlloc, SegmentFree};
        let collect = |reserved: u64| [(SegmentAlloc, reserved - 20), (Alloc, 1), (SegmentAlloc, 20), (Alloc, 1)];
        let served = [(SegmentFree, 20), (SegmentAlloc, 30), (Alloc, 30)];
        let told =
            |events: &[(Action, u64)], threshold: f64| collections(events).told(Some(0), &self::threshold(threshold));
        let events = [&collect(60)[..], &served].concat();
        assert_eq!(told(&events, 0.5), LimitTold::Below(120 * MIB));
        assert_eq!(told(&events, 0.75), LimitTold::Below(80 * MIB));
        // 60 / 0.9 is less than the 70 that were reserved.
        assert_eq!(told(&events, 0.9), LimitTold::Nothing);
        assert_eq!(told(&events, 0.0), LimitTold::Nothing, "nothing is collected");
        // With 40 more from before.
        assert_eq!(collections(&events).told(Some(40 * 1024 * 1024), &threshold(0.5)), LimitTold::Below(200 * MIB));
        assert_eq!(collections(&events).told(None, &threshold(0.5)), LimitTold::Some);
        // What would have served the request was gone before it; so was what collections leave alone.
        for released in [30, 2] {
            let events = [&collect(60)[..], &[(SegmentFree, released), (SegmentAlloc, 30), (Alloc, 30)]].concat();
            assert_eq!(told(&events, 0.5), LimitTold::Nothing, "{released}");
        }
        // Nothing new was needed, so nothing was collected for it.
        let events = [&collect(60)[..], &[(SegmentFree, 20), (Alloc, 1)]].concat();
        assert_eq!(told(&events, 0.5), LimitTold::Nothing);
    }

    #[test]
    fn oversize_segments_go_back_at_the_limit_too() {
        use Action::{Alloc, SegmentAlloc, SegmentFree};
        let events = [(SegmentAlloc, 80), (Alloc, 80), (SegmentFree, 40), (SegmentAlloc, 60), (Alloc, 60)];
        let told = |settings: CachingSettings| collections(&events).told(Some(0), &settings);
        assert_eq!(told(threshold(0.75)), LimitTold::Below(80 * MIB * 4 / 3));
        let split = CachingSettings { max_split_size: Some(32 * MIB), ..threshold(0.75) };
        assert_eq!(told(split), LimitTold::Below(140 * MIB));
    }
}
