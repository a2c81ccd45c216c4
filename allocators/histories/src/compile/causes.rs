//! What an allocator did inside one request: which frees it found completed, which segments went and came, and why.

use super::gaps::Gaps;
use crate::backends::CachingSettings;
use crate::contract::PoolKind;
use crate::policy::size::torch::{SMALL_SEGMENT, pool_of, round_size};
use crate::steps;

/// A segment that came from the device or went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentEvent {
    /// First address.
    pub(super) addr: u64,
    /// Bytes.
    pub(super) bytes: u64,
    /// Handle of its stream.
    pub(super) stream: u64,
    /// The pool of a part of an expandable segment; `None` for whole segments.
    pub(super) part: Option<PoolKind>,
    /// The operation inside which it happened.
    pub(super) op: u32,
    /// Whether it went back.
    pub(super) released: bool,
    /// Whether a device that refused is the only explanation, so that a replay has to refuse as well.
    pub(super) refused: bool,
}

/// A free that completed later than it was requested.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    /// The operation that requested it.
    pub(super) op: u32,
    /// Address of the block.
    pub(super) addr: u64,
    /// Bytes asked for.
    pub(super) bytes: u64,
    /// Size, where the history shows the block's segment: a request may get more than it asked for.
    pub(super) size: Option<u64>,
    /// Handle of its stream.
    pub(super) stream: u64,
    /// Whether a segment had gone back before.
    pub(super) after_release: bool,
}

/// The events between two of the client's.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Frees that completed.
    pub(super) completions: Vec<Completion>,
    /// The operation right before it, if that is a free which completed at once. It may as well have been held up and
    /// completed as the first event of this window.
    pub(super) before: Option<Completion>,
    /// Segments in order.
    pub(super) segments: Vec<SegmentEvent>,
    /// Bytes reserved before its first segment event.
    pub(super) reserved: u64,
    /// From how many reserved bytes on the device refused, where no limit is known and refused requests tell.
    pub(super) refused_from: Option<u64>,
    /// Whether a segment has gone back.
    pub(super) released: bool,
}

/// The client's event that ends a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// An allocation: the window is a part of it, or of an `empty_cache` before it.
    Alloc {
        /// Bytes asked for.
        bytes: u64,
        /// Handle of the stream.
        stream: u64,
    },
    /// A refused allocation: likewise.
    Refused {
        /// Bytes asked for.
        bytes: u64,
        /// Handle of the stream.
        stream: u64,
    },
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
    /// The same, but it was the device that refused.
    Full,
    /// The device refused where no limit did, and not everything was waited for.
    Device,
}

impl Window {
    /// Whether it may have been a call of `empty_cache`.
    pub(super) fn may_be_trim(&self, end: End) -> bool {
        end == End::Other || self.released
    }

    pub(super) fn is_empty(&self) -> bool {
        self.completions.is_empty() && self.segments.is_empty()
    }

    /// Whether the reason for which segments went back hangs on how large blocks were whose frees were held up.
    pub(super) fn asks_for_sizes(&self, end: End) -> bool {
        self.released && end != End::Other && !(self.completions.is_empty() && self.before.is_none())
    }

