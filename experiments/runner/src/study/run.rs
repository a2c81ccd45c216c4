//! `experiments run`: makes the runs of specs, and resumes where it stopped.

use super::compared;
use super::execute::{Experiment, Interrupted, Walls};
#[cfg(unix)]
use super::forks::Forks;
use super::lock::{Lock, lock};
use super::neighbours::Neighbours;
use super::plan::{plan_on, share};
use super::programs::{self, Inputs};
use super::record::{EXPERIMENT, Machine, Planned, RunStatus, spec_sha256};
use super::report::{self, Cell};
use super::spec::{self, Source};
use super::work::{WorkReport, check_folder, start_of, work};
use crate::repository;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use terminal::RuntimeFailure;
use terminal::Shard;
use terminal::signals::{self, Signals};
use terminal::{Column, Page, Table, say};
use vramlab::input::{DOCUMENT, read_text};
use vramlab::{CudaDriver, DeviceKind, DeviceName};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Specs: files, or names from experiments/specs (see `experiments list`)
    #[arg(required = true, value_name = "SPEC")]
    specs: Vec<String>,
    /// Directory for the experiments, one subdirectory each; existing runs are kept
    /// [default: runs/experiments-cuda or runs/experiments-sim]
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// cuda, cuda:N, sim or sim:PROFILE.json [default: cuda if there is a GPU, else sim]
    #[arg(long, value_name = "DEVICE", value_parser = programs::device)]
    device: Option<DeviceName>,
    /// Only every N-th run, beginning with the K-th. Shards may work in one directory at the same time; several
    /// directories merge by copying them together
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Number of parallel runs, on the simulated GPU or of specs with `concurrent`; runs that measure real time still
    /// run alone
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// Start no run that would end later, as far as finished runs show; exit code 4 if runs are left
    #[arg(long, value_name = "SECONDS")]
    budget: Option<u64>,
    /// Print the runs and their commands, and do nothing
    #[arg(long, conflicts_with = "json")]
    dry_run: bool,
    /// Remove these experiments' files from the directory, and start again
    #[arg(long, conflicts_with = "shard")]
    again: bool,
    /// Directory of recordings [default: experiments/histories]
    #[arg(long, value_name = "DIR", env = "HISTORIES")]
    histories: Option<PathBuf>,
    /// Directory with MNIST's four files [default: MNIST_DIR, then the user cache, then a download]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Directory of the specs [default: experiments/specs]
    #[arg(long = "specs", value_name = "DIR")]
    specs_dir: Option<PathBuf>,
    /// Print the cells of the matrix with their values as one JSON array
    #[arg(long)]
    json: bool,
}

/// The given device, else a GPU if all specs allow one and it exists, else the simulated one.
pub(crate) fn choose(named: Option<&DeviceName>, specs: &[Source]) -> DeviceName {
    if let Some(device) = named {
        return device.clone();
    }
    let all = |kind| specs.iter().all(|source| source.spec.devices.contains(&kind));
    if all(DeviceKind::Cuda) && CudaDriver::probe().is_ok() { DeviceName::Cuda(0) } else { DeviceName::Sim(None) }
}

/// Exit code if the budget ended before all runs were made.
pub(crate) const BUDGET: u8 = 4;

