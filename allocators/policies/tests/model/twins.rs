//! `caching` is `pytorch`, written for speed: on two equal devices they place every block at the same address by the same path,
//! make the same driver calls at the same time, and report the same.

use super::{Op, ROOM, STREAMS, caching_settings, ops};
use crate::common::{GIB, MIB, allocate, cases, free, sim, work};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::sync::{Arc, Mutex};
use vramlab_device::{
    CallEvent, CallKind, Driver, DriverError, FaultyDriver, GraphId, MeteredDriver, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::policy::size::torch::Divisions;
use vramlab_policies::{AllocError, Block, CaptureId, DeviceAllocator, Path, PrivatePool, Selection};

/// The fields of a driver call that must be equal.
type Call = (CallKind, u64, Option<u64>, bool, u64);

/// One of the two allocators, on a device of its own.
struct Side {
    sim: Arc<SimDriver>,
    faulty: Arc<FaultyDriver>,
    allocator: Arc<dyn DeviceAllocator>,
    calls: Arc<Mutex<Vec<Call>>>,
    streams: Vec<StreamId>,
    live: Vec<(Block, StreamId)>,
    /// Captures on the first two streams: open, and ended with their graphs.
    open: [Option<CaptureId>; 2],
    ended: Vec<(CaptureId, GraphId)>,
    /// Private pools that are not released, and which of them each stream is in.
    pools: Vec<PrivatePool>,
    routes: Vec<Option<PrivatePool>>,
}

/// Something that a program does with private pools.
#[derive(Clone, Debug)]
enum PoolOp {
    /// Lets a stream into a pool, or into a new one.
    Enter {
        stream: usize,
        which: Index,
    },
    Leave {
        stream: usize,
    },
    /// Releases a pool, and its free segments.
    Release {
        which: Index,
        now: bool,
    },
}

/// The result of an operation.
#[derive(Debug, PartialEq)]
enum Outcome {
    Placed(u64, u64, Path),
    Freed(Path),
    Trimmed(u64),
    Refused(String),
    Nothing,
}

impl Side {
    fn new(of: &str, settings: &CachingSettings, room: u64) -> Self {
        let sim = sim(room, SimMemory::None);
        let streams = (0..STREAMS).map(|_| sim.stream_create().unwrap()).collect();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&calls);
        let observer = Box::new(move |event: &CallEvent| {
            let addr = event.addr.map(|addr| addr.get());
            log.lock().unwrap().push((event.kind, event.bytes, addr, event.ok, event.start_ns));
        });
        let faulty = Arc::new(FaultyDriver::new(Arc::clone(&sim) as Arc<dyn Driver>));
        let mut allocator: Selection = of.parse().unwrap();
        allocator.adopt(settings);
        let driver = MeteredDriver::new(Arc::clone(&faulty) as Arc<dyn Driver>, None, Some(observer));
        let allocator = allocator.build(&(Arc::new(driver) as Arc<dyn Driver>)).unwrap();
        calls.lock().unwrap().clear();
        let (live, ended, pools) = (Vec::new(), Vec::new(), Vec::new());
        let (open, routes) = ([None; 2], vec![None; STREAMS]);
        Self { sim, faulty, allocator, calls, streams, live, open, ended, pools, routes }
    }

    /// The report contains the name of the allocator.
    fn refused(&self, error: &AllocError) -> Outcome {
        Outcome::Refused(error.to_string().replacen(self.allocator.name(), "either", 1))
    }

    fn apply(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Allocate { bytes, stream } => {
                let stream = self.streams[*stream];
                match allocate(self.allocator.as_ref(), *bytes, stream) {
                    Ok(block) => {
                        let placed = Outcome::Placed(block.addr().get(), block.bytes(), block.path());
                        self.live.push((block, stream));
                        placed
                    }
                    Err(error) => self.refused(&error),
                }
            }
            Op::Free { which } if !self.live.is_empty() => {
                let (block, stream) = self.live.swap_remove(which.index(self.live.len()));
                free(self.allocator.as_ref(), block, stream).map_or_else(|error| self.refused(&error), Outcome::Freed)
            }
            Op::RecordUse { which, stream } if !self.live.is_empty() => {
                self.allocator.record_use(&which.get(&self.live).0, self.streams[*stream]).unwrap();
                Outcome::Nothing
            }
            Op::Work { stream, ns } => {
                work(&self.sim, self.streams[*stream], *ns);
                Outcome::Nothing
            }
            Op::Synchronize { stream } => {
                self.sim.stream_synchronize(self.streams[*stream]).unwrap();
                Outcome::Nothing
            }
            Op::Trim { keep } => self.allocator.trim(*keep).map_or_else(|error| self.refused(&error), Outcome::Trimmed),
            Op::Free { .. } | Op::RecordUse { .. } => Outcome::Nothing,
        }
    }
}

