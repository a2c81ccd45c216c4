//! The command line of `vramlab`.

use crate::{advise, capacity, convert, diff, explain, nsight, oom, plan, python, replay, report, run, tried};
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;
use terminal::exit;

/// Record and explain the GPU memory of any CUDA program, and find PyTorch settings that reduce it
///
/// Reads recordings made by `vramlab run` and snapshots written by `torch.cuda.memory._dump_snapshot`.
#[derive(Debug, Parser)]
#[command(name = "vramlab", version, after_help = python::HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// The exit codes of `replay`.
const REPLAY_CODES: &str = "Exit codes: 0 all replays are made, even if an allocator ran out of memory; 1 the device or the output \
                            failed; 2 bad input, such as a recording that cannot be read or whose events contradict each other; \
                            130 interrupted (143 by SIGTERM, 129 by SIGHUP).";

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a CUDA program, also with PyTorch, and record its memory, under its own or another allocator
    ///
    /// The program needs no change; its output, signals and exit code stay the same. Each PyTorch process that uses CUDA writes a
    /// snapshot when it exits and when memory runs out. Send SIGUSR1 to get a snapshot at any other time. Of all other processes the
    /// memory calls to CUDA's driver are recorded.
    ///
    /// The exit code or signal is the program's, even if a recording cannot be written; a line on stderr reports that.
    /// A second SIGTERM or SIGINT (Ctrl-C presses do not count) kills the program and all processes that it started; so does
    /// the end of the 30 s after the first SIGTERM. `run` then lists the killed processes and exits by the signal.
    Run(run::RunArgs),
    /// Run a program several times under different allocators, and compare the runs
    ///
    /// A PyTorch program runs under its current settings, the advised settings and `remap`. Any other CUDA program runs unchanged,
    /// with its calls only timed, and under `caching` with frees that wait and with frees that do not.
    Try(tried::TryArgs),
    /// Find the PyTorch allocator settings that reduce a recorded program's memory
    ///
    /// Memory is measured by replaying the recording under each setting. Driver time is that of a simulated H200.
    Advise(advise::AdviseArgs),
    /// Show which lines hold memory at the peak, and why more is reserved than they need
    Explain(explain::ExplainArgs),
    /// Compare two snapshots, or two moments of one, line by line
    Diff(diff::DiffArgs),
    /// Replay recordings under each allocator
    #[command(after_help = REPLAY_CODES)]
    Replay(replay::ReplayArgs),
    /// Compute an offline placement of a recording's blocks, for the allocator `plan`
    Plan(plan::PlanArgs),
    /// Find the smallest memory in which a recording replays under each allocator
    Capacity(capacity::CapacityArgs),
    /// Convert a recording to another tool's format
    Convert(convert::ConvertArgs),
    /// Write one offline HTML page about recordings and runs: block maps, memory breakdowns, settings
    Report(report::ReportArgs),
    /// Explain an out-of-memory error from its text alone
    Oom(oom::OomArgs),
    /// Report which CUDA calls waited for the GPU, and behind which work, from a capture of Nsight Systems
    Nsight(nsight::NsightArgs),
    /// Analyze recordings for `run` and `try`, which start this command in a separate process
    #[command(hide = true)]
    Answer(run::AnswerArgs),
    /// Print a shell completion script
    Completions(terminal::Completions),
    /// A command of the Python analysis package.
    #[command(external_subcommand)]
    InPython(Vec<OsString>),
}

/// Returns the clap command, for programs that embed it.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program with these arguments; the first is the program's name. `--help`, `--version` and parse errors exit the
/// process.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    terminal::begin();
    run::set_command_line(&arguments);
    let Arguments { command } = terminal::parse(arguments);
    // Commands that run another program forward signals to it.
    if !matches!(command, Command::InPython(_) | Command::Run(_) | Command::Try(_)) {
        terminal::signals::end_at_once();
    }
    let outcome = match command {
        Command::Run(args) => run::run(&args),
        Command::Try(args) => tried::try_out(&args),
        Command::Advise(args) => match advise::advise(&args) {
            Ok(false) if args.exit_code => return exit::NO_SETTING_HELPS.into(),
            outcome => outcome.map(drop),
        },
        Command::Explain(args) => explain::explain(&args),
        Command::Diff(args) => diff::diff(&args),
        Command::Replay(args) => replay::replay(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Capacity(args) => capacity::capacity(&args),
        Command::Convert(args) => convert::convert(&args),
        Command::Report(args) => report::report(&args),
        Command::Oom(args) => oom::oom(&args),
        Command::Nsight(args) => nsight::nsight(&args),
        Command::Answer(args) => run::answer(&args),
        Command::Completions(args) => terminal::completions(&args, self::command()),
        Command::InPython(arguments) => python::run(&arguments),
    };
    exit::end(outcome).into()
}
