//! The answer in one line, for `run` and `try`.

use super::{Advice, Other, Outcome, Request, Verdict, advice};
use crate::advise::recorded_run::RecordedRun;
use crate::advise::sentences::{at_least, kept};
use crate::reading::ReadArgs;
use crate::recording::Recording;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::path::Path;
use vramlab::{Bytes, Selection};

/// The advice for one snapshot.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct First {
    verdict: Verdict,
    /// The setting to try, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`; `null` if no tested setting is better.
    pub(crate) conf: Option<String>,
    /// The advice in one sentence.
    pub(crate) sentence: String,
    saving_percent: Option<f64>,
    /// Predicted peak reserved bytes under it.
    pub(crate) predicted_reserved_bytes: Option<u64>,
    /// Predicted driver calls under it.
    pub(crate) predicted_driver_calls: Option<u64>,
    /// Recorded peak of reserved bytes.
    pub(crate) recorded_reserved_bytes: Option<u64>,
    /// Driver calls of the replay under the recorded settings.
    pub(crate) recorded_driver_calls: Option<u64>,
}

/// Advice for one snapshot.
///
/// # Errors
/// Those of reading it and of replays.
pub(crate) fn first(file: &Path, limit: Option<u64>) -> Result<First> {
    let (recording, builder) = Recording::read_to_replay(file, None, limit, &ReadArgs::default())?;
    if recording.events.is_empty() {
        return Ok(First {
            verdict: Verdict::NotRecorded,
            conf: None,
            sentence: "no allocation was recorded".to_owned(),
            saving_percent: None,
            predicted_reserved_bytes: None,
            predicted_driver_calls: None,
            recorded_reserved_bytes: None,
            recorded_driver_calls: None,
        });
    }
    let run = RecordedRun::new(limit, &recording, builder)?;
    Ok(first_of(&advice(file, &run, &Request::default(), false, &recording)?))
}

/// Result of a replay.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Replayed {
    pub(crate) reserved_bytes: u64,
    pub(crate) driver_calls: u64,
}

/// Replays a snapshot under an allocator, or under its own settings; `None` if memory runs out.
///
/// # Errors
/// Those of reading the snapshot and of the replay.
pub(crate) fn replayed(file: &Path, limit: Option<u64>, alloc: Option<&Selection>) -> Result<Option<Replayed>> {
    let run = RecordedRun::read(file, None, limit, &ReadArgs::default())?;
    let trial = run.trial(file)?;
    Ok(match alloc {
        Some(alloc) => totals(&trial.under(Other { alloc: alloc.clone() }, alloc)?),
        None => totals(&trial.run(&run.conf)?),
    })
}

fn totals<T>(outcome: &Outcome<T>) -> Option<Replayed> {
    let (reserved_bytes, driver_calls) = (outcome.peak_reserved_bytes, outcome.calls());
    outcome.runs().then_some(Replayed { reserved_bytes, driver_calls })
}

fn first_of(advice: &Advice) -> First {
    let first = advice.settings.first();
    let conf = first.filter(|_| matches!(advice.verdict, Verdict::Change | Verdict::Inconclusive));
    First {
        verdict: advice.verdict,
        conf: conf.map(|setting| setting.conf().text().to_owned()),
        sentence: sentence(advice),
        saving_percent: advice.saving_percent,
        predicted_reserved_bytes: conf.map(|setting| setting.outcome.peak_reserved_bytes),
        predicted_driver_calls: conf.map(|setting| setting.outcome.calls()),
        recorded_reserved_bytes: advice.recorded.peak_reserved_bytes,
        recorded_driver_calls: Some(advice.recorded.replayed.calls()),
    }
}

/// A sentence that continues another.
fn lower(mut sentence: String) -> String {
    if let Some(first) = sentence.get_mut(..1) {
        first.make_ascii_lowercase();
    }
    sentence
}

fn sentence(advice: &Advice) -> String {
    let Some(first) = advice.settings.first() else { return "no setting was tested".to_owned() };
    let reserved = Bytes(first.outcome.peak_reserved_bytes);
    let recorded =
        advice.recorded.peak_reserved_bytes.map_or(String::new(), |bytes| format!(" instead of {}", Bytes(bytes)));
    match advice.verdict {
        Verdict::Change => {
            let less = advice.saving_percent.map_or(String::new(), |saving| match advice.evidence.is_bound() {
                true => format!(" (saves at least {saving:.1} %)"),
                false => format!(" (-{saving:.1} %)"),
            });
            let more = match (first.smallest_memory_bytes, advice.recorded.smallest_memory_bytes) {
                (Some(least), Some(now)) if least > now => {
                    format!(", but needs {} instead of {}", at_least(least), at_least(now))
                }
                _ => String::new(),
            };
            format!("{} reserves {reserved}{recorded}{less}{more}", first.export)
        }
        Verdict::Keep => lower(kept(advice).unwrap_or_default()),
        Verdict::Inconclusive if advice.not_reproduced.is_some() => {
            format!("inconclusive: {}", advice.not_reproduced.as_deref().unwrap_or_default())
        }
        Verdict::Inconclusive => {
            let gain = kept(advice).map_or(String::new(), |kept| format!("; {}", lower(kept)));
            format!("inconclusive: the recording starts too late; raise --events{gain}")
        }
        Verdict::OutOfMemory => match advice.needed_bytes {
            Some(needed) => {
                format!("no tested setting avoids the out-of-memory; at least {} are needed", Bytes(needed))
            }
            None => "no tested setting avoids the out-of-memory".to_owned(),
        },
        Verdict::NotRecorded => "no allocation was recorded".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What `run` prints follows the ranking, as the screen of `advise` does.
    #[test]
    fn kept_settings_are_kept_by_the_ranking() {
        let event =
            |action: &str| json!({"action": action, "addr": 1 << 30, "size": 32 << 20, "stream": 0, "time_us": 1});
        let block = json!({"size": 32 << 20, "requested_size": 32 << 20, "state": "active_allocated"});
        let segment = json!({"device": 0, "address": 1 << 30, "total_size": 32 << 20, "stream": 0, "segment_type": "large",
            "blocks": [block]});
        let snapshot = json!({"segments": [segment], "device_traces": [[event("segment_alloc"), event("alloc")]]});
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("snapshot.json");
        std::fs::write(&file, snapshot.to_string()).unwrap();
        let first = first(&file, None).unwrap();
        assert_eq!((first.verdict, first.conf), (Verdict::Keep, None));
        let words = "keep the current settings; by peak reserved, minimum memory and driver time none of ";
        assert!(first.sentence.starts_with(words) && !first.sentence.contains('%'), "{}", first.sentence);
    }
}
