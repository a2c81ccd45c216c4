//! A compiled recording: the client's operations as a compact list, and the allocator's events to compare with.

mod beginning;
mod changes;
mod op;
mod out_of_memory;

use std::sync::Arc;
use vramlab_device::DriverError;
use vramlab_device::budget::{Claim, OverBudget};
use vramlab_policies::contract::{AllocError, PoolKind};
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

pub(crate) use beginning::{Beginning, StartBlock, StartSegment};
pub use op::MAX_STREAMS;
pub(crate) use op::{BY_DEVICE, DueFrees, Kind, MAX_POOLS, NEVER, NO_STREAM, Op, Release};
pub use out_of_memory::{Held, ImpossibleRequests, OutOfMemory, StreamHeld};

/// Largest size of a block or segment in a recording, in bytes: 256 TiB, beyond any device. Sums over a recording stay in 64 bits.
///
/// Larger ones are refused, except of failed requests: a program may request any size, such as a negative number as an unsigned one.
/// Those are [counted apart](History::impossible_requests), and nothing is computed from their size.
pub const MAX_BYTES: u64 = 1 << 48;

/// A recording that is ready to be replayed. Takes 16 bytes for each operation of the client, 8 for each allocation and 32 for
/// each segment event.
#[derive(Clone, Debug)]
pub struct History {
    pub(crate) ops: Vec<Op>,
    /// Recorded address of each allocation, in order.
    pub(crate) addresses: Vec<u64>,
    pub(crate) segments: Vec<SegmentEvent>,
    pub(crate) slots: u32,
    /// Recorded handles in ascending order.
    pub(crate) streams: Vec<u64>,
    /// Streams created in addition to the recorded ones.
    pub(crate) further_streams: u32,
    pub(crate) events: u64,
    pub(crate) allocations: u64,
    /// Number of operations of the client.
    pub(crate) operations: u64,
    /// The memory before recording started.
    pub(crate) beginning: Beginning,
    pub(crate) refused: u64,
    /// Failed requests above [`MAX_BYTES`].
    pub(crate) impossible: Option<ImpossibleRequests>,
    pub(crate) out_of_memory: Vec<OutOfMemory>,
    pub(crate) deferred: u64,
    pub(crate) max_live: u64,
    pub(crate) pools: PrivatePools,
    /// Why addresses cannot be compared.
    pub(crate) not_comparable: Option<String>,
    /// Claim for its lists, until the last copy is dropped.
    pub(crate) _claim: Arc<Claim>,
}

/// Private pools of a recording.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrivatePools {
    /// Number of pools. Operations refer to them by number, from 1.
    pub(crate) count: u32,
    /// For each released pool, the operation from which on it serves no more requests, in order.
    pub(crate) released: Vec<(u32, u32)>,
    /// Operations in which a pool releases its free segments by itself, in order. An operation with a pool's number empties no
    /// other cache.
    pub(crate) trimmed: Vec<(u32, u32)>,
    /// Pools that the program deletes, and the operation before which: they release their free segments. In order.
    pub(crate) deleted: Vec<(u32, u32)>,
    /// Number of allocations from them.
    pub(crate) allocations: u64,
    /// Number of allocations whose pool is ambiguous.
    pub(crate) undetermined: u64,
}

/// One call of a recorded history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Bytes to allocate, or 0 to free the slot's block.
    pub bytes: u64,
    /// Slot of the block while it is live.
    pub slot: u32,
    /// Number of its stream, from 0.
    pub stream: u32,
}

impl History {
    /// Number of events read, without those of other devices.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Number of allocations, the [prologue](Self::prologue_allocations) included.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Blocks that were active before recording started: allocated, or pending on other streams.
    #[must_use]
    pub fn prologue_allocations(&self) -> u64 {
        self.beginning.blocks.len() as u64
    }

    /// Segments reserved before recording started and their bytes, as far as known.
    /// [`Caching`](vramlab_policies::backends::Caching) then starts with them, and
    /// [`undetermined_blocks`](Self::undetermined_blocks) counts the uncertain blocks.
    #[must_use]
    pub fn prologue_segments(&self) -> (u64, u64) {
        (self.beginning.segments.len() as u64, self.beginning.reserved())
    }

    /// Blocks from before recording started whose size is unknown: each has the smallest size that the recording allows, and may
    /// be up to 1 MiB larger.
    #[must_use]
    pub fn undetermined_blocks(&self) -> u64 {
        self.beginning.undetermined
    }

    /// Why the segments from before recording started are unknown, if there were some.
    #[must_use]
    pub fn prologue_problem(&self) -> Option<&str> {
        self.beginning.unknown.as_deref()
    }

    /// Private pools of the program, of CUDA graphs and `MemPool`s, as far as the recording shows them.
    #[must_use]
    pub fn private_pools(&self) -> u64 {
        u64::from(self.pools.count)
    }

    /// Number of allocations from private pools.
    #[must_use]
    pub fn private_pool_allocations(&self) -> u64 {
        self.pools.allocations
    }

