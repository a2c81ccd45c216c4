//! Where each block of a history lies, and whether that is a plan: no two blocks that conflict overlap.

use super::lifetime::{CrossStream, Lifetime};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use vramlab_policies::backends::plan::PlanTable;

/// Where each block of a history lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Offset of each block in bytes, in the order of the allocations; multiples of [`UNIT`](super::UNIT).
    pub offsets: Vec<u64>,
    /// Bytes that the plan needs.
    pub bytes: u64,
    /// Bytes below which there is no plan.
    pub lower_bound: u64,
    /// Bytes below which no plan keeps each block in one piece, as far as the search proved it: `lower_bound` or more. If it is
    /// `bytes`, this is the best plan there is.
    pub least: u64,
    /// Steps that the search made.
    pub steps: u64,
    /// Why it ended.
    pub end: SearchEnd,
}

/// Why a search for a plan ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SearchEnd {
    /// The plan is the best there is, or within 0.012 % of the lower bound.
    Best,
    /// Its steps were used up.
    Steps,
    /// Its memory was used up, or some of its attempts ended because of that.
    Memory,
}

impl Plan {
    /// What the plan needs above the bound, as a fraction of the bound.
    #[must_use]
    pub fn gap(&self) -> f64 {
        // CAST: bytes of a device, below 2^53.
        if self.lower_bound == 0 { 0.0 } else { self.bytes as f64 / self.lower_bound as f64 - 1.0 }
    }

    /// The plan as the backend [`plan`](mod@vramlab_policies::backends::plan) follows it.
    ///
    /// # Panics
    /// When there are not as many lifetimes as offsets.
    #[must_use]
    pub fn table(&self, lifetimes: &[Lifetime]) -> PlanTable {
        assert_eq!(lifetimes.len(), self.offsets.len(), "an offset for each block");
        let blocks = lifetimes.iter().zip(&self.offsets).map(|(one, offset)| (one.requested, one.stream, *offset));
        PlanTable::new(self.bytes, blocks.collect())
    }

    /// Two blocks that conflict and overlap, if there are such: then it is no plan for these lifetimes. O(n · b), where b is
    /// the most blocks that have one byte one after another.
    ///
    /// # Panics
    /// When there are not as many lifetimes as offsets.
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

/// Two blocks that are in use at the same time, at the same addresses.
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

/// Whether two blocks need memory of their own; the first came first.
fn conflict(lifetimes: &[Lifetime], first: u32, second: u32, cross: CrossStream) -> bool {
    // Blocks that are freed before the next allocation have lived all the same.
    second < lifetimes[first as usize].end_for(&lifetimes[second as usize], cross).max(first + 1)
}

/// Goes through the offsets from the lowest to the highest and compares each block with those that reach beyond its start.
fn find_overlap(lifetimes: &[Lifetime], offsets: &[u64], cross: CrossStream) -> Option<Overlap> {
    assert_eq!(lifetimes.len(), offsets.len(), "an offset for each block");
    // CAST: a history has fewer than 2^32 allocations.
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
