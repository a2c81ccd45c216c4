//! How little memory a history can do with: a lower bound, and a plan that shows what can be had.
//!
//! An allocator decides without knowing what comes next. Afterwards everything is known: how large each block was, and from
//! when until when it was in use. Then placing the blocks is a packing problem (dynamic storage allocation): each block is a
//! rectangle that is as wide as its lifetime and as high as its size, and may be moved up and down only. [`plan`] solves it
//! well, though not always best; [`lower_bound`] says how well.
//!
//! - **Bound.** Most bytes in use at once. A block counts from its allocation to the completion of its free, rounded up to
//!   [512 bytes](UNIT) as PyTorch does it. No allocator with that rounding can reserve less, unless its frees wait for the
//!   work that still ran then (`cuMemFree` does).
//! - **Plan.** An offset for each block of the history, so that no two blocks that conflict overlap.
//! - **Gap.** The plan's bytes over the bound, less one.
//!
//! # Streams
//! When is memory free that a block of stream `a` had? For a later block of the same stream from the free on: work is
//! done in the order of the stream. If other streams used the block, from the completion of that free on, by which the host
//! knows that they are done. For a block of another stream the host's order says nothing: work of `a` that was queued before
//! the free may still be running. There are two answers ([`CrossStream`]):
//!
//! - [`AfterWait`](CrossStream::AfterWait): the new owner's stream is made to wait for an event behind the free. Every
//!   allocator could do that, so this is the plan that policies are compared with.
//! - [`KnownOrder`](CrossStream::KnownOrder): memory changes streams or pools only where the host has seen that the work is over.
//!   Each stream has a clock that says up to which free its work is known to be done. Logs do not name the waits between
//!   streams, so the host's observations (frees that complete late) are all that moves these clocks. It is the plan of a
//!   policy that never waits, as PyTorch's.
//!
//! With one stream the two are the same.
//!
//! # Private pools
//! A captured CUDA graph writes to the memory of its pool at each launch, whether a block there was freed or not. So memory
//! of a private pool serves its other blocks only, until the program has released the pool.
//!
//! # The search
//! 1. An online best fit gives the first plan, in O(n log n). It is what is left where the rest would take too long.
//! 2. Blocks are placed from the largest to the smallest (of equal ones the longest-lived first), each at the lowest offset
//!    at which no block that conflicts with it lies. Order decides: by size this is within a few percent of the bound.
//! 3. As long as a block's top lies above the bound, blocks that do move forward in the order, and all are placed
//!    again: "squeaky wheel" optimisation (Joslin and Clements 1999). The best plan is kept.
//!
//! The search ends at the bound (or within 0.012 % of it), or when it has made [`PlanSettings::steps`] steps. A step is a block
//! that is looked at or sorted, or two lists of byte ranges that are looked at. Nothing reads a clock, so the same history
//! gives the same plan everywhere.
//!
//! # What a history does not tell
//! - Blocks from before the first event are in use from the beginning, in address order, and blocks that are never freed are
//!   in use to the end.
//! - Requests that the recorded allocator refused never lived, and are left out.
//! - In a log that does not say when frees complete, they complete at once.
//!
//! *Source.* The heuristic is that of TensorFlow Lite's and TVM's memory planners (greedy by size) with the search added;
//! exact solvers are <https://github.com/google/minimalloc> and TelaMalloc (ASPLOS 2023).

mod bound;
mod conflicts;
mod misses;
mod occupied;
mod online;
mod overlap;
mod search;
mod stitched;

pub use bound::lower_bound;
pub use misses::{Misses, misses};
pub use overlap::Overlap;
pub use stitched::stitched;

use crate::backends::plan::PlanTable;
use search::Search;
use std::fmt;

pub use crate::backends::plan::UNIT;

/// The end of what is never free again.
pub const NEVER: u32 = u32::MAX;

/// How long a block of a history needs its memory. Time is counted in allocations: the lifetime of the k-th allocation starts
/// at k, so a list of lifetimes is in the order of their starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Bytes that were asked for.
    pub requested: u64,
    /// Number of the stream.
    pub stream: u32,
    /// Number of the private pool that it lies in, from 1; 0 for none.
    pub pool: u32,
    /// Number of the first allocation of the same stream and pool that can have the memory, or [`NEVER`].
    pub end: u32,
    /// The same for other streams if nobody waits for them, and for what lies outside its private pool. Not before `end`.
    pub end_elsewhere: u32,
}

/// Blocks that have memory from each other as soon as it is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    pool: u32,
    /// 0 where streams wait for each other.
    stream: u32,
}

