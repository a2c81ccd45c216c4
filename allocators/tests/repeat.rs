//! Allocations that repeat the one before are not carried out one by one; nobody can tell.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::{GIB, MIB, allocate, check_stats, free, sim, work};
use proptest::prelude::*;
use proptest::sample::Index;
use std::sync::Arc;
use vramlab::backends::{Caching, CachingSettings};
use vramlab::{AllocError, Block, DeviceAllocator, Driver, Path, SimDriver, SimMemory, StreamId};

const STREAMS: usize = 2;

#[derive(Clone, Debug)]
enum Op {
    /// The same block again and again; `out` leaves the last one with the client.
    Rounds {
        bytes: u64,
        rounds: u32,
        out: bool,
        stream: usize,
    },
    /// Sizes that round to the same, in turn.
    Turns {
        bytes: u64,
        rounds: u32,
        stream: usize,
    },
    Free {
        which: Index,
    },
    RecordUse {
        which: Index,
        stream: usize,
    },
    Synchronize,
    ResetPeaks,
    Trim,
    Look,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let bytes = || {
        prop_oneof![
            4 => prop::sample::select(vec![1u64, 500, 512, 513, 4096, 300 << 10, MIB - 1, MIB]),
            1 => Just(MIB + 1),
            1 => 1..3 * MIB,
        ]
    };
    let stream = || 0..STREAMS;
    let op = prop_oneof![
        8 => (bytes(), 1..6u32, any::<bool>(), stream())
            .prop_map(|(bytes, rounds, out, stream)| Op::Rounds { bytes, rounds, out, stream }),
        2 => (bytes(), 1..5u32, stream()).prop_map(|(bytes, rounds, stream)| Op::Turns { bytes, rounds, stream }),
        5 => any::<Index>().prop_map(|which| Op::Free { which }),
        3 => (any::<Index>(), stream()).prop_map(|(which, stream)| Op::RecordUse { which, stream }),
        1 => Just(Op::Synchronize),
        1 => Just(Op::ResetPeaks),
        1 => Just(Op::Trim),
        1 => Just(Op::Look),
    ];
    prop::collection::vec(op, 1..60)
}

/// An allocator on a device of its own.
struct Side {
    device: Arc<SimDriver>,
    caching: Caching,
    streams: Vec<StreamId>,
    live: Vec<(Block, StreamId)>,
    /// Whether everything is looked at after each call, so that nothing can be left undone.
    watched: bool,
    /// What the client saw.
    seen: Vec<(u64, u64, Path)>,
}

impl Side {
    fn new(watched: bool) -> Self {
        let device = sim(GIB, SimMemory::None);
        let streams = (0..STREAMS).map(|_| device.stream_create().unwrap()).collect();
        let settings = CachingSettings { memory_limit: Some(16 * MIB), ..CachingSettings::default() };
        let caching = Caching::new(Arc::clone(&device) as Arc<dyn Driver>, settings);
        Self { device, caching, streams, live: Vec::new(), watched, seen: Vec::new() }
    }

    fn allocate(&mut self, bytes: u64, stream: StreamId) -> Option<Block> {
        let block = match allocate(&self.caching, bytes, stream) {
            Err(AllocError::OutOfMemory(_)) => None,
            block => Some(block.unwrap()),
        };
        self.seen.extend(block.as_ref().map(|block| (block.addr().get(), block.bytes(), block.path())));
        self.look();
        block
    }

    fn free(&mut self, block: Block, stream: StreamId) {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        let path = free(&self.caching, block, stream).unwrap();
        self.seen.push((addr, bytes, path));
        self.look();
    }

