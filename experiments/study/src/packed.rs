//! `experiments pack` and `unpack`: a recorded experiment as a few tables, to be kept, sent and read anywhere.
//!
//! `experiments run` leaves a folder a run. Packed, an experiment is three files: `manifest.json` says what was run and
//! holds what all runs share; `runs.csv.xz` has a row a run; `series.jsonl.xz` has the longer tables of the runs, a line a
//! run and table, a JSON array a column. The same folder gives the same bytes, and unpacking gives back what was kept.
//! `analysis/schema.md` describes the files. Commands that read experiments take both forms, through [`open`].

mod cell;
mod columns;
mod compressed;
mod flat;
mod manifest;
mod pack;
mod series;
mod unpack;

use crate::study::record::{EXPERIMENT, read_json, remove};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use terminal::{Page, command, quoted};

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

/// Makes the folder `out/name`, which appears whole: `fill` writes to another one that takes its name.
fn publish(out: &Path, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let (part, folder) = (out.join(format!(".{name}.part")), out.join(name));
    remove(&part)?;
    std::fs::create_dir(&part).with_context(|| format!("cannot make {}", part.display()))?;
    if let Err(error) = fill(&part) {
        remove(&part)?;
        return Err(error);
    }
    std::fs::rename(&part, &folder).with_context(|| format!("cannot make {}", folder.display()))
}

/// Makes the folder `out`, none of whose folders of these names is there yet.
fn make_room<'a>(out: &Path, names: impl Iterator<Item = &'a String>) -> Result<()> {
    let mut seen = BTreeSet::new();
    for name in names {
        let folder = out.join(name);
        if !seen.insert(name) || folder.exists() {
            bail!("{} is there already; choose another folder with -o, or remove it", folder.display());
        }
    }
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))
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
