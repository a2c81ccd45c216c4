//! `experiments pack`: makes the tables of an experiment's folder.

use super::experiments_in;
use super::flat::{Depth, flatten, insert, is_at_or_below, write_cell};
use super::manifest::{Counts, Manifest, Table};
use super::series::{self, Content, Line};
use super::{MANIFEST, SERIES, TABLE};
use crate::repository;
use crate::study::figures::read_text;
use crate::study::lock::at_work;
use crate::study::record::is_plain;
use crate::study::record::{EXPERIMENT, RUN, RUNS, SCHEMA_VERSION, read_json};
use crate::table::table;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use terminal::{Cell, Column, Page};
use vramlab::input::{DOCUMENT, TABLE as MOST_BYTES};
use vramlab::output::{self, Existing};

/// Columns that the table has even where all runs have the same.
const ALWAYS: [&str; 5] = ["id", "arm", "program", "repeat", "status"];
/// Keys of `run.json` without which a run cannot be recognised, besides those of the plan.
const NEEDED: [&str; 4] = ["schema_version", "spec_sha256", "status", "files"];
/// Documents of a run, and the pointers under which their values are; those of `run.json` are under their own names.
const DOCUMENTS: [(&str, &str); 3] = [(RUN, ""), ("summary.json", "summary"), ("result.json", "result")];

#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// Folders that `experiments run` made: of an experiment, or of several
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// Folder in which each experiment gets one of its own
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    /// What not to keep: a file of the runs, as latency.hlog, or a part of one, as steps.csv:host_ns or
    /// summary.json:command
    #[arg(long, value_name = "WHAT,...", value_delimiter = ',')]
    leave_out: Vec<LeftOut>,
    /// Pack experiments of which some runs failed or are missing
    #[arg(long)]
    incomplete: bool,
}

/// A file of the runs, or a part of it, that is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LeftOut {
    /// As it was written.
    text: String,
    file: String,
    /// A column, or a pointer into a document.
    part: Option<String>,
}

impl FromStr for LeftOut {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (file, part) = text.split_once(':').map_or((text, None), |(file, part)| (file, Some(part.to_owned())));
        if file.is_empty() || part.as_ref().is_some_and(String::is_empty) {
            return Err("write a file, as latency.hlog, or a file and a part of it, as steps.csv:host_ns".into());
        }
        if file == RUN && part.as_ref().is_none_or(|part| NEEDED.contains(&part.as_str()) || part == "id") {
            return Err("without that no run could be told from another; leave out something else".into());
        }
        Ok(Self { text: text.to_owned(), file: file.to_owned(), part })
    }
}

/// What is left out, and which of it was there.
#[derive(Debug)]
struct Leaving<'a> {
    wanted: &'a [LeftOut],
    found: BTreeSet<usize>,
}

impl Leaving<'_> {
    /// Whether a file as a whole, or a part of it, is not kept.
    fn takes(&mut self, file: &str, part: Option<&str>) -> bool {
        let is = |left: &LeftOut| {
            left.file == file
                && match (&left.part, part) {
                    (Some(left), Some(part)) => is_at_or_below(part, left),
                    (None, None) => true,
                    _ => false,
                }
        };
        let at = self.wanted.iter().position(is);
        self.found.extend(at);
        at.is_some()
    }
}

/// A planned run, and what was recorded of it.
#[derive(Debug)]
struct Row {
    id: String,
    recorded: bool,
    values: Map<String, Value>,
    files: Vec<Line>,
}

