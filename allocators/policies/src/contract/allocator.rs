//! The upper seam: the trait that every backend and every instrument implements.

use crate::contract::{AllocError, Block, GUARANTEED_ALIGN, Ledger, Parts, Path, Snapshot, Stats};
use std::fmt;
use vramlab_device::StreamId;

/// Larger requests are refused before rounding, which could overflow.
const MAX_REQUEST: u64 = 1 << 62;

/// A client's request.
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

    /// Checks for requests that no backend can serve.
    ///
    /// # Errors
    /// [`AllocError::InvalidRequest`] for zero bytes, for an alignment that is not a power of two or is above [`GUARANTEED_ALIGN`],
    /// and for sizes whose rounding could overflow.
    #[inline(always)]
    pub fn validate(self) -> Result<(), AllocError> {
        // Nearly every request.
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

/// A device allocator: the functions of every backend, and the [parts](Self::parts) that it may have.
///
/// Every method is required, so a backend cannot forget one. An [`Instrument`](crate::contract::Instrument) around another
/// allocator writes only the methods that it watches. Calls of the parts by name (`allocator.capture_begin(stream)`) are methods of
/// `dyn DeviceAllocator`: where an allocator lacks the part, they return an error, `false` or `None`.
///
/// # Streams
/// A block may be used by work queued on the stream it was allocated on, after the call returns, and by no other stream until the
/// two are ordered. Announce work on another stream with [`record_use`](Self::record_use) before the block is freed; the backend
/// then reuses the block only after that work has completed.
///
/// # Graph capture
/// A stream's work can be captured into a graph that is launched many times ([`GraphDriver`](vramlab_device::GraphDriver)). Its
/// kernels use the same addresses at each launch, so that memory is *pinned*: it serves no other request while the graph lives. The
/// order is
///
/// 1. [`capture_begin`](crate::contract::GraphMemory::capture_begin), then the driver's `capture_begin`;
/// 2. the work: allocations and frees on the stream, and what uses them;
/// 4. launches, any number of times;
/// 4. launches, each as often as wanted;
/// 5. the driver's `graph_destroy` when the last launch has finished, then [`capture_release`](crate::contract::GraphMemory::capture_release).
///
/// In between, blocks that are allocated on the stream come from memory of that capture only. A block that is freed in the capture
/// may serve later requests of the same capture, in stream order, and no others. Free each block before the end of the capture.
/// When a block from before the capture is freed in the capture, the free takes effect at the end of the capture and is not part of
/// the graph. If captured work uses that block, it must live as long as the graph. A stream has at most one open capture; any
/// number of ended captures may exist, and memory of a released capture is reusable.
///
/// The caller orders calls on the stream from other threads with the begin and the end of the capture. Streams that join the
/// capture through an event get no memory of it: allocate on the stream that began the capture. [`Graph`](crate::Graph) keeps this
/// order by itself.
///
/// # Private pools
/// A program can keep some of its memory separate: that of its CUDA graphs, or of a part of the program (`torch.cuda.MemPool`). The
/// order is
///
/// 1. [`pool_create`](crate::contract::PrivatePools::pool_create);
/// 2. [`pool_begin`](crate::contract::PrivatePools::pool_begin), requests of that stream,
///    [`pool_end`](crate::contract::PrivatePools::pool_end), any number of times and for any number of streams;
/// 3. [`pool_release`](crate::contract::PrivatePools::pool_release) after the pool's last request, and then, to release its free
///    segments immediately, [`pool_trim`](crate::contract::PrivatePools::pool_trim).
///
/// A pool follows the allocator's rules, with separate free lists for each stream. Its memory serves no other request, not even of
/// the same stream, and a request of the pool is served from no other memory. A block is freed as any other, also after `pool_end`.
/// Segments of the pool stay reserved until the pool is released, also when the cache is emptied. While a stream is captured, the
/// capture takes precedence over the pool.
pub trait DeviceAllocator: Send + Sync + fmt::Debug {
    /// Name on the command line and in records.
    fn name(&self) -> &'static str;

    /// The settings in effect as a JSON object, read back where a driver holds them.
    fn settings(&self) -> serde_json::Value;

    /// Allocates a block of at least `request.bytes` for use on `stream`.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] when there is not enough memory, [`AllocError::InvalidRequest`] for a request that no allocator
    /// can serve, [`AllocError::Driver`] for any other failing driver call. Nothing is leaked and the allocator stays usable.
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError>;

    /// Frees a block and returns the path of the free.
    ///
    /// `stream` is the stream that the block was allocated on.
    ///
    /// # Errors
    /// [`AllocError::ForeignBlock`] when the block is not live here: the error returns it, for its owner. [`AllocError::Driver`]
    /// when the driver refused, or when a stream that was announced to use the block was destroyed: the client no longer holds the
    /// block, and the allocator reuses it once that is safe ([`stranded_bytes`](crate::Stats::stranded_bytes)).
    ///
    /// # Safety
    /// Every use of the block is queued before this call, on `stream` or on streams announced with
    /// [`record_use`](Self::record_use).
    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError>;

    /// Announces that work queued so far on `stream` uses the block (PyTorch's `record_stream`).
    ///
    /// # Errors
    /// [`AllocError::ForeignBlock`] when the block is not live here.
    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError>;

    /// Notifies the allocator that all work of a stream has completed and that the stream is about to be destroyed: neither live
    /// nor freed blocks wait for it any more. After this call no driver call names the stream, also for blocks of that stream,
    /// unless a later request names it again. Frees may run concurrently.
    fn forget_stream(&self, stream: StreamId);

    /// Statistics so far.
    fn stats(&self) -> Stats;

    /// Restarts the peaks of [`stats`](Self::stats) from the current values.
    fn reset_peaks(&self);

    /// Current segments and blocks in address order; `None` when the backend cannot see them.
    fn snapshot(&self) -> Option<Snapshot>;

    /// Breakdown of reserved minus requested memory, taken when reserved memory last reached a new peak.
    fn ledger_at_peak(&self) -> Ledger;

    /// Waits for deferred frees, then releases free memory to the driver while more than `keep_bytes` are reserved, and returns the
    /// released bytes. Memory is released in whole segments (a CUDA memory pool: granules), so the remainder can differ from
    /// `keep_bytes` by one of them.
    ///
    /// # Errors
    /// [`AllocError::Driver`] when the driver refused; memory released before that is accounted for. Also, once, when a deferred
    /// free waits for a stream that was destroyed.
    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError>;

    /// The optional parts of the contract that this allocator has; a wrapper returns those of the allocator inside, or parts around
    /// them. It always returns the same parts, without a lock or a driver call.
    fn parts(&self) -> Parts<'_>;
}
