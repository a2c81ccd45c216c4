//! Parts of a recording that can be planned separately, as rectangles between sections of time.
//!
//! Only times with a local maximum of active bytes matter: after an allocation and before the next free. Blocks active at other
//! times are a subset of these. The remaining times are the *sections*, so conflicting blocks share one.
//!
//! A block that shares a section with every other can be at the bottom: the others move up by its size. So it is placed and left
//! out, and the others may fall apart into stretches of time that no block crosses.

use super::{Lifetime, UNIT};

/// Average number of times that a block is examined before the rest is left as it is: each layer of nested lifetimes takes one.
const LAYERS: usize = 64;

/// A block of a part: active in the sections `from..to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) from: usize,
    pub(super) to: usize,
    /// In multiples of [`UNIT`].
    pub(super) size: u64,
    /// Number of the allocation.
    pub(super) block: u32,
}

/// Blocks that can be placed independently, above those already placed.
#[derive(Debug)]
pub(super) struct Part {
    /// Offset of the part, in units.
    pub(super) base: u64,
    /// In the order in which they start.
    pub(super) items: Vec<Item>,
    pub(super) sections: usize,
}

impl Part {
    /// Number of pairs of a block and a section in which it is active: the memory of a search.
    pub(super) fn pairs(&self) -> usize {
        self.items.iter().map(|item| item.to - item.from).sum()
    }
}

/// The parts of a recording of one group, and the offsets in units of the blocks that are already placed. O(n log n).
pub(super) fn parts(lifetimes: &[Lifetime]) -> (Vec<Part>, Vec<u64>) {
    let mut offsets = vec![0; lifetimes.len()];
    let mut parts = Vec::new();
    // CAST: a recording has fewer than 2^32 allocations.
    let items = (0u32..).zip(lifetimes).filter(|(_, lifetime)| lifetime.bytes() > 0).map(|(block, lifetime)| Item {
        from: block as usize,
        to: lifetime.end_within(block, lifetimes.len()),
        size: lifetime.bytes() / UNIT,
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
                parts.push(Part { base, items: rest, sections });
            } else {
                open.push((above, rest));
            }
        }
    }
    parts.sort_by_key(|part| part.items.first().map(|item| item.block));
    (parts, offsets)
}

/// Divides blocks, ordered by start, at times without active blocks, and renumbers the sections of each stretch.
fn stretches(mut items: Vec<Item>) -> Vec<(Vec<Item>, usize)> {
    // Ends precede starts.
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
