//! Pinned host memory of a run: staging buffers of batches and, with `--offload`, the optimizer's state.
//!
//! | `--pin` | a buffer is | it is pinned | staging |
//! |---|---|---|---|
//! | `plain` | memory of `cudaHostAlloc` | once, for the run | four buffers in rotation |
//! | `registered` | ordinary memory, touched by four threads, then `cudaHostRegister` | once, for the run | the same |
//! | `pooled` | a block of the allocator `host-exact` over `cudaHostAlloc` | when the pool has no block that fits | a block for each batch |
//!
//! A buffer may be dropped while copies still use it: a pooled block is reused behind them, other memory is released when the device
//! has become idle.

use crate::device::Device;
use crate::error::Result;
use crate::settings::PinMode;
use serde::Serialize;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab::backends::host_exact;
use vramlab::{Block, DeviceAddr, DeviceAllocator, Driver, HostDriver, Request, Selection, StreamId};

/// Threads that touch memory before it is registered, as the simulated device takes it to be.
const REGISTER_THREADS: u32 = vramlab::device::sim::SIM_REGISTER_THREADS;

/// Pinned memory and the copies from and to it.
#[derive(Debug)]
pub(crate) struct HostMemory {
    mode: PinMode,
    pool: Option<Pool>,
    host: Arc<HostDriver>,
    driver: Arc<dyn Driver>,
    usage: Mutex<Usage>,
}

/// Blocks instead of segments.
#[derive(Debug)]
struct Pool {
    allocator: Option<Arc<dyn DeviceAllocator>>,
    /// The host's place among the streams.
    stream: StreamId,
}

#[derive(Debug, Default)]
struct Usage {
    buffers: u64,
    live_bytes: u64,
    peak_bytes: u64,
    to_device_bytes: u64,
    to_host_bytes: u64,
    wait_ns: u64,
}

/// Pinned host memory of a run.
#[derive(Clone, Debug, Serialize)]
pub struct HostMemoryRecord {
    /// How memory was pinned: `cudaHostAlloc`, or `cudaHostRegister` with a number of threads that touched it.
    pub pinning: String,
    /// The allocator of host memory, with `--pin pooled`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocator: Option<String>,
    /// Buffers that were requested.
    pub buffers: u64,
    /// Most bytes that were requested and in use at once; with a pool also in blocks whose copies had not completed.
    pub peak_requested_bytes: u64,
    /// Most bytes that were pinned at once, in whole pages.
    pub peak_reserved_bytes: u64,
    /// Calls that pinned memory.
    pub pin_calls: u64,
    /// Calls that released it.
    pub release_calls: u64,
    /// Time in the calls that pinned memory, with touching it.
    pub pin_s: f64,
    /// Bytes that were copied to the device.
    pub to_device_bytes: u64,
    /// Bytes that were copied to the host.
    pub to_host_bytes: u64,
    /// Time for which the host waited for a staging buffer whose copy had not completed.
    pub staging_wait_s: f64,
    /// The optimizer's state on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadRecord>,
}

/// The optimizer's state on the host.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OffloadRecord {
    /// Its bytes.
    pub state_bytes: u64,
    /// Bytes of it that are on the device at most at once.
    pub window_bytes: u64,
    /// Mean time in a step for which updates waited for state, on the device; of each eighth step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_wait_s: Option<f64>,
}

impl HostMemory {
    /// Memory that is pinned in this way through a device's driver.
    ///
    /// # Errors
    /// Errors of building the pool.
    pub(crate) fn new(driver: Arc<dyn Driver>, mode: PinMode) -> Result<Arc<Self>> {
        let host = Arc::new(match mode {
            PinMode::Plain | PinMode::Pooled => HostDriver::real(Arc::clone(&driver)),
            PinMode::Registered => HostDriver::registered(Arc::clone(&driver), REGISTER_THREADS, false),
        });
        let pool = match mode {
            PinMode::Plain | PinMode::Registered => None,
            PinMode::Pooled => {
                let below = Arc::clone(&host) as Arc<dyn Driver>;
                let allocator = Some(Selection::of(&host_exact::BACKEND).build(&below)?);
                Some(Pool { allocator, stream: driver.stream_create()? })
            }
        };
        Ok(Arc::new(Self { mode, pool, host, driver, usage: Mutex::default() }))
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pool(&self) -> Option<(&dyn DeviceAllocator, StreamId)> {
        let pool = self.pool.as_ref()?;
        pool.allocator.as_deref().map(|allocator| (allocator, pool.stream))
    }

    /// How it is pinned.
    pub(crate) fn mode(&self) -> PinMode {
        self.mode
    }

    /// A buffer of initialised memory.
    ///
    /// # Errors
    /// Zero bytes; the driver or this machine has no more memory to pin.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<HostBuffer> {
        let (addr, block) = match self.pool() {
            Some((allocator, stream)) => {
                let block = allocator.allocate(Request::new(bytes as u64), stream)?;
                (block.addr(), Some(block))
            }
            None => (self.host.mem_alloc(bytes as u64)?, None),
        };
        let usage = &mut *self.usage();
        usage.buffers += 1;
        usage.live_bytes += bytes as u64;
        usage.peak_bytes = usage.peak_bytes.max(usage.live_bytes);
        Ok(HostBuffer { memory: Arc::clone(self), addr, bytes, block })
    }

