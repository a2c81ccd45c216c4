//! Pairs of a recording and a setting that it was not recorded under: the prediction and PyTorch's measurement.

use super::measured::Measured;
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use vramlab_cli::predict;

/// Settings whose peaks differ by less than this factor count as equally good.
const AS_GOOD: f64 = 1.01;

/// A pair of recording and setting; the keys are described in `analysis/schema.md`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Pair {
    /// The program.
    pub(super) program: String,
    /// `heldout` or `known`, as in the measured run.
    pub(super) set: String,
    /// The recording behind the prediction.
    pub(super) recording: String,
    /// Setting of the recording.
    pub(super) recorded_conf: String,
    /// The recording's deferred frees, which waited for other streams; their timing affects the result.
    pub(super) deferred_frees: u64,
    /// The recording's private pools, of CUDA graphs and of `MemPool`.
    pub(super) private_pools: u64,
    /// Predicted setting.
    pub(super) conf: String,
    /// Memory limit of the program. A recording under a limit predicts only runs under the same one.
    pub(super) limit_bytes: Option<u64>,
    /// PyTorch's own statistic; if memory ran out, at that time.
    pub(super) real_peak_reserved_bytes: u64,
    /// The replay's peak.
    pub(super) predicted_peak_reserved_bytes: u64,
    /// The difference in percent of the measured peak, where neither ran out of memory.
    pub(super) off_percent: Option<f64>,
    /// The same difference for the prediction from before `advise` was changed because of the held-out runs.
    pub(super) first_off_percent: Option<f64>,
    pub(super) real_out_of_memory: bool,
    /// Whether memory runs out in the replay.
    pub(super) predicted_out_of_memory: bool,
    pub(super) real_retries: u64,
    /// The replay's retries.
    pub(super) predicted_retries: u64,
    /// Rank, from 1, of the setting among those of the same recording and limit, the recorded one included, as
    /// `advise` orders them.
    pub(super) rank: u64,
    /// Whether the first-ranked setting reserved at most 1 % more than the best; absent where memory ran out under
    /// each, and where there is only one setting.
    pub(super) first_choice_right: Option<bool>,
    /// Commit of the program that predicted, with `-dirty` appended if its sources differed.
    pub(super) build: String,
}

/// The columns that identify a row.
pub(super) type Key<'a> = (&'a str, Option<u64>, &'a str);

impl Pair {
    pub(super) fn key(&self) -> Key<'_> {
        (&self.recording, self.limit_bytes, &self.conf)
    }

    /// Whether another build must give the same row.
    pub(super) fn agrees(&self, other: &Self) -> bool {
        *self == Self { build: self.build.clone(), ..other.clone() }
    }

    /// Whether the result depends on data that no recording contains, or the allocator is at its limit.
    pub(super) fn is_hard(&self) -> bool {
        self.deferred_frees > 0 || self.private_pools > 0 || self.limit_bytes.is_some()
    }
}

/// Whether a peak is within [`AS_GOOD`] of the least one.
fn is_as_good(bytes: u64, least: u64) -> bool {
    // CAST: bytes of a device, below 2^53.
    bytes as f64 <= least as f64 * AS_GOOD
}

/// A recording used for predictions: its name, its path and its run.
pub(super) type Recording<'a> = (&'a str, &'a Path, &'a Measured);

/// The recordings sorted by name. A recording that ended when memory ran out has no later events, so it is left out.
pub(super) fn recordings(runs: &[Measured]) -> Vec<Recording<'_>> {
    let mut all: Vec<Recording<'_>> = runs
        .iter()
        .filter(|run| !run.out_of_memory)
        .filter_map(|run| Some((run.recording.as_deref()?, run.file.as_deref()?, run)))
        .collect();
    all.sort_by_key(|(name, ..)| *name);
    all
}

