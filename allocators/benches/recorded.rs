//! The recorded histories as a loop, for counting instructions: what a processor shared with others cannot blur.
//!
//! ```text
//! cargo bench -p vramlab --bench recorded --no-run     # prints the program's path
//! valgrind --tool=callgrind --branch-sim=yes --callgrind-out-file=/dev/null \
//!     --toggle-collect='*Caching as *allocate' PROGRAM gpt2 2 1 # `deallocate` ends in that, too
//! ```
//!
//! Arguments: a case (a history's name, `mixed/LIVE`, `threads/THREADS`, or `all`), passes over it, and samples. With several
//! samples it prints nanoseconds for an allocation and its free: the least and the median. In `threads` each thread does
//! `mixed/64` on a stream of its own, and the figure is the time for which one of all their pairs stands. `experiments bench`
//! is what figures are quoted from.
#![allow(clippy::unwrap_used, reason = "a benchmark reports a failure by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;
use vramlab::backends::{Caching, CachingSettings};
use vramlab::histories::formats::{ReadError, ReadOptions, read};
use vramlab::histories::replay::HistoryBuilder;
use vramlab::histories::workload::{RecordedCalls, Sequence, Slots};
use vramlab::{DeviceAllocator, Driver, NullDriver, StreamId};

const STEPS: usize = 100_000;

fn recorded_files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../experiments/histories");
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|file| file.to_string_lossy().ends_with(".pickle.xz"));
    files.sort();
    files
}

fn load(path: &Path) -> RecordedCalls {
    let options = ReadOptions::default();
    let mut builder = HistoryBuilder::new(None).within(&options.budget);
    let summary = read(path, &options, &mut |event| builder.push(&event).map_err(ReadError::stop)).unwrap();
    builder.ends_with(&summary.segments).unwrap();
    RecordedCalls::new(&builder.finish(&CachingSettings::default()).unwrap())
}

/// Runs a case `samples` times and prints what an allocation and its free took.
fn sample(name: &str, samples: usize, allocations: u64, mut run: impl FnMut()) {
    let mut times: Vec<f64> = (0..samples)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64() * 1e9 / allocations as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{name} least {:.2} median {:.2} ns ({allocations} allocations)", times[0], times[times.len() / 2]);
}

/// An allocator with as many streams of its device.
fn caching(streams: u32) -> (Caching, Vec<StreamId>) {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 46));
    let streams = (0..streams).map(|_| driver.stream_create().unwrap()).collect();
    (Caching::new(driver, CachingSettings::default()), streams)
}

fn main() {
    // Cargo adds `--bench`, and `--test` where everything is to run once.
    let (options, words): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let once = !options.iter().any(|option| option == "--bench");
    let case = words.first().map_or("all", String::as_str);
    let number = |at: usize, otherwise| words.get(at).map_or(otherwise, |word| word.parse::<u64>().unwrap());
    let passes = number(1, if once { 1 } else { 20 });
    let samples = number(2, if once { 1 } else { 20 }) as usize;
    for file in recorded_files() {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let name = name.split('.').next().unwrap_or_default();
        if case != "all" && case != name {
            continue;
        }
        let calls = load(&file);
        let (allocator, streams) = caching(calls.streams());
        sample(name, samples, passes * calls.allocations(), || calls.run(&allocator, &streams, passes).unwrap());
    }
    for live in [64, 1_024, 16_384] {
        let name = format!("mixed/{live}");
        if case != "all" && case != name {
            continue;
        }
        let ((allocator, streams), sequence) = (caching(1), Sequence::new(1, live, STEPS));
        let allocator: &dyn DeviceAllocator = &allocator;
        let mut slots = Slots::fill(allocator, streams[0], &sequence.fill).unwrap();
        sample(&name, samples, passes * STEPS as u64, || {
            for _ in 0..passes {
                slots.run(&sequence.steps).unwrap();
            }
        });
    }
    for threads in [1, 2, 4, 8, 16] {
        let name = format!("threads/{threads}");
        if case != "all" && case != name {
            continue;
        }
        let (allocator, streams) = caching(threads);
        let sequences: Vec<_> = (1..=threads).map(|seed| Sequence::new(u64::from(seed), 64, STEPS)).collect();
        let fill = |sequence: &Sequence, stream| Slots::fill(&allocator, stream, &sequence.fill).unwrap();
        let work = sequences.iter().zip(streams).map(|(sequence, stream)| (fill(sequence, stream), &sequence.steps));
        let mut work: Vec<_> = work.collect();
        sample(&name, samples, passes * STEPS as u64 * u64::from(threads), || {
            thread::scope(|scope| {
                for (slots, steps) in &mut work {
                    scope.spawn(|| (0..passes).for_each(|_| slots.run(steps).unwrap()));
                }
            });
        });
    }
}
