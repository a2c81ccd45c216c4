//! `vramlab convert`: writes a recording in another tool's format.
//!
//! The output can be replayed: each event is checked as in a replay before it is written, and an event that contradicts
//! earlier ones ends the conversion.

use crate::explain::lines::{line_of, words};
use crate::gpus::{Gpus, Tallies};
use crate::history::{Devices, PYTORCH, Trace, TraceBuilder, adopted, is_as_recorded, no_events};
use crate::reading::{FromEvents, ReadArgs, warn_of_cut};
use crate::recording::{Range, ranges};
use crate::words::counted;
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use terminal::{Bar, Page, RuntimeFailure, arguments, command, quoted};
use vramlab::backends::parse_list;
use vramlab::budget::Budget;
use vramlab::histories::formats::{
    Action, Ending, Event, Export, Format, Origin, Origins, Place, Problem, ReadError, StackId, Summary, TextId,
    TraceWriter, WriteError, WriteProblem, jsonl_placements, read_origins_from,
};
use vramlab::histories::replay::{
    Addresses, BlockPlace, ReplayError, ReplaySettings, Watched, recorded_settings, replay_watched,
};
use vramlab::input::open_stream;
use vramlab::output::{Existing, OutputFile, OutputProblem};

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// Recording: PyTorch snapshot (pickle or JSON), RMM log, STAlloc trace, minimalloc table or trace.jsonl; plain, .gz or .xz
    #[arg(value_name = "IN")]
    from: PathBuf,
    /// Output format; events that it cannot represent are omitted (only snapshots and perfetto keep stack frames and annotations)
    #[arg(long, value_name = "FORMAT", value_parser = arguments::export())]
    to: Export,
    /// Output file (written atomically)
    #[arg(short, long, value_name = "OUT")]
    out: PathBuf,
    /// Convert only this GPU's events [default: all]
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// Replace OUT if it exists
    #[arg(long)]
    force: bool,
}

/// Reads a recording, writes it in another format and prints the number of events written and omitted.
pub(crate) fn convert(args: &ConvertArgs) -> Result<()> {
    let (file, bytes) = open(&args.from)?;
    let out = begin(args)?;
    // A pipe has no size.
    let form = if bytes > 0 {
        "{bar:30} convert {bytes}/{total_bytes} {wide_msg} [{elapsed} left {eta}]"
    } else {
        "{spinner} convert {bytes} {wide_msg} [{elapsed}]"
    };
    let bar = Bar::new(bytes, form);
    bar.message(args.from.display().to_string());
    let mut tally = Tally::default();
    let summary = write(args, out, bar.reading(file), &mut tally)?;
    bar.clear();
    warn_of_cut(&args.from, &summary);
    let mut page = Page::stdout();
    page.line(tally.line(args, &summary));
    let out = quoted(&args.out.to_string_lossy());
    match args.to {
        Export::Perfetto => page.line(format!("Next: open {out} in https://ui.perfetto.dev")),
        _ => page.next(&command("vramlab", &format!("replay {out}{}", tally.gpu_argument(args)))),
    }
    page.print()
}

/// The input and its size.
fn open(path: &Path) -> Result<(File, u64)> {
    let failed = |problem| ReadError { path: path.to_owned(), place: Place::Whole, problem };
    let file = open_stream(path).map_err(|error| failed(Problem::of_opening(error)))?;
    let metadata = file.metadata().map_err(|error| failed(Problem::Io(error)))?;
    Ok((file, metadata.len()))
}

/// Opens the output before anything is read.
fn begin(args: &ConvertArgs) -> Result<OutputFile> {
    let existing = if args.force { Existing::Replace } else { Existing::Refuse };
    OutputFile::create(&args.out, existing).map_err(|error| match error.problem {
        OutputProblem::Exists => anyhow!("{}: already exists; --force replaces it", args.out.display()),
        _ => error.into(),
    })
}

