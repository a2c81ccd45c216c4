//! Runs the trainer under several allocators and compares the records; measures allocators and device profiles.

use std::process::ExitCode;

fn main() -> ExitCode {
    experiments::main(std::env::args_os().collect())
}
