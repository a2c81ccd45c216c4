//! Readers and the compilation of histories on a million of whatever can make them slow. What they take grows with the
//! file: `allocators/histories/src/steps` counts it. This is for watching a change.
//!
//! `cargo bench -p vramlab --bench readers` measures, `cargo bench -p vramlab --bench readers -- --test` runs
//! everything once.
#![allow(missing_docs, reason = "Criterion's macros make undocumented functions")]
#![allow(clippy::unwrap_used, reason = "a benchmark reports a failure by panicking")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;
use vramlab::backends::CachingSettings;
use vramlab::histories::formats::{Action, Event, ReadOptions, read_from};
use vramlab::histories::replay::{History, HistoryBuilder};

const MANY: usize = 1_000_000;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const BASE: u64 = 1 << 40;

/// Files of a million items.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let pickle = |before: &[u8], item: &[u8], after: &[u8]| {
        [b"\x80\x04}(\x8c\x0ddevice_traces", before, &item.repeat(MANY)[..], after, b"u."].concat()
    };
    let event = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x10\x8c\x04sizeK\x20u";
    let json = |item: &str| format!("{{\"device_traces\":[[{}{item}]]}}", format!("{item},").repeat(MANY)).into_bytes();
    let rows = |header: &str, row: &str| [header.as_bytes(), row.repeat(MANY).as_bytes()].concat();
    vec![
        ("pickle events", pickle(b"](](", event, b"ee")),
        ("pickle keys", pickle(b"]", b"\x8c\x01x]", b"")),
        ("pickle references", pickle(b"]\x8c\x12allocator_settings}\x8c\x01x]\x94(", b"h\0", b"es")),
        ("pickle depth", pickle(b"]\x8c\x01x", b"(", &b"t".repeat(MANY))),
        ("json events", json("{\"action\":\"alloc\",\"addr\":1,\"size\":2}")),
        ("trace", rows("", "{\"time_ns\":1,\"action\":\"alloc\",\"addr\":1,\"size\":1,\"stream\":0}\n")),
        ("rmm", rows("Thread,Time,Action,Pointer,Size,Stream\n", "1,00:00:00.0,allocate,0x1,1,0\n")),
        ("stalloc", rows("", "1 1 1 1\n")),
        ("minimalloc", rows("id,lower,upper,size\n", "a,0,1,1\n")),
    ]
}

fn event(action: Action, addr: u64, bytes: u64) -> Event {
    Event { action, device: 0, addr, bytes, stream: 0, time_ns: 0 }
}

/// Histories with a million frees that are held up.
fn histories() -> Vec<(&'static str, Vec<Event>)> {
    let many = MANY as u64;
    let each = |action| (0..many).map(move |at| event(action, BASE + at * KIB, KIB));
    let held_up = || each(Action::Alloc).chain(each(Action::FreeRequested));
    let segments = (0..many).map(|at| event(Action::SegmentAlloc, 2 * BASE + at * MIB, MIB));
    let turns = [Action::SegmentFree, Action::SegmentAlloc].map(|action| event(action, BASE, many * KIB));
    let end = BASE + many * KIB;
    let last = [event(Action::SegmentAlloc, end, 2 * MIB), event(Action::Alloc, end, 2 * KIB)];
    let released = std::iter::once(turns[1]).chain(held_up()).chain(each(Action::FreeCompleted));
    vec![
        ("completions after segments", held_up().chain(segments).chain(each(Action::FreeCompleted)).collect()),
        ("segments that go after completions", released.chain((0..MANY).map(|at| turns[at % 2])).chain(last).collect()),
    ]
}

fn compile(events: &[Event]) -> History {
    let mut builder = HistoryBuilder::new(None);
    events.iter().for_each(|event| builder.push(event).unwrap());
    builder.finish(&CachingSettings { memory_limit: Some(MIB), ..CachingSettings::default() }).unwrap()
}

fn readers(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    for (name, bytes) in files() {
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        let read = || {
            read_from(Box::new(&bytes[..]), &ReadOptions::default(), &mut |event| {
                black_box(event);
                Ok(())
            })
        };
        group.bench_function(name, |bencher| bencher.iter(|| read().unwrap()));
    }
}

fn compilation(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("compile");
    for (name, events) in histories() {
        group.throughput(Throughput::Elements(events.len() as u64));
        group.bench_function(name, |bencher| bencher.iter(|| compile(&events)));
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(2));
    targets = readers, compilation
}
criterion_main!(benches);
