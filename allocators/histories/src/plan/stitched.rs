//! An ideal stitching allocator, which builds large blocks from any free pages; and the cache misses that it would have served.

use super::lifetime::{Ends, Group};
use super::{CrossStream, Lifetime, online};
use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab_device::{DeviceAddr, Driver, NullDriver, StreamId};
use vramlab_policies::backends::{Caching, CachingSettings};
use vramlab_policies::client::{DeviceBuffer, Memory};
use vramlab_policies::contract::{BlockState, DeviceAllocator, Path, Snapshot};

/// Page size in bytes: the granularity of `cuMemCreate`.
const PAGE: u64 = 2 << 20;
/// Blocks up to this size have separate segments, as in PyTorch's small pool.
const SMALL: u64 = 1 << 20;

/// Peak reserved by an allocator that stitches: GMLake (ASPLOS 2024), in the ideal case. A block above 1 MiB consists of as many
/// 2 MiB pages as it needs, from any free pages of its stream and pool; so it needs new ones only if there are not enough, and
/// there is no external fragmentation. Lost are the remainder of each block's last page and free pages of other streams. Smaller
/// blocks are in separate pages, by best fit in each stream. Nothing is released. O(n log n).
#[must_use]
pub fn stitched(lifetimes: &[Lifetime]) -> u64 {
    let large = |lifetime: &Lifetime| lifetime.bytes() > SMALL;
    // Active pages by stream and private pool, and their maximum.
    let mut pages: BTreeMap<Group, (u64, u64)> = BTreeMap::new();
    let mut ends = Ends::default();
    // CAST: a recording has fewer than 2^32 allocations.
    for (now, lifetime) in (0u32..).zip(lifetimes).filter(|(_, lifetime)| large(lifetime)) {
        while let Some(ended) = ends.pop(now) {
            let ended = &lifetimes[ended as usize];
            pages.entry(ended.group(CrossStream::KnownOrder)).or_default().0 -= ended.bytes().div_ceil(PAGE);
        }
        ends.add(lifetime, now);
        let (used, most) = pages.entry(lifetime.group(CrossStream::KnownOrder)).or_default();
        *used += lifetime.bytes().div_ceil(PAGE);
        *most = (*used).max(*most);
    }
    let large_pages: u64 = pages.values().map(|(_, most)| most).sum();
    let (_, small) = online::spaces(lifetimes, CrossStream::KnownOrder, |lifetime| !large(lifetime));
    PAGE * (large_pages + small.values().map(|end| end.div_ceil(PAGE)).sum::<u64>())
}

/// More than any recording needs.
const ENOUGH: u64 = 1 << 50;

/// Requests above 1 MiB that allocate a segment under PyTorch's native policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misses {
    /// Number of such requests.
    pub requests: u64,
    /// Of these, requests for which fully free 2 MiB pages would have sufficed, in large blocks of the stream that were each too
    /// small. An allocator that stitches pages together (GMLake) would have served them.
    pub stitchable: u64,
    /// Of these, requests that were not examined, because that takes a snapshot of the memory each: [`MOST_LOOKED`] blocks were
    /// examined.
    pub unexamined: u64,
}

/// Limit on blocks of snapshots that [`misses`] examines: about a second.
pub const MOST_LOOKED: u64 = 1 << 25;

/// Serves the blocks by PyTorch's native policy with default settings, and examines each miss separately: the effect of stitching
/// on later requests is not followed. O(n log n), and a snapshot for each miss with as many free bytes, up to [`MOST_LOOKED`]
/// blocks.
#[must_use]
pub fn misses(lifetimes: &[Lifetime]) -> Misses {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(ENOUGH));
    let caching: Arc<dyn DeviceAllocator> = Arc::new(Caching::new(Arc::clone(&driver), CachingSettings::default()));
    let memory = Memory::new(Arc::clone(&caching));
    let (mut streams, mut misses, mut looked) = (BTreeMap::new(), Misses::default(), 0);
    let mut live: BTreeMap<(u32, u32), DeviceBuffer> = BTreeMap::new();
    // CAST: a recording has fewer than 2^32 allocations.
    for (now, lifetime) in (0u32..).zip(lifetimes) {
        while live.first_key_value().is_some_and(|((end, _), _)| *end <= now) {
            live.pop_first();
        }
        // Neither fails on this device, except for requests that every allocator refuses.
        let Ok(stream) = streams.entry(lifetime.stream).or_insert_with(|| driver.stream_create()).clone() else {
            continue;
        };
        let Ok(buffer) = memory.allocate(lifetime.requested, stream) else { continue };
        if buffer.path() == Path::DriverAlloc && lifetime.bytes() > SMALL {
            misses.requests += 1;
            let stats = caching.stats();
            let free = stats.reserved_bytes.all.current.saturating_sub(stats.active_bytes.all.current);
            // The new segment's own remainder is counted, too.
            let enough = free >= lifetime.bytes().next_multiple_of(PAGE);
            if enough && looked >= MOST_LOOKED {
                misses.unexamined += 1;
            } else if enough && let Some(snapshot) = caching.snapshot() {
                looked += snapshot.segments.iter().map(|segment| 1 + segment.blocks.len() as u64).sum::<u64>();
                let free = free_pages(&snapshot, stream, buffer.addr());
                misses.stitchable += u64::from(free >= lifetime.bytes().div_ceil(PAGE));
            }
        }
        live.insert((lifetime.end.max(now + 1), now), buffer);
    }
    misses
}

