//! The parts of the campaign, from `experiments/campaign.toml`.

use crate::repository;
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use vramlab::input::{WRITTEN, read_text};

/// File that lists the parts.
const FILE: &str = "campaign.toml";
/// The machine's profile, among the records.
const PROFILE: &str = "profile.json";

/// Requirements of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Need {
    Gpu,
    TwoGpus,
    FourGpus,
    Pytorch,
    Cargo,
    Perf,
    Nvcc,
    Nsys,
    Ncu,
    Sanitizer,
}

impl Need {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::TwoGpus => "2 GPUs",
            Self::FourGpus => "4 GPUs",
            Self::Pytorch => "PyTorch",
            Self::Cargo => "cargo",
            Self::Perf => "perf",
            Self::Nvcc => "nvcc",
            Self::Nsys => "nsys",
            Self::Ncu => "ncu",
            Self::Sanitizer => "compute-sanitizer",
        }
    }
}

/// One part: a command, and the records that it makes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    pub(super) name: String,
    #[serde(default)]
    pub(super) needs: Vec<Need>,
    /// Seconds of its command, roughly, where no committed record contains them.
    pub(super) seconds: Option<f64>,
    /// The committed profile for `{profile}`, below `results` as `kept` of a record [default: the newest of a GPU].
    #[serde(default = "Part::profile")]
    profile: String,
    /// Words of the command, with placeholders in braces.
    pub(super) command: Vec<String>,
    /// File for its output, in the campaign's directory.
    pub(super) stdout: Option<String>,
    /// Pages that quote its records.
    pub(super) documents: Vec<String>,
    #[serde(rename = "record")]
    pub(super) records: Vec<Record>,
}

/// A record that a part makes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    /// Experiments with one such record each: `{spec}` in `made` and `kept` stands for their names, `{specs}` in the
    /// command for those of all records.
    #[serde(default)]
    specs: Vec<String>,
    /// Path in the campaign's directory.
    pub(super) made: String,
    /// The committed record, below `results`. The first component is a label, whose star stands for a date; a star by
    /// itself is any label of a GPU, which does not end in `sim`.
    kept: String,
    /// Key of the array of rows, in a document that is not itself an array.
    #[serde(default = "Record::rows")]
    pub(super) rows: String,
    /// Pointers to the values that identify a row. In an array `last` is its last element.
    pub(super) key: Vec<String>,
    /// Pointers to the values to compare.
    pub(super) figures: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Parts {
    part: Vec<Part>,
}

/// Reads the parts from a file, by default the repository's.
pub(super) fn read(named: Option<&Path>) -> Result<Vec<Part>> {
    let path = match named {
        Some(path) => path.to_owned(),
        None => repository::find(FILE).ok_or_else(|| anyhow!("experiments/{FILE} is not here; name it with --file"))?,
    };
    let text = read_text(&path, WRITTEN).with_context(|| format!("cannot read {}", path.display()))?;
    let mut parts: Parts = toml::from_str(&text).map_err(|error| anyhow!("{}: {}", path.display(), error.message()))?;
    for part in &mut parts.part {
        part.records = part.records.iter().flat_map(Record::of_each_spec).collect();
    }
    for (at, part) in parts.part.iter().enumerate() {
        if part.command.is_empty() || part.records.is_empty() {
            bail!("{}: part '{}' needs a command and a record", path.display(), part.name);
        }
        if parts.part[..at].iter().any(|other| other.name == part.name) {
            bail!("{}: two parts are called '{}'", path.display(), part.name);
        }
    }
    Ok(parts.part)
}

/// The parts with the given names, in the order of the file; all without a name.
pub(super) fn chosen(all: Vec<Part>, names: &[String]) -> Result<Vec<Part>> {
    let there = |name: &String| all.iter().any(|part| part.name == *name);
    if let Some(unknown) = names.iter().find(|name| !there(name)) {
        let known: Vec<&str> = all.iter().map(|part| part.name.as_str()).collect();
        bail!("no part is called '{unknown}'; there are {}", known.join(", "));
    }
    Ok(all.into_iter().filter(|part| names.is_empty() || names.contains(&part.name)).collect())
}

impl Record {
    fn rows() -> String {
        "rows".to_owned()
    }

    /// The record of each of its experiments; the record itself if it names none.
    fn of_each_spec(&self) -> Vec<Self> {
        let of = |spec: &String| {
            let fill = |text: &str| text.replace("{spec}", spec);
            Self { specs: vec![spec.clone()], made: fill(&self.made), kept: fill(&self.kept), ..self.clone() }
        };
        if self.specs.is_empty() { vec![self.clone()] } else { self.specs.iter().map(of).collect() }
    }

    /// The newest committed record, if any.
    pub(super) fn kept(&self) -> Result<Option<PathBuf>> {
        newest(&self.kept)
    }
}

/// The newest match of `pattern` below `results` ([`Record::kept`]), if any.
fn newest(pattern: &str) -> Result<Option<PathBuf>> {
    let Some(results) = repository::results()? else { return Ok(None) };
    let Some((first, name)) = pattern.split_once('/') else {
        let (before, after) = pattern.split_once('*').unwrap_or((pattern, ""));
        let fits =
            |name: &str| name.len() >= before.len() + after.len() && name.starts_with(before) && name.ends_with(after);
        let newest = repository::records(&results)?.into_iter().rfind(|record| fits(&record.name));
        return Ok(newest.map(|record| results.join(record.name)));
    };
    let device = first.strip_prefix("*-").unwrap_or(repository::GPU);
    repository::newest(&results, device, Path::new(name), Path::exists)
}

impl Part {
    fn profile() -> String {
        format!("*/{PROFILE}")
    }

    /// Whether it needs a GPU.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.needs.iter().any(|need| matches!(need, Need::Gpu | Need::TwoGpus | Need::FourGpus))
    }

    /// The first of its specs that is not here, if any.
    pub(super) fn missing_spec(&self) -> Option<&str> {
        let is_here = |spec: &str| repository::find(&format!("specs/{spec}.toml")).is_some();
        let mut names = self.records.iter().flat_map(|record| &record.specs).map(String::as_str);
        // A test's part names a file of its own in the command.
        let is_named = self.command.iter().any(|word| word == "{specs}");
        names.find(|spec| is_named && !is_here(spec))
    }

    /// The command with its placeholders filled.
    pub(super) fn words(&self, out: &Path, budget_s: f64) -> Result<Vec<String>> {
        let directory = repository::find(FILE).and_then(|path| Some(path.parent()?.to_owned()));
        let directory = directory.unwrap_or_else(|| PathBuf::from("experiments"));
        let made = Some(out.join(PROFILE)).filter(|path| path.exists());
        let committed = || newest(&self.profile);
        let profile = made.map_or_else(committed, |made| Ok(Some(made)))?.unwrap_or_else(|| PathBuf::from(PROFILE));
        let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let programs = repository::this_program()?.parent().map(Path::to_owned).unwrap_or_default();
        let fill = |word: &String| {
            word.replace("{out}", &out.to_string_lossy())
                .replace("{experiments}", &directory.to_string_lossy())
                .replace("{python}", &python)
                .replace("{programs}", &programs.to_string_lossy())
                .replace("{profile}", &profile.to_string_lossy())
                // Budget in whole seconds, which every program can parse.
                .replace("{budget}", &format!("{:.0}", budget_s.floor()))
        };
        let specs: Vec<String> = self.records.iter().flat_map(|record| record.specs.clone()).collect();
        Ok(self
            .command
            .iter()
            .flat_map(|word| if word == "{specs}" { specs.clone() } else { vec![fill(word)] })
            .collect())
    }
}
