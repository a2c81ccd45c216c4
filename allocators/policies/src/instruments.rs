//! Instruments: wrappers that measure or check and change nothing that an allocator returns.
//!
//! | instrument | reports |
//! |---|---|
//! | [`Timed`] | latency histograms by operation and path |
//! | [`EventTrace`] | every allocation and free in order |
//! | [`Nvtx`] | ranges on a profiler's timeline |
//! | [`NvtxMemory`](nvtx::memory::NvtxMemory) | blocks, to a memory checker |
//! | [`Limit`] | refuses what exceeds a byte budget |
//! | [`Checker`] | broken contracts: overlap, foreign blocks, writes after free, leaks |
//!
//! Each is an [`Instrument`](crate::Instrument): it names the calls that it watches, and forwards all others. An instrument of
//! another crate is written in the same way (`experiments/examples/out-of-tree/src/census.rs`).
//!
//! Each reports its own cost, so that a result can contain the cost of measuring.

/// The stream of each block that [`restore`](crate::contract::Takeover::restore) and
/// [`pool_restore`](crate::contract::PrivatePools::pool_restore) return, in their order.
pub fn restored_streams(snapshot: &crate::contract::Snapshot) -> impl Iterator<Item = vramlab_device::StreamId> {
    let is_live = |block: &&crate::contract::BlockInfo| block.state != crate::contract::BlockState::Free;
    snapshot.segments.iter().flat_map(move |segment| segment.blocks.iter().filter(is_live).map(|_| segment.stream))
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
