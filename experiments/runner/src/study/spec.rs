//! A spec in TOML: a question, and the runs that answer it. Unknown keys are refused with their line.

use crate::repository;
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use toml::{Spanned, Value};
use vramlab::DeviceKind;
use vramlab::input::{WRITTEN, read_text};
use vramlab::settings::Meant;

/// The file with the values of a run of the trainer or of its counterpart in PyTorch.
pub(super) const SUMMARY: &str = "summary.json";

/// Files of a run that a spec may keep.
pub(crate) const KEEPABLE: [&str; 11] = [
    SUMMARY,
    "steps.csv",
    "latency.hlog",
    "trace.jsonl",
    "driver_calls.jsonl",
    "perfetto.json",
    "snapshot.pickle",
    "snapshot.json",
    "history.pickle.xz",
    "rmm.csv",
    "minimalloc.csv",
];

/// Limit on the runs of one experiment: a typing error in a matrix should not fill a disk.
const MOST_RUNS: u64 = 10_000;

vramlab::device::named! {
    /// The program of a variant.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
    #[serde(rename_all = "lowercase")]
    pub(crate) enum Program {
        /// The trainer.
        #[default]
        Trainer "trainer",
        /// The same network in PyTorch, `experiments/pytorch/baselines/mlp.py`.
        Pytorch "pytorch",
        /// A program of `experiments/pytorch/programs` under an allocator in PyTorch.
        Inside "inside",
        /// A command of `experiments/commands.toml`, unchanged, under `vramlab run`, or with an allocator under PyTorch.
        Command "command",
        /// `vramlab replay`.
        Replay "replay",
        /// `vramlab capacity`.
        Capacity "capacity",
        /// `experiments bench`.
        Bench "bench",
    }
}

/// Values that override the others on one kind of device.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Overrides {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) repeats: Option<u32>,
    /// Discarded runs of each cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) warm_up: Option<u32>,
    #[serde(default, skip_serializing_if = "Entries::is_empty")]
    pub(crate) options: Entries,
    #[serde(default, skip_serializing_if = "Entries::is_empty")]
    pub(crate) matrix: Entries,
}

impl Program {
    /// Whether it needs PyTorch.
    pub(crate) fn needs_pytorch(self) -> bool {
        matches!(self, Self::Pytorch | Self::Inside)
    }

    /// Whether it runs on a GPU or, if its variant declares that, on this machine's processor, but never on the
    /// simulated GPU.
    fn is_for_gpu(self) -> bool {
        self.needs_pytorch() || self == Self::Command
    }
}

impl Overrides {
    fn is_empty(&self) -> bool {
        self.repeats.is_none() && self.warm_up.is_none() && self.options.is_empty() && self.matrix.is_empty()
    }
}

/// Turns that the runs of a repeat and a program take.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Turns {
    /// Number of rounds.
    pub(crate) rounds: u32,
    /// Requests of a round: at each one every process has one turn, in a new random order.
    pub(crate) requests: Vec<u64>,
}

/// A program with its options, crossed with the spec's matrix and its own.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arm {
    pub(crate) name: String,
    /// The program, by default `trainer`.
    #[serde(default)]
    pub(crate) program: Program,
    /// Devices on which the variant runs; for `pytorch`, `inside` and `command` by default `cuda`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) devices: Option<Vec<DeviceKind>>,
    #[serde(default, skip_serializing_if = "Entries::is_empty")]
    pub(crate) options: Entries,
    /// The variant's own matrix, crossed with the shared one.
    #[serde(default, skip_serializing_if = "Entries::is_empty")]
    pub(crate) matrix: Entries,
    /// Values for the simulated GPU, which override the shared ones.
    #[serde(default, skip_serializing_if = "Overrides::is_empty")]
    pub(crate) sim: Overrides,
    /// Values for a GPU, which override the shared ones.
    #[serde(default, skip_serializing_if = "Overrides::is_empty")]
    pub(crate) cuda: Overrides,
}

