//! Guests: allocators inside a program that made its streams, began its captures and sets its limits by itself.

use super::captures::reuse_what_streams_have_left;
use super::demand::{Outcome as _, demand, demand_eq};
use super::subject::{overlap, range};
use super::support::{MIB, check_nothing_held, check_stats};
use super::{Bench, Device};
use vramlab_device::{Bytes, StreamId};
use vramlab_policies::contract::{AllocError, Path, PrivatePool, Request};

/// The legacy default stream, which every program has.
fn default_stream(bench: &Bench) -> StreamId {
    // SAFETY: it exists as long as the device.
    unsafe { bench.driver.stream_adopt(0) }.granted()
}

pub(super) fn the_default_stream_is_one_like_others(bench: &Bench) {
    let (driver, other) = (bench.driver.as_ref(), bench.stream());
    let (allocator, own) = (bench.build(), default_stream(bench));
    demand_eq!(own, default_stream(bench), "the default stream can be adopted twice");
    let blocks = [100, 3 * MIB, 12 * MIB].map(|bytes| allocator.take(bytes, own));
    blocks.iter().for_each(|block| allocator.use_on(block, own));
    let theirs = allocator.take(3 * MIB, other);
    // Each stream's work uses the other one's blocks.
    for (block, user) in [(&blocks[1], other), (&theirs, own)] {
        allocator.use_on(block, user);
        allocator.record_use(block, user).granted();
    }
    check_stats(&allocator.stats());
    allocator.give(theirs, other);
    allocator.give_all(blocks, own);
    driver.device_synchronize().granted();
    allocator.check_all_returns();
}

pub(super) fn a_stream_that_was_forgotten_costs_no_block(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, own) = (bench.build(), bench.stream());
    let made = bench.stream();
    // SAFETY: the stream was made above and lives to the end.
    let guest = unsafe { driver.stream_adopt(made.get()) }.granted();
    let block = allocator.take(3 * MIB, own);
    allocator.use_on(&block, guest);
    allocator.record_use(&block, guest).granted();
    allocator.give(block, own);
    let later = allocator.take(5 * MIB, own);
    allocator.record_use(&later, guest).granted();
    driver.device_synchronize().granted();
    driver.stream_forget(guest).granted();
    allocator.forget_stream(guest);
    // Live blocks of the pool are freed as usual.
    allocator.give(later, own);
    driver.device_synchronize().granted();
    allocator.trim(0).granted();
    check_nothing_held(&allocator.stats());
    // SAFETY: as above; the bench destroys the stream.
    unsafe { driver.stream_adopt(made.get()) }.granted();
}

/// Requests memory until a request is refused; then frees everything.
fn room(bench: &Bench, allocator: &super::subject::Subject<'_>, stream: StreamId) -> u64 {
    let (blocks, error) = allocator.take_until_full(bench.scaled(24 * MIB), stream);
    demand!(error.is_out_of_memory(), came = error, "a full device, or a limit, is out of memory");
    let bytes = blocks.iter().map(|block| block.bytes()).sum();
    allocator.give_all(blocks, stream);
    bench.driver.device_synchronize().granted();
    bytes
}

pub(super) fn the_limit_changes_while_it_runs(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let [low, middle, high] = [48, 160, 320].map(|mib| bench.scaled(mib * MIB));
    if !allocator.limit_to(Some(middle)) {
        let text = "an allocator with the setting keeps to a limit that changes";
        demand!(!bench.selection.backend().has_setting(super::stress::LIMIT), "{text}");
        return;
    }
    let before = room(bench, &allocator, stream);
    demand!(
        before > 0 && allocator.reserved() <= middle,
        came = format_args!("{} reserved", Bytes(allocator.reserved())),
        "memory is reserved up to the limit"
    );
    demand!(allocator.limit_to(Some(high)), "a limit can be raised");
    let after = room(bench, &allocator, stream);
    demand!(
        after > before && allocator.reserved() <= high,
        came = format_args!("{} reserved", Bytes(allocator.reserved())),
        "a higher limit leaves more memory, up to the limit"
    );
    // Reserved memory above a lower limit stays, and does not grow.
    demand!(allocator.limit_to(Some(low)), "a limit can be lowered");
    allocator.trim(0).granted();
    demand!(room(bench, &allocator, stream) <= before, "a lower limit leaves less memory");
    demand!(
        allocator.reserved() <= low || !bench.capabilities().caches,
        came = format_args!("{} reserved", Bytes(allocator.reserved())),
        "trim and a lower limit release what is above it"
    );
    demand!(allocator.limit_to(None), "a limit can be removed");
    allocator.give(allocator.take(bench.scaled(400 * MIB), stream), stream);
    check_stats(&allocator.stats());
}

pub(super) fn a_capture_of_the_program_is_left_alone(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let graphs = driver.graphs().expect("the device should have graphs");
    let (allocator, captured, side) = (bench.build(), bench.stream(), bench.stream());
    let outside = allocator.take(3 * MIB, side);
    let pool = allocator.pool_create().granted();
    let take = |bytes: u64, pool: PrivatePool| allocator.allocate_in(Request::new(bytes), captured, pool).granted();
    driver.device_synchronize().granted();
    driver.note_capture(true);
    graphs.capture_begin(captured).granted();
    let live = take(5 * MIB, pool);
    let freed = take(700, pool);
    allocator.use_on(&live, captured);
    allocator.use_on(&freed, captured);
    // The graph uses a block of another stream, which is freed before the capture ends.
    allocator.use_on(&outside, captured);
    allocator.record_use(&outside, captured).granted();
    let lay = range(&outside);
    let path = allocator.give(outside, side);
    demand!(
        !bench.capabilities().caches || path == Path::Deferred || path == Path::WaitInserted,
        came = path,
        "a free waits for a capture that uses the block"
    );
    allocator.give(freed, captured);
    // Memory is short, or seems to be: nothing may wait for the device.
    let huge = allocator.try_take(1 << 50, side).refused();
    demand!(matches!(huge, AllocError::OutOfMemory(_)), came = huge, "a full device is out of memory");
    let meanwhile = allocator.take(3 * MIB, side);
    demand!(!overlap(range(&meanwhile), lay), "a block that a capture uses is not reused");
    let graph = graphs.capture_end(captured).granted();
    driver.note_capture(false);
    super::support::launch(graphs, graph, captured).granted();
    driver.device_synchronize().granted();
    // SAFETY: the graph was made above and its launch has finished.
    unsafe { graphs.graph_destroy(graph) }.granted();
    allocator.give(meanwhile, side);
    allocator.give(live, captured);
    allocator.pool_release(pool).granted();
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
    let pool = allocator.pool_create().granted();
    driver.note_capture(true);
    graphs.capture_begin(captured).granted();
    let take = || allocator.allocate_in(Request::new(3 * MIB), captured, pool).granted();
    reuse_what_streams_have_left(&allocator, captured, &take);
    let graph = graphs.capture_end(captured).granted();
    driver.note_capture(false);
    super::support::launch(graphs, graph, captured).granted();
    driver.device_synchronize().granted();
    // SAFETY: the graph was made above and its launch has finished.
    unsafe { graphs.graph_destroy(graph) }.granted();
    allocator.pool_release(pool).granted();
    allocator.check_all_returns();
}