fn write(args: &ConvertArgs, out: OutputFile, source: impl std::io::Read, tally: &mut Tally) -> Result<Summary> {
    let mut writer = args.to.begin(out).map_err(unwritten)?;
    let options = args.read.options();
    tally.budget = options.budget.clone();
    let mut labels = Labels::default();
    let mut sink = |event: Event, origin: Origin, origins: &Origins| {
        let chosen = args.gpu.is_none_or(|gpu| gpu == event.device);
        if chosen && args.to == Export::Perfetto && event.action == Action::Alloc {
            labels.write(writer.as_mut(), origin, origins);
        }
        tally.take(args, writer.as_mut(), event, origin, origins)
    };
    let read = read_origins_from(Box::new(source), &options, &mut sink);
    if let Some(error) = tally.unwritten.take() {
        return Err(unwritten(error));
    }
    let (mut summary, origins) = read.map_err(|error| ReadError { path: args.from.clone(), ..error })?;
    tally.chosen = std::mem::take(&mut tally.tallies).choose(args.gpu, &summary);
    if tally.too_many {
        tally
            .chosen
            .check_single(&args.from, &format!("it contains several GPUs and {} can hold one", args.to.name()))?;
    }
    summary.segments.retain(|segment| args.gpu.is_none_or(|gpu| gpu == segment.device));
    // A snapshot without events still contains the segments.
    let snapshot = matches!(args.to, Export::Snapshot | Export::SnapshotJson);
    if tally.events() == 0 && (!snapshot || summary.segments.is_empty()) {
        return Err(no_events(&args.from, tally.chosen.gpu, &summary));
    }
    let traces = tally.finish_checks(&summary).with_context(|| args.from.display().to_string())?;
    if args.to == Export::Perfetto {
        tally.ranges = write_ranges(writer.as_mut(), &origins, args.gpu).map_err(unwritten)?;
        for (gpu, trace) in &traces {
            writer.served(*gpu, placements(args, &summary, trace));
        }
    }
    tally.passed_over = writer.passed_over();
    tally.stood_in = writer.stood_in();
    if tally.written(args.to) == 0 && tally.events() > 0 {
        let text = format!("{} cannot represent any of its {} events", args.to.name(), tally.events());
        bail!("{}: {text}; choose another format with --to", args.from.display());
    }
    let ending = Ending {
        segments: &summary.segments,
        allocator_settings: Some(&summary.allocator_settings),
        devices: u16::try_from(summary.events.len()).unwrap_or(u16::MAX),
        origins: Some(&origins),
    };
    writer.finish(&ending).map_err(unwritten)?;
    Ok(summary)
}

/// The number, from 1, and the line of each stack described so far.
#[derive(Default)]
struct Labels(HashMap<StackId, (String, String)>);

