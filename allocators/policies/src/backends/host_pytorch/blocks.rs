//! The records of [`HostPyTorch`](super::HostPyTorch): its blocks, free lists and queue of events.
#![forbid(unsafe_code)]

use crate::contract::{BlockInfo, BlockState, Gauge, Ledger, PoolKind, PooledGauge, SegmentInfo, Snapshot, Stats};
use crate::policy::events::Events;
use std::collections::{BTreeMap, VecDeque};
use vramlab_device::{DeviceAddr, EventId, HOST_PAGE, StreamId};

/// The pool argument of gauges without pools.
pub(super) const ANY: PoolKind = PoolKind::Large;

/// A block: live, waiting for events, or cached.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) bytes: u64,
    /// Requested bytes; 0 when it is cached.
    requested: u64,
    /// The stream of the host's requests that it serves.
    owner: StreamId,
    pub(super) state: BlockState,
    /// Streams that were announced to use it.
    users: Vec<StreamId>,
    /// Events that it waits for, stranded ones included.
    events: usize,
    /// Of these, events that could not be recorded.
    stranded: usize,
    /// Whether it is a part of the reserved segment.
    pub(super) reserved: bool,
}

impl Record {
    /// A live block.
    pub(super) fn new(bytes: u64, requested: u64, owner: StreamId, reserved: bool) -> Self {
        let (state, users) = (BlockState::Allocated, Vec::new());
        Self { bytes, requested, owner, state, users, events: 0, stranded: 0, reserved }
    }
}

/// An event in the queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    /// Missing where it could not be recorded, or the stream is being captured; it is recorded later.
    pub(super) event: Option<EventId>,
    pub(super) stream: StreamId,
    pub(super) addr: DeviceAddr,
}

/// `PinnedReserveSegment`
#[derive(Debug)]
pub(super) struct Reserve {
    pub(super) start: DeviceAddr,
    pub(super) bytes: u64,
    /// Bytes from which blocks were taken.
    pub(super) used: u64,
}

impl Reserve {
    /// The next part, in whole pages; `None` when the rest is too small.
    pub(super) fn take(&mut self, bytes: u64) -> Option<DeviceAddr> {
        let end = self.used.checked_add(bytes.checked_next_multiple_of(HOST_PAGE)?)?;
        if end > self.bytes {
            return None;
        }
        let addr = self.start.offset(self.used);
        self.used = end;
        Some(addr)
    }
}

/// Everything behind the lock.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    pub(super) stats: Stats,
    pub(super) records: BTreeMap<DeviceAddr, Record>,
    /// Cached blocks by stream and bucket, the newest last.
    free: BTreeMap<(u32, StreamId), Vec<DeviceAddr>>,
    /// Cached bytes by stream.
    free_bytes: BTreeMap<StreamId, u64>,
    /// Requested bytes of live blocks.
    live_requested: u64,
    /// Events that deferred frees wait for, the oldest first.
    pub(super) queue: VecDeque<Waiting>,
    pub(super) events: Events,
    pub(super) reserve: Option<Reserve>,
    /// Whether a request has missed: from then on a background thread runs, if it is switched on.
    pub(super) missed: bool,
    pub(super) peak: Ledger,
}

/// `size_index`: ceil(log2).
fn bucket(bytes: u64) -> u32 {
    bytes.next_power_of_two().trailing_zeros()
}

impl Blocks {
    pub(super) fn new() -> Self {
        // Segments are counted from the start: a zero is a value, an absent one is not.
        let stats = Stats { segment: Some(PooledGauge::default()), ..Stats::default() };
        Self { stats, ..Self::default() }
    }

    pub(super) fn is_live(&self, addr: DeviceAddr) -> bool {
        self.records.get(&addr).is_some_and(|record| record.state == BlockState::Allocated)
    }

    pub(super) fn is_reserved(&self, addr: DeviceAddr) -> bool {
        self.records.get(&addr).is_some_and(|record| record.reserved)
    }

    /// Adds a live block of new memory.
    pub(super) fn add(&mut self, addr: DeviceAddr, record: Record) {
        let (bytes, requested, stream) = (record.bytes, record.requested, record.owner);
        self.records.insert(addr, record);
        self.live_requested += requested;
        self.stats.count_taken(ANY, bytes, requested);
        if self.stats.reserved_bytes.all.current > self.peak.reserved {
            self.peak = self.ledger(stream);
        }
    }

