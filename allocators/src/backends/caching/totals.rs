//! Levels and peaks over all streams, without a counter that all streams write.
//!
//! The peak of a sum is not the sum of the peaks, so the sum has to be known at each change. One shard at a time may change
//! its levels. It was told what all the others add up to, so its own peaks say how high the sum went. Work on another shard
//! first takes that right over, which costs two short locks; work on one stream finds in its own shard that it has it.
//!
//! So peaks are exact in a program with one thread, whatever its streams, and with several threads as long as they take
//! turns. After [`TURNS`] changes of thread the account is opened to every shard: each keeps its own peaks, and the sum
//! of those, an upper bound, is what the peaks can be told to be. [`Totals::restart_peaks`] starts over.

use super::shard::{Shard, ShardState, ShardTable};
use crate::backends::caching::core::tally::{Figures, Quantity, Scope};
use crate::contract::{Gauge, PooledGauge, Stats};
use crate::sync::{Mutex, SpinGuard, ThreadId, lock, this_thread};

/// Changes of thread after which several threads no longer share exact peaks.
pub(super) const TURNS: u32 = if cfg!(loom) { 2 } else { 64 };

/// Gauges whose peaks are sums of the shards' once every shard has an account of its own.
const SUMMED: [&str; 7] = [
    "allocation",
    "active",
    "inactive_split",
    "allocated_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
];

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Totals {
    books: Mutex<Books>,
}

/// What was known when the accounts were last closed.
#[derive(Debug, Default)]
struct Books {
    /// Sum of all shards' levels.
    current: Figures,
    /// Highest sums. Of `Requested`, pending blocks count as well.
    peak: Figures,
    /// Highest sums of blocks and bytes with pending ones.
    active_peak: Figures,
    /// Blocks whose free waits for other streams.
    pending: Figures,
    /// Highest `pending` since every shard has an account of its own.
    pending_peak: Figures,
    /// Who may change levels. Where that is a shard, it says so itself ([`ShardState::admitted`]), as do all once the
    /// tenancy is open, each from its next use on.
    tenancy: Tenancy,
    /// Thread that last took the right over for a shard.
    thread: Option<ThreadId>,
    turns: u32,
}

/// Who may change levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Tenancy {
    /// Nobody: the accounts are closed.
    #[default]
    Vacant,
    /// The shard with a number.
    Shard(u32),
    /// Every shard, each on an account of its own.
    Open,
}

impl Books {
    /// Takes levels that the sums reached into the peaks.
    fn reach(&mut self, sums: &Figures, pending: &Figures) {
        let active = sums.zip(pending, |sum, waiting| sum + waiting);
        self.active_peak = self.active_peak.zip(&active, u64::max);
        self.peak = self.peak.zip(sums, u64::max);
    }

    fn open(&self, state: &mut ShardState) {
        state.others = self.current.zip(&state.cache.tally.current(), |sum, own| sum - own);
        state.cache.tally.restart_peaks();
    }

    fn close(&mut self, state: &ShardState) {
        let reached = state.others.zip(&state.cache.tally.peak(), |others, own| others + own);
        let pending = self.pending;
        self.reach(&reached, &pending);
        self.current = state.others.zip(&state.cache.tally.current(), |others, own| others + own);
    }
}

impl Totals {
    pub(super) fn new() -> Self {
        Self { books: Mutex::new(Books::default()) }
    }

