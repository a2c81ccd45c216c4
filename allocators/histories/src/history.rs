//! A compiled history: what the client did, as a compact list, and what the recorded allocator did, to compare with.

mod beginning;
mod changes;
mod error;
mod op;
mod out_of_memory;
mod segment;

pub(crate) use beginning::{Beginning, StartBlock, StartSegment};
pub use error::ReplayError;
pub use op::MAX_STREAMS;
pub(crate) use op::{BY_DEVICE, DueFrees, Kind, MAX_POOLS, NEVER, NO_STREAM, Op, Release};
pub use out_of_memory::{Held, OutOfMemory, StreamHeld};
pub(crate) use segment::SegmentEvent;

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