    /// The newest cached block of the bucket of `bytes`, and its size; with `checked` the newest one that holds them.
    pub(super) fn newest(&self, stream: StreamId, bytes: u64, checked: bool) -> Option<(DeviceAddr, u64)> {
        let list = self.free.get(&(bucket(bytes), stream))?;
        let sized = list.iter().rev().map(|addr| (*addr, self.records.get(addr).map_or(0, |record| record.bytes)));
        sized.into_iter().find(|(_, size)| !checked || *size >= bytes)
    }

    /// Makes a cached block live.
    pub(super) fn take(&mut self, addr: DeviceAddr, requested: u64) {
        self.uncache(addr);
        let Some(record) = self.records.get_mut(&addr) else { return };
        (record.state, record.requested) = (BlockState::Allocated, requested);
        self.live_requested += requested;
        self.stats.count_taken(ANY, record.bytes, requested);
    }

    /// Removes a block from its free list.
    fn uncache(&mut self, addr: DeviceAddr) {
        let Some(record) = self.records.get(&addr) else { return };
        let key = (bucket(record.bytes), record.owner);
        if let Some(list) = self.free.get_mut(&key) {
            list.iter().rposition(|known| *known == addr).map(|at| list.remove(at));
            if list.is_empty() {
                self.free.remove(&key);
            }
        }
        if let Some(bytes) = self.free_bytes.get_mut(&record.owner) {
            *bytes -= record.bytes;
        }
    }

    /// The client's free of a live block; returns the streams that were announced to use it.
    pub(super) fn let_go(&mut self, addr: DeviceAddr) -> Vec<StreamId> {
        let Some(record) = self.records.get_mut(&addr) else { return Vec::new() };
        record.state = BlockState::PendingFree;
        self.live_requested -= record.requested;
        self.stats.count_let_go(ANY, record.bytes);
        std::mem::take(&mut record.users)
    }

    pub(super) fn announce(&mut self, addr: DeviceAddr, stream: StreamId) {
        if let Some(record) = self.records.get_mut(&addr)
            && record.owner != stream
            && !record.users.contains(&stream)
        {
            record.users.push(stream);
        }
    }

    /// Defers a freed block behind one more event.
    pub(super) fn wait_for(&mut self, addr: DeviceAddr, stream: StreamId, event: Option<EventId>) {
        if let Some(record) = self.records.get_mut(&addr) {
            record.events += 1;
        }
        self.queue.push_back(Waiting { event, stream, addr });
    }

    /// Defers a freed block behind the whole device: one of its streams records no event. An event of the block that is no longer
    /// in the queue was counted before.
    pub(super) fn strand(&mut self, addr: DeviceAddr) {
        let queued = self.queue.iter().filter(|waiting| waiting.addr == addr).count();
        let Some(record) = self.records.get_mut(&addr) else { return };
        record.stranded += 1;
        record.events = queued + record.stranded;
        if record.stranded == 1 {
            self.stats.stranded_bytes.get_or_insert_with(Gauge::default).increase(record.bytes);
        }
    }

    pub(super) fn has_stranded(&self) -> bool {
        self.stats.stranded_bytes.is_some_and(|gauge| gauge.current > 0)
    }

    /// The whole device was waited for: returns the blocks that wait for nothing any more.
    pub(super) fn take_stranded(&mut self) -> Vec<DeviceAddr> {
        let mut done = Vec::new();
        for (addr, record) in self.records.iter_mut().filter(|(_, record)| record.stranded > 0) {
            record.events -= std::mem::take(&mut record.stranded);
            self.stats.stranded_bytes.iter_mut().for_each(|gauge| gauge.decrease(record.bytes));
            if record.events == 0 {
                done.push(*addr);
            }
        }
        done
    }

    /// Counts an event of a block as completed; whether it was the last.
    pub(super) fn count_event(&mut self, addr: DeviceAddr) -> bool {
        let Some(record) = self.records.get_mut(&addr) else { return false };
        record.events -= 1;
        record.events == 0
    }

    /// Puts a freed block that nothing uses into its list; returns its size, or 0 for one of the reserved segment, which stays
    /// cached whatever its size.
    pub(super) fn complete(&mut self, addr: DeviceAddr) -> u64 {
        let Some(record) = self.records.get_mut(&addr) else { return 0 };
        let (bytes, requested, owner) = (record.bytes, std::mem::take(&mut record.requested), record.owner);
        record.state = BlockState::Free;
        self.stats.count_reusable(ANY, bytes, requested);
        self.free.entry((bucket(bytes), owner)).or_default().push(addr);
        *self.free_bytes.entry(owner).or_insert(0) += bytes;
        if self.records.get(&addr).is_some_and(|record| record.reserved) { 0 } else { bytes }
    }

