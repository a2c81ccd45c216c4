//! Room between blocks.

use crate::steps;

/// Blocks in address order, by start and end; those that touch or overlap are one.
#[derive(Debug)]
pub(super) struct Gaps(Vec<(u64, u64)>);

impl Gaps {
    /// The gaps between blocks given by start and end, in any order. O(n log n).
    pub(super) fn between(blocks: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut sorted: Vec<(u64, u64)> = blocks.collect();
        sorted.sort_unstable();
        let mut blocks: Vec<(u64, u64)> = Vec::with_capacity(sorted.len());
        for (start, end) in sorted {
            steps::count(1);
            match blocks.last_mut() {
                Some(before) if start <= before.1 => before.1 = before.1.max(end),
                _ => blocks.push((start, end)),
            }
        }
        Self(blocks)
    }

    /// The largest part of `start..end` in which no block lies. O(log n), and a step for each block in it.
    pub(super) fn largest_in(&self, start: u64, end: u64) -> u64 {
        let first = self.0.partition_point(|block| block.1 <= start);
        let last = self.0.partition_point(|block| block.0 < end).max(first);
        let (mut at, mut largest) = (start, 0);
        for block in &self.0[first..last] {
            steps::count(1);
            largest = largest.max(block.0.saturating_sub(at));
            at = block.1;
        }
        largest.max(end.saturating_sub(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest gap, found by looking at every address.
    fn slow(blocks: &[(u64, u64)], start: u64, end: u64) -> u64 {
        let free = |at: u64| !blocks.iter().any(|block| (block.0..block.1).contains(&at));
        let (mut run, mut largest) = (0, 0);
        for at in start..end {
            run = if free(at) { run + 1 } else { 0 };
            largest = largest.max(run);
        }
        largest
    }

    #[test]
    fn the_largest_gap_of_every_range_is_found() {
        let shapes: [&[(u64, u64)]; 6] = [
            &[],
            &[(3, 5)],
            &[(9, 12), (2, 3)],
            &[(1, 4), (3, 9), (9, 10), (15, 16)],
            &[(0, 1), (2, 3), (5, 6), (9, 10), (14, 15), (16, 18), (17, 20)],
            &[(4, 20), (5, 6), (7, 8), (1, 2)],
        ];
        for blocks in shapes {
            let gaps = Gaps::between(blocks.iter().copied());
            for start in 0..22 {
                for end in start..24 {
                    assert_eq!(gaps.largest_in(start, end), slow(blocks, start, end), "{blocks:?} {start}..{end}");
                }
            }
        }
    }
}
