//! Blocks of destroyed streams, and blocks of other allocators.

use crate::common::{self, GIB, KIB, MIB, allocate, build, check_nothing_held, check_stats, free, sim, work};
use std::sync::Arc;
use vramlab_device::{CallKind, Driver, DriverError, FaultyDriver, SimDriver, StreamId, sim::SimMemory};
use vramlab_policies::backends::{self, caching, stream_ordered};
use vramlab_policies::instruments::Limit;
use vramlab_policies::{AllocError, Backend, Block, BlockState, DeviceAllocator, Request, Selection};

const BYTES: u64 = 3 * MIB;

struct Bench {
    sim: Arc<SimDriver>,
    allocator: Arc<dyn DeviceAllocator>,
    owner: StreamId,
}

impl Bench {
    fn new(kind: &Selection, room: u64) -> Self {
        let sim = sim(room, SimMemory::None);
        let allocator = kind.build(&(Arc::clone(&sim) as Arc<dyn Driver>)).unwrap();
        let owner = sim.stream_create().unwrap();
        Self { sim, allocator, owner }
    }

    fn allocate(&self, bytes: u64) -> Block {
        allocate(self.allocator.as_ref(), bytes, self.owner).unwrap()
    }

    fn free(&self, block: Block) -> Result<vramlab_policies::Path, AllocError> {
        free(self.allocator.as_ref(), block, self.owner)
    }

    fn destroy(&self, stream: StreamId) {
        // SAFETY: the device checks calls with destroyed streams.
        unsafe { self.sim.stream_destroy(stream) }.unwrap();
    }

    /// A block that was announced to a stream which is destroyed by now.
    fn announced_to_one_that_is_gone(&self) -> Block {
        let (block, user) = (self.allocate(BYTES), self.sim.stream_create().unwrap());
        work(&self.sim, user, 1_000_000);
        self.allocator.record_use(&block, user).unwrap();
        self.destroy(user);
        block
    }

    fn stranded(&self) -> Option<u64> {
        self.allocator.stats().stranded_bytes.map(|gauge| gauge.current)
    }
}

/// Backends that defer frees for other streams. The others wait immediately, or for the device.
fn keeping() -> impl Iterator<Item = Selection> {
    backends::all().into_iter().map(Selection::of).filter(|kind| kind.capabilities().sets_aside)
}

fn is_a_driver_error(error: &AllocError) -> bool {
    matches!(error, AllocError::Driver(_))
}

#[test]
fn block_of_a_destroyed_stream_is_stranded_and_others_served() {
    for kind in keeping() {
        let bench = Bench::new(&kind, GIB);
        let block = bench.announced_to_one_that_is_gone();
        let (addr, bytes) = (block.addr(), block.bytes());
        assert_eq!(bench.stranded(), None, "{kind}: absent while there never were any");
        let error = bench.free(block).unwrap_err();
        assert!(is_a_driver_error(&error), "{kind}: it is told once: {error}");
        assert_eq!(bench.stranded(), Some(bytes), "{kind}");
        for _ in 0..3 {
            let next = bench.allocate(BYTES);
            assert_ne!(next.addr(), addr, "{kind}: nothing says that its work is over");
            bench.free(next).unwrap();
            check_stats(&bench.allocator.stats());
        }
        if let Some(snapshot) = bench.allocator.snapshot() {
            let mut blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
            assert!(blocks.any(|block| (block.addr, block.state) == (addr, BlockState::PendingFree)), "{kind}");
        }
        // A wait for the device does report it.
        assert!(bench.allocator.trim(0).unwrap() >= bytes, "{kind}");
        let stats = bench.allocator.stats();
        assert_eq!(stats.stranded_bytes.map(|gauge| (gauge.current, gauge.peak)), Some((0, bytes)), "{kind}");
        check_nothing_held(&stats);
        assert_eq!(stats.reserved_bytes.all.current, 0, "{kind}");
        assert_eq!(bench.allocator.trim(0).unwrap(), 0, "{kind}");
    }
}

