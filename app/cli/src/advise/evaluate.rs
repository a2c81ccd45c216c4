//! Replays under one setting: within the memory limit, and a search for the minimum memory.

use super::conf::Conf;
use crate::history::{Devices, failed};
use crate::replay::{Bounds, Failure};
use anyhow::{Result, anyhow};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use vramlab::histories::replay::{
    Addresses, Capacity, History, OutOfMemory, ReplayError, ReplayReport, ReplaySettings, replay, smallest_in,
};
use vramlab::{Bytes, DeviceName, Selection};

/// Step of the search for the minimum memory.
const STEP: u64 = 2 << 20;
/// End of the search, more than any device has.
const HIGHEST: u64 = 1 << 45;

/// A compiled trace, and the memory to replay it in.
#[derive(Debug)]
pub(super) struct Trial<'a> {
    path: &'a Path,
    pub(super) history: Cow<'a, History>,
    /// The trace with frees that complete immediately; `None` if they all do already.
    instant: Option<History>,
    /// The trace with deferred frees that complete earlier or later.
    paced: Vec<History>,
    devices: Devices,
    /// Limit on reserved bytes.
    pub(super) limit: Option<u64>,
    /// Whether the limit is a device's memory size.
    of_device: bool,
    /// Memory of a device that never runs out.
    room: u64,
}

/// Factors on the recorded time until deferred frees complete: the program's pace depends on the setting.
const PACES: [f64; 4] = [0.5, 0.75, 1.5, 2.0];

/// Result of a replay; `T` names the setting or allocator.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Outcome<T> {
    #[serde(flatten)]
    pub(super) of: T,
    /// Peak reserved bytes under the limit, if there is one.
    pub(super) peak_reserved_bytes: u64,
    /// Mean of that peak and the peaks with deferred frees that take 0.5, 0.75, 1.5 and 2 times as long. Settings are ranked by
    /// it.
    pub(super) expected_peak_reserved_bytes: u64,
    /// Peak active bytes: blocks that are allocated, or freed and still used by a stream.
    pub(super) peak_active_bytes: u64,
    /// Whether a request fails under the limit.
    pub(super) out_of_memory: bool,
    /// Whether the reserved peak exceeds `--limit`, as expandable segments can: PyTorch checks a request's own size, and maps
    /// full pages.
    pub(super) over_limit: bool,
    /// The request that failed; the replay ends there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_failure: Option<Failure>,
    pub(super) num_alloc_retries: u64,
    pub(super) driver_calls: BTreeMap<&'static str, u64>,
    /// Time in driver calls on a simulated H200.
    pub(super) simulated_s: Option<f64>,
}

impl<T> Outcome<T> {
    /// Whether the program runs within the limit.
    pub(super) fn runs(&self) -> bool {
        !self.out_of_memory && !self.over_limit
    }

    pub(super) fn calls(&self) -> u64 {
        self.driver_calls.values().sum()
    }

    /// Checks that the values are consistent with each other and with `bounds`.
    ///
    /// # Errors
    /// The contradiction, in one line.
    pub(super) fn check(&self, path: &Path, bounds: Option<&Bounds>) -> Result<()> {
        let (active, reserved) = (self.peak_active_bytes, self.peak_reserved_bytes);
        // A cache flush waits for frees that completed later in the recording.
        let waits = self.out_of_memory || self.num_alloc_retries > 0;
        let checked = match bounds.filter(|_| !waits) {
            _ if active > reserved => {
                Err(format!("{} are active, but only {} reserved", Bytes(active), Bytes(reserved)))
            }
            Some(bounds) => bounds.check("a setting", reserved),
            None => Ok(()),
        };
        checked.map_err(|problem| anyhow!("{}: the events contradict each other: {problem}", path.display()))
    }
}

/// A setting with its minimum memory.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Setting {
    /// From 1.
    pub(super) rank: usize,
    #[serde(flatten)]
    pub(super) outcome: Outcome<Of>,
    /// Minimum memory: the lowest limit under which every request succeeds and no more is reserved, in steps of 2 MiB; `null` if
    /// none was found.
    pub(super) smallest_memory_bytes: Option<u64>,
    /// Peak reserved if every free completes immediately. A program's peak is between the two.
    pub(super) instant_peak_reserved_bytes: u64,
    /// Shell line that sets it.
    pub(super) export: String,
    /// Python line that the setting requires; `null` if it needs none.
    pub(super) python: Option<String>,
}

/// Names a setting in JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Of {
    /// Value of `PYTORCH_CUDA_ALLOC_CONF`.
    pub(super) conf: Conf,
}

impl Setting {
    pub(super) fn conf(&self) -> &Conf {
        &self.outcome.of.conf
    }
}

impl<'a> Trial<'a> {
    pub(super) fn new(path: &'a Path, history: &'a History, limit: Option<u64>, of_device: bool) -> Result<Self> {
        Self::over(path, Cow::Borrowed(history), limit, of_device)
    }

    /// A trial of a modified trace.
    pub(super) fn changed(&self, change: impl Fn(&mut History)) -> Result<Self> {
        let mut history = History::clone(&self.history);
        change(&mut history);
        Self::over(self.path, Cow::Owned(history), self.limit, self.of_device)
    }

