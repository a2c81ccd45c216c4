//! Runs the trainer under several allocators and compares the records; measures allocators and device profiles: the
//! program `experiments`.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod calibrate;
mod campaign;
mod compare;
mod fidelity;
mod fit;
mod profile;
mod program;
mod repository;
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

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs experiments that specs describe, and goes on where it was
    Run(study::RunArgs),
    /// Says how far experiments are, and who is at work on them
    Status(study::StatusArgs),
    /// Lists the specs that are there, with their questions
    List(study::ListArgs),
    /// Makes one archive of recorded experiments, to be kept and sent
    Pack(study::PackArgs),
    /// Trains under each allocator and prints one table
    Compare(compare::CompareArgs),
    /// Says how far the simulated GPU is from the real one
    Fidelity(fidelity::FidelityArgs),
    /// Measures what an allocator call costs, beside other projects' allocators if wanted
    Bench(bench::BenchArgs),
    /// Measures what driver calls cost on a device and writes a profile for the simulated one
    Calibrate(calibrate::CalibrateArgs),
    /// Fits a profile's kernel costs to timings from `time_kernels`
    FitKernels(fit::FitArgs),
    /// Takes the program's own host time for each driver call from recorded runs into a profile
    FitProgram(program::ProgramArgs),
    /// Compares what `vramlab advise` says that programs would reserve with what PyTorch really did
    AdviseTruth(truth::TruthArgs),
    /// Makes the records that the documents quote, and says how they differ from those that are kept
    Campaign(campaign::CampaignArgs),
    /// Prints what a shell needs to complete command lines
    Completions(terminal::Completions),
    /// Is the trainer; `compare` and `run` start it in a process of its own for each run
    #[command(hide = true)]
    Trainer(OtherProgram),
    /// Is the program `vramlab`; `run` starts it in a process of its own for each run
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
    if matches!(cli.command, Command::Pack(_)) {
        terminal::signals::end_at_once();
    }
    let result = match cli.command {
        Command::Run(args) => study::run(&args),
        Command::Status(args) => study::status(&args),
        Command::List(args) => study::list(&args),
        Command::Pack(args) => study::pack(&args),
        Command::Fidelity(args) => fidelity::fidelity(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Calibrate(args) => calibrate::calibrate(&args),
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
