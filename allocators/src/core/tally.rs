//! What one stream's blocks add up to, counted where it happens and added up over the streams when asked.

use crate::stats::PoolKind;

/// What is counted, of the blocks that the client holds and of the free blocks that cannot go back to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Quantity {
    /// Blocks that the client holds.
    Blocks,
    /// Their bytes, after rounding.
    Bytes,
    /// The bytes that the client asked for in them.
    Requested,
    /// Free blocks of partly used segments.
    Split,
    /// Their bytes.
    SplitBytes,
}

/// Number of quantities.
pub const QUANTITIES: usize = 5;

/// Which blocks a figure is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Scope {
    /// The small pool's.
    Small,
    /// The large pool's.
    Large,
    /// All.
    All,
}

impl Scope {
    /// Every scope.
    pub const EACH: [Scope; 3] = [Scope::Small, Scope::Large, Scope::All];
}

impl From<PoolKind> for Scope {
    fn from(pool: PoolKind) -> Self {
        match pool {
            PoolKind::Small => Scope::Small,
            PoolKind::Large => Scope::Large,
        }
    }
}

/// One figure for each scope and quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures([[u64; QUANTITIES]; 3]);

impl Figures {
    /// The figure.
    #[must_use]
    #[inline]
    pub fn get(&self, scope: Scope, quantity: Quantity) -> u64 {
        self.0[scope as usize][quantity as usize]
    }

    #[inline]
    fn at(&mut self, scope: Scope, quantity: Quantity) -> &mut u64 {
        &mut self.0[scope as usize][quantity as usize]
    }

    /// Combines two sets figure by figure.
    #[must_use]
    pub fn zip(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let mut out = *self;
        for (row, others) in out.0.iter_mut().zip(&other.0) {
            for (figure, other) in row.iter_mut().zip(others) {
                *figure = combine(*figure, *other);
            }
        }
        out
    }

    /// Adds a block's figures to the quantities of held blocks, in its pool and over all.
    pub fn add_block(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        for scope in [pool.into(), Scope::All] {
            *self.at(scope, Quantity::Blocks) += 1;
            *self.at(scope, Quantity::Bytes) += bytes;
            *self.at(scope, Quantity::Requested) += requested;
        }
    }

    /// Takes a block's figures away.
    pub fn remove_block(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        for scope in [pool.into(), Scope::All] {
            *self.at(scope, Quantity::Blocks) -= 1;
            *self.at(scope, Quantity::Bytes) -= bytes;
            *self.at(scope, Quantity::Requested) -= requested;
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Level {
    current: u64,
    peak: u64,
    increases: u64,
}

/// Levels of one stream's blocks with their peaks and the sum of all increases.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pools: [[Level; QUANTITIES]; 2],
    /// Peaks of the pools' sum.
    peak: [u64; QUANTITIES],
}

impl Tally {
    #[inline(always)]
    fn increase(&mut self, pool: PoolKind, quantity: Quantity, amount: u64) {
        let other = self.pools[1 - pool as usize][quantity as usize].current;
        let own = &mut self.pools[pool as usize][quantity as usize];
        let peak = &mut self.peak[quantity as usize];
        own.current += amount;
        own.increases += amount;
        let all = own.current + other;
        if own.current > own.peak {
            own.peak = own.current;
        }
        if all > *peak {
            *peak = all;
        }
    }

    #[inline(always)]
    fn decrease(&mut self, pool: PoolKind, quantity: Quantity, amount: u64) {
        let level = &mut self.pools[pool as usize][quantity as usize];
        debug_assert!(level.current >= amount, "a level should not go below zero");
        level.current = level.current.wrapping_sub(amount);
    }

    /// A block was handed out.
    #[inline(always)]
    pub fn hand_out(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.increase(pool, Quantity::Blocks, 1);
        self.increase(pool, Quantity::Bytes, bytes);
        self.increase(pool, Quantity::Requested, requested);
    }

    /// A block is no longer the client's.
    #[inline(always)]
    pub fn take_back(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.decrease(pool, Quantity::Blocks, 1);
        self.decrease(pool, Quantity::Bytes, bytes);
        self.decrease(pool, Quantity::Requested, requested);
    }

    /// A free block became a part of a segment in use.
    #[inline(always)]
    pub fn add_split(&mut self, pool: PoolKind, bytes: u64) {
        self.increase(pool, Quantity::Split, 1);
        self.increase(pool, Quantity::SplitBytes, bytes);
    }

    /// A free part of a segment in use is no longer free, or no longer a part.
    #[inline(always)]
    pub fn remove_split(&mut self, pool: PoolKind, bytes: u64) {
        self.decrease(pool, Quantity::Split, 1);
        self.decrease(pool, Quantity::SplitBytes, bytes);
    }

    /// A free part of a segment in use became larger by `bytes`.
    #[inline(always)]
    pub fn grow_split(&mut self, pool: PoolKind, bytes: u64) {
        self.increase(pool, Quantity::SplitBytes, bytes);
    }

    /// A free part of a segment in use became smaller by `bytes`.
    #[inline(always)]
    pub fn shrink_split(&mut self, pool: PoolKind, bytes: u64) {
        self.decrease(pool, Quantity::SplitBytes, bytes);
    }

    fn figures(&self, of: impl Fn(&Level) -> u64, all: impl Fn(usize, u64) -> u64) -> Figures {
        let mut out = Figures::default();
        for quantity in 0..QUANTITIES {
            let [small, large] = [0, 1].map(|pool: usize| of(&self.pools[pool][quantity]));
            for (scope, figure) in
                [(Scope::Small, small), (Scope::Large, large), (Scope::All, all(quantity, small + large))]
            {
                out.0[scope as usize][quantity] = figure;
            }
        }
        out
    }

    /// Levels now.
    #[must_use]
    pub fn current(&self) -> Figures {
        self.figures(|level| level.current, |_, sum| sum)
    }

    /// Highest levels since the last [`restart_peaks`](Self::restart_peaks).
    #[must_use]
    pub fn peak(&self) -> Figures {
        self.figures(|level| level.peak, |quantity, _| self.peak[quantity])
    }

    /// Sums of all increases ("allocated" in PyTorch's keys).
    #[must_use]
    pub fn increases(&self) -> Figures {
        self.figures(|level| level.increases, |_, sum| sum)
    }

    /// Lets the peaks start again from the levels.
    pub fn restart_peaks(&mut self) {
        for level in self.pools.iter_mut().flatten() {
            level.peak = level.current;
        }
        let current = self.current();
        self.peak = current.0[Scope::All as usize];
    }
}
