//! Program changes that reduce memory where no setting does: calls of `empty_cache`, memory of other streams, workspaces, memory
//! cached by an earlier part, private pools, temporaries of optimizers, copies by autocast.
//!
//! Events show each cause, and a replay without the cause measures its cost.

use super::evaluate::{Of, Outcome, Trial};
use super::evidence::Evidence;
use super::recorded_run::RecordedRun;
use super::{Verdict, WORTH};
use crate::explain::{self, Avoidable, By, Releases, is_cublas_workspace};
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

/// Number of source lines that a sentence names.
const LINES: usize = 3;

/// Cause of memory use that a program change removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Cause {
    /// `empty_cache` releases segments that are allocated again.
    EmptyCache,
    /// Requests miss the cache while blocks of other streams are free.
    OtherStreams,
    /// Workspaces of cuBLAS stay allocated to the end.
    Workspaces,
    /// Memory cached before recording started is not used.
    LeftoverCache,
    /// Private pools keep unused segments reserved.
    PrivatePools,
    /// The same, of pools that also have live blocks.
    LivePrivatePools,
    /// Optimizer steps allocate intermediate tensors.
    OptimizerTemporaries,
    /// The same, in lists with a tensor for each parameter.
    OptimizerLists,
    /// Autocast caches copies of weights.
    AutocastCopies,
}

impl Cause {
    /// Advice.
    fn remedy(self) -> &'static str {
        match self {
            Self::EmptyCache => "Call torch.cuda.empty_cache() once per phase, if at all.",
            Self::OtherStreams => {
                "Allocate on one stream; call tensor.record_stream(s) for each other stream s that uses the tensor."
            }
            Self::Workspaces => {
                "CUBLAS_WORKSPACE_CONFIG=:16:8 reduces them to this size and may slow GEMMs; each stream that calls cuBLAS has one."
            }
            Self::LeftoverCache => "Call torch.cuda.empty_cache() once, where the earlier part ends.",
            Self::PrivatePools => {
                "Delete the MemPool as soon as its blocks are freed: while it exists, empty_cache releases none of it."
            }
            Self::LivePrivatePools => {
                "The MemPool has live blocks, so neither empty_cache nor a retry releases its free segments. Allocate temporaries, as of \
                 loading weights, outside of the MemPool, and copy into it only what stays."
            }
            Self::OptimizerTemporaries => {
                "Create the optimizer with fused=True (Adam, AdamW, SGD, Adagrad): its kernels need no such tensors."
            }
            Self::OptimizerLists => {
                "Create the optimizer with foreach=False: it updates one parameter at a time, in more kernels."
            }
            Self::AutocastCopies => {
                "Load the weights in autocast's precision (model.to(torch.bfloat16)): then no copies are made. Without gradients \
                 torch.autocast(..., cache_enabled=False) frees each copy after its operator, too."
            }
        }
    }
}

/// A source line of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Line {
    /// `null` where the recording has no frames for it.
    pub(super) line: Option<String>,
    /// Number of occurrences.
    pub(super) times: u64,
}

/// A program change and its gain.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Change {
    /// Cause that the change removes.
    pub(super) cause: Cause,
    /// Source lines, the most frequent first.
    pub(super) lines: Vec<Line>,
    /// Number of `empty_cache` calls, cache misses, workspaces, private pools, temporaries or copies.
    pub(super) times: u64,
    /// Their bytes: released, requested or reserved.
    pub(super) bytes: u64,
    /// Segments that were released, were allocated on cache misses, or are free in private pools.
    pub(super) segments: u64,
    /// Replay under the recorded settings without the cause; `null` for memory cached before recording started.
    pub(super) without: Option<Outcome<Of>>,
    /// Peak to compare with: of the replay under the recorded settings; for `other-streams` with frees that complete immediately,
    /// as on one stream.
    pub(super) instead_of_bytes: Option<u64>,
    /// Reduction of the reserved peak in percent; `null` where the recording does not show it.
    pub(super) saving_percent: Option<f64>,
    #[serde(skip)]
    description: String,
}

