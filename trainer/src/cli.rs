//! The command line.

use crate::observer::{Observer, Silent};
use crate::progress::Terminal;
use crate::ranks::{self, Membership, Part};
use crate::settings::BEGINNING;
use crate::{Outcome, Result, Settings, TrainError, allocators, check, doctor, exit, report, start, train};
use clap::{Arg, Args, Parser, Subcommand};
use serde::Serialize;
use serde_json::json;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use terminal::signals::Signals;
use terminal::{Completions, Page, completions, fail, parse, print_json, print_json_text, report_panics, say};
use vramlab::Bytes;
use vramlab::backends;

const AFTER_HELP: &str = "\
Examples:
  trainer --alloc caching                       train on a GPU if there is one, else on the simulated one
  trainer --alloc naive --log-driver-calls      watch each tensor go to the driver
  trainer --alloc stream-ordered:release_threshold=0 --sync step
  trainer --gpus 2 --device sim                 two simulated GPUs with one virtual time, a process for each
  nsys profile --trace=cuda,nvtx trainer --alloc caching
  trainer start -o start.safetensors            the weights and batches with which a run begins, for other programs
  trainer allocators                            the allocators
  trainer allocators caching                    its settings and what it can do
  trainer doctor                                what is there on this machine, and what to do about what is not

Exit codes: 0 done, 1 failed while running, 2 bad input, 130 interrupted (the record holds what was done; 143 by
SIGTERM, 129 by SIGHUP).";

const START_HELP: &str = "\
The file holds each layer's initial weights and biases, the order of the training rows in each epoch, and, for iris and
digits, the data. A run with the same options begins with exactly these.

Example:
  trainer start -o start.safetensors --hidden 784 --epochs 2
  python3 experiments/pytorch/baselines/mlp.py --start start.safetensors --lr 0.1";

#[derive(Debug, Parser)]
#[command(name = "trainer", version, about, after_long_help = AFTER_HELP)]
// The last of two equal options counts, so that a script's defaults can be changed at the end of its command.
#[command(args_conflicts_with_subcommands = true, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    train: TrainArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the allocators; with names, print their capabilities and settings
    Allocators {
        /// Allocators to describe in full
        #[arg(value_name = "NAME")]
        names: Vec<String>,
        /// Print one JSON array instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Report the driver, devices, pools, data and profiler of this machine
    Doctor {
        /// Print one JSON object instead of lines
        #[arg(long)]
        json: bool,
        /// Where MNIST's files are
        #[arg(long, value_name = "DIR")]
        data_dir: Option<PathBuf>,
    },
    /// Write initial weights and batches to a file, so that other programs can do the same work
    #[command(args_override_self = true, after_long_help = START_HELP, mut_args(if_it_decides))]
    Start(Box<StartArgs>),
    /// Print a completion script for a shell
    Completions(Completions),
}

#[derive(Debug, Args)]
struct StartArgs {
    /// Output file in the safetensors format; an existing file is replaced
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Print one JSON object on stdout
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// Refuses those options of a run that decide nothing about its beginning, and does not show them.
fn if_it_decides(option: Arg) -> Arg {
    let mut taken = ["output", "json", "help"].iter().chain(&BEGINNING);
    let is_taken = taken.any(|name| option.get_long() == Some(name));
    if is_taken { option } else { option.hide(true).conflicts_with("output") }
}

#[derive(Debug, Args)]
struct TrainArgs {
    #[command(flatten)]
    settings: Settings,
    /// Print the run record, and nothing else, on stdout
    #[arg(long, help_heading = "Record and instruments")]
    json: bool,
}

/// Refuses an allocator whose settings and limit do not go together.
fn check_allocator(settings: &Settings) -> Result<()> {
    let (mut allocator, limit) = (settings.allocator.clone(), settings.memory_limit);
    if let (Some(_), Some(own)) = (limit, allocator.memory_limit()) {
        return Err(TrainError::Input(format!(
            "--memory-limit is given, and --alloc {allocator} has a limit of {} too: leave one of them out",
            Bytes(own)
        )));
    }
    allocator.set_memory_limit(limit);
    allocator.check().map_err(|error| TrainError::Input(format!("--alloc {error}")))
}

/// Prints a value as JSON, or what a page says of it; the exit code.
fn print(json: bool, value: &impl Serialize, show: impl FnOnce(&mut Page)) -> u8 {
    exit::end(if json {
        print_json(value)
    } else {
        let mut page = Page::stdout();
        show(&mut page);
        page.print()
    })
}

/// Lists the allocators.
fn list_allocators(names: &[String], json: bool) -> Result<u8> {
    let selection = names.iter().map(|name| backends::find(name)).collect::<std::result::Result<Vec<_>, _>>();
    let mut selection = selection.map_err(|error| TrainError::Input(error.to_string()))?;
    let show = if selection.is_empty() { allocators::show } else { allocators::show_all };
    if selection.is_empty() {
        selection = backends::all();
    }
    Ok(print(json, &allocators::rows(&selection), |page| show(&selection, page)))
}

/// The grammar of the command line, for programs that compose one.
#[must_use]
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Checks that a run can begin with these options (without the program's name), from the options only.
///
/// # Errors
/// The line that the program would print.
pub fn check(options: &[OsString]) -> std::result::Result<(), String> {
    let program = std::iter::once(OsString::from("trainer"));
    let cli = Cli::try_parse_from(program.chain(options.iter().cloned())).map_err(|error| one_line(&error))?;
    let settings = cli.train.settings;
    check_allocator(&settings).and_then(|()| crate::check::settings(&settings)).map_err(|error| error.to_string())
}

/// Clap's error for a bad command line, in one line.
#[must_use]
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim);
    let first = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    match lines.find_map(|line| line.strip_prefix("tip: ").or_else(|| line.strip_prefix("[possible values: "))) {
        Some(more) if text.contains("[possible values: ") => {
            format!("{first}; write one of {}", more.trim_end_matches(']'))
        }
        Some(tip) => format!("{first}; {tip}"),
        None => first,
    }
}

