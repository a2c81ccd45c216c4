//! Shared by the commands that replay: the compiled trace of a recording, and devices to replay it on.

use crate::gpus::Gpus;
use crate::reading::{FromEvents, OneGpu, ReadArgs, read_gpu};
use anyhow::{Context, Result, anyhow};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;
use terminal::RuntimeFailure;
use vramlab::backends::CachingSettings;
use vramlab::budget::{Budget, OverBudget};
use vramlab::histories::formats::{Cut, Event, Keys, Origin, Summary};
use vramlab::histories::memory::{Levels, LimitBound, Peaks};
use vramlab::histories::replay::{History, HistoryBuilder, ReplayError, ReplayReport, recorded_settings};
use vramlab::{
    AllocError, Bytes, CudaDriver, DeviceName, Driver, NullDriver, Profile, Selection, SimDriver, SimMemory,
};

/// A recording compiled for replays.
pub(crate) struct Trace {
    pub(crate) history: History,
    /// Settings of the recorded allocator.
    pub(crate) settings: CachingSettings,
    /// Peaks of the recorded allocator; `None` where the file does not contain enough to compute them.
    pub(crate) recorded_peaks: Option<Peaks>,
    /// Settings under the names that the file uses.
    pub(crate) allocator_settings: Map<String, Value>,
    /// Keys that the snapshot contains.
    pub(crate) keys: Keys,
    /// Where the file was cut short, if it was.
    pub(crate) cut: Option<Cut>,
    /// Lower bound on peak reserved bytes, from the events alone.
    pub(crate) least_reserved: u64,
    /// Bound on the memory limit, inferred from garbage collections.
    pub(crate) limit_bound: LimitBound,
    /// Which GPU of the file it is.
    pub(crate) gpus: Gpus,
    /// Memory budget of the command; the history has claimed its share.
    pub(crate) budget: Budget,
}

/// Reads and compiles a file. `limit` is the memory limit during recording, for files that do not contain it. Warns where
/// the limit is missing.
///
/// # Errors
/// Those of reading; the file contains several GPUs and `gpu` chooses none.
pub(crate) fn load(path: &Path, gpu: Option<u16>, limit: Option<Bytes>, reading: &ReadArgs) -> Result<Trace> {
    let file = read_gpu(path, gpu, &reading.options())?;
    if gpu.is_none() {
        file.gpus.check_single(path, "the file contains several GPUs")?;
    }
    let trace = compiled(file, path, limit.map(|limit| limit.0))?;
    warn_of_limit(path, &trace);
    Ok(trace)
}

/// Reads and compiles one GPU of a file: of several, one that ran out of memory, else the one with the highest peak.
///
/// # Errors
/// Those of reading the file, and events that contradict each other.
pub fn read_history(path: &Path) -> Result<History> {
    Ok(compiled(read_gpu(path, None, &ReadArgs::default().options())?, path, None)?.history)
}

fn compiled(file: OneGpu<TraceBuilder>, path: &Path, limit: Option<u64>) -> Result<Trace> {
    let OneGpu { summary, gpus, events, .. } = file;
    let trace = events.and_then(|builder| builder.finish(&summary, gpus, limit));
    trace.with_context(|| path.display().to_string())?.check_not_empty(path, &summary)
}

impl Trace {
    /// Refuses a trace without events.
    ///
    /// # Errors
    /// [`no_events`].
    pub(crate) fn check_not_empty(self, path: &Path, summary: &Summary) -> Result<Self> {
        if self.history.events() > 0 { Ok(self) } else { Err(no_events(path, self.gpus.gpu, summary)) }
    }
}

/// Compiles the events of one GPU, taken one at a time.
#[derive(Debug)]
pub(crate) struct TraceBuilder {
    builder: HistoryBuilder,
    levels: Levels,
    budget: Budget,
}

impl FromEvents for TraceBuilder {
    const ORIGINS: bool = false;

    fn begin(gpu: u16, budget: &Budget) -> Self {
        let builder = HistoryBuilder::new(Some(gpu)).within(budget);
        Self { builder, levels: Levels::new(Some(gpu)), budget: budget.clone() }
    }

    fn push(&mut self, event: &Event, _origin: Origin) -> Result<(), ReplayError> {
        self.levels.take(event);
        self.builder.push(event)
    }
}

impl TraceBuilder {
    /// A copy with the same events, to be finished under another limit.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget has no room for it.
    pub(crate) fn copy(&self) -> Result<Self, OverBudget> {
        Ok(Self { builder: self.builder.copy()?, levels: self.levels.clone(), budget: self.budget.clone() })
    }

    /// Peaks of the recorded allocator, once all events were taken.
    pub(crate) fn peaks(&self, summary: &Summary) -> Option<Peaks> {
        self.levels.peaks(summary)
    }

