//! The instruments under threads: nothing is lost, and the order in a trace is the order in which it happened.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::{GIB, Random, allocate, build, free};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use vramlab::backends::caching;
use vramlab::contract::Action;
use vramlab::device::{Clock, MonotonicClock};
use vramlab::instruments::{EventTrace, Operation, Timed, Traced};
use vramlab::{DeviceAllocator, Driver, NullDriver};

const THREADS: u64 = 8;
const PAIRS: u64 = 30_000;

/// Time that stands still, as virtual time does while no driver is called.
#[derive(Debug)]
struct Still;

impl Clock for Still {
    fn now_ns(&self) -> u64 {
        7
    }
}

fn backend() -> Arc<dyn DeviceAllocator> {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(64 * GIB));
    build(&caching::BACKEND, &driver)
}

/// Allocates and frees from several threads on one stream, so that addresses pass from thread to thread; some blocks
/// are held for a while.
fn work(allocator: &dyn DeviceAllocator, stop: &AtomicBool) {
    let stream = common::stream(1);
    let running = AtomicU64::new(THREADS);
    thread::scope(|scope| {
        for seed in 0..THREADS {
            let running = &running;
            scope.spawn(move || {
                let (mut random, mut held) = (Random::new(seed), Vec::new());
                for _ in 0..PAIRS {
                    held.push(allocate(allocator, 512 << random.below(3), stream).unwrap());
                    if held.len() > 3 {
                        let block = held.swap_remove(random.below(4) as usize);
                        free(allocator, block, stream).unwrap();
                    }
                }
                for block in held {
                    free(allocator, block, stream).unwrap();
                }
                if running.fetch_sub(1, Relaxed) == 1 {
                    stop.store(true, Relaxed);
                }
            });
        }
    });
}

/// Follows a trace as a replay would: who holds what must always be plain.
fn follow(events: &[Traced]) {
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    for (at, Traced { event, block, .. }) in events.iter().enumerate() {
        let addr = event.addr;
        match event.action {
            Action::Alloc => {
                let before = live.range(..addr + block).next_back().map(|(other, bytes)| other + bytes);
                assert!(before.is_none_or(|end| end <= addr), "event {at}: {event:?} while it is held");
                live.insert(addr, *block);
            }
            Action::FreeRequested => assert_eq!(live.remove(&addr), Some(*block), "event {at}: {event:?}"),
            other => panic!("event {at}: {other:?}"),
        }
    }
    assert!(live.is_empty());
    assert!(events.windows(2).all(|pair| pair[0].event.time_ns <= pair[1].event.time_ns));
}

fn clocks() -> [Arc<dyn Clock>; 2] {
    [Arc::new(MonotonicClock::new()), Arc::new(Still)]
}

#[test]
fn a_free_comes_before_the_next_allocation_at_its_address() {
    for clock in clocks() {
        let trace = EventTrace::new(backend(), clock);
        work(&trace, &AtomicBool::new(false));
        let events = trace.take();
        assert_eq!(events.len() as u64, 2 * THREADS * PAIRS, "an event was lost");
        follow(&events);
        assert!(trace.take().is_empty());
    }
}

#[test]
fn events_that_are_taken_while_threads_work_join_without_a_gap() {
    for clock in clocks() {
        let trace = EventTrace::new(backend(), clock);
        let stop = AtomicBool::new(false);
        let mut events = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| work(&trace, &stop));
            while !stop.load(Relaxed) {
                events.extend(trace.take());
                thread::yield_now();
            }
        });
        events.extend(trace.take());
        assert_eq!(events.len() as u64, 2 * THREADS * PAIRS, "an event was lost");
        follow(&events);
    }
}

#[test]
fn histograms_hold_the_operations_of_all_threads() {
    let timed = Timed::new(backend(), Arc::new(MonotonicClock::new()));
    let count = |wanted: Operation| -> u64 {
        let of = timed.histograms().into_iter().filter(|(operation, ..)| *operation == wanted);
        of.map(|(_, _, histogram)| histogram.len()).sum()
    };
    // Twice, so that threads that have ended and threads that take their place are in it.
    for round in 1..=2 {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| work(&timed, &stop));
            let mut last = (round - 1) * THREADS * PAIRS;
            while !stop.load(Relaxed) {
                let now = count(Operation::Allocate);
                assert!((last..=round * THREADS * PAIRS).contains(&now), "{now} allocations after {last}");
                last = now;
                thread::yield_now();
            }
        });
        assert_eq!(count(Operation::Allocate), round * THREADS * PAIRS);
        assert_eq!(count(Operation::Deallocate), round * THREADS * PAIRS);
    }
    let rows = timed.rows();
    assert!(rows.iter().all(|row| row.min_ns <= row.p50_ns && row.p50_ns <= row.max_ns), "{rows:?}");
    assert!(rows.iter().any(|row| row.p50_ns > 0), "a real clock should see time pass: {rows:?}");
}
