//! The recorded allocator's memory, followed event by event: segments, the blocks in them and what lies free between.
//!
//! Blocks lie where the history says and are as large as PyTorch makes them: a request takes the front of a free block,
//! and what is left is split off if it is large enough. Free blocks of a segment that touch are one. Other formats say
//! nothing of sizes; there a block is as large as what was asked for.

use super::events::Recorded;
use super::recording::Recording;
use std::collections::{BTreeMap, BTreeSet};
use vramlab::PoolKind;
use vramlab::backends::CachingSettings;
use vramlab::histories::trace::{Action, Origin, StackId};
use vramlab::policy::size::torch::{SMALL_MAX, round_size};
use vramlab::policy::split::Split;

/// The number of an event that was before the first.
pub(super) const BEFORE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) bytes: u64,
    pub(super) stream: u64,
    pub(super) small: bool,
    expandable: bool,
}

impl Segment {
    pub(super) fn pool(&self) -> Pool {
        Pool { stream: self.stream, small: self.small }
    }
}

/// Segments from which a request may be served: those of a stream, for small requests or for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pool {
    pub(super) stream: u64,
    pub(super) small: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) requested: u64,
    pub(super) stream: u64,
    /// Index of the event that allocated it, or [`BEFORE`].
    pub(super) born: u32,
    /// Whether it was freed and waits for other streams, since this event.
    pub(super) pending: Option<u32>,
    pub(super) origin: Origin,
    /// The last stack before the allocation, for blocks without frames.
    pub(super) near: StackId,
    /// Whether it lies in a segment that the history shows.
    inside: bool,
}

#[derive(Clone, Copy, Debug)]
struct Gap {
    bytes: u64,
    pool: Pool,
}

/// What adds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) reserved: u64,
    pub(super) active: u64,
    pub(super) requested: u64,
    pub(super) pending: u64,
}

#[derive(Debug)]
pub(super) struct Memory {
    pytorch: bool,
    settings: CachingSettings,
    split: Split,
    pub(super) segments: BTreeMap<u64, Segment>,
    pub(super) blocks: BTreeMap<u64, Block>,
    free: BTreeMap<u64, Gap>,
    by_size: BTreeSet<(Pool, u64, u64)>,
    free_bytes: BTreeMap<Pool, u64>,
    waiting: BTreeSet<u64>,
    pub(super) totals: Totals,
    /// The last stack that was not empty.
    pub(super) near: StackId,
}

impl Memory {
    /// What was there before the first event.
    pub(super) fn new(recording: &Recording) -> Self {
        let settings = recording.settings;
        let split = Split::Torch {
            max_split: settings.max_split_size.unwrap_or(u64::MAX),
            max_non_split_rounding: settings.max_non_split_rounding,
        };
        let mut out = Self {
            pytorch: recording.pytorch,
            settings,
            split,
            segments: BTreeMap::new(),
            blocks: BTreeMap::new(),
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            free_bytes: BTreeMap::new(),
            waiting: BTreeSet::new(),
            totals: Totals::default(),
            near: StackId::default(),
        };
        for segment in &recording.before.segments {
            let made = Segment {
                bytes: segment.bytes,
                stream: segment.stream,
                small: segment.small,
                expandable: segment.expandable,
            };
            out.reserve(segment.addr, made);
        }
        for block in &recording.before.blocks {
            let size = block.bytes.unwrap_or_else(|| out.rounded(block.requested));
            let next = out.blocks.range(block.addr..).next().map_or(u64::MAX, |(at, _)| at - block.addr);
            out.place(block.addr, block.requested, Some(size.min(next)), block.stream, BEFORE, block.origin);
            if block.pending {
                out.request_free(block.addr, BEFORE);
            }
        }
        out
    }

    /// Bytes as the allocator rounds them.
    pub(super) fn rounded(&self, bytes: u64) -> u64 {
        if self.pytorch { round_size(bytes, &self.settings.roundup_power2_divisions) } else { bytes }
    }

    /// The pool that serves such a request.
    pub(super) fn pool_of(&self, stream: u64, bytes: u64) -> Pool {
        Pool { stream, small: self.rounded(bytes) <= SMALL_MAX }
    }

