//! Policies of other libraries, on cases that are derived by hand from their rules.

use std::sync::Arc;
use vramlab_device::{Driver, NullDriver, StreamId};
use vramlab_policies::backends::find;
use vramlab_policies::{AllocError, Block, DeviceAllocator, Path, Request, Selection};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

struct Bench {
    allocator: Arc<dyn DeviceAllocator>,
    streams: [StreamId; 2],
    /// Address of the first block.
    base: Option<u64>,
    /// Blocks that stay live.
    held: Vec<Block>,
}

impl Bench {
    fn new(allocator: &str, room: u64) -> Self {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(room));
        let streams = [(); 2].map(|()| driver.stream_create().unwrap());
        let selection: Selection = allocator.parse().unwrap();
        selection.check().unwrap();
        Self { allocator: selection.build(&driver).unwrap(), streams, base: None, held: Vec::new() }
    }

    fn try_take(&self, bytes: u64) -> Result<Block, AllocError> {
        self.allocator.allocate(Request::new(bytes), self.streams[0])
    }

    fn take(&mut self, bytes: u64) -> Block {
        let block = self.try_take(bytes).unwrap();
        self.base.get_or_insert(block.addr().get());
        block
    }

    /// The offset of a block from the first one.
    fn at(&self, block: &Block) -> i64 {
        block.addr().get().cast_signed() - self.base.unwrap().cast_signed()
    }

    /// Allocates a block that stays live; returns its offset and size.
    fn place(&mut self, bytes: u64) -> (i64, u64) {
        let block = self.take(bytes);
        let placed = (self.at(&block), block.bytes());
        self.held.push(block);
        placed
    }

    fn free(&self, block: Block) {
        // SAFETY: no work has used the block.
        unsafe { self.allocator.deallocate(block, self.streams[0]) }.unwrap();
    }

    fn reserved(&self) -> u64 {
        self.allocator.stats().reserved_bytes.all.current
    }
}

