//! The trainer with one allocator more: `cargo run -- --alloc bump`.

fn main() {
    if let Err(error) = vramlab::backends::register(&bump_allocator::BACKEND) {
        eprintln!("bump-allocator: {error}");
        std::process::exit(2);
    }
    std::process::exit(trainer::cli::main(std::env::args_os().collect()));
}
