//! Allocation policies: the contract of an allocator, the parts of policies, the backends, and the instruments that wrap them.

pub mod backends;
pub mod client;
pub mod contract;
pub mod instruments;
pub mod policy;
pub mod space;
mod sync;

pub use backends::{Backend, Capabilities, Selection};
pub use client::{Capture, DeviceBuffer, Graph, Memory, PinnedBuffer};
pub use contract::{
    AllocError, Attribution, Block, BlockInfo, BlockState, CaptureId, DeviceAllocator, GUARANTEED_ALIGN, Gauge,
    Instrument, Ledger, OomReport, Parts, Path, PeakKind, PoolKind, PooledGauge, PrivatePool, Request, RestoreError,
    SegmentInfo, Snapshot, Stats, Steals, Token, Tokens,
};
#[doc(hidden)]
pub use sync::restless;

/// A stream for tests on devices that check none.
#[cfg(test)]
pub(crate) const fn stream(number: u64) -> vramlab_device::StreamId {
    // SAFETY: the tests pass it to no driver, or to the null device, which ignores streams.
    unsafe { vramlab_device::StreamId::from_raw(number) }
}
