//! Memory that is allocated in captures of the simulated device: which requests it serves, and when it is released.

use crate::common::{GIB, MIB, capturing, fill, free_bytes, launch, sim};
use std::sync::Arc;
use vramlab_device::{Driver, GraphDriver, GraphId, SimDriver, sim::SimMemory};
use vramlab_policies::backends::GraphCapture;
use vramlab_policies::{Capture, Memory, PinnedBuffer, Request, Selection};

fn destroy(sim: &SimDriver, graph: GraphId) {
    // SAFETY: tests wait for the launches of a graph before they destroy it, and use it no more.
    unsafe { sim.graph_destroy(graph) }.unwrap();
}

#[test]
fn captured_copies_and_fills_take_their_time_at_each_launch() {
    let sim = sim(GIB, SimMemory::Host);
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
    let stream = sim.stream_create().unwrap();
    let addr = sim.mem_alloc(MIB).unwrap();
    let pinned = PinnedBuffer::new(&driver, 4096).unwrap();
    sim.capture_begin(stream).unwrap();
    // SAFETY: the block is larger, and both live until the end of the test.
    unsafe { pinned.copy_to(0, addr, 4096, stream) }.unwrap();
    fill(sim.as_ref(), addr, 0, MIB, stream);
    let graph = sim.capture_end(stream).unwrap();
    let busy = sim.busy_ns();
    launch(sim.as_ref(), graph, stream).unwrap();
    let first = sim.busy_ns() - busy;
    assert!(first > sim.profile().copies.to_device_ns.at(4096));
    launch(sim.as_ref(), graph, stream).unwrap();
    // By then the data are in the cache.
    assert!(sim.busy_ns() - busy - first <= first);
    sim.device_synchronize().unwrap();
    destroy(&sim, graph);
}

#[test]
fn a_graph_keeps_its_memory_and_gives_it_back() {
    for kind in capturing() {
        let sim = sim(GIB, SimMemory::Host);
        let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
        let start = free_bytes(sim.as_ref());
        let memory = Memory::new(Selection::of(kind).build(&driver).unwrap());
        let stream = sim.stream_create().unwrap();
        let capture = Capture::begin(&memory, &driver, stream).unwrap();
        let buffer = memory.allocate(5 * MIB, stream).unwrap();
        let addr = buffer.addr();
        fill(sim.as_ref(), addr, 0, MIB, stream);
        drop(buffer);
        let mut graph = capture.end().unwrap();
        for _ in 0..5 {
            graph.launch(stream).unwrap();
        }
        let stats = memory.allocator().stats();
        let used = stats.graph_memory.map(|memory| (memory.used, memory.reserved));
        // Plain memory that a graph uses belongs to the allocator.
        let of_driver = kind.capabilities.graph_capture == GraphCapture::DriverNodes;
        assert_eq!(used, of_driver.then_some((5 * MIB, 32 * MIB)), "{kind}");
        assert_eq!(stats.entries().iter().filter(|(name, _)| name.starts_with("graph_")).count() > 0, of_driver);
        assert_eq!(stats.reserved_bytes.all.current == 0, of_driver, "{kind}");
        // It belongs to the graph, though the buffer was dropped.
        assert!(sim.translate(addr.get(), 5 * MIB).is_some(), "{kind}");
        graph.release().unwrap();
        assert!(sim.translate(addr.get(), 5 * MIB).is_none(), "{kind}");
        // A failed capture, and a dropped one.
        let capture = Capture::begin(&memory, &driver, stream).unwrap();
        drop(memory.allocate(MIB, stream).unwrap());
        drop(capture);
        assert!(!sim.stream_is_capturing(stream).unwrap());
        let capture = Capture::begin(&memory, &driver, stream).unwrap();
        let buffer = memory.allocate(MIB, stream).unwrap();
        assert!(capture.end().is_err(), "{kind}: a buffer is left");
        drop(buffer);
        if of_driver {
            memory.check().unwrap_err();
        }
        let mut graph = Capture::begin(&memory, &driver, stream).unwrap().end().unwrap();
        graph.launch(stream).unwrap();
        drop(graph);
        memory.check().unwrap();
        memory.allocator().trim(0).unwrap();
        assert_eq!(free_bytes(sim.as_ref()), start, "{kind}");
    }
}

#[test]
fn graphs_of_one_capture_share_its_memory() {
    for kind in capturing() {
        let sim = sim(GIB, SimMemory::Host);
        let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
        let start = free_bytes(sim.as_ref());
        let memory = Memory::new(Selection::of(kind).build(&driver).unwrap());
        let (stream, other) = (sim.stream_create().unwrap(), sim.stream_create().unwrap());
        let step = || {
            // A block that is freed early serves a later request of the step.
            let first = memory.allocate(5 * MIB, stream).unwrap();
            let second = memory.allocate(3 * MIB, stream).unwrap();
            fill(sim.as_ref(), first.addr(), 1, MIB, stream);
            drop(first);
            let third = memory.allocate(5 * MIB, stream).unwrap();
            fill(sim.as_ref(), third.addr(), 2, MIB, stream);
            drop(second);
        };
        let taken = || start - free_bytes(sim.as_ref());
        let mut capture = Capture::begin(&memory, &driver, stream).unwrap();
        step();
        let of_one = taken();
        assert!(of_one >= 8 * MIB, "{kind}");
        (0..5).for_each(|_| step());
        assert_eq!(taken(), of_one, "{kind}: six steps of a graph should take what one does");
        capture.cut().unwrap();
        step();
        // The simulated driver gives each graph memory of its own.
        let nodes = if kind.capabilities.graph_capture == GraphCapture::DriverNodes { 2 } else { 1 };
        assert!(taken() <= nodes * of_one, "{kind}");
        let mut graph = capture.end().unwrap();
        for number in [0, 1, 1, 0] {
            graph.launch_nth(number, stream).unwrap();
        }
        // They must not run at the same time.
        let blocked = sim.blocked_ns().unwrap();
        graph.launch_nth(1, other).unwrap();
        assert!(sim.blocked_ns().unwrap() > blocked, "{kind}");
        let blocked = sim.blocked_ns().unwrap();
        graph.launch_nth(0, other).unwrap();
        assert_eq!(sim.blocked_ns().unwrap(), blocked, "{kind}");
        graph.release().unwrap();
        memory.check().unwrap();
        memory.allocator().trim(0).unwrap();
        assert_eq!(free_bytes(sim.as_ref()), start, "{kind}");
    }
}

