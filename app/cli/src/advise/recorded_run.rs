//! What the history itself says: what it ran under, whether memory ran out, and which limit it had.

use super::conf::Conf;
use super::evaluate::Trial;
use crate::explain::{By, Releases};
use crate::history::Compiled;
use crate::reading::ReadArgs;
use crate::recording::Recording;
use crate::replay::{Bounds, Search};
use anyhow::Result;
use serde::Serialize;
use std::fmt;
use std::path::Path;
use vramlab::Bytes;
use vramlab::histories::formats::Action;
use vramlab::histories::memory::{Leftover, LimitBound, Peaks};
use vramlab::histories::replay::OutOfMemory;
use vramlab::policy::size::Size;

/// How the limit is known under which settings are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum LimitSource {
    /// `--limit`.
    Given,
    /// The history names it.
    Recorded,
    /// What was reserved when memory ran out, with what the device still had.
    OutOfMemory,
    /// The cache was released during requests, by the stacks of what went back: what was reserved at most.
    Retries,
    /// When garbage was collected (`garbage_collection_threshold`): just below what the first of the collections allows.
    Collections,
}

/// A history and what it says.
pub(super) struct RecordedRun {
    pub(super) recorded: Compiled,
    /// What was cached before the recording began.
    pub(super) leftover: Leftover,
    /// Segments, or parts of expandable ones, that the recording takes from the device and gives back.
    pub(super) segments: (u64, u64),
    /// Releases of the cache from which the limit is told.
    pub(super) retries: Option<Retries>,
    pub(super) conf: Conf,
    pub(super) limit: Option<(u64, LimitSource)>,
    /// Whether a replay under the same settings and that limit should do what the history shows.
    pub(super) repeats: bool,
    /// Whether there was a limit that is not known.
    pub(super) limit_missing: bool,
}

impl RecordedRun {
    /// Reads a file. `limit` is the memory that there is to be.
    pub(super) fn read(path: &Path, gpu: Option<u16>, limit: Option<u64>, reading: &ReadArgs) -> Result<Self> {
        Self::of(limit, &Recording::read(path, gpu, None, reading)?)
    }

    /// What a history says. One that only the whole of it tells the memory limit of is compiled twice.
    pub(super) fn of(limit: Option<u64>, recording: &Recording) -> Result<Self> {
        let load = |own: &dyn Fn(Option<&Peaks>) -> Option<u64>| recording.compiled(own);
        // A program that held more than the limit ran under another one, if any.
        let own = |told: Option<&Peaks>| limit.filter(|limit| told.is_none_or(|told| told.reserved <= *limit));
        let mut recorded = load(&own)?;
        let known = recorded.settings.memory_limit;
        let told = recorded.limit_bound;
        let retries = Retries::of(recording).filter(|_| recorded.history.out_of_memory().is_empty());
        let inferred = match (inferred_limit(&recorded), told) {
            (Some(limit), _) => Some((limit, LimitSource::OutOfMemory)),
            (None, LimitBound::Below(below)) => Some((below - 1, LimitSource::Collections)),
            (None, _) => retries.map(|retries| (retries.least, LimitSource::Retries)),
        };
        // One that is given may be for another GPU: the history was recorded under less.
        let other = matches!(told, LimitBound::Below(below) if known.is_some_and(|known| known >= below));
        let mut limit_missing = known.is_none() && told == LimitBound::Unknown;
        if (known.is_none() || limit.is_some() && other)
            && let Some((inferred, source)) = inferred
        {
            // With the limit, what went back before memory ran out is told from calls of `empty_cache`. It is not quite
            // the limit, so the history may contradict it.
            match load(&|_| Some(inferred)) {
                Ok(again) => recorded = again,
                Err(_) => limit_missing = source == LimitSource::Collections,
            }
        }
        let limit = match (limit, known) {
            (Some(limit), _) => Some((limit, LimitSource::Given)),
            (None, Some(limit)) => Some((limit, LimitSource::Recorded)),
            (None, None) => inferred.filter(|_| !limit_missing),
        };
        let conf = Conf::recorded(&recorded.allocator_settings)?;
        let as_recorded = recorded.as_recorded;
        let repeats = match limit {
            None | Some((_, LimitSource::Recorded | LimitSource::Collections | LimitSource::Retries)) => true,
            Some((limit, LimitSource::Given)) => !other && as_recorded.is_some_and(|told| told.reserved <= limit),
            Some((_, LimitSource::OutOfMemory)) => false,
        };
        let count = |actions: [Action; 2]| actions.map(|action| recording.events.count(action) as u64).iter().sum();
        let segments =
            (count([Action::SegmentAlloc, Action::SegmentMap]), count([Action::SegmentFree, Action::SegmentUnmap]));
        // Where events of segments are missing, what was reserved is no more than a lower bound.
        let shown = recorded.as_recorded.map_or(0, |told| told.reserved);
        let missing = segments == (0, 0) && lies_outside(recording)
            || Bounds::of(&recorded, Search::Off, |_| {})?.check("", shown).is_err();
        if missing {
            recorded.as_recorded = None;
            recorded.seen_reserved = recorded.seen_reserved.max(shown);
        }
        let leftover = Leftover::of(&recording.events, &recording.before);
        let retries = retries.filter(|_| matches!(limit, Some((_, LimitSource::Retries))));
        Ok(Self { recorded, leftover, segments, retries, conf, limit, repeats, limit_missing })
    }

