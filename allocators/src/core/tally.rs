//! What one stream's blocks add up to, counted where it happens and added up over the streams when asked.

use crate::snapshot::Ledger;
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

/// A level, kept as its peak and how far it is below: so an increase sees in its own carry whether it is a new peak.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    peak: u64,
    below: u64,
}

impl Level {
    #[inline(always)]
    fn increase(&mut self, amount: u64) {
        let (below, higher) = self.below.overflowing_sub(amount);
        self.below = below;
        if higher {
            self.raise();
        }
    }

    /// Adds a number of either sign, as its two's complement.
    #[inline(always)]
    fn change(&mut self, amount: u64) {
        self.below = self.below.wrapping_sub(amount);
        if self.below.cast_signed() < 0 {
            self.raise();
        }
    }

    /// The peak follows a level that went over it.
    #[cold]
    #[inline(never)]
    fn raise(&mut self) {
        self.peak = self.peak.wrapping_sub(self.below);
        self.below = 0;
    }

    #[inline(always)]
    fn decrease(&mut self, amount: u64) {
        self.below += amount;
        debug_assert!(self.below <= self.peak, "a level should not go below zero");
    }

    fn current(self) -> u64 {
        self.peak - self.below
    }
}

/// Levels of one stream's blocks with their peaks and the sums of all increases.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pools: [[Level; QUANTITIES]; 2],
    all: [Level; QUANTITIES],
    increases: [[u64; QUANTITIES]; 2],
    /// Bytes of the segments.
    segments: u64,
    /// Bytes of the segments that are one free block.
    idle: u64,
    /// Bytes of the blocks whose free waits.
    pending: u64,
}

impl Tally {
    #[inline(always)]
    fn increase(&mut self, pool: PoolKind, quantity: Quantity, amount: u64) {
        self.increases[pool as usize][quantity as usize] += amount;
        self.pools[pool as usize][quantity as usize].increase(amount);
        self.all[quantity as usize].increase(amount);
    }

    #[inline(always)]
    fn decrease(&mut self, pool: PoolKind, quantity: Quantity, amount: u64) {
        self.pools[pool as usize][quantity as usize].decrease(amount);
        self.all[quantity as usize].decrease(amount);
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

    /// A block of `bytes` in a segment in use became free, and one with `joined` free parts beside it, of which there are
    /// at most two.
    #[inline(always)]
    pub fn join_splits(&mut self, pool: PoolKind, bytes: u64, joined: u64) {
        // One part more, or as many, or one less, without a branch; by what was not free before, as PyTorch counts the
        // whole change at once.
        self.increases[pool as usize][Quantity::Split as usize] += u64::from(joined == 0);
        for level in [&mut self.pools[pool as usize], &mut self.all] {
            level[Quantity::Split as usize].change(1u64.wrapping_sub(joined));
        }
        self.increase(pool, Quantity::SplitBytes, bytes);
    }

    /// Free parts of a segment in use are no longer free, or no longer parts.
    #[inline(always)]
    pub fn remove_splits(&mut self, pool: PoolKind, parts: u64, bytes: u64) {
        self.decrease(pool, Quantity::Split, parts);
        self.decrease(pool, Quantity::SplitBytes, bytes);
    }

    /// A free part of a segment in use became smaller by `bytes`.
    #[inline(always)]
    pub fn shrink_split(&mut self, pool: PoolKind, bytes: u64) {
        self.decrease(pool, Quantity::SplitBytes, bytes);
    }

    /// A segment came, as one free block.
    pub fn add_segment(&mut self, bytes: u64) {
        self.segments += bytes;
        self.idle += bytes;
    }

    /// A segment went, as one free block.
    pub fn remove_segment(&mut self, bytes: u64) {
        self.segments -= bytes;
        self.idle -= bytes;
    }

    /// A block that was a whole segment is so no longer, or no longer free.
    #[inline(always)]
    pub fn begin_segment(&mut self, bytes: u64) {
        self.idle -= bytes;
    }

    /// A segment became one free block.
    #[inline(always)]
    pub fn end_segment(&mut self, bytes: u64) {
        self.idle += bytes;
    }

    /// A block that the client let go of waits.
    pub fn add_pending(&mut self, bytes: u64) {
        self.pending += bytes;
    }

    /// A block has waited long enough.
    pub fn remove_pending(&mut self, bytes: u64) {
        self.pending -= bytes;
    }

    /// Where the bytes of the segments are, for a request on the stream itself (`own`) or on another one.
    #[must_use]
    pub fn ledger(&self, own: bool) -> Ledger {
        let level = |quantity: Quantity| self.all[quantity as usize].current();
        let (held, requested) = (level(Quantity::Bytes), level(Quantity::Requested));
        let free = self.segments - held - self.pending;
        debug_assert_eq!(free, self.idle + level(Quantity::SplitBytes), "a free block is a segment or a part of one");
        let (soft, hard, stream) = if own { (self.idle, free - self.idle, 0) } else { (0, 0, free) };
        let (internal, pending) = (held - requested, self.pending);
        Ledger { reserved: self.segments, requested, internal, pending, soft, hard, stream, ..Ledger::default() }
    }

    fn levels(&self, of: impl Fn(&Level) -> u64) -> Figures {
        // In the order of the scopes.
        let [small, large] = &self.pools;
        Figures([small, large, &self.all].map(|levels| levels.each_ref().map(&of)))
    }

    /// Levels now.
    #[must_use]
    pub fn current(&self) -> Figures {
        self.levels(|level| level.current())
    }

    /// Highest levels since the last [`restart_peaks`](Self::restart_peaks).
    #[must_use]
    pub fn peak(&self) -> Figures {
        self.levels(|level| level.peak)
    }

    /// Sums of all increases ("allocated" in PyTorch's keys).
    #[must_use]
    pub fn increases(&self) -> Figures {
        let [small, large] = self.increases;
        let mut all = small;
        all.iter_mut().zip(large).for_each(|(sum, increase)| *sum += increase);
        Figures([small, large, all])
    }

    /// Adds what the sums of all increases grew by since they were `before`, so many times more.
    pub fn repeat_increases(&mut self, before: &Figures, times: u64) {
        for (sums, before) in self.increases.iter_mut().zip(&before.0) {
            sums.iter_mut().zip(before).for_each(|(sum, before)| *sum += (*sum - before) * times);
        }
    }

    /// Lets the peaks start again from the levels.
    pub fn restart_peaks(&mut self) {
        for level in self.pools.iter_mut().flatten().chain(&mut self.all) {
            *level = Level { peak: level.current(), below: 0 };
        }
    }
}
