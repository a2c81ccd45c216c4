//! Part `grow`: what happens when no free block fits.
//!
//! A [`Ladder`] is a list of [steps](Step), tried in order until one returns a block; after the last the request is refused.
#![forbid(unsafe_code)]

use crate::contract::{AllocError, CaptureId, GUARANTEED_ALIGN, OomReport, Path, PoolKind};
use crate::space::{FreeList, SegmentId};
use std::cell::Cell;
use vramlab_device::{DriverError, StreamId};

/// The segments of an allocator, on which a ladder works. A [`Heap`](super::Heap) has them behind one lock, and
/// [`caching`](crate::backends::caching) in shards.
pub trait Segments {
    /// A block that serves a request; also a new segment.
    type Block;
    /// Identifies a segment.
    type Segment: Copy;

    /// Reserved bytes.
    fn reserved(&self) -> u64;

    /// Maximum of reserved bytes.
    fn limit(&self) -> Option<u64>;

    /// Bytes of the largest segment that is reserved for a free list; 0 without one.
    fn largest_segment(&self, _list: FreeList) -> u64 {
        0
    }

    /// Whether a graph is being captured, during which no wait is allowed.
    fn is_capturing(&self) -> bool;

    /// Allocates a segment. `None` when there is no memory, or the limit does not allow it.
    ///
    /// # Errors
    /// Those of the driver.
    fn new_segment(&mut self, list: FreeList, bytes: u64) -> Result<Option<Self::Block>, DriverError>;

    /// Segments that are releasable as a whole, in [this order](release_order).
    fn idle_segments(&self) -> Vec<Idle<Self::Segment>>;

    /// First address of the segment with the free block of a list that would serve a request of `bytes`.
    fn segment_that_fits(&mut self, list: FreeList, bytes: u64) -> Option<u64>;

    /// Releases an idle segment. Returns its bytes: 0 if it is in use by now.
    ///
    /// # Errors
    /// Those of the driver: the segment is still reserved then.
    fn release(&mut self, segment: Self::Segment) -> Result<u64, DriverError>;

    /// Releases memory of expandable segments, in lists that `filter` selects, while more than `keep` bytes are reserved. Returns
    /// the released bytes.
    ///
    /// # Errors
    /// Those of the driver. Memory released before that is accounted for.
    fn release_parts(&mut self, _keep: u64, _filter: impl Fn(&FreeList) -> bool) -> Result<u64, DriverError> {
        Ok(0)
    }

    /// Waits for all deferred frees, and makes those blocks reusable.
    ///
    /// # Errors
    /// Those of the driver.
    fn synchronize(&mut self) -> Result<(), DriverError>;

    /// Counts a device allocation that is repeated after a cache flush.
    fn count_retry(&mut self);

    /// Counts a refused request.
    fn count_refusal(&mut self);

    /// The facts about a refused request of `list` for `requested` bytes, which needed a segment of `needed` bytes.
    fn refusal(&self, allocator: &str, list: FreeList, requested: u64, needed: u64) -> OomReport;

    /// Counts a refused request for `requested` bytes. Returns its error.
    fn out_of_memory(&mut self, allocator: &str, miss: &Miss, requested: u64) -> AllocError {
        self.count_refusal();
        self.refusal(allocator, miss.list, requested, miss.segment).into()
    }
}

/// A segment without active blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idle<S = SegmentId> {
    /// The segment.
    pub segment: S,
    /// The free list of its blocks.
    pub list: FreeList,
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Searches since it became idle.
    pub age: u64,
}

/// The order in which PyTorch releases memory of free lists (`release_cached_blocks`): the large pool before the small one, each by
/// stream, then the private pools one after another, each with its small pool first. Within a list it is by size and address.
#[must_use]
pub fn release_order(list: FreeList, bytes: u64, addr: u64) -> (Option<CaptureId>, bool, StreamId, u64, u64) {
    let private = list.owner.private;
    let first = if private.is_some() { PoolKind::Small } else { PoolKind::Large };
    (private, list.pool != Some(first), list.owner.stream, bytes, addr)
}

/// A request that no free block fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// The list that a new segment is for.
    pub list: FreeList,
    /// Rounded size in bytes, from which on a search [always finds](super::fit::FreeBlocks::surely_found) a free block.
    pub bytes: u64,
    /// Segment size for it, by part `size`.
    pub segment: u64,
}

