//! The instruments under threads: nothing is lost, and a trace has the order of the operations.

use crate::common::{self, GIB, KIB, MIB, Random, allocate, build, capturing, fill, free, launch, sim};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use vramlab_device::{
    CallKind, Driver, GraphId, MeteredDriver, NullDriver, PoolSettings, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_device::{Clock, MonotonicClock};
use vramlab_policies::backends::{CachingSettings, caching};
use vramlab_policies::contract::Action;
use vramlab_policies::instruments::nvtx::Ranges;
use vramlab_policies::instruments::{EventTrace, Limit, Nvtx, NvtxMode, Operation, Timed, Traced};
use vramlab_policies::{AllocError, CaptureId, DeviceAllocator, Selection};

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

/// Follows a trace as a replay would: the owner of each block must always be unambiguous.
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
    let count = |target: Operation| -> u64 {
        let of = timed.histograms().into_iter().filter(|(operation, ..)| *operation == target);
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

// The instruments around graph capture: the same addresses with and without, and no work of theirs in a graph.

fn begin(driver: &dyn Driver, allocator: &dyn DeviceAllocator, stream: StreamId) -> CaptureId {
    let id = allocator.capture_begin(stream).unwrap();
    driver.graphs().unwrap().capture_begin(stream).unwrap();
    id
}

fn end(driver: &dyn Driver, allocator: &dyn DeviceAllocator, id: CaptureId, stream: StreamId) -> GraphId {
    let graph = driver.graphs().unwrap().capture_end(stream).unwrap();
    allocator.capture_end(id).unwrap();
    graph
}

fn release(driver: &dyn Driver, allocator: &dyn DeviceAllocator, (id, graph): (CaptureId, GraphId), stream: StreamId) {
    launch(driver.graphs().unwrap(), graph, stream).unwrap();
    driver.stream_synchronize(stream).unwrap();
    // SAFETY: captured by a test that is its only user, and its launch was waited for.
    unsafe { driver.graphs().unwrap().graph_destroy(graph) }.unwrap();
    allocator.capture_release(id).unwrap();
}

/// Addresses and sizes, in order, of a fixed run with captures in it.
fn addresses(driver: &dyn Driver, allocator: &dyn DeviceAllocator, stream: StreamId) -> Vec<(u64, u64)> {
    let (mut random, mut out, mut graphs) = (Random::new(21), Vec::new(), Vec::new());
    let mut before = Vec::new();
    for round in 0..6 {
        for captured in [false, true] {
            let id = captured.then(|| begin(driver, allocator, stream));
            let mut live = Vec::new();
            for _ in 0..60 {
                if random.below(9) < 5 || live.is_empty() {
                    let block = allocate(allocator, random.size(22), stream).unwrap();
                    fill(driver, block.addr(), 1, block.requested(), stream);
                    out.push((block.addr().get(), block.bytes()));
                    live.push(block);
                } else {
                    free(allocator, live.swap_remove(random.below(live.len() as u64) as usize), stream).unwrap();
                }
            }
            // Some of the plain blocks are freed in the capture.
            if captured {
                live.append(&mut before);
            } else {
                before = live.split_off(live.len() / 2);
            }
            for block in live {
                free(allocator, block, stream).unwrap();
            }
            graphs.extend(id.map(|id| (id, end(driver, allocator, id, stream))));
        }
        if round % 2 == 1 {
            release(driver, allocator, graphs.remove(0), stream);
        }
    }
    for graph in graphs {
        release(driver, allocator, graph, stream);
    }
    out
}

fn metered(memory: SimMemory) -> (Arc<SimDriver>, Arc<MeteredDriver>, Arc<dyn Driver>) {
    let sim = sim(4 * GIB, memory);
    let meter = Arc::new(MeteredDriver::new(Arc::clone(&sim) as _, None, None));
    let driver = Arc::clone(&meter) as Arc<dyn Driver>;
    (sim, meter, driver)
}

#[test]
fn instruments_change_no_address_of_a_capture() {
    for kind in capturing() {
        let mut settings = Selection::of(kind);
        // The checker's fills take time on the device, and opportunistic reuse depends on what is done by when.
        settings.adopt(&PoolSettings { reuse_allow_opportunistic: false, ..PoolSettings::default() });
        let (plain, _, driver) = metered(SimMemory::Host);
        let stream = plain.stream_create().unwrap();
        let expected = addresses(driver.as_ref(), settings.build(&driver).unwrap().as_ref(), stream);
        let (sim, _, driver) = metered(SimMemory::Host);
        let stream = sim.stream_create().unwrap();
        let mut allocator = settings.build(&driver).unwrap();
        allocator = Arc::new(Limit::new(allocator, GIB));
        allocator = Arc::new(Timed::new(allocator, driver.clock()));
        allocator = Arc::new(EventTrace::new(allocator, driver.clock()));
        allocator = Arc::new(Nvtx::new(allocator, Ranges::new(NvtxMode::Off)));
        let checker = Arc::new(common::checker(allocator, Arc::clone(&driver)));
        let captured = addresses(driver.as_ref(), checker.as_ref(), stream);
        assert_eq!(captured.len(), expected.len());
        assert_eq!(captured.into_iter().zip(expected).find(|(a, b)| a != b), None, "{kind}");
        assert!(checker.report().is_clean(), "{kind}: {:?}", checker.report());
    }
}

#[test]
fn the_checker_queues_nothing_in_a_capture_and_goes_on_after_it() {
    let (sim, meter, driver) = metered(SimMemory::Host);
    let checker = common::checker(build(&caching::BACKEND, &driver), Arc::clone(&driver));
    let (stream, other) = (sim.stream_create().unwrap(), sim.stream_create().unwrap());
    let before = allocate(&checker, 4096, stream).unwrap();
    let queued = || meter.counts().get(CallKind::Memset).count + meter.counts().get(CallKind::CopyToHost).count;
    let id = begin(driver.as_ref(), &checker, stream);
    let start = queued();
    for _ in 0..3 {
        let block = allocate(&checker, 4096, stream).unwrap();
        free(&checker, block, stream).unwrap();
    }
    free(&checker, before, stream).unwrap();
    assert_eq!(queued(), start);
    // Streams outside of it are checked as usual.
    let block = allocate(&checker, 4096, other).unwrap();
    free(&checker, block, other).unwrap();
    assert_eq!(queued(), start + 2);
    let graph = end(driver.as_ref(), &checker, id, stream);
    let block = allocate(&checker, 4096, stream).unwrap();
    free(&checker, block, stream).unwrap();
    assert_eq!(queued(), start + 4);
    release(driver.as_ref(), &checker, (id, graph), stream);
    assert!(checker.report().is_clean(), "{:?}", checker.report());
}

/// Ends a capture but forgets that its memory is pinned.
#[derive(Debug)]
struct Forgetful(Arc<dyn DeviceAllocator>);

impl vramlab_policies::Instrument for Forgetful {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.0.as_ref()
    }

    fn capture_begin(&self, _stream: StreamId) -> Result<CaptureId, AllocError> {
        // A capture of an idle stream.
        self.0.capture_begin(common::stream(u64::MAX))
    }

    fn name(&self) -> &'static str {
        "forgetful"
    }
}

