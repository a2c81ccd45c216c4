//! PyTorch's own host allocator, block by block: random requests to that of PyTorch 2.11, over a stand-in for CUDA that completes events
//! when the trace says so.

use std::path::{Path, PathBuf};
use vramlab_device::budget::Budget;
use vramlab_histories::formats::{Action, HostEvent, ReadOptions, StackId, read};
use vramlab_histories::host::{HostOp, HostReplay, HostReport, HostTrace, HostTraceBuilder, Sizes, replay_host};
use vramlab_policies::Selection;
use vramlab_policies::backends::parse_host_list;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/host").join(name)
}

fn trace(name: &str) -> HostTrace {
    let mut builder = HostTraceBuilder::new(Sizes::Requested, true, &Budget::default());
    let mut push = |event: vramlab_histories::formats::Event| {
        let (action, addr, bytes, stream) = (event.action, event.addr, event.bytes, event.stream);
        let stack = StackId::default();
        builder.push(&HostEvent { action, addr, bytes, stream, time_ns: event.time_ns, stack }).unwrap();
        Ok(())
    };
    read(&fixture(name), &ReadOptions::default(), &mut push).unwrap();
    builder.finish()
}

fn replayed(trace: &HostTrace, alloc: &str) -> HostReport {
    let list: Vec<Selection> = parse_host_list(alloc).unwrap();
    replay_host(trace, &list[0], &HostReplay::default()).unwrap()
}

const TRACES: [&str; 2] = ["in_order.torch2.11.jsonl.xz", "stuck.torch2.11.jsonl.xz"];

#[test]
fn every_block_is_the_one_that_pytorch_served() {
    for name in TRACES {
        let trace = trace(name);
        assert_eq!(trace.contradictions, 0, "{name}");
        let count = |wanted: fn(&HostOp) -> bool| trace.ops.iter().filter(|op| wanted(op)).count();
        let hits = trace.blocks.iter().filter(|block| block.cached == Some(true)).count();
        assert!(hits > 100 && trace.deferred > 50, "{name}: {hits} hits, {} deferred", trace.deferred);
        assert!(count(|op| *op == HostOp::Empty) > 0, "{name}");
        let report = replayed(&trace, "host-pytorch:release=2.11");
        assert_eq!(report.differences, Some(0), "{name}");
        assert_eq!(Some(report.stats.reserved_bytes.all.peak), trace.recorded_peak, "{name}");
        let misses = trace.blocks.len() - hits;
        assert_eq!(report.account.pins, misses as u64, "{name}");
    }
}

#[test]
fn other_rules_serve_other_blocks() {
    // The trace tells releases apart: under other rules the comparison finds differences.
    let trace = trace(TRACES[1]);
    let report = replayed(&trace, "host-pytorch:release=2.15,pinned_max_round_threshold_mb=0");
    assert!(report.differences.is_some_and(|differences| differences > 0), "{report:?}");
    for other in ["host-exact", "host-cupy"] {
        let report = replayed(&trace, other);
        assert_eq!((report.failed, report.overruns.count), (0, 0), "{other}");
    }
}

#[test]
fn exact_blocks_pin_less_than_powers_of_two() {
    for name in TRACES {
        let trace = trace(name);
        let [pytorch, exact] = ["host-pytorch", "host-exact"].map(|alloc| replayed(&trace, alloc));
        let peak = |report: &HostReport| report.stats.reserved_bytes.all.peak;
        assert!(peak(&exact) < peak(&pytorch), "{name}: {} and {}", peak(&exact), peak(&pytorch));
        assert!(peak(&exact) >= trace.peak_live, "{name}: nothing pins less than what is live");
    }
}

#[test]
fn memory_of_this_machine_is_pinned_by_a_device() {
    use std::sync::Arc;
    use vramlab_device::{Driver, Profile, SimDriver, sim::SimMemory};
    let mut builder = HostTraceBuilder::new(Sizes::Requested, false, &Budget::default());
    for number in 1..=5 {
        let (action, addr, bytes) = (Action::Alloc, number << 40, number * 300_000);
        builder
            .push(&HostEvent { action, addr, bytes, stream: 0, time_ns: number, stack: StackId::default() })
            .unwrap();
    }
    let trace = builder.finish();
    for alloc in ["host-exact", "host-pytorch", "host-pytorch:pinned_use_cuda_host_register=true"] {
        let list = parse_host_list(alloc).unwrap();
        let device = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
        let options = HostReplay { device: Some(device.clone() as Arc<dyn Driver>), ..HostReplay::default() };
        let report = replay_host(&trace, &list[0], &options).unwrap();
        let simulated = replay_host(&trace, &list[0], &HostReplay::default()).unwrap();
        assert_eq!(report.stats.reserved_bytes.all, simulated.stats.reserved_bytes.all, "{alloc}");
        assert_eq!((report.account.pins, report.pinning), (simulated.account.pins, simulated.pinning), "{alloc}");
        let ns = report.account.pin_ns.unwrap();
        assert!(ns > 0 && device.clock().now_ns() >= ns, "{alloc}: on the device's clock");
    }
}