    /// Notes that the host waited for a buffer.
    pub(crate) fn note_wait(&self, ns: u64) {
        self.usage().wait_ns += ns;
    }

    /// The account so far; `None` if nothing was pinned.
    pub(crate) fn record(&self, offload: Option<OffloadRecord>) -> Option<HostMemoryRecord> {
        let (account, usage) = (self.host.account(), self.usage());
        if usage.buffers == 0 {
            return None;
        }
        let pooled = self.pool().map(|(allocator, _)| (allocator.name(), allocator.stats().requested_bytes.all.peak));
        // CAST: nanoseconds of a run.
        let seconds = |ns: u64| ns as f64 / 1e9;
        Some(HostMemoryRecord {
            pinning: self.host.pinning().to_string(),
            allocator: pooled.map(|(name, _)| name.to_owned()),
            buffers: usage.buffers,
            peak_requested_bytes: pooled.map_or(usage.peak_bytes, |(_, peak)| peak),
            peak_reserved_bytes: account.peak_bytes,
            pin_calls: account.pins,
            release_calls: account.releases,
            pin_s: seconds(account.pin_ns.unwrap_or_default()),
            to_device_bytes: usage.to_device_bytes,
            to_host_bytes: usage.to_host_bytes,
            staging_wait_s: seconds(usage.wait_ns),
            offload,
        })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Some(mut pool) = self.pool.take() {
            // Before its stream.
            drop(pool.allocator.take());
            // SAFETY: made in `new`, and the allocator was its only user. A stream that is not destroyed ends with the context.
            let _ = unsafe { self.driver.stream_destroy(pool.stream) };
        }
    }
}

/// Pinned memory of one owner.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    memory: Arc<HostMemory>,
    addr: DeviceAddr,
    bytes: usize,
    block: Option<Block>,
}

impl HostBuffer {
    fn start(&self) -> NonNull<u8> {
        NonNull::new(self.addr.get() as *mut u8).expect("memory of the host should have an address")
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory to fill. The caller first waits for copies that still use it.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory is the buffer's, initialised by whoever pinned it, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.bytes) }
    }

    /// Announces a copy to the pool, which reuses the block behind it.
    fn announce(&self, stream: StreamId) -> Result<()> {
        if let (Some((allocator, _)), Some(block)) = (self.memory.pool(), &self.block) {
            allocator.record_use(block, stream)?;
        }
        Ok(())
    }

    /// The address of a part.
    ///
    /// # Panics
    /// When the part is outside of the buffer.
    fn part(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "a copy should stay inside its buffer");
        // SAFETY: the offset was just checked.
        unsafe { self.start().add(offset) }
    }

    /// Queues a copy of `bytes` bytes from `offset` on to `dst`.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// `dst` is valid for `bytes`, and the part does not change, until the stream has passed the copy.
    ///
    /// # Panics
    /// When the part is outside of the buffer.
    pub(crate) unsafe fn copy_to(&self, offset: usize, dst: DeviceAddr, bytes: usize, stream: StreamId) -> Result<()> {
        let part = self.part(offset, bytes);
        self.announce(stream)?;
        // SAFETY: the caller vouches for the target; the part is pinned memory that is released behind the copy.
        unsafe { self.memory.driver.copy_to_device_async(dst, part, bytes, stream)? };
        self.memory.usage().to_device_bytes += bytes as u64;
        Ok(())
    }

    /// Queues a copy of all of `src` to the buffer.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// `src` is valid for the buffer's size, and nothing else uses the buffer, until the stream has passed the copy.
    pub(crate) unsafe fn copy_from(&self, src: DeviceAddr, stream: StreamId) -> Result<()> {
        let part = self.part(0, self.bytes);
        self.announce(stream)?;
        // SAFETY: the caller vouches for both sides; the buffer is pinned memory that is released behind the copy.
        unsafe { self.memory.driver.copy_to_host_async(part, src, self.bytes, stream)? };
        self.memory.usage().to_host_bytes += self.bytes as u64;
        Ok(())
    }
}

impl Drop for HostBuffer {
    /// Errors are of no use: what cannot be released is released with the context.
    fn drop(&mut self) {
        self.memory.usage().live_bytes -= self.bytes as u64;
        match (self.memory.pool(), self.block.take()) {
            (Some((allocator, stream)), Some(block)) => {
                // SAFETY: the host uses it no more, and every copy was announced.
                let _ = unsafe { allocator.deallocate(block, stream) };
            }
            // SAFETY: allocated by this driver and freed once; the driver waits for copies.
            _ => drop(unsafe { self.memory.host.mem_free(self.addr) }),
        }
    }
}

impl Device {
    /// Pins memory in this way from now on.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn pin(&mut self, mode: PinMode) -> Result<()> {
        self.set_host_memory(HostMemory::new(self.driver(), mode)?);
        Ok(())
    }
}
