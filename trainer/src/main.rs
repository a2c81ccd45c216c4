//! The trainer's program: see `trainer --help`.

fn main() {
    std::process::exit(trainer::cli::main(std::env::args_os().collect()));
}
