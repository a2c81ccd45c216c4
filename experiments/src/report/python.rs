//! Runs without events: their page is made by the analysis package from their records.

use super::ReportArgs;
use crate::compare::ArmFailed;
use crate::python;
use anyhow::{Result, bail};
use std::process::{Command, Stdio};

/// Has the analysis package make the page.
///
/// # Errors
/// One line where the package is not there; what it says itself goes to the terminal.
pub(super) fn page(args: &ReportArgs) -> Result<()> {
    if !python::has("vramlab.__main__") {
        bail!(
            "{}: a run without events is shown by the analysis package, which python3 does not have here; install it \
             (pip install ./analysis), or record the run with --trace",
            args.inputs.iter().find(|path| path.is_dir()).unwrap_or(&args.inputs[0]).display()
        );
    }
    let mut command = Command::new(python::interpreter());
    command.args(["-m", "vramlab", "report"]).args(&args.inputs).arg("--out").arg(&args.out);
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) if status.code() == Some(2) => bail!("{}: no page was made, as said above", args.out.display()),
        other => {
            let why = other.map_or_else(|error| error.to_string(), |status| status.to_string());
            Err(ArmFailed::at_run_time(&format!("python3 -m vramlab report: {why}")).into())
        }
    }
}
