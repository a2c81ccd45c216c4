//! Graph capture: memory of a capture serves only the capture, is pinned until the release, and nothing is lost.

use super::demand::{Outcome as _, demand, demand_eq};
use super::subject::{Range, Subject, assert_apart, overlap, range};
use super::support::{KIB, MIB, Random, check_nothing_held, check_stats, free_bytes, launch, read, write};
use super::{Bench, Device};
use vramlab_device::{Bytes, GraphId, StreamId};
use vramlab_policies::backends::GraphCapture;
use vramlab_policies::contract::{AllocError, Block, CaptureId, Path};

fn begin(allocator: &Subject, stream: StreamId) -> CaptureId {
    let id = allocator.capture_begin(stream).granted();
    allocator.bench.driver.graphs().granted().capture_begin(stream).granted();
    id
}

fn end(allocator: &Subject, id: CaptureId, stream: StreamId) -> GraphId {
    let graph = allocator.bench.driver.graphs().granted().capture_end(stream).granted();
    allocator.capture_end(id).granted();
    graph
}

/// Launches a graph a few times, waits, destroys it and releases its memory.
fn run_out(allocator: &Subject, (id, graph): (CaptureId, GraphId), stream: StreamId) {
    let driver = allocator.bench.driver.as_ref();
    let graphs = driver.graphs().granted();
    for _ in 0..3 {
        launch(graphs, graph, stream).granted();
    }
    driver.stream_synchronize(stream).granted();
    // SAFETY: captured by a test, used by no other code, and its launches were waited for.
    unsafe { graphs.graph_destroy(graph) }.granted();
    allocator.capture_release(id).granted();
}

/// Allocates and frees in a capture, with work in between; returns the addresses.
fn step(allocator: &Subject, stream: StreamId, seed: u64) -> Vec<Range> {
    let (mut random, mut live, mut used) = (Random::new(seed), Vec::<Block>::new(), Vec::new());
    for _ in 0..60 {
        if random.below(3) > 0 || live.is_empty() {
            let block = allocator.take(random.size(22), stream);
            demand!(
                !live.iter().any(|other| overlap(range(other), range(&block))),
                came = format_args!("{block:?}"),
                "live blocks share no byte"
            );
            allocator.use_on(&block, stream);
            used.push(range(&block));
            live.push(block);
        } else {
            let block = live.swap_remove(random.below(live.len() as u64) as usize);
            allocator.give(block, stream);
        }
    }
    allocator.give_all(live, stream);
    used
}

/// Blocks of many sizes on two streams.
fn fill_up(allocator: &Subject, streams: [StreamId; 2], seed: u64) -> Vec<(Block, StreamId)> {
    let mut random = Random::new(seed);
    let mut one = |stream: StreamId| (allocator.take(random.size(23), stream), stream);
    (0..80).map(|number| one(streams[number % 2])).collect()
}

pub(super) fn captured_memory_is_apart_and_pinned_until_release(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let streams = bench.streams::<2>();
    let allocator = bench.build();
    let mut outside = fill_up(&allocator, streams, 1);
    // Free memory of the stream, which a capture must not use either: others may get it.
    allocator.give_each(outside.drain(..40));
    let id = begin(&allocator, streams[0]);
    let used = step(&allocator, streams[0], 2);
    assert_apart(outside.iter().map(|(block, _)| block), &used);
    // The other stream continues meanwhile.
    outside.push((allocator.take(3 * MIB, streams[1]), streams[1]));
    let graph = end(&allocator, id, streams[0]);
    outside.extend(fill_up(&allocator, streams, 3));
    assert_apart(outside.iter().map(|(block, _)| block), &used);
    allocator.give_each(std::mem::take(&mut outside));
    driver.device_synchronize().granted();
    allocator.trim(0).granted();
    outside = fill_up(&allocator, streams, 4);
    assert_apart(outside.iter().map(|(block, _)| block), &used);
    check_stats(&allocator.stats());
    run_out(&allocator, (id, graph), streams[0]);
    allocator.give_each(outside);
    driver.device_synchronize().granted();
    allocator.check_all_returns();
}

