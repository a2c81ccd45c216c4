//! A history as it would have been if the program had run at another pace, or had been written otherwise. Its recorded addresses
//! can then no longer be compared.

use super::op::{BY_DEVICE, Kind, NEVER, Release};
use super::{History, PrivatePools};

impl History {
    /// Makes every free complete at once, as if no other stream had used the block (PyTorch's `record_stream` left out): what
    /// waiting for other streams costs in memory is what a replay needs less then. Blocks come and go when they did.
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
        self.not_comparable = Some("every free is made to complete at once, other than when it was recorded".into());
    }

    /// Makes each free that waited for other streams wait `pace` times as long, counted in operations of the history. With
    /// other settings a program runs at another pace, and how far the streams are then is not known: what a replay needs at
    /// several paces says how much depends on it. What had not completed at the end still does not.
    pub fn complete_at_pace(&mut self, pace: f64) {
        let last = self.ops.len();
        for (at, op) in self.ops.iter_mut().enumerate().filter(|(_, op)| op.kind() == Kind::Release) {
            let Release { ready, user } = op.release();
            if ready == NEVER || ready == BY_DEVICE {
                continue;
            }
            // CAST: numbers of operations, below 2^32; a fraction of one is dropped.
            let waits = (f64::from(ready.saturating_sub(at as u32)) * pace) as usize;
            // CAST: as above.
            op.set_release(Release { ready: (at + waits).min(last) as u32, user });
        }
        self.not_comparable = Some("frees are made to complete at another pace than when it was recorded".into());
    }

    /// Leaves out every call of `empty_cache`.
    pub fn without_empty_cache(&mut self) {
        for op in self.ops.iter_mut().filter(|op| op.kind() == Kind::Trim) {
            op.set_kind(Kind::Nothing);
            self.operations -= 1;
        }
        self.pools.trimmed.clear();
        self.not_comparable = Some("calls of empty_cache are left out".into());
    }

    /// Gives allocations another size, by number from 0 in the order of the recorded events; `None` leaves one as it was.
    pub fn resize_allocations(&mut self, mut bytes: impl FnMut(u64) -> Option<u64>) {
        let allocations = self.ops.iter_mut().filter(|op| op.kind() == Kind::Alloc);
        for (op, number) in allocations.zip(0..) {
            op.value = bytes(number).unwrap_or(op.value);
        }
        self.not_comparable = Some("allocations have another size".into());
    }

    /// Lets all streams be one, so that every free block serves every request and no free waits.
    pub fn on_one_stream(&mut self) {
        self.complete_at_once();
        self.ops.iter_mut().chain(&mut self.beginning.frees).for_each(|op| op.set_stream(0));
        self.beginning.segments.iter_mut().for_each(|segment| segment.stream = 0);
        self.beginning.blocks.iter_mut().for_each(|block| block.stream = 0);
        self.not_comparable = Some("all streams are made one".into());
    }

    /// Takes every allocation from the cache that all share, and none from private pools.
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
        self.not_comparable = Some("private pools are left out".into());
    }
}
