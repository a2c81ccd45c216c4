//! Concurrent threads: blocks that change hands, streams that share, limits, and a thread that reads the statistics.
//! `STRESS_OPERATIONS` sets the operations of each thread.

use super::Bench;
use super::demand::{Outcome as _, demand, demand_eq};
use super::support::{
    GIB, MIB, Random, allocate, check_ledger, check_nothing_held, check_snapshot, check_stats, checker, free, join, sim,
};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use vramlab_device::{Bytes, Driver, NullDriver, StreamId, sim::SimMemory};
use vramlab_policies::backends::{Capabilities, Selection};
use vramlab_policies::contract::{Block, DeviceAllocator};
use vramlab_policies::restless;

const THREADS: usize = 16;

/// The setting of backends with a limit of their own.
pub(super) const LIMIT: &str = "memory_limit";

fn operations(default: u64) -> u64 {
    std::env::var("STRESS_OPERATIONS").ok().map_or(default, |text| text.parse().granted())
}

struct Rig {
    allocator: Arc<dyn DeviceAllocator>,
    driver: Arc<dyn Driver>,
    streams: Vec<StreamId>,
    /// Blocks on their way from one thread to another, with the stream that they were allocated on.
    mailbox: Mutex<Vec<(Block, StreamId)>>,
    running: AtomicUsize,
    largest_log2: u64,
    coalesces: bool,
    /// Bytes by which the limit may be exceeded.
    over_limit: u64,
}

/// Counts a thread as ended, also by a panic, so that the others do not wait for it.
struct Leaves<'a>(&'a AtomicUsize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Rig {
    fn new(selection: &Selection, driver: Arc<dyn Driver>, limit: Option<u64>, largest_log2: u64) -> Self {
        let mut selection = selection.clone();
        if let Some(limit) = limit {
            selection.set(LIMIT, &limit.to_string()).granted();
        }
        let allocator = selection.build(&driver).granted();
        let streams = (0..THREADS).map(|_| driver.stream_create().granted()).collect();
        let running = AtomicUsize::new(THREADS);
        let Capabilities { coalesces, segments, .. } = selection.capabilities();
        let over_limit = segments.over_limit();
        let mailbox = Mutex::default();
        Self { allocator, driver, streams, mailbox, running, largest_log2, coalesces, over_limit }
    }

    fn post(&self, block: Block, stream: StreamId) {
        self.mailbox.lock().granted().push((block, stream));
    }

    fn work(&self, allocator: &dyn DeviceAllocator, thread: usize, operations: u64) {
        let _leaves = Leaves(&self.running);
        restless::begin(thread as u64 + 1);
        let (mut random, own) = (Random::new(thread as u64 + 1), self.streams[thread]);
        let mut live: Vec<(Block, StreamId)> = Vec::new();
        for _ in 0..operations {
            match random.below(64) {
                0..28 if live.len() < 48 => {
                    // Mostly on the thread's own stream, sometimes on another's.
                    let stream = if random.below(8) == 0 { self.streams[random.below(16) as usize] } else { own };
                    match allocate(allocator, random.size(self.largest_log2), stream) {
                        Ok(block) => live.push((block, stream)),
                        Err(error) => {
                            demand!(error.is_out_of_memory(), came = error, "a request is served or out of memory")
                        }
                    }
                }
                0..56 if !live.is_empty() => {
                    let (block, stream) = live.swap_remove(random.below(live.len() as u64) as usize);
                    if random.below(6) == 0 {
                        let user = self.streams[random.below(16) as usize];
                        allocator.record_use(&block, user).granted();
                    }
                    if random.below(4) == 0 {
                        self.post(block, stream);
                    } else {
                        free(allocator, block, stream).granted();
                    }
                }
                56..63 => {
                    // Another thread's block, on the stream it was allocated on.
                    let received = self.mailbox.lock().granted().pop();
                    if let Some((block, stream)) = received {
                        free(allocator, block, stream).granted();
                    }
                }
                63 if random.below(16) == 0 => {
                    allocator.trim(random.below(64) * MIB).granted();
                }
                _ => {}
            }
        }
        for (block, stream) in live {
            free(allocator, block, stream).granted();
        }
    }

