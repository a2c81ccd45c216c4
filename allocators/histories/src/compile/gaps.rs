//! Room between blocks.

use crate::steps;

/// Blocks in address order, and how large the largest gap between any two of them is.
#[derive(Debug)]
pub(super) struct Gaps {
    /// Starts and ends; blocks that touch or overlap are one.
    blocks: Vec<(u64, u64)>,
    /// A tree of maxima: gap `i`, which lies behind block `i`, is leaf `gaps + i`, and node `i` is the larger of nodes
    /// `2 i` and `2 i + 1`.
    largest: Vec<u64>,
}

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
        let gaps = blocks.len().saturating_sub(1);
        let mut largest = vec![0; gaps];
        largest.extend(blocks.windows(2).map(|pair| pair[1].0 - pair[0].1));
        for node in (1..gaps).rev() {
            largest[node] = largest[2 * node].max(largest[2 * node + 1]);
        }
        Self { blocks, largest }
    }

    /// The largest part of `start..end` in which no block lies. O(log n).
    pub(super) fn largest_in(&self, start: u64, end: u64) -> u64 {
        let first = self.blocks.partition_point(|block| block.1 <= start);
        let last = self.blocks.partition_point(|block| block.0 < end);
        if first >= last {
            return end.saturating_sub(start);
        }
        let before = self.blocks[first].0.saturating_sub(start);
        let behind = end.saturating_sub(self.blocks[last - 1].1);
        before.max(behind).max(self.largest_of(first, last - 1))
    }

    /// The largest of gaps `first..last`.
    fn largest_of(&self, first: usize, last: usize) -> u64 {
        let gaps = self.largest.len() / 2;
        let (mut first, mut last, mut largest) = (first + gaps, last + gaps, 0);
        while first < last {
            steps::count(1);
            if !first.is_multiple_of(2) {
                largest = largest.max(self.largest[first]);
                first += 1;
            }
            if !last.is_multiple_of(2) {
                last -= 1;
                largest = largest.max(self.largest[last]);
            }
            first /= 2;
            last /= 2;
        }
        largest
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
