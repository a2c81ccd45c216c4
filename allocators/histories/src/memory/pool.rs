//! Segments, the pools that they belong to, and how large what is free in each pool is.

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
