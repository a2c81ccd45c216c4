//! PyTorch's measurements: runs of the repository's record, or of directories that `record_settings.py` and similar
//! programs wrote.

use crate::repository;
use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use vramlab::input::{DOCUMENT, TABLE, read_text};

/// The measured runs, one JSON object per line.
const RUNS: &str = "results/advise-truth.jsonl";
/// Their recordings, unless another directory of the repository contains them.
const HISTORIES: &str = "histories/truth.tar";

/// A run of a program under a setting; the keys are described in `analysis/schema.md`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Measured {
    /// The program.
    pub(super) program: String,
    /// `heldout`: recorded after the commit of `recorded_after`, so that `advise` could not have been fitted to it by
    /// then. `known`: `advise` was developed with it or fitted to it.
    pub(super) set: String,
    /// The setting, as `PYTORCH_CUDA_ALLOC_CONF` had it; empty: the defaults.
    pub(super) conf: String,
    /// Memory limit of PyTorch, in bytes.
    pub(super) limit_bytes: Option<u64>,
    /// PyTorch's own statistic; if memory ran out, at that time.
    pub(super) peak_reserved_bytes: u64,
    /// Peak bytes in blocks, PyTorch's own statistic.
    #[serde(rename = "peak_active_bytes")]
    _peak_active_bytes: Option<u64>,
    /// Whether memory ran out; the program may have caught it.
    pub(super) out_of_memory: bool,
    /// How often PyTorch emptied its cache to serve a request.
    pub(super) retries: u64,
    /// The run's recording: a file of `experiments/histories/truth.tar`, or with a `/` a file of the repository.
    pub(super) recording: Option<String>,
    /// PyTorch's version.
    #[serde(rename = "torch")]
    _torch: Option<String>,
    /// The GPU's name.
    #[serde(rename = "gpu")]
    _gpu: Option<String>,
    /// The last commit made without knowledge of this program.
    #[serde(rename = "recorded_after")]
    _recorded_after: Option<String>,
    /// The command that made the run.
    #[serde(rename = "command", default)]
    _command: Option<String>,
    /// Release of NVIDIA's driver.
    #[serde(rename = "driver", default)]
    _driver: Option<String>,
    /// The host, as `host_hash` in a record's provenance.
    #[serde(rename = "host", default)]
    _host: Option<String>,
    /// Commit of the sources of the program.
    #[serde(rename = "commit", default)]
    _commit: Option<String>,
    /// Day of the run.
    #[serde(rename = "date", default)]
    _date: Option<String>,
    /// The prediction from before `advise` was changed because of these runs.
    pub(super) first_predicted: Option<First>,
    /// Current path of its recording.
    #[serde(skip)]
    pub(super) file: Option<PathBuf>,
}

/// A prediction of an earlier build.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct First {
    /// Commit of that build.
    #[serde(rename = "build")]
    _build: String,
    /// Prediction from the recording under the defaults.
    pub(super) peak_reserved_bytes: u64,
}

/// Runs, and the directory of their recordings, which exists as long as this value.
#[derive(Debug)]
pub(super) struct Runs {
    pub(super) all: Vec<Measured>,
    _place: Option<TempDir>,
}

impl Runs {
    /// The repository's runs.
    ///
    /// # Errors
    ///
    /// The record is missing or damaged, or names a missing recording.
    pub(super) fn recorded() -> Result<Self> {
        let (Some(runs), Some(archive)) = (repository::find(RUNS), repository::find(HISTORIES)) else {
            bail!(
                "experiments/{RUNS} and experiments/{HISTORIES} are not here; change into the repository, or name folders"
            )
        };
        let temp_dir = tempfile::Builder::new().prefix("histories-").tempdir()?;
        let damaged = || format!("{} is damaged; check it out anew", archive.display());
        let packed = fs::File::open(&archive).with_context(|| archive.display().to_string())?;
        repository::unpack_into(packed, temp_dir.path()).with_context(damaged)?;
        // The repository's root: the record is two directories below `experiments`.
        let root = runs.ancestors().nth(3).unwrap_or(Path::new("."));
        let mut all = Vec::new();
        let text = read_text(&runs, TABLE).with_context(|| runs.display().to_string())?;
        for (number, line) in (1..).zip(text.lines()) {
            let place_of = |error: &dyn std::fmt::Display| anyhow!("{}:{number}: {error}", runs.display());
            let mut run: Measured = serde_json::from_str(line).map_err(|error| place_of(&error))?;
            if let Some(name) = &run.recording {
                let file = if name.contains('/') { root.join(name) } else { temp_dir.path().join(name) };
                if !file.is_file() {
                    return Err(place_of(&format!("there is no {name}; check the repository out anew")));
                }
                run.file = Some(file);
            }
            all.push(run);
        }
        Ok(Self { all, _place: Some(temp_dir) })
    }

