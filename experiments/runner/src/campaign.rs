//! `experiments campaign`: makes the records that the documents quote, and reports how they differ from the committed
//! ones.
//!
//! It only orders the commands that make them. The campaign's directory records each part when it is complete; within
//! a part the commands resume. After a kill there is either a part's complete record or the state from which its
//! command resumes.

mod origin;
mod parts;
mod rows;

use crate::child::Children;
use crate::repository::{self, this_program};
use crate::study::lock::lock;
use crate::study::record::{provenance, write_json};
use crate::study::run::BUDGET;
use crate::table::table;
use anyhow::{Context, Result, bail};
use clap::Args;
use origin::{Fact, Origin};
use parts::{Need, Part, Record};
use rows::Difference;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use terminal::{Cell, Column, Page, RuntimeFailure, Table, quoted, say};
use vramlab::CudaDriver;
use vramlab::input::{DOCUMENT, read_text};

/// Completed parts, in the campaign's directory.
const DONE: &str = "campaign.json";
/// Number of values printed per part without `--json`.
const SHOWN: usize = 12;

#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 all parts are made, 1 a part failed (the others are made), 2 bad input, 4 the budget ended \
                  first, 130 interrupted (143 by SIGTERM, 129 by SIGHUP)."
)]
pub(crate) struct CampaignArgs {
    /// Parts of the campaign [default: all that can run here]
    #[arg(value_name = "PART")]
    parts: Vec<String>,
    /// Directory of the new records; the same command resumes there
    #[arg(short, long, value_name = "DIR", default_value = "runs/campaign")]
    out: PathBuf,
    /// Print the parts, their requirements and costs, and start nothing
    #[arg(long)]
    plan: bool,
    /// Start no part whose last duration exceeds the remainder of this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400.0)]
    budget: f64,
    /// The parts [default: experiments/campaign.toml]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print the plan, or the differences, as one JSON array
    #[arg(long)]
    json: bool,
}

/// A completed part.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Finished {
    /// Completion time, UTC.
    finished_at: String,
    /// Seconds of its last call.
    took_s: f64,
    /// Provenance of the program that made it.
    provenance: serde_json::Value,
}

/// A line of the plan.
#[derive(Debug, Serialize)]
struct Planned {
    part: String,
    needs: Vec<Need>,
    /// Seconds of its last call here, else the total of the committed records' runs, else the estimate of the file.
    /// Absent where none contains it.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// Whether it is complete in this directory.
    done: bool,
    /// A spec of it that is not here: the part is skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing_spec: Option<String>,
    /// Its committed records, below `results`.
    kept: Vec<Kept>,
    /// Its records that have no committed one.
    not_kept: Vec<String>,
    command: Vec<String>,
    /// The file to which the command's output is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout: Option<PathBuf>,
    documents: Vec<String>,
}

/// A committed record.
#[derive(Debug, Serialize)]
struct Kept {
    path: String,
    /// What it does not say of its making.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lacks: Vec<Fact>,
}

/// A new record compared with the committed one.
#[derive(Debug)]
struct Compared {
    part: String,
    /// Its path in the campaign's directory.
    made: String,
    /// `None` where no record is kept.
    differences: Option<Vec<Difference>>,
    /// Runs of the new record that did not complete, by reason.
    failures: BTreeMap<String, usize>,
}

impl Compared {
    /// The possible causes of its differences; empty without a difference.
    fn because(&self) -> Vec<String> {
        let all = self.differences.iter().flatten();
        let mut because: Vec<String> =
            all.clone().find(|one| !one.is_none()).map_or_else(Vec::new, |one| one.because.clone());
        if all.clone().any(|one| !one.is_none()) && because.is_empty() {
            because.push("no recorded cause".to_owned());
        }
        because.extend(self.failures.iter().map(|(reason, runs)| format!("{runs} runs did not complete ({reason})")));
        because
    }
}

