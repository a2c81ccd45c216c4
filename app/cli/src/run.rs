//! `vramlab run`: a program runs as it would without, and what its allocator did is recorded, under PyTorch's own or another one.

mod answer;
mod device;
mod folder;
mod launch;
mod processes;
mod secrets;
mod summary;

use anyhow::Result;
use clap::Args;
use device::Sampler;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use terminal::around::{self, Around, Exit, Kill, Outcome, Signalled};
use terminal::{arguments, say};
use vramlab::Selection;

pub(crate) use answer::{AnswerArgs, advice_for, answer, replay, set_command_line};
pub(crate) use folder::Folder;
pub(crate) use launch::{Frames, Launch};
pub(crate) use processes::Process;
use processes::read_records;
pub(crate) use summary::missing_allocator;

/// Time for the program to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(30);

/// What `run` and `try` are told alike.
#[derive(Clone, Debug, Args)]
pub(crate) struct Recorded {
    /// Most bytes that PyTorch may reserve on each GPU, such as 24GiB
    #[arg(long, value_name = "BYTES", value_parser = limit)]
    pub(crate) limit: Option<u64>,
    /// Folder for what is recorded [default: the first of vramlab-run-1, vramlab-run-2, ... that is not there]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// Which events have the stack of Python. Frees have none: gathering it then can end a program with an error
    #[arg(long, value_name = "WHICH", default_value = "alloc")]
    frames: Frames,
    /// Smallest block whose allocation has a stack, such as 64KiB
    #[arg(long, value_name = "BYTES", value_parser = limit)]
    pub(crate) frames_from: Option<u64>,
    /// No event has one, which is faster: --frames none
    #[arg(long, conflicts_with = "frames")]
    no_frames: bool,
    /// Events that are kept where PyTorch's own history has to record, as without a C++ compiler; it keeps the newest
    #[arg(long, value_name = "N", default_value_t = 500_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) events: u32,
    /// The program and its arguments, behind --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

impl Recorded {
    pub(crate) fn frames(&self) -> Frames {
        if self.no_frames { Frames::None } else { self.frames }
    }
}

fn limit(text: &str) -> Result<u64, String> {
    crate::advise::limit(text).map_err(|error| format!("{error:#}"))
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| seconds.is_finite() && *seconds > 0.0);
    seconds.ok_or_else(|| "write seconds, such as 60".to_owned())
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Allocator that is put under PyTorch [default: PyTorch's own]
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocator())]
    alloc: Option<Selection>,
    /// Take a snapshot so often, too
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    every: Option<f64>,
    /// Do not ask at the end which setting would need less memory, which takes seconds
    #[arg(long)]
    no_advise: bool,
    /// Say nothing at the end; the folder has it all
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    recorded: Recorded,
}

/// Runs the program, and ends as it ended, whatever becomes of its records.
///
/// # Errors
/// What stands in the way of starting it.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let recorded = &args.recorded;
    let folder = Folder::make(recorded.output.as_deref())?;
    let runner = Runner::new(Exit::OfCommand)?;
    let launch = Launch {
        command: &recorded.command,
        alloc: args.alloc.as_ref(),
        limit: recorded.limit,
        every: args.every,
        frames: recorded.frames(),
        frames_from: recorded.frames_from,
        events: recorded.events,
        steps: false,
        conf: None,
        output_to_stderr: false,
    };
    let started = runner.run(&launch, &folder).inspect_err(|_| folder.discard())?;
    // Whoever had it killed does not wait for advice.
    let advise = !args.no_advise && !started.killed;
    let summary = summary::of(&summary::Told { launch: &launch, folder: &folder, started: &started, advise });
    if !args.quiet {
        summary.lines().iter().for_each(|line| say(line));
    }
    match folder.finish(&summary) {
        Ok(None) => {}
        Ok(Some(name)) => {
            report_problem(format_args!("another run has written program.json there; the record of this one is {name}"))
        }
        // The summary has said so.
        Err(_) if !args.quiet && !folder.still_exists() => {}
        Err(error) => report_problem(format_args!("no record is left of this run: {error:#}")),
    }
    around::end_alike(started.status)
}

/// What went wrong with the records of a program that has ended. It is no error of the program's.
pub(crate) fn report_problem(text: impl std::fmt::Display) {
    say(&format!("vramlab  {text}"));
}

/// How a program was run.
pub(crate) struct Started {
    pub(crate) status: std::process::ExitStatus,
    pub(crate) seconds: f64,
    pub(crate) processes: Vec<Process>,
    pub(crate) device: device::Sampled,
    /// Whether it was killed, since it did not end when it was asked to.
    pub(crate) killed: bool,
}

/// Runs programs, one at a time, with the devices sampled. SIGUSR1 goes to the processes that take it for a request, if there
/// are any.
pub(crate) struct Runner {
    around: Around,
    /// Where the program that runs is recorded.
    now: Arc<Mutex<Option<(PathBuf, String)>>>,
}

impl Runner {
    /// Listens to signals from now on.
    pub(crate) fn new(exit: Exit) -> Result<Self> {
        let now: Arc<Mutex<Option<(PathBuf, String)>>> = Arc::default();
        let asked = Arc::clone(&now);
        let heard = move |signal| match &*asked.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((folder, run)) => processes::ask_for_snapshots(signal, folder, run),
            None => Signalled::PassOn,
        };
        Ok(Self { around: Around::listen(exit, PATIENCE, heard)?, now })
    }

    /// Runs a program to its end. What cannot be read or written of its records is said, and is no error.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn run(&self, launch: &Launch<'_>, folder: &Folder) -> Result<Started> {
        let mut command = launch.command(folder)?;
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = Some((folder.path.clone(), folder.run.clone()));
        let sampler = Sampler::start();
        let began = Instant::now();
        let Outcome { status, kill } = self.around.run(&mut command)?;
        let seconds = began.elapsed().as_secs_f64();
        if let Some(kill) = &kill {
            report_kill(kill, &folder.run);
        }
        let device = sampler.stop();
        folder.sweep();
        let records = read_records(folder);
        if let Some(first) = records.unreadable.first() {
            let more = match records.unreadable.len() - 1 {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            report_problem(format_args!(
                "no record of this run in {}, and left alone: {first}{more}",
                folder.shown.display()
            ));
        }
        let processes = records.processes;
        if let Err(error) = device.write(folder, &processes) {
            report_problem(format_args!("what was sampled of the GPUs is not written: {error:#}"));
        }
        Ok(Started { status, seconds, processes, device, killed: kill.is_some() })
    }
}

/// Says what still ran of a program that was killed.
fn report_kill(kill: &Kill, run: &str) {
    let why = match kill.patience {
        Some(patience) => format!("{} s after SIGTERM", patience.as_secs()),
        None => format!("after signal {}, the second that asks for the end", kill.signal),
    };
    let list = |all: &[around::Process]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    // Systems without /proc do not list them.
    let ran =
        if kill.processes.is_empty() { String::new() } else { format!("; still running: {}", list(&kill.processes)) };
    report_problem(format_args!("the program was killed {why}{ran}"));
    if !kill.ended {
        report_problem("the system has not ended it yet: it waits in the kernel, perhaps for a GPU");
    }
    let left = processes::list_running(run);
    if !left.is_empty() {
        report_problem(format_args!("left running, since its parent is gone: {}", list(&left)));
    }
}
