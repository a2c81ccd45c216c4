//! What a history would do under one setting: a replay with the memory that there is, and the least memory that would do.

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

/// Steps in which memory is looked for.
const STEP: u64 = 2 << 20;
/// More than any device has; the search ends there.
const HIGHEST: u64 = 1 << 45;

/// A history, and the memory in which it is to run.
#[derive(Debug)]
pub(super) struct Trial<'a> {
    path: &'a Path,
    pub(super) history: Cow<'a, History>,
    /// That history with every free complete at once; `None` where that is so anyway.
    instant: Option<History>,
    /// That history with frees that waited for other streams completing earlier or later.
    otherwise: Vec<History>,
    devices: Devices,
    /// Most bytes that may be reserved.
    pub(super) limit: Option<u64>,
    /// Whether it is the memory of a device, too.
    of_device: bool,
    /// Memory of a device in which everything fits.
    room: u64,
}

/// By how much longer or shorter than when it was recorded other streams may take: with another setting the program runs at
/// another pace.
const PACES: [f64; 4] = [0.5, 0.75, 1.5, 2.0];

/// What a replay came to. `T` is what was replayed.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Outcome<T> {
    #[serde(flatten)]
    pub(super) of: T,
    /// Under the limit, if there is one.
    pub(super) peak_reserved_bytes: u64,
    /// Mean of that and of the peaks if other streams took 0.5, 0.75, 1.5 and 2 times as long to be done with what was
    /// freed. Settings are ranked by it.
    pub(super) expected_peak_reserved_bytes: u64,
    /// Most bytes in blocks that are held, or freed and still used by a stream.
    pub(super) peak_active_bytes: u64,
    /// Whether a request is refused under the limit.
    pub(super) out_of_memory: bool,
    /// Whether more is reserved than the limit that was given, as expandable segments can: a request is checked by its
    /// own size, and pages are mapped whole.
    pub(super) over_limit: bool,
    /// The request that is refused; the replay ends there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_failure: Option<Failure>,
    pub(super) num_alloc_retries: u64,
    pub(super) driver_calls: BTreeMap<&'static str, u64>,
    /// Time in driver calls on a simulated H200.
    pub(super) simulated_s: Option<f64>,
}

impl<T> Outcome<T> {
    /// Whether it runs in the memory that there is.
    pub(super) fn runs(&self) -> bool {
        !self.out_of_memory && !self.over_limit
    }

    pub(super) fn calls(&self) -> u64 {
        self.driver_calls.values().sum()
    }

    /// Whether the figures fit together, and `bounds` where there are some for them.
    ///
    /// # Errors
    /// What contradicts what; then nothing is said of it.
    pub(super) fn check(&self, path: &Path, bounds: Option<&Bounds>) -> Result<()> {
        let (active, reserved) = (self.peak_active_bytes, self.peak_reserved_bytes);
        // A release of the cache waits for frees that completed later when the history was recorded.
        let waits = self.out_of_memory || self.num_alloc_retries > 0;
        let checked = match bounds.filter(|_| !waits) {
            _ if active > reserved => Err(format!("{} are in blocks of {} reserved", Bytes(active), Bytes(reserved))),
            Some(bounds) => bounds.check("a setting", reserved),
            None => Ok(()),
        };
        checked.map_err(|what| anyhow!("{}: the events contradict each other: {what}", path.display()))
    }
}

/// A setting that was looked at closely.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Setting {
    /// From 1.
    pub(super) rank: usize,
    #[serde(flatten)]
    pub(super) outcome: Outcome<Of>,
    /// The least limit under which every request is served and no more is reserved, in steps of 2 MiB; `null` when none
    /// was found.
    pub(super) smallest_memory_bytes: Option<u64>,
    /// Peak reserved if every free completed at once. What a program reserves lies between the two.
    pub(super) instant_peak_reserved_bytes: u64,
    /// The line of a shell that sets it.
    pub(super) export: String,
    /// The line of Python without which it does nothing; `null` where the setting works alone.
    pub(super) python: Option<String>,
}