impl Side {
    /// Begins a capture on a stream, or ends the open one and releases the oldest that has ended.
    fn capture(&mut self, which: usize) -> Outcome {
        let (stream, graphs) = (self.streams[which], self.sim.graphs().unwrap());
        let Some(capture) = self.open[which] else {
            let capture = self.allocator.capture_begin(stream).unwrap();
            graphs.capture_begin(stream).unwrap();
            self.open[which] = Some(capture);
            return Outcome::Nothing;
        };
        self.open[which] = None;
        let graph = graphs.capture_end(stream).unwrap();
        let ended = self.allocator.capture_end(capture);
        self.ended.push((capture, graph));
        if self.ended.len() > 1 {
            let (capture, graph) = self.ended.remove(0);
            // SAFETY: made above, never launched, destroyed once.
            unsafe { graphs.graph_destroy(graph) }.unwrap();
            self.allocator.capture_release(capture).unwrap();
        }
        ended.map_or_else(|error| self.refused(&error), |()| Outcome::Nothing)
    }
}

impl Side {
    fn leave(&mut self, stream: usize) {
        if self.routes[stream].take().is_some() {
            self.allocator.pool_end(self.streams[stream]).unwrap();
        }
    }

    fn pool(&mut self, op: &PoolOp) -> Outcome {
        match op {
            PoolOp::Enter { stream, which } => {
                let which = which.index(self.pools.len() + 1);
                if which == self.pools.len() {
                    self.pools.push(self.allocator.pool_create().unwrap());
                }
                self.leave(*stream);
                self.allocator.pool_begin(self.pools[which], self.streams[*stream]).unwrap();
                self.routes[*stream] = Some(self.pools[which]);
            }
            PoolOp::Leave { stream } => self.leave(*stream),
            PoolOp::Release { which, now } if !self.pools.is_empty() => {
                let pool = self.pools.swap_remove(which.index(self.pools.len()));
                (0..STREAMS)
                    .filter(|stream| self.routes[*stream] == Some(pool))
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|stream| self.leave(stream));
                self.allocator.pool_release(pool).unwrap();
                if *now {
                    return Outcome::Trimmed(self.allocator.pool_trim(pool).unwrap());
                }
            }
            PoolOp::Release { .. } => {}
        }
        Outcome::Nothing
    }
}

struct Twins([Side; 2]);

impl Twins {
    fn new(settings: &CachingSettings, room: u64) -> Self {
        Self(["pytorch", "caching"].map(|of| Side::new(of, settings, room)))
    }

    fn apply(&mut self, op: &Op) {
        let [rules, fast] = &mut self.0;
        assert_eq!(rules.apply(op), fast.apply(op), "{op:?}");
        assert_eq!(*rules.calls.lock().unwrap(), *fast.calls.lock().unwrap(), "{op:?}");
        self.0.iter().for_each(|side| side.calls.lock().unwrap().clear());
    }

