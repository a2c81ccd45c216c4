//! Latency histograms by part of the run, so that a cold start does not hide in a long steady state.

use crate::error::Result;
use crate::record::RecordWriter;
use allocators::Path;
use allocators::instrument::{Operation, Timed};
use hdrhistogram::Histogram;
use std::time::{Duration, Instant, SystemTime};

type Histograms = Vec<(Operation, Path, Histogram<u64>)>;

/// What was recorded in one part of a run.
#[derive(Debug)]
pub struct Interval {
    /// From the start of the process.
    pub start: Duration,
    /// How long it was.
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

    /// Ends an interval. It is kept in memory until [`flush`](Self::flush), because between two steps the host has no
    /// time for files. Costs a copy of the histograms, some 200 KB for each path.
    pub fn close(&mut self, timed: &Timed) {
        let (start, now) = (self.ended, self.started.elapsed());
        let all = timed.histograms();
        let histograms = all.iter().filter_map(|(operation, path, histogram)| {
            let mut new = histogram.clone();
            let before = self.so_far.iter().find(|before| (before.0, before.1) == (*operation, *path));
            if let Some((_, _, before)) = before {
                // Counts only grow, so what was there before can be taken away.
                new.subtract(before).ok()?;
            }
            (!new.is_empty()).then_some((*operation, *path, new))
        });
        self.closed.push(Interval { start, length: now.saturating_sub(start), histograms: histograms.collect() });
        self.so_far = all;
        self.ended = now;
    }

    /// Writes what was closed since the last time to the record.
    ///
    /// # Errors
    /// [`TrainError::Output`](crate::error::TrainError::Output) when the file cannot be written.
    pub fn flush(&mut self, record: &RecordWriter) -> Result<()> {
        let began = SystemTime::now().checked_sub(self.started.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        record.append_latency(began, &std::mem::take(&mut self.closed))
    }
}
