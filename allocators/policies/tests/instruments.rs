//! The instruments: their reports, and that none of them changes the results of an allocator.

use crate::common::{self, GIB, KIB, MIB, Random, allocate, build, fill, free, read, sim, work, write};
use std::sync::Arc;
use std::thread;
use vramlab_device::{
    CallKind, Driver, DriverError, FaultyDriver, MeteredDriver, PoolSettings, Profile, SimDriver, StreamId,
    sim::SimMemory,
};
use vramlab_policies::backends::{self, caching, naive, stream_ordered};
use vramlab_policies::contract::Action;
use vramlab_policies::instruments::nvtx::Ranges;
use vramlab_policies::instruments::{
    Checker, EventTrace, Limit, Nvtx, NvtxMode, Operation, Timed, Traced, measure_cost,
};
use vramlab_policies::{AllocError, Backend, Block, BlockState, DeviceAllocator, Path, Selection, Snapshot};

struct Bench {
    sim: Arc<SimDriver>,
    driver: Arc<dyn Driver>,
    stream: StreamId,
}

fn bench(memory: SimMemory) -> Bench {
    let sim = sim(2 * GIB, memory);
    let stream = sim.stream_create().unwrap();
    Bench { driver: Arc::clone(&sim) as Arc<dyn Driver>, sim, stream }
}

#[test]
fn timed_counts_by_operation_and_path() {
    let bench = bench(SimMemory::None);
    let timed = Timed::new(build(&caching::BACKEND, &bench.driver), bench.sim.clock());
    let a = allocate(&timed, 100, bench.stream).unwrap();
    let b = allocate(&timed, 100, bench.stream).unwrap();
    let c = allocate(&timed, 100, bench.stream).unwrap();
    free(&timed, a, bench.stream).unwrap();
    free(&timed, b, bench.stream).unwrap();
    let a = allocate(&timed, 1024, bench.stream).unwrap();
    free(&timed, a, bench.stream).unwrap();
    free(&timed, c, bench.stream).unwrap();
    assert!(allocate(&timed, 1 << 50, bench.stream).is_err());
    let counted: Vec<_> =
        timed.histograms().iter().map(|(operation, path, histogram)| (*operation, *path, histogram.len())).collect();
    let expected = [
        (Operation::Allocate, Path::Hit, 1),
        (Operation::Allocate, Path::Split, 2),
        (Operation::Allocate, Path::DriverAlloc, 1),
        (Operation::Allocate, Path::Failed, 1),
        (Operation::Deallocate, Path::Hit, 2),
        (Operation::Deallocate, Path::Coalesce, 2),
    ];
    assert_eq!(counted, expected);
    // Virtual time: a hit makes no driver call and takes no time; a new segment costs the time in the profile.
    let rows = timed.rows();
    let row = |path: &str| rows.iter().find(|row| row.operation == "allocate" && row.path == path).unwrap();
    assert_eq!(row("hit").max_ns, 0);
    let segment = Profile::h200().plain.alloc_ns.at(2 * MIB);
    // Histograms keep three digits.
    assert!(row("driver_alloc").p50_ns.abs_diff(segment) <= segment / 500, "{:?}", row("driver_alloc"));
    assert!(rows.iter().all(|row| row.min_ns <= row.p50_ns && row.p50_ns <= row.p999_ns && row.p999_ns <= row.max_ns));
}

#[test]
fn the_trace_keeps_the_order() {
    let bench = bench(SimMemory::None);
    let trace = EventTrace::new(build(&caching::BACKEND, &bench.driver), bench.sim.clock());
    let other = bench.sim.stream_create().unwrap();
    let a = allocate(&trace, 700, bench.stream).unwrap();
    let addr = a.addr().get();
    trace.record_use(&a, other).unwrap();
    free(&trace, a, bench.stream).unwrap();
    assert!(allocate(&trace, 1 << 50, other).is_err());
    assert!(allocate(&trace, 0, other).is_err());
    let events = trace.take();
    let actions: Vec<_> =
        events.iter().map(|Traced { event, block, .. }| (event.action, event.addr, event.bytes, *block)).collect();
    assert_eq!(
        actions,
        [
            (Action::Alloc, addr, 700, 1024),
            (Action::RecordUse, addr, 700, 1024),
            (Action::FreeRequested, addr, 700, 1024),
            (Action::Oom, 0, 1 << 50, 0),
        ]
    );
    assert!(events.windows(2).all(|pair| pair[0].event.time_ns <= pair[1].event.time_ns));
    assert_eq!(events[2].path, Path::Deferred);
    assert!(trace.take().is_empty());
}

