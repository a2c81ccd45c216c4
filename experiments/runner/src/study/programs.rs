//! The programs that variants run: their command lines, and checks of their options before a run starts.

use super::plan::{self, LIMIT, Run};
use super::spec::{OptionValue, Program, Setting, Source};
use super::{commands, inside};
use crate::repository;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use trainer::data::{DataRequest, DatasetName, locate_mnist};
use vramlab::{DeviceKind, DeviceName, Selection, backends};

/// The option that names allocators.
pub(super) const ALLOC: &str = "alloc";

/// Program files in the directory of PyTorch's programs.
const PYTORCH: &str = "baselines/mlp.py";
const INSIDE: &str = "programs/programs.py";
const FORK_SERVER: &str = "programs/fork_server.py";
/// The options in the `--help` of `mlp.py`; none is a switch.
const PYTORCH_OPTIONS: [&str; 22] = [
    "mode",
    "compile-mode",
    "dtype",
    "weights",
    "loss-scale",
    "fused-sgd",
    "rows",
    "dataset",
    "hidden",
    "layers",
    "batch",
    "epochs",
    "steps",
    "lr",
    "seed",
    "init",
    "loader",
    "workers",
    "pin",
    "sync",
    "warm-up",
    "step-memory",
];
/// The options among PyTorch's with the same meaning and values as the trainer's.
const SHARED_OPTIONS: [&str; 12] =
    ["dtype", "weights", "loss-scale", "dataset", "hidden", "layers", "batch", "epochs", "steps", "lr", "seed", "init"];
/// Options that the runner sets itself, in addition to all that take a path.
const RESERVED: [&str; 8] = ["out", "json", "device", "start", "save-start", "data-dir", "help", "version"];
/// File for a program's output, where that is its result.
pub(crate) const RESULT: &str = "result.json";
/// PyTorch's recording of an `inside` run, below its record.
const HISTORY: &str = "history.pickle.xz";
/// Exit code of an `inside` run that ran out of memory, which its result describes.
pub(crate) const OUT_OF_MEMORY: i32 = 3;
/// Path of a program's record in its working directory.
pub(crate) const RECORD: &str = "record";

/// Parses the device of an experiment. Runs start in separate directories, so a profile is named by its absolute path.
pub(crate) fn device(text: &str) -> std::result::Result<DeviceName, String> {
    match DeviceName::among(text, &[DeviceKind::Cuda, DeviceKind::Sim]).map_err(|error| error.to_string())? {
        DeviceName::Sim(Some(path)) => match std::path::absolute(&path) {
            Ok(path) => Ok(DeviceName::Sim(Some(path))),
            Err(error) => Err(format!("{}: {error}", path.display())),
        },
        device => Ok(device),
    }
}

/// The device as records name it: without directories.
pub(crate) fn shown(device: &DeviceName) -> DeviceName {
    match device {
        DeviceName::Sim(Some(path)) => DeviceName::Sim(path.file_name().map(PathBuf::from)),
        device => device.clone(),
    }
}

/// Paths of the files that runs read.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    pub(crate) histories: PathBuf,
    pub(crate) data_dir: Option<PathBuf>,
    pub(crate) python: OsString,
    /// The directory of PyTorch's programs, if it exists.
    pub(crate) pytorch: Option<PathBuf>,
}

