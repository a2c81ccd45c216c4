//! Peaks of sums over streams: exact while threads take turns, an upper bound when they do not.

use crate::common::{self, GIB, MIB, Random, allocate, build, check_stats, free, sim, work};
use std::sync::{Arc, Barrier};
use std::thread;
use vramlab_device::{
    CallKind, Driver, DriverError, FaultyDriver, NullDriver, PoolSettings, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_policies::backends::{self, Caching, CachingSettings, StreamOrdered, caching, naive};
use vramlab_policies::{AllocError, Block, BlockState, DeviceAllocator, OomReport, Path, PoolKind, Selection, Stats};

const STREAMS: usize = 4;

/// Sums over the snapshot: for the small pool, the large pool and all, blocks and bytes allocated, active, requested bytes of
/// those, and free parts with their bytes.
fn levels(caching: &Caching) -> [[u64; 7]; 3] {
    let mut out = [[0; 7]; 3];
    for segment in caching.snapshot().unwrap().segments {
        let pool = usize::from(segment.pool == Some(PoolKind::Large));
        for block in &segment.blocks {
            let sums: &[(usize, u64)] = match block.state {
                BlockState::Allocated => &[(0, 1), (1, block.bytes), (2, 1), (3, block.bytes), (4, block.requested)],
                BlockState::PendingFree => &[(2, 1), (3, block.bytes), (4, block.requested)],
                BlockState::Free if segment.blocks.len() > 1 => &[(5, 1), (6, block.bytes)],
                BlockState::Free => &[],
            };
            for (quantity, amount) in sums {
                out[pool][*quantity] += amount;
                out[2][*quantity] += amount;
            }
        }
    }
    out
}

fn peaks(stats: &Stats) -> [[u64; 7]; 3] {
    let gauges = [
        stats.allocation,
        stats.allocated_bytes,
        stats.active,
        stats.active_bytes,
        stats.requested_bytes,
        stats.inactive_split.unwrap(),
        stats.inactive_split_bytes.unwrap(),
    ];
    [0, 1, 2].map(|scope| {
        gauges.map(|gauge| match scope {
            0 => gauge.small_pool.unwrap().peak,
            1 => gauge.large_pool.unwrap().peak,
            _ => gauge.all.peak,
        })
    })
}

/// The statistics are read only at the end: reading them ends leases, which must not be the reason why they are right.
#[test]
fn one_thread_on_several_streams_has_exact_peaks() {
    for seed in 0..12 {
        let device = sim(8 * GIB, SimMemory::None);
        let streams: Vec<StreamId> = (0..STREAMS).map(|_| device.stream_create().unwrap()).collect();
        let settings = CachingSettings { memory_limit: Some(GIB), ..CachingSettings::default() };
        let caching = Caching::new(Arc::clone(&device) as Arc<dyn Driver>, settings);
        let (mut random, mut expected) = (Random::new(seed), [[0u64; 7]; 3]);
        let mut live: Vec<(Block, StreamId)> = Vec::new();
        for step in 0..1_500u64 {
            match random.below(16) {
                // More at first, then fewer, so that peaks lie in the middle.
                0..9 if step < 900 || random.below(3) == 0 => {
                    let stream = streams[random.below(STREAMS as u64) as usize];
                    live.extend(allocate(&caching, random.size(24), stream).ok().map(|block| (block, stream)));
                }
                9..13 if !live.is_empty() => {
                    let (block, stream) = live.swap_remove(random.below(live.len() as u64) as usize);
                    if random.below(3) == 0 {
                        let user = streams[random.below(STREAMS as u64) as usize];
                        work(&device, user, 200_000);
                        caching.record_use(&block, user).unwrap();
                    }
                    free(&caching, block, stream).unwrap();
                }
                13 => device.stream_synchronize(streams[random.below(STREAMS as u64) as usize]).unwrap(),
                14 if random.below(20) == 0 => {
                    caching.trim(0).unwrap();
                }
                _ => {}
            }
            let now = levels(&caching);
            for (peaks, levels) in expected.iter_mut().zip(now) {
                for (peak, level) in peaks.iter_mut().zip(levels) {
                    *peak = level.max(*peak);
                }
            }
            if step == 400 {
                caching.reset_peaks();
                expected = now;
            }
        }
        let stats = caching.stats();
        check_stats(&stats);
        let actual = peaks(&stats);
        // Deferred frees are processed at the start of a request, which then takes other blocks; a read between requests does not
        // see the moment in between, in which there are more free parts than before and after.
        for scope in 0..3 {
            assert_eq!(actual[scope][..5], expected[scope][..5], "seed {seed}, scope {scope}");
            assert!(actual[scope][5] >= expected[scope][5] && actual[scope][6] >= expected[scope][6]);
        }
        for (block, stream) in live {
            free(&caching, block, stream).unwrap();
        }
    }
}

#[test]
fn threads_that_take_turns_have_exact_peaks() {
    let caching = Caching::new(Arc::new(NullDriver::new(1 << 40)), CachingSettings::default());
    let mut live = Vec::new();
    for turn in 0..20u64 {
        let stream = common::stream(1 + turn % 3);
        let caching = &caching;
        let take = move || allocate(caching, 100 * (turn + 1), stream).unwrap();
        live.push((thread::scope(|scope| scope.spawn(take).join()).unwrap(), stream));
    }
    let bytes: u64 = live.iter().map(|(block, _)| block.bytes()).sum();
    for (block, stream) in live {
        free(&caching, block, stream).unwrap();
    }
    let stats = caching.stats();
    assert_eq!((stats.allocated_bytes.all.peak, stats.allocation.all.peak), (bytes, 20));
    assert_eq!(stats.upper_bounds(), [""; 0]);
    assert_eq!(stats.active_bytes.all.peak, bytes);
}

#[test]
fn concurrent_threads_have_peaks_not_below_live_bytes() {
    const THREADS: u64 = 8;
    let caching = Caching::new(Arc::new(NullDriver::new(1 << 40)), CachingSettings::default());
    let together = Barrier::new(THREADS as usize);
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (caching, together) = (&caching, &together);
            scope.spawn(move || {
                let stream = common::stream(number + 1);
                for round in 0..2_000u64 {
                    let block = allocate(caching, 512 * (1 + round % 7), stream).unwrap();
                    free(caching, block, stream).unwrap();
                }
                let block = allocate(caching, MIB, stream).unwrap();
                together.wait();
                free(caching, block, stream).unwrap();
            });
        }
    });
    let stats = caching.stats();
    check_stats(&stats);
    let peak = stats.allocated_bytes.all.peak;
    assert!((THREADS * MIB..=THREADS * (MIB + 512 * 7)).contains(&peak), "{peak}");
    caching.reset_peaks();
    assert_eq!(caching.stats().allocated_bytes.all.peak, 0, "exact again");
}