pub(super) fn memory_freed_in_a_capture_serves_that_capture(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let id = begin(&allocator, stream);
    let mut addresses = std::collections::BTreeSet::new();
    for _ in 0..50 {
        let block = allocator.take(700 * KIB, stream);
        addresses.insert(block.addr());
        allocator.use_on(&block, stream);
        let path = allocator.give(block, stream);
        let waits = path == Path::Deferred;
        demand!(
            waits != bench.capabilities().caches,
            came = path,
            "a free in a capture waits only where nothing is cached"
        );
    }
    match bench.capabilities().graph_capture {
        // A GPU's driver chooses the addresses of captured allocations.
        GraphCapture::DriverNodes if bench.device == Device::Cuda => {
            demand!(!addresses.is_empty(), "a capture allocates")
        }
        _ => demand_eq!(addresses.len(), 1, "a capture reuses what was freed in it"),
    }
    let graph = end(&allocator, id, stream);
    check_nothing_held_but_pinned(&allocator);
    run_out(&allocator, (id, graph), stream);
    check_nothing_held(&allocator.stats());
}

/// No block is live; naive's pinned blocks still count as active.
fn check_nothing_held_but_pinned(allocator: &Subject) {
    let stats = allocator.stats();
    demand_eq!((stats.allocation.all.current, stats.allocated_bytes.all.current), (0, 0), "every block was freed");
    if allocator.bench.capabilities().caches {
        check_nothing_held(&stats);
    }
}

pub(super) fn blocks_left_in_a_capture_are_an_error(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream) = (bench.build(), bench.stream());
    for release_first in [false, true] {
        let id = begin(&allocator, stream);
        let [a, b, c] = [1000, 3 * MIB, 5000].map(|bytes| allocator.take(bytes, stream));
        allocator.give(c, stream);
        driver.graphs().granted().capture_abort(stream).granted();
        let error = allocator.capture_end(id).refused();
        let AllocError::CaptureLive { blocks, bytes, .. } = error else {
            super::demand::fail(&error.to_string(), "live blocks at the end of a capture are `CaptureLive`")
        };
        demand_eq!((blocks, bytes), (2, a.bytes() + b.bytes()), "the error counts the live blocks");
        demand!(
            error.to_string().contains("2 block") && !error.to_string().contains('\n'),
            came = error,
            "the error is one line with the number of blocks"
        );
        // It has ended nevertheless.
        demand!(matches!(allocator.capture_end(id), Err(AllocError::Capture { .. })), "a capture ends once");
        if release_first {
            allocator.capture_release(id).granted();
        }
        for block in [a, b] {
            let freed = allocator.try_give(block, stream);
            // Memory of the driver was released with the graph.
            let released = release_first && bench.capabilities().graph_capture == GraphCapture::DriverNodes;
            demand_eq!(
                matches!(freed, Err(AllocError::ForeignBlock { .. })),
                released,
                "only memory that the driver owned is gone with its graph"
            );
            demand!(released || freed.is_ok(), came = format_args!("{freed:?}"), "a block outlives its capture");
        }
        if !release_first {
            allocator.capture_release(id).granted();
        }
        allocator.check_all_returns();
    }
}

pub(super) fn a_block_from_before_is_freed_at_the_end_of_the_capture(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream, other) = (bench.build(), bench.stream(), bench.stream());
    let sizes = [900, 64 * KIB, 2 * MIB, 30 * MIB];
    let before = sizes.map(|bytes| allocator.take(bytes, stream));
    let ranges: Vec<Range> = before.iter().map(range).collect();
    if bench.has_memory() {
        before.iter().for_each(|block| write(driver, block.addr(), &[0x5A; 900], stream));
    }
    let first = before[0].addr();
    allocator.record_use(&before[1], other).granted();
    driver.device_synchronize().granted();
    let id = begin(&allocator, stream);
    for block in before {
        demand_eq!(
            allocator.give(block, stream),
            Path::Deferred,
            "a free of an earlier block waits for the end of the capture"
        );
    }
    let stats = allocator.stats();
    demand_eq!(
        (stats.allocation.all.current, stats.active.all.current),
        (0, 4),
        "a block freed in a capture stays active"
    );
    let captured = sizes.map(|bytes| allocator.take(bytes, stream));
    let outside = sizes.map(|bytes| allocator.take(bytes, other));
    allocator.trim(0).granted();
    assert_apart(captured.iter().chain(&outside), &ranges);
    if bench.has_memory() {
        demand_eq!(read(driver, first, 900, other), [0x5A; 900], "a graph uses a block that was freed in its capture");
    }
    allocator.give_all(captured, stream);
    let graph = end(&allocator, id, stream);
    // The block with a recorded use on the other stream waits for that stream, as outside of captures.
    driver.device_synchronize().granted();
    allocator.give_all(outside, other);
    allocator.trim(0).granted();
    check_nothing_held_but_pinned(&allocator);
    run_out(&allocator, (id, graph), stream);
    check_nothing_held(&allocator.stats());
    // After the release a free is no longer deferred.
    let block = allocator.take(1000, stream);
    let path = allocator.give(block, stream);
    demand!(path != Path::Deferred, came = path, "a free waits for no released capture");
}

