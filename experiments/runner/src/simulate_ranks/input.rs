//! Records of several ranks: run records of the trainer, and files with a run in each line.

use crate::study::figures::{read_summary, read_text};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use vramlab::Bytes;

/// Epochs of a run that are warm-up.
pub(super) const WARM_UP: u64 = 2;
/// Most bytes of a file.
const MOST_BYTES: u64 = 256 << 20;
/// Directories within each other that are searched.
const MOST_DEPTH: usize = 6;

/// Settings that make the steps of two runs comparable.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Configuration {
    hidden: String,
    /// Rows of a rank in each step.
    rows: u64,
    dtype: String,
    fuse: String,
    launch: String,
    buffers: String,
    pub(super) overlap: bool,
    pub(super) bucket_bytes: Vec<u64>,
    /// Other options of ranks that are not the defaults, with their values.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    options: Vec<String>,
}

/// Options of ranks with their defaults.
const OPTIONS: [(&str, &str); 4] =
    [("comm_streams", "1"), ("bucket_source", "allocator"), ("register", "false"), ("peer_access", "false")];

impl fmt::Display for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hidden, rows, dtype, fuse, launch, buffers, overlap, bucket_bytes, options } = self;
        let (count, bytes) = (bucket_bytes.len(), Bytes(bucket_bytes.iter().sum()));
        write!(f, "hidden {hidden}, {rows} rows a rank, {dtype}, fuse {fuse}, {launch}, {bytes} in {count} ")?;
        write!(f, "bucket{}, buffers {buffers}", if count == 1 { "" } else { "s" })?;
        if !*overlap {
            f.write_str(", no overlap")?;
        }
        options.iter().try_for_each(|option| write!(f, ", {option}"))
    }
}

/// Runs of one configuration with the same allocators on the ranks.
#[derive(Clone, Debug)]
pub(super) struct Runs {
    pub(super) configuration: Configuration,
    /// The allocator of each rank.
    pub(super) allocs: Vec<String>,
    /// The mean step of each epoch, or of each run where a record has only these. Not empty.
    pub(super) steps_s: Vec<f64>,
}

impl Runs {
    pub(super) fn ranks(&self) -> u32 {
        u32::try_from(self.allocs.len()).unwrap_or(u32::MAX)
    }

    /// The allocator, if all ranks have the same.
    pub(super) fn one_allocator(&self) -> Option<&str> {
        let first = self.allocs.first()?;
        self.allocs.iter().all(|alloc| alloc == first).then_some(first)
    }
}

/// The runs of several ranks in these files and directories, those of one configuration together.
///
/// # Errors
/// A path that cannot be read.
pub(super) fn read(paths: &[PathBuf]) -> Result<Vec<Runs>> {
    let mut out: BTreeMap<(Configuration, Vec<String>), Vec<f64>> = BTreeMap::new();
    for path in paths {
        let runs = if path.is_dir() { directory(path, 0)? } else { lines(path)? };
        for run in runs {
            out.entry((run.configuration, run.allocs)).or_default().extend(run.steps_s);
        }
    }
    let measured = |((configuration, allocs), steps_s)| Runs { configuration, allocs, steps_s };
    Ok(out.into_iter().map(measured).collect())
}

/// The runs in a file of which each line is a JSON object.
fn lines(path: &Path) -> Result<Vec<Runs>> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some(name) = path.file_name() else { bail!("{}: not a file", path.display()) };
    let text = read_text(directory, &name.to_string_lossy(), MOST_BYTES)?;
    let mut runs = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let value: Value = serde_json::from_str(line)
            .with_context(|| format!("{}, line {}: not a JSON object", path.display(), number + 1))?;
        if value["status"] == "finished" {
            let longest = numbers(&value, "step_s").into_iter().fold(0.0, f64::max);
            runs.extend(measured(&value, &value, vec![longest]));
        }
    }
    Ok(runs)
}

