//! `experiments status`: the progress of experiments, and their active runners.

use super::lock::{self, Holder};
use super::record::{EXPERIMENT, RUN, RUNS, RunStatus, experiments_in, is_plain, part_of, read_json, status_of};
use super::report::{drawing, tally};
use super::spec;
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use terminal::Shard;
use terminal::{self, Column, Page, Table, quoted};

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Directory given to `experiments run` as --out, or the directory of one experiment in it
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Print one JSON array with an object for each experiment
    #[arg(long)]
    json: bool,
}

/// State of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Done,
    Running,
    Failed,
    Skipped,
    /// Its record cannot be read.
    Damaged,
    Left,
}

#[derive(Debug, Serialize)]
struct Run {
    id: String,
    state: State,
    /// The reason for failing or skipping, or what is damaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Whether a killed runner left it unfinished.
    stale: bool,
}

/// Number of runs in each state.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Counts {
    planned: usize,
    done: usize,
    running: usize,
    failed: usize,
    skipped: usize,
    damaged: usize,
    /// Remaining runs.
    left: usize,
}

impl Counts {
    fn of<'a>(runs: impl Iterator<Item = &'a Run>) -> Self {
        let states: Vec<State> = runs.map(|run| run.state).collect();
        let of = |state| states.iter().filter(|other| **other == state).count();
        Self {
            planned: states.len(),
            done: of(State::Done),
            running: of(State::Running),
            failed: of(State::Failed),
            skipped: of(State::Skipped),
            damaged: of(State::Damaged),
            left: of(State::Left),
        }
    }

    /// Runs that are neither complete nor in progress.
    fn open(&self) -> usize {
        self.failed + self.skipped + self.left
    }
}

/// State of a runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Runner {
    /// It holds its lock.
    Running,
    /// It was killed: its lock file exists and no process holds it.
    Stale,
    /// There is no runner.
    None,
}

#[derive(Debug, Serialize)]
struct Part {
    /// Absent for a runner of all runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<String>,
    /// State of the runner.
    runner: Runner,
    /// As in the lock's file.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    #[serde(flatten)]
    counts: Counts,
}

#[derive(Debug, Serialize)]
struct Status {
    experiment: String,
    /// As in `experiment.json`.
    device: String,
    #[serde(flatten)]
    counts: Counts,
    /// Whether the file system supports locks, which show the active runners.
    locks: bool,
    /// Each shard, or the runner of all runs.
    runners: Vec<Part>,
    runs: Vec<Run>,
    #[serde(skip)]
    command: String,
    #[serde(skip)]
    folder: PathBuf,
}

/// Prints the progress of the experiments in a directory.
pub(crate) fn status(args: &StatusArgs) -> Result<()> {
    let statuses = experiments_in(&args.folder)?.iter().map(|folder| of(folder)).collect::<Result<Vec<Status>>>()?;
    if args.json {
        return terminal::print_json(&statuses);
    }
    let mut page = Page::stdout();
    page.table(&table(&statuses));
    statuses.iter().flat_map(Status::notes).for_each(|note| page.line(note));
    close(&mut page, &statuses);
    page.print()
}

