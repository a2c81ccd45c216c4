//! What a thread has seen, in the order in which it saw it: records of half a cache line.

use super::trace::Traced;
use crate::contract::{Action, Event, Path};
use vramlab_device::StreamId;

/// One operation as it is kept: 32 bytes, so that none lies on two cache lines. Its stream is that of the record before
/// it, unless a [stream record](Self::of_stream) stands between: few threads change streams at every step.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Record {
    /// Ticks of the clock since its start in the upper 56 bits, which last for five months at 5 GHz; then four bits each of
    /// action and path.
    pub(super) stamp: u64,
    /// Zero for a refused request.
    pub(super) addr: u64,
    pub(super) size: u64,
    pub(super) block: u64,
}

/// In the place of an action: what follows is on the stream that stands in the place of the address.
const STREAM: u64 = 15;

// CAST: widening.
const _: () = assert!(size_of::<Record>() == 32 && Path::COUNT <= 16 && Action::ALL.len() <= STREAM as usize);

impl Record {
    #[inline(always)]
    pub(super) fn stamp(time: u64, action: Action, path: Path) -> u64 {
        // CAST: the discriminants, which fit four bits.
        (time.min(u64::MAX >> 8) << 8) | ((action as u64) << 4) | path as u64
    }

    fn of_stream(stream: StreamId) -> Self {
        Self { stamp: STREAM << 4, addr: stream.get(), size: 0, block: 0 }
    }

    /// The stream of what follows, if this is no operation.
    pub(super) fn stream(&self) -> Option<StreamId> {
        // SAFETY: a record with this stamp was made by `of_stream` of a stream that the thread which pushed it had.
        (self.stamp >> 4 & 15 == STREAM).then(|| unsafe { StreamId::from_raw(self.addr) })
    }

    /// In ticks.
    pub(super) fn time(&self) -> u64 {
        self.stamp >> 8
    }

    pub(super) fn action(&self) -> Action {
        // CAST: four bits.
        Action::ALL[(self.stamp >> 4 & 15) as usize]
    }

    /// The event, at a time that may have been corrected.
    pub(super) fn event(&self, time_ns: u64, stream: StreamId) -> Traced {
        let (action, addr, bytes) = (self.action(), self.addr, self.size);
        // CAST: four bits.
        let path = Path::ALL[(self.stamp & 15) as usize];
        let event = Event { action, device: 0, addr, bytes, stream: stream.get(), time_ns };
        Traced { event, block: self.block, path }
    }
}

/// Records of one thread that were made one after the other. There is room for more from the start, so that none moves.
#[derive(Debug)]
pub(super) struct Chunk {
    records: Vec<Record>,
    /// Stream of the first record.
    pub(super) stream: StreamId,
    /// The order among all threads, where the clock does not tell it; empty where it does.
    sequences: Vec<u64>,
}

impl Chunk {
    /// 128 KiB: most threads that allocate a little need no more.
    const FIRST: usize = 4_096;
    /// 2 MiB.
    const WHOLE: usize = 65_536;

    pub(super) fn none() -> Self {
        Self::with_room(0)
    }

    fn with_room(records: usize) -> Self {
        Self { records: Vec::with_capacity(records), stream: StreamId::NONE, sequences: Vec::new() }
    }

    /// Whether it can be used again; a log that never began has no room.
    pub(super) fn has_room(&self) -> bool {
        self.records.capacity() > 0
    }

    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.sequences.clear();
    }

    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    /// What the record is sorted by.
    pub(super) fn key(&self, at: usize) -> Option<(u64, u64)> {
        let record = self.records.get(at)?;
        Some((record.time(), self.sequences.get(at).copied().unwrap_or(0)))
    }

    #[inline(always)]
    fn is_full(&self) -> bool {
        self.records.len() == self.records.capacity()
    }
}

/// One thread's records.
#[derive(Debug)]
pub(super) struct Log {
    /// Where records go; has no room before the first.
    open: Chunk,
    /// Stream of the last record.
    stream: StreamId,
    /// Full chunks, oldest first.
    full: Vec<Chunk>,
    /// Emptied chunks, so that a program that takes its events now and then asks the system for memory once.
    spare: Vec<Chunk>,
}

impl Default for Log {
    fn default() -> Self {
        Self { open: Chunk::none(), stream: StreamId::NONE, full: Vec::new(), spare: Vec::new() }
    }
}

impl Log {
    /// Emptied chunks that a thread keeps at most: 10 MiB.
    pub(super) const SPARE: usize = 5;

    #[inline(always)]
    pub(super) fn push(&mut self, record: Record, stream: StreamId, sequence: Option<u64>) {
        if self.stream != stream {
            self.change(stream, sequence);
        }
        self.add(record, sequence);
    }

    #[inline(always)]
    fn add(&mut self, record: Record, sequence: Option<u64>) {
        if self.open.is_full() {
            self.turn();
        }
        self.open.records.push(record);
        if let Some(sequence) = sequence {
            self.open.sequences.push(sequence);
        }
    }

    #[cold]
    fn change(&mut self, stream: StreamId, sequence: Option<u64>) {
        self.add(Record::of_stream(stream), sequence);
        self.stream = stream;
    }

    #[cold]
    fn turn(&mut self) {
        let records = if !self.open.has_room() { Chunk::FIRST } else { Chunk::WHOLE };
        let mut next = self.spare.pop().unwrap_or_else(|| Chunk::with_room(records));
        assert!(!next.is_full(), "a spare chunk should be empty and have room");
        next.stream = self.stream;
        let full = std::mem::replace(&mut self.open, next);
        if !full.records.is_empty() {
            self.full.push(full);
        }
    }

    /// Everything so far, oldest first.
    pub(super) fn take(&mut self) -> Vec<Chunk> {
        self.full.push(std::mem::replace(&mut self.open, Chunk::none()));
        std::mem::take(&mut self.full)
    }

    /// Takes emptied chunks to use again, as many as it wants.
    pub(super) fn keep(&mut self, spare: &mut Vec<Chunk>) {
        let room = Self::SPARE.saturating_sub(self.spare.len()).min(spare.len());
        self.spare.extend(spare.drain(..room));
    }
}