impl Change {
    /// The cause as events show it, with source lines.
    pub(super) fn sentence(&self) -> String {
        let mut out = self.description.clone();
        let named: Vec<String> =
            self.lines.iter().filter_map(|line| Some(format!("{} ({})", line.line.as_ref()?, line.times))).collect();
        if !named.is_empty() {
            let shown = named[..named.len().min(LINES)].join(", ");
            let more = named.len().saturating_sub(LINES);
            out += &if more > 0 { format!(": {shown}, {more} more") } else { format!(": {shown}") };
        }
        out + "."
    }

    /// The replay under the recorded settings without the cause.
    pub(super) fn gain(&self, replayed: &Outcome<Of>) -> String {
        let saving = match self.saving_percent {
            Some(saving) if saving > 0.0 => format!(" (-{saving:.1} %)"),
            _ => String::new(),
        };
        let Some((without, instead)) = self.without.as_ref().zip(self.instead_of_bytes) else {
            return format!("Without it, peak reserved falls by {}{saving}.", Bytes(self.bytes));
        };
        let begins = match self.cause {
            Cause::OtherStreams => "On one stream",
            Cause::Workspaces => "With 128 KiB each",
            Cause::OptimizerTemporaries => "With fused=True",
            Cause::OptimizerLists => "With foreach=False",
            Cause::AutocastCopies => "Without the copies",
            Cause::PrivatePools => "With the MemPool deleted",
            Cause::LivePrivatePools => "With one cache for all",
            _ => "Without it",
        };
        let (peak, instead_of) = (Bytes(without.peak_reserved_bytes), Bytes(instead));
        let mut out = match (replayed.runs(), without.runs()) {
            (false, true) => format!("{begins}: no out-of-memory, peak reserved {peak}"),
            _ if instead != replayed.peak_reserved_bytes => {
                format!("{begins}: peak reserved {peak} instead of {instead_of} without deferred frees{saving}")
            }
            _ => format!("{begins}: peak reserved {peak} instead of {instead_of}{saving}"),
        };
        // Waiting for other streams takes driver calls of its own, which a single stream does not make.
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

/// Changes with a worthwhile gain, the largest saving first.
pub(super) fn changes(
    recording: &Recording,
    run: &RecordedRun,
    trial: &Trial,
    evidence: &Evidence,
    replayed: &Outcome<Of>,
) -> Result<Vec<Change>> {
    let reserved = run.trace.recorded_peaks.map(|peaks| peaks.reserved);
    let mut out = Vec::new();
    for finding in findings(recording, run, evidence)? {
        let Finding { cause, description, lines, times, bytes, segments, removal } = finding;
        let (without, instead_of_bytes, saving_percent) = (None, None, None);
        let mut change =
            Change { cause, lines, times, bytes, segments, without, instead_of_bytes, saving_percent, description };
        match removal {
            None => change.saving_percent = reserved.map(|reserved| share(bytes, reserved)),
            Some(removal) => {
                let conf = &replayed.of.conf;
                let without = trial.changed(removal)?.run(conf)?;
                let (peak, mut instead_of) = (without.peak_reserved_bytes, replayed.peak_reserved_bytes);
                if cause == Cause::OtherStreams {
                    instead_of =
                        trial.changed(History::complete_at_once)?.run(conf)?.peak_reserved_bytes.min(instead_of);
                }
                let replayed_saving = share(instead_of.saturating_sub(peak), instead_of);
                change.saving_percent =
                    evidence.saving(peak).filter(|_| replayed.runs()).map(|saving| saving.min(replayed_saving));
                change.instead_of_bytes = Some(instead_of);
                change.without = Some(without);
            }
        }
        if is_worth_it(&change, replayed) {
            out.push(change);
        }
    }
    // Where savings are equal or unknown, as after an out-of-memory, the lower peak is first.
    let peak = |change: &Change| change.without.as_ref().map_or(u64::MAX, |without| without.peak_reserved_bytes);
    out.sort_by(|a, b| {
        let by_saving = b.saving_percent.unwrap_or(0.0).total_cmp(&a.saving_percent.unwrap_or(0.0));
        by_saving.then_with(|| peak(a).cmp(&peak(b)))
    });
    Ok(out)
}

/// A part in percent.
fn share(part: u64, total: u64) -> f64 {
    // CAST: bytes of a device, below 2^53.
    if total == 0 { 0.0 } else { 100.0 * part as f64 / total as f64 }
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
            // Programs call it to lower the peak, so the gain is in driver calls.
            Cause::EmptyCache => peak <= instead + instead / 50 && 10 * without.calls() < 9 * replayed.calls(),
            _ => saves >= WORTH,
        }
}

/// Whether the screen shows program changes before settings. `peak`: that of the first setting.
pub(super) fn comes_first(changes: &[Change], verdict: Verdict, saving: Option<f64>, peak: u64) -> bool {
    let best = changes.first().map(|first| first.saving_percent.unwrap_or(0.0));
    match verdict {
        // After an out-of-memory savings are unknown.
        Verdict::Change if saving.is_none() => {
            let without = changes.first().and_then(|first| first.without.as_ref());
            without.is_some_and(|without| without.runs() && without.peak_reserved_bytes < peak)
        }
        Verdict::Keep | Verdict::OutOfMemory => best.is_some(),
        Verdict::Inconclusive => best > Some(0.0),
        Verdict::Change | Verdict::NotRecorded => best > Some(saving.unwrap_or(0.0)),
    }
}

// Rules that examine the events, each in one pass.

/// A workspace under `CUBLAS_WORKSPACE_CONFIG=:16:8`: eight buffers of 16 KiB.
const SMALL_WORKSPACE: u64 = 8 * (16 << 10);

/// Removes a cause from a compiled trace.
type Removal = Box<dyn Fn(&mut History)>;

/// Result of a rule.
struct Finding {
    cause: Cause,
    description: String,
    lines: Vec<Line>,
    times: u64,
    bytes: u64,
    segments: u64,
    /// Removes the cause; `None` where the gain is `bytes`.
    removal: Option<Removal>,
}

fn findings(recording: &Recording, run: &RecordedRun, evidence: &Evidence) -> Result<Vec<Finding>> {
    let [fused, one_at_a_time] = optimizer_temporaries(recording);
    let findings = [
        empty_cache(recording),
        other_streams(recording)?,
        workspaces(recording),
        prior_cache(recording, run, evidence),
        private_pools(recording),
        fused,
        one_at_a_time,
        autocast_copies(recording),
    ];
    Ok(findings.into_iter().flatten().collect())
}

/// The lines of stacks, those that did it most often first.
fn lines(recording: &Recording, stacks: impl IntoIterator<Item = (StackId, u64)>) -> Vec<Line> {
    let mut sums: BTreeMap<Option<String>, u64> = BTreeMap::new();
    for (stack, times) in stacks {
        *sums.entry(explain::line_of(&recording.origins, stack)).or_default() += times;
    }
    let mut lines: Vec<Line> = sums.into_iter().map(|(line, times)| Line { line, times }).collect();
    lines.sort_by_key(|line| Reverse(line.times));
    lines
}

/// `empty_cache` calls whose released segments are allocated again, at least half of them. A call that releases nothing leaves no
/// event.
fn empty_cache(recording: &Recording) -> Option<Finding> {
    let releases = Releases::of(recording);
    let (mut stacks, mut released) = (HashMap::<StackId, u64>::new(), HashMap::<u64, u64>::new());
    let (mut segments, mut bytes, mut again) = (0, 0, 0);
    let mut inside = None;
    for (index, event) in recording.events.iter().enumerate() {
        match event.action {
            Action::SegmentFree | Action::SegmentUnmap
                if recording.origins.has_frames() && releases.by(index).is_call() =>
            {
                // Other frames do not belong to the call.
                let named = releases.by(index) == By::NamedCall;
                let stack = if named { event.origin.stack } else { StackId::default() };
                if inside.replace(stack) != Some(stack) {
                    *stacks.entry(stack).or_default() += 1;
                }
                segments += 1;
                bytes += event.bytes;
                *released.entry(event.bytes).or_default() += 1;
                continue;
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                if let Some(count) = released.get_mut(&event.bytes).filter(|count| **count > 0) {
                    *count -= 1;
                    again += 1;
                }
            }
            _ => {}
        }
        inside = None;
    }
    let times: u64 = stacks.values().sum();
    let description = format!(
        "{} to empty_cache released {} in {}, of which {again} were allocated again",
        counted(times, "call"),
        Bytes(bytes),
        counted(segments, "segment")
    );
    let lines = lines(recording, stacks);
    let removal: Removal = Box::new(History::without_empty_cache);
    (times > 1 && 2 * again >= segments).then(|| Finding {
        cause: Cause::EmptyCache,
        description,
        lines,
        times,
        bytes,
        segments,
        removal: Some(removal),
    })
}

/// Cache misses with a fitting free block on another stream, if they are at least a tenth of all cache misses.
fn other_streams(recording: &Recording) -> Result<Option<Finding>> {
    let misses = explain::misses(recording)?;
    let times: u64 = misses.other_streams.values().map(|(times, _)| times).sum();
    let bytes = misses.other_streams.values().map(|(_, bytes)| bytes).sum();
    if times == 0 || 10 * times < misses.all {
        return Ok(None);
    }
    let description = format!(
        "{times} of {} ({}) had a fitting free block on another stream",
        if misses.all == 1 { "1 cache miss".to_owned() } else { format!("{} cache misses", misses.all) },
        Bytes(bytes)
    );
    let lines = lines(recording, misses.other_streams.into_iter().map(|(stack, (times, _))| (stack, times)));
    let removal: Removal = Box::new(History::on_one_stream);
    Ok(Some(Finding {
        cause: Cause::OtherStreams,
        description,
        lines,
        times,
        bytes,
        segments: times,
        removal: Some(removal),
    }))
}

/// cuBLAS workspaces that stay allocated to the end and could be smaller. Only C++ frames show them.
fn workspaces(recording: &Recording) -> Option<Finding> {
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
    // Few blocks stay allocated to the end, which saves reading the frames of the others.
    live.retain(|_, (_, stack, _)| is_cublas_workspace(&recording.origins, *stack));
    let numbers: BTreeSet<u64> = live.values().map(|(number, ..)| *number).collect();
    let (times, bytes) = (live.len() as u64, live.values().map(|(.., bytes)| bytes).sum());
    let small = move |number: u64| numbers.contains(&number).then_some(SMALL_WORKSPACE);
    let removal: Removal = Box::new(move |history| history.resize_allocations(&small));
    (times > 0).then(|| Finding {
        cause: Cause::Workspaces,
        description: format!(
            "cuBLAS keeps {} allocated to the end, {} in total",
            counted(times, "workspace"),
            Bytes(bytes)
        ),
        lines: lines(recording, live.values().map(|(_, stack, _)| (*stack, 1))),
        times,
        bytes,
        segments: 0,
        removal: Some(removal),
    })
}

/// Memory cached before recording started and still unused at the peak.
fn prior_cache(recording: &Recording, run: &RecordedRun, evidence: &Evidence) -> Option<Finding> {
    // The earlier part of the program needed that memory once.
    let least = evidence.needed_reserved_bytes?.max(evidence.prior_reserved());
    let beyond = run.trace.recorded_peaks?.reserved.saturating_sub(least);
    let before = &run.prior_cache;
    // Segments released before the first allocation do not add to the peak.
    let later = before.returned_unused_bytes - before.returned_at_once_bytes;
    // The cure is empty_cache, which releases nothing of a private pool.
    let ending = recording.summary.ending().unwrap_or_default().iter();
    let private =
        ending.filter(|segment| segment.device == recording.device && segment.pool_id.is_some_and(|id| id != (0, 0)));
    let idle = private.filter(|segment| segment.blocks.iter().all(|block| block.state == BlockState::Free));
    let in_pools: u64 = idle.map(|segment| segment.total_size).sum();
    let bytes = beyond.min(before.kept_unused_bytes.saturating_sub(in_pools) + later);
    (bytes > 0).then(|| Finding {
        cause: Cause::LeftoverCache,
        description: format!("{} were cached before recording started and unused at the peak", Bytes(bytes)),
        lines: Vec::new(),
        times: 0,
        bytes,
        segments: 0,
        removal: None,
    })
}

/// Free memory of `MemPool`s at the end. Programs whose frames show CUDA graphs are left out: a graph writes to its memory at each
/// launch.
fn private_pools(recording: &Recording) -> Option<Finding> {
    let ending = recording.summary.ending().unwrap_or_default().iter();
    let ending = ending.filter(|segment| segment.device == recording.device);
    let mut pools = BTreeMap::<(u64, u64), MemPool>::new();
    for segment in ending {
        let Some(pool) = segment.pool_id.filter(|(graph, mem_pool)| *graph == 0 && *mem_pool != 0) else { continue };
        let pool = pools.entry(pool).or_default();
        let free = segment.blocks.iter().filter(|block| block.state == BlockState::Free);
        let free: u64 = free.map(|block| block.size).sum();
        pool.free += free;
        if free == segment.total_size {
            pool.idle_segments += 1;
        } else {
            pool.is_live = true;
        }
    }
    pools.retain(|_, pool| pool.free > 0);
    let names: Vec<String> =
        pools.iter().map(|((major, minor), pool)| format!("{major}.{minor} ({})", Bytes(pool.free))).collect();
    let (segments, bytes) =
        (pools.values().map(|pool| pool.idle_segments).sum(), pools.values().map(|pool| pool.free).sum());
    let graphs = !recording.origins.has_frames() || explain::captures_graphs(&recording.origins);
    let description = format!(
        "{} are free in {} at the end, which no other request can use: pool {}",
        Bytes(bytes),
        counted(pools.len() as u64, "MemPool"),
        names.join(", ")
    );
    let live = pools.values().any(|pool| pool.is_live);
    let removal: Removal = match live {
        true => Box::new(History::without_private_pools),
        false => Box::new(History::delete_private_pools),
    };
    (!pools.is_empty() && !graphs).then(|| Finding {
        cause: if live { Cause::LivePrivatePools } else { Cause::PrivatePools },
        description,
        lines: Vec::new(),
        times: pools.len() as u64,
        bytes,
        segments,
        removal: Some(removal),
    })
}

/// Memory of a `MemPool` at the end.
#[derive(Clone, Copy, Debug, Default)]
struct MemPool {
    /// Free bytes.
    free: u64,
    idle_segments: u64,
    /// Whether a segment has an active block.
    is_live: bool,
}

/// Intermediate tensors that optimizer steps allocate and free: of all steps, and of lists. A fused step needs none of them, and a step
/// for one parameter at a time one tensor of each list.
fn optimizer_temporaries(recording: &Recording) -> [Option<Finding>; 2] {
    let explain::OptimizerTemporaries { all, lists, fused } = explain::optimizer_temporaries(recording);
    let description = format!(
        "Optimizer steps hold up to {} in intermediate tensors, {} that the same step frees",
        Bytes(all.peak_bytes),
        counted(all.numbers.len() as u64, "allocation")
    );
    let of_lists = format!(
        "Optimizer steps hold lists of intermediate tensors, one tensor for each parameter; all but the largest of each list are up to \
         {}, {}",
        Bytes(lists.peak_bytes),
        counted(lists.numbers.len() as u64, "allocation")
    );
    let all = avoidable(recording, Cause::OptimizerTemporaries, description, all);
    [all.filter(|_| fused), avoidable(recording, Cause::OptimizerLists, of_lists, lists)]
}

/// Copies of weights that autocast caches.
fn autocast_copies(recording: &Recording) -> Option<Finding> {
    let copies = explain::autocast_copies(recording);
    let description = format!(
        "Autocast caches up to {} in copies of weights, {}",
        Bytes(copies.peak_bytes),
        counted(copies.numbers.len() as u64, "allocation")
    );
    avoidable(recording, Cause::AutocastCopies, description, copies)
}

fn avoidable(recording: &Recording, cause: Cause, description: String, found: Avoidable) -> Option<Finding> {
    let Avoidable { numbers, refused, stacks, peak_bytes } = found;
    let times = numbers.len() as u64;
    let lines = lines(recording, stacks);
    let removal: Removal = Box::new(move |history| history.without_allocations(&numbers, &refused));
    let removal = Some(removal);
    (times > 0).then_some(Finding { cause, description, lines, times, bytes: peak_bytes, segments: 0, removal })
}