impl Labels {
    /// Writes the origin of the next block: its line, its stack's number, its category and the program's note.
    fn write(&mut self, writer: &mut dyn TraceWriter, origin: Origin, origins: &Origins) {
        let number = self.0.len() + 1;
        let (stack, line) = match origin.stack.is_empty() {
            true => ("", ""),
            false => {
                let (stack, line) = self.0.entry(origin.stack).or_insert_with(|| {
                    let line = line_of(origins, origin.stack).unwrap_or_default();
                    let frames: Vec<String> = origins.frames(origin.stack).map(|frame| words(origins, frame)).collect();
                    writer.describe_stack(number, &line, &frames.join("\n"));
                    (number.to_string(), line)
                });
                (stack.as_str(), line.as_str())
            }
        };
        let labels = [
            ("line", line),
            ("stack", stack),
            ("category", origins.spelt(origin.category)),
            ("note", origins.spelt(origin.note)),
        ];
        let labels: Vec<(&'static str, &str)> = labels.into_iter().filter(|(_, text)| !text.is_empty()).collect();
        if !labels.is_empty() {
            writer.say(line, &labels);
        }
    }
}

/// The placement of each allocation, from the log itself or from a replay that matches every recorded address; empty if neither
/// has it.
fn placements(args: &ConvertArgs, summary: &Summary, trace: &Trace) -> Vec<BlockPlace> {
    if summary.format == Format::Jsonl {
        // A pipe cannot be read a second time.
        let placements = args.from.is_file().then(|| jsonl_placements(&args.from));
        return placements.and_then(Result::ok).unwrap_or_default();
    }
    // CAST: blocks of a history in memory.
    let before = trace.history.prologue_allocations() as usize;
    replay_placements(trace).map_or_else(Vec::new, |mut all| all.split_off(before.min(all.len())))
}

/// The placement of each allocation, starting with those from before recording started; `None` if no replay matches every
/// recorded block and segment address.
fn replay_placements(Trace { history, settings, .. }: &Trace) -> Option<Vec<BlockPlace>> {
    history.check_comparable().ok()?;
    parse_list(PYTORCH).ok()?.iter().find_map(|policy| {
        let (policy, _) = adopted(policy, settings);
        let driver = Devices::Null.make(None).ok()?;
        let how = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
        let mut watched = Watched::default();
        let report = replay_watched(history, &policy, &driver, &how, &mut watched).ok()?;
        is_as_recorded(&report).then_some(watched.places)
    })
}

/// Tracks for annotations that overlap without nesting.
const TRACKS: [&str; 3] = ["annotations", "annotations 2", "annotations 3"];

/// Writes the program's annotations as slices of a timeline, and returns the number of their starts and ends written. A range
/// without an end, and one that would overlap others on every track, is omitted.
fn write_ranges(writer: &mut dyn TraceWriter, origins: &Origins, gpu: Option<u16>) -> Result<u64, WriteError> {
    let ended = |range: Range| Some((range.start_ns, range.end_ns?.max(range.start_ns), range.name));
    let mut ranges: Vec<(u64, u64, TextId)> = ranges(origins, gpu).into_iter().filter_map(ended).collect();
    ranges.sort_by_key(|(start, end, _)| (*start, Reverse(*end)));
    let mut written = 0;
    // Ends of the open ranges on each track.
    let mut ends: [Vec<u64>; TRACKS.len()] = Default::default();
    for (start, end, name) in ranges {
        let fits = |ends: &mut Vec<u64>| {
            while ends.last().is_some_and(|last| *last <= start) {
                ends.pop();
            }
            ends.last().is_none_or(|last| end <= *last)
        };
        if let Some(track) = ends.iter_mut().position(fits) {
            ends[track].push(end);
            writer.slice(TRACKS[track], origins.spelt(name), start, end - start)?;
            written += 2;
        }
    }
    Ok(written)
}

/// The error of a write: exit code 2 if the recording does not fit the format, 1 if the operating system failed.
fn unwritten(error: WriteError) -> anyhow::Error {
    match error.problem {
        WriteProblem::Output(ref problem) if !problem.is_refusal() => RuntimeFailure::new(error).into(),
        _ => error.into(),
    }
}

/// Counts of the events read, written and omitted.
#[derive(Debug, Default)]
struct Tally {
    /// Counts of all GPUs.
    tallies: Tallies,
    /// The chosen GPU, and the others.
    chosen: Gpus,
    /// Whether there are events of more GPUs than the format can hold.
    too_many: bool,
    /// Events of the chosen GPUs by action.
    read: [u64; Action::ALL.len()],
    /// Checks of each GPU's events.
    gpus: BTreeMap<u16, TraceBuilder>,
    /// Number of GPUs.
    gpu_count: usize,
    /// Events that the writer could not place.
    passed_over: u64,
    /// Completions of frees that the writer wrote as frees.
    stood_in: u64,
    /// Annotation starts and ends in the output.
    ranges: u64,
    /// The error that ended the reading because an event could not be written.
    unwritten: Option<WriteError>,
    /// Memory limit of reading and checking.
    budget: Budget,
}

impl Tally {
    fn take(
        &mut self,
        args: &ConvertArgs,
        writer: &mut dyn TraceWriter,
        event: Event,
        origin: Origin,
        origins: &Origins,
    ) -> Result<(), ReadError> {
        self.tallies.take(&event);
        if args.gpu.is_some_and(|gpu| gpu != event.device) {
            return Ok(());
        }
        // CAST: a small enumeration.
        self.read[event.action as usize] += 1;
        let other = self.gpus.first_key_value().is_some_and(|(first, _)| *first != event.device);
        self.too_many |= other && matches!(args.to, Export::Rmm | Export::Minimalloc);
        // The remaining events are read for the peaks of the GPUs that the error lists.
        if self.too_many {
            return Ok(());
        }
        let checks = self.gpus.entry(event.device).or_insert_with(|| TraceBuilder::begin(event.device, &self.budget));
        checks.push(&event, origin).map_err(|error| match error {
            // Events are numbered per GPU.
            ReplayError::Event { number, what } if other => {
                ReadError::stop(format!("event {number} of GPU {}: {what}", event.device))
            }
            error => ReadError::stop(error),
        })?;
        writer.event_from(&event, origin, origins).map_err(|error| {
            self.unwritten = Some(error);
            ReadError::stop("an event cannot be written")
        })
    }

