//! The recorded allocator's memory, followed event by event: segments, the blocks in them and what lies free between.
//!
//! Blocks lie where the history says and are as large as PyTorch makes them: a request takes the front of a free block,
//! and what is left is split off if it is large enough. Free blocks of a segment that touch are one. Other formats say
//! nothing of sizes; there a block is as large as what was asked for.

use super::events::Recorded;
use super::{Before, Rules};
use crate::contract::PoolKind;
use crate::histories::trace::{Action, Origin, StackId};
use crate::policy::size::torch::{SMALL_MAX, round_size};
use crate::policy::split::Split;
use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};

/// The index of an event that was before the first.
pub const BEFORE: u32 = u32::MAX;

/// A segment, or the mapped parts of an expandable one that lie side by side.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Its size.
    pub bytes: u64,
    /// Its stream.
    pub stream: u64,
    /// Whether small requests are served from it.
    pub small: bool,
    expandable: bool,
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

/// A block that is in use, or was freed and waits for other streams.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Its size.
    pub bytes: u64,
    /// What was asked for.
    pub requested: u64,
    /// The stream that it was allocated on.
    pub stream: u64,
    /// Index of the event that allocated it, or [`BEFORE`].
    pub born: u32,
    /// Whether it was freed and waits for other streams, since this event.
    pub pending: Option<u32>,
    /// Where it came from.
    pub origin: Origin,
    /// The last stack before the allocation, for blocks without frames.
    pub near: StackId,
    /// Whether it lies in a segment that the history shows.
    inside: bool,
}

#[derive(Clone, Copy, Debug)]
struct Gap {
    bytes: u64,
    pool: Pool,
    /// Whether its segment is.
    expandable: bool,
}

/// What is free in a pool.
#[derive(Clone, Debug, Default)]
struct Free {
    bytes: u64,
    /// How many gaps there are of each size.
    sizes: BTreeMap<u64, u32>,
}

impl Free {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        *self.sizes.entry(bytes).or_default() += 1;
    }

    fn remove(&mut self, bytes: u64) {
        self.bytes -= bytes;
        if let Entry::Occupied(mut count) = self.sizes.entry(bytes) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// What adds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes of segments.
    pub reserved: u64,
    /// Bytes of blocks.
    pub active: u64,
    /// Bytes that were asked for and are not freed.
    pub requested: u64,
    /// Bytes of blocks that were freed and wait for other streams.
    pub pending: u64,
}

/// The memory after an event.
#[derive(Clone, Debug)]
pub struct Memory {
    rules: Rules,
    split: Split,
    /// By address.
    pub segments: BTreeMap<u64, Segment>,
    /// By address.
    pub blocks: BTreeMap<u64, Block>,
    gaps: BTreeMap<u64, Gap>,
    /// Pools that have a segment, or had one.
    free: BTreeMap<Pool, Free>,
    waiting: BTreeSet<u64>,
    /// Sums.
    pub totals: Totals,
    /// The last stack that was not empty.
    pub near: StackId,
}

impl Memory {
    /// What was there before the first event.
    #[must_use]
    pub fn new(rules: &Rules, before: &Before) -> Self {
        let split = Split::Torch {
            max_split: rules.settings.max_split_size.unwrap_or(u64::MAX),
            max_non_split_rounding: rules.settings.max_non_split_rounding,
        };
        let mut out = Self {
            rules: rules.clone(),
            split,
            segments: BTreeMap::new(),
            blocks: BTreeMap::new(),
            gaps: BTreeMap::new(),
            free: BTreeMap::new(),
            waiting: BTreeSet::new(),
            totals: Totals::default(),
            near: StackId::default(),
        };
        for segment in &before.segments {
            let made = Segment {
                bytes: segment.bytes,
                stream: segment.stream,
                small: segment.small,
                expandable: segment.expandable,
            };
            out.reserve(segment.addr, made);
        }
        for block in &before.blocks {
            let size = block.bytes.unwrap_or_else(|| out.rounded(block.requested));
            let next = out.blocks.range(block.addr..).next().map_or(u64::MAX, |(at, _)| at - block.addr);
            out.place(block.addr, block.requested, Some(size.min(next)), block.stream, BEFORE, block.origin);
            if block.pending {
                out.request_free(block.addr, BEFORE);
            }
        }
        out
    }

    /// About how many bytes a copy takes: nodes of the trees are two thirds full.
    #[must_use]
    pub fn copied_bytes(&self) -> usize {
        let blocks = self.blocks.len() * size_of::<(u64, Block)>();
        let gaps = self.gaps.len() * size_of::<(u64, Gap, u64, u32)>();
        let segments = self.segments.len() * size_of::<(u64, Segment)>();
        (blocks + gaps + segments + self.waiting.len() * size_of::<u64>()) / 2 * 3
    }

    /// Bytes as the allocator rounds them.
    #[must_use]
    pub fn rounded(&self, bytes: u64) -> u64 {
        if self.rules.pytorch { round_size(bytes, &self.rules.settings.roundup_power2_divisions) } else { bytes }
    }