    /// Does what an event says. `at_once`: the free completes with the next event.
    pub(super) fn apply(&mut self, recording: &Recording, event: &Recorded, index: u32, at_once: bool) {
        if !event.origin.stack.is_empty() {
            self.near = event.origin.stack;
        }
        let Recorded { addr, bytes, stream, .. } = *event;
        match event.action {
            Action::Alloc if bytes > 0 => self.place(addr, bytes, None, stream, index, event.origin),
            Action::FreeRequested => {
                self.request_free(addr, index);
                if at_once {
                    self.complete(addr);
                }
            }
            Action::FreeCompleted => self.complete(addr),
            Action::SegmentAlloc | Action::SegmentMap if bytes > 0 => {
                let expandable = event.action == Action::SegmentMap;
                let small = recording.is_small(addr, bytes, expandable);
                self.reserve(addr, Segment { bytes, stream, small, expandable });
            }
            Action::SegmentFree | Action::SegmentUnmap => self.release(addr, bytes),
            _ => {}
        }
    }

    pub(super) fn segment_of(&self, addr: u64) -> Option<(u64, Segment)> {
        let (start, segment) = self.segments.range(..=addr).next_back()?;
        (addr - start < segment.bytes).then_some((*start, *segment))
    }

    fn add_gap(&mut self, start: u64, bytes: u64, pool: Pool) {
        self.free.insert(start, Gap { bytes, pool });
        self.by_size.insert((pool, bytes, start));
        *self.free_bytes.entry(pool).or_default() += bytes;
    }

    fn remove_gap(&mut self, start: u64) -> Option<Gap> {
        let gap = self.free.remove(&start)?;
        self.by_size.remove(&(gap.pool, gap.bytes, start));
        if let Some(sum) = self.free_bytes.get_mut(&gap.pool) {
            *sum -= gap.bytes;
        }
        Some(gap)
    }

    /// Makes a range free and joins it with what is free beside it in its segment.
    fn free_range(&mut self, start: u64, bytes: u64, pool: Pool) {
        let Some((segment, whole)) = self.segment_of(start) else { return };
        let (mut from, mut to) = (start, start + bytes);
        if let Some((&before, gap)) = self.free.range(segment..start).next_back()
            && before + gap.bytes == from
        {
            from = before;
        }
        if to < segment + whole.bytes && self.free.contains_key(&to) {
            to += self.remove_gap(to).map_or(0, |gap| gap.bytes);
        }
        if from < start {
            self.remove_gap(from);
        }
        self.add_gap(from, to - from, pool);
    }

    fn reserve(&mut self, addr: u64, made: Segment) {
        let (mut start, mut whole) = (addr, made);
        // What contradicts the events before does not count twice.
        if self.segments.range(..addr + made.bytes).next_back().is_some_and(|(at, old)| at + old.bytes > addr) {
            return;
        }
        self.totals.reserved += made.bytes;
        if made.expandable {
            let joins = |other: &Segment| other.expandable && other.pool() == made.pool();
            if let Some((&before, other)) = self.segments.range(..addr).next_back()
                && before + other.bytes == addr
                && joins(other)
            {
                (start, whole.bytes) = (before, other.bytes + whole.bytes);
            }
            let behind = addr + made.bytes;
            if let Some(other) = self.segments.get(&behind).copied().filter(joins) {
                self.segments.remove(&behind);
                whole.bytes += other.bytes;
            }
        }
        self.segments.insert(start, whole);
        self.free_range(addr, made.bytes, made.pool());
    }

    fn release(&mut self, addr: u64, bytes: u64) {
        let Some((start, segment)) = self.segment_of(addr) else { return };
        let (from, to) = if segment.expandable {
            (addr, (addr + bytes).min(start + segment.bytes))
        } else {
            (start, start + segment.bytes)
        };
        // What lies in it goes with it.
        for at in self.blocks.range(from..to).map(|(at, _)| *at).collect::<Vec<u64>>() {
            self.forget(at);
        }
        let first = self.free.range(..=from).next_back().map_or(from, |(at, _)| *at);
        for at in self.free.range(first..to).map(|(at, _)| *at).collect::<Vec<u64>>() {
            let Some(gap) = self.free.get(&at).copied().filter(|gap| at + gap.bytes > from) else { continue };
            self.remove_gap(at);
            if at < from {
                self.add_gap(at, from - at, gap.pool);
            }
            if at + gap.bytes > to {
                self.add_gap(to, at + gap.bytes - to, gap.pool);
            }
        }
        self.segments.remove(&start);
        if start < from {
            self.segments.insert(start, Segment { bytes: from - start, ..segment });
        }
        if to < start + segment.bytes {
            self.segments.insert(to, Segment { bytes: start + segment.bytes - to, ..segment });
        }
        self.totals.reserved -= to - from;
    }

