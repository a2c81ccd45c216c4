//! What was there before the first event of a history: what goes without having come, and what is held at the end without
//! having come.

use super::Rules;
use super::events::{Events, Recorded};
use crate::contract::BlockState;
use crate::histories::trace::{Action, Origin, Origins, SegmentType, Summary};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// What was there before the first event, as far as the history tells it.
#[derive(Clone, Debug, Default)]
pub struct Before {
    /// By address.
    pub segments: Vec<SegmentBefore>,
    /// By address.
    pub blocks: Vec<BlockBefore>,
}

/// A segment that was there before the first event.
#[derive(Clone, Copy, Debug)]
pub struct SegmentBefore {
    /// Where it begins.
    pub addr: u64,
    /// Its size.
    pub bytes: u64,
    /// Its stream.
    pub stream: u64,
    /// Whether it grows by parts that are mapped.
    pub expandable: bool,
    /// Whether small requests are served from it.
    pub small: bool,
}

/// A block that was there before the first event.
#[derive(Clone, Copy, Debug)]
pub struct BlockBefore {
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

impl Before {
    /// What was there before the first of these events, all of which are `device`'s. Linear in the events and in what was
    /// held at the end.
    #[must_use]
    pub fn new(events: &Events, rules: &Rules, summary: &Summary, origins: &Origins, device: u16) -> Self {
        let mut out = Self::default();
        let mut live: HashSet<u64> = HashSet::new();
        let mut known: BTreeSet<u64> = BTreeSet::new();
        let mut made = Covered::default();
        for (_, event, at_once) in events.walk(0) {
            let Recorded { addr, bytes, stream, .. } = event;
            match event.action {
                Action::Alloc => drop(live.insert(addr)),
                // The event before it told of the block.
                Action::FreeCompleted if at_once => {}
                Action::FreeRequested | Action::FreeCompleted => {
                    let waits = event.action == Action::FreeRequested && !at_once;
                    let there = if waits { !live.insert(addr) } else { live.remove(&addr) };
                    if !there && bytes > 0 && known.insert(addr) {
                        let pending = event.action == Action::FreeCompleted;
                        let origin = Origin::default();
                        out.blocks.push(BlockBefore { addr, requested: bytes, bytes: None, stream, pending, origin });
                    }
                }
                Action::SegmentAlloc | Action::SegmentMap => made.insert(addr, addr + bytes),
                Action::SegmentFree | Action::SegmentUnmap => {
                    let expandable = event.action == Action::SegmentUnmap;
                    for (start, end) in made.missing(addr, addr + bytes) {
                        let bytes = end - start;
                        let small = rules.is_small(start, bytes, expandable);
                        out.segments.push(SegmentBefore { addr: start, bytes, stream, expandable, small });
                    }
                    made.remove(addr, addr + bytes);
                }
                Action::RecordUse | Action::Snapshot | Action::Oom => {}
            }
        }
        let held = summary.ending().unwrap_or_default();
        for end in held.iter().filter(|segment| segment.device == device) {
            let small = end.segment_type == SegmentType::Small;
            for (start, stop) in made.missing(end.address, end.address.saturating_add(end.total_size)) {
                let (stream, expandable) = (end.stream, end.is_expandable);
                out.segments.push(SegmentBefore { addr: start, bytes: stop - start, stream, expandable, small });
            }
            for block in end.blocks.iter().filter(|block| block.state != BlockState::Free) {
                if !live.contains(&block.address) && known.insert(block.address) {
                    out.blocks.push(BlockBefore {
                        addr: block.address,
                        requested: block.requested_size,
                        bytes: Some(block.size),
                        stream: end.stream,
                        pending: block.state == BlockState::PendingFree,
                        origin: origins.block(device, block.address),
                    });
                }
            }
        }
        out.segments.sort_by_key(|segment| segment.addr);
        out.blocks.sort_by_key(|block| block.addr);
        out
    }
}

/// Ranges of addresses, none of which overlap.
#[derive(Debug, Default)]
struct Covered(BTreeMap<u64, u64>);

impl Covered {
    fn insert(&mut self, start: u64, end: u64) {
        self.remove(start, end);
        if start < end {
            self.0.insert(start, end);
        }
    }

    fn overlapping(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let first = self.0.range(..=start).next_back().map_or(start, |(at, _)| *at);
        self.0.range(first..end.max(first)).map(|(at, to)| (*at, *to)).filter(|(_, to)| *to > start).collect()
    }

    fn remove(&mut self, start: u64, end: u64) {
        for (at, to) in self.overlapping(start, end) {
            self.0.remove(&at);
            if at < start {
                self.0.insert(at, start);
            }
            if to > end {
                self.0.insert(end, to);
            }
        }
    }

    /// The parts of a range that are not covered.
    fn missing(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (mut out, mut at) = (Vec::new(), start);
        for (from, to) in self.overlapping(start, end) {
            if from > at {
                out.push((at, from.min(end)));
            }
            at = at.max(to);
        }
        if at < end {
            out.push((at, end));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_covered_is_missing() {
        let mut covered = Covered::default();
        covered.insert(10, 20);
        covered.insert(30, 40);
        assert_eq!(covered.missing(0, 50), [(0, 10), (20, 30), (40, 50)]);
        assert_eq!(covered.missing(12, 18), []);
        covered.remove(15, 35);
        assert_eq!(covered.missing(10, 40), [(15, 35)]);
        assert_eq!(covered.missing(40, 40), []);
    }
}
