//! Counts of one stream's blocks: number and bytes of live blocks, requested bytes, and free parts of segments.
#![forbid(unsafe_code)]

use crate::contract::{Ledger, PoolKind};

/// The counted quantities of live blocks and of free blocks that are not releasable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Quantity {
    /// Live blocks.
    Blocks,
    /// Their bytes, after rounding.
    Bytes,
    /// Requested bytes in them.
    Requested,
    /// Free blocks of partly used segments.
    Split,
    /// Their bytes.
    SplitBytes,
}

/// Number of quantities.
pub(super) const QUANTITIES: usize = 5;

/// The blocks that a value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Scope {
    /// The small pool's.
    Small,
    /// The large pool's.
    Large,
    /// All.
    All,
}

impl From<PoolKind> for Scope {
    fn from(pool: PoolKind) -> Self {
        match pool {
            PoolKind::Small => Scope::Small,
            PoolKind::Large => Scope::Large,
        }
    }
}

/// One value for each scope and quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Figures([[u64; QUANTITIES]; 3]);

impl Figures {
    /// The value.
    #[must_use]
    #[inline]
    pub(super) fn get(&self, scope: Scope, quantity: Quantity) -> u64 {
        self.0[scope as usize][quantity as usize]
    }

    #[inline]
    fn at(&mut self, scope: Scope, quantity: Quantity) -> &mut u64 {
        &mut self.0[scope as usize][quantity as usize]
    }

    /// Combines two sets value by value.
    #[must_use]
    pub(super) fn zip(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let mut out = *self;
        for (row, others) in out.0.iter_mut().zip(&other.0) {
            for (figure, other) in row.iter_mut().zip(others) {
                *figure = combine(*figure, *other);
            }
        }
        out
    }

    /// Adds a block's values to the quantities of live blocks, in its pool and over all.
    pub(super) fn add_block(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        for scope in [pool.into(), Scope::All] {
            *self.at(scope, Quantity::Blocks) += 1;
            *self.at(scope, Quantity::Bytes) += bytes;
            *self.at(scope, Quantity::Requested) += requested;
        }
    }

    /// Subtracts a block's values.
    pub(super) fn remove_block(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        for scope in [pool.into(), Scope::All] {
            *self.at(scope, Quantity::Blocks) -= 1;
            *self.at(scope, Quantity::Bytes) -= bytes;
            *self.at(scope, Quantity::Requested) -= requested;
        }
    }
}

/// Level and peak of a quantity.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    current: u64,
    peak: u64,
}

impl Level {
    /// Adds a number of either sign, as its two's complement.
    #[inline(always)]
    fn change(&mut self, amount: u64) {
        self.current = self.current.wrapping_add(amount);
        self.peak = self.peak.max(self.current);
    }

    #[inline(always)]
    fn decrease(&mut self, amount: u64) {
        debug_assert!(self.current >= amount, "a level should not go below zero");
        self.current -= amount;
    }
}

/// Levels of one stream's blocks with their peaks and the sums of all increases.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    /// By scope.
    levels: [[Level; QUANTITIES]; 3],
    /// By pool.
    increases: [[u64; QUANTITIES]; 2],
    /// Bytes of the segments.
    segments: u64,
    /// Bytes of the segments that are one free block.
    idle: u64,
    /// Bytes of deferred frees.
    pending: u64,
}

impl Tally {
    #[inline(always)]
    fn increase(&mut self, pool: PoolKind, quantity: Quantity, amount: u64) {
        self.increases[pool as usize][quantity as usize] += amount;
        self.levels[pool as usize][quantity as usize].change(amount);
        self.levels[Scope::All as usize][quantity as usize].change(amount);
    }

    #[inline(always)]
    fn decrease(&mut self, pool: PoolKind, quantity: Quantity, amount: u64) {
        self.levels[pool as usize][quantity as usize].decrease(amount);
        self.levels[Scope::All as usize][quantity as usize].decrease(amount);
    }

    /// A block was allocated.
    #[inline(always)]
    pub(super) fn hand_out(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.increase(pool, Quantity::Blocks, 1);
        self.increase(pool, Quantity::Bytes, bytes);
        self.increase(pool, Quantity::Requested, requested);
    }

