//! What an allocator may do beyond [`DeviceAllocator`]: parts that are asked for.

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
    /// Memory that only requests which name it are served from.
    pub private_pools: Option<&'a dyn PrivatePools>,
    /// Memory in pages that others map or register.
    pub pages: Option<&'a dyn Pages>,
    /// A limit on reserved memory that changes.
    pub limit: Option<&'a dyn MemoryLimit>,
    /// Segments and blocks of another allocator.
    pub takeover: Option<&'a dyn Takeover>,
    /// When deferred frees complete.
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
    /// Lets blocks of `stream` come from memory of a new capture; see [graph capture](crate::DeviceAllocator#graph-capture).
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator serves no captures, [`AllocError::Unsupported`] when the device has no
    /// graphs, [`AllocError::Capture`] when the stream is in a capture already.
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError>;

    /// Ends a capture, after the driver has: its memory stays pinned, and frees that waited for it are carried out.
    ///
    /// # Errors
    /// [`AllocError::CaptureLive`] when blocks of the capture are still held; [`AllocError::Driver`] when a free that
    /// waited was refused. The capture has ended in both cases. [`AllocError::Capture`] when it had before.
    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError>;

    /// Gives up the memory of a capture that has ended: its graph is gone and the last launch has finished. What is still
    /// held of it can be freed as ever, unless the driver owns it: then it is gone with the graph and its free is
    /// [`AllocError::ForeignBlock`].
    ///
    /// # Errors
    /// [`AllocError::Capture`] when there is no such capture or it has not ended; [`AllocError::Driver`] when the driver
    /// refused to take memory back. What it refused is kept for the next request or [`trim`](crate::DeviceAllocator::trim).
    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError>;

    /// Sets whether a block that is freed inside a capture, after other streams used it there, may be reused within that capture once the
    /// order of the graph's nodes allows it (PyTorch's `graph_capture_record_stream_reuse`). Off at first: such a block waits for
    /// the end of the capture. To look costs time for each node that is captured. False where an allocator cannot; then nothing was done.
    fn set_reuse_in_captures(&self, on: bool) -> bool;
}

/// Memory that only requests which name it are served from; see [private pools](crate::DeviceAllocator#private-pools).
pub trait PrivatePools: Send + Sync {
    /// As [`allocate`](crate::DeviceAllocator::allocate), from the memory of a private pool, wherever the stream's requests go otherwise.
    ///
    /// # Errors
    /// As [`allocate`](crate::DeviceAllocator::allocate); [`AllocError::PrivatePool`] when there is no such pool or it was released.
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError>;

    /// Makes a private pool, which holds nothing yet; see [private pools](crate::DeviceAllocator#private-pools).
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator has none.
    fn pool_create(&self) -> Result<PrivatePool, AllocError>;

    /// Lets later requests of `stream` be served from a private pool (PyTorch's `beginAllocateToPool`).
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when there is no such pool, or it was released, or the stream is in one already.
    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError>;

    /// Lets later requests of `stream` be served as they were before (PyTorch's `endAllocateToPool`).
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when the stream is in none.
    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError>;

    /// Says that no more requests will come for a private pool (PyTorch's `releasePool`). Its idle segments go back when idle
    /// memory goes back the next time: by [`trim`](crate::DeviceAllocator::trim), or because memory is short. Blocks of it that are held can be
    /// freed as ever.
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when there is no such pool, or it was released before, or a stream is in it.
    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError>;

    /// Gives back what is idle of a released private pool, and nothing else (PyTorch's `emptyCache` of a pool); says how many
    /// bytes. Waits for no work: blocks that other streams still use stay.
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when the pool has not been released; [`AllocError::Driver`] when the driver refused.
    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError>;

    /// The segments and blocks of a private pool at this moment, for [`pool_restore`](Self::pool_restore) (PyTorch's
    /// `getCheckpointState`). Takes time in proportion to all blocks.
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator cannot see its blocks, or cannot go back.
    fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError>;

    /// Lets a private pool be as it was at a [checkpoint](Self::pool_checkpoint): first the blocks of it that are held come
    /// back, then each block that was held then lies where it lay, and is held by the client. Segments that came since are
    /// free. Returns these blocks in the order of the checkpoint (PyTorch's `setCheckpointPoolState`).
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when there is no such pool, memory of the checkpoint is there no more, or a block in it was not
    /// given back here or is used by another stream; [`AllocError::ForeignBlock`] for a block of another allocator;
    /// [`AllocError::Incapable`] for an allocator that cuts blocks by a scheme of its own. Nothing has changed then, and the error has the
    /// blocks that were given back.
    ///
    /// # Safety
    /// `held` is every block of the pool that the client holds, each with the stream that it was allocated on, given back as by
    /// [`deallocate`](crate::DeviceAllocator::deallocate). The pool is asked for no memory meanwhile.
    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError>;
}

