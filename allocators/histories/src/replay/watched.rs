//! Observations during a replay: block addresses, allocated memory, and breakdowns of reserved memory.

use crate::formats::BlockPlace;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use vramlab_device::{CallArguments, CallKind, CallOutcome, DeviceAddr, Driver, DriverResult, Hook, StreamId};
use vramlab_policies::contract::{Block, DeviceAllocator, Ledger, Path};

/// Memory that an allocator allocated from the device, or released to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentChange {
    /// Number of the allocation during or after which it happened, from 0.
    pub allocation: usize,
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it was allocated.
    pub taken: bool,
}

/// Observations during a replay. Recording them changes nothing but the host's time.
#[derive(Debug, Default)]
pub struct Watched {
    /// One for each allocation in order: first the blocks from before recording started, in address order.
    pub places: Vec<BlockPlace>,
    /// In order. Empty for an allocator on a CUDA memory pool, which shows no segments.
    pub segments: Vec<SegmentChange>,
    /// Breakdowns as the stream of the operation saw them, in order. The last is that after the last operation.
    pub ledgers: Vec<LedgerAt>,
    /// Operations between two breakdowns; 0 for none.
    every: usize,
    frees: usize,
}

/// A breakdown during the replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerAt {
    /// Number of allocations by then.
    pub allocations: usize,
    /// Number of requests to free by then.
    pub frees: usize,
    /// The breakdown.
    pub ledger: Ledger,
}

impl Watched {
    /// Takes a breakdown after each `every` allocations and frees (0: none). Each costs a snapshot of the allocator.
    #[must_use]
    pub fn every(every: usize) -> Self {
        Self { every, ..Self::default() }
    }

    pub(super) fn served(&mut self, block: &Block, by: Option<Path>, allocator: &dyn DeviceAllocator, at: StreamId) {
        self.places.push(BlockPlace { addr: block.addr().get(), bytes: block.bytes(), path: by });
        self.ledger_if_due(allocator, at);
    }

    pub(super) fn freed(&mut self, allocator: &dyn DeviceAllocator, at: StreamId) {
        self.frees += 1;
        self.ledger_if_due(allocator, at);
    }

    fn ledger_if_due(&mut self, allocator: &dyn DeviceAllocator, at: StreamId) {
        if self.every > 0 && (self.places.len() + self.frees).is_multiple_of(self.every) {
            self.take_ledger(allocator, at);
        }
    }

    pub(super) fn failed(&mut self) {
        self.places.push(BlockPlace { addr: 0, bytes: 0, path: Some(Path::Failed) });
    }

    /// Takes the breakdown after the last operation.
    pub(super) fn end(&mut self, allocator: &dyn DeviceAllocator, stream: StreamId) {
        if self.every > 0 {
            self.take_ledger(allocator, stream);
        }
    }

    fn take_ledger(&mut self, allocator: &dyn DeviceAllocator, stream: StreamId) {
        if let Some(snapshot) = allocator.snapshot() {
            let ledger = snapshot.ledger(stream);
            self.ledgers.push(LedgerAt { allocations: self.places.len(), frees: self.frees, ledger });
        }
    }
}

/// Records memory allocated from and released to the device.
#[derive(Debug, Default)]
pub(super) struct SegmentWatch {
    allocation: AtomicUsize,
    log: Mutex<SegmentLog>,
}

#[derive(Debug, Default)]
struct SegmentLog {
    changes: Vec<SegmentChange>,
    /// Bytes of each allocation, by address: the call that releases it has no size.
    sizes: HashMap<u64, u64>,
}

impl SegmentWatch {
    /// Sets the number of allocations.
    pub(super) fn at(&self, allocation: usize) {
        self.allocation.store(allocation, Relaxed);
    }

    pub(super) fn take(&self) -> Vec<SegmentChange> {
        std::mem::take(&mut self.log.lock().unwrap_or_else(PoisonError::into_inner).changes)
    }

    fn saw(&self, kind: CallKind, arguments: CallArguments, made: Option<DeviceAddr>) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let given = arguments.addr.map_or(0, DeviceAddr::get);
        let (addr, bytes, taken) = match kind {
            CallKind::MemAlloc => (made.map_or(0, DeviceAddr::get), arguments.bytes, true),
            CallKind::MemFree => (given, log.sizes.remove(&given).unwrap_or(0), false),
            CallKind::MemMap => (given, arguments.bytes, true),
            _ => (given, arguments.bytes, false),
        };
        if kind == CallKind::MemAlloc {
            log.sizes.insert(addr, bytes);
        }
        log.changes.push(SegmentChange { allocation: self.allocation.load(Relaxed), addr, bytes, taken });
    }
}

