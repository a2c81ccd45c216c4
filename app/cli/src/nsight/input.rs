//! The capture behind a file name: an export is read, a report is exported first.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};
use terminal::{Bar, command, quoted};
use vramlab_nsight::Capture;

/// Reads an SQLite export, or exports a report of Nsight Systems to a temporary file and reads that.
pub(crate) fn read(file: &Path) -> Result<Capture> {
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    let extension = file.extension().and_then(|extension| extension.to_str());
    if !matches!(extension, Some("nsys-rep" | "qdrep")) {
        bar.message(format!("reading {}", file.display()));
        let capture = vramlab_nsight::read(file);
        bar.clear();
        return Ok(capture?);
    }
    std::fs::metadata(file).with_context(|| file.display().to_string())?;
    let directory = tempfile::tempdir().context("cannot create a temporary directory")?;
    let export = directory.path().join("capture.sqlite");
    bar.message(format!("exporting {}", file.display()));
    let mut nsys = Command::new("nsys");
    nsys.args(["export", "--type", "sqlite", "--output"]).arg(&export).arg(file);
    let output = nsys.stdin(Stdio::null()).output();
    bar.clear();
    let by_hand = command("nsys", &format!("export --type sqlite {}", quoted(&file.display().to_string())));
    match output {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("{}: `nsys` is not on the PATH; export where it is: {by_hand}", file.display())
        }
        Err(error) => bail!("{}: cannot start `nsys`: {error}", file.display()),
        Ok(output) if !output.status.success() || !export.is_file() => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let line = stderr.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("no message");
            bail!("{}: `nsys export` failed ({line}); export by hand: {by_hand}", file.display())
        }
        Ok(_) => Ok(vramlab_nsight::read(&export)?),
    }
}
