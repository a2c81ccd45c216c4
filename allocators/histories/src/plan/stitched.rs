//! What stitching would do: large blocks from any free pages, wherever these lie.

use super::lifetime::Group;
use super::{CrossStream, Lifetime, online};
use std::collections::{BTreeMap, BTreeSet};

/// What is mapped as a whole, in bytes: the granularity of `cuMemCreate`.
pub(super) const PAGE: u64 = 2 << 20;
/// Blocks up to this size come from segments of their own kind, as PyTorch's small pool.
pub(super) const SMALL: u64 = 1 << 20;

/// Bytes that an allocator would reserve that stitches: GMLake (ASPLOS 2024), at its best. A block above 1 MiB is made of as
/// many pages of 2 MiB as it needs, from any free pages of its stream and pool; so it needs new ones only if there are not enough, and
/// there are no holes. What is lost is the rest of each block's last page, and what other streams have free. Smaller blocks
/// lie in pages of their own, by best fit in each stream. Nothing goes back. O(n log n).
#[must_use]
pub fn stitched(lifetimes: &[Lifetime]) -> u64 {
    let large = |one: &Lifetime| one.bytes() > SMALL;
    // Pages in use by stream and private pool, and the most that were.
    let mut pages: BTreeMap<Group, (u64, u64)> = BTreeMap::new();
    let mut ends: BTreeSet<(u32, u32)> = BTreeSet::new();
    // CAST: a history has fewer than 2^32 allocations.
    for (now, one) in (0u32..).zip(lifetimes).filter(|(_, one)| large(one)) {
        while let Some((_, gone)) = ends.first().copied().filter(|(end, _)| *end <= now) {
            ends.pop_first();
            let gone = &lifetimes[gone as usize];
            pages.entry(gone.group(CrossStream::KnownOrder)).or_default().0 -= gone.bytes().div_ceil(PAGE);
        }
        ends.insert((one.end.max(now + 1), now));
        let (used, most) = pages.entry(one.group(CrossStream::KnownOrder)).or_default();
        *used += one.bytes().div_ceil(PAGE);
        *most = (*used).max(*most);
    }
    let large_pages: u64 = pages.values().map(|(_, most)| most).sum();
    let (_, small) = online::spaces(lifetimes, CrossStream::KnownOrder, |one| !large(one));
    PAGE * (large_pages + small.values().map(|end| end.div_ceil(PAGE)).sum::<u64>())
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
}
