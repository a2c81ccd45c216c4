//! Latency histograms by operation and path.

use crate::allocator::{Block, DeviceAllocator, Path, Request};
use crate::device::StreamId;
use crate::error::AllocError;
use crate::instrument::Clock;
use crate::instrument::clock::{Reader, Scale};
use crate::snapshot::{Ledger, Snapshot};
use crate::stats::Stats;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use thread_local::ThreadLocal;

/// An operation of the upper seam.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// [`DeviceAllocator::allocate`].
    Allocate,
    /// [`DeviceAllocator::deallocate`].
    Deallocate,
}

impl Operation {
    const COUNT: usize = 2;
    const ALL: [Operation; Self::COUNT] = [Operation::Allocate, Operation::Deallocate];

    /// Name in records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Allocate => "allocate",
            Self::Deallocate => "deallocate",
        }
    }
}

/// Percentiles of one operation on one path, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyRow {
    /// Operation.
    pub operation: String,
    /// How it was served.
    pub path: String,
    /// Number of operations.
    pub count: u64,
    /// Minimum.
    pub min_ns: u64,
    /// Median.
    pub p50_ns: u64,
    /// 90th percentile.
    pub p90_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// 99.9th percentile.
    pub p999_ns: u64,
    /// Maximum.
    pub max_ns: u64,
}

const MAX_NS: u64 = 60_000_000_000;
const DIGITS: u8 = 3;
/// Buckets of one width before the width doubles, so that values keep three digits: as HdrHistogram lays them out.
const HALF: u32 = 10;
const BUCKETS: usize = bucket(MAX_NS) + 1;

/// The bucket of a value: `2 << HALF` of width 1, then `1 << HALF` of each further power of two.
#[inline(always)]
const fn bucket(ns: u64) -> usize {
    // What nearly every call takes.
    if ns < 2 << HALF {
        // CAST: below 2^11.
        return ns as usize;
    }
    wide_bucket(ns)
}

#[cold]
const fn wide_bucket(ns: u64) -> usize {
    let ns = if ns < MAX_NS { ns } else { MAX_NS };
    let shift = 63 - HALF - (ns | ((2 << HALF) - 1)).leading_zeros();
    // CAST: some tens of thousands at most, because the value is at most `MAX_NS`.
    ((shift as usize) << HALF) + (ns >> shift) as usize
}

/// The smallest value of a bucket.
const fn lowest(bucket: usize) -> u64 {
    let shift = (bucket >> HALF).saturating_sub(1);
    // CAST: widening.
    ((bucket - (shift << HALF)) as u64) << shift
}

/// What one thread counted for one operation and path: one number a bucket, 216 KiB.
#[derive(Clone, Debug)]
struct Counts(Box<[u64]>);

impl Counts {
    fn new() -> Self {
        Self(vec![0; BUCKETS].into())
    }

    /// Adds what was counted to a histogram.
    fn add_to(&self, histogram: &mut Histogram<u64>) {
        for (bucket, count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            histogram.saturating_record_n(lowest(bucket), *count);
        }
    }
}

/// A thread's counts by operation and path; of those that were taken.
type Tables = [[Option<Counts>; Path::COUNT]; Operation::COUNT];

/// An interval as it is kept until it is counted: its ticks, which last for years, over what it was of.
#[derive(Clone, Copy, Debug)]
struct Sample(u64);

/// Bits of a path, and of a path and an operation.
const PATH_BITS: u32 = Path::COUNT.next_power_of_two().ilog2();
const KIND_BITS: u32 = PATH_BITS + Operation::COUNT.ilog2();

impl Sample {
    #[inline(always)]
    fn new(operation: Operation, path: Path, ticks: u64) -> Self {
        // CAST: the discriminants.
        Self(ticks << KIND_BITS | (operation as u64) << PATH_BITS | path as u64)
    }

    #[inline(always)]
    fn count(self, tables: &mut Tables, scale: Scale) {
        let low = |bits: u32| self.0 & ((1 << bits) - 1);
        // CAST: a few bits.
        let (operation, path) = ((low(KIND_BITS) >> PATH_BITS) as usize, low(PATH_BITS) as usize);
        let counts = tables[operation][path].get_or_insert_with(Counts::new);
        counts.0[bucket(scale.nanoseconds(self.0 >> KIND_BITS))] += 1;
    }
}

/// Intervals that a thread keeps before it counts them: 1 KiB.
const RECENT: usize = 128;

