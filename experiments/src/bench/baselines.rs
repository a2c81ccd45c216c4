//! Other projects' allocators, measured by programs of their own (`experiments/baselines`).

use super::cases::Case;
use super::report::{Missing, Report, Row};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PROGRAM: &str = "run.py";

/// What the baseline programs print.
#[derive(Debug, Deserialize)]
struct Output {
    rows: Vec<Row>,
    missing: Vec<Missing>,
}

/// The folder of the programs: the one named, the one of the sources that this program was built from, or the one below
/// the current directory.
pub(crate) fn find(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(folder) = named {
        return if folder.join(PROGRAM).is_file() {
            Ok(folder.to_owned())
        } else {
            bail!("{} holds no {PROGRAM}; --baselines-dir takes the folder experiments/baselines", folder.display())
        };
    }
    let places = [Path::new(env!("CARGO_MANIFEST_DIR")).join("baselines"), PathBuf::from("experiments/baselines")];
    let found = places.into_iter().find(|folder| folder.join(PROGRAM).is_file());
    found.context("the baseline programs are not here; name their folder (experiments/baselines) with --baselines-dir")
}

/// Runs the programs on the cases that allocators of other projects share and adds what they found.
pub(crate) fn run(folder: &Path, cases: &[Case], repeats: u32, report: &mut Report) -> Result<()> {
    let shared = |case: &&Case| matches!(case, Case::Pair { .. } | Case::Mixed { .. } | Case::Threads { .. });
    let names: Vec<String> = cases.iter().filter(shared).map(Case::to_string).collect();
    if names.is_empty() {
        return Ok(());
    }
    let command = Command::new("python3")
        .arg(folder.join(PROGRAM))
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
    let found: Output =
        serde_json::from_slice(&output.stdout).context("the baselines printed something other than their rows")?;
    report.rows.extend(found.rows);
    report.missing.extend(found.missing);
    Ok(())
}
