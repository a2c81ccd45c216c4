//! The memory of the allocator from which a history was recorded: the events of one GPU, what was there before the first of
//! them, and the segments, the blocks in them and what lies free between, followed event by event.
//!
//! Unlike a [replay](super::replay) this asks no allocator anything. Blocks lie where the history says and are as large as
//! PyTorch makes them: a request takes the front of a free block, and what is left is split off if it is large enough. Free
//! blocks of a segment that touch are one. Parts of an expandable segment that touch are one segment here, which grows and
//! shrinks. Other formats say nothing of sizes; there a block is as large as what was asked for.
//!
//! A history may lack events: a ring buffer lost the first ones, or the program did not record all of them. What was there
//! [before](InitialState) is told from what goes without having come and from what is held at the end. Blocks outside of all segments
//! count as [active](Totals), and [`is_whole`](Memory::is_whole) says whether there are any.

mod contents;
mod events;
mod initial_state;
mod levels;
mod lifetimes;
mod limit;
mod pool;
mod prior_cache;
mod rules;

pub use contents::Contents;
pub use events::{Events, RecordedEvent};
pub use initial_state::{InitialBlock, InitialSegment, InitialState};
pub use levels::{Levels, Peaks};
pub use lifetimes::{BlockLifetime, Lifetimes, NEVER, SegmentLifetime, SegmentLifetimes};
pub use limit::LimitBound;
pub use pool::{Pool, Segment};
pub use prior_cache::PriorCache;
pub use rules::Rules;

use crate::formats::{Action, Origin, StackId};
use crate::steps;
use pool::{Gap, Gaps};
use std::collections::BTreeMap;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// The index of an event that was before the first.
pub const BEFORE: u32 = u32::MAX;

/// A block that is in use, or was freed and waits for other streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// A block that comes: what was asked for and what is known of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewBlock {
    /// What was asked for.
    pub(crate) requested: u64,
    /// Size of the block, where it is known; otherwise the rules tell it.
    pub(crate) size: Option<u64>,
    pub(crate) stream: u64,
    /// Index of the event.
    pub(crate) at: u32,
    pub(crate) origin: Origin,
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

impl Totals {
    /// Bytes of blocks that the program holds.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.active - self.pending
    }
}

/// The memory after an event. Each event costs O(log n) in the blocks, and what they take is claimed from a budget.
#[derive(Debug)]
pub struct Memory {
    rules: Rules,
    segments: BTreeMap<u64, Segment>,
    blocks: BTreeMap<u64, Block>,
    /// What is free.
    gaps: Gaps,
    /// What would be free if no free waited.
    gaps_with_pending: Gaps,
    totals: Totals,
    /// Blocks outside of all segments.
    outside: usize,
    near: StackId,
    budget: Budget,
    claim: Claim,
}

/// Memory of a map's entry where its nodes are as empty as they get.
pub(crate) const fn in_tree<K, V>() -> usize {
    3 * size_of::<(K, V)>() + 16
}

impl Memory {
    /// Without segments.
    #[must_use]
    pub fn new(rules: Rules, budget: &Budget) -> Self {
        Self {
            rules,
            segments: BTreeMap::new(),
            blocks: BTreeMap::new(),
            gaps: Gaps::default(),
            gaps_with_pending: Gaps::default(),
            totals: Totals::default(),
            outside: 0,
            near: StackId::default(),
            budget: budget.clone(),
            claim: budget.claim(),
        }
    }

    /// What was there before the first event.
    ///
    /// # Errors
    /// [`OverBudget`] when it takes more than there is.
    pub fn beginning(rules: Rules, before: &InitialState, budget: &Budget) -> Result<Self, OverBudget> {
        let mut out = Self::new(rules, budget);
        for segment in &before.segments {
            out.reserve(segment.addr, segment.segment)?;
        }
        for block in &before.blocks {
            let size = block.bytes.unwrap_or_else(|| out.rules.rounded(block.requested));
            let next = out.blocks.range(block.addr..).next().map_or(u64::MAX, |(at, _)| at - block.addr);
            let (requested, size, origin) = (block.requested, Some(size.min(next)), block.origin);
            out.place(block.addr, NewBlock { requested, size, stream: block.stream, at: BEFORE, origin })?;
            if block.pending {
                out.request_free(block.addr, BEFORE);
            }
        }
        Ok(out)
    }

    /// A copy, which takes memory of its own. O(n).
    ///
    /// # Errors
    /// [`OverBudget`] when it takes more than there is.
    pub fn copy(&self) -> Result<Self, OverBudget> {
        // Nodes of a map that was copied are two thirds full.
        let blocks = self.blocks.len() * size_of::<(u64, Block)>();
        let gaps = (self.gaps.len() + self.gaps_with_pending.len()) * size_of::<(u64, Gap, u64, u32)>();
        let segments = self.segments.len() * size_of::<(u64, Segment)>();
        let mut claim = self.budget.claim();
        claim.add((blocks + gaps + segments) / 2 * 3)?;
        Ok(Self {
            rules: self.rules.clone(),
            segments: self.segments.clone(),
            blocks: self.blocks.clone(),
            gaps: self.gaps.clone(),
            gaps_with_pending: self.gaps_with_pending.clone(),
            budget: self.budget.clone(),
            claim,
            ..*self
        })
    }

