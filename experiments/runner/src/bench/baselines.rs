//! Other projects' allocators, measured by separate programs (`experiments/pytorch/baselines`).

use super::cases::{Case, Named, write_history};
use super::report::{Missing, Report, Row};
use crate::repository;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
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

/// Runs the programs on the cases that other projects' allocators support and adds their results.
pub(crate) fn run(folder: &Path, cases: &[Case], histories: &[Named], repeats: u32, report: &mut Report) -> Result<()> {
    let names: Vec<String> = cases.iter().filter(|case| case.is_for_all()).map(|case| case.name(histories)).collect();
    if names.is_empty() {
        return Ok(());
    }
    let calls = TempDir::new().context("cannot create a directory for the calls of the recordings")?;
    let mut command = Command::new("python3");
    command.arg(folder.join(PROGRAM));
    for case in cases {
        if let Case::History { number } = case {
            command.arg("--history").arg(write_history(&histories[*number], calls.path())?);
        }
    }
    let command = command
        .args(["--cases", &names.join(","), "--repeats", &repeats.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output();
    let output = match command {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            report.missing.push(Missing {
                allocator: "every baseline".into(),
                reason: "there is no python3 on the PATH".into(),
                remedy: "install Python 3 and PyTorch".into(),
            });
            return Ok(());
        }
        other => other.context("cannot start the baselines")?,
    };
    if !output.status.success() {
        bail!("the baselines ended with {}; what they said is above", output.status);
    }
    let document: Output =
        serde_json::from_slice(&output.stdout).context("the baselines printed something other than their rows")?;
    report.rows.extend(document.rows);
    report.missing.extend(document.missing);
    Ok(())
}
