//! The command line of `vramlab`, for users who come with a snapshot of PyTorch's allocator and a question.

use crate::{advise, capacity, convert, diff, explain, nsight, oom, plan, python, replay, report, run, tried};
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;
use terminal::exit;

/// Why is more memory reserved than used, which lines do it, and which setting mends it?
///
/// Reads snapshots that `torch.cuda.memory._dump_snapshot` wrote.
#[derive(Debug, Parser)]
#[command(name = "vramlab", version, after_help = python::HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Question,
}

#[derive(Debug, Subcommand)]
enum Question {
    /// Runs a program and records what PyTorch's allocator did in it, under PyTorch's own or another allocator
    ///
    /// The program needs no change, and its output, signals and exit code are untouched. Each process that uses CUDA leaves a
    /// snapshot when it ends and when memory runs out; SIGUSR1 asks for one in between.
    ///
    /// The exit code, or the signal, is the program's, whatever becomes of the records: what cannot be written is said in a line.
    /// A program that does not end is killed, with all that it has started, by a second SIGTERM or SIGINT (key presses do not
    /// count), and 30 s after the first SIGTERM. Then it is said what still ran, and the exit is that of the signal.
    Run(run::RunArgs),
    /// Runs a program under its own settings, under those that are advised and under `remap`, and compares
    Try(tried::TryArgs),
    /// Says which setting of PyTorch's allocator mends a history, and what it would reserve under it
    ///
    /// Memory is what replays of the history reserve. Time in driver calls is that of a simulated H200.
    Advise(advise::AdviseArgs),
    /// Says who holds memory at the peak, where reserved memory went, and why
    Explain(explain::ExplainArgs),
    /// Says which lines hold more and which less in a second snapshot, or at a second moment
    Diff(diff::DiffArgs),
    /// Replays recorded histories under each allocator
    Replay(replay::ReplayArgs),
    /// Places the blocks of a recorded history so that it needs little memory, for the allocator `plan`
    Plan(plan::PlanArgs),
    /// Finds the smallest memory in which a recorded history still runs under each allocator
    Capacity(capacity::CapacityArgs),
    /// Writes a recorded history in another tool's format
    Convert(convert::ConvertArgs),
    /// Makes one offline page of recorded histories and runs: block maps, ledgers, settings compared
    Report(report::ReportArgs),
    /// Explain an out-of-memory error from its text alone
    Oom(oom::OomArgs),
    /// Report which CUDA calls waited for the GPU, and behind which work, from a capture of Nsight Systems
    Nsight(nsight::NsightArgs),
    /// Answers `run` and `try`, which start it in a process of its own
    #[command(hide = true)]
    Answer(run::AnswerArgs),
    /// Prints what a shell needs to complete command lines
    Completions(terminal::Completions),
    /// A command of the analysis package.
    #[command(external_subcommand)]
    InPython(Vec<OsString>),
}

/// The grammar of the command line, for programs that compose one.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program with these arguments (the first is its name). `--help`, `--version` and arguments that cannot be parsed
/// end the process.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    terminal::begin();
    run::set_command_line(&arguments);
    let Arguments { command } = terminal::parse(arguments);
    // Commands that run another program pass signals on to it.
    if !matches!(command, Question::InPython(_) | Question::Run(_) | Question::Try(_)) {
        terminal::signals::end_at_once();
    }
    let answered = match command {
        Question::Run(args) => run::run(&args),
        Question::Try(args) => tried::try_out(&args),
        Question::Advise(args) => match advise::advise(&args) {
            Ok(false) if args.exit_code => return exit::UNMENDED.into(),
            answered => answered.map(drop),
        },
        Question::Explain(args) => explain::explain(&args),
        Question::Diff(args) => diff::diff(&args),
        Question::Replay(args) => replay::replay(&args),
        Question::Plan(args) => plan::plan(&args),
        Question::Capacity(args) => capacity::capacity(&args),
        Question::Convert(args) => convert::convert(&args),
        Question::Report(args) => report::report(&args),
        Question::Oom(args) => oom::oom(&args),
        Question::Nsight(args) => nsight::nsight(&args),
        Question::Answer(args) => run::answer(&args),
        Question::Completions(args) => terminal::completions(&args, self::command()),
        Question::InPython(arguments) => python::run(&arguments),
    };
    exit::end(answered).into()
}
