//! Every operation in order, with times.

use crate::allocator::{Block, DeviceAllocator, Path, Request};
use crate::device::StreamId;
use crate::error::AllocError;
use crate::instrument::Clock;
use crate::snapshot::{Ledger, Snapshot};
use crate::stats::Stats;
use serde::Serialize;
use spin::mutex::{SpinMutex, SpinMutexGuard};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use thread_local::ThreadLocal;

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
struct Record {
    /// Time in the upper 56 bits, which last for 834 days; then four bits each of action and path.
    stamp: u64,
    /// Zero for a refused request.
    addr: u64,
    size: u64,
    block: u64,
    stream: u64,
}

const _: () = assert!(size_of::<Record>() == 40 && Path::COUNT <= 16 && TraceAction::ALL.len() <= 16);

impl Record {
    fn stamp(time_ns: u64, action: TraceAction, path: Path) -> u64 {
        // CAST: the discriminants, which fit four bits.
        (time_ns.min(u64::MAX >> 8) << 8) | ((action as u64) << 4) | path as u64
    }

    fn time_ns(&self) -> u64 {
        self.stamp >> 8
    }

    fn event(&self) -> TraceEvent {
        // CAST: four bits.
        let (action, path) = ((self.stamp >> 4 & 15) as usize, (self.stamp & 15) as usize);
        TraceEvent {
            time_ns: self.time_ns(),
            action: TraceAction::ALL[action],
            addr: Some(self.addr).filter(|addr| *addr != 0),
            size: self.size,
            block: self.block,
            stream: self.stream,
            path: Path::ALL[path].name(),
        }
    }
}

/// Records of one thread that were made one after the other, in memory that never moves.
#[derive(Debug)]
struct Chunk {
    records: Vec<Record>,
    /// The order among all threads, where the clock does not tell it; empty where it does.
    sequences: Vec<u64>,
}

impl Chunk {
    /// 640 KiB of records.
    const RECORDS: usize = 16_384;

    fn new() -> Self {
        Self { records: Vec::with_capacity(Self::RECORDS), sequences: Vec::new() }
    }

    #[inline]
    fn push(&mut self, record: Record, sequence: Option<u64>) {
        self.records.push(record);
        self.sequences.extend(sequence);
    }

    /// What the record is sorted by.
    fn key(&self, at: usize) -> Option<(u64, u64)> {
        let record = self.records.get(at)?;
        Some((record.time_ns(), self.sequences.get(at).copied().unwrap_or(0)))
    }
}

/// One thread's records, oldest chunk first.
#[derive(Debug, Default)]
struct Log {
    chunks: Vec<Chunk>,
    /// Emptied chunks, so that a program that takes its events now and then asks the system for memory once.
    spare: Vec<Chunk>,
}

impl Log {
    const SPARE: usize = 16;

    #[inline]
    fn push(&mut self, record: Record, sequence: Option<u64>) {
        if let Some(chunk) = self.chunks.last_mut().filter(|chunk| chunk.records.len() < Chunk::RECORDS) {
            chunk.push(record, sequence);
        } else {
            self.push_to_next(record, sequence);
        }
    }

    #[cold]
    fn push_to_next(&mut self, record: Record, sequence: Option<u64>) {
        let mut next = self.spare.pop().unwrap_or_else(Chunk::new);
        next.push(record, sequence);
        self.chunks.push(next);
    }
}

/// A thread's log on cache lines of its own. The lock is that thread's, but for the moment in which the events are
/// taken; to take it costs one locked instruction on a line that no other thread touches.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Slot(SpinMutex<Log, spin::Yield>);

type LogGuard<'a> = SpinMutexGuard<'a, Log>;

/// A counter on a line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Sequence(AtomicU64);

/// Keeps the operations in memory until they are taken. None is ever lost: memory is what bounds a trace, 40 bytes an
/// event until they are taken (about 72 more each in what [`take`](Self::take) returns).
///
/// *Order.* A free is stamped before the block goes back, everything else once it is done. So the free of an address
/// has an earlier stamp than the next allocation there, on whatever thread, and sorting by the stamp gives an order
/// that can be replayed. Where the clock cannot tell which of two threads came first
/// ([`Clock::orders_threads`]: virtual time stands still between driver calls) a shared counter breaks ties.
///
/// *Cost.* One read of the clock and a record in a buffer of the calling thread's own: no line shared with other
/// threads unless the clock needs the counter, an allocation once in 16,384 events.
#[derive(Debug)]
pub struct EventTrace {
    inner: Arc<dyn DeviceAllocator>,
    clock: Arc<dyn Clock>,
    /// Gives each event its place, where the clock does not.
    sequence: Option<Sequence>,
    logs: ThreadLocal<Slot>,
}

