//! Guests: allocators inside a program that made its streams, began its captures and sets its limits by itself.

use super::captures::reuse_what_streams_have_left;
use super::subject::{overlap, range};
use super::support::{MIB, check_nothing_held, check_stats};
use super::{Bench, Device};
use vramlab_device::StreamId;
use vramlab_policies::contract::{AllocError, Path, PrivatePool, Request};

/// The legacy default stream, which every program has.
fn default_stream(bench: &Bench) -> StreamId {
    // SAFETY: it is there as long as the device.
    unsafe { bench.driver.stream_adopt(0) }.unwrap()
}

pub(super) fn the_default_stream_is_one_like_others(bench: &Bench) {
    let (driver, other) = (bench.driver.as_ref(), bench.stream());
    let (allocator, own) = (bench.build(), default_stream(bench));
    assert_eq!(own, default_stream(bench), "it can be taken in twice");
    let blocks = [100, 3 * MIB, 12 * MIB].map(|bytes| allocator.take(bytes, own));
    blocks.iter().for_each(|block| allocator.use_on(block, own));
    let theirs = allocator.take(3 * MIB, other);
    // Each stream's work uses what the other one allocated.
    for (block, user) in [(&blocks[1], other), (&theirs, own)] {
        allocator.use_on(block, user);
        allocator.record_use(block, user).unwrap();
    }
    check_stats(&allocator.stats());
    allocator.give(theirs, other);
    allocator.give_all(blocks, own);
    driver.device_synchronize().unwrap();
    allocator.check_all_returns();
}

pub(super) fn a_stream_that_was_forgotten_costs_no_block(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, own) = (bench.build(), bench.stream());
    let made = bench.stream();
    // SAFETY: the stream was made above and lives to the end.
    let guest = unsafe { driver.stream_adopt(made.get()) }.unwrap();
    let block = allocator.take(3 * MIB, own);
    allocator.use_on(&block, guest);
    allocator.record_use(&block, guest).unwrap();
    allocator.give(block, own);
    let later = allocator.take(5 * MIB, own);
    allocator.record_use(&later, guest).unwrap();
    driver.device_synchronize().unwrap();
    driver.stream_forget(guest).unwrap();
    allocator.forget_stream(guest);
    // What was held then is freed as any other.
    allocator.give(later, own);
    driver.device_synchronize().unwrap();
    allocator.trim(0).unwrap();
    check_nothing_held(&allocator.stats());
    // SAFETY: as above; the bench destroys the stream.
    unsafe { driver.stream_adopt(made.get()) }.unwrap();
}

/// Asks for memory until it is refused; whatever came is given back.
fn room(bench: &Bench, allocator: &super::subject::Subject<'_>, stream: StreamId) -> u64 {
    let (blocks, error) = allocator.take_until_full(24 * MIB, stream);
    assert!(error.is_out_of_memory(), "{error}");
    let bytes = blocks.iter().map(|block| block.bytes()).sum();
    allocator.give_all(blocks, stream);
    bench.driver.device_synchronize().unwrap();
    bytes
}

pub(super) fn the_limit_changes_while_it_runs(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    if !allocator.set_memory_limit(Some(160 * MIB)) {
        let text = "an allocator with the setting keeps to a limit that changes";
        assert!(!bench.selection.backend().has_setting(super::stress::LIMIT), "{text}");
        return;
    }
    let before = room(bench, &allocator, stream);
    assert!(before > 0 && allocator.reserved() <= 160 * MIB, "{before} bytes under the limit");
    assert!(allocator.set_memory_limit(Some(320 * MIB)));
    let after = room(bench, &allocator, stream);
    assert!(after > before && allocator.reserved() <= 320 * MIB, "{after} bytes after {before}");
    // What is held above a lower limit stays; no more comes.
    assert!(allocator.set_memory_limit(Some(48 * MIB)));
    allocator.trim(0).unwrap();
    assert!(room(bench, &allocator, stream) <= before);
    assert!(allocator.reserved() <= 48 * MIB || !bench.capabilities().caches);
    assert!(allocator.set_memory_limit(None));
    allocator.give(allocator.take(400 * MIB, stream), stream);
    check_stats(&allocator.stats());
}

pub(super) fn a_capture_of_the_program_is_left_alone(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let graphs = driver.graphs().expect("the device should have graphs");
    let (allocator, captured, side) = (bench.build(), bench.stream(), bench.stream());
    let outside = allocator.take(3 * MIB, side);
    let pool = allocator.pool_create().unwrap();
    let take = |bytes: u64, pool: PrivatePool| allocator.allocate_in(Request::new(bytes), captured, pool).unwrap();
    driver.device_synchronize().unwrap();
    driver.note_capture(true);
    graphs.capture_begin(captured).unwrap();
    let kept = take(5 * MIB, pool);
    let gone = take(700, pool);
    allocator.use_on(&kept, captured);
    allocator.use_on(&gone, captured);
    // The graph uses a block of another stream, which is freed before the capture ends.
    allocator.use_on(&outside, captured);
    allocator.record_use(&outside, captured).unwrap();
    let lay = range(&outside);
    let path = allocator.give(outside, side);
    assert!(!bench.capabilities().caches || path == Path::Deferred || path == Path::WaitInserted, "{path}");
    allocator.give(gone, captured);
    // Memory runs short, or seems to: nothing may wait for the device.
    let huge = allocator.try_take(1 << 50, side).unwrap_err();
    assert!(matches!(huge, AllocError::OutOfMemory(_)), "{huge}");
    let meanwhile = allocator.take(3 * MIB, side);
    assert!(!overlap(range(&meanwhile), lay), "the capture still uses it");
    let graph = graphs.capture_end(captured).unwrap();
    driver.note_capture(false);
    super::support::launch(graphs, graph, captured).unwrap();
    driver.device_synchronize().unwrap();
    // SAFETY: the graph was made above and its launch has finished.
    unsafe { graphs.graph_destroy(graph) }.unwrap();
    allocator.give(meanwhile, side);
    allocator.give(kept, captured);
    allocator.pool_release(pool).unwrap();
    allocator.check_all_returns();
}

pub(super) fn a_capture_of_the_program_reuses_what_its_streams_have_left(bench: &Bench) {
    if bench.device == Device::Null {
        // Work has no order there.
        return;
    }
    let driver = bench.driver.as_ref();
    let graphs = driver.graphs().expect("the device should have graphs");
    let (allocator, captured) = (bench.build(), bench.stream());
    let pool = allocator.pool_create().unwrap();
    driver.note_capture(true);
    graphs.capture_begin(captured).unwrap();
    let take = || allocator.allocate_in(Request::new(3 * MIB), captured, pool).unwrap();
    reuse_what_streams_have_left(&allocator, captured, &take);
    let graph = graphs.capture_end(captured).unwrap();
    driver.note_capture(false);
    super::support::launch(graphs, graph, captured).unwrap();
    driver.device_synchronize().unwrap();
    // SAFETY: the graph was made above and its launch has finished.
    unsafe { graphs.graph_destroy(graph) }.unwrap();
    allocator.pool_release(pool).unwrap();
    allocator.check_all_returns();
}
