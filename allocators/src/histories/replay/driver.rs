//! The device of a replay: events complete where the history says so, and segments come at recorded addresses.

use super::op::{BY_DEVICE, NEVER};
use super::windows::SegmentEvent;
use crate::device::Clock;
use crate::device::DriverError;
use crate::device::{
    CallKind, DeviceAddr, DeviceDescription, Driver, DriverResult, EventId, MemInfo, PoolDriver, StreamId, VmmDriver,
};
use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Segments start at multiples of this where the history has no address for them.
const PAGE: u64 = 2 << 20;

/// Wraps the device on which a history is replayed.
#[derive(Debug)]
pub(super) struct ReplayDriver {
    inner: Arc<dyn Driver>,
    /// The operation that is being replayed.
    position: AtomicU32,
    /// At which operation events that are recorded now will have completed.
    releasing: AtomicU32,
    /// Recorded events that complete by the history: first operation at which they have.
    events: Mutex<HashMap<EventId, u32>>,
    segments: Option<Mutex<Segments>>,
}

/// Recorded segments and what became of them.
#[derive(Debug)]
struct Segments {
    recorded: Vec<SegmentEvent>,
    /// The next one that the backend has to make or release.
    next: usize,
    mismatches: u64,
    /// Segments that are out: by the address that was handed out, bytes and the device's own address.
    held: BTreeMap<u64, (u64, DeviceAddr)>,
    /// The next address for a segment that the history does not have.
    fresh: u64,
    /// The operation in which the device was made to refuse.
    refused_in: Option<u32>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Segments {
    fn new(recorded: Vec<SegmentEvent>) -> Self {
        let end = recorded.iter().map(|segment| segment.addr + segment.bytes).max().unwrap_or(0);
        Self {
            recorded,
            next: 0,
            mismatches: 0,
            held: BTreeMap::new(),
            fresh: end.next_multiple_of(PAGE).max(PAGE),
            refused_in: None,
        }
    }

    /// The recorded event that is due inside operation `op`. Those of earlier operations never happened.
    fn due(&mut self, op: u32) -> Option<SegmentEvent> {
        while self.recorded.get(self.next).is_some_and(|segment| segment.op < op) {
            self.next += 1;
            self.mismatches += 1;
        }
        self.recorded.get(self.next).filter(|segment| segment.op == op).copied()
    }

    /// Whether a segment is out at the addresses of a recorded one, because the backend kept what the history released.
    fn overlaps(&self, due: SegmentEvent) -> bool {
        let below = self.held.range(..due.addr + due.bytes).next_back();
        below.is_some_and(|(start, (bytes, _))| start + bytes > due.addr)
    }

    fn mem_alloc(&mut self, inner: &dyn Driver, op: u32, bytes: u64) -> DriverResult<DeviceAddr> {
        let due = self.due(op);
        if due.is_some_and(|due| due.released && due.refused) && self.refused_in != Some(op) {
            self.refused_in = Some(op);
            return Err(DriverError::new(CallKind::MemAlloc, DriverError::OUT_OF_MEMORY, "as in the history"));
        }
        let own = inner.mem_alloc(bytes)?;
        let addr = match due {
            Some(due) if !due.released && due.bytes == bytes && !self.overlaps(due) => {
                self.next += 1;
                due.addr
            }
            due => {
                self.mismatches += 1;
                self.next += usize::from(due.is_some_and(|due| !due.released));
                let addr = self.fresh;
                self.fresh = addr.saturating_add(bytes.next_multiple_of(PAGE));
                addr
            }
        };
        self.held.insert(addr, (bytes, own));
        Ok(DeviceAddr::new(addr).expect("recorded segments do not start at zero"))
    }

    fn mem_free(&mut self, inner: &dyn Driver, op: u32, addr: DeviceAddr) -> DriverResult<()> {
        let Some(&(_, own)) = self.held.get(&addr.get()) else {
            let text = format!("no segment at {:#x}", addr.get());
            return Err(DriverError::new(CallKind::MemFree, DriverError::INVALID_VALUE, text));
        };
        // SAFETY: the device handed this address out for the segment, which is freed once: it is removed below.
        unsafe { inner.mem_free(own) }?;
        self.held.remove(&addr.get());
        self.refused_in = None;
        match self.due(op) {
            Some(due) if due.released && due.addr == addr.get() => self.next += 1,
            due => {
                self.mismatches += 1;
                self.next += usize::from(due.is_some_and(|due| due.released));
            }
        }
        Ok(())
    }

    /// The device's own address for one that was handed out.
    fn own(&self, addr: DeviceAddr) -> DeviceAddr {
        let found = self.held.range(..=addr.get()).next_back();
        match found {
            Some((start, (bytes, own))) if addr.get() < start + bytes => own.offset(addr.get() - start),
            _ => addr,
        }
    }
}

impl ReplayDriver {
    /// Wraps `inner`; with `recorded`, segments come at those addresses.
    pub(super) fn new(inner: Arc<dyn Driver>, recorded: Option<Vec<SegmentEvent>>) -> Self {
        Self {
            inner,
            position: AtomicU32::new(0),
            releasing: AtomicU32::new(BY_DEVICE),
            events: Mutex::default(),
            segments: recorded.map(|recorded| Mutex::new(Segments::new(recorded))),
        }
    }