impl EventTrace {
    /// Records the operations of `inner` by `clock`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, clock: Arc<dyn Clock>) -> Self {
        let sequence = (!clock.orders_threads()).then(Sequence::default);
        Self { inner, clock, sequence, logs: ThreadLocal::new() }
    }

    /// The events since the last call, in order. While it empties the buffers other threads' operations wait, so that
    /// none of the events that come later belongs before one that was returned.
    #[must_use]
    pub fn take(&self) -> Vec<TraceEvent> {
        let taken = {
            // With all logs held no operation is between its stamp and its record. A log that is made meanwhile could
            // hold the free of an address whose next allocation is among what is taken, so then it begins anew.
            let mut held = loop {
                let held: Vec<_> = self.logs.iter().map(|slot| (slot, slot.0.lock())).collect();
                if self.logs.iter().count() == held.len() {
                    break held;
                }
            };
            held.iter_mut().map(|(slot, log)| (*slot, std::mem::take(&mut log.chunks))).collect::<Vec<_>>()
        };
        let events = taken.iter().flat_map(|(_, chunks)| chunks).map(|chunk| chunk.records.len()).sum();
        let mut out = Vec::with_capacity(events);
        let (slots, logs): (Vec<_>, Vec<_>) = taken.into_iter().unzip();
        let mut merge = Merge::new(logs, |log, chunk| {
            let spare = &mut slots[log].0.lock().spare;
            if spare.len() < Log::SPARE {
                spare.push(chunk);
            }
        });
        while merge.next_run(&mut out) {}
        out
    }

    #[inline]
    fn lock(&self) -> LogGuard<'_> {
        self.logs.get_or_default().0.lock()
    }

    /// The time and place of an event. With the log held, so that whoever takes the events takes either this one with
    /// all that came before, or none that comes after.
    #[inline]
    fn now(&self) -> (u64, Option<u64>) {
        let time_ns = self.clock.now_ns();
        // Relaxed: all threads see one order of this counter, and that is all that is asked of it.
        (time_ns, self.sequence.as_ref().map(|Sequence(next)| next.fetch_add(1, Relaxed)))
    }

    #[inline]
    fn push(&self, action: TraceAction, addr: u64, size: u64, block: u64, stream: StreamId, path: Path) {
        let mut log = self.lock();
        let (time_ns, sequence) = self.now();
        let stamp = Record::stamp(time_ns, action, path);
        log.push(Record { stamp, addr, size, block, stream: stream.0 }, sequence);
    }
}

/// Joins logs, each of which is in order.
struct Merge<F> {
    logs: Vec<(std::vec::IntoIter<Chunk>, Option<Chunk>, usize)>,
    /// Next record of each log that has one, by key and then log.
    heads: BinaryHeap<Reverse<((u64, u64), usize)>>,
    /// Takes emptied chunks.
    emptied: F,
}

impl<F: FnMut(usize, Chunk)> Merge<F> {
    fn new(logs: Vec<Vec<Chunk>>, emptied: F) -> Self {
        let logs = logs.into_iter().map(|chunks| (chunks.into_iter(), None, 0)).collect::<Vec<_>>();
        let mut merge = Self { heads: BinaryHeap::with_capacity(logs.len()), logs, emptied };
        for log in 0..merge.logs.len() {
            if let Some(key) = merge.head(log) {
                merge.heads.push(Reverse((key, log)));
            }
        }
        merge
    }

    /// The key of a log's next record; goes on to the next chunk where one has ended.
    fn head(&mut self, log: usize) -> Option<(u64, u64)> {
        let (rest, chunk, at) = &mut self.logs[log];
        loop {
            if let Some(key) = chunk.as_ref().and_then(|chunk| chunk.key(*at)) {
                return Some(key);
            }
            if let Some(mut done) = chunk.take() {
                done.records.clear();
                done.sequences.clear();
                (self.emptied)(log, done);
            }
            (*chunk, *at) = (Some(rest.next()?), 0);
        }
    }

    /// Moves the records of the log that is next, as long as it stays next; false when there are none left.
    fn next_run(&mut self, out: &mut Vec<TraceEvent>) -> bool {
        let Some(Reverse((mut key, log))) = self.heads.pop() else { return false };
        let until = self.heads.peek().map(|Reverse(head)| *head);
        while until.is_none_or(|until| (key, log) < until) {
            let (_, chunk, at) = &mut self.logs[log];
            out.extend(chunk.as_ref().and_then(|chunk| chunk.records.get(*at)).map(Record::event));
            *at += 1;
            match self.head(log) {
                Some(next) => key = next,
                None => return true,
            }
        }
        self.heads.push(Reverse((key, log)));
        true
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
        let mut log = self.lock();
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
}