    /// The pool that serves such a request.
    #[must_use]
    pub fn pool_of(&self, stream: u64, bytes: u64) -> Pool {
        Pool { stream, small: self.rounded(bytes) <= SMALL_MAX }
    }

    /// Does what an event says. `at_once`: of a free that completes at once.
    pub fn apply(&mut self, event: &Recorded, index: u32, at_once: bool) {
        if !event.origin.stack.is_empty() {
            self.near = event.origin.stack;
        }
        let Recorded { addr, bytes, stream, .. } = *event;
        match event.action {
            Action::Alloc if bytes > 0 => self.place(addr, bytes, None, stream, index, event.origin),
            Action::FreeRequested if at_once => self.free(addr),
            Action::FreeCompleted if at_once => {}
            Action::FreeRequested => self.request_free(addr, index),
            Action::FreeCompleted => self.free(addr),
            Action::SegmentAlloc | Action::SegmentMap if bytes > 0 => {
                let expandable = event.action == Action::SegmentMap;
                let small = self.rules.is_small(addr, bytes, expandable);
                self.reserve(addr, Segment { bytes, stream, small, expandable });
            }
            Action::SegmentFree | Action::SegmentUnmap => self.release(addr, bytes),
            _ => {}
        }
    }

    /// The segment that an address lies in, and where that begins.
    #[must_use]
    pub fn segment_of(&self, addr: u64) -> Option<(u64, Segment)> {
        let (start, segment) = self.segments.range(..=addr).next_back()?;
        (addr - start < segment.bytes).then_some((*start, *segment))
    }

    fn add_gap(&mut self, start: u64, gap: Gap) {
        self.free.entry(gap.pool).or_default().add(gap.bytes);
        // Where events contradict each other something may be free twice.
        if let Some(before) = self.gaps.insert(start, gap) {
            self.free.entry(before.pool).or_default().remove(before.bytes);
        }
    }

    fn remove_gap(&mut self, start: u64) -> Option<Gap> {
        let gap = self.gaps.remove(&start)?;
        self.free.entry(gap.pool).or_default().remove(gap.bytes);
        Some(gap)
    }

    /// The last gap that begins at an address or before.
    fn gap_to(&self, addr: u64) -> Option<(u64, Gap)> {
        self.gaps.range(..=addr).next_back().map(|(start, gap)| (*start, *gap))
    }

    fn resize_gap(&mut self, start: u64, bytes: u64) {
        let Some(gap) = self.gaps.get_mut(&start) else { return };
        let free = self.free.entry(gap.pool).or_default();
        free.remove(gap.bytes);
        free.add(bytes);
        gap.bytes = bytes;
    }

