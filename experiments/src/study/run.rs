//! `experiments run`: does what specs say, and goes on where it was.

use super::execute::{Experiment, Interrupted};
use super::lock::{Lock, lock};
use super::plan::{Run, Shard, plan_on, share};
use super::programs::{self, Device, Places};
use super::record::{
    EXPERIMENT, ExperimentRecord, Machine, RUNS, RunStatus, SCHEMA_VERSION, now, provenance, read_json, remove,
    spec_sha256, status_of, write_json,
};
use super::report::{self, Cell};
use super::spec::{self, DeviceKind, Program, Source};
use crate::compare::ArmFailed;
use allocators::CudaDriver;
use anyhow::{Context, Result, bail};
use clap::Args;
use comfy_table::{ContentArrangement, LineStyle, Table, presets};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use trainer::terminal::{Bar, say};

/// Exit code after Ctrl-C: 128 and the signal's number.
const INTERRUPTED: u8 = 130;

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Specs: files, or names from experiments/specs (see `experiments list`)
    #[arg(required = true, value_name = "SPEC")]
    specs: Vec<String>,
    /// Folder in which each experiment gets one of its own; runs that are there already are kept
    /// [default: runs/experiments-cuda or runs/experiments-sim]
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// cuda, cuda:N, sim or sim:PROFILE.json [default: cuda if there is a GPU, else sim]
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
    /// Only every N-th run, beginning with the K-th; shards merge by copying their folders together
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Print the runs and their commands, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Remove what these experiments left in the folder, and start afresh
    #[arg(long)]
    again: bool,
    /// Folder of recorded histories [default: experiments/histories]
    #[arg(long, value_name = "DIR", env = "HISTORIES")]
    histories: Option<PathBuf>,
    /// Directory with MNIST's four files [default: MNIST_DIR, then the user cache, then a download]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Folder of the specs [default: experiments/specs]
    #[arg(long = "specs", value_name = "DIR")]
    specs_dir: Option<PathBuf>,
    /// Print the cells of the matrix with their figures as one JSON array
    #[arg(long)]
    json: bool,
}

/// A spec that has been checked, with its runs.
struct Planned {
    source: Source,
    runs: Vec<Run>,
    sha256: String,
    folder: PathBuf,
}

/// The device that was named, else a GPU if all specs are for it and one is there, else the simulated one.
pub(crate) fn choose(named: Option<&Device>, specs: &[Source]) -> Result<Device> {
    if let Some(device) = named {
        return Ok(device.clone());
    }
    let all = |kind| specs.iter().all(|source| source.spec.devices.contains(&kind));
    let name = if all(DeviceKind::Cuda) && CudaDriver::probe().is_ok() { "cuda" } else { "sim" };
    name.parse().map_err(anyhow::Error::msg)
}

/// Runs the specs one after the other.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let sources =
        args.specs.iter().map(|text| spec::find(text, args.specs_dir.as_deref())).collect::<Result<Vec<_>>>()?;
    let device = choose(args.device.as_ref(), &sources)?;
    let places = Places::new(args.histories.as_deref(), args.data_dir.as_deref())?;
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("runs/experiments-{}", device.kind)));
    let out = std::path::absolute(&out).with_context(|| format!("{} is no folder that can be made", out.display()))?;
    // All of them before the first runs: a mistake in the last should not show after an hour.
    let planned = sources.into_iter().map(|source| prepare(source, &device, &places, &out, args.again));
    let planned = planned.collect::<Result<Vec<Planned>>>()?;
    if args.dry_run {
        return dry_run(&planned, &device, &places, args);
    }
    if device.kind == DeviceKind::Cuda {
        // Said once, instead of by every run.
        CudaDriver::probe().context("--device cuda")?;
    }
    let _locks = lock_all(&planned)?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || flag.store(true, std::sync::atomic::Ordering::SeqCst))
        .context("cannot listen for Ctrl-C")?;
    let machine = Machine::now();
    // Simulated time does not mind. CAST: a count of cores.
    if let Some(load) = machine.load.filter(|load| device.kind == DeviceKind::Cuda && *load > machine.cores as f64) {
        say(&format!("note: the machine is busy (load {load:.1} on {} cores); times will be noisy", machine.cores));
    }
    let mut all: Vec<Cell> = Vec::new();
    let mut failed = Vec::new();
    for planned in &planned {
        let done = run_one(planned, &device, &places, args, &stop);
        let (cells, failures) = done.map_err(|error| interrupted(error, planned))?;
        if !args.json {
            crate::print(&report::table(&planned.source.spec.name, &planned.source.spec.question, &cells))?;
        }
        failed.extend(failures);
        all.extend(cells);
    }
    if args.json {
        crate::print_json(&all)?;
    }
    report::warnings(&all).iter().for_each(|warning| say(&format!("note: {warning}")));
    match failed.as_slice() {
        [] => Ok(()),
        [(first, error), ..] => {
            let count = failed.len();
            let runs = if count == 1 { "1 run" } else { "runs" };
            let count = if count == 1 { String::new() } else { format!("{count} ") };
            let text = format!("{count}{runs} failed; {first}: {error}; the same command tries again");
            Err(ArmFailed::new(1, text).into())
        }
    }
}

