//! The minimum memory in which a recording runs.

use super::ReplayReport;
use super::run::{ReplaySettings, replay};
use crate::history::{History, ReplayError};
use std::sync::Arc;
use vramlab_device::Driver;
use vramlab_policies::backends::Selection;

/// A tested size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Memory of the device for clients, in bytes.
    pub bytes: u64,
    /// Whether every allocation succeeded.
    pub runs: bool,
}

/// Result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Capacity {
    /// The minimum size, in bytes: a multiple of the granularity. One step less either failed or is below the peak live bytes.
    pub bytes: u64,
    /// Granularity of the search, in bytes.
    pub granularity: u64,
    /// Tested sizes, in order.
    pub probes: Vec<Probe>,
    /// The replay at [`bytes`](Self::bytes).
    pub report: ReplayReport,
}

/// Searches by bisection for the smallest device on which every allocation succeeds, in steps of `granularity` bytes. `device`
/// makes a device with that many bytes for clients; `progress` receives each probe.
///
/// Bisection finds the minimum only if a recording that runs in some memory also runs in more. That holds for backends whose
/// behaviour depends on the device's size only through failures; one that flushes its cache under pressure and continues may run
/// in one size and fail in a larger one. In any case the returned size was tested and runs, and one step less does not.
///
/// A probe that runs costs as much as [`replay`], one that fails stops at its first failure; there are about log2(highest /
/// granularity) probes.
///
/// # Errors
/// Those of `device` and of [`replay`]; [`ReplayError::History`] when the recording does not run in `highest` bytes.
pub fn smallest_memory(
    history: &History,
    allocator: &Selection,
    granularity: u64,
    highest: u64,
    mut device: impl FnMut(u64) -> Result<Arc<dyn Driver>, ReplayError>,
    progress: impl FnMut(Probe),
) -> Result<Capacity, ReplayError> {
    let settings = ReplaySettings { stop_at_failure: true, ..ReplaySettings::default() };
    let run = |bytes| replay(history, allocator, &device(bytes)?, &settings);
    let capacity = smallest_in(history.max_live_bytes(), granularity, highest, run, progress)?;
    capacity
        .ok_or_else(|| ReplayError::History(format!("the recording does not run in {highest} bytes under {allocator}")))
}

/// The search of [`smallest_memory`] with any function `run` that replays in a given size, starting at `least` bytes. `None` if
/// it fails up to `highest`.
///
/// # Errors
/// Those of `run`.
pub fn smallest_in(
    least: u64,
    granularity: u64,
    highest: u64,
    mut run: impl FnMut(u64) -> Result<ReplayReport, ReplayError>,
    mut progress: impl FnMut(Probe),
) -> Result<Option<Capacity>, ReplayError> {
    let mut probes = Vec::new();
    let mut probe = |steps: u64| -> Result<(bool, ReplayReport), ReplayError> {
        let bytes = steps * granularity;
        let report = run(bytes)?;
        let probe = Probe { bytes, runs: report.failed_allocations == 0 };
        progress(probe);
        probes.push(probe);
        Ok((probe.runs, report))
    };
    let most = highest / granularity;
    // Below the peak live bytes nothing can run, which needs no probe.
    let least = least.div_ceil(granularity);
    let (mut fails, mut step) = (least.saturating_sub(1), least.max(1));
    // Upwards from the bound in growing steps: good allocators are near it.
    let mut smallest = loop {
        if step > most {
            return Ok(None);
        }
        let (runs, report) = probe(step)?;
        if runs {
            break (step, report);
        }
        let grown = (step + (step - fails).max(step / 64).max(1) * 2).min(most.max(step + 1));
        (fails, step) = (step, grown);
    };
    while smallest.0 - fails > 1 {
        let middle = fails + (smallest.0 - fails) / 2;
        match probe(middle)? {
            (true, report) => smallest = (middle, report),
            (false, _) => fails = middle,
        }
    }
    Ok(Some(Capacity { bytes: smallest.0 * granularity, granularity, probes, report: smallest.1 }))
}
