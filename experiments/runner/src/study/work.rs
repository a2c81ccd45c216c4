//! The work on one experiment: its directory, its start files, and its runs, possibly in parallel.

use super::execute::Experiment;
use super::lock;
use super::plan::{Run, share};
use super::record::{
    EXPERIMENT, ExperimentRecord, Planned, RUNS, RunStatus, SCHEMA_VERSION, provenance, read_json, remove, remove_file,
    write_json,
};
use super::report::{self, Cell};
use super::spec::{Program, Spec, Turns};
use super::turns;
use super::{commands, programs};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use terminal::{Bar, say};
use trainer::provenance::now;
use vramlab::{DeviceKind, DeviceName};

/// Directory of the files with the trainer's weights and batches.
pub(super) const START: &str = "start";

/// Failed runs with their errors.
pub(super) type Failures = Vec<(String, String)>;

/// The start file of a run that takes one, and the command that makes it.
pub(super) fn start_of(spec: &Spec, run: &Run) -> Option<(String, Vec<String>)> {
    (spec.start && run.program == Program::Pytorch).then(|| programs::start_file(run))
}

/// Checks that a directory is new, empty, or contains the same experiment.
pub(super) fn check_folder(planned: &Planned, device: &DeviceName) -> Result<()> {
    let folder = &planned.folder;
    let path = folder.join(EXPERIMENT);
    if !path.is_file() {
        // Names that begin with a dot are being written by another shard.
        let is_complete = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.is_ok_and(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
        };
        let holds_something =
            std::fs::read_dir(folder).is_ok_and(|mut entries| entries.any(is_complete)) && !path.is_file();
        if holds_something || folder.is_file() {
            bail!("{} already exists and has no {EXPERIMENT}; choose another directory with -o", folder.display());
        }
        return Ok(());
    }
    let experiment = read_json(&path)?;
    if experiment["spec_sha256"].as_str() != Some(&planned.sha256) {
        bail!(
            "{} has runs of another version of this spec; choose another directory with -o, or remove them with --again",
            folder.display()
        );
    }
    let (other, device) = (experiment["device"].as_str().unwrap_or("another device"), programs::shown(device));
    if other.parse().as_ref() != Ok(&device) {
        bail!(
            "{} has runs on {other}, not on {device}; choose another directory with -o, or remove them with --again",
            folder.display()
        );
    }
    if experiment["profile_sha256"].as_str() != planned.profile_sha256.as_deref() {
        bail!(
            "{} has runs on {other} when that file had another content; choose another directory with -o, or remove them \
             with --again",
            folder.display()
        );
    }
    Ok(())
}

/// The outcome of the work on an experiment.
#[derive(Debug)]
pub(super) struct WorkReport {
    pub(super) cells: Vec<Cell>,
    pub(super) failures: Failures,
    /// Number of runs that the deadline left out.
    pub(super) late: usize,
}

