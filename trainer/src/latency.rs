//! Latency histograms by part of the run, so that a cold start does not hide in a long steady state.

use hdrhistogram::Histogram;
use serde::Serialize;
use std::time::{Duration, Instant, SystemTime};
use vramlab::Path;
use vramlab::instruments::{LatencyRow, Operation, Timed};

type Histograms = Vec<(Operation, Path, Histogram<u64>)>;

/// Percentiles of one operation on one path, as in the summary, in nanoseconds. The simulated device has no cost
/// for an allocator's own work, so on its clock an operation without a driver call takes no time; there what would be 0
/// is absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LatencyRecord {
    /// Operation.
    pub operation: String,
    /// Path that served it.
    pub path: String,
    /// Number of operations.
    pub count: u64,
    /// Minimum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ns: Option<u64>,
    /// Median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_ns: Option<u64>,
    /// 90th percentile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p90_ns: Option<u64>,
    /// 99th percentile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<u64>,
    /// 99.9th percentile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p999_ns: Option<u64>,
    /// Maximum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ns: Option<u64>,
}

impl LatencyRecord {
    /// Percentiles measured on a clock, `virtual` or `monotonic`.
    #[must_use]
    pub fn new(row: LatencyRow, clock: &str) -> Self {
        let value = |ns: u64| (ns > 0 || clock != "virtual").then_some(ns);
        Self {
            min_ns: value(row.min_ns),
            p50_ns: value(row.p50_ns),
            p90_ns: value(row.p90_ns),
            p99_ns: value(row.p99_ns),
            p999_ns: value(row.p999_ns),
            max_ns: value(row.max_ns),
            operation: row.operation,
            path: row.path,
            count: row.count,
        }
    }
}

/// Latencies recorded in one interval of a run.
#[derive(Debug)]
pub struct Interval {
    /// From the start of the process.
    pub start: Duration,
    /// Duration.
    pub length: Duration,
    /// Nanoseconds by operation and path; paths on which nothing happened are left out.
    pub histograms: Histograms,
}

/// Divides the histograms of a run, which only grow, into intervals: from the start to the end of the first step, and
/// from there to the end of each epoch.
#[derive(Debug)]
pub struct Intervals {
    started: Instant,
    ended: Duration,
    so_far: Histograms,
    closed: Vec<Interval>,
}

impl Intervals {
    /// Intervals of a process that began at `started`.
    #[must_use]
    pub fn new(started: Instant) -> Self {
        Self { started, ended: Duration::ZERO, so_far: Vec::new(), closed: Vec::new() }
    }

    /// Ends an interval. It is kept in memory until [`take`](Self::take), because between two steps the host has no
    /// time for files. Costs a copy of the histograms, some 200 KB for each path.
    pub fn close(&mut self, timed: &Timed) {
        let (start, now) = (self.ended, self.started.elapsed());
        let all = timed.histograms();
        let histograms = all.iter().filter_map(|(operation, path, histogram)| {
            let mut new = histogram.clone();
            let before = self.so_far.iter().find(|before| (before.0, before.1) == (*operation, *path));
            if let Some((_, _, before)) = before {
                // Counts only grow, so the earlier counts can be subtracted.
                new.subtract(before).ok()?;
            }
            (!new.is_empty()).then_some((*operation, *path, new))
        });
        self.closed.push(Interval { start, length: now.saturating_sub(start), histograms: histograms.collect() });
        self.so_far = all;
        self.ended = now;
    }

    /// The start of the process, and the intervals closed since the last call.
    pub fn take(&mut self) -> (SystemTime, Vec<Interval>) {
        let began = SystemTime::now().checked_sub(self.started.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        (began, std::mem::take(&mut self.closed))
    }
}
