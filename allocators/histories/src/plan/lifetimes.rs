//! How long each block of a history needs its memory: what a [plan](crate::plan) is made for.

use super::{Lifetime, NEVER};
use crate::history::{BY_DEVICE, History, Kind, NEVER as NEVER_COMPLETES, NO_STREAM, Op, Release};

/// Bytes of a block that is in use, where the lower bound is looked for: in trees, by when its memory is free.
const LIVE: usize = 128;

/// A free whose memory other streams cannot have yet.
#[derive(Clone, Copy, Debug)]
struct Unseen {
    /// Number of its allocation.
    allocation: u32,
    /// Where it stands among the operations.
    op: u32,
}

/// A completion that the host sees: all that `stream` was given before operation `op` is done.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// The first allocation after it.
    when: u32,
    stream: u32,
    op: u32,
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
    fn free(&mut self, op: &Op, at: u32, allocations: &[u32]) {
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
    /// Bytes that [`lifetimes`](Self::lifetimes) holds at most while it works, with those of its result and of the [lower
    /// bound](super::lower_bound).
    #[must_use]
    pub fn bytes_of_lifetimes(&self) -> usize {
        // CAST: sizes in memory.
        let (blocks, slots, deferred) = (self.allocations as usize, self.slots as usize, self.deferred as usize);
        let frees = self.ops.iter().filter(|op| matches!(op.kind(), Kind::Free | Kind::Release)).count();
        let frees = frees + self.beginning.frees.len();
        blocks * size_of::<Lifetime>()
            + self.ops.len() * size_of::<u32>()
            // Lists that grow double, and hold both sizes for a moment.
            + 3 * (frees * size_of::<Unseen>() + deferred * size_of::<Seen>())
            + slots * (size_of::<u32>() + LIVE)
    }

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
        for (at, op) in (1..).zip(&self.ops) {
            match op.kind() {
                Kind::Alloc => walk.alloc(op.slot, op.stream(), op.pool(), op.value),
                Kind::Free | Kind::Release => walk.free(op, at, &allocations),
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
