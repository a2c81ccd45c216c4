//! What a compilation may hold: memory is claimed before it is taken.

use super::beginning::{Beginning, Pending, StartBlock, StartSegment};
use super::builder::HistoryBuilder;
use super::memory::Part;
use super::windows::Window;
use crate::budget::{Budget, OverBudget};

/// Memory of a map's entry where its nodes are as empty as they get.
const fn in_tree<K, V>() -> usize {
    3 * size_of::<(K, V)>() + 16
}

/// Memory of a table's entry while the table doubles at seven eighths.
const fn in_table<K, V>() -> usize {
    4 * (size_of::<(K, V)>() + 1)
}

impl HistoryBuilder {
    /// Lets the compilation draw on this budget, which may be the one of the reader. What the [`History`](super::History)
    /// holds stays claimed. Without it the compilation has a budget of its own, [`Budget::default`].
    #[must_use]
    pub fn within(mut self, budget: &Budget) -> Self {
        self.claim = budget.claim();
        self.maps = budget.claim();
        self
    }

    /// Claims what the next event adds at most.
    #[inline]
    pub(super) fn make_room(&mut self) -> Result<(), OverBudget> {
        let claim = &mut self.claim;
        claim.reserve(&mut self.ops, 4)?;
        claim.reserve(&mut self.addresses, 1)?;
        claim.reserve(&mut self.segments, self.window.segments.len())?;
        claim.reserve(&mut self.spare_slots, 1)?;
        claim.reserve(&mut self.deferred, 2)?;
        claim.reserve(&mut self.completions.held_up, 1)?;
        claim.reserve(&mut self.completions.completed, 1)?;
        claim.reserve(&mut self.unknown, 1)?;
        claim.reserve(&mut self.pending, 1)?;
        claim.reserve(&mut self.departed, 1)?;
        claim.reserve(&mut self.open, 1)?;
        claim.reserve(&mut self.window.completions, 1)?;
        claim.reserve(&mut self.window.segments, 1)?;
        let maps = (self.live.len() + 1) * in_tree::<u64, super::builder::Live>()
            + (self.seen.len() + self.held.len() + self.made.len() + self.left.len() + 4) * in_tree::<u64, u64>()
            + (self.mapped.len() + self.pools.len() + 4) * in_tree::<u64, u64>()
            + (self.waiting.len() + 1) * in_table::<u64, u32>();
        // In steps, so that most events find what they need.
        self.maps.set(maps.next_multiple_of(1 << 14))
    }

    /// Claims what finishing takes: what was there before the first event, and each window's free.
    pub(super) fn make_room_to_finish(&mut self) -> Result<(), OverBudget> {
        let ending = self.ending.as_deref().unwrap_or_default();
        let blocks = self.unknown.len() + self.pending.len() + ending.iter().map(|end| end.blocks.len()).sum::<usize>();
        let segments = self.departed.len() + ending.len();
        self.claim.reserve(&mut self.deferred, self.open.len() + blocks + 1)?;
        let block = 2 * size_of::<StartBlock>() + 2 * size_of::<Pending>() + in_table::<u32, u64>();
        let held = blocks * block + segments * 2 * size_of::<StartSegment>();
        // Followed up to a refused request or to a window, blocks have free ones between them.
        let live = self.slots as usize + self.most_waiting + blocks;
        let follow = (2 * live + self.most_held + segments + 1) * in_tree::<u64, Part>()
            + self.slots as usize * size_of::<Option<u64>>();
        let asks = self.open.iter().any(|open| open.window.asks_for_sizes(open.end));
        let follow = if asks || !self.completions.refusals.is_empty() { follow } else { 0 };
        self.claim.add(held + follow + self.deferred.len() * size_of::<u32>())
    }

    /// Claims what it takes to follow the placements from what was there before.
    pub(super) fn make_room_to_follow(&mut self, beginning: &Beginning) -> Result<(), OverBudget> {
        // Between two blocks that are live at once there is at most one free one.
        let live = self.slots as usize + beginning.blocks.len();
        let segments = self.segments.len() + beginning.segments.len();
        let block = 2 * in_tree::<u64, (u64, u64, u64)>() + in_tree::<(u64, u64, u64), ()>() + 2 * size_of::<u64>();
        let segment = 2 * in_tree::<u64, (u64, u64, u64)>();
        self.maps.add(live * block + segments * segment + self.deferred.len() * in_tree::<u32, Vec<u64>>())
    }

    /// Takes the memory of a window that has been dealt with for the next one.
    pub(super) fn reuse(&mut self, mut window: Window) {
        window.completions.clear();
        window.segments.clear();
        self.window = Window { completions: window.completions, segments: window.segments, ..Window::default() };
    }
}
