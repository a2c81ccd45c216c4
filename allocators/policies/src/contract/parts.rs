//! Optional parts of an allocator beyond [`DeviceAllocator`].

use crate::contract::{
    AllocError, Block, CaptureId, DeviceAllocator, Exported, PrivatePool, Request, RestoreError, Snapshot,
};
use std::fmt;
use std::os::fd::OwnedFd;
use vramlab_device::{DeviceAddr, StreamId};

/// The optional parts of an allocator: `Parts { graphs: Some(self), ..Parts::NONE }`.
#[derive(Clone, Copy, Default)]
pub struct Parts<'a> {
    /// Memory of captured graphs.
    pub graphs: Option<&'a dyn GraphMemory>,
    /// Memory that serves only requests which name it.
    pub private_pools: Option<&'a dyn PrivatePools>,
    /// Pages that other processes map or libraries register.
    pub pages: Option<&'a dyn Pages>,
    /// A limit on reserved memory that can change.
    pub limit: Option<&'a dyn MemoryLimit>,
    /// Segments and blocks of another allocator.
    pub takeover: Option<&'a dyn Takeover>,
    /// Completion of deferred frees.
    pub completions: Option<&'a dyn Completions>,
}

impl Parts<'_> {
    /// No part.
    pub const NONE: Self =
        Self { graphs: None, private_pools: None, pages: None, limit: None, takeover: None, completions: None };
}

impl fmt::Debug for Parts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts")
            .field("graphs", &self.graphs.is_some())
            .field("private_pools", &self.private_pools.is_some())
            .field("pages", &self.pages.is_some())
            .field("limit", &self.limit.is_some())
            .field("takeover", &self.takeover.is_some())
            .field("completions", &self.completions.is_some())
            .finish()
    }
}

/// Memory of captured graphs; see [graph capture](crate::DeviceAllocator#graph-capture).
pub trait GraphMemory: Send + Sync {
    /// Serves allocations on `stream` from memory of a new capture; see [graph capture](crate::DeviceAllocator#graph-capture).
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator does not support captures, [`AllocError::Unsupported`] when the device has no
    /// graphs, [`AllocError::Capture`] when the stream is already captured.
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError>;

    /// Ends a capture, after the driver's end: its memory stays pinned, and frees that were deferred to the end take effect.
    ///
    /// # Errors
    /// [`AllocError::CaptureLive`] when blocks of the capture are still live; [`AllocError::Driver`] when a deferred free was
    /// refused. The capture has ended in both cases. [`AllocError::Capture`] when it had ended before.
    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError>;

    /// Releases the memory of an ended capture: its graph is destroyed and the last launch has finished. Blocks of it that are
    /// still live can be freed as usual, unless the driver owns their memory: then they were released with the graph and their free
    /// is [`AllocError::ForeignBlock`].
    ///
    /// # Errors
    /// [`AllocError::Capture`] when there is no such capture or it has not ended; [`AllocError::Driver`] when the driver refused to
    /// release memory. That memory stays reserved for the next request or [`trim`](crate::DeviceAllocator::trim).
    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError>;

    /// Sets whether a block that is freed inside a capture, after other streams used it there, may be reused within that capture
    /// once the order of the graph's nodes allows it (PyTorch's `graph_capture_record_stream_reuse`). Off by default: such a block
    /// becomes reusable at the end of the capture. The search takes time for each captured node. Returns false, without effect,
    /// where an allocator cannot do this.
    fn set_reuse_in_captures(&self, on: bool) -> bool;
}

/// Memory that serves only requests which name it; see [private pools](crate::DeviceAllocator#private-pools).
pub trait PrivatePools: Send + Sync {
    /// As [`allocate`](crate::DeviceAllocator::allocate), from the memory of a private pool, whatever pool the stream is in.
    ///
    /// # Errors
    /// As [`allocate`](crate::DeviceAllocator::allocate); [`AllocError::PrivatePool`] when there is no such pool or it was
    /// released.
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError>;

    /// Makes an empty private pool; see [private pools](crate::DeviceAllocator#private-pools).
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator has no private pools.
    fn pool_create(&self) -> Result<PrivatePool, AllocError>;

    /// Serves later requests of `stream` from a private pool (PyTorch's `beginAllocateToPool`).
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when there is no such pool, or it was released, or the stream is already in a pool.
    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError>;

    /// Serves later requests of `stream` as before [`pool_begin`](Self::pool_begin) (PyTorch's `endAllocateToPool`).
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when the stream is not in a pool.
    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError>;

    /// Announces that a private pool will get no more requests (PyTorch's `releasePool`). Its free segments are released when free
    /// memory is released the next time: by [`trim`](crate::DeviceAllocator::trim), or because memory is short. Its live blocks can
    /// be freed as usual.
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when there is no such pool, or it was released before, or a stream is in it.
    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError>;

