//! Graphs of the simulated device: what a launch costs, what a capture allows, whose memory a graph has.

use crate::common::{GIB, MIB, free_bytes, launch, ready_ns, sim, work};

use vramlab_device::{CapturedWork, PoolId};
use vramlab_device::{
    DeviceAddr, Driver, DriverError, DriverResult, GraphDriver, GraphId, PoolDriver, PoolSettings, SimDriver, StreamId,
    sim::SimMemory,
};

fn give(sim: &SimDriver, addr: DeviceAddr, stream: StreamId) -> DriverResult<()> {
    // SAFETY: tests free what they allocated, once.
    unsafe { sim.mem_free_async(addr, stream) }
}

fn destroy(sim: &SimDriver, graph: GraphId) {
    // SAFETY: tests wait for the launches of a graph before they destroy it, and use it no more.
    unsafe { sim.graph_destroy(graph) }.unwrap();
}

/// A call that is made in a capture.
type Call<'a> = &'a dyn Fn() -> DriverResult<()>;

fn pool(sim: &SimDriver) -> PoolId {
    sim.pool_create(PoolSettings::default()).unwrap()
}

#[test]
fn launch_costs_one_call_and_a_gap_for_each_node() {
    let sim = sim(GIB, SimMemory::None);
    let (clock, costs, queues) = (sim.clock(), sim.profile().graphs, sim.profile().queues.clone());
    for nodes in [1, 20, 100] {
        let stream = sim.stream_create().unwrap();
        let busy = sim.busy_ns();
        sim.capture_begin(stream).unwrap();
        let start = clock.now_ns();
        for _ in 0..nodes {
            work(&sim, stream, 2_000);
        }
        // Captured launches cost the host what launches cost, and the device nothing.
        assert_eq!(clock.now_ns() - start, nodes * queues.launch_ns);
        let graph = sim.capture_end(stream).unwrap();
        assert_eq!(sim.busy_ns(), busy);
        sim.stream_synchronize(stream).unwrap();
        for _ in 0..3 {
            let start = clock.now_ns();
            launch(sim.as_ref(), graph, stream).unwrap();
            assert_eq!(clock.now_ns() - start, costs.launch_ns, "{nodes} nodes");
            let kernel = sim.profile().kernel_ns("test", 1, 1, 2_000 * 4300, 0.0);
            let expected = start + costs.launch_ns + queues.start_latency_ns + nodes * (kernel + costs.node_gap_ns);
            assert_eq!(ready_ns(&sim, stream), expected, "{nodes} nodes");
            sim.stream_synchronize(stream).unwrap();
        }
        let kernel = sim.profile().kernel_ns("test", 1, 1, 2_000 * 4300, 0.0);
        assert_eq!(sim.busy_ns() - busy, 3 * nodes * kernel, "a gap is no work");
        destroy(&sim, graph);
    }
}

#[test]
fn launches_of_one_graph_run_one_after_another() {
    let sim = sim(GIB, SimMemory::None);
    let streams = [sim.stream_create().unwrap(), sim.stream_create().unwrap()];
    sim.capture_begin(streams[0]).unwrap();
    work(&sim, streams[0], 1_000_000);
    let graph = sim.capture_end(streams[0]).unwrap();
    launch(sim.as_ref(), graph, streams[0]).unwrap();
    let first = ready_ns(&sim, streams[0]);
    launch(sim.as_ref(), graph, streams[1]).unwrap();
    assert!(ready_ns(&sim, streams[1]) >= first + 1_000_000);
    sim.device_synchronize().unwrap();
    destroy(&sim, graph);
    assert_eq!(launch(sim.as_ref(), graph, streams[0]).unwrap_err().code, DriverError::INVALID_HANDLE);
}

