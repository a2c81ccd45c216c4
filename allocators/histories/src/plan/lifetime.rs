//! How long blocks need their memory, and which blocks can have it then.

use std::collections::BTreeSet;
use vramlab_policies::backends::plan::UNIT;

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
    /// Number of the first allocation of another stream that can have the memory without a wait, or of one outside the private
    /// pool. It is not before `end`.
    pub end_elsewhere: u32,
}

/// Blocks that have memory from each other as soon as it is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Group {
    pub(super) pool: u32,
    /// 0 where streams wait for each other.
    pub(super) stream: u32,
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
    pub(super) fn end_within(&self, number: u32, allocations: usize) -> usize {
        // What is freed before the next allocation has lived all the same. `NEVER` lies behind the last.
        (self.end.max(number + 1) as usize).min(allocations)
    }

    pub(super) fn group(&self, cross: CrossStream) -> Group {
        let stream = if cross == CrossStream::AfterWait { 0 } else { self.stream };
        Group { pool: self.pool, stream }
    }

    /// The number of the first allocation of another group that can have the memory.
    pub(super) fn end_outside(&self, cross: CrossStream) -> u32 {
        let waits = cross == CrossStream::AfterWait && self.pool == 0;
        if waits { self.end } else { self.end_elsewhere.max(self.end) }
    }
}

/// Blocks by the allocation at which they end, while a history is gone through.
#[derive(Debug, Default)]
pub(super) struct Ends(BTreeSet<(u32, u32)>);

impl Ends {
    /// Takes note of allocation `number`. What is freed before the next allocation has lived all the same.
    pub(super) fn add(&mut self, lifetime: &Lifetime, number: u32) {
        self.0.insert((lifetime.end.max(number + 1), number));
    }

    /// The number of a block that ends at allocation `now` or before, once each.
    pub(super) fn pop(&mut self, now: u32) -> Option<u32> {
        self.0.first().filter(|(end, _)| *end <= now)?;
        self.0.pop_first().map(|(_, number)| number)
    }
}

/// Most blocks that are in use at once. O(n), with four bytes for each.
pub(super) fn most_in_use(lifetimes: &[Lifetime]) -> usize {
    let mut ends = vec![0_u32; lifetimes.len() + 1];
    let (mut now, mut most) = (0, 0);
    // CAST: a history has fewer than 2^32 allocations.
    for (number, one) in (0u32..).zip(lifetimes) {
        now -= ends[number as usize] as usize;
        now += 1;
        most = most.max(now);
        ends[one.end_within(number, lifetimes.len())] += 1;
    }
    most
}

/// When memory can go from one stream to another, see the [module](super).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CrossStream {
    /// As soon as it is freed; the later stream waits on the device.
    #[default]
    AfterWait,
    /// When the history shows that the work of the earlier stream is over. No stream waits.
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
    /// Steps of a search that nobody has asked for by itself: about a second.
    pub const STEPS: u64 = 1 << 25;

    /// Steps of a search that is a question of its own: about four seconds.
    pub const MOST_STEPS: u64 = 1 << 27;
}