/// The files of a packed experiment.
#[derive(Debug)]
struct Packed {
    name: String,
    runs: usize,
    before: u64,
    files: Vec<(&'static str, Vec<u8>)>,
    found: BTreeSet<usize>,
}

/// Packs each experiment that the folders hold.
pub(crate) fn pack(args: &PackArgs) -> Result<()> {
    let mut folders = Vec::new();
    for folder in &args.folders {
        folders.extend(experiments_in(folder)?);
    }
    // All of them are made before the first is written.
    let all = folders.iter().map(|folder| packed(folder, args)).collect::<Result<Vec<Packed>>>()?;
    if let Some(unused) = (0..args.leave_out.len()).find(|at| all.iter().all(|packed| !packed.found.contains(at))) {
        bail!("--leave-out {}: no run has that", args.leave_out[unused].text);
    }
    let named = super::by_name(all.iter().map(|packed| (packed.name.clone(), packed)))?;
    super::publish(&args.out, &named, |packed, part| {
        let write = |(name, bytes): &(&str, Vec<u8>)| output::write(&part.join(name), Existing::Refuse, bytes);
        Ok(packed.files.iter().try_for_each(write)?)
    })?;
    let after = |packed: &Packed| packed.files.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
    let table = table(
        &all,
        &[
            (Column::left("experiment"), &|packed| Cell::from(&packed.name)),
            (Column::right("runs"), &|packed| Cell::from(packed.runs.to_string())),
            (Column::right("bytes before"), &|packed| Cell::from(packed.before.to_string())),
            (Column::right("bytes packed"), &|packed| Cell::from(after(packed).to_string())),
        ],
    );
    let mut page = Page::stdout();
    page.table(&table);
    super::end(&mut page, all.len(), "packed", &args.out);
    page.print()
}

fn packed(folder: &Path, args: &PackArgs) -> Result<Packed> {
    if super::is_packed(folder) {
        bail!("{} is packed already", folder.display());
    }
    let absolute = std::path::absolute(folder).with_context(|| format!("{} is no folder", folder.display()))?;
    if at_work(&absolute)?.is_some_and(|found| found.iter().any(|lock| lock.held)) {
        bail!("a runner is at work in {}; wait until it has ended", folder.display());
    }
    let path = folder.join(EXPERIMENT);
    let mut experiment = read_json(&path)?;
    let name = experiment["name"].as_str().filter(|name| is_plain(name)).map(str::to_owned);
    let name = name.with_context(|| format!("{} has no name, so no experiment wrote it", path.display()))?;
    let plan = experiment.as_object_mut().and_then(|fields| fields.shift_remove("runs"));
    let plan = plan.as_ref().and_then(Value::as_array).with_context(|| format!("{} has no runs", path.display()))?;
    let plan_keys: Vec<String> =
        plan.first().and_then(Value::as_object).into_iter().flatten().map(|(k, _)| k.clone()).collect();
    let mut leaving = Leaving { wanted: &args.leave_out, found: BTreeSet::new() };
    let rows = plan.iter().map(|run| row(folder, run, &plan_keys, &mut leaving)).collect::<Result<Vec<Row>>>()?;
    let counts = counts(&rows);
    if counts.done < counts.planned && !args.incomplete {
        bail!(
            "{}: {} of {} runs are done; run the experiment to its end, or pack what is there with --incomplete",
            folder.display(),
            counts.done,
            counts.planned
        );
    }
    let before = bytes_in(folder, &rows)?;
    let (mut files, found) = (Vec::new(), leaving.found);
    let seeds = seeds(&rows);
    let started_at = started_at(&rows);
    let (same_in_all, rows) = shared(rows, &plan_keys);
    let (table, lines) = tables(&rows)?;
    let table = series::compress(&table)?;
    let mut listed = vec![Table::of(TABLE, rows.len(), &table)];
    files.push((TABLE, table));
    if !lines.is_empty() {
        let series = series::write(&lines)?;
        listed.push(Table::of(SERIES, lines.len(), &series));
        files.push((SERIES, series));
    }
    let manifest = Manifest {
        schema_version: SCHEMA_VERSION,
        packed_by: env!("CARGO_PKG_VERSION").to_owned(),
        experiment,
        runs: counts,
        seeds,
        started_at,
        left_out: found.iter().map(|at| args.leave_out[*at].text.clone()).collect(),
        plan_keys,
        same_in_all,
        tables: listed,
    };
    files.insert(0, (MANIFEST, (serde_json::to_string_pretty(&manifest)? + "\n").into_bytes()));
    Ok(Packed { name, runs: rows.len(), before, files, found })
}

/// What was recorded of a planned run.
fn row(folder: &Path, planned: &Value, plan_keys: &[String], leaving: &mut Leaving<'_>) -> Result<Row> {
    let id = planned["id"].as_str().filter(|id| is_plain(id)).map(str::to_owned);
    let id =
        id.with_context(|| format!("{}: a run has no id that names a folder", folder.join(EXPERIMENT).display()))?;
    let own = folder.join(RUNS).join(&id);
    let keys: Vec<&String> = planned.as_object().into_iter().flatten().map(|(key, _)| key).collect();
    if keys.len() != plan_keys.len() || plan_keys.iter().any(|key| planned.get(key).is_none()) {
        bail!("{}: the run {id} is planned with other keys than the first", folder.join(EXPERIMENT).display());
    }
    if !own.exists() {
        let values = flatten(planned, "", Depth::Tables).into_iter().collect();
        return Ok(Row { id, recorded: false, values, files: Vec::new() });
    }
    let mut run = read_json(&own.join(RUN))?;
    if let Some(key) = plan_keys.iter().find(|key| run.get(key.as_str()) != planned.get(key.as_str())) {
        bail!("{}: its {key} is not the planned one", own.join(RUN).display());
    }
    let listed: Vec<String> =
        run["files"].as_array().into_iter().flatten().filter_map(Value::as_str).map(plain_name).collect();
    check_files(&own, &listed)?;
    let (mut values, mut files, mut kept) = (Map::new(), Vec::new(), Vec::new());
    for name in listed {
        if leaving.takes(&name, None) {
            continue;
        }
        let limit = if name.ends_with(".json") { DOCUMENT } else { MOST_BYTES };
        let text = read_text(&own, &name, limit)
            .with_context(|| format!("{}: {name} cannot be packed; --leave-out {name} goes without", own.display()))?;
        kept.push(Value::from(name.as_str()));
        if let Some((_, prefix)) = DOCUMENTS.iter().find(|(document, _)| *document == name) {
            let document: Value =
                serde_json::from_str(&text).with_context(|| format!("{} is not JSON", own.join(&name).display()))?;
            add(&mut values, &name, prefix, &document, leaving);
            continue;
        }
        let (from, mut content) = series::of_file(&name, text);
        if let Content::Columns(columns) = &mut content {
            columns.leave_out(|column| leaving.takes(&name, Some(column)));
            if columns.is_empty() {
                continue;
            }
        }
        files.push(Line { run: id.clone(), table: name, from, content });
    }
    run["files"] = Value::Array(kept);
    let mut all = Map::new();
    add(&mut all, RUN, "", &run, leaving);
    all.extend(values);
    Ok(Row { id, recorded: true, values: all, files })
}

/// Puts a document's values under `prefix`, but for those that are left out.
fn add(values: &mut Map<String, Value>, file: &str, prefix: &str, document: &Value, leaving: &mut Leaving<'_>) {
    for (pointer, value) in flatten(document, prefix, Depth::Tables) {
        let part = pointer.strip_prefix(prefix).map_or("", |part| part.trim_start_matches('/'));
        if !leaving.takes(file, Some(part)) {
            values.insert(pointer, value);
        }
    }
}

/// A file's name before it was compressed.
fn plain_name(name: &str) -> String {
    name.strip_suffix(".gz").unwrap_or(name).to_owned()
}

/// What the record names is there, and nothing else.
fn check_files(own: &Path, listed: &[String]) -> Result<()> {
    let names = repository::entries(own)?;
    let names = names.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let there: BTreeSet<String> =
        names.filter(|name| name != RUN && !name.starts_with('.')).map(|name| plain_name(&name)).collect();
    if let Some(extra) = there.iter().find(|name| !listed.contains(name)) {
        bail!("{} is no file that {RUN} names; move it elsewhere", own.join(extra).display());
    }
    if let Some(lost) = listed.iter().find(|name| !there.contains(*name) || !is_plain(name)) {
        bail!("{}: {RUN} names {lost}, which is not there", own.display());
    }
    Ok(())
}

fn counts(rows: &[Row]) -> Counts {
    let of = |status: &str| rows.iter().filter(|row| row.values.get("status").is_some_and(|s| s == status)).count();
    Counts { planned: rows.len(), done: of("done"), failed: of("failed"), skipped: of("skipped") }
}

fn seeds(rows: &[Row]) -> Vec<u64> {
    let pointers = ["summary/settings/seed", "options/seed"];
    let seed = |row: &Row| pointers.iter().find_map(|pointer| row.values.get(*pointer)?.as_u64());
    rows.iter().filter_map(seed).collect::<BTreeSet<u64>>().into_iter().collect()
}

fn started_at(rows: &[Row]) -> Option<[String; 2]> {
    let times = || rows.iter().filter_map(|row| row.values.get("started_at")?.as_str());
    Some([times().min()?.to_owned(), times().max()?.to_owned()])
}

/// Takes out of the rows what all say alike; that, document by document.
fn shared(mut rows: Vec<Row>, plan_keys: &[String]) -> (Value, Vec<Row>) {
    let mut same = json!({"run": {}});
    let is_planned = |pointer: &str| plan_keys.iter().any(|key| is_at_or_below(pointer, key));
    let mut first = rows.iter().find(|row| row.recorded).map(|row| row.values.clone()).unwrap_or_default();
    first.sort_keys();
    for (pointer, value) in first {
        let planned = is_planned(&pointer);
        let mut counted = rows.iter().filter(|row| row.recorded || planned);
        if rows.len() < 2
            || ALWAYS.contains(&pointer.as_str())
            || !counted.all(|row| row.values.get(&pointer) == Some(&value))
        {
            continue;
        }
        for row in &mut rows {
            row.values.shift_remove(&pointer);
        }
        let place = if is_of_document(&pointer) { pointer } else { format!("run/{pointer}") };
        insert(&mut same, &place, value);
    }
    (same, rows)
}

/// Whether a pointer leads into a document besides `run.json`.
fn is_of_document(pointer: &str) -> bool {
    DOCUMENTS[1..].iter().any(|(_, prefix)| is_at_or_below(pointer, prefix))
}

/// The text of `runs.csv.xz`, and the lines of the longer tables, each table's together.
fn tables(rows: &[Row]) -> Result<(Vec<u8>, Vec<Line>)> {
    let mut columns = BTreeSet::new();
    let mut lines = Vec::new();
    let mut cells: Vec<Map<String, Value>> = Vec::new();
    for row in rows {
        let mut own = Map::new();
        for (pointer, value) in &row.values {
            if let Some((from, content)) = series::of_value(value) {
                let content = Content::Columns(content);
                lines.push(Line { run: row.id.clone(), table: pointer.clone(), from, content });
            } else {
                columns.insert((is_of_document(pointer), pointer.clone()));
                own.insert(pointer.clone(), value.clone());
            }
        }
        cells.push(own);
        lines.extend(row.files.iter().cloned());
    }
    // By table, within which runs stay in their order: what repeats from run to run is then near.
    lines.sort_by(|one, other| one.table.cmp(&other.table));
    let mut writer = csv::WriterBuilder::new().from_writer(Vec::new());
    // What names a run, what else its record says, what its program says.
    let others = columns.into_iter().map(|(_, name)| name).filter(|name| !ALWAYS.contains(&name.as_str()));
    let columns: Vec<String> = ALWAYS.iter().map(|name| (*name).to_owned()).chain(others).collect();
    writer.write_record(&columns)?;
    for own in &cells {
        writer.write_record(columns.iter().map(|name| own.get(name).map_or_else(String::new, write_cell)))?;
    }
    let table = writer.into_inner().map_err(|error| anyhow::anyhow!("{}", error.error()))?;
    Ok((table, lines))
}

/// Bytes of the experiment as it is.
fn bytes_in(folder: &Path, rows: &[Row]) -> Result<u64> {
    let mut sum = 0;
    let runs = rows.iter().filter(|row| row.recorded).map(|row| folder.join(RUNS).join(&row.id));
    for place in runs.chain([folder.to_owned()]) {
        for path in repository::entries(&place)? {
            let file = path.symlink_metadata().with_context(|| format!("cannot read {}", path.display()))?;
            sum += if file.is_file() { file.len() } else { 0 };
        }
    }
    Ok(sum)
}