impl Inputs {
    /// The given ones, else those of the environment, else those of the sources.
    pub(crate) fn new(histories: Option<&Path>, data_dir: Option<&Path>) -> Result<Self> {
        let absolute =
            |path: &Path| std::path::absolute(path).with_context(|| format!("{} is not a usable path", path.display()));
        let data_dir = data_dir.map(absolute).transpose()?;
        if let Some(folder) = data_dir.as_ref().filter(|folder| !folder.is_dir()) {
            bail!("{} is not a directory; --data-dir takes that of MNIST's four files", folder.display());
        }
        // The message of a run, which has no directories of this machine, could not name it.
        let request = DataRequest { name: DatasetName::Mnist, data_dir: data_dir.clone(), seed: 0, offline: true };
        if let (Some(folder), Some(found)) = (&data_dir, locate_mnist(&request).candidate)
            && let Some(file) = found.missing.first()
        {
            bail!(
                "{} has no {file}, plain or .gz; --data-dir takes the directory of MNIST's four files",
                folder.display()
            );
        }
        // An empty variable is as good as none.
        let data_dir =
            data_dir.or_else(|| std::env::var_os("MNIST_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from));
        let histories = histories.filter(|folder| !folder.as_os_str().is_empty()).map(Path::to_owned);
        let histories = histories.or_else(|| repository::find("histories"));
        Ok(Self {
            histories: absolute(&histories.unwrap_or_else(|| Path::new("experiments").join("histories")))?,
            data_dir: data_dir.as_deref().map(absolute).transpose()?,
            python: std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()),
            pytorch: repository::find("pytorch").as_deref().map(absolute).transpose()?,
        })
    }
}

/// A process to start.
#[derive(Clone, Debug)]
pub(crate) struct CommandLine {
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    /// The command line for readers, without directories of this machine.
    pub(crate) shown: Vec<String>,
    /// Working directory, if not the run's directory.
    pub(crate) folder: Option<PathBuf>,
    /// Environment variables; `None`: removed.
    pub(crate) variables: Vec<(String, Option<OsString>)>,
    /// The program from which the process is forked, if it is.
    pub(crate) server: Option<PathBuf>,
    pub(crate) output: Output,
}

/// Where a program leaves its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// On its standard output.
    Printed,
    /// In [`RESULT`].
    Written,
    /// Text on its standard output, of which [`super::printed`] makes the result.
    Text,
    /// In files under [`RECORD`].
    Record,
}

/// An option with its value, as on a command line.
fn argument(program: Program, name: &str, value: &OptionValue) -> Option<String> {
    match (value, is_switch(program, name)) {
        (OptionValue::Switch(on), Some(true)) => on.then(|| format!("--{name}")),
        _ => Some(format!("--{name}={value}")),
    }
}

/// The VramLab program that has this one as a command, with the grammar of its command line; `None` for PyTorch.
fn host(program: Program) -> Option<(&'static str, clap::Command)> {
    match program {
        Program::Trainer => Some(("trainer", trainer::cli::command())),
        Program::Replay | Program::Capacity => Some(("vramlab", vramlab_cli::command())),
        Program::Bench => Some(("experiments", crate::command())),
        Program::Pytorch | Program::Inside | Program::Command => None,
    }
}

/// The grammar of a program's options.
fn grammar(program: Program) -> Option<clap::Command> {
    let (name, command) = host(program)?;
    if name == program.name() { Some(command) } else { command.find_subcommand(program.name()).cloned() }
}

/// A program's long option of exactly this name; abbreviations that clap accepts do not count.
fn long_option(program: Program, name: &str) -> Option<clap::Arg> {
    grammar(program)?.get_arguments().find(|argument| argument.get_long() == Some(name)).cloned()
}

/// Whether an option takes no value; `None` if the program has no such option.
fn is_switch(program: Program, name: &str) -> Option<bool> {
    match program {
        Program::Pytorch => return PYTORCH_OPTIONS.contains(&name).then_some(false),
        Program::Inside => return inside::OPTIONS.contains(&name).then(|| inside::SWITCHES.contains(&name)),
        Program::Command => return commands::OPTIONS.contains(&name).then(|| commands::SWITCHES.contains(&name)),
        _ => {}
    }
    long_option(program, name).map(|found| matches!(found.get_action(), clap::ArgAction::SetTrue))
}

/// Whether an option is reserved for the runner: a spec, which may be from anyone, names no file.
fn is_reserved(program: Program, name: &str) -> bool {
    let paths = clap::builder::ValueParser::path_buf().type_id();
    let takes_path = |found: clap::Arg| found.get_value_parser().type_id() == paths;
    RESERVED.contains(&name) || long_option(program, name).is_some_and(takes_path)
}

/// Whether a key can be the name of a long option; `out=/x` and `-o` cannot.
fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(plain)
}

/// Whether a program accepts recordings.
fn takes_history(program: Program) -> bool {
    matches!(program, Program::Replay | Program::Capacity)
}

/// Whether an option of a spec is a setting of its allocators: the program has no option of this name, an allocator
/// has such a setting, and the program accepts allocators.
fn is_allocator_setting(program: Program, name: &str) -> bool {
    let setting = name.replace('-', "_");
    backends::all().iter().any(|backend| backend.has_setting(&setting))
        && long_option(program, name).is_none()
        && long_option(program, ALLOC).is_some()
}

