//! A recording in memory, as `explain`, `diff`, `report` and `advise` examine it.

use crate::explain::lines::beginning;
use crate::gpus::Gpus;
use crate::history::{Trace, TraceBuilder, no_events};
use crate::reading::{FromEvents, OneGpu, ReadArgs, read_gpu};
use anyhow::{Context, Result, anyhow};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use vramlab::backends::CachingSettings;
use vramlab::budget::{Budget, OverBudget};
use vramlab::contract::BlockState;
use vramlab::histories::formats::{Action, Annotation, Event, Origin, Origins, Summary, TextId};
use vramlab::histories::memory::{Events, InitialState, Memory, RecordedEvent, Rules, Totals};
use vramlab::histories::replay::{ReplayError, Soundness, recorded_settings};

/// The index that stands for the memory before recording started.
pub(crate) const START: usize = usize::MAX;

/// A recording of one GPU: its events with their origins, and the memory before the first of them.
pub(crate) struct Recording {
    path: PathBuf,
    pub(crate) events: Events,
    pub(crate) origins: Origins,
    pub(crate) summary: Summary,
    pub(crate) settings: CachingSettings,
    rules: Rules,
    pub(crate) device: u16,
    /// Why that GPU was chosen, and the peaks of the file's other GPUs.
    pub(crate) gpus: Gpus,
    pub(crate) initial: InitialState,
    /// Memory budget of the reading.
    pub(crate) budget: Budget,
    /// Whether its events have times.
    timed: bool,
    /// Annotations of this GPU; none if its events have no times.
    ranges: Vec<Range>,
    /// The innermost annotation from each time on.
    innermost: Vec<(u64, Option<usize>)>,
}

impl FromEvents for Events {
    const ORIGINS: bool = true;

    fn begin(_gpu: u16, budget: &Budget) -> Self {
        Self::new(budget)
    }

    fn push(&mut self, event: &Event, origin: Origin) -> Result<(), ReplayError> {
        let Event { action, addr, bytes, stream, time_ns, .. } = *event;
        Ok(Self::push(self, RecordedEvent { addr, bytes, stream, time_ns, origin, action })?)
    }
}

impl Recording {
    /// Reads the recording of `gpu` (without it, of the GPU that [`Tallies::choose`](crate::gpus::Tallies::choose) names) and
    /// checks its events. `limit` is the memory limit during recording, for files that do not contain it.
    ///
    /// # Errors
    /// Those of reading; events that contradict each other; nothing of the GPU in the file.
    pub(crate) fn read(path: &Path, gpu: Option<u16>, limit: Option<u64>, reading: &ReadArgs) -> Result<Self> {
        let check = |events: &Events, device: u16, summary: &Summary, budget: &Budget| {
            let mut soundness = Soundness::new(device, budget);
            events.iter().try_for_each(|recorded| soundness.push(&event(device, &recorded)))?;
            soundness.finish(summary)
        };
        Self::read_and(check, path, gpu, limit, reading).map(|(recording, ())| recording)
    }

    /// As [`read`](Self::read), for commands that also replay the recording: the events are checked while they are compiled.
    ///
    /// # Errors
    /// As above.
    pub(crate) fn read_to_replay(
        path: &Path,
        gpu: Option<u16>,
        limit: Option<u64>,
        reading: &ReadArgs,
    ) -> Result<(Self, TraceBuilder)> {
        let compile = |events: &Events, device: u16, _: &Summary, budget: &Budget| builder(events, device, budget);
        Self::read_and(compile, path, gpu, limit, reading)
    }

