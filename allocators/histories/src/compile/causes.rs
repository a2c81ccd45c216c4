//! Why segments were released: a call of `empty_cache`, or an allocation that needed memory.

use super::timeline::Timeline;
use super::windows::{Cause, ClosedWindow, Completion, End, Window};
use crate::history::{Kind, Release, SegmentEvent};
use crate::memory::Rules;
use crate::steps;
use std::collections::BTreeSet;
use vramlab_device::ranges::Ranges;
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::policy::size::torch::{SMALL_SEGMENT, pool_of, segment_size};

/// The recorded device and its streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordedDevice {
    /// Bytes reserved before recording started.
    pub(super) reserved: u64,
    /// The size from which the device refused, if failed requests show it.
    pub(super) refused_from: Option<u64>,
    /// Whether the recording shows another stream that may delay a free.
    pub(super) delays: bool,
}

/// Decides for each closed window why segments were released. Writes the result into the timeline, adds frees of blocks that were
/// pending to `deferred`, and returns the retried requests in order.
pub(super) fn decide(
    windows: Vec<ClosedWindow>,
    settings: &CachingSettings,
    device: RecordedDevice,
    timeline: &mut Timeline,
    deferred: &mut Vec<u32>,
) -> Vec<u32> {
    let RecordedDevice { reserved, refused_from, delays } = device;
    let mut retries = Vec::new();
    for ClosedWindow { mut window, placeholder, first, end } in windows {
        window.reserved = window.reserved.wrapping_add(reserved);
        window.refused_from = refused_from.filter(|_| settings.memory_limit.is_none());
        if !delays {
            window.before = None;
        }
        if settings.garbage_collection_threshold > 0.0 || settings.max_split_size.is_some() {
            // The released segments depend on free blocks, so a free that seems to have completed immediately is taken to have
            // done so.
            window.before = None;
        }
        let cause = window.cause(settings, end);
        if let End::Alloc { bytes, stream } | End::Refused { bytes, stream } = end
            && !window.before_fits(settings, bytes, stream)
        {
            window.before = None;
        }
        let trims = cause == Cause::Trim;
        if trims {
            timeline.ops[placeholder as usize].set_kind(Kind::Trim);
        }
        if cause == Cause::Retry && window.released {
            retries.push(placeholder + 1);
        }
        window.complete(cause, if trims { placeholder } else { placeholder + 1 }, timeline, deferred);
        let count = window.segments.len();
        for segment in timeline.segments[first..first + count].iter_mut().filter(|segment| segment.released) {
            segment.refused = matches!(cause, Cause::Full | Cause::Device);
            if trims {
                segment.op = placeholder;
            }
        }
    }
    retries
}

/// Requests of a private pool never release cached segments: such a release was a call of `empty_cache` right before, with which
/// `torch.cuda.graph` begins. `retries` are operations, in order.
pub(super) fn empty_before_private_pools(retries: &[u32], timeline: &mut Timeline) {
    let of_private = |op: &&u32| {
        let op = timeline.ops[**op as usize];
        op.kind() == Kind::Alloc && op.pool() > 0
    };
    let requests: BTreeSet<u32> = retries.iter().filter(of_private).copied().collect();
    if requests.is_empty() {
        return;
    }
    for request in &requests {
        timeline.ops[*request as usize - 1].set_kind(Kind::Trim);
    }
    for op in timeline.ops.iter_mut().filter(|op| op.kind() == Kind::Release) {
        let release = op.release();
        if requests.contains(&release.ready) {
            op.set_release(Release { ready: release.ready - 1, ..release });
        }
    }
    for segment in timeline.segments.iter_mut().filter(|segment| segment.released && requests.contains(&segment.op)) {
        segment.op -= 1;
    }
}

/// The largest range of a segment without any of these blocks. O(log n), and one step for each block in it.
fn largest_gap(blocks: &Ranges, segment: &SegmentEvent) -> u64 {
    let gaps = blocks.missing(segment.addr, segment.end());
    steps::count(gaps.len());
    gaps.into_iter().map(|(start, end)| end - start).max().unwrap_or(0)
}