    /// Applies an operation in which a call of the device may fail, and compares.
    fn apply_with(&mut self, op: &Op, fault: Option<Fault>) {
        for side in &self.0 {
            if let Some((kind, skip, code)) = fault {
                side.faulty.fail(kind, skip, code);
            }
        }
        self.apply(op);
        self.0.iter().for_each(|side| side.faulty.clear());
        self.compare();
    }

    fn capture(&mut self, which: usize) {
        let [rules, fast] = &mut self.0;
        assert_eq!(rules.capture(which), fast.capture(which));
    }

    fn pool(&mut self, op: &PoolOp) {
        let [rules, fast] = &mut self.0;
        assert_eq!(rules.pool(op), fast.pool(op), "{op:?}");
        assert_eq!(*rules.calls.lock().unwrap(), *fast.calls.lock().unwrap(), "{op:?}");
        self.0.iter().for_each(|side| side.calls.lock().unwrap().clear());
    }

    fn compare(&self) {
        let [rules, fast] = &self.0;
        assert_eq!(rules.allocator.stats().entries(), fast.allocator.stats().entries());
        assert_eq!(rules.allocator.ledger_at_peak(), fast.allocator.ledger_at_peak());
        // No two allocators of a process number their pools equally: only whether a segment belongs to a pool is compared.
        let calls_of = |side: &Side| {
            let mut snapshot = side.allocator.snapshot();
            let segments = snapshot.iter_mut().flat_map(|snapshot| &mut snapshot.segments);
            let private: Vec<bool> = segments.map(|segment| segment.private.take().is_some()).collect();
            (snapshot, private)
        };
        assert_eq!(calls_of(rules), calls_of(fast));
    }

    fn reset_peaks(&self) {
        self.0.iter().for_each(|side| side.allocator.reset_peaks());
    }
}

