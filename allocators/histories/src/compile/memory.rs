//! The recorded memory along a timeline. Third stage: sizes of blocks with deferred frees, where they show why segments were
//! released.

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

/// Time at which [`follow`] shows the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Before frees complete and segments change right before the operation or inside it.
    Before,
    /// After that, and before the operation's own block is allocated or freed.
    After,
}

/// A request of the timeline, or from before it, whose size is known or follows from the rules.
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

/// Follows the memory from the beginning to operation `last`, and shows it twice for each operation. `streams` are the handles.
/// O(n log n).
///
/// # Errors
/// [`OverBudget`] when the budget is used up.
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
    // Pending frees that are not in the beginning yet.
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

/// Fills in the sizes for closed windows that depend on them.
///
/// # Errors
/// [`OverBudget`] when the budget is used up.
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
        // Only sizes are needed, so any stream will do.
        let streams = vec![0; transcript.slots.stream_count()];
        let mut windows = closed.iter_mut().filter(asking).peekable();
        let Transcript { timeline, frees, budget, .. } = &*transcript;
        follow((timeline, frees), (beginning, &streams), (settings, budget), last, |at, when, memory| {
            if when == When::After {
                return;
            }
            let Some(next) = windows.peek_mut() else { return };
            let arrived = next.placeholder == at;
            // The block that was freed right before still exists at the operation that frees it; one from before recording
            // started is pending until its window.
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
