//! `experiments pack`: recorded experiments as one archive, to store and send.
//!
//! `LABEL.tar.xz` unpacks to the directory `LABEL` with the directory of each experiment, as `experiments run` leaves
//! it. Text files in it are uncompressed: one archive of all compresses them better than each by itself. The same
//! directories give the same bytes.

use super::figures::read_text;
use super::lock::at_work;
use super::programs::RESULT;
use super::record::{EXPERIMENT, RUN, RUNS, experiments_in, is_plain, read_json, status_of};
use super::spec::SUMMARY;
use crate::repository::{self, ARCHIVE};
use crate::table::table;
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use liblzma::write::XzEncoder;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use terminal::{Cell, Column, Page, quoted};
use vramlab::input::{DOCUMENT, TABLE};
use vramlab::output::{Existing, OutputFile, remove_abandoned};

/// As `xz -6e`: this level's output does not depend on the machine, and a reader needs 9 MiB.
const LEVEL: u32 = 6 | (1 << 31);
/// Keys of `run.json` without which a run cannot be identified.
const NEEDED: [&str; 5] = ["id", "schema_version", "spec_sha256", "status", "files"];
/// Key of `experiment.json` for the recorded data that the archive omits.
const LEFT_OUT: &str = "left_out";

#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// Directories that `experiments run` made: of an experiment, or of several
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// The archive; it unpacks to a directory LABEL with one subdirectory per experiment
    #[arg(short, long, value_name = "LABEL.tar.xz")]
    out: PathBuf,
    /// Data to omit: a file of the runs, as latency.hlog, or a part of one, as steps.csv:host_ns,
    /// summary.json:command, or driver_calls.jsonl:path=validate (lines with that word in that value)
    #[arg(long, value_name = "WHAT,...", value_delimiter = ',')]
    leave_out: Vec<LeftOut>,
    /// Pack experiments of which some runs failed or are missing
    #[arg(long)]
    incomplete: bool,
}

/// A file of the runs, or a part of it, that the archive omits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LeftOut {
    file: String,
    /// A column, the keys that lead to a value, joined with `/`, or `KEY=WORD` for the lines of a file whose value
    /// contains that word.
    part: Option<String>,
}

impl FromStr for LeftOut {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (file, part) = text.split_once(':').map_or((text, None), |(file, part)| (file, Some(part.to_owned())));
        if file.is_empty() || part.as_ref().is_some_and(|part| part.is_empty() || part.ends_with('=')) {
            return Err("write a file, as latency.hlog, or a file and a part of it, as steps.csv:host_ns".into());
        }
        if file == RUN && part.as_ref().is_none_or(|part| NEEDED.contains(&part.as_str())) {
            return Err("without it runs could not be distinguished; leave out something else".into());
        }
        if part.is_none() && [SUMMARY, RESULT].contains(&file) {
            return Err("without it runs have no values; leave out parts of it, as summary.json:command".into());
        }
        Ok(Self { file: file.to_owned(), part })
    }
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.file)?;
        self.part.iter().try_for_each(|part| write!(f, ":{part}"))
    }
}

/// An archive being written.
struct Packing<'a> {
    args: &'a PackArgs,
    label: &'a str,
    archive: tar::Builder<XzEncoder<OutputFile>>,
    /// Entries of `--leave-out` that some run had.
    found: BTreeSet<&'a LeftOut>,
}

/// An experiment in the archive.
struct Packed {
    name: String,
    runs: usize,
    /// Size of its files, as text.
    bytes: usize,
}

/// Packs each experiment in the given directories.
pub(crate) fn pack(args: &PackArgs) -> Result<()> {
    let out = args.out.display();
    let label =
        args.out.file_name().and_then(|name| name.to_str()?.strip_suffix(ARCHIVE)).filter(|name| is_plain(name));
    let label = label.with_context(|| format!("{out} is not the name of an archive; write LABEL{ARCHIVE} for -o"))?;
    remove_abandoned(&args.out);
    let archive = tar::Builder::new(XzEncoder::new(OutputFile::create(&args.out, Existing::Refuse)?, LEVEL));
    let mut packing = Packing { args, label, archive, found: BTreeSet::new() };
    let mut all: Vec<Packed> = Vec::new();
    for folder in &args.folders {
        for folder in experiments_in(folder)? {
            let packed = packing.experiment(&folder)?;
            if all.iter().any(|other| other.name == packed.name) {
                bail!("there are two experiments with the name {}; name one of them", packed.name);
            }
            all.push(packed);
        }
    }
    if let Some(unused) = args.leave_out.iter().find(|left| !packing.found.contains(left)) {
        bail!("--leave-out {unused}: no run has that");
    }
    let finished = packing.archive.into_inner().and_then(XzEncoder::finish);
    finished.with_context(|| format!("cannot write {out}"))?.finish()?;
    let mut page = Page::stdout();
    page.table(&table(
        &all,
        &[
            (Column::left("experiment"), &|packed| Cell::from(&packed.name)),
            (Column::right("runs"), &|packed| Cell::from(packed.runs.to_string())),
            (Column::right("bytes"), &|packed| Cell::from(packed.bytes.to_string())),
        ],
    ));
    let bytes = args.out.metadata().with_context(|| format!("cannot read {out}"))?.len();
    page.end(format!("Packed into {out}, {bytes} bytes."), &format!("tar -xf {}", quoted(&args.out.to_string_lossy())));
    page.print()
}

