//! Allocators around an allocator, which watch or check it.

use crate::contract::{
    AllocError, Block, CaptureId, Completions, DeviceAllocator, Exported, GraphMemory, Ledger, MemoryLimit, Pages,
    Parts, Path, PrivatePool, PrivatePools, Request, RestoreError, Snapshot, Stats, Takeover,
};
use std::fmt;
use std::os::fd::OwnedFd;
use vramlab_device::{DeviceAddr, StreamId};

/// An allocator around another: one method, and those that it watches. All others pass the call on to the allocator
/// [inside](Self::inner), captures, pools and notices of streams included, so it cannot lose one.
///
/// Every instrument is a [`DeviceAllocator`], which has the parts that the allocator inside has. It changes nothing that a client
/// can see: what it hands out came from the allocator inside in the same call, and what it takes back it passes on. Blocks come by
/// [`allocate`](Self::allocate), [`allocate_in`](Self::allocate_in), [`restore`](Self::restore) and
/// [`pool_restore`](Self::pool_restore), and go by [`deallocate`](Self::deallocate) and [`pool_restore`](Self::pool_restore).
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
/// use vramlab_device::StreamId;
/// use vramlab_policies::{AllocError, Block, DeviceAllocator, Instrument, Request};
///
/// #[derive(Debug)]
/// struct Largest(Arc<dyn DeviceAllocator>, AtomicU64);
///
/// impl Instrument for Largest {
///     fn inner(&self) -> &dyn DeviceAllocator {
///         self.0.as_ref()
///     }
///
///     fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
///         self.1.fetch_max(request.bytes, Relaxed);
///         self.inner().allocate(request, stream)
///     }
/// }
/// ```
///
/// Both traits have the methods of the core: code that calls an instrument by its type imports [`DeviceAllocator`] alone, or calls it
/// as `dyn DeviceAllocator`.
///
/// *Cost.* None beyond what an instrument does: `allocate` and `deallocate` are one call of the allocator inside. A call of a part
/// asks each allocator inside for its parts first.
pub trait Instrument: Send + Sync + fmt::Debug {
    /// The allocator inside, always the same.
    fn inner(&self) -> &dyn DeviceAllocator;

    /// As [`DeviceAllocator::name`], which it is by default.
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    /// As [`DeviceAllocator::settings`], which it is by default.
    fn settings(&self) -> serde_json::Value {
        self.inner().settings()
    }

    /// As [`DeviceAllocator::allocate`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    #[inline(always)]
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.inner().allocate(request, stream)
    }

    /// As [`DeviceAllocator::deallocate`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    ///
    /// # Safety
    /// As of [`DeviceAllocator::deallocate`].
    #[inline(always)]
    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        // SAFETY: passed on.
        unsafe { self.inner().deallocate(block, stream) }
    }

    /// As [`DeviceAllocator::record_use`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.inner().record_use(block, stream)
    }

    /// As [`DeviceAllocator::forget_stream`], which it is by default.
    fn forget_stream(&self, stream: StreamId) {
        self.inner().forget_stream(stream);
    }

    /// As [`DeviceAllocator::stats`], which it is by default.
    fn stats(&self) -> Stats {
        self.inner().stats()
    }

    /// As [`DeviceAllocator::reset_peaks`], which it is by default.
    fn reset_peaks(&self) {
        self.inner().reset_peaks();
    }

    /// As [`DeviceAllocator::snapshot`], which it is by default.
    fn snapshot(&self) -> Option<Snapshot> {
        self.inner().snapshot()
    }

    /// As [`DeviceAllocator::ledger_at_peak`], which it is by default.
    fn ledger_at_peak(&self) -> Ledger {
        self.inner().ledger_at_peak()
    }

    /// As [`DeviceAllocator::trim`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        self.inner().trim(keep_bytes)
    }

    /// As [`GraphMemory::capture_begin`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        self.inner().capture_begin(stream)
    }

    /// As [`GraphMemory::capture_end`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.inner().capture_end(capture)
    }

    /// As [`GraphMemory::capture_release`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.inner().capture_release(capture)
    }

    /// As [`GraphMemory::set_reuse_in_captures`], which it is by default.
    fn set_reuse_in_captures(&self, on: bool) -> bool {
        self.inner().set_reuse_in_captures(on)
    }

    /// As [`PrivatePools::allocate_in`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.inner().allocate_in(request, stream, pool)
    }

    /// As [`PrivatePools::pool_create`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_create(&self) -> Result<PrivatePool, AllocError> {
        self.inner().pool_create()
    }

    /// As [`PrivatePools::pool_begin`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        self.inner().pool_begin(pool, stream)
    }

    /// As [`PrivatePools::pool_end`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
        self.inner().pool_end(stream)
    }

    /// As [`PrivatePools::pool_release`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError> {
        self.inner().pool_release(pool)
    }

    /// As [`PrivatePools::pool_trim`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        self.inner().pool_trim(pool)
    }

    /// As [`PrivatePools::pool_checkpoint`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError> {
        self.inner().pool_checkpoint(pool)
    }

    /// As [`PrivatePools::pool_restore`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    ///
    /// # Safety
    /// As of [`PrivatePools::pool_restore`].
    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        // SAFETY: passed on.
        unsafe { self.inner().pool_restore(pool, checkpoint, held) }
    }

    /// As [`Pages::export`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn export(&self, block: &Block) -> Result<Exported, AllocError> {
        self.inner().export(block)
    }

    /// As [`Pages::exported_descriptor`], which it is by default.
    fn exported_descriptor(&self, number: i32) -> Option<OwnedFd> {
        self.inner().exported_descriptor(number)
    }

    /// As [`Pages::pin`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        self.inner().pin(addr, bytes)
    }

    /// As [`Pages::unpin`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn unpin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        self.inner().unpin(addr, bytes)
    }

    /// As [`MemoryLimit::set_memory_limit`], which it is by default.
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        self.inner().set_memory_limit(bytes)
    }

    /// As [`Takeover::restore`], which it is by default.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        self.inner().restore(snapshot, age)
    }

    /// As [`Completions::tell_completed`], which it is by default.
    fn tell_completed(&self, on: bool) {
        self.inner().tell_completed(on);
    }

    /// As [`Completions::take_completed`], which it is by default.
    fn take_completed(&self) -> Vec<DeviceAddr> {
        self.inner().take_completed()
    }
}