pub(super) fn block_used_by_a_captured_stream_is_freed_outside_the_graph(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream, other) = (bench.build(), bench.stream(), bench.stream());
    let block = allocator.take(3 * MIB, other);
    let id = begin(&allocator, stream);
    allocator.use_on(&block, stream);
    allocator.record_use(&block, stream).granted();
    allocator.give(block, other);
    demand!(!driver.stream_is_capturing(other).granted(), "a free draws no other stream into the capture");
    // Processes deferred frees.
    let again = allocator.take(500, other);
    allocator.give(again, other);
    driver.stream_synchronize(other).granted();
    end(&allocator, id, stream);
    driver.device_synchronize().granted();
    allocator.trim(0).granted();
    check_nothing_held(&allocator.stats());
}

/// Later work of `to` follows the queued work of `from`; in a capture `to` joins it.
fn wait_for(bench: &Bench, from: StreamId, to: StreamId) {
    let event = bench.driver.event_create(false).granted();
    bench.driver.event_record(event, from).granted();
    bench.driver.stream_wait_event(to, event).granted();
    // SAFETY: made above, and not used any more.
    unsafe { bench.driver.event_destroy(event) }.granted();
}

/// In an open capture of stream `own`, to which `take` allocates: a block that a second stream used is reusable when that has
/// joined again, where the allocator supports it.
pub(super) fn reuse_what_streams_have_left(allocator: &Subject, own: StreamId, take: &dyn Fn() -> Block) {
    let (bench, side) = (allocator.bench, allocator.bench.stream());
    let pending = || {
        let stats = allocator.stats();
        stats.active.all.current - stats.allocation.all.current
    };
    let give_used = |block: Block| {
        allocator.use_on(&block, own);
        wait_for(bench, own, side);
        allocator.use_on(&block, side);
        allocator.record_use(&block, side).granted();
        demand_eq!(allocator.give(block, own), Path::Deferred, "a block that another stream uses waits");
    };
    let looks = allocator.set_reuse_in_captures(true);
    let block = take();
    let lay = range(&block);
    give_used(block);
    let early = take();
    demand!(
        !overlap(range(&early), lay) && pending() == 1,
        came = format_args!("{early:?}"),
        "a block waits until the second stream has joined"
    );
    wait_for(bench, side, own);
    let late = take();
    demand_eq!(pending(), u64::from(!looks), "a block is reusable once the second stream has joined");
    demand!(
        !looks || !bench.capabilities().follows_pytorch || range(&late) == lay,
        came = format_args!("{late:?}"),
        "best fit reuses the block"
    );
    // Another block waits for the end, because the order is not used any more or the streams have not joined.
    allocator.set_reuse_in_captures(false);
    give_used(late);
    wait_for(bench, side, own);
    allocator.give(early, own);
    let last = take();
    demand_eq!(pending(), 1 + u64::from(!looks), "a block waits for the end of the capture once reuse is off");
    allocator.give(last, own);
    allocator.set_reuse_in_captures(true);
    give_used(take());
    wait_for(bench, side, own);
}

pub(super) fn a_capture_reuses_what_its_streams_have_left(bench: &Bench) {
    // The driver decides, or nothing is kept for reuse; or work has no order.
    let decides = bench.capabilities().graph_capture != GraphCapture::DriverNodes && bench.capabilities().caches;
    if !decides || bench.device == Device::Null {
        return;
    }
    let (allocator, stream) = (bench.build(), bench.stream());
    let id = begin(&allocator, stream);
    reuse_what_streams_have_left(&allocator, stream, &|| allocator.take(3 * MIB, stream));
    let graph = end(&allocator, id, stream);
    bench.driver.device_synchronize().granted();
    allocator.trim(0).granted();
    check_nothing_held(&allocator.stats());
    run_out(&allocator, (id, graph), stream);
    allocator.check_all_returns();
}

