//! `vramlab explain`: which lines hold memory at the peak, the reserved-memory breakdown, when the peaks are, and which requests
//! miss the cache.
//!
//! It follows the recorded allocator's events. Only the cost of deferred frees is computed by a replay.

mod breakdown;
mod causes;
mod checkpoints;
mod device_use;
mod explanation;
pub(crate) mod frames;
pub(crate) mod lines;
mod moments;
pub(crate) mod phases;
mod purposes;
mod ranks;
mod releases;
mod screen;
mod survey;
mod transient;

use self::phases::phases;
use crate::history::{Devices, adopted};
use crate::reading::{ReadArgs, share_of};
use crate::recording::{Recording, START};
use anyhow::{Result, anyhow, bail};
use checkpoints::Checkpoints;
use clap::Args;
use lines::Lines;
use moments::{describe, growth, held, holders, moment};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use survey::Survey;
use terminal::{Bar, Page, Shard};
use vramlab::backends::{TorchAllocator, of_torch};
use vramlab::histories::formats::Action;
use vramlab::histories::replay::{History, ReplaySettings, replay};
use vramlab::{Bytes, Selection};

pub(crate) use breakdown::Pools;
pub(crate) use explanation::{Explanation, Moment};
pub(crate) use lines::line_of;
pub(crate) use moments::{Held, Line};
pub(crate) use purposes::is_cublas_workspace;
pub(crate) use releases::{By, Releases};
pub(crate) use screen::{place, when};
pub(crate) use survey::{Misses, captures_graphs};
pub(crate) use transient::{Avoidable, OptimizerTemporaries, autocast_copies, optimizer_temporaries};

/// Default number of rows of each table.
const ROWS: u16 = 5;

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Recordings: PyTorch snapshots or other formats that `convert` reads; plain, .gz or .xz. Several files, such as the ranks of
    /// a job, are compared in one table
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    how: How,
    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = ROWS, value_parser = clap::value_parser!(u16).range(1..))]
    top: u16,
    /// Read only every Nth file, starting with the Kth
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Print one JSON object with all results
    #[arg(long)]
    json: bool,
}

/// Options for explaining a recording.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct How {
    /// Show every stack frame [default: fold frames of libraries, PyTorch, Python and C++]
    #[arg(long)]
    pub(crate) frames: bool,
    /// Show what grew between two moments: event numbers, or names of annotations (their start) [default: between repetitions of
    /// an annotation or of the recording's pattern, if there are at least four]
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    pub(crate) between: Option<Vec<String>>,
    /// Memory limit of the recorded program, such as 24GiB; distinguishes a retry from empty_cache
    #[arg(long, value_name = "BYTES")]
    pub(crate) limit: Option<Bytes>,
    /// Explain this GPU's events [default: one that ran out of memory, else the one with the highest reserved peak]
    #[arg(long, value_name = "N")]
    pub(crate) gpu: Option<u16>,
    #[command(flatten)]
    pub(crate) read: ReadArgs,
}

/// Explains recordings and prints the result.
pub(crate) fn explain(args: &ExplainArgs) -> Result<()> {
    let files = share_of(&args.files, args.shard)?;
    match &files[..] {
        [file] if args.files.len() == 1 => {
            let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
            bar.message(format!("reading {}", file.display()));
            let explanation = explanation(&args.how, file)?;
            bar.clear();
            if args.json {
                return terminal::print_json(&explanation);
            }
            let mut page = Page::stdout();
            screen::report(&explanation, args, &mut page);
            screen::end(&explanation, &mut page);
            page.print()
        }
        _ => ranks::ranks(args, &files),
    }
}

/// The explanation of one recording as `--json` prints it, plus the sentences of the screen, for the page of `report`.
///
/// # Errors
/// As for the command.
pub(crate) fn answer(file: &Path, recording: &Recording) -> Result<Value> {
    let explanation = explain_recording(file, recording, &How::default())?;
    let mut out = serde_json::to_value(&explanation)?;
    out["sentences"] = serde_json::to_value(screen::sentences(&explanation))?;
    Ok(out)
}

