//! The memory before recording started: segments and blocks that are released without having been allocated, or exist at the end
//! without having been allocated.

use super::events::{Events, RecordedEvent};
use super::{Rules, Segment};
use crate::formats::{Action, Origin, Origins, SegmentBlock, Summary};
use std::collections::HashSet;
use vramlab_device::ranges::Ranges;
use vramlab_policies::contract::{BlockState, PoolKind};

/// The memory before recording started, as far as the recording shows it.
#[derive(Clone, Debug, Default)]
pub struct InitialState {
    /// Segments by address.
    pub segments: Vec<InitialSegment>,
    /// Blocks by address.
    pub blocks: Vec<InitialBlock>,
}

/// A segment from before recording started.
#[derive(Clone, Copy, Debug)]
pub struct InitialSegment {
    /// First address.
    pub addr: u64,
    /// Its size, stream and kind.
    pub segment: Segment,
    /// Whether it still existed at the end.
    pub at_end: bool,
}

/// A block from before recording started.
#[derive(Clone, Copy, Debug)]
pub struct InitialBlock {
    /// First address.
    pub addr: u64,
    /// Requested bytes.
    pub requested: u64,
    /// Its size, if the end shows it.
    pub bytes: Option<u64>,
    /// Stream handle.
    pub stream: u64,
    /// Whether its free was pending.
    pub pending: bool,
    /// Where it was allocated, if the end shows it.
    pub origin: Origin,
}

impl InitialBlock {
    /// A block at the end, in a segment of this stream.
    pub(crate) fn at_end(block: &SegmentBlock, stream: u64, origin: Origin) -> Self {
        Self {
            addr: block.address,
            // Older snapshots do not contain the requested size.
            requested: if block.requested_size == 0 { block.size } else { block.requested_size },
            bytes: Some(block.size),
            stream,
            pending: block.state == BlockState::PendingFree,
            origin,
        }
    }
}

impl InitialState {
    /// The memory before the first of these events, which are all of `device`. Linear in the events and in the segments at the
    /// end.
    #[must_use]
    pub fn new(events: &Events, rules: &Rules, summary: &Summary, origins: &Origins, device: u16) -> Self {
        let mut out = Self::default();
        let mut live: HashSet<u64> = HashSet::new();
        // Addresses of blocks so far: an unknown free there is not of a block from before.
        let mut used = Ranges::default();
        let mut made = Ranges::default();
        for (_, event, at_once) in events.walk(0) {
            let RecordedEvent { addr, bytes, stream, .. } = event;
            match event.action {
                Action::Alloc => {
                    live.insert(addr);
                    used.insert(addr, addr + bytes);
                }
                // The previous event has introduced the block.
                Action::FreeCompleted if at_once => {}
                Action::FreeRequested | Action::FreeCompleted => {
                    let waits = event.action == Action::FreeRequested && !at_once;
                    let there = if waits { !live.insert(addr) } else { live.remove(&addr) };
                    if !there && bytes > 0 && !used.overlaps(addr, addr + bytes) && !made.overlaps(addr, addr + bytes) {
                        used.insert(addr, addr + bytes);
                        let pending = event.action == Action::FreeCompleted;
                        let origin = Origin::default();
                        out.blocks.push(InitialBlock { addr, requested: bytes, bytes: None, stream, pending, origin });
                    }
                }
                Action::SegmentAlloc | Action::SegmentMap if bytes > 0 => made.insert(addr, addr + bytes),
                Action::SegmentFree | Action::SegmentUnmap if bytes > 0 => {
                    for (addr, end) in made.missing(addr, addr + bytes) {
                        let bytes = end - addr;
                        let (small, expandable) = rules.kind(addr, bytes, event.action == Action::SegmentUnmap);
                        let segment = Segment { bytes, stream, small, expandable };
                        out.segments.push(InitialSegment { addr, segment, at_end: false });
                    }
                    made.remove(addr, addr + bytes);
                }
                _ => {}
            }
        }
        let ending = summary.ending().unwrap_or_default();
        for end in ending.iter().filter(|segment| segment.device == device) {
            let small = end.segment_type == PoolKind::Small;
            for (addr, stop) in made.missing(end.address, end.end()) {
                let segment = Segment { bytes: stop - addr, stream: end.stream, small, expandable: end.is_expandable };
                out.segments.push(InitialSegment { addr, segment, at_end: true });
            }
            for block in end.blocks.iter().filter(|block| block.state != BlockState::Free) {
                // The requested size is smaller than the block.
                if !live.contains(&block.address) && !used.overlaps(block.address, block.address + 1) {
                    out.blocks.push(InitialBlock::at_end(block, end.stream, origins.block(device, block.address)));
                }
            }
        }
        out.segments.sort_by_key(|segment| segment.addr);
        out.blocks.sort_by_key(|block| block.addr);
        // If segments were recorded, and the segments at the end, initial blocks are in initial segments.
        let segments = [Action::SegmentAlloc, Action::SegmentMap, Action::SegmentFree, Action::SegmentUnmap];
        if summary.ending().is_some() && segments.into_iter().any(|action| events.count(action) > 0) {
            let Self { segments, blocks } = &mut out;
            let before = |addr: u64| segments.partition_point(|segment| segment.addr <= addr).checked_sub(1);
            let around = |addr: u64| before(addr).map(|at| addr - segments[at].addr < segments[at].segment.bytes);
            blocks.retain(|block| around(block.addr) == Some(true));
        }
        out
    }
}