impl<'a> Packing<'a> {
    fn experiment(&mut self, folder: &Path) -> Result<Packed> {
        let absolute =
            std::path::absolute(folder).with_context(|| format!("{} is not a directory", folder.display()))?;
        if at_work(&absolute)?.is_some_and(|found| found.iter().any(|lock| lock.held)) {
            bail!("a runner is at work in {}; wait until it has ended", folder.display());
        }
        let path = folder.join(EXPERIMENT);
        let mut experiment = read_json(&path)?;
        let name = experiment["name"].as_str().filter(|name| is_plain(name)).map(str::to_owned);
        let name = name.with_context(|| format!("{} has no name, so no experiment wrote it", path.display()))?;
        let plan = experiment["runs"].as_array().with_context(|| format!("{} has no runs", path.display()))?;
        if plan.is_empty() {
            bail!("{} plans no runs, so it is not whole", path.display());
        }
        let sha256 = experiment["spec_sha256"].as_str().unwrap_or_default();
        let (mut done, mut files) = (0, Vec::new());
        for run in plan {
            let id = run["id"].as_str().filter(|id| is_plain(id));
            let id = id.with_context(|| format!("{}: a run has no id that names a directory", path.display()))?;
            let run_folder = folder.join(RUNS).join(id);
            if run_folder.exists() {
                // It reports what is damaged or of another version of the spec.
                status_of(&run_folder, sha256)?;
                done += usize::from(self.run(&run_folder, &format!("{RUNS}/{id}"), &mut files)?);
            }
        }
        let runs = plan.len();
        if done < runs && !self.args.incomplete {
            bail!(
                "{}: {done} of {runs} runs are done; run the experiment to its end, or pack what is there with --incomplete",
                folder.display()
            );
        }
        let left = experiment[LEFT_OUT].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned);
        let left: BTreeSet<String> = left.chain(self.args.leave_out.iter().map(LeftOut::to_string)).collect();
        experiment[LEFT_OUT] = left.into_iter().collect();
        files.insert(0, (EXPERIMENT.to_owned(), serde_json::to_string_pretty(&experiment)? + "\n"));
        for (file, text) in &files {
            let mut header = tar::Header::new_gnu();
            // CAST: a length in memory.
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            let member = format!("{}/{name}/{file}", self.label);
            let added = self.archive.append_data(&mut header, &member, text.as_bytes());
            added.with_context(|| format!("cannot pack {member}"))?;
        }
        Ok(Packed { bytes: files.iter().map(|(_, text)| text.len()).sum(), name, runs })
    }

    /// Adds the files of a run, from the directory `own`, under `place`; returns whether the run is complete.
    fn run(&mut self, own: &Path, place: &str, files: &mut Vec<(String, String)>) -> Result<bool> {
        let mut run = read_json(&own.join(RUN))?;
        let listed = run["files"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let listed: BTreeSet<String> = listed.map(plain_name).collect();
        check_files(own, &listed)?;
        let args = self.args;
        let mut kept: Vec<Value> = Vec::new();
        for name in listed {
            let left = || args.leave_out.iter().filter(|left| left.file == name);
            if let Some(left) = left().find(|left| left.part.is_none()) {
                self.found.insert(left);
                continue;
            }
            let fails = || format!("{}: {name} cannot be packed; --leave-out {name} goes without", own.display());
            let limit = if name.ends_with(".json") { DOCUMENT } else { TABLE };
            let mut text = read_text(own, &name, limit).with_context(fails)?;
            check_whole(&name, &text).with_context(|| {
                format!(
                    "{} is cut; remove the directory of that run, and run the experiment again",
                    own.join(&name).display()
                )
            })?;
            for (left, part) in left().filter_map(|left| Some((left, left.part.as_ref()?))) {
                if let Some(rest) = without(&name, part, &text).with_context(fails)? {
                    self.found.insert(left);
                    text = rest;
                }
            }
            kept.push(Value::from(name.as_str()));
            files.push((format!("{place}/{name}"), text));
        }
        run["files"] = Value::Array(kept);
        for left in args.leave_out.iter().filter(|left| left.file == RUN) {
            if left.part.as_ref().is_some_and(|part| remove(&mut run, part)) {
                self.found.insert(left);
            }
        }
        files.push((format!("{place}/{RUN}"), serde_json::to_string_pretty(&run)? + "\n"));
        Ok(run["status"] == "done")
    }
}

