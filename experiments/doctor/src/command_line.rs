//! The command line of `vramlab`, for those who come with a snapshot of PyTorch's allocator and a question.

use crate::{advise, capacity, convert, explain, python, replay, report};
use anyhow::Result;
use clap::{Parser, Subcommand};
use std::ffi::OsString;

/// Why is more memory reserved than used, which lines do it, and which setting mends it?
///
/// Reads snapshots that `torch.cuda.memory._dump_snapshot` wrote.
#[derive(Debug, Parser)]
#[command(name = "vramlab", version, after_help = python::HELP)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Question,
}

#[derive(Debug, Subcommand)]
enum Question {
    /// Says which setting of PyTorch's allocator mends a history, and what it would reserve under it
    Advise(advise::AdviseArgs),
    /// Says who holds memory at the peak, where reserved memory went, and why
    Explain(explain::ExplainArgs),
    /// Replays recorded histories under each allocator
    Replay(replay::ReplayArgs),
    /// Finds the smallest memory in which a recorded history still runs under each allocator
    Capacity(capacity::CapacityArgs),
    /// Writes a recorded history in another tool's format
    Convert(convert::ConvertArgs),
    /// Makes one offline page of recorded histories and runs: block maps, ledgers, settings compared
    Report(report::ReportArgs),
    /// A command of the analysis package.
    #[command(external_subcommand)]
    InPython(Vec<OsString>),
}

impl Arguments {
    /// Whether a command of the analysis package was asked for, which hears signals itself.
    pub(crate) fn is_in_python(&self) -> bool {
        matches!(self.command, Question::InPython(_))
    }
}

/// Answers.
pub(crate) fn run(arguments: Arguments) -> Result<()> {
    match arguments.command {
        Question::Advise(args) => advise::advise(&args),
        Question::Explain(args) => explain::explain(&args),
        Question::Replay(args) => replay::replay(&args),
        Question::Capacity(args) => capacity::capacity(&args),
        Question::Convert(args) => convert::convert(&args),
        Question::Report(args) => report::report(&args),
        Question::InPython(arguments) => python::run(&arguments),
    }
}
