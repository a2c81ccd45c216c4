//! GPU memory allocators behind one trait.
//!
//! Two seams hold this crate together. [`Driver`] is what a device can do: a real GPU ([`CudaDriver`]), a
//! simulated one ([`SimDriver`]) and doubles for tests. [`DeviceAllocator`] is what an allocator does; every
//! [backend](backends) implements it, and so does every [instrument](instruments), which wraps another
//! allocator and changes nothing that it returns.
//!
//! ```
//! use vramlab::backends::caching;
//! use vramlab::{Driver, Memory, Profile, Selection, SimDriver, SimMemory};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), vramlab::AllocError> {
//! let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::Host));
//! let stream = driver.stream_create()?;
//! let allocator = Selection::of(&caching::BACKEND).build(&driver)?;
//! let memory = Memory::new(allocator);
//!
//! let tensor = memory.allocate(1 << 20, stream)?;
//! drop(tensor); // back to the cache
//! let again = memory.allocate(1 << 20, stream)?; // served without the driver
//! assert_eq!(memory.allocator().stats().num_device_alloc, 1);
//! # Ok(()) }
//! ```
//!
//! # Terms
//! Words are PyTorch's, so that figures compare to `torch.cuda.memory_stats`.
//!
//! | term | meaning |
//! |---|---|
//! | segment | one range obtained from the device in one call |
//! | block | a part of a segment; the unit that is handed out, split and coalesced |
//! | requested | bytes that the client asked for |
//! | allocated | bytes in blocks that the client holds, after rounding |
//! | active | allocated, or freed by the client but still used by a stream |
//! | reserved | everything held from the device |
//! | inactive split | free blocks of partly used segments, which cannot go back to the device |

pub mod backends;
pub mod budget;
mod bytes;
pub mod client;
pub mod contract;
pub mod device;
pub mod histories;
pub mod input;
pub mod instruments;
mod ordered;
pub mod output;
pub mod policy;
mod ranges;
pub mod settings;
pub mod space;
mod steps;
mod sync;
pub mod testing;

pub use backends::{Backend, Capabilities, Selection};
pub use bytes::{Bytes, ParseBytesError};
pub use client::{Capture, DeviceBuffer, Graph, Memory, PinnedBuffer};
pub use contract::{
    AllocError, Attribution, Block, BlockInfo, BlockState, CaptureId, DeviceAllocator, GUARANTEED_ALIGN, Gauge, Ledger,
    OomReport, Path, PeakKind, PoolKind, PooledGauge, PrivatePool, Request, SegmentInfo, Snapshot, Stats, Steals,
    Token, Tokens,
};
pub use device::sim::SimMemory;
pub use device::{
    CallCounts, CallEvent, CallKind, CallTotals, CudaDeviceInfo, CudaDriver, CudaUnavailable, DeviceAddr,
    DeviceDescription, DeviceKind, DeviceName, Driver, DriverError, DriverResult, EventId, FaultyDriver, GraphDriver,
    GraphId, GraphMemory, HostRoom, IdleCosts, MemInfo, MeteredDriver, NullDriver, PoolDriver, PoolSettings, Profile,
    SimDriver, StreamId, VmmDriver,
};
