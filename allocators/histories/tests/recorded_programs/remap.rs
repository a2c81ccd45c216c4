//! The memory that `remap` needs, and that it costs nothing with enough memory.

use super::{MIB, load};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use vramlab_conformance::Random;
use vramlab_device::{
    CallEvent, CallKind, Driver, DriverError, FaultyDriver, MeteredDriver, NullDriver, Profile, SimDriver,
    sim::SimMemory,
};
use vramlab_histories::replay::{History, ReplayReport, ReplaySettings, replay};
use vramlab_policies::backends::{expandable, remap};
use vramlab_policies::{BlockState, Request, Selection};

fn history(name: &str) -> History {
    load(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../experiments/histories/{name}.pickle.xz")),
        None,
        None,
    )
    .0
}

fn run(history: &History, allocator: &str, bytes: u64) -> ReplayReport {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(bytes));
    replay(history, &allocator.parse::<Selection>().unwrap(), &driver, &ReplaySettings::default()).unwrap()
}

#[test]
fn remap_runs_in_little_more_than_live_bytes() {
    // The network's blocks are small, so its pages are never completely free; side streams keep pages until their work is done.
    for (name, most) in [("gpt2", 1.015), ("resnet50", 1.015), ("mlp", 1.05), ("streams", 1.05)] {
        let history = history(name);
        // CAST: bytes of a device, below 2^53.
        let device = (history.max_live_bytes() as f64 * most) as u64 / (2 * MIB) * 2 * MIB;
        let report = run(&history, remap::BACKEND.name, device);
        assert_eq!(report.failed_allocations, 0, "{name} in {device} bytes");
        assert!(report.stats.reserved_bytes.all.peak <= device);
        let pytorch = run(&history, expandable::BACKEND.name, device);
        let moved = report.stats.steals.unwrap().pages;
        assert!(moved > 0 || pytorch.failed_allocations == 0, "{name}: pages moved where PyTorch fails");
    }
}

#[test]
fn remap_moves_no_page_with_enough_memory() {
    for name in ["gpt2", "resnet50", "mlp", "streams"] {
        let history = history(name);
        let [ours, pytorch] =
            [&remap::BACKEND, &expandable::BACKEND].map(|backend| run(&history, backend.name, 1 << 50));
        assert_eq!(ours.stats.steals.unwrap().pages, 0, "{name}");
        assert_eq!(ours.driver_calls.get("mem_unmap"), None, "{name}");
        assert_eq!(ours.driver_calls["mem_set_access"], pytorch.driver_calls["mem_set_access"], "{name}: growth");
        assert_eq!(ours.stats.reserved_bytes.all.peak, pytorch.stats.reserved_bytes.all.peak, "{name}");
    }
}

#[test]
fn stealing_first_keeps_reserved_near_active() {
    // One page is more than 0.5 % of the network.
    for (name, most) in [("gpt2", 1.0105), ("resnet50", 1.0075), ("mlp", 1.055), ("streams", 1.06)] {
        let stats = run(&history(name), "remap:steal=always", 1 << 50).stats;
        let ratio = stats.reserved_bytes.all.peak as f64 / stats.active_bytes.all.peak as f64;
        assert!(ratio <= most, "{name}: {ratio}");
    }
}

#[test]
fn mixed_sizes_on_one_stream_reserve_little_over_active() {
    for name in ["gpt2", "resnet50", "mlp"] {
        let report = run(&history(name), "remap:steal=always,small_pool=off", 1 << 50);
        assert!(ratio(&report) <= 1.02, "{name}: {}", ratio(&report));
        assert_eq!(report.stats.active_bytes.small_pool, None, "there is one pool");
    }
}

