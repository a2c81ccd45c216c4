//! Evidence for an answer: the cache from before recording started, the replay under the recorded settings, and whether they
//! show how much a setting saves.

use super::evaluate::{Of, Outcome, Trial};
use super::recorded_run::RecordedRun;
use crate::history::is_as_recorded;
use crate::words::counted;
use anyhow::Result;
use serde::Serialize;
use vramlab::Bytes;
use vramlab::histories::memory::PriorCache;
use vramlab::histories::replay::{Addresses, History, ReplaySettings};

/// Smallest peak of the recorded settings from the common start, as a share of the recorded peak, at which savings are stated.
const CLOSE: f64 = 0.9;

/// Evidence for an answer.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Evidence {
    /// Memory cached before recording started: reused, released or never used.
    pub(super) before: PriorCache,
    /// Whether the recording has no segment events: then the segments at its end are assumed to predate it, although some may
    /// be newer.
    pub(super) told_from_end: bool,
    /// Recorded peak of reserved bytes, without memory that was cached before recording started and not yet used; under another
    /// limit than the recorded one, at most the peak of the replay. `null` where the file does not contain enough to compute it.
    pub(super) needed_reserved_bytes: Option<u64>,
    /// Peak of the recorded settings when started with the blocks that were active before recording started and no other memory.
    /// Settings that cannot reuse the recorded segments start like this. `null` where nothing was cached.
    pub(super) same_start_peak_reserved_bytes: Option<u64>,
    /// Comparison of the recording with its replay under the recorded settings.
    pub(super) compared: Compared,
    /// Sentences about memory that the recording does not show.
    pub(super) not_seen: Vec<String>,
}

/// Comparison of the recording with its replay under the recorded settings.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Compared {
    /// Segments, or mapped ranges of expandable ones, that the recording shows allocated.
    pub(super) segments_taken: u64,
    /// Segments or ranges that it shows released.
    pub(super) segments_returned: u64,
    /// Allocations whose addresses were compared.
    pub(super) allocations: u64,
    /// Whether all addresses and segments are as recorded; `null` where they cannot be compared.
    pub(super) same: Option<bool>,
}

impl Evidence {
    /// Replays a trace under the recorded settings, as recorded and from the start that all settings have in common.
    pub(super) fn new(run: &RecordedRun, trial: &Trial, replayed: &Outcome<Of>) -> Result<Self> {
        let before = run.prior_cache;
        let PriorCache { reserved_bytes: reserved, in_blocks_bytes: in_blocks, .. } = before;
        let peaks = run.trace.recorded_peaks;
        // Under another limit the program would have reserved as much as its replay.
        let most = if run.repeats { u64::MAX } else { replayed.peak_reserved_bytes };
        let same_start_peak_reserved_bytes = match reserved {
            0 => None,
            _ => Some(trial.changed(History::begin_without_cache)?.run(&run.conf)?.peak_reserved_bytes),
        };
        let mut not_recorded = Vec::new();
        if reserved > 0 {
            let unused = reserved.saturating_sub(in_blocks);
            not_recorded.push(format!(
                "The program before recording started: {} were reserved by then, {} active and {} cached.",
                Bytes(reserved),
                Bytes(in_blocks.min(reserved)),
                Bytes(unused)
            ));
        }
        if peaks.is_none() {
            not_recorded.push("Reserved memory: the recording does not show all segments.".into());
        }
        Ok(Self {
            before,
            told_from_end: run.segments == (0, 0),
            needed_reserved_bytes: peaks.map(|peaks| peaks.reserved.min(before.peak_in_use_bytes).min(most)),
            same_start_peak_reserved_bytes,
            compared: compared(run, trial)?,
            not_seen: not_recorded,
        })
    }

