//! The account: sums over blocks and segments, with exact peaks.

use super::FreeList;
use crate::contract::{Gauge, Ledger, PoolKind, PooledGauge, Stats};
use vramlab_device::StreamId;

/// PyTorch's statistics and the breakdown of reserved memory, counted as blocks change state. Peaks are exact: one change is
/// counted at a time.
///
/// The breakdown attributes free bytes to the stream that allocated their *segment*.
#[derive(Clone, Debug)]
pub struct Account {
    stats: Stats,
    /// Segments and blocks of at least this size are counted as oversize.
    oversize: u64,
    /// In the order of streams.
    by_stream: Vec<(StreamId, Sums)>,
    peak: Ledger,
    /// Stream of the request that last raised the peak of reserved memory.
    grown_by: StreamId,
}

/// Bytes in the segments that a stream allocated.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    reserved: u64,
    /// In segments without live or pending blocks, expandable ones excepted.
    idle: u64,
    /// Whole pages of free blocks in expandable segments.
    pages: u64,
    held: u64,
    /// Requested bytes of the live blocks.
    requested: u64,
    pending: u64,
}

impl Sums {
    fn ledger(&self, own: bool) -> Ledger {
        let free = self.reserved - self.held - self.pending;
        let releasable = self.idle + self.pages;
        let (soft, hard, stream) = if own { (releasable, free - releasable, 0) } else { (0, 0, free) };
        Ledger {
            internal: self.held - self.requested,
            soft,
            hard,
            stream,
            pending: self.pending,
            reserved: self.reserved,
            requested: self.requested,
            ..Ledger::default()
        }
    }
}

/// Gauges without pools ignore the pool.
fn pool(list: FreeList) -> PoolKind {
    list.pool.unwrap_or(PoolKind::Large)
}

impl Default for Account {
    fn default() -> Self {
        Self::new()
    }
}

impl Account {
    /// An account without pools.
    #[must_use]
    pub fn new() -> Self {
        let gauge = Some(PooledGauge::default());
        let stats = Stats { segment: gauge, inactive_split: gauge, inactive_split_bytes: gauge, ..Stats::default() };
        Self::of(stats, u64::MAX)
    }

    /// An account that also counts by pool, and sizes of at least `oversize` bytes.
    #[must_use]
    pub fn with_pools(oversize: u64) -> Self {
        Self::of(Stats::with_pools(), oversize)
    }

    fn of(stats: Stats, oversize: u64) -> Self {
        Self { stats, oversize, by_stream: Vec::new(), peak: Ledger::default(), grown_by: StreamId::NONE }
    }

