//! Every operation in order, with times.

use crate::allocator::{Block, DeviceAllocator, Path, Request};
use crate::device::StreamId;
use crate::error::AllocError;
use crate::instrument::Clock;
use crate::instrument::clock::Reader;
use crate::instrument::merge::Merge;
use crate::instrument::per_thread::PerThread;
use crate::snapshot::{Ledger, Snapshot};
use crate::stats::Stats;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum TraceAction {
    /// A block was handed out.
    Alloc,
    /// A block came back.
    FreeRequested,
    /// Work on another stream was announced.
    RecordUse,
    /// A request was refused for lack of memory.
    Oom,
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TraceEvent {
    /// On the device's clock: when the operation had been served, but for a free when it was asked for. So a block's
    /// life in the trace lies within its life in the allocator, and a free comes before the next allocation at its
    /// address on whatever thread.
    pub time_ns: u64,
    /// What happened.
    pub action: TraceAction,
    /// First address; absent for a refused request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<u64>,
    /// Bytes that were asked for.
    pub size: u64,
    /// Size of the block in bytes; 0 for a refused request.
    pub block: u64,
    /// Stream.
    pub stream: u64,
    /// How it was served.
    pub path: &'static str,
}

impl TraceAction {
    const ALL: [TraceAction; 4] = [Self::Alloc, Self::FreeRequested, Self::RecordUse, Self::Oom];
}

/// One operation as it is kept: 40 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// Time in the upper 56 bits, which last for 834 days; then four bits each of action and path.
    pub(super) stamp: u64,
    /// Zero for a refused request.
    pub(super) addr: u64,
    pub(super) size: u64,
    pub(super) block: u64,
    pub(super) stream: u64,
}

const _: () = assert!(size_of::<Record>() == 40 && Path::COUNT <= 16 && TraceAction::ALL.len() <= 16);

impl Record {
    pub(super) fn stamp(time_ns: u64, action: TraceAction, path: Path) -> u64 {
        // CAST: the discriminants, which fit four bits.
        (time_ns.min(u64::MAX >> 8) << 8) | ((action as u64) << 4) | path as u64
    }

    pub(super) fn time_ns(&self) -> u64 {
        self.stamp >> 8
    }

    pub(super) fn action(&self) -> TraceAction {
        // CAST: four bits.
        TraceAction::ALL[(self.stamp >> 4 & 15) as usize]
    }

    /// The event, at a time that may have been corrected.
    pub(super) fn event(&self, time_ns: u64) -> TraceEvent {
        // CAST: four bits.
        let path = (self.stamp & 15) as usize;
        TraceEvent {
            time_ns,
            action: self.action(),
            addr: Some(self.addr).filter(|addr| *addr != 0),
            size: self.size,
            block: self.block,
            stream: self.stream,
            path: Path::ALL[path].name(),
        }
    }
}

/// Records of one thread that were made one after the other, in memory that never moves.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    pub(super) records: Vec<Record>,
    /// The order among all threads, where the clock does not tell it; empty where it does.
    pub(super) sequences: Vec<u64>,
}

impl Chunk {
    /// 640 KiB of records.
    const RECORDS: usize = 16_384;

    fn with_room() -> Self {
        Self { records: Vec::with_capacity(Self::RECORDS), sequences: Vec::new() }
    }

    /// Whether it has the room of a chunk; a log that never began has none.
    pub(super) fn is_whole(&self) -> bool {
        self.records.capacity() == Self::RECORDS
    }

    /// What the record is sorted by.
    pub(super) fn key(&self, at: usize) -> Option<(u64, u64)> {
        let record = self.records.get(at)?;
        Some((record.time_ns(), self.sequences.get(at).copied().unwrap_or(0)))
    }
}

/// One thread's records.
#[derive(Debug, Default)]
struct Log {
    /// Where records go; has no room before the first.
    open: Chunk,
    /// Full chunks, oldest first.
    full: Vec<Chunk>,
    /// Emptied chunks, so that a program that takes its events now and then asks the system for memory once.
    spare: Vec<Chunk>,
}

impl Log {
    const SPARE: usize = 16;

    #[inline]
    fn push(&mut self, record: Record, sequence: Option<u64>) {
        if self.open.records.len() == self.open.records.capacity() {
            self.turn();
        }
        self.open.records.push(record);
        if let Some(sequence) = sequence {
            self.open.sequences.push(sequence);
        }
    }

