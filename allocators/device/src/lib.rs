//! The lower seam: the functions of a device, and the devices that implement them.
//!
//! | device | memory | time | for |
//! |---|---|---|---|
//! | [`CudaDriver`] | the GPU's | the machine's clock | measuring |
//! | [`SimDriver`] | host memory, or none | virtual, from a profile | learning and testing without a GPU |
//! | [`NullDriver`] | none | none: every call is free | benchmarking bookkeeping |
//! | [`FaultyDriver`] | that of the wrapped driver | the same | making the k-th call fail |
//! | [`MeteredDriver`] | that of the wrapped driver | the same | counting and timing every call |
//! | [`HostDriver`] | pinned memory of the host, simulated or real | the same | allocators of host memory |

pub mod budget;
mod bytes;
mod calls;
pub mod clock;
mod cuda;
mod error;
mod faulty;
mod graph;
mod hooked;
mod host;
mod ids;
pub mod input;
pub mod libcuda;
mod mappings;
mod metered;
mod name;
mod named;
mod null;
pub mod output;
mod plain_range;
pub mod ranges;
pub mod settings;
mod shared;
pub mod sim;

pub use bytes::{Bytes, ParseBytesError};
pub use calls::{CallCounts, CallKind, CallTotals};
pub use clock::{Clock, MonotonicClock};
pub use cuda::{CudaDeviceInfo, CudaDriver, CudaUnavailable, CudaVersion};
pub use error::DriverError;
pub use faulty::FaultyDriver;
pub use graph::{CapturedWork, GraphDriver};
pub use hooked::{CallArguments, CallOutcome, Hook, HookedDriver};
pub use host::{HOST_PAGE, HostAccount, HostCosts, HostCostsError, HostDriver, HostPages, PinnedMemory, Pinning};
pub use ids::{DeviceAddr, EventId, GraphId, PhysicalHandle, PoolId, StreamId};
pub use metered::{CallEvent, CallObserver, IdleCosts, InstrumentCost, MeteredDriver};
pub use name::{DeviceName, DeviceNameError};
pub use null::NullDriver;
pub use shared::{MemoryProperties, ShareKind, Shareable};
pub use sim::{HostRoom, Profile, SimDriver};

use crate::settings::{bytes, switch};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// Free and total memory of the device in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemInfo {
    /// Free bytes.
    pub free: u64,
    /// Total bytes.
    pub total: u64,
}

crate::named! {
    /// The kind of a device.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum DeviceKind {
        /// A CUDA GPU.
        Cuda "cuda",
        /// The simulated GPU.
        Sim "sim",
        /// A device without memory or costs.
        Null "null",
    }
}

/// A description of a device, for run records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceDescription {
    /// Kind.
    pub kind: DeviceKind,
    /// Name, such as `NVIDIA H200`; for the simulated device that of its profile.
    pub name: String,
    /// CUDA version of the driver, such as `13.0`; absent where there is no driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// Compute capability, such as `9.0`; absent where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<String>,
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// Whether time is virtual.
    pub virtual_time: bool,
    /// Whether it has stream-ordered pools.
    pub pools: bool,
    /// Whether it has virtual memory management.
    pub vmm: bool,
}

