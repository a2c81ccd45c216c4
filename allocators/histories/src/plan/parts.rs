//! The parts of a history that can be planned one by one, as rectangles between sections of time.
//!
//! Only points of time matter at which as much is in use as can be: after an allocation and before the next free. What is in
//! use elsewhere is a part of that. These *sections* are what remains of time, so blocks that conflict share one.
//!
//! A block that shares a section with every other can lie at the bottom: what lies beneath it moves up by its size. So it
//! is placed and left out, and what remains may fall apart into stretches of time that no block crosses.

use super::{Lifetime, UNIT};

/// How often a block is looked at, on average, before the rest is left as it is: nested lives are one layer each.
const LAYERS: usize = 64;

/// A block of a part: in use in the sections `from..to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) from: usize,
    pub(super) to: usize,
    /// In multiples of [`UNIT`].
    pub(super) size: u64,
    /// Number of the allocation.
    pub(super) block: u32,
}

/// Blocks that can be placed without a look at others, above what lies beneath them.
#[derive(Debug)]
pub(super) struct Part {
    /// Where the part begins, in units.
    pub(super) base: u64,
    /// In the order in which they start.
    pub(super) items: Vec<Item>,
    pub(super) sections: usize,
}

impl Part {
    /// How many pairs of a block and a section that it is in use in there are: the memory that a search needs.
    pub(super) fn pairs(&self) -> usize {
        self.items.iter().map(|item| item.to - item.from).sum()
    }
}

/// The parts of a history of one group, and the offsets in units of the blocks that are placed already. O(n log n).
pub(super) fn parts(lifetimes: &[Lifetime]) -> (Vec<Part>, Vec<u64>) {
    let mut offsets = vec![0; lifetimes.len()];
    let mut found = Vec::new();
    // CAST: a history has fewer than 2^32 allocations.
    let items = (0u32..).zip(lifetimes).filter(|(_, one)| one.bytes() > 0).map(|(block, one)| Item {
        from: block as usize,
        to: one.end_within(block, lifetimes.len()),
        size: one.bytes() / UNIT,
        block,
    });
    let mut open = vec![(0, items.collect())];
    let mut looked = 0;
    while let Some((base, items)) = open.pop() {
        for (items, sections) in stretches(items) {
            let mut above = base;
            looked += items.len();
            let leave = looked > LAYERS * lifetimes.len();
            let (through, rest): (Vec<Item>, Vec<Item>) =
                items.into_iter().partition(|item| item.from == 0 && item.to == sections && !leave);
            for item in &through {
                offsets[item.block as usize] = above;
                above += item.size;
            }
            if through.is_empty() {
                found.push(Part { base, items: rest, sections });
            } else {
                open.push((above, rest));
            }
        }
    }
    found.sort_by_key(|part| part.items.first().map(|item| item.block));
    (found, offsets)
}

/// Divides blocks, in the order of their starts, where none is in use, and counts the sections of each stretch of time anew.
fn stretches(mut items: Vec<Item>) -> Vec<(Vec<Item>, usize)> {
    // What ends goes before what starts.
    let starts = items.iter().enumerate().map(|(at, item)| (item.from, true, at));
    let mut events: Vec<(usize, bool, usize)> =
        starts.chain(items.iter().enumerate().map(|(at, item)| (item.to, false, at))).collect();
    events.sort_unstable();
    let (mut section, mut in_use, mut started) = (0, 0_usize, false);
    let (mut first, mut ends) = (0, Vec::new());
    for (_, starts, at) in events {
        if starts {
            items[at].from = section;
            (in_use, started) = (in_use + 1, true);
            first = first.max(at + 1);
            continue;
        }
        section += usize::from(started);
        started = false;
        items[at].to = section;
        in_use -= 1;
        if in_use == 0 {
            ends.push((first, section));
            section = 0;
        }
    }
    let mut items = items.into_iter();
    let mut before = 0;
    let divided = ends.into_iter().map(|(end, sections)| {
        let stretch = items.by_ref().take(end - before).collect();
        before = end;
        (stretch, sections)
    });
    divided.collect()
}
