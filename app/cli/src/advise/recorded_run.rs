//! The recorded run: its settings, whether memory ran out, and the memory limit.

use super::conf::Conf;
use super::evaluate::Trial;
use crate::explain::{By, Releases};
use crate::history::{Trace, TraceBuilder};
use crate::reading::ReadArgs;
use crate::recording::Recording;
use crate::replay::{Bounds, Search};
use crate::words::grouped;
use anyhow::Result;
use serde::Serialize;
use std::fmt;
use std::path::Path;
use vramlab::Bytes;
use vramlab::histories::formats::Action;
use vramlab::histories::memory::{LimitBound, PriorCache};
use vramlab::histories::replay::{MAX_BYTES, OutOfMemory};
use vramlab::policy::size::Size;

/// Source of the memory limit under which settings are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum LimitSource {
    /// `--limit`.
    Given,
    /// Contained in the recording.
    Recorded,
    /// Inferred from an out-of-memory event: reserved bytes plus the device's free bytes.
    OutOfMemory,
    /// Inferred from cache flushes that stack traces show: the highest reserved bytes.
    Retries,
    /// Inferred from garbage collections (`garbage_collection_threshold`): just below the limit that the first of them allows.
    Collections,
}

/// The recorded run: its trace, its settings, and the limit that the recording shows.
pub(super) struct RecordedRun {
    pub(super) trace: Trace,
    /// Memory cached before recording started.
    pub(super) prior_cache: PriorCache,
    /// Segments, or mapped ranges of expandable ones, that the recording shows allocated and released.
    pub(super) segments: (u64, u64),
    /// Cache flushes from which the limit is inferred.
    pub(super) retries: Option<Retries>,
    /// Requests right before which memory was released for an unknown reason.
    pub(super) unclear_releases: Option<u64>,
    pub(super) conf: Conf,
    /// Limit for the comparison of settings.
    pub(super) limit: Option<(u64, LimitSource)>,
    /// Whether a replay under the same settings and that limit should match the recording.
    pub(super) repeats: bool,
    /// Whether there was a limit that is not known.
    pub(super) limit_missing: bool,
}

impl RecordedRun {
    /// Reads a file. `limit` is the memory for which settings are compared.
    pub(super) fn read(path: &Path, gpu: Option<u16>, limit: Option<u64>, reading: &ReadArgs) -> Result<Self> {
        let (recording, builder) = Recording::read_to_replay(path, gpu, None, reading)?;
        Self::new(limit, &recording, builder)
    }

    /// Compiles a recording. Where the compiled trace shows a limit, the events are compiled again under that.
    pub(super) fn new(limit: Option<u64>, recording: &Recording, builder: TraceBuilder) -> Result<Self> {
        let refused = recording.events.count(Action::Oom) > 0
            && recording.events.iter().any(|event| event.action == Action::Oom && event.bytes <= MAX_BYTES);
        // A program that reserved more than the limit ran under another one, if any.
        let peaks = builder.peaks(&recording.summary);
        let retries = if refused { None } else { Retries::of(recording) };
        let given = limit.filter(|limit| peaks.is_none_or(|peaks| peaks.reserved <= *limit));
        let infers = refused || retries.is_some() || recording.settings.garbage_collection_threshold > 0.0;
        let copy = if infers { builder.copy().ok() } else { None };
        let mut trace = recording.finish(builder, given)?;
        let known = trace.settings.memory_limit;
        let bound = trace.limit_bound;
        let inferred = match (inferred_limit(&trace), bound) {
            (Some(limit), _) => Some((limit, LimitSource::OutOfMemory)),
            (None, LimitBound::Below(below)) => Some((below - 1, LimitSource::Collections)),
            // More was live than the recording has of segments, so it does not show what was reserved.
            (None, _) if retries.is_some_and(|retries| trace.history.max_live_bytes() > retries.least) => None,
            (None, _) => retries.map(|retries| (retries.least, LimitSource::Retries)),
        };
        // A given limit may be for another GPU: the program was recorded under a lower one.
        let other = matches!(bound, LimitBound::Below(below) if known.is_some_and(|known| known >= below));
        let mut limit_missing = known.is_none() && bound == LimitBound::Unknown;
        if (known.is_none() || limit.is_some() && other)
            && let Some((inferred, source)) = inferred
        {
            // Under the limit, segments released before memory ran out are distinguished from calls of `empty_cache`. The inferred limit
            // is not exact, so the events may contradict it.
            match copy.map(|builder| recording.finish(builder, Some(inferred))) {
                Some(Ok(again)) => trace = again,
                _ => limit_missing = source == LimitSource::Collections,
            }
        }
        let limit = match (limit, known) {
            (Some(limit), _) => Some((limit, LimitSource::Given)),
            (None, Some(limit)) => Some((limit, LimitSource::Recorded)),
            (None, None) => inferred.filter(|_| !limit_missing),
        };
        let conf = Conf::recorded(&trace.allocator_settings, recording.has_expandable_segments())?;
        // More memory serves the request that the recorded run refused, so its replay reserves more.
        let serves_refused = |limit: u64| refused && inferred.is_some_and(|(inferred, _)| limit > inferred);
        let repeats = match limit {
            None | Some((_, LimitSource::Recorded | LimitSource::Collections | LimitSource::Retries)) => true,
            Some((limit, LimitSource::Given)) => {
                !other && !serves_refused(limit) && peaks.is_some_and(|peaks| peaks.reserved <= limit)
            }
            Some((_, LimitSource::OutOfMemory)) => false,
        };
        let count = |actions: [Action; 2]| actions.map(|action| recording.events.count(action) as u64).iter().sum();
        let segments =
            (count([Action::SegmentAlloc, Action::SegmentMap]), count([Action::SegmentFree, Action::SegmentUnmap]));
        // Where events of segments are missing, the peak of reserved memory is no more than a lower bound.
        let peak = peaks.map_or(0, |peaks| peaks.reserved);
        let missing = segments == (0, 0) && has_blocks_outside(recording)
            || Bounds::of(&trace, Search::Off, |_| {})?.check("", peak).is_err();
        if missing {
            trace.recorded_peaks = None;
            trace.least_reserved = trace.least_reserved.max(peak);
        }
        let prior_cache = PriorCache::of(&recording.events, &recording.initial);
        let retries = retries.filter(|_| matches!(limit, Some((_, LimitSource::Retries))));
        let unclear_releases = Some(unclear_releases(recording)).filter(|count| *count > 0);
        Ok(Self { trace, prior_cache, segments, retries, unclear_releases, conf, limit, repeats, limit_missing })
    }

