//! The program `vramlab`.

use std::process::ExitCode;

fn main() -> ExitCode {
    vramlab_cli::main(std::env::args_os().collect())
}