#[test]
fn peaks_that_are_bounds_say_so() {
    let caching = Caching::new(Arc::new(NullDriver::new(1 << 40)), CachingSettings::default());
    // More changes of thread than are followed.
    for turn in 0..200u64 {
        let stream = common::stream(1 + turn % 2);
        let round = || free(&caching, allocate(&caching, MIB, stream).unwrap(), stream).unwrap();
        thread::scope(|scope| scope.spawn(round).join()).unwrap();
    }
    let stats = caching.stats();
    assert!(stats.allocated_bytes.all.peak > MIB, "no more than one block was ever held");
    for gauge in ["allocated_bytes", "active_bytes", "requested_bytes", "allocation", "inactive_split"] {
        assert!(stats.upper_bounds().contains(&gauge), "{gauge}: {:?}", stats.upper_bounds());
    }
    assert!(!stats.upper_bounds().contains(&"reserved_bytes"), "who grows takes turns");
    caching.reset_peaks();
    let stats = caching.stats();
    assert_eq!((stats.upper_bounds().len(), stats.allocated_bytes.all.peak), (0, 0), "exact again");
}

/// Fragmentation lets a pool grow while less is requested than before.
#[test]
fn pool_growth_below_the_requested_peak_takes_the_ledger() {
    for threshold in [u64::MAX, 64 * MIB, 0] {
        let driver: Arc<dyn Driver> = sim(4 * GIB, SimMemory::None);
        let settings = PoolSettings { release_threshold: threshold, ..PoolSettings::default() };
        let allocator = StreamOrdered::new(Arc::clone(&driver), settings).unwrap();
        let stream = driver.stream_create().unwrap();
        let take = |bytes| allocate(&allocator, bytes, stream).unwrap();
        let blocks: Vec<_> = (0..8).map(|_| take(16 * MIB)).collect();
        let mut live = Vec::new();
        for (number, block) in blocks.into_iter().enumerate() {
            if number % 2 == 0 {
                free(&allocator, block, stream).unwrap();
            } else {
                live.push(block);
            }
        }
        // 64 of 128 MiB are free, in fragments of 16.
        let large = take(40 * MIB);
        let (stats, ledger) = (allocator.stats(), allocator.ledger_at_peak());
        assert!(stats.requested_bytes.all.current < stats.requested_bytes.all.peak);
        assert_eq!(ledger.reserved, stats.reserved_bytes.all.peak, "{threshold}");
        assert_eq!((ledger.requested, ledger.peak_reserved), (104 * MIB, None), "{threshold}");
        assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
        live.into_iter().chain([large]).for_each(|block| assert!(free(&allocator, block, stream).is_ok()));
        allocator.trim(0).unwrap();
        allocator.reset_peaks();
        assert_eq!((allocator.stats().reserved_bytes.all.peak, allocator.ledger_at_peak().reserved), (0, 0));
        // After a trim the same addresses are new ones.
        let again = take(40 * MIB);
        let ledger = allocator.ledger_at_peak();
        assert_eq!((ledger.reserved, ledger.peak_reserved), (64 * MIB, None), "{threshold}");
        free(&allocator, again, stream).unwrap();
    }
}

