//! Every driver call of every backend is made to fail, once each: nothing panics, nothing leaks, the error is
//! reported where it is not absorbed, and the allocator works on.

use super::Bench;
use super::demand::{Asked, Outcome as _, demand, demand_eq};
use super::support::{MIB, allocate, check_nothing_held, check_stats, free, free_bytes, sim, work};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use vramlab_device::{
    Bytes, CallEvent, CallKind, Driver, DriverError, FaultyDriver, MeteredDriver, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_policies::backends::{Capabilities, SegmentUse, Selection};
use vramlab_policies::client::{Capture, DeviceBuffer, Memory};
use vramlab_policies::contract::{AllocError, Block, DeviceAllocator, Path};

/// Bytes of the device for a backend with usual segments.
const ROOM: u64 = 128 * MIB;

/// A simulated device under a driver that fails on demand, under a meter that keeps an account.
struct Rig {
    sim: Arc<SimDriver>,
    faulty: Arc<FaultyDriver>,
    driver: Arc<dyn Driver>,
    /// Each call, its bytes, and whether it succeeded.
    calls: Arc<Mutex<Vec<(CallKind, u64, bool)>>>,
    streams: [StreamId; 2],
    /// Free bytes of the device at first.
    room: u64,
    /// Factor between the usual sizes and those for this backend.
    scale: u64,
}

impl Rig {
    fn new(scale: u64) -> Self {
        let sim = sim(ROOM * scale, SimMemory::None);
        let faulty = Arc::new(FaultyDriver::new(Arc::clone(&sim) as Arc<dyn Driver>));
        let calls = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&calls);
        let observer =
            Box::new(move |event: &CallEvent| log.lock().granted().push((event.kind, event.bytes, event.ok)));
        let driver: Arc<dyn Driver> = Arc::new(MeteredDriver::new(Arc::clone(&faulty) as _, None, Some(observer)));
        let (streams, room) = ([0, 1].map(|_| sim.stream_create().granted()), free_bytes(sim.as_ref()));
        Self { sim, faulty, driver, calls, streams, room, scale }
    }

    /// A size in MiB, scaled from that of a backend with usual segments.
    fn mib(&self, usual: u64) -> u64 {
        usual * MIB * self.scale
    }

    fn count(&self, kind: CallKind) -> u64 {
        // One call may unmap what several have mapped.
        let in_bytes = matches!(kind, CallKind::MemMap | CallKind::MemUnmap);
        let calls = self.calls.lock().granted();
        let successful = calls.iter().filter(|(call, _, ok)| *call == kind && *ok);
        successful.map(|(_, bytes, _)| if in_bytes { *bytes } else { 1 }).sum()
    }

    fn kinds(&self) -> BTreeMap<CallKind, u64> {
        let mut kinds = BTreeMap::new();
        for (kind, ..) in self.calls.lock().granted().iter() {
            *kinds.entry(*kind).or_insert(0) += 1;
        }
        kinds
    }

    /// Kinds of objects that were created and not destroyed: their number, or the bytes of mappings.
    fn leaks(&self) -> Vec<(CallKind, u64)> {
        let pairs = [
            (CallKind::MemAlloc, CallKind::MemFree),
            (CallKind::MemAllocAsync, CallKind::MemFreeAsync),
            (CallKind::MemCreate, CallKind::MemRelease),
            (CallKind::MemMap, CallKind::MemUnmap),
            (CallKind::MemAddressReserve, CallKind::MemAddressFree),
            (CallKind::PoolCreate, CallKind::PoolDestroy),
            (CallKind::EventCreate, CallKind::EventDestroy),
            (CallKind::StreamCreate, CallKind::StreamDestroy),
            (CallKind::CaptureEnd, CallKind::GraphDestroy),
        ];
        let open = pairs.map(|(created, released)| (created, self.count(created).saturating_sub(self.count(released))));
        open.into_iter().filter(|(_, open)| *open > 0).collect()
    }
}

