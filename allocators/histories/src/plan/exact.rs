//! Improves a plan by searching for smaller ones, until none exists or the steps are used up.

use super::parts::{Part, parts};
use super::search::{DOUBLING, log2};
use super::skyline::{Answer, Room, Skyline, Start};
use super::{Lifetime, Plan, PlanSettings, SearchEnd, UNIT};
use crate::random::Random;
use crate::steps;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Maximum number of pairs of a block and a section in which it is active, four bytes each; larger parts are not searched.
const MOST_PAIRS: usize = 1 << 23;

/// Wrong decisions of the shortest search. A search that starts wrong does not recover, so another order is tried soon; sometimes
/// a search may take longer ([`luby`]).
const WRONG: u64 = 100;

/// Items that a search examines in the time of a step.
const LOOKED: u64 = 16;

/// Number of consecutive halvings of the gap.
const HALVINGS: u32 = 6;

/// Bytes for each allocation while a recording is divided into parts.
const DIVIDING: usize = 160;

/// A recording whose parts are searched.
#[derive(Debug)]
pub(super) struct Exact<'a> {
    lifetimes: &'a [Lifetime],
    parts: Vec<Searched>,
    /// In units, of the blocks outside the parts.
    offsets: Vec<u64>,
    random: Random,
    room: Room,
    /// Claim for the parts.
    _claim: Claim,
}

/// A part, and the best plan of it.
#[derive(Debug)]
struct Searched {
    part: Part,
    start: Start,
    /// Logarithms by which blocks are ordered.
    orders: Vec<Order>,
    /// Offsets above the part's base.
    offsets: Vec<u64>,
    /// Size of the plan because of this part, in units, once there is a plan.
    top: Option<u64>,
}

/// Reasons to place a block first, as logarithms.
#[derive(Clone, Copy, Debug)]
struct Order {
    /// Number of sections in which it is active.
    width: u64,
    size: u64,
    /// Maximum active bytes during its lifetime.
    crowd: u64,
}

impl Order {
    /// Blocks of crowded sections go first, or long ones, or those with the largest product of both. Attempts after the first
    /// four are perturbed.
    fn priority(self, attempt: u32, random: &mut Random) -> u64 {
        let Self { width, size, crowd } = self;
        let (priority, noise) = match attempt % 4 {
            0 => (width, DOUBLING),
            1 => (width + size, 2 * DOUBLING),
            2 => (64 * crowd + width, 16 * DOUBLING),
            _ => (64 * crowd + width + size, 16 * DOUBLING),
        };
        // CAST: below 2^21.
        priority + if attempt < 4 { 0 } else { u64::from(random.below(noise as u32)) }
    }
}

impl Searched {
    fn new(part: Part) -> Self {
        let start = Start::new(&part);
        let used = start.in_use();
        let order = |item: &super::parts::Item| Order {
            width: log2((item.to - item.from) as u64),
            size: log2(item.size),
            crowd: log2(used[item.from..item.to].iter().copied().max().unwrap_or(0)),
        };
        let orders = part.items.iter().map(order).collect();
        Self { start, orders, offsets: Vec::new(), top: None, part }
    }

    /// Searches for a plan of at most this many units. Adds to the steps, of which there are at most `most`.
    fn attempt(
        &mut self,
        units: u64,
        attempt: u32,
        (random, room): (&mut Random, &mut Room),
        steps: &mut u64,
        most: u64,
    ) -> Answer {
        let Some(capacity) = units.checked_sub(self.part.base) else { return Answer::Impossible };
        let priorities: Vec<u64> = self.orders.iter().map(|order| order.priority(attempt, random)).collect();
        let mut search = Skyline::new(&self.part, &self.start, &priorities, capacity, room);
        let looked = most.saturating_sub(*steps).saturating_mul(LOOKED);
        let answer = search.search(WRONG * luby(u64::from(attempt) + 1), looked);
        // CAST: a count of examined items.
        steps::count(search.looked as usize);
        *steps += search.looked.div_ceil(LOOKED);
        let offsets = search.finish();
        if answer == Answer::Found {
            self.offsets = offsets;
            let tops = self.offsets.iter().zip(&self.part.items).map(|(offset, item)| offset + item.size);
            self.top = Some(self.part.base + tops.max().unwrap_or(0));
        }
        answer
    }
}

