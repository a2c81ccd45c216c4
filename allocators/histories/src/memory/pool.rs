//! Segments, the pools that they belong to, the ranges of them in which nothing lies, and how large these are in each pool.

use crate::steps;
use std::collections::btree_map::{BTreeMap, Entry};

/// A segment, or the mapped parts of an expandable one that lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its size.
    pub bytes: u64,
    /// Its stream.
    pub stream: u64,
    /// Whether small requests are served from it.
    pub small: bool,
    /// Whether it grows and shrinks by parts that are mapped.
    pub expandable: bool,
}

impl Segment {
    /// The pool that it belongs to.
    #[must_use]
    pub fn pool(&self) -> Pool {
        Pool { stream: self.stream, small: self.small }
    }
}

/// Segments from which a request may be served: those of a stream, for small requests or for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pool {
    /// The stream.
    pub stream: u64,
    /// Whether it is the one for small requests.
    pub small: bool,
}

/// The sizes of the free blocks of each pool.
#[derive(Clone, Debug, Default)]
pub(super) struct Holes(BTreeMap<Pool, Sizes>);

#[derive(Clone, Debug, Default)]
struct Sizes {
    bytes: u64,
    /// How many there are of each size.
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

    /// Pools that have a segment, or had one.
    pub(super) fn pools(&self) -> impl Iterator<Item = Pool> + '_ {
        self.0.keys().copied()
    }
}

/// A range in which nothing lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gap {
    pub(super) bytes: u64,
    pub(super) pool: Pool,
    /// Whether its segment is.
    pub(super) expandable: bool,
}

/// Ranges by address, those of a segment that touch joined, and their sizes by pool. Each change costs O(log n).
#[derive(Clone, Debug, Default)]
pub(super) struct Gaps {
    ranges: BTreeMap<u64, Gap>,
    pub(super) holes: Holes,
}

impl Gaps {
    pub(super) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// A range of a segment becomes free. It joins what is free beside it there.
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

    /// The gap in which an address lies.
    pub(super) fn around(&self, addr: u64) -> Option<(u64, Gap)> {
        let (start, gap) = self.ranges.range(..=addr).next_back()?;
        (start + gap.bytes > addr).then_some((*start, *gap))
    }

    /// Those that begin in `from..to`: address and bytes of each.
    pub(super) fn within(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges.range(from..to).map(|(at, gap)| (*at, gap.bytes))
    }
}
