//! The recorded memory along a timeline. Third stage: how large the blocks were whose frees were held up, where that says why
//! segments went back.

use super::timeline::{Frees, Timeline};
use super::transcript::Transcript;
use super::windows::ClosedWindow;
use crate::formats::Origin;
use crate::history::{Beginning, Kind, SegmentEvent};
use crate::memory::{BEFORE, Memory, NewBlock, Rules, Segment};
use crate::steps;
use vramlab_device::budget::{Budget, OverBudget};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::contract::PoolKind;

/// When [`follow`] shows the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Before frees complete, and segments come and go, that did so right before the operation or inside it.
    Before,
    /// After that and before the operation's own block comes or goes.
    After,
}

/// A request of the timeline's, or from before it, whose size is known or follows from the rules.
fn new_block(requested: u64, size: Option<u64>, at: u32) -> NewBlock {
    NewBlock { requested, size, stream: 0, at, origin: Origin::default() }
}

fn change(memory: &mut Memory, event: &SegmentEvent) -> Result<(), OverBudget> {
    if event.released {
        memory.release(event.addr, event.bytes);
        return Ok(());
    }
    let (bytes, stream, expandable) = (event.bytes, event.stream, event.part.is_some());
    let small = event.pool() == PoolKind::Small;
    memory.reserve(event.addr, Segment { bytes, stream, small, expandable })
}

/// Follows the memory from the beginning up to operation `last`, and shows it twice for each operation. `streams` are
/// the handles. O(n log n).
///
/// # Errors
/// [`OverBudget`] when the memory takes more than there is.
pub(super) fn follow(
    (timeline, frees): (&Timeline, &Frees),
    (beginning, streams): (&Beginning, &[u64]),
    (settings, budget): (&CachingSettings, &Budget),
    last: u32,
    mut look: impl FnMut(u32, When, &Memory),
) -> Result<(), OverBudget> {
    let mut memory = Memory::new(Rules::pytorch(settings), budget);
    for segment in &beginning.segments {
        change(&mut memory, &SegmentEvent::made(segment.addr, segment.bytes, streams[segment.stream as usize]))?;
    }
    let mut slots: Vec<Option<u64>> = vec![None; timeline.slots as usize];
    for block in &beginning.blocks {
        memory.place(block.addr, new_block(block.requested, block.bytes, BEFORE))?;
        if block.freed.is_some() {
            memory.request_free(block.addr, BEFORE);
        } else {
            slots[block.slot as usize] = Some(block.addr);
        }
    }
    // Those that are not a part of the beginning yet.
    for pending in &timeline.pending {
        memory.place(pending.addr, new_block(pending.bytes, pending.size, BEFORE))?;
        memory.request_free(pending.addr, BEFORE);
    }
    let mut addresses = timeline.addresses.iter();
    let mut held_up = frees.held_up.iter().peekable();
    let mut completed = frees.completed.iter().peekable();
    let mut segments = timeline.segments.iter().peekable();
    for at in 0..=last {
        steps::count(1);
        look(at, When::Before, &memory);
        while let Some((_, addr)) = completed.next_if(|(op, _)| *op <= at) {
            memory.complete(*addr);
        }
        while let Some(segment) = segments.next_if(|segment| segment.op <= at) {
            change(&mut memory, segment)?;
        }
        look(at, When::After, &memory);
        let Some(op) = timeline.ops.get(at as usize) else { break };
        let waits = held_up.next_if(|op| **op <= at).is_some() && frees.completes;
        match op.kind() {
            Kind::Alloc => {
                if let Some(addr) = addresses.next() {
                    memory.place(*addr, new_block(op.value, None, at))?;
                    slots[op.slot as usize] = Some(*addr);
                }
            }
            Kind::Free | Kind::Release => {
                if let Some(addr) = slots[op.slot as usize].take() {
                    memory.request_free(addr, at);
                    if !waits {
                        memory.complete(addr);
                    }
                }
            }
            Kind::Use | Kind::Trim | Kind::Refused | Kind::Nothing => {}
        }
    }
    Ok(())
}