/// A complete spec.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spec {
    /// The file's name.
    pub(crate) name: String,
    /// The question that the spec answers.
    pub(crate) question: String,
    /// Runs of each cell, by default 3.
    #[serde(default = "three")]
    pub(crate) repeats: u32,
    /// Discarded runs of each cell, made before its repeats, by default 0.
    #[serde(default)]
    pub(crate) warm_up: u32,
    /// Seed of the order, by default 1.
    #[serde(default = "one")]
    pub(crate) seed: u64,
    /// Devices on which the spec runs.
    pub(crate) devices: Vec<DeviceKind>,
    /// Files of a run that are kept, by default `summary.json`, `steps.csv` and `latency.hlog`. Runs of `trainer` and `pytorch` need
    /// `summary.json`.
    #[serde(default = "usual_files")]
    pub(crate) keep: Vec<String>,
    /// Whether PyTorch starts with the trainer's weights and batches (`trainer start`, made with the run's options).
    #[serde(default)]
    pub(crate) start: bool,
    /// Name of the variant whose finished runs of the same `program` set the limits of the option `limit-over-active`:
    /// their median peak of active memory times its value. Those runs come first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limits_of: Option<String>,
    /// Whether runs of `inside`, or of a `command` that begins with `{python}`, are forked from a process that has imported
    /// PyTorch, which saves the imports. There is one such process for each environment: PyTorch reads `conf` when it is
    /// imported.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) fork: bool,
    /// Whether runs may share a GPU (`--jobs`): their times do not count.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) concurrent: bool,
    /// Limit on the seconds of a run, which is ended then and has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) timeout_s: Option<u32>,
    /// The runs of a repeat and a `program`, all of `inside`, run at the same time and take turns. If one is missing,
    /// all of them are made anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) turns: Option<Turns>,
    /// The program's long options with one value each, for every variant; a switch is `true`. Settings of allocators,
    /// written with `-` or `_`, are appended to the names in `--alloc` that support them.
    #[serde(default)]
    pub(crate) options: Entries,
    /// Options with lists of values, crossed, the first one slowest.
    #[serde(default)]
    pub(crate) matrix: Entries,
    /// Several programs in one experiment, each crossed with the matrix.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) arms: Vec<Arm>,
    /// Values for the simulated GPU, which override all others.
    #[serde(default, skip_serializing_if = "Overrides::is_empty")]
    pub(crate) sim: Overrides,
    /// Values for a GPU, which override all others.
    #[serde(default, skip_serializing_if = "Overrides::is_empty")]
    pub(crate) cuda: Overrides,
}

fn three() -> u32 {
    3
}

fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

fn usual_files() -> Vec<String> {
    KEEPABLE[..3].iter().map(|name| (*name).to_owned()).collect()
}

/// A spec with the file that it was read from, for messages that name a line.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
    pub(crate) spec: Spec,
}