    /// Releases the free segments of a released private pool, and nothing else (PyTorch's `emptyCache` of a pool); returns the
    /// bytes. It does not wait: blocks that other streams still use stay.
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when the pool has not been released; [`AllocError::Driver`] when the driver refused.
    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError>;

    /// The current segments and blocks of a private pool, for [`pool_restore`](Self::pool_restore) (PyTorch's
    /// `getCheckpointState`). Takes time in proportion to all blocks.
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator cannot see its blocks, or cannot restore a checkpoint.
    fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError>;

    /// Restores a private pool to a [checkpoint](Self::pool_checkpoint): first frees the live blocks of the pool, then allocates
    /// each block that was live at the checkpoint, at its former address. Newer segments are free afterwards. Returns these blocks
    /// in the order of the checkpoint (PyTorch's `setCheckpointPoolState`).
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when there is no such pool, memory of the checkpoint was released, or a block in it was not
    /// passed in or is used by another stream; [`AllocError::ForeignBlock`] for a block of another allocator;
    /// [`AllocError::Incapable`] for an allocator that splits blocks by a scheme of its own. Nothing has changed then, and the
    /// error contains the blocks that were passed in.
    ///
    /// # Safety
    /// `held` is every live block of the pool, each with the stream that it was allocated on, freed as by
    /// [`deallocate`](crate::DeviceAllocator::deallocate). The pool gets no request meanwhile.
    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError>;
}

/// Memory in pages that other processes map, or that a library registers.
pub trait Pages: Send + Sync {
    /// Handles by which other processes map the memory around a live block: whole pages, from the one in which the block begins to
    /// the one in which it ends. The handles stay the same while the block is live, and each page stays mapped at its address. The
    /// driver makes a handle for each page that has none yet.
    ///
    /// # Errors
    /// [`AllocError::ForeignBlock`] when the block is not live here. [`AllocError::Incapable`] when its memory is not mapped in
    /// pages: then it belongs to an allocation of the driver, which has handles of its own. [`AllocError::Unsupported`] when the
    /// device's memory has no handles, and [`AllocError::Driver`] when it refused one.
    fn export(&self, block: &Block) -> Result<Exported, AllocError>;

    /// A duplicate of a file descriptor that [`export`](Self::export) returned, by its number; `None` when it does not belong to a
    /// live block.
    fn exported_descriptor(&self, number: i32) -> Option<OwnedFd>;

    /// Keeps the memory of an address range mapped where it is until [`unpin`](Self::unpin), also while it is free: the pages in
    /// the range are neither moved nor unmapped. For memory that a library has registered by its address. Pins are counted.
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator's memory is not mapped in pages.
    fn pin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError>;

    /// Undoes one [`pin`](Self::pin) of the same range.
    ///
    /// # Errors
    /// As of [`pin`](Self::pin).
    fn unpin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError>;
}

/// A limit on reserved memory that changes while the allocator runs.
pub trait MemoryLimit: Send + Sync {
    /// Changes the maximum of reserved bytes, as the setting `memory_limit` sets it at the start; `None` removes the limit. Nothing
    /// is released immediately: memory above a lower limit is released when a request meets it. Returns false, without effect,
    /// where an allocator has no limit of its own.
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool;
}

/// Segments and blocks of another allocator.
pub trait Takeover: Send + Sync {
    /// Takes over segments and blocks of another allocator, before the first allocation: returns the blocks that are not free, in
    /// the order of the snapshot, as live blocks. Segments are allocated by the device; of their addresses in the snapshot only the
    /// order matters. Segments without an active block are skipped where memory is short, since an allocator would have released
    /// them. `age` returns the number of cache searches for which such a segment had been idle, for allocators that collect by age.
    /// Segments of a stream that is in a [private pool](PrivatePools::pool_begin) become that pool's; they may be taken over one
    /// pool after another. `None`, without effect, when an allocator keeps no segments of its own.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] when memory is short, [`AllocError::InvalidRequest`] when the blocks do not fill their
    /// segments, [`AllocError::Driver`] for any other failing driver call. Nothing is leaked.
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError>;
}

/// Completion of frees that were deferred for other streams.
pub trait Completions: Send + Sync {
    /// Starts or stops remembering the addresses of deferred frees once they complete: a recording has them as `free_completed`.
    fn tell_completed(&self, on: bool);

    /// First addresses of blocks whose free was [deferred](crate::Path::Deferred) and that have become reusable since the last
    /// call, in that order, if [they are remembered](Self::tell_completed). The memory may already be allocated again.
    fn take_completed(&self) -> Vec<DeviceAddr>;
}