    /// Whether the recording contains the settings of the allocator.
    pub(super) fn settings_known(&self) -> bool {
        !self.trace.allocator_settings.is_empty() && self.trace.cut.is_none_or(|cut| cut.settings_known)
    }

    /// Replays in the memory for which settings are compared.
    pub(super) fn trial<'a>(&'a self, path: &'a Path) -> Result<Trial<'a>> {
        let of_device = self.limit.is_some_and(|(_, source)| source == LimitSource::Given);
        Trial::new(path, &self.trace.history, self.limit.map(|(limit, _)| limit), of_device)
    }

    fn no_out_of_memory(&self) -> &'static str {
        match self.prior_cache.reserved_bytes {
            0 => "Memory did not run out.",
            _ => "Memory did not run out during the recording.",
        }
    }

    /// The last out-of-memory event.
    pub(super) fn out_of_memory(&self) -> Option<&OutOfMemory> {
        self.trace.history.out_of_memory().last()
    }
}

/// Memory at the last out-of-memory event: reserved bytes, plus the device's free bytes if they were less than the requested
/// segment. If they were more, a limit refused the request, and the result is a lower bound on it.
fn inferred_limit(trace: &Trace) -> Option<u64> {
    let last = trace.history.out_of_memory().last()?;
    let peak = trace.recorded_peaks.map_or(0, |peaks| peaks.reserved);
    let size = Size::Torch(trace.settings.roundup_power2_divisions);
    let segment = size.segment(size.round(last.requested_bytes));
    let free = last.device_free_bytes.filter(|free| *free < segment).unwrap_or(0);
    let at_end = last.held.filter(|_| last.complete).map_or(0, |held| held.reserved_bytes + free);
    Some(peak.max(at_end)).filter(|limit| *limit > 0)
}

/// Whether a block is outside every segment that was reserved before recording started.
fn has_blocks_outside(recording: &Recording) -> bool {
    let segments = &recording.initial.segments;
    let inside = |addr: u64| {
        let at = segments.partition_point(|segment| segment.addr <= addr);
        at.checked_sub(1).is_some_and(|at| addr - segments[at].addr < segments[at].segment.bytes)
    };
    recording.events.iter().any(|event| event.action == Action::Alloc && !inside(event.addr))
}

impl fmt::Display for RecordedRun {
    /// A few sentences.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.outcome(f)?;
        self.trace.history.impossible_requests().map_or(Ok(()), |impossible| write!(f, " {impossible}"))
    }
}