#[test]
fn when_memory_runs_out_what_was_set_aside_is_waited_for() {
    for kind in keeping() {
        let bench = Bench::new(&kind, 64 * MIB);
        let (large, user) = (bench.allocate(30 * MIB), bench.sim.stream_create().unwrap());
        bench.allocator.record_use(&large, user).unwrap();
        bench.destroy(user);
        bench.free(large).unwrap_err();
        // More than the remainder; the rest of its segment can be allocated again in the same size.
        let (most, bytes) = if kind.capabilities().keeps_segments { (2, 30 * MIB) } else { (1, 60 * MIB) };
        let mut later = Vec::new();
        while later.len() < most && bench.stranded() != Some(0) {
            later.push(bench.allocate(bytes));
        }
        assert_eq!(bench.stranded(), Some(0), "{kind}");
        later.into_iter().for_each(|block| assert!(bench.free(block).is_ok()));
        check_nothing_held(&bench.allocator.stats());
    }
}

#[test]
fn block_with_one_destroyed_stream_waits_for_the_others_too() {
    let bench = Bench::new(&Selection::of(&caching::BACKEND), GIB);
    let (block, alive) = (bench.announced_to_one_that_is_gone(), bench.sim.stream_create().unwrap());
    bench.allocator.record_use(&block, alive).unwrap();
    work(&bench.sim, alive, 5_000_000);
    bench.free(block).unwrap_err();
    assert_eq!((bench.stranded(), bench.allocator.stats().active.all.current), (Some(BYTES), 1));
    let other = bench.allocate(KIB);
    assert_eq!(bench.allocator.stats().active.all.current, 2);
    bench.free(other).unwrap();
    bench.allocator.trim(0).unwrap();
    check_nothing_held(&bench.allocator.stats());
}

#[test]
fn stream_destroyed_in_a_capture_strands_nothing_else() {
    let bench = Bench::new(&Selection::of(&caching::BACKEND), GIB);
    let driver: Arc<dyn Driver> = Arc::clone(&bench.sim) as _;
    let (block, user) = (bench.allocate(BYTES), bench.sim.stream_create().unwrap());
    bench.allocator.record_use(&block, user).unwrap();
    let graphs = driver.graphs().unwrap();
    // The user's stream is captured, so its event is recorded at the end; by then the stream is destroyed.
    let capture = bench.allocator.capture_begin(user).unwrap();
    graphs.capture_begin(user).unwrap();
    bench.free(block).unwrap();
    let graph = graphs.capture_end(user).unwrap();
    bench.allocator.capture_end(capture).unwrap();
    bench.destroy(user);
    for _ in 0..3 {
        bench.free(bench.allocate(KIB)).unwrap();
    }
    assert_eq!(bench.stranded(), Some(BYTES));
    let error = bench.allocator.trim(0).unwrap_err();
    assert!(is_a_driver_error(&error), "nobody was told before: {error}");
    assert_eq!(bench.stranded(), Some(0), "it was waited for all the same");
    // SAFETY: never launched.
    unsafe { graphs.graph_destroy(graph) }.unwrap();
    bench.allocator.capture_release(capture).unwrap();
    bench.allocator.trim(0).unwrap();
    check_nothing_held(&bench.allocator.stats());
}

#[test]
fn a_device_that_cannot_be_waited_for_keeps_what_was_set_aside() {
    for kind in keeping() {
        let sim = sim(GIB, SimMemory::None);
        let faulty = Arc::new(FaultyDriver::new(Arc::clone(&sim) as Arc<dyn Driver>));
        let allocator = kind.build(&(Arc::clone(&faulty) as Arc<dyn Driver>)).unwrap();
        let owner = sim.stream_create().unwrap();
        let bench = Bench { sim, allocator, owner };
        let block = bench.announced_to_one_that_is_gone();
        let bytes = block.bytes();
        bench.free(block).unwrap_err();
        faulty.fail(CallKind::DeviceSynchronize, 0, DriverError::ILLEGAL_STATE);
        let _ = bench.allocator.trim(0);
        assert_eq!((faulty.injected(), bench.stranded()), (1, Some(bytes)), "{kind}");
        bench.free(bench.allocate(KIB)).unwrap();
        bench.allocator.trim(0).unwrap();
        assert_eq!(bench.stranded(), Some(0), "{kind}");
        check_nothing_held(&bench.allocator.stats());
    }
}

