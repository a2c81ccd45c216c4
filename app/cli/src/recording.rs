//! A history in memory: its events with where they came from, and what was there before the first of them.

use crate::explain::lines::beginning;
use crate::gpus::{Gpus, Tallies};
use crate::history::{Compiled, Compiling, no_events, say_cut};
use crate::reading::ReadArgs;
use anyhow::{Context, Result, anyhow};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use vramlab::backends::CachingSettings;
use vramlab::budget::{Budget, OverBudget};
use vramlab::contract::BlockState;
use vramlab::histories::formats::{Annotation, Event, Origins, ReadError, Summary, TextId, read_origins};
use vramlab::histories::memory::{Before, Events, Memory, Peaks, Recorded, Rules};
use vramlab::histories::replay::{ReplayError, Soundness, recorded_settings};

/// The index of what was there before the first event.
pub(crate) const START: usize = usize::MAX;

/// The events of one GPU and what else its history says.
pub(crate) struct Recording {
    path: PathBuf,
    pub(crate) events: Events,
    pub(crate) origins: Origins,
    pub(crate) summary: Summary,
    pub(crate) settings: CachingSettings,
    rules: Rules,
    pub(crate) device: u16,
    /// Why that GPU, and what the others of the file came to.
    pub(crate) gpus: Gpus,
    pub(crate) before: Before,
    /// What reading it may take.
    pub(crate) budget: Budget,
    /// Annotations of this GPU.
    ranges: Vec<Range>,
    /// From when on which of them is the innermost.
    innermost: Vec<(u64, Option<usize>)>,
}

impl Recording {
    /// Reads the events of a GPU from a file (`None`: of the only one, or of several of the one that matters most, as
    /// [`Tallies::choose`] says). `limit` is the memory limit under which it was recorded, where the file does not say it.
    pub(crate) fn read(path: &Path, gpu: Option<u16>, limit: Option<u64>, reading: &ReadArgs) -> Result<Self> {
        let options = reading.keeping(path);
        let mut tallies = Tallies::default();
        // Which GPU matters is known at the end. All of them share the budget.
        let mut kept: BTreeMap<u16, Events> = BTreeMap::new();
        let (summary, origins) = read_origins(path, &options, &mut |event, origin, _| {
            tallies.take(&event);
            let Event { action, device, addr, bytes, stream, time_ns } = event;
            if gpu.is_some_and(|gpu| gpu != device) {
                return Ok(());
            }
            let events = kept.entry(device).or_insert_with(|| Events::new(&options.budget));
            events.push(Recorded { addr, bytes, stream, time_ns, origin, action }).map_err(ReadError::stop)
        })?;
        say_cut(path, &summary);
        let gpus = tallies.choose(gpu, &summary);
        let device = gpus.gpu;
        let mut events = kept.remove(&device).unwrap_or_else(|| Events::new(&options.budget));
        drop(kept);
        check(&events, device, &summary, &options.budget).with_context(|| path.display().to_string())?;
        let mine = summary.segments.iter().any(|segment| segment.device == device);
        if events.is_empty() && !mine {
            return Err(no_events(path, device, &summary));
        }
        if events.len() > u32::MAX as usize - 2 {
            return Err(anyhow!("{}: there are more than four billion events", path.display()));
        }
        let ending = summary.ending().unwrap_or_default().iter().filter(|segment| segment.device == device);
        if ending.flat_map(|segment| &segment.blocks).any(|block| block.state == BlockState::PendingFree) {
            events.waits_at_end();
        }
        let mut settings =
            recorded_settings(&summary.allocator_settings).with_context(|| path.display().to_string())?;
        settings.memory_limit = limit.or(settings.memory_limit);
        let rules = Rules::new(&summary, device, &settings);
        let before = Before::new(&events, &rules, &summary, &origins, device);
        let ranges = ranges(&origins, Some(device));
        Ok(Self {
            path: path.to_owned(),
            events,
            origins,
            summary,
            settings,
            rules,
            device,
            gpus,
            before,
            budget: options.budget,
            innermost: innermost(&ranges),
            ranges,
        })
    }

    /// The history for replays. `limit` tells the memory limit that it had from what the program held.
    ///
    /// # Errors
    /// Those of compiling a history.
    pub(crate) fn compiled(&self, limit: impl FnOnce(Option<&Peaks>) -> Option<u64>) -> Result<Compiled> {
        let file = || self.path.display().to_string();
        let mut compiling = Compiling::new(self.device, &self.budget);
        for recorded in self.events.iter() {
            compiling.take(&event(self.device, &recorded)).with_context(file)?;
        }
        let recorded = compiling.finish(&self.summary, limit).with_context(file)?;
        if recorded.history.events() == 0 {
            return Err(no_events(&self.path, self.device, &self.summary));
        }
        Ok(Compiled { gpus: self.gpus.clone(), ..recorded })
    }

    /// The memory before the first event.
    ///
    /// # Errors
    /// [`OverBudget`] when it takes more than there is.
    pub(crate) fn memory(&self) -> Result<Memory, OverBudget> {
        Memory::beginning(self.rules.clone(), &self.before, &self.budget)
    }