/// The number of synchronises that release memory which an allocation then reserves at a known address.
#[test]
fn a_pool_with_a_threshold_has_its_ledger_taken_at_the_peak_too() {
    for threshold in [0, 32 * MIB, 96 * MIB] {
        let driver: Arc<dyn Driver> = sim(4 * GIB, SimMemory::None);
        let settings = PoolSettings { release_threshold: threshold, ..PoolSettings::default() };
        let allocator = StreamOrdered::new(Arc::clone(&driver), settings).unwrap();
        let streams = [(); 2].map(|()| driver.stream_create().unwrap());
        let (mut random, mut live) = (Random::new(threshold + 1), Vec::new());
        let (mut highest, mut requested_then) = (0, 0);
        for step in 0..2_000 {
            let stream = streams[random.below(2) as usize];
            if random.below(5) < 3 && live.len() < 12 || live.is_empty() {
                live.push((allocate(&allocator, 1 + random.below(24 * MIB), stream).unwrap(), stream));
                let stats = allocator.stats();
                if stats.reserved_bytes.all.current > highest {
                    (highest, requested_then) = (stats.reserved_bytes.all.current, stats.requested_bytes.all.current);
                }
            } else {
                let (block, owner) = live.swap_remove(random.below(live.len() as u64) as usize);
                free(&allocator, block, owner).unwrap();
            }
            if random.below(10) == 0 {
                driver.device_synchronize().unwrap();
            }
            let ledger = allocator.ledger_at_peak();
            assert_eq!((ledger.reserved, ledger.requested), (highest, requested_then), "{threshold}, step {step}");
            assert_eq!(ledger.peak_reserved, None);
        }
        live.into_iter().for_each(|(block, stream)| assert!(free(&allocator, block, stream).is_ok()));
    }
}

#[test]
fn a_peak_that_was_not_seen_is_told_beside_the_ledger() {
    let device: Arc<dyn Driver> = sim(4 * GIB, SimMemory::None);
    let faulty = Arc::new(FaultyDriver::new(device));
    let driver: Arc<dyn Driver> = Arc::clone(&faulty) as _;
    let allocator = StreamOrdered::new(Arc::clone(&driver), PoolSettings::default()).unwrap();
    let stream = driver.stream_create().unwrap();
    let small = allocate(&allocator, 10 * MIB, stream).unwrap();
    // The counters cannot be read when the pool grows.
    faulty.fail(CallKind::PoolAttribute, 0, DriverError::ILLEGAL_STATE);
    let large = allocate(&allocator, 100 * MIB, stream).unwrap();
    assert_eq!(faulty.injected(), 1);
    let ledger = allocator.ledger_at_peak();
    assert_eq!((ledger.reserved, ledger.requested), (32 * MIB, 10 * MIB), "as observed");
    assert_eq!(ledger.peak_reserved, Some(allocator.stats().reserved_bytes.all.peak));
    free(&allocator, large, stream).unwrap();
    // Peaks that do not restart are bounds.
    faulty.fail(CallKind::PoolAttribute, 0, DriverError::ILLEGAL_STATE);
    allocator.reset_peaks();
    assert_eq!(allocator.stats().upper_bounds(), ["reserved_bytes"]);
    allocator.reset_peaks();
    assert_eq!(allocator.stats().upper_bounds(), [""; 0]);
    free(&allocator, small, stream).unwrap();
}

