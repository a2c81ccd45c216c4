//! The trainer with two allocators more: `cargo run -- --alloc bump`, or `snug`.

use std::process::ExitCode;

fn main() -> ExitCode {
    for backend in [&bump_allocator::BACKEND, &bump_allocator::snug::BACKEND] {
        if let Err(error) = vramlab::backends::register(backend) {
            eprintln!("bump-allocator: {error}");
            return ExitCode::from(2);
        }
    }
    trainer::cli::main(std::env::args_os().collect())
}