/// The size of a new segment. A private pool gets the size by part `size`, or with [`Exact`](Self::Exact) that of the request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SegmentSize {
    /// The size by part `size`.
    #[default]
    OfClass,
    /// The size of the request.
    Exact,
    /// This size, or the size of the request where that is more, or where the device has less.
    Fixed(u64),
    /// This size, or twice the largest segment that is reserved for the free list, or twice as much again until the request
    /// fits. Where the device has less, half of it, and so on down to the size of the request.
    Doubling(u64),
    /// The reserved size, doubling the pool, or the size of the request if larger. With a maximum: half of the remaining bytes up
    /// to it. Where the device has less, half of it, and so on down to the size of the request (RMM's pool).
    AsMuchAgain {
        /// Maximum of reserved bytes.
        maximum: Option<u64>,
    },
    /// A region of `next` bytes, doubled until the request fits, or the remaining bytes up to the limit; twice as many the next
    /// time, unless the request has just doubled it. Where the device has less, nine tenths of it, and so on down to the size of
    /// the request (TensorFlow's and XLA's BFC).
    Region {
        /// Bytes of the next region.
        next: Cell<u64>,
    },
}

/// A step of a ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Release idle segments of the large pool that are older than the average, while more than `above` bytes are reserved.
    /// PyTorch's `garbage_collect_cached_blocks`. The step itself returns no block.
    CollectGarbage {
        /// Bytes that may stay reserved.
        above: u64,
    },
    /// Allocate a segment. PyTorch's `alloc_block`.
    Segment,
    /// Release one idle segment of the stream that is large enough, or else the largest ones of at least `max_split` bytes until
    /// their sum is sufficient; then allocate a segment. PyTorch's `release_available_cached_blocks`.
    ReleaseOversize {
        /// Minimum size of a released segment.
        max_split: u64,
    },
    /// Wait for deferred frees, and release every idle segment. PyTorch's `release_cached_blocks`. The step itself returns no
    /// block. The ladder ends here for a request of a private pool, and while a graph is captured.
    ReleaseCached,
    /// Wait for deferred frees. The step itself returns no block.
    WaitForFrees,
    /// Release every idle segment if the request then fits into the source's limit. The step itself returns no block. BFC's
    /// `DeallocateFreeRegions`.
    ReleaseIfEnough,
    /// Search for a free block again: the wait may have made one reusable.
    FitAgain,
    /// Allocate a segment, and count a retry.
    SegmentAgain,
}

/// Steps in order, and the size of segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ladder {
    /// The steps.
    pub steps: Vec<Step>,
    /// Size of segments.
    pub size: SegmentSize,
}

impl Ladder {
    /// Allocates a segment; where that is refused, releases the cache, searches for a free block again and allocates a segment.
    #[must_use]
    pub fn releasing(size: SegmentSize) -> Self {
        Self { steps: vec![Step::Segment, Step::ReleaseCached, Step::FitAgain, Step::SegmentAgain], size }
    }

    /// Takes the steps until one returns a fitting free block, and the path of that step; `None` when none does. `again` searches
    /// for a free block.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn climb<S: Segments>(
        &self,
        segments: &mut S,
        miss: &Miss,
        again: impl Fn(&mut S) -> Result<Option<S::Block>, DriverError>,
    ) -> Result<Option<(S::Block, Path)>, DriverError> {
        let mut path = Path::DriverAlloc;
        for step in &self.steps {
            let block = match *step {
                Step::CollectGarbage { above } => {
                    if collect_garbage(segments, above)? {
                        path = Path::Collect;
                    }
                    None
                }
                Step::Segment => self.new_segment(segments, miss)?,
                Step::ReleaseOversize { max_split } => {
                    path = Path::Retry;
                    if release_oversize(segments, miss, max_split)? { self.new_segment(segments, miss)? } else { None }
                }
                // `captures_underway`
                Step::ReleaseCached if segments.is_capturing() || miss.list.owner.private.is_some() => break,
                Step::ReleaseCached => {
                    path = Path::Retry;
                    release_cached(segments, 0)?;
                    None
                }
                Step::WaitForFrees => {
                    path = Path::Retry;
                    segments.synchronize()?;
                    None
                }
                Step::ReleaseIfEnough => {
                    let idle: u64 = segments.idle_segments().iter().map(|idle| idle.bytes).sum();
                    if idle > 0 && miss.bytes <= room(segments).saturating_add(idle) {
                        path = Path::Retry;
                        release_cached(segments, 0)?;
                    }
                    None
                }
                Step::FitAgain => again(segments)?,
                Step::SegmentAgain => {
                    segments.count_retry();
                    self.new_segment(segments, miss)?
                }
            };
            if let Some(block) = block {
                return Ok(Some((block, path)));
            }
        }
        Ok(None)
    }

    /// Allocates a segment of the current size.
    fn new_segment<S: Segments>(&self, segments: &mut S, miss: &Miss) -> Result<Option<S::Block>, DriverError> {
        let due = match &self.size {
            SegmentSize::OfClass => miss.segment,
            SegmentSize::Exact => miss.bytes,
            // A private pool keeps its memory until its release, so it gets no more than necessary.
            SegmentSize::AsMuchAgain { .. }
            | SegmentSize::Region { .. }
            | SegmentSize::Doubling(_)
            | SegmentSize::Fixed(_)
                if miss.list.owner.private.is_some() =>
            {
                miss.segment
            }
            SegmentSize::Doubling(first) => return doubled(segments, miss, *first),
            SegmentSize::Region { next } => return region(segments, miss, next),
            SegmentSize::Fixed(bytes) if *bytes <= miss.bytes => miss.bytes,
            SegmentSize::Fixed(bytes) => match segments.new_segment(miss.list, *bytes)? {
                Some(block) => return Ok(Some(block)),
                None => miss.bytes,
            },
            SegmentSize::AsMuchAgain { maximum } => return as_much_again(segments, miss, *maximum),
        };
        segments.new_segment(miss.list, due)
    }
}

