//! The upper seam: what every backend and every instrument implements.

use crate::contract::{AllocError, Block, GUARANTEED_ALIGN, Ledger, Parts, Path, Snapshot, Stats};
use std::fmt;
use vramlab_device::StreamId;

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

/// A device allocator: what every backend does, and the [parts](Self::parts) that it may have.
///
/// Every method is required, so a backend forgets none. An [`Instrument`](crate::contract::Instrument) around another allocator
/// writes only what it watches. Calls of the parts by name (`allocator.capture_begin(stream)`) are methods of
/// `dyn DeviceAllocator`: where an allocator lacks the part, the answer says so.
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
/// 1. [`capture_begin`](crate::contract::GraphMemory::capture_begin), then the driver's `capture_begin`;
/// 2. the work: allocations and frees on the stream, and what uses them;
/// 3. the driver's `capture_end` (or `capture_abort`), then [`capture_end`](crate::contract::GraphMemory::capture_end);
/// 4. launches, each as often as wanted;
/// 5. the driver's `graph_destroy` when the last launch has finished, then [`capture_release`](crate::contract::GraphMemory::capture_release).
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
/// 1. [`pool_create`](crate::contract::PrivatePools::pool_create);
/// 2. [`pool_begin`](crate::contract::PrivatePools::pool_begin), requests of that stream, [`pool_end`](crate::contract::PrivatePools::pool_end), as often as wanted and for as many
///    streams as wanted;
/// 3. [`pool_release`](crate::contract::PrivatePools::pool_release) when no more requests will come for the pool, and then, for memory that should
///    go back at once, [`pool_trim`](crate::contract::PrivatePools::pool_trim).
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

    /// Says that all work of a stream is done and that none will come, because it is about to be destroyed: blocks wait for it no more,
    /// those that are held and those that were freed. When it returns, no call of the driver that names the stream is under way and none
    /// will be made, also for blocks of that stream, unless a later request names it again. Frees may run meanwhile.
    fn forget_stream(&self, stream: StreamId);

    /// Statistics so far.
    fn stats(&self) -> Stats;

    /// Lets the peaks of [`stats`](Self::stats) start again from the current values.
    fn reset_peaks(&self);

    /// Segments and blocks at this moment, in address order; `None` when the backend cannot see them.
    fn snapshot(&self) -> Option<Snapshot>;

    /// Where reserved minus requested went, taken when reserved last reached a new peak.
    fn ledger_at_peak(&self) -> Ledger;

    /// Waits for blocks whose free is pending, then returns idle memory to the driver while more than `keep_bytes`
    /// stay reserved, and says how many bytes went back. Memory goes in whole segments (a driver's pool: granules),
    /// so what stays can differ from `keep_bytes` by one of them.
    ///
    /// # Errors
    /// [`AllocError::Driver`] when the driver refused; what had gone back by then is accounted for. Also, once, when a
    /// pending free had turned out to wait for a stream that is gone.
    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError>;

    /// The optional parts of the contract that this allocator has; a wrapper returns those of the allocator inside, or its own
    /// around them. It always returns the same parts. No lock and no call of the driver.
    fn parts(&self) -> Parts<'_>;
}
