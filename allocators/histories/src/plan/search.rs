//! The search for a plan: placing in an order, and finding a better order. Blocks are ordered by logarithms of their sizes.

use super::conflicts::Placed;
use super::exact::Exact;
use super::occupied::Occupied;
use super::{CrossStream, Lifetime, Plan, PlanSettings, SearchEnd};
use crate::random::Random;
use crate::steps;
use std::cmp::Reverse;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Attempts stop when this many blocks are above the best plan, because they cannot become better. Attempts alternate: the first
/// stops sooner, the second shows more of the obstacles.
const OFFENDERS: [u32; 2] = [1, 4];

/// A plan within this fraction of the bound is good enough: 0.012 %.
const ENOUGH: u64 = 8192;

/// Share of the steps for orders before the exact search begins.
const FIRST: u64 = 8;

/// Minimum number of steps for orders, because the exact search finds little in that time.
const FEWEST_FIRST: u64 = 1 << 20;

/// Number of blocks whose lists fit a processor's caches. With more of them each step counts double.
const CACHED: usize = 1 << 16;

/// Maximum number of blocks for the search to begin at all.
const MOST_BLOCKS: usize = 1 << 15;

/// Bytes for each allocation in a search: two plans, an order, priorities, and sort keys.
const ALLOCATION: usize = 3 * size_of::<u64>() + size_of::<u32>() + 32;

/// A search over orders.
#[derive(Debug)]
pub(super) struct Search<'a> {
    lifetimes: &'a [Lifetime],
    settings: &'a PlanSettings,
    budget: &'a Budget,
    lower_bound: u64,
    placed: Blocks<'a>,
    /// Placed blocks of this attempt.
    offsets: Vec<u64>,
    /// Ranges of the blocks that conflict with the next one.
    taken: Vec<(u64, u64)>,
    /// Claim for the lists and `taken`.
    claim: Claim,
    steps: u64,
    /// Maximum number of steps.
    most: u64,
}

/// Placed blocks.
#[derive(Debug)]
enum Blocks<'a> {
    /// For one group: by occupied bytes.
    OneGroup(Occupied),
    /// For groups that can reuse others' memory later than their own: one by one.
    Groups(Placed<'a>),
}

impl<'a> Blocks<'a> {
    fn new(lifetimes: &'a [Lifetime], cross: CrossStream, budget: &Budget) -> Result<Self, OverBudget> {
        let several_groups = lifetimes.iter().any(|lifetime| lifetime.group(cross) != lifetimes[0].group(cross));
        Ok(match several_groups {
            true => Self::Groups(Placed::new(lifetimes, cross, budget)?),
            false => Self::OneGroup(Occupied::new(lifetimes.len(), budget)?),
        })
    }

    fn clear(&mut self) {
        match self {
            Self::OneGroup(occupied) => occupied.clear(),
            Self::Groups(placed) => placed.clear(),
        }
    }
}

/// Result of an attempt to place all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// All are placed, in this many bytes.
    Done(u64),
    /// Too many were above the best plan. Number of placed blocks.
    Worse(usize),
    /// The steps are used up.
    OutOfSteps,
    /// The memory is used up.
    OutOfMemory,
}

impl<'a> Search<'a> {
    /// A search.
    ///
    /// # Errors
    /// The budget has no room for any attempt.
    pub(super) fn new(
        lifetimes: &'a [Lifetime],
        settings: &'a PlanSettings,
        lower_bound: u64,
        budget: &'a Budget,
    ) -> Result<Self, OverBudget> {
        let mut claim = budget.claim();
        claim.add(ALLOCATION * lifetimes.len())?;
        let placed = Blocks::new(lifetimes, settings.cross_stream, budget)?;
        let (offsets, taken, most) = (vec![0; lifetimes.len()], Vec::new(), settings.steps);
        Ok(Self { lifetimes, settings, budget, lower_bound, placed, offsets, taken, claim, steps: 0, most })
    }