    #[cold]
    fn turn(&mut self) {
        let next = self.spare.pop().unwrap_or_else(Chunk::with_room);
        let full = std::mem::replace(&mut self.open, next);
        if !full.records.is_empty() {
            self.full.push(full);
        }
    }

    /// Everything so far, oldest first.
    fn take(&mut self) -> Vec<Chunk> {
        self.full.push(std::mem::take(&mut self.open));
        std::mem::take(&mut self.full)
    }
}

/// A counter on a line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Sequence(AtomicU64);

/// Keeps the operations in memory until they are taken. None is ever lost: memory is what bounds a trace, 40 bytes an
/// event until they are taken (about 72 more each in what [`take`](Self::take) returns).
///
/// *Order.* A free is stamped before the block goes back, everything else once it is done, so the free of an address
/// has an earlier stamp than the next allocation there, on whatever thread. The stamp is read without waiting for what
/// the processor has in flight, which would cost more than the rest of the record; where two threads' stamps are
/// therefore the wrong way round by some nanoseconds, the blocks themselves tell the order when the events are taken. So a
/// trace can always be replayed. Where the clock cannot tell which of two threads came first
/// ([`Clock::orders_threads`]: virtual time stands still between driver calls) a shared counter does.
///
/// *Cost.* One read of the clock and a record in a buffer of the calling thread's own: no lock, no line shared with
/// other threads unless the clock needs the counter, an allocation once in 16,384 events.
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
        Self {
            inner,
            clock: Reader::new(clock),
            merge: Mutex::new(Merge::new(sequence.is_none())),
            sequence,
            logs: PerThread::new(),
        }
    }

    /// The events since the last call, in order. While it empties the buffers other threads' operations wait, so that
    /// none of the events that come later belongs before one that was returned.
    #[must_use]
    pub fn take(&self) -> Vec<TraceEvent> {
        let mut merge = self.merge.lock().unwrap_or_else(PoisonError::into_inner);
        let logs = self.logs.collect(Log::take);
        let (events, mut spare) = merge.join(logs, Log::SPARE);
        drop(merge);
        if !spare.is_empty() {
            self.logs.collect(|log| {
                let room = Log::SPARE.saturating_sub(log.spare.len()).min(spare.len());
                log.spare.extend(spare.drain(..room));
            });
        }
        events
    }

    /// The time and place of an event. Read inside the log, so that whoever takes the events takes either this one with
    /// all that came before, or none that comes after.
    #[inline]
    fn now(&self) -> (u64, Option<u64>) {
        let time_ns = self.clock.now_at_once();
        // Relaxed: all threads see one order of this counter, and that is all that is asked of it.
        (time_ns, self.sequence.as_ref().map(|Sequence(next)| next.fetch_add(1, Relaxed)))
    }

    #[inline]
    fn push(&self, action: TraceAction, addr: u64, size: u64, block: u64, stream: StreamId, path: Path) {
        let mut log = self.logs.enter();
        let (time_ns, sequence) = self.now();
        let stamp = Record::stamp(time_ns, action, path);
        log.push(Record { stamp, addr, size, block, stream: stream.0 }, sequence);
    }
}

impl DeviceAllocator for EventTrace {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        let result = self.inner.allocate(request, stream);
        match &result {
            Ok(block) => {
                let (addr, path) = (block.addr().get(), block.path());
                self.push(TraceAction::Alloc, addr, request.bytes, block.bytes(), stream, path);
            }
            Err(error) if error.is_out_of_memory() => {
                self.push(TraceAction::Oom, 0, request.bytes, 0, stream, Path::Failed);
            }
            Err(_) => {}
        }
        result
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let (addr, size, bytes) = (block.addr().get(), block.requested(), block.bytes());
        let mut log = self.logs.enter();
        // Before the free: once the block is back, another thread may be handed its address.
        let (time_ns, sequence) = self.now();
        // SAFETY: the caller's promise is the inner allocator's.
        let result = unsafe { self.inner.deallocate(block, stream) };
        let path = *result.as_ref().unwrap_or(&Path::Failed);
        let stamp = Record::stamp(time_ns, TraceAction::FreeRequested, path);
        log.push(Record { stamp, addr, size, block: bytes, stream: stream.0 }, sequence);
        result
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.inner.record_use(block, stream)?;
        let addr = block.addr().get();
        self.push(TraceAction::RecordUse, addr, block.requested(), block.bytes(), stream, Path::Deferred);
        Ok(())
    }

    super::pass_on!();
    super::pass_on!(captures);
}
