//! Occupied bytes over time: finds the lowest offset for a block among the placed ones, where all can reuse each other's memory
//! as soon as it is free.
//!
//! A segment tree over time. A stretch of time is the union of O(log n) nodes, and each node has two lists of byte ranges that
//! are sorted and coalesced: ranges occupied *through* all of its time, and ranges occupied at some time *within* it. Ranges that
//! conflict with a block are occupied within the nodes of its lifetime, or through a node above one of these. So a block is
//! placed without examining each other block. Many small adjacent blocks, such as weights, are one range.

use super::conflicts::cover;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Occupied byte ranges, by time.
#[derive(Debug)]
pub(super) struct Occupied {
    leaves: usize,
    /// Ranges occupied within each node, followed by ranges occupied through each node except the leaves: for the time of one
    /// allocation both are the same.
    lists: Vec<Vec<(u64, u64)>>,
    /// Lists that are not empty.
    filled: Vec<u32>,
    /// Lists that a search traverses, and its position in each.
    cursors: Vec<(u32, u32)>,
    claim: Claim,
}

/// Ranges that are moved in the time of a step.
const MOVED: usize = 32;
/// Bytes of a list with one range, with the system allocator's overhead.
const SHORT: usize = 32;

impl Occupied {
    /// Nothing is occupied in the time of this many allocations.
    ///
    /// # Errors
    /// The budget has no room for the empty structure.
    pub(super) fn new(count: usize, budget: &Budget) -> Result<Self, OverBudget> {
        let leaves = count.next_power_of_two();
        let mut claim = budget.claim();
        claim.add(3 * leaves * (size_of::<Vec<(u64, u64)>>() + size_of::<u32>()))?;
        let filled = Vec::with_capacity(3 * leaves);
        Ok(Self { leaves, lists: vec![Vec::new(); 3 * leaves], filled, cursors: Vec::new(), claim })
    }

    /// Removes all ranges. Keeps the memory.
    pub(super) fn clear(&mut self) {
        self.filled.drain(..).for_each(|list| self.lists[list as usize].clear());
    }

    /// The lowest offset at which this many bytes are free from one allocation to another, and the number of steps: a step
    /// examines a list or a range.
    pub(super) fn lowest(&mut self, from: usize, to: usize, bytes: u64) -> (u64, u64) {
        let Self { leaves, ref lists, ref mut cursors, .. } = *self;
        cursors.clear();
        let mut ask = |list: usize| {
            if !lists[list].is_empty() {
                // CAST: at most six times the allocations, which the compilation limits.
                cursors.push((list as u32, 0));
            }
        };
        cover(leaves, from, to, &mut ask);
        above(leaves, from, to, |node| ask(2 * leaves + node));
        let (mut offset, mut steps) = (0, 0);
        // Each list moves the offset up, until none does.
        loop {
            let before = offset;
            cursors.retain_mut(|(list, at)| {
                let list = &lists[*list as usize];
                let rest = &list[*at as usize..];
                let passed = rest.iter().take(8).take_while(|range| range.1 <= offset).count();
                let passed = if passed < 8 { passed } else { rest.partition_point(|range| range.1 <= offset) };
                let met = rest[passed..].iter().take_while(|range| {
                    let meets = range.0 < offset + bytes;
                    offset = if meets { range.1 } else { offset };
                    meets
                });
                let met = met.count();
                steps += 1 + met as u64;
                // CAST: a list has fewer ranges than there are allocations.
                *at += (passed + met) as u32;
                (*at as usize) < list.len()
            });
            if offset == before {
                return (offset, steps);
            }
        }
    }

    /// Occupies bytes from one allocation to another. Returns the steps.
    ///
    /// # Errors
    /// The budget is used up. Some lists contain the bytes then.
    pub(super) fn insert(&mut self, from: usize, to: usize, bytes: (u64, u64)) -> Result<u64, OverBudget> {
        let Self { leaves, ref mut lists, ref mut filled, ref mut claim, .. } = *self;
        let (mut steps, mut room) = (0, Ok(()));
        let mut take = |list: usize| {
            let ranges = &mut lists[list];
            if ranges.is_empty() {
                // CAST: as above.
                filled.push(list as u32);
            }
            let enough = if ranges.capacity() == 0 {
                // Most lists have only this one range.
                claim.add(SHORT).map(|()| ranges.reserve_exact(1))
            } else {
                claim.reserve(ranges, 1)
            };
            match enough {
                Ok(()) => add(ranges, bytes) / MOVED,
                Err(over) => {
                    room = Err(over);
                    0
                }
            }
        };
        cover(leaves, from, to, |node| {
            steps += 2 + take(node);
            if node < leaves {
                steps += take(2 * leaves + node);
            }
        });
        above(leaves, from, to, |node| steps += 1 + take(node));
        // CAST: a count of examined items.
        room.map(|()| steps as u64)
    }
}

