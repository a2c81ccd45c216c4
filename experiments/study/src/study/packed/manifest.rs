//! `manifest.json` of a packed experiment: what was run, what all runs share, and the sums of the tables.

use super::MANIFEST;
use crate::repository::sha256;
use crate::study::record::{SCHEMA_VERSION, read_json};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// The manifest.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) schema_version: u64,
    /// Version of the program that packed it.
    pub(super) packed_by: String,
    /// `experiment.json` without the planned runs, which are rows of the table.
    pub(super) experiment: Value,
    pub(super) runs: Counts,
    /// Seeds of the runs.
    pub(super) seeds: Vec<u64>,
    /// When the first and the last run began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) started_at: Option<[String; 2]>,
    /// What was recorded and is not kept.
    pub(super) left_out: Vec<String>,
    /// Keys of a planned run.
    pub(super) plan_keys: Vec<String>,
    /// What all runs say alike, under `run`, `summary` and `result`; it is not in the tables.
    pub(super) same_in_all: Value,
    /// The other files, which readers check.
    pub(super) tables: Vec<Table>,
}

/// Runs by how they ended.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Counts {
    pub(super) planned: usize,
    pub(super) done: usize,
    pub(super) failed: usize,
    pub(super) skipped: usize,
}

/// A table's file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Table {
    pub(super) name: String,
    /// Runs, or tables of runs.
    pub(super) rows: usize,
    pub(super) bytes: u64,
    /// Its SHA-256 in lowercase hex.
    pub(super) sha256: String,
}

impl Table {
    /// Of a file with these bytes.
    pub(super) fn of(name: &str, rows: usize, bytes: &[u8]) -> Self {
        // CAST: a length in memory.
        Self { name: name.to_owned(), rows, bytes: bytes.len() as u64, sha256: sha256(bytes) }
    }
}

impl Manifest {
    /// Whether there is a table of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.tables.iter().any(|table| table.name == name)
    }

    /// The bytes of a table, which are those that were packed.
    pub(super) fn check(&self, folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
        let table = self.tables.iter().find(|table| table.name == name);
        let table = table.with_context(|| format!("{}: names no {name}", folder.join(MANIFEST).display()))?;
        if table.sha256 != sha256(bytes) {
            bail!(
                "{} is not the file that was packed, by its SHA-256; take it from where it came from",
                folder.join(name).display()
            );
        }
        Ok(())
    }
}

/// Reads the manifest of a folder.
pub(super) fn read(folder: &Path) -> Result<Manifest> {
    let path = folder.join(MANIFEST);
    let manifest: Manifest = serde_json::from_value(read_json(&path)?)
        .with_context(|| format!("{} is not what `experiments pack` writes", path.display()))?;
    let version = &manifest.experiment["schema_version"];
    if version.as_u64() != Some(SCHEMA_VERSION) {
        bail!("{}: the experiment has schema version {version}, this program reads {SCHEMA_VERSION}", path.display());
    }
    Ok(manifest)
}
