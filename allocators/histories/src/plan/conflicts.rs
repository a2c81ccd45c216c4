//! Finds the blocks that were placed and conflict with another one, without looking at the others, where streams or private
//! pools have their own memory back earlier than others' ([`occupied`](super::occupied) does it faster where none has).

use super::{CrossStream, Lifetime};
use std::collections::BTreeMap;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Blocks that were placed, by time.
///
/// What started before a block and is still in use when it starts is found in a segment tree over time: each lifetime lies in
/// the O(log n) nodes that cover it, and those that are in use at a time are on the path from its leaf to the root. What starts
/// while the block is in use is found in a bitmap: each allocation is a point of time of its own.
///
/// Where the order of streams must be known, a block's memory is free for its own stream earlier than for others, and for its
/// own private pool earlier than for others. The time between lies in a second tree and is looked up by group.
#[derive(Debug)]
pub(super) struct Placed<'a> {
    lifetimes: &'a [Lifetime],
    cross: CrossStream,
    /// Nodes of the tree whose leaves begin at `leaves`: blocks in use.
    used: Vec<Vec<u32>>,
    /// Blocks by the time in which only their own group can have the memory, for each group that has such blocks.
    owned: Vec<Vec<(u32, Vec<u32>)>>,
    leaves: usize,
    /// Nodes that are not empty.
    filled: Vec<u32>,
    filled_owned: Vec<u32>,
    /// Allocations that were placed, a bit each.
    bits: Vec<u64>,
    /// Numbers of the allocations of each group, and a bit for each.
    groups: Vec<Members>,
    /// The group of each allocation, and where it stands there.
    group: Vec<(u32, u32)>,
    claim: Claim,
}

/// Words of a bitmap that are looked at in the time of a step.
const WORDS: usize = 32;

/// Bytes of an allocation beside the lists of the trees, with its entry in the list of a group.
const ALLOCATION: usize = 32;
/// Bytes of a group.
const GROUP: usize = 160;

#[derive(Debug, Default)]
struct Members {
    allocations: Vec<u32>,
    bits: Vec<u64>,
}

/// Calls `found` with each bit that is set in `from..to`.
fn each_set(bits: &[u64], from: usize, to: usize, mut found: impl FnMut(usize)) {
    if from >= to {
        return;
    }
    let (first, last) = (from / 64, (to - 1) / 64);
    for (word, &all) in bits.iter().enumerate().take(last + 1).skip(first) {
        let mut left = all;
        if word == first {
            left &= u64::MAX << (from % 64);
        }
        if word == last {
            left &= u64::MAX >> (63 - (to - 1) % 64);
        }
        while left != 0 {
            // CAST: below 64.
            found(word * 64 + left.trailing_zeros() as usize);
            left &= left - 1;
        }
    }
}

fn set(bits: &mut [u64], at: usize) {
    bits[at / 64] |= 1 << (at % 64);
}

impl<'a> Placed<'a> {
    /// Nothing is placed.
    ///
    /// # Errors
    /// The budget has less than this takes when it is empty.
    pub(super) fn new(lifetimes: &'a [Lifetime], cross: CrossStream, budget: &Budget) -> Result<Self, OverBudget> {
        let count = lifetimes.len();
        let leaves = count.next_power_of_two();
        let mut claim = budget.claim();
        let nodes = 2 * leaves * (size_of::<Vec<u32>>() + size_of::<Vec<(u32, Vec<u32>)>>());
        claim.add(nodes + ALLOCATION * count)?;
        let mut groups: Vec<Members> = Vec::new();
        let mut group = Vec::new();
        let mut numbers = BTreeMap::new();
        group.reserve(count);
        // CAST: a history has fewer than 2^32 allocations.
        for (allocation, lifetime) in (0u32..).zip(lifetimes) {
            let next = numbers.len() as u32;
            let number = *numbers.entry(lifetime.group(cross)).or_insert(next);
            if number == next {
                claim.add(GROUP)?;
                groups.push(Members::default());
            }
            let list = &mut groups[number as usize].allocations;
            group.push((number, list.len() as u32));
            list.push(allocation);
        }
        groups.iter_mut().for_each(|group| group.bits = vec![0; group.allocations.len().div_ceil(64)]);
        Ok(Self {
            lifetimes,
            cross,
            used: vec![Vec::new(); 2 * leaves],
            owned: vec![Vec::new(); 2 * leaves],
            leaves,
            filled: Vec::new(),
            filled_owned: Vec::new(),
            bits: vec![0; count.div_ceil(64)],
            groups,
            group,
            claim,
        })
    }

