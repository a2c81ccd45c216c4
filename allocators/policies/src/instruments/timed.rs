//! Latency histograms by operation and path.

use crate::contract::AllocError;
use crate::contract::Stats;
use crate::contract::{Block, DeviceAllocator, Path, Request};
use crate::contract::{Ledger, Snapshot};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use thread_local::ThreadLocal;
use vramlab_device::Clock;
use vramlab_device::StreamId;
use vramlab_device::clock::{Reader, Scale};

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
/// Ticks of which longer intervals are counted: above a minute at any rate that a processor has.
const MAX_TICKS: u64 = (1 << 40) - 1;
/// Buckets of one width before the width doubles: twice as many as HdrHistogram has for three digits, and aligned with
/// those. So where ticks are nanoseconds a bucket is a part of one there; elsewhere its middle is off by a quarter of a
/// thousandth at most.
const HALF: u32 = 11;
/// Ticks that have a bucket each: what nearly every call takes.
const SINGLE: u64 = 2 << HALF;
const BUCKETS: usize = bucket(MAX_TICKS) + 1;

/// The bucket of an interval: [`SINGLE`] of width 1, then `1 << HALF` of each further power of two.
const fn bucket(ticks: u64) -> usize {
    let ticks = if ticks < MAX_TICKS { ticks } else { MAX_TICKS };
    let shift = 63 - HALF - (ticks | (SINGLE - 1)).leading_zeros();
    // CAST: some tens of thousands at most, because the value is at most `MAX_TICKS`.
    ((shift as usize) << HALF) + (ticks >> shift) as usize
}

/// The middle of a bucket, in ticks.
const fn middle(bucket: usize) -> u64 {
    let shift = (bucket >> HALF).saturating_sub(1);
    // CAST: widening.
    let lowest = ((bucket - (shift << HALF)) as u64) << shift;
    lowest + (1 << shift >> 1)
}

/// What one thread counted for one operation and path: one number a bucket, 480 KiB of which only the touched pages
/// are taken.
type Counts = Box<[AtomicU64; BUCKETS]>;

/// One thread's counts, written by that thread alone. On cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Slot([[OnceLock<Counts>; Path::COUNT]; Operation::COUNT]);

/// Adds a thread's counts to a histogram.
fn add(counts: &Counts, scale: Scale, histogram: &mut Histogram<u64>) {
    for (bucket, count) in counts.iter().enumerate() {
        let count = count.load(Relaxed);
        if count > 0 {
            histogram.saturating_record_n(scale.nanoseconds(middle(bucket)), count);
        }
    }
}

/// The table of a path that a thread takes for the first time.
#[cold]
fn first(table: &OnceLock<Counts>) -> &Counts {
    let counts = || std::iter::repeat_with(AtomicU64::default).take(BUCKETS).collect::<Box<[AtomicU64]>>();
    table.get_or_init(|| counts().try_into().expect("there are as many counts as buckets"))
}

/// The count of a long interval.
#[cold]
fn long(counts: &Counts, ticks: u64) -> &AtomicU64 {
    &counts[bucket(ticks)]
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

impl Slot {
    #[inline(always)]
    fn record(&self, operation: Operation, path: Path, ticks: u64) {
        let table = &self.0[operation as usize][path as usize];
        let counts = match table.get() {
            Some(counts) => counts,
            None => first(table),
        };
        // CAST: below 2^12.
        let count = if ticks < SINGLE { &counts[ticks as usize] } else { long(counts, ticks) };
        // No other thread writes here, so a load and a store lose nothing and cost no locked instruction. They are
        // atomic because readers may look at any time.
        count.store(count.load(Relaxed) + 1, Relaxed);
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
/// *Cost.* Two reads of the clock and one count in a table of the calling thread's own: no lock, no line shared
/// with other threads, no allocation but that of a table when a thread first takes a path (480 KiB each). Intervals are
/// counted in the clock's ticks and told in nanoseconds when they are read. Reading adds the threads' counts up; what is
/// being recorded at that moment may be in it or not. Counts of threads that have ended are kept.
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

    /// This thread's counts. Looked for before the clock is read, so that less is left to do between the end of an
    /// operation and what comes after it.
    #[inline(always)]
    fn slot(&self) -> &Slot {
        match self.slots.get() {
            Some(slot) => slot,
            None => self.first(),
        }
    }

    /// Counts an operation that began at `start` and is over.
    #[inline(always)]
    fn record(&self, slot: &Slot, operation: Operation, path: Path, start: u64) {
        let ticks = self.clock.read().saturating_sub(start);
        slot.record(operation, path, ticks);
    }

    /// Counts one that failed.
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
        let mut out = Vec::new();
        for operation in Operation::ALL {
            for path in Path::ALL {
                let mut merged = None;
                for counts in self.slots.iter().filter_map(|slot| slot.0[operation as usize][path as usize].get()) {
                    let histogram = merged.get_or_insert_with(|| {
                        let bounds = Histogram::<u64>::new_with_bounds(1, MAX_NS, DIGITS);
                        bounds.expect("the bounds are constants that the histogram accepts")
                    });
                    add(counts, self.clock.scale(), histogram);
                }
                // A table that was made for a first count that is not there yet is no histogram.
                out.extend(merged.filter(|merged| !merged.is_empty()).map(|merged| (operation, path, merged)));
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
    super::pass_on!(restore);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_a_part_of_one_of_the_histogram() {
        let histogram = Histogram::<u64>::new_with_bounds(1, MAX_NS, DIGITS).unwrap();
        let mut values: Vec<u64> = (0..36).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1]).collect();
        values.extend((0..20_000).chain((0..1_000).map(|n| n * 59_999_999)));
        for value in values.into_iter().filter(|value| *value <= MAX_NS) {
            let seen = middle(bucket(value));
            assert!(histogram.equivalent(seen, value), "{seen} for {value}");
            assert_eq!(bucket(seen), bucket(value), "{value}");
            assert!(seen.abs_diff(value) * 4_096 <= value && (value >= SINGLE || seen == value), "{seen} for {value}");
        }
        assert!((0..BUCKETS).all(|index| bucket(middle(index)) == index));
    }

    #[test]
    fn a_slot_reads_back_as_what_was_recorded() {
        let slot = Slot::default();
        let mut expected = Histogram::<u64>::new_with_bounds(1, MAX_NS, DIGITS).unwrap();
        for n in 0..100_000u64 {
            let ns = n * n % 7_919 * (1 + n % 5_000);
            slot.record(Operation::Allocate, Path::Hit, ns);
            expected.saturating_record(ns);
        }
        let counts = slot.0[0][0].get().unwrap();
        let mut read = Histogram::<u64>::new_with_bounds(1, MAX_NS, DIGITS).unwrap();
        add(counts, Scale::NANOSECONDS, &mut read);
        // Without the text of an `assert_eq`: a histogram prints as 27,000 numbers.
        assert!(read == expected);
        assert_eq!((read.min(), read.max()), (expected.min(), expected.max()));
        slot.record(Operation::Allocate, Path::Hit, u64::MAX);
        assert_eq!(counts[BUCKETS - 1].load(Relaxed), 1);
    }
}
