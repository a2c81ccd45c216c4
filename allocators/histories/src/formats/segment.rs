//! Segments at the end of a recording, as in PyTorch's snapshots.

use vramlab_policies::contract::{BlockState, PoolKind, Snapshot};
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

/// A block of a [`Segment`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBlock {
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
    /// Requested bytes. In a free block PyTorch keeps the previous value.
    pub requested_size: u64,
    /// State.
    pub state: BlockState,
}

/// Memory obtained from a device in one call, or one mapped range of an expandable segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Device, counted from 0.
    pub device: u16,
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub total_size: u64,
    /// Stream of its free blocks.
    pub stream: u64,
    /// Small or large requests.
    pub segment_type: PoolKind,
    /// Its private pool in PyTorch's notation (`segment_pool_id`): both zero for the default pool. `None` if unknown.
    pub pool_id: Option<(u64, u64)>,
    /// Whether it is a range of an expandable segment.
    pub is_expandable: bool,
    /// Blocks in address order.
    pub blocks: Vec<SegmentBlock>,
}

impl Segment {
    /// Bytes in allocated blocks.
    #[must_use]
    pub fn allocated_size(&self) -> u64 {
        self.sum(|block| if block.state == BlockState::Allocated { block.size } else { 0 })
    }

    /// Bytes in active blocks: allocated, or still used by a stream.
    #[must_use]
    pub fn active_size(&self) -> u64 {
        self.sum(|block| if block.state == BlockState::Free { 0 } else { block.size })
    }

    /// Requested bytes of active blocks.
    #[must_use]
    pub fn requested_size(&self) -> u64 {
        self.sum(|block| if block.state == BlockState::Free { 0 } else { block.requested_size })
    }

    /// Older snapshots have no addresses of blocks; blocks are consecutive.
    pub(super) fn place_blocks(&mut self) {
        let mut address = self.address;
        for block in &mut self.blocks {
            if block.address == 0 {
                block.address = address;
            }
            address = address.wrapping_add(block.size);
        }
    }

    fn sum(&self, of: impl Fn(&SegmentBlock) -> u64) -> u64 {
        self.blocks.iter().map(of).fold(0, u64::saturating_add)
    }

    /// The segments of one of our allocators on `device`.
    ///
    /// For a backend without two pools, the segment's size decides its pool, as in PyTorch.
    #[must_use]
    pub fn from_snapshot(snapshot: &Snapshot, device: u16) -> Vec<Segment> {
        // PyTorch's segments for small requests have 2 MiB, and no others are that small.
        let by_size = |bytes: u64| if bytes <= SMALL_SEGMENT { PoolKind::Small } else { PoolKind::Large };
        let convert = |segment: &vramlab_policies::contract::SegmentInfo| Segment {
            device,
            address: segment.addr.get(),
            total_size: segment.bytes,
            stream: segment.stream.get(),
            segment_type: segment.pool.unwrap_or(by_size(segment.bytes)),
            pool_id: None,
            is_expandable: false,
            blocks: segment
                .blocks
                .iter()
                .map(|block| SegmentBlock {
                    address: block.addr.get(),
                    size: block.bytes,
                    requested_size: block.requested,
                    state: block.state,
                })
                .collect(),
        };
        snapshot.segments.iter().map(convert).collect()
    }
}

/// Name of a segment's pool in PyTorch's snapshots.
pub(super) fn pool_name(pool: PoolKind) -> &'static str {
    match pool {
        PoolKind::Small => "small",
        PoolKind::Large => "large",
    }
}

/// Name of a block's state in PyTorch's snapshots. Its documentation has `active_awaiting_free`, its code and viewer
/// `active_pending_free`.
pub(super) fn state_name(state: BlockState) -> &'static str {
    match state {
        BlockState::Allocated => "active_allocated",
        BlockState::PendingFree => "active_pending_free",
        BlockState::Free => "inactive",
    }
}
