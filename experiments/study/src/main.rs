//! The programs `experiments` (runs the trainer under several allocators, compares what it recorded, measures device profiles)
//! and `vramlab` (answers questions about a recorded history of PyTorch's allocator).

mod advise;
mod bench;
mod calibrate;
mod capacity;
mod command_line;
mod compare;
mod convert;
mod explain;
mod fidelity;
mod fit;
mod history;
mod packed;
mod plan;
mod profile;
mod program;
mod python;
mod reading;
mod replay;
mod report;
mod study;
mod truth;

use anyhow::Result;
use clap::{Parser, Subcommand};
use serde::Serialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use trainer::terminal::{self, Column, Page, Table};
use vramlab::DeviceName;
use vramlab::device::sim::MemoryCost;
use vramlab::output::{self, Existing, OutputError};

/// Exit code for bad input, as the trainer's.
const BAD_INPUT: u8 = 2;
const FAILED: u8 = 1;

#[derive(Debug, Parser)]
#[command(name = "experiments", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs experiments that specs describe, and goes on where it was
    Run(study::RunArgs),
    /// Says how far experiments are, and who is at work on them
    Status(study::StatusArgs),
    /// Lists the specs that are there, with their questions
    List(study::ListArgs),
    /// Makes a few tables of a recorded experiment, to be kept, sent and read anywhere
    Pack(packed::PackArgs),
    /// Makes the folder of a packed experiment again
    Unpack(packed::UnpackArgs),
    /// Trains under each allocator and prints one table
    Compare(compare::CompareArgs),
    /// Says how far the simulated GPU is from the real one
    Fidelity(fidelity::FidelityArgs),
    /// Measures what an allocator call costs, beside other projects' allocators if wanted
    Bench(bench::BenchArgs),
    /// Measures what driver calls cost on a device and writes a profile for the simulated one
    Calibrate {
        /// cuda, cuda:N, or sim or sim:PROFILE.json to see that calibration gives back the profile it runs on
        #[arg(long, value_name = "DEVICE", default_value = "cuda")]
        device: DeviceName,
        /// Profile whose kernel costs are kept [default: the built-in H200]
        #[arg(long, value_name = "FILE")]
        profile: Option<PathBuf>,
        /// Machine and date, for the profile
        #[arg(long, value_name = "TEXT")]
        source: String,
        /// Where the new profile goes
        #[arg(short, long, value_name = "FILE")]
        out: PathBuf,
        /// Where every call's percentiles and the kernels' rates go, as JSON
        #[arg(short, long, value_name = "FILE")]
        measurements: Option<PathBuf>,
    },
    /// Fits a profile's kernel costs to timings from `time_kernels`
    FitKernels {
        /// Output of `cargo run --release -p kernels --example time_kernels` on a GPU
        timings: PathBuf,
        /// Profile whose other costs are kept [default: the built-in H200]
        #[arg(long, value_name = "FILE")]
        profile: Option<PathBuf>,
        /// What the L2 cache holds, as the profile's l2_bytes [default: as in the profile]
        #[arg(long, value_name = "BYTES")]
        l2_bytes: Option<u64>,
        /// Where the new profile goes
        #[arg(short, long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Takes the program's own host time for each driver call from recorded runs into a profile
    FitProgram(program::ProgramArgs),
    /// Writes a recorded history in another tool's format
    Convert(convert::ConvertArgs),
    /// Replays recorded histories under each allocator
    Replay(replay::ReplayArgs),
    /// Places the blocks of a recorded history so that it needs little memory, for the allocator `plan`
    Plan(plan::PlanArgs),
    /// Finds the smallest memory in which a recorded history still runs under each allocator
    Capacity(capacity::CapacityArgs),
    /// Makes one offline page of recorded histories and runs: block maps, ledgers, settings compared
    Report(report::ReportArgs),
    /// Says who holds memory at the peak of a recorded history, where reserved memory went, and why
    Explain(explain::ExplainArgs),
    /// Compares what `vramlab advise` says that programs would reserve with what PyTorch really did
    AdviseTruth(truth::TruthArgs),
    /// Is the trainer; `compare` and `run` start it in a process of its own for each run
    #[command(hide = true)]
    Trainer {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

/// The program `experiments`, from its command line to its exit code.
#[must_use]
pub fn experiments() -> ExitCode {
    started("experiments");
    let cli: Cli = terminal::parse(std::env::args_os().collect());
    if matches!(
        cli.command,
        Command::Convert(_)
            | Command::Replay(_)
            | Command::Plan(_)
            | Command::Capacity(_)
            | Command::Report(_)
            | Command::Explain(_)
            | Command::Pack(_)
            | Command::Unpack(_)
    ) {
        end_with_signals();
    }
    let result = match cli.command {
        Command::Run(args) => study::run(&args),
        Command::Status(args) => study::status(&args),
        Command::List(args) => study::list(&args),
        Command::Pack(args) => packed::pack(&args),
        Command::Unpack(args) => packed::unpack(&args),
        Command::Fidelity(args) => fidelity::fidelity(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Calibrate { device, profile, source, out, measurements } => writable(&out, measurements.as_deref())
            .and_then(|()| profile::read(profile.as_deref()))
            .and_then(|base| calibrate::calibrate(&device, base, &source))
            .and_then(|found| {
                profile::write(&found.profile, &out)?;
                measurements.map_or(Ok(()), |path| found.measurements.write(&path))?;
                print(found.measurements.page(&out))
            }),
        Command::FitKernels { timings, profile, l2_bytes, out } => fit_kernels(&timings, profile, l2_bytes, &out),
        Command::FitProgram(args) => program::fit_program(&args),
        Command::Convert(args) => convert::convert(&args),
        Command::Replay(args) => replay::replay(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Capacity(args) => capacity::capacity(&args),
        Command::Report(args) => report::report(&args),
        Command::Explain(args) => explain::explain(&args),
        Command::AdviseTruth(args) => truth::truth(&args),
        Command::Trainer { arguments } => {
            let program = std::iter::once(OsString::from("trainer"));
            std::process::exit(trainer::cli::main(program.chain(arguments).collect()));
        }
    };
    ended(result)
}

/// The program `vramlab`, from its command line to its exit code.
#[must_use]
pub fn vramlab() -> ExitCode {
    started("vramlab");
    let arguments: command_line::Arguments = terminal::parse(std::env::args_os().collect());
    if !arguments.is_in_python() {
        end_with_signals();
    }
    ended(command_line::run(arguments))
}

/// Has signals end the program with no unfinished file left behind.
fn end_with_signals() {
    // Where the system lets nobody listen, a signal ends the process as it would anyway.
    let _ = trainer::signals::end_at_once();
}

/// The program that runs.
static PROGRAM: OnceLock<&str> = OnceLock::new();

/// What both programs do first.
fn started(program: &'static str) {
    PROGRAM.get_or_init(|| program);
    terminal::report_panics();
    // Where the system lets nobody listen, such a limit ends the process, as it would anyway.
    let _ = trainer::signals::outlive_file_limits();
}

/// Says what went wrong, if something did.
fn ended(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            terminal::fail(format_args!("{error:#}"));
            ExitCode::from(code(&error))
        }
    }
}

/// The exit code for an error: bad input, unless it says that something failed on the way.
fn code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<OutputError>() {
        Some(error) if !error.problem.is_refusal() => FAILED,
        _ => error.downcast_ref::<compare::ArmFailed>().map_or(BAD_INPUT, |failed| failed.code),
    }
}

/// Refuses names of files before the minutes that measuring takes.
fn writable(out: &Path, measurements: Option<&Path>) -> Result<()> {
    Ok(std::iter::once(out).chain(measurements).try_for_each(|path| output::check(path, Existing::Replace))?)
}

/// The grammar of this program's command line.
fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// A command line of the program that runs, to go on with.
fn next_command(arguments: &str) -> String {
    terminal::command(PROGRAM.get().copied().unwrap_or("experiments"), arguments)
}

/// Writes a page to stdout.
fn print(page: Page) -> Result<()> {
    page.print().map_err(|error| unprinted(&error))
}

/// Writes one JSON document to stdout.
fn print_json<T: Serialize>(value: &T) -> Result<()> {
    terminal::print_json(&serde_json::to_string_pretty(value)?).map_err(|error| unprinted(&error))
}

/// A full disk behind stdout is no fault of the input.
fn unprinted(error: &impl std::fmt::Display) -> anyhow::Error {
    compare::ArmFailed::at_run_time(&format!("cannot write to stdout: {error}")).into()
}

fn fit_kernels(timings: &Path, base: Option<PathBuf>, l2_bytes: Option<u64>, out: &Path) -> Result<()> {
    let mut profile = profile::read(base.as_deref())?;
    profile.l2_bytes = l2_bytes.or(profile.l2_bytes);
    let fits = fit::fit_kernels(&mut profile, timings)?;
    let mut table = Table::new([
        Column::left("kernel"),
        Column::right("timings").priority(3),
        Column::right("fixed ns"),
        Column::right("iteration ns"),
        Column::right("blocks per wave").priority(2),
        Column::right("bytes per ns"),
        Column::right("worst miss"),
        Column::right("from memory: fixed ns").priority(6),
        Column::right("iteration ns").priority(5),
        Column::right("bytes per ns").priority(4),
        Column::right("worst miss").priority(1),
    ]);
    let (mut count, mut off) = (0, 0.0_f64);
    for fit in fits {
        let cold = |of: fn(&MemoryCost) -> f64| {
            fit.cost.from_memory.as_ref().map_or_else(|| "-".to_owned(), |cold| of(cold).to_string())
        };
        count += 1;
        off = off.max(fit.worst).max(fit.worst_cold.unwrap_or(0.0));
        table.row([
            fit.kernel.clone(),
            fit.timings.to_string(),
            fit.cost.fixed_ns.to_string(),
            fit.cost.iteration_ns.to_string(),
            fit.cost.blocks_per_wave.to_string(),
            fit.cost.bytes_per_ns.to_string(),
            format!("{:.0} %", 100.0 * fit.worst),
            cold(|cold| cold.fixed_ns),
            cold(|cold| cold.iteration_ns),
            cold(|cold| cold.bytes_per_ns),
            fit.worst_cold.map_or_else(|| "-".to_owned(), |worst| format!("{:.0} %", 100.0 * worst)),
        ]);
    }
    profile::write(&profile, out)?;
    let mut page = Page::stdout();
    page.table(&table);
    let found = format!(
        "The costs of {count} kernels went to {}; the worst misses a timing by {:.0} %.",
        out.display(),
        100.0 * off
    );
    let next = format!("fidelity --profile {}", terminal::quoted(&out.to_string_lossy()));
    page.end(found, &terminal::command("experiments", &next));
    print(page)
}