/// Replays a recording under the settings of all other runs of its program, for each limit.
///
/// # Errors
///
/// Reading or replaying it fails, or two runs have the same setting and limit.
pub(super) fn predicted((name, file, own): Recording<'_>, runs: &[Measured], build: &str) -> Result<Vec<Pair>> {
    let mut limits: BTreeMap<Option<u64>, Vec<&Measured>> = BTreeMap::new();
    for run in runs.iter().filter(|run| run.program == own.program) {
        if own.limit_bytes.is_none() || own.limit_bytes == run.limit_bytes {
            limits.entry(run.limit_bytes).or_default().push(run);
        }
    }
    let mut pairs = Vec::new();
    for (limit, runs) in limits {
        let is_own = |conf: &str| limit == own.limit_bytes && conf == own.conf;
        if runs.iter().all(|run| is_own(&run.conf)) {
            continue;
        }
        let mut confs: Vec<String> = runs.iter().map(|run| run.conf.clone()).collect();
        confs.sort_unstable();
        let real: BTreeMap<&str, &Measured> = runs.iter().map(|run| (run.conf.as_str(), *run)).collect();
        if real.len() < confs.len() {
            bail!("{}: two runs are of the same setting and limit; keep one", own.program);
        }
        let prediction = predict(file, limit, &confs)?;
        let least = runs.iter().filter(|run| !run.out_of_memory).map(|run| run.peak_reserved_bytes).min();
        let first = prediction.settings.first().and_then(|setting| real.get(setting.conf.as_str()));
        let first_choice_right = least
            .zip(first)
            .filter(|_| runs.len() > 1)
            .map(|(least, first)| !first.out_of_memory && is_as_good(first.peak_reserved_bytes, least));
        for (rank, one) in (1..).zip(&prediction.settings) {
            let Some(run) = real.get(one.conf.as_str()).filter(|run| !is_own(&run.conf)) else { continue };
            let off = |bytes: u64| {
                // CAST: bytes of a device, below 2^53.
                let off = 100.0 * (bytes as f64 / run.peak_reserved_bytes.max(1) as f64 - 1.0);
                (!run.out_of_memory && !one.out_of_memory).then_some((off * 1000.0).round() / 1000.0)
            };
            pairs.push(Pair {
                program: run.program.clone(),
                set: run.set.clone(),
                recording: name.to_owned(),
                recorded_conf: own.conf.clone(),
                deferred_frees: prediction.deferred_frees,
                private_pools: prediction.private_pools,
                conf: run.conf.clone(),
                limit_bytes: limit,
                real_peak_reserved_bytes: run.peak_reserved_bytes,
                predicted_peak_reserved_bytes: one.peak_reserved_bytes,
                off_percent: off(one.peak_reserved_bytes),
                first_off_percent: run.first_predicted.as_ref().and_then(|first| off(first.peak_reserved_bytes)),
                real_out_of_memory: run.out_of_memory,
                predicted_out_of_memory: one.out_of_memory,
                real_retries: run.retries,
                predicted_retries: one.num_alloc_retries,
                rank,
                first_choice_right,
                build: build.to_owned(),
            });
        }
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_peak_at_most_one_percent_above_the_least_is_as_good() {
        let least = 1_000_000_000;
        assert_eq!([0, 9_999_999, 10_000_001].map(|more| is_as_good(least + more, least)), [true, true, false]);
    }

    #[test]
    fn a_recording_that_ended_out_of_memory_predicts_nothing() {
        let run = |name: &str, out_of_memory: bool| {
            let mut run: Measured = serde_json::from_value(json!({
                "program": "a", "set": "known", "conf": "", "limit_bytes": null, "peak_reserved_bytes": 1,
                "peak_active_bytes": null, "out_of_memory": out_of_memory, "retries": 0, "recording": name, "torch": null,
                "gpu": null, "recorded_after": null, "first_predicted": null,
            }))
            .unwrap();
            run.file = Some(name.into());
            run
        };
        let runs = [run("b", false), run("out", true), run("a", false)];
        let names: Vec<&str> = recordings(&runs).into_iter().map(|recording| recording.0).collect();
        assert_eq!(names, ["a", "b"]);
    }
}
