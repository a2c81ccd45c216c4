//! A byte limit on what the client holds, the same for every backend.

use crate::allocator::{Block, DeviceAllocator, Path, Request};
use crate::device::StreamId;
use crate::error::{AllocError, OomReport};
use crate::snapshot::{Ledger, Snapshot};
use crate::stats::Stats;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Refuses an allocation that would take the bytes in live blocks over the limit.
///
/// [`Caching`](crate::backend::Caching) has a limit of its own, on reserved bytes, under which it releases its
/// cache before it gives up; this one is for backends without.
#[derive(Debug)]
pub struct Limit {
    inner: Arc<dyn DeviceAllocator>,
    limit: u64,
    held: AtomicU64,
}

impl Limit {
    /// Keeps the blocks that `inner` has handed out through this decorator at or below `limit` bytes.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, limit: u64) -> Self {
        Self { inner, limit, held: AtomicU64::new(0) }
    }

    fn refuse(&self, bytes: u64) -> AllocError {
        let stats = self.inner.stats();
        AllocError::OutOfMemory(Box::new(OomReport {
            allocator: self.name().into(),
            requested_bytes: bytes,
            needed_bytes: bytes,
            reserved_bytes: stats.reserved_bytes.all.current,
            active_bytes: stats.active_bytes.all.current,
            largest_free_bytes: None,
            other_streams_free_bytes: None,
            limit_bytes: Some(self.limit),
            device_bytes: None,
        }))
    }
}

impl DeviceAllocator for Limit {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        let bytes = request.bytes;
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.limit);
        if self.held.fetch_update(Relaxed, Relaxed, fits).is_err() {
            return Err(self.refuse(bytes));
        }
        let block = match self.inner.allocate(request, stream) {
            Ok(block) => block,
            Err(error) => {
                self.held.fetch_sub(bytes, Relaxed);
                return Err(error);
            }
        };
        // The block may be larger than the request; what it really takes is counted.
        let rounding = block.bytes() - bytes;
        let fits = |held: u64| held.checked_add(rounding).filter(|sum| *sum <= self.limit);
        if self.held.fetch_update(Relaxed, Relaxed, fits).is_ok() {
            return Ok(block);
        }
        self.held.fetch_sub(bytes, Relaxed);
        // SAFETY: nobody has used the block.
        unsafe { self.inner.deallocate(block, stream) }?;
        Err(self.refuse(bytes))
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let bytes = block.bytes();
        // SAFETY: the caller's promise is the inner allocator's.
        let result = unsafe { self.inner.deallocate(block, stream) };
        // After a failing free, too, the block is gone from the client's side; only a foreign one was never counted.
        if !matches!(result, Err(AllocError::ForeignBlock { .. })) {
            self.held.fetch_sub(bytes, Relaxed);
        }
        result
    }

    super::pass_on!(record_use);
}