proptest! {
    #![proptest_config(cases(500))]

    /// On a device with room for everything and on one that is often full.
    #[test]
    fn caching_is_pytorch_on_any_operations(
        ops in ops(200),
        settings in caching_settings(),
        tight in any::<bool>(),
    ) {
        let mut twins = Twins::new(&settings, if tight { 96 * MIB } else { 8 * GIB });
        for (at, op) in ops.iter().enumerate() {
            twins.apply(op);
            twins.compare();
            if at == 100 {
                twins.reset_peaks();
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(250))]

    /// While graphs are captured on two of the streams. Nothing waits for a stream: that would invalidate the capture.
    #[test]
    fn caching_is_pytorch_while_graphs_are_captured(
        ops in ops(200),
        captures in prop::collection::vec(prop::option::weighted(0.06, 0..2usize), 200),
        settings in caching_settings(),
    ) {
        // With room for everything, no limit is reached, so no ladder waits for a stream that is captured.
        let settings = CachingSettings { memory_limit: None, garbage_collection_threshold: 0.0, ..settings };
        let mut twins = Twins::new(&settings, 16 * GIB);
        for (op, capture) in ops.iter().zip(captures) {
            if let Some(which) = capture {
                twins.capture(which);
            }
            if !matches!(op, Op::Synchronize { .. } | Op::Trim { .. }) {
                twins.apply(op);
            }
            twins.compare();
        }
    }
}

fn pool_op() -> impl Strategy<Value = PoolOp> {
    prop_oneof![
        3 => (0..STREAMS, any::<Index>()).prop_map(|(stream, which)| PoolOp::Enter { stream, which }),
        2 => (0..STREAMS).prop_map(|stream| PoolOp::Leave { stream }),
        1 => (any::<Index>(), any::<bool>()).prop_map(|(which, now)| PoolOp::Release { which, now }),
    ]
}

proptest! {
    #![proptest_config(cases(400))]

    /// While some requests are for private pools, also where memory is short.
    #[test]
    fn caching_is_pytorch_with_private_pools(
        ops in ops(200),
        pools in prop::collection::vec(prop::option::weighted(0.15, pool_op()), 200),
        settings in caching_settings(),
        tight in any::<bool>(),
    ) {
        let mut twins = Twins::new(&settings, if tight { 128 * MIB } else { 8 * GIB });
        for (op, pool) in ops.iter().zip(pools) {
            pool.iter().for_each(|pool| twins.pool(pool));
            twins.apply(op);
            twins.compare();
        }
    }
}

/// A kind of call, the number of its calls before the one that fails, and the error.
type Fault = (CallKind, u64, u32);

fn fault() -> impl Strategy<Value = Fault> {
    let kinds = vec![
        CallKind::MemAlloc,
        CallKind::MemFree,
        CallKind::EventCreate,
        CallKind::EventRecord,
        CallKind::EventQuery,
        CallKind::EventSynchronize,
    ];
    let code = prop::sample::select(vec![DriverError::OUT_OF_MEMORY, DriverError::ILLEGAL_ADDRESS]);
    (prop::sample::select(kinds), 0..4u64, code)
}

proptest! {
    #![proptest_config(cases(200))]

    /// While calls of the device fail now and then: both say so of the same operation, and keep the same.
    #[test]
    fn caching_is_pytorch_where_calls_fail(
        ops in ops(200),
        faults in prop::collection::vec(prop::option::weighted(0.3, fault()), 200),
        settings in caching_settings(),
    ) {
        let mut twins = Twins::new(&settings, ROOM);
        for (op, fault) in ops.iter().zip(faults) {
            twins.apply_with(op, fault);
        }
    }
}

/// A free whose event fails after the free has returned, and a segment that the device does not release.
#[test]
fn both_say_first_that_an_event_failed() {
    // Only one block is live at a time.
    let which = any::<Index>().new_tree(&mut TestRunner::deterministic()).unwrap().current();
    let mut twins = Twins::new(&CachingSettings::default(), ROOM);
    let fault = |kind| Some((kind, 0, DriverError::OUT_OF_MEMORY));
    for (op, fault) in [
        (Op::Allocate { bytes: 512, stream: 0 }, None),
        (Op::RecordUse { which, stream: 1 }, None),
        (Op::Free { which }, fault(CallKind::EventCreate)),
        (Op::Allocate { bytes: 10 * MIB, stream: 0 }, fault(CallKind::EventRecord)),
        (Op::Free { which }, None),
        (Op::Trim { keep: 0 }, fault(CallKind::MemFree)),
    ] {
        twins.apply_with(&op, fault);
    }
}

/// Operations under each of the settings; `TWIN_STEPS` sets another number.
fn steps() -> usize {
    std::env::var("TWIN_STEPS").map_or(2_000, |steps| steps.parse().unwrap())
}

/// Long ones, in which caches grow old.
#[test]
fn caching_stays_pytorch() {
    let plain = CachingSettings::default();
    let limited = CachingSettings { memory_limit: Some(128 * MIB), ..plain };
    let collecting = CachingSettings { garbage_collection_threshold: 0.6, ..limited };
    let unsplit = CachingSettings { max_split_size: Some(24 * MIB), max_non_split_rounding: 4 * MIB, ..collecting };
    let stepped = CachingSettings { roundup_power2_divisions: Divisions::uniform(8), ..unsplit };
    let again = CachingSettings { retry_fit_after_sync: true, ..stepped };
    for settings in [plain, limited, collecting, unsplit, stepped, again] {
        let (mut twins, mut runner) = (Twins::new(&settings, ROOM), TestRunner::deterministic());
        let (strategy, mut done) = (ops(1_000), 0);
        while done < steps() {
            for op in strategy.new_tree(&mut runner).unwrap().current() {
                twins.apply(&op);
                done += 1;
                if done.is_multiple_of(16) {
                    twins.compare();
                }
            }
            twins.reset_peaks();
        }
    }
}