/// Runs the remaining parts and compares.
pub(crate) fn campaign(args: &CampaignArgs) -> Result<()> {
    if !(args.budget.is_finite() && args.budget > 0.0) {
        bail!("--budget {}: write seconds, more than none", args.budget);
    }
    let chosen = parts::chosen(parts::read(args.file.as_deref())?, &args.parts)?;
    let out = std::path::absolute(&args.out).with_context(|| format!("{} is not a directory", args.out.display()))?;
    if args.plan {
        let planned = plan(&chosen, &finished(&out)?, &out, args.budget)?;
        return if args.json { terminal::print_json(&planned) } else { page(&planned).print() };
    }
    // Two campaigns would write the same files.
    let _lock = lock(&out, None)?;
    let mut completed = finished(&out)?;
    let planned = plan(&chosen, &completed, &out, args.budget)?;
    let children = Children::listen()?;
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let began = Instant::now();
    let (mut failed, mut left) = (Vec::new(), Vec::new());
    let mut lacks = BTreeMap::new();
    for (part, planned) in chosen.iter().zip(&planned) {
        if planned.done {
            continue;
        }
        if let Some(spec) = part.missing_spec() {
            say(&format!("skipped  {}: there is no spec '{spec}' in experiments/specs", part.name));
            continue;
        }
        if let Some(need) = part.needs.iter().find(|need| *lacks.entry(**need).or_insert_with(|| lacking(**need))) {
            if args.parts.is_empty() {
                say(&format!("skipped  {}: needs {}", part.name, need.name()));
                continue;
            }
            bail!("{} needs {}, which is not here", part.name, need.name());
        }
        let budget = args.budget - began.elapsed().as_secs_f64();
        if budget < planned.seconds.unwrap_or(0.0).max(1.0) {
            left.push(part.name.as_str());
            continue;
        }
        say(&format!("part     {}", part.name));
        let started = Instant::now();
        match run(part, &out, budget, &children)? {
            Ending::Done => {
                let record = Finished {
                    finished_at: trainer::provenance::now(),
                    took_s: started.elapsed().as_secs_f64(),
                    provenance: serde_json::to_value(provenance())?,
                };
                completed.insert(part.name.clone(), record);
                write_json(&out.join(DONE), &completed)?;
            }
            Ending::Code(BUDGET) => left.push(part.name.as_str()),
            Ending::Code(code @ (129 | 130 | 143)) => {
                return Err(RuntimeFailure::with_code(code, format!("{} was interrupted", part.name)).into());
            }
            Ending::Code(code) => failed.push(format!("{} (exit code {code})", part.name)),
            Ending::Failed(reason) => failed.push(format!("{} ({reason})", part.name)),
        }
    }
    let compared = compare(&chosen, &out)?;
    children.check("before the comparison; the same command goes on")?;
    if args.json {
        terminal::print_json(&compared.iter().flat_map(|one| one.differences.iter().flatten()).collect::<Vec<_>>())?
    } else {
        differences(&compared).print()?
    }
    if !failed.is_empty() {
        return Err(RuntimeFailure::new(format!("failed: {}", failed.join(", "))).into());
    }
    if !left.is_empty() {
        let text = format!("the budget ended before {}; the same command goes on", left.join(", "));
        return Err(RuntimeFailure::with_code(BUDGET, text).into());
    }
    Ok(())
}

/// Completed parts, read from the directory.
fn finished(out: &Path) -> Result<BTreeMap<String, Finished>> {
    let path = out.join(DONE);
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let text = read_text(&path, DOCUMENT).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not what this program writes; remove it", path.display()))
}

fn plan(chosen: &[Part], done: &BTreeMap<String, Finished>, out: &Path, budget: f64) -> Result<Vec<Planned>> {
    let line = |part: &Part| {
        let here = done.get(&part.name);
        let there = part.records.iter().all(|record| out.join(&record.made).exists());
        let (mut kept, mut not_kept) = (Vec::new(), Vec::new());
        for record in &part.records {
            let Some(path) = record.kept()? else {
                not_kept.push(record.made.clone());
                continue;
            };
            let lacks = Origin::read(&path, &record.rows)?.lacks(part.is_on_gpu());
            let below =
                repository::find("results").and_then(|results| Some(path.strip_prefix(results).ok()?.to_owned()));
            kept.push(Kept { path: below.unwrap_or(path).to_string_lossy().into_owned(), lacks });
        }
        Ok(Planned {
            part: part.name.clone(),
            needs: part.needs.clone(),
            seconds: here.map_or_else(|| rows::recorded_s(part), |here| Ok(Some(here.took_s)))?.or(part.seconds),
            done: here.is_some() && there,
            missing_spec: part.missing_spec().map(str::to_owned),
            kept,
            not_kept,
            command: part.words(out, budget)?,
            stdout: part.stdout.as_ref().map(|name| out.join(name)),
            documents: part.documents.clone(),
        })
    };
    chosen.iter().map(line).collect()
}