    /// Runs the checks that need all events, and returns each GPU's trace.
    fn finish_checks(&mut self, summary: &Summary) -> Result<Vec<(u16, Trace)>, ReplayError> {
        self.gpu_count = self.gpus.len();
        if self.gpus.is_empty() {
            recorded_settings(&summary.allocator_settings)?;
        }
        let checked = std::mem::take(&mut self.gpus).into_iter();
        checked.map(|(gpu, checks)| Ok((gpu, checks.finish(summary, Gpus::only(gpu), None)?))).collect()
    }

    /// The `--gpu` argument for a command on the output: a snapshot contains all GPUs unless one was chosen.
    fn gpu_argument(&self, args: &ConvertArgs) -> String {
        let all_gpus = matches!(args.to, Export::Snapshot | Export::SnapshotJson) && args.gpu.is_none();
        if all_gpus { self.chosen.argument() } else { String::new() }
    }

    fn events(&self) -> u64 {
        self.read.iter().sum()
    }

    /// Number of events in the output.
    fn written(&self, to: Export) -> u64 {
        let kept = Action::ALL.into_iter().zip(self.read).filter(|(action, _)| to.holds(*action));
        kept.map(|(_, count)| count).sum::<u64>().saturating_sub(self.passed_over) + self.stood_in
    }

    /// The counts as one line.
    fn line(&self, args: &ConvertArgs, summary: &Summary) -> String {
        let mut omitted: Vec<String> = Vec::new();
        let written = self.written(args.to);
        for (action, count) in Action::ALL.into_iter().zip(self.read).filter(|(_, count)| *count > 0) {
            let count = if action == Action::FreeCompleted { count - self.stood_in.min(count) } else { count };
            if !args.to.holds(action) && count > 0 {
                omitted.push(format!("{count} {action}"));
            }
        }
        if self.passed_over > 0 {
            omitted.push(format!("{} of blocks from before recording started", self.passed_over));
        }
        if summary.unknown_actions > 0 {
            omitted.push(match &summary.unknown_names[..] {
                [] => format!("{} of unknown actions", summary.unknown_actions),
                names => format!("{} of unknown actions ({})", summary.unknown_actions, names.join(", ")),
            });
        }
        let annotations = summary.external_annotations.saturating_sub(self.ranges);
        if annotations > 0 && !matches!(args.to, Export::Snapshot | Export::SnapshotJson) {
            omitted.push(format!("{annotations} annotations"));
        }
        let others = summary.all_events().saturating_sub(self.events());
        if others > 0 {
            omitted.push(format!("{others} of other GPUs"));
        }
        let (from, out) = (args.from.display(), args.out.display());
        let (format, to) = (summary.format.name(), args.to.name());
        let gpus = counted(self.gpu_count as u64, "GPU");
        let omitted =
            if omitted.is_empty() { "nothing omitted".to_owned() } else { format!("omitted: {}", omitted.join(", ")) };
        // Only these two formats show until when a block is live.
        let lifetimes = matches!(args.to, Export::Perfetto | Export::Minimalloc);
        let count = |action: Action| self.read[action as usize]; // CAST: the number of the action.
        let ends = if lifetimes && count(Action::FreeRequested) > 0 && count(Action::FreeCompleted) == 0 {
            " The recording has no free_completed events: blocks are shown as live until their addresses are reused."
        } else {
            ""
        };
        format!("{from} ({format}) to {out} ({to}): {written} events of {gpus}; {omitted}.{ends}")
    }
}

#[cfg(test)]
mod tests;
