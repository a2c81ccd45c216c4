//! Wrappers around an allocator, which watch or check it.

use crate::contract::{
    AllocError, Block, CaptureId, Completions, DeviceAllocator, Exported, GraphMemory, Ledger, MemoryLimit, Pages,
    Parts, Path, PrivatePool, PrivatePools, Request, RestoreError, Snapshot, Stats, Takeover,
};
use std::fmt;
use std::os::fd::OwnedFd;
use vramlab_device::{DeviceAddr, StreamId};

/// An allocator around another: one method, and the methods that it watches. All others forward the call to the allocator
/// [inside](Self::inner), captures, pools and notices of streams included, so no call is lost.
///
/// Every instrument is a [`DeviceAllocator`] with the parts of the allocator inside. It changes nothing that a client can see: it
/// returns the blocks that the allocator inside returned in the same call, and forwards every freed block. Blocks are allocated by
/// [`allocate`](Self::allocate), [`allocate_in`](Self::allocate_in), [`restore`](Self::restore) and
/// [`pool_restore`](Self::pool_restore), and freed by [`deallocate`](Self::deallocate) and [`pool_restore`](Self::pool_restore).
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
/// Both traits have the methods of the core: code that calls an instrument by its type imports only [`DeviceAllocator`], or calls
/// it as `dyn DeviceAllocator`.
///
/// *Cost.* Only that of the instrument: `allocate` and `deallocate` are one call of the allocator inside. A call of a part first
/// gets the parts of each allocator inside.
pub trait Instrument: Send + Sync + fmt::Debug {
    /// The allocator inside; always the same one.
    fn inner(&self) -> &dyn DeviceAllocator;

    /// By default [`DeviceAllocator::name`] of the allocator inside.
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    /// By default [`DeviceAllocator::settings`] of the allocator inside.
    fn settings(&self) -> serde_json::Value {
        self.inner().settings()
    }

    /// By default [`DeviceAllocator::allocate`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    #[inline(always)]
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.inner().allocate(request, stream)
    }

    /// By default [`DeviceAllocator::deallocate`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    ///
    /// # Safety
    /// As of [`DeviceAllocator::deallocate`].
    #[inline(always)]
    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.inner().deallocate(block, stream) }
    }

    /// By default [`DeviceAllocator::record_use`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.inner().record_use(block, stream)
    }

    /// By default [`DeviceAllocator::forget_stream`] of the allocator inside.
    fn forget_stream(&self, stream: StreamId) {
        self.inner().forget_stream(stream);
    }

    /// By default [`DeviceAllocator::stats`] of the allocator inside.
    fn stats(&self) -> Stats {
        self.inner().stats()
    }

    /// By default [`DeviceAllocator::reset_peaks`] of the allocator inside.
    fn reset_peaks(&self) {
        self.inner().reset_peaks();
    }

    /// By default [`DeviceAllocator::snapshot`] of the allocator inside.
    fn snapshot(&self) -> Option<Snapshot> {
        self.inner().snapshot()
    }

    /// By default [`DeviceAllocator::ledger_at_peak`] of the allocator inside.
    fn ledger_at_peak(&self) -> Ledger {
        self.inner().ledger_at_peak()
    }

    /// By default [`DeviceAllocator::trim`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        self.inner().trim(keep_bytes)
    }

    /// By default [`GraphMemory::capture_begin`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        self.inner().capture_begin(stream)
    }

    /// By default [`GraphMemory::capture_end`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.inner().capture_end(capture)
    }

    /// By default [`GraphMemory::capture_release`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.inner().capture_release(capture)
    }

    /// By default [`GraphMemory::set_reuse_in_captures`] of the allocator inside.
    fn set_reuse_in_captures(&self, on: bool) -> bool {
        self.inner().set_reuse_in_captures(on)
    }

    /// By default [`PrivatePools::allocate_in`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.inner().allocate_in(request, stream, pool)
    }

    /// By default [`PrivatePools::pool_create`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_create(&self) -> Result<PrivatePool, AllocError> {
        self.inner().pool_create()
    }

    /// By default [`PrivatePools::pool_begin`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        self.inner().pool_begin(pool, stream)
    }

    /// By default [`PrivatePools::pool_end`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
        self.inner().pool_end(stream)
    }

    /// By default [`PrivatePools::pool_release`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError> {
        self.inner().pool_release(pool)
    }

    /// By default [`PrivatePools::pool_trim`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        self.inner().pool_trim(pool)
    }

    /// By default [`PrivatePools::pool_checkpoint`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError> {
        self.inner().pool_checkpoint(pool)
    }

    /// By default [`PrivatePools::pool_restore`] of the allocator inside.
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
        // SAFETY: the caller's promise is passed on.
        unsafe { self.inner().pool_restore(pool, checkpoint, held) }
    }

    /// By default [`Pages::export`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn export(&self, block: &Block) -> Result<Exported, AllocError> {
        self.inner().export(block)
    }

    /// By default [`Pages::exported_descriptor`] of the allocator inside.
    fn exported_descriptor(&self, number: i32) -> Option<OwnedFd> {
        self.inner().exported_descriptor(number)
    }

    /// By default [`Pages::pin`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn pin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        self.inner().pin(addr, bytes)
    }

    /// By default [`Pages::unpin`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn unpin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        self.inner().unpin(addr, bytes)
    }

    /// By default [`MemoryLimit::set_memory_limit`] of the allocator inside.
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        self.inner().set_memory_limit(bytes)
    }

    /// By default [`Takeover::restore`] of the allocator inside.
    ///
    /// # Errors
    /// Those of the allocator inside.
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        self.inner().restore(snapshot, age)
    }

    /// By default [`Completions::tell_completed`] of the allocator inside.
    fn tell_completed(&self, on: bool) {
        self.inner().tell_completed(on);
    }

    /// By default [`Completions::take_completed`] of the allocator inside.
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
        // SAFETY: the caller's promise is passed on.
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
        // SAFETY: the caller's promise is passed on.
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
