//! Answers questions about a recorded history of PyTorch's allocator.

use std::process::ExitCode;

fn main() -> ExitCode {
    vramlab_cli::main(std::env::args_os().collect())
}