/// Memory grows only if no page is completely free: reserved bytes beyond active ones are in partly used pages.
#[test]
fn free_pages_are_used_before_memory_grows() {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 50));
    let streams = [(); 3].map(|()| driver.stream_create().unwrap());
    let allocator = "remap:steal=always".parse::<Selection>().unwrap().build(&driver).unwrap();
    let reserved = || allocator.stats().reserved_bytes.all.current;
    let whole_pages = || {
        let segments = allocator.snapshot().unwrap().segments;
        let free = segments.iter().flat_map(|segment| &segment.blocks).filter(|block| block.state == BlockState::Free);
        free.map(|block| {
            let end = (block.addr.get() + block.bytes) / (2 * MIB);
            end.saturating_sub(block.addr.get().div_ceil(2 * MIB))
        })
        .sum::<u64>()
    };
    let (mut live, mut random, mut grown) = (Vec::new(), 1u64, 0);
    let mut draw = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for _ in 0..2_000 {
        let stream = streams[draw(3) as usize];
        let most = if draw(3) == 0 { MIB } else { 30 * MIB };
        let before = reserved();
        live.push((allocator.allocate(Request::new(1 + draw(most)), stream).unwrap(), stream));
        if reserved() > before {
            grown += 1;
            assert_eq!(whole_pages(), 0, "{} bytes were taken", reserved() - before);
        }
        while live.len() as u64 > 20 + draw(40) {
            let (block, stream) = live.swap_remove(draw(live.len() as u64) as usize);
            // SAFETY: no work has used the block.
            unsafe { allocator.deallocate(block, stream) }.unwrap();
        }
    }
    assert!(grown > 40 && allocator.stats().steals.unwrap().pages > 1_000, "{grown}: {:?}", allocator.stats());
    for (block, stream) in live {
        // SAFETY: no work has used the block.
        unsafe { allocator.deallocate(block, stream) }.unwrap();
    }
}

/// Peak reserved over peak active.
fn ratio(report: &ReplayReport) -> f64 {
    report.stats.reserved_bytes.all.peak as f64 / report.stats.active_bytes.all.peak as f64
}

#[test]
fn ratio_bounds_reserved_memory() {
    for name in ["gpt2", "resnet50"] {
        let history = history(name);
        let mut moved = Vec::new();
        for steal in ["always", "1.01", "1.02", "1.05", "pressure"] {
            let report = run(&history, &format!("remap:steal={steal}"), 1 << 50);
            let most = steal.parse().unwrap_or(f64::INFINITY);
            // Missing free pages are allocated from the device: a few pages of thousands.
            assert!(ratio(&report) <= most + 0.001, "{name}, {steal}: {}", ratio(&report));
            moved.push(report.stats.steals.unwrap().pages);
        }
        // Pages that are released where they are mapped are moved as well, and the more there are, the more are released.
        assert!(moved[0] > 0 && moved[1] > 0, "{name}: {moved:?}");
        assert_eq!(moved.last(), Some(&0), "{name}");
    }
}

#[test]
fn larger_handles_take_fewer_calls_and_more_memory() {
    for name in ["gpt2", "resnet50", "streams"] {
        let history = history(name);
        let mut costs = Vec::new();
        for mib in [2, 4, 8, 16, 32] {
            let report = run(&history, &format!("remap:steal=always,handle={mib}M"), 1 << 50);
            assert_eq!(report.stats.reserved_bytes.all.peak % (mib * MIB), 0, "{name}, {mib}");
            assert_eq!(report.settings["handle"], mib * MIB);
            costs.push((report.driver_calls["mem_create"] + report.driver_calls["mem_map"], ratio(&report)));
        }
        assert!(costs.is_sorted_by(|(more, _), (fewer, _)| more > fewer), "{name}: {costs:?}");
        assert!(costs[0].1 < costs[4].1, "{name}: {costs:?}");
    }
}

#[test]
fn invalid_handle_size_is_refused_in_one_line() {
    let refused = "remap:handle=3M".parse::<Selection>().unwrap().check().unwrap_err().to_string();
    assert!(refused.contains("handle is 3145728 bytes") && refused.contains("handle=4M"), "{refused}");
    assert!("remap:handle=1M".parse::<Selection>().unwrap_err().to_string().contains("at least 2M"));
}

