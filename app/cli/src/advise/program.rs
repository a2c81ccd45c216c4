//! What a change of the program would gain, where its memory is held by what no setting reaches: calls of `empty_cache`, memory of
//! other streams, workspaces, what an earlier part left in the cache, private pools.
//!
//! Each is shown by events, and a replay without it says what it costs.

use super::evaluate::{Of, Outcome, Trial};
use super::evidence::Evidence;
use super::recorded_run::RecordedRun;
use super::{Verdict, WORTH};
use crate::explain::{self, By, Releases, is_cublas_workspace};
use crate::recording::Recording;
use crate::words::counted;
use anyhow::Result;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use vramlab::Bytes;
use vramlab::contract::BlockState;
use vramlab::histories::formats::{Action, StackId};
use vramlab::histories::replay::History;

/// Lines that are named.
const LINES: usize = 3;

/// What of a program could be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Cause {
    /// `empty_cache` gives segments back that are fetched again.
    EmptyCache,
    /// Requests miss while memory is free that other streams allocated.
    OtherStreams,
    /// Workspaces of cuBLAS are held to the end.
    Workspaces,
    /// What was cached before the recording began is not used.
    LeftoverCache,
    /// Private pools of the program keep segments that nothing uses.
    PrivatePools,
}

impl Cause {
    /// What to do.
    fn remedy(self) -> &'static str {
        match self {
            Self::EmptyCache => "Call torch.cuda.empty_cache() once a phase, if at all.",
            Self::OtherStreams => {
                "Allocate on one stream; another one that uses such memory is told by tensor.record_stream(stream)."
            }
            Self::Workspaces => {
                "CUBLAS_WORKSPACE_CONFIG=:16:8 makes them so small, and may make products slower; each stream that calls cuBLAS has one."
            }
            Self::LeftoverCache => "Call torch.cuda.empty_cache() once, where the earlier part ends.",
            Self::PrivatePools => {
                "Delete the MemPool as soon as what lies in it is freed: while it lives, empty_cache gives nothing of it back."
            }
        }
    }
}

/// A line of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Line {
    /// `null` where the recording has no frames for it.
    pub(super) line: Option<String>,
    /// How often it did that.
    pub(super) times: u64,
}

/// A change of the program, and what it gains.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Change {
    /// What could be changed.
    pub(super) cause: Cause,
    /// Where, the line that does most first.
    pub(super) lines: Vec<Line>,
    /// Calls of `empty_cache`, requests that miss, workspaces, or private pools.
    pub(super) times: u64,
    /// Bytes that it is about: given back, asked for, or held.
    pub(super) bytes: u64,
    /// Segments that went back, were taken by requests that miss, or are free in private pools.
    pub(super) segments: u64,
    /// What the recorded settings come to without it; `null` for what was cached before the recording began.
    pub(super) without: Option<Outcome<Of>>,
    /// The peak with which that is compared: that of the replay under the recorded settings; for `other-streams` with frees that
    /// complete at once, as they do on one stream.
    pub(super) instead_of_bytes: Option<u64>,
    /// What is reserved less at the peak then, in percent; `null` where the recording does not say.
    pub(super) saving_percent: Option<f64>,
    #[serde(skip)]
    what: String,
}

impl Change {
    /// What the events show, and what the recorded settings come to without it.
    pub(super) fn sentence(&self) -> String {
        let mut out = self.what.clone();
        let named: Vec<String> =
            self.lines.iter().filter_map(|one| Some(format!("{} ({})", one.line.as_ref()?, one.times))).collect();
        if !named.is_empty() {
            let shown = named[..named.len().min(LINES)].join(", ");
            let more = named.len().saturating_sub(LINES);
            out += &if more > 0 { format!(": {shown}, {more} more") } else { format!(": {shown}") };
        }
        out + "."
    }