impl<I: Instrument> DeviceAllocator for I {
    fn name(&self) -> &'static str {
        Instrument::name(self)
    }

    fn settings(&self) -> serde_json::Value {
        Instrument::settings(self)
    }

    #[inline(always)]
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        Instrument::allocate(self, request, stream)
    }

    #[inline(always)]
    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        // SAFETY: passed on.
        unsafe { Instrument::deallocate(self, block, stream) }
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        Instrument::record_use(self, block, stream)
    }

    fn forget_stream(&self, stream: StreamId) {
        Instrument::forget_stream(self, stream);
    }

    fn stats(&self) -> Stats {
        Instrument::stats(self)
    }

    fn reset_peaks(&self) {
        Instrument::reset_peaks(self);
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Instrument::snapshot(self)
    }

    fn ledger_at_peak(&self) -> Ledger {
        Instrument::ledger_at_peak(self)
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        Instrument::trim(self, keep_bytes)
    }

    fn parts(&self) -> Parts<'_> {
        let inner = self.inner().parts();
        Parts {
            graphs: inner.graphs.map(|_| self as _),
            private_pools: inner.private_pools.map(|_| self as _),
            pages: inner.pages.map(|_| self as _),
            limit: inner.limit.map(|_| self as _),
            takeover: inner.takeover.map(|_| self as _),
            completions: inner.completions.map(|_| self as _),
        }
    }
}

impl<I: Instrument> GraphMemory for I {
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        Instrument::capture_begin(self, stream)
    }

    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        Instrument::capture_end(self, capture)
    }

    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        Instrument::capture_release(self, capture)
    }

    fn set_reuse_in_captures(&self, on: bool) -> bool {
        Instrument::set_reuse_in_captures(self, on)
    }
}

impl<I: Instrument> PrivatePools for I {
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        Instrument::allocate_in(self, request, stream, pool)
    }

    fn pool_create(&self) -> Result<PrivatePool, AllocError> {
        Instrument::pool_create(self)
    }

    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        Instrument::pool_begin(self, pool, stream)
    }

    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
        Instrument::pool_end(self, stream)
    }

    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError> {
        Instrument::pool_release(self, pool)
    }

    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        Instrument::pool_trim(self, pool)
    }

    fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError> {
        Instrument::pool_checkpoint(self, pool)
    }

    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        // SAFETY: passed on.
        unsafe { Instrument::pool_restore(self, pool, checkpoint, held) }
    }
}

impl<I: Instrument> Pages for I {
    fn export(&self, block: &Block) -> Result<Exported, AllocError> {
        Instrument::export(self, block)
    }

    fn exported_descriptor(&self, number: i32) -> Option<OwnedFd> {
        Instrument::exported_descriptor(self, number)
    }

    fn pin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        Instrument::pin(self, addr, bytes)
    }

    fn unpin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        Instrument::unpin(self, addr, bytes)
    }
}

impl<I: Instrument> MemoryLimit for I {
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        Instrument::set_memory_limit(self, bytes)
    }
}

impl<I: Instrument> Takeover for I {
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        Instrument::restore(self, snapshot, age)
    }
}

impl<I: Instrument> Completions for I {
    fn tell_completed(&self, on: bool) {
        Instrument::tell_completed(self, on);
    }

    fn take_completed(&self) -> Vec<DeviceAddr> {
        Instrument::take_completed(self)
    }
}
