//! Bytes below which there is no plan.

use super::lifetime::{Ends, Group};
use super::{CrossStream, Lifetime};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes below which there is no plan: no allocator that rounds to [`UNIT`](super::UNIT) and keeps to `cross` gets by with
/// less. O(n log n).
///
/// It is the most bytes in blocks of which each two conflict. With one stream, or where streams wait for one another, those
/// are the blocks that are in use at one point of time. A stream whose memory others cannot have yet, or a private pool that
/// is not released, also counts with what it had in use earlier, as long as none of that has gone to others. What is found is
/// a bound, and may not be the highest.
#[must_use]
pub fn lower_bound(lifetimes: &[Lifetime], cross: CrossStream) -> u64 {
    let mut groups: BTreeMap<Group, InUse> = BTreeMap::new();
    let mut ends = Ends::default();
    // Until when groups hold what they had.
    let mut losses: BTreeSet<(u32, Group)> = BTreeSet::new();
    let (mut held, mut highest) = (0, 0);
    // CAST: a history has fewer than 2^32 allocations.
    for (now, one) in (0u32..).zip(lifetimes) {
        let mut changed = BTreeSet::from([one.group(cross)]);
        while let Some(gone) = ends.pop(now) {
            let block = &lifetimes[gone as usize];
            groups.entry(block.group(cross)).or_default().remove(block.bytes(), outside(block, gone, cross));
            changed.insert(block.group(cross));
        }
        groups.entry(one.group(cross)).or_default().add(one.bytes(), outside(one, now, cross));
        ends.add(one, now);
        while let Some((_, group)) = losses.first().copied().filter(|(seen, _)| *seen <= now) {
            losses.pop_first();
            changed.insert(group);
        }
        for group in changed {
            let Some(of) = groups.get_mut(&group) else { continue };
            held -= of.held();
            if let Some(seen) = of.note(now) {
                losses.insert((seen, group));
            }
            held += of.held();
        }
        highest = highest.max(held);
    }
    highest
}

/// The first allocation of another group that can have the memory of allocation `number`.
fn outside(one: &Lifetime, number: u32, cross: CrossStream) -> u32 {
    one.end_outside(cross).max(number + 1)
}

/// What a group has in use, and what it had in use that no other group can have yet.
#[derive(Debug, Default)]
struct InUse {
    bytes: u64,
    /// How many of the blocks in use others can have from which allocation on.
    outside: BTreeMap<u32, u32>,
    /// Bytes that were in use at once, by the first allocation of another group that can have some of them. The later that is,
    /// the fewer: of two the one that is less and sooner gone is left out.
    had: BTreeMap<u32, u64>,
}

impl InUse {
    fn add(&mut self, bytes: u64, outside: u32) {
        self.bytes += bytes;
        *self.outside.entry(outside).or_default() += 1;
    }

    fn remove(&mut self, bytes: u64, outside: u32) {
        self.bytes -= bytes;
        if let Some(count) = self.outside.get_mut(&outside) {
            *count -= 1;
            if *count == 0 {
                self.outside.remove(&outside);
            }
        }
    }

    /// Most bytes that it had in use at once and that no other group can have yet.
    fn held(&self) -> u64 {
        self.had.first_key_value().map_or(0, |(_, bytes)| *bytes)
    }

    /// Takes note of what is in use at allocation `now`, and until when that counts. Forgets what others can have.
    fn note(&mut self, now: u32) -> Option<u32> {
        while self.had.first_key_value().is_some_and(|(seen, _)| *seen <= now) {
            self.had.pop_first();
        }
        let (&seen, _) = self.outside.first_key_value()?;
        if self.had.range(seen..).next().is_some_and(|(_, bytes)| *bytes >= self.bytes) {
            return None;
        }
        while let Some((&sooner, _)) = self.had.range(..=seen).next_back().filter(|(_, bytes)| **bytes <= self.bytes) {
            self.had.remove(&sooner);
        }
        self.had.insert(seen, self.bytes);
        Some(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::super::NEVER;
    use super::*;

    fn block(requested: u64, stream: u32, end: u32, end_elsewhere: u32) -> Lifetime {
        Lifetime { requested, stream, pool: 0, end, end_elsewhere }
    }

    #[test]
    fn a_block_counts_rounded_until_its_end() {
        let lifetimes = [block(1, 0, 2, 2), block(513, 0, 2, 2), block(2000, 0, NEVER, NEVER)];
        assert_eq!(lower_bound(&lifetimes, CrossStream::AfterWait), 2048);
        assert_eq!(lower_bound(&lifetimes[..2], CrossStream::AfterWait), 1536);
        assert_eq!(lower_bound(&[], CrossStream::KnownOrder), 0);
    }

    #[test]
    fn streams_that_know_nothing_of_each_other_add_up() {
        // Each stream's block is gone when the other's comes.
        let blocks = |seen: u32| [block(4096, 0, 1, seen), block(512, 0, 2, 2), block(8192, 1, 3, 3)];
        assert_eq!(lower_bound(&blocks(NEVER), CrossStream::AfterWait), 8192);
        assert_eq!(lower_bound(&blocks(NEVER), CrossStream::KnownOrder), 8192 + 4096);
        // The second stream has seen the first one's block go, but not the one after it.
        assert_eq!(lower_bound(&blocks(2), CrossStream::KnownOrder), 8192);
    }
}
