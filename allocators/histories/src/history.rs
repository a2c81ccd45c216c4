//! A compiled history: what the client did, as a compact list, and what the recorded allocator did, to compare with.

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
pub use out_of_memory::{Held, OutOfMemory, StreamHeld};

/// Largest size that a history may name, in bytes: 256 TiB, beyond any device. Sums over a history stay in 64 bits.
pub const MAX_BYTES: u64 = 1 << 48;

/// A history that is ready to be replayed. Holds 16 bytes for each operation of the client, 8 for each allocation
/// and 32 for each segment event.
#[derive(Clone, Debug)]
pub struct History {
    pub(crate) ops: Vec<Op>,
    /// Recorded address of each allocation, in order.
    pub(crate) addresses: Vec<u64>,
    pub(crate) segments: Vec<SegmentEvent>,
    pub(crate) slots: u32,
    /// Recorded handles in ascending order.
    pub(crate) streams: Vec<u64>,
    /// Streams that are made beside the recorded ones.
    pub(crate) further_streams: u32,
    pub(crate) events: u64,
    pub(crate) allocations: u64,
    /// Operations of the client.
    pub(crate) operations: u64,
    /// What was held before the first event.
    pub(crate) beginning: Beginning,
    pub(crate) refused: u64,
    pub(crate) out_of_memory: Vec<OutOfMemory>,
    pub(crate) deferred: u64,
    pub(crate) max_live: u64,
    pub(crate) pools: PrivatePools,
    /// Why addresses cannot be compared.
    pub(crate) not_comparable: Option<String>,
    /// Of its lists, until the last copy is dropped.
    pub(crate) _claim: Arc<Claim>,
}

/// What is known of the private pools of a history.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrivatePools {
    /// How many there are. Operations name them by number, from 1.
    pub(crate) count: u32,
    /// From which operation on each that was released is asked for no more memory, in order.
    pub(crate) released: Vec<(u32, u32)>,
    /// In which operation which of them gives back by itself what is idle, in order. An operation with the number of a pool empties
    /// no other cache.
    pub(crate) trimmed: Vec<(u32, u32)>,
    /// Allocations from them.
    pub(crate) allocations: u64,
    /// Allocations whose pool the history does not tell.
    pub(crate) undetermined: u64,
}

/// One call of a recorded history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Bytes to allocate, or 0 to free what lies in the slot.
    pub bytes: u64,
    /// Where the block is kept while it is live.
    pub slot: u32,
    /// Number of its stream, from 0.
    pub stream: u32,
}

impl History {
    /// Events that were read, those of other devices not counted.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Allocations, the [prologue](Self::prologue_allocations) included.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Blocks that were in use before the first event: held by the client, or waiting for other streams.
    #[must_use]
    pub fn prologue_allocations(&self) -> u64 {
        self.beginning.blocks.len() as u64
    }

    /// Segments that were held before the first event and their bytes, as far as they are known. Then
    /// [`Caching`](vramlab_policies::backends::Caching) starts with them, and [`undetermined_blocks`](Self::undetermined_blocks)
    /// says what is not known for certain.
    #[must_use]
    pub fn prologue_segments(&self) -> (u64, u64) {
        (self.beginning.segments.len() as u64, self.beginning.reserved())
    }

    /// Blocks from before the first event whose size the history does not tell: each is as small as what the history
    /// shows allows, and may be larger by up to 1 MiB.
    #[must_use]
    pub fn undetermined_blocks(&self) -> u64 {
        self.beginning.undetermined
    }

    /// Why the segments from before the first event are not known, if there were some.
    #[must_use]
    pub fn prologue_problem(&self) -> Option<&str> {
        self.beginning.unknown.as_deref()
    }

    /// Private pools of the program: those of CUDA graphs and `MemPool`s, as far as the history tells.
    #[must_use]
    pub fn private_pools(&self) -> u64 {
        u64::from(self.pools.count)
    }

    /// Allocations from private pools.
    #[must_use]
    pub fn private_pool_allocations(&self) -> u64 {
        self.pools.allocations
    }

