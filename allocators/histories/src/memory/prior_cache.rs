//! Memory cached before recording started: reused, released or never used. An earlier part of the program, or an earlier program
//! of the same process, reserved it.

use super::{Events, InitialSegment, InitialState, RecordedEvent};
use crate::formats::Action;
use serde::Serialize;
use vramlab_device::ranges::Ranges;

/// Page size of expandable segments; a block uses full pages.
const PAGE: u64 = 2 << 20;

/// Memory cached before recording started: reused, released or never used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PriorCache {
    /// Reserved bytes before recording started.
    pub reserved_bytes: u64,
    /// Of these, bytes in blocks.
    pub in_blocks_bytes: u64,
    /// Of these, bytes released without a block in them since recording started.
    pub returned_unused_bytes: u64,
    /// Of the bytes released unused, those released before the first allocation.
    pub returned_at_once_bytes: u64,
    /// Bytes that stayed reserved to the end without a block in them since recording started.
    pub kept_unused_bytes: u64,
    /// Peak of reserved bytes without memory from before recording started that was not yet used.
    pub peak_in_use_bytes: u64,
}

impl PriorCache {
    /// Follows all events. O(log n) for each.
    #[must_use]
    pub fn of(events: &Events, before: &InitialState) -> Self {
        let mut unused = Unused::of(before);
        let mut out = Self { reserved_bytes: unused.bytes, ..Self::default() };
        for block in &before.blocks {
            let bytes = block.bytes.unwrap_or(block.requested);
            out.in_blocks_bytes += bytes;
            unused.take(block.addr, bytes);
        }
        let (mut reserved, mut allocated) = (out.reserved_bytes, false);
        out.peak_in_use_bytes = reserved - unused.bytes;
        for RecordedEvent { addr, bytes, action, .. } in events.iter() {
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

/// Initial memory without a block since recording started.
struct Unused<'a> {
    before: &'a InitialState,
    ranges: Ranges,
    bytes: u64,
}

impl<'a> Unused<'a> {
    fn of(before: &'a InitialState) -> Self {
        let mut out = Self { before, ranges: Ranges::default(), bytes: 0 };
        for InitialSegment { addr, segment, .. } in &before.segments {
            out.bytes += segment.bytes;
            out.ranges.insert(*addr, addr + segment.bytes);
        }
        out
    }

    /// A block is allocated here, in a segment or in pages of an expandable one, which are used from now on.
    fn take(&mut self, addr: u64, bytes: u64) {
        let segments = &self.before.segments;
        let end = addr.saturating_add(bytes);
        let first = segments.partition_point(|initial| initial.addr + initial.segment.bytes <= addr);
        for initial in segments[first..].iter().take_while(|initial| initial.addr < end) {
            let last = initial.addr + initial.segment.bytes;
            if initial.segment.expandable {
                let page = |at: u64| initial.addr + (at - initial.addr) / PAGE * PAGE;
                self.remove(page(addr.max(initial.addr)), (page(end.min(last) - 1) + PAGE).min(last));
            } else {
                self.remove(initial.addr, last);
            }
        }
    }

    /// Removes `start..end` from the unused memory, and returns the number of bytes removed.
    fn remove(&mut self, start: u64, end: u64) -> u64 {
        if start >= end {
            return 0;
        }
        let bytes = self.ranges.remove(start, end).into_iter().map(|(from, to)| to - from).sum();
        self.bytes -= bytes;
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::Origin;
    use crate::memory::{InitialBlock, Segment};
    use vramlab_device::budget::Budget;

    const MIB: u64 = 1 << 20;

    fn prior_cache(segments: &[(u64, u64, bool)], block: Option<u64>, history: &[(Action, u64, u64)]) -> PriorCache {
        let segment = |&(addr, mib, expandable): &(u64, u64, bool)| InitialSegment {
            addr: addr * MIB,
            segment: Segment { bytes: mib * MIB, stream: 0, small: false, expandable },
            at_end: false,
        };
        let block = block.map(|addr| InitialBlock {
            addr: addr * MIB,
            requested: MIB,
            bytes: Some(MIB),
            stream: 0,
            pending: false,
            origin: Origin::default(),
        });
        let before =
            InitialState { segments: segments.iter().map(segment).collect(), blocks: block.into_iter().collect() };
        let mut events = Events::new(&Budget::default());
        for &(action, addr, mib) in history {
            let (addr, bytes) = (addr * MIB, mib * MIB);
            let event = RecordedEvent { addr, bytes, stream: 0, time_ns: 0, origin: Origin::default(), action };
            events.push(event).unwrap();
        }
        PriorCache::of(&events, &before)
    }

    #[test]
    fn prior_cache_of_an_earlier_run_is_not_needed() {
        use Action::{Alloc, SegmentAlloc, SegmentFree};
        // 100 MiB are released before the first allocation, and 40 later without a use. 20 contain a block, and 30 get one.
        let before = [(1000, 100, false), (2000, 40, false), (3000, 20, false), (4000, 30, false), (5000, 7, false)];
        let cache = prior_cache(
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
        let expected = PriorCache {
            reserved_bytes: 197 * MIB,
            in_blocks_bytes: MIB,
            returned_unused_bytes: 140 * MIB,
            returned_at_once_bytes: 100 * MIB,
            kept_unused_bytes: 7 * MIB,
            peak_in_use_bytes: 110 * MIB,
        };
        assert_eq!(cache, expected);
        assert_eq!(prior_cache(&[], None, &[(SegmentAlloc, 1, 2), (SegmentFree, 1, 2)]).peak_in_use_bytes, 2 * MIB);
    }

    #[test]
    fn expandable_segments_are_used_by_page() {
        use Action::{Alloc, SegmentUnmap};
        // A block of 3 MiB from the fifth MiB on touches two pages.
        let cache = prior_cache(&[(100, 20, true)], None, &[(Alloc, 104, 3), (SegmentUnmap, 110, 4)]);
        let PriorCache { returned_unused_bytes, kept_unused_bytes, peak_in_use_bytes, .. } = cache;
        assert_eq!((returned_unused_bytes, kept_unused_bytes, peak_in_use_bytes), (4 * MIB, 12 * MIB, 4 * MIB));
    }
}