fn interrupted(error: anyhow::Error, planned: &Planned) -> anyhow::Error {
    if error.downcast_ref::<Interrupted>().is_none() {
        return error;
    }
    let name = &planned.source.spec.name;
    ArmFailed::new(INTERRUPTED, format!("interrupted in {name}; what was done is kept, the same command goes on"))
        .into()
}

/// Takes the locks of all experiments before the first runs.
fn lock_all(planned: &[Planned]) -> Result<Vec<Lock>> {
    // One that is named twice is one.
    let folders: BTreeSet<&Path> = planned.iter().map(|planned| planned.folder.as_path()).collect();
    let mut locks = Vec::new();
    for folder in folders {
        match lock(folder)? {
            Some(lock) => locks.push(lock),
            None => say(&format!("note: {} cannot be locked here; run nothing else in it meanwhile", folder.display())),
        }
    }
    Ok(locks)
}

/// Checks a spec and the folder that it would write to.
fn prepare(source: Source, device: &Device, places: &Places, out: &Path, again: bool) -> Result<Planned> {
    programs::check(&source, device.kind, Some(&places.histories))?;
    let runs = plan_on(&source, device.kind)?;
    let sha256 = spec_sha256(&source.spec)?;
    let folder = out.join(&source.spec.name);
    if !again {
        check_folder(&folder, &sha256, device)?;
        for run in &runs {
            status_of(&report::folder_of(&folder, run), &sha256)?;
        }
    } else if folder.exists() && !folder.join(EXPERIMENT).is_file() {
        bail!("{} holds no experiment, so --again will not remove it", folder.display());
    }
    Ok(Planned { source, runs, sha256, folder })
}

/// A folder is new, empty, or holds the same experiment.
fn check_folder(folder: &Path, sha256: &str, device: &Device) -> Result<()> {
    let path = folder.join(EXPERIMENT);
    if !path.is_file() {
        let holds_something = std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
        if holds_something || folder.is_file() {
            bail!("{} is there and holds no {EXPERIMENT}; choose another folder with -o", folder.display());
        }
        return Ok(());
    }
    let found = read_json(&path)?;
    if found["spec_sha256"].as_str() != Some(sha256) {
        bail!(
            "{} holds runs of another version of this spec; choose another folder with -o, or remove them with --again",
            folder.display()
        );
    }
    let other = found["device"].as_str().unwrap_or("another device");
    if other != device.shown {
        bail!(
            "{} holds runs on {other}, not on {}; choose another folder with -o, or remove them with --again",
            folder.display(),
            device.shown
        );
    }
    Ok(())
}

fn dry_run(planned: &[Planned], device: &Device, places: &Places, args: &RunArgs) -> Result<()> {
    let mut table = Table::new();
    table.force_no_tty();
    let style = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["experiment", "run", "state", "command"]);
    for planned in planned {
        for run in share(&planned.runs, args.shard) {
            let start = starts(planned, run).map(|(name, _)| name);
            let command = programs::command_line(run, device, places, start.as_deref());
            let command = command.map_or_else(|error| format!("skipped: {error}"), |line| line.shown.join(" "));
            let state = match status_of(&report::folder_of(&planned.folder, run), &planned.sha256) {
                _ if args.again => "to do",
                Ok(Some(RunStatus::Done)) => "done",
                _ => "to do",
            };
            table.add_row([planned.source.spec.name.clone(), run.id.clone(), state.to_owned(), command]);
        }
    }
    crate::print(&table.to_string())
}

/// The start file of a run that takes one, and how it is made.
fn starts(planned: &Planned, run: &Run) -> Option<(String, Vec<String>)> {
    (planned.source.spec.start && run.program == Program::Pytorch).then(|| programs::start_file(run))
}

type Failures = Vec<(String, String)>;

