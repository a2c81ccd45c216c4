//! Bytes below which there is no plan.

use super::{CrossStream, Lifetime};
use std::collections::BTreeMap;

/// Most streams whose points of time are chosen apart.
const MOST_STREAMS: usize = 64;
/// How many of them the search starts from.
const STARTS: usize = 8;
/// How often each stream's point is looked over.
const ROUNDS: usize = 4;

/// Bytes below which there is no plan: no allocator that rounds to [`UNIT`](super::UNIT) and keeps to `cross` gets by with
/// less. O(n log n).
///
/// It is the most bytes in blocks of which each two conflict. With one stream, or where streams wait for one another, those
/// are the blocks that are in use at one point of time. Where the order has to be known each stream may be at another point,
/// as long as none has seen the memory of another go: such points are searched for, one stream at a time. What is found is a
/// bound, and may not be the highest.
#[must_use]
pub fn lower_bound(lifetimes: &[Lifetime], cross: CrossStream) -> u64 {
    let highest = in_use(lifetimes, |_| true).iter().map(|point| point.bytes).max().unwrap_or(0);
    if cross == CrossStream::AfterWait {
        return highest;
    }
    let mut streams: BTreeMap<u32, u64> = BTreeMap::new();
    lifetimes.iter().for_each(|one| *streams.entry(one.stream).or_default() += one.bytes());
    // Those that hold most; each is a bound without the others.
    let mut largest: Vec<(u64, u32)> = streams.into_iter().map(|(stream, bytes)| (bytes, stream)).collect();
    largest.sort_unstable_by(|a, b| b.cmp(a));
    largest.truncate(MOST_STREAMS);
    let apart: Vec<Vec<Point>> =
        largest.iter().map(|(_, stream)| in_use(lifetimes, |one| one.stream == *stream)).collect();
    (0..apart.len().min(STARTS)).map(|first| climb(&apart, first)).fold(highest, u64::max)
}

/// What some blocks use when one of them is allocated.
#[derive(Clone, Copy, Debug)]
struct Point {
    /// Number of the allocation.
    when: u32,
    bytes: u64,
    /// The first allocation of another stream that can have some of it.
    seen: u32,
}

/// What the blocks of a kind use after each of their allocations.
fn in_use(lifetimes: &[Lifetime], kind: impl Fn(&Lifetime) -> bool) -> Vec<Point> {
    let mut points = Vec::new();
    let mut bytes = 0;
    // Ends of what is in use: bytes, and when other streams can have them.
    let mut ends: BTreeMap<u32, Vec<(u64, u32)>> = BTreeMap::new();
    // How often each of those times occurs.
    let mut seen: BTreeMap<u32, u32> = BTreeMap::new();
    // CAST: a history has fewer than 2^32 allocations.
    for (when, one) in (0u32..).zip(lifetimes).filter(|(_, one)| kind(one)) {
        while let Some(entry) = ends.first_entry().filter(|entry| *entry.key() <= when) {
            for (gone, elsewhere) in entry.remove() {
                bytes -= gone;
                if let Some(count) = seen.get_mut(&elsewhere) {
                    *count -= 1;
                    if *count == 0 {
                        seen.remove(&elsewhere);
                    }
                }
            }
        }
        bytes += one.bytes();
        let elsewhere = one.end_elsewhere.max(one.end).max(when + 1);
        ends.entry(one.end.max(when + 1)).or_default().push((one.bytes(), elsewhere));
        *seen.entry(elsewhere).or_default() += 1;
        let seen = seen.first_key_value().map_or(elsewhere, |(first, _)| *first);
        points.push(Point { when, bytes, seen });
    }
    points
}

/// Gives each stream a point of time, beginning with the `first` one's highest; the bytes that are in use at them.
///
/// Two blocks of two streams conflict if each stream's point comes before the other can have some of its memory: then the
/// later of them was allocated before that, too.
fn climb(apart: &[Vec<Point>], first: usize) -> u64 {
    let mut chosen: Vec<Option<Point>> = vec![None; apart.len()];
    for _ in 0..ROUNDS {
        for stream in std::iter::once(first).chain((0..apart.len()).filter(|stream| *stream != first)) {
            let others =
                || chosen.iter().enumerate().filter(|(other, _)| *other != stream).filter_map(|(_, point)| *point);
            let before = others().map(|point| point.seen).min();
            let after = others().map(|point| point.when).max();
            let fits = |point: &&Point| {
                before.is_none_or(|seen| point.when < seen) && after.is_none_or(|when| when < point.seen)
            };
            let best = apart[stream].iter().filter(fits).max_by_key(|point| point.bytes);
            if best.map_or(0, |point| point.bytes) > chosen[stream].map_or(0, |point| point.bytes) {
                chosen[stream] = best.copied();
            }
        }
    }
    chosen.iter().flatten().map(|point| point.bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::super::NEVER;
    use super::*;

    fn block(requested: u64, stream: u32, end: u32, end_elsewhere: u32) -> Lifetime {
        Lifetime { requested, stream, end, end_elsewhere }
    }

    #[test]
    fn a_block_counts_rounded_until_its_end() {
        let lifetimes = [block(1, 0, 2, 2), block(513, 0, 2, 2), block(2000, 0, NEVER, NEVER)];
        assert_eq!(lower_bound(&lifetimes, CrossStream::AfterWait), 2048);
        assert_eq!(lower_bound(&lifetimes[..2], CrossStream::AfterWait), 1536);
        assert_eq!(lower_bound(&[], CrossStream::KnownOrder), 0);
    }

    #[test]
    fn streams_that_know_nothing_of_each_other_add_up() {
        // Each stream's block is gone when the other's comes.
        let blocks = |seen: u32| [block(4096, 0, 1, seen), block(512, 0, 2, 2), block(8192, 1, 3, 3)];
        assert_eq!(lower_bound(&blocks(NEVER), CrossStream::AfterWait), 8192);
        assert_eq!(lower_bound(&blocks(NEVER), CrossStream::KnownOrder), 8192 + 4096);
        // The second stream has seen the first one's block go, but not the one after it.
        assert_eq!(lower_bound(&blocks(2), CrossStream::KnownOrder), 8192);
    }
}