/// Runs the program with these arguments (the first is its name) and returns the exit code. `--help`, `--version`
/// and arguments that cannot be parsed end the process.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    run(arguments).into()
}

fn run(arguments: Vec<OsString>) -> u8 {
    // A panic is a bug of ours; a person gets one line that says so instead of a backtrace.
    report_panics();
    let started = Instant::now();
    let command = arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let cli: Cli = parse(arguments.clone());
    let terminal = Arc::new(Terminal::new());
    let outcome = match cli.command {
        Some(Command::Doctor { json, data_dir }) => {
            let diagnosis = doctor::examine(data_dir.as_deref());
            Ok(print(json, &diagnosis, |page| diagnosis.show(page)))
        }
        Some(Command::Allocators { names, json }) => list_allocators(&names, json),
        Some(Command::Start(args)) => write_start(&args, &terminal),
        Some(Command::Completions(args)) => Ok(exit::end(completions(&args, self::command()))),
        None => train(&cli.train, (&arguments, command), started, &terminal),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            terminal.clear();
            fail(&error);
            error.exit_code()
        }
    }
}

fn write_start(args: &StartArgs, terminal: &Arc<Terminal>) -> Result<u8> {
    listen()?;
    let observer: Arc<dyn Observer> = Arc::clone(terminal) as _;
    let start = start::run(&args.settings, &args.output, &observer)?;
    terminal.clear();
    if args.json {
        return Ok(exit::end(print_json_text(&json!(start).to_string())));
    }
    say(&format!("start    {} (SHA-256 {})", start.path, start.sha256));
    Ok(exit::OK)
}

fn train(
    args: &TrainArgs,
    (arguments, command): (&[OsString], Vec<String>),
    started: Instant,
    terminal: &Arc<Terminal>,
) -> Result<u8> {
    let settings = &args.settings;
    check_allocator(settings)?;
    let observer: Arc<dyn Observer> = Arc::clone(terminal) as _;
    match Part::of(settings)? {
        Part::Alone => {
            let signals = listen()?;
            let outcome = crate::run(settings, command, started, signals.stop(), &observer)?;
            Ok(show(args, settings, outcome, &signals, terminal))
        }
        Part::Launcher(count) => {
            check::settings(settings)?;
            check::ranks(settings, count)?;
            for chosen in &settings.rank_alloc {
                check_allocator(&Settings { allocator: chosen.allocator.clone(), ..settings.clone() })?;
            }
            ranks::launch(count, settings, arguments, &listen()?)
        }
        Part::Rank(membership) => train_rank(args, &membership, command, started, terminal),
    }
}

/// Trains as one rank. Rank 0 prints the account of the run, the others their errors alone.
fn train_rank(
    args: &TrainArgs,
    membership: &Membership,
    command: Vec<String>,
    started: Instant,
    terminal: &Arc<Terminal>,
) -> Result<u8> {
    check::settings(&args.settings)?;
    check::ranks(&args.settings, membership.size)?;
    let settings = membership.settings(&args.settings);
    check_allocator(&settings)?;
    let signals = listen()?;
    let group = Arc::new(membership.join(&args.settings)?);
    let first = membership.rank == 0;
    let observer: Arc<dyn Observer> = if first { Arc::clone(terminal) as _ } else { Arc::new(Silent) };
    let code = match train::run_rank(&settings, command, started, signals.stop(), &observer, &group) {
        Ok(outcome) if first => show(args, &settings, outcome, &signals, terminal),
        Ok(outcome) => outcome.error.as_ref().map_or(exit::OK, |error| end(error, &signals)),
        Err(error) => {
            terminal.clear();
            end(&error, &signals)
        }
    };
    if group.check().is_err() {
        // Threads of NCCL may still wait for the rank that failed.
        ranks::end_now(code);
    }
    group.leave();
    Ok(code)
}

/// Prints the account of a run; the exit code.
fn show(args: &TrainArgs, settings: &Settings, outcome: Outcome, signals: &Signals, terminal: &Arc<Terminal>) -> u8 {
    terminal.clear();
    // Before the report, whose last lines are what was found and the next command.
    say(&format!("record   {}", outcome.directory.display()));
    let printed = print(args.json, &outcome.summary, |page| report::report(&outcome, settings, page));
    outcome.error.as_ref().map_or(printed, |error| end(error, signals))
}

/// Prints the error that ended a run; the exit code.
fn end(error: &TrainError, signals: &Signals) -> u8 {
    fail(error);
    let own_signal = signals.stop().load(std::sync::atomic::Ordering::Relaxed);
    if matches!(error, TrainError::Interrupted) && own_signal { signals.exit_code() } else { error.exit_code() }
}

fn listen() -> Result<Signals> {
    Signals::listen().map_err(|error| TrainError::Input(format!("cannot listen for Ctrl-C: {error}")))
}