#[test]
fn a_block_whose_own_stream_is_gone_comes_back() {
    for kind in backends::all() {
        let bench = Bench::new(&Selection::of(kind), GIB);
        let destroyed = bench.sim.stream_create().unwrap();
        let block = allocate(bench.allocator.as_ref(), BYTES, destroyed).unwrap();
        work(&bench.sim, destroyed, 1_000_000);
        bench.destroy(destroyed);
        let freed = free(bench.allocator.as_ref(), block, destroyed);
        assert_eq!(freed.is_err(), kind == &stream_ordered::BACKEND, "{kind}: {freed:?}");
        bench.free(bench.allocate(KIB)).unwrap();
        bench.allocator.trim(0).unwrap();
        check_nothing_held(&bench.allocator.stats());
        assert_eq!(bench.allocator.stats().reserved_bytes.all.current, 0, "{kind}");
    }
}

#[test]
fn a_stream_that_was_forgotten_is_named_no_more() {
    for kind in backends::all() {
        let bench = Bench::new(&Selection::of(kind), GIB);
        let destroyed_stream = bench.sim.stream_create().unwrap();
        let own_block = allocate(bench.allocator.as_ref(), BYTES, destroyed_stream).unwrap();
        let [live, freed] = [0, 1].map(|_| bench.allocate(BYTES));
        for block in [&live, &freed] {
            bench.allocator.record_use(block, destroyed_stream).unwrap();
        }
        bench.free(freed).unwrap();
        bench.sim.device_synchronize().unwrap();
        bench.allocator.forget_stream(destroyed_stream);
        bench.destroy(destroyed_stream);
        bench.free(live).unwrap();
        free(bench.allocator.as_ref(), own_block, destroyed_stream).unwrap();
        assert_eq!(bench.allocator.stats().active.all.current, 0, "{kind}: nothing waits");
        bench.allocator.trim(0).unwrap();
        check_nothing_held(&bench.allocator.stats());
        assert_eq!((bench.stranded(), bench.allocator.stats().reserved_bytes.all.current), (None, 0), "{kind}");
    }
}

/// Two allocators on two devices that return the same addresses, each with one block at the same address.
fn twins(kind: &'static Backend) -> [(Bench, Block); 2] {
    let twins = [GIB, GIB].map(|room| {
        let bench = Bench::new(&Selection::of(kind), room);
        let block = bench.allocate(BYTES);
        (bench, block)
    });
    assert_eq!(twins[0].1.addr(), twins[1].1.addr(), "{kind}");
    assert_eq!(twins[0].0.owner, twins[1].0.owner, "{kind}");
    twins
}

#[test]
fn block_of_another_device_is_refused_and_freed_by_its_owner() {
    for kind in backends::all() {
        let [(first, own), (second, foreign)] = twins(kind);
        let before = first.allocator.stats();
        let error = first.allocator.record_use(&foreign, first.sim.stream_create().unwrap()).unwrap_err();
        assert!(matches!(error, AllocError::ForeignBlock { .. }), "{kind}: {error}");
        let error = first.free(foreign).unwrap_err();
        assert_eq!(first.allocator.stats(), before, "{kind}: a refusal should change nothing");
        let AllocError::ForeignBlock { block, .. } = &error else { panic!("{kind}: {error}") };
        let copy = error.clone();
        second.free(block.take().unwrap()).unwrap();
        check_nothing_held(&second.allocator.stats());
        let AllocError::ForeignBlock { block, .. } = copy else { panic!("{kind}") };
        assert!(block.take().is_none(), "{kind}: a block is given back once");
        first.free(own).unwrap();
        check_nothing_held(&first.allocator.stats());
    }
}

