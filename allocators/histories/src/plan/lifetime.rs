//! How long blocks need their memory, and which blocks can have it then.

use crate::history::{BY_DEVICE, History, Kind, NEVER as NEVER_COMPLETES, NO_STREAM, Op, Release};
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
    /// Steps that [`for_blocks`](Self::for_blocks) gives at most.
    pub const MOST_STEPS: u64 = 1 << 27;

    /// What a history of so many allocations gets unless the caller asks for more: about a second for 10,000 of them, and
    /// never more than some five.
    #[must_use]
    pub fn for_blocks(blocks: usize) -> Self {
        let steps = ((1 << 25) + 1024 * blocks as u64).min(Self::MOST_STEPS);
        Self { cross_stream: CrossStream::AfterWait, steps, seed: 0 }
    }
}

// How long each block of a history needs its memory: what a [plan](crate::plan) is made for.

/// A free whose memory other streams cannot have yet.
#[derive(Clone, Copy, Debug)]
struct Unseen {
    /// Number of its allocation.
    allocation: u32,
    /// Where it stands among the operations.
    op: usize,
}

/// A completion that the host sees: all that `stream` was given before operation `op` is done.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// The first allocation after it.
    when: u32,
    stream: u32,
    op: usize,
}

/// Goes through the operations in order.
#[derive(Debug)]
struct Walk {
    lifetimes: Vec<Lifetime>,
    /// The allocation whose block is in a slot.
    slots: Vec<u32>,
    /// Frees by the stream of their block, in order.
    frees: Vec<Vec<Unseen>>,
    /// In the order of the frees.
    seen: Vec<Seen>,
}

impl Walk {
    fn alloc(&mut self, slot: u32, stream: u32, pool: u32, requested: u64) {
        // CAST: a history has fewer than 2^32 operations.
        self.slots[slot as usize] = self.lifetimes.len() as u32;
        self.lifetimes.push(Lifetime { requested, stream, pool, end: NEVER, end_elsewhere: NEVER });
    }

    /// A free, as operation `at`. `allocations` counts those before each operation.
    fn free(&mut self, op: &Op, at: usize, allocations: &[u32]) {
        let allocation = self.slots[op.slot as usize];
        // CAST: as above.
        let now = self.lifetimes.len() as u32;
        let lifetime = &mut self.lifetimes[allocation as usize];
        lifetime.end = now;
        if op.kind() == Kind::Release {
            let Release { ready, user } = op.release();
            lifetime.end = match ready {
                BY_DEVICE => now,
                NEVER_COMPLETES => NEVER,
                ready => allocations.get(ready as usize).copied().unwrap_or(NEVER).max(now),
            };
            if ready != BY_DEVICE && user != NO_STREAM && lifetime.end != NEVER {
                self.seen.push(Seen { when: lifetime.end, stream: user, op: at });
            }
        }
        self.frees[op.stream() as usize].push(Unseen { allocation, op: at });
    }
}

impl History {
    /// How long each allocation needs its memory, in the order in which a replay makes them. O(n log n).
    ///
    /// A block's memory is free for its own stream when its free completes. It is free for other streams when the host has
    /// also seen that the work is over which the block's stream was given before the free. The host sees that when a free
    /// completes that waited for that stream: what it waited for was queued after all of it. Memory of a private pool is free for
    /// others when the pool was released.
    #[must_use]
    pub fn lifetimes(&self) -> Vec<Lifetime> {
        let before = self.beginning.blocks.len();
        // CAST: a history has fewer than 2^32 operations.
        let mut count = before as u32;
        let allocations: Vec<u32> = self
            .ops
            .iter()
            .map(|op| {
                let number = count;
                count += u32::from(op.kind() == Kind::Alloc);
                number
            })
            .collect();
        let streams = self.streams.len() + self.further_streams as usize;
        let mut walk = Walk {
            lifetimes: Vec::with_capacity(count as usize),
            slots: vec![0; self.slots as usize],
            frees: vec![Vec::new(); streams],
            seen: Vec::new(),
        };
        for block in &self.beginning.blocks {
            walk.alloc(block.slot, block.stream, self.beginning.private_at(block.addr), block.requested);
        }
        // Their frees come before the first operation.
        for op in &self.beginning.frees {
            walk.free(op, 0, &allocations);
        }
        for (at, op) in self.ops.iter().enumerate() {
            match op.kind() {
                Kind::Alloc => walk.alloc(op.slot, op.stream(), op.pool(), op.value),
                Kind::Free | Kind::Release => walk.free(op, at + 1, &allocations),
                Kind::Use | Kind::Trim | Kind::Refused | Kind::Nothing => {}
            }
        }
        walk.see();
        walk.keep_in_pools(&self.pools.released, &allocations);
        walk.lifetimes
    }
}

impl Walk {
    /// Says when other streams can have what was freed.
    fn see(&mut self) {
        self.seen.sort_by_key(|seen| (seen.when, seen.op));
        let mut next = vec![0; self.frees.len()];
        for seen in &self.seen {
            let (frees, next) = (&self.frees[seen.stream as usize], &mut next[seen.stream as usize]);
            while let Some(free) = frees.get(*next).filter(|free| free.op <= seen.op) {
                let lifetime = &mut self.lifetimes[free.allocation as usize];
                lifetime.end_elsewhere = lifetime.end.max(seen.when);
                *next += 1;
            }
        }
    }

    /// Says when others can have what lay in private pools.
    fn keep_in_pools(&mut self, released: &[(u32, u32)], allocations: &[u32]) {
        let count = self.lifetimes.iter().map(|one| one.pool).max().unwrap_or(0);
        let mut until = vec![NEVER; count as usize + 1];
        for &(op, pool) in released {
            if let (Some(until), Some(&first)) = (until.get_mut(pool as usize), allocations.get(op as usize)) {
                *until = first;
            }
        }
        for one in self.lifetimes.iter_mut().filter(|one| one.pool > 0) {
            one.end_elsewhere = until[one.pool as usize].max(one.end);
        }
    }
}