    /// The runs in the given directories.
    ///
    /// # Errors
    ///
    /// A directory cannot be read, or a file in it is not JSON.
    pub(super) fn of_folders(folders: &[PathBuf]) -> Result<Self> {
        let mut all: Vec<Measured> = Vec::new();
        for folder in folders {
            for path in json_files(folder)? {
                let Some(run) = run_of(&path)? else { continue };
                // Some settings were recorded twice, and only one of the runs may have a recording.
                let same = |other: &&mut Measured| {
                    (&other.program, &other.conf, other.limit_bytes) == (&run.program, &run.conf, run.limit_bytes)
                };
                match all.iter_mut().find(same) {
                    Some(other) if other.file.is_none() => *other = run,
                    Some(_) => {}
                    None => all.push(run),
                }
            }
        }
        Ok(Self { all, _place: None })
    }
}

/// The JSON files of a directory, sorted by name.
fn json_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot = "name a directory with recordings and statistics";
    let entries = fs::read_dir(folder).map_err(|error| anyhow!("{}: {error}; {cannot}", folder.display()))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| folder.display().to_string())?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The run in a file of statistics; `None` if the file contains something else.
fn run_of(path: &Path) -> Result<Option<Measured>> {
    let text = read_text(path, DOCUMENT).with_context(|| path.display().to_string())?;
    let facts: Value = serde_json::from_str(&text)
        .map_err(|error| anyhow!("{}: it is not JSON ({error}); record it anew, or move it away", path.display()))?;
    let number = |key: &str| facts.get(key).or_else(|| facts.get("stats")?.get(key)).and_then(Value::as_u64);
    let Some(peak_reserved_bytes) = number("reserved_bytes.all.peak") else { return Ok(None) };
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let fact = |key: &str| facts.get(key).and_then(Value::as_str).map(str::to_owned);
    let config = fact("config").unwrap_or_else(|| "default".to_owned());
    // Some files name the setting only in the run's name.
    let names_setting = |part: &str| part == config || ["default", "expandable"].contains(&part);
    let program: Vec<&str> = stem.split('.').filter(|part| !names_setting(part)).collect();
    let unnamed = if config.starts_with("expandable") { "expandable_segments:True" } else { "" };
    // PyTorch gets the limit as a share of the memory and truncates the product to whole bytes.
    let limit_bytes = facts.get("limit_mib").and_then(Value::as_f64).filter(|mib| *mib > 0.0).and_then(|mib| {
        let total = facts.get("total_memory").and_then(Value::as_f64)?;
        // CAST: bytes of a device; the fraction is dropped, as PyTorch does.
        Some((mib * (1_u64 << 20) as f64 / total * total) as u64)
    });
    let names = [stem.clone(), program.join(".")];
    let file = names.iter().map(|name| path.with_file_name(format!("{name}.pickle.xz"))).find(|path| path.is_file());
    Ok(Some(Measured {
        program: program.join("."),
        set: "known".to_owned(),
        conf: fact("conf").unwrap_or_else(|| unnamed.to_owned()).trim().to_owned(),
        limit_bytes,
        peak_reserved_bytes,
        _peak_active_bytes: number("active_bytes.all.peak"),
        // A program may catch the error and go on.
        out_of_memory: facts.get("oom").is_some_and(|oom| !oom.is_null())
            || number("num_ooms").is_some_and(|ooms| ooms > 0),
        retries: number("num_alloc_retries").unwrap_or(0),
        recording: file.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()),
        _torch: fact("torch"),
        _gpu: fact("gpu"),
        _recorded_after: None,
        _command: fact("command"),
        _driver: fact("driver"),
        _host: fact("host"),
        _commit: fact("commit"),
        _date: fact("date"),
        first_predicted: None,
        file,
    }))
}