    /// Nothing is placed any more. Keeps its memory.
    pub(super) fn clear(&mut self) {
        self.filled.drain(..).for_each(|node| self.used[node as usize].clear());
        for node in self.filled_owned.drain(..) {
            self.owned[node as usize].iter_mut().for_each(|(_, blocks)| blocks.clear());
        }
        self.bits.fill(0);
        self.groups.iter_mut().for_each(|group| group.bits.fill(0));
    }

    /// The ends of a block as points of time: for its own group, and for others.
    fn ends(&self, block: u32) -> (usize, usize) {
        let lifetime = &self.lifetimes[block as usize];
        let own = lifetime.end_within(block, self.lifetimes.len());
        let elsewhere = Lifetime { end: lifetime.end_outside(self.cross), ..*lifetime };
        (own, elsewhere.end_within(block, self.lifetimes.len()).max(own))
    }

    /// Calls `found` with each placed block that conflicts with this one, once. Returns the steps that were made besides.
    pub(super) fn each(&self, block: u32, mut found: impl FnMut(u32)) -> u64 {
        let start = block as usize;
        let (end, elsewhere) = self.ends(block);
        let mut node = self.leaves + start;
        while node > 0 {
            self.used[node].iter().for_each(|&other| found(other));
            node /= 2;
        }
        // CAST: allocations are numbered in 32 bits.
        each_set(&self.bits, start, end, |other| found(other as u32));
        let (group, _) = self.group[start];
        let mut asked = (end - start) / 64 / WORDS;
        let mut node = self.leaves + start;
        while node > 0 {
            for (_, blocks) in self.owned[node].iter().filter(|(owner, _)| *owner != group) {
                asked += 1;
                blocks.iter().for_each(|&other| found(other));
            }
            node /= 2;
        }
        if end < elsewhere {
            for (_, other) in self.groups.iter().enumerate().filter(|(number, _)| *number != group as usize) {
                asked += 1;
                let from = other.allocations.partition_point(|&number| (number as usize) < end);
                let to = other.allocations.partition_point(|&number| (number as usize) < elsewhere);
                each_set(&other.bits, from, to, |at| found(other.allocations[at]));
                asked += (to - from) / 64 / WORDS;
            }
        }
        // CAST: a count of what was looked at.
        asked as u64
    }

    /// Places a block. Returns the steps.
    ///
    /// # Errors
    /// The budget is used up. Some lists have the block then.
    pub(super) fn insert(&mut self, block: u32) -> Result<u64, OverBudget> {
        let start = block as usize;
        let (end, elsewhere) = self.ends(block);
        set(&mut self.bits, start);
        let (used, filled, claim) = (&mut self.used, &mut self.filled, &mut self.claim);
        let mut room = Ok(());
        cover(self.leaves, start, end, |node| {
            // CAST: at most twice the allocations' next power of two, which the builder of a history bounds.
            room =
                room.and_then(|()| claim.push(&mut used[node], block)).and_then(|()| claim.push(filled, node as u32));
        });
        let (group, place) = self.group[start];
        set(&mut self.groups[group as usize].bits, place as usize);
        let (owned, filled) = (&mut self.owned, &mut self.filled_owned);
        let mut asked = 0;
        cover(self.leaves, end, elsewhere, |node| {
            let lists = &mut owned[node];
            let found = lists.iter().position(|(owner, _)| *owner == group);
            asked += found.unwrap_or(lists.len());
            room = room.and_then(|()| {
                let at = match found {
                    Some(at) => at,
                    None => {
                        claim.push(lists, (group, Vec::new()))?;
                        lists.len() - 1
                    }
                };
                claim.push(&mut lists[at].1, block)?;
                // CAST: as above.
                claim.push(filled, node as u32)
            });
        });
        // CAST: a count of what was looked at.
        room.map(|()| asked as u64)
    }
}

/// Calls `node` with the nodes of a segment tree that together are `from..to`.
pub(super) fn cover(leaves: usize, from: usize, to: usize, mut node: impl FnMut(usize)) {
    let (mut from, mut to) = (leaves + from, leaves + to);
    while from < to {
        if from % 2 == 1 {
            node(from);
            from += 1;
        }
        if to % 2 == 1 {
            to -= 1;
            node(to);
        }
        (from, to) = (from / 2, to / 2);
    }
}
