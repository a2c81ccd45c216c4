//! Segments and their pools, the free ranges in them, and the sizes of free ranges in each pool.

use crate::steps;
use std::collections::btree_map::{BTreeMap, Entry};

/// A segment, or adjacent mapped ranges of an expandable one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Size in bytes.
    pub bytes: u64,
    /// Stream handle.
    pub stream: u64,
    /// Whether it serves small requests.
    pub small: bool,
    /// Whether it grows and shrinks by mapped ranges.
    pub expandable: bool,
}

impl Segment {
    /// Its pool.
    #[must_use]
    pub fn pool(&self) -> Pool {
        Pool { stream: self.stream, small: self.small }
    }
}

/// Segments that may serve a request: those of a stream, for small or for other requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pool {
    /// Stream handle.
    pub stream: u64,
    /// Whether it serves small requests.
    pub small: bool,
}

/// Sizes of the free blocks of each pool.
#[derive(Clone, Debug, Default)]
pub(super) struct Holes(BTreeMap<Pool, Sizes>);

#[derive(Clone, Debug, Default)]
struct Sizes {
    bytes: u64,
    /// Number of free blocks of each size.
    counts: BTreeMap<u64, u32>,
}

impl Holes {
    pub(super) fn add(&mut self, pool: Pool, bytes: u64) {
        let sizes = self.0.entry(pool).or_default();
        sizes.bytes += bytes;
        *sizes.counts.entry(bytes).or_default() += 1;
    }

    pub(super) fn remove(&mut self, pool: Pool, bytes: u64) {
        let Some(sizes) = self.0.get_mut(&pool) else { return };
        sizes.bytes -= bytes;
        if let Entry::Occupied(mut count) = sizes.counts.entry(bytes) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    pub(super) fn largest(&self, pool: Pool) -> u64 {
        let largest = self.0.get(&pool).and_then(|sizes| sizes.counts.last_key_value());
        largest.map_or(0, |(bytes, _)| *bytes)
    }

    pub(super) fn smallest_from(&self, pool: Pool, bytes: u64) -> Option<u64> {
        self.0.get(&pool)?.counts.range(bytes..).next().map(|(bytes, _)| *bytes)
    }

    pub(super) fn bytes(&self, pool: Pool) -> u64 {
        self.0.get(&pool).map_or(0, |sizes| sizes.bytes)
    }

    /// Pools that have or had a segment.
    pub(super) fn pools(&self) -> impl Iterator<Item = Pool> + '_ {
        self.0.keys().copied()
    }
}

/// A free range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gap {
    pub(super) bytes: u64,
    pub(super) pool: Pool,
    /// Whether its segment is expandable.
    pub(super) expandable: bool,
}

/// Free ranges by address, coalesced within each segment, and their sizes by pool. Each change costs O(log n).
#[derive(Clone, Debug, Default)]
pub(super) struct Gaps {
    ranges: BTreeMap<u64, Gap>,
    pub(super) holes: Holes,
}

impl Gaps {
    pub(super) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// A range of a segment becomes free and coalesces with adjacent free ranges.
    pub(super) fn give(&mut self, start: u64, bytes: u64, (at, segment): (u64, Segment)) {
        let end = start + bytes;
        let behind = if end < at + segment.bytes { self.remove(end) } else { None };
        let bytes = bytes + behind.map_or(0, |gap| gap.bytes);
        match self.ranges.range(at..start).next_back().map(|(before, gap)| (*before, *gap)) {
            Some((before, gap)) if before + gap.bytes == start => {
                self.add(before, Gap { bytes: gap.bytes + bytes, ..gap });
            }
            _ => self.add(start, Gap { bytes, pool: segment.pool(), expandable: segment.expandable }),
        }
    }

    /// Nothing of `from..to` is free any longer.
    pub(super) fn take(&mut self, from: u64, to: u64) {
        let last = |gaps: &Self| gaps.ranges.range(..to).next_back().map(|(at, gap)| (*at, *gap));
        while let Some((at, gap)) = last(self).filter(|(at, gap)| at + gap.bytes > from) {
            steps::count(1);
            self.remove(at);
            if at + gap.bytes > to {
                self.add(to, Gap { bytes: at + gap.bytes - to, ..gap });
            }
            if at < from {
                self.add(at, Gap { bytes: from - at, ..gap });
                return;
            }
        }
    }

    fn add(&mut self, start: u64, gap: Gap) {
        self.holes.add(gap.pool, gap.bytes);
        if let Some(before) = self.ranges.insert(start, gap) {
            self.holes.remove(before.pool, before.bytes);
        }
    }

    fn remove(&mut self, start: u64) -> Option<Gap> {
        let gap = self.ranges.remove(&start)?;
        self.holes.remove(gap.pool, gap.bytes);
        Some(gap)
    }

    /// The free range that contains an address.
    pub(super) fn around(&self, addr: u64) -> Option<(u64, Gap)> {
        let (start, gap) = self.ranges.range(..=addr).next_back()?;
        (start + gap.bytes > addr).then_some((*start, *gap))
    }

    /// Free ranges that start in `from..to`: address and bytes of each.
    pub(super) fn within(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges.range(from..to).map(|(at, gap)| (*at, gap.bytes))
    }
}
