//! `vramlab explain`: who holds memory at the peak, where reserved memory went, when that was, and which requests miss.
//!
//! It looks at what the recorded allocator did, and replays nothing but the question what frees cost that wait.

mod beside;
mod causes;
mod checkpoints;
mod explanation;
mod frames;
mod holes;
pub(crate) mod lines;
mod moments;
pub(crate) mod phases;
mod purposes;
mod ranks;
mod releases;
mod screen;
mod survey;

use self::phases::phases;
use crate::history::{Devices, adopted};
use crate::reading::{ReadArgs, share_of};
use crate::recording::{Recording, START};
use anyhow::{Result, anyhow, bail};
use checkpoints::Checkpoints;
use clap::Args;
use lines::Lines;
use moments::{described, grew, held, moment, who};
use serde_json::Value;
use std::path::{Path, PathBuf};
use survey::Survey;
use terminal::{Bar, Page, Shard};
use vramlab::backends::{TorchAllocator, of_torch};
use vramlab::histories::formats::Action;
use vramlab::histories::replay::{ReplaySettings, replay};
use vramlab::{Bytes, Selection};

pub(crate) use explanation::{Explanation, Moment};
pub(crate) use lines::line_of;
pub(crate) use moments::{Held, Line};
pub(crate) use purposes::is_cublas_workspace;
pub(crate) use releases::{By, Releases};
pub(crate) use screen::{place, when};
pub(crate) use survey::{Misses, captures_graphs};

/// Rows of each table where the command line names no number.
const ROWS: u16 = 5;

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Histories: PyTorch snapshots and the other formats of `convert`, plain, .gz or .xz; of several, as of the ranks of a
    /// job, one table and then the worst
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    how: How,
    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = ROWS, value_parser = clap::value_parser!(u16).range(1..))]
    top: u16,
    /// Of several histories only every Nth, from the Kth on
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Print one JSON object with everything
    #[arg(long)]
    json: bool,
}

/// How a history is looked at.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct How {
    /// Every stack frame; otherwise those of libraries, of PyTorch, Python and C++ are folded
    #[arg(long)]
    pub(crate) frames: bool,
    /// What grew between two points: numbers of events, or names of annotations, which begin there [default: from the lowest
    /// point of the second quarter to that of the last]
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    pub(crate) between: Option<Vec<String>>,
    /// Memory limit under which the history was recorded, such as 24GiB: it tells a retry from empty_cache
    #[arg(long, value_name = "BYTES")]
    pub(crate) limit: Option<Bytes>,
    /// Which GPU's events are explained, where a history holds several [default: one that ran out of memory, else the one that
    /// reserved most]
    #[arg(long, value_name = "N")]
    pub(crate) gpu: Option<u16>,
    #[command(flatten)]
    pub(crate) read: ReadArgs,
}

/// Explains, and prints it.
pub(crate) fn explain(args: &ExplainArgs) -> Result<()> {
    let files = share_of(&args.files, args.shard);
    match &files[..] {
        [] => bail!("there are fewer histories than shards: {} of them", args.files.len()),
        [file] if args.files.len() == 1 => {
            let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
            bar.message(format!("reading {}", file.display()));
            let found = explanation(&args.how, file)?;
            bar.clear();
            if args.json {
                return terminal::print_json(&found);
            }
            let mut page = Page::stdout();
            screen::report(&found, args, &mut page);
            screen::end(&found, &mut page);
            page.print()
        }
        _ => ranks::ranks(args, &files),
    }
}

/// The explanation of one history as `--json` has it, with sentences of the screen, for the page of `report`.
///
/// # Errors
/// As those of the command.
pub(crate) fn answer(file: &Path, recording: &Recording) -> Result<Value> {
    let found = explained(file, recording, &How::default())?;
    let mut out = serde_json::to_value(&found)?;
    out["sentences"] = serde_json::to_value(screen::sentences(&found))?;
    Ok(out)
}

/// Adds to a page what the screen shows of a recording.
///
/// # Errors
/// As those of the command.
pub(crate) fn show(file: &Path, recording: &Recording, page: &mut Page) -> Result<()> {
    let found = explained(file, recording, &How::default())?;
    let shown = ExplainArgs { files: Vec::new(), how: How::default(), top: ROWS, shard: None, json: false };
    screen::report(&found, &shown, page);
    Ok(())
}

