//! Allocators of pinned host memory: PyTorch's choices block by block, and published sizes to the byte.

use std::sync::Arc;
use vramlab_device::{
    CallKind, Driver, DriverError, FaultyDriver, NullDriver, Profile, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_policies::backends::{MemoryKind, all, hosts, parse_host_list};
use vramlab_policies::{AllocError, Block, DeviceAllocator, Path, Request, Selection};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// An allocator on a device, with the stream of the host's requests and one that copies.
struct Bench {
    allocator: Arc<dyn DeviceAllocator>,
    host: StreamId,
    copies: StreamId,
}

fn selection(text: &str) -> Selection {
    let list = parse_host_list(text).unwrap();
    list.iter().for_each(|selection| selection.check().unwrap());
    list.into_iter().next().unwrap()
}

impl Bench {
    fn on(driver: Arc<dyn Driver>, text: &str) -> Self {
        let [host, copies] = [(); 2].map(|()| driver.stream_create().unwrap());
        Self { allocator: selection(text).build(&driver).unwrap(), host, copies }
    }

    fn new(text: &str) -> Self {
        Self::on(Arc::new(NullDriver::new(2048 * GIB)), text)
    }

    fn take(&self, bytes: u64) -> Block {
        self.allocator.allocate(Request::new(bytes), self.host).unwrap()
    }

    fn give(&self, block: Block) -> Path {
        // SAFETY: no work uses it, or the stream was announced.
        unsafe { self.allocator.deallocate(block, self.host) }.unwrap()
    }

    fn reserved(&self) -> u64 {
        self.allocator.stats().reserved_bytes.all.current
    }

    fn pinned(&self, sizes: &[u64]) -> u64 {
        let blocks: Vec<Block> = sizes.iter().map(|bytes| self.take(*bytes)).collect();
        let reserved = self.reserved();
        for block in blocks {
            self.give(block);
        }
        reserved
    }
}

/// Half a gibibyte, a tenth, and so on, as reports write sizes.
fn gib(amount: f64) -> u64 {
    (amount * GIB as f64) as u64
}

/// Requested and pinned bytes of published programs.
fn published() -> [(&'static str, u64, u64); 6] {
    [
        ("https://github.com/vllm-project/vllm/issues/58185", gib(4.5), 8 * GIB),
        ("https://github.com/vllm-project/vllm/issues/50094", 6 * GIB, 8 * GIB),
        ("https://github.com/vllm-project/vllm/issues/50094", 10 * GIB, 16 * GIB),
        ("https://github.com/vllm-project/vllm/issues/50094", 12 * GIB, 16 * GIB),
        ("https://github.com/sgl-project/sglang/issues/36562", gib(20.4), 32 * GIB),
        ("vllm-backport 67", gib(2.25), 4 * GIB),
    ]
}

#[test]
fn six_published_roundings_come_out_to_the_byte() {
    for release in ["2.6", "2.11", "2.13", "2.15"] {
        for (source, asked, pinned) in published() {
            let bench = Bench::new(&format!("host-pytorch:release={release}"));
            assert_eq!(bench.pinned(&[asked]), pinned, "{source} {release}");
        }
    }
    let sizes = published().map(|(_, asked, _)| asked);
    let asked: u64 = sizes.iter().sum();
    assert_eq!((asked * 10).div_ceil(GIB), 552, "55.2 GiB");
    assert_eq!(Bench::new("host-pytorch").pinned(&sizes), 84 * GIB);
    // Each is pinned in whole pages, and nothing else.
    let exact = Bench::new("host-exact").pinned(&sizes);
    assert!((asked..asked + 4096 * sizes.len() as u64).contains(&exact), "{exact} of {asked}");
}

#[test]
fn single_sizes_of_other_reports_come_out_to_the_byte() {
    for (source, asked, pinned) in [
        ("https://github.com/vllm-project/vllm/issues/53042", 2_236_817_408, 4 * GIB),
        ("https://github.com/pytorch/pytorch/issues/95823", 8_695_185_408, 16 * GIB),
        ("https://github.com/vllm-project/vllm/issues/48436", 33 * GIB, 64 * GIB),
        ("https://github.com/vllm-project/vllm/issues/48436", 40 * GIB, 64 * GIB),
    ] {
        assert_eq!(Bench::new("host-pytorch").pinned(&[asked]), pinned, "{source}");
    }
}

#[test]
fn all_ranks_of_a_published_program_come_out_to_the_byte() {
    // 24 tensors of 2,236,817,408 bytes on each of 4 ranks: 384 GiB were pinned.
    let rank = vec![2_236_817_408; 24];
    assert_eq!(4 * Bench::new("host-pytorch").pinned(&rank), 384 * GIB);
    let exact = 4 * Bench::new("host-exact").pinned(&rank);
    assert!(exact < 201 * GIB, "{exact}");
}

#[test]
fn bucket_of_exact_sizes_overruns_before_sizes_were_compared() {
    let settings = "pinned_max_round_threshold_mb=128,pinned_max_cached_size_mb=1024";
    for (release, overruns) in [("2.13", true), ("2.14", true), ("2.15", false)] {
        let bench = Bench::new(&format!("host-pytorch:release={release},{settings}"));
        bench.give(bench.take(150 * MIB));
        let second = bench.allocator.allocate(Request::new(200 * MIB), bench.host);
        if overruns {
            let error = second.unwrap_err();
            let expected = AllocError::Overrun { allocator: "host-pytorch", requested: 200 * MIB, bytes: 150 * MIB };
            assert_eq!(error, expected, "{release}");
            assert!(error.to_string().contains("an overrun of 52428800 bytes"), "{error}");
            assert_eq!(bench.reserved(), 150 * MIB, "{release}");
        } else {
            let block = second.unwrap();
            assert_eq!((block.bytes(), bench.reserved()), (200 * MIB, 350 * MIB), "{release}");
            bench.give(block);
        }
    }
}

#[test]
fn newest_block_that_is_large_enough_is_taken() {
    let bench = Bench::new("host-pytorch:pinned_max_round_threshold_mb=1");
    let blocks = [200 * MIB, 150 * MIB, 140 * MIB].map(|bytes| bench.take(bytes));
    let addresses = blocks.each_ref().map(Block::addr);
    for block in blocks {
        bench.give(block);
    }
    // All three are of bucket 28, the newest is 140 MiB.
    let taken = [145 * MIB, 130 * MIB].map(|bytes| bench.take(bytes));
    assert_eq!(taken.each_ref().map(Block::addr), [addresses[1], addresses[2]]);
    assert_eq!(taken[0].bytes(), 150 * MIB, "a block is never split");
    taken.into_iter().for_each(|block| _ = bench.give(block));
}

/// A simulated GPU on which a stream is busy for a while.
fn busy(text: &str) -> (Arc<SimDriver>, Bench, StreamId) {
    let sim = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
    let bench = Bench::on(Arc::clone(&sim) as Arc<dyn Driver>, text);
    let other = sim.stream_create().unwrap();
    (sim, bench, other)
}

/// Queues a kernel that runs far longer than the test's calls.
fn work(sim: &SimDriver, stream: StreamId) {
    sim.launch(stream, "test", (1, 1), 4_300_000_000_000, &[]).unwrap();
}

#[test]
fn a_stuck_event_holds_what_is_behind_it() {
    for (text, held) in [("host-pytorch", true), ("host-exact", false)] {
        let (sim, bench, other) = busy(text);
        let [stuck, behind] = [(); 2].map(|()| bench.take(4 * MIB));
        let address = behind.addr();
        work(&sim, bench.copies);
        bench.allocator.record_use(&stuck, bench.copies).unwrap();
        bench.allocator.record_use(&behind, other).unwrap();
        assert_eq!(bench.give(stuck), Path::Deferred);
        assert_eq!(bench.give(behind), Path::Deferred);
        // The other stream is idle, so its event has completed.
        let next = bench.take(4 * MIB);
        assert_eq!(next.addr() != address, held, "{text}");
        sim.device_synchronize().unwrap();
        bench.give(next);
        let stats = bench.allocator.stats();
        bench.allocator.trim(0).unwrap();
        assert_eq!(stats.allocation.all.current, 0, "{text}");
        assert_eq!(bench.reserved(), 0, "{text}");
    }
}

#[test]
fn no_block_returns_before_its_copy_has_completed() {
    for backend in hosts() {
        let (sim, bench, _) = busy(backend.name);
        let block = bench.take(8 * MIB);
        let (start, end) = (block.addr().get(), block.addr().get() + block.bytes());
        bench.allocator.record_use(&block, bench.copies).unwrap();
        work(&sim, bench.copies);
        bench.give(block);
        for _ in 0..4 {
            let next = bench.take(8 * MIB);
            let at = next.addr().get();
            assert!(at + next.bytes() <= start || at >= end, "{backend}: reused while its copy runs");
        }
    }
}

#[test]
fn a_background_thread_drains_only_after_the_first_miss_and_then_by_size() {
    // Up to 2.9 a request drains the events of blocks of its size, whichever is in front.
    for (release, reused) in [("2.9", true), ("2.10", false)] {
        let (sim, bench, other) = busy(&format!("host-pytorch:release={release},pinned_use_background_threads=on"));
        let [stuck, small] = [8 * MIB, 2 * MIB].map(|bytes| bench.take(bytes));
        let address = small.addr();
        work(&sim, bench.copies);
        bench.allocator.record_use(&stuck, bench.copies).unwrap();
        bench.allocator.record_use(&small, other).unwrap();
        bench.give(stuck);
        bench.give(small);
        let next = bench.take(2 * MIB);
        assert_eq!(next.addr() == address, reused, "{release}");
    }
}

#[test]
fn reserved_segment_is_a_bump_pointer_whose_bytes_are_lost_by_a_trim() {
    let bench = Bench::new("host-pytorch:pinned_reserve_segment_size_mb=1");
    let [first, second] = [100, 5000].map(|bytes| bench.take(bytes));
    assert_eq!(second.addr().get() - first.addr().get(), 4096, "whole pages");
    assert_eq!((first.bytes(), second.bytes(), bench.reserved()), (128, 8192, MIB));
    let address = second.addr();
    bench.give(first);
    bench.give(second);
    assert_eq!(bench.take(6000).addr(), address, "blocks of it are cached");
    // 1 MiB does not fit any more.
    let large = bench.take(MIB);
    assert_eq!(bench.reserved(), 2 * MIB);
    bench.give(large);
    assert_eq!(bench.allocator.trim(0).unwrap(), MIB);
    assert_eq!(bench.reserved(), MIB, "the segment is never released");
    let next = bench.take(100);
    assert_eq!(next.addr().get() - address.get(), 8192, "the first block's page is lost");
    let snapshot = bench.allocator.snapshot().unwrap();
    assert_eq!(snapshot.segments.iter().map(|segment| segment.bytes).sum::<u64>(), MIB);
}

#[test]
fn a_refused_request_releases_nothing_in_pytorch() {
    let full = |text: &str| {
        let bench = Bench::on(Arc::new(NullDriver::new(64 * MIB)), text);
        bench.give(bench.take(33 * MIB - 1));
        let outcome = bench.allocator.allocate(Request::new(16 * MIB), bench.host).map(std::mem::forget);
        (outcome, bench)
    };
    let (outcome, bench) = full("host-pytorch");
    let error = outcome.unwrap_err();
    assert!(error.is_out_of_memory() && !error.to_string().contains('\n'), "{error}");
    assert_eq!((bench.reserved(), bench.allocator.stats().num_alloc_retries), (64 * MIB, 0));
    for other in ["host-exact", "host-cupy"] {
        let (outcome, _) = full(other);
        outcome.unwrap();
    }
}

#[test]
fn an_event_that_is_not_recorded_keeps_its_block_until_the_device_was_waited_for() {
    let driver = Arc::new(FaultyDriver::new(Arc::new(NullDriver::new(GIB))));
    let bench = Bench::on(Arc::clone(&driver) as Arc<dyn Driver>, "host-pytorch");
    let block = bench.take(MIB);
    bench.allocator.record_use(&block, bench.copies).unwrap();
    driver.fail(CallKind::EventRecord, 0, DriverError::INVALID_HANDLE);
    // SAFETY: the stream was announced.
    let error = unsafe { bench.allocator.deallocate(block, bench.host) }.unwrap_err();
    assert!(matches!(error, AllocError::Driver(_)), "{error}");
    let stranded = || bench.allocator.stats().stranded_bytes.map(|gauge| gauge.current);
    let _live = bench.take(MIB);
    assert_eq!((stranded(), bench.reserved()), (Some(MIB), 2 * MIB), "it serves no request");
    bench.allocator.trim(0).unwrap();
    assert_eq!((stranded(), bench.reserved()), (Some(0), MIB));
}

#[test]
fn exact_blocks_keep_no_idle_segment_that_does_not_fit() {
    let bench = Bench::new("host-exact");
    for size in [10 * MIB, 20 * MIB, 40 * MIB] {
        bench.give(bench.take(size));
    }
    assert_eq!(bench.allocator.stats().reserved_bytes.all.peak, 40 * MIB);
    let keeps = Bench::new("host-exact:keep_idle=on");
    for size in [10 * MIB, 20 * MIB, 40 * MIB] {
        keeps.give(keeps.take(size));
    }
    assert_eq!(keeps.reserved(), 70 * MIB);
}

#[test]
fn lists_and_command_lines_keep_the_two_memories_apart() {
    assert!(all().iter().all(|backend| backend.capabilities.memory == MemoryKind::Device));
    let names: Vec<&str> = hosts().iter().map(|backend| backend.name).collect();
    assert_eq!(names, ["host-pytorch", "host-exact", "host-cupy", "host-rmm-pool"]);
    let error = "host-exact".parse::<Selection>().unwrap_err().to_string();
    assert!(error.contains("pinned host memory") && error.contains("replay FILE --host"), "{error}");
    assert!(parse_host_list("caching").unwrap_err().to_string().contains("no allocator is called 'caching'"));
    let every = parse_host_list("all").unwrap();
    assert_eq!(every.len(), names.len());
    let error = parse_host_list("host-pytorch:release=2.5").unwrap_err().to_string();
    assert!(error.contains("'release' takes 2.6, 2.7"), "{error}");
}
