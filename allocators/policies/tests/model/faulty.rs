//! Random programs on a driver whose calls fail sometimes: failures are reported, blocks stay disjoint, the account stays correct,
//! and nothing is lost.

use super::{Op, STREAMS, assert_tiles, of_every_backend, ops};
use crate::common::{MIB, allocate, check_nothing_held, check_stats, free, free_bytes, sim, work};
use proptest::prelude::*;
use std::sync::Arc;
use vramlab_device::{CallKind, Driver, DriverError, FaultyDriver, SimDriver, StreamId, sim::SimMemory};
use vramlab_policies::instruments::assert_layout;
use vramlab_policies::{AllocError, Block, DeviceAllocator, Selection};

const ROOM: u64 = 160 * MIB;

/// Calls that backends make after they were built.
const KINDS: [CallKind; 14] = [
    CallKind::MemAlloc,
    CallKind::MemFree,
    CallKind::MemAllocAsync,
    CallKind::MemFreeAsync,
    CallKind::MemGetInfo,
    CallKind::PoolAttribute,
    CallKind::PoolTrim,
    CallKind::EventCreate,
    CallKind::EventRecord,
    CallKind::EventQuery,
    CallKind::EventSynchronize,
    CallKind::StreamWaitEvent,
    CallKind::StreamSynchronize,
    CallKind::DeviceSynchronize,
];

/// The call after the next `skip` ones of a kind fails.
#[derive(Clone, Debug)]
struct Fault {
    kind: CallKind,
    skip: u64,
    code: u32,
}

fn steps(length: usize) -> impl Strategy<Value = Vec<(Op, Option<Fault>)>> {
    let code = prop::sample::select(vec![DriverError::OUT_OF_MEMORY, DriverError::ILLEGAL_ADDRESS]);
    let fault = (prop::sample::select(KINDS.to_vec()), 0..3u64, code);
    let fault = fault.prop_map(|(kind, skip, code)| Fault { kind, skip, code });
    let faults = prop::collection::vec(prop::option::weighted(0.3, fault), length);
    (ops(length), faults).prop_map(|(ops, faults)| ops.into_iter().zip(faults).collect())
}

struct Rig {
    sim: Arc<SimDriver>,
    faulty: Arc<FaultyDriver>,
    allocator: Arc<dyn DeviceAllocator>,
    streams: Vec<StreamId>,
    live: Vec<(Block, StreamId)>,
}

impl Rig {
    /// An error is the device's lack of memory, or the fault.
    fn expect<T>(&self, result: Result<T, AllocError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(AllocError::Driver(error)) => {
                assert!(error.context.contains("injected fault") || error.is_out_of_memory(), "{error}");
                None
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                None
            }
        }
    }

    fn apply(&mut self, op: &Op) {
        let allocator = self.allocator.as_ref();
        match op {
            Op::Allocate { bytes, stream } => {
                let stream = self.streams[*stream];
                let Some(block) = self.expect(allocate(allocator, *bytes, stream)) else { return };
                let (start, end) = (block.addr().get(), block.addr().get() + block.bytes());
                for (other, _) in &self.live {
                    let disjoint = end <= other.addr().get() || other.addr().get() + other.bytes() <= start;
                    assert!(disjoint, "{block:?} {other:?}");
                }
                self.live.push((block, stream));
            }
            Op::Free { which } if !self.live.is_empty() => {
                let (block, stream) = self.live.swap_remove(which.index(self.live.len()));
                self.expect(free(allocator, block, stream));
            }
            Op::RecordUse { which, stream } if !self.live.is_empty() => {
                self.expect(allocator.record_use(&which.get(&self.live).0, self.streams[*stream]));
            }
            Op::Work { stream, ns } => work(&self.sim, self.streams[*stream], *ns),
            Op::Synchronize { stream } => self.sim.stream_synchronize(self.streams[*stream]).unwrap(),
            Op::Trim { keep } => {
                self.expect(allocator.trim(*keep));
            }
            Op::Free { .. } | Op::RecordUse { .. } => {}
        }
    }
}

fn check_history(settings: &Selection, steps: &[(Op, Option<Fault>)]) {
    let sim = sim(ROOM, SimMemory::None);
    let streams: Vec<StreamId> = (0..STREAMS).map(|_| sim.stream_create().unwrap()).collect();
    let start = free_bytes(sim.as_ref());
    let faulty = Arc::new(FaultyDriver::new(Arc::clone(&sim) as Arc<dyn Driver>));
    let allocator = settings.build(&(Arc::clone(&faulty) as Arc<dyn Driver>)).unwrap();
    let joins = settings.capabilities().coalesces;
    let mut rig = Rig { sim, faulty, allocator, streams, live: Vec::new() };
    for (op, fault) in steps {
        if let Some(Fault { kind, skip, code }) = fault {
            rig.faulty.fail(*kind, *skip, *code);
        }
        rig.apply(op);
        // Reading the statistics must not meet a fault that is meant for an operation.
        rig.faulty.clear();
        let stats = rig.allocator.stats();
        check_stats(&stats);
        assert_eq!(stats.allocation.all.current, rig.live.len() as u64);
        match rig.allocator.snapshot() {
            Some(snapshot) if joins => assert_layout(&snapshot),
            Some(snapshot) => assert_tiles(&snapshot),
            None => {}
        }
    }
    while let Some((block, stream)) = rig.live.pop() {
        free(rig.allocator.as_ref(), block, stream).unwrap();
    }
    rig.sim.device_synchronize().unwrap();
    // A fault that a request met when it processed deferred frees is reported by the next trim, once.
    rig.expect(rig.allocator.trim(0));
    rig.allocator.trim(0).unwrap();
    check_nothing_held(&rig.allocator.stats());
    assert_eq!(rig.allocator.stats().reserved_bytes.all.current, 0);
    drop(rig.allocator);
    assert_eq!(free_bytes(rig.sim.as_ref()), start, "device memory leaked");
}

#[test]
fn every_backend_survives_random_faults() {
    of_every_backend(700, || steps(80), |selection, steps| check_history(selection, steps));
}
