//! How little memory `remap` needs, and that it costs nothing where there is enough.

use super::{MIB, load};
use std::path::Path;
use std::sync::Arc;
use vramlab::backends::{expandable, remap};
use vramlab::histories::replay::{History, ReplayReport, ReplaySettings, replay};
use vramlab::{BlockState, Driver, NullDriver, Profile, Request, Selection, SimDriver, SimMemory};

fn history(name: &str) -> History {
    load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../experiments/histories/{name}.pickle.xz")), None, None)
        .0
}

fn run(history: &History, allocator: &str, bytes: u64) -> ReplayReport {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(bytes));
    replay(history, &allocator.parse::<Selection>().unwrap(), &driver, &ReplaySettings::default()).unwrap()
}

#[test]
fn histories_run_in_hardly_more_than_they_hold() {
    // The network's blocks are small, so that its pages are never all free; side streams keep pages until their work is over.
    for (name, most) in [("gpt2", 1.015), ("resnet50", 1.015), ("mlp", 1.05), ("streams", 1.05)] {
        let history = history(name);
        // CAST: bytes of a device, below 2^53.
        let device = (history.max_live_bytes() as f64 * most) as u64 / (2 * MIB) * 2 * MIB;
        let report = run(&history, remap::BACKEND.name, device);
        assert_eq!(report.failed_allocations, 0, "{name} in {device} bytes");
        assert!(report.stats.reserved_bytes.all.peak <= device);
        let pytorch = run(&history, expandable::BACKEND.name, device);
        let moved = report.driver_calls.get("mem_unmap").copied().unwrap_or(0);
        assert!(moved > 0 || pytorch.failed_allocations == 0, "{name}: pages moved where PyTorch fails");
    }
}

#[test]
fn with_room_to_spare_no_page_moves() {
    for name in ["gpt2", "resnet50", "mlp", "streams"] {
        let history = history(name);
        let [ours, pytorch] =
            [&remap::BACKEND, &expandable::BACKEND].map(|backend| run(&history, backend.name, 1 << 50));
        assert_eq!(ours.driver_calls.get("mem_unmap"), None, "{name}");
        assert_eq!(ours.driver_calls["mem_set_access"], pytorch.driver_calls["mem_set_access"], "{name}: growth");
        assert_eq!(ours.stats.reserved_bytes.all.peak, pytorch.stats.reserved_bytes.all.peak, "{name}");
    }
}

#[test]
fn pages_that_are_always_taken_first_keep_reserved_at_what_is_active() {
    for (name, most) in [("gpt2", 1.015), ("resnet50", 1.015), ("mlp", 1.05), ("streams", 1.04)] {
        let stats = run(&history(name), "remap:steal=always", 1 << 50).stats;
        let ratio = stats.reserved_bytes.all.peak as f64 / stats.active_bytes.all.peak as f64;
        assert!(ratio <= most, "{name}: {ratio}");
    }
}

#[test]
fn with_small_blocks_between_large_ones_programs_of_one_stream_reserve_hardly_more_than_is_active() {
    for name in ["gpt2", "resnet50", "mlp"] {
        let report = run(&history(name), "remap:steal=always,small_pool=off", 1 << 50);
        assert!(ratio(&report) <= 1.02, "{name}: {}", ratio(&report));
        assert_eq!(report.stats.active_bytes.small_pool, None, "there is one pool");
    }
}

/// Memory grows only when no page is free as a whole: what is reserved beyond what is active lies in pages that are partly in use.
#[test]
fn whole_pages_are_taken_before_memory_grows() {
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
fn a_ratio_bounds_what_is_reserved_and_moves_fewer_pages_the_higher_it_is() {
    for name in ["gpt2", "resnet50"] {
        let history = history(name);
        let mut moved = Vec::new();
        for steal in ["always", "1.01", "1.02", "1.05", "pressure"] {
            let report = run(&history, &format!("remap:steal={steal}"), 1 << 50);
            let most = steal.parse().unwrap_or(f64::INFINITY);
            assert!(ratio(&report) <= most, "{name}, {steal}: {}", ratio(&report));
            moved.push(report.stats.steals.unwrap().pages);
        }
        assert!(moved.is_sorted_by(|more, fewer| more >= fewer) && moved[0] > 0, "{name}: {moved:?}");
        assert_eq!(moved.last(), Some(&0), "{name}");
    }
}

#[test]
fn larger_handles_take_fewer_calls_and_more_memory() {
    for name in ["gpt2", "resnet50", "streams"] {
        let history = history(name);
        let mut found = Vec::new();
        for mib in [2, 4, 8, 16, 32] {
            let report = run(&history, &format!("remap:steal=always,handle={mib}M"), 1 << 50);
            assert_eq!(report.stats.reserved_bytes.all.peak % (mib * MIB), 0, "{name}, {mib}");
            assert_eq!(report.settings["handle"], mib * MIB);
            found.push((report.driver_calls["mem_create"] + report.driver_calls["mem_map"], ratio(&report)));
        }
        assert!(found.is_sorted_by(|(more, _), (fewer, _)| more > fewer), "{name}: {found:?}");
        assert!(found[0].1 < found[4].1, "{name}: {found:?}");
    }
}

#[test]
fn a_handle_that_no_device_makes_is_refused_in_one_line() {
    let refused = "remap:handle=3M".parse::<Selection>().unwrap().check().unwrap_err().to_string();
    assert!(refused.contains("handle is 3145728 bytes") && refused.contains("handle=4M"), "{refused}");
    assert!("remap:handle=1M".parse::<Selection>().unwrap_err().to_string().contains("at least 2M"));
}

/// What a steal costs stands in the report beside what a retry costs.
#[test]
fn the_report_says_what_steals_and_retries_cost() {
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
    assert_eq!((moved.requests, moved.pages), (steals.count, report.driver_calls["mem_unmap"]));
    assert_eq!(moved.bytes, moved.pages * 2 * MIB);
    assert!(steals.driver_calls > moved.pages && steals.driver_ns > 0);
    let (retries, report) = cost("pytorch-expandable", "retry");
    assert_eq!(
        (retries.count + report.failed_allocations, report.stats.steals),
        (report.stats.num_alloc_retries, None)
    );
    assert!(retries.driver_ns > 0 && report.requests.contains_key("driver_alloc"));
    // Nothing takes time on the null device, and so nothing is said of it.
    assert_eq!(run(&history, "remap", limit).driver_ns, None);
}