struct Run<'a> {
    allocator: &'a dyn DeviceAllocator,
    live: Vec<(Block, StreamId)>,
    errors: Vec<AllocError>,
}

impl Run<'_> {
    fn allocate(&mut self, bytes: u64, stream: StreamId) {
        match allocate(self.allocator, bytes, stream) {
            Ok(block) => self.live.push((block, stream)),
            Err(error) => self.errors.push(error),
        }
        check_stats(&self.allocator.stats());
    }

    fn free_first(&mut self) {
        if !self.live.is_empty() {
            let (block, stream) = self.live.remove(0);
            self.errors.extend(free(self.allocator, block, stream).err());
        }
        check_stats(&self.allocator.stats());
    }

    fn trim(&mut self, keep: u64) {
        Asked::Trim { keep }.note();
        self.errors.extend(self.allocator.trim(keep).err());
        check_stats(&self.allocator.stats());
    }
}

/// Small and large blocks, uses on another stream, deferred frees, trims, and a full device.
fn plain_workload(rig: &Rig, allocator: &Arc<dyn DeviceAllocator>) -> Vec<AllocError> {
    let (allocator, sim, [owner, user]) = (allocator.as_ref(), rig.sim.as_ref(), rig.streams);
    let mut run = Run { allocator, live: Vec::new(), errors: Vec::new() };
    for bytes in [100, MIB / 2, rig.mib(3), rig.mib(12)] {
        run.allocate(bytes, owner);
        run.allocate(bytes, user);
    }
    work(sim, user, 500_000);
    for index in 0..3 {
        if let Some((block, _)) = run.live.get(index) {
            allocator.record_use(block, user).granted();
        }
    }
    for _ in 0..4 {
        run.free_first();
    }
    run.allocate(100, owner);
    sim.device_synchronize().granted();
    run.allocate(rig.mib(5), owner);
    run.trim(0);
    work(sim, user, 200_000);
    if let Some((block, _)) = run.live.last() {
        allocator.record_use(block, user).granted();
        let (block, stream) = run.live.pop().granted();
        run.errors.extend(free(allocator, block, stream).err());
    }
    // Fills the device, so that every step of the ladder is tried.
    for _ in 0..6 {
        run.allocate(rig.mib(30), owner);
    }
    run.free_first();
    run.allocate(rig.mib(30), user);
    while !run.live.is_empty() {
        run.free_first();
    }
    run.errors
}

/// A graph that allocates blocks, and frees earlier ones, some of them used on another stream.
fn captured_workload(rig: &Rig, allocator: &Arc<dyn DeviceAllocator>) -> Vec<AllocError> {
    let (memory, mut errors) = (Memory::new(Arc::clone(allocator)), Vec::new());
    let [owner, user] = rig.streams;
    for _ in 0..2 {
        let mut note = |buffer: Result<DeviceBuffer, AllocError>| buffer.map_err(|error| errors.push(error)).ok();
        let before = [100, rig.mib(3), rig.mib(12)].map(|bytes| note(memory.allocate(bytes, owner)));
        let elsewhere = note(memory.allocate(rig.mib(2), user));
        work(&rig.sim, user, 300_000);
        let capture = Capture::begin(&memory, &rig.driver, owner);
        let announce = |buffer: &Option<DeviceBuffer>, stream| {
            buffer.iter().for_each(|buffer| buffer.record_use(stream).granted());
        };
        announce(&before[1], user);
        announce(&elsewhere, owner);
        let mut captured: Vec<_> =
            [700, rig.mib(1), rig.mib(5)].map(|bytes| note(memory.allocate(bytes, owner))).into();
        work(&rig.sim, owner, 1_000);
        drop((before, elsewhere));
        captured.truncate(1);
        captured.push(note(memory.allocate(rig.mib(5), owner)));
        // Deferred frees are processed.
        drop(note(memory.allocate(300, user)));
        captured.clear();
        // A second graph in the memory of the first.
        let launched = capture.and_then(|mut capture| {
            capture.cut()?;
            drop(memory.allocate(rig.mib(5), owner)?);
            let mut graph = capture.end()?;
            graph.launch(owner)?;
            graph.launch_nth(1, user)?;
            graph.release()
        });
        errors.extend(launched.err());
        errors.extend(allocator.trim(0).err());
    }
    while let Err(error) = memory.check() {
        errors.push(error);
    }
    errors
}

