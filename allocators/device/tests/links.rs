//! Several simulated GPUs: a collective starts with the last rank.

use crate::common::{MIB, work};
use std::sync::{Arc, Barrier, Mutex};
use vramlab_device::sim::{Ranks, SimMemory};
use vramlab_device::{DeviceAddr, Driver, DriverResult, Profile, SimDriver};

/// Ranks that are threads of this test.
#[derive(Debug)]
struct Threads {
    barrier: Barrier,
    count: u64,
    times: Mutex<Vec<u64>>,
}

impl Ranks for Threads {
    fn count(&self) -> u64 {
        self.count
    }

    fn last_start(&self, ready_ns: u64) -> DriverResult<u64> {
        self.times.lock().unwrap().push(ready_ns);
        self.barrier.wait();
        let last = self.times.lock().unwrap().iter().copied().max().unwrap();
        if self.barrier.wait().is_leader() {
            self.times.lock().unwrap().clear();
        }
        self.barrier.wait();
        Ok(last)
    }
}

/// For each rank, the time at which its two all-reduces have completed and the time its host was blocked; the rank of number r has
/// `works[r]` nanoseconds of work before them. With `graph` all of it is one launch.
fn run(works: &[u64], graph: bool) -> Vec<(u64, u64)> {
    let count = works.len();
    let ranks = Arc::new(Threads { barrier: Barrier::new(count), count: count as u64, times: Mutex::default() });
    let rank = |work_ns: u64| {
        let sim = SimDriver::new(Profile::h200(), SimMemory::None);
        sim.join(Arc::clone(&ranks) as Arc<dyn Ranks>);
        let stream = sim.stream_create().unwrap();
        let addr = sim.mem_alloc(4 * MIB).unwrap();
        let queue = || {
            work(&sim, stream, work_ns);
            sim.all_reduce(stream, addr, 4 * MIB).unwrap();
            sim.all_reduce(stream, DeviceAddr::new(addr.get() + MIB).unwrap(), MIB).unwrap();
        };
        if graph {
            let graphs = sim.graphs().unwrap();
            graphs.capture_begin(stream).unwrap();
            queue();
            let captured = graphs.capture_end(stream).unwrap();
            // SAFETY: the memory is live to the end of the test.
            unsafe { graphs.graph_launch(captured, stream) }.unwrap();
        } else {
            queue();
        }
        sim.stream_synchronize(stream).unwrap();
        (sim.clock().now_ns(), sim.blocked_ns().unwrap())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = works.iter().map(|work_ns| scope.spawn(move || rank(*work_ns))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_collective_starts_with_the_last_rank_and_ends_for_all() {
    for graph in [false, true] {
        let ends = run(&[1_000_000, 5_000_000, 2_000_000], graph);
        assert_eq!(ends[0].0, ends[1].0, "graph: {graph}");
        assert_eq!(ends[0].0, ends[2].0, "graph: {graph}");
        // The ranks with less work wait for the difference.
        let alone = run(&[5_000_000, 5_000_000, 5_000_000], graph);
        assert_eq!(ends[0].0, alone[0].0, "graph: {graph}");
        // Whatever the real order of the threads.
        assert_eq!(run(&[1_000_000, 5_000_000, 2_000_000], graph), ends);
    }
}

#[test]
fn a_collective_of_one_rank_waits_for_nobody() {
    let links = Profile::h200().links;
    let one = run(&[1_000_000], false)[0].0;
    let two = run(&[1_000_000, 1_000_000], false)[0].0;
    let of = |ranks| links.all_reduce_ns(ranks, 4 * MIB) + links.all_reduce_ns(ranks, MIB);
    assert_eq!(two - one, of(2) - of(1));
}

/// Two ranks that do the same at the same time.
#[derive(Debug)]
struct Alike;

impl Ranks for Alike {
    fn count(&self) -> u64 {
        2
    }

    fn last_start(&self, ready_ns: u64) -> DriverResult<u64> {
        Ok(ready_ns)
    }
}

#[test]
fn collectives_of_two_streams_share_the_links() {
    let end = |streams: usize| {
        let sim = SimDriver::new(Profile::h200(), SimMemory::None);
        sim.join(Arc::new(Alike));
        let addr = sim.mem_alloc(64 * MIB).unwrap();
        let streams: Vec<_> = (0..streams).map(|_| sim.stream_create().unwrap()).collect();
        let start = sim.clock().now_ns();
        for number in 0..4 {
            sim.all_reduce(streams[number % streams.len()], addr, 64 * MIB).unwrap();
        }
        sim.device_synchronize().unwrap();
        sim.clock().now_ns() - start
    };
    assert_eq!(end(1), end(2));
}