    /// Allocations whose pool is ambiguous: their segment does not exist at the end, and several pools would have served them as
    /// recorded. They are replayed in the likeliest.
    #[must_use]
    pub fn undetermined_pool_allocations(&self) -> u64 {
        self.pools.undetermined
    }

    /// Failed requests above [`MAX_BYTES`], which are not among the operations; `None` if there are none.
    #[must_use]
    pub fn impossible_requests(&self) -> Option<ImpossibleRequests> {
        self.impossible
    }

    /// Number of requests that failed in the recording, without [impossible](Self::impossible_requests) ones.
    #[must_use]
    pub fn refused_allocations(&self) -> u64 {
        self.refused
    }

    /// Memory state at each failed request, in order; at most the last hundred.
    #[must_use]
    pub fn out_of_memory(&self) -> &[OutOfMemory] {
        &self.out_of_memory
    }

    /// Number of deferred frees.
    #[must_use]
    pub fn deferred_frees(&self) -> u64 {
        self.deferred
    }

    /// Recorded stream handles in ascending order.
    #[must_use]
    pub fn streams(&self) -> &[u64] {
        &self.streams
    }

    /// Peak live bytes as requested: a lower bound for every allocator. (A block counts from its allocation to the request to
    /// free it.)
    #[must_use]
    pub fn max_live_bytes(&self) -> u64 {
        self.max_live
    }

    /// The allocations and frees in order, starting with blocks from before recording started.
    pub fn calls(&self) -> impl Iterator<Item = Call> + '_ {
        let before = self.beginning.blocks.iter().map(|block| Call {
            bytes: block.requested,
            slot: block.slot,
            stream: block.stream,
        });
        let ops = self.beginning.frees.iter().chain(&self.ops);
        before.chain(ops.filter_map(|op| {
            let bytes = match op.kind() {
                Kind::Alloc => op.value,
                Kind::Free | Kind::Release => 0,
                _ => return None,
            };
            Some(Call { bytes, slot: op.slot, stream: op.stream() })
        }))
    }

    /// Whether recorded addresses can be used and compared.
    ///
    /// # Errors
    /// [`ReplayError::History`] with the reason, if they cannot.
    pub fn check_comparable(&self) -> Result<(), ReplayError> {
        match &self.not_comparable {
            Some(why) => Err(ReplayError::History(format!("{why}; let the device choose addresses (--addresses own)"))),
            None => Ok(()),
        }
    }
}

/// Why a recording cannot be replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// An event contradicts earlier ones or is impossible.
    #[error("event {number}: {what}")]
    Event {
        /// Number of the event, from 1.
        number: u64,
        /// The contradiction.
        what: String,
    },
    /// The recording as a whole cannot be replayed in the requested way.
    #[error("{0}")]
    History(String),
    /// The allocator failed for another reason than memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The device failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Compiling the recording needs more memory than the budget has.
    #[error(transparent)]
    TooLarge(#[from] OverBudget),
}

impl ReplayError {
    /// Whether the recording is at fault and not the device.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        matches!(self, Self::Event { .. } | Self::History(_) | Self::TooLarge(_))
    }
}

/// A segment, or a mapped range of an expandable one, that was allocated or released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentEvent {
    /// First address.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) bytes: u64,
    /// Handle of its stream.
    pub(crate) stream: u64,
    /// The pool of a mapped range; `None` for full segments.
    pub(crate) part: Option<PoolKind>,
    /// The operation inside which it happened.
    pub(crate) op: u32,
    /// Number of its event among those of the device, from 1; 0 for memory from before recording started.
    pub(crate) event: u64,
    /// Whether it was released.
    pub(crate) released: bool,
    /// Whether only a refusal of the device explains it, so that a replay must refuse as well.
    pub(crate) refused: bool,
}

impl SegmentEvent {
    /// A segment allocated before the first operation.
    pub(crate) fn made(addr: u64, bytes: u64, stream: u64) -> Self {
        Self { addr, bytes, stream, part: None, op: 0, event: 0, released: false, refused: false }
    }

    /// The release of this memory.
    pub(crate) fn released(self) -> Self {
        Self { released: true, ..self }
    }

    /// This memory as a range of an expandable segment.
    pub(crate) fn part_of(self, pool: PoolKind) -> Self {
        Self { part: Some(pool), ..self }
    }

    /// Its pool, which for a full segment follows from its size.
    pub(crate) fn pool(&self) -> PoolKind {
        self.part.unwrap_or(if self.bytes == SMALL_SEGMENT { PoolKind::Small } else { PoolKind::Large })
    }

    /// The first address behind it.
    pub(crate) fn end(&self) -> u64 {
        self.addr + self.bytes
    }

    /// Whether it contains an address.
    pub(crate) fn contains(&self, addr: u64) -> bool {
        addr >= self.addr && addr - self.addr < self.bytes
    }
}
