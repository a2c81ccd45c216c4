//! What the commands that replay share: reading a history, opening a device.

use crate::gpus::{Gpus, Tallies};
use crate::reading::ReadArgs;
use anyhow::{Context, Result, anyhow};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use terminal::RuntimeFailure;
use vramlab::backends::CachingSettings;
use vramlab::budget::Budget;
use vramlab::histories::formats::{Cut, Event, Keys, ReadError, Summary, read};
use vramlab::histories::memory::{Levels, LimitBound, Peaks};
use vramlab::histories::replay::{History, HistoryBuilder, ReplayError, ReplayReport, recorded_settings};
use vramlab::{
    AllocError, Bytes, CudaDriver, DeviceName, Driver, NullDriver, Profile, Selection, SimDriver, SimMemory,
};

/// A history and the settings under which it was recorded.
pub(crate) struct Compiled {
    pub(crate) history: History,
    pub(crate) settings: CachingSettings,
    /// What the program that recorded it held; `None` where the file does not tell.
    pub(crate) as_recorded: Option<Peaks>,
    /// The allocator's settings as the file names them.
    pub(crate) allocator_settings: Map<String, Value>,
    /// The keys that a snapshot has.
    pub(crate) keys: Keys,
    /// Where the file was cut short, if it was.
    pub(crate) cut: Option<Cut>,
    /// What was held from the device at the peak, as far as the events show it: at least so much.
    pub(crate) seen_reserved: u64,
    /// What its garbage collections tell of the memory limit.
    pub(crate) limit_bound: LimitBound,
    /// Which GPU's history it is.
    pub(crate) gpus: Gpus,
    /// What the command may hold; the history has its part of it.
    pub(crate) budget: Budget,
}

/// Reads and compiles a file to be replayed. `limit` is the memory limit under which it was recorded, where the file does not
/// say it; warns where one is missing.
///
/// # Errors
/// Those of reading it; it holds several GPUs of which none is chosen.
pub(crate) fn load(path: &Path, gpu: Option<u16>, limit: Option<Bytes>, reading: &ReadArgs) -> Result<Compiled> {
    let file = OfFile::read(path, gpu, reading)?;
    if gpu.is_none() {
        file.gpus.check_single(path, "it holds several GPUs")?;
    }
    let compiled = file.compiled(path, |_| limit.map(|limit| limit.0))?;
    warn_of_limit(path, &compiled);
    Ok(compiled)
}

/// Reads one GPU's history from a file, as it was recorded: of several that of one that ran out of memory, else of the one that
/// reserved most.
///
/// # Errors
/// Those of reading the file and of events that fit no history.
pub fn read_history(path: &Path) -> Result<History> {
    Ok(load_under(path, None, &ReadArgs::default(), |_| None)?.history)
}

/// As [`load`], where what the recording program held says which limit it had. Of several GPUs it chooses one.
pub(crate) fn load_under(
    path: &Path,
    gpu: Option<u16>,
    reading: &ReadArgs,
    limit: impl FnOnce(Option<&Peaks>) -> Option<u64>,
) -> Result<Compiled> {
    OfFile::read(path, gpu, reading)?.compiled(path, limit)
}

/// What was read from a file. Which of its GPUs is compiled is known only now.
struct OfFile {
    summary: Summary,
    gpus: Gpus,
    /// The events of the GPU, or which of them contradicts those before it.
    compiling: Result<Compiling, ReplayError>,
}

impl OfFile {
    /// Reads a file once. The events of all GPUs that may be chosen share the reading's budget.
    fn read(path: &Path, gpu: Option<u16>, reading: &ReadArgs) -> Result<Self> {
        let options = reading.options();
        let mut tallies = Tallies::default();
        let mut compiling: BTreeMap<u16, Result<Compiling, ReplayError>> = BTreeMap::new();
        let summary = read(path, &options, &mut |event| {
            tallies.take(&event);
            if gpu.is_some_and(|gpu| gpu != event.device) {
                return Ok(());
            }
            let fresh = || Ok(Compiling::new(event.device, &options.budget));
            let own = compiling.entry(event.device).or_insert_with(fresh);
            let Ok(taking) = own else { return Ok(()) };
            match taking.take(&event) {
                // What is wrong with a GPU's events matters if that GPU is chosen.
                Err(error @ ReplayError::Event { .. }) if gpu.is_none() => *own = Err(error),
                taken => taken.map_err(ReadError::stop)?,
            }
            Ok(())
        })?;
        say_cut(path, &summary);
        let gpus = tallies.choose(gpu, &summary);
        let compiling = compiling.remove(&gpus.gpu);
        let compiling = compiling.unwrap_or_else(|| Ok(Compiling::new(gpus.gpu, &options.budget)));
        Ok(Self { summary, gpus, compiling })
    }

    fn compiled(self, path: &Path, limit: impl FnOnce(Option<&Peaks>) -> Option<u64>) -> Result<Compiled> {
        let Self { summary, gpus, compiling } = self;
        let finished = compiling.and_then(|compiling| compiling.finish(&summary, limit));
        let recorded = finished.with_context(|| path.display().to_string())?;
        if recorded.history.events() == 0 {
            return Err(no_events(path, gpus.gpu, &summary));
        }
        Ok(Compiled { gpus, ..recorded })
    }
}

/// The events of one GPU on their way to be compiled, and what they alone say of the program that made them.
#[derive(Debug)]
pub(crate) struct Compiling {
    gpu: u16,
    builder: HistoryBuilder,
    levels: Levels,
    budget: Budget,
}

