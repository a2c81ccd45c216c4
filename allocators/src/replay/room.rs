//! What a compilation may hold: memory is claimed before it is taken.

use super::builder::HistoryBuilder;
use super::op::Op;
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
        claim.reserve(&mut self.unknown, 1)?;
        claim.reserve(&mut self.open, 1)?;
        claim.reserve(&mut self.window.completions, 1)?;
        claim.reserve(&mut self.window.segments, 1)?;
        let maps = (self.live.len() + 1) * in_tree::<u64, super::builder::Live>()
            + (self.seen.len() + self.held.len() + 2) * in_tree::<u64, u64>()
            + (self.waiting.len() + 1) * in_table::<u64, u32>();
        // In steps, so that most events find what they need.
        self.maps.set(maps.next_multiple_of(1 << 14))
    }

    /// Claims what finishing takes: a copy with what was there before at the front, and each window's free.
    pub(super) fn make_room_to_finish(&mut self) -> Result<(), OverBudget> {
        self.claim.reserve(&mut self.deferred, self.open.len() + 1)?;
        let front = self.unknown.len();
        let copies = if front == 0 {
            0
        } else {
            (self.ops.len() + front) * size_of::<Op>() + (self.addresses.len() + front) * size_of::<u64>()
        };
        self.claim.add(copies + self.deferred.len())
    }

    /// Takes the memory of a window that has been dealt with for the next one.
    pub(super) fn reuse(&mut self, mut window: Window) {
        window.completions.clear();
        window.segments.clear();
        self.window = Window { completions: window.completions, segments: window.segments, ..Window::default() };
    }
}
