//! The command line.

use crate::arithmetic::{Accumulate, Dtype, FuseMode, GemmMode, WeightsMode};
use crate::data::DatasetName;
use crate::observer::Observer;
use crate::progress::Terminal;
use crate::settings::{DeviceChoice, GRAPH_STEPS, InitMode, LaunchMode, LoaderMode, ProfileSteps, SyncMode};
use crate::signals::Signals;
use crate::terminal::{Page, fail, parse, print_json, report_panics, say};
use crate::{Result, Settings, TrainError, alloc, doctor, exit, record, report, start};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use serde_json::json;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use vramlab::backends;
use vramlab::histories::trace::Export;
use vramlab::instruments::NvtxMode;
use vramlab::{Bytes, Selection};

const AFTER_HELP: &str = "\
Examples:
  trainer --alloc caching                       train on a GPU if there is one, else on the simulated one
  trainer --alloc naive --log-driver-calls      watch each tensor go to the driver
  trainer --alloc stream-ordered:release_threshold=0 --sync step
  nsys profile --trace=cuda,nvtx trainer --alloc caching
  trainer start -o start.safetensors            the weights and batches with which a run begins, for other programs
  trainer allocators                            the allocators with their settings and what they can do
  trainer doctor                                what is there on this machine, and what to do about what is not

Exit codes: 0 done, 1 failed while running, 2 bad input, 130 interrupted (the record holds what was done; 143 by
SIGTERM, 129 by SIGHUP).";

const START_HELP: &str = "\
The file holds each layer's initial weights and biases, the order of the training rows in each epoch, and, for iris and
digits, the data. A run with the same options begins with exactly these.

Example:
  trainer start -o start.safetensors --hidden 784 --epochs 2
  python3 experiments/baselines/mlp.py --start start.safetensors --lr 0.1";

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
    /// Lists the allocators with their settings and what they can do
    Allocators(AllocatorsArgs),
    /// Says what was found on this machine: driver, devices, pools, data, profiler
    Doctor(DoctorArgs),
    /// Writes initial weights and batches to a file from which other programs can do the same work
    #[command(args_override_self = true, after_long_help = START_HELP)]
    Start(StartArgs),
}

#[derive(Debug, Args)]
struct StartArgs {
    /// The file, in the safetensors format; one that is there is replaced
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Print one JSON object on stdout
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    work: WorkArgs,
}

#[derive(Debug, Args)]
struct AllocatorsArgs {
    /// Only these
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print one JSON array instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct DoctorArgs {
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
    /// Where MNIST's files are
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// What is computed, whatever the device and the allocator.
#[derive(Debug, Args)]
struct WorkArgs {
    /// Data set; auto is MNIST if it can be had, else generated digits
    #[arg(long, value_enum, default_value = "auto", help_heading = "Device and data")]
    dataset: DatasetName,
    /// Directory with MNIST's four files, plain or .gz [default: MNIST_DIR, then the user cache, then a download]
    #[arg(long, value_name = "DIR", help_heading = "Device and data")]
    data_dir: Option<PathBuf>,
    /// Never download
    #[arg(long, help_heading = "Device and data")]
    offline: bool,

    /// Width of the hidden layers
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = "Training")]
    hidden: u32,
    /// Number of linear layers
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Training")]
    layers: u32,
    /// Rows in a batch
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Training")]
    batch: u32,
    /// Passes over the training set
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Training")]
    epochs: u32,
    /// Stop after this many steps in all
    #[arg(long, value_name = "N", help_heading = "Training")]
    steps: Option<u64>,
    /// Seed of weights, order and generated data
    #[arg(long, value_name = "N", default_value_t = 42, help_heading = "Training")]
    seed: u64,
    /// Initial weights
    #[arg(long, value_enum, default_value = "kaiming", help_heading = "Training")]
    init: InitMode,
}

