//! The trainer with two allocators more: `cargo run -- --alloc bump`, or `snug`.

fn main() {
    for backend in [&bump_allocator::BACKEND, &bump_allocator::snug::BACKEND] {
        if let Err(error) = vramlab::backends::register(backend) {
            eprintln!("bump-allocator: {error}");
            std::process::exit(2);
        }
    }
    std::process::exit(trainer::cli::main(std::env::args_os().collect()));
}