impl Lifetime {
    /// Bytes of its block.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.requested.next_multiple_of(UNIT)
    }

    /// The number of the first allocation that can have the memory, if it is like `other`.
    #[must_use]
    pub fn end_for(&self, other: &Lifetime, cross: CrossStream) -> u32 {
        if self.group(cross) == other.group(cross) { self.end } else { self.end_outside(cross) }
    }

    /// The end of allocation `number` as a point of time, of which a history of so many allocations has as many.
    fn end_within(&self, number: u32, allocations: usize) -> usize {
        // What is freed before the next allocation has lived all the same. `NEVER` lies behind the last.
        (self.end.max(number + 1) as usize).min(allocations)
    }

    fn group(&self, cross: CrossStream) -> Group {
        let stream = if cross == CrossStream::AfterWait { 0 } else { self.stream };
        Group { pool: self.pool, stream }
    }

    /// The number of the first allocation of another group that can have the memory.
    fn end_outside(&self, cross: CrossStream) -> u32 {
        let waits = cross == CrossStream::AfterWait && self.pool == 0;
        if waits { self.end } else { self.end_elsewhere.max(self.end) }
    }
}

/// When memory can go from one stream to another, see the [module](self).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CrossStream {
    /// As soon as it is freed; the later stream waits on the device.
    #[default]
    AfterWait,
    /// When the history shows that the work of the earlier stream is over. Nobody waits.
    KnownOrder,
}

/// How a plan is searched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanSettings {
    /// When memory can go from one stream to another.
    pub cross_stream: CrossStream,
    /// Most steps. Some thirty million are a second.
    pub steps: u64,
    /// Seed of the random numbers by which blocks move forward.
    pub seed: u64,
}

impl PlanSettings {
    /// Steps that [`for_blocks`](Self::for_blocks) gives at most.
    pub const MOST_STEPS: u64 = 1 << 27;

    /// What a history of so many allocations gets unless somebody asks for more: about a second for 10,000 of them, and
    /// never more than some five.
    #[must_use]
    pub fn for_blocks(blocks: usize) -> Self {
        let steps = ((1 << 25) + 1024 * blocks as u64).min(Self::MOST_STEPS);
        Self { cross_stream: CrossStream::AfterWait, steps, seed: 0 }
    }
}

/// Where each block of a history lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Offset of each block in bytes, in the order of the allocations; multiples of [`UNIT`].
    pub offsets: Vec<u64>,
    /// Bytes that the plan needs.
    pub bytes: u64,
    /// Bytes below which there is no plan.
    pub lower_bound: u64,
    /// Steps that the search made.
    pub steps: u64,
}

impl Plan {
    /// What the plan needs above the bound, as a fraction of the bound.
    #[must_use]
    pub fn gap(&self) -> f64 {
        // CAST: bytes of a device, below 2^53.
        if self.lower_bound == 0 { 0.0 } else { self.bytes as f64 / self.lower_bound as f64 - 1.0 }
    }

    /// The plan as the backend [`plan`](mod@crate::backends::plan) follows it.
    ///
    /// # Panics
    /// When there are not as many lifetimes as offsets.
    #[must_use]
    pub fn table(&self, lifetimes: &[Lifetime]) -> PlanTable {
        assert_eq!(lifetimes.len(), self.offsets.len(), "an offset for each block");
        let blocks = lifetimes.iter().zip(&self.offsets).map(|(one, offset)| (one.requested, one.stream, *offset));
        PlanTable::new(self.bytes, blocks.collect())
    }

    /// Two blocks that conflict and overlap, if there are such: then it is no plan for these lifetimes. O(n · b), where b is
    /// the most blocks that have one byte one after another.
    ///
    /// # Panics
    /// When there are not as many lifetimes as offsets.
    #[must_use]
    pub fn overlap(&self, lifetimes: &[Lifetime], cross: CrossStream) -> Option<Overlap> {
        overlap::find(lifetimes, &self.offsets, cross)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, lower_bound, .. } = self;
        write!(f, "{} bytes, {:.2} % above the bound of {lower_bound}", bytes, 100.0 * self.gap())
    }
}

/// Places the blocks of a history. `progress` hears after each attempt how many steps were made and how many bytes the best
/// plan so far needs.
///
/// O(n log n) and at most [`PlanSettings::steps`] steps more, with some 100 bytes of memory for each block.
#[must_use]
pub fn plan(lifetimes: &[Lifetime], settings: &PlanSettings, mut progress: impl FnMut(u64, u64)) -> Plan {
    let lower_bound = lower_bound(lifetimes, settings.cross_stream);
    Search::new(lifetimes, settings, lower_bound).run(&mut progress)
}
