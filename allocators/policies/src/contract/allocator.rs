//! The upper seam: what every backend and every instrument implements.

use crate::contract::{
    AllocError, Block, CaptureId, GUARANTEED_ALIGN, Ledger, Path, PrivatePool, RestoreError, Snapshot, Stats,
};
use std::fmt;
use vramlab_device::{DeviceAddr, StreamId};

/// Requests above this many bytes are refused as they are: rounding them could overflow.
const MAX_REQUEST: u64 = 1 << 62;

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes, at least 1.
    pub bytes: u64,
    /// Alignment in bytes: a power of two, at most [`GUARANTEED_ALIGN`].
    pub align: u64,
}

impl Request {
    /// A request with the guaranteed alignment.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self { bytes, align: GUARANTEED_ALIGN }
    }

    /// Checks what no backend could serve.
    ///
    /// # Errors
    /// [`AllocError::InvalidRequest`] for zero bytes, for an alignment that is no power of two or above
    /// [`GUARANTEED_ALIGN`], and for sizes whose rounding could overflow.
    #[inline(always)]
    pub fn validate(self) -> Result<(), AllocError> {
        // What nearly every request is.
        if self.align == GUARANTEED_ALIGN && self.bytes.wrapping_sub(1) < MAX_REQUEST {
            return Ok(());
        }
        self.validate_fully()
    }

    #[cold]
    fn validate_fully(self) -> Result<(), AllocError> {
        let reason = if self.bytes == 0 {
            "zero bytes; an empty tensor needs no memory, so do not allocate it"
        } else if !self.align.is_power_of_two() || self.align > GUARANTEED_ALIGN {
            "the alignment must be a power of two of at most 256"
        } else if self.bytes > MAX_REQUEST {
            "more than 4 EiB"
        } else {
            return Ok(());
        };
        Err(AllocError::InvalidRequest { bytes: self.bytes, align: self.align, reason })
    }
}

/// A device allocator: backends implement it, instruments wrap it.
///
/// # Streams
/// A block may be used by work queued on the stream it was allocated on, after the call returns, and by no
/// other stream until the two are ordered. Work on another stream must be announced with
/// [`record_use`](Self::record_use) before the block is freed; the backend then keeps the block until that
/// work is done.
///
/// # Graph capture
/// A stream's work can be captured into a graph that is launched many times
/// ([`GraphDriver`](vramlab_device::GraphDriver)). Its kernels use the same addresses at each launch, so that memory is
/// *pinned*: it serves no other request while the graph lives. The order is
///
/// 1. [`capture_begin`](Self::capture_begin), then the driver's `capture_begin`;
/// 2. the work: allocations and frees on the stream, and what uses them;
/// 3. the driver's `capture_end` (or `capture_abort`), then [`capture_end`](Self::capture_end);
/// 4. launches, each as often as wanted;
/// 5. the driver's `graph_destroy` when the last launch has finished, then [`capture_release`](Self::capture_release).
///
/// In between, blocks that are allocated on the stream come from memory of that capture alone. One that is freed in the
/// capture may serve later requests of the same capture, in stream order, and no others. Each has to be freed before the
/// end. A block from before that is freed in the capture stays as it is until the end, and is freed then: its free is no
/// part of the graph. If captured work uses it, it has to live as long as the graph. One capture at a time runs on a
/// stream; any number of ended ones live side by side, and memory of a released one can be used again.
///
/// Calls on the stream from other threads have to be ordered with the two ends of the capture by their callers. Streams that
/// join the capture through an event get no memory of it: allocate on the stream that began.
/// [`Graph`](crate::Graph) keeps the order by itself.
///
/// # Private pools
/// A program can keep some of its memory apart from the rest: that of its CUDA graphs, or of a part of the program
/// (`torch.cuda.MemPool`). The order is
///
/// 1. [`pool_create`](Self::pool_create);
/// 2. [`pool_begin`](Self::pool_begin), requests of that stream, [`pool_end`](Self::pool_end), as often as wanted and for as many
///    streams as wanted;
/// 3. [`pool_release`](Self::pool_release) when no more requests will come for the pool, and then, for memory that should
///    go back at once, [`pool_trim`](Self::pool_trim).
///
/// A pool follows the allocator's rules, and each stream has its own part of it. Its memory serves no other request, not even
/// of the same stream, and a request of the pool is served from no other memory. A block is freed as any other, wherever its
/// stream's requests go then. Segments of the pool stay until it is released, also when the cache is emptied. While a stream is
/// captured, the capture comes before the pool.
pub trait DeviceAllocator: Send + Sync + fmt::Debug {
    /// Name on the command line and in records.
    fn name(&self) -> &'static str;

    /// The settings in effect as a JSON object, read back where a driver holds them.
    fn settings(&self) -> serde_json::Value;

    /// Hands out a block of at least `request.bytes` for use on `stream`.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] when memory is short, [`AllocError::InvalidRequest`] for what can never be
    /// served, [`AllocError::Driver`] for any other failing driver call. Nothing is leaked and the allocator
    /// stays usable.
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError>;