    /// Why segments went back in this window.
    pub(super) fn cause(&self, settings: &CachingSettings, end: End) -> Cause {
        let released = || self.segments.iter().filter(|segment| segment.released);
        if !self.released {
            return match end {
                End::Alloc { .. } => Cause::Nothing,
                End::Refused { .. } => Cause::Retry,
                // Only an allocation or `empty_cache` finds out that frees have completed.
                End::Other if self.completions.is_empty() => Cause::Nothing,
                End::Other => Cause::Trim,
            };
        }
        if self.segments.iter().any(|segment| segment.part.is_some()) {
            return self.cause_of_parts(settings, end);
        }
        let taken = self.segments.iter().rev().find(|segment| !segment.released).map(|segment| segment.bytes);
        let (serves_once_free, serves_by_waiting);
        let taken = match (end, taken) {
            (End::Other, _) | (End::Alloc { .. }, None) => return Cause::Trim,
            // Had one of the segments been there, the request would have got it: they were gone before.
            (End::Alloc { bytes, stream } | End::Refused { bytes, stream }, _)
                if self.could_have_served(settings, bytes, stream, true) =>
            {
                return Cause::Trim;
            }
            (End::Refused { .. }, _) => return Cause::Retry,
            (End::Alloc { bytes, stream }, Some(taken)) => {
                // Of a segment that stays such a block serves what comes after `empty_cache`.
                serves_by_waiting = self.held_up_fits(settings, bytes, stream, |done| !self.is_gone(done.addr));
                serves_once_free = self.could_have_served(settings, bytes, stream, false)
                    || self.held_up_fits(settings, bytes, stream, |_| true);
                taken
            }
        };
        let oversize = settings.max_split_size.is_some_and(|bound| released().all(|segment| segment.bytes >= bound));
        let Some(limit) = settings.memory_limit else {
            if settings.max_split_size.is_none() && (self.is_refused(taken) || serves_by_waiting) {
                return Cause::Full;
            }
            // Oversize segments go largest first and only as many as are needed; `empty_cache` goes smallest first.
            let sizes: Vec<u64> = released().map(|segment| segment.bytes).collect();
            let enough = sizes.iter().sum::<u64>() >= taken && sizes.windows(2).all(|pair| pair[0] >= pair[1]);
            return if oversize && enough { Cause::Device } else { Cause::Trim };
        };
        // CAST: as PyTorch computes the threshold, in a double cut to an integer.
        let threshold = (settings.garbage_collection_threshold * limit as f64) as u64;
        let collects = settings.garbage_collection_threshold > 0.0 && self.reserved > threshold;
        let over = self.reserved.saturating_add(taken) > limit;
        if over && serves_once_free {
            // Only because blocks were held up did they not serve the request, so they were waited for.
            Cause::Retry
        } else if collects && released().all(|segment| segment.bytes > SMALL_SEGMENT) || over && oversize {
            Cause::Collect
        } else if over {
            Cause::Retry
        } else {
            Cause::Trim
        }
    }

    /// Whether the device refused so many bytes more, as far as refused requests tell.
    pub(super) fn is_refused(&self, bytes: u64) -> bool {
        self.refused_from.is_some_and(|least| self.reserved.saturating_add(bytes) >= least)
    }

    /// Whether a free part of a segment that went back would have fitted a request, when the blocks that were held up
    /// count as in use or as free.
    fn could_have_served(&self, settings: &CachingSettings, bytes: u64, stream: u64, in_use: bool) -> bool {
        let round = |bytes: u64| round_size(bytes, &settings.roundup_power2_divisions);
        let rounded = round(bytes);
        let small = pool_of(rounded) == PoolKind::Small;
        let max_split = settings.max_split_size.unwrap_or(u64::MAX);
        // Blocks that were held up lay between the free parts of segments. One that may have been counts among them: if
        // nothing else served the request, a retry does what the client would have done, whether that block was free
        // or not.
        let held_up = self.completions.iter().chain(&self.before).filter(|_| in_use);
        let gaps = Gaps::between(held_up.map(|done| (done.addr, done.addr + done.size.unwrap_or(round(done.bytes)))));
        self.segments.iter().filter(|segment| segment.released).any(|segment| {
            steps::count(1);
            let room = gaps.largest_in(segment.addr, segment.addr + segment.bytes);
            segment.stream == stream
                && (segment.bytes == SMALL_SEGMENT) == small
                && room >= rounded
                // Oversize blocks serve only requests of about their size.
                && (room < max_split || rounded >= max_split && room < rounded + settings.max_non_split_rounding)
        })
    }

    /// Whether an address lies in a segment that went back.
    pub(super) fn is_gone(&self, addr: u64) -> bool {
        let mut gone = self.segments.iter().filter(|segment| segment.released);
        gone.any(|segment| addr >= segment.addr && addr - segment.addr < segment.bytes)
    }

