//! Every operation in order, with times.

use super::restored_streams;
use crate::contract::{
    Action, AllocError, Block, DeviceAllocator, Event, Instrument, Path, PrivatePool, Request, RestoreError, Snapshot,
};
use crate::instruments::per_thread::PerThread;
use serde::ser::{Serialize, SerializeStruct, Serializer};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use vramlab_device::clock::Reader;
use vramlab_device::{Clock, DeviceAddr, StreamId};

/// An event with its path. Written as a line of `trace.jsonl` (`analysis/schema.md`), a format for recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traced {
    /// One of [`Action::Alloc`], [`Action::FreeRequested`], [`Action::RecordUse`] and [`Action::Oom`], with the requested bytes.
    /// Its time is the device's clock after the operation, but for a free before it. So a block's life in the trace is within its
    /// life in the allocator, and a free precedes the next allocation at its address on any thread.
    pub event: Event,
    /// Size of the block in bytes; 0 for a refused request.
    pub block: u64,
    /// Its path.
    pub path: Path,
}

impl Serialize for Traced {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Event { action, addr, bytes, stream, time_ns, .. } = self.event;
        let mut line = serializer.serialize_struct("Traced", 7)?;
        line.serialize_field("time_ns", &time_ns)?;
        line.serialize_field("action", &action)?;
        // A refused request has none.
        if addr != 0 {
            line.serialize_field("addr", &addr)?;
        }
        line.serialize_field("size", &bytes)?;
        line.serialize_field("block", &self.block)?;
        line.serialize_field("stream", &stream)?;
        line.serialize_field("path", self.path.name())?;
        line.end()
    }
}

/// A counter on a line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Sequence(AtomicU64);

/// The events of a thread, each with its position among those of all threads, and its time in ticks.
type Log = Vec<(u64, Traced)>;

/// Keeps the operations in memory until they are taken. None is lost: memory bounds a trace, at 64 bytes an event until they are
/// taken.
///
/// *Order.* All threads share a counter that gives each event its position. A free is counted before the block is freed, everything
/// else after it, so the free of an address precedes the next allocation there, on any thread. So a trace can always be replayed.
///
/// *Cost.* One read of the clock, one step of the counter and a record in a buffer of the calling thread's own, behind a lock of
/// its own.
#[derive(Debug)]
pub struct EventTrace {
    inner: Arc<dyn DeviceAllocator>,
    clock: Reader,
    sequence: Sequence,
    logs: PerThread<Log>,
    /// The latest time that was returned, in ticks.
    last: Mutex<u64>,
}

impl EventTrace {
    /// Records the operations of `inner` by `clock`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, clock: Arc<dyn Clock>) -> Self {
        let (clock, sequence, logs) = (Reader::new(clock), Sequence::default(), PerThread::new());
        Self { inner, clock, sequence, logs, last: Mutex::default() }
    }

    /// The events since the last call, in order. Times do not decrease. While it empties the buffers other threads' operations
    /// wait, so that no later event belongs before a returned one.
    #[must_use]
    pub fn take(&self) -> Vec<Traced> {
        let last = &mut *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut events = self.logs.collect(std::mem::take).concat();
        events.sort_unstable_by_key(|(place, _)| *place);
        let event_of = |(_, Traced { mut event, block, path })| {
            *last = event.time_ns.max(*last);
            event.time_ns = self.clock.scale().nanoseconds(*last);
            Traced { event, block, path }
        };
        events.into_iter().map(event_of).collect()
    }

    /// An event that ends now, with its position. It is made inside the log, so that a thread that takes the events takes either
    /// this one with all earlier ones, or none of the later ones.
    #[inline(always)]
    fn event(&self, action: Action, block: (u64, u64, u64), stream: StreamId, path: Path) -> (u64, Traced) {
        let (addr, bytes, block) = block;
        let (stream, time_ns) = (stream.get(), self.clock.now());
        // Relaxed: all threads see one order of this counter, which is sufficient.
        let position = self.sequence.0.fetch_add(1, Relaxed);
        (position, Traced { event: Event { action, device: 0, addr, bytes, stream, time_ns }, block, path })
    }

    /// Records how a request was served.
    #[inline(always)]
    fn served(
        &self,
        request: Request,
        stream: StreamId,
        served: Result<Block, AllocError>,
    ) -> Result<Block, AllocError> {
        match served {
            Ok(block) => {
                self.push(Action::Alloc, place(&block), stream, block.path());
                Ok(block.hand_on())
            }
            Err(error) => {
                if error.is_out_of_memory() {
                    self.push(Action::Oom, (0, request.bytes, 0), stream, Path::Failed);
                }
                Err(error)
            }
        }
    }

    #[inline(always)]
    fn push(&self, action: Action, block: (u64, u64, u64), stream: StreamId, path: Path) {
        let log = &mut *self.logs.enter();
        log.push(self.event(action, block, stream, path));
    }
}

/// Address, requested bytes, and bytes.
#[inline(always)]
fn place(block: &Block) -> (u64, u64, u64) {
    (block.addr().get(), block.requested(), block.bytes())
}

impl Instrument for EventTrace {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.served(request, stream, self.inner.allocate(request, stream))
    }

    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.served(request, stream, self.inner.allocate_in(request, stream, pool))
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let log = &mut *self.logs.enter();
        // Before the free: afterwards another thread may be given the address.
        let (number, event) = self.event(Action::FreeRequested, place(&block), stream, Path::Failed);
        // SAFETY: the caller's promise is the inner allocator's.
        let freed = unsafe { self.inner.deallocate(block, stream) };
        log.push((number, Traced { path: *freed.as_ref().unwrap_or(&Path::Failed), ..event }));
        freed
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.inner.record_use(block, stream)?;
        self.push(Action::RecordUse, place(block), stream, Path::Deferred);
        Ok(())
    }

    /// Blocks that were taken over are in the trace as if they had been allocated then, so that it can be replayed.
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        let restored = self.inner.restore(snapshot, age)?;
        for (block, stream) in restored.iter().flatten().zip(restored_streams(snapshot)) {
            self.push(Action::Alloc, place(block), stream, block.path());
        }
        Ok(restored)
    }

    /// Freed blocks are in the trace as freed, and restored ones as allocated.
    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        let freed: Vec<_> = held.iter().map(|(block, stream)| (place(block), *stream)).collect();
        // SAFETY: the caller's promise is passed on.
        let restored = unsafe { self.inner.pool_restore(pool, checkpoint, held) }?;
        freed.into_iter().for_each(|(place, stream)| self.push(Action::FreeRequested, place, stream, Path::Hit));
        for (block, stream) in restored.iter().zip(restored_streams(checkpoint)) {
            self.push(Action::Alloc, place(block), stream, block.path());
        }
        Ok(restored)
    }
}
