//! `experiment.json` and `run.json`: the files that an experiment leaves. `analysis/schema.md` describes them.

use super::plan::Run;
use super::spec::{Source, Spec};
use crate::repository::{self, sha256};
use anyhow::{Context, Result, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;
use trainer::provenance::Provenance;
use vramlab::input::{DOCUMENT, open, read_text};
use vramlab::output::{self, Existing, OutputFile};

/// Version of both files; raised when a field changes its meaning or is removed.
pub(crate) const SCHEMA_VERSION: u64 = 1;
/// File of the complete experiment.
pub(crate) const EXPERIMENT: &str = "experiment.json";
/// File of one run, next to its program's output.
pub(crate) const RUN: &str = "run.json";
/// Directory of the runs.
pub(crate) const RUNS: &str = "runs";
/// Text files above this size are compressed.
const PLAIN_BYTES: u64 = 16 << 10;

/// A spec that has been checked, with its runs.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) source: Source,
    pub(super) runs: Vec<Run>,
    pub(super) sha256: String,
    /// SHA-256 of the profile's file, if the device is simulated with one.
    pub(super) profile_sha256: Option<String>,
    /// `DIR/<name>`, absolute.
    pub(super) folder: PathBuf,
}

impl Planned {
    /// Directory of a run's complete record.
    pub(super) fn run_folder(&self, run: &Run) -> PathBuf {
        self.folder.join(RUNS).join(&run.id)
    }

    /// Status of a run.
    pub(super) fn status_of(&self, run: &Run) -> Result<Option<RunStatus>> {
        status_of(&self.run_folder(run), &self.sha256)
    }
}

/// A complete experiment.
#[derive(Debug, Serialize)]
pub(crate) struct ExperimentRecord<'a> {
    /// Version of this file and of `run.json`: 1.
    pub(crate) schema_version: u64,
    pub(crate) name: &'a str,
    /// The question that the experiment answers.
    pub(crate) question: &'a str,
    /// The complete spec as JSON, with defaults filled in.
    pub(crate) spec: &'a Spec,
    /// SHA-256 of `spec` as compact JSON, in lowercase hex. A directory accepts runs of one value only.
    pub(crate) spec_sha256: &'a str,
    /// `cuda`, `cuda:N`, `sim`, or `sim:` and a profile's name.
    pub(crate) device: String,
    /// SHA-256 of that profile's file, in lowercase hex. A directory accepts runs of one profile only. Absent: a GPU,
    /// or the built-in profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) profile_sha256: Option<&'a str>,
    /// The runner's arguments that determine the runs; shared by all shards.
    pub(crate) command: Vec<String>,
    pub(crate) code_version: &'a str,
    /// Provenance of the runner that started the experiment.
    pub(crate) provenance: Provenance,
    /// Start of the experiment, UTC.
    pub(crate) started_at: String,
    /// Planned runs in the order of the spec, of all shards.
    pub(crate) runs: &'a [Run],
}

/// The machine of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// Name of the processor, if the system names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu: Option<String>,
    /// Cores that this process may use.
    pub(crate) cores: u32,
    /// Name of the GPU of a run on one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<String>,
    /// Load average over the last minute when the run began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load: Option<f64>,
    /// Of a run on a GPU: whether no other `experiments run` was at work on this host's GPUs when it began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) alone: Option<bool>,
}

impl Machine {
    /// This machine now.
    pub(crate) fn now() -> Self {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = text("/proc/cpuinfo");
        let cpu = cpuinfo.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
        Self {
            cpu: cpu.map(|(_, name)| name.trim().to_owned()),
            cores: cores(),
            gpu: None,
            load: text("/proc/loadavg").split_whitespace().next().and_then(|load| load.parse().ok()),
            alone: None,
        }
    }
}

/// Cores that this process may use.
pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

/// Outcome of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RunStatus {
    /// Completed.
    Done,
    /// See `error`.
    Failed,
    /// The run is not possible on this machine.
    Skipped,
}