impl Source {
    /// Reads and checks a file, except for the options, which only the programs can check.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = read_text(path, WRITTEN).with_context(|| format!("cannot read {}", path.display()))?;
        let spec = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(&text, span.start));
            // Options are the only maps of a spec.
            let message = one_line(error.message()).replace("expected a map", "expected a table of options");
            anyhow!("{}:{line}: {message}", path.display())
        })?;
        let source = Self { path: path.to_owned(), text, spec };
        source.check()?;
        Ok(source)
    }

    /// A message about a position in the file.
    pub(crate) fn at(&self, offset: usize, message: impl fmt::Display) -> anyhow::Error {
        anyhow!("{}:{}: {message}", self.path.display(), line_of(&self.text, offset))
    }

    /// A message about the first line that begins with a key or with a table of that name; line 1 if there is none.
    pub(crate) fn at_key(&self, key: &str, message: impl fmt::Display) -> anyhow::Error {
        let begins = |line: &str| {
            let rest = line.trim_start().trim_start_matches('[').strip_prefix(key);
            rest.is_some_and(|rest| rest.trim_start().starts_with(['=', ']']))
        };
        let offset: usize = self.text.split_inclusive('\n').take_while(|line| !begins(line)).map(str::len).sum();
        self.at(if offset == self.text.len() { 0 } else { offset }, message)
    }

    fn check(&self) -> Result<()> {
        let spec = &self.spec;
        let stem = self.path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let slugged = |name: &str| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c))
        };
        if spec.name != stem || !slugged(&spec.name) {
            let name = &spec.name;
            let rule = "a spec has the name of its file, in lowercase letters, digits, '-' and '_'";
            return Err(self.at_key("name", format!("the name is '{name}' and the file is '{stem}'; {rule}")));
        }
        if spec.question.trim().is_empty() {
            return Err(self.at_key("question", "an experiment answers a question; write it down"));
        }
        let overrides =
            [&spec.sim, &spec.cuda].into_iter().chain(spec.arms.iter().flat_map(|arm| [&arm.sim, &arm.cuda]));
        let (repeats, warm_up): (Vec<Option<u32>>, Vec<Option<u32>>) =
            overrides.map(|of| (of.repeats, of.warm_up)).chain([(Some(spec.repeats), Some(spec.warm_up))]).unzip();
        if repeats.into_iter().flatten().any(|repeats| !(1..=1000).contains(&repeats)) {
            return Err(self.at_key("repeats", "repeats lie between 1 and 1000"));
        }
        if warm_up.into_iter().flatten().any(|times| times > 1000) {
            return Err(self.at_key("warm_up", "warm_up is at most 1000"));
        }
        if spec.devices.is_empty() || spec.devices.contains(&DeviceKind::Null) {
            return Err(self.at_key("devices", "name at least one of \"cuda\" and \"sim\""));
        }
        if let Some(file) = spec.keep.iter().find(|file| !KEEPABLE.contains(&file.as_str())) {
            return Err(self.at_key("keep", format!("no run writes '{file}'; there are {}", KEEPABLE.join(", "))));
        }
        let mut names = BTreeSet::new();
        for (number, arm) in spec.arms.iter().enumerate() {
            if !slugged(&arm.name) || !names.insert(arm.name.as_str()) {
                let name = &arm.name;
                let message =
                    format!("the arm's name '{name}' must be its own, of lowercase letters, digits, '-', '_'");
                return Err(self.at(self.offset_of_arm(number), message));
            }
            if let Some(device) = arm.devices.iter().flatten().find(|device| !spec.devices.contains(device)) {
                let message = format!("arm '{}' is for {device}, which the spec's devices do not name", arm.name);
                return Err(self.at(self.offset_of_arm(number), message));
            }
            if arm.sim.warm_up.is_some() || arm.cuda.warm_up.is_some() {
                return Err(self.at_key("warm_up", "warm-up is the spec's, not an arm's"));
            }
        }
        if let Some(name) = spec.limits_of.as_ref().filter(|name| !names.contains(name.as_str())) {
            return Err(self.at_key("limits_of", format!("no arm is called '{name}'")));
        }
        let all =
            |programs: &[Program]| !spec.arms.is_empty() && spec.arms.iter().all(|arm| programs.contains(&arm.program));
        if spec.fork && !all(&[Program::Inside, Program::Command]) {
            return Err(self.at_key("fork", "'fork' is for specs whose arms all run 'inside' or 'command'"));
        }
        if spec.turns.is_some() && !all(&[Program::Inside]) {
            return Err(self.at_key("turns", "'turns' is for specs whose arms all run 'inside'"));
        }
        if spec.fork && spec.turns.is_some() {
            return Err(self.at_key("fork", "runs that take turns cannot be forked; keep one of 'fork' and 'turns'"));
        }
        if spec.turns.as_ref().is_some_and(|turns| turns.rounds == 0 || turns.requests.is_empty()) {
            return Err(self.at_key("turns", "'turns' needs at least one round and one request"));
        }
        if spec.timeout_s == Some(0) {
            return Err(self.at_key("timeout_s", "timeout_s is at least 1"));
        }
        // After faults in what the arms run, which decides this.
        let has_record = |program: Program| matches!(program, Program::Trainer | Program::Pytorch);
        let records = spec.arms.is_empty() || spec.arms.iter().any(|arm| has_record(arm.program));
        if records && !spec.keep.iter().any(|file| file == SUMMARY) {
            let use_of = "the values of each run are in it, and nothing reads a run without it";
            return Err(self.at_key("keep", format!("'{SUMMARY}' is missing; {use_of}")));
        }
        for kind in [DeviceKind::Cuda, DeviceKind::Sim] {
            // Before any of them is built: the product of a few dozen axes exceeds any memory.
            let mut left = MOST_RUNS;
            for arm in self.spec.arms_on(kind) {
                let settings = self.settings(&arm, kind)?;
                let mut values = settings.iter().map(|setting| setting.values.len() as u64);
                let repeats = u64::from(spec.repeats_on(&arm, kind));
                let runs = values.try_fold(repeats, |runs, values| runs.checked_mul(values));
                let Some(rest) = runs.and_then(|runs| left.checked_sub(runs)) else {
                    bail!("{}: more than {MOST_RUNS} runs on {kind}; shorten the matrix", self.path.display());
                };
                left = rest;
            }
        }
        Ok(())
    }

    /// Byte offset of a variant's name.
    fn offset_of_arm(&self, number: usize) -> usize {
        #[derive(Deserialize)]
        struct Named {
            name: Spanned<String>,
        }
        #[derive(Deserialize)]
        struct Arms {
            arms: Vec<Named>,
        }
        let arms = toml::from_str::<Arms>(&self.text).map_or_else(|_| Vec::new(), |all| all.arms);
        arms.get(number).map_or(0, |arm| arm.name.span().start)
    }

    /// Options of a variant on a kind of device, in order: later places override earlier ones, and values for a kind
    /// of device override all others.
    pub(crate) fn settings(&self, arm: &Arm, kind: DeviceKind) -> Result<Vec<Setting>> {
        let mut settings: Vec<Setting> = Vec::new();
        let spec = &self.spec;
        let (shared, own) = (spec.overrides(kind), arm.overrides(kind));
        let levels = [
            (&spec.options, &spec.matrix),
            (&arm.options, &arm.matrix),
            (&shared.options, &shared.matrix),
            (&own.options, &own.matrix),
        ];
        for (options, matrix) in levels {
            for (entry, axis) in
                options.0.iter().map(|entry| (entry, false)).chain(matrix.0.iter().map(|entry| (entry, true)))
            {
                let values = entry.values(axis).map_err(|message| self.at(entry.offset, message))?;
                if axis && options.0.iter().any(|option| option.name == entry.name) {
                    let name = &entry.name;
                    return Err(self.at(entry.offset, format!("'{name}' is an option and an axis; keep one of them")));
                }
                let setting = Setting { name: entry.name.clone(), values, axis, offset: entry.offset };
                match settings.iter_mut().find(|known| known.name == entry.name) {
                    Some(known) => *known = setting,
                    None => settings.push(setting),
                }
            }
        }
        Ok(settings)
    }
}

