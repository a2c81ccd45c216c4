//! The device of a replay: events complete as recorded, and segments have recorded addresses.

use super::near::{AllocatedRanges, Near};
use crate::history::{BY_DEVICE, NEVER, SegmentEvent};
use crate::steps;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab_device::{
    CallArguments, CallKind, CallOutcome, DeviceAddr, Driver, DriverError, DriverResult, EventId, Hook, HookedDriver,
    VmmDriver,
};

/// Alignment of segments without a recorded address.
const PAGE: u64 = 2 << 20;

/// Wraps the device of a replay.
pub(super) type ReplayDriver = HookedDriver<Replaying>;

/// Progress of a replay, and its events and segments.
#[derive(Debug)]
pub(super) struct Replaying {
    /// The current operation.
    position: AtomicU32,
    /// Operation at which events that are recorded now will have completed.
    releasing: AtomicU32,
    /// Recorded events that complete as in the recording, with the first operation at which they have.
    events: Mutex<HashMap<EventId, u32>>,
    segments: Option<Mutex<Segments>>,
    near: Option<Mutex<Near>>,
}

/// Recorded segments and their replay.
#[derive(Debug)]
struct Segments {
    recorded: Vec<SegmentEvent>,
    /// The next one that the backend has to allocate or release.
    next: usize,
    mismatches: u64,
    /// Allocated segments.
    allocated: AllocatedRanges,
    /// Reserved ranges of addresses.
    ranges: AllocatedRanges,
    /// The next address for a segment that is not recorded.
    fresh: u64,
    /// Unmapped bytes of the range that is due, and the end of one that was not due.
    unmapped: u64,
    strange_end: u64,
    /// The operation in which the device was made to refuse.
    refused_in: Option<u32>,
    /// The operation whose request failed: in it the recorded device allocated no more than recorded.
    refused_op: Option<u32>,
    /// Whether segments must be in this order, regardless of the operation.
    anytime: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The error of a device that is made to refuse.
fn refused(call: CallKind) -> DriverError {
    DriverError::new(call, DriverError::OUT_OF_MEMORY, "as in the recording")
}

impl Segments {
    fn new(recorded: Vec<SegmentEvent>) -> Self {
        let end = recorded.iter().map(|segment| segment.addr + segment.bytes).max().unwrap_or(0);
        Self {
            recorded,
            next: 0,
            mismatches: 0,
            allocated: AllocatedRanges::default(),
            ranges: AllocatedRanges::default(),
            unmapped: 0,
            strange_end: 0,
            fresh: end.next_multiple_of(PAGE).max(PAGE),
            refused_in: None,
            refused_op: None,
            anytime: false,
        }
    }

    /// The recorded event that is due in operation `op`. Overdue ones of earlier operations are skipped.
    fn due(&mut self, op: u32) -> Option<SegmentEvent> {
        if self.anytime {
            return self.recorded.get(self.next).copied();
        }
        while self.recorded.get(self.next).is_some_and(|segment| segment.op < op) {
            steps::count(1);
            self.next += 1;
            self.mismatches += 1;
            self.unmapped = 0;
        }
        self.recorded.get(self.next).filter(|segment| segment.op == op).copied()
    }

    /// Whether the recorded device refused memory here.
    fn refuses(&mut self, op: u32) -> bool {
        let due = self.due(op);
        if self.refused_op == Some(op) {
            return due.is_none_or(|due| due.released);
        }
        let refuses = due.is_some_and(|due| due.released && due.refused) && self.refused_in != Some(op);
        if refuses {
            self.refused_in = Some(op);
        }
        refuses
    }

    /// The backend allocated or released something else than recorded. It counts as the due event if it is of the same kind.
    fn differs(&mut self, due: Option<SegmentEvent>, released: bool) {
        self.mismatches += 1;
        self.next += usize::from(due.is_some_and(|due| due.released == released));
    }

    fn mem_alloc(&mut self, inner: &dyn Driver, op: u32, bytes: u64) -> DriverResult<DeviceAddr> {
        if self.refuses(op) {
            return Err(refused(CallKind::MemAlloc));
        }
        let due = self.due(op);
        let inner_block = inner.mem_alloc(bytes)?;
        let addr = match due {
            Some(due)
                if !due.released
                    && due.part.is_none()
                    && due.bytes == bytes
                    && self.allocated.is_free(due.addr, due.bytes) =>
            {
                self.next += 1;
                due.addr
            }
            due => {
                self.differs(due, false);
                self.fresh(bytes)
            }
        };
        self.allocated.add(addr, bytes, inner_block);
        Ok(DeviceAddr::new(addr).expect("recorded segments do not start at zero"))
    }

