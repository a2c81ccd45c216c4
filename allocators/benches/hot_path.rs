//! The cases of `experiments bench` on the null device, under Criterion: for watching a change. Figures that are quoted
//! come from `experiments bench`, which compares in one run.
//!
//! `cargo bench -p allocators` measures, `cargo bench -p allocators -- --test` runs everything once.
#![allow(missing_docs, reason = "Criterion's macros make undocumented functions")]
#![allow(clippy::unwrap_used, reason = "a benchmark reports a failure by panicking")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};
use vramlab::backends::{self, caching};
use vramlab::histories::workload::{self, Sequence, Slots};
use vramlab::instruments::{EventTrace, Timed};
use vramlab::{Backend, DeviceAllocator, Driver, NullDriver, Selection, StreamId};

const STREAM: StreamId = stream(1);

const fn stream(number: u64) -> StreamId {
    // SAFETY: given to the null device only, which checks none.
    unsafe { StreamId::from_raw(number) }
}
/// Operations in one iteration, so that a look at the clock is nothing beside them.
const BATCH: usize = 1_000;
const STEPS: usize = 16_000;

fn build(kind: &'static Backend) -> Arc<dyn DeviceAllocator> {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 46));
    Selection::of(kind).build(&driver).unwrap()
}

fn pairs(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pair");
    group.throughput(Throughput::Elements(BATCH as u64));
    for kind in backends::all() {
        for bytes in [512, 64 << 10, 1 << 20, 32 << 20] {
            let allocator = build(kind);
            let run = || workload::pair(allocator.as_ref(), STREAM, bytes, BATCH as u64).unwrap();
            group.bench_function(BenchmarkId::new(kind.name, bytes), |bencher| bencher.iter(run));
        }
    }
}

fn mixed(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("mixed");
    group.throughput(Throughput::Elements(BATCH as u64));
    for kind in backends::all() {
        for live in [64, 1_024, 16_384] {
            let (allocator, sequence) = (build(kind), Sequence::new(1, live, STEPS));
            let mut slots = Slots::fill(allocator.as_ref(), STREAM, &sequence.fill).unwrap();
            slots.run(&sequence.steps).unwrap();
            let mut batches = sequence.steps.chunks_exact(BATCH).cycle();
            group.bench_function(BenchmarkId::new(kind.name, live), |bencher| {
                bencher.iter(|| batches.next().map(|batch| slots.run(batch).unwrap()));
            });
        }
    }
}

/// Time for `rounds` batches by each thread on a stream of its own.
fn in_threads(allocator: &dyn DeviceAllocator, threads: u64, rounds: u64) -> Duration {
    let ready = Barrier::new(threads as usize + 1);
    thread::scope(|scope| {
        let workers: Vec<_> = (1..=threads)
            .map(|at| {
                let ready = &ready;
                scope.spawn(move || {
                    let sequence = Sequence::new(at, 64, STEPS);
                    let mut slots = Slots::fill(allocator, stream(at), &sequence.fill).unwrap();
                    slots.run(&sequence.steps[..BATCH]).unwrap();
                    ready.wait();
                    for batch in sequence.steps.chunks_exact(BATCH).cycle().take(rounds as usize) {
                        slots.run(batch).unwrap();
                    }
                    // Before the blocks go back.
                    Instant::now()
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        let ends = workers.into_iter().map(|worker| worker.join().unwrap().saturating_duration_since(start));
        ends.max().unwrap_or_default()
    })
}

fn threads(criterion: &mut Criterion) {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let mut group = criterion.benchmark_group("threads");
    for kind in backends::all() {
        for threads in [1, 2, 4, 8, 16].into_iter().filter(|threads| *threads <= cores) {
            let allocator = build(kind);
            group.throughput(Throughput::Elements(threads * BATCH as u64));
            group.bench_function(BenchmarkId::new(kind.name, threads), |bencher| {
                bencher.iter_custom(|rounds| in_threads(allocator.as_ref(), threads, rounds));
            });
        }
    }
}

fn instruments(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("instrument");
    group.throughput(Throughput::Elements(2 * BATCH as u64));
    let clock = NullDriver::new(1).clock();
    let run = |allocator: &dyn DeviceAllocator| workload::pair(allocator, STREAM, 4096, BATCH as u64).unwrap();
    let bare = build(&caching::BACKEND);
    group.bench_function("bare", |bencher| bencher.iter(|| run(bare.as_ref())));
    let timed = Timed::new(build(&caching::BACKEND), Arc::clone(&clock));
    group.bench_function("latency", |bencher| bencher.iter(|| run(&timed)));
    let trace = EventTrace::new(build(&caching::BACKEND), clock);
    group.bench_function("trace", |bencher| {
        bencher.iter_custom(|rounds| {
            let mut time = Duration::ZERO;
            // Events are taken now and then, outside the time, so that memory does not run out.
            for _ in 0..rounds {
                let start = Instant::now();
                run(&trace);
                time += start.elapsed();
                assert_eq!(trace.take().len(), 2 * BATCH);
            }
            time
        });
    });
}

criterion_group! {
    name = hot_path;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    targets = pairs, mixed, threads, instruments
}
criterion_main!(hot_path);