/// The runs in a directory and those below it. The records of single ranks, below that of rank 0, are parts of its run.
fn directory(path: &Path, depth: usize) -> Result<Vec<Runs>> {
    if ["summary.json", "summary.json.gz"].iter().any(|name| path.join(name).is_file()) {
        let summary = read_summary(path)?;
        if summary["status"] != "finished" {
            return Ok(Vec::new());
        }
        return Ok(measured(&summary, &summary["settings"], steps(&summary)).into_iter().collect());
    }
    let mut runs = Vec::new();
    if depth < MOST_DEPTH {
        let reading = || format!("{}: cannot be read", path.display());
        let mut below: Vec<PathBuf> = Vec::new();
        for entry in path.read_dir().with_context(reading)? {
            let entry = entry.with_context(reading)?;
            // A link could lead back here.
            if entry.file_type().with_context(reading)?.is_dir() {
                below.push(entry.path());
            }
        }
        below.sort();
        for path in below {
            runs.extend(directory(&path, depth + 1)?);
        }
    }
    Ok(runs)
}

/// The mean step of each epoch behind the warm-up. The host queues steps ahead, so single steps have no time of their own.
fn steps(summary: &Value) -> Vec<f64> {
    let epochs = summary["epochs"].as_array().into_iter().flatten();
    let behind = epochs.filter(|epoch| epoch["epoch"].as_u64().is_some_and(|epoch| epoch > WARM_UP));
    behind.filter_map(|epoch| Some(epoch["train_s"].as_f64()? / epoch["steps"].as_f64()?)).collect()
}

fn numbers(run: &Value, name: &str) -> Vec<f64> {
    run["ranks"].as_array().into_iter().flatten().filter_map(|rank| rank[name].as_f64()).collect()
}

/// A run, if it has several ranks and steps.
fn measured(run: &Value, settings: &Value, steps_s: Vec<f64>) -> Option<Runs> {
    let ranks = run["ranks"].as_array().filter(|ranks| ranks.len() > 1)?;
    let allocs = ranks.iter().map(|rank| rank["alloc"].as_str().map(str::to_owned)).collect::<Option<Vec<String>>>()?;
    let text = |name: &str| match &settings[name] {
        Value::String(text) => text.clone(),
        Value::Null => "default".to_owned(),
        value => value.to_string(),
    };
    let buckets = run["communication"]["bucket_bytes"].as_array();
    let option = |(name, usual): (&str, &str)| {
        let value = text(name);
        // Older records have no such option.
        (value != usual && value != "default").then(|| format!("{} {value}", name.replace('_', " ")))
    };
    let configuration = Configuration {
        hidden: text("hidden"),
        rows: settings["batch"].as_u64()? / ranks.len() as u64,
        dtype: text("dtype"),
        fuse: text("fuse"),
        launch: text("launch"),
        buffers: text("buffers"),
        overlap: settings["overlap"].as_bool().unwrap_or(true),
        bucket_bytes: buckets.into_iter().flatten().filter_map(Value::as_u64).collect(),
        options: OPTIONS.into_iter().filter_map(option).collect(),
    };
    let is_usable = !steps_s.is_empty() && steps_s.iter().all(|step| *step > 0.0);
    is_usable.then_some(Runs { configuration, allocs, steps_s })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use serde_json::json;

    #[test]
    fn runs_with_other_options_of_ranks_are_another_configuration() {
        let configuration = |options: Value| {
            let run = json!({"ranks": [{"alloc": "caching"}, {"alloc": "caching"}]});
            let mut settings = json!({"hidden": 64, "batch": 16, "buffers": "kept"});
            settings.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
            measured(&run, &settings, vec![1.0]).unwrap().configuration
        };
        let older = configuration(json!({}));
        let usual = json!({"comm_streams": 1, "bucket_source": "allocator", "register": false, "peer_access": false});
        assert_eq!(configuration(usual), older);
        let other = configuration(json!({"comm_streams": 2, "register": true}));
        assert!(other != older && other.to_string().ends_with(", comm streams 2, register true"), "{other}");
    }
}