    /// PyTorch's statistics.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Reserved bytes.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.stats.reserved_bytes.all.current
    }

    /// The current breakdown, as seen by a request on `stream`.
    #[must_use]
    pub fn ledger(&self, stream: StreamId) -> Ledger {
        self.by_stream.iter().map(|(owner, sums)| sums.ledger(*owner == stream)).sum()
    }

    /// The breakdown when reserved memory last reached a new peak.
    #[must_use]
    pub fn ledger_at_peak(&self) -> Ledger {
        self.peak
    }

    /// Notes the breakdown if a request of `stream` raised the peak of reserved memory.
    pub fn note_peak(&mut self, stream: StreamId) {
        if self.reserved() > self.peak.reserved {
            self.peak = self.ledger(stream);
            self.grown_by = stream;
        }
    }

    /// Restarts every peak from the current value.
    pub fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
        self.peak = self.ledger(self.grown_by);
    }

    /// Counts a device allocation that is repeated after a cache flush.
    pub fn count_retry(&mut self) {
        self.stats.num_alloc_retries += 1;
    }

    /// Counts a request that was refused for lack of memory.
    pub fn count_refusal(&mut self) {
        self.stats.num_ooms += 1;
    }

    /// Counts a wait for all pending events.
    pub fn count_wait(&mut self) {
        self.stats.num_sync_all_streams += 1;
    }

    /// Counts moved pages, and requests for which pages were moved: `(0, 0, 0)` announces that pages may be moved.
    pub fn count_stolen(&mut self, requests: u64, pages: u64, bytes: u64) {
        let steals = self.stats.steals.get_or_insert_default();
        steals.requests += requests;
        steals.pages += pages;
        steals.bytes += bytes;
    }

    fn sums(&mut self, segment: FreeList) -> &mut Sums {
        let stream = segment.owner.stream;
        let at = self.by_stream.binary_search_by_key(&stream, |(of, _)| *of).unwrap_or_else(|at| {
            self.by_stream.insert(at, (stream, Sums::default()));
            at
        });
        &mut self.by_stream[at].1
    }

    pub(crate) fn segment_added(&mut self, list: FreeList, bytes: u64) {
        self.stats.count_segment(pool(list), bytes, self.oversize);
        let sums = self.sums(list);
        (sums.reserved, sums.idle) = (sums.reserved + bytes, sums.idle + bytes);
    }

    pub(crate) fn segment_removed(&mut self, list: FreeList, bytes: u64) {
        self.stats.count_segment_released(pool(list), bytes, self.oversize);
        let sums = self.sums(list);
        (sums.reserved, sums.idle) = (sums.reserved - bytes, sums.idle - bytes);
    }

    /// Counts newly mapped memory of an expandable segment. Its free pages count [separately](Self::pages_added).
    pub(super) fn mapped(&mut self, list: FreeList, bytes: u64) {
        self.stats.count_reserved(pool(list), bytes);
        self.sums(list).reserved += bytes;
    }

    pub(super) fn unmapped_part(&mut self, list: FreeList, bytes: u64) {
        self.stats.count_released(pool(list), bytes);
        self.sums(list).reserved -= bytes;
    }

    /// Counts whole pages of a free block in an expandable segment.
    pub(super) fn pages_added(&mut self, segment: FreeList, bytes: u64) {
        self.sums(segment).pages += bytes;
    }

    /// Whole pages of an expandable segment are no longer free.
    pub(super) fn pages_removed(&mut self, segment: FreeList, bytes: u64) {
        self.sums(segment).pages -= bytes;
    }

    /// Counts the mapped remainder of an expandable segment that is removed.
    pub(super) fn unmapped(&mut self, list: FreeList, bytes: u64) {
        if bytes > 0 {
            self.unmapped_part(list, bytes);
        }
    }

    /// The first block of a segment was taken.
    pub(crate) fn segment_busy(&mut self, segment: FreeList, mapped: u64) {
        self.sums(segment).idle -= mapped;
    }

    /// The last block of a segment became free.
    pub(crate) fn segment_idle(&mut self, segment: FreeList, mapped: u64) {
        self.sums(segment).idle += mapped;
    }

    /// Counts an allocation of the client.
    pub(crate) fn taken(&mut self, list: FreeList, segment: FreeList, bytes: u64, requested: u64) {
        self.stats.count_taken(pool(list), bytes, requested);
        self.oversize(bytes).for_each(|gauge| gauge.increase(1));
        let sums = self.sums(segment);
        (sums.held, sums.requested) = (sums.held + bytes, sums.requested + requested);
    }

    /// Counts a free of the client; the block is pending now.
    pub(crate) fn let_go(&mut self, list: FreeList, segment: FreeList, bytes: u64, requested: u64) {
        self.stats.count_let_go(pool(list), bytes);
        self.oversize(bytes).for_each(|gauge| gauge.decrease(1));
        let sums = self.sums(segment);
        (sums.held, sums.requested) = (sums.held - bytes, sums.requested - requested);
        sums.pending += bytes;
    }

    /// The gauge for oversize blocks, if a block is oversize.
    fn oversize(&mut self, bytes: u64) -> impl Iterator<Item = &mut Gauge> {
        let oversize = self.oversize;
        self.stats.oversize_allocations.iter_mut().filter(move |_| bytes >= oversize)
    }

    /// A pending block became reusable.
    pub(crate) fn freed(&mut self, list: FreeList, segment: FreeList, bytes: u64, requested: u64) {
        self.stats.count_reusable(pool(list), bytes, requested);
        self.sums(segment).pending -= bytes;
    }

    /// Changes the number and bytes of free blocks that are parts of segments.
    pub(crate) fn split_changed(&mut self, list: FreeList, blocks: i64, bytes: i64) {
        self.stats.inactive_split.iter_mut().for_each(|gauge| gauge.change(pool(list), blocks));
        self.stats.inactive_split_bytes.iter_mut().for_each(|gauge| gauge.change(pool(list), bytes));
    }
}
