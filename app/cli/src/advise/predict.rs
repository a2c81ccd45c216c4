//! Predictions for settings, to be compared with measurements.

use super::evaluate::Trial;
use super::recorded_run::RecordedRun;
use super::search;
use crate::reading::{ReadArgs, cores, in_parallel};
use anyhow::Result;
use std::path::Path;

/// Predicted values of a setting, to be compared with measured ones.
#[derive(Debug)]
pub struct Predicted {
    /// The setting, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
    pub conf: String,
    /// Peak of reserved memory.
    pub peak_reserved_bytes: u64,
    /// Whether a request fails.
    pub out_of_memory: bool,
    /// Cache flushes before a request can be served.
    pub num_alloc_retries: u64,
}

/// Predictions for a recording under settings, and what no replay shows.
#[derive(Debug)]
pub struct Predictions {
    /// The best first.
    pub settings: Vec<Predicted>,
    /// Deferred frees.
    pub deferred_frees: u64,
    /// Private pools of CUDA graphs and of `MemPool`.
    pub private_pools: u64,
}

/// Replays a recording under settings.
///
/// # Errors
/// Those of reading the recording, and invalid settings.
pub fn predict(file: &Path, limit: Option<u64>, confs: &[String]) -> Result<Predictions> {
    let run = RecordedRun::read(file, None, limit, &ReadArgs::default())?;
    // PyTorch's limit, which expandable segments may exceed.
    let trial = Trial::new(file, &run.trace.history, limit, false)?;
    let confs = super::confs(confs)?;
    let mut outcomes = in_parallel(cores(), &confs, |conf| trial.run(conf))?;
    search::rank(&mut outcomes, &run.conf);
    let settings = outcomes.into_iter().map(|outcome| Predicted {
        conf: outcome.of.conf.text().to_owned(),
        peak_reserved_bytes: outcome.peak_reserved_bytes,
        out_of_memory: outcome.out_of_memory,
        num_alloc_retries: outcome.num_alloc_retries,
    });
    let history = &run.trace.history;
    let (deferred_frees, private_pools) = (history.deferred_frees(), history.private_pools());
    Ok(Predictions { settings: settings.collect(), deferred_frees, private_pools })
}