    /// Does what an event says. `at_once`: of a free that completes at once.
    ///
    /// # Errors
    /// [`OverBudget`] when what it adds takes more than there is.
    pub fn apply(&mut self, event: &RecordedEvent, index: u32, at_once: bool) -> Result<(), OverBudget> {
        steps::count(1);
        let RecordedEvent { addr, bytes, stream, origin, .. } = *event;
        if !origin.stack.is_empty() {
            self.near = origin.stack;
        }
        match event.action {
            Action::Alloc if bytes > 0 => {
                self.place(addr, NewBlock { requested: bytes, size: None, stream, at: index, origin })?;
            }
            Action::FreeRequested if at_once => self.free(addr),
            Action::FreeCompleted if at_once => {}
            Action::FreeRequested => self.request_free(addr, index),
            // Of a block that was not freed only the whole of it goes.
            Action::FreeCompleted
                if self.blocks.get(&addr).is_some_and(|block| block.pending.is_some() || block.requested == bytes) =>
            {
                self.free(addr);
            }
            Action::SegmentAlloc | Action::SegmentMap if bytes > 0 => {
                let expandable = event.action == Action::SegmentMap;
                let small = self.rules.is_small_segment(addr, bytes, expandable);
                self.reserve(addr, Segment { bytes, stream, small, expandable })?;
            }
            Action::SegmentFree | Action::SegmentUnmap => self.release(addr, bytes),
            _ => {}
        }
        Ok(())
    }

    /// Memory comes from the device. A part of an expandable segment joins what touches it.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub(crate) fn reserve(&mut self, addr: u64, made: Segment) -> Result<(), OverBudget> {
        self.make_room()?;
        let (mut start, mut whole) = (addr, made);
        let end = addr + made.bytes;
        // What contradicts the events before does not count twice.
        if self.segments.range(..end).next_back().is_some_and(|(at, old)| at + old.bytes > addr) {
            return Ok(());
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
            if let Some(other) = self.segments.get(&end).copied().filter(joins) {
                self.segments.remove(&end);
                whole.bytes += other.bytes;
            }
        }
        self.segments.insert(start, whole);
        self.gaps.give(addr, made.bytes, (start, whole));
        self.gaps_with_pending.give(addr, made.bytes, (start, whole));
        Ok(())
    }

    /// A segment goes back, or a part of an expandable one, with what lies in it.
    pub(crate) fn release(&mut self, addr: u64, bytes: u64) {
        let Some((start, segment)) = self.segment_of(addr) else { return };
        let end = start + segment.bytes;
        let (from, to) = if segment.expandable { (addr, (addr + bytes).min(end)) } else { (start, end) };
        while let Some((&at, _)) = self.blocks.range(from..to).next() {
            steps::count(1);
            self.forget(at);
        }
        self.gaps.take(from, to);
        self.gaps_with_pending.take(from, to);
        self.segments.remove(&start);
        for (from, to) in [(start, from), (to, end)] {
            if from < to {
                self.segments.insert(from, Segment { bytes: to - from, ..segment });
            }
        }
        self.totals.reserved -= to - from;
    }

    /// A request is served by a block at an address.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another block.
    pub(crate) fn place(&mut self, addr: u64, new: NewBlock) -> Result<(), OverBudget> {
        self.make_room()?;
        let NewBlock { requested, size, stream, at, origin } = new;
        // The history lacks the completions of frees of what lay here.
        while let Some((&at, block)) = self.blocks.range(..addr + requested).next_back()
            && at + block.bytes > addr
            && (at == addr || block.pending.is_some())
        {
            steps::count(1);
            self.free(at);
        }
        let gap = self.gaps.around(addr);
        let mut bytes = size.unwrap_or_else(|| self.rules.rounded(requested));
        if let Some((start, gap)) = gap {
            // Other allocators hand out parts of a free block that are not its front.
            let room = start + gap.bytes - addr;
            bytes = bytes.min(room);
            let cuts = match size {
                Some(_) => room > bytes,
                None => self.rules.cuts(gap.pool.small || gap.expandable, bytes, room),
            };
            bytes = if cuts { bytes } else { room };
            self.gaps.take(addr, addr + bytes);
            self.gaps_with_pending.take(addr, addr + bytes);
        }
        let near = if origin.stack.is_empty() { self.near } else { StackId::default() };
        let inside = gap.is_some();
        self.totals.active += bytes;
        self.totals.requested += requested;
        self.outside += usize::from(!inside);
        self.blocks.insert(addr, Block { bytes, requested, stream, born: at, pending: None, origin, near, inside });
        Ok(())
    }

    /// The program frees a block that other streams may still use.
    pub(crate) fn request_free(&mut self, addr: u64, at: u32) {
        let Some(block) = self.blocks.get_mut(&addr).filter(|block| block.pending.is_none()) else { return };
        block.pending = Some(at);
        self.totals.requested -= block.requested;
        self.totals.pending += block.bytes;
        let block = *block;
        if let Some(segment) = self.segment_of(addr).filter(|_| block.inside) {
            self.gaps_with_pending.give(addr, block.bytes, segment);
        }
    }

    /// Frees a block, whether it waits or not: a completion without a request before it is the whole free.
    pub(crate) fn free(&mut self, addr: u64) {
        if let Some(block) = self.forget(addr)
            && block.inside
            && let Some(segment) = self.segment_of(addr)
        {
            self.gaps.give(addr, block.bytes, segment);
            if block.pending.is_none() {
                self.gaps_with_pending.give(addr, block.bytes, segment);
            }
        }
    }

    /// The free of a block completes, if it was requested or if the block lies outside of all segments.
    pub(crate) fn complete(&mut self, addr: u64) {
        if self.blocks.get(&addr).is_some_and(|block| block.pending.is_some() || !block.inside) {
            self.free(addr);
        }
    }

    /// Takes a block out of the sums.
    fn forget(&mut self, addr: u64) -> Option<Block> {
        let block = self.blocks.remove(&addr)?;
        self.totals.active -= block.bytes;
        self.outside -= usize::from(!block.inside);
        if block.pending.is_some() {
            self.totals.pending -= block.bytes;
        } else {
            self.totals.requested -= block.requested;
        }
        Some(block)
    }

    /// Claims what one more block, or one more segment, adds at most.
    fn make_room(&mut self) -> Result<(), OverBudget> {
        let bytes = (self.blocks.len() + 1) * in_tree::<u64, Block>()
            + (self.gaps.len() + self.gaps_with_pending.len() + 4) * (in_tree::<u64, Gap>() + in_tree::<u64, u32>())
            + (self.segments.len() + 2) * in_tree::<u64, Segment>();
        // In steps, so that most events find what they need.
        self.claim.set(bytes.next_multiple_of(1 << 16))
    }
}