    /// A block was freed by the client.
    #[inline(always)]
    pub(super) fn take_back(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.decrease(pool, Quantity::Blocks, 1);
        self.decrease(pool, Quantity::Bytes, bytes);
        self.decrease(pool, Quantity::Requested, requested);
    }

    /// A free block became a part of a segment in use.
    #[inline(always)]
    pub(super) fn add_split(&mut self, pool: PoolKind, bytes: u64) {
        self.increase(pool, Quantity::Split, 1);
        self.increase(pool, Quantity::SplitBytes, bytes);
    }

    /// A block of `bytes` in a segment in use became free, and was coalesced with `joined` adjacent free parts, at most two.
    #[inline(always)]
    pub(super) fn join_splits(&mut self, pool: PoolKind, bytes: u64, joined: u64) {
        // The change in total, by the bytes that were not free before, as PyTorch counts it.
        self.increases[pool as usize][Quantity::Split as usize] += u64::from(joined == 0);
        for scope in [pool.into(), Scope::All] {
            self.levels[scope as usize][Quantity::Split as usize].change(1u64.wrapping_sub(joined));
        }
        self.increase(pool, Quantity::SplitBytes, bytes);
    }

    /// Free parts of a segment in use are no longer free, or no longer parts.
    #[inline(always)]
    pub(super) fn remove_splits(&mut self, pool: PoolKind, parts: u64, bytes: u64) {
        self.decrease(pool, Quantity::Split, parts);
        self.decrease(pool, Quantity::SplitBytes, bytes);
    }

    /// A free part of a segment in use became smaller by `bytes`.
    #[inline(always)]
    pub(super) fn shrink_split(&mut self, pool: PoolKind, bytes: u64) {
        self.decrease(pool, Quantity::SplitBytes, bytes);
    }

    /// A segment was added, as one free block.
    pub(super) fn add_segment(&mut self, bytes: u64) {
        self.segments += bytes;
        self.idle += bytes;
    }

    /// A segment was removed, as one free block.
    pub(super) fn remove_segment(&mut self, bytes: u64) {
        self.segments -= bytes;
        self.idle -= bytes;
    }

    /// A block that was a whole segment was split or allocated.
    #[inline(always)]
    pub(super) fn begin_segment(&mut self, bytes: u64) {
        self.idle -= bytes;
    }

    /// A segment became one free block.
    #[inline(always)]
    pub(super) fn end_segment(&mut self, bytes: u64) {
        self.idle += bytes;
    }

    /// A freed block waits for other streams.
    pub(super) fn add_pending(&mut self, bytes: u64) {
        self.pending += bytes;
    }

    /// A block's wait has completed.
    pub(super) fn remove_pending(&mut self, bytes: u64) {
        self.pending -= bytes;
    }

    /// The breakdown of the segments' bytes, for a request on the stream itself (`own`) or on another one.
    #[must_use]
    pub(super) fn ledger(&self, own: bool) -> Ledger {
        let level = |quantity: Quantity| self.levels[Scope::All as usize][quantity as usize].current;
        let (held, requested) = (level(Quantity::Bytes), level(Quantity::Requested));
        let free = self.segments - held - self.pending;
        debug_assert_eq!(free, self.idle + level(Quantity::SplitBytes), "a free block is a segment or a part of one");
        let (soft, hard, stream) = if own { (self.idle, free - self.idle, 0) } else { (0, 0, free) };
        let (internal, pending) = (held - requested, self.pending);
        Ledger { reserved: self.segments, requested, internal, pending, soft, hard, stream, ..Ledger::default() }
    }

    /// Current levels.
    #[must_use]
    pub(super) fn current(&self) -> Figures {
        Figures(self.levels.map(|levels| levels.map(|level| level.current)))
    }

    /// Highest levels since the last [`restart_peaks`](Self::restart_peaks).
    #[must_use]
    pub(super) fn peak(&self) -> Figures {
        Figures(self.levels.map(|levels| levels.map(|level| level.peak)))
    }