    /// What replays it in the memory that there is to be.
    pub(super) fn trial<'a>(&'a self, path: &'a Path) -> Result<Trial<'a>> {
        let of_device = self.limit.is_some_and(|(_, source)| source == LimitSource::Given);
        Trial::new(path, &self.recorded.history, self.limit.map(|(limit, _)| limit), of_device)
    }

    /// That memory did not run out, as far as the recording shows it.
    fn did_not_run_out(&self) -> &'static str {
        match self.leftover.reserved_bytes {
            0 => "Memory did not run out.",
            _ => "Memory did not run out in what was recorded.",
        }
    }

    /// The last request that was refused when the history was recorded.
    pub(super) fn out_of_memory(&self) -> Option<&OutOfMemory> {
        self.recorded.history.out_of_memory().last()
    }
}

/// The memory that there was when it ran out: what was reserved, and what the device still had where that was less than the
/// segment that it was asked for. Where it had more, a limit refused it, of which the history shows the least that it can
/// have been.
fn inferred_limit(recorded: &Compiled) -> Option<u64> {
    let last = recorded.history.out_of_memory().last()?;
    let most = recorded.as_recorded.map_or(0, |told| told.reserved);
    let size = Size::Torch(recorded.settings.roundup_power2_divisions);
    let segment = size.segment(size.round(last.requested_bytes));
    let left = last.device_free_bytes.filter(|free| *free < segment).unwrap_or(0);
    let at_end = last.held.filter(|_| last.complete).map_or(0, |held| held.reserved_bytes + left);
    Some(most.max(at_end)).filter(|limit| *limit > 0)
}

/// Whether a block lies in no segment that was held before the first event.
fn lies_outside(recording: &Recording) -> bool {
    let segments = &recording.before.segments;
    let inside = |addr: u64| {
        let at = segments.partition_point(|one| one.addr <= addr);
        at.checked_sub(1).is_some_and(|at| addr - segments[at].addr < segments[at].segment.bytes)
    };
    recording.events.iter().any(|event| event.action == Action::Alloc && !inside(event.addr))
}