/// BFC's `Extend`.
fn region<S: Segments>(segments: &mut S, miss: &Miss, due: &Cell<u64>) -> Result<Option<S::Block>, DriverError> {
    let mut next = due.get();
    let available = room(segments) / GUARANTEED_ALIGN * GUARANTEED_ALIGN;
    if miss.bytes > available {
        return Ok(None);
    }
    let grown = next < miss.bytes;
    while next < miss.bytes {
        next = next.saturating_mul(2);
    }
    let mut bytes = next.min(available);
    while bytes >= miss.bytes {
        if let Some(block) = segments.new_segment(miss.list, bytes)? {
            // Only after a success: a request that cannot be served should not make the next region huge.
            due.set(if grown { next } else { next.saturating_mul(2) });
            return Ok(Some(block));
        }
        // CAST: in 32-bit floating point, truncated, as there. Newer versions take a step where that rounds up to no less.
        let less = ((bytes as f32 * 0.9) as u64).next_multiple_of(GUARANTEED_ALIGN);
        bytes = less.min(bytes - GUARANTEED_ALIGN);
    }
    Ok(None)
}

/// Twice the largest segment of the list.
fn doubled<S: Segments>(segments: &mut S, miss: &Miss, first: u64) -> Result<Option<S::Block>, DriverError> {
    let mut bytes = first.max(segments.largest_segment(miss.list).saturating_mul(2));
    while bytes < miss.bytes {
        bytes = bytes.saturating_mul(2);
    }
    loop {
        if let Some(block) = segments.new_segment(miss.list, bytes)? {
            return Ok(Some(block));
        }
        if bytes == miss.bytes {
            return Ok(None);
        }
        bytes = (bytes / 2).next_multiple_of(GUARANTEED_ALIGN).max(miss.bytes);
    }
}

/// Remaining bytes up to the source's limit.
fn room<S: Segments>(segments: &S) -> u64 {
    segments.limit().map_or(u64::MAX, |limit| limit.saturating_sub(segments.reserved()))
}

/// RMM's `size_to_grow` and `try_to_expand`.
fn as_much_again<S: Segments>(
    segments: &mut S,
    miss: &Miss,
    maximum: Option<u64>,
) -> Result<Option<S::Block>, DriverError> {
    let reserved = segments.reserved();
    let mut due = reserved.max(miss.bytes);
    if let Some(maximum) = maximum {
        let left = maximum.saturating_sub(reserved).next_multiple_of(GUARANTEED_ALIGN);
        if miss.bytes > left {
            return Ok(None);
        }
        // Half of it may not be a whole number of blocks. RMM leaves it so.
        due = (left / 2).max(miss.bytes);
    }
    loop {
        let block = segments.new_segment(miss.list, due)?;
        if block.is_some() || due == miss.bytes {
            return Ok(block);
        }
        due = (due / 2).max(miss.bytes);
    }
}