impl<'a> Exact<'a> {
    /// For a recording of one group; `None` if a search would examine too much.
    ///
    /// # Errors
    /// The budget is used up.
    pub(super) fn new(
        lifetimes: &'a [Lifetime],
        settings: &PlanSettings,
        budget: &Budget,
    ) -> Result<Option<Self>, OverBudget> {
        let mut claim = budget.claim();
        claim.add(DIVIDING * lifetimes.len())?;
        let (parts, offsets) = parts(lifetimes);
        if parts.iter().map(Part::pairs).sum::<usize>() > MOST_PAIRS {
            return Ok(None);
        }
        claim.add(parts.iter().map(Start::bytes).sum())?;
        let parts = parts.into_iter().map(Searched::new).collect();
        let (random, room) = (Random(settings.seed), Room::new(budget));
        Ok(Some(Self { lifetimes, parts, offsets, random, room, _claim: claim }))
    }

    /// Improves a plan, in no more than `most` steps except for one decision. Every other attempt is for the smallest size that
    /// may suffice. The others halve the distance to the plan, or less if that was too much.
    pub(super) fn improve(mut self, plan: &mut Plan, most: u64, progress: &mut dyn FnMut(u64, u64)) {
        let mut halvings = 1;
        let mut tried = 0;
        let mut memory = false;
        while plan.bytes > plan.least && plan.steps < most {
            progress(plan.steps, plan.bytes);
            let (best, least) = (plan.bytes / UNIT, plan.least / UNIT);
            let units = if tried % 2 == 0 { least } else { best - ((best - least) >> halvings).max(1) };
            match self.attempt(units, tried / 2, &mut plan.steps, most) {
                Answer::Found => {
                    plan.offsets = self.placed();
                    let tops =
                        plan.offsets.iter().zip(self.lifetimes).map(|(offset, lifetime)| offset + lifetime.bytes());
                    plan.bytes = tops.max().unwrap_or(0);
                    halvings = 1;
                }
                Answer::Impossible => plan.least = (units + 1) * UNIT,
                answer => {
                    memory |= answer == Answer::Memory;
                    if tried % 2 == 1 {
                        halvings = halvings % HALVINGS + 1;
                    }
                }
            }
            tried += 1;
        }
        plan.end = match plan.bytes <= plan.least {
            true => SearchEnd::Best,
            false if memory => SearchEnd::Memory,
            false => SearchEnd::Steps,
        };
    }

    /// Searches each part that needs more than this many units.
    fn attempt(&mut self, units: u64, attempt: u32, steps: &mut u64, most: u64) -> Answer {
        let mut all = Answer::Found;
        for part in self.parts.iter_mut().filter(|part| part.top.is_none_or(|top| top > units)) {
            match part.attempt(units, attempt, (&mut self.random, &mut self.room), steps, most) {
                Answer::Found => {}
                Answer::Impossible => return Answer::Impossible,
                unknown if all == Answer::Found || unknown == Answer::Memory => all = unknown,
                _ => {}
            }
        }
        all
    }

    /// Offsets in bytes, when every part has a plan.
    fn placed(&self) -> Vec<u64> {
        let mut offsets = self.offsets.clone();
        for Searched { part, offsets: above, .. } in &self.parts {
            for (item, offset) in part.items.iter().zip(above) {
                offsets[item.block as usize] = part.base + offset;
            }
        }
        offsets.iter_mut().for_each(|offset| *offset *= UNIT);
        offsets
    }
}

