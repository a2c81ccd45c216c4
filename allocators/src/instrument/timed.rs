//! Latency histograms by operation and path.

use crate::allocator::{Block, DeviceAllocator, Path, Request};
use crate::device::StreamId;
use crate::error::AllocError;
use crate::instrument::Clock;
use crate::snapshot::{Ledger, Snapshot};
use crate::stats::Stats;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};

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

/// One histogram for each operation and path, made when first needed (about 220 KiB each).
type Table = [[Option<Box<Histogram<u64>>>; Path::COUNT]; Operation::COUNT];

/// Times each operation. Histograms keep three significant digits from 1 ns to 60 s; what lies outside is
/// clamped. Percentiles are of the closed loop of the caller: no correction for coordinated omission applies,
/// because nothing is scheduled.
///
/// On the simulated device the clock is virtual and only driver calls take time, so a hit takes none.
#[derive(Debug)]
pub struct Timed {
    inner: Arc<dyn DeviceAllocator>,
    clock: Arc<dyn Clock>,
    table: Mutex<Table>,
}

const MAX_NS: u64 = 60_000_000_000;
const DIGITS: u8 = 3;

impl Timed {
    /// Times `inner` by `clock`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, clock: Arc<dyn Clock>) -> Self {
        Self { inner, clock, table: Mutex::default() }
    }

    fn record(&self, operation: Operation, path: Path, ns: u64) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut table[operation as usize][path as usize];
        let histogram = slot.get_or_insert_with(|| {
            let bounds = Histogram::new_with_bounds(1, MAX_NS, DIGITS);
            Box::new(bounds.expect("the bounds are constants that the histogram accepts"))
        });
        histogram.saturating_record(ns);
    }

    /// The histograms recorded so far, by operation and path.
    #[must_use]
    pub fn histograms(&self) -> Vec<(Operation, Path, Histogram<u64>)> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = Vec::new();
        for operation in Operation::ALL {
            for path in Path::ALL {
                if let Some(histogram) = &table[operation as usize][path as usize] {
                    out.push((operation, path, histogram.as_ref().clone()));
                }
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
        let start = self.clock.now_ns();
        let result = self.inner.allocate(request, stream);
        let ns = self.clock.now_ns().saturating_sub(start);
        self.record(Operation::Allocate, result.as_ref().map_or(Path::Failed, Block::path), ns);
        result
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let start = self.clock.now_ns();
        // SAFETY: the caller's promise is the inner allocator's.
        let result = unsafe { self.inner.deallocate(block, stream) };
        let ns = self.clock.now_ns().saturating_sub(start);
        self.record(Operation::Deallocate, *result.as_ref().unwrap_or(&Path::Failed), ns);
        result
    }

    super::pass_on!(record_use);
}
