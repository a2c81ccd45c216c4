//! RMM's policies: placements derived by hand, and the race between three streams.

use std::sync::Arc;
use vramlab_device::{
    CallKind, Driver, DriverError, FaultyDriver, NullDriver, Profile, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_policies::backends::{RmmArena, RmmArenaSettings, RmmPool, RmmPoolSettings};
use vramlab_policies::{Block, DeviceAllocator, Request};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Frees a block that is no longer in use.
fn free(allocator: &dyn DeviceAllocator, block: Block, stream: StreamId) {
    // SAFETY: the tests queue every use of a block before, on its own stream.
    unsafe { allocator.deallocate(block, stream) }.unwrap();
}

fn allocate(allocator: &dyn DeviceAllocator, bytes: u64, stream: StreamId) -> Block {
    allocator.allocate(Request::new(bytes), stream).unwrap()
}

/// A pool of 1 MiB, and streams.
fn pool<const N: usize>(driver: Arc<dyn Driver>, record_after_merge: bool) -> (impl DeviceAllocator, [StreamId; N]) {
    let streams = std::array::from_fn(|_| driver.stream_create().unwrap());
    let settings = RmmPoolSettings { initial_pool_size: MIB, record_after_merge, ..RmmPoolSettings::default() };
    (RmmPool::new(driver, settings), streams)
}

fn null() -> Arc<dyn Driver> {
    Arc::new(NullDriver::new(64 * MIB))
}

#[test]
fn blocks_are_cut_to_256_bytes_and_the_best_fit_is_taken() {
    let (pool, [stream]) = pool(null(), false);
    let sizes = [1, 257, 3 * KIB, 256, 2 * KIB, 256];
    let blocks = sizes.map(|bytes| allocate(&pool, bytes, stream));
    let base = blocks[0].addr().get();
    let at = |block: &Block| block.addr().get() - base;
    assert_eq!(blocks.each_ref().map(at), [0, 256, 768, 3840, 4096, 6144]);
    assert_eq!(blocks.each_ref().map(Block::bytes), [256, 512, 3072, 256, 2048, 256]);
    let [first, _second, three, _fourth, two, _sixth] = blocks;
    // Holes of 256, 2048 and 3072 bytes: the smallest that fits serves, and its remainder stays.
    for hole in [first, three, two] {
        free(&pool, hole, stream);
    }
    let results = [1500, 256, 512, 3072].map(|bytes| allocate(&pool, bytes, stream));
    assert_eq!(results.each_ref().map(at), [4096, 0, 4096 + 1536, 768]);
}

#[test]
fn the_pool_doubles_and_what_the_device_gave_apart_stays_apart() {
    let (pool, [stream]) = pool(null(), false);
    let first = allocate(&pool, MIB, stream);
    let second = allocate(&pool, 256, stream);
    let reserved = || pool.stats().reserved_bytes.all.current;
    assert_eq!(reserved(), 2 * MIB);
    let third = allocate(&pool, 3 * MIB, stream);
    assert_eq!(reserved(), 5 * MIB, "more than is held");
    for block in [first, second, third] {
        free(&pool, block, stream);
    }
    // Of 1, 1 and 3 MiB.
    let largest = allocate(&pool, 4 * MIB, stream);
    assert_eq!(reserved(), 10 * MIB);
    free(&pool, largest, stream);
}

#[test]
fn stream_takes_from_the_first_fitting_list_then_all_lists() {
    let (pool, [one, two, three]) = pool(null(), false);
    let block = allocate(&pool, 512 * KIB, one);
    let base = block.addr().get();
    // The remainder belongs to the first stream: the second takes its front, and the rest stays with the first.
    let taken = allocate(&pool, 256 * KIB, two);
    assert_eq!((taken.addr().get() - base, taken.path()), (512 * KIB, vramlab_policies::Path::WaitInserted));
    free(&pool, taken, two);
    let again = allocate(&pool, 256 * KIB, one);
    assert_eq!(again.addr().get() - base, 768 * KIB, "the first stream's own rest comes before the second's block");
    free(&pool, again, one);
    // [0, 512) is live; [512, 768) belongs to the second, [768, 1024) to the first. Together they serve the third.
    let full_block = allocate(&pool, 512 * KIB, three);
    assert_eq!((full_block.addr().get() - base, pool.stats().num_device_alloc), (512 * KIB, 1));
    free(&pool, full_block, three);
    free(&pool, block, one);
}

#[test]
fn memory_of_a_destroyed_stream_serves_others_after_a_wait() {
    let mut profile = Profile::h200();
    profile.total_bytes = profile.context_bytes + 6 * MIB;
    let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(profile, SimMemory::None));
    let [destroyed_stream, other] = [(); 2].map(|()| driver.stream_create().unwrap());
    let settings = RmmPoolSettings { initial_pool_size: 2 * MIB, ..RmmPoolSettings::default() };
    let pool = RmmPool::new(Arc::clone(&driver), settings);
    let block = allocate(&pool, 2 * MIB, destroyed_stream);
    // SAFETY: the stream is named once more, as the stream of the block.
    unsafe { driver.stream_destroy(destroyed_stream) }.unwrap();
    free(&pool, block, destroyed_stream);
    let blocks = [(); 3].map(|()| allocate(&pool, 2 * MIB, other));
    let paths = blocks.each_ref().map(Block::path);
    assert_eq!(
        paths,
        [vramlab_policies::Path::DriverAlloc, vramlab_policies::Path::DriverAlloc, vramlab_policies::Path::Retry]
    );
    assert_eq!(pool.stats().num_device_alloc, 3);
    for block in blocks {
        free(&pool, block, other);
    }
}

