//! The meter's waiting time of a call, rule by rule, on a device whose calls take a time that the test sets.

use crate::common::{self, GIB, KIB, MIB};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use vramlab_device::Clock;
use vramlab_device::{CallEvent, MemInfo};
use vramlab_device::{
    CallKind, DeviceAddr, DeviceDescription, Driver, DriverError, EventId, GraphDriver, IdleCosts, MeteredDriver,
    NullDriver, PoolDriver, Profile, SimDriver, StreamId, VmmDriver, sim::SimMemory,
};

type DriverResult<T> = Result<T, DriverError>;

#[derive(Debug, Default)]
struct Script {
    now_ns: AtomicU64,
    /// How long the next call takes.
    takes_ns: AtomicU64,
    /// How much of it the device says was waited for.
    waits_ns: AtomicU64,
    waited_ns: AtomicU64,
    /// Where the next allocation lies; zero: there is no memory.
    addr: AtomicU64,
}

impl Clock for Script {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(SeqCst)
    }
}

impl Script {
    fn pass(&self) {
        self.now_ns.fetch_add(self.takes_ns.swap(0, SeqCst), SeqCst);
        self.waited_ns.fetch_add(self.waits_ns.swap(0, SeqCst), SeqCst);
    }
}

/// A device that does what the script says, and otherwise nothing.
#[derive(Debug)]
struct Scripted {
    script: Arc<Script>,
    /// Whether it knows how long it was waited for.
    tells: bool,
    null: NullDriver,
}

impl Scripted {
    fn done<T>(&self, answer: T) -> T {
        self.script.pass();
        answer
    }
}

