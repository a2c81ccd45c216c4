//! Reading statistics and snapshots changes nothing: `caching` does the same whether it is watched or not.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::{GIB, MIB, Random, allocate, build, check_stats, free, sim, work};
use std::sync::Arc;
use vramlab::backends::{Caching, CachingSettings, caching};
use vramlab::{AllocError, Block, DeviceAllocator, Driver, OomReport, Path, Selection, SimDriver, SimMemory, StreamId};

const STREAMS: u64 = 2;
/// Sizes at the edges of both pools, few enough that the same ones come again and again.
const SIZES: [u64; 10] = [1, 500, 512, 513, 4096, 300 << 10, MIB - 1, MIB, MIB + 1, 3 * MIB];

/// An allocator on a device of its own.
struct Side {
    device: Arc<SimDriver>,
    caching: Caching,
    streams: Vec<StreamId>,
    live: Vec<(Block, StreamId)>,
    /// Whether everything is looked at after each call.
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
            self.caching.snapshot().unwrap();
        }
    }

    /// One random operation; equal random numbers make equal operations.
    fn step(&mut self, random: &mut Random) {
        let stream = self.streams[random.below(STREAMS) as usize];
        let which = random.below(self.live.len().max(1) as u64) as usize;
        let bytes = SIZES[random.below(SIZES.len() as u64) as usize];
        match random.below(24) {
            // The same over and over, which a cache may be tempted not to carry out.
            0..8 => {
                for _ in 0..1 + random.below(5) {
                    let Some(block) = self.allocate(bytes, stream) else { return };
                    self.free(block, stream);
                }
            }
            8..15 => {
                let block = self.allocate(bytes, stream);
                self.live.extend(block.map(|block| (block, stream)));
            }
            15..20 if !self.live.is_empty() => {
                let (block, stream) = self.live.swap_remove(which);
                self.free(block, stream);
            }
            20 if !self.live.is_empty() => {
                work(&self.device, stream, 10_000);
                self.caching.record_use(&self.live[which].0, stream).unwrap();
            }
            21 => self.device.device_synchronize().unwrap(),
            22 => self.caching.reset_peaks(),
            23 => drop(self.caching.trim(0).unwrap()),
            _ => {}
        }
    }
}

#[test]
fn looking_changes_nothing() {
    for seed in 0..200 {
        let (mut plain, mut watched) = (Side::new(false), Side::new(true));
        for side in [&mut plain, &mut watched] {
            let mut random = Random::new(seed);
            (0..60).for_each(|_| side.step(&mut random));
            for (block, stream) in std::mem::take(&mut side.live) {
                side.free(block, stream);
            }
        }
        assert_eq!(plain.seen, watched.seen, "seed {seed}");
        assert_eq!(plain.caching.stats(), watched.caching.stats(), "seed {seed}");
        assert_eq!(plain.caching.snapshot(), watched.caching.snapshot(), "seed {seed}");
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

// What an out-of-memory error says of the memory that there was, and of what would have helped.

fn report(error: AllocError) -> OomReport {
    let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    *report
}

#[test]
fn the_largest_free_block_and_the_bytes_of_other_streams_are_named() {
    let driver: Arc<dyn Driver> = sim(64 * MIB, SimMemory::None);
    let caching = build(&caching::BACKEND, &driver);
    let [own, other] = [(); 2].map(|()| driver.stream_create().unwrap());
    let take = |bytes, stream| allocate(caching.as_ref(), bytes, stream).unwrap();
    // In segments of 20 MiB: free parts of 3, 5 and 4 MiB between blocks that are held.
    let blocks = [3, 6, 5, 2, 4].map(|mib| take(mib * MIB, own));
    let elsewhere = [7, 2].map(|mib| take(mib * MIB, other));
    let small = take(1000, own);
    let mut kept = Vec::new();
    for (number, block) in blocks.into_iter().enumerate() {
        if number % 2 == 0 { assert!(free(caching.as_ref(), block, own).is_ok()) } else { kept.push((block, own)) }
    }
    let [freed, held] = elsewhere;
    free(caching.as_ref(), freed, other).unwrap();
    kept.extend([(held, other), (small, own)]);
    let found = report(allocate(caching.as_ref(), 30 * MIB, own).unwrap_err());
    assert_eq!(found.reserved_bytes, 42 * MIB);
    assert_eq!(found.active_bytes, 10 * MIB + 1024);
    assert_eq!(found.largest_free_bytes, Some(5 * MIB), "{found:?}");
    // 7 MiB before what is held, 11 behind it.
    assert_eq!(found.other_streams_free_bytes, Some(18 * MIB));
    assert_eq!((found.requested_bytes, found.needed_bytes), (30 * MIB, 30 * MIB));
    assert!(found.to_string().contains("largest free block 5 MiB"), "{found}");
    for (block, stream) in kept {
        free(caching.as_ref(), block, stream).unwrap();
    }
}

/// A segment of 20 MiB is cut in five, and every other piece is freed: 12 MiB in three, of which 10 are asked for.
fn in_pieces(text: &str, room: u64) -> String {
    let driver: Arc<dyn Driver> = sim(room, SimMemory::None);
    let allocator = text.parse::<Selection>().unwrap().build(&driver).unwrap();
    let stream = driver.stream_create().unwrap();
    let blocks = [(); 5].map(|()| allocate(allocator.as_ref(), 4 * MIB, stream).unwrap());
    let (odd, even): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(number, _)| number % 2 == 1);
    let give_back = |blocks: Vec<(usize, Block)>| {
        assert!(blocks.into_iter().all(|(_, block)| free(allocator.as_ref(), block, stream).is_ok()));
    };
    give_back(even);
    let advice = report(allocate(allocator.as_ref(), 10 * MIB, stream).unwrap_err()).advice();
    give_back(odd);
    let (_, advice) = advice.split_once("(fragmentation): ").unwrap_or_else(|| panic!("{text}: {advice}"));
    advice.to_owned()
}

#[test]
fn the_advice_names_settings_that_the_allocator_has() {
    for (alloc, settings) in [
        ("caching", ", or set max_split_size, or use expandable segments (pytorch-expandable)"),
        ("caching:max_split_size=32M", ", or lower max_split_size, or use expandable segments (pytorch-expandable)"),
        ("pytorch", ", or set max_split_size, or use expandable segments (pytorch-expandable)"),
        ("lab", ", or set max_split_size, or use expandable segments (source=expandable)"),
        ("lab:split=always", ", or use expandable segments (source=expandable)"),
        ("lab:stream=steal", ", or set max_split_size"),
    ] {
        assert_eq!(in_pieces(alloc, 22 * MIB), format!("allocate large tensors first{settings}"), "{alloc}");
    }
    let pool = "rmm-pool:initial_pool_size=20M,maximum_pool_size=20M";
    assert_eq!(in_pieces(pool, 64 * MIB), "allocate large tensors first");
}