/// An allocator with the settings that it supports, in addition to those in its own text: in a matrix of allocators
/// each takes the settings meant for it. Names may be written with dashes, as options are.
fn with_settings(alloc: &str, settings: &[(&str, String)]) -> String {
    let name = alloc.split(':').next().unwrap_or_default();
    let mut out = alloc.to_owned();
    for (setting, value) in settings {
        let setting = setting.replace('-', "_");
        // An unknown allocator is refused by its program.
        if backends::find(name).is_ok_and(|backend| backend.has_setting(&setting)) {
            out.push(if out.contains(':') { ',' } else { ':' });
            out.push_str(&format!("{setting}={value}"));
        }
    }
    out
}

/// The options of a run as arguments, its recording first. Settings of its allocator follow the allocator's name.
fn arguments(run: &Run) -> Vec<String> {
    let is_setting = |name: &str| is_allocator_setting(run.program, name);
    let settings: Vec<(&str, String)> = run
        .options
        .iter()
        .filter(|(name, _)| is_setting(name))
        .map(|(name, value)| (name.as_str(), value.to_string()))
        .collect();
    let mut out = Vec::new();
    let is_variable = |name: &str| run.program == Program::Inside && inside::is_variable(name);
    for (name, value) in run.options.iter().filter(|(name, _)| !is_variable(name)) {
        if takes_history(run.program) && name == "history" || run.program == Program::Inside && name == "program" {
            out.insert(0, value.to_string());
        } else if run.program == Program::Inside && name == "history" {
            out.extend((*value == OptionValue::Switch(true)).then(|| format!("--history={RECORD}/{HISTORY}")));
        } else if name == ALLOC {
            out.push(format!("--{ALLOC}={}", with_settings(&value.to_string(), &settings)));
        } else if !is_setting(name) {
            out.extend(argument(run.program, name, value));
        }
    }
    if !settings.is_empty() && run.option(ALLOC).is_none() {
        out.push(format!("--{ALLOC}={}", with_settings(Selection::default().name(), &settings)));
    }
    out
}

/// The command of a run. `start` is the file with the trainer's weights and batches, `limit` the most bytes that PyTorch
/// may reserve.
pub(crate) fn command_line(
    run: &Run,
    device: &DeviceName,
    inputs: &Inputs,
    start: Option<&str>,
    limit: Option<u64>,
) -> Result<CommandLine> {
    if run.program == Program::Command {
        return listed_command(run, device, inputs);
    }
    let same = |word: &str| (word.to_owned(), word.to_owned());
    let name = run.program.name();
    // The first words, which a reader sees in a different form than the system.
    let (first, mut words) = match run.program {
        Program::Trainer | Program::Bench => (Some("experiments"), vec![same(name)]),
        Program::Replay | Program::Capacity => (None, vec![same("vramlab"), same(name)]),
        Program::Pytorch | Program::Inside => {
            let name = if run.program == Program::Pytorch { PYTORCH } else { INSIDE };
            let shown = format!("experiments/pytorch/{name}");
            let folder = inputs.pytorch.as_ref().with_context(|| format!("{shown} is not here"))?;
            (Some("python3"), vec![(folder.join(name).to_string_lossy().into_owned(), shown)])
        }
        Program::Command => (None, Vec::new()),
    };
    let variables = match (run.program, &inputs.pytorch) {
        (Program::Inside, Some(pytorch)) => inside::variables(run, pytorch),
        _ => Vec::new(),
    };
    words.extend(arguments(run).iter().map(|option| same(option)));
    // Relative to the run's directory, two levels below the experiment's.
    let start = start.map(|start| format!("--start=../../{start}"));
    words.extend(start.iter().map(|start| same(start)));
    words.push(match (run.program, device.kind()) {
        (Program::Bench, DeviceKind::Sim) => same("--device=null"),
        (Program::Pytorch | Program::Inside, kind) if kind != DeviceKind::Cuda => same("--device=cpu"),
        _ => (format!("--device={device}"), format!("--device={}", shown(device))),
    });
    words.extend(limit.map(|limit| same(&format!("--limit={limit}"))));
    let (output, option) = match run.program {
        Program::Replay | Program::Capacity | Program::Bench => (Output::Printed, "--json".to_owned()),
        Program::Inside => (Output::Written, format!("--output={RESULT}")),
        Program::Trainer | Program::Pytorch | Program::Command => (Output::Record, format!("--out={RECORD}")),
    };
    words.push(same(&option));
    let (arguments, of_readers): (Vec<String>, Vec<String>) = words.into_iter().unzip();
    Ok(CommandLine {
        program: match run.program {
            Program::Pytorch | Program::Inside => inputs.python.clone(),
            _ => repository::this_program()?.into(),
        },
        arguments: arguments.into_iter().map(OsString::from).collect(),
        shown: shown_variables(&variables).chain(first.map(str::to_owned)).chain(of_readers).collect(),
        folder: takes_history(run.program).then(|| inputs.histories.clone()),
        server: inputs.pytorch.as_ref().filter(|_| run.fork).map(|folder| folder.join(FORK_SERVER)),
        variables,
        output,
    })
}

