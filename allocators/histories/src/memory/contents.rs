//! What lies in the segments, and the account of it.

use super::{Block, Memory};
use crate::formats::{self, SegmentBlock};
use crate::steps;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use vramlab_policies::contract::{BlockState, Ledger, PoolKind};

/// What lies in a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Bytes of blocks, those included whose free waits.
    pub active: u64,
    /// Bytes of blocks whose free waits for other streams.
    pub pending: u64,
    /// Bytes asked for in the blocks that the program holds.
    pub requested: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Free bytes.
    pub free: u64,
    /// Number of free blocks.
    pub holes: u64,
    /// Bytes of the largest free block.
    pub largest_hole: u64,
}

impl Memory {
    /// What lies in the segment at an address. O(log n + blocks of the segment).
    #[must_use]
    pub fn contents(&self, start: u64, segment: &Segment) -> Contents {
        let mut out = Contents::default();
        for (_, block) in self.blocks_in(start, segment) {
            out.active += block.bytes;
            out.blocks += 1;
            match block.pending {
                Some(_) => out.pending += block.bytes,
                None => out.requested += block.requested,
            }
        }
        for (_, bytes) in self.free_in(start, segment) {
            out.free += bytes;
            out.holes += 1;
            out.largest_hole = out.largest_hole.max(bytes);
        }
        out
    }

    /// The blocks of a segment with their addresses: those that keep it from going back.
    pub fn blocks_in(&self, start: u64, segment: &Segment) -> impl Iterator<Item = (u64, &Block)> + '_ {
        self.blocks.range(start..start + segment.bytes).map(|(addr, block)| (*addr, block))
    }

    /// The free blocks of a segment: address and bytes of each.
    pub fn free_in(&self, start: u64, segment: &Segment) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.gaps.within(start, start + segment.bytes)
    }

    /// Where reserved memory is, as a request on `stream` sees it. Blocks outside of the segments that the history shows do not
    /// count. O(n).
    #[must_use]
    pub fn ledger(&self, stream: u64) -> Ledger {
        let mut out = Ledger::default();
        for (start, segment) in &self.segments {
            let inside = self.contents(*start, segment);
            let free = match (segment.stream == stream, inside.blocks) {
                (false, _) => &mut out.stream,
                (true, 0) => &mut out.soft,
                (true, _) => &mut out.hard,
            };
            *free += inside.free;
            out.reserved += segment.bytes;
            out.pending += inside.pending;
            out.requested += inside.requested;
            out.internal += inside.active - inside.pending;
        }
        out.internal = out.internal.saturating_sub(out.requested);
        out
    }

    /// The segments and their blocks as PyTorch's snapshot of `device` lists them, in the order of their addresses. O(n).
    #[must_use]
    pub fn snapshot(&self, device: u16) -> Vec<formats::Segment> {
        let segment = |(&address, segment): (&u64, &Segment)| {
            let used = self.blocks_in(address, segment).map(|(address, block)| SegmentBlock {
                address,
                size: block.bytes,
                requested_size: block.requested,
                state: if block.pending.is_some() { BlockState::PendingFree } else { BlockState::Allocated },
            });
            let free = self.free_in(address, segment).map(|(address, size)| SegmentBlock {
                address,
                size,
                requested_size: 0,
                state: BlockState::Free,
            });
            let mut blocks: Vec<SegmentBlock> = used.chain(free).collect();
            blocks.sort_unstable_by_key(|block| block.address);
            formats::Segment {
                device,
                address,
                total_size: segment.bytes,
                stream: segment.stream,
                segment_type: if segment.small { PoolKind::Small } else { PoolKind::Large },
                pool_id: None,
                is_expandable: segment.expandable,
                blocks,
            }
        };
        self.segments.iter().map(segment).collect()
    }
}

// Ranges of segments in which nothing lies.

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

// Segments, the pools that they belong to, and how large what is free in each pool is.

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
