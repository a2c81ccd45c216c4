//! What stands between an allocator and its device: the limit of allocators that have none of their own, and word of the
//! segments that come and go.
//!
//! Segments are seen where they come from, in the calls of the driver, so that every allocator tells of them. The callback of the
//! program runs after the call that made them, when no lock is held.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab_device::{CallArguments, CallKind, CallOutcome, Driver, DriverError, DriverResult, Hook};

thread_local! {
    /// The stream of the request that this thread is serving.
    static STREAM: Cell<u64> = const { Cell::new(0) };
}

/// Names the stream of the request that this thread is serving, for the segments that it takes.
#[inline]
pub(crate) fn serving(stream: u64) {
    STREAM.set(stream);
}

/// What happened to a segment, or to a part of one that memory was added to or taken from.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentAction {
    /// It came from the device.
    Alloc = 0,
    /// It went back.
    Free = 1,
    /// Memory was mapped behind its addresses.
    Map = 2,
    /// Memory behind its addresses was unmapped.
    Unmap = 3,
}

/// A segment that came or went.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentEvent {
    /// What happened.
    pub action: SegmentAction,
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// The stream whose request took it.
    pub stream: u64,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Segments {
    /// Most bytes that may be held, `u64::MAX` for no limit.
    limit: AtomicU64,
    /// Whether the program wants to know of segments.
    told: AtomicBool,
    /// Whether there is something to tell.
    waiting: AtomicBool,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// Memory that is held by single calls: bytes and the stream of the request, by address.
    held: BTreeMap<u64, (u64, u64)>,
    bytes: u64,
    events: Vec<SegmentEvent>,
}

impl Segments {
    pub(crate) fn new() -> Self {
        Self { limit: AtomicU64::new(u64::MAX), ..Self::default() }
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

    /// Tells the program of segments from now on, or no longer.
    pub(crate) fn tell(&self, told: bool) {
        self.told.store(told, Release);
        if !told {
            self.lock().events.clear();
        }
    }

    /// What there is to tell, oldest first. One comparison when there is nothing.
    #[inline]
    pub(crate) fn take_events(&self) -> Vec<SegmentEvent> {
        if !self.waiting.load(Acquire) || !self.waiting.swap(false, AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut self.lock().events)
    }

    fn push(&self, known: &mut Known, event: SegmentEvent) {
        if !self.told.load(Acquire) {
            return;
        }
        // Memory comes and goes page by page; the program is told of the whole.
        let last = known.events.last_mut().filter(|last| last.action == event.action);
        let parts = matches!(event.action, SegmentAction::Map | SegmentAction::Unmap);
        match last.filter(|_| parts) {
            Some(last) if last.address + last.bytes == event.address => last.bytes += event.bytes,
            Some(last) if event.address + event.bytes == last.address => {
                (last.address, last.bytes) = (event.address, last.bytes + event.bytes);
            }
            _ => known.events.push(event),
        }
        self.waiting.store(true, Release);
    }
}

// SAFETY: refuses calls and looks at the others, and changes none.
unsafe impl Hook for Segments {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments) -> DriverResult<()> {
        let takes = matches!(kind, CallKind::MemAlloc | CallKind::MemAllocAsync);
        let limit = self.limit.load(Relaxed);
        if takes && limit != u64::MAX && self.lock().bytes.saturating_add(arguments.bytes) > limit {
            return Err(DriverError::new(kind, DriverError::OUT_OF_MEMORY, "the limit of this allocator"));
        }
        Ok(())
    }

    fn after(&self, _: &dyn Driver, kind: CallKind, arguments: CallArguments, (): (), outcome: CallOutcome) {
        if !outcome.ok {
            return;
        }
        let (stream, bytes) = (STREAM.get(), arguments.bytes);
        match (kind, outcome.addr, arguments.addr) {
            (CallKind::MemAlloc | CallKind::MemAllocAsync, Some(addr), _) => {
                let known = &mut *self.lock();
                known.held.insert(addr.get(), (bytes, stream));
                known.bytes += bytes;
                if kind == CallKind::MemAlloc {
                    let address = addr.get();
                    self.push(known, SegmentEvent { action: SegmentAction::Alloc, address, bytes, stream });
                }
            }
            (CallKind::MemFree | CallKind::MemFreeAsync, _, Some(addr)) => {
                let known = &mut *self.lock();
                let Some((bytes, stream)) = known.held.remove(&addr.get()) else { return };
                known.bytes -= bytes;
                if kind == CallKind::MemFree {
                    let address = addr.get();
                    self.push(known, SegmentEvent { action: SegmentAction::Free, address, bytes, stream });
                }
            }
            (CallKind::MemMap | CallKind::MemUnmap, _, Some(addr)) => {
                let action = if kind == CallKind::MemMap { SegmentAction::Map } else { SegmentAction::Unmap };
                self.push(&mut self.lock(), SegmentEvent { action, address: addr.get(), bytes, stream });
            }
            _ => {}
        }
    }
}
