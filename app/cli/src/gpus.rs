//! The GPUs of a file: the peak of each, and the GPU that a command analyzes.

use crate::words::{counted, size};
use anyhow::{Result, anyhow};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use vramlab::histories::formats::{Action, Event, Summary};
use vramlab::histories::memory::Levels;

/// The `--gpu` argument for the next command; empty if no GPU was chosen.
pub(crate) fn chosen(gpu: Option<u16>) -> String {
    gpu.map_or_else(String::new, |gpu| format!(" --gpu {gpu}"))
}

/// Counts for every GPU of a file, taken while its events are read.
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
    /// Counts the next event. O(1).
    pub(crate) fn take(&mut self, event: &Event) {
        let tally = self.0.entry(event.device).or_insert_with(|| Tally::new(event.device));
        tally.levels.take(event);
        tally.events += 1;
        tally.refused += u64::from(event.action == Action::Oom);
    }

    /// Chooses the requested GPU; without a request one that ran out of memory, else the one with the highest reserved peak.
    pub(crate) fn choose(mut self, requested: Option<u16>, summary: &Summary) -> Gpus {
        for segment in &summary.segments {
            self.0.entry(segment.device).or_insert_with(|| Tally::new(segment.device));
        }
        let mut all: Vec<GpuPeak> = self.0.iter().map(|(gpu, tally)| GpuPeak::new(*gpu, tally, summary)).collect();
        // Of equal GPUs the first.
        let key = |peak: &&GpuPeak| (peak.refused > 0, peak.peak_reserved_bytes, std::cmp::Reverse(peak.gpu));
        let gpu = requested.or(all.iter().max_by_key(key).map(|peak| peak.gpu)).unwrap_or(0);
        let chosen = all.iter().position(|peak| peak.gpu == gpu).map(|at| all.remove(at));
        let reason = match chosen {
            _ if requested.is_some() => Reason::Requested,
            Some(peak) if peak.refused > 0 => Reason::OutOfMemory,
            _ => Reason::HighestPeak,
        };
        Gpus { gpu, other_gpus: all, chosen, reason }
    }
}

/// The analyzed GPU of a file, and its other GPUs.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Gpus {
    /// The analyzed GPU: the one that `--gpu` names, else one that ran out of memory, else the one with the highest reserved
    /// peak.
    pub(crate) gpu: u16,
    /// The other GPUs of the file.
    pub(crate) other_gpus: Vec<GpuPeak>,
    /// Counts of the analyzed GPU; `None` if the file has neither events nor segments of it.
    #[serde(skip)]
    chosen: Option<GpuPeak>,
    #[serde(skip)]
    reason: Reason,
}

/// The reason for choosing a GPU.
#[derive(Clone, Copy, Debug, Default)]
enum Reason {
    Requested,
    OutOfMemory,
    #[default]
    HighestPeak,
}

/// Counts of one GPU of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct GpuPeak {
    gpu: u16,
    /// Number of its events.
    events: u64,
    /// Number of refused requests.
    refused: u64,
    /// Lower bound on this GPU's peak reserved bytes.
    peak_reserved_bytes: u64,
    /// Whether that bound is exact: the events and the segments at the end agree.
    peak_is_whole: bool,
}

impl GpuPeak {
    fn new(gpu: u16, Tally { levels, events, refused }: &Tally, summary: &Summary) -> Self {
        let (events, refused) = (*events, *refused);
        let segments = summary.segments.iter().filter(|segment| segment.device == gpu);
        let at_end = segments.map(|segment| segment.total_size).fold(0, u64::saturating_add);
        // Without events the segments at the end do not determine the peak.
        let peak = levels.peaks(summary).filter(|_| events > 0).map(|peaks| peaks.reserved);
        let peak_reserved_bytes = peak.unwrap_or_else(|| levels.least_reserved().max(at_end));
        Self { gpu, events, refused, peak_reserved_bytes, peak_is_whole: peak.is_some() }
    }

    /// The counts as part of a sentence.
    fn words(&self) -> String {
        let reserved = size(self.peak_reserved_bytes);
        let mut out = match (self.events, self.peak_is_whole) {
            (0, _) => return format!("{reserved} reserved at the end, no events"),
            (_, true) => format!("peak reserved {reserved}"),
            (_, false) => format!("peak reserved at least {reserved}"),
        };
        if self.refused > 0 {
            out += &format!(", out of memory ({})", counted(self.refused, "refused request"));
        }
        format!("{out}, {}", counted(self.events, "event"))
    }
}

impl Gpus {
    /// For a recording that is read for one GPU only.
    pub(crate) fn only(gpu: u16) -> Self {
        Self { gpu, ..Self::default() }
    }

    /// The `--gpu` argument for the next command; empty if the file has no other GPU.
    pub(crate) fn argument(&self) -> String {
        chosen((!self.other_gpus.is_empty()).then_some(self.gpu))
    }

    /// The name of a file, followed by the GPU if the file has several.
    pub(crate) fn named(&self, file: &str) -> String {
        if self.other_gpus.is_empty() { file.to_owned() } else { format!("{file}, GPU {}", self.gpu) }
    }

    /// The analyzed GPU and the reason for it, then a line for each other GPU; empty if the file has no other GPU.
    pub(crate) fn lines(&self) -> Vec<String> {
        if self.other_gpus.is_empty() {
            return Vec::new();
        }
        let reason = match self.reason {
            Reason::Requested => "chosen with --gpu",
            Reason::OutOfMemory => "which ran out of memory",
            Reason::HighestPeak => "which has the highest reserved peak",
        };
        let count = self.other_gpus.len() + 1;
        let mut out = vec![format!("The file contains {count} GPUs. This analysis is for GPU {}, {reason}.", self.gpu)];
        let line = |peak: &GpuPeak| format!("GPU {}: {} (--gpu {})", peak.gpu, peak.words(), peak.gpu);
        out.extend(self.other_gpus.iter().map(line));
        out
    }

    /// Refuses a file with several GPUs, for a command that analyzes one and does not choose.
    ///
    /// # Errors
    /// The file contains several GPUs; the error lists them with their peaks.
    pub(crate) fn check_single(&self, path: &Path, what: &str) -> Result<()> {
        if self.other_gpus.is_empty() {
            return Ok(());
        }
        let mut all: Vec<&GpuPeak> = self.chosen.iter().chain(&self.other_gpus).collect();
        all.sort_by_key(|peak| peak.gpu);
        let list: Vec<String> = all.into_iter().map(|peak| format!("GPU {} ({})", peak.gpu, peak.words())).collect();
        Err(anyhow!("{}: {what}: {}; choose one with --gpu", path.display(), list.join(", ")))
    }
}