#[test]
fn what_waits_is_refused_in_a_capture_and_breaks_it() {
    let sim = sim(GIB, SimMemory::Host);
    let stream = sim.stream_create().unwrap();
    let (inside, outside) = (sim.event_create(true).unwrap(), sim.event_create(true).unwrap());
    let addr = sim.mem_alloc(MIB).unwrap();
    let other = sim.stream_create().unwrap();
    sim.event_record(outside, other).unwrap();
    let calls: [(&str, u32, Call<'_>); 7] = [
        ("synchronise", 900, &|| sim.stream_synchronize(stream)),
        ("device", 900, &|| sim.device_synchronize()),
        ("query", 907, &|| sim.event_query(inside).map(|_| ())),
        ("wait for event", 907, &|| sim.event_synchronize(inside)),
        // SAFETY: inside the block allocated above.
        ("copy to host", 900, &|| unsafe { sim.copy_to_host(&mut [0; 8], addr, stream) }),
        // SAFETY: inside the block allocated above.
        ("pageable copy", 900, &|| unsafe { sim.copy_to_device(addr, &[0; 8], stream) }),
        ("work outside", 905, &|| sim.stream_wait_event(stream, outside)),
    ];
    for (what, code, call) in calls {
        sim.capture_begin(stream).unwrap();
        assert!(sim.stream_is_capturing(stream).unwrap());
        sim.event_record(inside, stream).unwrap();
        assert_eq!(call().unwrap_err().code, code, "{what}");
        assert_eq!(sim.capture_end(stream).unwrap_err().code, DriverError::STREAM_CAPTURE_INVALIDATED, "{what}");
        assert!(!sim.stream_is_capturing(stream).unwrap());
        sim.stream_synchronize(stream).unwrap();
        assert!(sim.event_query(inside).unwrap());
    }
    // A broken capture can be thrown away as well; without one there is nothing to end.
    sim.capture_begin(stream).unwrap();
    assert_eq!(sim.capture_begin(stream).unwrap_err().code, DriverError::ILLEGAL_STATE);
    sim.stream_synchronize(stream).unwrap_err();
    sim.capture_abort(stream).unwrap();
    assert_eq!(sim.capture_end(stream).unwrap_err().code, DriverError::ILLEGAL_STATE);
}

#[test]
fn a_stream_that_waits_for_the_capture_joins_it() {
    let sim = sim(GIB, SimMemory::None);
    let (origin, other) = (sim.stream_create().unwrap(), sim.stream_create().unwrap());
    let (fork, join) = (sim.event_create(false).unwrap(), sim.event_create(false).unwrap());
    sim.capture_begin(origin).unwrap();
    work(&sim, origin, 1_000);
    sim.event_record(fork, origin).unwrap();
    sim.stream_wait_event(other, fork).unwrap();
    assert!(sim.stream_is_capturing(other).unwrap());
    work(&sim, other, 1_000);
    assert_eq!(sim.capture_end(other).unwrap_err().code, DriverError::STREAM_CAPTURE_UNMATCHED);
    sim.event_record(join, other).unwrap();
    sim.stream_wait_event(origin, join).unwrap();
    let graph = sim.capture_end(origin).unwrap();
    assert!(!sim.stream_is_capturing(other).unwrap());
    let busy = sim.busy_ns();
    launch(sim.as_ref(), graph, origin).unwrap();
    assert_eq!(sim.busy_ns() - busy, 2 * sim.profile().kernel_ns("test", 1, 1, 1_000 * 4300, 0.0));
    sim.device_synchronize().unwrap();
    destroy(&sim, graph);
}

#[test]
fn memory_of_a_graph_is_its_own_and_no_pools() {
    let sim = sim(GIB, SimMemory::Host);
    let (stream, pool) = (sim.stream_create().unwrap(), pool(&sim));
    let start = free_bytes(sim.as_ref());
    sim.capture_begin(stream).unwrap();
    let a = sim.mem_alloc_async(pool, 3 * MIB, stream).unwrap();
    give(&sim, a, stream).unwrap();
    assert_eq!(give(&sim, a, stream).unwrap_err().code, DriverError::INVALID_VALUE, "freed twice");
    let b = sim.mem_alloc_async(pool, 3 * MIB, stream).unwrap();
    assert_eq!(a, b, "used again in the capture");
    give(&sim, b, stream).unwrap();
    let graph = sim.capture_end(stream).unwrap();
    assert_eq!(sim.pool_counters(pool).unwrap().reserved, 0);
    let memory = sim.graph_memory().unwrap();
    assert_eq!((memory.used, memory.reserved), (3 * MIB, 32 * MIB));
    assert_eq!(start - free_bytes(sim.as_ref()), 32 * MIB);
    assert!(sim.translate(a.get(), 3 * MIB).is_some(), "a launch computes there");
    // Another graph has other addresses as long as this one lives.
    sim.capture_begin(stream).unwrap();
    let c = sim.mem_alloc_async(pool, 3 * MIB, stream).unwrap();
    assert_ne!(a, c);
    sim.capture_abort(stream).unwrap();
    sim.graph_trim().unwrap();
    assert_eq!(sim.graph_memory().unwrap().reserved, 32 * MIB, "in use");
    destroy(&sim, graph);
    assert!(sim.translate(a.get(), 1).is_none());
    let memory = sim.graph_memory().unwrap();
    assert_eq!((memory.used, memory.reserved, memory.used_high), (0, 32 * MIB, 6 * MIB));
    sim.graph_trim().unwrap();
    let memory = sim.graph_memory().unwrap();
    assert_eq!((memory.reserved, memory.reserved_high), (0, 32 * MIB));
    assert_eq!(free_bytes(sim.as_ref()), start);
}

#[test]
fn what_comes_behind_what_in_a_capture_is_known() {
    let sim = sim(GIB, SimMemory::None);
    let [own, side, outside] = [(); 3].map(|()| sim.stream_create().unwrap());
    let wait = |from: StreamId, to: StreamId| {
        let event = sim.event_create(false).unwrap();
        sim.event_record(event, from).unwrap();
        sim.stream_wait_event(to, event).unwrap();
    };
    let front = |stream: StreamId| sim.capture_front(stream).unwrap().map(|front| front.nodes.into_iter().collect());
    let mut past = CapturedWork::default();
    let mut extend = |stream: StreamId| {
        sim.capture_past(stream, &mut past).unwrap();
        past.nodes.iter().copied().collect::<Vec<u64>>()
    };
    assert_eq!(front(own), None::<Vec<u64>>);
    sim.capture_begin(own).unwrap();
    assert_eq!(front(own), Some(vec![]));
    work(&sim, own, 1_000);
    wait(own, side);
    assert_eq!((front(own), front(side), front(outside)), (Some(vec![0]), Some(vec![0]), None));
    work(&sim, side, 1_000);
    work(&sim, own, 1_000);
    assert_eq!((front(own), front(side)), (Some(vec![2]), Some(vec![1])));
    assert_eq!((extend(own), extend(outside)), (vec![0, 2], vec![0, 2]));
    wait(side, own);
    assert_eq!((front(own), extend(own)), (Some(vec![1, 2]), vec![0, 1, 2]));
    work(&sim, own, 1_000);
    assert_eq!((front(own), extend(own)), (Some(vec![3]), vec![0, 1, 2, 3]));
    // A broken capture has no order any more, and another one begins anew.
    sim.stream_synchronize(side).unwrap_err();
    assert_eq!(front(own), None);
    sim.capture_abort(own).unwrap();
    sim.capture_begin(own).unwrap();
    work(&sim, own, 1_000);
    assert_eq!(extend(own), [0]);
    sim.capture_abort(own).unwrap();
}