    /// Reads a file and passes the chosen GPU's events to `check` before anything is computed from them.
    fn read_and<T>(
        check: impl FnOnce(&Events, u16, &Summary, &Budget) -> Result<T, ReplayError>,
        path: &Path,
        gpu: Option<u16>,
        limit: Option<u64>,
        reading: &ReadArgs,
    ) -> Result<(Self, T)> {
        let file = || path.display().to_string();
        let options = reading.keeping(path);
        let budget = options.budget.clone();
        let OneGpu { summary, origins, gpus, events } = read_gpu::<Events>(path, gpu, &options)?;
        if summary.is_pinned {
            return Err(anyhow!(
                "{}: these are requests of pinned host memory, not of a GPU's; replay them with vramlab replay --host, or name the \
                 recording of the GPU beside the file",
                path.display()
            ));
        }
        let device = gpus.gpu;
        let mut events = events.with_context(file)?;
        let checked = check(&events, device, &summary, &budget).with_context(file)?;
        if events.is_empty() && !summary.segments.iter().any(|segment| segment.device == device) {
            return Err(no_events(path, device, &summary));
        }
        if events.len() > u32::MAX as usize - 2 {
            return Err(anyhow!("{}: there are more than four billion events", path.display()));
        }
        let ending = summary.ending().unwrap_or_default().iter().filter(|segment| segment.device == device);
        if ending.flat_map(|segment| &segment.blocks).any(|block| block.state == BlockState::PendingFree) {
            events.waits_at_end();
        }
        if summary.cut.is_some() {
            events.breaks_off();
        }
        let mut settings = recorded_settings(&summary.allocator_settings).with_context(file)?;
        settings.memory_limit = limit.or(settings.memory_limit);
        let rules = Rules::new(&summary, device, &settings);
        let initial = InitialState::new(&events, &rules, &summary, &origins, device);
        let timed = has_times(&events, &summary);
        let ranges = if timed { ranges(&origins, Some(device)) } else { Vec::new() };
        let recording = Self {
            path: path.to_owned(),
            events,
            origins,
            summary,
            settings,
            rules,
            device,
            gpus,
            initial,
            budget,
            timed,
            innermost: innermost(&ranges),
            ranges,
        };
        Ok((recording, checked))
    }

    /// Whether PyTorch allocated expandable segments.
    pub(crate) fn has_expandable_segments(&self) -> bool {
        let ends = self.summary.segments.iter();
        self.events.count(Action::SegmentMap) > 0
            || ends.filter(|segment| segment.device == self.device).any(|segment| segment.is_expandable)
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The trace for replays. `limit` is the memory limit during recording, for files that do not contain it.
    ///
    /// # Errors
    /// Those of compiling the events.
    pub(crate) fn trace(&self, limit: Option<u64>) -> Result<Trace> {
        self.finish(self.builder()?, limit)
    }

    /// The events, ready to be compiled.
    ///
    /// # Errors
    /// The budget is used up.
    pub(crate) fn builder(&self) -> Result<TraceBuilder> {
        builder(&self.events, self.device, &self.budget).with_context(|| self.path.display().to_string())
    }

    /// Compiles the events of a [`builder`](Self::builder).
    ///
    /// # Errors
    /// Those of compiling them.
    pub(crate) fn finish(&self, builder: TraceBuilder, limit: Option<u64>) -> Result<Trace> {
        let trace = builder.finish(&self.summary, self.gpus.clone(), limit);
        trace.with_context(|| self.path.display().to_string())?.check_not_empty(&self.path, &self.summary)
    }

    /// The memory before recording started.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub(crate) fn memory(&self) -> Result<Memory, OverBudget> {
        Memory::beginning(self.rules.clone(), &self.initial, &self.budget)
    }

    /// The number of an event among those of its GPU, from 1.
    pub(crate) fn number(&self, index: usize) -> u64 {
        // CAST: a length in memory.
        index as u64 + 1
    }

    /// Time of an event since the first; `None` without [times](Self::is_timed).
    pub(crate) fn since_start(&self, index: usize) -> Option<u64> {
        let first = self.events.first()?.time_ns;
        let time = self.events.get(index)?.time_ns;
        self.timed.then(|| time.saturating_sub(first))
    }

    /// Whether the events have times: durations are unknown where times are missing or go backwards.
    pub(crate) fn is_timed(&self) -> bool {
        self.timed
    }

