//! What was there before the first event of a history: what goes without having come, and what is held at the end without
//! having come.

use super::events::{Events, Recorded};
use super::{Rules, Segment};
use crate::formats::{Action, Origin, Origins, SegmentBlock, Summary};
use serde::Serialize;
use std::collections::HashSet;
use vramlab_device::ranges::Ranges;
use vramlab_policies::contract::{BlockState, PoolKind};

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
    /// What it is.
    pub segment: Segment,
    /// Whether it was held at the end, too.
    pub at_end: bool,
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

impl BlockBefore {
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

impl Before {
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
            let Recorded { addr, bytes, stream, .. } = event;
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
                        out.blocks.push(BlockBefore { addr, requested: bytes, bytes: None, stream, pending, origin });
                    }
                }
                Action::SegmentAlloc | Action::SegmentMap if bytes > 0 => made.insert(addr, addr + bytes),
                Action::SegmentFree | Action::SegmentUnmap if bytes > 0 => {
                    let expandable = event.action == Action::SegmentUnmap;
                    for (addr, end) in made.missing(addr, addr + bytes) {
                        let bytes = end - addr;
                        let small = rules.is_small_segment(addr, bytes, expandable);
                        let segment = Segment { bytes, stream, small, expandable };
                        out.segments.push(SegmentBefore { addr, segment, at_end: false });
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
                out.segments.push(SegmentBefore { addr, segment, at_end: true });
            }
            for block in end.blocks.iter().filter(|block| block.state != BlockState::Free) {
                // It was asked for less than it has.
                if !live.contains(&block.address) && !seen.overlaps(block.address, block.address + 1) {
                    out.blocks.push(BlockBefore::at_end(block, end.stream, origins.block(device, block.address)));
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

// What was cached before the first event, and what became of it: memory that an earlier part of the program, or an earlier
// program of the same process, reserved and the recording does not show in use.

/// Pages of expandable segments; what a block touches is counted in whole ones.
const PAGE: u64 = 2 << 20;

/// What was cached before the first event, and what became of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Leftover {
    /// Held from the device before the first event.
    pub reserved_bytes: u64,
    /// Of that, in blocks.
    pub in_blocks_bytes: u64,
    /// Of that, given back without a block in it since the first event.
    pub returned_unused_bytes: u64,
    /// Of what was returned unused, what went before the first allocation.
    pub returned_at_once_bytes: u64,
    /// Held to the end without a block in it since the first event.
    pub kept_unused_bytes: u64,
    /// Peak of reserved memory without what was cached before the first event and had not been used by then.
    pub peak_in_use_bytes: u64,
}

impl Leftover {
    /// Follows all events. O(log n) for each.
    #[must_use]
    pub fn of(events: &Events, before: &Before) -> Self {
        let mut unused = Unused::of(before);
        let mut out = Self { reserved_bytes: unused.bytes, ..Self::default() };
        for block in &before.blocks {
            let bytes = block.bytes.unwrap_or(block.requested);
            out.in_blocks_bytes += bytes;
            unused.take(block.addr, bytes);
        }
        let (mut reserved, mut allocated) = (out.reserved_bytes, false);
        out.peak_in_use_bytes = reserved - unused.bytes;
        for Recorded { addr, bytes, action, .. } in events.iter() {
            match action {
                Action::Alloc => {
                    allocated = true;
                    unused.take(addr, bytes);
                }
                Action::SegmentAlloc | Action::SegmentMap => reserved += bytes,
                Action::SegmentFree | Action::SegmentUnmap => {
                    reserved = reserved.saturating_sub(bytes);
                    let went = unused.remove(addr, addr.saturating_add(bytes));
                    out.returned_unused_bytes += went;
                    out.returned_at_once_bytes += if allocated { 0 } else { went };
                }
                _ => {}
            }
            out.peak_in_use_bytes = out.peak_in_use_bytes.max(reserved.saturating_sub(unused.bytes));
        }
        out.kept_unused_bytes = unused.bytes;
        out
    }
}

/// Memory from before the first event in which no block has been since.
struct Unused<'a> {
    before: &'a Before,
    ranges: Ranges,
    bytes: u64,
}

impl<'a> Unused<'a> {
    fn of(before: &'a Before) -> Self {
        let mut out = Self { before, ranges: Ranges::default(), bytes: 0 };
        for SegmentBefore { addr, segment, .. } in &before.segments {
            out.bytes += segment.bytes;
            out.ranges.insert(*addr, addr + segment.bytes);
        }
        out
    }

    /// A block comes to lie here, in a segment or in pages of an expandable one. Those are no longer unused.
    fn take(&mut self, addr: u64, bytes: u64) {
        let segments = &self.before.segments;
        let end = addr.saturating_add(bytes);
        let first = segments.partition_point(|one| one.addr + one.segment.bytes <= addr);
        for one in segments[first..].iter().take_while(|one| one.addr < end) {
            let last = one.addr + one.segment.bytes;
            if one.segment.expandable {
                let page = |at: u64| one.addr + (at - one.addr) / PAGE * PAGE;
                self.remove(page(addr.max(one.addr)), (page(end.min(last) - 1) + PAGE).min(last));
            } else {
                self.remove(one.addr, last);
            }
        }
    }

    /// How many bytes of `start..end` were unused; they are no longer.
    fn remove(&mut self, start: u64, end: u64) -> u64 {
        if start >= end || !self.ranges.overlaps(start, end) {
            return 0;
        }
        let used: u64 = self.ranges.missing(start, end).into_iter().map(|(from, to)| to - from).sum();
        self.ranges.remove(start, end);
        let bytes = end - start - used;
        self.bytes -= bytes;
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::Origin;
    use crate::memory::{BlockBefore, Segment};
    use vramlab_device::budget::Budget;

    const MIB: u64 = 1 << 20;

    fn leftover(segments: &[(u64, u64, bool)], block: Option<u64>, history: &[(Action, u64, u64)]) -> Leftover {
        let segment = |&(addr, mib, expandable): &(u64, u64, bool)| SegmentBefore {
            addr: addr * MIB,
            segment: Segment { bytes: mib * MIB, stream: 0, small: false, expandable },
            at_end: false,
        };
        let block = block.map(|addr| BlockBefore {
            addr: addr * MIB,
            requested: MIB,
            bytes: Some(MIB),
            stream: 0,
            pending: false,
            origin: Origin::default(),
        });
        let before = Before { segments: segments.iter().map(segment).collect(), blocks: block.into_iter().collect() };
        let mut events = Events::new(&Budget::default());
        for &(action, addr, mib) in history {
            let (addr, bytes) = (addr * MIB, mib * MIB);
            let event = Recorded { addr, bytes, stream: 0, time_ns: 0, origin: Origin::default(), action };
            events.push(event).unwrap();
        }
        Leftover::of(&events, &before)
    }

    #[test]
    fn what_an_earlier_run_left_is_not_what_this_one_needs() {
        use Action::{Alloc, SegmentAlloc, SegmentFree};
        // 100 MiB go before anything is asked for, and 40 later without a use. 20 hold a block, and 30 get one.
        let before = [(1000, 100, false), (2000, 40, false), (3000, 20, false), (4000, 30, false), (5000, 7, false)];
        let found = leftover(
            &before,
            Some(3000),
            &[
                (SegmentFree, 1000, 100),
                (SegmentAlloc, 6000, 50),
                (Alloc, 6000, 50),
                (Alloc, 4010, 4),
                (SegmentFree, 2000, 40),
                (SegmentAlloc, 1000, 10),
            ],
        );
        let expected = Leftover {
            reserved_bytes: 197 * MIB,
            in_blocks_bytes: MIB,
            returned_unused_bytes: 140 * MIB,
            returned_at_once_bytes: 100 * MIB,
            kept_unused_bytes: 7 * MIB,
            peak_in_use_bytes: 110 * MIB,
        };
        assert_eq!(found, expected);
        assert_eq!(leftover(&[], None, &[(SegmentAlloc, 1, 2), (SegmentFree, 1, 2)]).peak_in_use_bytes, 2 * MIB);
    }

    #[test]
    fn of_an_expandable_segment_pages_are_used() {
        use Action::{Alloc, SegmentUnmap};
        // A block of 3 MiB from the fifth MiB on touches two pages.
        let found = leftover(&[(100, 20, true)], None, &[(Alloc, 104, 3), (SegmentUnmap, 110, 4)]);
        let Leftover { returned_unused_bytes, kept_unused_bytes, peak_in_use_bytes, .. } = found;
        assert_eq!((returned_unused_bytes, kept_unused_bytes, peak_in_use_bytes), (4 * MIB, 12 * MIB, 4 * MIB));
    }
}
