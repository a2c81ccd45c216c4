//! Commands that the analysis package has, which is Python.

use anyhow::{Result, bail};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use terminal::RuntimeFailure;

/// Commands of `python3 -m vramlab_analysis`.
const COMMANDS: [&str; 6] = ["steps", "losses", "nsight", "readme-figures", "readme", "notebooks"];

/// What help says of them.
pub(crate) const HELP: &str = "The analysis package (pip install ./analysis) adds: steps, losses, nsight, readme-figures, \
                               readme, notebooks";

/// The interpreter: that of the environment in which this program is installed, else the first of the path.
pub(crate) fn interpreter() -> PathBuf {
    let name = if cfg!(windows) { "python.exe" } else { "python3" };
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name(name));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| name.into())
}

/// Whether a module of the package can be imported.
pub(crate) fn has(module: &str) -> bool {
    let mut command = Command::new(interpreter());
    command.arg("-c").arg(format!("import importlib.util as u, sys; sys.exit(u.find_spec('{module}') is None)"));
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Has the package run a command of its own, whose words are `arguments`. Its exit code is this program's.
///
/// # Errors
/// One line where there is no such command, or the package is not there.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let name = arguments.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if !COMMANDS.contains(&name.as_str()) {
        bail!("'{name}' is no command of vramlab; vramlab --help lists them");
    }
    if !has("vramlab_analysis.__main__") {
        bail!(
            "{name}: the analysis package has this command, and {} does not have it; pip install ./analysis",
            interpreter().display()
        );
    }
    match Command::new(interpreter()).args(["-m", "vramlab_analysis"]).args(arguments).status() {
        Ok(status) if status.success() => Ok(()),
        // It has said what is wrong.
        Ok(status) if status.code().is_some() => std::process::exit(status.code().unwrap_or(1)),
        other => {
            let why = other.map_or_else(|error| error.to_string(), |status| status.to_string());
            Err(RuntimeFailure::new(format!("python3 -m vramlab_analysis {name}: {why}")).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_those_of_the_package() {
        let main = concat!(env!("CARGO_MANIFEST_DIR"), "/../../analysis/src/vramlab_analysis/__main__.py");
        let source = std::fs::read_to_string(main).unwrap();
        let parsers = source.split("commands.add_parser(").skip(1);
        let names: Vec<&str> = parsers.filter_map(|rest| rest.split('"').nth(1)).collect();
        assert_eq!(names, COMMANDS);
        assert!(COMMANDS.iter().all(|name| HELP.contains(name)));
    }
}
