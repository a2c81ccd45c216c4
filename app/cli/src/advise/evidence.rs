//! What an answer rests on: what was there before the recording began, what a replay was compared with, and whether that tells
//! what a setting saves.

use super::evaluate::{Of, Outcome, Trial};
use super::recorded_run::RecordedRun;
use crate::history::is_as_recorded;
use crate::words::counted;
use anyhow::Result;
use serde::Serialize;
use vramlab::Bytes;
use vramlab::histories::memory::Leftover;
use vramlab::histories::replay::{Addresses, History, ReplaySettings};

/// From the same start, the recorded settings have to come this close to what was reserved.
const CLOSE: f64 = 0.9;

/// What an answer rests on.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Evidence {
    /// What was cached before the first event, and what became of it.
    pub(super) before: Leftover,
    /// Whether no segment came or went in the recording: then those of its end are taken to have been there before, and some may have
    /// come later.
    pub(super) told_from_end: bool,
    /// Most bytes that the recording program held from the device, without what was cached before the first event and not used by
    /// then; under another limit than its own, no more than its replay reserves. `null` where the file does not tell what was held.
    pub(super) needed_reserved_bytes: Option<u64>,
    /// Peak of the recorded settings, begun with the blocks that were in use before the first event and no other memory. That is
    /// where settings begin that cannot take over the recorded segments. `null` where nothing was cached.
    pub(super) same_start_peak_reserved_bytes: Option<u64>,
    /// What the replay under the recorded settings did as it was recorded.
    pub(super) compared: Compared,
    /// What the recording does not show.
    pub(super) not_seen: Vec<String>,
}

/// What the replay under the recorded settings did as it was recorded.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Compared {
    /// Segments, or parts of expandable ones, that the recording takes from the device.
    pub(super) segments_taken: u64,
    /// Those that it gives back.
    pub(super) segments_returned: u64,
    /// Allocations whose addresses were compared.
    pub(super) allocations: u64,
    /// Whether all of them lie where they were recorded; `null` where they cannot be compared.
    pub(super) same: Option<bool>,
}

impl Evidence {
    /// Replays a history as it was recorded, and from the start that all settings have in common.
    pub(super) fn of(happened: &RecordedRun, trial: &Trial, replayed: &Outcome<Of>) -> Result<Self> {
        let before = happened.leftover;
        let Leftover { reserved_bytes: reserved, in_blocks_bytes: in_blocks, .. } = before;
        let told = happened.recorded.as_recorded;
        // Under another limit than its own the program would have reserved what its replay does.
        let most = if happened.repeats { u64::MAX } else { replayed.peak_reserved_bytes };
        let same_start_peak_reserved_bytes = match reserved {
            0 => None,
            _ => Some(trial.changed(History::begin_without_cache)?.run(&happened.conf)?.peak_reserved_bytes),
        };
        let mut not_seen = Vec::new();
        if reserved > 0 {
            let unused = reserved.saturating_sub(in_blocks);
            not_seen.push(format!(
                "What came before the recording: {} were reserved by then, {} of them in use and {} cached.",
                Bytes(reserved),
                Bytes(in_blocks.min(reserved)),
                Bytes(unused)
            ));
        }
        if told.is_none() {
            not_seen
                .push("What the program held from the device: the recording does not show all of its segments.".into());
        }
        Ok(Self {
            before,
            told_from_end: happened.segments == (0, 0),
            needed_reserved_bytes: told.map(|told| told.reserved.min(before.peak_in_use_bytes).min(most)),
            same_start_peak_reserved_bytes,
            compared: compared(happened, trial)?,
            not_seen,
        })
    }

    /// What a setting saves that reserves so much, in percent of what was recorded; `None` where the recording does not say. It does
    /// where the setting needs more after the first event than was reserved before it: then what it would have needed before does
    /// not matter.
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

    /// Why the recording does not say what a setting saves that reserves so much.
    pub(super) fn not_said(&self, peak: u64) -> String {
        let held = Bytes(self.held_before());
        match (self.needed_reserved_bytes, self.same_start_peak_reserved_bytes) {
            (Some(_), _) if !self.reaches(peak) => format!(
                "{held} were reserved before it began, more than the setting needs that does best in what was recorded, and what it \
                 would have needed before is not known"
            ),
            (Some(needed), Some(same_start)) => format!(
                "begun without what was cached, what ran reserves {} instead of {}",
                Bytes(same_start),
                Bytes(needed)
            ),
            _ => "events of segments are missing, so what was reserved is not known".to_owned(),
        }
    }

    /// Whether so much is reserved after the first event that what was needed before does not matter.
    pub(super) fn reaches(&self, peak: u64) -> bool {
        peak >= self.held_before()
    }

    /// What was reserved before the first event, without what went back before the first allocation.
    pub(super) fn held_before(&self) -> u64 {
        self.before.reserved_bytes - self.before.returned_at_once_bytes
    }
}

/// Replays a history under its own settings at its own addresses.
fn compared(happened: &RecordedRun, trial: &Trial) -> Result<Compared> {
    let history = &happened.recorded.history;
    let (segments_taken, segments_returned) = happened.segments;
    let mut out = Compared { segments_taken, segments_returned, allocations: 0, same: None };
    if happened.repeats && history.check_comparable().is_ok() {
        let how = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
        let report = trial.as_recorded(&happened.conf, &how)?;
        out.allocations = report.allocations;
        out.same = Some(is_as_recorded(&report));
    }
    Ok(out)
}

impl Compared {
    /// Segments that come or go: where none does, a replay tests nothing.
    pub(super) fn changes(&self) -> u64 {
        self.segments_taken + self.segments_returned
    }

    pub(super) fn counts(&self) -> String {
        format!("{} taken, {} given back", counted(self.segments_taken, "segment"), self.segments_returned)
    }

    /// What was tested, in a sentence; `None` where it was not the same, or the recording tests nothing.
    pub(super) fn sentence(&self) -> Option<String> {
        let blocks = counted(self.allocations, "block");
        (self.same == Some(true) && self.changes() > 0).then(|| {
            let counts = self.counts();
            format!("Replayed under that it does the same to the byte: {counts}, {blocks} compared by address.")
        })
    }
}