#[test]
fn a_trace_of_many_threads_can_be_replayed() {
    // The free of a block must be recorded before the next allocation at its address.
    let bench = bench(SimMemory::None);
    let trace = EventTrace::new(build(&caching::BACKEND, &bench.driver), bench.sim.clock());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    let block = allocate(&trace, 512, bench.stream).unwrap();
                    free(&trace, block, bench.stream).unwrap();
                }
            });
        }
    });
    let mut live = std::collections::BTreeSet::new();
    for Traced { event, .. } in trace.take() {
        let addr = event.addr;
        match event.action {
            Action::Alloc => assert!(live.insert(addr), "{addr:#x} was handed out twice"),
            _ => assert!(live.remove(&addr), "{addr:#x} was freed twice"),
        }
    }
    assert!(live.is_empty());
}

#[test]
fn a_limit_refuses_and_recovers() {
    for kind in backends::all() {
        let bench = bench(SimMemory::None);
        let limit = Limit::new(build(kind, &bench.driver), 10 * KIB);
        let mut live = Vec::new();
        let error = loop {
            match allocate(&limit, 1000, bench.stream) {
                Ok(block) => live.push(block),
                Err(error) => break error,
            }
            let bytes: u64 = live.iter().map(Block::bytes).sum();
            assert!(bytes <= 10 * KIB, "{kind}: {bytes} bytes are held");
        };
        let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
        assert_eq!((report.limit_bytes, report.requested_bytes), (Some(10 * KIB), 1000));
        assert_eq!(live.len(), 10, "{kind}");
        assert!(allocate(&limit, u64::MAX, bench.stream).is_err());
        free(&limit, live.pop().unwrap(), bench.stream).unwrap();
        live.push(allocate(&limit, 1000, bench.stream).unwrap());
        for block in live {
            free(&limit, block, bench.stream).unwrap();
        }
        let accepted = allocate(&limit, 10 * KIB, bench.stream).unwrap();
        free(&limit, accepted, bench.stream).unwrap();
        assert_eq!(limit.stats().allocation.all.current, 0);
    }
}

#[test]
fn limit_counts_rounding_and_forgets_failed_frees() {
    let bench = bench(SimMemory::None);
    let limit = Limit::new(build(&caching::BACKEND, &bench.driver), 800);
    let one = allocate(&limit, 1, bench.stream).unwrap();
    assert!(allocate(&limit, 200, bench.stream).is_err(), "two blocks of 512 bytes are more than 800");
    free(&limit, one, bench.stream).unwrap();
    assert!(allocate(&limit, 600, bench.stream).is_err(), "600 are rounded to 1024");
    let one = allocate(&limit, 512, bench.stream).unwrap();
    free(&limit, one, bench.stream).unwrap();

    let faulty = Arc::new(FaultyDriver::new(Arc::clone(&bench.driver)));
    let driver: Arc<dyn Driver> = Arc::clone(&faulty) as _;
    let limit = Limit::new(build(&naive::BACKEND, &driver), 1000);
    let one = allocate(&limit, 1000, bench.stream).unwrap();
    faulty.fail(CallKind::MemFree, 0, DriverError::ILLEGAL_ADDRESS);
    free(&limit, one, bench.stream).unwrap_err();
    let one = allocate(&limit, 1000, bench.stream).unwrap();
    free(&limit, one, bench.stream).unwrap();
}

fn checked(bench: &Bench) -> Checker {
    common::checker(build(&caching::BACKEND, &bench.driver), Arc::clone(&bench.driver))
}

#[test]
fn the_checker_finds_a_write_after_free() {
    let bench = bench(SimMemory::Host);
    let checker = checked(&bench);
    let block = allocate(&checker, 1000, bench.stream).unwrap();
    let addr = block.addr();
    free(&checker, block, bench.stream).unwrap();
    write(bench.sim.as_ref(), addr.offset(700), &[7], bench.stream);
    let error = allocate(&checker, 1000, bench.stream).unwrap_err();
    let AllocError::Violation(text) = &error else { panic!("{error}") };
    assert!(text.contains("write after free") && text.contains(&format!("{:#x}", addr.get() + 700)), "{text}");
    let report = checker.report();
    assert!(!report.is_clean() && report.violations.len() == 1 && report.live.is_empty(), "{report:?}");
    // It continues.
    let block = allocate(&checker, 1000, bench.stream).unwrap();
    free(&checker, block, bench.stream).unwrap();
    assert_eq!(checker.stats().allocation.all.current, 0);
}

