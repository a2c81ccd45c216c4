//! Whether a plan is one: no two blocks that conflict overlap.

use super::{CrossStream, Lifetime};
use std::collections::BTreeSet;
use std::fmt;

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
pub(super) fn conflict(lifetimes: &[Lifetime], first: u32, second: u32, cross: CrossStream) -> bool {
    // Blocks that are freed before the next allocation have lived all the same.
    second < lifetimes[first as usize].end_for(&lifetimes[second as usize], cross).max(first + 1)
}

/// Goes through the offsets from the lowest to the highest and compares each block with those that reach beyond its start.
pub(super) fn find(lifetimes: &[Lifetime], offsets: &[u64], cross: CrossStream) -> Option<Overlap> {
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