#[test]
fn a_peak_that_is_reached_again_keeps_its_ledger() {
    for kind in backends::all() {
        let driver: Arc<dyn Driver> = sim(GIB, SimMemory::None);
        let (allocator, stream) = (build(kind, &driver), driver.stream_create().unwrap());
        let round = |bytes| {
            let block = allocate(allocator.as_ref(), bytes, stream).unwrap();
            free(allocator.as_ref(), block, stream).unwrap();
            allocator.trim(0).unwrap();
            allocator.ledger_at_peak()
        };
        let ledger = round(600_000);
        assert_eq!(ledger.requested, 600_000, "{kind}");
        let again = round(300_000);
        if again.reserved > ledger.reserved {
            // Segments that grow with each.
            assert_eq!(again.requested, 300_000, "{kind}: a higher peak has a ledger of its own");
        } else {
            assert_eq!(again, ledger, "{kind}: the peak was not exceeded");
        }
    }
}

/// `naive` reserves exactly the requested bytes, except where the driver refuses a free.
#[test]
fn a_peak_that_naive_reaches_again_keeps_its_ledger() {
    let faulty = Arc::new(FaultyDriver::new(sim(GIB, SimMemory::None)));
    let driver: Arc<dyn Driver> = Arc::clone(&faulty) as _;
    let (naive, stream) = (build(&naive::BACKEND, &driver), driver.stream_create().unwrap());
    let take = || allocate(naive.as_ref(), 300_000, stream).unwrap();
    let (first, second) = (take(), take());
    let ledger = naive.ledger_at_peak();
    assert_eq!((ledger.reserved, ledger.requested, ledger.pending), (600_000, 600_000, 0));
    faulty.fail(CallKind::MemFree, 0, DriverError::ILLEGAL_STATE);
    free(naive.as_ref(), first, stream).unwrap_err();
    free(naive.as_ref(), second, stream).unwrap();
    let third = take();
    assert_eq!(naive.stats().reserved_bytes.all.current, 600_000);
    assert_eq!(naive.ledger_at_peak(), ledger, "the peak was not exceeded");
    let fourth = take();
    let ledger = naive.ledger_at_peak();
    assert_eq!((ledger.reserved, ledger.requested, ledger.pending), (900_000, 600_000, 300_000));
    [third, fourth].into_iter().for_each(|block| assert!(free(naive.as_ref(), block, stream).is_ok()));
    assert_eq!(naive.trim(0).unwrap(), 300_000);
}

// Reading statistics and snapshots changes nothing: `caching` behaves equally whether it is read or not.

const WATCHED_STREAMS: u64 = 2;
/// Sizes at the edges of both pools, few enough that the same ones recur.
const SIZES: [u64; 10] = [1, 500, 512, 513, 4096, 300 << 10, MIB - 1, MIB, MIB + 1, 3 * MIB];

/// An allocator on a device of its own.
struct Side {
    device: Arc<SimDriver>,
    caching: Caching,
    streams: Vec<StreamId>,
    live: Vec<(Block, StreamId)>,
    /// Whether everything is read after each call.
    watched: bool,
    /// The results for the client.
    results: Vec<(u64, u64, Path)>,
}

impl Side {
    fn new(watched: bool) -> Self {
        let device = sim(GIB, SimMemory::None);
        let streams = (0..WATCHED_STREAMS).map(|_| device.stream_create().unwrap()).collect();
        let settings = CachingSettings { memory_limit: Some(16 * MIB), ..CachingSettings::default() };
        let caching = Caching::new(Arc::clone(&device) as Arc<dyn Driver>, settings);
        Self { device, caching, streams, live: Vec::new(), watched, results: Vec::new() }
    }

