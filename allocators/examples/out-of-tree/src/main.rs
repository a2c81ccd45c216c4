//! The trainer and `vramlab` with the allocators of this crate in their lists: `cargo run -- --alloc bump` trains,
//! `cargo run -- vramlab replay HISTORY --alloc bump,caching` replays.

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
    terminal::contains(&[("trainer", ""), ("vramlab", "vramlab")]);
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|word| word == "vramlab") {
        arguments.remove(0);
        return doctor::main(arguments);
    }
    trainer::cli::main(arguments)
}
