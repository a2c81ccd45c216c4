//! The layer between an allocator and its device: the limit of allocators without one, and events of segments.
//!
//! Segments are observed in the calls of the driver, so that every allocator reports them. The callbacks of the program run after
//! the call that made them, see [`notices`](crate::notices).

use crate::notices::Notices;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::{CallArguments, CallKind, CallOutcome, Driver, DriverError, DriverResult, Hook};

thread_local! {
    /// The stream of the request that this thread is serving.
    static STREAM: Cell<u64> = const { Cell::new(0) };
}

/// Names the stream of the request that this thread is serving, for the segments that it allocates.
#[inline]
pub(crate) fn serving(stream: u64) {
    STREAM.set(stream);
}

/// An event of a segment, or of a mapped range of one.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentAction {
    /// The device allocated it.
    Alloc = 0,
    /// It was released to the device.
    Free = 1,
    /// Memory was mapped behind its addresses.
    Map = 2,
    /// Memory behind its addresses was unmapped.
    Unmap = 3,
}

impl SegmentAction {
    pub(crate) fn adds_memory(self) -> bool {
        matches!(self, Self::Alloc | Self::Map)
    }
}

/// An event of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentEvent {
    /// Its kind.
    pub action: SegmentAction,
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// The stream whose request allocated it.
    pub stream: u64,
}

impl SegmentEvent {
    /// Both as one event, where the mapped or unmapped ranges are adjacent.
    pub(crate) fn joined_with(&self, next: &Self) -> Option<Self> {
        let parts = matches!(self.action, SegmentAction::Map | SegmentAction::Unmap) && next.action == self.action;
        let beside = self.address + self.bytes == next.address || next.address + next.bytes == self.address;
        let (address, bytes) = (self.address.min(next.address), self.bytes + next.bytes);
        (parts && beside).then_some(Self { address, bytes, ..*self })
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Segments {
    /// Maximum of reserved bytes, `UINT64_MAX` for no limit.
    limit: AtomicU64,
    known: Mutex<Known>,
    notices: Arc<Notices>,
}

#[derive(Debug, Default)]
struct Known {
    /// Memory of single allocations: bytes and the stream of the request, by address.
    held: BTreeMap<u64, (u64, u64)>,
    /// Its bytes, including running calls.
    bytes: u64,
}

/// The state to restore when a call fails.
#[derive(Debug, Default)]
pub(crate) struct Around {
    /// Bytes that were counted for the requested memory.
    claimed: u64,
    /// The record of released memory: its bytes and stream.
    released: Option<(u64, u64)>,
    /// The entry among the notices. A release is queued before the call, because the device may return its address immediately.
    notice: Option<u64>,
}

impl Segments {
    pub(crate) fn new(notices: Arc<Notices>) -> Self {
        Self { limit: AtomicU64::new(u64::MAX), known: Mutex::default(), notices }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Relaxed);
    }

    /// The limit, if there is one.
    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Relaxed)).filter(|limit| *limit != u64::MAX)
    }
}

// SAFETY: refuses calls and observes the others, and changes none.
unsafe impl Hook for Segments {
    type Before = Around;

    fn before(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments) -> DriverResult<Around> {
        match (kind, arguments.addr) {
            (CallKind::MemAlloc | CallKind::MemAllocAsync, _) => {
                let known = &mut *self.lock();
                let sum = known.bytes.checked_add(arguments.bytes);
                let Some(sum) = sum.filter(|sum| *sum <= self.limit.load(Relaxed)) else {
                    return Err(DriverError::new(kind, DriverError::OUT_OF_MEMORY, "the limit of this allocator"));
                };
                known.bytes = sum;
                Ok(Around { claimed: arguments.bytes, ..Around::default() })
            }
            (CallKind::MemFree | CallKind::MemFreeAsync, Some(addr)) => {
                let address = addr.get();
                let record = self.lock().held.remove(&address);
                let event = |(bytes, stream)| SegmentEvent { action: SegmentAction::Free, address, bytes, stream };
                let freed = record.filter(|_| kind == CallKind::MemFree).map(event);
                let notice = freed.and_then(|event| self.notices.queue(event, false));
                Ok(Around { released: record, notice, ..Around::default() })
            }
            (CallKind::MemUnmap, Some(addr)) => {
                let (address, bytes, stream) = (addr.get(), arguments.bytes, STREAM.get());
                let event = SegmentEvent { action: SegmentAction::Unmap, address, bytes, stream };
                Ok(Around { notice: self.notices.queue(event, false), ..Around::default() })
            }
            _ => Ok(Around::default()),
        }
    }

    fn after(&self, _: &dyn Driver, kind: CallKind, arguments: CallArguments, before: Around, outcome: CallOutcome) {
        let Around { claimed, released, notice } = before;
        if let Some(number) = notice {
            self.notices.settle(number, outcome.ok);
        }
        let (stream, bytes) = (STREAM.get(), arguments.bytes);
        match (kind, outcome.addr, arguments.addr) {
            (CallKind::MemAlloc | CallKind::MemAllocAsync, Some(addr), _) => {
                let address = addr.get();
                self.lock().held.insert(address, (bytes, stream));
                if kind == CallKind::MemAlloc {
                    self.notices.queue(SegmentEvent { action: SegmentAction::Alloc, address, bytes, stream }, true);
                }
            }
            (CallKind::MemAlloc | CallKind::MemAllocAsync, None, _) => self.lock().bytes -= claimed,
            (CallKind::MemFree | CallKind::MemFreeAsync, _, Some(addr)) => {
                let Some(record) = released else { return };
                let known = &mut *self.lock();
                match outcome.ok {
                    true => known.bytes -= record.0,
                    false => _ = known.held.insert(addr.get(), record),
                }
            }
            (CallKind::MemMap, _, Some(addr)) if outcome.ok => {
                let address = addr.get();
                self.notices.queue(SegmentEvent { action: SegmentAction::Map, address, bytes, stream }, true);
            }
            _ => {}
        }
    }
}
