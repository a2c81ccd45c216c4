//! Modified recordings: the program at another pace, or with changes. Their recorded addresses can no longer be compared.

use super::op::{BY_DEVICE, Kind, NEVER, Release};
use super::{History, PrivatePools};
use std::collections::{BTreeMap, BTreeSet};

impl History {
    /// Makes every free complete immediately, as if no other stream had used the block (without PyTorch's `record_stream`). The
    /// reduction of a replay's memory is the cost of deferred frees. Allocations and requested frees stay as they were.
    pub fn complete_at_once(&mut self) {
        for op in self.ops.iter_mut().chain(&mut self.beginning.frees) {
            match op.kind() {
                Kind::Free | Kind::Release => {
                    op.set_kind(Kind::Free);
                    op.complete_by_device();
                }
                Kind::Use => {
                    op.set_kind(Kind::Nothing);
                    self.operations -= 1;
                }
                Kind::Alloc | Kind::Trim | Kind::Refused | Kind::Nothing => {}
            }
        }
        self.further_streams = 0;
        self.deferred = 0;
        self.not_comparable = Some("every free completes immediately, unlike in the recording".into());
    }

    /// Scales the time for which each deferred free is pending by `pace`, counted in operations. Under other settings a program
    /// runs at another pace, and the progress of its streams is unknown: replays at several paces show how much the memory
    /// depends on it. Frees that were pending at the end stay pending.
    pub fn complete_at_pace(&mut self, pace: f64) {
        let last = self.ops.len();
        for (at, op) in self.ops.iter_mut().enumerate().filter(|(_, op)| op.kind() == Kind::Release) {
            let Release { ready, user } = op.release();
            if ready == NEVER || ready == BY_DEVICE {
                continue;
            }
            // CAST: numbers of operations, below 2^32; the fraction is dropped.
            let waits = (f64::from(ready.saturating_sub(at as u32)) * pace) as usize;
            // CAST: as above.
            op.set_release(Release { ready: (at + waits).min(last) as u32, user });
        }
        self.not_comparable = Some("deferred frees complete at another pace than recorded".into());
    }

    /// Removes every call of `empty_cache`.
    pub fn without_empty_cache(&mut self) {
        for op in self.ops.iter_mut().filter(|op| op.kind() == Kind::Trim) {
            op.set_kind(Kind::Nothing);
            self.operations -= 1;
        }
        self.pools.trimmed.clear();
        self.not_comparable = Some("calls of empty_cache are removed".into());
    }

    /// Resizes allocations, by number from 0 in recorded order; `None` keeps a size.
    pub fn resize_allocations(&mut self, mut bytes: impl FnMut(u64) -> Option<u64>) {
        let allocations = self.ops.iter_mut().filter(|op| op.kind() == Kind::Alloc);
        for (op, number) in allocations.zip(0..) {
            op.value = bytes(number).unwrap_or(op.value);
        }
        self.not_comparable = Some("allocations have another size".into());
    }

    /// Removes allocations and failed requests, by number from 0 in recorded order, with their uses and frees. The failed requests
    /// that are removed are no longer among [`out_of_memory`](Self::out_of_memory) either.
    pub fn without_allocations(&mut self, allocations: &BTreeSet<u64>, refused: &BTreeSet<u64>) {
        let (mut number, mut request) = (0, 0);
        let mut removed = vec![false; self.slots as usize];
        for op in &mut self.ops {
            let remove = match op.kind() {
                Kind::Alloc => {
                    let remove = allocations.contains(&number);
                    removed[op.slot as usize] = remove;
                    number += 1;
                    remove
                }
                Kind::Refused => {
                    request += 1;
                    refused.contains(&(request - 1))
                }
                Kind::Free | Kind::Release | Kind::Use => removed[op.slot as usize],
                Kind::Trim | Kind::Nothing => false,
            };
            if remove {
                self.deferred -= u64::from(op.kind() == Kind::Release);
                self.operations -= u64::from(op.kind() != Kind::Refused);
                op.set_kind(Kind::Nothing);
            }
        }
        // The list has the last of the failed requests.
        let first = self.refused - self.out_of_memory.len() as u64;
        let mut at = first..;
        self.out_of_memory.retain(|_| at.next().is_none_or(|number| !refused.contains(&number)));
        self.not_comparable = Some("allocations are removed".into());
    }

    /// Merges all streams into one, so that every free block can serve every request and no free is deferred.
    pub fn on_one_stream(&mut self) {
        self.complete_at_once();
        self.ops.iter_mut().chain(&mut self.beginning.frees).for_each(|op| op.set_stream(0));
        self.beginning.segments.iter_mut().for_each(|segment| segment.stream = 0);
        self.beginning.blocks.iter_mut().for_each(|block| block.stream = 0);
        self.not_comparable = Some("all streams are merged".into());
    }

    /// Deletes each private pool after its last block is freed: its free segments are released then, as by PyTorch when a `MemPool` is
    /// deleted. Pools with live blocks at the end, and those that existed before recording started, stay.
    pub fn delete_private_pools(&mut self) {
        let mut slots = vec![0; self.slots as usize];
        // By pool: the number of live blocks, and the operation after its last one.
        let mut pools: BTreeMap<u32, (u64, usize)> = BTreeMap::new();
        for (at, op) in self.ops.iter().enumerate() {
            match op.kind() {
                Kind::Alloc => {
                    slots[op.slot as usize] = op.pool();
                    pools.entry(op.pool()).or_default().0 += 1;
                }
                Kind::Free | Kind::Release => {
                    let pool = pools.entry(slots[op.slot as usize]).or_default();
                    *pool = (pool.0.saturating_sub(1), at + 1);
                }
                Kind::Use | Kind::Trim | Kind::Refused | Kind::Nothing => {}
            }
        }
        let kept = |pool: &u32| {
            let before = self.beginning.segments.iter().any(|segment| segment.private == *pool);
            *pool == 0 || before || self.pools.released.iter().any(|(_, released)| released == pool)
        };
        pools.retain(|pool, (live, _)| *live == 0 && !kept(pool));
        // CAST: an index of an operation, below 2^32.
        let mut deleted: Vec<(u32, u32)> = pools.into_iter().map(|(pool, (_, at))| (at as u32, pool)).collect();
        deleted.sort_unstable();
        self.pools.deleted = deleted;
        self.not_comparable = Some("private pools are deleted".into());
    }

    /// Allocates everything from the shared cache, and nothing from private pools.
    pub fn without_private_pools(&mut self) {
        for op in self.ops.iter_mut().chain(&mut self.beginning.frees) {
            if op.kind() == Kind::Trim && op.pool() != 0 {
                op.set_kind(Kind::Nothing);
                self.operations -= 1;
            }
            *op = op.of_pool(0);
        }
        self.beginning.segments.iter_mut().for_each(|segment| segment.private = 0);
        self.pools = PrivatePools::default();
        self.not_comparable = Some("private pools are removed".into());
    }
}
