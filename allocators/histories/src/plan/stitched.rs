//! What stitching would do: large blocks from any free pages, wherever these lie. And which requests it would have served that
//! took memory from the device.

use super::lifetime::{Ends, Group};
use super::{CrossStream, Lifetime, online};
use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab_device::{DeviceAddr, Driver, NullDriver, StreamId};
use vramlab_policies::backends::{Caching, CachingSettings};
use vramlab_policies::client::{DeviceBuffer, Memory};
use vramlab_policies::contract::{BlockState, DeviceAllocator, Path, Snapshot};

/// What is mapped as a whole, in bytes: the granularity of `cuMemCreate`.
const PAGE: u64 = 2 << 20;
/// Blocks up to this size come from segments of their own kind, as PyTorch's small pool.
const SMALL: u64 = 1 << 20;

/// Bytes that an allocator would reserve that stitches: GMLake (ASPLOS 2024), at its best. A block above 1 MiB is made of as
/// many pages of 2 MiB as it needs, from any free pages of its stream and pool; so it needs new ones only if there are not enough, and
/// there are no holes. What is lost is the rest of each block's last page, and what other streams have free. Smaller blocks
/// lie in pages of their own, by best fit in each stream. Nothing goes back. O(n log n).
#[must_use]
pub fn stitched(lifetimes: &[Lifetime]) -> u64 {
    let large = |one: &Lifetime| one.bytes() > SMALL;
    // Pages in use by stream and private pool, and the most that were.
    let mut pages: BTreeMap<Group, (u64, u64)> = BTreeMap::new();
    let mut ends = Ends::default();
    // CAST: a history has fewer than 2^32 allocations.
    for (now, one) in (0u32..).zip(lifetimes).filter(|(_, one)| large(one)) {
        while let Some(gone) = ends.pop(now) {
            let gone = &lifetimes[gone as usize];
            pages.entry(gone.group(CrossStream::KnownOrder)).or_default().0 -= gone.bytes().div_ceil(PAGE);
        }
        ends.add(one, now);
        let (used, most) = pages.entry(one.group(CrossStream::KnownOrder)).or_default();
        *used += one.bytes().div_ceil(PAGE);
        *most = (*used).max(*most);
    }
    let large_pages: u64 = pages.values().map(|(_, most)| most).sum();
    let (_, small) = online::spaces(lifetimes, CrossStream::KnownOrder, |one| !large(one));
    PAGE * (large_pages + small.values().map(|end| end.div_ceil(PAGE)).sum::<u64>())
}

/// Beyond what any history needs.
const ENOUGH: u64 = 1 << 50;

/// Requests above 1 MiB that take a segment from the device under PyTorch's native policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misses {
    /// Such requests.
    pub requests: u64,
    /// Those for which pages of 2 MiB that were wholly free would have sufficed, in large blocks of the stream that were each
    /// too small. An allocator that stitches pages together (GMLake) would have served them.
    pub stitchable: u64,
    /// Those that were not looked at, because that takes a snapshot of the memory each: [`MOST_LOOKED`] blocks were seen.
    pub unexamined: u64,
}

/// Blocks of snapshots that [`misses`] looks at: about a second.
pub const MOST_LOOKED: u64 = 1 << 25;

