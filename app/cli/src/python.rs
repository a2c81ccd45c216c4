//! Commands of the Python analysis package.

use anyhow::{Result, bail};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use terminal::RuntimeFailure;

/// Commands of `python3 -m vramlab_analysis`.
const COMMANDS: [&str; 2] = ["steps", "losses"];

/// The line below the commands in `--help`.
pub(crate) const HELP: &str = "Commands of the analysis package (pip install ./analysis): steps, losses";

/// The module that runs the commands.
const PACKAGE: &str = "vramlab_analysis.__main__";

/// Modules that it imports.
const NEEDS: [&str; 7] = [PACKAGE, "hdrh", "matplotlib", "numpy", "PIL", "polars", "pydantic"];

/// The Python interpreter of the environment in which this program is installed, else the first on the path.
pub(crate) fn interpreter() -> PathBuf {
    let name = if cfg!(windows) { "python.exe" } else { "python3" };
    let installed = std::env::current_exe().ok().map(|exe| exe.with_file_name(name));
    installed.filter(|path| path.is_file()).unwrap_or_else(|| name.into())
}

/// The first module that cannot be imported; without an interpreter, the first of the list.
fn missing<'m>(modules: &[&'m str]) -> Option<&'m str> {
    const FIND: &str = "import importlib.util as u, sys\nfor name in sys.argv[1:]:\n    try:\n        spec = u.find_spec(name)\n    \
                        except ImportError:\n        spec = None\n    if spec is None:\n        sys.exit(name)\n";
    match Command::new(interpreter()).args(["-c", FIND]).args(modules).stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let name = String::from_utf8_lossy(&output.stderr).into_owned();
            modules.iter().find(|module| name.trim_end() == **module).or(modules.first()).copied()
        }
        Err(_) => modules.first().copied(),
    }
}

/// The command with the most similar name, as a question; nothing if no name is similar.
fn nearest(name: &str) -> String {
    let command = crate::command_line::command();
    let names = command.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name);
    let similar = names.chain(COMMANDS).map(|known| (strsim::jaro_winkler(name, known), known));
    // The threshold of clap's own suggestions is 0.7.
    let best = similar.filter(|(similarity, _)| *similarity > 0.7).max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.map_or_else(String::new, |(_, known)| format!(" (did you mean {known}?)"))
}

/// Runs a command of the package with `arguments`, the first of which is its name. Its exit code becomes this program's.
///
/// # Errors
/// The command does not exist, or the package is not installed.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let name = arguments.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if !COMMANDS.contains(&name.as_str()) {
        bail!("'{name}' is not a command of vramlab{}; vramlab --help lists the commands", nearest(&name));
    }
    if let Some(module) = missing(&NEEDS) {
        let python = interpreter().display().to_string();
        const INSTALL: &str = "install it with pip install ./analysis (Python 3.11 or newer)";
        match module {
            PACKAGE => bail!("{name}: needs the analysis package, which {python} does not have; {INSTALL}"),
            _ => bail!("{name}: needs the Python module {module}, which {python} does not have; {INSTALL}"),
        }
    }
    match Command::new(interpreter()).args(["-m", "vramlab_analysis"]).args(arguments).status() {
        Ok(status) if status.success() => Ok(()),
        // The command has printed its error.
        Ok(status) if status.code().is_some() => std::process::exit(status.code().unwrap_or(1)),
        other => {
            let why = other.map_or_else(|error| error.to_string(), |status| status.to_string());
            Err(RuntimeFailure::new(format!("python3 -m vramlab_analysis {name}: {why}")).into())
        }
    }
}