#[derive(Debug, Args)]
struct TrainArgs {
    /// Allocator, with settings that are not its defaults; `trainer allocators` lists them
    #[arg(long, value_name = "NAME[:key=value,...]", default_value_t, value_parser = alloc::one(), help_heading = "Allocator")]
    alloc: Selection,
    /// Most bytes that the allocator may take, such as 512M
    #[arg(long, value_name = "BYTES", help_heading = "Allocator")]
    memory_limit: Option<Bytes>,

    /// auto, cuda, cuda:N, sim or sim:PROFILE.json
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Device and data")]
    device: DeviceChoice,
    #[command(flatten)]
    work: WorkArgs,
    /// How batches reach the device
    #[arg(long, value_enum, default_value = "resident", help_heading = "Device and data")]
    loader: LoaderMode,

    /// Learning rate
    #[arg(long, value_name = "RATE", default_value_t = 0.1, allow_negative_numbers = true, help_heading = "Training")]
    lr: f32,
    /// Type of activations, their gradients and weights
    #[arg(long, value_enum, default_value = "f32", help_heading = "Arithmetic")]
    dtype: Dtype,
    /// Type of sums on tensor cores; f16 only with --dtype f16
    #[arg(long, value_enum, default_value = "f32", help_heading = "Arithmetic")]
    accumulate: Accumulate,
    /// Weights that are stepped; half only with --dtype bf16 or f16
    #[arg(long, value_enum, default_value = "master", help_heading = "Arithmetic")]
    weights: WeightsMode,
    /// Factor of the gradients until the update [default: 1024 for f16, else 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Arithmetic")]
    loss_scale: Option<f32>,
    /// Matrix product [default: tiled for f32, else tensor]; tensor makes a product of f32 from three of tf32;
    /// cublaslt needs NVIDIA's library on a GPU
    #[arg(long, value_enum, help_heading = "Arithmetic")]
    gemm: Option<GemmMode>,
    /// What is fused into one launch; not with --gemm naive
    #[arg(long, value_enum, default_value = "none", help_heading = "Arithmetic")]
    fuse: FuseMode,

    /// How a step is launched; graph and persistent need --loader resident, persistent also --fuse update and no --gemm tensor for f32
    #[arg(long, value_enum, default_value = "eager", help_heading = "Training")]
    launch: LaunchMode,
    /// Steps of a graph, for --launch graph: fewer launches [default: 8, and 1 with --sync step]
    #[arg(long, value_name = "N", value_parser = graph_steps_parser(), help_heading = "Training")]
    graph_steps: Option<u32>,
    /// Streams: 2 gives weight updates their own (with --fuse update), 3 the loader too, 4 the validation too
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4), help_heading = "Training")]
    streams: u32,
    /// When the host waits for the device
    #[arg(long, value_enum, default_value = "never", help_heading = "Training")]
    sync: SyncMode,

    /// Directory for the run record, new or empty [default: a new one under runs/]
    #[arg(long, value_name = "DIR", help_heading = "Record and instruments")]
    out: Option<PathBuf>,
    /// Write the start file of this run before training, as `trainer start` does
    #[arg(long, value_name = "FILE", help_heading = "Record and instruments")]
    save_start: Option<PathBuf>,
    /// Print the run record, and nothing else, on stdout
    #[arg(long, help_heading = "Record and instruments")]
    json: bool,
    /// NVTX ranges; auto is on when a profiler is attached
    #[arg(long, value_parser = nvtx_parser(), default_value = "auto", value_name = "auto|on|off", help_heading = "Record and instruments")]
    nvtx: NvtxMode,
    /// What a profiler captures: these steps of the run, both included, between two waits for the device [default: the
    /// whole training]
    #[arg(long, value_name = "FIRST..LAST", help_heading = "Record and instruments")]
    profile_steps: Option<ProfileSteps>,
    /// Latency histograms
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set, help_heading = "Record and instruments")]
    latency: bool,
    /// Write every allocator operation to the record
    #[arg(long, help_heading = "Record and instruments")]
    trace: bool,
    /// Write the history in these formats, comma separated; implies --trace
    #[arg(long, value_name = "FORMAT", value_parser = export_parser(), value_delimiter = ',', help_heading = "Record and instruments")]
    export: Vec<Export>,
    /// Check the allocator: overlap, writes after free, leaks (slow)
    #[arg(long, help_heading = "Record and instruments")]
    check: bool,
    /// Print each driver call that takes memory or gives it back
    #[arg(long, help_heading = "Record and instruments")]
    log_driver_calls: bool,
}