    fn mem_free(&mut self, inner: &dyn Driver, op: u32, addr: DeviceAddr) -> DriverResult<()> {
        self.allocated.mem_free(inner, addr)?;
        self.refused_in = None;
        match self.due(op) {
            Some(due) if due.released && due.addr == addr.get() => self.next += 1,
            due => self.differs(due, true),
        }
        Ok(())
    }

    /// A range of addresses. It starts at the first range that the recording maps in it.
    fn address_reserve(&mut self, inner: &dyn VmmDriver, op: u32, bytes: u64) -> DriverResult<DeviceAddr> {
        let inner_block = inner.address_reserve(bytes)?;
        self.due(op);
        let now = self.recorded[self.next..].iter().take_while(|event| event.op == op);
        let mut first = now.filter(|event| !event.released && event.part.is_some()).map(|event| event.addr);
        let known = first.find(|addr| self.ranges.get(*addr).is_none());
        let addr = known.unwrap_or_else(|| self.fresh(bytes));
        self.ranges.add(addr, bytes, inner_block);
        Ok(DeviceAddr::new(addr).expect("recorded parts do not start at zero"))
    }

    fn address_free(&mut self, inner: &dyn VmmDriver, addr: DeviceAddr) -> DriverResult<()> {
        let Some((bytes, inner_block)) = self.ranges.get(addr.get()) else {
            let text = format!("no reserved range at {:#x}", addr.get());
            return Err(DriverError::new(CallKind::MemAddressFree, DriverError::INVALID_VALUE, text));
        };
        // SAFETY: the device returned this address for the range. The caller promises that nothing is mapped in it, and it is
        // freed once: it is removed below.
        unsafe { inner.address_free(inner_block, bytes) }?;
        self.ranges.remove(addr);
        Ok(())
    }

    /// A range was mapped: access is set once for all of it.
    fn part_mapped(&mut self, op: u32, addr: u64, bytes: u64) {
        match self.due(op) {
            Some(due) if !due.released && (due.addr, due.bytes) == (addr, bytes) => self.next += 1,
            due => self.differs(due, false),
        }
    }

    /// One handle of a range was unmapped.
    fn handle_unmapped(&mut self, op: u32, addr: u64, bytes: u64) {
        self.refused_in = None;
        match self.due(op) {
            Some(due) if due.released && addr == due.addr + self.unmapped && self.unmapped + bytes <= due.bytes => {
                self.unmapped += bytes;
                if self.unmapped == due.bytes {
                    (self.next, self.unmapped) = (self.next + 1, 0);
                }
            }
            due => {
                if addr != self.strange_end {
                    self.differs(due, true);
                }
                (self.strange_end, self.unmapped) = (addr + bytes, 0);
            }
        }
    }

    /// The inner device's address for a returned one.
    fn inner_addr(&self, addr: DeviceAddr) -> DeviceAddr {
        self.allocated.inner_addr(addr).or_else(|| self.ranges.inner_addr(addr)).unwrap_or(addr)
    }

    /// An address for a segment that is not recorded.
    fn fresh(&mut self, bytes: u64) -> u64 {
        let addr = self.fresh;
        self.fresh = addr.saturating_add(bytes.next_multiple_of(PAGE));
        addr
    }
}

impl Replaying {
    /// With `recorded`, segments get those addresses.
    pub(super) fn new(recorded: Option<Vec<SegmentEvent>>) -> Self {
        Self {
            position: AtomicU32::new(0),
            releasing: AtomicU32::new(BY_DEVICE),
            events: Mutex::default(),
            segments: recorded.map(|recorded| Mutex::new(Segments::new(recorded))),
            near: None,
        }
    }

    /// Segments get addresses near these.
    pub(super) fn near(segments: impl Iterator<Item = SegmentEvent>) -> Self {
        Self { near: Some(Mutex::new(Near::new(segments))), ..Self::new(None) }
    }

    /// Segments get the addresses of these, in order.
    pub(super) fn in_order(segments: Vec<SegmentEvent>) -> Self {
        let segments = Segments { anytime: true, ..Segments::new(segments) };
        Self { segments: Some(Mutex::new(segments)), ..Self::new(None) }
    }

    /// Ends the setup of `segments` from before the first event; differences count from here.
    pub(super) fn begin(&self, segments: usize) {
        if let Some(recorded) = &self.segments {
            let mut recorded = lock(recorded);
            (recorded.next, recorded.mismatches) = (segments, 0);
        }
    }

    /// Sets the current operation. Costs a store.
    pub(super) fn at(&self, op: u32) {
        self.position.store(op, Relaxed);
    }