/// Reads and explains one history.
///
/// # Errors
/// What is wrong with the file, in one line.
pub(crate) fn explanation(how: &How, file: &Path) -> Result<Explanation> {
    explained(file, &Recording::read(file, how.gpu, how.limit.map(|limit| limit.0), &how.read)?, how)
}

/// A recording, and its stacks as people read them.
struct View<'r> {
    recording: &'r Recording,
    lines: Lines<'r>,
}

fn explained(file: &Path, recording: &Recording, how: &How) -> Result<Explanation> {
    let mut view = View { recording, lines: Lines::new(&recording.origins, how.frames) };
    let named = between_named(how, recording)?;
    let points = named.iter().flat_map(|named| [named.from, named.to]).collect::<Vec<usize>>();
    let mut found = Explanation {
        trace: file.display().to_string(),
        format: recording.summary.format.name(),
        gpus: recording.gpus.clone(),
        events: recording.events.len() as u64,
        frames: recording.origins.has_frames(),
        annotations: recording.origins.annotations().len() as u64,
        cut: recording.summary.cut.map(|cut| cut.to_string()),
        blocks_before: recording.before.blocks.len() as u64,
        segments_before: recording.before.segments.len() as u64,
        limit_bytes: recording.settings.memory_limit,
        phases: phases(recording)?,
        ..Explanation::default()
    };
    let (survey, checkpoints) = survey::survey(&mut view, &points, &mut found)?;
    let between = named.or_else(|| between_lows(&survey));
    look_closely(&mut view, &survey, &checkpoints, between, &mut found)?;
    if found.reserved.pending.deferred_frees > 0 {
        found.reserved.pending.replayed_reserved_bytes = replayed(recording, false);
        found.reserved.pending.replayed_instant_reserved_bytes = replayed(recording, true);
    }
    found.beside = beside::beside(file, recording, &found.reserved.moment, &mut found.timeline);
    found.pinning = beside::pinning(recording);
    Ok(found)
}

/// Two points between which something may have grown.
struct Between {
    from: usize,
    to: usize,
    named: Vec<String>,
}

/// From the lowest point of the second quarter to that of the last.
fn between_lows(survey: &Survey) -> Option<Between> {
    // Less than one part in a hundred is no growth.
    let points = survey.low_early.zip(survey.low_late);
    let points = points.filter(|((_, early), (_, late))| *late > early + early / 100);
    points.map(|((from, _), (to, _))| Between { from, to, named: Vec::new() })
}

/// The points that were asked for.
fn between_named(how: &How, recording: &Recording) -> Result<Option<Between>> {
    let Some(named) = &how.between else { return Ok(None) };
    let [from, to] = &named[..] else { bail!("--between wants two points") };
    let (from, to) = (point("--between", from, recording)?, point("--between", to, recording)?);
    if from >= to {
        bail!("--between: the first point, {}, is not before the second, {}", named[0], named[1]);
    }
    Ok(Some(Between { from, to, named: named.clone() }))
}

/// The event of a number, or the first one of an annotation.
fn point(option: &str, name: &str, recording: &Recording) -> Result<usize> {
    match name.parse::<u64>() {
        Ok(number) => {
            let index = number.checked_sub(1).and_then(|index| usize::try_from(index).ok());
            index
                .filter(|index| *index < recording.events.len())
                .ok_or_else(|| anyhow!("{option} {name}: the events have the numbers 1 to {}", recording.events.len()))
        }
        Err(_) => recording.begins(name).ok_or_else(|| {
            anyhow!("{option}: no annotation of the history is named '{name}', or nothing happens after it begins")
        }),
    }
}

