//! Lifetimes of blocks and segments, counted in events.

use super::{Events, InitialBlock, InitialState, RecordedEvent};
use crate::formats::{Action, Origin, Segment};
use std::collections::{BTreeMap, HashMap};
use vramlab_policies::contract::PoolKind;
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

/// The end of memory that is never released.
pub const NEVER: u32 = u32::MAX;

/// A block from its allocation to the completion of its free. Times are indices of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLifetime {
    /// Its allocation.
    pub start: u32,
    /// The request to free it.
    pub freed: u32,
    /// The completion of that free.
    pub end: u32,
    /// First address.
    pub addr: u64,
    /// Requested bytes.
    pub bytes: u64,
    /// Stream handle.
    pub stream: u64,
    /// Where it was allocated.
    pub origin: Origin,
    /// Whether it existed before recording started.
    pub before: bool,
}

/// A segment. Times are indices of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLifetime {
    /// The event that allocated it.
    pub start: u32,
    /// The event that released it.
    pub end: u32,
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Its stream; `None` if unknown.
    pub stream: Option<u64>,
    /// Whether it serves small requests; `None` if unknown.
    pub small: Option<bool>,
    /// Whether it is a mapped range of an expandable segment.
    pub expandable: bool,
    /// Its private pool, such as that of a CUDA graph; known only for segments at the end.
    pub private: Option<(u64, u64)>,
    /// Whether it existed before recording started.
    pub before: bool,
}

/// The lifetimes of a recording's blocks and segments.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    /// Blocks from before recording started in address order, then the others in the order of their allocation.
    pub blocks: Vec<BlockLifetime>,
    /// In the order of their allocation.
    pub segments: Vec<SegmentLifetime>,
}

impl Lifetimes {
    /// The lifetimes of a recording that ends with these segments. O(n log n).
    #[must_use]
    pub fn of(events: &Events, before: &InitialState, ending: &[Segment]) -> Self {
        let block_before = |block: &InitialBlock| BlockLifetime {
            start: 0,
            freed: if block.pending { 0 } else { NEVER },
            end: NEVER,
            addr: block.addr,
            bytes: block.requested,
            stream: block.stream,
            origin: block.origin,
            before: true,
        };
        let mut blocks: Vec<BlockLifetime> = before.blocks.iter().map(block_before).collect();
        let mut live: HashMap<u64, usize> = blocks.iter().enumerate().map(|(at, block)| (block.addr, at)).collect();
        let mut segments = SegmentLifetimes::default();
        // The pool of an initial segment is known only if the segment still exists at the end.
        before.segments.iter().for_each(|segment| {
            segments.take(SegmentLifetime {
                start: 0,
                end: NEVER,
                addr: segment.addr,
                bytes: segment.segment.bytes,
                stream: Some(segment.segment.stream),
                small: None,
                expandable: false,
                private: None,
                before: true,
            });
        });
        // The block whose free was requested by the previous event and completes immediately.
        let mut just_freed = None;
        for (index, event, at_once) in events.walk(0) {
            // CAST: a recording has fewer than 2^32 events.
            let at = index as u32;
            let RecordedEvent { addr, bytes, stream, origin, .. } = event;
            match event.action {
                Action::Alloc if bytes > 0 => {
                    if let Some(lost) = live.insert(addr, blocks.len()) {
                        blocks[lost].end = at;
                    }
                    let (freed, end) = (NEVER, NEVER);
                    blocks.push(BlockLifetime { start: at, freed, end, addr, bytes, stream, origin, before: false });
                }
                Action::FreeRequested if at_once => {
                    just_freed = live.remove(&addr);
                    if let Some(block) = just_freed.map(|number| &mut blocks[number]) {
                        (block.freed, block.end) = (block.freed.min(at), at);
                    }
                }
                Action::FreeCompleted if at_once => {
                    if let Some(number) = just_freed {
                        blocks[number].end = at;
                    }
                }
                Action::FreeRequested => {
                    if let Some(number) = live.get(&addr) {
                        blocks[*number].freed = blocks[*number].freed.min(at);
                    }
                }
                Action::FreeCompleted => {
                    if let Some(block) = live.remove(&addr).map(|number| &mut blocks[number]) {
                        (block.freed, block.end) = (block.freed.min(at), at);
                    }
                }
                Action::SegmentAlloc | Action::SegmentMap => segments.take(SegmentLifetime {
                    start: at,
                    end: NEVER,
                    addr,
                    bytes,
                    stream: Some(stream),
                    small: Some(bytes <= SMALL_SEGMENT),
                    expandable: event.action == Action::SegmentMap,
                    private: None,
                    before: false,
                }),
                Action::SegmentFree | Action::SegmentUnmap => segments.give_back(at, addr, bytes),
                _ => {}
            }
        }
        ending.iter().for_each(|segment| segments.held_at_the_end(segment));
        Self { blocks, segments: segments.finish() }
    }

    /// Number of blocks from before recording started.
    #[must_use]
    pub fn blocks_before(&self) -> usize {
        self.blocks.partition_point(|block| block.before)
    }
}

/// Builds the lifetimes of memory whose allocated and released ranges may differ.
#[derive(Debug, Default)]
pub struct SegmentLifetimes {
    now: BTreeMap<u64, SegmentLifetime>,
    past: Vec<SegmentLifetime>,
}

impl SegmentLifetimes {
    /// Memory is allocated. A range that a damaged log allocates twice ends where the second begins. O(log n).
    pub fn take(&mut self, segment: SegmentLifetime) {
        self.give_back(segment.start, segment.addr, segment.bytes);
        if segment.bytes > 0 {
            self.now.insert(segment.addr, segment);
        }
    }

    /// Ends the segments in a range. O(log n) for each of them.
    pub fn give_back(&mut self, at: u32, addr: u64, bytes: u64) {
        let end = addr.saturating_add(bytes);
        let first = self.now.range(..addr).next_back().filter(|(_, segment)| segment.addr + segment.bytes > addr);
        let first = first.map_or(addr, |(addr, _)| *addr);
        let overlapping: Vec<SegmentLifetime> =
            self.now.range(first..end.max(first)).map(|(_, segment)| *segment).collect();
        for segment in overlapping {
            self.now.remove(&segment.addr);
            let (from, to) = (segment.addr.max(addr), (segment.addr + segment.bytes).min(end));
            self.past.push(SegmentLifetime { addr: from, bytes: to - from, end: at, ..segment });
            for (from, to) in [(segment.addr, from), (to, segment.addr + segment.bytes)] {
                if from < to {
                    self.now.insert(from, SegmentLifetime { addr: from, bytes: to - from, ..segment });
                }
            }
        }
    }

    /// A segment at the end shows the pool of its ranges.
    fn held_at_the_end(&mut self, segment: &Segment) {
        let ranges = self.now.range_mut(..segment.end()).map(|(_, range)| range);
        for range in ranges.rev().take_while(|range| range.addr + range.bytes > segment.address) {
            range.small = Some(segment.segment_type == PoolKind::Small);
            range.expandable = segment.is_expandable;
            range.private = segment.pool_id.filter(|pool| *pool != (0, 0));
        }
    }

    /// All lifetimes, in the order of their allocation.
    #[must_use]
    pub fn finish(self) -> Vec<SegmentLifetime> {
        let mut all = self.past;
        all.extend(self.now.into_values());
        all.sort_by_key(|segment| (segment.start, segment.addr, segment.end));
        all
    }
}
