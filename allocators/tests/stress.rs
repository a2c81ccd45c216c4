//! Many threads at once: blocks that change hands, streams that share, limits that press, and somebody who reads the
//! statistics all the while. `STRESS_OPERATIONS` sets the operations of each thread.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::{GIB, MIB, Random, allocate, check_nothing_held, check_stats, free, sim};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use vramlab::backends::{CachingSettings, caching, naive, stream_ordered};
use vramlab::instruments::assert_layout;
use vramlab::{Backend, Block, DeviceAllocator, Driver, NullDriver, Selection, SimMemory, StreamId};

const THREADS: usize = 16;

fn operations(default: u64) -> u64 {
    std::env::var("STRESS_OPERATIONS").ok().map_or(default, |text| text.parse().unwrap())
}

struct Rig {
    allocator: Arc<dyn DeviceAllocator>,
    driver: Arc<dyn Driver>,
    streams: Vec<StreamId>,
    /// Blocks on their way from one thread to another, with the stream that they were allocated on.
    mailbox: Mutex<Vec<(Block, StreamId)>>,
    running: AtomicUsize,
    largest_log2: u64,
}

/// Counts a thread out when it ends, also by a panic: nobody waits for it then.
struct Leaves<'a>(&'a AtomicUsize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Rig {
    fn new(kind: &'static Backend, driver: Arc<dyn Driver>, limit: Option<u64>, largest_log2: u64) -> Self {
        let settings = CachingSettings { memory_limit: limit, ..CachingSettings::default() };
        let allocator = Selection::with(kind, &settings).build(&driver).unwrap();
        let streams = (0..THREADS).map(|_| driver.stream_create().unwrap()).collect();
        let running = AtomicUsize::new(THREADS);
        Self { allocator, driver, streams, mailbox: Mutex::default(), running, largest_log2 }
    }

    fn post(&self, block: Block, stream: StreamId) {
        self.mailbox.lock().unwrap().push((block, stream));
    }

    fn work(&self, allocator: &dyn DeviceAllocator, thread: usize, operations: u64) {
        let _leaves = Leaves(&self.running);
        let (mut random, own) = (Random::new(thread as u64 + 1), self.streams[thread]);
        let mut live: Vec<(Block, StreamId)> = Vec::new();
        for _ in 0..operations {
            match random.below(64) {
                0..28 if live.len() < 48 => {
                    // Mostly on the thread's own stream, sometimes on another's.
                    let stream = if random.below(8) == 0 { self.streams[random.below(16) as usize] } else { own };
                    match allocate(allocator, random.size(self.largest_log2), stream) {
                        Ok(block) => live.push((block, stream)),
                        Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                    }
                }
                0..56 if !live.is_empty() => {
                    let (block, stream) = live.swap_remove(random.below(live.len() as u64) as usize);
                    if random.below(6) == 0 {
                        let user = self.streams[random.below(16) as usize];
                        allocator.record_use(&block, user).unwrap();
                    }
                    if random.below(4) == 0 {
                        self.post(block, stream);
                    } else {
                        free(allocator, block, stream).unwrap();
                    }
                }
                56..63 => {
                    // Somebody else's block, on the stream it was allocated on.
                    let received = self.mailbox.lock().unwrap().pop();
                    if let Some((block, stream)) = received {
                        free(allocator, block, stream).unwrap();
                    }
                }
                63 if random.below(16) == 0 => {
                    allocator.trim(random.below(64) * MIB).unwrap();
                }
                _ => {}
            }
        }
        for (block, stream) in live {
            free(allocator, block, stream).unwrap();
        }
    }

    /// Statistics, layout and ledger while the others work.
    fn watch(&self, allocator: &dyn DeviceAllocator, limit: Option<u64>) -> u64 {
        let mut looks = 0;
        while self.running.load(SeqCst) > 0 {
            let stats = allocator.stats();
            check_stats(&stats);
            assert!(limit.is_none_or(|limit| stats.reserved_bytes.all.peak <= limit), "the limit was passed");
            if let Some(snapshot) = allocator.snapshot() {
                assert_layout(&snapshot);
                let ledger = snapshot.ledger(self.streams[0]);
                assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
            }
            let ledger = allocator.ledger_at_peak();
            assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
            if looks % 8 == 7 {
                allocator.reset_peaks();
            }
            looks += 1;
            thread::yield_now();
        }
        looks
    }

    fn run(&self, allocator: &dyn DeviceAllocator, operations: u64, limit: Option<u64>) {
        let looks = thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || self.work(allocator, thread, operations));
            }
            scope.spawn(|| self.watch(allocator, limit)).join().unwrap()
        });
        assert!(looks > 0, "somebody should have looked");
        for (block, stream) in self.mailbox.lock().unwrap().drain(..) {
            free(allocator, block, stream).unwrap();
        }
        self.driver.device_synchronize().unwrap();
        allocator.trim(0).unwrap();
        let stats = allocator.stats();
        check_nothing_held(&stats);
        assert_eq!(stats.reserved_bytes.all.current, 0);
        assert!(stats.allocation.all.allocated > operations, "{stats:#?}");
    }
}

/// Every byte poisoned and verified, and every overlap found.
fn with_the_checker(kind: &'static Backend, limit: Option<u64>) {
    let rig = Rig::new(kind, sim(GIB, SimMemory::Host), limit, 20);
    let checker = common::checker(Arc::clone(&rig.allocator), Arc::clone(&rig.driver));
    rig.run(&checker, operations(1_500), limit);
    let report = checker.report();
    assert!(report.is_clean(), "{:?} {:?}", report.violations, report.live);
    assert!(kind != &caching::BACKEND || report.verified_bytes > 0);
}

/// As fast as it goes.
fn at_full_speed(kind: &'static Backend, limit: Option<u64>) {
    let rig = Rig::new(kind, Arc::new(NullDriver::new(1 << 40)), limit, 25);
    rig.run(rig.allocator.as_ref(), operations(30_000), limit);
}

#[test]
fn caching_with_the_checker() {
    with_the_checker(&caching::BACKEND, None);
}

#[test]
fn caching_with_the_checker_under_a_limit() {
    with_the_checker(&caching::BACKEND, Some(80 * MIB));
}

#[test]
fn stream_ordered_with_the_checker() {
    with_the_checker(&stream_ordered::BACKEND, None);
}

#[test]
fn naive_with_the_checker() {
    with_the_checker(&naive::BACKEND, None);
}

#[test]
fn caching_at_full_speed() {
    at_full_speed(&caching::BACKEND, None);
}

#[test]
fn caching_at_full_speed_under_a_limit() {
    at_full_speed(&caching::BACKEND, Some(1200 * MIB));
}