/// Serves the blocks by PyTorch's native policy with its default settings, and looks at each miss by itself: what stitching
/// would have changed for later requests is not followed. O(n log n), and a snapshot for each miss with as many free bytes, up
/// to [`MOST_LOOKED`] blocks.
#[must_use]
pub fn misses(lifetimes: &[Lifetime]) -> Misses {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(ENOUGH));
    let caching: Arc<dyn DeviceAllocator> = Arc::new(Caching::new(Arc::clone(&driver), CachingSettings::default()));
    let memory = Memory::new(Arc::clone(&caching));
    let (mut streams, mut found, mut looked) = (BTreeMap::new(), Misses::default(), 0);
    let mut live: BTreeMap<(u32, u32), DeviceBuffer> = BTreeMap::new();
    // CAST: a history has fewer than 2^32 allocations.
    for (now, one) in (0u32..).zip(lifetimes) {
        while live.first_key_value().is_some_and(|((end, _), _)| *end <= now) {
            live.pop_first();
        }
        // Neither fails on this device, but for requests that every allocator refuses.
        let Ok(stream) = streams.entry(one.stream).or_insert_with(|| driver.stream_create()).clone() else { continue };
        let Ok(buffer) = memory.allocate(one.requested, stream) else { continue };
        if buffer.path() == Path::DriverAlloc && one.bytes() > SMALL {
            found.requests += 1;
            let stats = caching.stats();
            let free = stats.reserved_bytes.all.current.saturating_sub(stats.active_bytes.all.current);
            // The new segment's own rest is counted, too.
            let enough = free >= one.bytes().next_multiple_of(PAGE);
            if enough && looked >= MOST_LOOKED {
                found.unexamined += 1;
            } else if enough && let Some(snapshot) = caching.snapshot() {
                looked += snapshot.segments.iter().map(|segment| 1 + segment.blocks.len() as u64).sum::<u64>();
                let free = free_pages(&snapshot, stream, buffer.addr());
                found.stitchable += u64::from(free >= one.bytes().div_ceil(PAGE));
            }
        }
        live.insert((one.end.max(now + 1), now), buffer);
    }
    found
}

/// Pages that are wholly free in the large segments of a stream, but for the one that has just come with a block at `new`.
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
        // Two holes of two pages each, and a block of four pages: no contiguous memory, and no new page.
        let apart = [block(4 * MIB, 0, 3), block(2 * MIB, 0, NEVER), block(4 * MIB, 0, 3), block(7 * MIB, 0, NEVER)];
        assert_eq!(stitched(&apart), 10 * MIB);
        let other = [apart[0], apart[1], apart[2], block(7 * MIB, 1, NEVER)];
        assert_eq!(stitched(&other), 18 * MIB, "another stream takes pages of its own");
        let small = [block(MIB, 0, 1), block(MIB, 0, NEVER), block(512, 0, NEVER), block(MIB, 0, NEVER)];
        assert_eq!(stitched(&small), 4 * MIB);
        assert_eq!(stitched(&[]), 0);
    }

    #[test]
    fn free_blocks_that_are_each_too_small_count_when_they_suffice_together() {
        // Two segments of 12 MiB are free when 20 MiB are asked for, and still when 26 are.
        let apart =
            [block(12 * MIB, 0, 2), block(12 * MIB, 0, 2), block(20 * MIB, 0, NEVER), block(26 * MIB, 0, NEVER)];
        assert_eq!(misses(&apart), Misses { requests: 4, stitchable: 1, unexamined: 0 });
        let elsewhere = [apart[0], apart[1], block(20 * MIB, 1, NEVER)];
        assert_eq!(misses(&elsewhere), Misses { requests: 3, ..Misses::default() });
        // One of them fits: no miss. Small requests have segments of their own.
        let fits = [apart[0], apart[1], block(11 * MIB, 0, NEVER), block(512, 0, NEVER)];
        assert_eq!(misses(&fits), Misses { requests: 2, ..Misses::default() });
        assert_eq!(misses(&[]), Misses::default());
    }

    #[test]
    fn misses_among_many_free_blocks_are_looked_at_up_to_a_bound() {
        // Every other block is free, and each request needs more than one of them has.
        let count: u32 = 16_000;
        let first = (0..count).map(|at| block(3 * MIB, 0, if at % 2 == 0 { count } else { NEVER }));
        let then = (0..count / 2).map(|_| block(7 * MIB, 0, NEVER));
        let found = misses(&first.chain(then).collect::<Vec<_>>());
        assert!(found.unexamined > 0 && found.stitchable > 0, "{found:?}");
        assert!(found.stitchable + found.unexamined <= found.requests, "{found:?}");
    }

    #[test]
    fn only_whole_pages_count() {
        // The front 3 MiB of a segment of 20 MiB are free, which is one page and a half, and 4 MiB are asked for.
        let edges = [block(3 * MIB, 0, 2), block(17 * MIB, 0, NEVER), block(4 * MIB, 0, NEVER)];
        assert_eq!(misses(&edges), Misses { requests: 2, ..Misses::default() });
    }
}