/// The report contains the cost of steals and of retries.
#[test]
fn report_contains_the_cost_of_steals_and_retries() {
    let history = history("resnet50");
    // CAST: bytes of a device, below 2^53.
    let limit = (history.max_live_bytes() as f64 * 1.018) as u64;
    let cost = |allocator: &str, path: &str| {
        let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
        let allocator = format!("{allocator}:memory_limit={limit}").parse::<Selection>().unwrap();
        let report = replay(&history, &allocator, &driver, &ReplaySettings::default()).unwrap();
        assert_eq!(report.driver_ns, report.simulated_ns, "nothing else takes time there");
        let served: u64 = report.requests.values().map(|requests| requests.count).sum();
        assert_eq!(served, report.allocations);
        let within: u64 = report.requests.values().map(|requests| requests.driver_calls).sum();
        assert!(within <= report.driver_calls.values().sum());
        (report.requests[path], report)
    };
    let (steals, report) = cost("remap", "steal");
    let moved = report.stats.steals.unwrap();
    assert_eq!((moved.requests, moved.bytes), (steals.count, moved.pages * 2 * MIB));
    let again = report.driver_calls["mem_map"] - report.driver_calls["mem_create"];
    assert!(0 < again && again < moved.pages, "some return to their mapped address: {again} of {}", moved.pages);
    assert!(steals.driver_calls > again && steals.driver_ns > 0);
    let (retries, report) = cost("pytorch-expandable", "retry");
    assert_eq!(
        (retries.count + report.failed_allocations, report.stats.steals),
        (report.stats.num_alloc_retries, None)
    );
    assert!(retries.driver_ns > 0 && report.requests.contains_key("driver_alloc"));
    // Calls take no time on the null device, so times are absent.
    assert_eq!(run(&history, "remap", limit).driver_ns, None);
}

/// A repeating program under a limit that it can keep only because pages move: after a few steps no call maps memory, and the
/// host never waits although the device is far behind. The simulated device refuses to unmap memory that queued work uses.
#[test]
fn repeating_program_stops_mapping_and_never_waits() {
    for steal in ["pressure", "always"] {
        let sim = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
        let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
        let metered = Arc::new(MeteredDriver::new(Arc::clone(&driver), None, None));
        let stream = driver.stream_create().unwrap();
        let free = driver.mem_info().unwrap().free;
        let allocator = format!("remap:steal={steal},memory_limit={}", 300 * MIB).parse::<Selection>().unwrap();
        let allocator = allocator.build(&(Arc::clone(&metered) as Arc<dyn Driver>)).unwrap();
        let mapped = || {
            let calls = metered.counts();
            [CallKind::MemCreate, CallKind::MemMap, CallKind::MemUnmap, CallKind::MemSetAccess]
                .map(|call| calls.get(call).count)
        };
        // Blocks freed in between leave gaps of other sizes than later requests; one block lives from each step to the next.
        let mut last = None;
        let mut before = mapped();
        for step in 0..12 {
            let mut live = Vec::new();
            for (number, mib) in [30, 50, 20, 60, 40, 70, 110, 90].into_iter().enumerate() {
                let block = allocator.allocate(Request::new(mib * MIB), stream).unwrap();
                sim.launch(stream, "work", (1, 1), 1 << 34, &[(block.addr().get(), block.bytes())]).unwrap();
                live.push(block);
                if number % 2 == 1 {
                    let freed = live.swap_remove(number / 4);
                    // SAFETY: later work of the stream alone uses the memory.
                    unsafe { allocator.deallocate(freed, stream) }.unwrap();
                }
                while live.iter().map(vramlab_policies::Block::bytes).sum::<u64>() > 150 * MIB {
                    // SAFETY: as above.
                    unsafe { allocator.deallocate(live.remove(0), stream) }.unwrap();
                }
            }
            let retained = allocator.allocate(Request::new(24 * MIB), stream).unwrap();
            for block in last.replace(retained).into_iter().chain(live) {
                // SAFETY: as above.
                unsafe { allocator.deallocate(block, stream) }.unwrap();
            }
            let now = mapped();
            assert!(step < 8 || now == before, "{steal}, step {step}: {before:?} {now:?}");
            before = now;
        }
        let moved = allocator.stats().steals.unwrap();
        assert!(moved.pages > 0, "{steal}: the program needs it");
        assert_eq!(sim.blocked_ns(), Some(0), "{steal}");
        assert_eq!(before[2], 0, "{steal}: nothing had to be undone");
        // SAFETY: as above.
        unsafe { allocator.deallocate(last.unwrap(), stream) }.unwrap();
        allocator.trim(0).unwrap();
        assert_eq!(driver.mem_info().unwrap().free, free, "{steal}: no page is left mapped");
    }
}

