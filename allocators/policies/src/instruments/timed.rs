//! Latency histograms by operation and path.

use crate::contract::{AllocError, Block, DeviceAllocator, Instrument, Path, PrivatePool, Request};
use crate::instruments::per_thread::PerThread;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use vramlab_device::clock::Reader;
use vramlab_device::{Clock, StreamId};

vramlab_device::named! {
    /// An operation of an allocator.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Operation {
        /// [`DeviceAllocator::allocate`].
        Allocate "allocate",
        /// [`DeviceAllocator::deallocate`].
        Deallocate "deallocate",
    }
}

/// Percentiles of one operation on one path, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyRow {
    /// Operation.
    pub operation: String,
    /// Its path.
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

/// One thread's histograms, by operation and path.
#[derive(Debug, Default)]
struct Counts([[Option<Histogram<u64>>; Path::COUNT]; Operation::COUNT]);

/// An empty histogram.
fn empty() -> Histogram<u64> {
    Histogram::new_with_bounds(1, MAX_NS, DIGITS).expect("the bounds are constants that the histogram accepts")
}

/// Times each operation. Histograms have three significant digits from 1 ns to 60 s; values outside are clamped. Percentiles are of
/// the closed loop of the caller: there is no correction for coordinated omission, because nothing is scheduled.
///
/// On the simulated device the clock is virtual and only driver calls take time, so a hit takes none.
///
/// The machine's clock is read while the processor may have instructions of a few nanoseconds in flight; waiting for them would
/// double the time of a cached allocation.
///
/// *Cost.* Two reads of the clock and one count in a histogram of the calling thread's own, behind a lock of its own: no cache line
/// shared with other threads, no allocation but that of a histogram when a thread first takes a path (200 KiB each). Reading adds
/// the threads' counts up. Counts of threads that have ended are kept.
#[derive(Debug)]
pub struct Timed {
    inner: Arc<dyn DeviceAllocator>,
    clock: Reader,
    counts: PerThread<Counts>,
}

impl Timed {
    /// Times `inner` by `clock`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, clock: Arc<dyn Clock>) -> Self {
        Self { inner, clock: Reader::new(clock), counts: PerThread::new() }
    }

    /// Times an allocation.
    #[inline(always)]
    fn time(
        &self,
        allocate: impl FnOnce(&dyn DeviceAllocator) -> Result<Block, AllocError>,
    ) -> Result<Block, AllocError> {
        let start = self.clock.read();
        let served = allocate(self.inner.as_ref());
        self.record(Operation::Allocate, served.as_ref().map_or(Path::Failed, Block::path), start);
        served.map(Block::hand_on)
    }

    /// Counts an operation that began at `start` and has completed.
    #[inline(always)]
    fn record(&self, operation: Operation, path: Path, start: u64) {
        let ns = self.clock.scale().nanoseconds(self.clock.read().saturating_sub(start));
        let counts = &mut *self.counts.enter();
        counts.0[operation as usize][path as usize].get_or_insert_with(empty).saturating_record(ns);
    }

    /// The recorded histograms, by operation and path, of all threads together.
    #[must_use]
    pub fn histograms(&self) -> Vec<(Operation, Path, Histogram<u64>)> {
        let mut sums = Counts::default();
        self.counts.collect(|counts| {
            let each = sums.0.iter_mut().flatten().zip(counts.0.iter().flatten());
            for (sum, counted) in each.filter_map(|(sum, counted)| Some((sum, counted.as_ref()?))) {
                sum.get_or_insert_with(empty).add(counted).expect("histograms of the same bounds add up");
            }
        });
        let operations = Operation::ALL.into_iter().zip(sums.0);
        let each =
            operations.flat_map(|(operation, sums)| Path::ALL.map(|path| (operation, path)).into_iter().zip(sums));
        each.filter_map(|((operation, path), sum)| Some((operation, path, sum?))).collect()
    }

    /// Percentiles of all recorded operations.
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

impl Instrument for Timed {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.time(|inner| inner.allocate(request, stream))
    }

    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.time(|inner| inner.allocate_in(request, stream, pool))
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let start = self.clock.read();
        // SAFETY: the caller's promise is the inner allocator's.
        let freed = unsafe { self.inner.deallocate(block, stream) };
        self.record(Operation::Deallocate, *freed.as_ref().unwrap_or(&Path::Failed), start);
        freed
    }
}
