//! Owners of memory: the trainer's view of an allocator.

use crate::contract::{AllocError, Block, DeviceAllocator, Path, Request};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use vramlab_device::{DeviceAddr, Driver, DriverError, StreamId};

/// An allocator, and the error of a dropped buffer until the next fallible call.
#[derive(Debug)]
pub struct Memory {
    allocator: Arc<dyn DeviceAllocator>,
    deferred: Mutex<Vec<AllocError>>,
}

impl Memory {
    /// Wraps an allocator.
    #[must_use]
    pub fn new(allocator: Arc<dyn DeviceAllocator>) -> Arc<Self> {
        Arc::new(Self { allocator, deferred: Mutex::default() })
    }

    /// The allocator.
    #[must_use]
    pub fn allocator(&self) -> &Arc<dyn DeviceAllocator> {
        &self.allocator
    }

    /// A buffer of `bytes` for work on `stream`, freed when it is dropped.
    ///
    /// # Errors
    /// Those of [`DeviceAllocator::allocate`], and the first error of an earlier drop.
    pub fn allocate(self: &Arc<Self>, bytes: u64, stream: StreamId) -> Result<DeviceBuffer, AllocError> {
        self.check()?;
        let block = self.allocator.allocate(Request::new(bytes), stream)?;
        Ok(DeviceBuffer { block: Some(block), stream, memory: Arc::clone(self) })
    }

    /// Keeps an error for the next fallible call.
    pub(crate) fn defer(&self, error: AllocError) {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(error);
    }

    /// Takes the first error of a dropped buffer, if any.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), AllocError> {
        let mut deferred = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        if deferred.is_empty() { Ok(()) } else { Err(deferred.remove(0)) }
    }
}

/// Device memory that is freed when dropped.
///
/// The free takes effect on the stream that the buffer was allocated on, after everything queued on it so far; announce work on
/// other streams with [`record_use`](Self::record_use). An error of that free is kept and returned by the next fallible call on the
/// [`Memory`].
#[derive(Debug)]
pub struct DeviceBuffer {
    block: Option<Block>,
    stream: StreamId,
    memory: Arc<Memory>,
}

impl DeviceBuffer {
    fn block(&self) -> &Block {
        self.block.as_ref().expect("a buffer holds its block until it is dropped")
    }

    /// First address.
    #[must_use]
    pub fn addr(&self) -> DeviceAddr {
        self.block().addr()
    }

    /// Requested size, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block().requested()
    }

    /// Stream that the buffer belongs to.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// The path of the allocation.
    #[must_use]
    pub fn path(&self) -> Path {
        self.block().path()
    }

    /// Announces that work queued so far on another stream uses the buffer.
    ///
    /// # Errors
    /// Those of [`DeviceAllocator::record_use`].
    pub fn record_use(&self, stream: StreamId) -> Result<(), AllocError> {
        self.memory.allocator.record_use(self.block(), stream)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        // SAFETY: the code that queued work on this memory, by an unsafe call, promised that it stays valid until then. On the
        // buffer's own stream the free is queued later; work on others was announced with `record_use` or has been waited for.
        let freed = unsafe { self.memory.allocator.deallocate(block, self.stream) };
        if let Err(error) = freed {
            self.memory.defer(error);
        }
    }
}

/// Page-locked host memory, freed when dropped.
#[derive(Debug)]
pub struct PinnedBuffer {
    driver: Arc<dyn Driver>,
    ptr: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the buffer owns its memory, and a driver may be called from any thread.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` of zeroed page-locked memory.
    ///
    /// # Errors
    /// Those of [`Driver::host_alloc`].
    pub fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, DriverError> {
        let ptr = driver.host_alloc(bytes)?;
        Ok(Self { driver: Arc::clone(driver), ptr, bytes })
    }

    /// The memory to fill. The caller first waits for copies that still read it.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `ptr` is valid and initialised for `bytes` (host_alloc zeroes it) and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes) }
    }

    /// Queues a copy of `bytes` bytes from `offset` on to `dst`.
    ///
    /// # Errors
    /// Those of [`Driver::copy_to_device_async`].
    ///
    /// # Safety
    /// `dst` is valid for `bytes`. Until the stream has passed the copy, this buffer does not change and both it and `dst` stay
    /// allocated.
    ///
    /// # Panics
    /// When the range is outside of the buffer.
    pub unsafe fn copy_to(
        &self,
        offset: usize,
        dst: DeviceAddr,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), DriverError> {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "a copy should stay inside its buffer");
        // SAFETY: the offset was just checked.
        let src = unsafe { self.ptr.add(offset) };
        // SAFETY: the caller keeps both sides valid; the source is in memory from `host_alloc`.
        unsafe { self.driver.copy_to_device_async(dst, src, bytes, stream) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this size in `new`, freed only here; users of `copy_to` promised to wait. After a failing free the
        // memory stays allocated until the process ends; nothing more could be done.
        let _ = unsafe { self.driver.host_free(self.ptr, self.bytes) };
    }
}