/// Errors as a failure shows them: their number, and the first.
fn listed(errors: &[AllocError]) -> String {
    errors.first().map_or_else(|| "no error".to_owned(), |first| format!("{} error(s), first: {first}", errors.len()))
}

/// The calls of a run.
type Workload = fn(&Rig, &Arc<dyn DeviceAllocator>) -> Vec<AllocError>;

/// Whether the contract lets a failure of this call pass without an error of the allocator's.
fn may_be_absorbed(can: Capabilities, kind: CallKind, code: u32) -> bool {
    match kind {
        // Only values in a report or in statistics.
        CallKind::MemGetInfo | CallKind::PoolAttribute | CallKind::GraphMemory => true,
        // Repeated after a cache flush.
        CallKind::MemAlloc
        | CallKind::MemAddressReserve
        | CallKind::MemCreate
        | CallKind::MemMap
        | CallKind::MemSetAccess => {
            can.retries && can.segments != SegmentUse::Hidden && code == DriverError::OUT_OF_MEMORY
        }
        CallKind::MemAllocAsync => code == DriverError::OUT_OF_MEMORY,
        // Ordering one stream after another falls back to a wait of the host.
        CallKind::EventCreate | CallKind::EventRecord | CallKind::StreamWaitEvent | CallKind::EventDestroy => {
            can.used_elsewhere == Path::WaitInserted
        }
        _ => false,
    }
}

/// One run in which call number `skip` of `kind` fails; false when there is no such call.
fn inject((selection, scale): (&Selection, u64), work: Workload, kind: CallKind, skip: u64, code: u32) -> bool {
    let rig = Rig::new(scale);
    let what = format!("{kind} number {skip} fails with code {code}");
    rig.faulty.fail(kind, skip, code);
    match selection.build(&rig.driver) {
        Err(error) => {
            let injected = rig.faulty.injected() == 1 && error.to_string().contains("injected fault");
            demand!(injected, came = error, "{what}: building reports the fault, and nothing else");
        }
        Ok(allocator) => {
            let errors = work(&rig, &allocator);
            let hit = rig.faulty.injected() == 1;
            let reported = errors.iter().any(|error| match error {
                AllocError::Driver(error) => error.call == kind && error.code == code,
                _ => false,
            });
            // A refusal for lack of memory is a typed report of its own.
            let ran_out = code == DriverError::OUT_OF_MEMORY && errors.iter().any(AllocError::is_out_of_memory);
            demand!(
                !hit || reported || ran_out || may_be_absorbed(selection.capabilities(), kind, code),
                came = listed(&errors),
                "{what}: the fault is reported"
            );
            // The allocator still works, and everything can be freed. One that keeps its segments may need a trim first.
            if selection.capabilities().keeps_segments {
                let _ = allocator.trim(0);
            }
            for stream in rig.streams {
                rig.sim.device_synchronize().granted();
                let again = allocate(allocator.as_ref(), rig.mib(8), stream);
                if hit {
                    free(allocator.as_ref(), again.granted(), stream).granted();
                } else if let Ok(block) = again {
                    let _ = free(allocator.as_ref(), block, stream);
                }
            }
            Asked::Trim { keep: 0 }.note();
            let trimmed = allocator.trim(0);
            if hit {
                trimmed.granted();
                check_nothing_held(&allocator.stats());
                demand_eq!(
                    allocator.stats().reserved_bytes.all.current,
                    0,
                    "{what}: trim releases all when nothing is held"
                );
                demand!(
                    allocator.snapshot().is_none_or(|snapshot| snapshot.segments.is_empty()),
                    "{what}: no segment is left"
                );
            }
            drop(allocator);
        }
    }
    let hit = rig.faulty.injected() == 1;
    let captured = rig.count(CallKind::CaptureBegin) > 0;
    if hit {
        demand_eq!(free_bytes(rig.sim.as_ref()), rig.room, "{what}: no memory leaks");
        let mut leaks = rig.leaks();
        // An event that the driver refuses to destroy stays.
        leaks.retain(|(made, _)| !(kind == CallKind::EventDestroy && *made == CallKind::EventCreate));
        // Memory that a capture does not free is released with its graph; the device's bytes were checked above.
        leaks.retain(|(made, _)| !(kind == CallKind::MemFreeAsync && *made == CallKind::MemAllocAsync && captured));
        demand_eq!(leaks, [], "{what}: nothing leaks");
    }
    hit
}