/// Shows no segments.
#[derive(Debug)]
struct Blind(Arc<dyn DeviceAllocator>);

impl vramlab_policies::Instrument for Blind {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.0.as_ref()
    }

    fn name(&self) -> &'static str {
        "blind"
    }

    fn snapshot(&self) -> Option<Snapshot> {
        None
    }
}

#[test]
fn checker_ignores_memory_that_was_released_and_reallocated() {
    let bench = bench(SimMemory::Host);
    let inner = build(&caching::BACKEND, &bench.driver);
    for inner in [Arc::clone(&inner), Arc::new(Blind(inner)) as Arc<dyn DeviceAllocator>] {
        let checker = common::checker(inner, Arc::clone(&bench.driver));
        let pair = || [0, 1].map(|_| allocate(&checker, 1000, bench.stream).unwrap());
        let before = pair();
        let addresses = before.each_ref().map(Block::addr);
        before.into_iter().for_each(|block| assert!(free(&checker, block, bench.stream).is_ok()));
        assert_eq!(checker.trim(0).unwrap(), 2 * MIB);
        let again = pair();
        assert_eq!(again.each_ref().map(Block::addr), addresses);
        again.into_iter().for_each(|block| assert!(free(&checker, block, bench.stream).is_ok()));
        // The remaining block is checked.
        free(&checker, allocate(&checker, 1000, bench.stream).unwrap(), bench.stream).unwrap();
        checker.trim(0).unwrap();
        let report = checker.report();
        assert!(report.is_clean() && report.verified_bytes == 1000, "{report:?}");
    }
}

#[test]
fn the_checker_finds_leaks_and_foreign_frees() {
    let bench = bench(SimMemory::Host);
    let (checker, stranger) = (checked(&bench), build(&caching::BACKEND, &bench.driver));
    let unfreed = allocate(&checker, 4000, bench.stream).unwrap();
    assert_eq!(checker.report().live, [(unfreed.addr().get(), 4096)]);
    assert!(!checker.report().is_clean());
    let foreign = allocate(stranger.as_ref(), 4000, bench.stream).unwrap();
    let error = free(&checker, foreign, bench.stream).unwrap_err();
    assert!(matches!(error, AllocError::Violation(_)), "{error}");
    let other = bench.sim.stream_create().unwrap();
    let wrong = allocate(&checker, 4000, bench.stream).unwrap();
    free(&checker, wrong, other).unwrap();
    free(&checker, unfreed, bench.stream).unwrap();
    let report = checker.report();
    assert_eq!((report.violations.len(), report.live.len(), report.operations), (2, 0, 5), "{report:?}");
}

#[test]
fn fresh_and_freed_memory_reads_as_nan() {
    let bench = bench(SimMemory::Host);
    let checker = checked(&bench);
    let check = |bytes: Vec<u8>| {
        let floats = bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
        assert!(floats.count() > 0 && bytes.iter().all(|byte| *byte == 0xFF));
        assert!(f32::from_le_bytes(bytes[..4].try_into().unwrap()).is_nan());
        assert!(f64::from_le_bytes(bytes[..8].try_into().unwrap()).is_nan());
    };
    for _ in 0..3 {
        let block = allocate(&checker, 1000, bench.stream).unwrap();
        let addr = block.addr();
        check(read(bench.sim.as_ref(), addr, 1000, bench.stream));
        write(bench.sim.as_ref(), addr, &[0; 1000], bench.stream);
        free(&checker, block, bench.stream).unwrap();
        check(read(bench.sim.as_ref(), addr, 1000, bench.stream));
    }
    assert!(checker.report().is_clean());
    assert_eq!(checker.report().verified_bytes, 2 * 1000);
}

