//! Finds placed blocks that conflict with another one, without examining the others, where streams or private pools can reuse
//! their own memory earlier than others' ([`occupied`](super::occupied) is faster where none can).

use super::{CrossStream, Lifetime};
use std::collections::BTreeMap;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Placed blocks, by time.
///
/// Blocks that started before a block and are still active when it starts are in a segment tree over time: each lifetime is in
/// the O(log n) nodes that cover it, and those active at a time are on the path from its leaf to the root. Blocks that start
/// while the block is active are in a bitmap: each allocation is a time of its own.
///
/// Where the order of streams must be known, a block's memory is free for its own stream earlier than for others, and for its own
/// private pool earlier than for others. The time between is in a second tree and is looked up by group.
#[derive(Debug)]
pub(super) struct Placed<'a> {
    lifetimes: &'a [Lifetime],
    cross: CrossStream,
    /// Nodes of the tree whose leaves start at `leaves`: active blocks.
    used: Vec<Vec<u32>>,
    /// Blocks by the time in which only their own group can reuse the memory, for each group with such blocks.
    owned: Vec<Vec<(u32, Vec<u32>)>>,
    leaves: usize,
    /// Nodes that are not empty.
    filled: Vec<u32>,
    filled_owned: Vec<u32>,
    /// Placed allocations, one bit each.
    bits: Vec<u64>,
    /// Numbers of the allocations of each group, and a bit for each.
    groups: Vec<Members>,
    /// The group of each allocation, and its index there.
    group: Vec<(u32, u32)>,
    claim: Claim,
}

/// Words of a bitmap that are examined in the time of a step.
const WORDS: usize = 32;

/// Bytes for each allocation besides the lists of the trees, with its entry in the list of a group.
const ALLOCATION: usize = 32;
/// Bytes of a group.
const GROUP: usize = 160;

#[derive(Debug, Default)]
struct Members {
    allocations: Vec<u32>,
    bits: Vec<u64>,
}

/// Calls `visit` with each set bit in `from..to`.
fn each_set(bits: &[u64], from: usize, to: usize, mut visit: impl FnMut(usize)) {
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
            visit(word * 64 + left.trailing_zeros() as usize);
            left &= left - 1;
        }
    }
}

fn set(bits: &mut [u64], at: usize) {
    bits[at / 64] |= 1 << (at % 64);
}

impl<'a> Placed<'a> {
    /// Without placed blocks.
    ///
    /// # Errors
    /// The budget has no room for the empty structure.
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
        // CAST: a recording has fewer than 2^32 allocations.
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

    /// Removes all blocks. Keeps the memory.
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
        let own_end = lifetime.end_within(block, self.lifetimes.len());
        let elsewhere = Lifetime { end: lifetime.end_outside(self.cross), ..*lifetime };
        (own_end, elsewhere.end_within(block, self.lifetimes.len()).max(own_end))
    }

    /// Calls `visit` with each placed block that conflicts with this one, once. Returns the number of additional steps.
    pub(super) fn each(&self, block: u32, mut visit: impl FnMut(u32)) -> u64 {
        let start = block as usize;
        let (end, elsewhere) = self.ends(block);
        let mut node = self.leaves + start;
        while node > 0 {
            self.used[node].iter().for_each(|&other| visit(other));
            node /= 2;
        }
        // CAST: allocations are numbered in 32 bits.
        each_set(&self.bits, start, end, |other| visit(other as u32));
        let (group, _) = self.group[start];
        let mut asked = (end - start) / 64 / WORDS;
        let mut node = self.leaves + start;
        while node > 0 {
            for (_, blocks) in self.owned[node].iter().filter(|(owner, _)| *owner != group) {
                asked += 1;
                blocks.iter().for_each(|&other| visit(other));
            }
            node /= 2;
        }
        if end < elsewhere {
            for (_, other) in self.groups.iter().enumerate().filter(|(number, _)| *number != group as usize) {
                asked += 1;
                let from = other.allocations.partition_point(|&number| (number as usize) < end);
                let to = other.allocations.partition_point(|&number| (number as usize) < elsewhere);
                each_set(&other.bits, from, to, |at| visit(other.allocations[at]));
                asked += (to - from) / 64 / WORDS;
            }
        }
        // CAST: a count of examined items.
        asked as u64
    }

    /// Places a block. Returns the steps.
    ///
    /// # Errors
    /// The budget is used up. Some lists contain the block then.
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
        let (group, index) = self.group[start];
        set(&mut self.groups[group as usize].bits, index as usize);
        let (owned, filled) = (&mut self.owned, &mut self.filled_owned);
        let mut asked = 0;
        cover(self.leaves, end, elsewhere, |node| {
            let lists = &mut owned[node];
            let index = lists.iter().position(|(owner, _)| *owner == group);
            asked += index.unwrap_or(lists.len());
            room = room.and_then(|()| {
                let at = match index {
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
        // CAST: a count of examined items.
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