    /// What the recorded settings come to without it.
    pub(super) fn gain(&self, replayed: &Outcome<Of>) -> String {
        let saving = match self.saving_percent {
            Some(saving) if saving > 0.0 => format!(" (-{saving:.1} %)"),
            _ => String::new(),
        };
        let Some((without, instead)) = self.without.as_ref().zip(self.instead_of_bytes) else {
            return format!("Without that {} less are reserved at the peak{saving}.", Bytes(self.bytes));
        };
        let begins = match self.cause {
            Cause::OtherStreams => "On one stream",
            Cause::Workspaces => "With 128 KiB for each",
            _ => "Without that",
        };
        let (peak, instead_of) = (Bytes(without.peak_reserved_bytes), Bytes(instead));
        let mut out = match (replayed.runs(), without.runs()) {
            (false, true) => format!("{begins} it runs, and reserves {peak}"),
            _ if instead != replayed.peak_reserved_bytes => {
                format!("{begins} it reserves {peak} instead of {instead_of} with frees that complete at once{saving}")
            }
            _ => format!("{begins} it reserves {peak} instead of {instead_of}{saving}"),
        };
        // On one stream nothing waits for another, which takes calls of its own.
        if self.cause != Cause::OtherStreams && without.calls() != replayed.calls() {
            let (calls, were) = (counted(without.calls(), "driver call"), replayed.calls());
            out += &format!(", in {calls} instead of {were}");
            if let Some((now, was)) = without.simulated_s.zip(replayed.simulated_s) {
                // CAST: seconds back to nanoseconds, for display.
                let time = |seconds: f64| terminal::duration((seconds * 1e9).round() as u64);
                out += &format!(" ({} instead of {}, simulated H200)", time(now), time(was));
            }
        }
        out + "."
    }

    pub(super) fn remedy(&self) -> &'static str {
        self.cause.remedy()
    }
}

/// All changes that are worth it, the one that saves most first.
pub(super) fn changes(
    recording: &Recording,
    happened: &RecordedRun,
    trial: &Trial,
    evidence: &Evidence,
    replayed: &Outcome<Of>,
) -> Result<Vec<Change>> {
    let reserved = happened.recorded.as_recorded.map(|told| told.reserved);
    let mut out = Vec::new();
    for found in all(recording, happened, evidence)? {
        let Found { cause, what, lines, times, bytes, segments, change } = found;
        let (without, instead_of_bytes, saving_percent) = (None, None, None);
        let mut found =
            Change { cause, lines, times, bytes, segments, without, instead_of_bytes, saving_percent, what };
        match change {
            None => found.saving_percent = reserved.map(|reserved| share(bytes, reserved)),
            Some(change) => {
                let conf = &replayed.of.conf;
                let without = trial.changed(change)?.run(conf)?;
                let (peak, mut instead_of) = (without.peak_reserved_bytes, replayed.peak_reserved_bytes);
                if cause == Cause::OtherStreams {
                    instead_of =
                        trial.changed(History::complete_at_once)?.run(conf)?.peak_reserved_bytes.min(instead_of);
                }
                let own = share(instead_of.saturating_sub(peak), instead_of);
                found.saving_percent = evidence.saving(peak).filter(|_| replayed.runs()).map(|said| said.min(own));
                found.instead_of_bytes = Some(instead_of);
                found.without = Some(without);
            }
        }
        if is_worth_it(&found, replayed) {
            out.push(found);
        }
    }
    out.sort_by(|one, other| other.saving_percent.unwrap_or(0.0).total_cmp(&one.saving_percent.unwrap_or(0.0)));
    Ok(out)
}