/// Adds the explanation of a recording to a page.
///
/// # Errors
/// As for the command.
pub(crate) fn show(file: &Path, recording: &Recording, page: &mut Page) -> Result<()> {
    let explanation = explain_recording(file, recording, &How::default())?;
    let args = ExplainArgs { files: Vec::new(), how: How::default(), top: ROWS, shard: None, json: false };
    screen::report(&explanation, &args, page);
    Ok(())
}

/// Reads and explains one recording.
///
/// # Errors
/// One line about the fault in the file.
pub(crate) fn explanation(how: &How, file: &Path) -> Result<Explanation> {
    explain_recording(file, &Recording::read(file, how.gpu, how.limit.map(|limit| limit.0), &how.read)?, how)
}

/// A recording, and the text of its stacks.
struct View<'r> {
    recording: &'r Recording,
    lines: Lines<'r>,
}

fn explain_recording(file: &Path, recording: &Recording, how: &How) -> Result<Explanation> {
    let mut view = View { recording, lines: Lines::new(&recording.origins, how.frames) };
    let requested = between_requested(how, recording)?;
    let points = requested.iter().flat_map(|between| [between.from, between.to]).collect::<Vec<usize>>();
    let mut explanation = Explanation {
        trace: file.display().to_string(),
        format: recording.summary.format.name(),
        of_pytorch: recording.summary.format.is_snapshot(),
        gpus: recording.gpus.clone(),
        events: recording.events.len() as u64,
        frames: recording.origins.has_frames(),
        annotations: recording.origins.annotations().len() as u64,
        cut: recording.summary.cut.map(|cut| cut.to_string()),
        unknown_events: recording.summary.unknown_events(),
        blocks_before: recording.initial.blocks.len() as u64,
        segments_before: recording.initial.segments.len() as u64,
        limit_bytes: recording.settings.memory_limit,
        expandable: is_expandable(recording),
        phases: phases(recording)?,
        ..Explanation::default()
    };
    let repeats = if requested.is_some() { Vec::new() } else { repeated_annotation(recording) };
    let (survey, checkpoints) = survey::survey(&mut view, &points, &repeats, &mut explanation)?;
    let between = requested.or_else(|| between_repetitions(&survey));
    describe_moments(&mut view, &survey, &checkpoints, between, &mut explanation)?;
    if explanation.reserved.pending.deferred_frees > 0 {
        let pending = &mut explanation.reserved.pending;
        [pending.replayed_reserved_bytes, pending.replayed_instant_reserved_bytes] = replayed_peaks(recording);
    }
    explanation.beside =
        device_use::device_use(file, recording, &explanation.reserved.moment, &mut explanation.timeline);
    explanation.pinning = device_use::pinned_host(recording);
    explanation.host = crate::host::memory_use(recording)?;
    Ok(explanation)
}

/// Two moments between which growth is reported.
struct Between {
    from: usize,
    to: usize,
    named: Vec<String>,
}

/// Minimum number of repetitions between which growth is reported.
const REPETITIONS: usize = 4;

/// The first events of the repetitions of an annotation: of the annotation that covers the most time, numbers in names ignored.
/// Empty with fewer than four repetitions.
fn repeated_annotation(recording: &Recording) -> Vec<usize> {
    let mut groups: BTreeMap<String, (u64, Vec<usize>)> = BTreeMap::new();
    for range in recording.ranges() {
        let index = recording.events.at_time(range.start_ns);
        if index >= recording.events.len() {
            continue;
        }
        let name = recording.origins.spelt(range.name).replace(|character: char| character.is_ascii_digit(), "");
        let (covered, starts) = groups.entry(name).or_default();
        *covered += range.end_ns.map_or(0, |end| end.saturating_sub(range.start_ns));
        starts.push(index);
    }
    let repeated = groups.into_values().filter_map(|(covered, mut starts)| {
        starts.sort_unstable();
        starts.dedup();
        (starts.len() >= REPETITIONS).then_some((covered, starts))
    });
    repeated.max().map(|(_, starts)| starts).unwrap_or_default()
}

