//! Which memory limit a recorded program had, as its garbage collections tell.
//!
//! With `garbage_collection_threshold` PyTorch gives idle segments back right before it takes a new one, but only under a limit
//! and while more is reserved than that share of it. So each such collection says that the limit is lower than what was reserved
//! then, divided by the threshold; and it is at least the peak.

use super::Rules;
use crate::formats::{Action, Event};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

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
#[derive(Clone, Debug, Default)]
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
    use super::super::Levels;
    use super::*;

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