impl Window {
    /// Why segments were released in this window.
    pub(super) fn cause(&self, settings: &CachingSettings, end: End) -> Cause {
        let released = || self.segments.iter().filter(|segment| segment.released);
        if !self.released {
            return match end {
                End::Alloc { .. } => Cause::Nothing,
                End::Refused { .. } => Cause::Retry,
                // Only an allocation or `empty_cache` notices completed frees.
                End::Other if self.completions.is_empty() || self.waits_on => Cause::Nothing,
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
            // One of the segments would have served the request, so they were released before it.
            (End::Alloc { bytes, stream } | End::Refused { bytes, stream }, _)
                if self.could_have_served(settings, bytes, stream, true) =>
            {
                return Cause::Trim;
            }
            (End::Refused { .. }, _) => return Cause::Retry,
            (End::Alloc { bytes, stream }, Some(taken)) => {
                // A block of a retained segment also serves requests after `empty_cache`.
                serves_by_waiting =
                    self.held_up_fits(settings, bytes, stream, |completion| !self.is_released(completion.addr));
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
            // Oversize segments are released largest first and only as many as needed; `empty_cache` releases the smallest first.
            let sizes: Vec<u64> = released().map(|segment| segment.bytes).collect();
            let enough = sizes.iter().sum::<u64>() >= taken && sizes.windows(2).all(|pair| pair[0] >= pair[1]);
            // `empty_cache` would have waited for all frees.
            let collects = self.waits_on && settings.garbage_collection_threshold > 0.0;
            return match oversize && enough {
                true => Cause::Device,
                false if collects => Cause::Collect,
                false => Cause::Trim,
            };
        };
        // CAST: PyTorch computes the threshold as a double and truncates it.
        let threshold = (settings.garbage_collection_threshold * limit as f64) as u64;
        let collects = settings.garbage_collection_threshold > 0.0 && self.reserved > threshold;
        let over = self.reserved.saturating_add(taken) > limit;
        if over && serves_once_free {
            // Only pending blocks kept them from serving the request, so the allocator waited.
            Cause::Retry
        } else if collects && released().all(|segment| segment.bytes > SMALL_SEGMENT) || over && oversize {
            Cause::Collect
        } else if over {
            Cause::Retry
        } else {
            Cause::Trim
        }
    }

    /// Whether the device refused this many more bytes, as far as failed requests show.
    pub(super) fn is_refused(&self, bytes: u64) -> bool {
        self.refused_from.is_some_and(|least| self.reserved.saturating_add(bytes) >= least)
    }

    /// Whether a free range of a released segment would have fitted a request, with pending blocks counted as active or as free.
    fn could_have_served(&self, settings: &CachingSettings, bytes: u64, stream: u64, in_use: bool) -> bool {
        let rules = Rules::pytorch(settings);
        let rounded = rules.rounded(bytes);
        // Pending blocks separate the free ranges of segments. A block that may have been pending counts as one: if nothing else
        // served the request, a retry has the same effect as the client's call, whether that block was free or not.
        let held_up = if in_use { self.held_up(&rules) } else { Ranges::default() };
        self.segments.iter().filter(|segment| segment.released).any(|segment| {
            steps::count(1);
            let room = largest_gap(&held_up, segment);
            segment.stream == stream
                && segment.pool() == pool_of(rounded)
                // Oversize blocks serve only requests of similar size.
                && rules.serves(room, rounded)
        })
    }

    /// Ranges of blocks whose frees were pending, or may have been.
    fn held_up(&self, rules: &Rules) -> Ranges {
        let mut out = Ranges::default();
        for completion in self.completions.iter().chain(&self.before) {
            steps::count(1);
            out.insert(completion.addr, completion.addr + completion.size.unwrap_or(rules.rounded(completion.bytes)));
        }
        out
    }

    /// Whether an address is in a released segment.
    pub(super) fn is_released(&self, addr: u64) -> bool {
        let mut released = self.segments.iter().filter(|segment| segment.released);
        released.any(|segment| segment.contains(addr))
    }

    /// Whether one of the pending blocks would have fitted a request.
    pub(super) fn held_up_fits(
        &self,
        settings: &CachingSettings,
        bytes: u64,
        stream: u64,
        mut accepts: impl FnMut(&Completion) -> bool,
    ) -> bool {
        let rules = Rules::pytorch(settings);
        let rounded = rules.rounded(bytes);
        self.completions.iter().any(|completion| {
            steps::count(1);
            let size = completion.size.unwrap_or(rules.rounded(completion.bytes));
            accepts(completion)
                && completion.stream == stream
                && pool_of(rules.rounded(completion.bytes)) == pool_of(rounded)
                && size >= rounded
                && settings.max_split_size.is_none_or(|bound| size < bound)
        })
    }

    /// Whether the block of the free that precedes the window may be in a free range that fits a request: then it was pending, since
    /// the request did not get it.
    fn before_fits(&self, settings: &CachingSettings, bytes: u64, stream: u64) -> bool {
        self.before.is_some_and(|before| before.stream == stream)
            && self.before_room >= Rules::pytorch(settings).rounded(bytes)
    }

    /// Why ranges were unmapped in this window.
    pub(super) fn cause_of_parts(&self, settings: &CachingSettings, end: End) -> Cause {
        let (bytes, stream, otherwise) = match end {
            End::Other => return Cause::Trim,
            End::Alloc { bytes, stream } => (bytes, stream, Cause::Trim),
            End::Refused { bytes, stream } => (bytes, stream, Cause::Retry),
        };
        // The client does not empty the cache within a request: the device had memory for the first range and none for the next.
        if !self.segments[0].released {
            return Cause::Device;
        }
        let rules = Rules::pytorch(settings);
        let rounded = rules.rounded(bytes);
        // Blocks with pending frees separated the free ranges.
        let held_up = self.held_up(&rules);
        let fits = |part: &SegmentEvent| {
            part.released
                && part.stream == stream
                && part.part == Some(pool_of(rounded))
                && largest_gap(&held_up, part) >= rounded
        };
        // One of the ranges would have served the request, so they were unmapped before it.
        if settings.max_split_size.is_none() && self.segments.iter().any(fits) {
            return Cause::Trim;
        }
        // After `empty_cache` a retained block would have served the request, and nothing would have been mapped.
        let serves_by_waiting = self.segments.iter().any(|part| !part.released)
            && settings.max_split_size.is_none()
            && self.held_up_fits(settings, bytes, stream, |completion| !self.is_released(completion.addr));
        let over = |limit: u64| self.reserved.saturating_add(segment_size(rounded)) > limit;
        match settings.memory_limit {
            Some(limit) if over(limit) => Cause::Retry,
            None if otherwise == Cause::Trim && (serves_by_waiting || self.is_refused(segment_size(rounded))) => {
                Cause::Full
            }
            _ => otherwise,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab_policies::contract::PoolKind;

    const MIB: u64 = 1 << 20;
    /// A request that no segment of the tests' windows could serve.
    const ALLOC: End = End::Alloc { bytes: 100 * MIB, stream: 0 };

    fn window(reserved: u64, sizes: &[i64]) -> Window {
        let segment =
            |&mib: &i64| SegmentEvent { released: mib < 0, ..SegmentEvent::made(1 << 40, mib.unsigned_abs() * MIB, 0) };
        Window {
            completions: vec![Completion { op: 0, addr: 1, bytes: 512, size: None, stream: 0, after_release: false }],
            before: None,
            before_room: 0,
            segments: sizes.iter().map(segment).collect(),
            reserved: reserved * MIB,
            refused_from: None,
            released: sizes.iter().any(|mib| *mib < 0),
            waits_on: false,
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
    fn empty_cache_leaves_no_free_waiting() {
        let completed =
            |waits_on| Window { waits_on, ..window(90, &[]) }.cause(&CachingSettings::default(), End::Other);
        assert_eq!((completed(false), completed(true)), (Cause::Trim, Cause::Nothing));
    }

    #[test]
    fn refused_requests_tell_a_retry_on_a_full_device() {
        let settings = CachingSettings::default();
        let full_from = |mib: u64| Window { refused_from: Some(mib * MIB), ..window(90, &[-20, 20]) };
        assert_eq!(full_from(110).cause(&settings, ALLOC), Cause::Full);
        assert_eq!(full_from(111).cause(&settings, ALLOC), Cause::Trim, "the device had that much free");
        let fits = End::Alloc { bytes: 20 * MIB, stream: 0 };
        assert_eq!(full_from(110).cause(&settings, fits), Cause::Trim, "the released segment would have served it");
        // A free block of a retained segment would have served it after `empty_cache`.
        let mut waited = window(90, &[-20, 20]);
        waited.completions[0] = Completion { addr: 1 << 41, bytes: 30 * MIB, ..waited.completions[0] };
        let cause = |window: &Window, mib: u64| window.cause(&settings, End::Alloc { bytes: mib * MIB, stream: 0 });
        assert_eq!((cause(&waited, 30), cause(&waited, 31)), (Cause::Full, Cause::Trim));
        waited.completions[0].addr = 1 << 40;
        assert_eq!(cause(&waited, 30), Cause::Trim, "it was released with its segment");
        // All pending frees are waited for, as in a retry under a limit.
        assert_eq!(full_from(110).waited_for(Cause::Full).collect::<Vec<_>>(), [(0, true)]);
    }

    #[test]
    fn what_would_have_fitted_was_gone_before() {
        let settings = CachingSettings { memory_limit: Some(100 * MIB), ..CachingSettings::default() };
        let window = window(90, &[-20, 20]);
        let cause = |bytes, stream| window.cause(&settings, End::Alloc { bytes, stream });
        assert_eq!(cause(20 * MIB, 0), Cause::Trim);
        assert_eq!(cause(20 * MIB + 1, 0), Cause::Retry);
        assert_eq!(cause(20 * MIB, 1), Cause::Retry, "of another stream");
        assert_eq!(cause(MIB, 0), Cause::Retry, "of the other pool");
        let mut window = window;
        window.completions[0].addr = (1 << 40) + 5 * MIB;
        let cause = |bytes| window.cause(&settings, End::Alloc { bytes, stream: 0 });
        assert_eq!(cause(16 * MIB), Cause::Retry, "a block in it was pending");
        assert_eq!(cause(14 * MIB), Cause::Trim, "the block left enough room");
        window.completions[0].size = Some(MIB + 512);
        let cause = |bytes| window.cause(&settings, End::Alloc { bytes, stream: 0 });
        assert_eq!(cause(14 * MIB), Cause::Retry, "that block was larger than what was accepts for");
        assert_eq!(cause(13 * MIB), Cause::Trim, "the block still left enough room");
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
        assert_eq!(cause(&window, 14, 100), Cause::Retry, "its segment was not free before");
        assert_eq!(cause(&window, 14, 110), Cause::Trim, "the limit allowed a segment");
        window.before = freed(0, 5);
        assert_eq!(cause(&window, 14, 100), Cause::Trim, "the block left enough room");
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
        // The allocator waited for a free that completed after a release, so the earlier one was complete before.
        window.completions.push(Completion { op: 1, addr: 1, bytes: 512, size: None, stream: 0, after_release: true });
        assert_eq!(window.waited_for(Cause::Retry).collect::<Vec<_>>(), [(0, false), (1, true)]);
    }

    #[test]
    fn the_limit_counts_a_segment_of_the_native_policy() {
        let part = |mib: i64| SegmentEvent {
            released: mib < 0,
            ..SegmentEvent::made(1 << 40, mib.unsigned_abs() * MIB, 0).part_of(PoolKind::Large)
        };
        let window = |parts: &[i64]| Window {
            segments: parts.iter().map(|mib| part(*mib)).collect(),
            reserved: 80 * MIB,
            released: true,
            ..Window::default()
        };
        let alloc = |mib: u64| End::Alloc { bytes: mib * MIB, stream: 0 };
        let limited = |mib: u64| CachingSettings { memory_limit: Some(mib * MIB), ..CachingSettings::default() };
        let cause = |parts: &[i64], end, mib| window(parts).cause(&limited(mib), end);
        // A limit counts 2 MiB as 20 MiB.
        assert_eq!(cause(&[-20, 20], alloc(2), 99), Cause::Trim, "20 MiB would have served it");
        assert_eq!(cause(&[-20, 40], alloc(30), 109), Cause::Retry);
        assert_eq!(cause(&[-20, 40], alloc(30), 110), Cause::Trim);
        assert_eq!(cause(&[-20], End::Other, 99), Cause::Trim);
        assert_eq!(cause(&[-20], End::Refused { bytes: 30 * MIB, stream: 0 }, 109), Cause::Retry);
        assert_eq!(cause(&[20, -20, 20], alloc(30), 200), Cause::Device);
    }

    #[test]
    fn a_held_up_block_could_not_serve_before_its_free_completed() {
        let part = |addr: u64, bytes: u64, released: bool| SegmentEvent {
            released,
            ..SegmentEvent::made(addr, bytes, 0).part_of(PoolKind::Large)
        };
        let held_up = |addr: u64, mib: u64| {
            let (op, size, stream) = (0, Some(mib * MIB), 0);
            Completion { op, addr, bytes: mib * MIB, size, stream, after_release: false }
        };
        let (released, retained) = (1 << 40, 2 << 40);
        let window = |completion| Window {
            completions: Vec::from([completion]),
            segments: Vec::from([part(released, 40 * MIB, true), part(4 << 40, 20 * MIB, false)]),
            reserved: 80 * MIB,
            released: true,
            ..Window::default()
        };
        let cause = |completion, limit: Option<u64>, mib: u64| {
            let settings = CachingSettings { memory_limit: limit.map(|mib| mib * MIB), ..CachingSettings::default() };
            window(completion).cause(&settings, End::Alloc { bytes: mib * MIB, stream: 0 })
        };
        // 15 MiB were free on each side of the block in the released segment: enough for 12, not for 16.
        let between = released + 15 * MIB;
        assert_eq!(cause(held_up(between, 10), Some(90), 12), Cause::Trim);
        assert_eq!(cause(held_up(between, 10), Some(90), 16), Cause::Retry);
        // After `empty_cache` the retained block would have served the request, unless it is too small: the device was full.
        assert_eq!(cause(held_up(retained, 16), None, 16), Cause::Trim, "40 MiB were free in one block");
        let small = |mib| Window {
            segments: Vec::from([part(released, 2 * MIB, true), part(4 << 40, 20 * MIB, false)]),
            ..window(held_up(retained, mib))
        };
        let end = End::Alloc { bytes: 16 * MIB, stream: 0 };
        assert_eq!(small(16).cause(&CachingSettings::default(), end), Cause::Full);
        assert_eq!(small(15).cause(&CachingSettings::default(), end), Cause::Trim);
    }
}