/// An option of a variant with all its values.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) name: String,
    pub(crate) values: Vec<OptionValue>,
    pub(crate) axis: bool,
    pub(crate) offset: usize,
}

impl Arm {
    fn overrides(&self, kind: DeviceKind) -> &Overrides {
        if kind == DeviceKind::Sim { &self.sim } else { &self.cuda }
    }
}

impl Spec {
    fn overrides(&self, kind: DeviceKind) -> &Overrides {
        if kind == DeviceKind::Sim { &self.sim } else { &self.cuda }
    }

    /// The variants on a kind of device. A spec without variants has one, of the trainer.
    pub(crate) fn arms_on(&self, kind: DeviceKind) -> Vec<Arm> {
        if !self.devices.contains(&kind) {
            return Vec::new();
        }
        if self.arms.is_empty() {
            return vec![Arm { name: Program::Trainer.name().into(), ..Arm::default() }];
        }
        let runs = |arm: &&Arm| match &arm.devices {
            Some(devices) => devices.contains(&kind),
            // Not on the simulated GPU; a variant for the CPU as its counterpart declares that.
            None => kind == DeviceKind::Cuda || !arm.program.is_for_gpu(),
        };
        self.arms.iter().filter(runs).cloned().collect()
    }

    /// Repeats of a variant on a kind of device.
    pub(crate) fn repeats_on(&self, arm: &Arm, kind: DeviceKind) -> u32 {
        arm.overrides(kind).repeats.or(self.overrides(kind).repeats).unwrap_or(self.repeats)
    }