pub(super) fn memory_of_a_released_capture_comes_back(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream) = (bench.build(), bench.stream());
    let mut least = u64::MAX;
    for round in 0..10 {
        let id = begin(&allocator, stream);
        step(&allocator, stream, 7);
        let graph = end(&allocator, id, stream);
        launch(driver.graphs().granted(), graph, stream).granted();
        driver.stream_synchronize(stream).granted();
        let now = free_bytes(driver);
        demand!(
            round == 0 || now + bench.slack() >= least,
            came = format_args!("{} free in round {round} after {}", Bytes(now), Bytes(least)),
            "memory of a released capture is reused"
        );
        least = least.min(now);
        run_out(&allocator, (id, graph), stream);
        check_nothing_held(&allocator.stats());
    }
    demand!(least < allocator.room, "a graph has memory of the device");
    allocator.check_all_returns();
}

pub(super) fn captures_live_side_by_side(bench: &Bench) {
    let streams = bench.streams::<2>();
    let allocator = bench.build();
    // One after another on one stream, and two simultaneously.
    let first = begin(&allocator, streams[0]);
    let mut used = vec![step(&allocator, streams[0], 1)];
    let mut graphs = vec![(first, end(&allocator, first, streams[0]), streams[0])];
    let ids = streams.map(|stream| begin(&allocator, stream));
    let blocks = streams.map(|stream| allocator.take(5 * MIB, stream));
    demand!(
        !overlap(range(&blocks[0]), range(&blocks[1])),
        came = format_args!("{blocks:?}"),
        "live blocks share no byte"
    );
    for (stream, block) in streams.into_iter().zip(blocks) {
        let mut live = step(&allocator, stream, stream.get());
        live.push(range(&block));
        allocator.give(block, stream);
        used.push(live);
    }
    for (id, stream) in ids.into_iter().zip(streams) {
        graphs.push((id, end(&allocator, id, stream), stream));
    }
    for (index, own) in used.iter().enumerate() {
        for other in used[index + 1..].iter().flatten() {
            demand!(
                !own.iter().any(|range| overlap(*range, *other)),
                came = format_args!("capture {index} with {other:#x?} of a later one"),
                "captures share no memory"
            );
        }
    }
    for (id, graph, stream) in graphs {
        run_out(&allocator, (id, graph), stream);
    }
    allocator.check_all_returns();
}

pub(super) fn captures_out_of_order_are_refused(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let refused = |outcome: Result<(), AllocError>, word: &str| {
        let error = outcome.refused();
        demand!(
            matches!(error, AllocError::Capture { .. }) && error.to_string().contains(word),
            came = error,
            "a capture begins, ends and is released in that order: the error says `{word}`"
        );
    };
    let id = begin(&allocator, stream);
    refused(allocator.capture_begin(stream).map(|_| ()), "already");
    refused(allocator.capture_release(id), "not ended");
    let graph = end(&allocator, id, stream);
    refused(allocator.capture_end(id), "before");
    run_out(&allocator, (id, graph), stream);
    refused(allocator.capture_release(id), "released");
    refused(allocator.capture_end(id), "released");
}

pub(super) fn a_capture_that_runs_out_of_memory_loses_nothing(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    // A GPU's driver allocates the memory of a graph's nodes when it makes the graph. If that is too much, driver 580 keeps the
    // part that it had allocated: there an impossible node is requested.
    let driver_nodes = bench.device == Device::Cuda && bench.capabilities().graph_capture == GraphCapture::DriverNodes;
    let part = match bench.device {
        Device::Cuda if driver_nodes => 4 * allocator.room,
        Device::Cuda => allocator.room / 8,
        _ => bench.scaled(4 * MIB),
    };
    let id = begin(&allocator, stream);
    let (live, error) = allocator.take_until_full(part, stream);
    demand!(error.is_out_of_memory(), came = error, "a full device is out of memory");
    allocator.give_all(live, stream);
    let graph = end(&allocator, id, stream);
    run_out(&allocator, (id, graph), stream);
    allocator.check_all_returns();
}

/// For backends without captures.
pub(super) fn captures_are_refused(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let error = allocator.capture_begin(stream).refused();
    demand!(
        matches!(error, AllocError::Incapable { .. } | AllocError::Unsupported { .. }),
        came = error,
        "captures are refused where `graph_capture` says so"
    );
    let block = allocator.take(MIB, stream);
    allocator.give(block, stream);
    check_nothing_held(&allocator.stats());
}