    /// Ends what comes before the first event, in which `segments` were to be made: differences count from here.
    pub(super) fn begin(&self, segments: usize) {
        if let Some(recorded) = &self.segments {
            let mut recorded = lock(recorded);
            (recorded.next, recorded.mismatches) = (segments, 0);
        }
    }

    /// Says which operation comes now. Costs a store.
    pub(super) fn at(&self, op: u32) {
        self.position.store(op, Relaxed);
    }

    /// Says when events complete that are recorded from now on.
    pub(super) fn releasing(&self, ready: u32) {
        self.releasing.store(ready, Relaxed);
    }

    /// Segment events that differ from the recorded ones, those that never happened included.
    pub(super) fn segment_mismatches(&self) -> Option<u64> {
        self.segments.as_ref().map(|segments| {
            let segments = lock(segments);
            segments.mismatches + (segments.recorded.len() - segments.next) as u64
        })
    }

    fn own(&self, addr: DeviceAddr) -> DeviceAddr {
        self.segments.as_ref().map_or(addr, |segments| lock(segments).own(addr))
    }
}

// SAFETY (for every unsafe call below): the contract of each method here is that of the inner device's method of the
// same name, and addresses are the device's own for those that were handed out, so the caller's promise is passed on.
impl Driver for ReplayDriver {
    fn describe(&self) -> DeviceDescription {
        self.inner.describe()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.inner.clock()
    }

    fn blocked_ns(&self) -> Option<u64> {
        self.inner.blocked_ns()
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        self.inner.mem_info()
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        match &self.segments {
            Some(segments) => lock(segments).mem_alloc(self.inner.as_ref(), self.position.load(Relaxed), bytes),
            None => self.inner.mem_alloc(bytes),
        }
    }

    unsafe fn mem_free(&self, addr: DeviceAddr) -> DriverResult<()> {
        match &self.segments {
            Some(segments) => lock(segments).mem_free(self.inner.as_ref(), self.position.load(Relaxed), addr),
            // SAFETY: passed on.
            None => unsafe { self.inner.mem_free(addr) },
        }
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        self.inner.stream_create()
    }

    unsafe fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.inner.stream_destroy(stream) }
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        self.inner.stream_synchronize(stream)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.inner.stream_wait_event(stream, event)
    }

    fn stream_is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        self.inner.stream_is_capturing(stream)
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        self.inner.device_synchronize()
    }

    fn event_create(&self, timing: bool) -> DriverResult<EventId> {
        self.inner.event_create(timing)
    }

    unsafe fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        lock(&self.events).remove(&event);
        // SAFETY: passed on.
        unsafe { self.inner.event_destroy(event) }
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.inner.event_record(event, stream)?;
        match self.releasing.load(Relaxed) {
            BY_DEVICE => lock(&self.events).remove(&event),
            ready => lock(&self.events).insert(event, ready),
        };
        Ok(())
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let done = self.inner.event_query(event)?;
        match lock(&self.events).get(&event).copied() {
            None => Ok(done),
            Some(NEVER) => Ok(false),
            Some(ready) if self.position.load(Relaxed) < ready => Ok(false),
            // The history is ahead of the device.
            Some(_) if !done => self.inner.event_synchronize(event).map(|()| true),
            Some(_) => Ok(true),
        }
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        self.inner.event_synchronize(event)?;
        lock(&self.events).remove(&event);
        Ok(())
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> DriverResult<u64> {
        self.inner.event_elapsed_ns(start, end)
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        self.inner.host_alloc(bytes)
    }

    unsafe fn host_free(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.inner.host_free(ptr, bytes) }
    }

    unsafe fn copy_to_device(&self, dst: DeviceAddr, src: &[u8], stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.inner.copy_to_device(self.own(dst), src, stream) }
    }

    unsafe fn copy_to_device_async(
        &self,
        dst: DeviceAddr,
        src: NonNull<u8>,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.inner.copy_to_device_async(self.own(dst), src, bytes, stream) }
    }

    unsafe fn copy_to_host(&self, dst: &mut [u8], src: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.inner.copy_to_host(dst, self.own(src), stream) }
    }

    unsafe fn fill_bytes(&self, dst: DeviceAddr, value: u8, bytes: u64, stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        unsafe { self.inner.fill_bytes(self.own(dst), value, bytes, stream) }
    }

    fn pools(&self) -> Option<&dyn PoolDriver> {
        self.inner.pools()
    }

    fn vmm(&self) -> Option<&dyn VmmDriver> {
        self.inner.vmm()
    }
}
