//! Lifetimes of blocks, and which blocks can reuse their memory.

use std::collections::BTreeSet;
use vramlab_policies::backends::plan::UNIT;

/// The end of blocks that are never freed.
pub const NEVER: u32 = u32::MAX;

/// Lifetime of a block. Time is counted in allocations: the lifetime of the k-th allocation starts at k, so a list of lifetimes
/// is ordered by start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Requested bytes.
    pub requested: u64,
    /// Number of the stream.
    pub stream: u32,
    /// Number of its private pool, from 1; 0 for none.
    pub pool: u32,
    /// Number of the first allocation of the same stream and pool that can reuse the memory, or [`NEVER`].
    pub end: u32,
    /// Number of the first allocation of another stream that can reuse the memory without a wait, or of one outside the private
    /// pool. Not before `end`.
    pub end_elsewhere: u32,
}

/// Blocks that can reuse each other's memory as soon as it is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Group {
    pub(super) pool: u32,
    /// 0 if streams wait for each other.
    pub(super) stream: u32,
}

impl Lifetime {
    /// Bytes of its block.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.requested.next_multiple_of(UNIT)
    }

    /// The number of the first allocation that can reuse the memory, if it is like `other`.
    #[must_use]
    pub fn end_for(&self, other: &Lifetime, cross: CrossStream) -> u32 {
        if self.group(cross) == other.group(cross) { self.end } else { self.end_outside(cross) }
    }

    /// The end of allocation `number` as a time, in a recording with this many allocations.
    pub(super) fn end_within(&self, number: u32, allocations: usize) -> usize {
        // A block that is freed before the next allocation still has a lifetime. `NEVER` is after the last.
        (self.end.max(number + 1) as usize).min(allocations)
    }

    pub(super) fn group(&self, cross: CrossStream) -> Group {
        let stream = if cross == CrossStream::AfterWait { 0 } else { self.stream };
        Group { pool: self.pool, stream }
    }

    /// The number of the first allocation of another group that can reuse the memory.
    pub(super) fn end_outside(&self, cross: CrossStream) -> u32 {
        let waits = cross == CrossStream::AfterWait && self.pool == 0;
        if waits { self.end } else { self.end_elsewhere.max(self.end) }
    }
}

/// Blocks by the allocation at which they end, while a recording is traversed.
#[derive(Debug, Default)]
pub(super) struct Ends(BTreeSet<(u32, u32)>);

impl Ends {
    /// Adds allocation `number`. A block that is freed before the next allocation still has a lifetime.
    pub(super) fn add(&mut self, lifetime: &Lifetime, number: u32) {
        self.0.insert((lifetime.end.max(number + 1), number));
    }

    /// The number of a block that ends at or before allocation `now`, once each.
    pub(super) fn pop(&mut self, now: u32) -> Option<u32> {
        self.0.first().filter(|(end, _)| *end <= now)?;
        self.0.pop_first().map(|(_, number)| number)
    }
}

/// Maximum number of simultaneously active blocks. O(n), with four bytes for each.
pub(super) fn most_in_use(lifetimes: &[Lifetime]) -> usize {
    let mut ends = vec![0_u32; lifetimes.len() + 1];
    let (mut now, mut most) = (0, 0);
    // CAST: a recording has fewer than 2^32 allocations.
    for (number, lifetime) in (0u32..).zip(lifetimes) {
        now -= ends[number as usize] as usize;
        now += 1;
        most = most.max(now);
        ends[lifetime.end_within(number, lifetimes.len())] += 1;
    }
    most
}

/// When memory can change streams; see the [module](super).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CrossStream {
    /// As soon as it is freed; the later stream waits on the device.
    #[default]
    AfterWait,
    /// When the recording shows that the work of the earlier stream is complete. No stream waits.
    KnownOrder,
}

/// Options of the search for a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanSettings {
    /// When memory can change streams.
    pub cross_stream: CrossStream,
    /// Maximum number of steps. Some thirty million take a second.
    pub steps: u64,
    /// Seed of the random numbers for perturbing the order.
    pub seed: u64,
}

impl PlanSettings {
    /// Steps of a search inside other commands: about a second.
    pub const STEPS: u64 = 1 << 25;

    /// Steps of a search by itself: about four seconds.
    pub const MOST_STEPS: u64 = 1 << 27;
}