    /// Improves a plan. Not generic, so that it is compiled and optimised in this crate.
    pub(super) fn run(mut self, first: Plan, progress: &mut dyn FnMut(u64, u64)) -> Plan {
        let Plan { offsets: mut best, mut bytes, .. } = first;
        let mut end = SearchEnd::Best;
        let mut random = Random(self.settings.seed);
        // CAST: a recording has fewer than 2^32 allocations.
        let mut order: Vec<u32> = (0..self.lifetimes.len() as u32).collect();
        let mut priorities: Vec<u64> = self.lifetimes.iter().map(|lifetime| log2(lifetime.bytes())).collect();
        // The first order is by size; it is completed in any case.
        order.sort_by_cached_key(|&block| (Reverse(self.lifetimes[block as usize].bytes()), self.tie(block)));
        let mut limit = u64::MAX;
        let mut offenders = OFFENDERS.iter().cycle();
        let all = self.settings.steps;
        let mut exact = None;
        if matches!(self.placed, Blocks::OneGroup(_)) && self.lifetimes.len() <= MOST_BLOCKS {
            self.most = (all / FIRST).max(FEWEST_FIRST).min(all);
        }
        while bytes - self.lower_bound > self.lower_bound / ENOUGH {
            progress(self.steps, bytes);
            let offenders = offenders.next().copied().unwrap_or(1);
            let placed = match self.attempt(&order, limit, offenders) {
                Attempt::Done(size) => {
                    if size < bytes {
                        (bytes, best) = (size, self.offsets.clone());
                    }
                    order.len()
                }
                Attempt::Worse(placed) => placed,
                Attempt::OutOfSteps if self.most < all => {
                    self.most = all;
                    match Exact::new(self.lifetimes, self.settings, self.budget) {
                        Ok(None) => continue,
                        Ok(search) => {
                            exact = search;
                            break;
                        }
                        Err(_) => {
                            end = SearchEnd::Memory;
                            break;
                        }
                    }
                }
                Attempt::OutOfSteps => {
                    end = SearchEnd::Steps;
                    break;
                }
                Attempt::OutOfMemory => {
                    end = SearchEnd::Memory;
                    break;
                }
            };
            limit = bytes;
            // Blocks above the bound move forward, by half a doubling to one and a half.
            for &block in &order[..placed] {
                if self.offsets[block as usize] + self.lifetimes[block as usize].bytes() > self.lower_bound {
                    // CAST: below 2^16.
                    priorities[block as usize] += DOUBLING / 2 + u64::from(random.below(DOUBLING as u32));
                }
            }
            order.sort_by_cached_key(|&block| (Reverse(priorities[block as usize]), self.tie(block)));
            self.steps += order.len() as u64;
        }
        let Self { lower_bound, steps, .. } = self;
        let mut plan = Plan { offsets: best, bytes, lower_bound, least: lower_bound, steps, end };
        if let Some(exact) = exact {
            exact.improve(&mut plan, all, progress);
        }
        progress(plan.steps, plan.bytes);
        plan
    }

    /// Of equal blocks the longest-lived comes first, then the earliest allocation.
    fn tie(&self, block: u32) -> (Reverse<u32>, u32) {
        (Reverse(self.lifetimes[block as usize].end.saturating_sub(block)), block)
    }

    /// Places all blocks in this order, unless as many as `offenders` are above `limit`.
    fn attempt(&mut self, order: &[u32], limit: u64, offenders: u32) -> Attempt {
        self.placed.clear();
        let (mut highest, mut above) = (0, 0);
        for (count, &block) in order.iter().enumerate() {
            let Ok(top) = self.place(block) else { return Attempt::OutOfMemory };
            highest = highest.max(top);
            above += u32::from(top >= limit);
            if above == offenders {
                return Attempt::Worse(count + 1);
            }
            if self.steps >= self.most {
                return Attempt::OutOfSteps;
            }
        }
        if above > 0 { Attempt::Worse(order.len()) } else { Attempt::Done(highest) }
    }

