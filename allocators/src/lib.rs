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

pub use vramlab_conformance as testing;
pub use vramlab_device as device;
pub use vramlab_device::{budget, input, output, settings};
pub use vramlab_histories as histories;
pub use vramlab_policies::{backends, client, contract, instruments, policy, space};

pub use device::sim::SimMemory;
pub use device::{Bytes, ParseBytesError};
pub use device::{
    CallCounts, CallEvent, CallKind, CallTotals, CudaDeviceInfo, CudaDriver, CudaUnavailable, DeviceAddr,
    DeviceDescription, DeviceKind, DeviceName, Driver, DriverError, DriverResult, EventId, FaultyDriver, GraphDriver,
    GraphId, HostRoom, IdleCosts, MemInfo, MeteredDriver, NullDriver, PoolCounters, PoolDriver, PoolSettings, Profile,
    SimDriver, StreamId, VmmDriver,
};
pub use vramlab_policies::{
    AllocError, Attribution, Backend, Block, BlockInfo, BlockState, Capabilities, Capture, CaptureId, DeviceAllocator,
    DeviceBuffer, GUARANTEED_ALIGN, Gauge, Graph, Instrument, Ledger, Memory, OomReport, Parts, Path, PeakKind,
    PinnedBuffer, PoolKind, PooledGauge, PrivatePool, Request, SegmentInfo, Selection, Snapshot, Stats, Steals, Token,
    Tokens,
};
