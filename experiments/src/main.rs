//! Runs the trainer under several allocators and compares what it recorded; replays and converts histories; measures device profiles.

use std::process::ExitCode;

fn main() -> ExitCode {
    experiments::experiments()
}