/// Fills in the sizes in the closed windows that ask for them.
///
/// # Errors
/// [`OverBudget`] when following the memory takes more than there is.
pub(super) fn find_held_up_sizes(
    transcript: &mut Transcript,
    beginning: &Beginning,
    settings: &CachingSettings,
) -> Result<(), OverBudget> {
    fn asking(closed: &&mut ClosedWindow) -> bool {
        closed.window.asks_for_sizes(closed.end)
    }
    let mut closed = std::mem::take(&mut transcript.windows.closed);
    if let Some(last) = closed.iter_mut().rev().find(asking).map(|closed| closed.placeholder) {
        // Only sizes are asked for, so any stream will do.
        let streams = vec![0; transcript.slots.stream_count()];
        let mut windows = closed.iter_mut().filter(asking).peekable();
        let Transcript { timeline, frees, budget, .. } = &*transcript;
        follow((timeline, frees), (beginning, &streams), (settings, budget), last, |at, when, memory| {
            if when == When::After {
                return;
            }
            let Some(next) = windows.peek_mut() else { return };
            let arrived = next.placeholder == at;
            // The block that was freed right before is still there when the operation comes that frees it; one from
            // before the first event is pending until its window.
            if let Some(before) = next.window.before.as_mut().filter(|before| before.op == at || arrived) {
                before.size = before.size.or(memory.size_of(before.addr));
            }
            if arrived {
                for held_up in &mut next.window.completions {
                    steps::count(1);
                    held_up.size = memory.size_of(held_up.addr);
                }
                windows.next();
            }
        })?;
    }
    transcript.windows.closed = closed;
    Ok(())
}

// Room between blocks.

/// Blocks in address order, and how large the largest gap between any two of them is.
#[derive(Debug)]
pub(super) struct Gaps {
    /// Starts and ends; blocks that touch or overlap are one.
    blocks: Vec<(u64, u64)>,
    /// A tree of maxima: gap `i`, which lies behind block `i`, is leaf `gaps + i`, and node `i` is the larger of nodes
    /// `2 i` and `2 i + 1`.
    largest: Vec<u64>,
}

impl Gaps {
    /// The gaps between blocks given by start and end, in any order. O(n log n).
    pub(super) fn between(blocks: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut sorted: Vec<(u64, u64)> = blocks.collect();
        sorted.sort_unstable();
        let mut blocks: Vec<(u64, u64)> = Vec::with_capacity(sorted.len());
        for (start, end) in sorted {
            steps::count(1);
            match blocks.last_mut() {
                Some(before) if start <= before.1 => before.1 = before.1.max(end),
                _ => blocks.push((start, end)),
            }
        }
        let gaps = blocks.len().saturating_sub(1);
        let mut largest = vec![0; gaps];
        largest.extend(blocks.windows(2).map(|pair| pair[1].0 - pair[0].1));
        for node in (1..gaps).rev() {
            largest[node] = largest[2 * node].max(largest[2 * node + 1]);
        }
        Self { blocks, largest }
    }

    /// The largest part of `start..end` in which no block lies. O(log n).
    pub(super) fn largest_in(&self, start: u64, end: u64) -> u64 {
        let first = self.blocks.partition_point(|block| block.1 <= start);
        let last = self.blocks.partition_point(|block| block.0 < end);
        if first >= last {
            return end.saturating_sub(start);
        }
        let before = self.blocks[first].0.saturating_sub(start);
        let behind = end.saturating_sub(self.blocks[last - 1].1);
        before.max(behind).max(self.largest_of(first, last - 1))
    }

    /// The largest of gaps `first..last`.
    fn largest_of(&self, first: usize, last: usize) -> u64 {
        let gaps = self.largest.len() / 2;
        let (mut first, mut last, mut largest) = (first + gaps, last + gaps, 0);
        while first < last {
            steps::count(1);
            if !first.is_multiple_of(2) {
                largest = largest.max(self.largest[first]);
                first += 1;
            }
            if !last.is_multiple_of(2) {
                last -= 1;
                largest = largest.max(self.largest[last]);
            }
            first /= 2;
            last /= 2;
        }
        largest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest gap, found by looking at every address.
    fn slow(blocks: &[(u64, u64)], start: u64, end: u64) -> u64 {
        let free = |at: u64| !blocks.iter().any(|block| (block.0..block.1).contains(&at));
        let (mut run, mut largest) = (0, 0);
        for at in start..end {
            run = if free(at) { run + 1 } else { 0 };
            largest = largest.max(run);
        }
        largest
    }

    #[test]
    fn the_largest_gap_of_every_range_is_found() {
        let shapes: [&[(u64, u64)]; 6] = [
            &[],
            &[(3, 5)],
            &[(9, 12), (2, 3)],
            &[(1, 4), (3, 9), (9, 10), (15, 16)],
            &[(0, 1), (2, 3), (5, 6), (9, 10), (14, 15), (16, 18), (17, 20)],
            &[(4, 20), (5, 6), (7, 8), (1, 2)],
        ];
        for blocks in shapes {
            let gaps = Gaps::between(blocks.iter().copied());
            for start in 0..22 {
                for end in start..24 {
                    assert_eq!(gaps.largest_in(start, end), slow(blocks, start, end), "{blocks:?} {start}..{end}");
                }
            }
        }
    }
}