    /// Whether one of the blocks that were held up would have fitted a request.
    pub(super) fn held_up_fits(
        &self,
        settings: &CachingSettings,
        bytes: u64,
        stream: u64,
        mut asked: impl FnMut(&Completion) -> bool,
    ) -> bool {
        let round = |bytes: u64| round_size(bytes, &settings.roundup_power2_divisions);
        let rounded = round(bytes);
        self.completions.iter().any(|done| {
            steps::count(1);
            let size = done.size.unwrap_or(round(done.bytes));
            asked(done)
                && done.stream == stream
                && pool_of(round(done.bytes)) == pool_of(rounded)
                && size >= rounded
                && settings.max_split_size.is_none_or(|bound| size < bound)
        })
    }

    /// Whether each completed free was found by waiting for it, after no free block had fitted, and not by asking.
    pub(super) fn waited_for(&self, cause: Cause) -> impl Iterator<Item = (u32, bool)> + '_ {
        let some_after = self.completions.iter().any(|done| done.after_release);
        let retry = matches!(cause, Cause::Retry | Cause::Full) && !some_after;
        self.completions.iter().map(move |done| (done.op, done.after_release || retry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// A request that no segment of the tests' windows could have served.
    const ALLOC: End = End::Alloc { bytes: 100 * MIB, stream: 0 };

    fn window(reserved: u64, sizes: &[i64]) -> Window {
        let segment = |&mib: &i64| SegmentEvent {
            addr: 1 << 40,
            bytes: mib.unsigned_abs() * MIB,
            stream: 0,
            part: None,
            op: 0,
            released: mib < 0,
            refused: false,
        };
        Window {
            completions: vec![Completion { op: 0, addr: 1, bytes: 512, size: None, stream: 0, after_release: false }],
            before: None,
            segments: sizes.iter().map(segment).collect(),
            reserved: reserved * MIB,
            refused_from: None,
            released: sizes.iter().any(|mib| *mib < 0),
        }
    }

    #[test]
    fn a_retry_needs_the_limit() {
        let limited = |mib: u64| CachingSettings { memory_limit: Some(mib * MIB), ..CachingSettings::default() };
        let retry = window(90, &[-20, 20]);
        assert_eq!(retry.cause(&limited(100), ALLOC), Cause::Retry);
        assert_eq!(retry.cause(&limited(110), ALLOC), Cause::Trim);
        assert_eq!(retry.cause(&CachingSettings::default(), ALLOC), Cause::Trim);
        assert_eq!(retry.cause(&limited(100), End::Other), Cause::Trim);
        assert_eq!(window(90, &[-20]).cause(&limited(100), ALLOC), Cause::Trim);
        assert_eq!(window(90, &[20]).cause(&limited(100), ALLOC), Cause::Nothing);
        assert_eq!(
            window(90, &[-20]).cause(&CachingSettings::default(), End::Refused { bytes: 100 * MIB, stream: 0 }),
            Cause::Retry
        );
    }

    #[test]
    fn refused_requests_tell_a_retry_on_a_full_device() {
        let settings = CachingSettings::default();
        let told = |mib: u64| Window { refused_from: Some(mib * MIB), ..window(90, &[-20, 20]) };
        assert_eq!(told(110).cause(&settings, ALLOC), Cause::Full);
        assert_eq!(told(111).cause(&settings, ALLOC), Cause::Trim, "the device had that much");
        let fits = End::Alloc { bytes: 20 * MIB, stream: 0 };
        assert_eq!(told(110).cause(&settings, fits), Cause::Trim, "what went back would have served it");
        // A block of a segment that stays, which is free now, would have served it after `empty_cache`.
        let mut waited = window(90, &[-20, 20]);
        waited.completions[0] = Completion { addr: 1 << 41, bytes: 30 * MIB, ..waited.completions[0] };
        let cause = |window: &Window, mib: u64| window.cause(&settings, End::Alloc { bytes: mib * MIB, stream: 0 });
        assert_eq!((cause(&waited, 30), cause(&waited, 31)), (Cause::Full, Cause::Trim));
        waited.completions[0].addr = 1 << 40;
        assert_eq!(cause(&waited, 30), Cause::Trim, "it went with its segment");
        // All that was pending is waited for, as in a retry under a limit.
        assert_eq!(told(110).waited_for(Cause::Full).collect::<Vec<_>>(), [(0, true)]);
    }

    #[test]
    fn what_would_have_fitted_was_gone_before() {
        let settings = CachingSettings { memory_limit: Some(100 * MIB), ..CachingSettings::default() };
        let window = window(90, &[-20, 20]);
        let cause = |bytes, stream| window.cause(&settings, End::Alloc { bytes, stream });
        assert_eq!(cause(20 * MIB, 0), Cause::Trim);
        assert_eq!(cause(20 * MIB + 1, 0), Cause::Retry);
        assert_eq!(cause(20 * MIB, 1), Cause::Retry, "another stream's");
        assert_eq!(cause(MIB, 0), Cause::Retry, "the other pool's");
        let mut window = window;
        window.completions[0].addr = (1 << 40) + 5 * MIB;
        let cause = |bytes| window.cause(&settings, End::Alloc { bytes, stream: 0 });
        assert_eq!(cause(16 * MIB), Cause::Retry, "a block in it was held up");
        assert_eq!(cause(14 * MIB), Cause::Trim, "there was room behind that block");
        window.completions[0].size = Some(MIB + 512);
        let cause = |bytes| window.cause(&settings, End::Alloc { bytes, stream: 0 });
        assert_eq!(cause(14 * MIB), Cause::Retry, "that block was larger than what was asked for");
        assert_eq!(cause(13 * MIB), Cause::Trim, "there was room behind it all the same");
    }

    #[test]
    fn a_free_right_before_may_have_been_held_up() {
        let settings = CachingSettings { memory_limit: Some(100 * MIB), ..CachingSettings::default() };
        let mut window = window(90, &[-20, 20]);
        let freed = |at: u64, mib: u64| {
            Some(Completion {
                op: 0,
                addr: (1 << 40) + at * MIB,
                bytes: mib * MIB,
                size: None,
                stream: 0,
                after_release: false,
            })
        };
        let cause = |window: &Window, mib: u64, limit: u64| {
            let settings = CachingSettings { memory_limit: Some(limit * MIB), ..settings };
            window.cause(&settings, End::Alloc { bytes: mib * MIB, stream: 0 })
        };
        window.before = freed(0, 20);
        assert_eq!(cause(&window, 14, 100), Cause::Retry, "its segment was of no use before");
        assert_eq!(cause(&window, 14, 110), Cause::Trim, "the limit allowed a segment");
        window.before = freed(0, 5);
        assert_eq!(cause(&window, 14, 100), Cause::Trim, "there was room behind that block");
        assert_eq!(window.cause(&settings, End::Refused { bytes: 18 * MIB, stream: 0 }), Cause::Retry);
    }

    #[test]
    fn collection_and_oversize_release_are_told_apart_from_a_retry() {
        let collects = CachingSettings {
            memory_limit: Some(100 * MIB),
            garbage_collection_threshold: 0.5,
            ..CachingSettings::default()
        };
        assert_eq!(window(60, &[-20, 20]).cause(&collects, ALLOC), Cause::Collect);
        assert_eq!(window(60, &[-20, -2, 20]).cause(&collects, ALLOC), Cause::Trim);
        assert_eq!(window(90, &[-20, -2, 20]).cause(&collects, ALLOC), Cause::Retry);
        let oversize = CachingSettings { max_split_size: Some(30 * MIB), ..CachingSettings::default() };
        assert_eq!(window(60, &[-40, -30, 60]).cause(&oversize, ALLOC), Cause::Device);
        assert_eq!(window(60, &[-30, -40, 60]).cause(&oversize, ALLOC), Cause::Trim);
    }

    #[test]
    fn in_a_retry_frees_complete_by_waiting() {
        let mut window = window(90, &[-20, 20]);
        assert_eq!(window.waited_for(Cause::Retry).collect::<Vec<_>>(), [(0, true)]);
        assert_eq!(window.waited_for(Cause::Collect).collect::<Vec<_>>(), [(0, false)]);
        // A free that completed after a segment had gone was waited for, so the one before it was not.
        window.completions.push(Completion { op: 1, addr: 1, bytes: 512, size: None, stream: 0, after_release: true });
        assert_eq!(window.waited_for(Cause::Retry).collect::<Vec<_>>(), [(0, false), (1, true)]);
    }
}
