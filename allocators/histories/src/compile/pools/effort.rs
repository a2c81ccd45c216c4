//! How much work the search for pools may be.

use crate::steps;
use std::cell::Cell;

/// Steps for each operation and segment, and some for all. Recorded histories take a small part of that.
const EACH: u64 = 16;
const SOME: u64 = 1 << 20;

/// How much work the search for pools may be: in proportion to the history, whatever that says. What says of pairs of segments
/// that they are of different pools can be as much as there are pairs.
#[derive(Debug)]
pub(super) struct Effort(Cell<u64>);

impl Effort {
    pub(super) fn new(items: usize) -> Self {
        Self(Cell::new(EACH * items as u64 + SOME))
    }

    /// Takes steps. Whether some are left.
    pub(super) fn take(&self, steps: usize) -> bool {
        steps::count(if self.is_spent() { 0 } else { steps });
        self.0.set(self.0.get().saturating_sub(steps as u64));
        !self.is_spent()
    }

    pub(super) fn is_spent(&self) -> bool {
        self.0.get() == 0
    }
}