/// The error of a selection's settings.
fn refused(allocator: &str) -> String {
    let error = allocator.parse::<Selection>().map_or_else(
        |error| error.to_string(),
        |selection| selection.check().map_or_else(|error| error.to_string(), |()| "accepted".to_owned()),
    );
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn bfc_cuts_a_block_that_is_twice_as_large_or_leaves_too_much() {
    let mut bench = Bench::new("bfc", 1 << 40);
    // From a region of 2 MiB, which is split.
    assert_eq!(bench.place(1000 * KIB), (0, 1000 * KIB));
    // The remainder is 1048 KiB: less than twice 600, so the request gets all of it.
    assert_eq!(bench.place(600 * KIB), (1_024_000, 1048 * KIB));
    assert_eq!(bench.reserved(), 2 * MIB);
    // The next region has 4 MiB.
    let block = bench.take(600 * KIB);
    assert_eq!((bench.reserved(), block.bytes(), block.path()), (6 * MIB, 600 * KIB, Path::DriverAlloc));
    // With a smaller bound for the remainder, the same request is split.
    let mut bench = Bench::new("bfc:max_dead_bytes_per_chunk=448K", 1 << 40);
    bench.place(1000 * KIB);
    assert_eq!(bench.place(600 * KIB), (1_024_000, 600 * KIB));
    assert_eq!(bench.place(600 * KIB - 1).1, 600 * KIB, "448 KiB are left, which is too little");
}

#[test]
fn bfc_joins_neighbours_and_takes_the_smallest_block_that_fits() {
    let mut bench = Bench::new("bfc", 1 << 40);
    let blocks = [256, 512, 1024, 256, 2048, 256].map(|bytes| bench.take(bytes));
    let [first, second, third, _, fifth, _] = blocks;
    for block in [first, third, second, fifth] {
        bench.free(block);
    }
    // Free: [0, 1792), [2048, 4096), and the range behind 4352. The first serves as a whole: the remainder of 1024 bytes, to which
    // 896 is rounded up, would be smaller.
    assert_eq!(bench.place(896), (0, 1792));
    // The second half has a remainder.
    assert_eq!(bench.place(1024), (2048, 1024));
    assert_eq!(bench.place(1000), (3072, 1024));
}

#[test]
fn bfc_takes_regions_that_double_up_to_its_limit() {
    let mut bench = Bench::new("bfc:memory_limit=16M", 1 << 40);
    let sizes = [2, 4, 5].map(|mib| bench.take(mib * MIB).bytes() / MIB);
    // 2 and 4; 5 does not double the next region of 8; 2 MiB remain up to the limit.
    assert_eq!((sizes, bench.reserved()), ([2, 4, 8], 14 * MIB));
    bench.place(MIB);
    assert_eq!(bench.reserved(), 16 * MIB);
    assert!(bench.try_take(2 * MIB).unwrap_err().is_out_of_memory());
    let bench = &mut Bench::new("bfc:memory_limit=16M,allow_growth=off", 1 << 40);
    bench.place(256);
    assert_eq!(bench.reserved(), 16 * MIB);
    let bench = &mut Bench::new("bfc:extend=same-as-requested", 1 << 40);
    for bytes in [3 * MIB, 256, 5 * MIB] {
        bench.place(bytes);
    }
    assert_eq!(bench.reserved(), 8 * MIB + 256);
}

#[test]
fn bfc_gives_free_regions_back_only_if_that_is_enough() {
    for (collects, served) in [("off", false), ("on", true)] {
        let mut bench = Bench::new(&format!("bfc:garbage_collection={collects},memory_limit=8M"), 1 << 40);
        let (small, large) = (bench.take(2 * MIB), bench.take(4 * MIB));
        bench.free(large);
        assert!(bench.try_take(7 * MIB).is_err());
        assert_eq!(bench.reserved(), 6 * MIB, "it would not help");
        let result = bench.try_take(5 * MIB);
        assert_eq!(result.is_ok(), served, "{result:?}");
        assert_eq!(bench.reserved(), if served { 8 * MIB } else { 6 * MIB });
        bench.free(small);
    }
}

#[test]
fn tlsf_takes_the_block_that_became_free_last_and_cuts_it() {
    let mut bench = Bench::new("tlsf:segment=4M", 1 << 40);
    // 100 and 101 units of 512 bytes are of one class, which begins at 100; 98 is of the class before.
    let sizes = [100, 1, 101, 1, 98, 1];
    let [first, _, third, _, fifth, _] = sizes.map(|units| bench.take(units * 512));
    let [first_at, third_at] = [&first, &third].map(|block| bench.at(block));
    assert_eq!((first_at, third_at), (0, 101 * 512));
    for block in [first, third, fifth] {
        bench.free(block);
    }
    assert_eq!(bench.place(99 * 512), (101 * 512, 99 * 512), "the last of the first class in which all fit");
    // 101 units may be missed although a block of 100 exists.
    let (at, _) = bench.place(100 * 512);
    assert_eq!(at, 0);
    assert_eq!(bench.reserved(), 4 * MIB);
}

#[test]
fn tlsf_misses_a_block_of_exactly_the_wanted_size() {
    let mut bench = Bench::new("tlsf:segment=4M", 1 << 40);
    let block = bench.take(101 * 512);
    let _behind = bench.take(512);
    bench.free(block);
    assert_eq!(bench.place(101 * 512).0, 102 * 512, "all that are sure to fit are larger");
    assert_eq!(bench.place(100 * 512).0, 0);
    // A segment has a size that a search finds, so that a repeated request larger than one unit class finds it.
    for name in ["tlsf", "lab:fit=tlsf,grow=exact"] {
        let mut bench = Bench::new(name, 1 << 45);
        let places = [(); 6].map(|()| {
            let block = bench.take(154_389_504);
            let at = bench.at(&block);
            bench.free(block);
            at
        });
        // 301,542 units are more than 36 and less than 37 parts of 8,192, which are 4 MiB.
        assert_eq!((places, bench.reserved()), ([0; 6], 37 * 4 * MIB), "{name}");
    }
    // Sizes beyond 4 GiB, which the original's 32 rows do not hold.
    let mut bench = Bench::new("tlsf", 1 << 45);
    let large = bench.take(5 << 30);
    bench.free(large);
    assert_eq!((bench.place(5 << 30), bench.reserved()), ((0, 5 << 30), 5 << 30));
}

#[test]
fn cupy_takes_the_oldest_of_equal_blocks_and_cuts_exactly() {
    let mut bench = Bench::new("cupy", 1 << 40);
    let block = bench.take(4096);
    assert_eq!(bench.reserved(), 4096, "as much as was asked for");
    bench.free(block);
    // [0, 512) is the oldest; the later splits are younger by their address.
    let blocks = [512; 8].map(|bytes| bench.take(bytes));
    assert_eq!(
        (bench.reserved(), blocks.each_ref().map(|block| bench.at(block) / 512)),
        (4096, [0, 1, 2, 3, 4, 5, 6, 7])
    );
    let [_, b, _, d, _, f, _, _] = blocks;
    for block in [f, b, d] {
        bench.free(block);
    }
    assert_eq!([(); 3].map(|()| bench.place(1).0 / 512), [1, 3, 5]);
    bench.place(3 * MIB + 1);
    assert_eq!(bench.reserved(), 4096 + 3 * MIB + 512);
}

#[test]
fn cupy_gives_whole_segments_back_before_it_gives_up() {
    let mut bench = Bench::new("cupy:memory_limit=8M", 1 << 40);
    let (cut, whole) = (bench.take(4 * MIB), bench.take(4 * MIB));
    bench.free(cut);
    let _part = bench.take(MIB);
    bench.free(whole);
    assert!(bench.try_take(5 * MIB).is_err(), "the segment that is cut stays");
    assert_eq!(bench.reserved(), 4 * MIB, "the other went");
    bench.place(4 * MIB);
}

#[test]
fn paddle_hands_out_the_end_of_a_block() {
    let mut bench = Bench::new("paddle:chunk_size=4K", 1 << 40);
    // The first is at the end of the chunk, so the others are in front of it.
    assert_eq!([256, 512, 1000].map(|bytes| bench.place(bytes)), [(0, 256), (-512, 512), (-1536, 1024)]);
    // 2304 bytes remain in front; a hole of 512 serves requests up to its size, again at its end.
    let mut bench = Bench::new("paddle:chunk_size=4K", 1 << 40);
    let [_, hole, _] = [256, 512, 256].map(|bytes| bench.take(bytes));
    bench.free(hole);
    assert_eq!([256, 256, 3072].map(|bytes| bench.place(bytes).0), [-256, -512, -768 - 3072]);
    assert_eq!(bench.reserved(), 4096);
    bench.place(5000);
    assert_eq!(bench.reserved(), 4096 + 5120, "more than a chunk is taken as it is");
}

#[test]
fn settings_that_contradict_are_refused_in_one_line() {
    for (allocator, words) in [
        ("bfc:allow_growth=off", "set memory_limit, too"),
        ("bfc:allow_growth=off,memory_limit=1G,extend=same-as-requested", "contradict each other"),
        ("bfc:initial_region=1000", "multiples of 256"),
        ("bfc:extend=sometimes", "takes next-power-of-two or same-as-requested"),
        ("tlsf:segment=2097153", "multiples of 512"),
        ("tlsf:segment=1M", "at least 2M"),
        ("paddle:chunk_size=1001", "multiples of 256"),
        ("rmm-pool:initial_pool_size=1000", "multiples of 256"),
        ("rmm-pool:initial_pool_size=2G,maximum_pool_size=1G", "make it at least as large"),
    ] {
        assert!(refused(allocator).contains(words), "{allocator}: {}", refused(allocator));
    }
}

#[test]
fn what_they_say_they_can_do_is_listed() {
    let can = |name: &str| find(name).unwrap().capabilities.describe().join("; ");
    assert!(can("bfc").contains("memory serves any stream") && !can("bfc").contains("coalesces immediately"));
    assert!(can("cupy").contains("memory stays with its stream") && can("cupy").contains("coalesces immediately"));
}
