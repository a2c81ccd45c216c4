//! Whole layouts of the caching backend after given sequences: splits, unsplit blocks, coalescing. Blocks are (offset, bytes,
//! state): **A**llocated, **P**ending free, **F**ree.

use crate::common::{GIB, KIB, MIB, allocate, free, layout, sim, work};
use std::sync::Arc;
use vramlab_device::{Driver, SimDriver, StreamId, sim::SimMemory};
use vramlab_policies::backends::{Caching, CachingSettings};
use vramlab_policies::instruments::assert_layout;
use vramlab_policies::{AllocError, Block, DeviceAllocator, Path};

type Segments = Vec<Vec<(u64, u64, char)>>;

struct Bench {
    sim: Arc<SimDriver>,
    caching: Caching,
    stream: StreamId,
    other: StreamId,
}

impl Bench {
    fn with(settings: CachingSettings) -> Self {
        let sim = sim(4 * GIB, SimMemory::None);
        let (stream, other) = (sim.stream_create().unwrap(), sim.stream_create().unwrap());
        let caching = Caching::new(Arc::clone(&sim) as Arc<dyn Driver>, settings);
        Self { sim, caching, stream, other }
    }

    fn new() -> Self {
        Self::with(CachingSettings::default())
    }

    fn take(&self, bytes: u64) -> Block {
        allocate(&self.caching, bytes, self.stream).unwrap()
    }

    fn give(&self, block: Block) -> Path {
        free(&self.caching, block, self.stream).unwrap()
    }

    fn layout(&self) -> Segments {
        let snapshot = self.caching.snapshot().unwrap();
        assert_layout(&snapshot);
        layout(&snapshot)
    }
}

#[test]
fn the_small_pool_splits_its_segment_from_the_front() {
    let bench = Bench::new();
    let a = bench.take(1);
    assert_eq!((a.path(), a.bytes()), (Path::DriverAlloc, 512));
    assert_eq!(bench.layout(), [vec![(0, 512, 'A'), (512, 2 * MIB - 512, 'F')]]);
    let b = bench.take(513);
    assert_eq!((b.path(), b.bytes()), (Path::Split, 1024));
    assert_eq!(bench.layout(), [vec![(0, 512, 'A'), (512, 1024, 'A'), (1536, 2 * MIB - 1536, 'F')]]);
    // The remainder is used to the last 512 bytes.
    let c = bench.take(MIB);
    let d = bench.take(MIB - 1536);
    assert_eq!(d.path(), Path::Hit);
    assert_eq!(
        bench.layout(),
        [vec![(0, 512, 'A'), (512, 1024, 'A'), (1536, MIB, 'A'), (1536 + MIB, MIB - 1536, 'A')]]
    );
    let e = bench.take(512);
    assert_eq!(e.path(), Path::DriverAlloc, "the first segment is full");
    for block in [a, b, c, d, e] {
        bench.give(block);
    }
    assert_eq!(bench.layout(), [vec![(0, 2 * MIB, 'F')], vec![(0, 2 * MIB, 'F')]]);
}

#[test]
fn requests_above_1_mib_share_segments_of_20_mib() {
    let bench = Bench::new();
    let a = bench.take(MIB + 1);
    assert_eq!(bench.layout(), [vec![(0, MIB + 512, 'A'), (MIB + 512, 19 * MIB - 512, 'F')]]);
    let b = bench.take(10 * MIB - 512);
    let rest = 9 * MIB;
    assert_eq!(bench.layout(), [vec![(0, MIB + 512, 'A'), (MIB + 512, 10 * MIB - 512, 'A'), (11 * MIB, rest, 'F')]]);
    // A small request never takes from the large pool.
    let c = bench.take(MIB);
    assert_eq!(c.path(), Path::DriverAlloc);
    assert_eq!(bench.layout()[1], [(0, MIB, 'A'), (MIB, MIB, 'F')]);
    for block in [a, b, c] {
        bench.give(block);
    }
}

#[test]
fn a_large_block_is_split_only_when_more_than_1_mib_is_left() {
    for (bytes, expected) in [
        (19 * MIB, vec![(0, 20 * MIB, 'A')]),
        (19 * MIB - 512, vec![(0, 19 * MIB - 512, 'A'), (19 * MIB - 512, MIB + 512, 'F')]),
    ] {
        let bench = Bench::new();
        // A free segment of 20 MiB.
        let first = bench.take(2 * MIB);
        bench.give(first);
        let block = bench.take(bytes);
        assert_eq!(bench.layout(), [expected]);
        assert_eq!(block.bytes() == bytes, block.path() == Path::Split);
        bench.give(block);
    }
}

