//! The trainer's program: see `trainer --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    trainer::cli::main(std::env::args_os().collect())
}
