use super::*;
use std::ops::Deref;
use vramlab_device::NullDriver;

const MIB: u64 = 1 << 20;

/// An allocator on a device, with a stream.
struct Bench {
    allocator: GmLake,
    stream: StreamId,
    driver: Arc<NullDriver>,
}

impl Deref for Bench {
    type Target = GmLake;

    fn deref(&self) -> &GmLake {
        &self.allocator
    }
}

impl Bench {
    fn new(room: u64, settings: GmLakeSettings) -> Self {
        let driver = Arc::new(NullDriver::new(room));
        let stream = driver.stream_create().unwrap();
        Self { allocator: GmLake::new(Arc::clone(&driver) as _, settings).unwrap(), stream, driver }
    }

    fn take(&self, mib: u64) -> Block {
        self.allocate(Request::new(mib * MIB), self.stream).unwrap()
    }

    fn give(&self, block: Block) {
        // SAFETY: the block is not used.
        assert_eq!(unsafe { self.deallocate(block, self.stream) }.unwrap(), Path::Hit);
    }

    fn reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.current / MIB
    }

    fn stitched_bytes(&self) -> u64 {
        self.lock().lake.stitched_bytes() / MIB
    }
}

fn settings() -> GmLakeSettings {
    GmLakeSettings { frag_limit: 2 * MIB, ..GmLakeSettings::default() }
}

#[test]
fn two_free_blocks_that_are_not_adjacent_serve_their_sum_without_new_memory() {
    let bench = Bench::new(1 << 30, settings());
    let [one, kept, two] = [64, 64, 64].map(|mib| bench.take(mib));
    bench.give(one);
    bench.give(two);
    let before = bench.stats();
    let both = bench.take(128);
    assert_eq!((both.path(), both.bytes()), (Path::Steal, 128 * MIB));
    let after = bench.stats();
    assert_eq!((after.reserved_bytes, after.num_device_alloc), (before.reserved_bytes, before.num_device_alloc));
    assert_eq!(after.steals.map(|steals| (steals.requests, steals.bytes)), Some((1, 128 * MIB)));
    assert_eq!(after.inactive_split_bytes.unwrap().all.current, 0);
    let snapshot = bench.snapshot().unwrap();
    assert_eq!(snapshot.segments.iter().map(|segment| segment.bytes).sum::<u64>(), 192 * MIB);
    assert!(snapshot.segments.iter().any(|segment| segment.addr == both.addr() && segment.bytes == 128 * MIB));

    // The stitched block is kept, and is in use while one of its parts is.
    let addr = both.addr();
    bench.give(both);
    let part = bench.take(64);
    let other = bench.take(128);
    assert_eq!((other.path(), bench.reserved()), (Path::DriverAlloc, 320));
    bench.give(part);
    let again = bench.take(128);
    assert_eq!((again.path(), again.addr()), (Path::Hit, addr));
    [kept, other, again].into_iter().for_each(|block| bench.give(block));
    assert_eq!(bench.trim(0).unwrap(), 320 * MIB);
    assert_eq!((bench.reserved(), bench.stitched_bytes()), (0, 0));
    assert_eq!(bench.driver.mem_info().unwrap().free, 1 << 30, "mappings keep no memory");
}

/// Blocks of 64 MiB, all of which are free, and one stitched block over them.
fn stitched(bench: &Bench, blocks: u64) -> DeviceAddr {
    let parts: Vec<Block> = (0..blocks).map(|_| bench.take(64)).collect();
    parts.into_iter().for_each(|block| bench.give(block));
    let block = bench.take(64 * blocks);
    assert_eq!((block.path(), bench.reserved()), (Path::Steal, 64 * blocks));
    let addr = block.addr();
    bench.give(block);
    addr
}

#[test]
fn the_front_of_a_larger_stitched_block_serves_a_request() {
    let bench = Bench::new(1 << 30, settings());
    let addr = stitched(&bench, 2);
    let front = bench.take(100);
    assert_eq!((front.path(), front.addr()), (Path::Split, addr));
    let split = || bench.stats().inactive_split_bytes.unwrap().all.current / MIB;
    assert_eq!((split(), bench.reserved()), (28, 128));
    let rest = bench.take(28);
    assert_eq!((rest.path(), split(), bench.reserved()), (Path::Hit, 0, 128));
    bench.give(front);
    bench.give(rest);
    let parts = [64, 64].map(|mib| bench.take(mib));
    assert_eq!(parts.each_ref().map(Block::path), [Path::Hit; 2], "primitive blocks coalesce");
    parts.into_iter().for_each(|block| bench.give(block));

    let bench = Bench::new(1 << 30, GmLakeSettings { reuse_limit: 1, ..settings() });
    let addr = stitched(&bench, 2);
    let front = bench.take(100);
    assert_eq!((front.path(), bench.reserved()), (Path::Steal, 128), "another one is stitched");
    assert_ne!(front.addr(), addr);
    bench.give(front);
}

