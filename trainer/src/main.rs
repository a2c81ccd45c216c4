//! The trainer's program: see `trainer --help`.

mod cli;
mod progress;

fn main() {
    // A panic is a bug of ours; a person gets one line that says so instead of a backtrace.
    std::panic::set_hook(Box::new(|panic| eprintln!("error: internal fault, please report it: {panic}")));
    let code = cli::main();
    std::process::exit(code);
}