// SAFETY: addresses are what the script says, no work uses them, and the null device has no memory.
unsafe impl Driver for Scripted {
    fn describe(&self) -> DeviceDescription {
        self.null.describe()
    }
    fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.script) as _
    }
    fn blocked_ns(&self) -> Option<u64> {
        self.tells.then(|| self.script.waited_ns.load(SeqCst))
    }
    fn mem_info(&self) -> DriverResult<MemInfo> {
        self.done(self.null.mem_info())
    }
    fn mem_alloc(&self, _bytes: u64) -> DriverResult<DeviceAddr> {
        let addr = DeviceAddr::new(self.script.addr.load(SeqCst));
        self.done(addr.ok_or_else(|| DriverError::new(CallKind::MemAlloc, DriverError::OUT_OF_MEMORY, "")))
    }
    unsafe fn mem_free(&self, _addr: DeviceAddr) -> DriverResult<()> {
        self.done(Ok(()))
    }
    fn stream_create(&self) -> DriverResult<StreamId> {
        self.done(Ok(STREAM))
    }
    unsafe fn stream_destroy(&self, _stream: StreamId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    unsafe fn stream_adopt(&self, _handle: u64) -> DriverResult<StreamId> {
        Ok(STREAM)
    }
    fn stream_forget(&self, _stream: StreamId) -> DriverResult<()> {
        Ok(())
    }
    fn note_capture(&self, open: bool) {
        self.null.note_capture(open);
    }
    fn is_capture_noted(&self) -> bool {
        self.null.is_capture_noted()
    }
    fn stream_synchronize(&self, _stream: StreamId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    fn stream_wait_event(&self, _stream: StreamId, _event: EventId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    fn stream_is_capturing(&self, _stream: StreamId) -> DriverResult<bool> {
        self.done(Ok(false))
    }
    fn device_synchronize(&self) -> DriverResult<()> {
        self.done(Ok(()))
    }
    fn event_create(&self, _timing: bool) -> DriverResult<EventId> {
        self.done(Ok(EVENT))
    }
    unsafe fn event_destroy(&self, _event: EventId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    fn event_record(&self, _event: EventId, _stream: StreamId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    fn event_query(&self, _event: EventId) -> DriverResult<bool> {
        self.done(Ok(true))
    }
    fn event_synchronize(&self, _event: EventId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    fn event_elapsed_ns(&self, _start: EventId, _end: EventId) -> DriverResult<u64> {
        self.done(Ok(0))
    }
    fn host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        self.null.host_alloc(bytes)
    }
    unsafe fn host_free(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.null.host_free(ptr, bytes) }
    }
    unsafe fn host_register(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.null.host_register(ptr, bytes) }
    }
    unsafe fn host_unregister(&self, ptr: NonNull<u8>) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.null.host_unregister(ptr) }
    }
    unsafe fn copy_to_host_async(
        &self,
        _dst: NonNull<u8>,
        _src: DeviceAddr,
        _bytes: usize,
        _stream: StreamId,
    ) -> DriverResult<()> {
        self.done(Ok(()))
    }
    unsafe fn copy_to_device(&self, _dst: DeviceAddr, _src: &[u8], _stream: StreamId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    unsafe fn copy_to_device_async(
        &self,
        _dst: DeviceAddr,
        _src: NonNull<u8>,
        _bytes: usize,
        _stream: StreamId,
    ) -> DriverResult<()> {
        self.done(Ok(()))
    }
    unsafe fn copy_to_host(&self, _dst: &mut [u8], _src: DeviceAddr, _stream: StreamId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    unsafe fn fill_bytes(&self, _dst: DeviceAddr, _value: u8, _bytes: u64, _stream: StreamId) -> DriverResult<()> {
        self.done(Ok(()))
    }
    fn pools(&self) -> Option<&dyn PoolDriver> {
        None
    }
    fn vmm(&self) -> Option<&dyn VmmDriver> {
        None
    }
    fn graphs(&self) -> Option<&dyn GraphDriver> {
        None
    }
}

/// The costs that tests compare with.
fn idle() -> IdleCosts {
    IdleCosts {
        mem_alloc: vec![(2 * MIB, 30_000), (32 * MIB, 40_000)],
        mem_alloc_in_page: 1_000,
        mem_free: vec![(2 * MIB, 32_000), (32 * MIB, 44_000)],
        mem_free_in_page: 1_200,
        stream_synchronize: 400,
        device_synchronize: 500,
        kernel_launch: 3_000,
    }
}

struct Bench {
    script: Arc<Script>,
    metered: MeteredDriver,
    events: Arc<Mutex<Vec<CallEvent>>>,
}

const STREAM: StreamId = common::stream(1);
// SAFETY: the scripted device checks no events.
const EVENT: EventId = unsafe { EventId::from_raw(1) };
const BASE: u64 = 1 << 40;

impl Bench {
    fn new(tells: bool, idle: Option<IdleCosts>) -> Self {
        let script = Arc::new(Script::default());
        let scripted = Scripted { script: Arc::clone(&script), tells, null: NullDriver::new(GIB) };
        let events = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&events);
        let observer = Box::new(move |event: &CallEvent| log.lock().unwrap().push(*event));
        Self { script, metered: MeteredDriver::new(Arc::new(scripted), idle, Some(observer)), events }
    }

    /// A device that does not tell how long it was waited for.
    fn silent() -> Self {
        Self::new(false, Some(idle()))
    }

    /// The meter's waiting time of a call that takes `ns`.
    fn blocked<T>(&self, ns: u64, call: impl FnOnce(&MeteredDriver) -> T) -> u64 {
        self.script.takes_ns.store(ns, SeqCst);
        let before = self.events.lock().unwrap().len();
        call(&self.metered);
        let events = self.events.lock().unwrap();
        assert_eq!(events.len(), before + 1, "one call is one event");
        assert_eq!(events[before].total_ns, ns);
        events[before].blocked_ns
    }

    /// An allocation at an offset in bytes that takes `ns`.
    fn alloc(&self, offset: u64, bytes: u64, ns: u64) -> u64 {
        self.script.addr.store(BASE + offset, SeqCst);
        self.blocked(ns, |driver| driver.mem_alloc(bytes).unwrap())
    }

    fn free(&self, offset: u64, ns: u64) -> u64 {
        let addr = DeviceAddr::new(BASE + offset).unwrap();
        // SAFETY: the device has no memory.
        self.blocked(ns, |driver| unsafe { driver.mem_free(addr) }.unwrap())
    }
}

#[test]
fn call_waits_if_half_as_long_again_plus_two_microseconds() {
    let bench = Bench::silent();
    // 1.5 * 30 us + 2 us.
    assert_eq!(bench.alloc(0, 2 * MIB, 30_000), 0);
    assert_eq!(bench.alloc(2 * MIB, 2 * MIB, 47_000), 0, "the scatter of an idle device");
    assert_eq!(bench.alloc(4 * MIB, 2 * MIB, 47_001), 17_001, "all beyond the idle cost counts");
    // 1.5 * 32 us + 2 us.
    assert_eq!(bench.free(0, 50_000), 0);
    assert_eq!(bench.free(2 * MIB, 50_001), 18_001);
    assert_eq!(bench.free(4 * MIB, 1_000_000), 968_000);
}

#[test]
fn an_allocation_in_a_page_that_is_held_is_a_cheap_one() {
    let bench = Bench::silent();
    assert_eq!(bench.alloc(0, KIB, 31_000), 0, "it takes the page");
    assert_eq!(bench.alloc(KIB, KIB, 3_500), 0, "1.5 * 1 us + 2 us");
    assert_eq!(bench.alloc(2 * KIB, KIB, 3_501), 2_501);
    assert_eq!(bench.alloc(3 * KIB, KIB, 31_000), 30_000, "no page was to be taken, so it waited");
    assert_eq!(bench.alloc(2 * MIB, KIB, 31_000), 0, "the next page is new");
}

#[test]
fn a_page_goes_back_with_its_last_block() {
    let bench = Bench::silent();
    bench.alloc(0, KIB, 0);
    bench.alloc(KIB, KIB, 0);
    assert_eq!(bench.free(0, 33_000), 31_800, "the page stays, so it waited");
    assert_eq!(bench.free(KIB, 33_000), 0, "the page went");
    assert_eq!(bench.alloc(0, KIB, 31_000), 0, "and has to be taken again");
}

#[test]
fn a_block_that_spans_pages_holds_each_of_them() {
    let bench = Bench::silent();
    bench.alloc(0, 3 * MIB, 0);
    assert_eq!(bench.alloc(3 * MIB, MIB, 31_000), 30_000, "its second page is held");
    assert_eq!(bench.alloc(4 * MIB - KIB, 2 * KIB, 31_000), 0, "one of two pages is new");
    assert_eq!(bench.free(0, 33_000), 0, "its first page goes");
    assert_eq!(bench.free(3 * MIB, 33_000), 31_800);
    assert_eq!(bench.free(4 * MIB - KIB, 33_000), 0);
    // Right up to the end of a page, and not into the next.
    bench.alloc(8 * MIB, 2 * MIB, 0);
    assert_eq!(bench.alloc(10 * MIB, KIB, 31_000), 0);
}

#[test]
fn cost_of_a_size_is_that_of_the_next_measured_one() {
    let bench = Bench::silent();
    for (number, (bytes, cost)) in
        [(2 * MIB, 30_000), (2 * MIB + 1, 40_000), (32 * MIB, 40_000), (300 * MIB, 40_000)].into_iter().enumerate()
    {
        let limit = cost + cost / 2 + 2_000;
        let at = number as u64 * GIB;
        assert_eq!(bench.alloc(at, bytes, limit), 0, "{bytes}");
        assert_eq!(bench.alloc(at + GIB / 2, bytes, limit + 1), limit + 1 - cost, "{bytes}");
        let cost = if bytes > 2 * MIB { 44_000 } else { 32_000 };
        let limit = cost + cost / 2 + 2_000;
        assert_eq!(bench.free(at, limit), 0, "{bytes}");
        assert_eq!(bench.free(at + GIB / 2, limit + 1), limit + 1 - cost, "{bytes}");
    }
}

#[test]
fn a_synchronise_waits_for_what_exceeds_its_idle_cost() {
    let bench = Bench::silent();
    for (takes, waits) in [(300, 0), (400, 0), (401, 1), (10_400, 10_000)] {
        assert_eq!(bench.blocked(takes, |driver| driver.stream_synchronize(STREAM)), waits);
        assert_eq!(bench.blocked(takes, |driver| driver.event_synchronize(EVENT)), waits);
        assert_eq!(bench.blocked(takes + 100, |driver| driver.device_synchronize()), waits);
    }
}

#[test]
fn calls_that_only_queue_never_wait() {
    let bench = Bench::silent();
    let addr = DeviceAddr::new(BASE).unwrap();
    assert_eq!(bench.blocked(1_000_000, |driver| driver.event_query(EVENT)), 0);
    assert_eq!(bench.blocked(1_000_000, |driver| driver.event_record(EVENT, STREAM)), 0);
    assert_eq!(bench.blocked(1_000_000, |driver| driver.stream_wait_event(STREAM, EVENT)), 0);
    assert_eq!(bench.blocked(1_000_000, |driver| driver.mem_info()), 0);
    // SAFETY: the device has no memory.
    assert_eq!(bench.blocked(1_000_000, |driver| unsafe { driver.fill_bytes(addr, 0, 1, STREAM) }), 0);
}

#[test]
fn launch_waits_if_a_third_longer_plus_half_a_microsecond() {
    let bench = Bench::silent();
    let launch = |ns| {
        bench.blocked(ns, |driver| {
            driver.count(CallKind::KernelLaunch, STREAM, || {
                bench.script.pass();
                Ok::<(), DriverError>(())
            })
        })
    };
    assert_eq!((launch(3_000), launch(4_500)), (0, 0));
    assert_eq!(launch(4_501), 1_501);
    assert_eq!(launch(40_000), 37_000, "the queue was full");
    let totals = bench.metered.counts();
    let totals = totals.get(CallKind::KernelLaunch);
    assert_eq!((totals.count, totals.total_ns, totals.blocked_ns), (4, 52_001, 38_501));
}

#[test]
fn what_failed_holds_no_page() {
    let bench = Bench::silent();
    bench.script.addr.store(0, SeqCst);
    assert_eq!(bench.blocked(90_000, |driver| driver.mem_alloc(KIB).unwrap_err()), 0);
    assert_eq!(bench.alloc(0, KIB, 31_000), 0);
    let events = bench.events.lock().unwrap();
    assert_eq!((events[0].ok, events[0].addr, events[1].ok), (false, None, true));
}

#[test]
fn a_free_is_told_with_the_size_of_its_block() {
    let bench = Bench::silent();
    bench.alloc(0, 5 * KIB, 0);
    bench.free(0, 0);
    let events = bench.events.lock().unwrap();
    assert_eq!((events[0].bytes, events[1].bytes), (5 * KIB, 5 * KIB));
    assert_eq!(events[1].addr, DeviceAddr::new(BASE));
}

#[test]
fn a_device_that_tells_is_believed() {
    // Also where the idle costs would say something else.
    for idle in [None, Some(idle())] {
        let bench = Bench::new(true, idle);
        bench.script.waits_ns.store(700, SeqCst);
        assert_eq!(bench.blocked(1_000, |driver| driver.event_query(EVENT)), 700);
        assert_eq!(bench.blocked(1_000_000, |driver| driver.stream_synchronize(STREAM)), 0);
        bench.script.waits_ns.store(9, SeqCst);
        let launch = || {
            bench.script.pass();
            Ok::<(), DriverError>(())
        };
        assert_eq!(bench.blocked(50, |driver| driver.count(CallKind::KernelLaunch, STREAM, launch)), 9);
    }
}

#[test]
fn without_idle_costs_a_silent_device_is_not_guessed_about() {
    let bench = Bench::new(false, None);
    assert_eq!(bench.alloc(0, 2 * MIB, 1_000_000), 0);
    assert_eq!(bench.blocked(1_000_000, |driver| driver.device_synchronize()), 0);
}

#[test]
fn idle_costs_are_what_calls_cost() {
    let profile = Profile::h200();
    let sim = SimDriver::new(profile.clone(), SimMemory::None);
    let stream = sim.stream_create().unwrap();
    let costs = IdleCosts::measure(&sim, stream).unwrap();
    let sizes = [2 * MIB, 32 * MIB, 256 * MIB];
    assert_eq!(costs.mem_alloc, sizes.map(|bytes| (bytes, profile.plain.alloc_ns.at(bytes))));
    assert_eq!(costs.mem_free, sizes.map(|bytes| (bytes, profile.plain.free_ns.at(bytes))));
    assert_eq!(costs.mem_alloc_in_page, profile.plain.alloc_in_page_ns);
    assert_eq!(costs.mem_free_in_page, profile.plain.free_in_page_ns);
    assert_eq!(costs.stream_synchronize, profile.queues.stream_synchronize_ns);
    assert_eq!(costs.device_synchronize, profile.queues.device_synchronize_ns);
    assert_eq!(costs.kernel_launch, 0, "set by whoever can launch");
    assert_eq!(common::free_bytes(&sim), profile.total_bytes - profile.context_bytes, "nothing is kept");
    // Of work that is under way nothing is left when the first call is timed.
    common::work(&sim, stream, 50_000_000);
    assert_eq!(IdleCosts::measure(&sim, stream).unwrap(), costs);
}

#[test]
fn a_small_device_is_measured_at_the_sizes_that_it_has_room_for() {
    let sim = common::sim(64 * MIB, SimMemory::None);
    let stream = sim.stream_create().unwrap();
    let costs = IdleCosts::measure(sim.as_ref(), stream).unwrap();
    assert_eq!(costs.mem_alloc.iter().map(|(bytes, _)| *bytes).collect::<Vec<_>>(), [2 * MIB, 32 * MIB]);
    assert_eq!(costs.mem_free.len(), 2);
}
