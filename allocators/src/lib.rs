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
//! # Where to start
//! - **How an allocator works:** [`backends::pytorch`] is PyTorch's caching allocator, written to be read. Its page explains each
//!   rule, and the source follows it in the same order.
//! - **Use an allocator:** [`Selection`] chooses one by name and settings, [`Memory`] and [`DeviceBuffer`] hold its blocks.
//! - **Write an allocator:** implement [`DeviceAllocator`], or put it together from the parts in [`policy`]. [`backends::register`]
//!   makes it known by name, [`testing`] checks it, and [`instruments`] measure it.
//! - **Study a recording:** [`histories`] reads memory snapshots of PyTorch and replays them under any allocator.
//!
//! # Features
//! The layouts of CUDA's structures depend on its version. A program names exactly one; a library leaves the choice to the program.
//! Nothing of CUDA is needed to build or to use the simulated device: the driver is loaded by [`CudaDriver::new`].
//!
//! | feature | CUDA |
//! |---|---|
//! | `cuda-12060`, `cuda-12080`, `cuda-12090` | 12.6, 12.8, 12.9 |
//! | `cuda-13000`, `cuda-13010` | 13.0, 13.1 |
//!
//! A newer driver serves programs of an older version.
//!
//! ```toml
//! [dependencies]
//! vramlab = { version = "0.3", features = ["cuda-13000"] }
//! ```
//!
//! Without one of them `cudarc`, which binds the driver, does not build and lists those that it knows.
//!
//! # Safety
//! Safe code cannot cause undefined behaviour through this crate. Streams, events and pools come from a [`Driver`] and cannot be made
//! up; a [`Block`] has one owner and cannot be copied. The promises that remain are `unsafe`, and each item says what its caller
//! has to keep:
//! - [`Driver`] and [`device::Hook`] are `unsafe` to implement: all memory comes from them.
//! - [`Block::new`] is `unsafe`: its bytes are device memory that no other live block has.
//! - [`StreamId::from_raw`] takes a stream that the program made itself.
//!
//! # Terms
//! Words are PyTorch's, so that figures compare to `torch.cuda.memory_stats`.
//!
//! | term | meaning |
//! |---|---|
//! | segment | one range obtained from the device in one call |
//! | block | a part of a segment; the unit that is allocated and freed |
//! | split | to allocate a part of a free block; the remainder is a free block |
//! | coalesce | to combine adjacent free blocks of a segment into one |
//! | requested | bytes before rounding |
//! | allocated | bytes in blocks that the client has not freed, after rounding |
//! | active | allocated, or freed by the client but still used by a stream |
//! | reserved | bytes of all segments |
//! | inactive split | free blocks of partly used segments, which cannot be released |
//! | release threshold | reserved bytes of a CUDA memory pool up to which a synchronisation releases nothing |

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
    GraphId, HostAccount, HostCosts, HostDriver, HostRoom, IdleCosts, MemInfo, MeteredDriver, NullDriver, Pinning,
    PoolCounters, PoolDriver, PoolSettings, Profile, SimDriver, StreamId, VmmDriver,
};
pub use vramlab_policies::{
    AllocError, Attribution, Backend, Block, BlockInfo, BlockState, Capabilities, Capture, CaptureId, DeviceAllocator,
    DeviceBuffer, GUARANTEED_ALIGN, Gauge, Graph, Instrument, Ledger, Memory, OomReport, Parts, Path, PeakKind,
    PinnedBuffer, PoolKind, PooledGauge, PrivatePool, Request, SegmentInfo, Selection, Snapshot, Stats, Steals, Token,
    Tokens,
};
