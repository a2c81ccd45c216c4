//! `vramlab try`: runs a program several times under different allocators and compares the runs.
//!
//! A program that uses PyTorch runs under its current settings, under the advised ones, and under an allocator ([`torch`]). Any other
//! program that uses CUDA runs unchanged, and with its memory served in three ways at the driver's boundary ([`cuda`]).

mod cuda;
mod output;
mod torch;

use crate::run::{AtDriver, Folder, Launch, Output, Recorded, Runner, report_problem};
use anyhow::{Result, bail};
use clap::Args;
use output::Copied;
use terminal::{RuntimeFailure, arguments, around, say};
use vramlab::Selection;

#[derive(Debug, Args)]
pub(crate) struct TryArgs {
    /// Allocator of the last runs; may be repeated [default: remap for PyTorch, caching for other CUDA programs]
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocator())]
    alloc: Vec<Selection>,
    /// Rounds of runs for a program that does not use PyTorch. The order of the runs alternates between rounds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON object on standard output; what the program prints goes to standard error
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    recorded: Recorded,
}

impl TryArgs {
    /// The allocators of the last runs.
    fn allocators(&self, default: &str) -> Result<Vec<Selection>> {
        if !self.alloc.is_empty() {
            return Ok(self.alloc.clone());
        }
        Ok(vec![Selection::of(vramlab::backends::find(default)?)])
    }
}

/// Runs the program under each setting and compares the runs.
///
/// # Errors
/// The program cannot be started, or uses no CUDA memory that can be observed.
pub(crate) fn try_out(args: &TryArgs) -> Result<()> {
    let recorded = &args.recorded;
    let folder = Folder::make(recorded.output.as_deref())?;
    let mut runner = Runner::new(around::Exit::Own)?;
    let at_driver = AtDriver::find();
    let unwatched = at_driver.as_ref().err().cloned();
    if let Ok(at_driver) = at_driver {
        runner.watch_driver(at_driver);
    }
    let launch = Launch {
        command: &recorded.command,
        alloc: None,
        limit: recorded.limit,
        every: None,
        frames: recorded.frames(),
        frames_from: recorded.frames_from,
        events: recorded.events,
        steps: true,
        conf: None,
        output: if args.json { Output::Stderr } else { Output::Same },
    };
    say("try      current settings");
    let copied = Copied::new(args.json)?;
    let shown = launch.output;
    let first = Launch { output: Output::Pipe(copied.writer()), ..launch };
    let first = torch::run_once(&runner, &first, &folder, "as it is").inspect_err(|_| folder.discard());
    let copied = copied.finish();
    let (as_it_is, started) = first?;
    if let Some(snapshot) = torch::snapshot(&started, &as_it_is.folder) {
        let launch = Launch { output: shown, ..launch };
        return torch::compare(args, &runner, &launch, &folder, as_it_is, &snapshot);
    }
    match &started.calls {
        Ok(calls) if !calls.is_empty() => cuda::compare(args, &mut runner, &launch, &folder, copied),
        calls => {
            let why = unwatched.or_else(|| calls.as_ref().err().cloned());
            let why = why.unwrap_or_else(|| "it made no memory call of CUDA's driver".to_owned());
            bail!(RuntimeFailure::new(format_args!(
                "no PyTorch process loaded the recorder (python -I, -E and -S switch it off); \
                 other CUDA programs are observed at the driver, but {why}. There is nothing to compare"
            )))
        }
    }
}

/// Writes the record of one run into its folder.
fn finish(folder: &Folder, record: &impl serde::Serialize) {
    if let Err(error) = folder.finish(record) {
        report_problem(format_args!("cannot write the record of this run: {error:#}"));
    }
}