    fn place(&mut self, addr: u64, requested: u64, size: Option<u64>, stream: u64, born: u32, origin: Origin) {
        // A free whose completion the history lacks.
        if self.blocks.contains_key(&addr) {
            self.request_free(addr, born);
            self.complete(addr);
        }
        let rounded = size.unwrap_or_else(|| self.rounded(requested));
        let found = self.free.range(..=addr).next_back().map(|(start, gap)| (*start, *gap));
        let gap = found.filter(|(start, gap)| start + gap.bytes > addr);
        let mut bytes = rounded;
        if let Some((start, gap)) = gap {
            self.remove_gap(start);
            // Other allocators hand out parts of a free block that are not its front.
            if addr > start {
                self.add_gap(start, addr - start, gap.pool);
            }
            let room = start + gap.bytes - addr;
            bytes = rounded.min(room);
            let segment = self.segment_of(addr).map(|(_, segment)| segment);
            let fine = gap.pool.small || segment.is_some_and(|segment| segment.expandable);
            let kind = if fine { PoolKind::Small } else { PoolKind::Large };
            let cuts =
                if size.is_some() || !self.pytorch { room > bytes } else { self.split.cuts(Some(kind), bytes, room) };
            if cuts {
                self.add_gap(addr + bytes, room - bytes, gap.pool);
            } else {
                bytes = room;
            }
        }
        let near = if origin.stack.is_empty() { self.near } else { StackId::default() };
        let inside = gap.is_some();
        self.totals.active += bytes;
        self.totals.requested += requested;
        self.blocks.insert(addr, Block { bytes, requested, stream, born, pending: None, origin, near, inside });
    }

    fn request_free(&mut self, addr: u64, index: u32) {
        let Some(block) = self.blocks.get_mut(&addr).filter(|block| block.pending.is_none()) else { return };
        block.pending = Some(index);
        self.totals.requested -= block.requested;
        self.totals.pending += block.bytes;
        self.waiting.insert(addr);
    }

    /// Takes a block out of the sums.
    fn forget(&mut self, addr: u64) -> Option<Block> {
        let block = self.blocks.remove(&addr)?;
        self.totals.active -= block.bytes;
        if block.pending.is_some() {
            self.totals.pending -= block.bytes;
            self.waiting.remove(&addr);
        } else {
            self.totals.requested -= block.requested;
        }
        Some(block)
    }

    fn complete(&mut self, addr: u64) {
        if self.blocks.get(&addr).is_none_or(|block| block.pending.is_none()) {
            return;
        }
        if let Some(block) = self.forget(addr)
            && block.inside
            && let Some((_, segment)) = self.segment_of(addr)
        {
            self.free_range(addr, block.bytes, segment.pool());
        }
    }

    /// The largest free block of a pool.
    pub(super) fn largest(&self, pool: Pool) -> u64 {
        let all = self.by_size.range((pool, 0, 0)..=(pool, u64::MAX, u64::MAX));
        all.into_iter().next_back().map_or(0, |(_, bytes, _)| *bytes)
    }

    /// The smallest free block of a pool that has at least so many bytes.
    pub(super) fn smallest_from(&self, pool: Pool, bytes: u64) -> Option<u64> {
        let mut all = self.by_size.range((pool, bytes, 0)..=(pool, u64::MAX, u64::MAX));
        all.next().map(|(_, bytes, _)| *bytes)
    }

    /// Free bytes of a pool.
    pub(super) fn free_in(&self, pool: Pool) -> u64 {
        self.free_bytes.get(&pool).copied().unwrap_or(0)
    }

    /// Pools that have a segment, or had one.
    pub(super) fn pools(&self) -> impl Iterator<Item = Pool> + '_ {
        self.free_bytes.keys().copied()
    }

    /// The free ranges of a segment.
    pub(super) fn free_ranges(&self, start: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.free.range(start..start + bytes).map(|(at, gap)| (*at, gap.bytes))
    }

    /// The largest range of a pool that would be free if no free waited.
    pub(super) fn largest_with_pending(&self, pool: Pool) -> u64 {
        let (mut largest, mut done) = (0, 0);
        for &addr in &self.waiting {
            let Some((segment, whole)) = self.segment_of(addr).filter(|(_, segment)| segment.pool() == pool) else {
                continue;
            };
            if addr < done {
                continue;
            }
            let (mut from, mut to) = (addr, addr);
            if let Some((&before, gap)) = self.free.range(segment..addr).next_back()
                && before + gap.bytes == addr
            {
                from = before;
            }
            while to < segment + whole.bytes {
                to += match (self.free.get(&to), self.blocks.get(&to)) {
                    (Some(gap), _) => gap.bytes,
                    (None, Some(block)) if block.pending.is_some() => block.bytes,
                    _ => break,
                };
            }
            (largest, done) = (largest.max(to - from), to);
        }
        largest
    }
}