    /// Takes a block back and says how.
    ///
    /// `stream` is the stream that the block was allocated on.
    ///
    /// # Errors
    /// [`AllocError::ForeignBlock`] when the block is not held here: it is given back in the error, for its owner.
    /// [`AllocError::Driver`] when the driver refused, or when a stream that was announced to use the block is gone: the
    /// block is gone from the client's side, and kept until it is safe to use again
    /// ([`stranded_bytes`](crate::Stats::stranded_bytes)).
    ///
    /// # Safety
    /// Every use of the block is queued before this call, on `stream` or on streams announced with
    /// [`record_use`](Self::record_use).
    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError>;

    /// Announces that work queued so far on `stream` uses the block (PyTorch's `record_stream`).
    ///
    /// # Errors
    /// [`AllocError::ForeignBlock`] when the block is not held here.
    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError>;

    /// As [`allocate`](Self::allocate), from the memory of a private pool, wherever the stream's requests go otherwise.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); [`AllocError::PrivatePool`] when there is no such pool or it was released.
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        let _ = (request, stream);
        Err(AllocError::PrivatePool { allocator: self.name(), reason: format!("there is no pool {pool}") })
    }

    /// Says that all work of a stream is done and that none will come, because it is about to be destroyed: blocks wait for it no more,
    /// those that are held and those that were freed. When it returns, no call of the driver that names the stream is under way and none
    /// will be made, also for blocks of that stream, unless a later request names it again. Frees may run meanwhile.
    fn forget_stream(&self, stream: StreamId) {
        let _ = stream;
    }

    /// Remembers from now on, or no longer, where blocks lay whose free had to wait, once they are reusable: a history has them
    /// as `free_completed`.
    fn tell_completed(&self, on: bool) {
        let _ = on;
    }

    /// First addresses of blocks whose free [waited](Path::Deferred) and that have become reusable since the last call, in that
    /// order, if [they are remembered](Self::tell_completed). It may be handed out again by then.
    fn take_completed(&self) -> Vec<DeviceAddr> {
        Vec::new()
    }

    /// Statistics so far.
    fn stats(&self) -> Stats;

    /// Lets the peaks of [`stats`](Self::stats) start again from the current values.
    fn reset_peaks(&self);

    /// Segments and blocks at this moment, in address order; `None` when the backend cannot see them.
    fn snapshot(&self) -> Option<Snapshot>;

    /// Where reserved minus requested went, taken when reserved last reached a new peak.
    fn ledger_at_peak(&self) -> Ledger;

    /// Takes over segments and blocks that another allocator held, before the first allocation: the blocks that are not
    /// free in the order of the snapshot, each held by the client. Segments come from the device; their addresses in the
    /// snapshot say nothing but their order. Segments without a block in use are left out where memory is short, since
    /// an allocator in need would have given them back. `age` says for how many searches of the cache such a segment had
    /// been idle, for allocators that collect by age. Segments of a stream that is in a [private pool](Self::pool_begin) become
    /// that pool's; such may be taken over one pool after another. `None` when an allocator keeps no segments of its own: then nothing
    /// was done.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] when memory is short, [`AllocError::InvalidRequest`] when the blocks do not fill their
    /// segments, [`AllocError::Driver`] for any other failing driver call. Nothing is leaked.
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        let _ = (snapshot, age);
        Ok(None)
    }

    /// Changes the most bytes that may be held from the device, as the setting `memory_limit` sets it at the start; `None` for
    /// as many as the device has. Nothing goes back at once: memory above a lower limit goes when a request meets it. False
    /// where an allocator has no limit of its own; then nothing was done.
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        let _ = bytes;
        false
    }

    /// Sets whether a block that is freed inside a capture, after other streams used it there, may be reused within that capture once the
    /// order of the graph's nodes allows it (PyTorch's `graph_capture_record_stream_reuse`). Off at first: such a block waits for
    /// the end of the capture. To look costs time for each node that is captured. False where an allocator cannot; then nothing was done.
    fn set_reuse_in_captures(&self, on: bool) -> bool {
        let _ = on;
        false
    }

    /// Handles by which other processes map the memory around a block that is held here: whole pages, from the one in which the
    /// block begins to the one in which it ends. They are the same handles for as long as the block is held, and each page stays
    /// where it is. The driver makes a handle for each page that has none yet.
    ///
    /// # Errors
    /// [`AllocError::ForeignBlock`] when the block is not held here. [`AllocError::Incapable`] when its memory is not mapped in
    /// pages: then it belongs to an allocation of the driver, which has handles of its own. [`AllocError::Unsupported`] when the
    /// device's memory has no handles, and [`AllocError::Driver`] when it refused one.
    fn export(&self, block: &Block) -> Result<crate::contract::Exported, AllocError> {
        let _ = block;
        Err(crate::contract::no_pages(self.name()))
    }

    /// A copy of a file descriptor that [`export`](Self::export) returned, by its number; `None` when it is of no block that is
    /// still held.
    fn exported_descriptor(&self, number: i32) -> Option<std::os::fd::OwnedFd> {
        let _ = number;
        None
    }

    /// Keeps the memory behind a range of addresses where it is until [`unpin`](Self::unpin), also while it is free: the pages that
    /// the range touches are neither moved nor unmapped. For memory that something outside of the allocator has registered by
    /// its address. It is counted.
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator's memory is not mapped in pages.
    fn pin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        let _ = (addr, bytes);
        Err(crate::contract::no_pages(self.name()))
    }

    /// Undoes one [`pin`](Self::pin) of the same range.
    ///
    /// # Errors
    /// As of [`pin`](Self::pin).
    fn unpin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        let _ = (addr, bytes);
        Err(crate::contract::no_pages(self.name()))
    }

    /// Waits for blocks whose free is pending, then returns idle memory to the driver while more than `keep_bytes`
    /// stay reserved, and says how many bytes went back. Memory goes in whole segments (a driver's pool: granules),
    /// so what stays can differ from `keep_bytes` by one of them.
    ///
    /// # Errors
    /// [`AllocError::Driver`] when the driver refused; what had gone back by then is accounted for. Also, once, when a
    /// pending free had turned out to wait for a stream that is gone.
    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError>;

    /// Lets blocks of `stream` come from memory of a new capture; see [graph capture](Self#graph-capture).
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator serves no captures, [`AllocError::Unsupported`] when the device has no
    /// graphs, [`AllocError::Capture`] when the stream is in a capture already.
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        let _ = stream;
        Err(AllocError::Incapable { allocator: self.name(), capability: "graph capture" })
    }

    /// Ends a capture, after the driver has: its memory stays pinned, and frees that waited for it are carried out.
    ///
    /// # Errors
    /// [`AllocError::CaptureLive`] when blocks of the capture are still held; [`AllocError::Driver`] when a free that
    /// waited was refused. The capture has ended in both cases. [`AllocError::Capture`] when it had before.
    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        Err(AllocError::Capture { allocator: self.name(), reason: format!("there is no capture {capture}") })
    }

    /// Gives up the memory of a capture that has ended: its graph is gone and the last launch has finished. What is still
    /// held of it can be freed as ever, unless the driver owns it: then it is gone with the graph and its free is
    /// [`AllocError::ForeignBlock`].
    ///
    /// # Errors
    /// [`AllocError::Capture`] when there is no such capture or it has not ended; [`AllocError::Driver`] when the driver
    /// refused to take memory back. What it refused is kept for the next request or [`trim`](Self::trim).
    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        Err(AllocError::Capture { allocator: self.name(), reason: format!("there is no capture {capture}") })
    }

    /// Makes a private pool, which holds nothing yet; see [private pools](Self#private-pools).
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator has none.
    fn pool_create(&self) -> Result<PrivatePool, AllocError> {
        Err(AllocError::Incapable { allocator: self.name(), capability: "private pools" })
    }

    /// Lets later requests of `stream` be served from a private pool (PyTorch's `beginAllocateToPool`).
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when there is no such pool, or it was released, or the stream is in one already.
    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        let _ = stream;
        Err(AllocError::PrivatePool { allocator: self.name(), reason: format!("there is no pool {pool}") })
    }

    /// Lets later requests of `stream` be served as they were before (PyTorch's `endAllocateToPool`).
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when the stream is in none.
    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
        let reason = format!("stream {} is in no pool", stream.get());
        Err(AllocError::PrivatePool { allocator: self.name(), reason })
    }

    /// Says that no more requests will come for a private pool (PyTorch's `releasePool`). Its idle segments go back when idle
    /// memory goes back the next time: by [`trim`](Self::trim), or because memory is short. Blocks of it that are held can be
    /// freed as ever.
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when there is no such pool, or it was released before, or a stream is in it.
    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError> {
        Err(AllocError::PrivatePool { allocator: self.name(), reason: format!("there is no pool {pool}") })
    }

    /// Gives back what is idle of a released private pool, and nothing else (PyTorch's `emptyCache` of a pool); says how many
    /// bytes. Waits for no work: blocks that other streams still use stay.
    ///
    /// # Errors
    /// [`AllocError::PrivatePool`] when the pool has not been released; [`AllocError::Driver`] when the driver refused.
    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        Err(AllocError::PrivatePool { allocator: self.name(), reason: format!("there is no pool {pool}") })
    }

    /// The segments and blocks of a private pool at this moment, for [`pool_restore`](Self::pool_restore) (PyTorch's
    /// `getCheckpointState`). Takes time in proportion to all blocks.
    ///
    /// # Errors
    /// [`AllocError::Incapable`] when the allocator cannot see its blocks, or cannot go back.
    fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError> {
        let mut snapshot = self.snapshot().ok_or_else(|| no_checkpoints(self.name()))?;
        snapshot.segments.retain(|segment| segment.private == Some(pool.id()));
        Ok(snapshot)
    }

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
    /// [`deallocate`](Self::deallocate). The pool is asked for no memory meanwhile.
    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        let _ = (pool, checkpoint);
        Err(RestoreError { held, error: no_checkpoints(self.name()) })
    }
}

pub(crate) fn no_checkpoints(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "checkpoints of private pools" }
}