/// `fits` says whether the device has room for the whole workload.
fn every_call_fails_once(bench: &Bench, work: Workload, fits: bool) {
    let (selection, scale) = (&bench.selection, bench.scale);
    let rig = Rig::new(scale);
    let allocator = selection.build(&rig.driver).granted();
    let errors = work(&rig, &allocator);
    let rule = if fits { "the device holds the whole workload" } else { "the workload fills the device" };
    demand!(errors.is_empty() == fits, came = listed(&errors), "with {} and no fault {rule}", Bytes(rig.room));
    drop(allocator);
    demand_eq!(rig.leaks(), [], "with no fault nothing leaks");
    let kinds = rig.kinds();
    demand!(kinds.len() >= 3, came = format_args!("{kinds:?}"), "the workload makes at least three kinds of calls");
    for (kind, calls) in kinds {
        for code in [DriverError::OUT_OF_MEMORY, DriverError::ILLEGAL_ADDRESS] {
            // A few more than in a run without faults: a failure can lead to calls that it does not have.
            let hits = (0..calls + 3).filter(|skip| inject((selection, scale), work, kind, *skip, code)).count();
            demand!(
                hits as u64 >= calls,
                came = format_args!("{hits} of {calls} calls"),
                "each call of {kind} is made to fail"
            );
        }
    }
}

pub(super) fn every_driver_call_may_fail_once(bench: &Bench) {
    every_call_fails_once(bench, plain_workload, false);
}

pub(super) fn every_driver_call_may_fail_once_around_a_capture(bench: &Bench) {
    every_call_fails_once(bench, captured_workload, true);
}

pub(super) fn a_fault_while_dropping_leaks_nothing(bench: &Bench) {
    let kinds = [
        CallKind::MemFree,
        CallKind::MemUnmap,
        CallKind::MemRelease,
        CallKind::MemAddressFree,
        CallKind::StreamSynchronize,
        CallKind::EventSynchronize,
        CallKind::EventRecord,
        CallKind::DeviceSynchronize,
        CallKind::PoolDestroy,
    ];
    for (kind, skip) in kinds.into_iter().flat_map(|kind| (0..4).map(move |skip| (kind, skip))) {
        let rig = Rig::new(bench.scale);
        let [owner, user] = rig.streams;
        let allocator = bench.selection.build(&rig.driver).granted();
        let blocks = [100, rig.mib(3), rig.mib(12)].map(|bytes| allocate(allocator.as_ref(), bytes, owner).granted());
        work(&rig.sim, user, 900_000);
        for block in blocks {
            allocator.record_use(&block, user).granted();
            free(allocator.as_ref(), block, owner).granted();
        }
        rig.faulty.fail(kind, skip, DriverError::ILLEGAL_ADDRESS);
        drop(allocator);
        rig.faulty.clear();
        let what = format!("{kind} number {skip} fails in drop");
        demand_eq!(free_bytes(rig.sim.as_ref()), rig.room, "{what}: no memory leaks");
        demand_eq!(rig.leaks(), [], "{what}: nothing leaks");
    }
}
