//! What a change of the program would gain, where its memory is held by what no setting reaches: calls of `empty_cache`, memory of
//! other streams, workspaces, what an earlier part left in the cache, private pools.
//!
//! Each is shown by events, and a replay without it says what it costs.

mod rules;

use super::evaluate::{Of, Outcome, Trial};
use super::evidence::Evidence;
use super::recorded_run::RecordedRun;
use super::{Verdict, WORTH};
use crate::recording::Recording;
use crate::words::counted;
use anyhow::Result;
use serde::Serialize;
use vramlab::Bytes;
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
    for found in rules::all(recording, happened, evidence)? {
        let rules::Found { cause, what, lines, times, bytes, segments, change } = found;
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
