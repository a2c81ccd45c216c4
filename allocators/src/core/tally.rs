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

/// Levels of one stream's blocks with their peaks and the sum of all increases.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Levels now.
    pub current: Figures,
    /// Highest levels since the last [`restart_peaks`](Self::restart_peaks).
    pub peak: Figures,
    /// Sum of all increases ("allocated" in PyTorch's keys).
    pub increases: Figures,
}

impl Tally {
    #[inline]
    fn increase(&mut self, pool: PoolKind, quantity: Quantity, amount: u64) {
        *self.increases.at(pool.into(), quantity) += amount;
        for scope in [pool.into(), Scope::All] {
            let level = self.current.at(scope, quantity);
            *level += amount;
            let (level, peak) = (*level, self.peak.at(scope, quantity));
            if level > *peak {
                *peak = level;
            }
        }
    }

    #[inline]
    fn decrease(&mut self, pool: PoolKind, quantity: Quantity, amount: u64) {
        for scope in [pool.into(), Scope::All] {
            let level = self.current.at(scope, quantity);
            debug_assert!(*level >= amount, "a level should not go below zero");
            *level = level.wrapping_sub(amount);
        }
    }

    /// A block was handed out.
    #[inline]
    pub fn hand_out(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.increase(pool, Quantity::Blocks, 1);
        self.increase(pool, Quantity::Bytes, bytes);
        self.increase(pool, Quantity::Requested, requested);
    }

    /// A block is no longer the client's.
    #[inline]
    pub fn take_back(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.decrease(pool, Quantity::Blocks, 1);
        self.decrease(pool, Quantity::Bytes, bytes);
        self.decrease(pool, Quantity::Requested, requested);
    }

    /// The free parts of segments in use became more or fewer, and more or less in bytes; the two may differ in sign.
    #[inline]
    pub fn change_split(&mut self, pool: PoolKind, count: i64, bytes: i64) {
        for (quantity, amount) in [(Quantity::Split, count), (Quantity::SplitBytes, bytes)] {
            if amount > 0 {
                self.increase(pool, quantity, amount.unsigned_abs());
            } else if amount < 0 {
                self.decrease(pool, quantity, amount.unsigned_abs());
            }
        }
    }

    /// Lets the peaks start again from the levels.
    pub fn restart_peaks(&mut self) {
        self.peak = self.current;
    }
}