/// In a capture no event reports that another stream has finished with a block, so the block waits for the capture's end.
#[test]
fn block_used_elsewhere_serves_no_later_captured_request() {
    for kind in capturing().filter(|kind| kind.capabilities.graph_capture == GraphCapture::Pinned) {
        let driver: Arc<dyn Driver> = sim(GIB, SimMemory::Host) as _;
        let memory = Memory::new(Selection::of(kind).build(&driver).unwrap());
        let (stream, other) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
        let capture = Capture::begin(&memory, &driver, stream).unwrap();
        let [used, own] = [5 * MIB; 2].map(|bytes| memory.allocate(bytes, stream).unwrap());
        let before = [used.addr(), own.addr()];
        used.record_use(other).unwrap();
        own.record_use(stream).unwrap();
        drop((used, own));
        let again = [5 * MIB; 2].map(|bytes| memory.allocate(bytes, stream).unwrap());
        let after = again.each_ref().map(|buffer| buffer.addr());
        assert!(!after.contains(&before[0]) && after.contains(&before[1]), "{kind}: {before:?} and {after:?}");
        drop(again);
        capture.end().unwrap().release().unwrap();
        memory.allocator().trim(0).unwrap();
        assert_eq!(memory.allocator().stats().reserved_bytes.all.current, 0, "{kind}");
    }
}

/// A capture that only one side knows, or that does not end in the order of the contract.
#[test]
fn a_misused_capture_keeps_no_memory_of_the_pool() {
    for misuse in 0..6 {
        let sim = sim(GIB, SimMemory::None);
        let driver: Arc<dyn Driver> = sim.clone();
        let (stream, free) = (sim.stream_create().unwrap(), free_bytes(sim.as_ref()));
        let allocator = "stream-ordered".parse::<Selection>().unwrap().build(&driver).unwrap();
        let take = || allocator.allocate(Request::new(5 * MIB), stream).unwrap();
        // SAFETY: no work uses the block. Misuse may be an error, and must not leak memory.
        let give = |block| drop(unsafe { allocator.deallocate(block, stream) });
        let id = allocator.capture_begin(stream).unwrap();
        let early = (misuse > 2).then(take);
        if misuse > 2 {
            sim.capture_begin(stream).unwrap();
        }
        let block = take();
        match misuse {
            0 => {
                allocator.capture_end(id).unwrap();
                give(block);
            }
            1 => {
                allocator.capture_end(id).unwrap();
                allocator.capture_release(id).unwrap();
                give(block);
            }
            2 => {
                give(block);
                allocator.capture_end(id).unwrap();
            }
            3 => {
                allocator.capture_end(id).unwrap_err();
                give(block);
                destroy(&sim, sim.capture_end(stream).unwrap());
            }
            4 => {
                destroy(&sim, sim.capture_end(stream).unwrap());
                give(block);
                allocator.capture_end(id).unwrap();
            }
            _ => {
                sim.capture_abort(stream).unwrap();
                allocator.capture_end(id).unwrap_err();
                give(block);
            }
        }
        early.into_iter().for_each(give);
        if misuse != 1 {
            allocator.capture_release(id).unwrap();
        }
        allocator.trim(0).unwrap();
        assert_eq!(free - free_bytes(sim.as_ref()), 0, "misuse {misuse}");
        assert_eq!(allocator.stats().allocated_bytes.all.current, 0, "misuse {misuse}");
    }
}

/// As a GPU's driver does (`cuDeviceGraphMemTrim`).
#[test]
fn memory_of_an_unknown_graph_stays_with_the_driver() {
    let sim = sim(GIB, SimMemory::None);
    let driver: Arc<dyn Driver> = sim.clone();
    let (stream, free) = (sim.stream_create().unwrap(), free_bytes(sim.as_ref()));
    let allocator = "stream-ordered".parse::<Selection>().unwrap().build(&driver).unwrap();
    sim.capture_begin(stream).unwrap();
    let block = allocator.allocate(Request::new(5 * MIB), stream).unwrap();
    // SAFETY: no work uses the block.
    unsafe { allocator.deallocate(block, stream) }.unwrap();
    destroy(&sim, sim.capture_end(stream).unwrap());
    allocator.trim(0).unwrap();
    assert_eq!(free - free_bytes(sim.as_ref()), 32 * MIB);
    sim.graph_trim().unwrap();
    assert_eq!(free_bytes(sim.as_ref()), free);
}