/// Adds a range and coalesces it with adjacent ones. Returns the number of moved ranges.
fn add(ranges: &mut Vec<(u64, u64)>, (start, end): (u64, u64)) -> usize {
    let first = ranges.partition_point(|range| range.1 < start);
    let last = first + ranges[first..].partition_point(|range| range.0 <= end);
    let joined = &ranges[first..last];
    let start = joined.first().map_or(start, |range| range.0.min(start));
    let end = joined.last().map_or(end, |range| range.1.max(end));
    let moved = if last == first + 1 { 0 } else { ranges.len() - last };
    ranges.splice(first..last, [(start, end)]);
    moved
}

/// Calls `node` with the nodes of a segment tree that intersect `from..to` without being inside, once each.
fn above(leaves: usize, from: usize, to: usize, mut node: impl FnMut(usize)) {
    let (from, to) = (leaves + from, leaves + to);
    for level in 1..=leaves.ilog2() {
        let (left, right) = (from >> level, (to - 1) >> level);
        let cut = [left << level != from, (to >> level) << level != to];
        if cut[0] || (cut[1] && left == right) {
            node(left);
        }
        if cut[1] && left != right {
            node(right);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::random::Random;

    /// Examines each placed block.
    fn slowly(placed: &[(usize, usize, u64, u64)], from: usize, to: usize, bytes: u64) -> u64 {
        let mut near: Vec<_> = placed.iter().filter(|other| other.0 < to && from < other.1).collect();
        near.sort_by_key(|other| other.2);
        let mut offset = 0;
        for &&(_, _, start, end) in &near {
            if start >= offset + bytes {
                break;
            }
            offset = offset.max(end);
        }
        offset
    }

    #[test]
    fn the_lowest_place_is_that_which_looking_at_every_block_finds() {
        let mut random = Random(5);
        for count in [1, 2, 3, 7, 64, 100, 129] {
            let mut occupied = Occupied::new(count as usize, &Budget::default()).unwrap();
            for _ in 0..40 {
                occupied.clear();
                let mut placed = Vec::new();
                for _ in 0..60 {
                    let from = random.below(count);
                    let to = from + 1 + random.below(count - from);
                    let (from, to, bytes) = (from as usize, to as usize, u64::from(1 + random.below(9)));
                    let (offset, _) = occupied.lowest(from, to, bytes);
                    assert_eq!(offset, slowly(&placed, from, to, bytes), "{bytes} in {from}..{to} among {placed:?}");
                    // Not always at the lowest offset, which leaves gaps.
                    let offset =
                        offset + u64::from(random.below(3)) * u64::from(slowly(&placed, from, to, bytes + 3) == offset);
                    placed.push((from, to, offset, offset + bytes));
                    occupied.insert(from, to, (offset, offset + bytes)).unwrap();
                }
            }
        }
    }

    #[test]
    fn neighbours_are_one_range() {
        let mut ranges = Vec::new();
        for range in [(0, 2), (6, 8), (2, 3), (5, 6), (9, 12), (4, 5), (1, 10)] {
            add(&mut ranges, range);
        }
        assert_eq!(ranges, [(0, 12)]);
        add(&mut ranges, (14, 15));
        assert_eq!(ranges, [(0, 12), (14, 15)]);
    }

    #[test]
    fn a_thousand_blocks_side_by_side_are_looked_at_as_one() {
        let mut occupied = Occupied::new(1000, &Budget::default()).unwrap();
        for block in 0..1000 {
            occupied.insert(block, 1000, (block as u64, block as u64 + 1)).unwrap();
        }
        let (offset, steps) = occupied.lowest(999, 1000, 1);
        assert!(offset == 1000 && steps < 50, "{offset} after {steps} steps");
    }
}