/// A part in percent.
fn share(part: u64, whole: u64) -> f64 {
    // CAST: bytes of a device, below 2^53.
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

fn is_worth_it(change: &Change, replayed: &Outcome<Of>) -> bool {
    let Some((without, instead)) = change.without.as_ref().zip(change.instead_of_bytes) else {
        return change.saving_percent >= Some(WORTH);
    };
    if !replayed.runs() {
        return without.runs();
    }
    let peak = without.peak_reserved_bytes;
    let saves = change.saving_percent.unwrap_or_else(|| share(instead.saturating_sub(peak), instead));
    without.runs()
        && match change.cause {
            // What it is called for is a lower peak.
            Cause::EmptyCache => peak <= instead + instead / 50 && 10 * without.calls() < 9 * replayed.calls(),
            _ => saves >= WORTH,
        }
}

/// Whether a change of the program comes before the settings.
pub(super) fn comes_first(changes: &[Change], verdict: Verdict, saving: Option<f64>) -> bool {
    let best = changes.first().map(|first| first.saving_percent.unwrap_or(0.0));
    match verdict {
        Verdict::Keep | Verdict::OutOfMemory => best.is_some(),
        Verdict::NotSaid => best > Some(0.0),
        Verdict::Change | Verdict::NotRecorded => best > Some(saving.unwrap_or(0.0)),
    }
}

// What the events show of a program's use of memory. Each rule looks at them once.

/// A workspace under `CUBLAS_WORKSPACE_CONFIG=:16:8`: eight buffers of 16 KiB.
const SMALL_WORKSPACE: u64 = 8 * (16 << 10);

/// A change of a history.
type OfHistory = Box<dyn Fn(&mut History)>;

/// What a rule found.
struct Found {
    cause: Cause,
    what: String,
    lines: Vec<Line>,
    times: u64,
    bytes: u64,
    segments: u64,
    /// What leaves it out of a history; `None` where all of `bytes` is too much.
    change: Option<OfHistory>,
}

/// What all rules find.
fn all(recording: &Recording, happened: &RecordedRun, evidence: &Evidence) -> Result<Vec<Found>> {
    let found = [
        empty_cache(recording),
        other_streams(recording)?,
        workspaces(recording),
        leftover(happened, evidence),
        private_pools(recording),
    ];
    Ok(found.into_iter().flatten().collect())
}

/// The lines of stacks, those that did it most often first.
fn lines(recording: &Recording, stacks: impl IntoIterator<Item = (StackId, u64)>) -> Vec<Line> {
    let mut sums: BTreeMap<Option<String>, u64> = BTreeMap::new();
    for (stack, times) in stacks {
        *sums.entry(explain::line_of(&recording.origins, stack)).or_default() += times;
    }
    let mut lines: Vec<Line> = sums.into_iter().map(|(line, times)| Line { line, times }).collect();
    lines.sort_by_key(|one| Reverse(one.times));
    lines
}

/// Calls that give segments back of which half or more are fetched again. A call that gives nothing back leaves no event.
fn empty_cache(recording: &Recording) -> Option<Found> {
    let releases = Releases::of(recording);
    let (mut stacks, mut gone) = (HashMap::<StackId, u64>::new(), HashMap::<u64, u64>::new());
    let (mut segments, mut bytes, mut again) = (0, 0, 0);
    let mut inside = None;
    for (index, event) in recording.events.iter().enumerate() {
        match event.action {
            Action::SegmentFree | Action::SegmentUnmap
                if recording.origins.has_frames() && releases.by(index).is_call() =>
            {
                // Other frames are not those of the call.
                let named = releases.by(index) == By::NamedCall;
                let stack = if named { event.origin.stack } else { StackId::default() };
                if inside.replace(stack) != Some(stack) {
                    *stacks.entry(stack).or_default() += 1;
                }
                segments += 1;
                bytes += event.bytes;
                *gone.entry(event.bytes).or_default() += 1;
                continue;
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                if let Some(left) = gone.get_mut(&event.bytes).filter(|left| **left > 0) {
                    *left -= 1;
                    again += 1;
                }
            }
            _ => {}
        }
        inside = None;
    }
    let times: u64 = stacks.values().sum();
    let what = format!(
        "empty_cache gave {} back in {}, {again} of which were fetched again; {} did it",
        Bytes(bytes),
        counted(segments, "segment"),
        counted(times, "call")
    );
    let lines = lines(recording, stacks);
    let change: OfHistory = Box::new(History::without_empty_cache);
    (times > 1 && 2 * again >= segments).then(|| Found {
        cause: Cause::EmptyCache,
        what,
        lines,
        times,
        bytes,
        segments,
        change: Some(change),
    })
}

/// Requests that took memory from the device while a block was free on another stream, where they are a tenth of those that took
/// some.
fn other_streams(recording: &Recording) -> Result<Option<Found>> {
    let misses = explain::misses(recording)?;
    let times: u64 = misses.other_streams.values().map(|(times, _)| times).sum();
    let bytes = misses.other_streams.values().map(|(_, bytes)| bytes).sum();
    if times == 0 || 10 * times < misses.all {
        return Ok(None);
    }
    let what = format!(
        "{times} of {} that found no free block on their stream found one on another, for {}",
        counted(misses.all, "request"),
        Bytes(bytes)
    );
    let lines = lines(recording, misses.other_streams.into_iter().map(|(stack, (times, _))| (stack, times)));
    let change: OfHistory = Box::new(History::on_one_stream);
    Ok(Some(Found { cause: Cause::OtherStreams, what, lines, times, bytes, segments: times, change: Some(change) }))
}

/// Workspaces of cuBLAS that are held to the end, larger than they can be made. Only frames of C++ show them.
fn workspaces(recording: &Recording) -> Option<Found> {
    let mut live: BTreeMap<u64, (u64, StackId, u64)> = BTreeMap::new();
    let mut numbers = 0..;
    for event in recording.events.iter() {
        match event.action {
            Action::Alloc if event.bytes > 0 => {
                let number = numbers.next()?;
                if event.bytes > SMALL_WORKSPACE {
                    live.insert(event.addr, (number, event.origin.stack, event.bytes));
                }
            }
            Action::FreeRequested | Action::FreeCompleted => {
                live.remove(&event.addr);
            }
            _ => {}
        }
    }
    // Reading frames takes long, and few blocks are held to the end.
    live.retain(|_, (_, stack, _)| is_cublas_workspace(&recording.origins, *stack));
    let numbers: BTreeSet<u64> = live.values().map(|(number, ..)| *number).collect();
    let (times, bytes) = (live.len() as u64, live.values().map(|(.., bytes)| bytes).sum());
    let small = move |number: u64| numbers.contains(&number).then_some(SMALL_WORKSPACE);
    let change: OfHistory = Box::new(move |history| history.resize_allocations(&small));
    (times > 0).then(|| Found {
        cause: Cause::Workspaces,
        what: format!("cuBLAS holds {} of {} in all to the end", counted(times, "workspace"), Bytes(bytes)),
        lines: lines(recording, live.values().map(|(_, stack, _)| (*stack, 1))),
        times,
        bytes,
        segments: 0,
        change: Some(change),
    })
}

/// What was cached before the first event and still was, unused, when most was reserved.
fn leftover(happened: &RecordedRun, evidence: &Evidence) -> Option<Found> {
    // What was held then had been needed once.
    let least = evidence.needed_reserved_bytes?.max(evidence.held_before());
    let beyond = happened.recorded.as_recorded?.reserved.saturating_sub(least);
    let before = &happened.leftover;
    // What goes back before the first allocation is in the way of nothing.
    let later = before.returned_unused_bytes - before.returned_at_once_bytes;
    let bytes = beyond.min(before.kept_unused_bytes + later);
    (bytes > 0).then(|| Found {
        cause: Cause::LeftoverCache,
        what: format!("{} were cached before the recording began, and unused at the peak", Bytes(bytes)),
        lines: Vec::new(),
        times: 0,
        bytes,
        segments: 0,
        change: None,
    })
}

/// Segments of `MemPool`s without a block in them at the end. Where frames show CUDA graphs it is theirs: a graph writes to its
/// memory at each launch.
fn private_pools(recording: &Recording) -> Option<Found> {
    let held = recording.summary.ending().unwrap_or_default().iter();
    let idle = held.filter(|segment| {
        segment.device == recording.device
            && segment.pool_id.is_some_and(|(graph, own)| graph == 0 && own != 0)
            && segment.blocks.iter().all(|block| block.state == BlockState::Free)
    });
    let (mut segments, mut bytes, mut pools) = (0, 0, BTreeSet::new());
    for segment in idle {
        segments += 1;
        bytes += segment.total_size;
        pools.extend(segment.pool_id);
    }
    let graphs = !recording.origins.has_frames() || explain::captures_graphs(&recording.origins);
    let what = format!(
        "{} of private pools, {}, are free in {} at the end",
        counted(segments, "segment"),
        Bytes(bytes),
        counted(pools.len() as u64, "MemPool")
    );
    let change: OfHistory = Box::new(History::without_private_pools);
    (segments > 0 && !graphs).then(|| Found {
        cause: Cause::PrivatePools,
        what,
        lines: Vec::new(),
        times: pools.len() as u64,
        bytes,
        segments,
        change: Some(change),
    })
}