/// Whether this machine lacks something that the part needs.
fn lacking(need: Need) -> bool {
    let fails = |program: &str, words: &[&str]| {
        let mut command = Command::new(program);
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        !command.status().is_ok_and(|status| status.success())
    };
    match need {
        Need::Gpu => CudaDriver::probe().is_err(),
        Need::Pytorch => {
            fails(&std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned()), &["-c", "import torch"])
        }
        Need::TwoGpus => CudaDriver::probe().map_or(true, |all| all.len() < 2),
        Need::FourGpus => CudaDriver::probe().map_or(true, |all| all.len() < 4),
        Need::Nvcc => fails(&std::env::var("NVCC").unwrap_or_else(|_| toolkit("nvcc")), &["--version"]),
        Need::Sanitizer => fails(&toolkit("compute-sanitizer"), &["--version"]),
        Need::Nsys => fails("nsys", &["--version"]),
        Need::Ncu => fails("ncu", &["--version"]),
        Need::Cargo => fails("cargo", &["--version"]),
        Need::Perf => fails(&std::env::var("PERF").unwrap_or_else(|_| "perf".to_owned()), &["--version"]),
    }
}

/// A program of CUDA's toolkit, on the PATH or where the toolkit is installed.
fn toolkit(name: &str) -> String {
    let installed = Path::new("/usr/local/cuda/bin").join(name);
    if installed.is_file() { installed.to_string_lossy().into_owned() } else { name.to_owned() }
}

/// How the command of a part ended.
#[derive(Debug)]
enum Ending {
    Done,
    /// An exit code that is not zero.
    Code(u8),
    /// No exit code: it was not started, or a signal to it alone ended it.
    Failed(String),
}

/// Runs a part's command.
fn run(part: &Part, out: &Path, budget: f64, children: &Children) -> Result<Ending> {
    let words = part.words(out, budget)?;
    let mut command = match words[0].as_str() {
        "experiments" | "vramlab" => Command::new(this_program()?),
        program => Command::new(program),
    };
    // After the word `vramlab` this program is `vramlab`.
    command.args(&words[usize::from(words[0] != "vramlab")..]).stdin(Stdio::null());
    // The output gets its name only when it is complete.
    let printed = part.stdout.as_ref().map(|name| (out.join(name), out.join(format!("{name}.part"))));
    if let Some((_, partial)) = &printed {
        let file = File::create(partial).with_context(|| format!("cannot write {}", partial.display()))?;
        command.stdout(file);
    } else {
        // A command's table is not part of this program's output.
        command.stdout(Stdio::null());
    }
    let ended = children.run(&mut command, &format!("in part {}; the same command goes on", part.name));
    let ending = match &ended {
        Ok(Ok(status)) if status.success() => Ending::Done,
        Ok(Ok(status)) => match status.code() {
            Some(code) => Ending::Code(u8::try_from(code).unwrap_or(1)),
            None => Ending::Failed(status.to_string()),
        },
        Ok(Err(error)) => Ending::Failed(format!("cannot start {}: {error}", words[0])),
        Err(_) => Ending::Failed("interrupted".to_owned()),
    };
    if let Some((path, partial)) = printed {
        let moved =
            if matches!(ending, Ending::Done) { fs::rename(&partial, &path) } else { fs::remove_file(&partial) };
        moved.with_context(|| format!("cannot write {}", path.display()))?;
    }
    // An interruption ends the campaign, after the part's unfinished output is removed.
    ended.map(|_| ending)
}

/// The new records compared with the committed ones.
fn compare(chosen: &[Part], out: &Path) -> Result<Vec<Compared>> {
    let mut all = Vec::new();
    for part in chosen {
        for record in &part.records {
            let made = out.join(&record.made);
            if !made.exists() {
                continue;
            }
            let differences = match record.kept()? {
                Some(kept) => Some(differences_from(&part.name, record, &kept, &made)?),
                None => None,
            };
            all.push(Compared {
                part: part.name.clone(),
                made: record.made.clone(),
                differences,
                failures: rows::failures(&made)?,
            });
        }
    }
    Ok(all)
}

fn differences_from(part: &str, record: &Record, kept: &Path, made: &Path) -> Result<Vec<Difference>> {
    let read = |path: &Path| rows::read(path, &record.rows);
    let mut all = rows::differences(part, record, &read(kept)?, &read(made)?);
    if all.iter().any(|one| !one.is_none()) {
        let causes = Origin::read(made, &record.rows)?.causes(&Origin::read(kept, &record.rows)?);
        all.iter_mut().filter(|one| !one.is_none()).for_each(|one| one.because.clone_from(&causes));
    }
    Ok(all)
}