#[test]
fn requests_from_10_mib_on_get_segments_of_their_own() {
    for (bytes, segment) in [(10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB), (GIB, GIB)] {
        let bench = Bench::new();
        let block = bench.take(bytes);
        assert_eq!(block.path(), Path::DriverAlloc);
        let rounded = bytes.next_multiple_of(512);
        let expected = if segment - rounded > MIB {
            vec![(0, rounded, 'A'), (rounded, segment - rounded, 'F')]
        } else {
            vec![(0, segment, 'A')]
        };
        assert_eq!(bench.layout(), [expected], "{bytes}");
        bench.give(block);
        assert_eq!(bench.layout(), [vec![(0, segment, 'F')]]);
    }
}

#[test]
fn neighbours_merge_in_every_order_of_frees() {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for order in orders {
        let bench = Bench::new();
        let mut blocks: Vec<Option<Block>> = (0..3).map(|_| Some(bench.take(256 * KIB))).collect();
        let tail = bench.take(MIB + 256 * KIB - 512 - MIB / 4);
        let tail_bytes = tail.bytes();
        let mut free_parts = [false; 3];
        for index in order {
            let touches_free = (index > 0 && free_parts[index - 1]) || (index < 2 && free_parts[index + 1]);
            let path = bench.give(blocks[index].take().unwrap());
            free_parts[index] = true;
            assert_eq!(path, if touches_free { Path::Coalesce } else { Path::Hit }, "{order:?}");
            let mut expected: Vec<(u64, u64, char)> = Vec::new();
            for (part, free) in free_parts.iter().enumerate() {
                let at = part as u64 * 256 * KIB;
                match expected.last_mut() {
                    Some(last) if *free && last.2 == 'F' => last.1 += 256 * KIB,
                    _ => expected.push((at, 256 * KIB, if *free { 'F' } else { 'A' })),
                }
            }
            expected.push((768 * KIB, tail_bytes, 'A'));
            let rest = 2 * MIB - 768 * KIB - tail_bytes;
            expected.push((768 * KIB + tail_bytes, rest, 'F'));
            assert_eq!(bench.layout(), [expected], "{order:?}");
        }
        assert_eq!(bench.give(tail), Path::Coalesce, "the last block joins both sides");
        assert_eq!(bench.layout(), [vec![(0, 2 * MIB, 'F')]]);
    }
}

#[test]
fn best_fit_takes_the_smallest_and_then_the_lowest() {
    let bench = Bench::new();
    let sizes = [64 * KIB, 512, 32 * KIB, 512, 32 * KIB, 512];
    let blocks: Vec<Block> = sizes.iter().map(|bytes| bench.take(*bytes)).collect();
    let addresses: Vec<u64> = blocks.iter().map(|block| block.addr().get()).collect();
    let mut live = Vec::new();
    for (index, block) in blocks.into_iter().enumerate() {
        if index % 2 == 0 {
            bench.give(block);
        } else {
            live.push(block);
        }
    }
    let first = bench.take(20 * KIB);
    let second = bench.take(20 * KIB);
    let third = bench.take(20 * KIB);
    let got = [&first, &second, &third].map(|block| block.addr().get());
    assert_eq!(got, [addresses[2], addresses[4], addresses[0]]);
    for block in live.into_iter().chain([first, second, third]) {
        bench.give(block);
    }
    assert_eq!(bench.layout(), [vec![(0, 2 * MIB, 'F')]]);
}

#[test]
fn two_streams_keep_apart() {
    let bench = Bench::new();
    let mine = bench.take(4 * MIB);
    bench.give(mine);
    let other = allocate(&bench.caching, 4 * MIB, bench.other).unwrap();
    assert_eq!(other.path(), Path::DriverAlloc, "free blocks of another stream are not taken");
    assert_eq!(bench.layout(), [vec![(0, 4 * MIB, 'A'), (4 * MIB, 16 * MIB, 'F')], vec![(0, 20 * MIB, 'F')]]);
    let ledger = bench.caching.snapshot().unwrap().ledger(bench.other);
    assert_eq!((ledger.stream, ledger.hard, ledger.soft), (20 * MIB, 16 * MIB, 0));
    free(&bench.caching, other, bench.other).unwrap();
}

#[test]
fn pending_block_keeps_its_address_until_the_use_completes() {
    let bench = Bench::new();
    let (a, b) = (bench.take(2 * MIB), bench.take(3 * MIB));
    work(&bench.sim, bench.other, 1_000_000);
    bench.caching.record_use(&a, bench.other).unwrap();
    assert_eq!(bench.give(a), Path::Deferred);
    assert_eq!(bench.give(b), Path::Coalesce, "b joins the tail, not the pending neighbour");
    assert_eq!(bench.layout(), [vec![(0, 2 * MIB, 'P'), (2 * MIB, 18 * MIB, 'F')]]);
    let c = bench.take(2 * MIB);
    assert_eq!(bench.layout(), [vec![(0, 2 * MIB, 'P'), (2 * MIB, 2 * MIB, 'A'), (4 * MIB, 16 * MIB, 'F')]]);
    bench.sim.stream_synchronize(bench.other).unwrap();
    let d = bench.take(MIB + 512);
    assert_eq!(
        bench.layout(),
        [vec![(0, 2 * MIB, 'A'), (2 * MIB, 2 * MIB, 'A'), (4 * MIB, 16 * MIB, 'F')]],
        "the freed block is the best fit, and too little is left of it to split"
    );
    bench.give(c);
    bench.give(d);
    assert_eq!(bench.layout(), [vec![(0, 20 * MIB, 'F')]]);
}