    /// Marks the next operation's request as failed in the recording.
    pub(super) fn at_refused(&self, op: u32) {
        self.at(op);
        if let Some(segments) = &self.segments {
            lock(segments).refused_op = Some(op);
        }
    }

    /// Sets when events complete that are recorded from now on.
    pub(super) fn releasing(&self, ready: u32) {
        self.releasing.store(ready, Relaxed);
    }

    /// Segment events that differ from the recorded ones, missing ones included.
    pub(super) fn segment_mismatches(&self) -> Option<u64> {
        self.segments.as_ref().map(|segments| {
            let segments = lock(segments);
            segments.mismatches + (segments.recorded.len() - segments.next) as u64
        })
    }
}

// SAFETY: returned addresses stand for segments and ranges of the inner device, which `own_addr`, `mem_free` and `address_free`
// translate; the replay never reports an event earlier than the inner device.
unsafe impl Hook for Replaying {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments) -> DriverResult<()> {
        if kind == CallKind::MemCreate
            && let Some(segments) = &self.segments
            && lock(segments).refuses(self.position.load(Relaxed))
        {
            return Err(refused(kind));
        }
        if kind == CallKind::EventDestroy
            && let Some(event) = arguments.event
        {
            lock(&self.events).remove(&event);
        }
        Ok(())
    }

    fn after(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments, (): (), outcome: CallOutcome) {
        if !outcome.ok {
            return;
        }
        if let (Some(segments), Some(addr)) = (&self.segments, arguments.addr) {
            let op = self.position.load(Relaxed);
            match kind {
                CallKind::MemUnmap => lock(segments).handle_unmapped(op, addr.get(), arguments.bytes),
                CallKind::MemSetAccess => lock(segments).part_mapped(op, addr.get(), arguments.bytes),
                _ => {}
            }
        }
        let Some(event) = arguments.event else { return };
        match (kind, self.releasing.load(Relaxed)) {
            (CallKind::EventRecord, BY_DEVICE) | (CallKind::EventSynchronize, _) => {
                lock(&self.events).remove(&event);
            }
            (CallKind::EventRecord, ready) => {
                lock(&self.events).insert(event, ready);
            }
            _ => {}
        }
    }

    fn mem_alloc(&self, inner: &dyn Driver, bytes: u64) -> DriverResult<DeviceAddr> {
        match (&self.segments, &self.near) {
            (Some(segments), _) => lock(segments).mem_alloc(inner, self.position.load(Relaxed), bytes),
            (None, Some(near)) => lock(near).mem_alloc(inner, bytes),
            (None, None) => inner.mem_alloc(bytes),
        }
    }

    unsafe fn mem_free(&self, inner: &dyn Driver, addr: DeviceAddr) -> DriverResult<()> {
        match (&self.segments, &self.near) {
            (Some(segments), _) => lock(segments).mem_free(inner, self.position.load(Relaxed), addr),
            (None, Some(near)) => lock(near).allocated.mem_free(inner, addr),
            // SAFETY: the caller promises an address of `mem_alloc`, which is the inner device's where there are no recorded
            // segments.
            (None, None) => unsafe { inner.mem_free(addr) },
        }
    }

    fn address_reserve(&self, inner: &dyn VmmDriver, bytes: u64) -> DriverResult<DeviceAddr> {
        match &self.segments {
            Some(segments) => lock(segments).address_reserve(inner, self.position.load(Relaxed), bytes),
            None => inner.address_reserve(bytes),
        }
    }

    unsafe fn address_free(&self, inner: &dyn VmmDriver, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        match &self.segments {
            Some(segments) => lock(segments).address_free(inner, addr),
            // SAFETY: the caller promises a range of `address_reserve`, which is the inner device's where there are no recorded
            // segments.
            None => unsafe { inner.address_free(addr, bytes) },
        }
    }

    fn event_query(&self, inner: &dyn Driver, event: EventId) -> DriverResult<bool> {
        let completed = inner.event_query(event)?;
        // Read before the match: waiting below must not hold the lock.
        let ready = lock(&self.events).get(&event).copied();
        match ready {
            None => Ok(completed),
            Some(NEVER) => Ok(false),
            Some(ready) if self.position.load(Relaxed) < ready => Ok(false),
            // The recording is ahead of the device.
            Some(_) if !completed => inner.event_synchronize(event).map(|()| true),
            Some(_) => Ok(true),
        }
    }

    fn own_addr(&self, addr: DeviceAddr) -> DeviceAddr {
        match (&self.segments, &self.near) {
            (Some(segments), _) => lock(segments).inner_addr(addr),
            (None, Some(near)) => lock(near).allocated.inner_addr(addr).unwrap_or(addr),
            (None, None) => addr,
        }
    }
}
