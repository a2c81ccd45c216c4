//! `vramlab run`: a program runs as it would without, and what its allocator did is recorded, under its own or another one.

mod answer;
mod calls;
mod device;
mod driver;
mod folder;
mod host;
mod launch;
mod processes;
mod secrets;
mod summary;
mod symbols;
mod unversioned;

use anyhow::{Result, anyhow};
pub(crate) use calls::CudaProcess;
use clap::Args;
use device::Sampler;
pub(crate) use driver::{AtDriver, Free};
use driver::{Pool, Stacks};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use terminal::around::{self, Around, Exit, Kill, Outcome, Signalled};
use terminal::{arguments, say};
use vramlab::{Bytes, Selection};

pub(crate) use answer::{AnswerArgs, advice_for, answer, replay, set_command_line};
pub(crate) use folder::Folder;
use host::HostSampler;
use launch::Python;
pub(crate) use launch::{Frames, Launch, Output};
pub(crate) use processes::Process;
use processes::read_records;
pub(crate) use summary::missing_allocator;

/// Time for the program to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(30);

/// Options of both `run` and `try`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Recorded {
    /// Limit of the memory that PyTorch reserves on each GPU, such as 24GiB
    #[arg(long, value_name = "BYTES", value_parser = limit)]
    pub(crate) limit: Option<u64>,
    /// Output directory [default: the first of vramlab-run-1, vramlab-run-2, ... that does not exist]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// Which events have the stack of Python. Frees have none: gathering it then can end a program with an error
    #[arg(long, value_name = "WHICH", default_value = "alloc")]
    frames: Frames,
    /// Smallest block whose allocation has a stack, such as 64KiB
    #[arg(long, value_name = "BYTES", value_parser = size)]
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

fn size(text: &str) -> Result<u64, impl std::error::Error + Send + Sync + use<>> {
    text.parse().map(|Bytes(bytes)| bytes)
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| seconds.is_finite() && *seconds > 0.0);
    seconds.ok_or_else(|| "write seconds, such as 60".to_owned())
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Allocator that serves the program [default: its own]. It is put under PyTorch in Python programs that load it, and between the
    /// program and CUDA's driver in all others: it then serves cudaMalloc, cudaMallocPitch, cudaMallocAsync and the frees. The library
    /// for that, libvramlab_inject.so, is next to this program, in ../lib or in the Python package
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocator())]
    alloc: Option<Selection>,
    /// Allocator that serves pinned host memory, such as host-exact [default: the program's own]. In PyTorch it is put under
    /// at::setHostAllocator; in all other programs it serves cudaMallocHost, cudaHostAlloc and cudaFreeHost. vramlab replay --host
    /// compares host-exact, host-pytorch, host-cupy and host-rmm-pool
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = host_allocator)]
    host_alloc: Option<Selection>,
    /// Also take a snapshot every SECONDS seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    every: Option<f64>,
    /// What cudaFree does between the program and CUDA's driver
    #[arg(long, value_name = "HOW", default_value = "ordered")]
    free: Free,
    /// Fill new memory between the program and CUDA's driver with bytes that are NaN: shows programs that rely on zeros
    #[arg(long)]
    poison: bool,
    /// Serve and record at CUDA's driver only, also in PyTorch: for PYTORCH_NO_CUDA_MEMORY_CACHING=1
    #[arg(long)]
    at_driver: bool,
    /// Keep freed memory of these kinds between the program and CUDA's driver: managed, for the next request of the same size, and pinned,
    /// which is --host-alloc host-exact
    #[arg(long, value_name = "KINDS", value_delimiter = ',')]
    pool: Vec<Pool>,
    /// Which memory calls of CUDA's driver have the call stack of the program
    #[arg(long, value_name = "WHICH", default_value = "on")]
    stacks: Stacks,
    /// Do not search for a better setting at the end, which takes seconds
    #[arg(long)]
    no_advise: bool,
    /// Print no summary; the output directory has it
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    recorded: Recorded,
}

/// Reads one allocator of pinned host memory.
fn host_allocator(text: &str) -> Result<Selection, String> {
    let mut all = vramlab::backends::parse_host_list(text).map_err(|error| error.to_string())?;
    let (Some(selection), true) = (all.pop(), all.is_empty()) else {
        return Err("name one allocator, such as host-exact".to_owned());
    };
    selection.check().map_err(|error| error.to_string())?;
    Ok(selection)
}

/// Runs the program, and ends as it ended, whatever becomes of its records.
///
/// # Errors
/// Why it cannot be started.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let recorded = &args.recorded;
    let at_driver = at_driver(args)?;
    let folder = Folder::make(recorded.output.as_deref())?;
    let mut runner = Runner::new(Exit::OfCommand)?;
    runner.at_driver = at_driver;
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
        output: Output::Same,
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