    fn over(path: &'a Path, history: Cow<'a, History>, limit: Option<u64>, of_device: bool) -> Result<Self> {
        let devices = Devices::open(&DeviceName::Sim(None))?;
        let deferred = history.deferred_frees() > 0;
        let changed = |change: &dyn Fn(&mut History)| {
            let mut other = History::clone(&history);
            change(&mut other);
            other
        };
        let instant = deferred.then(|| changed(&History::complete_at_once));
        let paced = PACES.iter().filter(|_| deferred).map(|pace| changed(&|other| other.complete_at_pace(*pace)));
        let paced = paced.collect();
        let least = bound(&history);
        // No policy reserves eight times the bound; expandable segments size their address range by it.
        let room = least.max(limit.unwrap_or(0)).saturating_mul(8).clamp(1 << 38, HIGHEST);
        Ok(Self { path, history, instant, paced, devices, limit, of_device, room })
    }

    fn replay(&self, history: &History, of: &Selection, limit: Option<u64>) -> Result<ReplayReport, ReplayError> {
        let mut selection = of.clone();
        let keeps_to_it = selection.set_memory_limit(limit);
        let driver = self.devices.with_memory(limit.filter(|_| !keeps_to_it).unwrap_or(self.room))?;
        let addresses = Addresses::Near;
        let how = ReplaySettings { addresses, stop_at_failure: true, ask_again: true, ..ReplaySettings::default() };
        replay(history, &selection, &driver, &how)
    }

    /// Replays under PyTorch's settings, with replay options.
    pub(super) fn as_recorded(&self, conf: &Conf, how: &ReplaySettings) -> Result<ReplayReport> {
        let mut selection = conf.selection();
        let keeps_to_it = selection.set_memory_limit(self.limit);
        let driver = self.devices.with_memory(self.limit.filter(|_| !keeps_to_it).unwrap_or(self.room));
        let report = driver.and_then(|driver| replay(&self.history, &selection, &driver, how));
        report.map_err(|error| failed(self.path, error))
    }

    /// Replays under a backend and its settings up to the first failed request, where programs end.
    pub(super) fn under<T>(&self, of: T, selection: &Selection) -> Result<Outcome<T>> {
        let replayed = |history| self.replay(history, selection, self.limit).map_err(|error| failed(self.path, error));
        let report = replayed(&self.history)?;
        let peak = report.stats.reserved_bytes.all.peak;
        let out_of_memory = report.failed_allocations > 0;
        let limit = self.limit.filter(|_| self.of_device && !out_of_memory);
        let mut sum = peak;
        for other in &self.paced {
            sum += replayed(other)?.stats.reserved_bytes.all.peak;
        }
        Ok(Outcome {
            of,
            peak_reserved_bytes: peak,
            expected_peak_reserved_bytes: sum / (1 + self.paced.len() as u64),
            peak_active_bytes: report.stats.active_bytes.all.peak,
            out_of_memory,
            over_limit: limit.is_some_and(|limit| peak > limit),
            first_failure: Failure::of(&report),
            num_alloc_retries: report.stats.num_alloc_retries,
            driver_calls: report.driver_calls,
            // CAST: nanoseconds far below 2^53.
            simulated_s: report.simulated_ns.map(|ns| ns as f64 / 1e9),
        })
    }

    /// Replays under PyTorch's settings.
    pub(super) fn run(&self, conf: &Conf) -> Result<Outcome<Of>> {
        self.under(Of { conf: conf.clone() }, &conf.selection())
    }

    /// Adds the values that take several replays: minimum memory, and the peak with immediate completion.
    pub(super) fn detailed(&self, outcome: Outcome<Of>) -> Result<Setting> {
        let conf = &outcome.of.conf;
        let selection = conf.selection();
        let named = |error| failed(self.path, error);
        let in_limit = |bytes| self.replay(&self.history, &selection, Some(bytes));
        let capacity = smallest_in(bound(&self.history), STEP, HIGHEST, in_limit, |_| {}).map_err(named)?;
        let smallest_memory_bytes = match capacity {
            Some(Capacity { bytes, report, .. }) => Some(enough(bytes, report, in_limit).map_err(named)?),
            None => None,
        };
        let instant_peak_reserved_bytes = match &self.instant {
            Some(instant) => self.replay(instant, &selection, self.limit).map_err(named)?.stats.reserved_bytes.all.peak,
            None => outcome.peak_reserved_bytes,
        };
        let (export, python) = (conf.export(), conf.python(self.limit));
        Ok(Setting { rank: 0, export, python, smallest_memory_bytes, instant_peak_reserved_bytes, outcome })
    }
}

/// Minimum memory from `bytes` on that also holds the reserved peak. Expandable segments exceed a limit, which no device allows.
fn enough(
    mut bytes: u64,
    mut report: ReplayReport,
    mut run: impl FnMut(u64) -> Result<ReplayReport, ReplayError>,
) -> Result<u64, ReplayError> {
    let mut step = STEP;
    loop {
        let peak = report.stats.reserved_bytes.all.peak;
        if report.failed_allocations == 0 && peak <= bytes {
            return Ok(bytes);
        }
        // With more memory less is released, so the peak may rise, but not above the peak without a limit. Growing steps keep
        // the number of replays low.
        bytes = (bytes + step).max(if report.failed_allocations == 0 { peak.next_multiple_of(STEP) } else { 0 });
        step += step.div_ceil(4).next_multiple_of(STEP);
        report = run(bytes)?;
    }
}

/// Peak live bytes, refused requests included: a lower bound for every allocator.
pub(super) fn bound(history: &History) -> u64 {
    let needed = |refused: &OutOfMemory| refused.live_bytes + refused.requested_bytes;
    history.out_of_memory().iter().map(needed).max().unwrap_or(0).max(history.max_live_bytes())
}
