//! Evidence for an answer: the cache from before recording started, the replay under the recorded settings, and whether they
//! show how much a setting saves.

use super::WORTH;
use super::evaluate::{Of, Outcome, Trial};
use super::recorded_run::RecordedRun;
use crate::history::is_as_recorded;
use crate::words::counted;
use anyhow::Result;
use serde::Serialize;
use vramlab::Bytes;
use vramlab::histories::memory::PriorCache;
use vramlab::histories::replay::{Addresses, History, ReplaySettings};
use vramlab::policy::size::torch::LARGE_SEGMENT;

/// Smallest ratio of two peaks of the recorded settings, as recorded and from the common start, at which savings are stated.
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
    /// Bytes by which a peak from the common start may fall short, because earlier memory leaves one segment of each stream partly
    /// used; 0 where nothing was cached.
    pub(super) start_tolerance_bytes: u64,
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
        // CAST: a number of streams.
        let start_tolerance_bytes =
            if reserved == 0 { 0 } else { LARGE_SEGMENT * run.trace.history.streams().len() as u64 };
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
            start_tolerance_bytes,
            compared: compared(run, trial)?,
            not_seen: not_recorded,
        })
    }

    /// Saving of a setting with this peak, in percent of the recorded peak; `None` where the recording does not show it.
    ///
    /// In a recording that started late it is a lower bound. Before, the setting may have needed what was reserved by then. What the
    /// common start changes for the recorded settings, in either direction, it may change for this one.
    pub(super) fn saving(&self, peak: u64) -> Option<f64> {
        let needed = self.needed_reserved_bytes.filter(|needed| *needed > 0)?;
        let Some(same_start) = self.same_start_peak_reserved_bytes else {
            // CAST: bytes of a device, below 2^53.
            return Some(100.0 * (1.0 - peak as f64 / needed as f64).max(0.0));
        };
        // CAST: as above.
        let ratio = needed.min(same_start) as f64 / needed.max(same_start) as f64;
        let most = (peak + self.start_tolerance_bytes).max(self.prior_reserved());
        // CAST: as above.
        let saving = 100.0 * (1.0 - most as f64 / (needed as f64 * ratio)).max(0.0);
        let is_known = ratio >= CLOSE && (self.reaches(peak) || saving >= WORTH);
        is_known.then_some(saving)
    }

    /// Whether a setting with this peak is worth a change. Of a lower bound half is enough where the replays differ by a worthwhile
    /// saving.
    pub(super) fn is_worth_it(&self, peak: u64, saving: f64) -> bool {
        // CAST: bytes of a device, below 2^53.
        let replayed = 100.0 * (1.0 - peak as f64 / self.reference_bytes().max(1) as f64);
        saving >= WORTH || self.is_bound() && saving >= WORTH / 2.0 && replayed >= WORTH
    }

    /// Whether savings are lower bounds, because recording started late.
    pub(super) fn is_bound(&self) -> bool {
        self.same_start_peak_reserved_bytes.is_some()
    }

    /// Whether the current settings reserve less from the common start than recorded.
    pub(super) fn starts_lower(&self) -> bool {
        let needed = self.needed_reserved_bytes;
        self.same_start_peak_reserved_bytes.is_some_and(|same_start| needed.is_some_and(|needed| same_start < needed))
    }

    /// The lower of the two peaks of the recorded settings: as recorded, and from the common start.
    pub(super) fn reference_bytes(&self) -> u64 {
        let needed = self.needed_reserved_bytes.unwrap_or(0);
        self.same_start_peak_reserved_bytes.map_or(needed, |same_start| needed.min(same_start))
    }

    /// [`reference_bytes`](Self::reference_bytes) in words.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Evidence of a recording whose recorded peak is 1000 MiB. `same_start`, `prior` and `tolerance` in MiB.
    fn evidence(same_start: Option<u64>, prior: u64, tolerance: u64) -> Evidence {
        Evidence {
            before: PriorCache { reserved_bytes: prior << 20, ..PriorCache::default() },
            told_from_end: false,
            needed_reserved_bytes: Some(1000 << 20),
            same_start_peak_reserved_bytes: same_start.map(|peak| peak << 20),
            start_tolerance_bytes: tolerance << 20,
            compared: Compared { segments_taken: 0, segments_returned: 0, allocations: 0, same: None },
            not_seen: Vec::new(),
        }
    }

    #[test]
    fn savings_of_late_recordings_are_lower_bounds() {
        let saving = |evidence: &Evidence| evidence.saving(700 << 20).map(|saving| saving.round());
        assert_eq!(saving(&evidence(None, 0, 0)), Some(30.0));
        assert_eq!(saving(&evidence(Some(1000), 300, 0)), Some(30.0));
        assert_eq!(saving(&evidence(Some(1000), 300, 20)), Some(28.0), "the start is known to a segment");
        // The setting may have needed before what was reserved then.
        assert_eq!(saving(&evidence(Some(1000), 800, 0)), Some(20.0));
        assert_eq!(saving(&evidence(Some(1000), 990, 0)), None);
        // The common start changes the recorded settings' peak, in either direction.
        assert_eq!(saving(&evidence(Some(920), 300, 0)), Some(24.0));
        assert_eq!(saving(&evidence(Some(1087), 300, 0)), Some(24.0));
        assert_eq!(saving(&evidence(Some(890), 300, 0)), None);
        assert_eq!(saving(&evidence(Some(1120), 300, 0)), None);
        // 979 MiB of 1000 are 2.1 % less, of which 1.1 % are certain.
        let late = evidence(Some(1000), 300, 10);
        assert!(late.is_worth_it(979 << 20, late.saving(979 << 20).unwrap()));
        assert!(!late.is_worth_it(985 << 20, late.saving(985 << 20).unwrap()), "1.5 % less");
        assert!(!evidence(None, 0, 0).is_worth_it(981 << 20, 1.9));
    }
}