#[test]
fn checker_does_not_poison_blocks_in_use_elsewhere() {
    let sim = sim(GIB, SimMemory::Host);
    let meter = Arc::new(MeteredDriver::new(Arc::clone(&sim) as _, None, None));
    let driver: Arc<dyn Driver> = Arc::clone(&meter) as _;
    let (owner, user) = (sim.stream_create().unwrap(), sim.stream_create().unwrap());
    let checker = common::checker(build(&caching::BACKEND, &driver), Arc::clone(&driver));
    let block = allocate(&checker, 4096, owner).unwrap();
    let addr = block.addr();
    fill(sim.as_ref(), addr, 1, 4096, owner);
    work(&sim, user, 1_000_000);
    checker.record_use(&block, user).unwrap();
    let fills = meter.counts().get(CallKind::Memset).count;
    free(&checker, block, owner).unwrap();
    assert_eq!(meter.counts().get(CallKind::Memset).count, fills, "the other stream still reads the block");
    assert_eq!(read(sim.as_ref(), addr, 4096, user), vec![1; 4096]);
    let block = allocate(&checker, 4096, owner).unwrap();
    free(&checker, block, owner).unwrap();
    assert!(checker.report().is_clean());
}

#[test]
fn the_checker_leaks_nothing_when_its_own_calls_fail() {
    let bench = bench(SimMemory::Host);
    let faulty = Arc::new(FaultyDriver::new(Arc::clone(&bench.driver)));
    let driver: Arc<dyn Driver> = Arc::clone(&faulty) as _;
    let checker = common::checker(build(&caching::BACKEND, &driver), Arc::clone(&driver));
    for (kind, skip) in [(CallKind::Memset, 0), (CallKind::Memset, 1), (CallKind::CopyToHost, 0)] {
        for _ in 0..2 {
            faulty.fail(kind, skip, DriverError::ILLEGAL_ADDRESS);
            let mut errors = 0;
            for _ in 0..2 {
                match allocate(&checker, 2000, bench.stream) {
                    Ok(block) => errors += usize::from(free(&checker, block, bench.stream).is_err()),
                    Err(_) => errors += 1,
                }
            }
            faulty.clear();
            assert_eq!(errors, 1, "{kind} {skip}");
            assert_eq!(checker.stats().allocation.all.current, 0, "{kind} {skip}");
            assert!(checker.report().is_clean(), "{kind} {skip}: {:?}", checker.report());
        }
    }
}

/// Addresses and sizes, in order, of a fixed run of operations.
fn addresses(allocator: &dyn DeviceAllocator, bench: &Bench) -> Vec<(u64, u64)> {
    let (mut random, mut live, mut out) = (Random::new(77), Vec::new(), Vec::new());
    let other = bench.sim.stream_create().unwrap();
    for _ in 0..800 {
        let stream = if random.below(4) == 0 { other } else { bench.stream };
        if random.below(9) < 5 || live.is_empty() {
            let block = allocate(allocator, random.size(22), stream).unwrap();
            out.push((block.addr().get(), block.bytes()));
            live.push((block, stream));
        } else {
            let (block, stream) = live.swap_remove(random.below(live.len() as u64) as usize);
            free(allocator, block, stream).unwrap();
        }
    }
    for (block, stream) in live {
        free(allocator, block, stream).unwrap();
    }
    out
}

#[test]
fn instruments_change_no_address() {
    for kind in backends::all() {
        let mut settings = Selection::of(kind);
        // The checker's fills take time on the device, and opportunistic reuse depends on which work has completed.
        settings.adopt(&PoolSettings { reuse_allow_opportunistic: false, ..PoolSettings::default() });
        let plain = bench(SimMemory::Host);
        let expected = addresses(settings.build(&plain.driver).unwrap().as_ref(), &plain);
        let bench = bench(SimMemory::Host);
        let driver: Arc<dyn Driver> = Arc::new(MeteredDriver::new(Arc::clone(&bench.driver), None, None));
        let mut allocator = settings.build(&driver).unwrap();
        allocator = Arc::new(Limit::new(allocator, GIB));
        allocator = Arc::new(Timed::new(allocator, driver.clock()));
        allocator = Arc::new(EventTrace::new(allocator, driver.clock()));
        allocator = Arc::new(Nvtx::new(allocator, Ranges::new(NvtxMode::Off)));
        let checker = Arc::new(common::checker(allocator, Arc::clone(&driver)));
        let differs = addresses(checker.as_ref(), &bench).into_iter().zip(expected).find(|(a, b)| a != b);
        assert_eq!(differs, None, "{kind}");
        assert!(checker.report().is_clean(), "{kind}: {:?}", checker.report());
    }
}

