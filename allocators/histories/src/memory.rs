//! The recorded allocator's memory: the events of one GPU, the memory before the first of them, and segments, blocks and free
//! blocks, followed event by event.
//!
//! Unlike a [replay](super::replay) this runs no allocator. Blocks have their recorded addresses and the sizes that PyTorch gives
//! them: a request takes the front of a free block, and the remainder is split off if it is large enough. Adjacent free blocks of
//! a segment coalesce. Adjacent mapped ranges of an expandable segment are one segment here, which grows and shrinks. Other
//! formats do not contain sizes; there a block has its requested size.
//!
//! A recording may lack events: a ring buffer lost the first ones, or the program did not record all of them. The [initial
//! state](InitialState) is inferred from blocks and segments that are released without having been allocated, and from those at
//! the end. Blocks outside all segments count as [active](Totals), and [`is_whole`](Memory::is_whole) returns whether there are
//! any.

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

/// The index of events before recording started.
pub const BEFORE: u32 = u32::MAX;

/// An active block: in use, or freed and pending on other streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its size.
    pub bytes: u64,
    /// Requested bytes.
    pub requested: u64,
    /// The stream that it was allocated on.
    pub stream: u64,
    /// Index of the event that allocated it, or [`BEFORE`].
    pub born: u32,
    /// The event that requested its free, if that is pending on other streams.
    pub pending: Option<u32>,
    /// Where it was allocated.
    pub origin: Origin,
    /// The last stack before the allocation, for blocks without frames.
    pub near: StackId,
    /// Whether it is in a segment of the recording.
    inside: bool,
}

/// A block to allocate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewBlock {
    /// Requested bytes.
    pub(crate) requested: u64,
    /// Size of the block, if known; otherwise it follows from the rules.
    pub(crate) size: Option<u64>,
    pub(crate) stream: u64,
    /// Index of the event.
    pub(crate) at: u32,
    pub(crate) origin: Origin,
}

/// Sums over the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes of segments.
    pub reserved: u64,
    /// Bytes of blocks.
    pub active: u64,
    /// Requested bytes that are not freed.
    pub requested: u64,
    /// Bytes of blocks that were freed and are pending on other streams.
    pub pending: u64,
}

impl Totals {
    /// Bytes of allocated blocks.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.active - self.pending
    }
}

/// The memory after an event. Each event costs O(log n) in the blocks, and their memory is claimed from a budget.
#[derive(Debug)]
pub struct Memory {
    rules: Rules,
    segments: BTreeMap<u64, Segment>,
    blocks: BTreeMap<u64, Block>,
    /// Free ranges.
    gaps: Gaps,
    /// Ranges that would be free if no free were pending.
    gaps_with_pending: Gaps,
    totals: Totals,
    /// Number of blocks outside all segments.
    outside: usize,
    near: StackId,
    budget: Budget,
    claim: Claim,
}

/// Memory of a map's entry in the emptiest nodes.
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

    /// The memory before recording started.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
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

    /// A copy, with a claim of its own. O(n).
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub fn copy(&self) -> Result<Self, OverBudget> {
        // Nodes of a copied map are two thirds full.
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

    /// Applies an event. `at_once`: it belongs to a free that completes immediately.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
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
            // A completion without a request must be of the full block.
            Action::FreeCompleted
                if self.blocks.get(&addr).is_some_and(|block| block.pending.is_some() || block.requested == bytes) =>
            {
                self.free(addr);
            }
            Action::SegmentAlloc | Action::SegmentMap if bytes > 0 => {
                let (small, expandable) = self.rules.kind(addr, bytes, event.action == Action::SegmentMap);
                self.reserve(addr, Segment { bytes, stream, small, expandable })?;
            }
            Action::SegmentFree | Action::SegmentUnmap => self.release(addr, bytes),
            _ => {}
        }
        Ok(())
    }

    /// A segment is allocated, or a range of an expandable one is mapped, which coalesces with adjacent ones.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub(crate) fn reserve(&mut self, addr: u64, made: Segment) -> Result<(), OverBudget> {
        self.make_room()?;
        let (mut start, mut coalesced) = (addr, made);
        let end = addr + made.bytes;
        // Memory that contradicts earlier events does not count twice.
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
                (start, coalesced.bytes) = (before, other.bytes + coalesced.bytes);
            }
            if let Some(other) = self.segments.get(&end).copied().filter(joins) {
                self.segments.remove(&end);
                coalesced.bytes += other.bytes;
            }
        }
        self.segments.insert(start, coalesced);
        self.gaps.give(addr, made.bytes, (start, coalesced));
        self.gaps_with_pending.give(addr, made.bytes, (start, coalesced));
        Ok(())
    }

    /// A segment is released, or a range of an expandable one is unmapped, with its blocks.
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

    /// A block is allocated at an address.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub(crate) fn place(&mut self, addr: u64, new: NewBlock) -> Result<(), OverBudget> {
        self.make_room()?;
        let NewBlock { requested, size, stream, at, origin } = new;
        // The recording lacks the completions of earlier frees at this address.
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
            // Other allocators also allocate from the middle of a free block.
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

    /// Frees a block, pending or not: a completion without a request is the complete free.
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

    /// The free of a block completes, if it was requested or if the block is outside all segments.
    pub(crate) fn complete(&mut self, addr: u64) {
        if self.blocks.get(&addr).is_some_and(|block| block.pending.is_some() || !block.inside) {
            self.free(addr);
        }
    }

    /// Removes a block from the sums.
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

    /// Claims the most that one more block or segment can add.
    fn make_room(&mut self) -> Result<(), OverBudget> {
        let bytes = (self.blocks.len() + 1) * in_tree::<u64, Block>()
            + (self.gaps.len() + self.gaps_with_pending.len() + 4) * (in_tree::<u64, Gap>() + in_tree::<u64, u32>())
            + (self.segments.len() + 2) * in_tree::<u64, Segment>();
        // In steps, so that most events find what they need.
        self.claim.set(bytes.next_multiple_of(1 << 16))
    }
}

/// Queries.
impl Memory {
    /// How blocks are split.
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

    /// Whether every block is in a segment of the recording.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.outside == 0
    }

    /// Size of the active block at an address, if it is in a segment of the recording.
    pub(crate) fn size_of(&self, addr: u64) -> Option<u64> {
        self.blocks.get(&addr).filter(|block| block.inside).map(|block| block.bytes)
    }

    /// The segment that contains an address, with its start.
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

    /// Pools that have or had a segment.
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

    /// The smallest free block of a pool with at least this many bytes.
    #[must_use]
    pub fn smallest_hole_from(&self, pool: Pool, bytes: u64) -> Option<u64> {
        self.gaps.holes.smallest_from(pool, bytes)
    }

    /// The largest range of a pool that would be free if no free were pending.
    #[must_use]
    pub fn largest_with_pending(&self, pool: Pool) -> u64 {
        self.gaps_with_pending.holes.largest(pool)
    }
}
