//! The placement of a recording's blocks, and a check that no two conflicting blocks overlap.

use super::lifetime::{CrossStream, Lifetime};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use vramlab_policies::backends::plan::PlanTable;

/// The placement of a recording's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Offset of each block in bytes, in the order of the allocations; multiples of [`UNIT`](super::UNIT).
    pub offsets: Vec<u64>,
    /// Size of the plan in bytes.
    pub bytes: u64,
    /// Lower bound on the size of a plan.
    pub lower_bound: u64,
    /// Proved lower bound for plans that keep each block contiguous: `lower_bound` or more. If it equals `bytes`, this plan is
    /// optimal.
    pub least: u64,
    /// Number of steps of the search.
    pub steps: u64,
    /// Why the search stopped.
    pub end: SearchEnd,
}

/// Why a search for a plan stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SearchEnd {
    /// The plan is optimal, or within 0.012 % of the lower bound.
    Best,
    /// Its steps were used up.
    Steps,
    /// Its memory was used up, or some attempts stopped because of that.
    Memory,
}

impl Plan {
    /// The plan's size above the bound, as a fraction of the bound.
    #[must_use]
    pub fn gap(&self) -> f64 {
        // CAST: bytes of a device, below 2^53.
        if self.lower_bound == 0 { 0.0 } else { self.bytes as f64 / self.lower_bound as f64 - 1.0 }
    }

    /// The plan for the backend [`plan`](mod@vramlab_policies::backends::plan).
    ///
    /// # Panics
    /// When the numbers of lifetimes and offsets differ.
    #[must_use]
    pub fn table(&self, lifetimes: &[Lifetime]) -> PlanTable {
        assert_eq!(lifetimes.len(), self.offsets.len(), "an offset for each block");
        let blocks = lifetimes
            .iter()
            .zip(&self.offsets)
            .map(|(lifetime, offset)| (lifetime.requested, lifetime.stream, *offset));
        PlanTable::new(self.bytes, blocks.collect())
    }

    /// Two blocks that conflict and overlap, if there are any: then this is not a plan for these lifetimes. O(n · b), where b is
    /// the maximum number of blocks that use one byte in turn.
    ///
    /// # Panics
    /// When the numbers of lifetimes and offsets differ.
    #[must_use]
    pub fn overlap(&self, lifetimes: &[Lifetime], cross: CrossStream) -> Option<Overlap> {
        find_overlap(lifetimes, &self.offsets, cross)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, lower_bound, .. } = self;
        write!(f, "{} bytes, {:.2} % above the bound of {lower_bound}", bytes, 100.0 * self.gap())
    }
}

/// Two simultaneously active blocks at the same addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Number of the allocation that came first.
    pub first: u32,
    /// Number of the other.
    pub second: u32,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "allocation {} is given memory that allocation {} still uses", self.second, self.first)
    }
}

/// Whether two blocks need separate memory; the first was allocated first.
fn conflict(lifetimes: &[Lifetime], first: u32, second: u32, cross: CrossStream) -> bool {
    // A block that is freed before the next allocation still has a lifetime.
    second < lifetimes[first as usize].end_for(&lifetimes[second as usize], cross).max(first + 1)
}

/// Traverses the offsets from the lowest to the highest and compares each block with those that extend beyond its start.
fn find_overlap(lifetimes: &[Lifetime], offsets: &[u64], cross: CrossStream) -> Option<Overlap> {
    assert_eq!(lifetimes.len(), offsets.len(), "an offset for each block");
    // CAST: a recording has fewer than 2^32 allocations.
    let mut order: Vec<u32> =
        (0..lifetimes.len() as u32).filter(|&block| lifetimes[block as usize].bytes() > 0).collect();
    order.sort_unstable_by_key(|&block| (offsets[block as usize], block));
    // By their tops.
    let mut reaching: BTreeSet<(u64, u32)> = BTreeSet::new();
    for block in order {
        let offset = offsets[block as usize];
        while reaching.first().is_some_and(|(top, _)| *top <= offset) {
            reaching.pop_first();
        }
        for &(_, other) in &reaching {
            let (first, second) = (block.min(other), block.max(other));
            if conflict(lifetimes, first, second, cross) {
                return Some(Overlap { first, second });
            }
        }
        reaching.insert((offset + lifetimes[block as usize].bytes(), block));
    }
    None
}
