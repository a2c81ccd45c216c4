//! The smallest memory in which a history still runs.

use super::ReplayReport;
use super::run::{ReplaySettings, replay};
use crate::history::{History, ReplayError};
use std::sync::Arc;
use vramlab_device::Driver;
use vramlab_policies::backends::Selection;

/// One size that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Memory of the device for clients, in bytes.
    pub bytes: u64,
    /// Whether every allocation succeeded.
    pub runs: bool,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Capacity {
    /// The smallest size that was found to run, in bytes: a multiple of the granularity. One step less either failed
    /// or is below what the client held at once.
    pub bytes: u64,
    /// Steps in which sizes were tried, in bytes.
    pub granularity: u64,
    /// Every size that was tried, in order.
    pub probes: Vec<Probe>,
    /// The replay at [`bytes`](Self::bytes).
    pub report: ReplayReport,
}

/// Searches by bisection for the smallest device on which every allocation of a history succeeds, in steps of
/// `granularity` bytes. `device` makes a fresh device with that many bytes for clients; `progress` hears of each probe.
///
/// Bisection finds the smallest size only if what runs in some memory also runs in more. That holds for a backend whose
/// behaviour depends on the device's size only by failing; one that releases its cache under pressure and goes on may
/// run in some size and fail in a larger one. What always holds is what was tried: the size that is returned runs, and
/// one step less does not.
///
/// A replay that runs costs as much as [`replay`], one that fails ends at its first failure; there are about
/// log2(highest / granularity) of them.
///
/// # Errors
/// Those of `device` and of [`replay`]; [`ReplayError::History`] when the history does not run in `highest` bytes.
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
    let found = smallest_in(history.max_live_bytes(), granularity, highest, run, progress)?;
    found.ok_or_else(|| ReplayError::History(format!("the history does not run in {highest} bytes under {allocator}")))
}

/// The search of [`smallest_memory`] where `run` replays in so many bytes, in whatever way, from `least` bytes on. `None` when nothing up to
/// `highest` runs.
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
    // Below what the client holds at once nothing can run, so that needs no probe.
    let least = least.div_ceil(granularity);
    let (mut fails, mut step) = (least.saturating_sub(1), least.max(1));
    // Upwards from the bound in growing steps: good allocators end near it.
    let mut found = loop {
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
    while found.0 - fails > 1 {
        let middle = fails + (found.0 - fails) / 2;
        match probe(middle)? {
            (true, report) => found = (middle, report),
            (false, _) => fails = middle,
        }
    }
    Ok(Some(Capacity { bytes: found.0 * granularity, granularity, probes, report: found.1 }))
}
