//! Graph capture: memory of a capture is its own, pinned until the release, and nothing is lost.

use super::support::{
    KIB, MIB, Random, allocate, check_nothing_held, check_stats, fill, free, free_bytes, launch, read, write,
};
use super::{Bench, Device};
use vramlab_device::{GraphId, StreamId};
use vramlab_policies::backends::GraphCapture;
use vramlab_policies::contract::{AllocError, Block, CaptureId, DeviceAllocator, Path};

/// A range of addresses.
type Range = (u64, u64);

fn range(block: &Block) -> Range {
    (block.addr().get(), block.bytes())
}

fn overlap(a: Range, b: Range) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

fn begin(bench: &Bench, allocator: &dyn DeviceAllocator, stream: StreamId) -> CaptureId {
    let id = allocator.capture_begin(stream).unwrap();
    bench.driver.graphs().unwrap().capture_begin(stream).unwrap();
    id
}

fn end(bench: &Bench, allocator: &dyn DeviceAllocator, id: CaptureId, stream: StreamId) -> GraphId {
    let graph = bench.driver.graphs().unwrap().capture_end(stream).unwrap();
    allocator.capture_end(id).unwrap();
    graph
}

/// Launches a graph a few times, waits, destroys it and releases its memory.
fn run_out(bench: &Bench, allocator: &dyn DeviceAllocator, (id, graph): (CaptureId, GraphId), stream: StreamId) {
    let graphs = bench.driver.graphs().unwrap();
    for _ in 0..3 {
        launch(graphs, graph, stream).unwrap();
    }
    bench.driver.stream_synchronize(stream).unwrap();
    // SAFETY: captured by a test, used by no other code, and its launches were waited for.
    unsafe { graphs.graph_destroy(graph) }.unwrap();
    allocator.capture_release(id).unwrap();
}

/// Allocates and frees in a capture, with work between; the addresses that it used.
fn step(bench: &Bench, allocator: &dyn DeviceAllocator, stream: StreamId, seed: u64) -> Vec<Range> {
    let (mut random, mut live, mut used) = (Random::new(seed), Vec::<Block>::new(), Vec::new());
    for _ in 0..60 {
        if random.below(3) > 0 || live.is_empty() {
            let block = allocate(allocator, random.size(22), stream).unwrap();
            assert!(!live.iter().any(|other| overlap(range(other), range(&block))), "live blocks overlap");
            fill(bench.driver.as_ref(), block.addr(), 3, block.requested(), stream);
            used.push(range(&block));
            live.push(block);
        } else {
            let block = live.swap_remove(random.below(live.len() as u64) as usize);
            free(allocator, block, stream).unwrap();
        }
    }
    for block in live {
        free(allocator, block, stream).unwrap();
    }
    used
}

/// Fails when any of some blocks shares a byte with any of some ranges.
fn assert_apart<'a>(blocks: impl Iterator<Item = &'a Block>, ranges: &[Range]) {
    for block in blocks {
        let shared = ranges.iter().find(|other| overlap(range(block), **other));
        assert!(shared.is_none(), "{block:?} lies in {shared:#x?}");
    }
}

fn free_all(allocator: &dyn DeviceAllocator, blocks: Vec<(Block, StreamId)>) {
    for (block, stream) in blocks {
        free(allocator, block, stream).unwrap();
    }
}

/// Blocks of many sizes on two streams.
fn fill_up(allocator: &dyn DeviceAllocator, streams: [StreamId; 2], seed: u64) -> Vec<(Block, StreamId)> {
    let mut random = Random::new(seed);
    let mut one = |stream: StreamId| (allocate(allocator, random.size(23), stream).unwrap(), stream);
    (0..80).map(|number| one(streams[number % 2])).collect()
}

