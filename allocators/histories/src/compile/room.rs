//! Memory claims of a compilation: memory is claimed before it is allocated.

use super::slots::Live;
use super::timeline::Pending;
use super::transcript::Transcript;
use super::windows::Windows;
use crate::formats::Segment;
use crate::history::{Beginning, StartBlock, StartSegment};
use crate::memory::in_tree;
use vramlab_device::budget::OverBudget;

/// Memory of a hash table's entry while the table doubles at seven eighths.
const fn in_table<K, V>() -> usize {
    4 * (size_of::<(K, V)>() + 1)
}

impl Transcript {
    /// Claims the most that the next event can add.
    #[inline]
    pub(super) fn make_room(&mut self) -> Result<(), OverBudget> {
        let Self { claim, timeline, slots, frees, segments, windows, .. } = self;
        claim.reserve(&mut timeline.ops, 4)?;
        claim.reserve(&mut timeline.addresses, 1)?;
        claim.reserve(&mut timeline.segments, windows.current.segments.len())?;
        claim.reserve(&mut timeline.pending, 1)?;
        claim.reserve(&mut slots.spare, 1)?;
        claim.reserve(&mut frees.deferred, 2)?;
        claim.reserve(&mut frees.held_up, 1)?;
        claim.reserve(&mut frees.completed, 1)?;
        claim.reserve(&mut self.unknown, 1)?;
        claim.reserve(&mut segments.departed, 1)?;
        claim.reserve(&mut windows.closed, 1)?;
        claim.reserve(&mut windows.current.completions, 1)?;
        claim.reserve(&mut windows.current.segments, 1)?;
        let (segment_entries, range_entries) = segments.entries();
        let maps = (slots.live() + 1) * in_tree::<u64, Live>()
            + (slots.used_ranges() + segment_entries + range_entries + 8) * in_tree::<u64, u64>()
            + (frees.waiting() + 1) * in_table::<u64, u32>();
        // In steps, so that most events find what they need.
        self.maps.set(maps.next_multiple_of(1 << 14))
    }

    /// Returns the claims of dropped lists; the lists of the timeline and others remain claimed.
    pub(super) fn give_room_back(&mut self) -> Result<(), OverBudget> {
        fn bytes<T>(items: &Vec<T>) -> usize {
            items.capacity() * size_of::<T>()
        }
        let Self { claim, timeline, slots, frees, segments, windows, unknown, .. } = self;
        let of_operations = bytes(&timeline.ops) + bytes(&timeline.addresses) + bytes(&timeline.segments);
        let of_frees = bytes(&frees.deferred) + bytes(&frees.held_up) + bytes(&frees.completed);
        let of_blocks = bytes(&timeline.pending) + bytes(&slots.spare) + bytes(unknown) + bytes(&segments.departed);
        let Windows { current, closed } = windows;
        let of_windows = bytes(closed) + bytes(&current.completions) + bytes(&current.segments);
        claim.set(of_operations + of_frees + of_blocks + of_windows)
    }

    /// Claims memory for finishing: the initial memory by the segments at the end, and a free for each window.
    pub(super) fn make_room_to_finish(&mut self, ending: Option<&[Segment]>) -> Result<(), OverBudget> {
        let Self { claim, timeline, frees, segments, windows, .. } = self;
        let ending = ending.unwrap_or_default();
        let at_end: usize = ending.iter().map(|end| end.blocks.len()).sum();
        let blocks = self.unknown.len() + timeline.pending.len() + at_end;
        let before = segments.departed.len() + ending.len();
        claim.reserve(&mut frees.deferred, windows.closed.len() + blocks + 1)?;
        let block = 2 * size_of::<StartBlock>() + 2 * size_of::<Pending>() + in_table::<u32, u64>();
        let bytes = blocks * block + before * 2 * size_of::<StartSegment>();
        claim.add(bytes + frees.deferred.len() * size_of::<u32>())
    }

    /// Claims memory to follow the placements from the initial memory.
    pub(super) fn make_room_to_follow(&mut self, beginning: &Beginning) -> Result<(), OverBudget> {
        // Between two live blocks there is at most one free block.
        let live = self.timeline.slots as usize + beginning.blocks.len();
        let segments = self.timeline.segments.len() + beginning.segments.len();
        let block = 2 * in_tree::<u64, (u64, u64, u64)>() + in_tree::<(u64, u64, u64), ()>() + 2 * size_of::<u64>();
        let segment = 2 * in_tree::<u64, (u64, u64, u64)>();
        self.maps.add(live * block + segments * segment + self.frees.deferred.len() * in_tree::<u32, Vec<u64>>())
    }
}