#[test]
fn max_split_size_keeps_oversize_blocks_whole() {
    let settings = CachingSettings { max_split_size: Some(32 * MIB), ..CachingSettings::default() };
    let bench = Bench::with(settings);
    let big = bench.take(64 * MIB);
    bench.give(big);
    let small = bench.take(12 * MIB);
    assert_eq!(small.path(), Path::DriverAlloc, "an oversize block is not for smaller requests");
    assert_eq!(bench.layout(), [vec![(0, 12 * MIB, 'A')], vec![(0, 64 * MIB, 'F')]]);
    let block = bench.take(45 * MIB);
    assert_eq!((block.path(), block.bytes()), (Path::Hit, 64 * MIB), "within 20 MiB, and never split");
    bench.give(block);
    let far = bench.take(44 * MIB);
    assert_eq!((far.path(), far.bytes()), (Path::DriverAlloc, 44 * MIB), "20 MiB larger is too large");
    let stats = bench.caching.stats();
    assert_eq!(stats.oversize_segments.unwrap().current, 2);
    assert_eq!(stats.oversize_allocations.unwrap().current, 1);
    bench.give(far);
    bench.give(small);
    assert_eq!(bench.caching.stats().oversize_allocations.unwrap().current, 0);
    bench.caching.trim(0).unwrap();
    assert_eq!(bench.caching.stats().oversize_segments.unwrap().current, 0);
}

#[test]
fn only_whole_segments_go_back_however_small_max_split_size_is() {
    // Smaller than a segment, which PyTorch would refuse: then parts of a segment are oversize, too.
    let settings =
        CachingSettings { max_split_size: Some(4 * MIB), memory_limit: Some(40 * MIB), ..CachingSettings::default() };
    let bench = Bench::with(settings);
    let a = bench.take(2 * MIB);
    assert_eq!(bench.layout(), [vec![(0, 2 * MIB, 'A'), (2 * MIB, 18 * MIB, 'F')]]);
    let b = bench.take(20 * MIB);
    let error = allocate(&bench.caching, 24 * MIB, bench.stream).unwrap_err();
    assert!(matches!(error, AllocError::OutOfMemory(_)), "{error}");
    assert_eq!(bench.layout(), [vec![(0, 20 * MIB, 'A')], vec![(0, 2 * MIB, 'A'), (2 * MIB, 18 * MIB, 'F')]]);
    bench.give(a);
    bench.give(b);
    bench.caching.trim(0).unwrap();
    assert_eq!(bench.layout(), Segments::new());
}

#[test]
fn under_a_limit_idle_segments_make_room() {
    let settings = CachingSettings { memory_limit: Some(40 * MIB), ..CachingSettings::default() };
    let bench = Bench::with(settings);
    let (a, b) = (bench.take(18 * MIB), bench.take(18 * MIB));
    let error = allocate(&bench.caching, 4 * MIB, bench.stream).unwrap_err();
    let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    assert_eq!((report.limit_bytes, report.reserved_bytes, report.needed_bytes), (Some(40 * MIB), 36 * MIB, 20 * MIB));
    bench.give(a);
    let c = bench.take(30 * MIB - 18 * MIB + 8 * MIB);
    assert_eq!(c.path(), Path::Retry);
    assert_eq!(bench.caching.stats().num_alloc_retries, 2);
    assert_eq!(bench.layout().concat().len(), 2);
    bench.give(b);
    bench.give(c);
}

#[test]
fn a_block_freed_by_the_wait_is_missed_unless_asked_for() {
    // The flaw that PyTorch has and `retry_fit_after_sync` fixes: the wait for deferred frees makes a block usable in a segment
    // that is not releasable, and only a new segment is tried.
    for retry_fit_after_sync in [false, true] {
        let bench = Bench::with(CachingSettings {
            memory_limit: Some(20 * MIB),
            retry_fit_after_sync,
            ..CachingSettings::default()
        });
        let (a, b) = (bench.take(8 * MIB), bench.take(12 * MIB));
        work(&bench.sim, bench.other, 1_000_000);
        bench.caching.record_use(&a, bench.other).unwrap();
        bench.give(a);
        let again = allocate(&bench.caching, 8 * MIB, bench.stream);
        assert_eq!(again.is_ok(), retry_fit_after_sync);
        if let Ok(block) = again {
            assert_eq!(block.path(), Path::Retry);
            bench.give(block);
        }
        bench.give(b);
        assert_eq!(bench.layout(), [vec![(0, 20 * MIB, 'F')]]);
    }
}