/// Two similar moments between which memory grew: starts of an annotation, else lows between peaks. `None` with fewer than four
/// repetitions, or without steady growth.
fn between_repetitions(survey: &Survey) -> Option<Between> {
    let moments = match survey.repeats.len() >= REPETITIONS {
        true => &survey.repeats,
        // Four periods have three lows between them.
        false if survey.lows.len() >= REPETITIONS - 1 => &survey.lows,
        false => return None,
    };
    // The first repetitions allocate what later ones keep, such as optimizer state.
    let moments = &moments[moments.len() / 4..];
    let [(from, first), .., (to, last)] = moments else { return None };
    let rises = moments.windows(2).filter(|pair| pair[1].1 >= pair[0].1).count();
    let steady = 4 * rises >= 3 * (moments.len() - 1);
    // Less than one part in a hundred is not growth.
    (steady && *last > first + first / 100).then(|| Between { from: *from, to: *to, named: Vec::new() })
}

/// The moments given with `--between`.
fn between_requested(how: &How, recording: &Recording) -> Result<Option<Between>> {
    let Some(names) = &how.between else { return Ok(None) };
    let [from, to] = &names[..] else { bail!("--between takes two moments") };
    let (from, to) = (point("--between", from, recording)?, point("--between", to, recording)?);
    if from >= to {
        bail!("--between: the first moment, {}, is not before the second, {}; swap them", names[0], names[1]);
    }
    Ok(Some(Between { from, to, named: names.clone() }))
}

/// The index of an event given by its number, or of the first event of an annotation.
fn point(option: &str, name: &str, recording: &Recording) -> Result<usize> {
    match name.parse::<u64>() {
        Ok(number) => {
            let index = number.checked_sub(1).and_then(|index| usize::try_from(index).ok());
            index
                .filter(|index| *index < recording.events.len())
                .ok_or_else(|| anyhow!("{option} {name}: events are numbered 1 to {}", recording.events.len()))
        }
        Err(_) => recording
            .begins(name)
            .ok_or_else(|| anyhow!("{option}: the recording has no annotation '{name}' with events after its start")),
    }
}

/// Memory held at given moments: `start`, `peak` (of active memory), `end`, an event number, or the name of an annotation for its
/// start.
///
/// # Errors
/// A moment does not exist, or the memory budget is exceeded.
pub(crate) fn held_at(recording: &Recording, frames: bool, moments: &[String]) -> Result<Vec<Held>> {
    let mut view = View { recording, lines: Lines::new(&recording.origins, frames) };
    let checkpoints = Checkpoints::new(recording);
    let at = |name: &String| {
        let index = match name.as_str() {
            "start" => START,
            "end" => recording.events.len().checked_sub(1).unwrap_or(START),
            "peak" => survey::active_peak(recording)?,
            name => point("--at", name, recording)?,
        };
        Ok(held(&mut view, &checkpoints.memory_at(index)?, index))
    };
    moments.iter().map(at).collect()
}

/// The cache misses of a recording.
///
/// # Errors
/// The memory budget is exceeded.
pub(crate) fn misses(recording: &Recording) -> Result<Misses> {
    let mut view = View { recording, lines: Lines::new(&recording.origins, false) };
    let (survey, _) = survey::survey(&mut view, &[], &[], &mut Explanation::default())?;
    Ok(survey.misses)
}

/// The memory of the pools at the moment whose breakdown `explain` shows; `None` if the recording names no private pool.
///
/// # Errors
/// The memory budget is exceeded.
pub(crate) fn pools(recording: &Recording) -> Result<Option<Pools>> {
    if !survey::has_private_pools(recording) {
        return Ok(None);
    }
    let mut view = View { recording, lines: Lines::new(&recording.origins, false) };
    let (survey, checkpoints) = survey::survey(&mut view, &[], &[], &mut Explanation::default())?;
    let (index, at) = survey.scene();
    Ok(breakdown::pools(recording, &checkpoints.memory_at(index)?, index, at))
}

