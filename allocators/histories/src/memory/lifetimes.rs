//! From when to when blocks and segments were there, counted in events.

use super::{Events, InitialBlock, InitialState, RecordedEvent};
use crate::formats::{Action, Origin, Segment};
use std::collections::{BTreeMap, HashMap};
use vramlab_policies::contract::PoolKind;
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

/// The end of what is never given back.
pub const NEVER: u32 = u32::MAX;

/// A block from its allocation until its memory is free again. Times are indices of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLifetime {
    /// Its allocation.
    pub start: u32,
    /// The request to free it.
    pub freed: u32,
    /// The completion of that free.
    pub end: u32,
    /// Where it begins.
    pub addr: u64,
    /// Bytes that were asked for.
    pub bytes: u64,
    /// Its stream.
    pub stream: u64,
    /// Where it came from.
    pub origin: Origin,
    /// Whether it was there before the first event.
    pub before: bool,
}

/// Memory held from the device. Times are indices of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLifetime {
    /// The event with which it came.
    pub start: u32,
    /// The one with which it went.
    pub end: u32,
    /// Where it begins.
    pub addr: u64,
    /// Its size.
    pub bytes: u64,
    /// Its stream; `None` where it is not known.
    pub stream: Option<u64>,
    /// Whether it serves small requests, or others; `None` where it is not known.
    pub small: Option<bool>,
    /// Whether it is a part of an expandable segment.
    pub expandable: bool,
    /// The private pool that it belongs to, such as that of a CUDA graph. Only those that are held at the end are known.
    pub private: Option<(u64, u64)>,
    /// Whether it was there before the first event.
    pub before: bool,
}

/// The lifetimes of a history's blocks and segments.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    /// Those from before the first event in address order, then the others in the order of their allocation.
    pub blocks: Vec<BlockLifetime>,
    /// In the order in which they came.
    pub segments: Vec<SegmentLifetime>,
}

impl Lifetimes {
    /// Those of a history, at whose end these segments were held. O(n log n).
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
        // What a segment from before was for is known only where it is there at the end.
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
        // The block whose free was requested by the event before and completes at once.
        let mut just_freed = None;
        for (index, event, at_once) in events.walk(0) {
            // CAST: a history has fewer than 2^32 events.
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

    /// Number of blocks from before the first event.
    #[must_use]
    pub fn blocks_before(&self) -> usize {
        self.blocks.partition_point(|block| block.before)
    }
}

/// Finds the lifetimes of memory that comes and goes in ranges of addresses, also in others than it came in.
#[derive(Debug, Default)]
pub struct SegmentLifetimes {
    now: BTreeMap<u64, SegmentLifetime>,
    past: Vec<SegmentLifetime>,
}

impl SegmentLifetimes {
    /// Memory comes. What a damaged log holds twice ends where the second begins. O(log n).
    pub fn take(&mut self, segment: SegmentLifetime) {
        self.give_back(segment.start, segment.addr, segment.bytes);
        if segment.bytes > 0 {
            self.now.insert(segment.addr, segment);
        }
    }

    /// Ends what is held of a range. O(log n) for each segment in it.
    pub fn give_back(&mut self, at: u32, addr: u64, bytes: u64) {
        let end = addr.saturating_add(bytes);
        let first = self.now.range(..addr).next_back().filter(|(_, held)| held.addr + held.bytes > addr);
        let first = first.map_or(addr, |(addr, _)| *addr);
        let found: Vec<SegmentLifetime> = self.now.range(first..end.max(first)).map(|(_, held)| *held).collect();
        for held in found {
            self.now.remove(&held.addr);
            let (from, to) = (held.addr.max(addr), (held.addr + held.bytes).min(end));
            self.past.push(SegmentLifetime { addr: from, bytes: to - from, end: at, ..held });
            for (from, to) in [(held.addr, from), (to, held.addr + held.bytes)] {
                if from < to {
                    self.now.insert(from, SegmentLifetime { addr: from, bytes: to - from, ..held });
                }
            }
        }
    }

    /// What is held at the end says what it is for.
    fn held_at_the_end(&mut self, segment: &Segment) {
        let held = self.now.range_mut(..segment.end()).map(|(_, held)| held);
        for held in held.rev().take_while(|held| held.addr + held.bytes > segment.address) {
            held.small = Some(segment.segment_type == PoolKind::Small);
            held.expandable = segment.is_expandable;
            held.private = segment.pool_id.filter(|pool| *pool != (0, 0));
        }
    }

    /// All of them, in the order in which they came.
    #[must_use]
    pub fn finish(self) -> Vec<SegmentLifetime> {
        let mut all = self.past;
        all.extend(self.now.into_values());
        all.sort_by_key(|held| (held.start, held.addr, held.end));
        all
    }
}