    /// Places a block at the lowest offset without overlap with a conflicting block; returns its top.
    ///
    /// # Errors
    /// The budget is used up.
    fn place(&mut self, block: u32) -> Result<u64, OverBudget> {
        let Self { lifetimes, offsets, taken, placed, claim, .. } = self;
        let of = &lifetimes[block as usize];
        let bytes = of.bytes();
        let mut offset = 0;
        let made = match placed {
            Blocks::OneGroup(occupied) => {
                let (from, to) = (block as usize, of.end_within(block, lifetimes.len()));
                let (lowest, steps) = occupied.lowest(from, to, bytes);
                offset = lowest;
                let lists = steps + occupied.insert(from, to, (offset, offset + bytes))?;
                // Examining a list takes half as long as a block.
                lists.div_ceil(2)
            }
            Blocks::Groups(placed) => {
                taken.clear();
                let mut room = Ok(());
                let asked = placed.each(block, |other| {
                    let offset = offsets[other as usize];
                    let range = (offset, offset + lifetimes[other as usize].bytes());
                    room = room.and_then(|()| claim.push(taken, range));
                });
                room?;
                lowest_gap(taken, bytes, &mut offset);
                // CAST: a count of examined items.
                placed.insert(block)? + taken.len() as u64 + asked
            }
        };
        // CAST: a count of examined items.
        steps::count(made as usize);
        self.steps += if lifetimes.len() > CACHED { 2 * made } else { made };
        self.offsets[block as usize] = offset;
        Ok(offset + bytes)
    }
}

/// Moves `offset` up to the lowest gap of `bytes` between ranges; returns false if that is behind the last one.
///
/// The ranges are sorted only up to that gap.
fn lowest_gap(ranges: &mut [(u64, u64)], bytes: u64, offset: &mut u64) -> bool {
    const FEW: usize = 24;
    if ranges.len() > FEW {
        let middle = ranges.len() / 2;
        ranges.select_nth_unstable(middle);
        let (low, high) = ranges.split_at_mut(middle);
        return lowest_gap(low, bytes, offset) || lowest_gap(high, bytes, offset);
    }
    ranges.sort_unstable();
    for &mut (start, end) in ranges {
        if *offset + bytes <= start {
            return true;
        }
        *offset = end.max(*offset);
    }
    false
}

/// One doubling of the size, in a logarithm.
pub(super) const DOUBLING: u64 = 1 << 16;

/// The binary logarithm, with sixteen fractional bits that are linear between powers of two. Integers only, so that it is the
/// same everywhere.
pub(super) fn log2(bytes: u64) -> u64 {
    let Some(power) = bytes.checked_ilog2() else { return 0 };
    let rest = bytes - (1 << power);
    // CAST: the quotient is below 2^16.
    u64::from(power) * DOUBLING + ((u128::from(rest) * u128::from(DOUBLING)) >> power) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_gap_is_found_without_sorting_all() {
        let gap = |mut ranges: Vec<(u64, u64)>, bytes| {
            let mut offset = 0;
            let between = lowest_gap(&mut ranges, bytes, &mut offset);
            (offset, between)
        };
        assert_eq!(gap(vec![], 5), (0, false));
        assert_eq!(gap(vec![(10, 20), (0, 4)], 6), (4, true));
        assert_eq!(gap(vec![(10, 20), (0, 4), (2, 8)], 6), (20, false));
        // A hundred blocks of 8 at multiples of ten; one of them is missing.
        let row: Vec<(u64, u64)> = (0..100).rev().filter(|at| *at != 61).map(|at| (at * 10, at * 10 + 8)).collect();
        assert_eq!(gap(row.clone(), 2), (8, true));
        assert_eq!(gap(row.clone(), 12), (608, true));
        assert_eq!(gap(row, 13), (998, false));
    }

    #[test]
    fn the_logarithm_rises_with_the_size() {
        assert_eq!([0, 1, 2, 3, 1 << 40].map(log2), [0, 0, DOUBLING, DOUBLING * 3 / 2, 40 * DOUBLING]);
        assert!((1..5000u64).all(|units| log2(512 * units) < log2(512 * units + 512)));
    }
}
