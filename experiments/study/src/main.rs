//! Runs the trainer under several allocators and compares what it recorded; measures allocators and device profiles.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod calibrate;
mod compare;
mod fidelity;
mod fit;
mod packed;
mod profile;
mod program;
mod repository;
mod study;
mod table;
mod truth;

use anyhow::Result;
use clap::{Parser, Subcommand};
use fit::Fit;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use table::{percent, table};
use terminal::{Cell, Column, Page, exit};
use vramlab::DeviceName;
use vramlab::device::sim::MemoryCost;
use vramlab::output::{self, Existing};

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
    /// Compares what `vramlab advise` says that programs would reserve with what PyTorch really did
    AdviseTruth(truth::TruthArgs),
    /// Is the trainer; `compare` and `run` start it in a process of its own for each run
    #[command(hide = true)]
    Trainer(Other),
    /// Is the program `vramlab`; `run` starts it in a process of its own for each run
    #[command(hide = true)]
    Vramlab(Other),
}

/// The command line of another program.
#[derive(Debug, clap::Args)]
struct Other {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl Other {
    /// Its words, with the program's name before them.
    fn of(self, program: &str) -> Vec<OsString> {
        std::iter::once(OsString::from(program)).chain(self.arguments).collect()
    }
}

fn main() -> ExitCode {
    terminal::begin();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    if let Some(line) = for_vramlab(&arguments) {
        terminal::fail(line);
        return exit::BAD_INPUT.into();
    }
    let cli: Cli = terminal::parse(arguments);
    if matches!(cli.command, Command::Pack(_) | Command::Unpack(_)) {
        terminal::signals::end_at_once();
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
                found.measurements.page(&out).print()
            }),
        Command::FitKernels { timings, profile, l2_bytes, out } => fit_kernels(&timings, profile, l2_bytes, &out),
        Command::FitProgram(args) => program::fit_program(&args),
        Command::AdviseTruth(args) => truth::truth(&args),
        Command::Trainer(other) => return trainer::cli::main(other.of("trainer")),
        Command::Vramlab(other) => return doctor::main(other.of("vramlab")),
    };
    exit::end(result).into()
}

/// What to type instead, where a command of `vramlab` was typed.
fn for_vramlab(arguments: &[OsString]) -> Option<String> {
    let name = arguments.get(1)?.to_str()?;
    doctor::command().find_subcommand(name)?;
    let words: Vec<String> = arguments[1..].iter().map(|word| terminal::quoted(&word.to_string_lossy())).collect();
    Some(format!("{name} is a command of vramlab: {}", terminal::command("vramlab", &words.join(" "))))
}

/// Refuses names of files before the minutes that measuring takes.
fn writable(out: &Path, measurements: Option<&Path>) -> Result<()> {
    Ok(std::iter::once(out).chain(measurements).try_for_each(|path| output::check(path, Existing::Replace))?)
}

/// The grammar of this program's command line.
fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

fn fit_kernels(timings: &Path, base: Option<PathBuf>, l2_bytes: Option<u64>, out: &Path) -> Result<()> {
    let mut profile = profile::read(base.as_deref())?;
    profile.l2_bytes = l2_bytes.or(profile.l2_bytes);
    let fits = fit::fit_kernels(&mut profile, timings)?;
    let of = |value: f64| Cell::from(value.to_string());
    let cold = |fit: &Fit, of: fn(&MemoryCost) -> f64| {
        Cell::or_dash(fit.cost.from_memory.as_ref().map(|cold| of(cold).to_string()))
    };
    let table = table(
        &fits,
        &[
            (Column::left("kernel"), &|fit| Cell::from(&fit.kernel)),
            (Column::right("timings").priority(3), &|fit| Cell::from(fit.timings.to_string())),
            (Column::right("fixed ns"), &|fit| of(fit.cost.fixed_ns)),
            (Column::right("iteration ns"), &|fit| of(fit.cost.iteration_ns)),
            (Column::right("blocks per wave").priority(2), &|fit| Cell::from(fit.cost.blocks_per_wave.to_string())),
            (Column::right("bytes per ns"), &|fit| of(fit.cost.bytes_per_ns)),
            (Column::right("worst miss"), &|fit| Cell::from(percent(fit.worst, 0))),
            (Column::right("from memory: fixed ns").priority(6), &|fit| cold(fit, |cold| cold.fixed_ns)),
            (Column::right("iteration ns").priority(5), &|fit| cold(fit, |cold| cold.iteration_ns)),
            (Column::right("bytes per ns").priority(4), &|fit| cold(fit, |cold| cold.bytes_per_ns)),
            (Column::right("worst miss").priority(1), &|fit| {
                Cell::or_dash(fit.worst_cold.map(|worst| percent(worst, 0)))
            }),
        ],
    );
    let off = fits.iter().map(|fit| fit.worst.max(fit.worst_cold.unwrap_or(0.0))).fold(0.0, f64::max);
    profile::write(&profile, out)?;
    let mut page = Page::stdout();
    page.table(&table);
    let found = format!(
        "The costs of {} kernels went to {}; the worst misses a timing by {}.",
        fits.len(),
        out.display(),
        percent(off, 0)
    );
    let next = format!("fidelity --profile {}", terminal::quoted(&out.to_string_lossy()));
    page.end(found, &terminal::command("experiments", &next));
    page.print()
}
