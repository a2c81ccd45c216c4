//! What the events show of a program's use of memory. Each rule looks at them once.

use super::{Cause, Line};
use crate::advise::evidence::Evidence;
use crate::advise::recorded_run::RecordedRun;
use crate::explain::{self, is_cublas_workspace};
use crate::recording::Recording;
use crate::words::counted;
use anyhow::Result;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use vramlab::Bytes;
use vramlab::contract::BlockState;
use vramlab::histories::formats::{Action, StackId};
use vramlab::histories::replay::History;

/// A workspace under `CUBLAS_WORKSPACE_CONFIG=:16:8`: eight buffers of 16 KiB.
const SMALL_WORKSPACE: u64 = 8 * (16 << 10);

/// A change of a history.
type OfHistory = Box<dyn Fn(&mut History)>;

/// What a rule found.
pub(super) struct Found {
    pub(super) cause: Cause,
    pub(super) what: String,
    pub(super) lines: Vec<Line>,
    pub(super) times: u64,
    pub(super) bytes: u64,
    pub(super) segments: u64,
    /// What leaves it out of a history; `None` where all of `bytes` is too much.
    pub(super) change: Option<OfHistory>,
}

/// What all rules find.
pub(super) fn all(recording: &Recording, happened: &RecordedRun, evidence: &Evidence) -> Result<Vec<Found>> {
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
    let calls = explain::empty_cache_stacks(recording);
    let (mut stacks, mut gone) = (HashMap::<StackId, u64>::new(), HashMap::<u64, u64>::new());
    let (mut segments, mut bytes, mut again) = (0, 0, 0);
    let mut inside = None;
    for event in recording.events.iter() {
        let stack = event.origin.stack;
        match event.action {
            Action::SegmentFree | Action::SegmentUnmap if calls.get(stack.index()) == Some(&true) => {
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
                if event.bytes > SMALL_WORKSPACE && is_cublas_workspace(&recording.origins, event.origin.stack) {
                    live.insert(event.addr, (number, event.origin.stack, event.bytes));
                }
            }
            Action::FreeRequested | Action::FreeCompleted => {
                live.remove(&event.addr);
            }
            _ => {}
        }
    }
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
