//! The program `experiments`: runs the trainer, PyTorch, CUDA programs and replays under several allocators and compares the records;
//! measures allocator calls, and the costs of the simulated GPU.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod calibrate;
mod campaign;
mod child;
mod compare;
mod fidelity;
mod fit;
mod profile;
mod program;
mod register;
mod repository;
mod results;
mod simulate_ranks;
mod study;
mod table;
mod truth;

use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;
use terminal::exit;

#[derive(Debug, Parser)]
#[command(name = "experiments", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The exit codes of `run`.
const RUN_CODES: &str = "Exit codes: 0 all runs are made, 1 a run failed (the others are made), 2 bad input, 4 the budget ended \
                         first, 130 interrupted (143 by SIGTERM, 129 by SIGHUP; what was done is kept).";

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs experiments that specs describe, and resumes where it stopped
    #[command(after_help = RUN_CODES)]
    Run(study::RunArgs),
    /// Prints the progress of experiments, and their active runners
    Status(study::StatusArgs),
    /// Lists the available specs, with their questions
    List(study::ListArgs),
    /// Makes one archive of recorded experiments
    Pack(study::PackArgs),
    /// Unpacks the archives of recorded results and lists them, oldest first
    Results(results::ResultsArgs),
    /// Trains under each allocator and prints one table
    Compare(compare::CompareArgs),
    /// Prints the error of the simulated GPU compared with the real one
    Fidelity(fidelity::FidelityArgs),
    /// Measures the cost of an allocator call, optionally compared with other projects' allocators
    Bench(bench::BenchArgs),
    /// Measures the cost of driver calls on a device and writes a profile for the simulated one
    Calibrate(calibrate::CalibrateArgs),
    /// Measures which kinds of memory NCCL can register, on several GPUs
    Register(register::RegisterArgs),
    /// Predicts the step of more ranks than were measured, by a model
    SimulateRanks(simulate_ranks::SimulateRanksArgs),
    /// Fits a profile's kernel costs to timings from `time_kernels`
    FitKernels(fit::FitArgs),
    /// Fits a profile's host time per driver call to recorded runs
    FitProgram(program::ProgramArgs),
    /// Compares the predictions of `vramlab advise` with PyTorch's measurements
    AdviseTruth(truth::TruthArgs),
    /// Makes the records that the documents quote and compares them with the committed ones
    Campaign(campaign::CampaignArgs),
    /// Prints a shell's completion script
    Completions(terminal::Completions),
    /// The trainer; `compare` and `run` start it in a separate process for each run
    #[command(hide = true)]
    Trainer(OtherProgram),
    /// The program `vramlab`; `run` starts it in a separate process for each run
    #[command(hide = true)]
    Vramlab(OtherProgram),
}

/// The command line of another program.
#[derive(Debug, clap::Args)]
struct OtherProgram {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl OtherProgram {
    /// The words of the command line, the program's name first.
    fn of(self, program: &str) -> Vec<OsString> {
        std::iter::once(OsString::from(program)).chain(self.arguments).collect()
    }
}

/// The program. Its command line begins with the program's name. A program of another crate that contains this one
/// also accepts the words `trainer` and `vramlab`, behind which it behaves as those programs: runs start it so.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    terminal::begin();
    if let Some(line) = for_vramlab(&arguments) {
        terminal::fail(line);
        return exit::BAD_INPUT.into();
    }
    let cli: Cli = terminal::parse(arguments);
    if matches!(cli.command, Command::Pack(_) | Command::Results(_)) {
        terminal::signals::end_at_once();
    }
    let result = match cli.command {
        Command::Run(args) => study::run(&args),
        Command::Status(args) => study::status(&args),
        Command::List(args) => study::list(&args),
        Command::Pack(args) => study::pack(&args),
        Command::Results(args) => results::results(&args),
        Command::Fidelity(args) => fidelity::fidelity(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Calibrate(args) => calibrate::calibrate(&args),
        Command::Register(args) => register::register(&args),
        Command::SimulateRanks(args) => simulate_ranks::simulate_ranks(&args),
        Command::FitKernels(args) => fit::fit_kernels(&args),
        Command::FitProgram(args) => program::fit_program(&args),
        Command::AdviseTruth(args) => truth::truth(&args),
        Command::Campaign(args) => campaign::campaign(&args),
        Command::Completions(args) => terminal::completions(&args, command()),
        Command::Trainer(other) => return trainer::cli::main(other.of("trainer")),
        Command::Vramlab(other) => return vramlab_cli::main(other.of("vramlab")),
    };
    exit::end(result).into()
}

/// The command to type instead, if a command of `vramlab` was typed.
fn for_vramlab(arguments: &[OsString]) -> Option<String> {
    let name = arguments.get(1)?.to_str()?;
    if command().find_subcommand(name).is_some() {
        return None;
    }
    vramlab_cli::command().find_subcommand(name)?;
    let words: Vec<String> = arguments[1..].iter().map(|word| terminal::quoted(&word.to_string_lossy())).collect();
    Some(format!("{name} is a command of vramlab: {}", terminal::command("vramlab", &words.join(" "))))
}

/// The grammar of this program's command line.
fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}