/// Length of an attempt relative to the first: 1, 1, 2, 1, 1, 2, 4, 1, … (Luby, Sinclair and Zuckerman 1993). Attempts are
/// counted from 1.
fn luby(mut attempt: u64) -> u64 {
    loop {
        let power = 1 << attempt.max(1).ilog2();
        if attempt + 1 >= 2 * power {
            return power;
        }
        // After a power of two the sequence restarts.
        attempt -= power - 1;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::{CrossStream, NEVER, lower_bound};
    use super::*;

    /// Whether a smaller plan exists: blocks are placed in the order of their offsets, each at the lowest possible one.
    fn fewer(lifetimes: &[Lifetime], bytes: u64, offsets: &mut [Option<u64>], last: u64) -> bool {
        let end = |block: usize| (lifetimes[block].end as usize).max(block + 1);
        for block in 0..lifetimes.len() {
            if offsets[block].is_some() {
                continue;
            }
            let meets = |other: &usize| block < end(*other) && *other < end(block);
            let top = |other: usize| offsets[other].map(|offset| offset + lifetimes[other].bytes());
            let below = (0..lifetimes.len()).filter(meets).filter_map(top).max().unwrap_or(0);
            let offset = below.max(last);
            if offset + lifetimes[block].bytes() >= bytes {
                // Its offset does not decrease.
                return false;
            }
            offsets[block] = Some(offset);
            let smaller = fewer(lifetimes, bytes, offsets, offset);
            offsets[block] = None;
            if smaller {
                return true;
            }
        }
        offsets.iter().all(Option::is_some)
    }

    /// A recording with nine active units whenever a block is freed, so that a plan has no spare room.
    fn full(random: &mut Random) -> Vec<Lifetime> {
        let (mut lifetimes, mut live, mut room): (Vec<Lifetime>, Vec<usize>, u32) = (Vec::new(), Vec::new(), 9);
        while lifetimes.len() < 8 {
            while room > 0 {
                let units = 1 + random.below(room.min(4));
                room -= units;
                live.push(lifetimes.len());
                let requested = UNIT * u64::from(units);
                lifetimes.push(Lifetime { requested, stream: 0, pool: 0, end: NEVER, end_elsewhere: NEVER });
            }
            for _ in 0..2 {
                let freed = live.swap_remove(random.below(live.len() as u32) as usize);
                let end = lifetimes.len() as u32;
                lifetimes[freed].end = end;
                room += (lifetimes[freed].requested / UNIT) as u32;
            }
        }
        lifetimes
    }

    /// The plan for blocks that are stacked, once the search proves that no smaller plan exists.
    fn best(lifetimes: &[Lifetime]) -> Plan {
        let mut bytes = 0;
        let stacked = lifetimes.iter().map(|lifetime| {
            bytes += lifetime.bytes();
            bytes - lifetime.bytes()
        });
        let offsets = stacked.collect();
        let lower_bound = lower_bound(lifetimes, CrossStream::AfterWait);
        let mut plan = Plan { offsets, bytes, lower_bound, least: lower_bound, steps: 0, end: SearchEnd::Steps };
        let settings = PlanSettings { cross_stream: CrossStream::AfterWait, steps: 1 << 20, seed: 1 };
        let exact = Exact::new(lifetimes, &settings, &Budget::default()).unwrap();
        exact.unwrap().improve(&mut plan, settings.steps, &mut |_, _| ());
        assert_eq!(plan.overlap(lifetimes, CrossStream::AfterWait), None);
        assert_eq!(plan.bytes, plan.least, "{lifetimes:?}");
        assert!(!fewer(lifetimes, plan.bytes, &mut vec![None; lifetimes.len()], 0), "{lifetimes:?}");
        plan
    }

    #[test]
    fn the_best_plan_is_found() {
        let mut random = Random(3);
        for _ in 0..200 {
            best(&full(&mut random));
        }
    }

    #[test]
    fn a_bound_that_no_plan_reaches_is_proved_to_be_too_low() {
        // Units and ends. In each list the same bytes are active whenever a block is freed.
        let known: [&[(u64, u32)]; 2] = [
            &[
                (1, 6),
                (4, 3),
                (3, 3),
                (2, 10),
                (3, 6),
                (2, 8),
                (2, 8),
                (2, 10),
                (3, NEVER),
                (1, 12),
                (1, NEVER),
                (3, 12),
            ],
            &[
                (3, 10),
                (3, 3),
                (2, 3),
                (2, 6),
                (2, 6),
                (1, 11),
                (3, 8),
                (1, 8),
                (3, 13),
                (1, 10),
                (4, 11),
                (3, NEVER),
                (2, 13),
            ],
        ];
        for blocks in known {
            let block = |&(units, end): &(u64, u32)| Lifetime {
                requested: UNIT * units,
                stream: 0,
                pool: 0,
                end,
                end_elsewhere: end,
            };
            let lifetimes: Vec<Lifetime> = blocks.iter().map(block).collect();
            let plan = best(&lifetimes);
            assert_eq!((plan.lower_bound, plan.bytes), (8 * UNIT, 9 * UNIT));
        }
    }

    #[test]
    fn attempts_are_seldom_long() {
        assert_eq!([1, 2, 3, 4, 5, 6, 7, 8, 14, 15, 16].map(luby), [1, 1, 2, 1, 1, 2, 4, 1, 4, 8, 1]);
    }
}
