//! Contents of segments, and the breakdown of reserved memory.

use super::{Block, Memory, Segment};
use crate::formats::{self, SegmentBlock};
use vramlab_policies::contract::{BlockState, Ledger, PoolKind};
use vramlab_policies::policy::size::torch::{LARGE_SEGMENT, SMALL_SEGMENT};
use vramlab_policies::space::whole_pages;

/// Contents of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Bytes of active blocks, pending ones included.
    pub active: u64,
    /// Bytes of blocks with a pending free.
    pub pending: u64,
    /// Requested bytes of allocated blocks.
    pub requested: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Free bytes.
    pub free: u64,
    /// Number of free blocks.
    pub holes: u64,
    /// Bytes of the largest free block.
    pub largest_hole: u64,
}

impl Memory {
    /// Contents of the segment at an address. O(log n + blocks of the segment).
    #[must_use]
    pub fn contents(&self, start: u64, segment: &Segment) -> Contents {
        let mut out = Contents::default();
        for (_, block) in self.blocks_in(start, segment) {
            out.active += block.bytes;
            out.blocks += 1;
            match block.pending {
                Some(_) => out.pending += block.bytes,
                None => out.requested += block.requested,
            }
        }
        for (_, bytes) in self.free_in(start, segment) {
            out.free += bytes;
            out.holes += 1;
            out.largest_hole = out.largest_hole.max(bytes);
        }
        out
    }

    /// Bytes of a segment that PyTorch's cache release frees or unmaps: the segment if it has no blocks; of an expandable segment the
    /// whole pages of each free block. O(log n + blocks of the segment).
    #[must_use]
    pub fn releasable(&self, start: u64, segment: &Segment, inside: &Contents) -> u64 {
        if !segment.expandable {
            return if inside.blocks == 0 { inside.free } else { 0 };
        }
        // Pages are as large as the pool's segments. A mapped range begins at a page.
        let page = if segment.small { SMALL_SEGMENT } else { LARGE_SEGMENT };
        self.free_in(start, segment).map(|(address, bytes)| whole_pages(address - start, bytes, page)).sum()
    }

    /// Active blocks of a segment with their addresses: they keep it reserved.
    pub fn blocks_in(&self, start: u64, segment: &Segment) -> impl Iterator<Item = (u64, &Block)> + '_ {
        self.blocks.range(start..start + segment.bytes).map(|(addr, block)| (*addr, block))
    }

    /// The free blocks of a segment: address and bytes of each.
    pub fn free_in(&self, start: u64, segment: &Segment) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.gaps.within(start, start + segment.bytes)
    }

    /// Breakdown of reserved memory as seen by a request on `stream`. Blocks outside the segments of the recording do not count.
    /// O(n).
    #[must_use]
    pub fn ledger(&self, stream: u64) -> Ledger {
        let mut out = Ledger::default();
        for (start, segment) in &self.segments {
            let inside = self.contents(*start, segment);
            if segment.stream == stream {
                let soft = self.releasable(*start, segment, &inside);
                out.soft += soft;
                out.hard += inside.free - soft;
            } else {
                out.stream += inside.free;
            }
            out.reserved += segment.bytes;
            out.pending += inside.pending;
            out.requested += inside.requested;
            out.internal += inside.active - inside.pending;
        }
        out.internal = out.internal.saturating_sub(out.requested);
        out
    }

    /// The segments and their blocks in address order, as in PyTorch's snapshot of `device`. O(n).
    #[must_use]
    pub fn snapshot(&self, device: u16) -> Vec<formats::Segment> {
        let segment = |(&address, segment): (&u64, &Segment)| {
            let used = self.blocks_in(address, segment).map(|(address, block)| SegmentBlock {
                address,
                size: block.bytes,
                requested_size: block.requested,
                state: if block.pending.is_some() { BlockState::PendingFree } else { BlockState::Allocated },
            });
            let free = self.free_in(address, segment).map(|(address, size)| SegmentBlock {
                address,
                size,
                requested_size: 0,
                state: BlockState::Free,
            });
            let mut blocks: Vec<SegmentBlock> = used.chain(free).collect();
            blocks.sort_unstable_by_key(|block| block.address);
            formats::Segment {
                device,
                address,
                total_size: segment.bytes,
                stream: segment.stream,
                segment_type: if segment.small { PoolKind::Small } else { PoolKind::Large },
                pool_id: None,
                is_expandable: segment.expandable,
                blocks,
            }
        };
        self.segments.iter().map(segment).collect()
    }
}
