//! What a shell needs to complete a program's command lines.

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

/// The arguments of a program's `completions`.
#[derive(Clone, Debug, Args)]
pub struct Completions {
    /// The shell that is to read it, as in: source <(PROGRAM completions bash)
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the shell's script for a program's grammar.
///
/// # Errors
/// As [`print_json`](crate::print_json).
pub fn completions(args: &Completions, mut program: Command) -> Result<()> {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    crate::write_out(&String::from_utf8_lossy(&script))
}