impl RecordedRun {
    fn outcome(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trace { history, recorded_peaks, least_reserved, .. } = &self.trace;
        let events = history.events();
        if let Some(last) = self.out_of_memory() {
            write!(f, "Out of memory at event {} of {events}: {} requested", last.event, Bytes(last.requested_bytes))?;
            if let Some(held) = &last.held {
                write!(f, " with {} reserved, {} allocated", Bytes(held.reserved_bytes), Bytes(held.allocated_bytes))?;
                if held.pending_bytes > 0 {
                    write!(f, ", {} pending on other streams", Bytes(held.pending_bytes))?;
                }
                match held.free_blocks {
                    0 => f.write_str(", none free")?,
                    1 => write!(f, ", {} free in one block", Bytes(held.free_bytes))?,
                    blocks => {
                        let (free, largest) = (Bytes(held.free_bytes), Bytes(held.largest_free_bytes));
                        write!(f, ", {free} free in {blocks} blocks, the largest {largest}")?;
                    }
                }
                if last.private_free_bytes > 0 {
                    write!(f, " ({} of it in private pools)", Bytes(last.private_free_bytes))?;
                }
            } else {
                write!(f, " with {} live", Bytes(last.live_bytes))?;
            }
            f.write_str(".")?;
            if let earlier @ 1.. = history.refused_allocations() - 1 {
                write!(f, " Earlier refused requests: {earlier}.")?;
            }
            return Ok(());
        }
        match recorded_peaks {
            Some(peaks) => {
                // A cache that was released unused was not needed.
                let unneeded = self.prior_cache.returned_at_once_bytes > 0;
                let reserved =
                    if unneeded { peaks.reserved.min(self.prior_cache.peak_in_use_bytes) } else { peaks.reserved };
                // CAST: bytes of a device, below 2^53.
                let above = 100.0 * (reserved as f64 / peaks.requested.max(1) as f64 - 1.0);
                let (peak, requested) = (
                    if unneeded { "Peak reserved without that cache" } else { "Peak reserved" },
                    Bytes(peaks.requested),
                );
                f.write_str(self.no_out_of_memory())?;
                let above = match above {
                    // CAST: a ratio of bytes, for display.
                    above if above > 1000.0 => {
                        format!("{} times peak requested", grouped((above / 100.0 + 1.0).round() as u64))
                    }
                    above => format!("{above:.1} % above peak requested"),
                };
                write!(f, " {peak}: {}, {above} ({requested}", Bytes(reserved))?;
                f.write_str(match history.deferred_frees() {
                    0 => ").",
                    _ => ", deferred frees included).",
                })
            }
            None => {
                write!(f, "{} ", self.no_out_of_memory())?;
                if *least_reserved > 0 {
                    write!(f, "Peak reserved: at least {}. ", Bytes(*least_reserved))?;
                }
                write!(f, "Peak live: {}.", Bytes(history.max_live_bytes()))
            }
        }
    }
}

// Cache flushes that served a request: PyTorch released its cache, retried and succeeded. A snapshot has no event for that; stack
// frames and the order of events show it (`Releases`).

/// Requests that flushed the cache, and the range of the memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Retries {
    /// Number of flushes that stack traces show.
    pub(super) count: u64,
    /// Lower bound: the highest reserved bytes.
    pub(super) least: u64,
    /// Upper bound: with more memory the cache would not have been flushed.
    pub(super) most: u64,
}

impl Retries {
    /// Flushes that stack traces show; `None` where they show none, where garbage collection releases segments as well, or where
    /// they contradict the reserved bytes. Linear in the events.
    pub(super) fn of(recording: &Recording) -> Option<Self> {
        if recording.settings.garbage_collection_threshold > 0.0 {
            return None;
        }
        let mut reserved: u64 = recording.initial.segments.iter().map(|initial| initial.segment.bytes).sum();
        let mut out = Self { count: 0, least: reserved, most: u64::MAX };
        let releases = Releases::of(recording);
        // Bytes reserved before a run of released segments, and whether a request released all of them.
        let mut run: Option<(u64, bool)> = None;
        for (index, event) in recording.events.iter().enumerate() {
            match event.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    let by_request = releases.by(index) == By::Request;
                    run = Some(run.map_or((reserved, by_request), |(before, all)| (before, all && by_request)));
                    reserved = reserved.saturating_sub(event.bytes);
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    if let Some((before, _)) = run.take().filter(|(_, by_request)| *by_request) {
                        out.count += 1;
                        out.most = out.most.min(before + event.bytes - 1);
                    }
                    reserved += event.bytes;
                    out.least = out.least.max(reserved);
                }
                _ => run = None,
            }
        }
        Some(out).filter(|out| out.count > 0 && out.least <= out.most)
    }
}

/// Number of requests that a new segment served right after segments were released, where nothing shows who released them. Garbage
/// collection is left out. Linear in the events.
fn unclear_releases(recording: &Recording) -> u64 {
    let collects = recording.settings.garbage_collection_threshold > 0.0;
    if collects || !recording.summary.format.is_snapshot() {
        return 0;
    }
    let releases = Releases::of(recording);
    let (mut count, mut released, mut taken) = (0, false, false);
    for (index, event) in recording.events.iter().enumerate() {
        match event.action {
            Action::SegmentFree | Action::SegmentUnmap => released |= releases.by(index) == By::Unknown,
            Action::SegmentAlloc | Action::SegmentMap => taken = released,
            Action::FreeCompleted => {}
            action => {
                count += u64::from(action == Action::Alloc && released && taken);
                (released, taken) = (false, false);
            }
        }
    }
    count
}
