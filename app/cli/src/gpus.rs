//! The GPUs of a file: what each of them came to, and which one an answer is about.

use crate::words::{counted, size};
use anyhow::{Result, anyhow};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use vramlab::histories::formats::{Action, Event, Summary};
use vramlab::histories::memory::Levels;

/// What the next command needs that goes on from one for which `--gpu` chose.
pub(crate) fn chosen(gpu: Option<u16>) -> String {
    gpu.map_or_else(String::new, |gpu| format!(" --gpu {gpu}"))
}

/// What every GPU of a file came to, counted while its events are read.
#[derive(Debug, Default)]
pub(crate) struct Tallies(BTreeMap<u16, Tally>);

#[derive(Debug)]
struct Tally {
    levels: Levels,
    events: u64,
    refused: u64,
}

impl Tally {
    fn new(gpu: u16) -> Self {
        Self { levels: Levels::new(Some(gpu)), events: 0, refused: 0 }
    }
}

impl Tallies {
    /// Takes the next event. O(1).
    pub(crate) fn take(&mut self, event: &Event) {
        let tally = self.0.entry(event.device).or_insert_with(|| Tally::new(event.device));
        tally.levels.take(event);
        tally.events += 1;
        tally.refused += u64::from(event.action == Action::Oom);
    }

    /// Chooses the GPU that is asked for; else one that ran out of memory; else, or of several that did, the one that reserved
    /// most.
    pub(crate) fn choose(mut self, asked: Option<u16>, summary: &Summary) -> Gpus {
        for held in &summary.segments {
            self.0.entry(held.device).or_insert_with(|| Tally::new(held.device));
        }
        let mut all: Vec<GpuPeak> = self.0.iter().map(|(gpu, tally)| GpuPeak::of(*gpu, tally, summary)).collect();
        // Of equals the first.
        let key = |one: &&GpuPeak| (one.refused > 0, one.peak_reserved_bytes, std::cmp::Reverse(one.gpu));
        let gpu = asked.or(all.iter().max_by_key(key).map(|most| most.gpu)).unwrap_or(0);
        let own = all.iter().position(|one| one.gpu == gpu).map(|at| all.remove(at));
        let why = match own {
            _ if asked.is_some() => Why::Asked,
            Some(own) if own.refused > 0 => Why::RanOut,
            _ => Why::ReservedMost,
        };
        Gpus { gpu, other_gpus: all, own, why }
    }
}

/// The GPU that an answer is about, and the others.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Gpus {
    /// Number of the GPU whose events these are: of several the one that `--gpu` names, else one that ran out of memory,
    /// else the one that reserved most.
    pub(crate) gpu: u16,
    /// The other GPUs of the file.
    pub(crate) other_gpus: Vec<GpuPeak>,
    /// What the GPU itself came to; `None` where the file has nothing of it.
    #[serde(skip)]
    own: Option<GpuPeak>,
    #[serde(skip)]
    why: Why,
}

/// Why a GPU was chosen.
#[derive(Clone, Copy, Debug, Default)]
enum Why {
    Asked,
    RanOut,
    #[default]
    ReservedMost,
}

/// What a GPU of a file came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct GpuPeak {
    gpu: u16,
    /// Its events.
    events: u64,
    /// Requests that were refused on it.
    refused: u64,
    /// Most bytes that were reserved on it, as far as the file tells: at least so many.
    peak_reserved_bytes: u64,
    /// Whether its events and what was held at the end agree, so that it was not more.
    peak_is_whole: bool,
}

impl GpuPeak {
    fn of(gpu: u16, Tally { levels, events, refused }: &Tally, summary: &Summary) -> Self {
        let (events, refused) = (*events, *refused);
        let held = summary.segments.iter().filter(|segment| segment.device == gpu);
        let at_end = held.map(|segment| segment.total_size).fold(0, u64::saturating_add);
        // What was held at the end says nothing of the peak where no event was recorded.
        let told = levels.peaks(summary).filter(|_| events > 0).map(|told| told.reserved);
        let peak_reserved_bytes = told.unwrap_or_else(|| levels.least_reserved().max(at_end));
        Self { gpu, events, refused, peak_reserved_bytes, peak_is_whole: told.is_some() }
    }

    /// What it came to, in half a sentence.
    fn words(&self) -> String {
        let reserved = size(self.peak_reserved_bytes);
        let mut out = match (self.events, self.peak_is_whole) {
            (0, _) => return format!("{reserved} reserved at the end, no events"),
            (_, true) => format!("at most {reserved} reserved"),
            (_, false) => format!("at least {reserved} reserved at the peak"),
        };
        if self.refused > 0 {
            out += &format!(", out of memory ({})", counted(self.refused, "refused request"));
        }
        format!("{out}, {}", counted(self.events, "event"))
    }
}

impl Gpus {
    /// Those of a history that is asked for by the number of its GPU.
    pub(crate) fn only(gpu: u16) -> Self {
        Self { gpu, ..Self::default() }
    }

    /// What the next command needs to be about the same GPU; nothing where the file has no other.
    pub(crate) fn argument(&self) -> String {
        chosen((!self.other_gpus.is_empty()).then_some(self.gpu))
    }

    /// The name of a file, with the GPU where the file has several.
    pub(crate) fn named(&self, file: &str) -> String {
        if self.other_gpus.is_empty() { file.to_owned() } else { format!("{file}, GPU {}", self.gpu) }
    }

    /// Which GPU this is about and why, then a line for each other one; nothing where the file has no other.
    pub(crate) fn lines(&self) -> Vec<String> {
        if self.other_gpus.is_empty() {
            return Vec::new();
        }
        let why = match self.why {
            Why::Asked => "which --gpu names",
            Why::RanOut => "which ran out of memory",
            Why::ReservedMost => "which reserved most",
        };
        let count = self.other_gpus.len() + 1;
        let mut out = vec![format!("The file holds {count} GPUs. This is about GPU {}, {why}.", self.gpu)];
        let line = |one: &GpuPeak| format!("GPU {}: {} (--gpu {})", one.gpu, one.words(), one.gpu);
        out.extend(self.other_gpus.iter().map(line));
        out
    }

    /// Refuses a file with several GPUs, for a command that does not choose one.
    ///
    /// # Errors
    /// There are several, which are named with their peaks.
    pub(crate) fn check_single(&self, path: &Path, what: &str) -> Result<()> {
        if self.other_gpus.is_empty() {
            return Ok(());
        }
        let mut all: Vec<&GpuPeak> = self.own.iter().chain(&self.other_gpus).collect();
        all.sort_by_key(|one| one.gpu);
        let list: Vec<String> = all.into_iter().map(|one| format!("GPU {} ({})", one.gpu, one.words())).collect();
        Err(anyhow!("{}: {what}: {}; choose one with --gpu", path.display(), list.join(", ")))
    }
}