fn run_one(
    planned: &Planned,
    device: &Device,
    places: &Places,
    args: &RunArgs,
    stop: &AtomicBool,
) -> Result<(Vec<Cell>, Failures)> {
    let spec = &planned.source.spec;
    if args.again {
        remove(&planned.folder)?;
    }
    let runs_folder = planned.folder.join(RUNS);
    std::fs::create_dir_all(&runs_folder).with_context(|| format!("cannot make {}", runs_folder.display()))?;
    write_experiment(planned, device)?;
    let experiment = Experiment {
        name: &spec.name,
        sha256: &planned.sha256,
        keep: &spec.keep,
        folder: &planned.folder,
        device,
        places,
        stop,
    };
    let mine = share(&planned.runs, args.shard);
    let state = |run: &Run| status_of(&experiment.run_folder(run), &planned.sha256).ok().flatten();
    let mut left: Vec<&Run> = mine.iter().copied().filter(|run| state(run) != Some(RunStatus::Done)).collect();
    let mut failures = Failures::new();
    if left.iter().any(|run| run.program == Program::Pytorch)
        && let Some(reason) = programs::pytorch_missing(places, device.kind)
    {
        let (skipped, others): (Vec<&Run>, Vec<&Run>) =
            left.into_iter().partition(|run| run.program == Program::Pytorch);
        for run in &skipped {
            experiment.skip(run, &reason)?;
        }
        say(&format!("note: {}: {} runs of PyTorch are skipped: {reason}", spec.name, skipped.len()));
        left = others;
    }
    make_starts(planned, &experiment, &mut left, &mut failures)?;
    warm_up(planned, &experiment, &left, device.kind)?;
    let bar = Bar::new(mine.len() as u64, "{prefix} {bar:20} run {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
    bar.prefix(&spec.name);
    bar.begin_at((mine.len() - left.len()) as u64);
    for run in left {
        bar.message(&run.id);
        let start = starts(planned, run).map(|(name, _)| name);
        match experiment.run(run, start.as_deref()) {
            Ok((_, None)) => {}
            Ok((_, Some(error))) => failures.push((format!("{}/{}", spec.name, run.id), error)),
            Err(error) => {
                bar.clear();
                return Err(error);
            }
        }
        bar.advance(1);
    }
    bar.clear();
    if planned.runs.iter().all(|run| state(run) == Some(RunStatus::Done)) {
        // They are large, and their seeds make them again.
        remove(&planned.folder.join("start"))?;
    }
    let cells =
        report::cells(&spec.name, !spec.arms.is_empty(), &planned.runs, |run| experiment.run_folder(run), state)?;
    Ok((cells, failures))
}

/// Writes `experiment.json`, if the experiment is new.
fn write_experiment(planned: &Planned, device: &Device) -> Result<()> {
    let path = planned.folder.join(EXPERIMENT);
    if path.is_file() {
        return Ok(());
    }
    let spec = &planned.source.spec;
    let record = ExperimentRecord {
        schema_version: SCHEMA_VERSION,
        name: &spec.name,
        question: &spec.question,
        spec,
        spec_sha256: &planned.sha256,
        device: &device.shown,
        command: ["experiments", "run", &spec.name, "--device", &device.shown].map(str::to_owned).into(),
        code_version: env!("CARGO_PKG_VERSION"),
        provenance: provenance(),
        started_at: now(),
        runs: &planned.runs,
    };
    write_json(&path, &record)
}

/// Writes the start files of the runs that are left; runs whose file cannot be written fail.
fn make_starts(
    planned: &Planned,
    experiment: &Experiment<'_>,
    left: &mut Vec<&Run>,
    failures: &mut Failures,
) -> Result<()> {
    let wanted: BTreeMap<String, Vec<String>> = left.iter().filter_map(|run| starts(planned, run)).collect();
    for (name, arguments) in wanted {
        let Some(error) = experiment.make_start(&name, &arguments)? else { continue };
        failures.push((format!("{}/{name}", planned.source.spec.name), error));
        left.retain(|run| starts(planned, run).is_none_or(|(other, _)| other != name));
    }
    Ok(())
}

/// Runs each cell that has runs left, as often as the spec says, and keeps nothing.
fn warm_up(planned: &Planned, experiment: &Experiment<'_>, left: &[&Run], kind: DeviceKind) -> Result<()> {
    let times = planned.source.spec.warm_up_on(kind);
    for _ in 0..times {
        let mut seen = BTreeSet::new();
        for run in left.iter().filter(|run| seen.insert(run.cell)) {
            let start = starts(planned, run).map(|(name, _)| name);
            experiment.warm_up(run, start.as_deref())?;
        }
    }
    Ok(())
}