/// Two streams' blocks, some of them freed.
fn snapshot_of(kind: &'static Backend, bench: &Bench, other: StreamId) -> Snapshot {
    let donor = build(kind, &bench.driver);
    let mut live: Vec<_> = (1..40u64)
        .map(|n| {
            let stream = if n % 3 == 0 { other } else { bench.stream };
            (allocate(donor.as_ref(), n * n * 3_000, stream).unwrap(), stream)
        })
        .collect();
    for at in (0..20).rev() {
        let (block, stream) = live.swap_remove(at * 2 - at / 2);
        free(donor.as_ref(), block, stream).unwrap();
    }
    let mut snapshot = donor.snapshot().unwrap();
    for (block, stream) in live {
        free(donor.as_ref(), block, stream).unwrap();
    }
    // Memory in the list of the default stream (`rmm-pool`) is taken over for an existing stream.
    let of_default = snapshot.segments.iter_mut().filter(|segment| segment.stream == StreamId::NONE);
    of_default.for_each(|segment| segment.stream = bench.stream);
    snapshot
}

#[test]
fn blocks_that_are_taken_over_pass_every_instrument() {
    for kind in backends::all().into_iter().filter(|kind| kind.capabilities.restores) {
        let bench = bench(SimMemory::Host);
        let other = bench.sim.stream_create().unwrap();
        let snapshot = snapshot_of(kind, &bench, other);
        let limited = Arc::new(Limit::new(build(kind, &bench.driver), GIB));
        let timed = Arc::new(Timed::new(Arc::clone(&limited) as _, bench.sim.clock()));
        let trace = Arc::new(EventTrace::new(timed, bench.sim.clock()));
        let nvtx = Arc::new(Nvtx::new(Arc::clone(&trace) as _, Ranges::new(NvtxMode::Off)));
        let checker = common::checker(nvtx, Arc::clone(&bench.driver));
        let taking: &dyn DeviceAllocator = &checker;
        let blocks = taking.restore(&snapshot, &|_| 0).unwrap().unwrap_or_else(|| panic!("{kind} says that it can"));
        let live = |snapshot: &Snapshot| -> Vec<(StreamId, u64, u64)> {
            let blocks = snapshot.segments.iter().flat_map(|s| s.blocks.iter().map(move |block| (s.stream, block)));
            let allocated = blocks.filter(|(_, block)| block.state == BlockState::Allocated);
            allocated.map(|(stream, block)| (stream, block.bytes, block.requested)).collect()
        };
        let sorted = |mut blocks: Vec<(StreamId, u64, u64)>| {
            blocks.sort_unstable();
            blocks
        };
        let in_order = live(&snapshot);
        let expected = sorted(in_order.clone());
        // The device chose the addresses of segments.
        assert_eq!(sorted(live(&checker.snapshot().unwrap())), expected, "{kind}");
        assert_eq!((blocks.len(), checker.report().live.len()), (expected.len(), expected.len()), "{kind}");
        // The trace begins with them.
        let mut traced: Vec<_> =
            trace.take().into_iter().map(|line| (line.event.action, line.event.stream, line.block)).collect();
        let allocations: Vec<_> =
            expected.iter().map(|(stream, bytes, _)| (Action::Alloc, stream.get(), *bytes)).collect();
        traced.sort_unstable_by_key(|(_, stream, bytes)| (*stream, *bytes));
        assert_eq!(traced, allocations, "{kind}");
        // The limit counts them.
        let sum: u64 = expected.iter().map(|(_, bytes, _)| bytes).sum();
        assert!(allocate(&checker, GIB - sum + 1, bench.stream).is_err(), "{kind}");
        for (block, (stream, _, _)) in blocks.into_iter().zip(in_order) {
            free(&checker, block, stream).unwrap();
        }
        assert!(checker.report().is_clean(), "{kind}: {:?}", checker.report());
        let small: Arc<dyn DeviceAllocator> = Arc::new(Limit::new(build(kind, &bench.driver), sum - 1));
        let error = small.restore(&snapshot, &|_| 0).unwrap_err();
        assert!(error.is_out_of_memory(), "{kind}: {error}");
        assert_eq!(small.stats().allocation.all.current, 0, "{kind}");
    }
}

fn metered(kind: &'static Backend) -> (Arc<SimDriver>, Arc<MeteredDriver>, Arc<dyn DeviceAllocator>) {
    let sim = sim(2 * GIB, SimMemory::None);
    let meter = Arc::new(MeteredDriver::new(Arc::clone(&sim) as _, None, None));
    let driver: Arc<dyn Driver> = Arc::clone(&meter) as _;
    let allocator = build(kind, &driver);
    (sim, meter, allocator)
}