#[test]
fn primitive_blocks_are_preferred_to_stitched_ones() {
    let bench = Bench::new(1 << 30, settings());
    stitched(&bench, 2);
    let large = bench.take(200);
    let addr = large.addr();
    bench.give(large);
    let block = bench.take(128);
    assert_eq!((block.path(), block.addr()), (Path::Split, addr));
    bench.give(block);
}

#[test]
fn a_segment_behind_a_live_front_is_released() {
    let bench = Bench::new(1 << 30, settings());
    let addr = stitched(&bench, 3);
    let front = bench.take(128);
    assert_eq!((front.path(), front.addr()), (Path::Split, addr));
    assert_eq!(bench.trim(0).unwrap(), 64 * MIB);
    assert_eq!((bench.reserved(), bench.driver.mem_info().unwrap().free), (128, (1 << 30) - 128 * MIB));
    bench.give(front);
    let again = bench.take(128);
    assert_eq!((again.path(), again.addr()), (Path::Hit, addr), "its front is a stitched block");
    bench.give(again);
    bench.trim(0).unwrap();
    assert_eq!((bench.stitched_bytes(), bench.driver.mem_info().unwrap().free), (0, 1 << 30));
}

/// Requests 56 MiB while every second block of 16 MiB is free and the device is full.
fn served_when_short(settings: GmLakeSettings) -> Option<Path> {
    let bench = Bench::new(128 * MIB, settings);
    let mut blocks: Vec<Block> = (0..8).map(|_| bench.take(16)).collect();
    [6, 4, 2, 0].into_iter().for_each(|at| bench.give(blocks.remove(at)));
    let served = bench.allocate(Request::new(56 * MIB), bench.stream);
    let path = served.as_ref().map(Block::path).ok();
    blocks.extend(served);
    blocks.into_iter().for_each(|block| bench.give(block));
    path
}

#[test]
fn the_level_sets_when_requests_are_stitched() {
    let level = |defrag_level| served_when_short(GmLakeSettings { defrag_level, ..settings() });
    assert_eq!(level(0), Some(Path::Steal));
    assert_eq!(level(1), Some(Path::Steal), "new memory was refused");
    assert_eq!(level(2), Some(Path::Retry), "idle segments were released");
    let bench = |defrag_level| {
        let bench = Bench::new(1 << 30, GmLakeSettings { defrag_level, ..settings() });
        let parts = [64, 64].map(|mib| bench.take(mib));
        parts.into_iter().for_each(|block| bench.give(block));
        let block = bench.take(128);
        let path = block.path();
        bench.give(block);
        path
    };
    assert_eq!([0, 1, 2].map(bench), [Path::Steal, Path::DriverAlloc, Path::DriverAlloc]);
}

#[test]
fn requests_below_the_limit_are_never_stitched() {
    // Both segments are in use, so none is releasable.
    let outcome = |settings| {
        let bench = Bench::new(64 * MIB, settings);
        let parts = [32, 32].map(|mib| bench.take(mib));
        parts.into_iter().for_each(|block| bench.give(block));
        let pins = [16, 18].map(|mib| bench.take(mib));
        let block = bench.allocate(Request::new(30 * MIB), bench.stream);
        let path = block.as_ref().map(Block::path).map_err(AllocError::is_out_of_memory);
        pins.into_iter().for_each(|block| bench.give(block));
        block.into_iter().for_each(|block| bench.give(block));
        path
    };
    assert_eq!(outcome(GmLakeSettings::default()), Err(true));
    assert_eq!(outcome(settings()), Ok(Path::Steal));
}

#[test]
fn the_addresses_of_stitched_blocks_have_a_limit() {
    let bench = Bench::new(1 << 30, GmLakeSettings { auto_gc: 256 * MIB, ..settings() });
    let blocks = [20, 20, 20, 20, 20, 20].map(|mib| bench.take(mib));
    blocks.into_iter().for_each(|block| bench.give(block));
    // Sizes that differ, so that each is stitched.
    let mut unmapped = 0;
    for mib in (42..120).step_by(2) {
        let before = bench.stitched_bytes();
        let block = bench.take(mib);
        unmapped += u64::from(bench.stitched_bytes() < before);
        assert!(bench.stitched_bytes() <= 256, "{} MiB", bench.stitched_bytes());
        bench.give(block);
    }
    assert_eq!(bench.reserved(), 120, "no request needed new memory");
    assert!(unmapped > 1);
    bench.trim(0).unwrap();
    assert_eq!(bench.driver.mem_info().unwrap().free, 1 << 30);
}

#[test]
fn nothing_is_stitched_across_streams() {
    let bench = Bench::new(1 << 30, settings());
    let other = bench.driver.stream_create().unwrap();
    let theirs = bench.allocate(Request::new(64 * MIB), other).unwrap();
    let mine = bench.take(64);
    bench.give(mine);
    // SAFETY: the block is not used.
    unsafe { bench.deallocate(theirs, other) }.unwrap();
    let block = bench.take(128);
    assert_eq!((block.path(), bench.reserved()), (Path::DriverAlloc, 256));
    bench.give(block);
}