/// The parts by the names of their methods. Without the part, the result is an error, `false` or `None`.
impl dyn DeviceAllocator + '_ {
    /// [`GraphMemory::capture_begin`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        self.parts().graphs.ok_or_else(|| no_graphs(self.name()))?.capture_begin(stream)
    }

    /// [`GraphMemory::capture_end`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.parts().graphs.ok_or_else(|| no_graphs(self.name()))?.capture_end(capture)
    }

    /// [`GraphMemory::capture_release`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.parts().graphs.ok_or_else(|| no_graphs(self.name()))?.capture_release(capture)
    }

    /// [`GraphMemory::set_reuse_in_captures`]; false without that part.
    pub fn set_reuse_in_captures(&self, on: bool) -> bool {
        self.parts().graphs.is_some_and(|part| part.set_reuse_in_captures(on))
    }

    /// [`PrivatePools::allocate_in`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.parts().private_pools.ok_or_else(|| no_private_pools(self.name()))?.allocate_in(request, stream, pool)
    }

    /// [`PrivatePools::pool_create`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn pool_create(&self) -> Result<PrivatePool, AllocError> {
        self.parts().private_pools.ok_or_else(|| no_private_pools(self.name()))?.pool_create()
    }

    /// [`PrivatePools::pool_begin`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        self.parts().private_pools.ok_or_else(|| no_private_pools(self.name()))?.pool_begin(pool, stream)
    }

    /// [`PrivatePools::pool_end`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
        self.parts().private_pools.ok_or_else(|| no_private_pools(self.name()))?.pool_end(stream)
    }

    /// [`PrivatePools::pool_release`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError> {
        self.parts().private_pools.ok_or_else(|| no_private_pools(self.name()))?.pool_release(pool)
    }

    /// [`PrivatePools::pool_trim`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        self.parts().private_pools.ok_or_else(|| no_private_pools(self.name()))?.pool_trim(pool)
    }

    /// [`PrivatePools::pool_checkpoint`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError> {
        self.parts().private_pools.ok_or_else(|| no_private_pools(self.name()))?.pool_checkpoint(pool)
    }

    /// [`PrivatePools::pool_restore`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    ///
    /// # Safety
    /// As of [`PrivatePools::pool_restore`].
    pub unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        match self.parts().private_pools {
            // SAFETY: the caller's promise is passed on.
            Some(pools) => unsafe { pools.pool_restore(pool, checkpoint, held) },
            None => Err(RestoreError { held, error: no_private_pools(self.name()) }),
        }
    }

    /// [`Pages::export`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn export(&self, block: &Block) -> Result<Exported, AllocError> {
        self.parts().pages.ok_or_else(|| no_pages(self.name()))?.export(block)
    }

    /// [`Pages::exported_descriptor`]; `None` without that part.
    pub fn exported_descriptor(&self, number: i32) -> Option<OwnedFd> {
        self.parts().pages.and_then(|part| part.exported_descriptor(number))
    }

    /// [`Pages::pin`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn pin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        self.parts().pages.ok_or_else(|| no_pages(self.name()))?.pin(addr, bytes)
    }

    /// [`Pages::unpin`].
    ///
    /// # Errors
    /// As there; [`AllocError::Incapable`] without that part.
    pub fn unpin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        self.parts().pages.ok_or_else(|| no_pages(self.name()))?.unpin(addr, bytes)
    }

    /// [`MemoryLimit::set_memory_limit`]; false without that part.
    pub fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        self.parts().limit.is_some_and(|part| part.set_memory_limit(bytes))
    }

    /// [`Takeover::restore`]; `None` without that part.
    ///
    /// # Errors
    /// As there.
    pub fn restore(
        &self,
        snapshot: &Snapshot,
        age: &dyn Fn(DeviceAddr) -> u64,
    ) -> Result<Option<Vec<Block>>, AllocError> {
        self.parts().takeover.map_or(Ok(None), |part| part.restore(snapshot, age))
    }

    /// [`Completions::tell_completed`]; false without that part, whose frees are never deferred or not observed.
    pub fn tell_completed(&self, on: bool) -> bool {
        let completions = self.parts().completions;
        completions.inspect(|completions| completions.tell_completed(on)).is_some()
    }

    /// [`Completions::take_completed`]; no address without that part.
    pub fn take_completed(&self) -> Vec<DeviceAddr> {
        self.parts().completions.map(|part| part.take_completed()).unwrap_or_default()
    }
}

/// The error of allocators that do not support captures.
fn no_graphs(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "graph capture" }
}

/// The error of allocators without private pools.
pub(crate) fn no_private_pools(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "private pools" }
}

/// The error of allocators whose pools have no checkpoints.
pub(crate) fn no_checkpoints(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "checkpoints of private pools" }
}

/// The error of allocators whose memory is not mapped in pages.
pub(crate) fn no_pages(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "pages of memory that others can map or register by themselves" }
}