    /// Forgets a cached block; returns its size.
    pub(super) fn remove(&mut self, addr: DeviceAddr) -> u64 {
        self.uncache(addr);
        self.records.remove(&addr).map_or(0, |record| record.bytes)
    }

    /// Removes a stream whose work has completed; returns the blocks that waited only for it.
    pub(super) fn forget(&mut self, stream: StreamId) -> Vec<DeviceAddr> {
        self.records.values_mut().for_each(|record| record.users.retain(|user| *user != stream));
        let (gone, kept): (Vec<_>, Vec<_>) = self.queue.drain(..).partition(|waiting| waiting.stream == stream);
        self.queue = kept.into();
        let mut done = Vec::new();
        for waiting in gone {
            waiting.event.into_iter().for_each(|event| self.events.reuse(event));
            if self.count_event(waiting.addr) {
                done.push(waiting.addr);
            }
        }
        done
    }

    /// Cached blocks bucket by bucket.
    pub(super) fn cached(&self) -> Vec<DeviceAddr> {
        self.free.values().flatten().copied().collect()
    }

    /// Cached bytes of a stream, and of all others.
    pub(super) fn free_of(&self, stream: StreamId) -> (u64, u64) {
        let own = self.free_bytes.get(&stream).copied().unwrap_or(0);
        (own, self.free_bytes.values().sum::<u64>() - own)
    }

    pub(super) fn largest_free(&self, stream: StreamId) -> u64 {
        let lists = self.free.iter().filter(|((_, owner), _)| *owner == stream).flat_map(|(_, list)| list);
        lists.filter_map(|addr| self.records.get(addr)).map(|record| record.bytes).max().unwrap_or(0)
    }

    pub(super) fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
        // The stream of the next request is not known: all cached bytes count as usable.
        self.peak = self.ledger(StreamId::NONE);
        (self.peak.soft, self.peak.stream) = (self.peak.soft + self.peak.stream, 0);
    }

    fn ledger(&self, stream: StreamId) -> Ledger {
        let stats = &self.stats;
        let [reserved, active, allocated] =
            [&stats.reserved_bytes, &stats.active_bytes, &stats.allocated_bytes].map(|gauge| gauge.all.current);
        let (soft, others) = self.free_of(stream);
        Ledger {
            internal: allocated - self.live_requested,
            soft,
            // What the reserved segment has left or lost.
            hard: reserved - active - soft - others,
            stream: others,
            pending: active - allocated,
            reserved,
            requested: self.live_requested,
            ..Ledger::default()
        }
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let info = |addr: DeviceAddr, record: &Record| BlockInfo {
            addr,
            bytes: record.bytes,
            requested: record.requested,
            state: record.state,
        };
        let segment = |addr, bytes, stream, blocks| SegmentInfo {
            addr,
            bytes,
            stream,
            pool: None,
            private: None,
            expandable: false,
            page: bytes,
            blocks,
        };
        let own = self.records.iter().filter(|(_, record)| !record.reserved);
        let mut segments: Vec<SegmentInfo> =
            own.map(|(addr, record)| segment(*addr, record.bytes, record.owner, vec![info(*addr, record)])).collect();
        if let Some(reserve) = &self.reserve {
            let (mut blocks, mut at) = (Vec::new(), reserve.start);
            let gap = |at: DeviceAddr, end: u64| BlockInfo {
                addr: at,
                bytes: end - at.get(),
                requested: 0,
                state: BlockState::Free,
            };
            let parts = self.records.iter().filter(|(_, record)| record.reserved);
            for (addr, record) in parts.clone() {
                blocks.extend((at < *addr).then(|| gap(at, addr.get())));
                blocks.push(info(*addr, record));
                at = addr.offset(record.bytes);
            }
            let end = reserve.start.get() + reserve.bytes;
            blocks.extend((at.get() < end).then(|| gap(at, end)));
            let stream = parts.map(|(_, record)| record.owner).next().unwrap_or(StreamId::NONE);
            segments.push(segment(reserve.start, reserve.bytes, stream, blocks));
        }
        segments.sort_unstable_by_key(|segment| segment.addr);
        Snapshot { segments }
    }
}