/// PyTorch's `garbage_collect_cached_blocks`, which skips private pools: true when it released a segment.
fn collect_garbage<S: Segments>(segments: &mut S, above: u64) -> Result<bool, DriverError> {
    let target = segments.reserved().saturating_sub(above);
    let mut idle = segments.idle_segments();
    idle.retain(|idle| idle.list.pool != Some(PoolKind::Small) && idle.list.owner.private.is_none());
    let mut reclaimed = 0;
    while reclaimed < target && !idle.is_empty() {
        let mean = idle.iter().map(|idle| idle.age).sum::<u64>() as f64 / idle.len() as f64;
        let (old, young): (Vec<_>, Vec<_>) = idle.into_iter().partition(|idle| idle.age as f64 >= mean);
        // The oldest is at least as old as the average, so each round releases a segment.
        for idle in old {
            reclaimed += segments.release(idle.segment)?;
        }
        idle = young;
    }
    Ok(reclaimed > 0)
}

/// PyTorch's `release_available_cached_blocks`: true when at least the size of the request was released.
fn release_oversize<S: Segments>(segments: &mut S, miss: &Miss, max_split: u64) -> Result<bool, DriverError> {
    let required = miss.bytes.max(max_split);
    let mut idle = segments.idle_segments();
    idle.retain(|idle| idle.list == miss.list);
    // The free block that is next in size may be a part of a segment, which is not releasable.
    if let Some(addr) = segments.segment_that_fits(miss.list, required)
        && let Some(whole) = idle.iter().find(|idle| idle.addr == addr)
    {
        segments.release(whole.segment)?;
        return Ok(true);
    }
    let mut released = 0;
    for idle in idle.iter().rev().filter(|idle| (max_split..required).contains(&idle.bytes)) {
        if released >= required {
            break;
        }
        released += segments.release(idle.segment)?;
    }
    Ok(released >= required)
}

/// PyTorch's `release_cached_blocks`: waits for deferred frees, then releases idle segments, and free whole handles of expandable
/// ones, while more than `keep` bytes are reserved. Returns the released bytes.
///
/// # Errors
/// Those of the driver.
pub fn release_cached<S: Segments>(segments: &mut S, keep: u64) -> Result<u64, DriverError> {
    segments.synchronize()?;
    let mut released = 0;
    for idle in segments.idle_segments() {
        if segments.reserved() <= keep {
            break;
        }
        released += segments.release(idle.segment)?;
    }
    Ok(released + segments.release_parts(keep, |_| true)?)
}