    fn look(&self) {
        if self.watched {
            check_stats(&self.caching.stats());
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Rounds { bytes, rounds, out, stream } => {
                let stream = self.streams[*stream];
                for round in 0..*rounds {
                    let Some(block) = self.allocate(*bytes, stream) else { return };
                    if *out && round + 1 == *rounds {
                        self.live.push((block, stream));
                    } else {
                        self.free(block, stream);
                    }
                }
            }
            Op::Turns { bytes, rounds, stream } => {
                let stream = self.streams[*stream];
                for round in 0..u64::from(*rounds) {
                    let Some(block) = self.allocate(bytes.saturating_sub(round % 2).max(1), stream) else { return };
                    self.free(block, stream);
                }
            }
            Op::Free { which } if !self.live.is_empty() => {
                let (block, stream) = self.live.swap_remove(which.index(self.live.len()));
                self.free(block, stream);
            }
            Op::RecordUse { which, stream } if !self.live.is_empty() => {
                let (block, _) = &self.live[which.index(self.live.len())];
                work(&self.device, self.streams[*stream], 10_000);
                self.caching.record_use(block, self.streams[*stream]).unwrap();
            }
            Op::Synchronize => self.device.device_synchronize().unwrap(),
            Op::ResetPeaks => self.caching.reset_peaks(),
            Op::Trim => drop(self.caching.trim(0).unwrap()),
            Op::Free { .. } | Op::RecordUse { .. } | Op::Look => {}
        }
    }
}

/// `PROPTEST_CASES` sets another number.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 1_500 };
    ProptestConfig { cases, failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn looking_changes_nothing(ops in ops()) {
        let (mut plain, mut watched) = (Side::new(false), Side::new(true));
        for op in &ops {
            plain.apply(op);
            watched.apply(op);
            if matches!(op, Op::Look) {
                prop_assert_eq!(plain.caching.stats(), watched.caching.stats());
                prop_assert_eq!(plain.caching.snapshot(), watched.caching.snapshot());
            }
        }
        prop_assert_eq!(&plain.seen, &watched.seen);
        prop_assert_eq!(plain.caching.stats(), watched.caching.stats());
        prop_assert_eq!(plain.caching.snapshot(), watched.caching.snapshot());
        for side in [&mut plain, &mut watched] {
            for (block, stream) in std::mem::take(&mut side.live) {
                side.free(block, stream);
            }
        }
        prop_assert_eq!(plain.caching.stats(), watched.caching.stats());
    }
}

#[test]
fn a_thousand_rounds_are_a_thousand_allocations() {
    let mut side = Side::new(false);
    let stream = side.streams[0];
    for _ in 0..1_000 {
        let block = side.allocate(700, stream).unwrap();
        side.free(block, stream);
    }
    let stats = side.caching.stats();
    let figures = |gauge: vramlab::Gauge| (gauge.current, gauge.peak, gauge.allocated, gauge.freed);
    assert_eq!(figures(stats.allocation.all), (0, 1, 1_000, 1_000));
    assert_eq!(figures(stats.allocated_bytes.all), (0, 1_024, 1_024_000, 1_024_000));
    assert_eq!(figures(stats.requested_bytes.all), (0, 700, 700_000, 700_000));
    // The rest of the segment is a part while the block is out.
    assert_eq!(figures(stats.inactive_split.unwrap().all), (0, 1, 1_000, 1_000));
    assert_eq!(side.seen.iter().filter(|(_, _, path)| *path == Path::Split).count(), 999);
    assert_eq!(side.seen.iter().filter(|(_, _, path)| *path == Path::Coalesce).count(), 1_000);
}

#[test]
fn a_block_that_came_back_is_not_taken_twice() {
    let mut side = Side::new(false);
    let stream = side.streams[0];
    for _ in 0..3 {
        let block = side.allocate(512, stream).unwrap();
        side.free(block, stream);
    }
    let block = side.allocate(512, stream).unwrap();
    // What a caller that breaks the rules of `deallocate` would hold.
    // SAFETY: a bitwise copy of a block without a destructor; only the allocator's checks see it.
    let copy = unsafe { std::ptr::read(&block) };
    side.free(block, stream);
    assert!(matches!(free(&side.caching, copy, stream), Err(AllocError::ForeignBlock { .. })));
    assert_eq!(side.caching.stats().allocation.all.allocated, 4);
    assert_eq!(side.caching.stats().allocation.all.freed, 4);
}