    /// Statistics, layout and ledger while the others work, and once afterwards: on a busy machine they may have ended by now.
    fn watch(&self, allocator: &dyn DeviceAllocator, limit: Option<u64>) {
        restless::begin(THREADS as u64 + 1);
        for looks in 0u64.. {
            let works = self.running.load(SeqCst) > 0;
            let stats = allocator.stats();
            check_stats(&stats);
            let highest = stats.reserved_bytes.all.peak;
            demand!(
                limit.is_none_or(|limit| highest <= limit + self.over_limit),
                came = format_args!("{} reserved", Bytes(highest)),
                "reserved memory stays within the limit"
            );
            if let Some(snapshot) = allocator.snapshot() {
                check_snapshot(&snapshot, self.coalesces, self.streams[0]);
            }
            check_ledger(&allocator.ledger_at_peak());
            if looks % 8 == 7 {
                allocator.reset_peaks();
            }
            if !works {
                break;
            }
            thread::yield_now();
        }
    }

    fn run(&self, allocator: &dyn DeviceAllocator, operations: u64, limit: Option<u64>) {
        thread::scope(|scope| {
            let work: Vec<_> =
                (0..THREADS).map(|thread| scope.spawn(move || self.work(allocator, thread, operations))).collect();
            join(scope.spawn(|| self.watch(allocator, limit)));
            work.into_iter().for_each(join);
        });
        for (block, stream) in self.mailbox.lock().granted().drain(..) {
            free(allocator, block, stream).granted();
        }
        self.driver.device_synchronize().granted();
        allocator.trim(0).granted();
        let stats = allocator.stats();
        check_nothing_held(&stats);
        demand_eq!(stats.reserved_bytes.all.current, 0, "trim releases all when nothing is held");
        demand!(
            stats.allocation.all.allocated > operations,
            came = format_args!("{} allocations", stats.allocation.all.allocated),
            "most requests are served"
        );
    }
}

/// Every byte poisoned and verified, and every overlap detected.
fn with_the_checker(bench: &Bench, limit: Option<u64>) {
    let (selection, limit) = (&bench.selection, limit.map(|bytes| bench.scaled(bytes)));
    // The simulated device's memory is this machine's.
    let room = bench.scaled(GIB).min(4 * GIB);
    let rig = Rig::new(selection, sim(room, SimMemory::Host), limit, 20);
    let checker = checker(Arc::clone(&rig.allocator), Arc::clone(&rig.driver));
    rig.run(&checker, operations(1_500), limit);
    let report = checker.report();
    demand!(
        report.is_clean(),
        came = format_args!("{:?} {:?}", report.violations, report.live),
        "the checker finds nothing"
    );
    let Capabilities { caches, segments, .. } = selection.capabilities();
    let recycles = caches && segments.is_shared();
    demand!(!recycles || report.verified_bytes > 0, "freed memory is reused (`caches`)");
}

/// At full speed: on the null device, without checks of contents.
fn at_full_speed(bench: &Bench, limit: Option<u64>) {
    let (selection, limit) = (&bench.selection, limit.map(|bytes| bench.scaled(bytes)));
    let rig = Rig::new(selection, Arc::new(NullDriver::new(1 << 40)), limit, 25);
    rig.run(rig.allocator.as_ref(), operations(30_000), limit);
}

pub(super) fn many_threads_with_the_checker(bench: &Bench) {
    with_the_checker(bench, None);
}

pub(super) fn many_threads_with_the_checker_under_a_limit(bench: &Bench) {
    with_the_checker(bench, Some(80 * MIB));
}

pub(super) fn many_threads_at_full_speed(bench: &Bench) {
    at_full_speed(bench, None);
}

pub(super) fn many_threads_at_full_speed_under_a_limit(bench: &Bench) {
    at_full_speed(bench, Some(1200 * MIB));
}