/// A failed call during a move costs at most the request: reserved memory is what is mapped, and all of it is released.
#[test]
fn failed_move_loses_no_memory() {
    for (kind, code) in [
        (CallKind::MemMap, DriverError::OUT_OF_MEMORY),
        (CallKind::MemMap, DriverError::ILLEGAL_STATE),
        (CallKind::MemSetAccess, DriverError::ILLEGAL_STATE),
        (CallKind::MemUnmap, DriverError::ILLEGAL_STATE),
        (CallKind::MemRelease, DriverError::ILLEGAL_STATE),
    ] {
        for skip in (0..60).step_by(3) {
            let sim: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
            let faulty = Arc::new(FaultyDriver::new(Arc::clone(&sim)));
            let streams = [(); 2].map(|()| sim.stream_create().unwrap());
            let free = sim.mem_info().unwrap().free;
            let allocator = format!("remap:memory_limit={}", 64 * MIB).parse::<Selection>().unwrap();
            let allocator = allocator.build(&(Arc::clone(&faulty) as Arc<dyn Driver>)).unwrap();
            faulty.fail(kind, skip, code);
            let mut live = Vec::new();
            for number in 0..120u64 {
                let stream = streams[(number % 7 == 3) as usize];
                if let Ok(block) = allocator.allocate(Request::new((number * 7 % 13 + 3) * MIB), stream) {
                    live.push((block, stream));
                }
                while live.len() > 4 + (number % 3) as usize {
                    let (block, stream) = live.remove((number * 5) as usize % live.len());
                    // SAFETY: no work has used the block.
                    unsafe { allocator.deallocate(block, stream) }.unwrap();
                }
                if number % 40 == 39 {
                    let _ = allocator.trim(0);
                }
                // Memory that the device did not take back is offered again at the next release.
                if number > 100 && kind != CallKind::MemRelease {
                    assert_eq!(
                        free - sim.mem_info().unwrap().free,
                        allocator.stats().reserved_bytes.all.current,
                        "{kind} {skip}"
                    );
                }
            }
            for (block, stream) in live {
                // SAFETY: as above.
                unsafe { allocator.deallocate(block, stream) }.unwrap();
            }
            faulty.clear();
            allocator.trim(0).unwrap();
            assert_eq!(sim.mem_info().unwrap().free, free, "{kind} {skip}");
        }
    }
}