fn page(planned: &[Planned]) -> Page {
    let needs = |planned: &Planned| planned.needs.iter().map(|need| need.name()).collect::<Vec<_>>().join(", ");
    let seconds = |planned: &Planned| planned.seconds.map(|seconds| format!("{seconds:.0}"));
    let state = |planned: &Planned| match &planned.missing_spec {
        Some(spec) => format!("no spec {spec}"),
        None if planned.done => "done".to_owned(),
        None => "to do".to_owned(),
    };
    let table = table(
        planned,
        &[
            (Column::left("part"), &|part| Cell::from(&part.part)),
            (Column::left("needs"), &|part| Cell::or_dash(Some(needs(part)).filter(|needs| !needs.is_empty()))),
            (Column::right("seconds"), &|part| Cell::or_dash(seconds(part))),
            (Column::left("state"), &|part| Cell::from(state(part))),
            (Column::text("read by"), &|part| Cell::from(part.documents.join(", "))),
        ],
    );
    let mut page = Page::stdout();
    page.table(&table);
    page.note("seconds: the last call here, else the runs of the kept records, else an estimate");
    page.gap();
    for part in planned {
        let mut line = part.command.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        if let Some(file) = &part.stdout {
            line += &format!(" > {}", quoted(&file.to_string_lossy()));
        }
        page.line(format!("{}:", part.part));
        page.verbatim(&line);
    }
    origins(planned, &mut page);
    page
}

/// What is kept of the parts, and what the kept records do not say of their making.
fn origins(planned: &[Planned], page: &mut Page) {
    let mut lacking: BTreeMap<Vec<&str>, Vec<&str>> = BTreeMap::new();
    for kept in planned.iter().flat_map(|part| &part.kept).filter(|kept| !kept.lacks.is_empty()) {
        let facts: Vec<&str> = kept.lacks.iter().map(|fact| fact.name()).collect();
        lacking.entry(facts).or_default().push(&kept.path);
    }
    if !lacking.is_empty() {
        page.title("Kept records that do not say all of their making");
        for (facts, mut records) in lacking {
            records.sort_unstable();
            records.dedup();
            page.line(format!("no {}: {}", facts.join(", "), records.join(", ")));
        }
    }
    let without: Vec<String> = planned
        .iter()
        .filter(|part| !part.not_kept.is_empty())
        .map(|part| {
            let all = part.kept.is_empty();
            if all { part.part.clone() } else { format!("{} ({})", part.part, part.not_kept.join(", ")) }
        })
        .collect();
    if !without.is_empty() {
        page.title("Parts without a kept record");
        page.line(without.join(", "));
    }
}

fn differences(compared: &[Compared]) -> Page {
    let mut page = Page::stdout();
    if compared.is_empty() {
        page.line("Nothing was made.");
    }
    let mut by_part: Vec<(&str, Vec<&Compared>)> = Vec::new();
    for one in compared {
        match by_part.last_mut() {
            Some((part, all)) if *part == one.part => all.push(one),
            _ => by_part.push((&one.part, vec![one])),
        }
    }
    for (part, all) in by_part {
        let figures: Vec<&Difference> = all.iter().flat_map(|one| one.differences.iter().flatten()).collect();
        let mut changed: Vec<&Difference> = figures.iter().filter(|one| !one.is_none()).copied().collect();
        changed.sort_by(|one, other| other.distance().total_cmp(&one.distance()));
        let same = figures.len() - changed.len();
        page.title(format!("{part}: {same} of {} figures are as they were, within 1 %", figures.len()));
        if !changed.is_empty() {
            page.table(&changes(&changed));
            if changed.len() > SHOWN {
                page.note(format!("{} more; --json has all", changed.len() - SHOWN));
            }
        }
        let mut because: BTreeMap<Vec<String>, Vec<&str>> = BTreeMap::new();
        for one in &all {
            because.entry(one.because()).or_default().push(&one.made);
        }
        for (causes, records) in because.iter().filter(|(causes, _)| !causes.is_empty()) {
            page.note(format!("{} differs: {}", records.join(", "), causes.join("; ")));
        }
        let without: Vec<&str> =
            all.iter().filter(|one| one.differences.is_none()).map(|one| one.made.as_str()).collect();
        if !without.is_empty() {
            page.note(format!("no kept record of {}", without.join(", ")));
        }
    }
    page
}

/// The table of the largest differences.
fn changes(changed: &[&Difference]) -> Table {
    let number = |value: Option<f64>| {
        Cell::or_dash(value.map(|value| format!("{value:.6}").trim_end_matches('0').trim_end_matches('.').to_owned()))
    };
    table(
        changed.iter().take(SHOWN).copied(),
        &[
            (Column::text("figure"), &|one: &Difference| Cell::from(&one.figure)),
            (Column::right("kept"), &|one: &Difference| number(one.kept)),
            (Column::right("new"), &|one: &Difference| number(one.new)),
            (Column::right("ratio"), &|one: &Difference| Cell::or_dash(one.ratio.map(|ratio| format!("{ratio:.3}")))),
        ],
    )
}