/// A run.
#[derive(Debug, Serialize)]
pub(crate) struct RunRecord<'a> {
    pub(crate) schema_version: u64,
    pub(crate) experiment: &'a str,
    /// As in `experiment.json`.
    pub(crate) spec_sha256: &'a str,
    #[serde(flatten)]
    pub(crate) run: &'a Run,
    /// As in `experiment.json`. On `sim`, PyTorch runs on the CPU and `bench` on the device without costs.
    pub(crate) device: String,
    /// The runner's shard, as `2/4`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shard: Option<String>,
    /// Limit on simultaneous runs, `--jobs`. Above 1, real times are those of a busy machine, but `bench` and
    /// `pytorch` always run alone.
    pub(crate) jobs: usize,
    /// The command without directories; empty if skipped.
    pub(crate) command: Vec<String>,
    pub(crate) started_at: String,
    /// Real time of the process, startup included; 0 if skipped.
    pub(crate) wall_s: f64,
    pub(crate) status: RunStatus,
    /// Exit code of the process; `null` if a signal ended it, or if skipped.
    pub(crate) exit_code: Option<i32>,
    /// The program's last line, or the reason for skipping.
    pub(crate) error: Option<String>,
    pub(crate) machine: Machine,
    pub(crate) provenance: Provenance,
    /// Other files of the run's directory.
    pub(crate) files: Vec<String>,
}

/// Provenance of this program on this machine, now.
pub(crate) fn provenance() -> Provenance {
    Provenance::of(terminal::built!())
}

/// SHA-256 of a spec's content, without comments and layout of its file.
pub(crate) fn spec_sha256(spec: &Spec) -> Result<String> {
    let text = serde_json::to_string(spec).context("the spec cannot be written as JSON")?;
    Ok(sha256(text.as_bytes()))
}

/// Replaces a file atomically, formatted for people.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    replace(path, serde_json::to_string_pretty(value).with_context(|| format!("cannot write {}", path.display()))?)
}

/// Replaces a file atomically, on one line: otherwise half of a summary is white space.
pub(crate) fn write_compact(path: &Path, value: &Value) -> Result<()> {
    replace(path, value.to_string())
}

fn replace(path: &Path, mut text: String) -> Result<()> {
    text.push('\n');
    Ok(output::write(path, Existing::Replace, text)?)
}

/// Reads a JSON file of a version that this program knows.
pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let text = read_text(path, DOCUMENT).with_context(|| format!("cannot read {}", path.display()))?;
    let value: Value = serde_json::from_str(&text)
        .with_context(|| format!("{} is not JSON, so something else wrote it or it was cut", path.display()))?;
    match value["schema_version"].as_u64() {
        Some(SCHEMA_VERSION) => Ok(value),
        Some(other) => bail!(
            "{} has schema version {other}, this program writes {SCHEMA_VERSION}; choose another directory with -o",
            path.display()
        ),
        None => bail!("{} has no schema_version, so no experiment wrote it", path.display()),
    }
}

/// The directory itself if it is an experiment, else the experiments in it, sorted.
pub(crate) fn experiments_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let holds_experiment = |folder: &Path| folder.join(EXPERIMENT).is_file();
    if holds_experiment(folder) {
        return Ok(vec![folder.to_owned()]);
    }
    let mut experiments = repository::entries(folder)?;
    experiments.retain(|path| holds_experiment(path));
    if experiments.is_empty() {
        bail!(
            "{} has no {EXPERIMENT}, nor does a directory in it; name what `experiments run` had as --out",
            folder.display()
        );
    }
    Ok(experiments)
}

/// Whether a name cannot lead to another directory.
pub(crate) fn is_plain(id: &str) -> bool {
    !id.is_empty() && !id.starts_with('.') && !id.contains(['/', '\\', '\0'])
}

/// Directory in which a run's record is written before it is complete.
pub(crate) fn part_of(runs: &Path, id: &str) -> PathBuf {
    runs.join(format!(".{id}.part"))
}