/// Describes the moments that the survey selected.
fn describe_moments(
    view: &mut View<'_>,
    survey: &Survey,
    checkpoints: &Checkpoints<'_>,
    between: Option<Between>,
    explanation: &mut Explanation,
) -> Result<()> {
    let last = view.recording.events.len().checked_sub(1).unwrap_or(START);
    let (active, reserved) = (survey.peak_active.0, survey.peak_reserved());
    let (scene, at) = survey.scene();
    let mut detailed = vec![active, reserved, scene, last];
    detailed.extend(between.iter().flat_map(|between| [between.from, between.to]));
    let (mut from, mut to): (Option<Held>, Option<Held>) = (None, None);
    explanation.peaks = vec![Moment::default(); survey.peaks.len()];
    // In the order of the events, in which lines get their numbers; START comes first.
    let mut all: Vec<usize> = detailed.iter().copied().chain(survey.peaks.iter().map(|peak| peak.index)).collect();
    all.sort_unstable_by_key(|index| index.wrapping_add(1));
    all.dedup();
    for index in all {
        if let Some(at) = survey.peaks.iter().position(|peak| peak.index == index) {
            explanation.peaks[at] = describe(view, &survey.peaks[at]);
        }
        if !detailed.contains(&index) {
            continue;
        }
        let memory = checkpoints.memory_at(index)?;
        if index == active {
            explanation.peak_active = moment(view, &memory, index);
            explanation.who.insert(0, holders(view, &memory, index, "peak_active"));
        }
        if index == reserved {
            explanation.peak_reserved = moment(view, &memory, index);
        }
        if index == scene {
            explanation.reserved = breakdown::breakdown(view, &memory, survey, index, at, explanation);
            if let Some(last) = explanation.out_of_memory.last_mut().filter(|_| at == "out_of_memory")
                && last.private_pool.is_none()
            {
                let pool = breakdown::pool_name(memory.pool_of(last.stream, last.asked_bytes));
                let rows = explanation.reserved.streams.iter();
                let private =
                    rows.filter(|row| row.private_pool.is_some() && (row.stream, row.pool) == (last.stream, pool));
                last.private_free_bytes = private.map(|row| row.reserved_bytes - row.active_bytes).sum();
            }
            if index != active {
                explanation.who.push(holders(view, &memory, index, at));
            }
        }
        match &between {
            Some(between) if index == between.from => from = Some(held(view, &memory, index)),
            Some(between) if index == between.to => to = Some(held(view, &memory, index)),
            _ => {}
        }
        if index == last {
            explanation.end = moment(view, &memory, index);
        }
    }
    let names = between.map(|between| between.named).unwrap_or_default();
    explanation.grew = from.zip(to).and_then(|(from, to)| growth(from, to, names));
    Ok(())
}

/// Whether a recording has expandable segments.
fn is_expandable(recording: &Recording) -> bool {
    recording.events.count(Action::SegmentMap) > 0
}

/// Peak reserved bytes of replays under the recorded policy without a memory limit, with frees that complete as recorded and
/// immediately. `None` for a recording that cannot be replayed.
fn replayed_peaks(recording: &Recording) -> [Option<u64>; 2] {
    let Ok(mut trace) = recording.trace(recording.settings.memory_limit) else { return [None; 2] };
    let policy = of_torch(if is_expandable(recording) { TorchAllocator::Expandable } else { TorchAllocator::Native });
    let (policy, _) = adopted(&Selection::of(policy), &trace.settings);
    let peak = |history: &History| {
        let driver = Devices::Null.make(None).ok()?;
        let report = replay(history, &policy, &driver, &ReplaySettings::default()).ok()?;
        Some(report.stats.reserved_bytes.all.peak)
    };
    let as_recorded = peak(&trace.history);
    trace.history.complete_at_once();
    [as_recorded, peak(&trace.history)]
}