    /// Makes a range of a segment free and joins it with what is free beside it there.
    fn free_range(&mut self, start: u64, bytes: u64, (at, segment): (u64, Segment)) {
        let end = start + bytes;
        let behind = if end < at + segment.bytes { self.remove_gap(end) } else { None };
        let bytes = bytes + behind.map_or(0, |gap| gap.bytes);
        match self.gaps.range(at..start).next_back() {
            Some((&before, gap)) if before + gap.bytes == start => self.resize_gap(before, gap.bytes + bytes),
            _ => self.add_gap(start, Gap { bytes, pool: segment.pool(), expandable: segment.expandable }),
        }
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
        self.free_range(addr, made.bytes, (start, whole));
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
        let first = self.gap_to(from).map_or(from, |(at, _)| at);
        for (at, gap) in self.gaps.range(first..to).map(|(at, gap)| (*at, *gap)).collect::<Vec<_>>() {
            if at + gap.bytes <= from {
                continue;
            }
            self.remove_gap(at);
            if at < from {
                self.add_gap(at, Gap { bytes: from - at, ..gap });
            }
            if at + gap.bytes > to {
                self.add_gap(to, Gap { bytes: at + gap.bytes - to, ..gap });
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
            self.free(addr);
        }
        let rounded = size.unwrap_or_else(|| self.rounded(requested));
        let gap = self.gap_to(addr).filter(|(start, gap)| start + gap.bytes > addr);
        let mut bytes = rounded;
        if let Some((start, gap)) = gap {
            // Other allocators hand out parts of a free block that are not its front.
            if addr > start {
                self.resize_gap(start, addr - start);
            } else {
                self.remove_gap(start);
            }
            let room = start + gap.bytes - addr;
            bytes = rounded.min(room);
            let kind = if gap.pool.small || gap.expandable { PoolKind::Small } else { PoolKind::Large };
            let cuts = if size.is_some() || !self.rules.pytorch {
                room > bytes
            } else {
                self.split.cuts(Some(kind), bytes, room)
            };
            if cuts {
                self.add_gap(addr + bytes, Gap { bytes: room - bytes, ..gap });
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

    /// Frees a block, whether it waits or not: a completion without a request before it is the whole free.
    fn free(&mut self, addr: u64) {
        if let Some(block) = self.forget(addr)
            && block.inside
            && let Some(segment) = self.segment_of(addr)
        {
            self.free_range(addr, block.bytes, segment);
        }
    }

    /// The largest free block of a pool.
    #[must_use]
    pub fn largest(&self, pool: Pool) -> u64 {
        let largest = self.free.get(&pool).and_then(|free| free.sizes.last_key_value());
        largest.map_or(0, |(bytes, _)| *bytes)
    }

    /// The smallest free block of a pool that has at least so many bytes.
    #[must_use]
    pub fn smallest_from(&self, pool: Pool, bytes: u64) -> Option<u64> {
        self.free.get(&pool)?.sizes.range(bytes..).next().map(|(bytes, _)| *bytes)
    }

    /// Free bytes of a pool.
    #[must_use]
    pub fn free_in(&self, pool: Pool) -> u64 {
        self.free.get(&pool).map_or(0, |free| free.bytes)
    }

    /// Pools that have a segment, or had one.
    pub fn pools(&self) -> impl Iterator<Item = Pool> + '_ {
        self.free.keys().copied()
    }

    /// The free ranges of a segment.
    pub fn free_ranges(&self, start: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.gaps.range(start..start + bytes).map(|(at, gap)| (*at, gap.bytes))
    }

    /// The largest range of a pool that would be free if no free waited.
    #[must_use]
    pub fn largest_with_pending(&self, pool: Pool) -> u64 {
        let (mut largest, mut done) = (0, 0);
        for &addr in &self.waiting {
            let Some((segment, whole)) = self.segment_of(addr).filter(|(_, segment)| segment.pool() == pool) else {
                continue;
            };
            if addr < done {
                continue;
            }
            let (mut from, mut to) = (addr, addr);
            if let Some((&before, gap)) = self.gaps.range(segment..addr).next_back()
                && before + gap.bytes == addr
            {
                from = before;
            }
            while to < segment + whole.bytes {
                to += match (self.gaps.get(&to), self.blocks.get(&to)) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::CachingSettings;
    use crate::budget::Budget;
    use crate::histories::recorded::Events;
    use crate::histories::trace::{Event, ReadOptions, read_origins};
    use std::path::Path;

    /// The sums are those of what is there, and blocks and gaps fill the segments.
    fn check(memory: &Memory) {
        let blocks = || memory.blocks.values();
        let pending = |block: &&Block| block.pending.is_some();
        let totals = Totals {
            reserved: memory.segments.values().map(|segment| segment.bytes).sum(),
            active: blocks().map(|block| block.bytes).sum(),
            requested: blocks().filter(|block| !pending(block)).map(|block| block.requested).sum(),
            pending: blocks().filter(pending).map(|block| block.bytes).sum(),
        };
        assert_eq!(memory.totals, totals);
        let waiting = memory.blocks.iter().filter(|(_, block)| block.pending.is_some()).map(|(addr, _)| *addr);
        assert!(memory.waiting.iter().copied().eq(waiting));
        let mut free: BTreeMap<Pool, Vec<u64>> = BTreeMap::new();
        for (&start, segment) in &memory.segments {
            let range = start..start + segment.bytes;
            let inside = memory.blocks.range(range.clone()).map(|(at, block)| (*at, block.bytes));
            let mut parts: Vec<(u64, u64)> = inside.chain(memory.free_ranges(start, segment.bytes)).collect();
            parts.sort_unstable();
            let end = parts.iter().fold(start, |at, (from, bytes)| if at == *from { at + bytes } else { at });
            assert_eq!(end, range.end, "{parts:?}");
            free.entry(segment.pool())
                .or_default()
                .extend(memory.free_ranges(start, segment.bytes).map(|(_, bytes)| bytes));
        }
        for (pool, sizes) in free {
            assert_eq!(memory.free_in(pool), sizes.iter().sum::<u64>());
            assert_eq!(memory.largest(pool), sizes.iter().copied().max().unwrap_or(0));
            for bytes in &sizes {
                assert_eq!(memory.smallest_from(pool, *bytes), Some(*bytes));
                let next = sizes.iter().copied().filter(|other| other > bytes).min();
                assert_eq!(memory.smallest_from(pool, bytes + 1), next);
            }
        }
    }

    #[test]
    fn sums_are_those_of_what_is_there() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        for name in ["small.p4.pickle", "streams.expandable.pickle.xz"] {
            let mut events = Events::new(&Budget::default());
            let (summary, origins) =
                read_origins(&fixtures.join(name), &ReadOptions::default(), &mut |event, origin, _| {
                    let Event { action, addr, bytes, stream, time_ns, .. } = event;
                    events.push(Recorded { addr, bytes, stream, time_ns, origin, action }).unwrap();
                    Ok(())
                })
                .unwrap();
            let rules = Rules::new(&summary, 0, &CachingSettings::default());
            let before = Before::new(&events, &rules, &summary, &origins, 0);
            let mut memory = Memory::new(&rules, &before);
            check(&memory);
            for (index, event, at_once) in events.walk(0) {
                memory.apply(&event, index as u32, at_once);
                // Every event of a long history would take long.
                if index < 200 || index % 97 == 0 {
                    check(&memory);
                }
            }
        }
    }
}