/// The functions of a device.
///
/// No method has a default, so the one wrapper ([`HookedDriver`]) cannot forget to forward one.
///
/// # Streams
/// Calls that take a stream are queued on it and return immediately unless documented otherwise. Streams are non-blocking: they do
/// not wait for the legacy default stream.
///
/// # Errors
/// Every fallible call returns [`DriverError`] with the driver's code; running out of memory is `CUDA_ERROR_OUT_OF_MEMORY`. Errors
/// of earlier asynchronous work can surface at any later call. A handle that this driver did not make, or that was destroyed, is an
/// error (`CUDA_ERROR_INVALID_HANDLE`) wherever it would matter.
///
/// # Captures
/// Work that is queued while its stream is captured runs at each launch of the graph. Where an unsafe call below requires something
/// "until the stream has passed it", it is then required until the graph is destroyed.
///
/// # Safety
/// Unsafe code relies on these properties of an implementation:
/// - memory from [`host_alloc`](Self::host_alloc) has the requested size, is initialised, and is given to no other caller until it
///   is freed;
/// - an address range from [`mem_alloc`](Self::mem_alloc), [`PoolDriver::mem_alloc_async`] or
///   [`VmmDriver::address_reserve`] is given to no other caller until it is freed;
/// - safe methods, here and of [`pools`](Self::pools), [`vmm`](Self::vmm) and [`graphs`](Self::graphs), are sound for all
///   arguments, also handles of another driver and of destroyed objects.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// The description of this device.
    fn describe(&self) -> DeviceDescription;

    /// The device's clock.
    fn clock(&self) -> Arc<dyn Clock>;

    /// Nanoseconds that the host has spent waiting for the device so far; `None` when the device does not report it.
    fn blocked_ns(&self) -> Option<u64>;

    /// Free and total memory.
    fn mem_info(&self) -> DriverResult<MemInfo>;

    /// A new segment, aligned to at least 256 bytes (`cuMemAlloc`).
    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddr>;

    /// Releases a segment (`cuMemFree`). Current drivers wait for the whole device.
    ///
    /// # Safety
    /// `addr` came from [`mem_alloc`](Self::mem_alloc) of this driver and is freed once.
    unsafe fn mem_free(&self, addr: DeviceAddr) -> DriverResult<()>;

    /// A new stream.
    fn stream_create(&self) -> DriverResult<StreamId>;

    /// Destroys a stream once its work has completed.
    ///
    /// # Safety
    /// The stream is not used afterwards.
    unsafe fn stream_destroy(&self, stream: StreamId) -> DriverResult<()>;

    /// Registers a stream that another part of the program created, by the value of its CUDA handle: 0 and 1 are the legacy default
    /// stream, 2 is the calling thread's default stream. A second registration has no effect. On a device without CUDA the handle
    /// is a number, and work that is queued on it is ordered as on a stream of the device's own.
    ///
    /// # Safety
    /// The handle is of a live stream of this device's primary context, and stays so until
    /// [`stream_forget`](Self::stream_forget). No other thread ends a capture of it while a call of this driver names it.
    unsafe fn stream_adopt(&self, handle: u64) -> DriverResult<StreamId>;

    /// Forgets a [registered](Self::stream_adopt) stream without destroying it. Calls that name it are errors from then on.
    fn stream_forget(&self, stream: StreamId) -> DriverResult<()>;

    /// Notes that the program began to capture work by itself (`open`), or that such a capture has ended. While one is open, calls
    /// are made in CUDA's relaxed capture mode, in which they do not invalidate it.
    /// <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html>
    fn note_capture(&self, open: bool);

    /// Whether a capture that was [noted](Self::note_capture) is open.
    fn is_capture_noted(&self) -> bool;

    /// Waits until all work queued on `stream` has completed.
    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()>;

    /// Makes later work on `stream` wait for `event`; the host does not wait.
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()>;

    /// Whether work queued on `stream` is being captured into a graph.
    fn stream_is_capturing(&self, stream: StreamId) -> DriverResult<bool>;

    /// Waits until all work on the device has completed.
    fn device_synchronize(&self) -> DriverResult<()>;

    /// A new event; with `timing` it can be passed to [`event_elapsed_ns`](Self::event_elapsed_ns).
    fn event_create(&self, timing: bool) -> DriverResult<EventId>;

    /// Destroys an event.
    ///
    /// # Safety
    /// The event is not used afterwards.
    unsafe fn event_destroy(&self, event: EventId) -> DriverResult<()>;

    /// Queues `event` on `stream`.
    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()>;

    /// Whether the work before the event's last record has completed.
    fn event_query(&self, event: EventId) -> DriverResult<bool>;

    /// Waits for the work before the event's last record.
    fn event_synchronize(&self, event: EventId) -> DriverResult<()>;

    /// Device time between two recorded and completed timing events.
    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> DriverResult<u64>;

    /// Page-locked host memory, zeroed.
    fn host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>>;

    /// Frees page-locked host memory.
    ///
    /// # Safety
    /// `ptr` came from [`host_alloc`](Self::host_alloc) with the same size, is freed once, and no queued copy
    /// still uses it.
    unsafe fn host_free(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()>;

    /// Page-locks memory of the program in place (`cuMemHostRegister`). The host makes pages resident that nothing has touched yet.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for zero bytes, `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED` where a part of the memory is
    /// registered.
    ///
    /// # Safety
    /// The memory belongs to this process and stays allocated until [`host_unregister`](Self::host_unregister).
    unsafe fn host_register(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()>;

    /// Ends the page-locking of [registered](Self::host_register) memory, which stays the program's.
    ///
    /// # Errors
    /// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED` where no registered memory begins at `ptr`.
    ///
    /// # Safety
    /// No queued copy still uses the memory.
    unsafe fn host_unregister(&self, ptr: NonNull<u8>) -> DriverResult<()>;

    /// Copies from pageable host memory; the source may be reused on return.
    ///
    /// # Safety
    /// `dst` is valid for `src.len()` bytes until the stream has passed this copy.
    unsafe fn copy_to_device(&self, dst: DeviceAddr, src: &[u8], stream: StreamId) -> DriverResult<()>;

    /// Queues a copy from page-locked host memory; the source must not change until the stream has passed it.
    ///
    /// # Safety
    /// `dst` and `src` are valid for `bytes` until the stream has passed this copy, and `src` is page-locked.
    unsafe fn copy_to_device_async(
        &self,
        dst: DeviceAddr,
        src: NonNull<u8>,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()>;

    /// Copies to pageable host memory and waits for the result.
    ///
    /// # Safety
    /// `src` is valid for `dst.len()` bytes until the call returns.
    unsafe fn copy_to_host(&self, dst: &mut [u8], src: DeviceAddr, stream: StreamId) -> DriverResult<()>;

    /// Queues a copy to page-locked host memory, which holds the result once the stream has passed it.
    ///
    /// # Safety
    /// `dst` and `src` are valid for `bytes` until the stream has passed this copy, `dst` is page-locked, and nothing else reads or
    /// writes it until then.
    unsafe fn copy_to_host_async(
        &self,
        dst: NonNull<u8>,
        src: DeviceAddr,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()>;

    /// Queues filling `bytes` bytes with `value`.
    ///
    /// # Safety
    /// `dst` is valid for `bytes` until the stream has passed this call.
    unsafe fn fill_bytes(&self, dst: DeviceAddr, value: u8, bytes: u64, stream: StreamId) -> DriverResult<()>;

    /// Stream-ordered pools, if the device has them.
    fn pools(&self) -> Option<&dyn PoolDriver>;

    /// Virtual memory management, if the device has it.
    fn vmm(&self) -> Option<&dyn VmmDriver>;

    /// Stream capture and graphs, if the device has them.
    fn graphs(&self) -> Option<&dyn GraphDriver>;
}

crate::settings! {
    /// Settings of a stream-ordered pool.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub struct PoolSettings {
        /// Bytes that the pool keeps when a synchronise lets it release memory; `max` keeps everything, CUDA's own default is 0.
        pub release_threshold: u64 = u64::MAX, bytes().or("max");
        /// Reuse memory freed on another stream when an event or dependency orders the free before the allocation.
        pub reuse_follow_event_dependencies: bool = true, switch();
        /// Reuse memory freed on another stream when that free happens to have completed.
        pub reuse_allow_opportunistic: bool = true, switch();
        /// Reuse memory freed on another stream by inserting a hidden wait.
        pub reuse_allow_internal_dependencies: bool = true, switch();
    }
}

/// The driver's own counters of a pool in bytes, or of the memory that graphs allocate for themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Reserved bytes.
    pub reserved: u64,
    /// Highest `reserved`.
    pub reserved_high: u64,
    /// Allocated bytes.
    pub used: u64,
    /// Highest `used`.
    pub used_high: u64,
}

impl PoolCounters {
    /// Counts an allocation of `bytes`, after which `reserved` bytes are reserved.
    pub(crate) fn take(&mut self, bytes: u64, reserved: u64) {
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
        self.reserved = reserved;
        self.reserved_high = self.reserved_high.max(reserved);
    }
}

/// Stream-ordered pools (`cuMemPool*`, `cuMemAllocFromPoolAsync`).
/// <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>
pub trait PoolDriver {
    /// A pool of its own on this device; the device's default pool is never used.
    fn pool_create(&self, settings: PoolSettings) -> DriverResult<PoolId>;

    /// Destroys a pool.
    ///
    /// # Safety
    /// The pool is not used afterwards and everything allocated from it has been freed.
    unsafe fn pool_destroy(&self, pool: PoolId) -> DriverResult<()>;

    /// The settings in effect, read back.
    fn pool_settings(&self, pool: PoolId) -> DriverResult<PoolSettings>;

    /// The pool's counters.
    fn pool_counters(&self, pool: PoolId) -> DriverResult<PoolCounters>;

    /// Peak of reserved bytes: one of the [counters](Self::pool_counters), for the cost of one.
    fn pool_reserved_high(&self, pool: PoolId) -> DriverResult<u64>;

    /// Restarts the peaks of the [counters](Self::pool_counters) from the current values.
    fn pool_reset_peaks(&self, pool: PoolId) -> DriverResult<()>;

    /// Lets the pool release unused memory while at least `keep_bytes` stay, in whole granules (32 MiB on an H200). Synchronise
    /// first: frees that are still queued keep their memory.
    fn pool_trim_to(&self, pool: PoolId, keep_bytes: u64) -> DriverResult<()>;

    /// Queues an allocation; the address, a multiple of at least 256 bytes, is valid for work queued on `stream` afterwards.
    fn mem_alloc_async(&self, pool: PoolId, bytes: u64, stream: StreamId) -> DriverResult<DeviceAddr>;

    /// Queues a free.
    ///
    /// # Safety
    /// `addr` came from [`mem_alloc_async`](Self::mem_alloc_async), is freed once, and every use of it is
    /// ordered before this point of `stream`.
    unsafe fn mem_free_async(&self, addr: DeviceAddr, stream: StreamId) -> DriverResult<()>;
}

/// Virtual memory management (`cuMemAddressReserve`, `cuMemCreate`, `cuMemMap`, ...).
/// <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>
pub trait VmmDriver {
    /// Sizes and addresses below are multiples of this many bytes.
    fn granularity(&self) -> DriverResult<u64>;

    /// Reserves a range of addresses without memory.
    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr>;

    /// Releases a range of addresses.
    ///
    /// # Safety
    /// The range came from [`address_reserve`](Self::address_reserve) with this size and nothing is mapped in it.
    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()>;

    /// Physical memory on the device.
    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle>;

    /// Maps the whole of `handle` at `addr`; not accessible until [`set_access`](Self::set_access).
    ///
    /// # Safety
    /// `addr..addr + bytes` is in one reserved range and unmapped; `bytes` is the handle's size.
    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()>;

    /// Makes a mapped range readable and writable by the device.
    ///
    /// # Safety
    /// The range is mapped.
    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()>;

    /// Unmaps a range. The caller waits first for the work that uses it.
    ///
    /// # Safety
    /// The range consists of whole mappings and no queued work uses it.
    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()>;

    /// Releases a physical handle; the memory is released with its last mapping.
    ///
    /// # Safety
    /// The handle is released once.
    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()>;

    /// The properties of memory from [`create`](Self::create). A device may refuse properties that it claims to support: they are
    /// certain after the first creation.
    fn memory_properties(&self) -> MemoryProperties;

    /// A handle of created memory that another process can [import](Self::import). On CUDA each call makes a new one.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` when the memory was created without this kind of handle, or was imported.
    fn export(&self, handle: PhysicalHandle, kind: ShareKind) -> DriverResult<Shareable>;

    /// Memory that another process has [exported](Self::export). It is mapped and released as created memory, with the size at its
    /// creation.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, or another code of the driver, for other handles.
    fn import(&self, shared: &Shareable) -> DriverResult<PhysicalHandle>;
}
