//! The sums over all shards, and their peaks, without a counter that all streams write.
//!
//! The peak of a sum is not the sum of the peaks: it needs the sum at that time. So the right to change levels is *leased* to one
//! shard at a time. A lease contains the sum of all other shards, which do not change while it lasts; so the holder's own peaks
//! determine the peak of the sum. Work on another shard first ends the lease and takes one for that shard, which costs two short
//! locks. Work on one stream never does.
//!
//! Peaks are therefore exact in a program with one thread, whatever its streams, and with several threads that take turns. After
//! [`TURNS`] leases that another thread took, every shard gets a permanent one. From then on the peaks of all shards are added up,
//! and the sum is reported as a bound ([`PeakKind::AtMost`]). [`Totals::restart_peaks`] makes them exact again.
//!
//! *Effect.* Exact peaks without a cache line that every thread writes at every call. With such a line sixteen threads take about
//! twelve times as long for an allocation and its free, and one thread as long (`experiments/notes/caching.md`).

use super::shard::{Counted, Locked, Shard, ShardTable};
use crate::backends::caching::tally::{Figures, Quantity, Scope};
use crate::contract::{Gauge, PeakKind, PooledGauge, Stats};
use crate::sync::{Mutex, ThreadId, lock, this_thread};

/// Leases that were taken by another thread than the one before, after which threads no longer wait for each other.
pub(super) const TURNS: u32 = if cfg!(loom) { 2 } else { 64 };

/// The right of a shard to change its levels.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lease {
    /// The sum of all other shards while it lasts; nothing where all shards have one.
    others: Figures,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Totals {
    sums: Mutex<Sums>,
}

/// The state when the last lease ended.
#[derive(Debug, Default)]
pub(super) struct Sums {
    /// Sum of all shards' levels.
    current: Figures,
    /// Highest sums.
    peak: Figures,
    /// Highest sums with pending blocks.
    active_peak: Figures,
    /// Deferred frees.
    pending: Figures,
    /// Highest `pending` since every shard has a lease.
    pending_peak: Figures,
    /// Shard that may change its counters. The shard has the lease itself; where all have one, each takes it at its next use.
    holder: Holder,
    /// Thread that took the last lease.
    thread: Option<ThreadId>,
    turns: u32,
}

/// The shards that may change their levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Holder {
    /// No shard.
    #[default]
    None,
    /// The shard with a number.
    Shard(u32),
    /// Every shard.
    All,
}

impl Sums {
    /// Raises the peaks to levels that the sums reached.
    fn reach(&mut self, sums: &Figures) {
        let active = sums.zip(&self.pending, |sum, waiting| sum + waiting);
        self.active_peak = self.active_peak.zip(&active, u64::max);
        self.peak = self.peak.zip(sums, u64::max);
    }

    /// Gives a shard the lease; its peaks restart from its levels.
    fn begin_lease(&mut self, shard: &mut Locked<'_>) {
        let others = self.current.zip(&shard.cache().tally().current(), |sum, own| sum - own);
        shard.restart_peaks();
        *shard.lease() = Some(Lease { others });
    }

    /// Ends the lease of the one shard that has it. Until the sums are unlocked no levels change then, unless all have one.
    fn end_lease(&mut self, table: &ShardTable) {
        let Holder::Shard(id) = self.holder else { return };
        self.holder = Holder::None;
        let Some(shard) = table.by_id(id) else { return };
        let shard = &mut shard.lock();
        let Some(lease) = shard.lease().take() else { return };
        let tally = shard.cache().tally();
        self.reach(&lease.others.zip(&tally.peak(), |others, own| others + own));
        self.current = lease.others.zip(&tally.current(), |others, own| others + own);
    }
}

impl Totals {
    pub(super) fn new() -> Self {
        Self { sums: Mutex::new(Sums::default()) }
    }

