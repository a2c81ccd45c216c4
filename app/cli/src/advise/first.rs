//! The answer in one line, for programs that ran here.

use super::{Advice, Asked, Other, Outcome, Verdict, advice};
use crate::advise::recorded_run::RecordedRun;
use crate::reading::ReadArgs;
use crate::recording::Recording;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::path::Path;
use vramlab::{Bytes, Selection};

/// What is advised for one snapshot.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct First {
    verdict: Verdict,
    /// The setting to try, as `PYTORCH_CUDA_ALLOC_CONF` has it; `null` where there is none that is better.
    pub(crate) conf: Option<String>,
    /// What is said of it.
    pub(crate) sentence: String,
    saving_percent: Option<f64>,
    /// What the program would reserve under it.
    pub(crate) predicted_reserved_bytes: Option<u64>,
    /// Calls of the driver that it would make.
    pub(crate) predicted_driver_calls: Option<u64>,
    /// What ran, as the recording has it.
    pub(crate) recorded_reserved_bytes: Option<u64>,
    /// Calls of the driver that it made, by its replay under the same settings.
    pub(crate) recorded_driver_calls: Option<u64>,
}

/// Advice for one snapshot.
///
/// # Errors
/// Those of reading it and of replays.
pub(crate) fn first(file: &Path, limit: Option<u64>) -> Result<First> {
    let recording = Recording::read(file, None, limit, &ReadArgs::default())?;
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
    let happened = RecordedRun::of(limit, &recording)?;
    Ok(told(&advice(file, &happened, &Asked::default(), false, &recording)?))
}

/// What a program comes to in a replay of its history.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Replayed {
    pub(crate) reserved_bytes: u64,
    pub(crate) driver_calls: u64,
}

/// Replays a snapshot's history under an allocator, or under the settings that it had; `None` where memory runs out.
///
/// # Errors
/// Those of reading the snapshot and of the replay.
pub(crate) fn replayed(file: &Path, limit: Option<u64>, alloc: Option<&Selection>) -> Result<Option<Replayed>> {
    let happened = RecordedRun::read(file, None, limit, &ReadArgs::default())?;
    let trial = happened.trial(file)?;
    Ok(match alloc {
        Some(alloc) => figures(&trial.under(Other { alloc: alloc.clone() }, alloc)?),
        None => figures(&trial.run(&happened.conf)?),
    })
}

fn figures<T>(outcome: &Outcome<T>) -> Option<Replayed> {
    let (reserved_bytes, driver_calls) = (outcome.peak_reserved_bytes, outcome.calls());
    outcome.runs().then_some(Replayed { reserved_bytes, driver_calls })
}

fn told(advice: &Advice) -> First {
    let first = advice.settings.first();
    let conf = first.filter(|_| matches!(advice.verdict, Verdict::Change | Verdict::NotSaid));
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

fn sentence(advice: &Advice) -> String {
    let Some(first) = advice.settings.first() else { return "no setting was tried".to_owned() };
    let reserved = Bytes(first.outcome.peak_reserved_bytes);
    let ran = advice.recorded.peak_reserved_bytes.map_or(String::new(), |bytes| format!(" for {}", Bytes(bytes)));
    match advice.verdict {
        Verdict::Change => {
            let less = advice.saving_percent.map_or(String::new(), |saving| format!(" (-{saving:.1} %)"));
            format!("{} reserves {reserved}{ran}{less}", first.export)
        }
        Verdict::Keep => {
            let tried = advice.settings.len() + advice.also_tried.len();
            format!("keep the settings: none of {tried} saves 2 %")
        }
        Verdict::NotSaid => "the recording does not reach back far enough to say; --events keeps more".to_owned(),
        Verdict::OutOfMemory => match advice.needed_bytes {
            Some(needed) => format!("no setting mends the out-of-memory; {} are needed", Bytes(needed)),
            None => "no setting mends the out-of-memory".to_owned(),
        },
        Verdict::NotRecorded => "no allocation was recorded".to_owned(),
    }
}
