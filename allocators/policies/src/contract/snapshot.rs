//! What an allocator holds at one moment, and the five ways in which reserved memory is not in use.

use crate::contract::{CaptureId, PoolKind};
use serde::{Deserialize, Serialize};
use std::iter::Sum;
use vramlab_device::{DeviceAddr, StreamId};

/// State of a block inside a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Held by the client (`active_allocated` in PyTorch's snapshots).
    Allocated,
    /// Freed by the client, still used by a stream (`active_pending_free`).
    PendingFree,
    /// Reusable (`inactive`).
    Free,
}

/// A part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// First address.
    pub addr: DeviceAddr,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes that the client asked for; 0 when free.
    pub requested: u64,
    /// State.
    pub state: BlockState,
}

/// Memory obtained from the device in one call, cut into blocks without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// First address.
    pub addr: DeviceAddr,
    /// Size in bytes.
    pub bytes: u64,
    /// Stream that owns its free blocks.
    pub stream: StreamId,
    /// Pool, for backends that have two.
    pub pool: Option<PoolKind>,
    /// Capture or private pool that it belongs to.
    pub private: Option<CaptureId>,
    /// Whether it is a part of a range of addresses that memory can be added to.
    pub expandable: bool,
    /// Blocks in address order.
    pub blocks: Vec<BlockInfo>,
}

impl SegmentInfo {
    /// Whether no block of it is in use.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.blocks.iter().all(|block| block.state == BlockState::Free)
    }

    /// The sizes of its blocks in address order, each with the bytes that were asked for if it is in use. Free neighbours are one
    /// here.
    #[must_use]
    pub fn parts(&self) -> Vec<(u64, Option<u64>)> {
        let mut parts: Vec<(u64, Option<u64>)> = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let requested = (block.state != BlockState::Free).then_some(block.requested);
            match parts.last_mut() {
                Some((bytes, None)) if requested.is_none() => *bytes += block.bytes,
                _ => parts.push((block.bytes, requested)),
            }
        }
        parts
    }
}

/// All segments in address order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Segments in address order.
    pub segments: Vec<SegmentInfo>,
}

/// How the parts of a [`Ledger`] were told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attribution {
    /// Block by block, from a snapshot.
    #[default]
    Blocks,
    /// From a driver pool's two counters. A pool shows no segments to its client and its driver may release
    /// any free page of it, so all its free bytes count as soft.
    PoolCounters,
}

/// Where `reserved - requested` went. The five parts add up to it exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Rounding inside blocks that the client holds.
    pub internal: u64,
    /// Free bytes in segments of the requesting stream that are wholly free: they could go back to the device.
    pub soft: u64,
    /// Free bytes in segments of the requesting stream that are partly in use: they cannot.
    pub hard: u64,
    /// Free bytes in segments of other streams, which the requesting stream could not use.
    pub stream: u64,
    /// Bytes that the client freed and that wait for events of other streams.
    pub pending: u64,
    /// Bytes held from the device.
    pub reserved: u64,
    /// Bytes that the client asked for in the blocks that it holds.
    pub requested: u64,
    /// How the parts were told apart.
    pub attribution: Attribution,
    /// Highest bytes held from the device, if that was more than `reserved`: the peak itself was not seen, and the ledger
    /// is of the highest level that was. Absent when the ledger is of the peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_reserved: Option<u64>,
}

impl Ledger {
    /// `reserved - requested`, the sum of the five parts.
    #[must_use]
    pub fn wasted(&self) -> u64 {
        self.internal + self.soft + self.hard + self.stream + self.pending
    }
}

impl Sum for Ledger {
    /// Adds up ledgers that were told apart alike.
    fn sum<I: Iterator<Item = Self>>(ledgers: I) -> Self {
        ledgers.fold(Self::default(), |sum, next| Self {
            internal: sum.internal + next.internal,
            soft: sum.soft + next.soft,
            hard: sum.hard + next.hard,
            stream: sum.stream + next.stream,
            pending: sum.pending + next.pending,
            reserved: sum.reserved + next.reserved,
            requested: sum.requested + next.requested,
            attribution: next.attribution,
            peak_reserved: None,
        })
    }
}

impl Snapshot {
    /// The ledger of this moment as seen by a request on `stream`.
    #[must_use]
    pub fn ledger(&self, stream: StreamId) -> Ledger {
        let mut ledger = Ledger::default();
        for segment in &self.segments {
            let idle = segment.is_idle();
            ledger.reserved += segment.bytes;
            for block in &segment.blocks {
                match block.state {
                    BlockState::Allocated => {
                        ledger.requested += block.requested;
                        ledger.internal += block.bytes - block.requested;
                    }
                    BlockState::PendingFree => ledger.pending += block.bytes,
                    BlockState::Free if segment.stream != stream => ledger.stream += block.bytes,
                    BlockState::Free if idle => ledger.soft += block.bytes,
                    BlockState::Free => ledger.hard += block.bytes,
                }
            }
        }
        debug_assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
        ledger
    }
}