/// Takes the name of an [`Export`]; help lists them all.
pub fn export_parser() -> impl TypedValueParser<Value = Export> {
    let values = Export::ALL.map(|export| PossibleValue::new(export.name()).help(export.summary()));
    PossibleValuesParser::new(values).map(|name| {
        // The parser before has refused every other name.
        Export::ALL.into_iter().find(|export| export.name() == name).unwrap_or(Export::Snapshot)
    })
}

fn graph_steps_parser() -> impl TypedValueParser<Value = u32> {
    let (least, most) = GRAPH_STEPS.into_inner();
    clap::value_parser!(u32).range(i64::from(least)..=i64::from(most))
}

fn nvtx_parser() -> impl TypedValueParser<Value = NvtxMode> {
    PossibleValuesParser::new(["auto", "on", "off"]).map(|name| match name.as_str() {
        "on" => NvtxMode::On,
        "off" => NvtxMode::Off,
        _ => NvtxMode::Auto,
    })
}

/// Takes `on` or `off`.
///
/// # Errors
/// Says that those are the two.
pub fn parse_switch(text: &str) -> std::result::Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("write on or off".into()),
    }
}

impl WorkArgs {
    fn settings(&self) -> Settings {
        Settings {
            dataset: self.dataset,
            data_dir: self.data_dir.clone(),
            offline: self.offline,
            hidden: self.hidden,
            layers: self.layers,
            batch: self.batch,
            epochs: self.epochs,
            steps: self.steps,
            seed: self.seed,
            init: self.init,
            ..Settings::default()
        }
    }
}

impl TrainArgs {
    fn settings(&self) -> Result<Settings> {
        let limit = self.memory_limit.map(|bytes| bytes.0);
        check_allocator(self.alloc.clone(), limit)?;
        Ok(Settings {
            allocator: self.alloc.clone(),
            memory_limit: limit,
            device: self.device.clone(),
            learning_rate: self.lr,
            sync: self.sync,
            loader: self.loader,
            dtype: self.dtype,
            accumulate: self.accumulate,
            weights: self.weights,
            loss_scale: self.loss_scale,
            gemm: self.gemm,
            fuse: self.fuse,
            launch: self.launch,
            graph_steps: self.graph_steps,
            streams: self.streams,
            out: self.out.clone(),
            save_start: self.save_start.clone(),
            nvtx: self.nvtx,
            profile_steps: self.profile_steps,
            latency: self.latency,
            trace: self.trace,
            exports: self.export.clone(),
            check: self.check,
            log_driver_calls: self.log_driver_calls,
            ..self.work.settings()
        })
    }
}

/// Refuses an allocator whose settings and limit do not go together.
fn check_allocator(mut allocator: Selection, limit: Option<u64>) -> Result<()> {
    if let (Some(_), Some(own)) = (limit, allocator.memory_limit()) {
        return Err(TrainError::Input(format!(
            "--memory-limit is given, and --alloc {allocator} has a limit of {} too: leave one of them out",
            Bytes(own)
        )));
    }
    let keeps = allocator.set_memory_limit(limit);
    allocator.check().map_err(|error| {
        let mend = if keeps && allocator.memory_limit().is_none() { "; give --memory-limit" } else { "" };
        TrainError::Input(format!("--alloc {error}{mend}"))
    })
}