    /// The number of an event, from 1, in the list that the file has of its GPU.
    pub(crate) fn number(&self, index: usize) -> u64 {
        // CAST: a length in memory.
        index as u64 + 1
    }

    /// Time of an event since the first; `None` in logs without times.
    pub(crate) fn since_start(&self, index: usize) -> Option<u64> {
        let first = self.events.first()?.time_ns;
        let time = self.events.get(index)?.time_ns;
        let timed = self.events.last().is_some_and(|last| last.time_ns > 0);
        timed.then(|| time.saturating_sub(first))
    }

    /// The innermost annotation at an event.
    pub(crate) fn annotation(&self, index: usize) -> Option<&str> {
        let time = self.events.get(index)?.time_ns;
        let next = self.innermost.partition_point(|(from, _)| *from <= time);
        let (_, innermost) = *self.innermost.get(next.checked_sub(1)?)?;
        Some(self.name(&self.ranges[innermost?]))
    }

    /// The name of an annotation, as far as it is shown.
    fn name(&self, range: &Range) -> &str {
        beginning(self.origins.spelt(range.name))
    }

    /// When the annotations began and ended whose names begin so.
    pub(crate) fn named(&self, begins: &str) -> Vec<(u64, u64)> {
        let named = self.ranges.iter().filter(|range| self.origins.spelt(range.name).starts_with(begins));
        named.map(|range| (range.start_ns, range.end_ns.unwrap_or(u64::MAX))).collect()
    }

    /// The annotations that lie in no other, in order: names, when they begin, and when they end.
    pub(crate) fn outermost(&self) -> impl Iterator<Item = (&str, u64, Option<u64>)> {
        let mut until = 0;
        let outer = self.ranges.iter().filter(move |range| {
            let outer = range.start_ns >= until;
            if outer {
                until = range.end_ns.unwrap_or(u64::MAX);
            }
            outer
        });
        outer.map(|range| (self.name(range), range.start_ns, range.end_ns))
    }

    /// The first event from the first annotation of a name on.
    pub(crate) fn begins(&self, name: &str) -> Option<usize> {
        let found = self.ranges.iter().find(|range| self.origins.spelt(range.name) == name)?;
        let index = self.events.at_time(found.start_ns);
        (index < self.events.len()).then_some(index)
    }
}

/// An event as the file has it.
fn event(device: u16, recorded: &Recorded) -> Event {
    let Recorded { action, addr, bytes, stream, time_ns, .. } = *recorded;
    Event { action, device, addr, bytes, stream, time_ns }
}

/// Refuses what a replay refuses, in the same words.
fn check(events: &Events, device: u16, summary: &Summary, budget: &Budget) -> Result<(), ReplayError> {
    let mut soundness = Soundness::new(device, budget);
    events.iter().try_for_each(|recorded| soundness.push(&event(device, &recorded)))?;
    soundness.finish(summary)
}

/// A range that a program named.
pub(crate) struct Range {
    pub(crate) start_ns: u64,
    /// `None` for one that does not end.
    pub(crate) end_ns: Option<u64>,
    pub(crate) name: TextId,
}

/// The ranges of a GPU (`None`: of all), in the order of their beginnings. An end without a beginning is left out.
pub(crate) fn ranges(origins: &Origins, gpu: Option<u16>) -> Vec<Range> {
    let mut out: Vec<Range> = Vec::new();
    let mut open: HashMap<TextId, Vec<usize>> = HashMap::new();
    let elsewhere = |device: Option<u16>| gpu.zip(device).is_some_and(|(gpu, device)| gpu != device);
    let mut all: Vec<&Annotation> = origins.annotations().iter().filter(|one| !elsewhere(one.device)).collect();
    all.sort_by_key(|annotation| annotation.time_ns);
    for annotation in all {
        if annotation.start {
            open.entry(annotation.name).or_default().push(out.len());
            out.push(Range { start_ns: annotation.time_ns, end_ns: None, name: annotation.name });
        } else if let Some(begun) = open.get_mut(&annotation.name).and_then(Vec::pop) {
            out[begun].end_ns = Some(annotation.time_ns);
        }
    }
    out
}

/// From when on which range is the innermost, the last that has begun and not ended.
fn innermost(ranges: &[Range]) -> Vec<(u64, Option<usize>)> {
    let begins = ranges.iter().enumerate().map(|(number, range)| (range.start_ns, number));
    let ends = ranges.iter().enumerate().filter_map(|(number, range)| Some((range.end_ns?, number)));
    let mut changes: Vec<(u64, usize)> = begins.chain(ends).collect();
    changes.sort_unstable();
    let (mut open, mut out) = (BTreeSet::new(), Vec::with_capacity(changes.len()));
    for (time, number) in changes {
        let ended = ranges[number].end_ns.is_some_and(|end| end <= time);
        if ended {
            open.remove(&number)
        } else {
            open.insert(number)
        };
        out.push((time, open.last().copied()));
    }
    out
}