/// The command of a run of `command`.
fn listed_command(run: &Run, device: &DeviceName, inputs: &Inputs) -> Result<CommandLine> {
    let (words, shown): (Vec<String>, Vec<String>) = commands::words(run, inputs, device.kind())?.into_iter().unzip();
    let variables = commands::variables(run, inputs)?;
    let (program, arguments) = words.split_first().context("the catalogue names no command")?;
    let server = inputs.pytorch.as_ref().filter(|_| run.fork).map(|folder| folder.join(FORK_SERVER));
    Ok(CommandLine {
        program: program.into(),
        arguments: arguments.iter().map(OsString::from).collect(),
        shown: shown_variables(&variables).chain(shown.into_iter().filter(|word| !word.is_empty())).collect(),
        folder: None,
        variables,
        server,
        output: Output::Text,
    })
}

/// The variables of a command for readers, without paths.
fn shown_variables(variables: &[(String, Option<OsString>)]) -> impl Iterator<Item = String> {
    let set = variables.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
    let is_path = |name: &str| ["PYTHONPATH", "LD_LIBRARY_PATH"].contains(&name);
    set.filter(move |(name, _)| !is_path(name)).map(|(name, value)| format!("{name}={}", value.to_string_lossy()))
}

/// The command for the file with the trainer's weights and batches, and the file's name: runs with equal inputs for it
/// share one.
pub(crate) fn start_file(run: &Run) -> (String, Vec<String>) {
    const DECIDES: [&str; 8] = ["dataset", "hidden", "layers", "batch", "epochs", "steps", "seed", "init"];
    let chosen: Vec<&(String, OptionValue)> =
        run.options.iter().filter(|(name, _)| DECIDES.contains(&name.as_str())).collect();
    let name = chosen.iter().map(|(name, value)| format!("{name}-{value}")).collect::<Vec<String>>().join("_");
    let name = format!("start/{}.safetensors", if name.is_empty() { "default".to_owned() } else { name });
    let mut arguments = vec!["trainer".to_owned(), "start".to_owned(), format!("-o={name}")];
    arguments.extend(chosen.iter().map(|(name, value)| format!("--{name}={value}")));
    (name, arguments)
}

/// Checks every option of a spec as its program would, on a kind of device, and that the recordings exist.
pub(crate) fn check(source: &Source, kind: DeviceKind, histories: Option<&Path>) -> Result<()> {
    for arm in source.spec.arms_on(kind) {
        let settings = source.settings(&arm, kind)?;
        let allocators = settings.iter().find(|setting| setting.name == ALLOC);
        let allocators: Vec<String> = match allocators {
            Some(setting) => setting.values.iter().map(ToString::to_string).collect(),
            None => vec![Selection::default().to_string()],
        };
        for setting in &settings {
            if is_allocator_setting(arm.program, &setting.name) {
                check_allocator_setting(source, setting, &allocators)?;
            } else {
                check_setting(source, arm.program, setting, histories)?;
            }
        }
    }
    // Combinations of options: one message for the first faulty cell.
    let runs = plan::plan(source, kind)?;
    for run in runs.iter().filter(|run| run.repeat == 0) {
        if takes_history(run.program) && run.option("history").is_none() {
            return Err(source.at_key("program", format!("{} needs the option 'history'", run.program.name())));
        }
        inside::check_run(run)
            .and_then(|()| commands::check_run(run))
            .map_err(|(key, message)| source.at_key(key, message))?;
        if run.option(LIMIT).is_some() && source.spec.limits_of.is_none() {
            return Err(source.at_key(LIMIT, "limits_of = \"ARM\" names the arm whose active memory it multiplies"));
        }
        if run.program == Program::Capacity && kind == DeviceKind::Cuda {
            return Err(source.at_key("program", "capacity searches on the simulated GPU; devices = [\"sim\"]"));
        }
        if let Err(message) = parse(run.program, &arguments(run)) {
            return Err(source.at(0, format!("{}: {message}", run.label(true))));
        }
    }
    Ok(())
}

