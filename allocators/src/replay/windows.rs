//! What an allocator did inside one request: which frees it found completed, which segments went and came, and why.

use crate::backend::CachingSettings;
use crate::core::rounding::SMALL_SEGMENT;

/// A segment that came from the device or went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentEvent {
    /// First address.
    pub(super) addr: u64,
    /// Bytes.
    pub(super) bytes: u64,
    /// The operation inside which it happened.
    pub(super) op: u32,
    /// Whether it went back.
    pub(super) released: bool,
    /// Whether a device that refused is the only explanation, so that a replay has to refuse as well.
    pub(super) refused: bool,
}

/// The events between two of the client's.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Operations whose free completed, and whether a segment had gone back before.
    pub(super) completions: Vec<(u32, bool)>,
    /// Segments in order.
    pub(super) segments: Vec<SegmentEvent>,
    /// Bytes reserved before its first segment event.
    pub(super) reserved: u64,
}

/// The client's event that ends a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// An allocation: the window is a part of it, or of an `empty_cache` before it.
    Alloc,
    /// A refused allocation.
    Refused,
    /// Anything else, or the end of the history.
    Other,
}

/// Why segments went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// None did.
    Nothing,
    /// The client emptied the cache.
    Trim,
    /// Garbage collection or the release of oversize segments, after the usual look at pending frees.
    Collect,
    /// The limit refused, everything pending was waited for, and the cache was released.
    Retry,
    /// The device refused where no limit did.
    Device,
}

impl Window {
    pub(super) fn is_empty(&self) -> bool {
        self.completions.is_empty() && self.segments.is_empty()
    }

    /// Why segments went back in this window.
    pub(super) fn cause(&self, settings: &CachingSettings, end: End) -> Cause {
        let released = || self.segments.iter().filter(|segment| segment.released);
        if released().next().is_none() {
            return if end == End::Refused { Cause::Retry } else { Cause::Nothing };
        }
        let taken = self.segments.iter().rev().find(|segment| !segment.released).map(|segment| segment.bytes);
        let taken = match (end, taken) {
            (End::Refused, _) => return Cause::Retry,
            (End::Other, _) | (End::Alloc, None) => return Cause::Trim,
            (End::Alloc, Some(bytes)) => bytes,
        };
        let oversize = settings.max_split_size.is_some_and(|bound| released().all(|segment| segment.bytes >= bound));
        let Some(limit) = settings.memory_limit else {
            // Oversize segments go largest first and only as many as are needed; `empty_cache` goes smallest first.
            let sizes: Vec<u64> = released().map(|segment| segment.bytes).collect();
            let enough = sizes.iter().sum::<u64>() >= taken && sizes.windows(2).all(|pair| pair[0] >= pair[1]);
            return if oversize && enough { Cause::Device } else { Cause::Trim };
        };
        // CAST: as PyTorch computes the threshold, in a double cut to an integer.
        let threshold = (settings.garbage_collection_threshold * limit as f64) as u64;
        let collects = settings.garbage_collection_threshold > 0.0 && self.reserved > threshold;
        let over = self.reserved.saturating_add(taken) > limit;
        if collects && released().all(|segment| segment.bytes > SMALL_SEGMENT) || over && oversize {
            Cause::Collect
        } else if over {
            Cause::Retry
        } else {
            Cause::Trim
        }
    }

    /// Whether each completed free was found by waiting for it, after no free block had fitted, and not by asking.
    pub(super) fn waited_for(&self, cause: Cause) -> impl Iterator<Item = (u32, bool)> + '_ {
        let some_after = self.completions.iter().any(|(_, after)| *after);
        self.completions.iter().map(move |&(op, after)| (op, after || cause == Cause::Retry && !some_after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn window(reserved: u64, sizes: &[i64]) -> Window {
        let segment = |&mib: &i64| SegmentEvent {
            addr: 1,
            bytes: mib.unsigned_abs() * MIB,
            op: 0,
            released: mib < 0,
            refused: false,
        };
        Window {
            completions: vec![(0, false)],
            segments: sizes.iter().map(segment).collect(),
            reserved: reserved * MIB,
        }
    }

    #[test]
    fn a_retry_needs_the_limit() {
        let limited = |mib: u64| CachingSettings { memory_limit: Some(mib * MIB), ..CachingSettings::default() };
        let retry = window(90, &[-20, 20]);
        assert_eq!(retry.cause(&limited(100), End::Alloc), Cause::Retry);
        assert_eq!(retry.cause(&limited(110), End::Alloc), Cause::Trim);
        assert_eq!(retry.cause(&CachingSettings::default(), End::Alloc), Cause::Trim);
        assert_eq!(retry.cause(&limited(100), End::Other), Cause::Trim);
        assert_eq!(window(90, &[-20]).cause(&limited(100), End::Alloc), Cause::Trim);
        assert_eq!(window(90, &[20]).cause(&limited(100), End::Alloc), Cause::Nothing);
        assert_eq!(window(90, &[-20]).cause(&CachingSettings::default(), End::Refused), Cause::Retry);
    }

    #[test]
    fn collection_and_oversize_release_are_told_apart_from_a_retry() {
        let collects = CachingSettings {
            memory_limit: Some(100 * MIB),
            garbage_collection_threshold: 0.5,
            ..CachingSettings::default()
        };
        assert_eq!(window(60, &[-20, 20]).cause(&collects, End::Alloc), Cause::Collect);
        assert_eq!(window(60, &[-20, -2, 20]).cause(&collects, End::Alloc), Cause::Trim);
        assert_eq!(window(90, &[-20, -2, 20]).cause(&collects, End::Alloc), Cause::Retry);
        let oversize = CachingSettings { max_split_size: Some(30 * MIB), ..CachingSettings::default() };
        assert_eq!(window(60, &[-40, -30, 60]).cause(&oversize, End::Alloc), Cause::Device);
        assert_eq!(window(60, &[-30, -40, 60]).cause(&oversize, End::Alloc), Cause::Trim);
    }

    #[test]
    fn in_a_retry_frees_complete_by_waiting() {
        let mut window = window(90, &[-20, 20]);
        assert_eq!(window.waited_for(Cause::Retry).collect::<Vec<_>>(), [(0, true)]);
        assert_eq!(window.waited_for(Cause::Collect).collect::<Vec<_>>(), [(0, false)]);
        // A free that completed after a segment had gone was waited for, so the one before it was not.
        window.completions.push((1, true));
        assert_eq!(window.waited_for(Cause::Retry).collect::<Vec<_>>(), [(0, false), (1, true)]);
    }
}
