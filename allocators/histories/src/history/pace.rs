//! A history as it would have been if other streams had been done earlier or later.

use super::History;
use super::op::{BY_DEVICE, Kind, NEVER, Release};

impl History {
    /// Makes every free complete at once, as if no other stream had used the block (PyTorch's `record_stream` left out): what
    /// waiting for other streams costs in memory is what a replay needs less then. Blocks come and go when they did; their
    /// recorded addresses can no longer be compared.
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
    /// several paces says how much depends on it. What had not completed at the end still does not. Recorded addresses can no
    /// longer be compared.
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
}