/// What one thread has seen. On cache lines of its own.
///
/// Intervals are not counted one by one: where a count lies depends on the clock, and what comes next would wait until the
/// processor knows where that is. They are kept in order, in places that are known beforehand, and counted when there is no
/// more room.
#[repr(align(128))]
struct Slot {
    /// Intervals in `recent`. The thread alone adds to them and, with the lock of `tables`, takes them away.
    kept: AtomicUsize,
    recent: [AtomicU64; RECENT],
    tables: Mutex<Tables>,
}

impl Default for Slot {
    fn default() -> Self {
        let recent = [const { AtomicU64::new(0) }; RECENT];
        Self { kept: AtomicUsize::new(0), recent, tables: Mutex::default() }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

impl Slot {
    /// Keeps an interval; for the slot's own thread.
    #[inline(always)]
    fn record(&self, sample: Sample, scale: Scale) {
        let at = self.kept.load(Relaxed);
        // There is room, so the remainder changes nothing; it saves a check.
        self.recent[at % RECENT].store(sample.0, Relaxed);
        // Who sees the number sees the interval.
        self.kept.store(at + 1, Release);
        if at + 1 == RECENT {
            self.count(scale);
        }
    }

    /// Counts what is kept; for the slot's own thread.
    #[cold]
    #[inline(never)]
    fn count(&self, scale: Scale) {
        let tables = &mut *self.tables();
        self.recent().for_each(|sample| sample.count(tables, scale));
        self.kept.store(0, Relaxed);
    }

    /// While this is held, nothing that is kept is taken away.
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recent(&self) -> impl Iterator<Item = Sample> {
        self.recent[..self.kept.load(Acquire)].iter().map(|sample| Sample(sample.load(Relaxed)))
    }

    /// Everything so far, counted.
    fn read(&self, scale: Scale) -> Tables {
        let held = self.tables();
        let mut tables = held.clone();
        self.recent().for_each(|sample| sample.count(&mut tables, scale));
        drop(held);
        tables
    }
}

/// Times each operation. Histograms keep three significant digits from 1 ns to 60 s; what lies outside is
/// clamped. Percentiles are of the closed loop of the caller: no correction for coordinated omission applies,
/// because nothing is scheduled.
///
/// On the simulated device the clock is virtual and only driver calls take time, so a hit takes none.
///
/// The machine's clock is read while the processor may have instructions of a few nanoseconds in flight; to wait for them
/// would double what a cached allocation takes.
///
/// *Cost.* Two reads of the clock and 8 bytes in a buffer of the calling thread's own: no line shared with other threads, no
/// lock and no allocation, but that of its own table when a thread first takes a path (216 KiB each). Once in 128 calls it
/// counts them, between two operations, under a lock that nobody else wants but who reads. Reading adds the threads' counts
/// up; what is being recorded at that moment may be in it or not. Counts of threads that have ended are kept.
#[derive(Debug)]
pub struct Timed {
    inner: Arc<dyn DeviceAllocator>,
    clock: Reader,
    slots: ThreadLocal<Slot>,
}

impl Timed {
    /// Times `inner` by `clock`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, clock: Arc<dyn Clock>) -> Self {
        Self { inner, clock: Reader::new(clock), slots: ThreadLocal::new() }
    }

    /// This thread's slot. Looked for before the clock is read, and so not between the end of an operation and what comes
    /// after it.
    #[inline(always)]
    fn slot(&self) -> &Slot {
        match self.slots.get() {
            Some(slot) => slot,
            None => self.first(),
        }
    }

    /// Keeps an operation that began at `start` and is over.
    #[inline(always)]
    fn record(&self, slot: &Slot, operation: Operation, path: Path, start: u64) {
        let ticks = self.clock.read().saturating_sub(start);
        slot.record(Sample::new(operation, path, ticks), self.clock.scale());
    }

    /// Keeps one that failed.
    #[cold]
    #[inline(never)]
    fn record_failed(&self, slot: &Slot, operation: Operation, start: u64) {
        self.record(slot, operation, Path::Failed, start);
    }

    /// What a thread finds when it comes for the first time.
    #[cold]
    fn first(&self) -> &Slot {
        self.slots.get_or_default()
    }

    /// The histograms recorded so far, by operation and path, of all threads together.
    #[must_use]
    pub fn histograms(&self) -> Vec<(Operation, Path, Histogram<u64>)> {
        let threads: Vec<Tables> = self.slots.iter().map(|slot| slot.read(self.clock.scale())).collect();
        let mut out = Vec::new();
        for operation in Operation::ALL {
            for path in Path::ALL {
                let mut merged = None;
                for counts in threads.iter().filter_map(|tables| tables[operation as usize][path as usize].as_ref()) {
                    let histogram = merged.get_or_insert_with(|| {
                        let bounds = Histogram::<u64>::new_with_bounds(1, MAX_NS, DIGITS);
                        bounds.expect("the bounds are constants that the histogram accepts")
                    });
                    counts.add_to(histogram);
                }
                out.extend(merged.map(|merged| (operation, path, merged)));
            }
        }
        out
    }

    /// Percentiles of everything recorded so far.
    #[must_use]
    pub fn rows(&self) -> Vec<LatencyRow> {
        let row = |(operation, path, histogram): (Operation, Path, Histogram<u64>)| LatencyRow {
            operation: operation.name().into(),
            path: path.name().into(),
            count: histogram.len(),
            min_ns: histogram.min(),
            p50_ns: histogram.value_at_quantile(0.5),
            p90_ns: histogram.value_at_quantile(0.9),
            p99_ns: histogram.value_at_quantile(0.99),
            p999_ns: histogram.value_at_quantile(0.999),
            max_ns: histogram.max(),
        };
        self.histograms().into_iter().map(row).collect()
    }
}

impl DeviceAllocator for Timed {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        let slot = self.slot();
        let start = self.clock.read();
        match self.inner.allocate(request, stream) {
            Ok(block) => {
                self.record(slot, Operation::Allocate, block.path(), start);
                Ok(block.hand_on())
            }
            Err(error) => {
                self.record_failed(slot, Operation::Allocate, start);
                Err(error)
            }
        }
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let slot = self.slot();
        let start = self.clock.read();
        // SAFETY: the caller's promise is the inner allocator's.
        match unsafe { self.inner.deallocate(block, stream) } {
            Ok(path) => {
                self.record(slot, Operation::Deallocate, path, start);
                Ok(path)
            }
            Err(error) => {
                self.record_failed(slot, Operation::Deallocate, start);
                Err(error)
            }
        }
    }