/// A program that never repeats itself keeps mapping pages elsewhere, and the oldest mappings are removed.
#[test]
fn number_of_kept_mappings_is_bounded() {
    let sim: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
    // One call may unmap the mappings of several, so bytes are counted: mapped, and unmapped.
    let moved = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let counters = Arc::clone(&moved);
    let observer = Box::new(move |event: &CallEvent| match event.kind {
        CallKind::MemMap => _ = counters[0].fetch_add(event.bytes, Relaxed),
        CallKind::MemUnmap => _ = counters[1].fetch_add(event.bytes, Relaxed),
        _ => {}
    });
    let metered = Arc::new(MeteredDriver::new(Arc::clone(&sim), None, Some(observer)));
    let stream = sim.stream_create().unwrap();
    let free = sim.mem_info().unwrap().free;
    let allocator = format!("remap:memory_limit={}", 96 * MIB).parse::<Selection>().unwrap();
    let allocator = allocator.build(&(Arc::clone(&metered) as Arc<dyn Driver>)).unwrap();
    let mut random = Random::new(7);
    let mut live = Vec::new();
    let mut most = 0;
    for _ in 0..6000 {
        let bytes = (3 + random.below(28)) * MIB;
        while live.iter().map(vramlab_policies::Block::bytes).sum::<u64>() + bytes > 90 * MIB {
            // CAST: a small number.
            let freed = live.swap_remove(random.below(live.len() as u64) as usize);
            // SAFETY: no work has used the block.
            unsafe { allocator.deallocate(freed, stream) }.unwrap();
        }
        live.push(allocator.allocate(Request::new(bytes), stream).unwrap());
        let mapped = (moved[0].load(Relaxed) - moved[1].load(Relaxed)) / (2 * MIB);
        let pages = allocator.stats().reserved_bytes.all.current / (2 * MIB);
        most = most.max(mapped / pages);
        // Each page is mapped at its own address, and at most eight others.
        assert!(mapped <= 9 * pages, "{mapped} mappings of {pages} pages");
    }
    assert!(most >= 8 && moved[1].load(Relaxed) > 0, "{most}: the bound should have been met");
    for block in live {
        // SAFETY: as above.
        unsafe { allocator.deallocate(block, stream) }.unwrap();
    }
    allocator.trim(0).unwrap();
    assert_eq!(sim.mem_info().unwrap().free, free);
}

/// A graph writes to its memory at each launch, so none of its pages moves while others do.
#[test]
fn graph_pages_never_move() {
    let sim: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
    let stream = sim.stream_create().unwrap();
    let allocator = format!("remap:steal=always,memory_limit={}", 128 * MIB).parse::<Selection>().unwrap();
    let allocator = allocator.build(&sim).unwrap();
    let give = |block| {
        // SAFETY: no work has used the block.
        unsafe { allocator.deallocate(block, stream) }.unwrap();
    };
    let churn = |rounds: u64| {
        let mut live = std::collections::VecDeque::new();
        for number in 0..rounds {
            live.push_back(allocator.allocate(Request::new((number * 5 % 17 + 5) * MIB), stream).unwrap());
            while live.len() > 3 {
                give(live.pop_front().unwrap());
            }
        }
        live.into_iter().for_each(give);
    };
    churn(60);
    let before = allocator.stats().steals.unwrap().pages;
    assert!(before > 0, "pages should have moved before the capture");
    let capture = allocator.capture_begin(stream).unwrap();
    sim.graphs().unwrap().capture_begin(stream).unwrap();
    let captured: Vec<_> = [6, 3, 9].map(|mib| allocator.allocate(Request::new(mib * MIB), stream).unwrap()).into();
    let ranges: Vec<_> = captured.iter().map(|block| (block.addr().get(), block.bytes())).collect();
    captured.into_iter().for_each(give);
    sim.graphs().unwrap().capture_end(stream).unwrap();
    allocator.capture_end(capture).unwrap();
    churn(200);
    assert!(allocator.stats().steals.unwrap().pages > before, "pages should have moved beside the graph");
    // All of the graph's memory is still mapped at its addresses, and free only in its pool.
    let snapshot = allocator.snapshot().unwrap();
    for (addr, bytes) in &ranges {
        let inside = |start: u64, size: u64| start <= *addr && addr + bytes <= start + size;
        let segment = snapshot
            .segments
            .iter()
            .find(|segment| inside(segment.addr.get(), segment.bytes))
            .expect("its memory should be there");
        assert!(segment.private.is_some(), "{segment:?}");
    }
    allocator.capture_release(capture).unwrap();
    churn(60);
    allocator.trim(0).unwrap();
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
}