#[test]
fn plain_free_waits_for_queued_work_and_allocation_does_not() {
    let (sim, meter, allocator) = metered(&naive::BACKEND);
    let stream = sim.stream_create().unwrap();
    for round in 1..=5 {
        let block = allocate(allocator.as_ref(), 4 * MIB, stream).unwrap();
        work(&sim, stream, 3_000_000);
        free(allocator.as_ref(), block, stream).unwrap();
        let counts = meter.counts();
        let (allocs, frees) = (counts.get(CallKind::MemAlloc), counts.get(CallKind::MemFree));
        assert_eq!((allocs.count, frees.count), (round, round));
        assert_eq!(allocs.blocked_ns, 0);
        assert!(frees.blocked_ns.abs_diff(round * 3_000_000) < round * 10_000, "{frees:?}");
        assert!(frees.total_ns > frees.blocked_ns && allocs.total_ns > 0);
    }
    assert_eq!(meter.counts().iter().map(|(_, totals)| totals.blocked_ns).sum::<u64>(), sim.blocked_ns().unwrap());
}

#[test]
fn a_hit_makes_no_driver_call() {
    let (sim, meter, allocator) = metered(&caching::BACKEND);
    let stream = sim.stream_create().unwrap();
    let block = allocate(allocator.as_ref(), 4 * MIB, stream).unwrap();
    free(allocator.as_ref(), block, stream).unwrap();
    let (before, time) = (meter.counts(), sim.clock().now_ns());
    for _ in 0..100 {
        work(&sim, stream, 100);
        let block = allocate(allocator.as_ref(), 4 * MIB, stream).unwrap();
        free(allocator.as_ref(), block, stream).unwrap();
    }
    assert_eq!(meter.counts().since(&before).iter().count(), 0);
    assert_eq!(sim.blocked_ns(), Some(0));
    assert!(sim.clock().now_ns() > time, "launches take time");
}

#[test]
fn pool_releases_memory_at_a_synchronise_above_threshold() {
    for (release_threshold, kept) in [(0, 0), (64 * MIB, 64 * MIB), (u64::MAX, 192 * MIB)] {
        let sim = sim(2 * GIB, SimMemory::None);
        let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
        let settings = PoolSettings { release_threshold, ..PoolSettings::default() };
        let allocator = Selection::with(&stream_ordered::BACKEND, &settings).build(&driver).unwrap();
        let stream = sim.stream_create().unwrap();
        let blocks: Vec<Block> = (0..6).map(|_| allocate(allocator.as_ref(), 30 * MIB, stream).unwrap()).collect();
        let reserved = || allocator.stats().reserved_bytes.all.current;
        // 180 MiB in whole granules of 32 MiB.
        assert_eq!(reserved(), 192 * MIB);
        for block in blocks {
            free(allocator.as_ref(), block, stream).unwrap();
        }
        assert_eq!(reserved(), 192 * MIB, "nothing goes before a synchronise");
        let before = sim.clock().now_ns();
        sim.stream_synchronize(stream).unwrap();
        assert_eq!(reserved(), kept);
        let released = (192 * MIB - kept) / (32 * MIB);
        let spent = sim.clock().now_ns() - before;
        let cost = released * sim.profile().pool.as_ref().unwrap().release_ns_per_granule;
        assert!((cost..cost + 10_000).contains(&spent), "{released} granules: {spent} ns");
    }
}

#[test]
fn device_time_of_a_destroyed_stream_still_counts() {
    let bench = bench(SimMemory::None);
    let brief = bench.sim.stream_create().unwrap();
    work(&bench.sim, brief, 1_000_000);
    let busy = bench.sim.busy_ns();
    // SAFETY: made above, and used only here.
    unsafe { bench.sim.stream_destroy(brief) }.unwrap();
    assert_eq!(bench.sim.busy_ns(), busy);
}

#[test]
fn instruments_know_their_own_cost() {
    let clock = bench(SimMemory::None).sim.clock();
    let cost = measure_cost("timed", 10_000, &|inner| Arc::new(Timed::new(inner, Arc::clone(&clock)))).unwrap();
    assert_eq!(cost.instrument, "timed");
    assert!(cost.ns_per_operation.is_finite() && cost.ns_per_operation < 100_000.0, "{cost:?}");
}