/// Releases the idle segments of a private pool that is not pinned. Returns the released bytes.
///
/// # Errors
/// Those of the driver.
pub fn release_private<S: Segments>(segments: &mut S, private: CaptureId) -> Result<u64, DriverError> {
    let mut released = 0;
    for idle in segments.idle_segments().iter().filter(|idle| idle.list.owner.private == Some(private)) {
        released += segments.release(idle.segment)?;
    }
    Ok(released + segments.release_parts(0, |list| list.owner.private == Some(private))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Heap;
    use crate::policy::fit::Fit;
    use crate::policy::source::Source;
    use crate::policy::stream::Stream;
    use crate::space::{Account, BlockId, Owner, Space};
    use std::sync::Arc;
    use vramlab_device::{Driver, NullDriver};

    const MIB: u64 = 1 << 20;

    fn heap(room: u64) -> Heap {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(room));
        let space = Space::new(Account::with_pools(u64::MAX));
        Heap::new(space, Fit::best(), Stream::Own, Source::Plain { driver, limit: None })
    }

    fn list(pool: PoolKind) -> FreeList {
        FreeList { owner: Owner::of(crate::stream(1)), pool: Some(pool) }
    }

    fn miss(bytes: u64) -> Miss {
        Miss { list: list(PoolKind::Large), bytes, segment: bytes.next_multiple_of(2 * MIB) }
    }

    fn climb(ladder: &Ladder, heap: &mut Heap, bytes: u64) -> Option<(u64, Path)> {
        let served = ladder.climb(heap, &miss(bytes), |heap| Ok(heap.find(list(PoolKind::Large), bytes, u64::MAX)));
        served.unwrap().map(|(block, path)| (heap.space()[block].bytes, path))
    }

    /// Takes all of a new segment.
    fn hold(heap: &mut Heap, bytes: u64) -> BlockId {
        let block = heap.new_segment(list(PoolKind::Large), bytes).unwrap().unwrap();
        heap.take(block, list(PoolKind::Large), bytes, bytes);
        block
    }

    #[test]
    fn segments_have_the_size_that_is_due() {
        for (size, sizes) in [
            (SegmentSize::OfClass, [2 * MIB, 4 * MIB, 10 * MIB]),
            (SegmentSize::Exact, [256, 3 * MIB, 9 * MIB]),
            (SegmentSize::Fixed(8 * MIB), [8 * MIB, 8 * MIB, 9 * MIB]),
            (SegmentSize::Doubling(2 * MIB), [2 * MIB, 4 * MIB, 16 * MIB]),
        ] {
            let (mut heap, ladder) = (heap(64 * MIB), Ladder { steps: vec![Step::Segment], size });
            let made = [256, 3 * MIB, 9 * MIB].map(|bytes| climb(&ladder, &mut heap, bytes));
            assert_eq!(made, sizes.map(|bytes| Some((bytes, Path::DriverAlloc))), "{ladder:?}");
        }
    }

    #[test]
    fn private_pool_gets_a_segment_of_the_class() {
        let owner = Owner { stream: crate::stream(1), private: Some(CaptureId::next()) };
        let list = FreeList { owner, pool: Some(PoolKind::Large) };
        let miss = Miss { list, ..miss(MIB) };
        for size in [
            SegmentSize::Doubling(32 * MIB),
            SegmentSize::Fixed(32 * MIB),
            SegmentSize::AsMuchAgain { maximum: None },
            SegmentSize::Region { next: (32 * MIB).into() },
        ] {
            let (mut heap, ladder) = (heap(256 * MIB), Ladder { steps: vec![Step::Segment], size: size.clone() });
            for _ in 0..3 {
                let (block, _) = ladder.climb(&mut heap, &miss, |_| Ok(None)).unwrap().unwrap();
                assert_eq!(heap.space()[block].bytes, 2 * MIB, "{size:?}");
            }
            assert_eq!(ladder.size, size, "later segments of other pools have the same size");
        }
    }

    #[test]
    fn doubling_starts_again_for_each_list_and_after_a_release() {
        let ladder = Ladder { steps: vec![Step::Segment], size: SegmentSize::Doubling(2 * MIB) };
        let mut heap = heap(64 * MIB);
        let grow = |heap: &mut Heap, stream| {
            let list = FreeList { owner: Owner::of(crate::stream(stream)), pool: Some(PoolKind::Large) };
            let (block, _) = ladder.climb(heap, &Miss { list, ..miss(256) }, |_| Ok(None)).unwrap().unwrap();
            heap.space()[block].bytes / MIB
        };
        assert_eq!([1, 1, 2, 1, 2].map(|stream| grow(&mut heap, stream)), [2, 4, 2, 8, 4]);
        release_cached(&mut heap, 0).unwrap();
        assert_eq!([1, 2, 1].map(|stream| grow(&mut heap, stream)), [2, 2, 4]);
    }

    #[test]
    fn a_doubled_segment_is_halved_down_to_what_is_needed() {
        let steps = vec![Step::Segment];
        for (room, bytes, made) in
            [(9 * MIB, 3 * MIB, Some(8 * MIB)), (3 * MIB, 3 * MIB, Some(3 * MIB)), (MIB, 256, None)]
        {
            let ladder = Ladder { steps: steps.clone(), size: SegmentSize::Doubling(32 * MIB) };
            let mut heap = heap(room);
            // The remainder is too small for any request.
            let _full = made.is_none().then(|| hold(&mut heap, MIB));
            assert_eq!(climb(&ladder, &mut heap, bytes), made.map(|bytes| (bytes, Path::DriverAlloc)));
        }
    }

    /// Sizes of a heap's new segments; the device refuses those above `most`.
    fn regions(limit: Option<u64>, most: u64, next: u64, requests: &[u64]) -> Vec<Option<u64>> {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(most));
        let mut heap = Heap::new(Space::new(Account::new()), Fit::best(), Stream::Own, Source::Plain { driver, limit });
        let ladder = Ladder { steps: vec![Step::Segment], size: SegmentSize::Region { next: next.into() } };
        requests.iter().map(|bytes| climb(&ladder, &mut heap, *bytes).map(|(bytes, _)| bytes)).collect()
    }

    #[test]
    fn regions_double_but_not_twice_for_one_request() {
        // 2 MiB, then 4; the request of 40 MiB doubles 8 to 64, which is the size of the next one, too; then 128.
        let made = regions(None, 1 << 40, 2 * MIB, &[256, 256, 40 * MIB, 256, 256]);
        assert_eq!(made, [2, 4, 64, 64, 128].map(|mib| Some(mib * MIB)));
    }

    #[test]
    fn the_last_region_is_what_the_limit_leaves_in_whole_blocks() {
        let made = regions(Some(7 * MIB + 300), 1 << 40, 2 * MIB, &[256, 256, 2 * MIB, 256, 256]);
        assert_eq!(made, [Some(2 * MIB), Some(4 * MIB), None, Some(MIB + 256), None]);
    }

    #[test]
    fn a_refused_region_shrinks_by_tenths_in_single_precision() {
        // From 2^30: 966367744, 869731072, 782758144, 704482304, 634034176. In double precision the last two would be larger by
        // 256.
        let made = regions(None, 640_000_000, 1 << 30, &[256]);
        assert_eq!(made, [Some(634_034_176)]);
        assert_eq!(regions(None, MIB, 2 * MIB, &[MIB + 256]), [None], "never less than the request");
    }

    #[test]
    fn a_pool_doubles_up_to_half_of_what_is_left() {
        let grow = |maximum, requests: &[u64]| {
            let (mut heap, size) = (heap(64 * MIB), SegmentSize::AsMuchAgain { maximum });
            let ladder = Ladder { steps: vec![Step::Segment], size };
            let made = requests.iter().map(|bytes| climb(&ladder, &mut heap, *bytes).map(|(bytes, _)| bytes));
            made.collect::<Vec<_>>()
        };
        assert_eq!(grow(None, &[MIB, 256, 3 * MIB, 256]), [MIB, MIB, 3 * MIB, 5 * MIB].map(Some));
        assert_eq!(grow(None, &[40 * MIB, 256, 5 * MIB]), [Some(40 * MIB), Some(20 * MIB), None]);
        let bounded = grow(Some(16 * MIB + 512), &[8 * MIB, 256, 5 * MIB, 256]);
        assert_eq!(bounded, [Some(8 * MIB + 256), Some(4 * MIB + 128), None, Some(2 * MIB + 128)]);
    }

    #[test]
    fn the_path_says_how_far_up_the_ladder_a_block_was_found() {
        let all = vec![Step::CollectGarbage { above: 8 * MIB }, Step::Segment, Step::ReleaseCached, Step::SegmentAgain];
        let ladder = Ladder { steps: all, size: SegmentSize::OfClass };
        let mut heap = heap(16 * MIB);
        let old = hold(&mut heap, 6 * MIB);
        assert_eq!(climb(&ladder, &mut heap, 2 * MIB), Some((2 * MIB, Path::DriverAlloc)));
        let young = heap.find(list(PoolKind::Large), 2 * MIB, u64::MAX).unwrap();
        heap.take(young, list(PoolKind::Large), 2 * MIB, 1);
        heap.put(old);
        heap.space_mut().count_search();
        hold(&mut heap, 2 * MIB);
        // Ten are reserved, of which six are idle: these are released, because at most eight may stay.
        assert_eq!(climb(&ladder, &mut heap, 2 * MIB), Some((2 * MIB, Path::Collect)));
        assert_eq!(heap.space().account().reserved(), 6 * MIB);
        heap.put(young);
        assert_eq!(climb(&ladder, &mut heap, 14 * MIB), Some((14 * MIB, Path::Retry)));
        let stats = heap.space().account().stats();
        assert_eq!((stats.num_alloc_retries, stats.num_sync_all_streams, stats.num_ooms), (1, 1, 0));
        assert_eq!(climb(&ladder, &mut heap, 32 * MIB), None);
    }

    #[test]
    fn smallest_sufficient_oversize_segment_is_released_first() {
        let mut heap = heap(64 * MIB);
        let blocks = [6, 8, 10, 12].map(|mib| hold(&mut heap, mib * MIB));
        blocks.into_iter().for_each(|block| {
            heap.put(block);
        });
        let left = |heap: &Heap| heap.idle_segments().iter().map(|idle| idle.bytes / MIB).collect::<Vec<_>>();
        assert!(release_oversize(&mut heap, &miss(7 * MIB), 2 * MIB).unwrap());
        assert_eq!(left(&heap), [6, 10, 12], "the eight");
        assert!(release_oversize(&mut heap, &miss(20 * MIB), 2 * MIB).unwrap());
        assert_eq!(left(&heap), [6], "twelve and ten");
        assert!(!release_oversize(&mut heap, &miss(20 * MIB), 8 * MIB).unwrap(), "six is not oversize");
    }
}