pub(super) fn captured_memory_is_apart_and_pinned_until_release(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let streams = [driver.stream_create().unwrap(), driver.stream_create().unwrap()];
    let start = free_bytes(driver);
    let allocator = bench.build();
    let allocator = allocator.as_ref();
    let mut outside = fill_up(allocator, streams, 1);
    // Free memory of the stream, which a capture must not use either: others may get it.
    free_all(allocator, outside.drain(..40).collect());
    let id = begin(bench, allocator, streams[0]);
    let used = step(bench, allocator, streams[0], 2);
    assert_apart(outside.iter().map(|(block, _)| block), &used);
    // The other stream goes on meanwhile.
    outside.push((allocate(allocator, 3 * MIB, streams[1]).unwrap(), streams[1]));
    let graph = end(bench, allocator, id, streams[0]);
    outside.extend(fill_up(allocator, streams, 3));
    assert_apart(outside.iter().map(|(block, _)| block), &used);
    free_all(allocator, std::mem::take(&mut outside));
    driver.device_synchronize().unwrap();
    allocator.trim(0).unwrap();
    outside = fill_up(allocator, streams, 4);
    assert_apart(outside.iter().map(|(block, _)| block), &used);
    check_stats(&allocator.stats());
    run_out(bench, allocator, (id, graph), streams[0]);
    free_all(allocator, outside);
    driver.device_synchronize().unwrap();
    allocator.trim(0).unwrap();
    check_nothing_held(&allocator.stats());
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
    assert!(free_bytes(driver).abs_diff(start) <= bench.slack(), "the device should have its memory back");
}

pub(super) fn memory_freed_in_a_capture_serves_that_capture(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.driver.stream_create().unwrap());
    let id = begin(bench, allocator.as_ref(), stream);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..50 {
        let block = allocate(allocator.as_ref(), 700 * KIB, stream).unwrap();
        seen.insert(block.addr());
        fill(bench.driver.as_ref(), block.addr(), 1, block.requested(), stream);
        let path = free(allocator.as_ref(), block, stream).unwrap();
        assert_eq!(path == Path::Deferred, !bench.capabilities().caches, "{path}");
    }
    match bench.capabilities().graph_capture {
        // Where a GPU's driver puts what it captures is its own affair.
        GraphCapture::DriverNodes if bench.device == Device::Cuda => assert!(!seen.is_empty()),
        _ => assert_eq!(seen.len(), 1),
    }
    let graph = end(bench, allocator.as_ref(), id, stream);
    check_nothing_held_but_pinned(bench, allocator.as_ref());
    run_out(bench, allocator.as_ref(), (id, graph), stream);
    check_nothing_held(&allocator.stats());
}

/// The client holds nothing; naive's pinned blocks still count as active.
fn check_nothing_held_but_pinned(bench: &Bench, allocator: &dyn DeviceAllocator) {
    let stats = allocator.stats();
    assert_eq!((stats.allocation.all.current, stats.allocated_bytes.all.current), (0, 0));
    if bench.capabilities().caches {
        check_nothing_held(&stats);
    }
}

pub(super) fn blocks_left_in_a_capture_are_an_error(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let start = free_bytes(driver);
    let (allocator, stream) = (bench.build(), driver.stream_create().unwrap());
    let allocator = allocator.as_ref();
    for release_first in [false, true] {
        let id = begin(bench, allocator, stream);
        let [a, b, c] = [1000, 3 * MIB, 5000].map(|bytes| allocate(allocator, bytes, stream).unwrap());
        free(allocator, c, stream).unwrap();
        driver.graphs().unwrap().capture_abort(stream).unwrap();
        let error = allocator.capture_end(id).unwrap_err();
        let AllocError::CaptureLive { blocks, bytes, .. } = error else { panic!("{error}") };
        assert_eq!((blocks, bytes), (2, a.bytes() + b.bytes()));
        assert!(error.to_string().contains("2 block") && !error.to_string().contains('\n'), "{error}");
        // It has ended all the same.
        assert!(matches!(allocator.capture_end(id), Err(AllocError::Capture { .. })));
        if release_first {
            allocator.capture_release(id).unwrap();
        }
        for block in [a, b] {
            let freed = free(allocator, block, stream);
            // What the driver owned went with the graph.
            let gone = release_first && bench.capabilities().graph_capture == GraphCapture::DriverNodes;
            assert_eq!(matches!(freed, Err(AllocError::ForeignBlock { .. })), gone, "{freed:?}");
            assert!(gone || freed.is_ok(), "{freed:?}");
        }
        if !release_first {
            allocator.capture_release(id).unwrap();
        }
        allocator.trim(0).unwrap();
        check_nothing_held(&allocator.stats());
        assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
        assert!(free_bytes(driver).abs_diff(start) <= bench.slack());
    }
}

