//! The plan for every recording: blocks are placed in recorded order, by best fit.

use super::lifetime::{Ends, Group};
use super::{CrossStream, Lifetime};
use std::collections::{BTreeMap, BTreeSet};

/// One address space with coalescing free ranges.
#[derive(Debug, Default)]
struct Space {
    /// Bytes of free ranges by offset.
    by_offset: BTreeMap<u64, u64>,
    /// (bytes, offset) of the same.
    by_bytes: BTreeSet<(u64, u64)>,
    /// Its end.
    end: u64,
}

impl Space {
    fn remove(&mut self, offset: u64, bytes: u64) {
        self.by_offset.remove(&offset);
        self.by_bytes.remove(&(bytes, offset));
    }

    fn insert(&mut self, offset: u64, bytes: u64) {
        self.by_offset.insert(offset, bytes);
        self.by_bytes.insert((bytes, offset));
    }

    /// The smallest free range that fits, or the end of the space, which grows by the missing bytes.
    fn take(&mut self, bytes: u64) -> u64 {
        let fit = self.by_bytes.range((bytes, 0)..).next().copied();
        let last = || {
            self.by_offset.last_key_value().map(|(&at, &free)| (free, at)).filter(|(free, at)| at + free == self.end)
        };
        let (free, at) = fit.or_else(last).unwrap_or((0, self.end));
        if free > 0 {
            self.remove(at, free);
        }
        if free > bytes {
            self.insert(at + bytes, free - bytes);
        }
        self.end = self.end.max(at + bytes);
        at
    }

    fn give(&mut self, mut offset: u64, mut bytes: u64) {
        if let Some((&before, &free)) =
            self.by_offset.range(..offset).next_back().filter(|(at, free)| **at + **free == offset)
        {
            self.remove(before, free);
            (offset, bytes) = (before, bytes + free);
        }
        if let Some(&free) = self.by_offset.get(&(offset + bytes)) {
            self.remove(offset + bytes, free);
            bytes += free;
        }
        self.insert(offset, bytes);
    }
}

/// Offsets of the blocks of a kind, and the end of each group's space. O(n log n).
pub(super) fn spaces(
    lifetimes: &[Lifetime],
    cross: CrossStream,
    kind: impl Fn(&Lifetime) -> bool,
) -> (Vec<u64>, BTreeMap<Group, u64>) {
    let mut spaces: BTreeMap<Group, Space> = BTreeMap::new();
    let mut offsets = vec![0; lifetimes.len()];
    let mut ends = Ends::default();
    // CAST: a recording has fewer than 2^32 allocations.
    for (now, lifetime) in (0u32..).zip(lifetimes).filter(|(_, lifetime)| kind(lifetime)) {
        while let Some(ended) = ends.pop(now) {
            let block = &lifetimes[ended as usize];
            spaces.entry(block.group(cross)).or_default().give(offsets[ended as usize], block.bytes());
        }
        offsets[now as usize] = spaces.entry(lifetime.group(cross)).or_default().take(lifetime.bytes());
        ends.add(lifetime, now);
    }
    (offsets, spaces.into_iter().map(|(number, space)| (number, space.end)).collect())
}

/// Offsets, and their total size: the spaces are consecutive.
pub(super) fn best_fit(lifetimes: &[Lifetime], cross: CrossStream) -> (Vec<u64>, u64) {
    let (mut offsets, ends) = spaces(lifetimes, cross, |_| true);
    let mut base = 0;
    let mut bases = BTreeMap::new();
    for (number, end) in ends {
        bases.insert(number, base);
        base += end;
    }
    for (offset, lifetime) in offsets.iter_mut().zip(lifetimes) {
        *offset += bases[&lifetime.group(cross)];
    }
    (offsets, base)
}