    /// Sums of all increases ("allocated" in PyTorch's keys).
    #[must_use]
    pub(super) fn increases(&self) -> Figures {
        let [small, large] = self.increases;
        let mut all = small;
        all.iter_mut().zip(large).for_each(|(sum, figure)| *sum += figure);
        // In the order of the scopes.
        Figures([small, large, all])
    }

    /// Restarts the peaks from the levels.
    pub(super) fn restart_peaks(&mut self) {
        for level in self.levels.iter_mut().flatten() {
            level.peak = level.current;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Levels and peaks, each changed independently.
    #[derive(Default)]
    struct Naive {
        levels: [[u64; QUANTITIES]; 3],
        peaks: [[u64; QUANTITIES]; 3],
    }

    impl Naive {
        fn change(&mut self, pool: PoolKind, quantity: Quantity, up: u64, down: u64) {
            for scope in [Scope::from(pool), Scope::All] {
                let level = &mut self.levels[scope as usize][quantity as usize];
                *level = *level + up - down;
                let peak = &mut self.peaks[scope as usize][quantity as usize];
                *peak = *level.max(peak);
            }
        }
    }

    /// Blocks are allocated and freed in both pools: few at first, then alternately many and few, at times equally many.
    #[test]
    fn peaks_are_those_of_every_moment() {
        let mut seed = 5u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 11) % below
        };
        let (mut tally, mut naive) = (Tally::default(), Naive::default());
        let mut live: Vec<(PoolKind, u64, u64)> = Vec::new();
        let mut parts = [0u64; 2];
        // Miri is some thousand times slower, and there is no unsafe code in here.
        let steps: u64 = if cfg!(miri) { 2_000 } else { 200_000 };
        for step in 0..steps {
            let most = [20, 64, 200][(step / (steps / 20) % 3) as usize];
            if live.len() as u64 >= most || (!live.is_empty() && random(100) < 45) {
                let (pool, bytes, requested) = live.swap_remove(random(live.len() as u64) as usize);
                tally.take_back(pool, bytes, requested);
                naive.change(pool, Quantity::Blocks, 0, 1);
                naive.change(pool, Quantity::Bytes, 0, bytes);
                naive.change(pool, Quantity::Requested, 0, requested);
                let joined = random(3).min(parts[pool as usize]);
                parts[pool as usize] = parts[pool as usize] + 1 - joined;
                tally.join_splits(pool, bytes, joined);
                naive.change(pool, Quantity::Split, u64::from(joined == 0), joined.saturating_sub(1));
                naive.change(pool, Quantity::SplitBytes, bytes, 0);
            } else {
                let pool = if random(4) == 0 { PoolKind::Large } else { PoolKind::Small };
                let most = 1 << (8 + random(12));
                let requested = 1 + random(most);
                let bytes = requested.next_multiple_of(512);
                tally.hand_out(pool, bytes, requested);
                naive.change(pool, Quantity::Blocks, 1, 0);
                naive.change(pool, Quantity::Bytes, bytes, 0);
                naive.change(pool, Quantity::Requested, requested, 0);
                live.push((pool, bytes, requested));
                let free = naive.levels[pool as usize][Quantity::SplitBytes as usize];
                if free >= bytes && random(2) == 0 {
                    tally.shrink_split(pool, bytes);
                    naive.change(pool, Quantity::SplitBytes, 0, bytes);
                } else if parts[pool as usize] > 0 {
                    let bytes = random(free + 1);
                    parts[pool as usize] -= 1;
                    tally.remove_splits(pool, 1, bytes);
                    naive.change(pool, Quantity::Split, 0, 1);
                    naive.change(pool, Quantity::SplitBytes, 0, bytes);
                } else {
                    parts[pool as usize] += 1;
                    tally.add_split(pool, bytes);
                    naive.change(pool, Quantity::Split, 1, 0);
                    naive.change(pool, Quantity::SplitBytes, bytes, 0);
                }
            }
            if random(30_000) == 0 {
                tally.restart_peaks();
                naive.peaks = naive.levels;
            }
            assert_eq!(tally.current(), Figures(naive.levels), "step {step}");
            assert_eq!(tally.peak(), Figures(naive.peaks), "step {step}");
        }
    }
}