/// Memory in pages that other processes map, or that something outside of the allocator registers.
pub trait Pages: Send + Sync {
    /// Handles by which other processes map the memory around a block that is held here: whole pages, from the one in which the
    /// block begins to the one in which it ends. They are the same handles for as long as the block is held, and each page stays
    /// where it is. The driver makes a handle for each page that has none yet.
    ///
    /// # Errors
    /// [`AllocError::ForeignBlock`] when the block is not held here. [`AllocError::Incapable`] when its memory is not mapped in
    /// pages: then it belongs to an allocation of the driver, which has handles of its own. [`AllocError::Unsupported`] when the
    /// device's memory has no handles, and [`AllocError::Driver`] when it refused one.
    fn export(&self, block: &Block) -> Result<Exported, AllocError>;

    /// A copy of a file descriptor that [`export`](Self::export) returned, by its number; `None` when it is of no block that is
    /// still held.
    fn exported_descriptor(&self, number: i32) -> Option<OwnedFd>;

    /// Keeps the memory behind a range of addresses where it is until [`unpin`](Self::unpin), also while it is free: the pages that
    /// the range touches are neither moved nor unmapped. For memory that something outside of the allocator has registered by
    /// its address. It is counted.
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
    /// Changes the most bytes that may be held from the device, as the setting `memory_limit` sets it at the start; `None` for
    /// as many as the device has. Nothing goes back at once: memory above a lower limit goes when a request meets it. False
    /// where an allocator has no limit of its own; then nothing was done.
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool;
}

/// Segments and blocks that another allocator held.
pub trait Takeover: Send + Sync {
    /// Takes over segments and blocks that another allocator held, before the first allocation: the blocks that are not
    /// free in the order of the snapshot, each held by the client. Segments come from the device; their addresses in the
    /// snapshot say nothing but their order. Segments without a block in use are left out where memory is short, since
    /// an allocator in need would have given them back. `age` says for how many searches of the cache such a segment had
    /// been idle, for allocators that collect by age. Segments of a stream that is in a [private pool](PrivatePools::pool_begin) become
    /// that pool's; such may be taken over one pool after another. `None` when an allocator keeps no segments of its own: then nothing
    /// was done.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] when memory is short, [`AllocError::InvalidRequest`] when the blocks do not fill their
    /// segments, [`AllocError::Driver`] for any other failing driver call. Nothing is leaked.
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError>;
}

/// When frees that had to wait for other streams complete.
pub trait Completions: Send + Sync {
    /// Remembers from now on, or no longer, where blocks lay whose free had to wait, once they are reusable: a history has them
    /// as `free_completed`.
    fn tell_completed(&self, on: bool);

    /// First addresses of blocks whose free [waited](crate::Path::Deferred) and that have become reusable since the last call, in that
    /// order, if [they are remembered](Self::tell_completed). It may be handed out again by then.
    fn take_completed(&self) -> Vec<DeviceAddr>;
}

/// The parts by the names of their methods. Without the part, the answer is that there is none: an error, `false` or `None`.
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
            // SAFETY: passed on.
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

    /// [`Completions::tell_completed`]; false without that part, whose frees never wait or are not seen to.
    pub fn tell_completed(&self, on: bool) -> bool {
        let completions = self.parts().completions;
        completions.inspect(|completions| completions.tell_completed(on)).is_some()
    }

    /// [`Completions::take_completed`]; no address without that part.
    pub fn take_completed(&self) -> Vec<DeviceAddr> {
        self.parts().completions.map(|part| part.take_completed()).unwrap_or_default()
    }
}

/// The answer of allocators that serve no captures.
fn no_graphs(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "graph capture" }
}

/// The answer of allocators without private pools.
pub(crate) fn no_private_pools(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "private pools" }
}

/// The answer of allocators whose pools cannot go back.
pub(crate) fn no_checkpoints(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "checkpoints of private pools" }
}

/// The answer of allocators whose memory is not mapped in pages.
pub(crate) fn no_pages(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "pages of memory that others can map or register by themselves" }
}
