//! `experiments unpack`: the folder of an experiment as `experiments run` leaves it, from its tables.

use super::experiments_in;
use super::flat::{insert, read_cell};
use super::manifest::{self, Manifest};
use super::series::{self, Content, From, Line};
use super::{PLAIN_TABLE, SERIES, TABLE};
use crate::study::record::is_plain;
use crate::study::record::{EXPERIMENT, RUN, RUNS, compress, write_compact, write_json};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use terminal::Page;
use vramlab::input::{TABLE as MOST_BYTES, read_bytes};
use vramlab::output::{self, Existing};

#[derive(Debug, Args)]
pub(crate) struct UnpackArgs {
    /// Folders that `experiments pack` made: of an experiment, or of several
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// Folder in which each experiment gets one of its own
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
}

/// Unpacks each experiment that the folders hold.
pub(crate) fn unpack(args: &UnpackArgs) -> Result<()> {
    let mut all = Vec::new();
    for folder in &args.folders {
        for folder in experiments_in(folder)? {
            if !super::is_packed(&folder) {
                bail!("{} is not packed", folder.display());
            }
            let manifest = manifest::read(&folder)?;
            let name = manifest.experiment["name"].as_str().filter(|name| is_plain(name));
            let name = name.with_context(|| format!("{}: the experiment has no name", folder.display()))?.to_owned();
            all.push((name, folder));
        }
    }
    let all = super::by_name(all)?;
    super::publish(&args.out, &all, |folder, part| to_folder(folder, part))?;
    let mut page = Page::stdout();
    super::end(&mut page, all.len(), "unpacked", &args.out);
    page.print()
}

/// A run: its documents by the pointers that they have in the table, and its files.
#[derive(Debug, Default)]
struct Unpacked {
    documents: Value,
    files: BTreeMap<String, String>,
}

/// Writes what a packed folder holds into an empty one.
pub(super) fn to_folder(folder: &Path, out: &Path) -> Result<()> {
    let manifest = manifest::read(folder)?;
    let of_rows = if manifest.has(PLAIN_TABLE) { PLAIN_TABLE } else { TABLE };
    let rows = rows(folder, &manifest, of_rows)?;
    let runs = out.join(RUNS);
    std::fs::create_dir(&runs).with_context(|| format!("cannot make {}", runs.display()))?;
    let mut series: BTreeMap<String, Vec<Line>> = BTreeMap::new();
    if manifest.has(SERIES) {
        for line in series::read(folder, &table(folder, &manifest, SERIES)?)? {
            series.entry(line.run.clone()).or_default().push(line);
        }
    }
    let mut plan = Vec::new();
    for (number, row) in rows.into_iter().enumerate() {
        let here = || format!("{}: row {}", folder.join(of_rows).display(), number + 1);
        let id = row.get("id").and_then(Value::as_str).filter(|id| is_plain(id)).map(str::to_owned);
        let id = id.with_context(|| format!("{} has no id that names a folder", here()))?;
        let recorded = row.contains_key("status");
        let run = run(&manifest, row, series.remove(&id).unwrap_or_default()).with_context(here)?;
        let planned = |key: &String| Some((key.clone(), run.documents["run"].get(key)?.clone()));
        plan.push(Value::Object(manifest.plan_keys.iter().filter_map(planned).collect()));
        if recorded {
            let own = runs.join(&id);
            std::fs::create_dir(&own).with_context(|| format!("cannot make {}", own.display()))?;
            write_run(&own, run).with_context(here)?;
        }
    }
    let mut experiment = manifest.experiment;
    experiment["runs"] = Value::Array(plan);
    write_json(&out.join(EXPERIMENT), &experiment)
}

/// A table's bytes, which are those that were packed.
fn table(folder: &Path, manifest: &Manifest, name: &str) -> Result<Vec<u8>> {
    let path = folder.join(name);
    let bytes = read_bytes(&path, MOST_BYTES).with_context(|| format!("cannot read {}", path.display()))?;
    manifest.check(folder, name, &bytes)?;
    Ok(bytes)
}

/// The rows of the table of runs, whose file has this name.
fn rows(folder: &Path, manifest: &Manifest, name: &str) -> Result<Vec<Map<String, Value>>> {
    let (path, mut bytes) = (folder.join(name), table(folder, manifest, name)?);
    if name == TABLE {
        bytes = series::decompress(&path, &bytes)?.into_bytes();
    }
    let here = || format!("cannot read {}", path.display());
    let mut reader = csv::ReaderBuilder::new().from_reader(bytes.as_slice());
    let names: Vec<String> = reader.headers().with_context(here)?.iter().map(str::to_owned).collect();
    let mut out = Vec::new();
    for record in reader.records() {
        let mut row = Map::new();
        for (name, text) in names.iter().zip(&record.with_context(here)?) {
            if let Some(value) = read_cell(text).with_context(here)? {
                row.insert(name.clone(), value);
            }
        }
        out.push(row);
    }
    Ok(out)
}

/// Puts a run together again.
fn run(manifest: &Manifest, row: Map<String, Value>, lines: Vec<Line>) -> Result<Unpacked> {
    let mut run = Unpacked { documents: manifest.same_in_all.clone(), ..Unpacked::default() };
    let place = |pointer: &str| {
        let document = ["summary", "result"].iter().any(|prefix| super::flat::is_at_or_below(pointer, prefix));
        if document { pointer.to_owned() } else { format!("run/{pointer}") }
    };
    for (pointer, value) in row {
        insert(&mut run.documents, &place(&pointer), value);
    }
    for line in lines {
        match (&line.content, line.from) {
            (Content::Columns(columns), From::Array | From::Object | From::List) => {
                let value = series::to_value(line.from, columns);
                let value = value.with_context(|| format!("{}: columns do not fit together", line.table))?;
                insert(&mut run.documents, &place(&line.table), value);
            }
            _ => {
                let text = series::to_file(&line);
                let text = text.with_context(|| format!("{}: columns do not fit together", line.table))?;
                run.files.insert(line.table, text);
            }
        }
    }
    Ok(run)
}

/// Writes a run's folder.
fn write_run(own: &Path, mut unpacked: Unpacked) -> Result<()> {
    let listed = unpacked.documents["run"]["files"].as_array().cloned().unwrap_or_default();
    let mut files = Vec::new();
    for name in listed.iter().filter_map(Value::as_str) {
        let path = own.join(name);
        match (name, unpacked.files.remove(name)) {
            (_, Some(text)) if is_plain(name) => output::write(&path, Existing::Refuse, text)?,
            ("summary.json", None) => write_compact(&path, &unpacked.documents["summary"])?,
            ("result.json", None) => write_compact(&path, &unpacked.documents["result"])?,
            _ => bail!("names the file {name}, which is in no table"),
        }
        files.extend(compress(&path)?.file_name().map(|name| Value::from(name.to_string_lossy())));
    }
    unpacked.documents["run"]["files"] = Value::Array(files);
    write_json(&own.join(RUN), &unpacked.documents["run"])
}
