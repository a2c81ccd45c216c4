//! Lifetimes of blocks: the input of a [plan](crate::plan).

use super::{Lifetime, NEVER};
use crate::history::{BY_DEVICE, History, Kind, NEVER as NEVER_COMPLETES, NO_STREAM, Op, Release};

/// Bytes for each active block in the search for the lower bound: in trees, by the end of its memory.
const LIVE: usize = 128;

/// A free whose memory other streams cannot have yet.
#[derive(Clone, Copy, Debug)]
struct Unobserved {
    /// Number of its allocation.
    allocation: u32,
    /// Its position among the operations.
    op: u32,
}

/// A completion that the host observes: all work queued on `stream` before operation `op` is complete.
#[derive(Clone, Copy, Debug)]
struct Observed {
    /// The first allocation after it.
    when: u32,
    stream: u32,
    op: u32,
}

/// Traverses the operations.
#[derive(Debug)]
struct Walk {
    lifetimes: Vec<Lifetime>,
    /// The allocation of each slot.
    slots: Vec<u32>,
    /// Frees by the stream of their block, in order.
    frees: Vec<Vec<Unobserved>>,
    /// Observed completions in the order of the frees.
    observed: Vec<Observed>,
}

impl Walk {
    fn alloc(&mut self, slot: u32, stream: u32, pool: u32, requested: u64) {
        // CAST: a recording has fewer than 2^32 operations.
        self.slots[slot as usize] = self.lifetimes.len() as u32;
        self.lifetimes.push(Lifetime { requested, stream, pool, end: NEVER, end_elsewhere: NEVER });
    }

    /// A failed request: a block until the next one.
    fn request(&mut self, stream: u32, pool: u32, requested: u64) {
        // CAST: a recording has fewer than 2^32 operations.
        let end = self.lifetimes.len() as u32 + 1;
        self.lifetimes.push(Lifetime { requested, stream, pool, end, end_elsewhere: end });
    }

    /// A free, as operation `at`. `allocations` is the number of allocations before each operation.
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
                self.observed.push(Observed { when: lifetime.end, stream: user, op: at });
            }
        }
        self.frees[op.stream() as usize].push(Unobserved { allocation, op: at });
    }
}

impl History {
    /// Maximum bytes of [`lifetimes`](Self::lifetimes), with its result and the [lower bound](super::lower_bound).
    #[must_use]
    pub fn bytes_of_lifetimes(&self) -> usize {
        // CAST: sizes in memory.
        let blocks = (self.allocations + self.refused) as usize;
        let (slots, deferred) = (self.slots as usize, self.deferred as usize);
        let frees = self.ops.iter().filter(|op| matches!(op.kind(), Kind::Free | Kind::Release)).count();
        let frees = frees + self.beginning.frees.len();
        blocks * size_of::<Lifetime>()
            + self.ops.len() * size_of::<u32>()
            // Growing lists double, and allocate both sizes for a moment.
            + 3 * (frees * size_of::<Unobserved>() + deferred * size_of::<Observed>())
            + slots * (size_of::<u32>() + LIVE)
    }

    /// The lifetime of each allocation, in the order of a replay. O(n log n).
    ///
    /// A block's memory is free for its own stream when its free completes. It is free for other streams when the host has also
    /// observed that the work queued on the block's stream before the free is complete. The host observes that when a deferred
    /// free completes that waited for that stream: the work that it waited for was queued after all of it. Memory of a private
    /// pool is free for others when the pool was released.
    #[must_use]
    pub fn lifetimes(&self) -> Vec<Lifetime> {
        self.lifetimes_of(&[Kind::Alloc])
    }

    /// As [`lifetimes`](Self::lifetimes), with the requests that failed in the recording: each as a block that is freed immediately.
    #[must_use]
    pub fn lifetimes_with_refused(&self) -> Vec<Lifetime> {
        self.lifetimes_of(&[Kind::Alloc, Kind::Refused])
    }

    /// Lifetimes of the blocks that operations of these kinds request.
    fn lifetimes_of(&self, requests: &[Kind]) -> Vec<Lifetime> {
        let before = self.beginning.blocks.len();
        // CAST: a recording has fewer than 2^32 allocations.
        let mut count = before as u32;
        let allocations: Vec<u32> = self
            .ops
            .iter()
            .map(|op| {
                let number = count;
                count += u32::from(requests.contains(&op.kind()));
                number
            })
            .collect();
        let streams = self.streams.len() + self.further_streams as usize;
        let mut walk = Walk {
            lifetimes: Vec::with_capacity(count as usize),
            slots: vec![0; self.slots as usize],
            frees: vec![Vec::new(); streams],
            observed: Vec::new(),
        };
        for block in &self.beginning.blocks {
            walk.alloc(block.slot, block.stream, self.beginning.private_at(block.addr), block.requested);
        }
        // Their frees precede the first operation.
        for op in &self.beginning.frees {
            walk.free(op, 0, &allocations);
        }
        for (at, op) in (1..).zip(&self.ops) {
            match op.kind() {
                Kind::Alloc => walk.alloc(op.slot, op.stream(), op.pool(), op.value),
                Kind::Free | Kind::Release => walk.free(op, at, &allocations),
                Kind::Refused if requests.contains(&Kind::Refused) => {
                    walk.request(op.stream(), op.pool(), op.value);
                }
                Kind::Use | Kind::Trim | Kind::Refused | Kind::Nothing => {}
            }
        }
        walk.see();
        walk.keep_in_pools(&self.pools.released, &allocations);
        walk.lifetimes
    }
}

impl Walk {
    /// Sets when other streams can reuse freed memory.
    fn see(&mut self) {
        self.observed.sort_by_key(|observed| (observed.when, observed.op));
        let mut next = vec![0; self.frees.len()];
        for observed in &self.observed {
            let (frees, next) = (&self.frees[observed.stream as usize], &mut next[observed.stream as usize]);
            while let Some(free) = frees.get(*next).filter(|free| free.op <= observed.op) {
                let lifetime = &mut self.lifetimes[free.allocation as usize];
                lifetime.end_elsewhere = lifetime.end.max(observed.when);
                *next += 1;
            }
        }
    }

    /// Sets when others can reuse memory of private pools.
    fn keep_in_pools(&mut self, released: &[(u32, u32)], allocations: &[u32]) {
        let count = self.lifetimes.iter().map(|lifetime| lifetime.pool).max().unwrap_or(0);
        let mut until = vec![NEVER; count as usize + 1];
        for &(op, pool) in released {
            if let (Some(until), Some(&first)) = (until.get_mut(pool as usize), allocations.get(op as usize)) {
                *until = first;
            }
        }
        for lifetime in self.lifetimes.iter_mut().filter(|lifetime| lifetime.pool > 0) {
            lifetime.end_elsewhere = until[lifetime.pool as usize].max(lifetime.end);
        }
    }
}