    /// Saving of a setting with this peak, in percent of the recorded peak; `None` where the recording does not show it. The
    /// recording shows it if the peak is at least the memory reserved before recording started; earlier demand is then irrelevant.
    pub(super) fn saving(&self, peak: u64) -> Option<f64> {
        let needed = self.needed_reserved_bytes?;
        let mut of = needed;
        if let Some(same_start) = self.same_start_peak_reserved_bytes {
            // CAST: bytes of a device, below 2^53.
            if !self.reaches(peak) || (same_start as f64) < CLOSE * needed as f64 {
                return None;
            }
            of = of.min(same_start);
        }
        // CAST: as above.
        (of > 0).then(|| 100.0 * (1.0 - peak as f64 / of as f64).max(0.0))
    }

    /// Whether [`saving`](Self::saving) compares with the current settings from the common start, which reserve less there.
    pub(super) fn starts_lower(&self) -> bool {
        let needed = self.needed_reserved_bytes;
        self.same_start_peak_reserved_bytes.is_some_and(|same_start| needed.is_some_and(|needed| same_start < needed))
    }

    /// The memory that [`saving`](Self::saving) compares with, in words.
    pub(super) fn reference(&self) -> String {
        let needed = self.needed_reserved_bytes.unwrap_or(0);
        match self.same_start_peak_reserved_bytes.filter(|_| self.starts_lower()) {
            Some(same_start) => format!("the {} that they reserve without the prior cache", Bytes(same_start)),
            None => format!("the {} that the recorded program reserved and used", Bytes(needed)),
        }
    }

    /// Why the recording does not show the saving of a setting with this peak.
    pub(super) fn inconclusive(&self, peak: u64) -> String {
        let prior = Bytes(self.prior_reserved());
        match (self.needed_reserved_bytes, self.same_start_peak_reserved_bytes) {
            (Some(_), _) if !self.reaches(peak) => format!(
                "{prior} were reserved before recording started, more than the best setting needs afterwards; earlier demand is \
                 unknown"
            ),
            (Some(needed), Some(same_start)) => format!(
                "starting without the prior cache, the current settings reserve {} instead of {}",
                Bytes(same_start),
                Bytes(needed)
            ),
            _ => "segment events are missing, so reserved memory is unknown".to_owned(),
        }
    }

    /// Whether a peak is at least the memory reserved before recording started, so that earlier demand is irrelevant.
    pub(super) fn reaches(&self, peak: u64) -> bool {
        peak >= self.prior_reserved()
    }

    /// Memory reserved before recording started, without segments that were released before the first allocation.
    pub(super) fn prior_reserved(&self) -> u64 {
        self.before.reserved_bytes - self.before.returned_at_once_bytes
    }
}

/// Replays a trace under its own settings at its own addresses.
fn compared(run: &RecordedRun, trial: &Trial) -> Result<Compared> {
    let history = &run.trace.history;
    let (segments_taken, segments_returned) = run.segments;
    let mut out = Compared { segments_taken, segments_returned, allocations: 0, same: None };
    if run.repeats && history.check_comparable().is_ok() {
        let how = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
        let report = trial.as_recorded(&run.conf, &how)?;
        out.allocations = report.allocations;
        out.same = Some(is_as_recorded(&report));
    }
    Ok(out)
}

impl Compared {
    /// Number of segment events; without any, a replay tests nothing.
    pub(super) fn changes(&self) -> u64 {
        self.segments_taken + self.segments_returned
    }

    pub(super) fn counts(&self) -> String {
        format!("{} allocated, {} released", counted(self.segments_taken, "segment"), self.segments_returned)
    }

    /// Sentence for an exact match; `None` where the replay differs, or the recording tests nothing.
    pub(super) fn sentence(&self) -> Option<String> {
        let addresses = counted(self.allocations, "block address").replace("addresss", "addresses");
        (self.same == Some(true) && self.changes() > 0).then(|| {
            let counts = self.counts();
            format!("Replay matches the recording exactly: {counts}, {addresses} equal.")
        })
    }
}
