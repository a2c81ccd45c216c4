//! A history that is ready to be replayed.

use super::ReplayError;
use super::beginning::Beginning;
use super::oom::OutOfMemory;
use super::op::{Kind, Op};
use super::pools::PrivatePools;
use super::windows::SegmentEvent;
use crate::histories::workload::Call;

/// A history that is ready to be replayed. Holds 16 bytes for each operation of the client, 8 for each allocation
/// and 32 for each segment event.
#[derive(Clone, Debug)]
pub struct History {
    pub(super) ops: Vec<Op>,
    /// Recorded address of each allocation, in order.
    pub(super) addresses: Vec<u64>,
    pub(super) segments: Vec<SegmentEvent>,
    pub(super) slots: u32,
    /// Recorded handles in ascending order.
    pub(super) streams: Vec<u64>,
    /// Streams that are made beside the recorded ones.
    pub(super) further_streams: u32,
    pub(super) events: u64,
    pub(super) allocations: u64,
    /// Operations of the client.
    pub(super) operations: u64,
    /// What was held before the first event.
    pub(super) beginning: Beginning,
    pub(super) refused: u64,
    pub(super) out_of_memory: Vec<OutOfMemory>,
    pub(super) deferred: u64,
    pub(super) max_live: u64,
    pub(super) pools: PrivatePools,
    /// Why addresses cannot be compared.
    pub(super) not_comparable: Option<String>,
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
    /// [`Caching`](crate::backends::Caching) starts with them, and [`undetermined_blocks`](Self::undetermined_blocks)
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
