//! The memory limit of a recorded program, inferred from its garbage collections.
//!
//! With `garbage_collection_threshold` PyTorch releases idle segments right before it allocates one, but only under a limit and
//! while more than that share of the limit is reserved. So each collection shows that the limit is below the bytes reserved then
//! divided by the threshold; it is at least the peak.

use super::Rules;
use crate::formats::{Action, Event};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

/// Bound on the limit from garbage collections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LimitBound {
    /// There are no collections.
    #[default]
    None,
    /// There was a collection, and so a limit, but the reserved bytes are unknown.
    Unknown,
    /// The limit was below this.
    Below(u64),
}

/// Segments released right before a request allocated a new one.
#[derive(Clone, Debug, Default)]
struct Release {
    /// Bytes reserved before the release, relative to the start of the recording.
    reserved: i128,
    /// Bytes and stream of each segment, in order.
    segments: Vec<(u64, u64)>,
    /// Bytes of the new segment.
    taken: u64,
    /// Requested bytes.
    requested: u64,
    stream: u64,
}

/// Possible garbage collections among the events of one GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Collections {
    /// Segments released since the last event of the program.
    open: Release,
    releases: Vec<Release>,
}

impl Collections {
    /// Takes the next event, with the reserved bytes before it.
    pub(super) fn take(&mut self, event: &Event, reserved: i128) {
        match event.action {
            Action::SegmentFree => {
                if self.open.segments.is_empty() {
                    self.open.reserved = reserved;
                }
                self.open.segments.push((event.bytes, event.stream));
            }
            Action::SegmentAlloc => self.open.taken = event.bytes,
            // Mapped ranges of expandable segments are not collected.
            Action::SegmentMap | Action::SegmentUnmap | Action::FreeCompleted => {}
            action => {
                let open = std::mem::take(&mut self.open);
                if action == Action::Alloc && open.taken > 0 && !open.segments.is_empty() {
                    self.releases.push(Release { requested: event.bytes, stream: event.stream, ..open });
                }
            }
        }
    }

    /// The bound, given the bytes reserved before recording started and at the peak.
    pub(super) fn limit(&self, known: Option<(i128, u64)>, settings: &CachingSettings) -> LimitBound {
        if settings.garbage_collection_threshold <= 0.0 {
            return LimitBound::None;
        }
        let rules = Rules::pytorch(settings);
        let mut collections = self.releases.iter().filter(|release| release.may_be_collection(&rules)).peekable();
        let Some((start, peak)) = known else {
            return collections.peek().map_or(LimitBound::None, |_| LimitBound::Unknown);
        };
        let below = collections.map(|release| {
            let reserved = u64::try_from(start + release.reserved).unwrap_or(0);
            release.limit_below(reserved, settings)
        });
        // A release that implies a limit below the peak was a call of `empty_cache`.
        below.filter(|below| *below > peak).min().map_or(LimitBound::None, LimitBound::Below)
    }
}

impl Release {
    /// Whether it can be a garbage collection, which spares segments of the small pool. A segment that would have served the
    /// request would have been used instead.
    fn may_be_collection(&self, rules: &Rules) -> bool {
        let rounded = rules.rounded(self.requested);
        self.segments.iter().all(|&(bytes, stream)| {
            let serves = stream == self.stream && self.taken > SMALL_SEGMENT && rules.serves(bytes, rounded);
            bytes > SMALL_SEGMENT && !serves
        })
    }

    /// The limit was below this, given the bytes reserved before.
    fn limit_below(&self, reserved: u64, settings: &CachingSettings) -> u64 {
        // CAST: bytes of a device, below 2^53; the fraction is dropped.
        let by_threshold = (reserved as f64 / settings.garbage_collection_threshold) as u64;
        // Segments of that size are also released for another reason: with the new segment the limit would be exceeded.
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

    /// The bound from collections, with `start` bytes reserved before recording started.
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
    fn limit_is_below_each_collection_and_above_the_peak() {
        use Action::{Alloc, SegmentAlloc, SegmentFree};
        let collect = |reserved: u64| [(SegmentAlloc, reserved - 20), (Alloc, 1), (SegmentAlloc, 20), (Alloc, 1)];
        let served = [(SegmentFree, 20), (SegmentAlloc, 30), (Alloc, 30)];
        let bound = |events: &[(Action, u64)], threshold: f64| limit(events, Some(0), &self::threshold(threshold));
        let events = [&collect(60)[..], &served].concat();
        assert_eq!(bound(&events, 0.5), LimitBound::Below(120 * MIB));
        assert_eq!(bound(&events, 0.75), LimitBound::Below(80 * MIB));
        // 60 / 0.9 is below the 70 that were reserved.
        assert_eq!(bound(&events, 0.9), LimitBound::None);
        assert_eq!(bound(&events, 0.0), LimitBound::None, "nothing is collected");
        // With 40 more from before recording started.
        assert_eq!(limit(&events, Some(40 * 1024 * 1024), &threshold(0.5)), LimitBound::Below(200 * MIB));
        assert_eq!(limit(&events, None, &threshold(0.5)), LimitBound::Unknown);
        // A segment that would have served the request was released before it, and collections spare small segments.
        for released in [30, 2] {
            let events = [&collect(60)[..], &[(SegmentFree, released), (SegmentAlloc, 30), (Alloc, 30)]].concat();
            assert_eq!(bound(&events, 0.5), LimitBound::None, "{released}");
        }
        // No segment was needed, so none was collected for it.
        let events = [&collect(60)[..], &[(SegmentFree, 20), (Alloc, 1)]].concat();
        assert_eq!(bound(&events, 0.5), LimitBound::None);
    }

    #[test]
    fn oversize_segments_go_back_at_the_limit_too() {
        use Action::{Alloc, SegmentAlloc, SegmentFree};
        let events = [(SegmentAlloc, 80), (Alloc, 80), (SegmentFree, 40), (SegmentAlloc, 60), (Alloc, 60)];
        let bound = |settings: CachingSettings| limit(&events, Some(0), &settings);
        assert_eq!(bound(threshold(0.75)), LimitBound::Below(80 * MIB * 4 / 3));
        let split = CachingSettings { max_split_size: Some(32 * MIB), ..threshold(0.75) };
        assert_eq!(bound(split), LimitBound::Below(140 * MIB));
    }
}