    /// Allocations whose pool the history does not tell: their segment is gone at the end, and more than one pool would have
    /// served them as was recorded. They are replayed in the likeliest.
    #[must_use]
    pub fn undetermined_pool_allocations(&self) -> u64 {
        self.pools.undetermined
    }

    /// Requests that the recorded allocator refused.
    #[must_use]
    pub fn refused_allocations(&self) -> u64 {
        self.refused
    }

    /// What the recorded allocator held at each request that it refused, in order; of more than a hundred the last.
    #[must_use]
    pub fn out_of_memory(&self) -> &[OutOfMemory] {
        &self.out_of_memory
    }

    /// Frees that did not complete at once.
    #[must_use]
    pub fn deferred_frees(&self) -> u64 {
        self.deferred
    }

    /// Recorded stream handles in ascending order.
    #[must_use]
    pub fn streams(&self) -> &[u64] {
        &self.streams
    }

    /// Most bytes that the client held at once, as it asked for them: no allocator can do with less. (A block counts
    /// from its allocation to the request to free it.)
    #[must_use]
    pub fn max_live_bytes(&self) -> u64 {
        self.max_live
    }

    /// The allocations and frees in order, those of blocks from before the first event first.
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

    /// Recorded addresses can be handed out and compared.
    ///
    /// # Errors
    /// [`ReplayError::History`] says why they cannot.
    pub fn check_comparable(&self) -> Result<(), ReplayError> {
        match &self.not_comparable {
            Some(why) => Err(ReplayError::History(format!("{why}; use the device's own addresses (--addresses own)"))),
            None => Ok(()),
        }
    }
}

/// Why a history cannot be replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// An event contradicts the ones before it or names what cannot be.
    #[error("event {number}: {what}")]
    Event {
        /// Number of the event, from 1.
        number: u64,
        /// What is wrong with it.
        what: String,
    },
    /// The history as a whole cannot be replayed in the way that was asked for.
    #[error("{0}")]
    History(String),
    /// The allocator failed for another reason than memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The device failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The history needs more memory than its compilation may take.
    #[error(transparent)]
    TooLarge(#[from] OverBudget),
}

impl ReplayError {
    /// Whether the history is at fault and not the device.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        matches!(self, Self::Event { .. } | Self::History(_) | Self::TooLarge(_))
    }
}

/// A segment, or a part of an expandable one, that came from the device or went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentEvent {
    /// First address.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) bytes: u64,
    /// Handle of its stream.
    pub(crate) stream: u64,
    /// The pool of a part of an expandable segment; `None` for whole segments.
    pub(crate) part: Option<PoolKind>,
    /// The operation inside which it happened.
    pub(crate) op: u32,
    /// Whether it went back.
    pub(crate) released: bool,
    /// Whether a device that refused is the only explanation, so that a replay has to refuse as well.
    pub(crate) refused: bool,
}

impl SegmentEvent {
    /// A whole segment that came before the first operation.
    pub(crate) fn made(addr: u64, bytes: u64, stream: u64) -> Self {
        Self { addr, bytes, stream, part: None, op: 0, released: false, refused: false }
    }

    /// This memory on its way back to the device.
    pub(crate) fn released(self) -> Self {
        Self { released: true, ..self }
    }

    /// This memory as a part of an expandable segment.
    pub(crate) fn part_of(self, pool: PoolKind) -> Self {
        Self { part: Some(pool), ..self }
    }

    /// The pool that it serves: that of a whole segment follows from its size.
    pub(crate) fn pool(&self) -> PoolKind {
        self.part.unwrap_or(if self.bytes == SMALL_SEGMENT { PoolKind::Small } else { PoolKind::Large })
    }

    /// The first address behind it.
    pub(crate) fn end(&self) -> u64 {
        self.addr + self.bytes
    }

    /// Whether an address lies in it.
    pub(crate) fn contains(&self, addr: u64) -> bool {
        addr >= self.addr && addr - self.addr < self.bytes
    }
}
