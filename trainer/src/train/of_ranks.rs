//! A run as one rank of several: its row in the record, its part of a batch, and the error that ended all ranks.

use super::Run;
use crate::device::{Backend, SumCosts};
use crate::error::{Result, TrainError};
use crate::mlp::Buckets;
use crate::ranks::{self, CommunicationRecord, Group, RankRecord, RankSpread};
use crate::record::Summary;
use crate::settings::Settings;
use vramlab::CallCounts;

/// Ends the run on all ranks; the error of the rank that failed first.
pub(super) fn cause(group: &Group, error: TrainError) -> TrainError {
    if matches!(error, TrainError::Interrupted) {
        return error;
    }
    // The failed call may be a consequence.
    group.fail(&error);
    match group.check() {
        Err(TrainError::Rank { rank, .. }) if rank == group.rank() => error,
        Err(first) => first,
        Ok(()) => error,
    }
}

impl Run {
    /// Writes the results of every rank until now into the record of rank 0.
    pub(super) fn gather_ranks(&mut self) -> Result<()> {
        let Some(group) = &self.group else { return Ok(()) };
        let own = serde_json::to_vec(&self.rank_record(group.rank())).unwrap_or_default();
        let mut ranks: Vec<RankRecord> = Vec::new();
        group.exchange(own, |parts| {
            ranks = parts.iter().filter_map(|part| serde_json::from_slice(part).ok()).collect();
            Ok(Vec::new())
        })?;
        self.summary.rank_spread = RankSpread::over(&ranks);
        self.summary.ranks = ranks;
        Ok(())
    }

    fn rank_record(&self, rank: u32) -> RankRecord {
        let Summary { epochs, allocator_stats: stats, settings, .. } = &self.summary;
        let steps: u64 = epochs.iter().map(|epoch| epoch.steps).sum();
        // CAST: fewer than 2^53 steps; nanoseconds of a run are exact up to 104 days.
        let mean = |seconds: f64| seconds / steps.max(1) as f64;
        let train_s = epochs.iter().map(|epoch| epoch.train_s).sum();
        let of_calls = |calls: &CallCounts| calls.iter().map(|(_, totals)| totals.blocked_ns).sum::<u64>();
        RankRecord {
            rank,
            device: settings.chosen.device.to_string(),
            alloc: settings.chosen.allocator.to_string(),
            directory: if rank == 0 { ".".to_owned() } else { format!("rank{rank}") },
            steps,
            train_s,
            step_s: mean(train_s),
            step_device_s: mean(epochs.iter().map(|epoch| epoch.train_device_s).sum()),
            // CAST: as above.
            exposed_communication_s: exposed(self.sum_waits),
            blocked_s: epochs.iter().map(|epoch| of_calls(&epoch.train_driver_calls)).sum::<u64>() as f64 / 1e9,
            driver_allocations: epochs.iter().map(|epoch| epoch.train_driver_calls.driver_allocations()).sum(),
            peak_reserved_bytes: stats.reserved_bytes.all.peak,
            peak_active_bytes: stats.active_bytes.all.peak,
            peak_pending_bytes: self.peak_pending_bytes,
        }
    }
}

/// Mean wait for sums in a step, from the number of timed steps and the total of their waits in ns.
fn exposed((steps, waited_ns): (u64, u64)) -> Option<f64> {
    // CAST: nanoseconds of a run are exact up to 104 days.
    (steps > 0).then(|| waited_ns as f64 / steps as f64 / 1e9)
}

/// The directory of the record of a rank, in that of rank 0, which exists once rank 0 has announced it.
pub(super) fn record_of_rank(group: &Group) -> Result<std::path::PathBuf> {
    let announced = group.broadcast(Vec::new())?;
    let directory: std::path::PathBuf = serde_json::from_slice(&announced)
        .map_err(|error| TrainError::Input(format!("rank 0 sent no directory for records: {error}")))?;
    Ok(directory.join(format!("rank{}", group.rank())))
}

/// Rows of a batch that this rank has.
pub(super) fn part(rows: usize, group: Option<&Group>) -> usize {
    group.map_or(rows, |group| ranks::share(0..rows, group.rank(), group.size()).len())
}

pub(super) fn communication(
    settings: &Settings,
    backend: Backend,
    buckets: &Buckets,
    costs: Option<SumCosts>,
) -> CommunicationRecord {
    let buffers = settings.buffers.unwrap_or_default();
    let (version, library) = backend.library.unzip();
    CommunicationRecord {
        backend: backend.name,
        version,
        library,
        bucket_bytes: buckets.bytes(),
        streams: settings.comm_streams.unwrap_or(1),
        source: settings.bucket_source.unwrap_or_default(),
        // CAST: a number of buckets.
        registered_buckets: (settings.register == Some(true)).then(|| buckets.registered() as u64),
        refusal: buckets.refusal().map(str::to_owned),
        context_bytes: costs.as_ref().map(|costs| costs.context_bytes),
        library_bytes: costs.as_ref().map(|costs| costs.library_bytes),
        counted_bytes: costs.as_ref().and_then(|costs| costs.counted_bytes),
        // CAST: nanoseconds of a sum.
        sum_s: costs.map(|costs| costs.sum_ns.iter().map(|ns| *ns as f64 / 1e9).collect()),
        buffers,
        waits: buffers.waits(),
    }
}