/// Status of a run, read from its directory.
pub(crate) fn status_of(folder: &Path, sha256: &str) -> Result<Option<RunStatus>> {
    let path = folder.join(RUN);
    let value = match read_json(&path) {
        _ if !folder.exists() => return Ok(None),
        // A directory that another runner is replacing is complete a moment later.
        Err(_) => read_json(&path)
            .with_context(|| format!("{} is damaged; remove it, and the run is made again", folder.display()))?,
        Ok(value) => value,
    };
    if value["spec_sha256"].as_str() != Some(sha256) {
        bail!("{} belongs to another version of the spec; choose another directory with -o", path.display());
    }
    serde_json::from_value(value["status"].clone()).map(Some).with_context(|| format!("{}: status", path.display()))
}

/// Removes a directory if it exists, including files that a killed runner's program still writes to it.
pub(crate) fn remove(folder: &Path) -> Result<()> {
    /// A program that still writes opens a few more files; each try leaves it less to do.
    const TRIES: u32 = 1000;
    let mut left = TRIES;
    loop {
        match std::fs::remove_dir_all(folder) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty && left > 0 => {
                left -= 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error).with_context(|| format!("cannot remove {}", folder.display())),
        }
    }
}

/// Removes a file if it exists.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
    .with_context(|| format!("cannot remove {}", path.display()))
}

/// Compresses a large text file; returns its name after that.
pub(crate) fn compress(path: &Path) -> Result<PathBuf> {
    let fails = || format!("cannot compress {}", path.display());
    let size = std::fs::metadata(path).with_context(fails)?.len();
    let is_text = path.extension().is_some_and(|end| ["json", "jsonl", "csv", "hlog"].iter().any(|text| end == *text));
    // Readers open the summary first; it stays readable.
    if size <= PLAIN_BYTES || !is_text || path.ends_with("summary.json") {
        return Ok(path.to_owned());
    }
    let packed = PathBuf::from(format!("{}.gz", path.display()));
    let mut out = OutputFile::create(&packed, Existing::Replace)?;
    // No name and no time in the header: the same text gives the same bytes.
    let mut encoder = GzEncoder::new(&mut out, Compression::best());
    let copied = open(path).and_then(|mut file| std::io::copy(&mut file, &mut encoder));
    copied.and_then(|_| encoder.finish()).with_context(fails)?;
    out.finish()?;
    std::fs::remove_file(path).with_context(fails)?;
    Ok(packed)
}

/// Removes this machine's directories from every text of a record: only the last component of a path stays.
pub(crate) fn without_folders(value: &mut Value, folders: &[PathBuf]) {
    match value {
        Value::String(text) => {
            for folder in folders {
                let folder = folder.to_string_lossy();
                if folder.len() > 1 && text.contains(folder.as_ref()) {
                    *text = text.replace(&format!("{folder}/"), "").replace(folder.as_ref(), ".");
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| without_folders(value, folders)),
        Value::Object(fields) => fields.values_mut().for_each(|value| without_folders(value, folders)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    #[test]
    fn a_folder_that_is_written_to_can_be_removed() {
        let temp_dir = tempfile::TempDir::new().unwrap();
        let (folder, over) = (temp_dir.path().join("run"), AtomicBool::new(false));
        std::thread::scope(|scope| {
            // Writes as a program does, in its working directory.
            scope.spawn(|| {
                for number in 0_u64.. {
                    if over.load(SeqCst) {
                        break;
                    }
                    let _ = std::fs::write(folder.join(format!("record-{}", number % 7)), "text");
                    // A program has work between two files; one without any could write forever.
                    std::thread::sleep(Duration::from_micros(20));
                }
            });
            for _ in 0..200 {
                std::fs::create_dir_all(&folder).unwrap();
                std::thread::sleep(Duration::from_micros(200));
                let removed = remove(&folder);
                over.fetch_or(removed.is_err(), SeqCst);
                removed.unwrap();
                assert!(!folder.exists());
            }
            over.store(true, SeqCst);
        });
        remove(&folder).unwrap();
    }
}