    /// Locks a shard for work that changes its levels.
    #[inline(always)]
    pub(super) fn enter<'a>(&self, shard: &'a Shard, table: &ShardTable) -> Counted<'a> {
        loop {
            if let Some(counted) = shard.lock_leased() {
                return counted;
            }
            self.lease(shard, table);
        }
    }

    #[cold]
    fn lease(&self, shard: &Shard, table: &ShardTable) {
        let sums = &mut *lock(&self.sums);
        if sums.holder == Holder::All {
            *shard.lock().lease() = Some(Lease::default());
            return;
        }
        if sums.holder == Holder::Shard(shard.id) {
            return;
        }
        sums.end_lease(table);
        let thread = this_thread();
        if sums.thread.replace(thread).is_some_and(|last| last != thread) {
            sums.turns += 1;
        }
        if sums.turns < TURNS {
            sums.begin_lease(&mut shard.lock());
            sums.holder = Holder::Shard(shard.id);
        } else {
            // No level changes before this has completed: shards take a lease first.
            for shard in table.by_stream() {
                shard.lock().restart_peaks();
            }
            *shard.lock().lease() = Some(Lease::default());
            sums.pending_peak = sums.pending;
            sums.holder = Holder::All;
        }
    }

    /// Changes a shard's levels together with those of pending blocks, so that the sum of the two makes one step.
    pub(super) fn step<R>(
        &self,
        shard: &Shard,
        table: &ShardTable,
        change: impl FnOnce(&mut Counted<'_>, &mut Figures) -> R,
    ) -> R {
        let sums = &mut *lock(&self.sums);
        sums.end_lease(table);
        let counted = &mut shard.lock_with(sums);
        let before = counted.tally().current();
        let out = change(counted, &mut sums.pending);
        if sums.holder == Holder::All {
            sums.pending_peak = sums.pending_peak.zip(&sums.pending, u64::max);
        } else {
            let rest = sums.current.zip(&before, |sum, own| sum - own);
            sums.current = rest.zip(&counted.tally().current(), |rest, own| rest + own);
            sums.reach(&sums.current.clone());
        }
        out
    }

    /// Restarts the peaks from the levels, exact again.
    pub(super) fn restart_peaks(&self, table: &ShardTable) {
        let sums = &mut *lock(&self.sums);
        sums.end_lease(table);
        let mut current = Figures::default();
        for shard in table.by_stream() {
            let shard = &mut shard.lock();
            // Levels do not change after they are read, until the sums are unlocked.
            *shard.lease() = None;
            current = current.zip(&shard.cache().tally().current(), |sum, own| sum + own);
        }
        *sums = Sums { current, pending: sums.pending, ..Sums::default() };
        sums.reach(&current);
    }

    /// Fills in the gauges of blocks, with levels of one moment.
    pub(super) fn report(&self, table: &ShardTable, stats: &mut Stats) {
        let sums = &mut *lock(&self.sums);
        sums.end_lease(table);
        let (mut current, mut increases, mut added) = (Figures::default(), Figures::default(), Figures::default());
        // Where every shard has a lease, levels change meanwhile.
        for shard in &ShardTable::lock_all(&table.by_stream()) {
            let tally = *shard.cache().tally();
            current = current.zip(&tally.current(), |sum, own| sum + own);
            increases = increases.zip(&tally.increases(), |sum, own| sum + own);
            added = added.zip(&tally.peak(), |sum, own| sum + own);
        }
        let (mut peak, mut active_peak, mut peak_is) = (sums.peak, sums.active_peak, PeakKind::Exact);
        if sums.holder == Holder::All {
            let active = added.zip(&sums.pending_peak, |held, waiting| held + waiting);
            (peak, active_peak) = (peak.zip(&added, u64::max), active_peak.zip(&active, u64::max));
            peak_is = PeakKind::AtMost;
        }
        let pooled = |quantity: Quantity, peaks: &Figures, pending: &Figures| {
            let gauge = |scope: Scope| {
                let level = current.get(scope, quantity) + pending.get(scope, quantity);
                let allocated = increases.get(scope, quantity);
                let peak = peaks.get(scope, quantity).max(level);
                Gauge { current: level, peak, peak_is, allocated, freed: allocated - level }
            };
            PooledGauge {
                all: gauge(Scope::All),
                small_pool: Some(gauge(Scope::Small)),
                large_pool: Some(gauge(Scope::Large)),
            }
        };
        let none = Figures::default();
        stats.allocation = pooled(Quantity::Blocks, &peak, &none);
        stats.allocated_bytes = pooled(Quantity::Bytes, &peak, &none);
        stats.active = pooled(Quantity::Blocks, &active_peak, &sums.pending);
        stats.active_bytes = pooled(Quantity::Bytes, &active_peak, &sums.pending);
        stats.requested_bytes = pooled(Quantity::Requested, &active_peak, &sums.pending);
        stats.inactive_split = Some(pooled(Quantity::Split, &peak, &none));
        stats.inactive_split_bytes = Some(pooled(Quantity::SplitBytes, &peak, &none));
    }
}