/// What there is.
impl Memory {
    /// How blocks are cut.
    #[must_use]
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Sums.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Segments by address.
    #[must_use]
    pub fn segments(&self) -> &BTreeMap<u64, Segment> {
        &self.segments
    }

    /// Blocks by address.
    #[must_use]
    pub fn blocks(&self) -> &BTreeMap<u64, Block> {
        &self.blocks
    }

    /// The last stack that was not empty.
    #[must_use]
    pub fn near(&self) -> StackId {
        self.near
    }

    /// Whether every block lies in a segment that the history shows.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.outside == 0
    }

    /// Size of the block at an address, in use or pending, if it lies in a segment that the history shows.
    pub(crate) fn size_of(&self, addr: u64) -> Option<u64> {
        self.blocks.get(&addr).filter(|block| block.inside).map(|block| block.bytes)
    }

    /// The segment that an address lies in, and where that begins.
    #[must_use]
    pub fn segment_of(&self, addr: u64) -> Option<(u64, Segment)> {
        let (start, segment) = self.segments.range(..=addr).next_back()?;
        (addr - start < segment.bytes).then_some((*start, *segment))
    }

    /// The pool that serves such a request.
    #[must_use]
    pub fn pool_of(&self, stream: u64, bytes: u64) -> Pool {
        Pool { stream, small: self.rules.is_small(self.rules.rounded(bytes)) }
    }

    /// Pools that have a segment, or had one.
    pub fn pools(&self) -> impl Iterator<Item = Pool> + '_ {
        self.gaps.holes.pools()
    }

    /// Free bytes of a pool.
    #[must_use]
    pub fn free_bytes(&self, pool: Pool) -> u64 {
        self.gaps.holes.bytes(pool)
    }

    /// The largest free block of a pool.
    #[must_use]
    pub fn largest_hole(&self, pool: Pool) -> u64 {
        self.gaps.holes.largest(pool)
    }

    /// The smallest free block of a pool that has at least so many bytes.
    #[must_use]
    pub fn smallest_hole_from(&self, pool: Pool, bytes: u64) -> Option<u64> {
        self.gaps.holes.smallest_from(pool, bytes)
    }

    /// The largest range of a pool that would be free if no free waited.
    #[must_use]
    pub fn largest_with_pending(&self, pool: Pool) -> u64 {
        self.gaps_with_pending.holes.largest(pool)
    }
}