    /// Annotations of this GPU by start time; none without [times](Self::is_timed).
    pub(crate) fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// The innermost annotation at an event.
    pub(crate) fn annotation(&self, index: usize) -> Option<&str> {
        let time = self.events.get(index)?.time_ns;
        let next = self.innermost.partition_point(|(from, _)| *from <= time);
        let (_, innermost) = *self.innermost.get(next.checked_sub(1)?)?;
        Some(self.name(&self.ranges[innermost?]))
    }

    /// The name of an annotation, shortened for display.
    fn name(&self, range: &Range) -> &str {
        beginning(self.origins.spelt(range.name))
    }

    /// Start and end times of annotations whose names begin with a text.
    pub(crate) fn named(&self, begins: &str) -> Vec<(u64, u64)> {
        let named = self.ranges.iter().filter(|range| self.origins.spelt(range.name).starts_with(begins));
        named.map(|range| (range.start_ns, range.end_ns.unwrap_or(u64::MAX))).collect()
    }

    /// Top-level annotations in order: name, start and end.
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

    /// Reserved bytes of these totals; `None` if unknown: the recording has no segments, or none of the live blocks'.
    pub(crate) fn reserved(&self, totals: Totals) -> Option<u64> {
        let new_segments = self.events.count(Action::SegmentAlloc) + self.events.count(Action::SegmentMap);
        let has_segments = new_segments > 0 || !self.initial.segments.is_empty();
        (has_segments && (totals.reserved > 0 || totals.active == 0)).then_some(totals.reserved)
    }

    /// The first event since the first annotation of a name.
    pub(crate) fn begins(&self, name: &str) -> Option<usize> {
        let range = self.ranges.iter().find(|range| self.origins.spelt(range.name) == name)?;
        let index = self.events.at_time(range.start_ns);
        (index < self.events.len()).then_some(index)
    }
}

/// An event as in the file.
fn event(device: u16, recorded: &RecordedEvent) -> Event {
    let RecordedEvent { action, addr, bytes, stream, time_ns, .. } = *recorded;
    Event { action, device, addr, bytes, stream, time_ns }
}

fn builder(events: &Events, device: u16, budget: &Budget) -> Result<TraceBuilder, ReplayError> {
    let mut builder = TraceBuilder::begin(device, budget);
    events.iter().try_for_each(|recorded| builder.push(&event(device, &recorded), recorded.origin))?;
    Ok(builder)
}

/// Clocks of several processors differ by less.
const JITTER_NS: u64 = 1_000_000;

/// Whether events have times. Those of snapshots are since 1970, so that 0 is a missing one.
fn has_times(events: &Events, summary: &Summary) -> bool {
    let mut latest = 0;
    let is_ordered = |event: RecordedEvent| {
        latest = latest.max(event.time_ns);
        event.time_ns.saturating_add(JITTER_NS) >= latest && (event.time_ns > 0 || !summary.format.is_snapshot())
    };
    events.last().is_some_and(|last| last.time_ns > 0) && events.iter().all(is_ordered)
}

/// A named time range of a program.
pub(crate) struct Range {
    pub(crate) start_ns: u64,
    /// `None` for a range that does not end.
    pub(crate) end_ns: Option<u64>,
    pub(crate) name: TextId,
}

/// The ranges of a GPU (`None`: of all) by start time. Ends without a start are left out.
pub(crate) fn ranges(origins: &Origins, gpu: Option<u16>) -> Vec<Range> {
    let mut out: Vec<Range> = Vec::new();
    let mut open: HashMap<TextId, Vec<usize>> = HashMap::new();
    let elsewhere = |device: Option<u16>| gpu.zip(device).is_some_and(|(gpu, device)| gpu != device);
    let mut all: Vec<&Annotation> =
        origins.annotations().iter().filter(|annotation| !elsewhere(annotation.device)).collect();
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

/// The innermost range from each time on: the last one that has started and not ended.
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
