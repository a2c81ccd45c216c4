//! Commands that the analysis package has, which is Python.

use anyhow::{Result, bail};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use terminal::RuntimeFailure;

/// Commands of `python3 -m vramlab_analysis`.
const COMMANDS: [&str; 3] = ["steps", "losses", "nsight"];

/// What help says of them.
pub(crate) const HELP: &str = "The analysis package (pip install ./analysis) adds: steps, losses, nsight";

/// What runs the commands.
const PACKAGE: &str = "vramlab_analysis.__main__";

/// Modules without which it does not load.
const NEEDS: [&str; 7] = [PACKAGE, "hdrh", "matplotlib", "numpy", "PIL", "polars", "pydantic"];

/// The interpreter: that of the environment in which this program is installed, else the first of the path.
pub(crate) fn interpreter() -> PathBuf {
    let name = if cfg!(windows) { "python.exe" } else { "python3" };
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name(name));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| name.into())
}

/// The first of some modules that cannot be imported; that of the list without an interpreter.
fn missing<'m>(modules: &[&'m str]) -> Option<&'m str> {
    const LOOK: &str = "import importlib.util as u, sys\nfor name in sys.argv[1:]:\n    try:\n        found = u.find_spec(name)\n    \
                        except ImportError:\n        found = None\n    if found is None:\n        sys.exit(name)\n";
    let looked = Command::new(interpreter()).args(["-c", LOOK]).args(modules).stdin(Stdio::null()).output();
    match looked {
        Ok(looked) if looked.status.success() => None,
        Ok(looked) => {
            let said = String::from_utf8_lossy(&looked.stderr).into_owned();
            modules.iter().find(|module| said.trim_end() == **module).or(modules.first()).copied()
        }
        Err(_) => modules.first().copied(),
    }
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
    if let Some(module) = missing(&NEEDS) {
        let python = interpreter().display().to_string();
        const BRINGS: &str = "pip install ./analysis brings it, for Python 3.11 or newer";
        match module {
            PACKAGE => bail!("{name}: the analysis package has this command, and {python} does not have it; {BRINGS}"),
            _ => bail!("{name}: the analysis needs {module}, and {python} does not have it; {BRINGS}"),
        }
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