    fn allocate(&mut self, bytes: u64, stream: StreamId) -> Option<Block> {
        let block = match allocate(&self.caching, bytes, stream) {
            Err(AllocError::OutOfMemory(_)) => None,
            block => Some(block.unwrap()),
        };
        self.results.extend(block.as_ref().map(|block| (block.addr().get(), block.bytes(), block.path())));
        self.look();
        block
    }

    fn free(&mut self, block: Block, stream: StreamId) {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        let path = free(&self.caching, block, stream).unwrap();
        self.results.push((addr, bytes, path));
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
        let stream = self.streams[random.below(WATCHED_STREAMS) as usize];
        let which = random.below(self.live.len().max(1) as u64) as usize;
        let bytes = SIZES[random.below(SIZES.len() as u64) as usize];
        match random.below(24) {
            // The same repeatedly, which a cache may be tempted to skip.
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
        assert_eq!(plain.results, watched.results, "seed {seed}");
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
    let figures = |gauge: vramlab_policies::Gauge| (gauge.current, gauge.peak, gauge.allocated, gauge.freed);
    assert_eq!(figures(stats.allocation.all), (0, 1, 1_000, 1_000));
    assert_eq!(figures(stats.allocated_bytes.all), (0, 1_024, 1_024_000, 1_024_000));
    assert_eq!(figures(stats.requested_bytes.all), (0, 700, 700_000, 700_000));
    // The remainder of the segment is a part while the block is live.
    assert_eq!(figures(stats.inactive_split.unwrap().all), (0, 1, 1_000, 1_000));
    assert_eq!(side.results.iter().filter(|(_, _, path)| *path == Path::Split).count(), 999);
    assert_eq!(side.results.iter().filter(|(_, _, path)| *path == Path::Coalesce).count(), 1_000);
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
    // A block of a caller that violates the rules of `deallocate`.
    // SAFETY: a bitwise copy of a block without a destructor; only the allocator's checks see it.
    let copy = unsafe { std::ptr::read(&block) };
    side.free(block, stream);
    assert!(matches!(free(&side.caching, copy, stream), Err(AllocError::ForeignBlock { .. })));
    assert_eq!(side.caching.stats().allocation.all.allocated, 4);
    assert_eq!(side.caching.stats().allocation.all.freed, 4);
}

// The contents of an out-of-memory error: the memory at that moment, and the remedy.

fn report(error: AllocError) -> OomReport {
    let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    *report
}

#[test]
fn report_names_largest_free_block_and_bytes_of_other_streams() {
    let driver: Arc<dyn Driver> = sim(64 * MIB, SimMemory::None);
    let caching = build(&caching::BACKEND, &driver);
    let [own, other] = [(); 2].map(|()| driver.stream_create().unwrap());
    let take = |bytes, stream| allocate(caching.as_ref(), bytes, stream).unwrap();
    // In segments of 20 MiB: free parts of 3, 5 and 4 MiB between live blocks.
    let blocks = [3, 6, 5, 2, 4].map(|mib| take(mib * MIB, own));
    let elsewhere = [7, 2].map(|mib| take(mib * MIB, other));
    let small = take(1000, own);
    let mut live = Vec::new();
    for (number, block) in blocks.into_iter().enumerate() {
        if number % 2 == 0 { assert!(free(caching.as_ref(), block, own).is_ok()) } else { live.push((block, own)) }
    }
    let [freed, held] = elsewhere;
    free(caching.as_ref(), freed, other).unwrap();
    live.extend([(held, other), (small, own)]);
    let refusal = report(allocate(caching.as_ref(), 30 * MIB, own).unwrap_err());
    assert_eq!(refusal.reserved_bytes, 42 * MIB);
    assert_eq!(refusal.active_bytes, 10 * MIB + 1024);
    assert_eq!(refusal.largest_free_bytes, Some(5 * MIB), "{refusal:?}");
    // 7 MiB in front of the live block, 11 behind it.
    assert_eq!(refusal.other_streams_free_bytes, Some(18 * MIB));
    assert_eq!((refusal.requested_bytes, refusal.needed_bytes), (30 * MIB, 30 * MIB));
    assert!(refusal.to_string().contains("largest free block 5 MiB"), "{refusal}");
    for (block, stream) in live {
        free(caching.as_ref(), block, stream).unwrap();
    }
}

/// A segment of 20 MiB is split in five, and every other block is freed: 12 MiB in three fragments, of which 10 are requested.
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
