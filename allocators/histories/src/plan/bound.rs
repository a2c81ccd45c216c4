//! Lower bound on the size of a plan.

use super::lifetime::{Ends, Group};
use super::{CrossStream, Lifetime};
use std::collections::{BTreeMap, BTreeSet};

/// Lower bound on the size of a plan: no allocator that rounds to [`UNIT`](super::UNIT) and respects `cross` needs less. O(n log
/// n).
///
/// It is the maximum of the bytes in blocks that all conflict with each other. With one stream, or where streams wait for one
/// another, these are the blocks that are active at one time. A stream whose memory others cannot have yet, or a private pool
/// that is not released, also counts with its earlier active bytes, as long as none of them can have gone to others. The result
/// is a bound, and possibly not the highest.
#[must_use]
pub fn lower_bound(lifetimes: &[Lifetime], cross: CrossStream) -> u64 {
    let mut groups: BTreeMap<Group, InUse> = BTreeMap::new();
    let mut ends = Ends::default();
    // Times until which groups keep their earlier memory.
    let mut losses: BTreeSet<(u32, Group)> = BTreeSet::new();
    let (mut conflicting, mut highest) = (0, 0);
    // CAST: a recording has fewer than 2^32 allocations.
    for (now, lifetime) in (0u32..).zip(lifetimes) {
        let mut changed = BTreeSet::from([lifetime.group(cross)]);
        while let Some(ended) = ends.pop(now) {
            let block = &lifetimes[ended as usize];
            groups.entry(block.group(cross)).or_default().remove(block.bytes(), outside(block, ended, cross));
            changed.insert(block.group(cross));
        }
        groups.entry(lifetime.group(cross)).or_default().add(lifetime.bytes(), outside(lifetime, now, cross));
        ends.add(lifetime, now);
        while let Some((_, group)) = losses.first().copied().filter(|(known, _)| *known <= now) {
            losses.pop_first();
            changed.insert(group);
        }
        for group in changed {
            let Some(of) = groups.get_mut(&group) else { continue };
            conflicting -= of.conflicting();
            if let Some(known) = of.note(now) {
                losses.insert((known, group));
            }
            conflicting += of.conflicting();
        }
        highest = highest.max(conflicting);
    }
    highest
}

/// The first allocation of another group that can have the memory of allocation `number`.
fn outside(lifetime: &Lifetime, number: u32, cross: CrossStream) -> u32 {
    lifetime.end_outside(cross).max(number + 1)
}

/// Active bytes of a group, and its earlier active bytes that no other group can have yet.
#[derive(Debug, Default)]
struct InUse {
    bytes: u64,
    /// Bytes of active blocks, by the allocation from which on others can have them.
    outside: BTreeMap<u32, u32>,
    /// Simultaneously active bytes, by the first allocation of another group that can have some of them. The later that is, the
    /// fewer: of two entries the smaller and earlier one is left out.
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

    /// Maximum simultaneously active bytes that no other group can have yet.
    fn conflicting(&self) -> u64 {
        self.had.first_key_value().map_or(0, |(_, bytes)| *bytes)
    }

    /// Records the active bytes at allocation `now`, and returns until when they count. Forgets memory that others can have.
    fn note(&mut self, now: u32) -> Option<u32> {
        while self.had.first_key_value().is_some_and(|(known, _)| *known <= now) {
            self.had.pop_first();
        }
        let (&known, _) = self.outside.first_key_value()?;
        if self.had.range(known..).next().is_some_and(|(_, bytes)| *bytes >= self.bytes) {
            return None;
        }
        while let Some((&sooner, _)) = self.had.range(..=known).next_back().filter(|(_, bytes)| **bytes <= self.bytes) {
            self.had.remove(&sooner);
        }
        self.had.insert(known, self.bytes);
        Some(known)
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
        // Each stream's block is free when the other's is allocated.
        let blocks = |known: u32| [block(4096, 0, 1, known), block(512, 0, 2, 2), block(8192, 1, 3, 3)];
        assert_eq!(lower_bound(&blocks(NEVER), CrossStream::AfterWait), 8192);
        assert_eq!(lower_bound(&blocks(NEVER), CrossStream::KnownOrder), 8192 + 4096);
        // The second stream knows that the first one's block is free, but not the one after it.
        assert_eq!(lower_bound(&blocks(2), CrossStream::KnownOrder), 8192);
    }
}
