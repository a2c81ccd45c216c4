//! Expandable segments step by step: the mapped and unmapped ranges, their order, and the fault that each setting fixes.

use crate::common::{self, MIB, allocate, check_stats, fill, free, layout, profile, sim, work};
use std::sync::{Arc, Mutex};
use vramlab_device::{
    CallEvent, CallKind, Driver, DriverError, FaultyDriver, MeteredDriver, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_policies::backends::Needs;
use vramlab_policies::{AllocError, Block, DeviceAllocator, Path, Request, Selection};

struct Bench {
    sim: Arc<SimDriver>,
    calls: Arc<Mutex<Vec<CallKind>>>,
    allocator: Arc<dyn DeviceAllocator>,
    stream: StreamId,
}

impl Bench {
    /// `pytorch-expandable` with these settings on a device of `mib` MiB.
    fn new(mib: u64, settings: &str) -> Self {
        let separator = if settings.is_empty() { "" } else { ":" };
        Self::of(mib, &format!("pytorch-expandable{separator}{settings}"))
    }

    fn of(mib: u64, selection: &str) -> Self {
        let sim = sim(mib * MIB, SimMemory::None);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&calls);
        let observer = Box::new(move |event: &CallEvent| log.lock().unwrap().push(event.kind));
        let driver: Arc<dyn Driver> = Arc::new(MeteredDriver::new(Arc::clone(&sim) as _, None, Some(observer)));
        let allocator = selection.parse::<Selection>().unwrap().build(&driver).unwrap();
        let stream = sim.stream_create().unwrap();
        Self { sim, calls, allocator, stream }
    }

    fn try_allocate(&self, mib: u64) -> Result<Block, AllocError> {
        let block = allocate(self.allocator.as_ref(), mib * MIB, self.stream);
        check_stats(&self.allocator.stats());
        block
    }

    fn allocate(&self, mib: u64) -> Block {
        self.try_allocate(mib).unwrap()
    }

    fn free(&self, block: Block) -> Path {
        free(self.allocator.as_ref(), block, self.stream).unwrap()
    }

    fn reserved(&self) -> u64 {
        self.allocator.stats().reserved_bytes.all.current / MIB
    }

    fn layout(&self) -> Vec<Vec<(u64, u64, char)>> {
        let in_mib = |(at, bytes, state)| (at / MIB, bytes / MIB, state);
        layout(&self.allocator.snapshot().unwrap())
            .into_iter()
            .map(|run| run.into_iter().map(in_mib).collect())
            .collect()
    }

    /// The calls since the last read.
    fn calls(&self) -> Vec<CallKind> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

#[test]
fn a_retry_unmaps_whole_handles_and_maps_what_is_lacking() {
    use CallKind::{MemCreate, MemMap, MemRelease, MemSetAccess, MemUnmap, StreamSynchronize};
    let bench = Bench::new(1000, "memory_limit=100M");
    let first = bench.allocate(30);
    let second = bench.allocate(30);
    assert_eq!(bench.layout(), [[(0, 30, 'A'), (30, 30, 'A')]]);
    bench.free(first);
    bench.calls();
    // 60 are reserved, and 50 more would exceed the limit.
    let third = bench.allocate(50);
    // The handle that the second block shares stays mapped.
    assert_eq!(bench.layout(), [[(0, 10, 'F'), (10, 30, 'A'), (40, 50, 'A'), (90, 10, 'F')]]);
    let expected =
        [vec![StreamSynchronize, MemUnmap, MemRelease], vec![MemCreate; 3], vec![MemMap; 3], vec![MemSetAccess]];
    assert_eq!(bench.calls(), expected.concat(), "every handle is made before the first is mapped");
    let stats = bench.allocator.stats();
    assert_eq!((stats.num_alloc_retries, stats.num_device_alloc, stats.num_device_free), (1, 3, 1));
    assert_eq!(stats.segment.map(|gauge| gauge.all.allocated), Some(0));
    assert_eq!(stats.inactive_split.map(|gauge| gauge.all.allocated), Some(0));
    for block in [second, third] {
        bench.free(block);
    }
    assert_eq!(bench.allocator.trim(0).unwrap(), 100 * MIB);
    assert!(bench.calls().ends_with(&[CallKind::MemAddressFree]));
}

#[test]
fn memory_at_the_growing_end_is_kept_whole() {
    let bench = Bench::new(1000, "");
    let blocks: Vec<Block> = [12, 2, 5].map(|mib| bench.allocate(mib)).into();
    let mut blocks = blocks.into_iter();
    bench.free(blocks.next().unwrap());
    // 1 MiB at the end is the best fit for no request; of 12 MiB inside and 21 at the end the inner ones are taken for 11.
    let last = bench.allocate(20);
    bench.free(last);
    assert_eq!(bench.layout(), [[(0, 12, 'F'), (12, 2, 'A'), (14, 5, 'A'), (19, 21, 'F')]]);
    let _inner = bench.allocate(11);
    assert_eq!(bench.layout()[0][0], (0, 11, 'A'));
    // The block that fits best is at the end and counts with the addresses behind it, so a larger inner one serves.
    let bench = Bench::new(1000, "");
    let inner = bench.allocate(18);
    let blocks = bench.allocate(4);
    bench.free(inner);
    assert_eq!(bench.layout(), [[(0, 18, 'F'), (18, 4, 'A'), (22, 18, 'F')]]);
    let end = bench.allocate(2);
    assert_eq!(bench.layout(), [[(0, 2, 'A'), (2, 16, 'F'), (18, 4, 'A'), (22, 18, 'F')]]);
    bench.free(end);
    let small_end = bench.allocate(17);
    bench.free(small_end);
    bench.free(blocks);
}

#[test]
fn request_over_two_holes_keeps_the_first_unless_rolled_back() {
    for (settings, left) in [("", 40), ("rollback=on", 20)] {
        let bench = Bench::new(60, settings);
        let [first, second] = [20, 20].map(|mib| bench.allocate(mib));
        bench.free(first);
        bench.allocator.trim(20 * MIB).unwrap();
        bench.free(second);
        assert_eq!(bench.layout(), [[(0, 20, 'F')]], "in front of it and behind it are holes");
        // While another stream is captured nothing is released, so the mapping of the first hole remains visible.
        let captured = bench.sim.stream_create().unwrap();
        let capture = bench.allocator.capture_begin(captured).unwrap();
        assert!(bench.try_allocate(80).unwrap_err().is_out_of_memory());
        assert_eq!(bench.reserved(), left, "{settings}");
        bench.allocator.capture_end(capture).unwrap();
        bench.allocator.capture_release(capture).unwrap();
        bench.calls();
        let block = bench.allocate(60);
        assert_eq!(bench.layout(), [[(0, 60, 'A')]], "{settings}");
        assert_eq!(bench.calls().iter().filter(|call| **call == CallKind::MemSetAccess).count() as u64, 3 - left / 20);
        bench.free(block);
    }
}

#[test]
fn the_limit_counts_a_native_segment_or_what_will_be_mapped() {
    // 15 of 40 MiB are free at the end: 30 MiB need 20 more.
    for (settings, runs) in [("memory_limit=65M", false), ("memory_limit=65M,limit_shortfall=on", true)] {
        let bench = Bench::new(1000, settings);
        let _held = bench.allocate(25);
        assert_eq!(bench.try_allocate(30).is_ok(), runs, "{settings}");
        assert_eq!(bench.reserved(), if runs { 60 } else { 40 });
    }
    // 22 MiB take 40.
    for (settings, runs) in [("memory_limit=22M", true), ("memory_limit=22M,limit_shortfall=on", false)] {
        assert_eq!(Bench::new(1000, settings).try_allocate(22).is_ok(), runs, "{settings}");
    }
}

#[test]
fn free_block_after_a_release_is_searched_only_if_set() {
    for (settings, runs) in [("memory_limit=35M", false), ("memory_limit=35M,retry_fit_after_sync=on", true)] {
        let bench = Bench::new(1000, settings);
        let [pending, _held] = [15, 4].map(|mib| bench.allocate(mib));
        let user = bench.sim.stream_create().unwrap();
        work(&bench.sim, user, 1_000_000);
        bench.allocator.record_use(&pending, user).unwrap();
        assert_eq!(bench.free(pending), Path::Deferred);
        // The wait frees 15 MiB that share their handle with a block, so they are not unmapped.
        assert_eq!(bench.try_allocate(15).is_ok(), runs, "{settings}");
    }
}

#[test]
fn handles_that_a_retry_unmapped_can_be_mapped_again() {
    for (settings, made, released) in [("memory_limit=100M", 3, 1), ("memory_limit=100M,reuse_handles=on", 2, 0)] {
        let bench = Bench::new(1000, settings);
        let [first, _held] = [30, 30].map(|mib| bench.allocate(mib));
        bench.free(first);
        bench.calls();
        let _grown = bench.allocate(50);
        let calls = bench.calls();
        let count = |kind| calls.iter().filter(|call| **call == kind).count();
        assert_eq!((count(CallKind::MemCreate), count(CallKind::MemRelease)), (made, released), "{settings}");
        assert_eq!(bench.reserved(), 100);
    }
}

#[test]
fn smaller_reserve_makes_more_ranges_and_refuses_larger() {
    let bench = Bench::new(1000, "expandable_segments_reserve=40M");
    let blocks = [30, 30, 8].map(|mib| bench.allocate(mib));
    assert_eq!(bench.calls().iter().filter(|call| **call == CallKind::MemAddressReserve).count(), 2);
    let mut runs = bench.layout();
    runs.sort();
    assert_eq!(runs, [vec![(0, 30, 'A'), (30, 8, 'A'), (38, 2, 'F')], vec![(0, 30, 'A'), (30, 10, 'F')]]);
    assert!(bench.try_allocate(41).unwrap_err().is_out_of_memory());
    blocks.into_iter().for_each(|block| {
        bench.free(block);
    });
}

#[test]
fn a_device_without_virtual_memory_is_refused_with_what_can() {
    let driver: Arc<dyn Driver> =
        Arc::new(SimDriver::new(vramlab_device::Profile { vmm: None, ..profile(MIB) }, SimMemory::None));
    for (of, setting) in [("pytorch-expandable", ""), ("lab:source=expandable", "source=expandable")] {
        let of: Selection = of.parse().unwrap();
        assert_eq!(of.capabilities().needs, Needs::Vmm, "{of}");
        let error = of.build(&driver).unwrap_err();
        assert!(matches!(error, AllocError::Unsupported { .. }));
        let text = error.to_string();
        assert!(text.contains("virtual memory management") && text.contains("pytorch and caching"), "{text}");
        // Where the device does not support a setting, the error names it.
        assert!(text.contains(setting) && text.contains(" for ") != setting.is_empty(), "{text}");
    }
}

#[test]
fn a_fault_in_a_mapping_is_an_error_and_one_of_memory_a_retry() {
    for of in ["pytorch-expandable", "lab:source=expandable"] {
        fault_in_a_mapping(of);
    }
}

fn fault_in_a_mapping(of: &str) {
    let of: Selection = of.parse().unwrap();
    for call in [CallKind::MemAddressReserve, CallKind::MemCreate, CallKind::MemMap, CallKind::MemSetAccess] {
        for (number, code) in [0, 1, 2]
            .into_iter()
            .flat_map(|number| [(number, DriverError::OUT_OF_MEMORY), (number, DriverError::ILLEGAL_ADDRESS)])
        {
            let faulty = Arc::new(FaultyDriver::new(sim(1000 * MIB, SimMemory::None)));
            let driver = Arc::clone(&faulty) as Arc<dyn Driver>;
            let stream = driver.stream_create().unwrap();
            let allocator = of.build(&driver).unwrap();
            faulty.fail(call, number, code);
            let block = allocator.allocate(Request::new(50 * MIB), stream);
            if faulty.injected() == 0 {
                continue;
            }
            match code {
                DriverError::OUT_OF_MEMORY => {
                    assert_eq!(block.as_ref().unwrap().path(), Path::Retry, "{call} {number}");
                    free(allocator.as_ref(), block.unwrap(), stream).unwrap();
                }
                _ => assert!(matches!(block.unwrap_err(), AllocError::Driver(error) if error.call == call)),
            }
            let block = allocator.allocate(Request::new(50 * MIB), stream).unwrap();
            free(allocator.as_ref(), block, stream).unwrap();
            assert_eq!(allocator.trim(0).unwrap(), 60 * MIB, "{call} {number}: nothing else is mapped");
        }
    }
}

#[test]
fn memory_is_unmapped_only_when_its_stream_has_finished() {
    let bench = Bench::new(1000, "memory_limit=40M");
    let block = bench.allocate(20);
    work(&bench.sim, bench.stream, 1_000_000);
    fill(bench.sim.as_ref(), block.addr(), 1, 20 * MIB, bench.stream);
    let queued = common::ready_ns(&bench.sim, bench.stream);
    bench.free(block);
    // The simulated device would fault if the allocator did not wait.
    let _again = bench.allocate(40);
    assert!(bench.sim.clock().now_ns() >= queued);
}

/// Two holes are filled for a request, and the memory ends after the first. Reserved memory then has a new peak, but only a request
/// that is served takes the breakdown at that peak.
#[test]
fn peak_of_a_refused_request_is_noted_with_the_next_served() {
    let bench = Bench::new(60, "memory_limit=1G");
    let [first, second] = [20, 20].map(|mib| bench.allocate(mib));
    bench.free(first);
    bench.allocator.trim(20 * MIB).unwrap();
    bench.free(second);
    let captured = bench.sim.stream_create().unwrap();
    let capture = bench.allocator.capture_begin(captured).unwrap();
    bench.allocator.reset_peaks();
    let before = bench.allocator.ledger_at_peak();
    assert!(bench.try_allocate(80).unwrap_err().is_out_of_memory());
    assert_eq!((bench.reserved(), bench.allocator.ledger_at_peak()), (40, before));
    bench.allocator.capture_end(capture).unwrap();
    let block = bench.allocate(2);
    assert_eq!(block.path(), Path::Split);
    let ledger = bench.allocator.ledger_at_peak();
    assert_eq!((ledger.reserved, ledger.requested), (40 * MIB, 2 * MIB));
}