impl Compiling {
    pub(crate) fn new(gpu: u16, budget: &Budget) -> Self {
        let builder = HistoryBuilder::new(Some(gpu)).within(budget);
        Self { gpu, builder, levels: Levels::new(Some(gpu)), budget: budget.clone() }
    }

    pub(crate) fn take(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.levels.take(event);
        self.builder.push(event)
    }

    /// Ends a compilation with what the file says besides its events.
    pub(crate) fn finish(
        mut self,
        summary: &Summary,
        limit: impl FnOnce(Option<&Peaks>) -> Option<u64>,
    ) -> Result<Compiled, ReplayError> {
        // PyTorch's snapshots may begin in the middle; other logs begin with their program.
        match summary.ending() {
            Some(segments) => self.builder.ends_with(segments)?,
            None if summary.cut.is_some() => self.builder.breaks_off(),
            None => self.builder.expect_complete(),
        }
        let as_recorded = self.levels.peaks(summary);
        let mut settings = recorded_settings(&summary.allocator_settings)?;
        settings.memory_limit = limit(as_recorded.as_ref()).or(settings.memory_limit);
        Ok(Compiled {
            history: self.builder.finish(&settings)?,
            settings,
            as_recorded,
            allocator_settings: summary.allocator_settings.clone(),
            keys: summary.keys,
            cut: summary.cut,
            seen_reserved: self.levels.least_reserved(),
            limit_bound: self.levels.limit(summary, &settings),
            gpus: Gpus::only(self.gpu),
            budget: self.budget,
        })
    }
}

/// Says in one line that a file was cut short, if it was.
pub(crate) fn say_cut(path: &Path, summary: &Summary) {
    // Some commands read a file more than once.
    static SAID: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if let Some(cut) = summary.cut
        && SAID.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(path.to_owned())
    {
        terminal::say(&format!("warning: {}: {cut}", path.display()));
    }
}

/// Warns where garbage was collected under a limit that neither the file nor the command line names: what went then is taken for
/// frees of the program's own.
fn warn_of_limit(path: &Path, recorded: &Compiled) {
    let most = match recorded.limit_bound {
        _ if recorded.settings.memory_limit.is_some() => return,
        LimitBound::None => return,
        LimitBound::Unknown => String::new(),
        LimitBound::Below(below) => format!("; it was {} or less: --limit {}B", Bytes(below - 1), below - 1),
    };
    let what = "garbage was collected under a memory limit; without --limit that counts as calls of empty_cache";
    terminal::say(&format!("warning: {}: {what}{most}", path.display()));
}

/// A history that holds nothing, or nothing of the chosen GPU.
pub(crate) fn no_events(path: &Path, gpu: u16, summary: &Summary) -> anyhow::Error {
    let counts = summary.events.iter().enumerate();
    let others: Vec<String> = counts.filter(|(_, count)| **count > 0).map(|(gpu, _)| gpu.to_string()).collect();
    let file = path.display();
    match others.is_empty() {
        true => anyhow!("{file}: there are no events; turn recording on before the work"),
        false => anyhow!("{file}: no event of GPU {gpu}; there are those of {}", others.join(", ")),
    }
}

/// An error of a replay: exit code 2 where the history or the command line is at fault, 1 where the device is.
pub(crate) fn failed(path: &Path, error: ReplayError) -> anyhow::Error {
    // The allocator and the device are chosen on the command line; the history has nothing to do with it.
    if let ReplayError::Alloc(AllocError::Unsupported { .. } | AllocError::File { .. }) = error {
        return anyhow::Error::msg(error.to_string());
    }
    let bad_input = error.is_bad_input();
    let text = format!("{}: {error}", path.display());
    if bad_input { anyhow::Error::msg(text) } else { RuntimeFailure::new(text).into() }
}

/// PyTorch's two policies.
pub(crate) const PYTORCH: &str = "caching,pytorch-expandable";

/// An allocator with what it can take over from the settings that a history was recorded under, and the size of the device
/// that stands for a limit which it does not keep itself.
pub(crate) fn adopted(alloc: &Selection, settings: &CachingSettings) -> (Selection, Option<u64>) {
    let mut backend = alloc.clone();
    backend.adopt(settings);
    let keeps = backend.set_memory_limit(settings.memory_limit);
    (backend, settings.memory_limit.filter(|_| !keeps))
}

/// Whether a replay put every block and every segment where it was recorded.
pub(crate) fn is_as_recorded(report: &ReplayReport) -> bool {
    report.address_mismatches == Some(0) && report.segment_mismatches.unwrap_or(0) == 0
}

/// More than any history can ask for.
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
    /// Opens what was named.
    pub(crate) fn open(name: &DeviceName) -> Result<Self> {
        Ok(match name {
            DeviceName::Sim(path) => {
                Self::Sim(Box::new(path.as_deref().map_or_else(|| Ok(Profile::h200()), Profile::read)?))
            }
            DeviceName::Null => Self::Null,
            DeviceName::Cuda(number) => Self::Cuda(Arc::new(CudaDriver::new(*number)?)),
        })
    }

    /// A device of so many bytes for a replay.
    pub(crate) fn made(&self, bytes: u64) -> Result<Arc<dyn Driver>, ReplayError> {
        self.make(Some(bytes)).map_err(|error| ReplayError::History(format!("cannot make a device: {error:#}")))
    }

    /// A device; with `bytes`, one that has that many for clients. A GPU has what it has.
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