/// The first stream takes over a block that the second still works on, and the third takes it from the first. Returns whether the
/// third's work begins before the second's completes.
fn third_overtakes_second(record_after_merge: bool) -> bool {
    let sim = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
    let (pool, [one, two, three]) = pool(Arc::clone(&driver), record_after_merge);
    let [second_done, third_begins] = [(); 2].map(|()| driver.event_create(false).unwrap());
    let front = allocate(&pool, 512 * KIB, one);
    let back = allocate(&pool, 512 * KIB, two);
    let (addr, bytes) = (back.addr().get(), back.bytes());
    // About a millisecond of work.
    sim.launch(two, "reads the block", (1, 1), 4_300_000_000, &[(addr, bytes)]).unwrap();
    driver.event_record(second_done, two).unwrap();
    free(&pool, back, two);
    free(&pool, front, one);
    // Neither list has 768 KiB. The first stream waits for the second, but its event is older.
    let joined = allocate(&pool, 768 * KIB, one);
    let end = joined.addr().get() + joined.bytes();
    let stolen = allocate(&pool, 256 * KIB, three);
    assert_eq!((stolen.addr().get(), end), (addr + 256 * KIB, addr + 256 * KIB), "a part of what the second works on");
    driver.event_record(third_begins, three).unwrap();
    driver.event_synchronize(third_begins).unwrap();
    let overtakes = !driver.event_query(second_done).unwrap();
    free(&pool, stolen, three);
    free(&pool, joined, one);
    drop(pool);
    overtakes
}

#[test]
fn old_event_lets_a_third_stream_in_unless_switched_off() {
    assert!(third_overtakes_second(false), "https://github.com/rapidsai/rmm/issues/2489");
    assert!(!third_overtakes_second(true));
}

/// An arena of 16 MiB with two streams, on a device with `room`.
fn arena(room: u64) -> (impl DeviceAllocator, [StreamId; 2]) {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(room));
    let streams = [(); 2].map(|()| driver.stream_create().unwrap());
    (RmmArena::new(driver, RmmArenaSettings { arena_size: Some(16 * MIB) }), streams)
}

#[test]
fn small_blocks_use_their_streams_superblocks_large_the_global() {
    let (arena, [one, two]) = arena(64 * MIB);
    let base = allocate(&arena, 100, one);
    let at = |block: &Block| block.addr().get() - base.addr().get();
    let small = allocate(&arena, 100, two);
    assert_eq!(at(&small), MIB, "a superblock of 1 MiB for each stream");
    let again = allocate(&arena, MIB - 256, one);
    assert_eq!(at(&again), 256, "exactly what is left of the first");
    let large = allocate(&arena, 3 * MIB + 1, two);
    assert_eq!((at(&large), large.bytes()), (2 * MIB, 3 * MIB + 256));
    free(&arena, large, two);
    // It was joined with the remainder of the arena, of which the next superblock is split.
    let next = allocate(&arena, MIB, one);
    assert_eq!(at(&next), 2 * MIB);
    let rest = allocate(&arena, 13 * MIB, one);
    assert_eq!(at(&rest), 3 * MIB);
    assert_eq!(arena.stats().num_device_alloc, 1);
    for block in [base, again, next, rest] {
        free(&arena, block, one);
    }
    free(&arena, small, two);
}