    /// Discarded runs of each cell on a kind of device.
    pub(crate) fn warm_up_on(&self, kind: DeviceKind) -> u32 {
        self.overrides(kind).warm_up.unwrap_or(self.warm_up)
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<&str>>().join("; ")
}

/// The directory of the specs: the given one, the one below the current directory, or the one in the sources.
pub(crate) fn folder(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(folder) = named {
        return if folder.is_dir() { Ok(folder.to_owned()) } else { bail!("{} is not a directory", folder.display()) };
    }
    repository::find("specs")
        .context("there is no experiments/specs here; name the directory of the specs with --specs")
}

/// Names of all specs in a directory, sorted.
pub(crate) fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = repository::entries(folder)?;
    let name = |path: &PathBuf| path.file_name()?.to_string_lossy().strip_suffix(".toml").map(str::to_owned);
    let mut names: Vec<String> = entries.iter().filter_map(name).collect();
    // Sorted again: with their endings, names sort differently.
    names.sort();
    Ok(names)
}

/// Reads the spec at a path, or the one with this name in the directory of the specs.
pub(crate) fn find(text: &str, specs: Option<&Path>) -> Result<Source> {
    let path = Path::new(text);
    if path.is_file() || path.extension().is_some() || path.components().count() > 1 {
        return Source::read(path);
    }
    let folder = folder(specs)?;
    let path = folder.join(format!("{text}.toml"));
    if !path.is_file() {
        let names = names(&folder)?;
        let among: Vec<&str> = names.iter().map(String::as_str).collect();
        bail!("there is no spec '{text}' in {}{}", folder.display(), Meant { name: text, among: &among });
    }
    Source::read(&path)
}

// Options of a spec: tables whose keys are a program's long options, each with its position in the file.

/// A value on a command line.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum OptionValue {
    /// A switch, or `on` and `off` where an option takes those.
    Switch(bool),
    Integer(i64),
    Number(f64),
    Text(String),
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(on) => f.write_str(if *on { "on" } else { "off" }),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Number(value) => write!(f, "{value}"),
            Self::Text(value) => f.write_str(value),
        }
    }
}

impl OptionValue {
    fn of(value: &Value) -> Option<Self> {
        match value {
            Value::Boolean(on) => Some(Self::Switch(*on)),
            Value::Integer(value) => Some(Self::Integer(*value)),
            Value::Float(value) if value.is_finite() => Some(Self::Number(*value)),
            // A command line cannot contain a zero byte.
            Value::String(text) if !text.contains('\0') => Some(Self::Text(text.clone())),
            _ => None,
        }
    }
}

/// A key of a table and its value.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Byte offset of the key in the file.
    pub(crate) offset: usize,
    value: Value,
}

impl Entry {
    /// The values of an axis, or the single value of an option.
    pub(crate) fn values(&self, axis: bool) -> Result<Vec<OptionValue>, String> {
        let name = &self.name;
        let one = |value| OptionValue::of(value).ok_or_else(|| format!("'{name}' takes text, numbers, true or false"));
        match (&self.value, axis) {
            (Value::Array(values), true) if values.is_empty() => Err(format!("the axis '{name}' has no value")),
            (Value::Array(values), true) => {
                let out = values.iter().map(one).collect::<Result<Vec<OptionValue>, String>>()?;
                let twice = (1..out.len()).find(|at| out[..*at].contains(&out[*at]));
                twice.map_or(Ok(out.clone()), |at| Err(format!("the axis '{name}' has the value {} twice", out[at])))
            }
            (_, true) => {
                Err(format!("an axis is a list, as {name} = [{}, …]; a single value is an option", self.value))
            }
            (Value::Array(_), false) => Err(format!("an option has one value; put the list '{name}' under [matrix]")),
            (value, false) => Ok(vec![one(value)?]),
        }
    }
}

/// A table in the order of the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "BTreeMap<Spanned<String>, Value>")]
pub(crate) struct Entries(pub(crate) Vec<Entry>);

impl Entries {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<BTreeMap<Spanned<String>, Value>> for Entries {
    fn from(table: BTreeMap<Spanned<String>, Value>) -> Self {
        let entry =
            |(key, value): (Spanned<String>, Value)| Entry { offset: key.span().start, name: key.into_inner(), value };
        let mut entries: Vec<Entry> = table.into_iter().map(entry).collect();
        entries.sort_by_key(|entry| entry.offset);
        Self(entries)
    }
}

impl Serialize for Entries {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|entry| (&entry.name, &entry.value)))
    }
}