#[test]
fn the_checker_finds_memory_of_a_graph_in_other_hands() {
    let (sim, _, driver) = metered(SimMemory::Host);
    let inner = Arc::new(Forgetful(build(&caching::BACKEND, &driver)));
    let checker = common::checker(inner, Arc::clone(&driver));
    let stream = sim.stream_create().unwrap();
    let checked: &dyn DeviceAllocator = &checker;
    let id = checked.capture_begin(stream).unwrap();
    let block = allocate(&checker, 4096, stream).unwrap();
    free(&checker, block, stream).unwrap();
    checked.capture_end(id).unwrap();
    let error = allocate(&checker, 4096, stream).unwrap_err();
    assert!(error.to_string().contains("pins its memory"), "{error}");
}

#[test]
fn a_limit_counts_captured_blocks_and_a_trace_lists_them() {
    for kind in capturing() {
        let (sim, _, driver) = metered(SimMemory::None);
        let trace = Arc::new(EventTrace::new(build(kind, &driver), driver.clock()));
        let limit = Limit::new(Arc::clone(&trace) as _, 10 * KIB);
        let stream = sim.stream_create().unwrap();
        let id = begin(driver.as_ref(), &limit, stream);
        let block = allocate(&limit, 8 * KIB, stream).unwrap();
        assert!(allocate(&limit, 8 * KIB, stream).unwrap_err().is_out_of_memory());
        free(&limit, block, stream).unwrap();
        let again = allocate(&limit, 8 * KIB, stream).unwrap();
        free(&limit, again, stream).unwrap();
        let graph = end(driver.as_ref(), &limit, id, stream);
        release(driver.as_ref(), &limit, (id, graph), stream);
        let actions: Vec<Action> = trace.take().iter().map(|traced| traced.event.action).collect();
        let pair = [Action::Alloc, Action::FreeRequested];
        assert_eq!(actions, [pair, pair].concat(), "{kind}");
    }
}

#[test]
fn the_memory_limit_of_caching_counts_segments_of_captures() {
    let (sim, _, driver) = metered(SimMemory::None);
    let settings = CachingSettings { memory_limit: Some(65 * MIB), ..CachingSettings::default() };
    let allocator = Selection::with(&caching::BACKEND, &settings).build(&driver).unwrap();
    let allocator = allocator.as_ref();
    let stream = sim.stream_create().unwrap();
    // 20 MiB that are idle: the capture cannot use them, and nothing is released for it.
    let block = allocate(allocator, 5 * MIB, stream).unwrap();
    free(allocator, block, stream).unwrap();
    let id = begin(driver.as_ref(), allocator, stream);
    let blocks = [12 * MIB, 12 * MIB, 12 * MIB].map(|bytes| allocate(allocator, bytes, stream).unwrap());
    assert_eq!(allocator.stats().reserved_bytes.all.current, 56 * MIB);
    let error = allocate(allocator, 12 * MIB, stream).unwrap_err();
    let AllocError::OutOfMemory(report) = &error else { panic!("{error}") };
    assert_eq!((report.limit_bytes, report.reserved_bytes), (Some(65 * MIB), 56 * MIB));
    for block in blocks {
        free(allocator, block, stream).unwrap();
    }
    let graph = end(driver.as_ref(), allocator, id, stream);
    // Pinned: neither a request nor a trim uses it.
    assert!(allocate(allocator, 40 * MIB, stream).is_err());
    assert_eq!((allocator.trim(0).unwrap(), allocator.stats().reserved_bytes.all.current), (0, 36 * MIB));
    release(driver.as_ref(), allocator, (id, graph), stream);
    let block = allocate(allocator, 40 * MIB, stream).unwrap();
    free(allocator, block, stream).unwrap();
}