    super::pass_on!(record_use);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_those_of_the_histogram() {
        let histogram = Histogram::<u64>::new_with_bounds(1, MAX_NS, DIGITS).unwrap();
        let mut values: Vec<u64> = (0..36).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1]).collect();
        values.extend((0..5_000).chain((0..1_000).map(|n| n * 59_999_999)));
        for value in values.into_iter().filter(|value| *value <= MAX_NS) {
            let low = lowest(bucket(value));
            assert_eq!(low, histogram.lowest_equivalent(value), "{value}");
            assert_eq!(bucket(low), bucket(value), "{value}");
        }
        assert!((0..BUCKETS).all(|index| bucket(lowest(index)) == index));
    }

    #[test]
    fn a_slot_reads_back_as_what_was_recorded() {
        let slot = Slot::default();
        let new = || Histogram::<u64>::new_with_bounds(1, MAX_NS, DIGITS).unwrap();
        let mut expected = new();
        let read = || {
            let mut read = new();
            slot.read(Scale::NANOSECONDS)[1][2].as_ref().unwrap().add_to(&mut read);
            read
        };
        for n in 0..100_000u64 {
            let ns = n * n % 7_919 * (1 + n % 5_000);
            slot.record(Sample::new(Operation::Deallocate, Path::Coalesce, ns), Scale::NANOSECONDS);
            expected.saturating_record(ns);
            // With all numbers of intervals that are kept: each is counted once.
            if n % 997 == 0 {
                assert_eq!(read().len(), n + 1);
            }
        }
        // Without the text of an `assert_eq`: a histogram prints as 27,000 numbers.
        assert!(read() == expected);
        assert_eq!((read().min(), read().max()), (expected.min(), expected.max()));
        slot.record(Sample::new(Operation::Allocate, Path::Failed, 1 << 50), Scale::NANOSECONDS);
        let tables = slot.read(Scale::NANOSECONDS);
        assert_eq!(tables[0][Path::Failed as usize].as_ref().unwrap().0[BUCKETS - 1], 1);
        assert_eq!(tables.iter().flatten().flatten().count(), 2);
    }
}
