//! The three programs with the allocators of this crate in their lists: `cargo run -- --alloc bump` trains,
//! `cargo run -- vramlab replay HISTORY --alloc bump,caching` replays, `cargo run -- experiments compare bump caching` compares.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    for backend in bump_allocator::ALL {
        if let Err(error) = vramlab::backends::register(backend) {
            eprintln!("bump-allocator: {error}");
            return ExitCode::from(2);
        }
    }
    // Commands that are suggested begin with this program.
    terminal::contains(&[("trainer", ""), ("vramlab", "vramlab"), ("experiments", "experiments")]);
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let program: fn(Vec<OsString>) -> ExitCode = match arguments.get(1).and_then(|word| word.to_str()) {
        Some("vramlab") => vramlab_cli::main,
        Some("experiments") => experiments::main,
        // So `experiments` starts its runs.
        Some("trainer") => trainer::cli::main,
        _ => return trainer::cli::main(arguments),
    };
    arguments.remove(0);
    program(arguments)
}