    /// Locks a shard for work that changes its levels.
    #[inline(always)]
    pub(super) fn enter<'a>(&self, shard: &'a Shard, table: &ShardTable) -> SpinGuard<'a, ShardState> {
        loop {
            let state = shard.lock();
            if state.admitted {
                return state;
            }
            drop(state);
            self.admit(shard, table);
        }
    }

    /// Takes the right to change levels from the shard that has it. Until the lock is released no shard gets it, unless all
    /// have it.
    fn close_tenancy(books: &mut Books, table: &ShardTable) {
        let Tenancy::Shard(tenant) = books.tenancy else { return };
        if let Some(shard) = table.by_id(tenant) {
            let state = &mut *shard.lock();
            // Whoever takes the shard's lock after us finds that it may no longer change levels.
            state.admitted = false;
            books.close(state);
        }
        books.tenancy = Tenancy::Vacant;
    }

    #[cold]
    fn admit(&self, shard: &Shard, table: &ShardTable) {
        let books = &mut *lock(&self.books);
        if books.tenancy == Tenancy::Open {
            shard.lock().admitted = true;
            return;
        }
        if books.tenancy == Tenancy::Shard(shard.id) {
            return;
        }
        Self::close_tenancy(books, table);
        let thread = this_thread();
        if books.thread.replace(thread).is_some_and(|last| last != thread) {
            books.turns += 1;
        }
        if books.turns < TURNS {
            let state = &mut *shard.lock();
            books.open(state);
            state.admitted = true;
            books.tenancy = Tenancy::Shard(shard.id);
        } else {
            // No level changes before this is done: shards ask for the books first.
            for shard in table.by_stream() {
                shard.lock().cache.tally.restart_peaks();
            }
            shard.lock().admitted = true;
            books.pending_peak = books.pending;
            books.tenancy = Tenancy::Open;
        }
    }

    /// Changes a shard's levels together with those of pending blocks, so that the sum of the two makes one step.
    pub(super) fn step<R>(
        &self,
        shard: &Shard,
        table: &ShardTable,
        change: impl FnOnce(&mut ShardState, &mut Figures) -> R,
    ) -> R {
        let books = &mut *lock(&self.books);
        Self::close_tenancy(books, table);
        let everybody = books.tenancy == Tenancy::Open;
        let state = &mut *shard.lock();
        let before = state.cache.tally.current();
        let out = change(state, &mut books.pending);
        if everybody {
            books.pending_peak = books.pending_peak.zip(&books.pending, u64::max);
        } else {
            let rest = books.current.zip(&before, |sum, own| sum - own);
            books.current = rest.zip(&state.cache.tally.current(), |rest, own| rest + own);
            let (sums, pending) = (books.current, books.pending);
            books.reach(&sums, &pending);
        }
        out
    }

    /// Lets the peaks start again from the levels, exact again.
    pub(super) fn restart_peaks(&self, table: &ShardTable) {
        let books = &mut *lock(&self.books);
        Self::close_tenancy(books, table);
        let mut sums = Figures::default();
        for shard in table.by_stream() {
            let state = &mut *shard.lock();
            // Once its level is read it stays, until the books are let go.
            state.admitted = false;
            sums = sums.zip(&state.cache.tally.current(), |sum, own| sum + own);
        }
        *books = Books { current: sums, pending: books.pending, ..Books::default() };
        books.reach(&sums, &books.pending.clone());
    }

    /// Fills in the gauges of blocks.
    pub(super) fn report(&self, table: &ShardTable, stats: &mut Stats) {
        let books = &mut *lock(&self.books);
        Self::close_tenancy(books, table);
        let everybody = books.tenancy == Tenancy::Open;
        let (mut current, mut increases, mut summed) = (Figures::default(), Figures::default(), Figures::default());
        for shard in table.by_stream() {
            let tally = shard.lock().cache.tally;
            current = current.zip(&tally.current(), |sum, own| sum + own);
            increases = increases.zip(&tally.increases(), |sum, own| sum + own);
            summed = summed.zip(&tally.peak(), |sum, own| sum + own);
        }
        if everybody {
            let pending = books.pending_peak;
            books.reach(&summed, &pending);
            stats.upper_bounds = SUMMED.to_vec();
        }
        let pooled = |quantity: Quantity, peaks: &Figures, pending: Option<&Figures>| {
            let gauge = |scope: Scope| {
                let level = current.get(scope, quantity) + pending.map_or(0, |figures| figures.get(scope, quantity));
                let allocated = match scope {
                    Scope::All => increases.get(Scope::Small, quantity) + increases.get(Scope::Large, quantity),
                    pool => increases.get(pool, quantity),
                };
                let peak = peaks.get(scope, quantity).max(level);
                Gauge { current: level, peak, allocated, freed: allocated - level }
            };
            PooledGauge {
                all: gauge(Scope::All),
                small_pool: Some(gauge(Scope::Small)),
                large_pool: Some(gauge(Scope::Large)),
            }
        };
        let (peak, active) = (&books.peak, &books.active_peak);
        stats.allocation = pooled(Quantity::Blocks, peak, None);
        stats.allocated_bytes = pooled(Quantity::Bytes, peak, None);
        stats.active = pooled(Quantity::Blocks, active, Some(&books.pending));
        stats.active_bytes = pooled(Quantity::Bytes, active, Some(&books.pending));
        stats.requested_bytes = pooled(Quantity::Requested, active, Some(&books.pending));
        stats.inactive_split = Some(pooled(Quantity::Split, peak, None));
        stats.inactive_split_bytes = Some(pooled(Quantity::SplitBytes, peak, None));
    }
}
