//! Other projects' allocators, measured by separate programs (`experiments/pytorch/baselines`).

use super::cases::{Case, Named, write_history};
use super::measure::Sample;
use super::report::{Missing, Row};
use crate::repository;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

const PROGRAM: &str = "run.py";

/// Output of the baseline programs.
#[derive(Debug, Deserialize)]
struct Output {
    rows: Vec<Row>,
    missing: Vec<Missing>,
}

/// The directory of the programs: the given one, the one below the current directory, or the one in the sources.
pub(crate) fn find(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(folder) = named {
        return if folder.join(PROGRAM).is_file() {
            Ok(folder.to_owned())
        } else {
            bail!(
                "{} has no {PROGRAM}; --baselines-dir takes the directory experiments/pytorch/baselines",
                folder.display()
            )
        };
    }
    let directory = repository::find("pytorch/baselines").filter(|folder| folder.join(PROGRAM).is_file());
    directory.context(
        "the baseline programs are not here; name their directory (experiments/pytorch/baselines) with --baselines-dir",
    )
}

/// The programs on the cases that other projects' allocators support, and their results so far.
#[derive(Debug)]
pub(crate) struct Baselines {
    /// The program's file, and its arguments.
    words: Vec<OsString>,
    /// The calls of the recordings.
    _calls: TempDir,
    pub(crate) rows: Vec<Row>,
    pub(crate) missing: Vec<Missing>,
}

impl Baselines {
    /// Writes the calls of the recordings; `None` if no case is one that other projects' allocators support.
    pub(crate) fn new(folder: &Path, cases: &[Case], histories: &[Named]) -> Result<Option<Self>> {
        let for_all = cases.iter().filter(|case| case.is_for_all());
        let names: Vec<String> = for_all.map(|case| case.name(histories)).collect();
        if names.is_empty() {
            return Ok(None);
        }
        let calls = TempDir::new().context("cannot create a directory for the calls of the recordings")?;
        let mut words = vec![folder.join(PROGRAM).into_os_string()];
        for case in cases {
            if let Case::History { number } = case {
                words.push("--history".into());
                words.push(write_history(&histories[*number], calls.path())?.into());
            }
        }
        words.extend(["--repeats", "1", "--cases", &names.join(",")].map(OsString::from));
        Ok(Some(Self { words, _calls: calls, rows: Vec::new(), missing: Vec::new() }))
    }

    /// Runs the programs once and adds their samples. What is missing is missing in each repeat.
    pub(crate) fn repeat(&mut self) -> Result<()> {
        let mut command = Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()));
        let output = match command.args(&self.words).stdin(Stdio::null()).stderr(Stdio::inherit()).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.missing = vec![Missing {
                    allocator: "every baseline".into(),
                    reason: "there is no python3 on the PATH".into(),
                    remedy: "install Python 3 and PyTorch".into(),
                }];
                return Ok(());
            }
            other => other.context("cannot start the baselines")?,
        };
        if !output.status.success() {
            bail!("the baselines ended with {}; what they said is above", output.status);
        }
        let document: Output =
            serde_json::from_slice(&output.stdout).context("the baselines printed something other than their rows")?;
        self.missing = document.missing;
        for new in document.rows {
            let known = |row: &&mut Row| row.case == new.case && row.allocator == new.allocator;
            match self.rows.iter_mut().find(known) {
                Some(row) => {
                    let operations = new.operations;
                    new.samples.iter().for_each(|value| row.add(Sample { value: *value, operations }));
                }
                None => self.rows.push(new),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    /// Each repeat starts the programs anew for one sample, so that they can take turns with other allocators.
    #[test]
    #[ignore = "needs python3; run with --ignored"]
    fn samples_of_each_repeat_are_added() {
        let folder = TempDir::new().unwrap();
        let program = r#"
import json, pathlib, sys
assert sys.argv[1:] == ["--repeats", "1", "--cases", "pair/512"], sys.argv
count = pathlib.Path(__file__).with_name("count")
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
row = {"case": "pair/512", "allocator": "pytorch-c10", "program": "c10", "device": "cuda", "threads": 1, "unit": "ns/operation",
       "median": number, "min": number, "max": number, "operations": 7, "samples": [number]}
missing = {"allocator": "rmm-pool", "reason": "none", "remedy": "install it"}
print(json.dumps({"rows": [row], "missing": [missing]}))
"#;
        std::fs::write(folder.path().join(PROGRAM), program).unwrap();
        let mut others = Baselines::new(folder.path(), &[Case::Pair { bytes: 512 }], &[]).unwrap().unwrap();
        for _ in 0..3 {
            others.repeat().unwrap();
        }
        let [row] = others.rows.as_slice() else { panic!("{:?}", others.rows) };
        assert_eq!((row.samples.as_slice(), row.median, row.min, row.max), ([1.0, 2.0, 3.0].as_slice(), 2.0, 1.0, 3.0));
        assert_eq!(others.missing.len(), 1, "named once");
        assert!(Baselines::new(folder.path(), &[], &[]).unwrap().is_none());
    }
}
