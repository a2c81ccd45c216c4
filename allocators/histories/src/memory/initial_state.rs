//! What was there before the first event of a history: what goes without having come, and what is held at the end without
//! having come.

use super::events::{Events, RecordedEvent};
use super::{Rules, Segment};
use crate::formats::{Action, Origin, Origins, SegmentBlock, Summary};
use std::collections::HashSet;
use vramlab_device::ranges::Ranges;
use vramlab_policies::contract::{BlockState, PoolKind};

/// What was there before the first event, as far as the history tells it.
#[derive(Clone, Debug, Default)]
pub struct InitialState {
    /// By address.
    pub segments: Vec<InitialSegment>,
    /// By address.
    pub blocks: Vec<InitialBlock>,
}

/// A segment that was there before the first event.
#[derive(Clone, Copy, Debug)]
pub struct InitialSegment {
    /// Where it begins.
    pub addr: u64,
    /// What it is.
    pub segment: Segment,
    /// Whether it was held at the end, too.
    pub at_end: bool,
}

/// A block that was there before the first event.
#[derive(Clone, Copy, Debug)]
pub struct InitialBlock {
    /// Where it begins.
    pub addr: u64,
    /// What was asked for.
    pub requested: u64,
    /// Its size, where the end tells it.
    pub bytes: Option<u64>,
    /// Its stream.
    pub stream: u64,
    /// Whether it had been freed and waited for other streams.
    pub pending: bool,
    /// Where it came from, where the end tells it.
    pub origin: Origin,
}

impl InitialBlock {
    /// One that is held at the end, in a segment of this stream.
    pub(crate) fn at_end(block: &SegmentBlock, stream: u64, origin: Origin) -> Self {
        Self {
            addr: block.address,
            // Older snapshots do not say what was asked for.
            requested: if block.requested_size == 0 { block.size } else { block.requested_size },
            bytes: Some(block.size),
            stream,
            pending: block.state == BlockState::PendingFree,
            origin,
        }
    }
}

impl InitialState {
    /// What was there before the first of these events, all of which are `device`'s. Linear in the events and in what was
    /// held at the end.
    #[must_use]
    pub fn new(events: &Events, rules: &Rules, summary: &Summary, origins: &Origins, device: u16) -> Self {
        let mut out = Self::default();
        let mut live: HashSet<u64> = HashSet::new();
        // Where blocks have been: what goes from there without having come was not there before.
        let mut seen = Ranges::default();
        let mut made = Ranges::default();
        for (_, event, at_once) in events.walk(0) {
            let RecordedEvent { addr, bytes, stream, .. } = event;
            match event.action {
                Action::Alloc => {
                    live.insert(addr);
                    seen.insert(addr, addr + bytes);
                }
                // The event before it told of the block.
                Action::FreeCompleted if at_once => {}
                Action::FreeRequested | Action::FreeCompleted => {
                    let waits = event.action == Action::FreeRequested && !at_once;
                    let there = if waits { !live.insert(addr) } else { live.remove(&addr) };
                    if !there && bytes > 0 && !seen.overlaps(addr, addr + bytes) && !made.overlaps(addr, addr + bytes) {
                        seen.insert(addr, addr + bytes);
                        let pending = event.action == Action::FreeCompleted;
                        let origin = Origin::default();
                        out.blocks.push(InitialBlock { addr, requested: bytes, bytes: None, stream, pending, origin });
                    }
                }
                Action::SegmentAlloc | Action::SegmentMap if bytes > 0 => made.insert(addr, addr + bytes),
                Action::SegmentFree | Action::SegmentUnmap if bytes > 0 => {
                    let expandable = event.action == Action::SegmentUnmap;
                    for (addr, end) in made.missing(addr, addr + bytes) {
                        let bytes = end - addr;
                        let small = rules.is_small_segment(addr, bytes, expandable);
                        let segment = Segment { bytes, stream, small, expandable };
                        out.segments.push(InitialSegment { addr, segment, at_end: false });
                    }
                    made.remove(addr, addr + bytes);
                }
                _ => {}
            }
        }
        let held = summary.ending().unwrap_or_default();
        for end in held.iter().filter(|segment| segment.device == device) {
            let small = end.segment_type == PoolKind::Small;
            for (addr, stop) in made.missing(end.address, end.end()) {
                let segment = Segment { bytes: stop - addr, stream: end.stream, small, expandable: end.is_expandable };
                out.segments.push(InitialSegment { addr, segment, at_end: true });
            }
            for block in end.blocks.iter().filter(|block| block.state != BlockState::Free) {
                // It was asked for less than it has.
                if !live.contains(&block.address) && !seen.overlaps(block.address, block.address + 1) {
                    out.blocks.push(InitialBlock::at_end(block, end.stream, origins.block(device, block.address)));
                }
            }
        }
        out.segments.sort_by_key(|segment| segment.addr);
        out.blocks.sort_by_key(|block| block.addr);
        // Where segments were recorded, and what was held at the end, blocks from before lay in the segments from before.
        let segments = [Action::SegmentAlloc, Action::SegmentMap, Action::SegmentFree, Action::SegmentUnmap];
        if summary.ending().is_some() && segments.into_iter().any(|action| events.count(action) > 0) {
            let Self { segments, blocks } = &mut out;
            let before = |addr: u64| segments.partition_point(|one| one.addr <= addr).checked_sub(1);
            let around = |addr: u64| before(addr).map(|at| addr - segments[at].addr < segments[at].segment.bytes);
            blocks.retain(|block| around(block.addr) == Some(true));
        }
        out
    }
}