#[test]
fn a_block_of_any_other_allocator_is_refused() {
    // Several of each, so that allocators of two kinds with counters of their own would collide.
    let kinds = || backends::all().into_iter().chain(backends::all()).chain(backends::all());
    let live: Vec<(Bench, Block)> = kinds()
        .map(|kind| {
            let bench = Bench::new(&Selection::of(kind), GIB);
            let block = bench.allocate(BYTES);
            (bench, block)
        })
        .collect();
    let mut at_one_address = 0;
    for ((first, own), (_, foreign)) in live.iter().flat_map(|first| live.iter().map(move |other| (first, other))) {
        if own.addr() == foreign.addr() && own != foreign {
            let error = first.allocator.record_use(foreign, first.owner).unwrap_err();
            assert!(matches!(error, AllocError::ForeignBlock { .. }), "{}: {error}", first.allocator.name());
            at_one_address += 1;
        }
        assert_eq!(own.token() == foreign.token(), own == foreign, "{own:?} and {foreign:?}");
    }
    assert!(at_one_address > live.len());
    for (bench, block) in live {
        bench.free(block).unwrap();
    }
}

#[test]
fn a_limit_counts_only_what_it_handed_out() {
    for kind in backends::all() {
        let bench = Bench::new(&Selection::of(kind), GIB);
        // A block may be larger than its request.
        let sample = bench.allocate(BYTES);
        let limit = Limit::new(Arc::clone(&bench.allocator), sample.bytes());
        bench.free(sample).unwrap();
        // Twice as much, past the limit.
        let direct = bench.allocate(2 * BYTES);
        let error = free(&limit, direct, bench.owner).unwrap_err();
        let AllocError::ForeignBlock { block, .. } = error else { panic!("{kind}: {error}") };
        let block_of_limit = allocate(&limit, BYTES, bench.owner).unwrap();
        assert!(allocate(&limit, 1, bench.owner).unwrap_err().is_out_of_memory(), "{kind}");
        bench.free(block.take().unwrap()).unwrap();
        free(&limit, block_of_limit, bench.owner).unwrap();
        let full_block = limit.allocate(Request::new(BYTES), bench.owner).unwrap();
        free(&limit, full_block, bench.owner).unwrap();

        let [(first, own), (second, foreign)] = twins(kind);
        // A block may be larger than its request.
        let bytes = own.bytes();
        first.free(own).unwrap();
        let limit = Limit::new(Arc::clone(&first.allocator), bytes);
        let block_of_limit = allocate(&limit, BYTES, first.owner).unwrap();
        if block_of_limit.addr() == foreign.addr() {
            let error = free(&limit, foreign, first.owner).unwrap_err();
            let AllocError::ForeignBlock { block, .. } = error else { panic!("{kind}: {error}") };
            assert!(allocate(&limit, 1, first.owner).is_err(), "{kind}: its own block still counts");
            second.free(block.take().unwrap()).unwrap();
        }
        free(&limit, block_of_limit, first.owner).unwrap();
    }
}

#[test]
fn the_checker_tells_a_block_of_another_device_from_its_own() {
    let [(first, own), (_, foreign)] = twins(&caching::BACKEND);
    first.free(own).unwrap();
    let driver: Arc<dyn Driver> = sim(GIB, SimMemory::Host);
    let stream = driver.stream_create().unwrap();
    let checker = common::checker(build(&caching::BACKEND, &driver), Arc::clone(&driver));
    let leaked = allocate(&checker, BYTES, stream).unwrap();
    assert_eq!(leaked.addr(), foreign.addr());
    assert!(matches!(free(&checker, foreign, stream), Err(AllocError::Violation(_))));
    assert_eq!(checker.report().live, [(leaked.addr().get(), BYTES)]);
    free(&checker, leaked, stream).unwrap();
}