/// Fully free pages in the large segments of a stream, except the new segment with a block at `new`.
fn free_pages(snapshot: &Snapshot, stream: StreamId, new: DeviceAddr) -> u64 {
    let is_new = |addr: u64, bytes: u64| (addr..addr + bytes).contains(&new.get());
    let others = snapshot.segments.iter().filter(|segment| {
        segment.stream == stream && segment.bytes > PAGE && !is_new(segment.addr.get(), segment.bytes)
    });
    let free = others.flat_map(|segment| &segment.blocks).filter(|block| block.state == BlockState::Free);
    let pages = free.map(|block| {
        let (start, end) = (block.addr.get(), block.addr.get() + block.bytes);
        (end / PAGE).saturating_sub(start.div_ceil(PAGE))
    });
    pages.sum()
}

#[cfg(test)]
mod tests {
    use super::super::NEVER;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn block(requested: u64, stream: u32, end: u32) -> Lifetime {
        Lifetime { requested, stream, pool: 0, end, end_elsewhere: end }
    }

    #[test]
    fn holes_serve_together_and_streams_and_sizes_stay_apart() {
        // Two free blocks of two pages each, and a request of four pages: no contiguous memory, and no new page.
        let blocks = [block(4 * MIB, 0, 3), block(2 * MIB, 0, NEVER), block(4 * MIB, 0, 3), block(7 * MIB, 0, NEVER)];
        assert_eq!(stitched(&blocks), 10 * MIB);
        let other = [blocks[0], blocks[1], blocks[2], block(7 * MIB, 1, NEVER)];
        assert_eq!(stitched(&other), 18 * MIB, "another stream takes pages of its own");
        let small = [block(MIB, 0, 1), block(MIB, 0, NEVER), block(512, 0, NEVER), block(MIB, 0, NEVER)];
        assert_eq!(stitched(&small), 4 * MIB);
        assert_eq!(stitched(&[]), 0);
    }

    #[test]
    fn free_blocks_that_suffice_together_count_as_stitchable() {
        // Two segments of 12 MiB are free at a request of 20 MiB, and still at one of 26.
        let blocks =
            [block(12 * MIB, 0, 2), block(12 * MIB, 0, 2), block(20 * MIB, 0, NEVER), block(26 * MIB, 0, NEVER)];
        assert_eq!(misses(&blocks), Misses { requests: 4, stitchable: 1, unexamined: 0 });
        let elsewhere = [blocks[0], blocks[1], block(20 * MIB, 1, NEVER)];
        assert_eq!(misses(&elsewhere), Misses { requests: 3, ..Misses::default() });
        // One of them fits: no miss. Small requests have separate segments.
        let fits = [blocks[0], blocks[1], block(11 * MIB, 0, NEVER), block(512, 0, NEVER)];
        assert_eq!(misses(&fits), Misses { requests: 2, ..Misses::default() });
        assert_eq!(misses(&[]), Misses::default());
    }

    #[test]
    fn misses_among_many_free_blocks_are_looked_at_up_to_a_bound() {
        // Every other block is free, and each request is larger than one of them.
        let count: u32 = 16_000;
        let first = (0..count).map(|at| block(3 * MIB, 0, if at % 2 == 0 { count } else { NEVER }));
        let then = (0..count / 2).map(|_| block(7 * MIB, 0, NEVER));
        let counts = misses(&first.chain(then).collect::<Vec<_>>());
        assert!(counts.unexamined > 0 && counts.stitchable > 0, "{counts:?}");
        assert!(counts.stitchable + counts.unexamined <= counts.requests, "{counts:?}");
    }

    #[test]
    fn only_whole_pages_count() {
        // The first 3 MiB of a segment of 20 MiB are free, which is one page and a half, and 4 MiB are requested.
        let edges = [block(3 * MIB, 0, 2), block(17 * MIB, 0, NEVER), block(4 * MIB, 0, NEVER)];
        assert_eq!(misses(&edges), Misses { requests: 2, ..Misses::default() });
    }
}