/// How calls are served and recorded at the driver's boundary, if they can be.
fn at_driver(args: &RunArgs) -> Result<Result<AtDriver, String>> {
    if args.host_alloc.is_some() {
        if args.free == Free::Driver {
            return Err(anyhow!("--host-alloc serves nothing with --free driver; use --free ordered or --free waits"));
        }
        if args.pool.contains(&Pool::Pinned) {
            return Err(anyhow!("--pool pinned is --host-alloc host-exact; leave one of them out"));
        }
    }
    let set = |at: AtDriver| AtDriver {
        free: args.free,
        poison: args.poison,
        all: args.at_driver,
        stacks: args.stacks == Stacks::On,
        pool: args.pool.clone(),
        host: args.host_alloc.clone(),
        ..at
    };
    let found = AtDriver::find().map(set);
    let option = [
        (args.at_driver, "--at-driver"),
        (args.poison, "--poison"),
        (args.free != Free::Ordered, "--free"),
        (!args.pool.is_empty(), "--pool"),
        (args.host_alloc.is_some(), "--host-alloc"),
    ];
    let option = option.into_iter().find_map(|(given, name)| given.then_some(name));
    match option {
        Some(option) => driver::needed(found, option).map(Ok),
        None => Ok(found),
    }
}

/// A fault in the records of a program that has ended. It is not an error of the program.
pub(crate) fn report_problem(text: impl std::fmt::Display) {
    say(&format!("vramlab  {text}"));
}

/// How a program was run.
pub(crate) struct Started {
    pub(crate) status: std::process::ExitStatus,
    pub(crate) seconds: f64,
    pub(crate) processes: Vec<Process>,
    pub(crate) device: device::Sampled,
    /// The host's memory; `None` where the system does not report it.
    pub(crate) host: Option<host::HostUse>,
    /// What the driver's boundary saw, or why it saw nothing.
    pub(crate) calls: Result<Vec<CudaProcess>, String>,
    /// Whether it was killed, since it did not end when it was asked to.
    pub(crate) killed: bool,
}

/// Runs programs, one at a time, with the devices sampled. SIGUSR1 goes to the processes that take it for a request, if there
/// are any.
pub(crate) struct Runner {
    around: Around,
    /// How calls are served and recorded at the driver's boundary, or why they are not.
    at_driver: Result<AtDriver, String>,
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
        let at_driver = Err("this command looks at PyTorch only".to_owned());
        Ok(Self { around: Around::listen(exit, PATIENCE, heard)?, at_driver, now })
    }

    /// Serves and records at the driver's boundary from now on.
    pub(crate) fn watch_driver(&mut self, at_driver: AtDriver) {
        self.at_driver = Ok(at_driver);
    }

    /// Sets what a free does at the driver's boundary, if that is watched.
    pub(crate) fn set_free(&mut self, free: Free) {
        if let Ok(at_driver) = &mut self.at_driver {
            at_driver.free = free;
        }
    }

    /// Runs a program to its end without recording anything: its status and its seconds.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn run_unchanged(&self, launch: &Launch<'_>) -> Result<(std::process::ExitStatus, f64)> {
        let mut command = launch.unchanged()?;
        let began = Instant::now();
        let Outcome { status, .. } = self.around.run(&mut command)?;
        Ok((status, began.elapsed().as_secs_f64()))
    }

    /// Runs a program to its end. What cannot be read or written of its records is said, and is no error.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn run(&self, launch: &Launch<'_>, folder: &Folder) -> Result<Started> {
        // An allocator that nothing can put in is an error; a program that only cannot be recorded runs unchanged.
        let python = match &self.at_driver {
            Ok(at) if at.all => Python::LeftOut,
            Err(_) if launch.alloc.is_some() => Python::Needed,
            _ => Python::IfInstalled,
        };
        let mut command = launch.command(folder, python)?;
        let mut unseen = self.at_driver.as_ref().err().cloned();
        let mut _library = None;
        if let Ok(at_driver) = &self.at_driver {
            unseen = launch.command.first().and_then(driver::why_unseen);
            if unseen.is_none() {
                _library = at_driver.prepare(&mut command, launch, folder)?;
            }
        }
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = Some((folder.path.clone(), folder.run.clone()));
        let sampler = Sampler::start();
        let host = HostSampler::start();
        let began = Instant::now();
        let Outcome { status, kill } = self.around.run(&mut command)?;
        let seconds = began.elapsed().as_secs_f64();
        if let Some(kill) = &kill {
            report_kill(kill, &folder.run);
        }
        let device = sampler.stop();
        let host = host.stop();
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
        let calls = match unseen {
            Some(why) => Err(why),
            None => Ok(calls::read(folder)),
        };
        if let Err(error) = device.write(folder, &processes, calls.as_deref().unwrap_or_default()) {
            report_problem(format_args!("what was sampled of the GPUs is not written: {error:#}"));
        }
        Ok(Started { status, seconds, processes, device, host, calls, killed: kill.is_some() })
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