#[test]
fn superblock_with_live_large_blocks_serves_a_stream() {
    let (arena, [one, two]) = arena(64 * MIB);
    // Each in a superblock of its own size, but the last: the remainder behind it is not a superblock.
    let blocks = [8 * MIB, 4 * MIB, 3 * MIB + MIB / 2].map(|bytes| allocate(&arena, bytes, one));
    let base = blocks[0].addr().get();
    let at = |block: &Block| block.addr().get() - base;
    let small = allocate(&arena, 256, two);
    assert_eq!(at(&small), 15 * MIB + MIB / 2);
    let [first, second, third] = blocks;
    // The third block's superblock belongs to the second stream now, and so does its free range.
    free(&arena, third, one);
    let again = allocate(&arena, MIB, two);
    assert_eq!(at(&again), 12 * MIB);
    // The range between the two belongs to the second stream, until no other memory is left.
    let taken_back = allocate(&arena, 2 * MIB, one);
    assert_eq!((at(&taken_back), taken_back.path()), (13 * MIB, vramlab_policies::Path::Retry));
    for block in [first, second, taken_back] {
        free(&arena, block, one);
    }
    for block in [small, again] {
        free(&arena, block, two);
    }
    let full_block = allocate(&arena, 16 * MIB, one);
    assert_eq!(at(&full_block), 0);
    free(&arena, full_block, one);
}

#[test]
fn an_arena_that_is_full_takes_every_superblock_back() {
    let (arena, [one, two]) = arena(64 * MIB);
    let (first, second) = (allocate(&arena, 256, one), allocate(&arena, 256, two));
    let large = allocate(&arena, 14 * MIB, one);
    let base = first.addr().get();
    free(&arena, first, one);
    // Both streams keep their superblocks, though the first one's is empty, and no other memory is left. The request needs more
    // than one superblock, and the second is in use, so taking them back does not help.
    let error = arena.allocate(Request::new(MIB + 1), one).unwrap_err();
    let vramlab_policies::AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    assert_eq!((report.largest_free_bytes, report.needed_bytes), (Some(MIB), MIB + 256));
    // They belong to the global arena now. The one in use serves the first stream as soon as the empty one is taken.
    let results = [MIB, 256].map(|bytes| allocate(&arena, bytes, one));
    assert_eq!(results.each_ref().map(|block| block.addr().get() - base), [0, MIB + 256]);
    assert_eq!((arena.stats().num_alloc_retries, arena.stats().num_ooms), (1, 1));
    for block in results.into_iter().chain([large]) {
        free(&arena, block, one);
    }
    free(&arena, second, two);
    let full_block = allocate(&arena, 16 * MIB, two);
    assert_eq!((full_block.addr().get(), full_block.path()), (base, vramlab_policies::Path::Retry));
    free(&arena, full_block, two);
}

#[test]
fn refused_arena_is_an_error_unless_its_size_is_automatic() {
    let (arena, [one, _]) = self::arena(8 * MIB);
    let error = arena.allocate(Request::new(1), one).unwrap_err();
    let vramlab_policies::AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    assert_eq!((report.needed_bytes, report.reserved_bytes, arena.stats().num_ooms), (16 * MIB, 0, 1));
    for (refusals, bytes) in [(0, 20 * MIB), (1, 10 * MIB)] {
        let driver = Arc::new(FaultyDriver::new(Arc::new(NullDriver::new(40 * MIB))));
        let stream = driver.stream_create().unwrap();
        let arena = RmmArena::new(Arc::clone(&driver) as Arc<dyn Driver>, RmmArenaSettings::default());
        if refusals > 0 {
            driver.fail(CallKind::MemAlloc, 0, DriverError::OUT_OF_MEMORY);
        }
        free(&arena, allocate(&arena, 1, stream), stream);
        let reserved = arena.stats().reserved_bytes.all.current;
        assert_eq!((reserved, driver.injected()), (bytes, refusals), "half of what is free, or half of that");
    }
    // A simulated GPU that computes has no more memory than its host.
    let sim = SimDriver::new(Profile::h200(), SimMemory::Host).with_host_limit(2048 * MIB);
    let stream = sim.stream_create().unwrap();
    let arena = RmmArena::new(Arc::new(sim), RmmArenaSettings::default());
    free(&arena, allocate(&arena, 1, stream), stream);
    assert_eq!(arena.stats().reserved_bytes.all.current, 1024 * MIB);
}

/// Whether the host waits for the stream when a block of `bytes` is freed behind a millisecond of work.
fn host_waits(bytes: u64) -> bool {
    let sim = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
    let (stream, done) = (driver.stream_create().unwrap(), driver.event_create(false).unwrap());
    let arena = RmmArena::new(Arc::clone(&driver), RmmArenaSettings::default());
    let block = allocate(&arena, bytes, stream);
    sim.launch(stream, "reads the block", (1, 1), 4_300_000_000, &[(block.addr().get(), bytes)]).unwrap();
    driver.event_record(done, stream).unwrap();
    free(&arena, block, stream);
    let waits = driver.event_query(done).unwrap();
    drop(arena);
    // SAFETY: no stream waits for it any more.
    unsafe { driver.event_destroy(done) }.unwrap();
    waits
}

#[test]
fn a_large_block_is_waited_for_and_a_small_one_is_not() {
    assert_eq!([MIB, MIB + 1].map(host_waits), [false, true]);
}