    /// Compiles the events. `limit` is the memory limit during recording; without it, the one that the file contains.
    ///
    /// # Errors
    /// Those of [`HistoryBuilder::finish`], and settings that PyTorch does not accept.
    pub(crate) fn finish(mut self, summary: &Summary, gpus: Gpus, limit: Option<u64>) -> Result<Trace, ReplayError> {
        // PyTorch's snapshots may begin in the middle; other logs begin with their program.
        match summary.ending() {
            Some(segments) => self.builder.ends_with(segments)?,
            None if summary.cut.is_some() => self.builder.breaks_off(),
            None => self.builder.expect_complete(),
        }
        self.builder.names_pools(&summary.segment_pools)?;
        let mut settings = recorded_settings(&summary.allocator_settings)?;
        settings.memory_limit = limit.or(settings.memory_limit);
        Ok(Trace {
            history: self.builder.finish(&settings)?,
            settings,
            recorded_peaks: self.levels.peaks(summary),
            allocator_settings: summary.allocator_settings.clone(),
            keys: summary.keys,
            cut: summary.cut,
            least_reserved: self.levels.least_reserved(),
            limit_bound: self.levels.limit(summary, &settings),
            gpus,
            budget: self.budget,
        })
    }
}

/// Warns if PyTorch collected garbage under a limit that neither the file nor the command line contains: those releases count as
/// the program's own.
fn warn_of_limit(path: &Path, trace: &Trace) {
    let bound = match trace.limit_bound {
        _ if trace.settings.memory_limit.is_some() => return,
        LimitBound::None => return,
        LimitBound::Unknown => String::new(),
        LimitBound::Below(below) => format!("; it was {} or less: --limit {}B", Bytes(below - 1), below - 1),
    };
    let problem = "garbage was collected under a memory limit; without --limit that counts as calls of empty_cache";
    terminal::say(&format!("warning: {}: {problem}{bound}", path.display()));
}

/// The error for a file without events, or without events of the chosen GPU.
pub(crate) fn no_events(path: &Path, gpu: u16, summary: &Summary) -> anyhow::Error {
    let counts = summary.events.iter().enumerate();
    let others: Vec<String> = counts.filter(|(_, count)| **count > 0).map(|(gpu, _)| gpu.to_string()).collect();
    let file = path.display();
    match others.is_empty() {
        true => anyhow!("{file}: the file has no events; start recording before the work"),
        false => anyhow!("{file}: no event of GPU {gpu}; the file has events of {}", others.join(", ")),
    }
}

/// Converts an error of a replay: exit code 2 for bad recordings and arguments, 1 for device failures.
pub(crate) fn failed(path: &Path, error: ReplayError) -> anyhow::Error {
    // The command line is at fault, not the file.
    if let ReplayError::Alloc(AllocError::Unsupported { .. } | AllocError::File { .. }) = error {
        return anyhow::Error::msg(error.to_string());
    }
    let bad_input = error.is_bad_input();
    let text = format!("{}: {error}", path.display());
    if bad_input { anyhow::Error::msg(text) } else { RuntimeFailure::new(text).into() }
}

/// PyTorch's two policies.
pub(crate) const PYTORCH: &str = "caching,pytorch-expandable";

/// An allocator with the recorded settings that it has, and the device size that replaces a limit that it cannot apply itself.
pub(crate) fn adopted(alloc: &Selection, settings: &CachingSettings) -> (Selection, Option<u64>) {
    let mut backend = alloc.clone();
    backend.adopt(settings);
    let applies_limit = backend.set_memory_limit(settings.memory_limit);
    (backend, settings.memory_limit.filter(|_| !applies_limit))
}

/// Whether every block and every segment of a replay is at its recorded address.
pub(crate) fn is_as_recorded(report: &ReplayReport) -> bool {
    report.address_mismatches == Some(0) && report.segment_mismatches.unwrap_or(0) == 0
}

/// More than any recording can request.
const UNLIMITED: u64 = 1 << 62;

/// Makes fresh devices of one kind.
#[derive(Debug)]
pub(crate) enum Devices {
    /// Simulated, with this profile.
    Sim(Box<Profile>),
    /// Without costs.
    Null,
    /// One GPU.
    Cuda(Arc<CudaDriver>),
}

impl Devices {
    /// Opens a device by name.
    pub(crate) fn open(name: &DeviceName) -> Result<Self> {
        Ok(match name {
            DeviceName::Sim(path) => {
                Self::Sim(Box::new(path.as_deref().map_or_else(|| Ok(Profile::h200()), Profile::read)?))
            }
            DeviceName::Null => Self::Null,
            DeviceName::Cuda(number) => Self::Cuda(Arc::new(CudaDriver::new(*number)?)),
        })
    }

    /// Makes a device with this memory size for a replay.
    pub(crate) fn with_memory(&self, bytes: u64) -> Result<Arc<dyn Driver>, ReplayError> {
        self.make(Some(bytes)).map_err(|error| ReplayError::History(format!("cannot make a device: {error:#}")))
    }

    /// Makes a device; with `bytes`, a device with that much memory for clients. A real GPU keeps its own size.
    pub(crate) fn make(&self, bytes: Option<u64>) -> Result<Arc<dyn Driver>> {
        Ok(match self {
            Self::Sim(profile) => {
                let mut profile = profile.as_ref().clone();
                if let Some(bytes) = bytes {
                    profile.total_bytes = profile.context_bytes.saturating_add(bytes);
                }
                Arc::new(SimDriver::new(profile, SimMemory::None))
            }
            Self::Null => Arc::new(NullDriver::new(bytes.unwrap_or(UNLIMITED))),
            Self::Cuda(driver) => {
                driver.bind_to_thread()?;
                Arc::clone(driver) as Arc<dyn Driver>
            }
        })
    }
}