/// Runs the specs in order.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let began = Instant::now();
    let sources =
        args.specs.iter().map(|text| spec::find(text, args.specs_dir.as_deref())).collect::<Result<Vec<_>>>()?;
    let device = choose(args.device.as_ref(), &sources);
    let inputs = Inputs::new(args.histories.as_deref(), args.data_dir.as_deref())?;
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("runs/experiments-{}", device.kind())));
    let out = std::path::absolute(&out)
        .with_context(|| format!("{} is not a directory that can be created", out.display()))?;
    // Check all specs before the first run: an error in the last should not appear after an hour.
    let planned = sources.into_iter().map(|source| prepare(source, &device, &inputs, &out, args.again));
    let planned = planned.collect::<Result<Vec<Planned>>>()?;
    let mut folders = BTreeSet::new();
    if let Some(twice) = planned.iter().find(|planned| !folders.insert(planned.folder.as_path())) {
        bail!("the name {} is of two specs; name one of them, or rename one", twice.source.spec.name);
    }
    if let Some(turns) = planned.iter().find(|planned| args.shard.is_some() && planned.source.spec.turns.is_some()) {
        bail!("--shard: the runs of {} take turns; leave it out", turns.source.spec.name);
    }
    if args.dry_run {
        return dry_run(&planned, &device, &inputs, args);
    }
    if device.kind() == DeviceKind::Cuda {
        if let Some(timed) = planned.iter().find(|planned| args.jobs > 1 && !planned.source.spec.concurrent) {
            bail!(
                "--jobs on a GPU is for specs with concurrent = true: runs of {} that share a GPU would change each \
                 other's times; leave it out",
                timed.source.spec.name
            );
        }
        // Report this once, instead of in every run.
        CudaDriver::probe().context("--device cuda")?;
    }
    let _locks = lock_all(&planned, args.shard)?;
    // Complete runs are kept, from the first on.
    signals::record_begins();
    let signals = Signals::listen().context("cannot listen for signals")?;
    let machine = Machine::now();
    // Simulated time is not affected.
    if let Some(load) =
        machine.load.filter(|load| device.kind() == DeviceKind::Cuda && *load > f64::from(machine.cores))
    {
        say(&format!("note: the machine is busy (load {load:.1} on {} cores); times will be noisy", machine.cores));
    }
    let neighbours = if device.kind() == DeviceKind::Cuda { Neighbours::new() } else { None };
    if neighbours.as_ref().is_some_and(|others| !others.absent()) {
        say("note: another experiment is at work on this host's GPUs; times may be longer");
    }
    let mut all: Vec<Cell> = Vec::new();
    let (mut failed, mut late) = (Vec::new(), 0);
    for planned in &planned {
        let experiment = Experiment {
            planned,
            device: &device,
            inputs: &inputs,
            shard: args.shard,
            jobs: usize::from(args.jobs),
            deadline: args.budget.and_then(|budget| began.checked_add(Duration::from_secs(budget))),
            walls: Walls::default(),
            signals: &signals,
            neighbours: neighbours.as_ref(),
            #[cfg(unix)]
            forks: Forks::default(),
        };
        let WorkReport { cells, failures, late: more } =
            work(&experiment, args.again).map_err(|error| interrupted(error, planned, &signals))?;
        late += more;
        compared::lines(planned)?.iter().for_each(|line| say(line));
        if !args.json {
            report::table(&planned.source.spec.name, &planned.source.spec.question, &cells).print()?;
        }
        failed.extend(failures);
        all.extend(cells);
    }
    report::warnings(&all).iter().for_each(|warning| say(&format!("note: {warning}")));
    if let Some(count) = neighbours.as_ref().map(Neighbours::met).filter(|count| *count > 0) {
        say(&format!(
            "note: {count} runs began while another experiment was at work on this host's GPUs (machine.alone); their \
             times may be longer"
        ));
    }
    if args.json {
        terminal::print_json(&all)?;
    } else {
        report::closing(&all, &out).print()?;
    }
    match failed.as_slice() {
        [] if late > 0 => {
            let text = format!("the budget left out {late} runs; the same command makes them");
            Err(RuntimeFailure::with_code(BUDGET, text).into())
        }
        [] => Ok(()),
        [(first, error), ..] => {
            let count = failed.len();
            let runs = if count == 1 { "1 run" } else { "runs" };
            let count = if count == 1 { String::new() } else { format!("{count} ") };
            let text = format!("{count}{runs} failed; {first}: {error}; the same command tries again");
            Err(RuntimeFailure::new(text).into())
        }
    }
}

/// Ctrl-C, TERM or HUP as the error that ends the program.
fn interrupted(error: anyhow::Error, planned: &Planned, signals: &Signals) -> anyhow::Error {
    if error.downcast_ref::<Interrupted>().is_none() {
        return error;
    }
    let name = &planned.source.spec.name;
    let code = signals.exit_code();
    RuntimeFailure::with_code(code, format!("interrupted in {name}; what was done is kept, the same command goes on"))
        .into()
}

/// Takes the locks of all experiments before the first run.
fn lock_all(planned: &[Planned], shard: Option<Shard>) -> Result<Vec<Lock>> {
    let mut locks = Vec::new();
    for folder in planned.iter().map(|planned| planned.folder.as_path()) {
        match lock(folder, shard)? {
            Some(lock) => locks.push(lock),
            None => say(&format!(
                "note: {} cannot be locked here; have no other runner of the same runs in it meanwhile",
                folder.display()
            )),
        }
    }
    Ok(locks)
}

/// Checks a spec and its output directory.
fn prepare(source: Source, device: &DeviceName, inputs: &Inputs, out: &Path, again: bool) -> Result<Planned> {
    programs::check(&source, device.kind(), Some(&inputs.histories))?;
    let runs = plan_on(&source, device.kind())?;
    let sha256 = spec_sha256(&source.spec)?;
    let profile_sha256 = match device {
        DeviceName::Sim(Some(path)) => {
            let text = read_text(path, DOCUMENT).with_context(|| format!("cannot read {}", path.display()))?;
            Some(repository::sha256(text.as_bytes()))
        }
        _ => None,
    };
    let planned = Planned { folder: out.join(&source.spec.name), source, runs, sha256, profile_sha256 };
    let folder = &planned.folder;
    if !again {
        check_folder(&planned, device)?;
        planned.runs.iter().try_for_each(|run| planned.status_of(run).map(|_| ()))?;
    } else if folder.exists() && !folder.join(EXPERIMENT).is_file() {
        bail!("{} has no experiment, so --again will not remove it", folder.display());
    }
    Ok(planned)
}

fn dry_run(planned: &[Planned], device: &DeviceName, inputs: &Inputs, args: &RunArgs) -> Result<()> {
    let columns = [Column::left("experiment"), Column::left("run"), Column::left("state"), Column::text("command")];
    let mut table = Table::new(columns);
    for planned in planned {
        for run in share(&planned.runs, args.shard) {
            let start = start_of(&planned.source.spec, run).map(|(name, _)| name);
            let command = programs::command_line(run, device, inputs, start.as_deref(), None);
            let command = command.map_or_else(|error| format!("skipped: {error}"), |line| line.shown.join(" "));
            let completed = !args.again && matches!(planned.status_of(run), Ok(Some(RunStatus::Done)));
            let state = if completed { "done" } else { "to do" };
            table.row([planned.source.spec.name.clone(), run.id.clone(), state.to_owned(), command]);
        }
    }
    let mut page = Page::stdout();
    page.table(&table);
    page.print()
}
