//! An allocator's memory at one moment, and the five parts of reserved memory that are not requested.

use crate::contract::{CaptureId, PoolKind};
use crate::space::whole_pages;
use serde::{Deserialize, Serialize};
use std::iter::Sum;
use vramlab_device::{DeviceAddr, StreamId};

/// State of a block inside a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Live (`active_allocated` in PyTorch's snapshots).
    Allocated,
    /// Freed by the client, still used by a stream (`active_pending_free`).
    PendingFree,
    /// Reusable (`inactive`).
    Free,
}

/// A block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// First address.
    pub addr: DeviceAddr,
    /// Size in bytes.
    pub bytes: u64,
    /// Requested bytes; 0 when free.
    pub requested: u64,
    /// State.
    pub state: BlockState,
}

/// Memory that the device allocated in one call, split into blocks without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// First address.
    pub addr: DeviceAddr,
    /// Size in bytes.
    pub bytes: u64,
    /// Stream of its free blocks.
    pub stream: StreamId,
    /// Pool, for backends that have two.
    pub pool: Option<PoolKind>,
    /// Capture or private pool of the segment.
    pub private: Option<CaptureId>,
    /// Whether it is a mapped range of an expandable segment.
    pub expandable: bool,
    /// Bytes of a page. A mapped range begins at a page, and whole free pages of it are releasable. Otherwise the segment's size.
    pub page: u64,
    /// Blocks in address order.
    pub blocks: Vec<BlockInfo>,
}

impl SegmentInfo {
    /// Whether it has no active block.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.blocks.iter().all(|block| block.state == BlockState::Free)
    }

    /// The sizes of its blocks in address order, each with the requested bytes if it is active. Free neighbours count as one here.
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

/// How the parts of a [`Ledger`] were determined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attribution {
    /// Block by block, from a snapshot.
    #[default]
    Blocks,
    /// From the two counters of a CUDA memory pool. A pool shows no segments to its client and its driver may release any free page
    /// of it, so all its free bytes count as soft.
    PoolCounters,
}

/// The breakdown of `reserved - requested`. The five parts add up to it exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Rounding inside live blocks.
    pub internal: u64,
    /// Releasable free bytes of the requesting stream: segments that are entirely free, and of each free block in an expandable
    /// segment the whole pages.
    pub soft: u64,
    /// Other free bytes in segments of the requesting stream, which share a segment or a page with an active block.
    pub hard: u64,
    /// Free bytes in segments of other streams, which the requesting stream could not use.
    pub stream: u64,
    /// Bytes of deferred frees.
    pub pending: u64,
    /// Reserved bytes.
    pub reserved: u64,
    /// Requested bytes in live blocks.
    pub requested: u64,
    /// How the parts were determined.
    pub attribution: Attribution,
    /// Peak reserved bytes, if that was more than `reserved`: the peak itself was not observed, and the breakdown is of the highest
    /// level that was. Absent when the breakdown is of the peak.
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
    /// Adds up breakdowns that were determined in the same way.
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
    /// The breakdown at this moment as seen by a request on `stream`.
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
                    BlockState::Free if segment.expandable => {
                        let offset = block.addr.get() - segment.addr.get();
                        let pages = whole_pages(offset, block.bytes, segment.page);
                        ledger.soft += pages;
                        ledger.hard += block.bytes - pages;
                    }
                    BlockState::Free if idle => ledger.soft += block.bytes,
                    BlockState::Free => ledger.hard += block.bytes,
                }
            }
        }
        debug_assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
        ledger
    }
}