/// Checks a setting with each of a variant's allocators that has it; at least one has.
fn check_allocator_setting(source: &Source, setting: &Setting, allocators: &[String]) -> Result<()> {
    let name = setting.name.replace('-', "_");
    // A fault in an allocator's own text is reported at its place.
    let chosen = allocators.iter().filter_map(|alloc| Some((alloc, alloc.parse::<Selection>().ok()?)));
    let has: Vec<&String> =
        chosen.filter(|(_, chosen)| chosen.backend().has_setting(&name)).map(|(alloc, _)| alloc).collect();
    if has.is_empty() {
        let all = allocators.join(", ");
        return Err(source.at(setting.offset, format!("no allocator of the arm has a setting '{name}': {all}")));
    }
    for alloc in has {
        for value in &setting.values {
            let text = with_settings(alloc, &[(&name, value.to_string())]);
            text.parse::<Selection>().map_err(|error| source.at(setting.offset, error))?;
        }
    }
    Ok(())
}

fn check_setting(source: &Source, program: Program, setting: &Setting, histories: Option<&Path>) -> Result<()> {
    let name = setting.name.as_str();
    let here = |message: String| Err(source.at(setting.offset, message));
    if takes_history(program) && name == "history" {
        let folder = histories.unwrap_or(Path::new(""));
        for value in &setting.values {
            let path = PathBuf::from(value.to_string());
            let mut parts = path.components().peekable();
            let below = parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)));
            if !below || value.to_string().starts_with('-') {
                return here(format!("'{value}' names no file in the directory of recordings"));
            }
            if histories.is_some() && !folder.join(path).is_file() {
                let folder = folder.display();
                return here(format!("{value} is not in {folder}; name the directory of recordings with --histories"));
            }
        }
        return Ok(());
    }
    if !is_name(name) {
        return here(format!(
            "'{name}' is not the name of an option; write it without dashes before it, and the value behind ="
        ));
    }
    if is_reserved(program, name) {
        return here(format!("the runner sets --{name} itself; leave it out"));
    }
    let known = is_switch(program, name);
    let options: Option<&[&str]> = match program {
        Program::Pytorch => Some(&PYTORCH_OPTIONS),
        Program::Inside => Some(&inside::OPTIONS),
        Program::Command => Some(&commands::OPTIONS),
        _ => None,
    };
    if let Some(options) = options.filter(|_| known.is_none()) {
        return here(format!("--{name} is not an option of {}; there are {}", program.name(), options.join(", ")));
    }
    for value in &setting.values {
        if program == Program::Inside {
            inside::check(name, value).or_else(here)?;
        } else if program == Program::Command {
            commands::check(name, value).or_else(here)?;
        }
        let text = argument(program, name, value);
        if known == Some(true) && !matches!(value, OptionValue::Switch(_)) {
            return here(format!("--{name} takes no value; write {name} = true"));
        }
        let mut line: Vec<String> = takes_history(program).then(|| "FILE".to_owned()).into_iter().collect();
        line.extend(text);
        if let Err(message) = parse(program, &line) {
            // Requirements on other options can only be checked once all are present.
            if known.is_some() && names_another(&message, name) {
                continue;
            }
            return here(message);
        }
    }
    if known.is_none() {
        // The program accepts it under another name.
        return here(format!("--{name} is not an option of {}; write its whole name", program.name()));
    }
    Ok(())
}

/// Whether a message is about an option other than the one of this name.
fn names_another(message: &str, name: &str) -> bool {
    let words = message.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    words.filter_map(|word| word.strip_prefix("--")).any(|option| option != name)
}

/// The program's verdict on its options.
fn parse(program: Program, options: &[String]) -> std::result::Result<(), String> {
    let trainer = |options: &mut dyn Iterator<Item = &String>| {
        trainer::cli::check(&options.map(OsString::from).collect::<Vec<OsString>>())
    };
    match program {
        Program::Trainer => trainer(&mut options.iter()),
        Program::Pytorch => {
            let shared = |option: &&String| {
                let name = option.trim_start_matches("--").split('=').next().unwrap_or_default();
                SHARED_OPTIONS.contains(&name)
            };
            trainer(&mut options.iter().filter(shared))
        }
        Program::Inside | Program::Command => Ok(()),
        Program::Replay | Program::Capacity | Program::Bench => {
            let Some((host, grammar)) = host(program) else { return Ok(()) };
            let line = [host, program.name()].into_iter().chain(options.iter().map(String::as_str));
            grammar.try_get_matches_from(line).map(|_| ()).map_err(|error| trainer::cli::one_line(&error))
        }
    }
}

