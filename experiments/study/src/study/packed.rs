//! `experiments pack` and `unpack`: a recorded experiment as a few tables, to be kept, sent and read anywhere.
//!
//! `experiments run` leaves a folder a run. Packed, an experiment is three files: `manifest.json` says what was run and
//! holds what all runs share; `runs.csv.xz` has a row a run; `series.jsonl.xz` has the longer tables of the runs, a line a
//! run and table, a JSON array a column. The same folder gives the same bytes, and unpacking gives back what was kept.
//! `analysis/schema.md` describes the files. Commands that read experiments take both forms, through [`open`].

mod columns;
mod flat;
mod manifest;
mod pack;
mod series;
mod unpack;

use super::record::{EXPERIMENT, read_json, remove};
use crate::repository;
use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use terminal::{Page, command, quoted};
use vramlab::output::{OutputFolder, OutputProblem};

pub(crate) use pack::{PackArgs, pack};
pub(crate) use unpack::{UnpackArgs, unpack};

/// What was run, and what all runs share.
pub(crate) const MANIFEST: &str = "manifest.json";
/// A row a run.
const TABLE: &str = "runs.csv.xz";
/// The same table as earlier versions packed it.
const PLAIN_TABLE: &str = "runs.csv";
/// The longer tables of the runs.
const SERIES: &str = "series.jsonl.xz";

/// Whether a folder holds an experiment, packed or as `experiments run` leaves it.
pub(crate) fn holds_experiment(folder: &Path) -> bool {
    folder.join(EXPERIMENT).is_file() || is_packed(folder)
}

/// The folder itself if it holds an experiment, else those in it that do, sorted.
pub(crate) fn experiments_in(folder: &Path) -> Result<Vec<PathBuf>> {
    if holds_experiment(folder) {
        return Ok(vec![folder.to_owned()]);
    }
    let mut found = repository::entries(folder)?;
    found.retain(|path| holds_experiment(path));
    if found.is_empty() {
        bail!(
            "{} holds no {EXPERIMENT}, nor does a folder in it; name what `experiments run` had as --out",
            folder.display()
        );
    }
    Ok(found)
}

/// Whether a folder holds a packed experiment.
pub(crate) fn is_packed(folder: &Path) -> bool {
    !folder.join(EXPERIMENT).is_file() && folder.join(MANIFEST).is_file()
}

/// `experiment.json` of a folder in either form; of a packed one without the planned runs.
pub(crate) fn experiment_of(folder: &Path) -> Result<Value> {
    if is_packed(folder) { Ok(manifest::read(folder)?.experiment) } else { read_json(&folder.join(EXPERIMENT)) }
}

/// An experiment's folder as `experiments run` leaves it.
#[derive(Debug)]
pub(crate) struct Opened {
    path: PathBuf,
    /// Removed when this is dropped.
    _unpacked: Option<TempDir>,
}

impl Opened {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Makes the folders `out/name`, by name and what is in each: all of them, or none. Each appears whole.
fn publish<T>(out: &Path, all: &BTreeMap<String, T>, fill: impl Fn(&T, &Path) -> Result<()>) -> Result<()> {
    let taken =
        |folder: &Path| anyhow!("{} is there already; choose another folder with -o, or remove it", folder.display());
    if let Some(folder) = all.keys().map(|name| out.join(name)).find(|folder| folder.exists()) {
        return Err(taken(&folder));
    }
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let mut parts = Vec::new();
    for (name, one) in all {
        let folder = OutputFolder::create(&out.join(name))?;
        fill(one, folder.part())?;
        parts.push(folder);
    }
    // In the order of the names, so that of several programs that make the same folders the first to make one makes all.
    let mut made = Vec::new();
    for part in parts {
        let folder = part.path().to_owned();
        if let Err(error) = part.finish() {
            made.iter().try_for_each(|folder: &PathBuf| remove(folder))?;
            let exists = matches!(error.problem, OutputProblem::Exists);
            return Err(if exists { taken(&folder) } else { error.into() });
        }
        made.push(folder);
    }
    Ok(())
}

/// By name, of which no two may have the same.
fn by_name<T>(all: impl IntoIterator<Item = (String, T)>) -> Result<BTreeMap<String, T>> {
    let mut named = BTreeMap::new();
    for (name, one) in all {
        if named.contains_key(&name) {
            bail!("there are two experiments with the name {name}; name one of them");
        }
        named.insert(name, one);
    }
    Ok(named)
}

/// How many experiments were packed or unpacked, and the next command.
fn end(page: &mut Page, count: usize, done: &str, out: &Path) {
    let word = if count == 1 { "experiment" } else { "experiments" };
    let next = format!("status {}", quoted(&out.to_string_lossy()));
    page.end(format!("{count} {word} {done} into {}.", out.display()), &command("experiments", &next));
}

/// The folder itself, or a temporary one with what a packed folder holds.
///
/// # Errors
/// The folder holds no experiment, or one that was damaged.
pub(crate) fn open(folder: &Path) -> Result<Opened> {
    if !holds_experiment(folder) {
        bail!(
            "{} holds no {EXPERIMENT} and no {MANIFEST}; name a folder that `experiments run` or `pack` made",
            folder.display()
        );
    }
    if !is_packed(folder) {
        return Ok(Opened { path: folder.to_owned(), _unpacked: None });
    }
    let place = tempfile::Builder::new().prefix("experiment-").tempdir()?;
    unpack::to_folder(folder, place.path())?;
    Ok(Opened { path: place.path().to_owned(), _unpacked: Some(place) })
}
