//! The three programs with this crate's allocators added: `cargo run -- --alloc bump` trains, `cargo run -- vramlab
//! replay HISTORY --alloc bump,caching` replays, `cargo run -- experiments compare bump caching` compares.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    for backend in bump_allocator::ALL {
        if let Err(error) = vramlab::backends::register(backend) {
            eprintln!("bump-allocator: {error}");
            return ExitCode::from(2);
        }
    }
    // Suggested commands begin with this program's name.
    terminal::contains(&[("trainer", ""), ("vramlab", "vramlab"), ("experiments", "experiments")]);
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let program: fn(Vec<OsString>) -> ExitCode = match arguments.get(1).and_then(|word| word.to_str()) {
        Some("vramlab") => vramlab_cli::main,
        Some("experiments") => experiments::main,
        // `experiments` starts its runs with these words.
        Some("trainer") => trainer::cli::main,
        _ => return trainer::cli::main(arguments),
    };
    arguments.remove(0);
    program(arguments)
}