/// What is held at each of some moments: `start`, `peak` (of use), `end`, the number of an event, or the name of an annotation,
/// at whose beginning.
///
/// # Errors
/// There is no such moment, or the memory takes more than there is.
pub(crate) fn held_at(recording: &Recording, frames: bool, moments: &[String]) -> Result<Vec<Held>> {
    let mut view = View { recording, lines: Lines::new(&recording.origins, frames) };
    let checkpoints = Checkpoints::new(recording);
    let at = |name: &String| {
        let index = match name.as_str() {
            "start" => START,
            "end" => recording.events.len().checked_sub(1).unwrap_or(START),
            "peak" => survey::peak_of_use(recording)?,
            name => point("--at", name, recording)?,
        };
        Ok(held(&mut view, &checkpoints.memory_at(index)?, index))
    };
    moments.iter().map(at).collect()
}

/// Which requests took memory from the device.
///
/// # Errors
/// As those of reading it.
pub(crate) fn misses(recording: &Recording) -> Result<Misses> {
    let mut view = View { recording, lines: Lines::new(&recording.origins, false) };
    let (survey, _) = survey::survey(&mut view, &[], &mut Explanation::default())?;
    Ok(survey.misses)
}

/// Describes the moments that were found.
fn look_closely(
    view: &mut View<'_>,
    survey: &Survey,
    checkpoints: &Checkpoints<'_>,
    between: Option<Between>,
    found: &mut Explanation,
) -> Result<()> {
    let last = view.recording.events.len().checked_sub(1).unwrap_or(START);
    let (active, reserved) = (survey.peak_active.0, survey.peak_reserved.0);
    let near = survey.near_peak.front().map_or(reserved, |(index, _)| *index);
    let (scene, at) = match survey.last_refused {
        Some(refused) => (refused, "out_of_memory"),
        None if near == reserved => (reserved, "peak_reserved"),
        None => (near, "near_peak_reserved"),
    };
    let mut whole = vec![active, reserved, scene, last];
    whole.extend(between.iter().flat_map(|between| [between.from, between.to]));
    let (mut from, mut to): (Option<Held>, Option<Held>) = (None, None);
    found.peaks = vec![Moment::default(); survey.peaks.len()];
    // In order, in which lines get their numbers, and the beginning first.
    let mut all: Vec<usize> = whole.iter().copied().chain(survey.peaks.iter().map(|peak| peak.index)).collect();
    all.sort_unstable_by_key(|index| index.wrapping_add(1));
    all.dedup();
    for index in all {
        if let Some(at) = survey.peaks.iter().position(|peak| peak.index == index) {
            found.peaks[at] = described(view, &survey.peaks[at]);
        }
        if !whole.contains(&index) {
            continue;
        }
        let memory = checkpoints.memory_at(index)?;
        if index == active {
            found.peak_active = moment(view, &memory, index);
            found.who.insert(0, who(view, &memory, index, "peak_active"));
        }
        if index == reserved {
            found.peak_reserved = moment(view, &memory, index);
        }
        if index == scene {
            found.reserved = holes::where_it_went(view, &memory, survey, index, at, found);
            if index != active {
                found.who.push(who(view, &memory, index, at));
            }
        }
        match &between {
            Some(between) if index == between.from => from = Some(held(view, &memory, index)),
            Some(between) if index == between.to => to = Some(held(view, &memory, index)),
            _ => {}
        }
        if index == last {
            found.end = moment(view, &memory, index);
        }
    }
    let named = between.map(|between| between.named).unwrap_or_default();
    found.grew = from.zip(to).and_then(|(from, to)| grew(from, to, named));
    Ok(())
}

/// What the recorded policy reserves at its peak on a device without end, with frees that complete as recorded or at once;
/// `None` for a history that cannot be replayed.
fn replayed(recording: &Recording, instant: bool) -> Option<u64> {
    let mut compiled = recording.compiled(|_| recording.settings.memory_limit).ok()?;
    let expandable = recording.events.count(Action::SegmentMap) > 0;
    if instant {
        compiled.history.complete_at_once();
    }
    let policy = of_torch(if expandable { TorchAllocator::Expandable } else { TorchAllocator::Native });
    let (policy, _) = adopted(&Selection::of(policy), &compiled.settings);
    let driver = Devices::Null.make(None).ok()?;
    let report = replay(&compiled.history, &policy, &driver, &ReplaySettings::default()).ok()?;
    Some(report.stats.reserved_bytes.all.peak)
}
