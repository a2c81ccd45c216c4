//! Instruments: decorators that measure or check and change nothing that an allocator returns.
//!
//! | instrument | says |
//! |---|---|
//! | [`Timed`] | latency histograms by operation and path |
//! | [`EventTrace`] | every allocation and free in order |
//! | [`Nvtx`] | ranges on a profiler's timeline |
//! | [`NvtxMemory`](nvtx::memory::NvtxMemory) | blocks, to a memory checker |
//! | [`Limit`] | refuses what exceeds a byte budget |
//! | [`Checker`] | broken contracts: overlap, foreign blocks, writes after free, leaks |
//!
//! Each reports its own cost, so that a result can say what measuring it added.

/// The methods of `DeviceAllocator` that a decorator passes on unchanged.
macro_rules! pass_on {
    (record_use) => {
        fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
            self.inner.record_use(block, stream)
        }

        crate::instruments::pass_on!();
        crate::instruments::pass_on!(captures);
        crate::instruments::pass_on!(pools);
    };
    (pool_restore) => {
        unsafe fn pool_restore(
            &self,
            pool: crate::contract::PrivatePool,
            checkpoint: &Snapshot,
            held: Vec<(Block, StreamId)>,
        ) -> Result<Vec<Block>, crate::contract::RestoreError> {
            // SAFETY: passed on.
            unsafe { self.inner.pool_restore(pool, checkpoint, held) }
        }
    };
    (restore) => {
        fn restore(
            &self,
            snapshot: &Snapshot,
            age: &dyn Fn(vramlab_device::DeviceAddr) -> u64,
        ) -> Result<Option<Vec<Block>>, AllocError> {
            self.inner.restore(snapshot, age)
        }
    };
    () => {
        fn name(&self) -> &'static str {
            self.inner.name()
        }

        fn settings(&self) -> serde_json::Value {
            self.inner.settings()
        }

        fn stats(&self) -> Stats {
            self.inner.stats()
        }

        fn reset_peaks(&self) {
            self.inner.reset_peaks();
        }

        fn snapshot(&self) -> Option<Snapshot> {
            self.inner.snapshot()
        }

        fn ledger_at_peak(&self) -> Ledger {
            self.inner.ledger_at_peak()
        }

        fn forget_stream(&self, stream: StreamId) {
            self.inner.forget_stream(stream);
        }

        fn tell_completed(&self, on: bool) {
            self.inner.tell_completed(on);
        }

        fn take_completed(&self) -> Vec<vramlab_device::DeviceAddr> {
            self.inner.take_completed()
        }

        fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
            self.inner.set_memory_limit(bytes)
        }

        fn set_reuse_in_captures(&self, on: bool) -> bool {
            self.inner.set_reuse_in_captures(on)
        }

        fn export(&self, block: &Block) -> Result<crate::contract::Exported, AllocError> {
            self.inner.export(block)
        }

        fn exported_descriptor(&self, number: i32) -> Option<std::os::fd::OwnedFd> {
            self.inner.exported_descriptor(number)
        }

        fn pin(&self, addr: vramlab_device::DeviceAddr, bytes: u64) -> Result<(), AllocError> {
            self.inner.pin(addr, bytes)
        }

        fn unpin(&self, addr: vramlab_device::DeviceAddr, bytes: u64) -> Result<(), AllocError> {
            self.inner.unpin(addr, bytes)
        }

        fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
            self.inner.trim(keep_bytes)
        }
    };
    (captures) => {
        fn capture_begin(&self, stream: StreamId) -> Result<crate::contract::CaptureId, AllocError> {
            self.inner.capture_begin(stream)
        }

        fn capture_end(&self, capture: crate::contract::CaptureId) -> Result<(), AllocError> {
            self.inner.capture_end(capture)
        }

        fn capture_release(&self, capture: crate::contract::CaptureId) -> Result<(), AllocError> {
            self.inner.capture_release(capture)
        }
    };
    (pools) => {
        fn pool_create(&self) -> Result<crate::contract::PrivatePool, AllocError> {
            self.inner.pool_create()
        }

        fn pool_begin(&self, pool: crate::contract::PrivatePool, stream: StreamId) -> Result<(), AllocError> {
            self.inner.pool_begin(pool, stream)
        }

        fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
            self.inner.pool_end(stream)
        }

        fn pool_release(&self, pool: crate::contract::PrivatePool) -> Result<(), AllocError> {
            self.inner.pool_release(pool)
        }

        fn pool_trim(&self, pool: crate::contract::PrivatePool) -> Result<u64, AllocError> {
            self.inner.pool_trim(pool)
        }

        fn pool_checkpoint(&self, pool: crate::contract::PrivatePool) -> Result<Snapshot, AllocError> {
            self.inner.pool_checkpoint(pool)
        }
    };
}
use pass_on;

/// The stream of each block that [`restore`](crate::DeviceAllocator::restore) and
/// [`pool_restore`](crate::DeviceAllocator::pool_restore) hand out, in their order.
pub fn restored_streams(snapshot: &crate::contract::Snapshot) -> impl Iterator<Item = vramlab_device::StreamId> {
    let held = |block: &&crate::contract::BlockInfo| block.state != crate::contract::BlockState::Free;
    snapshot.segments.iter().flat_map(move |segment| segment.blocks.iter().filter(held).map(|_| segment.stream))
}

mod check;
mod cost;
mod limit;
pub mod nvtx;
mod per_thread;
mod timed;
mod trace;

pub use check::{CheckReport, Checker, POISON, assert_layout, assert_tiled};
pub use cost::{measure_cost, measure_cost_on};
pub use limit::Limit;
pub use nvtx::{Nvtx, NvtxMode};
pub use timed::{LatencyRow, Operation, Timed};
pub use trace::{EventTrace, Traced};