/// A file's name before compression.
fn plain_name(name: &str) -> String {
    name.strip_suffix(".gz").unwrap_or(name).to_owned()
}

/// Checks that exactly the files listed in the record exist.
fn check_files(own: &Path, listed: &BTreeSet<String>) -> Result<()> {
    let names = repository::entries(own)?;
    let names = names.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let there: BTreeSet<String> =
        names.filter(|name| name != RUN && !name.starts_with('.')).map(|name| plain_name(&name)).collect();
    if let Some(extra) = there.difference(listed).next() {
        bail!("{} is not a file that {RUN} names; move it elsewhere", own.join(extra).display());
    }
    if let Some(lost) = listed.difference(&there).next() {
        bail!("{}: {RUN} names {lost}, which is not there", own.display());
    }
    Ok(())
}

/// Checks that a file's text has an end: a value in JSON, and in tables rows of one length.
fn check_whole(name: &str, text: &str) -> Result<()> {
    if name.ends_with(".json") {
        serde_json::from_str::<IgnoredAny>(text)?;
    } else if name.ends_with(".csv") {
        let mut rows = csv::ReaderBuilder::new().has_headers(false).from_reader(text.as_bytes());
        let count = rows.byte_records().try_fold(0_usize, |count, row| row.map(|_| count + 1))?;
        anyhow::ensure!(count > 0 && text.ends_with('\n'), "its last line has no end");
    }
    Ok(())
}

/// The text of a file without a part of it; `None` if it has no such part.
fn without(file: &str, part: &str, text: &str) -> Result<Option<String>> {
    if file.ends_with(".csv") {
        let mut rows = csv::ReaderBuilder::new().has_headers(false).from_reader(text.as_bytes());
        let rows = rows.records().collect::<csv::Result<Vec<csv::StringRecord>>>()?;
        let column = rows.first().and_then(|names| names.iter().position(|name| name == part));
        let Some(column) = column else { return Ok(None) };
        let mut rest = csv::Writer::from_writer(Vec::new());
        for row in &rows {
            rest.write_record(row.iter().enumerate().filter(|(number, _)| *number != column).map(|(_, cell)| cell))?;
        }
        let rest = rest.into_inner().map_err(|error| anyhow!("{}", error.error()))?;
        return Ok(Some(String::from_utf8(rest)?));
    }
    let mut is_present = false;
    if let Some((key, word)) = part.split_once('=').filter(|_| file.ends_with(".jsonl")) {
        let mut rest = String::new();
        for line in text.lines() {
            let value: Value = serde_json::from_str(line)?;
            if value[key].as_str().is_some_and(|text| text.contains(word)) {
                is_present = true;
            } else {
                rest.extend([line, "\n"]);
            }
        }
        return Ok(is_present.then_some(rest));
    }
    let mut cut = |text: &str| -> Result<String> {
        let mut value = serde_json::from_str(text)?;
        is_present |= remove(&mut value, part);
        Ok(format!("{value}\n"))
    };
    let rest = if file.ends_with(".jsonl") { text.lines().map(cut).collect::<Result<String>>()? } else { cut(text)? };
    Ok(is_present.then_some(rest))
}

/// Removes the value at the keys; returns whether it existed.
fn remove(value: &mut Value, keys: &str) -> bool {
    let (parent, key) = keys.rsplit_once('/').map_or((None, keys), |(parent, key)| (Some(parent), key));
    let parent = parent.map_or_else(String::new, |parent| format!("/{parent}"));
    value.pointer_mut(&parent).and_then(Value::as_object_mut).and_then(|fields| fields.shift_remove(key)).is_some()
}