/// Makes the remaining runs of an experiment, or of a shard of it; with `again` all of them anew.
pub(super) fn work(experiment: &Experiment<'_>, again: bool) -> Result<WorkReport> {
    let (planned, device) = (experiment.planned, experiment.device);
    let spec = &planned.source.spec;
    // Shards may start simultaneously.
    lock::alone(&planned.folder, || {
        let folder = &planned.folder;
        if again {
            // Other files in it are somebody's. The plan goes last: without it the rest would not be an experiment.
            [RUNS, START, commands::BUILT].iter().try_for_each(|name| remove(&folder.join(name)))?;
            remove_file(&folder.join(EXPERIMENT))?;
        } else {
            check_folder(planned, device)?;
        }
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        write_experiment(planned, device)
    })?;
    let runs_folder = planned.folder.join(RUNS);
    std::fs::create_dir_all(&runs_folder).with_context(|| format!("cannot make {}", runs_folder.display()))?;
    let mine = share(&planned.runs, experiment.shard);
    mine.iter().try_for_each(|run| experiment.tidy(run))?;
    let state = |run: &Run| planned.status_of(run).ok().flatten();
    let mut left: Vec<&Run> = mine.iter().copied().filter(|run| state(run) != Some(RunStatus::Done)).collect();
    let mut failures = Failures::new();
    if left.iter().any(|run| run.program.needs_pytorch())
        && let Some(reason) = programs::pytorch_missing(experiment.inputs, device.kind())
    {
        let (skipped, others): (Vec<&Run>, Vec<&Run>) = left.into_iter().partition(|run| run.program.needs_pytorch());
        for run in &skipped {
            experiment.skip(run, &reason)?;
        }
        say(&format!("note: {}: {} runs of PyTorch are skipped: {reason}", spec.name, skipped.len()));
        left = others;
    }
    left = skip_impossible(experiment, left)?;
    if spec.turns.is_some() {
        let missing: BTreeSet<_> = left.iter().map(|run| turns_of(run)).collect();
        left = mine.iter().copied().filter(|run| missing.contains(&turns_of(run))).collect();
    }
    make_starts(spec, experiment, &mut left, &mut failures)?;
    compile(spec, experiment, &mut left, &mut failures)?;
    experiment.prepare(&left)?;
    warm_up(spec, experiment, &left, device.kind())?;
    let bar = Bar::new(mine.len() as u64, "{prefix} {bar:20} run {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
    bar.prefix(&spec.name);
    bar.begin_at((mine.len() - left.len()) as u64);
    let late = AtomicUsize::new(0);
    let failed = all(experiment, spec, &left, &bar, &late);
    bar.clear();
    failures.extend(failed?);
    if planned.runs.iter().all(|run| state(run) == Some(RunStatus::Done)) {
        // They are large, and can be made again from their seeds.
        remove(&planned.folder.join(START))?;
        remove(&planned.folder.join(commands::BUILT))?;
    }
    // A damaged file of one run takes nothing from other experiments.
    let cells = report::cells(planned, state).unwrap_or_else(|error| {
        let text = format!("{error:#}; remove the directory of that run, which is then made again");
        failures.push((spec.name.clone(), text));
        Vec::new()
    });
    Ok(WorkReport { cells, failures, late: late.into_inner() })
}

/// Whether a run measures real time, which parallel runs would change.
fn is_timed(spec: &Spec, run: &Run) -> bool {
    match run.program {
        _ if spec.concurrent => false,
        Program::Bench | Program::Pytorch | Program::Inside | Program::Command => true,
        // Their times are simulated; the record contains the number of parallel runs for the few that are not.
        Program::Trainer | Program::Replay | Program::Capacity => false,
    }
}

/// Makes the runs in order, up to `jobs` in parallel, and then those that need the machine for themselves.
fn all(experiment: &Experiment<'_>, spec: &Spec, left: &[&Run], bar: &Bar, late: &AtomicUsize) -> Result<Failures> {
    let jobs = experiment.jobs;
    let mut failures = Vec::new();
    if let Some(turns) = &spec.turns {
        let mut groups: BTreeMap<_, Vec<&Run>> = BTreeMap::new();
        left.iter().for_each(|run| groups.entry(turns_of(run)).or_default().push(run));
        for runs in groups.values() {
            failures.extend(in_turn(experiment, turns, runs, bar, late)?);
        }
    } else {
        let (alone, together): (Vec<&Run>, Vec<&Run>) = left.iter().partition(|run| jobs == 1 || is_timed(spec, run));
        failures.extend(at_once(experiment, spec, &together, jobs, bar, late)?);
        failures.extend(at_once(experiment, spec, &alone, 1, bar, late)?);
    }
    failures.sort();
    Ok(failures.into_iter().map(|(_, id, error)| (format!("{}/{id}", spec.name), error)).collect())
}

/// Makes the runs, `jobs` in parallel; returns index, name and error of the failed ones.
fn at_once(
    experiment: &Experiment<'_>,
    spec: &Spec,
    runs: &[&Run],
    jobs: usize,
    bar: &Bar,
    late: &AtomicUsize,
) -> Result<Vec<(usize, String, String)>> {
    let (next, given_up) = (AtomicUsize::new(0), AtomicBool::new(false));
    let failed = Mutex::new(Vec::new());
    let worker = || -> Result<()> {
        while !given_up.load(SeqCst)
            && let Some(run) = runs.get(next.fetch_add(1, SeqCst))
        {
            bar.message(&run.id);
            if experiment.is_late(run) {
                late.fetch_add(1, SeqCst);
                continue;
            }
            let start = start_of(spec, run).map(|(name, _)| name);
            match experiment.run(run, start.as_deref(), None) {
                Ok((_, None)) => {}
                Ok((_, Some(error))) => {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).push((run.position, run.id.clone(), error))
                }
                Err(error) => {
                    // The others finish their current runs.
                    given_up.store(true, SeqCst);
                    return Err(error);
                }
            }
            bar.advance(1);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // A process ends with the thread that started it, so each thread waits for its own.
        let workers: Vec<_> = (0..jobs.min(runs.len())).map(|_| scope.spawn(worker)).collect();
        let ended = workers.into_iter().map(|worker| {
            // A panic is a fault of this program; it is propagated.
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        ended.collect::<Vec<Result<()>>>().into_iter().collect::<Result<()>>()
    })?;
    Ok(failed.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Runs with equal values take turns and are compared with each other: those of a repeat and of a program.
fn turns_of(run: &Run) -> (u32, String) {
    (run.repeat, run.option("program").map(ToString::to_string).unwrap_or_default())
}

/// Makes runs at the same time, which take turns; returns index, name and error of the failed ones.
fn in_turn(
    experiment: &Experiment<'_>,
    turns: &Turns,
    runs: &[&Run],
    bar: &Bar,
    late: &AtomicUsize,
) -> Result<Vec<(usize, String, String)>> {
    if runs.iter().any(|run| experiment.is_late(run)) {
        late.fetch_add(runs.len(), SeqCst);
        return Ok(Vec::new());
    }
    // A killed runner must not leave runs of two attempts.
    runs.iter().try_for_each(|run| remove(&experiment.planned.run_folder(run)))?;
    let (sender, pipes) = channel();
    let outcomes = std::thread::scope(|scope| {
        // A process ends with the thread that started it, so each thread waits for its own.
        let start = |run| {
            let sender = sender.clone();
            scope.spawn(move || experiment.run(run, None, Some(sender)))
        };
        let workers: Vec<_> = runs.iter().copied().map(start).collect();
        drop(sender);
        let repeat = runs.first().map_or(0, |run| u64::from(run.repeat));
        turns::take(turns, experiment.planned.source.spec.seed.wrapping_add(repeat), pipes);
        let ended = workers.into_iter().map(|worker| {
            bar.advance(1);
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        ended.collect::<Vec<_>>()
    });
    let mut failed = Vec::new();
    for (run, outcome) in runs.iter().zip(outcomes) {
        failed.extend(outcome?.1.map(|error| (run.position, run.id.clone(), error)));
    }
    Ok(failed)
}

/// Writes `experiment.json` if the experiment is new.
fn write_experiment(planned: &Planned, device: &DeviceName) -> Result<()> {
    let path = planned.folder.join(EXPERIMENT);
    if path.is_file() {
        return Ok(());
    }
    let spec = &planned.source.spec;
    let device = programs::shown(device).to_string();
    let record = ExperimentRecord {
        schema_version: SCHEMA_VERSION,
        name: &spec.name,
        question: &spec.question,
        spec,
        spec_sha256: &planned.sha256,
        device: device.clone(),
        profile_sha256: planned.profile_sha256.as_deref(),
        command: ["experiments", "run", &spec.name, "--device", &device].map(str::to_owned).into(),
        code_version: env!("CARGO_PKG_VERSION"),
        provenance: provenance(),
        started_at: now(),
        runs: &planned.runs,
    };
    write_json(&path, &record)
}

/// Skips commands that this machine cannot run; returns the other runs.
fn skip_impossible<'a>(experiment: &Experiment<'_>, left: Vec<&'a Run>) -> Result<Vec<&'a Run>> {
    let mut reasons: BTreeMap<String, Option<String>> = BTreeMap::new();
    let mut possible = Vec::new();
    for run in left {
        if run.program != Program::Command {
            possible.push(run);
            continue;
        }
        let key = format!("{} {:?}", commands::name(run), run.option("own-pool"));
        if !reasons.contains_key(&key) {
            let reason = commands::missing(run, experiment.inputs)?;
            let is_new = !reasons.values().any(|known| *known == reason);
            if let Some(reason) = reason.as_ref().filter(|_| is_new) {
                say(&format!("note: {}: skipped: {reason}", experiment.planned.source.spec.name));
            }
            reasons.insert(key.clone(), reason);
        }
        match reasons.get(&key) {
            Some(Some(reason)) => experiment.skip(run, reason)?,
            _ => possible.push(run),
        }
    }
    Ok(possible)
}

/// Compiles the programs of the remaining runs in parallel; runs of a program that cannot be compiled fail.
fn compile(spec: &Spec, experiment: &Experiment<'_>, left: &mut Vec<&Run>, failures: &mut Failures) -> Result<()> {
    let commands = left.iter().filter(|run| run.program == Program::Command);
    let names: BTreeSet<String> = commands.map(|run| commands::name(run)).collect();
    if names.is_empty() {
        return Ok(());
    }
    let folder = experiment.planned.folder.join(commands::BUILT);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let built: Vec<(String, Result<()>)> = std::thread::scope(|scope| {
        let build = |name: &String| {
            let (name, folder) = (name.clone(), &folder);
            scope.spawn(move || (name.clone(), commands::build(&name, folder)))
        };
        let threads: Vec<_> = names.iter().map(build).collect();
        let end = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(end).collect()
    });
    for (name, outcome) in built {
        let Err(error) = outcome else { continue };
        failures.push((format!("{}/{name}", spec.name), format!("{error:#}")));
        left.retain(|run| run.program != Program::Command || commands::name(run) != name);
    }
    Ok(())
}

/// Writes the start files of the remaining runs; runs whose file cannot be written fail.
fn make_starts(spec: &Spec, experiment: &Experiment<'_>, left: &mut Vec<&Run>, failures: &mut Failures) -> Result<()> {
    let files: BTreeMap<String, Vec<String>> = left.iter().filter_map(|run| start_of(spec, run)).collect();
    for (name, arguments) in files {
        let Some(error) = experiment.make_start(&name, &arguments)? else { continue };
        failures.push((format!("{}/{name}", spec.name), error));
        left.retain(|run| start_of(spec, run).is_none_or(|(other, _)| other != name));
    }
    Ok(())
}

/// Runs each cell with remaining runs, as often as the spec requires and the deadline allows, and keeps nothing.
fn warm_up(spec: &Spec, experiment: &Experiment<'_>, left: &[&Run], kind: DeviceKind) -> Result<()> {
    let times = spec.warm_up_on(kind);
    for _ in 0..times {
        let mut cells = BTreeSet::new();
        for run in left.iter().filter(|run| cells.insert(run.cell) && !experiment.is_late(run)) {
            let start = start_of(spec, run).map(|(name, _)| name);
            experiment.warm_up(run, start.as_deref())?;
        }
    }
    Ok(())
}