/// Names a setting in JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Of {
    /// What `PYTORCH_CUDA_ALLOC_CONF` is set to.
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

    /// The trial of a history that differs.
    pub(super) fn changed(&self, change: impl Fn(&mut History)) -> Result<Self> {
        let mut history = History::clone(&self.history);
        change(&mut history);
        Self::over(self.path, Cow::Owned(history), self.limit, self.of_device)
    }

    fn over(path: &'a Path, history: Cow<'a, History>, limit: Option<u64>, of_device: bool) -> Result<Self> {
        let devices = Devices::open(&DeviceName::Sim(None))?;
        let waits = history.deferred_frees() > 0;
        let changed = |change: &dyn Fn(&mut History)| {
            let mut other = History::clone(&history);
            change(&mut other);
            other
        };
        let instant = waits.then(|| changed(&History::complete_at_once));
        let otherwise = PACES.iter().filter(|_| waits).map(|pace| changed(&|other| other.complete_at_pace(*pace)));
        let otherwise = otherwise.collect();
        let least = bound(&history);
        // No policy takes so much more; expandable segments reserve addresses by it.
        let room = least.max(limit.unwrap_or(0)).saturating_mul(8).clamp(1 << 38, HIGHEST);
        Ok(Self { path, history, instant, otherwise, devices, limit, of_device, room })
    }

    fn replay(&self, history: &History, of: &Selection, limit: Option<u64>) -> Result<ReplayReport, ReplayError> {
        let mut selection = of.clone();
        let keeps_to_it = selection.set_memory_limit(limit);
        let driver = self.devices.made(limit.filter(|_| !keeps_to_it).unwrap_or(self.room))?;
        let addresses = Addresses::Near;
        let how = ReplaySettings { addresses, stop_at_failure: true, ask_again: true, ..ReplaySettings::default() };
        replay(history, &selection, &driver, &how)
    }

    /// Replays a history under PyTorch's settings, as `how` says.
    pub(super) fn as_recorded(&self, conf: &Conf, how: &ReplaySettings) -> Result<ReplayReport> {
        let mut selection = conf.selection();
        let keeps_to_it = selection.set_memory_limit(self.limit);
        let driver = self.devices.made(self.limit.filter(|_| !keeps_to_it).unwrap_or(self.room));
        let report = driver.and_then(|driver| replay(&self.history, &selection, &driver, how));
        report.map_err(|error| failed(self.path, error))
    }

    /// Replays under a backend and its settings, up to the first request that is refused: there programs end.
    pub(super) fn under<T>(&self, of: T, selection: &Selection) -> Result<Outcome<T>> {
        let replayed = |history| self.replay(history, selection, self.limit).map_err(|error| failed(self.path, error));
        let report = replayed(&self.history)?;
        let peak = report.stats.reserved_bytes.all.peak;
        let out_of_memory = report.failed_allocations > 0;
        let limit = self.limit.filter(|_| self.of_device && !out_of_memory);
        let mut sum = peak;
        for other in &self.otherwise {
            sum += replayed(other)?.stats.reserved_bytes.all.peak;
        }
        Ok(Outcome {
            of,
            peak_reserved_bytes: peak,
            expected_peak_reserved_bytes: sum / (1 + self.otherwise.len() as u64),
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

    /// What takes several replays: the least memory, and the peak with instant completion.
    pub(super) fn closely(&self, outcome: Outcome<Of>) -> Result<Setting> {
        let conf = &outcome.of.conf;
        let selection = conf.selection();
        let told = |error| failed(self.path, error);
        let in_limit = |bytes| self.replay(&self.history, &selection, Some(bytes));
        let found = smallest_in(bound(&self.history), STEP, HIGHEST, in_limit, |_| {}).map_err(told)?;
        let smallest_memory_bytes = match found {
            Some(Capacity { bytes, report, .. }) => Some(enough(bytes, report, in_limit).map_err(told)?),
            None => None,
        };
        let instant_peak_reserved_bytes = match &self.instant {
            Some(instant) => self.replay(instant, &selection, self.limit).map_err(told)?.stats.reserved_bytes.all.peak,
            None => outcome.peak_reserved_bytes,
        };
        let (export, python) = (conf.export(), conf.python(self.limit));
        Ok(Setting { rank: 0, export, python, smallest_memory_bytes, instant_peak_reserved_bytes, outcome })
    }
}

/// The least memory from `bytes` on, in which a history runs, that holds all that is then reserved, too. Expandable segments pass
/// their limit, as no device lets them.
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
        // With more memory less is given back, so that the peak may rise with it, but not beyond what is reserved without a
        // limit. Growing steps keep the replays few.
        bytes = (bytes + step).max(if report.failed_allocations == 0 { peak.next_multiple_of(STEP) } else { 0 });
        step += step.div_ceil(4).next_multiple_of(STEP);
        report = run(bytes)?;
    }
}

/// Most bytes in use at once, what was asked for and refused included: no allocator does with less.
pub(super) fn bound(history: &History) -> u64 {
    let refused = |refused: &OutOfMemory| refused.live_bytes + refused.requested_bytes;
    history.out_of_memory().iter().map(refused).max().unwrap_or(0).max(history.max_live_bytes())
}