// SAFETY: changes no call.
unsafe impl Hook for SegmentWatch {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, _kind: CallKind, _arguments: CallArguments) -> DriverResult<()> {
        Ok(())
    }

    fn after(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments, (): (), outcome: CallOutcome) {
        let changes = matches!(kind, CallKind::MemAlloc | CallKind::MemFree | CallKind::MemMap | CallKind::MemUnmap);
        if changes && outcome.ok {
            self.saw(kind, arguments, outcome.addr);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::Event;
    use crate::replay::{Addresses, HistoryBuilder, ReplaySettings, replay, replay_watched};
    use std::sync::Arc;
    use vramlab_device::NullDriver;
    use vramlab_policies::backends::{CachingSettings, Selection};
    use vramlab_policies::contract::Action;

    #[test]
    fn a_replay_says_where_its_blocks_lay_and_what_it_held() {
        const MIB: u64 = 1 << 20;
        let mut builder = HistoryBuilder::new(None);
        let mut push = |action, addr, bytes| {
            builder.push(&Event { action, device: 0, addr, bytes, stream: 0, time_ns: 0 }).unwrap();
        };
        push(Action::SegmentAlloc, 64 * MIB, 2 * MIB);
        push(Action::Alloc, 64 * MIB, 1000);
        push(Action::Alloc, 64 * MIB + 1024, 500);
        push(Action::SegmentAlloc, 32 * MIB, 20 * MIB);
        push(Action::Alloc, 32 * MIB, 3 * MIB);
        push(Action::FreeRequested, 64 * MIB, 1000);
        push(Action::FreeCompleted, 64 * MIB, 1000);
        builder.expect_complete();
        let history = builder.finish(&CachingSettings::default()).unwrap();
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 40));
        let selection: Selection = "caching".parse().unwrap();
        let settings = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
        let mut watched = Watched::every(2);
        let report = replay_watched(&history, &selection, &driver, &settings, &mut watched).unwrap();
        let plain = replay(&history, &selection, &driver, &settings).unwrap();
        assert_eq!((&report.stats, &report.ledger), (&plain.stats, &plain.ledger), "watching changes nothing");
        let block = |addr, bytes, path| BlockPlace { addr, bytes, path: Some(path) };
        let expected = [
            block(64 * MIB, 1024, Path::DriverAlloc),
            block(64 * MIB + 1024, 512, Path::Split),
            block(32 * MIB, 3 * MIB, Path::DriverAlloc),
        ];
        assert_eq!(watched.places, expected);
        let taken = |allocation, addr, bytes| SegmentChange { allocation, addr, bytes, taken: true };
        assert_eq!(watched.segments[..2], [taken(0, 64 * MIB, 2 * MIB), taken(2, 32 * MIB, 20 * MIB)]);
        let values = |at: &LedgerAt| (at.allocations, at.frees, at.ledger.requested, at.ledger.reserved);
        let expected = [(2, 0, 1500, 2 * MIB), (3, 1, 3 * MIB + 500, 22 * MIB), (3, 1, 3 * MIB + 500, 22 * MIB)];
        assert_eq!(watched.ledgers.iter().map(values).collect::<Vec<_>>(), expected, "after each two, and at the end");
    }

    #[test]
    fn an_allocation_that_fails_has_no_place() {
        let mut builder = HistoryBuilder::new(None);
        for addr in [1 << 30, 2 << 30] {
            let event = Event { action: Action::Alloc, device: 0, addr, bytes: 1 << 24, stream: 0, time_ns: 0 };
            builder.push(&event).unwrap();
        }
        builder.expect_complete();
        let history = builder.finish(&CachingSettings::default()).unwrap();
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 24));
        let mut watched = Watched::default();
        let settings = ReplaySettings::default();
        replay_watched(&history, &"naive".parse().unwrap(), &driver, &settings, &mut watched).unwrap();
        let bytes: Vec<u64> = watched.places.iter().map(|place| place.bytes).collect();
        assert_eq!((bytes, watched.places[1].path), (vec![1 << 24, 0], Some(Path::Failed)));
        assert!(watched.ledgers.is_empty());
    }
}
