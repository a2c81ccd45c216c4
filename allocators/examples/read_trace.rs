//! Reads a history and says what is in it: `cargo run --release -p allocators --example read_trace FILE`.

use allocators::trace::{Action, ReadOptions, read};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: read_trace FILE");
        return ExitCode::from(2);
    };
    let mut counts = [0_u64; Action::ALL.len()];
    let mut count = |event: allocators::trace::Event| {
        counts[event.action as usize] += 1;
        Ok(())
    };
    match read(Path::new(&path), &ReadOptions::default(), &mut count) {
        Ok(summary) => {
            println!("{}, {} bytes unpacked, {} events", summary.format.name(), summary.bytes, summary.all_events());
            for (action, count) in Action::ALL.iter().zip(counts).filter(|(_, count)| *count > 0) {
                println!("{action:>15} {count}");
            }
            println!("{:>15} {}", "segments left", summary.segments.len());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
