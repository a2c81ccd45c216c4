//! Every operation in order, with times.

use crate::contract::{Action, AllocError, Block, DeviceAllocator, Event, Ledger, Path, Request, Snapshot, Stats};
use crate::instruments::log::{Log, Record};
use crate::instruments::merge::Merge;
use crate::instruments::per_thread::PerThread;
use serde::ser::{Serialize, SerializeStruct, Serializer};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use vramlab_device::clock::Reader;
use vramlab_device::{Clock, DeviceAddr, StreamId};

/// An event, and how it was served. Written as a line of `trace.jsonl` (`analysis/schema.md`), which histories are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traced {
    /// One of [`Action::Alloc`], [`Action::FreeRequested`], [`Action::RecordUse`] and [`Action::Oom`], with the bytes that were
    /// asked for. Its time is the device's clock when the operation had been served, but for a free when it was asked for. So a
    /// block's life in the trace lies within its life in the allocator, and a free comes before the next allocation at its
    /// address on whatever thread.
    pub event: Event,
    /// Size of the block in bytes; 0 for a refused request.
    pub block: u64,
    /// How it was served.
    pub path: Path,
}

impl Serialize for Traced {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Event { action, addr, bytes, stream, time_ns, .. } = self.event;
        let mut line = serializer.serialize_struct("Traced", 7)?;
        line.serialize_field("time_ns", &time_ns)?;
        line.serialize_field("action", &action)?;
        // A request that was refused has none.
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

/// Keeps the operations in memory until they are taken. None is ever lost: memory is what bounds a trace, 32 bytes an
/// event until they are taken (about 72 more each in what [`take`](Self::take) returns).
///
/// *Order.* A free is stamped before the block goes back, everything else once it is done, so the free of an address
/// has an earlier stamp than the next allocation there, on whatever thread. The stamp is read without waiting for what
/// the processor has in flight, which would cost more than the rest of the record; where two threads' stamps are
/// therefore the wrong way round by some nanoseconds, the blocks themselves tell the order when the events are taken. So a
/// trace can always be replayed. Where the clock cannot tell which of two threads came first
/// ([`Clock::orders_threads`]: virtual time stands still between driver calls) a shared counter does.
///
/// *Cost.* One read of the clock and a record in a buffer of the calling thread's own, behind a lock of its own: no line shared
/// with other threads unless the clock needs the counter, an allocation once in 65,536 events. A thread that changes its
/// stream at every operation needs 64 bytes an event.
#[derive(Debug)]
pub struct EventTrace {
    inner: Arc<dyn DeviceAllocator>,
    clock: Reader,
    /// Gives each event its place, where the clock does not.
    sequence: Option<Sequence>,
    logs: PerThread<Log>,
    /// Joins the logs; knows which blocks were live when events were last taken.
    merge: Mutex<Merge>,
}

impl EventTrace {
    /// Records the operations of `inner` by `clock`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, clock: Arc<dyn Clock>) -> Self {
        let sequence = (!clock.orders_threads()).then(Sequence::default);
        let clock = Reader::new(clock);
        let merge = Mutex::new(Merge::new(sequence.is_none(), clock.scale()));
        Self { inner, clock, merge, sequence, logs: PerThread::new() }
    }

    /// The events since the last call, in order. While it empties the buffers other threads' operations wait, so that
    /// none of the events that come later belongs before one that was returned.
    #[must_use]
    pub fn take(&self) -> Vec<Traced> {
        let mut merge = self.merge.lock().unwrap_or_else(PoisonError::into_inner);
        let logs = self.logs.collect(Log::take);
        let (events, mut spare) = merge.join(logs, Log::SPARE);
        drop(merge);
        if !spare.is_empty() {
            self.logs.collect(|log| log.keep(&mut spare));
        }
        events
    }

    /// The time in ticks and the place of an event. Read inside the log, so that a thread that takes the events takes either this
    /// one with all that came before, or none that comes after.
    #[inline(always)]
    fn now(&self) -> (u64, Option<u64>) {
        let time = self.clock.now();
        // Relaxed: all threads see one order of this counter, and that is all that is asked of it.
        (time, self.sequence.as_ref().map(|Sequence(next)| next.fetch_add(1, Relaxed)))
    }

    #[inline(always)]
    fn push(&self, action: Action, addr: u64, size: u64, block: u64, stream: StreamId, path: Path) {
        let mut log = self.logs.enter();
        let (time, sequence) = self.now();
        let stamp = Record::stamp(time, action, path);
        log.push(Record { stamp, addr, size, block }, stream, sequence);
    }

    /// A request that was refused.
    #[cold]
    #[inline(never)]
    fn push_refused(&self, request: Request, stream: StreamId) {
        self.push(Action::Oom, 0, request.bytes, 0, stream, Path::Failed);
    }
}

impl DeviceAllocator for EventTrace {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        match self.inner.allocate(request, stream) {
            Ok(block) => {
                let (addr, path) = (block.addr().get(), block.path());
                self.push(Action::Alloc, addr, request.bytes, block.bytes(), stream, path);
                Ok(block.hand_on())
            }
            Err(error) => {
                if error.is_out_of_memory() {
                    self.push_refused(request, stream);
                }
                Err(error)
            }
        }
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let (addr, size, bytes) = (block.addr().get(), block.requested(), block.bytes());
        let mut log = self.logs.enter();
        // Before the free: once the block is back, another thread may be handed its address.
        let (time, sequence) = self.now();
        let mut push = |path: Path| {
            let stamp = Record::stamp(time, Action::FreeRequested, path);
            log.push(Record { stamp, addr, size, block: bytes }, stream, sequence);
        };
        // SAFETY: the caller's promise is the inner allocator's.
        match unsafe { self.inner.deallocate(block, stream) } {
            Ok(path) => {
                push(path);
                Ok(path)
            }
            Err(error) => {
                push(Path::Failed);
                Err(error)
            }
        }
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.inner.record_use(block, stream)?;
        let addr = block.addr().get();
        self.push(Action::RecordUse, addr, block.requested(), block.bytes(), stream, Path::Deferred);
        Ok(())
    }

    /// Blocks that were taken over are in the trace as if they had been allocated then, so that it can be replayed.
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        let restored = self.inner.restore(snapshot, age)?;
        for (block, stream) in restored.iter().flatten().zip(super::restored_streams(snapshot)) {
            let addr = block.addr().get();
            self.push(Action::Alloc, addr, block.requested(), block.bytes(), stream, block.path());
        }
        Ok(restored)
    }

    super::pass_on!();
    super::pass_on!(captures);
    super::pass_on!(pools);
}