/// The reason why the PyTorch variants cannot run here, if any. The answer is the same for all experiments of this
/// process, and takes the time of an import.
pub(crate) fn pytorch_missing(inputs: &Inputs, kind: DeviceKind) -> Option<String> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    REASON.get_or_init(|| probe_pytorch(inputs, kind)).clone()
}

fn probe_pytorch(inputs: &Inputs, kind: DeviceKind) -> Option<String> {
    if inputs.pytorch.is_none() {
        return Some("experiments/pytorch is not here".to_owned());
    }
    let python = inputs.python.to_string_lossy().into_owned();
    let probe = "import sys\ntry:\n import torch\nexcept ImportError:\n sys.exit(3)\n\
                 sys.exit(0 if torch.cuda.is_available() else 4)";
    let status = Command::new(&inputs.python).args(["-c", probe]).stdin(Stdio::null()).stderr(Stdio::null()).status();
    match status.map(|status| status.code()) {
        Err(_) => Some(format!("{python} is not on the PATH; install Python 3, or name it with PYTHON")),
        Ok(Some(3)) => Some(format!("{python} has no PyTorch; install the package torch, or name another PYTHON")),
        Ok(Some(4)) if kind == DeviceKind::Cuda => Some("PyTorch finds no GPU".into()),
        Ok(Some(0 | 4)) => None,
        Ok(_) => Some(format!("{python} cannot load PyTorch")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    #[test]
    fn the_options_of_pytorch_are_those_of_its_program() {
        let read = |name: &str| std::fs::read_to_string(repository::find("pytorch").unwrap().join(name)).unwrap();
        let text = read(INSIDE);
        for option in inside::OPTIONS.iter().filter(|option| **option != "program" && !inside::is_variable(option)) {
            assert!(text.contains(&format!("\"--{option}\"")), "{INSIDE} has no --{option}");
        }
        let text = read(PYTORCH);
        for option in PYTORCH_OPTIONS.iter().chain(["device", "out", "start"].iter()) {
            assert!(text.contains(&format!("\"--{option}\"")), "{PYTORCH} has no --{option}");
        }
        for option in SHARED_OPTIONS {
            assert!(
                PYTORCH_OPTIONS.contains(&option) && is_switch(Program::Trainer, option) == Some(false),
                "{option}"
            );
        }
    }

    #[test]
    fn a_message_about_another_option_is_told_from_one_about_this() {
        assert!(names_another("--weights half needs --dtype bf16 or f16, found f32", "weights"));
        assert!(!names_another("--loss-scale must be a positive number, found 0", "loss-scale"));
        assert!(!names_another("invalid value 'x' for '--dtype <DTYPE>'; write one of f32, bf16", "dtype"));
    }

    /// All programs whose options have a clap grammar.
    const PROGRAMS: [Program; 4] = [Program::Trainer, Program::Replay, Program::Capacity, Program::Bench];

    #[test]
    fn every_option_that_takes_a_path_is_the_runners() {
        for (program, names) in [
            (Program::Trainer, &["out", "save-start", "data-dir", "device", "json", "help", "version"][..]),
            (Program::Bench, &["baselines-dir", "device", "json"]),
            (Program::Replay, &["device", "json"]),
        ] {
            for name in names {
                assert!(is_reserved(program, name), "{name}");
            }
        }
        // By its value's name, not only its type: an option of another type that names a file would be found here.
        for program in PROGRAMS {
            for found in grammar(program).unwrap().get_arguments() {
                let Some(name) = found.get_long() else { continue };
                let names_file =
                    found.get_value_names().unwrap_or_default().iter().any(|of| of == "FILE" || of == "DIR");
                assert!(!names_file || is_reserved(program, name), "{} {name}", program.name());
                assert!(is_name(name), "{name}");
            }
        }
    }

    #[test]
    fn devices_are_shown_without_their_folder() {
        let of = |text: &str| device(text).unwrap();
        assert_eq!(shown(&of("cuda:1")).to_string(), "cuda:1");
        let profile = of("sim:some/where/p.json");
        let argument = profile.to_string();
        assert!(argument.starts_with("sim:/") && argument.ends_with("/some/where/p.json"));
        assert_eq!(shown(&profile).to_string(), "sim:p.json");
        for text in ["", "null", "sim:", "cuda:x", "auto"] {
            assert!(device(text).unwrap_err().contains("is not a device"), "{text}");
        }
    }
}