pub(super) fn a_block_from_before_is_freed_at_the_end_of_the_capture(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream, other) = (bench.build(), driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let allocator = allocator.as_ref();
    let sizes = [900, 64 * KIB, 2 * MIB, 30 * MIB];
    let before = sizes.map(|bytes| allocate(allocator, bytes, stream).unwrap());
    let ranges: Vec<Range> = before.iter().map(range).collect();
    if bench.has_memory() {
        before.iter().for_each(|block| write(driver, block.addr(), &[0x5A; 900], stream));
    }
    let first = before[0].addr();
    allocator.record_use(&before[1], other).unwrap();
    driver.device_synchronize().unwrap();
    let id = begin(bench, allocator, stream);
    for block in before {
        assert_eq!(free(allocator, block, stream).unwrap(), Path::Deferred);
    }
    let stats = allocator.stats();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 4), "freed, and still there");
    let captured = sizes.map(|bytes| allocate(allocator, bytes, stream).unwrap());
    let outside = sizes.map(|bytes| allocate(allocator, bytes, other).unwrap());
    allocator.trim(0).unwrap();
    assert_apart(captured.iter().chain(&outside), &ranges);
    if bench.has_memory() {
        assert_eq!(read(driver, first, 900, other), [0x5A; 900]);
    }
    for block in captured {
        free(allocator, block, stream).unwrap();
    }
    let graph = end(bench, allocator, id, stream);
    // The one that the other stream was announced to use waits for that, as ever.
    driver.device_synchronize().unwrap();
    for block in outside {
        free(allocator, block, other).unwrap();
    }
    allocator.trim(0).unwrap();
    check_nothing_held_but_pinned(bench, allocator);
    run_out(bench, allocator, (id, graph), stream);
    check_nothing_held(&allocator.stats());
    // The stream's blocks are free as ever.
    let block = allocate(allocator, 1000, stream).unwrap();
    assert_ne!(free(allocator, block, stream).unwrap(), Path::Deferred);
}

pub(super) fn a_block_that_a_captured_stream_uses_is_freed_outside_of_the_graph(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream, other) = (bench.build(), driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let allocator = allocator.as_ref();
    let block = allocate(allocator, 3 * MIB, other).unwrap();
    let id = begin(bench, allocator, stream);
    fill(driver, block.addr(), 1, block.requested(), stream);
    allocator.record_use(&block, stream).unwrap();
    free(allocator, block, other).unwrap();
    assert!(!driver.stream_is_capturing(other).unwrap(), "the other stream should not be drawn into the capture");
    // Looks after pending frees.
    let again = allocate(allocator, 500, other).unwrap();
    free(allocator, again, other).unwrap();
    driver.stream_synchronize(other).unwrap();
    end(bench, allocator, id, stream);
    driver.device_synchronize().unwrap();
    allocator.trim(0).unwrap();
    check_nothing_held(&allocator.stats());
}

pub(super) fn memory_of_a_released_capture_comes_back(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream) = (bench.build(), driver.stream_create().unwrap());
    let allocator = allocator.as_ref();
    let start = free_bytes(driver);
    let mut least = u64::MAX;
    for round in 0..10 {
        let id = begin(bench, allocator, stream);
        step(bench, allocator, stream, 7);
        let graph = end(bench, allocator, id, stream);
        launch(driver.graphs().unwrap(), graph, stream).unwrap();
        driver.stream_synchronize(stream).unwrap();
        let now = free_bytes(driver);
        assert!(round == 0 || now + bench.slack() >= least, "round {round} left {now} bytes, earlier ones {least}");
        least = least.min(now);
        run_out(bench, allocator, (id, graph), stream);
        check_nothing_held(&allocator.stats());
    }
    assert!(least < start, "a graph has memory");
    allocator.trim(0).unwrap();
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
    assert!(free_bytes(driver).abs_diff(start) <= bench.slack(), "the device should have its memory back");
}