impl fmt::Display for RecordedRun {
    /// One or two sentences.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Compiled { history, as_recorded, seen_reserved, .. } = &self.recorded;
        let events = history.events();
        if let Some(last) = self.out_of_memory() {
            write!(f, "Out of memory at event {} of {events}: {} asked for", last.event, Bytes(last.requested_bytes))?;
            if let Some(held) = &last.held {
                write!(
                    f,
                    " while {} were reserved, {} of them allocated",
                    Bytes(held.reserved_bytes),
                    Bytes(held.allocated_bytes)
                )?;
                if held.pending_bytes > 0 {
                    write!(f, ", {} waiting for other streams", Bytes(held.pending_bytes))?;
                }
                match held.free_blocks {
                    0 => write!(f, " and nothing free")?,
                    1 => write!(f, " and {} free in one piece", Bytes(held.free_bytes))?,
                    pieces => {
                        let (free, largest) = (Bytes(held.free_bytes), Bytes(held.largest_free_bytes));
                        write!(f, " and {free} free in {pieces} pieces, the largest {largest}")?;
                    }
                }
            } else {
                write!(f, " while {} were live", Bytes(last.live_bytes))?;
            }
            f.write_str(".")?;
            if let before @ 1.. = history.refused_allocations() - 1 {
                let times = if before == 1 { "once".to_owned() } else { format!("{before} times") };
                write!(f, " It was refused {times} before.")?;
            }
            return Ok(());
        }
        match as_recorded {
            Some(told) => {
                // What was cached before, and went back unused, was not for this.
                let unneeded = self.leftover.returned_at_once_bytes > 0;
                let reserved =
                    if unneeded { told.reserved.min(self.leftover.peak_in_use_bytes) } else { told.reserved };
                // CAST: bytes of a device, below 2^53.
                let above = 100.0 * (reserved as f64 / told.requested.max(1) as f64 - 1.0);
                let (without, requested) = (if unneeded { "Without that, at" } else { "At" }, Bytes(told.requested));
                f.write_str(self.did_not_run_out())?;
                write!(
                    f,
                    " {without} most {} were reserved, {above:.1} % more than the {requested} ",
                    Bytes(reserved)
                )?;
                f.write_str(match history.deferred_frees() {
                    0 => "that were asked for at most.",
                    _ => "asked for at most, frees that waited included.",
                })
            }
            None => {
                write!(f, "{} ", self.did_not_run_out())?;
                if *seen_reserved > 0 {
                    write!(f, "At least {} were reserved. ", Bytes(*seen_reserved))?;
                }
                write!(f, "At most {} were live.", Bytes(history.max_live_bytes()))
            }
        }
    }
}

// A GPU or a limit that was full without a request being refused: PyTorch released its cache, asked again and was served. Nothing
// names that in a snapshot, but frames and the order of events do (`Releases`).

/// Requests during which the cache was released, and the memory that there was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Retries {
    /// How many stacks show.
    pub(super) count: u64,
    /// So much was reserved at least once.
    pub(super) least: u64,
    /// With so much more than this, no cache would have been released.
    pub(super) most: u64,
}

impl Retries {
    /// What stacks show; `None` where they show no release, where segments also go back to collections of garbage, or where the
    /// releases contradict what was reserved. Linear in the events.
    pub(super) fn of(recording: &Recording) -> Option<Self> {
        if recording.settings.garbage_collection_threshold > 0.0 {
            return None;
        }
        let mut reserved: u64 = recording.before.segments.iter().map(|one| one.segment.bytes).sum();
        let mut out = Self { count: 0, least: reserved, most: u64::MAX };
        let releases = Releases::of(recording);
        // What was reserved before segments went back one after another, where a request did that.
        let mut going: Option<(u64, bool)> = None;
        for (index, event) in recording.events.iter().enumerate() {
            match event.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    let by_request = releases.by(index) == By::Request;
                    going = Some(going.map_or((reserved, by_request), |(held, all)| (held, all && by_request)));
                    reserved = reserved.saturating_sub(event.bytes);
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    if let Some((held, _)) = going.take().filter(|(_, by_request)| *by_request) {
                        out.count += 1;
                        out.most = out.most.min(held + event.bytes - 1);
                    }
                    reserved += event.bytes;
                    out.least = out.least.max(reserved);
                }
                _ => going = None,
            }
        }
        Some(out).filter(|out| out.count > 0 && out.least <= out.most)
    }
}
