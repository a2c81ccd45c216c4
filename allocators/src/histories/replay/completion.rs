//! A history as it would have been if no free had waited for other streams.

use super::history::History;
use super::op::{BY_DEVICE, Kind, NO_STREAM, Release};

impl History {
    /// Makes every free complete at once, as if no other stream had used the block (PyTorch's `record_stream` left out): what
    /// waiting for other streams costs in memory is what a replay needs less then. Blocks come and go when they did; their
    /// recorded addresses can no longer be compared.
    pub fn complete_at_once(&mut self) {
        let waits_for_nobody = Release { ready: BY_DEVICE, user: NO_STREAM }.pack();
        for op in self.ops.iter_mut().chain(&mut self.beginning.frees) {
            match op.kind() {
                Kind::Free | Kind::Release => {
                    op.set_kind(Kind::Free);
                    op.value = waits_for_nobody;
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
}