pub(super) fn captures_live_side_by_side(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let streams = [driver.stream_create().unwrap(), driver.stream_create().unwrap()];
    let allocator = bench.build();
    let allocator = allocator.as_ref();
    // One after another on one stream, and two at once.
    let first = begin(bench, allocator, streams[0]);
    let mut used = vec![step(bench, allocator, streams[0], 1)];
    let mut graphs = vec![(first, end(bench, allocator, first, streams[0]), streams[0])];
    let ids = streams.map(|stream| begin(bench, allocator, stream));
    let held = streams.map(|stream| allocate(allocator, 5 * MIB, stream).unwrap());
    assert!(!overlap(range(&held[0]), range(&held[1])));
    for (stream, block) in streams.into_iter().zip(held) {
        let mut own = step(bench, allocator, stream, stream.get());
        own.push(range(&block));
        free(allocator, block, stream).unwrap();
        used.push(own);
    }
    for (id, stream) in ids.into_iter().zip(streams) {
        graphs.push((id, end(bench, allocator, id, stream), stream));
    }
    for (index, own) in used.iter().enumerate() {
        for other in used[index + 1..].iter().flatten() {
            assert!(!own.iter().any(|range| overlap(*range, *other)), "captures {index} and a later one share memory");
        }
    }
    for (id, graph, stream) in graphs {
        run_out(bench, allocator, (id, graph), stream);
    }
    allocator.trim(0).unwrap();
    check_nothing_held(&allocator.stats());
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
}

pub(super) fn captures_out_of_order_are_refused(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream) = (bench.build(), driver.stream_create().unwrap());
    let refused = |outcome: Result<(), AllocError>, word: &str| {
        let error = outcome.unwrap_err();
        assert!(matches!(error, AllocError::Capture { .. }) && error.to_string().contains(word), "{error}");
    };
    let id = begin(bench, allocator.as_ref(), stream);
    refused(allocator.capture_begin(stream).map(|_| ()), "already");
    refused(allocator.capture_release(id), "not ended");
    let graph = end(bench, allocator.as_ref(), id, stream);
    refused(allocator.capture_end(id), "before");
    run_out(bench, allocator.as_ref(), (id, graph), stream);
    refused(allocator.capture_release(id), "released");
    refused(allocator.capture_end(id), "released");
}

pub(super) fn a_capture_that_runs_out_of_memory_loses_nothing(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let (allocator, stream) = (bench.build(), driver.stream_create().unwrap());
    let allocator = allocator.as_ref();
    let start = free_bytes(driver);
    // A GPU's driver takes the memory of a graph's nodes when it makes the graph. If that is too much, driver 580 keeps what
    // it had taken by then: there a node that cannot be is asked for.
    let driver_nodes = bench.device == Device::Cuda && bench.capabilities().graph_capture == GraphCapture::DriverNodes;
    let part = match bench.device {
        Device::Cuda if driver_nodes => 4 * start,
        Device::Cuda => start / 8,
        _ => 4 * MIB,
    };
    let id = begin(bench, allocator, stream);
    let mut live = Vec::new();
    let error = loop {
        match allocate(allocator, part, stream) {
            Ok(block) => live.push(block),
            Err(error) => break error,
        }
        assert!(live.len() < 100, "the device should be full");
    };
    assert!(error.is_out_of_memory(), "{error}");
    for block in live {
        free(allocator, block, stream).unwrap();
    }
    let graph = end(bench, allocator, id, stream);
    run_out(bench, allocator, (id, graph), stream);
    allocator.trim(0).unwrap();
    check_nothing_held(&allocator.stats());
    assert!(free_bytes(driver).abs_diff(start) <= bench.slack());
}

/// Of backends that say so.
pub(super) fn captures_are_refused(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.driver.stream_create().unwrap());
    let error = allocator.capture_begin(stream).unwrap_err();
    assert!(matches!(error, AllocError::Incapable { .. } | AllocError::Unsupported { .. }), "{error}");
    let block = allocate(allocator.as_ref(), MIB, stream).unwrap();
    free(allocator.as_ref(), block, stream).unwrap();
    check_nothing_held(&allocator.stats());
}