/// Lists the allocators.
fn allocators(args: &AllocatorsArgs) -> Result<i32> {
    let wanted = args.names.iter().map(|name| backends::find(name)).collect::<std::result::Result<Vec<_>, _>>();
    let mut wanted = wanted.map_err(|error| TrainError::Input(error.to_string()))?;
    if wanted.is_empty() {
        wanted = backends::all();
    }
    Ok(printed(if args.json {
        print_json(&alloc::to_json(&wanted))
    } else {
        let mut page = Page::stdout();
        alloc::show(&wanted, &mut page);
        page.print()
    }))
}

/// The grammar of the command line, for programs that compose one.
#[must_use]
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Whether a run could begin with these options (without the program's name), as far as they alone tell.
///
/// # Errors
/// The line that the program would print.
pub fn check(options: &[OsString]) -> std::result::Result<(), String> {
    let program = std::iter::once(OsString::from("trainer"));
    let cli = Cli::try_parse_from(program.chain(options.iter().cloned())).map_err(|error| one_line(&error))?;
    let settings = cli.train.settings().map_err(|error| error.to_string())?;
    crate::train::check(&settings).map_err(|error| error.to_string())
}

/// What clap says about a bad command line in several lines, in one.
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
pub fn main(arguments: Vec<OsString>) -> i32 {
    // A panic is a bug of ours; a person gets one line that says so instead of a backtrace.
    report_panics();
    let started = Instant::now();
    let command = arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let cli: Cli = parse(arguments);
    let terminal = Arc::new(Terminal::new());
    let done = match cli.command {
        Some(Command::Doctor(args)) => {
            let diagnosis = doctor::examine(args.data_dir.as_deref());
            return printed(if args.json {
                print_json(&diagnosis.to_json())
            } else {
                let mut page = Page::stdout();
                diagnosis.show(&mut page);
                page.print()
            });
        }
        Some(Command::Allocators(args)) => allocators(&args),
        Some(Command::Start(args)) => write_start(&args, &terminal),
        None => train(&cli.train, command, started, &terminal),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            terminal.clear();
            fail(&error);
            error.exit_code()
        }
    }
}

fn write_start(args: &StartArgs, terminal: &Arc<Terminal>) -> Result<i32> {
    listen()?;
    let observer: Arc<dyn Observer> = Arc::clone(terminal) as _;
    let start = start::run(&args.work.settings(), &args.output, &observer)?;
    terminal.clear();
    if args.json {
        return Ok(printed(print_json(&json!(start).to_string())));
    }
    say(&format!("start    {} (SHA-256 {})", start.path, start.sha256));
    Ok(exit::OK)
}

fn train(args: &TrainArgs, command: Vec<String>, started: Instant, terminal: &Arc<Terminal>) -> Result<i32> {
    let settings = args.settings()?;
    let signals = listen()?;
    let observer: Arc<dyn Observer> = Arc::clone(terminal) as _;
    let outcome = crate::run(&settings, command, started, signals.stop(), &observer)?;
    terminal.clear();
    // Before the report, whose last lines are what was found and the next command.
    say(&format!("record   {}", outcome.directory.display()));
    let printed = printed(if args.json {
        print_json(&record::to_json(&outcome.summary)?)
    } else {
        let mut page = Page::stdout();
        report::report(&outcome, &settings, &mut page);
        page.print()
    });
    match outcome.error {
        None => Ok(printed),
        Some(error) => {
            fail(&error);
            Ok(if matches!(error, TrainError::Interrupted) { signals.exit_code() } else { error.exit_code() })
        }
    }
}

fn listen() -> Result<Signals> {
    Signals::listen().map_err(|error| TrainError::Input(format!("cannot listen for Ctrl-C: {error}")))
}

/// The exit code after writing to standard output.
fn printed(done: std::io::Result<()>) -> i32 {
    match done {
        Ok(()) => exit::OK,
        Err(error) => {
            fail(format_args!("cannot write to stdout: {error}"));
            exit::FAILED
        }
    }
}