fn of(folder: &Path) -> Result<Status> {
    let absolute = std::path::absolute(folder).with_context(|| format!("{} is not a directory", folder.display()))?;
    let path = folder.join(EXPERIMENT);
    let record = read_json(&path)?;
    let text = |key: &str| {
        let value = record[key].as_str().map(str::to_owned);
        value.with_context(|| format!("{} has no {key}, so no experiment wrote it", path.display()))
    };
    let (experiment, device, sha256) = (text("name")?, text("device")?, text("spec_sha256")?);
    let planned = record["runs"].as_array().with_context(|| format!("{} has no runs", path.display()))?;
    let at_work = lock::at_work(&absolute)?;
    let locks = at_work.as_deref().unwrap_or_default();
    let is_held =
        |index: usize| locks.iter().any(|lock| lock.held && lock.shard.is_none_or(|shard| shard.holds(index)));
    let mut runs = Vec::new();
    let mut shards: Vec<Shard> = locks.iter().filter_map(|lock| lock.shard).collect();
    for (index, run) in planned.iter().enumerate() {
        let id = run["id"].as_str().filter(|id| is_plain(id));
        let id = id.with_context(|| format!("{}: the run {index} has no id that names a directory", path.display()))?;
        let runs_folder = folder.join(RUNS);
        let (directory, begun) = (runs_folder.join(id), part_of(&runs_folder, id).exists());
        let (state, damage) = match status_of(&directory, &sha256) {
            Ok(Some(RunStatus::Done)) => (State::Done, None),
            _ if begun && is_held(index) => (State::Running, None),
            Ok(Some(RunStatus::Failed)) => (State::Failed, None),
            Ok(Some(RunStatus::Skipped)) => (State::Skipped, None),
            Ok(None) => (State::Left, None),
            Err(error) => (State::Damaged, Some(format!("{error:#}"))),
        };
        let of_run =
            if state == State::Left { Value::Null } else { read_json(&directory.join(RUN)).unwrap_or_default() };
        let error = of_run["error"].as_str().filter(|_| state != State::Running).map(str::to_owned).or(damage);
        // Where no lock names a shard, the records do.
        let shard = of_run["shard"].as_str().and_then(|shard| shard.parse::<Shard>().ok());
        shards.extend(shard.filter(|_| locks.is_empty()));
        runs.push(Run {
            id: id.to_owned(),
            state,
            error,
            stale: begun && state != State::Running && at_work.is_some(),
        });
    }
    let runners = runners(locks, &shards, &runs);
    // Without the program's own name. The record has no directories, so that of another spec is not known.
    let is_known = spec::find(&experiment, None).is_ok();
    let word = |word: &str| if word == experiment && !is_known { format!("path/to/{word}.toml") } else { quoted(word) };
    let command = record["command"].as_array().into_iter().flatten().skip(1).filter_map(Value::as_str).map(word);
    let out = folder.parent().filter(|out| !out.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let command = command.chain(["-o".to_owned(), quoted(&out.to_string_lossy())]).collect::<Vec<String>>().join(" ");
    let (counts, locks) = (Counts::of(runs.iter()), at_work.is_some());
    Ok(Status { experiment, device, counts, locks, runners, runs, command, folder: folder.to_owned() })
}

/// The runner of all runs, and each shard where all agree on their number.
fn runners(found: &[lock::Found], shards: &[Shard], runs: &[Run]) -> Vec<Part> {
    let runner_of = |wanted: Option<Shard>| {
        let lock = found.iter().find(|lock| lock.shard == wanted);
        let runner = lock.map_or(Runner::None, |lock| if lock.held { Runner::Running } else { Runner::Stale });
        (runner, lock.and_then(|lock| lock.holder.clone()))
    };
    let mut out = Vec::new();
    let (runner, holder) = runner_of(None);
    if runner != Runner::None {
        out.push(Part { shard: None, runner, holder, counts: Counts::of(runs.iter()) });
    }
    let Some(of) = shards.first().map(|shard| shard.of).filter(|of| shards.iter().all(|shard| shard.of == *of)) else {
        return out;
    };
    // Shards in excess of the runs have nothing to do.
    for number in 1..=of.min(runs.len()) {
        let shard = Shard { number, of };
        let mine = runs.iter().enumerate().filter(|(index, _)| shard.holds(*index)).map(|(_, run)| run);
        let (runner, holder) = runner_of(Some(shard));
        out.push(Part { shard: Some(shard.to_string()), runner, holder, counts: Counts::of(mine) });
    }
    out
}

fn table(found: &[Status]) -> Table {
    let mut table = Table::new([
        Column::left("experiment"),
        Column::left("shard"),
        Column::right("done"),
        Column::right("running"),
        Column::right("failed"),
        Column::right("skipped"),
        Column::right("left"),
        Column::text("runner"),
    ]);
    let row = |name: &str, shard: &str, counts: &Counts, runner: String| {
        let of = [counts.running, counts.failed, counts.skipped, counts.left].map(|count| count.to_string());
        let [running, failed, skipped, left] = of;
        let progress = format!("{}/{}", counts.done, counts.planned);
        [name.to_owned(), shard.to_owned(), progress, running, failed, skipped, left, runner]
    };
    for status in found {
        let whole = status.runners.iter().find(|part| part.shard.is_none());
        table.row(row(&status.experiment, "all", &status.counts, whole.map_or_else(String::new, Part::words)));
        for part in &status.runners {
            if let Some(shard) = &part.shard {
                table.row(row("", shard, &part.counts, part.words()));
            }
        }
    }
    table
}

impl Part {
    /// State of the shard's runner, in words.
    fn words(&self) -> String {
        let holder = self.holder.as_ref().map_or_else(String::new, |holder| {
            let job = holder.job.as_ref().map_or_else(String::new, |job| format!(", job {}", job.id));
            format!("process {}{job}, since {}", holder.process, holder.started_at)
        });
        match self.runner {
            Runner::Running => holder,
            Runner::Stale if self.counts.open() > 0 => "stale: it was killed".to_owned(),
            Runner::Stale | Runner::None => String::new(),
        }
    }
}

impl Status {
    /// Failures, leftovers, and unknown states.
    fn notes(&self) -> Vec<String> {
        /// Limit on the failures that are named.
        const NAMED: usize = 5;
        let mut out = Vec::new();
        let failed: Vec<&Run> = self.runs.iter().filter(|run| run.state == State::Failed).collect();
        for run in failed.iter().take(NAMED) {
            let error = run.error.as_deref().unwrap_or("it does not say why");
            out.push(format!("failed: {}/{}: {error}", self.experiment, run.id));
        }
        if failed.len() > NAMED {
            out.push(format!("failed: {} more of {}", failed.len() - NAMED, self.experiment));
        }
        for run in self.runs.iter().filter(|run| run.state == State::Damaged) {
            out.push(format!("damaged: {}", run.error.as_deref().unwrap_or(&run.id)));
        }
        for run in self.runs.iter().filter(|run| run.stale) {
            out.push(format!("stale: {}/{} was begun by a runner that is gone", self.experiment, run.id));
        }
        if !self.locks {
            let name = &self.experiment;
            out.push(format!(
                "note: {name} is on a file system without locks, so it is unknown which runs are running"
            ));
        }
        out
    }

    /// The command that resumes runs that are not in progress; `None` if none are left.
    fn next(&self) -> Option<String> {
        if self.counts.open() == 0
            || self.runners.iter().any(|part| part.shard.is_none() && part.runner == Runner::Running)
        {
            return None;
        }
        let mut shards = self.runners.iter().filter(|part| part.shard.is_some()).peekable();
        if shards.peek().is_none() {
            return Some(self.command.clone());
        }
        let part = shards.find(|part| part.runner != Runner::Running && part.counts.open() > 0)?;
        part.shard.as_ref().map(|shard| format!("{} --shard {shard}", self.command))
    }
}

/// One sentence about all experiments, and the next command.
fn close(page: &mut Page, found: &[Status]) {
    let Counts { planned, done, running, failed, skipped, damaged, left } =
        Counts::of(found.iter().flat_map(|status| &status.runs));
    let text = format!("{done} of {planned} runs are done")
        + &tally([
            (running, "running"),
            (failed, "failed"),
            (skipped, "skipped"),
            (damaged, "damaged"),
            (left, "left"),
        ]);
    let go_on = || Some(terminal::command("experiments", &found.iter().find_map(Status::next)?));
    let draw = || found.first().filter(|_| done == planned).map(|status| drawing(&status.folder));
    match go_on().or_else(draw) {
        Some(next) => page.end(format!("{text}."), &next),
        None => page.title(format!("{text}.")),
    }
}
