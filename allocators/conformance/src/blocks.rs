//! What one thread sees: requests, blocks, statistics, snapshots, trims, running out of memory.

use super::subject::Subject;
use super::support::{
    GIB, KIB, MIB, Random, check_ledger, check_nothing_held, check_snapshot, check_stats, read, write,
};
use super::{Bench, Device};
use vramlab_device::StreamId;
use vramlab_policies::backends::{self, SegmentUse, StreamUse};
use vramlab_policies::contract::{AllocError, Block, BlockState, Request, SegmentInfo, Snapshot};

/// In place of all other checks, on a device that lacks what the backend needs.
pub(super) fn a_device_that_lacks_what_is_needed_is_refused(bench: &Bench) {
    let error = bench.selection.build(&bench.driver).unwrap_err();
    assert!(matches!(error, AllocError::Unsupported { .. }), "{error}");
}

pub(super) fn zero_bytes_are_refused(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let error = allocator.try_take(0, stream).unwrap_err();
    assert!(matches!(error, AllocError::InvalidRequest { bytes: 0, .. }), "{error}");
    assert_eq!(allocator.stats().allocation.all.allocated, 0);
    assert_eq!(allocator.stats().num_device_alloc, 0);
}

pub(super) fn a_huge_request_is_refused_and_the_allocator_stays_usable(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    for bytes in [1 << 50, 1 << 62, (1 << 62) + 1, 1 << 63, u64::MAX - 511, u64::MAX] {
        let error = allocator.try_take(bytes, stream).unwrap_err();
        assert!(matches!(error, AllocError::OutOfMemory(_) | AllocError::InvalidRequest { .. }), "{bytes}: {error}");
        assert!(!error.to_string().contains('\n'));
    }
    assert_eq!(allocator.stats().allocation.all.allocated, 0);
    let block = allocator.take(MIB, stream);
    allocator.give(block, stream);
    check_nothing_held(&allocator.stats());
}

pub(super) fn alignment_up_to_256_is_kept_and_512_refused(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let mut blocks = Vec::new();
    for align in (0..=8).map(|log2| 1 << log2) {
        for bytes in [1, 3, 255, 256, 257, 4097, MIB + 1, 11 * MIB + 3] {
            let block = allocator.allocate(Request { bytes, align }, stream).unwrap();
            assert!(block.addr().get().is_multiple_of(align), "{align} {block:?}");
            assert!(block.bytes() >= bytes && block.requested() == bytes, "{block:?}");
            blocks.push(block);
        }
    }
    for align in [0, 3, 100, 512, 1 << 40] {
        let error = allocator.allocate(Request { bytes: 1024, align }, stream).unwrap_err();
        assert!(matches!(error, AllocError::InvalidRequest { .. }), "{error}");
    }
    allocator.give_all(blocks, stream);
    check_nothing_held(&allocator.stats());
}

/// Panics when two blocks share a byte.
fn assert_disjoint<'a>(blocks: impl Iterator<Item = &'a Block>) {
    let mut ranges: Vec<(u64, u64)> = blocks.map(|block| (block.addr().get(), block.bytes())).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{:#x?} overlap", pair);
    }
}

pub(super) fn live_blocks_are_disjoint(bench: &Bench) {
    let (allocator, mut random) = (bench.build(), Random::new(3));
    let streams = bench.streams::<3>();
    let mut live = Vec::new();
    for step in 0..400 {
        let stream = streams[random.below(3) as usize];
        live.push((allocator.take(random.size(24), stream), stream));
        if step % 3 == 0 {
            let (block, stream) = live.swap_remove(random.below(live.len() as u64) as usize);
            allocator.give(block, stream);
        }
        if step % 20 == 0 {
            assert_disjoint(live.iter().map(|(block, _)| block));
        }
    }
    assert_disjoint(live.iter().map(|(block, _)| block));
    allocator.give_each(live);
}

pub(super) fn patterns_survive_in_live_blocks(bench: &Bench) {
    if !bench.has_memory() {
        return;
    }
    let (allocator, stream, mut random) = (bench.build(), bench.stream(), Random::new(5));
    let driver = bench.driver.as_ref();
    let mut live: Vec<(Block, Vec<u8>)> = Vec::new();
    for round in 0..4 {
        for _ in 0..60 {
            let block = allocator.take(random.size(17), stream);
            let pattern: Vec<u8> = (0..block.requested()).map(|_| random.next() as u8).collect();
            write(driver, block.addr(), &pattern, stream);
            live.push((block, pattern));
        }
        for (block, pattern) in &live {
            assert_eq!(&read(driver, block.addr(), block.requested(), stream), pattern, "{block:?}");
        }
        let keep = if round == 3 { 0 } else { live.len() / 2 };
        while live.len() > keep {
            let (block, _) = live.swap_remove(random.below(live.len() as u64) as usize);
            allocator.give(block, stream);
        }
    }
    check_nothing_held(&allocator.stats());
}

pub(super) fn freed_memory_is_used_again_by_its_stream(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let sizes = [700, 100 * KIB, MIB, 3 * MIB, 12 * MIB];
    let round = |allocator: &Subject| {
        let blocks: Vec<Block> = sizes.iter().map(|bytes| allocator.take(*bytes, stream)).collect();
        let reserved = allocator.reserved();
        allocator.give_all(blocks, stream);
        reserved
    };
    let first = round(&allocator);
    for _ in 0..50 {
        assert_eq!(round(&allocator), first, "the same round should need the same memory");
    }
    assert_eq!(allocator.stats().reserved_bytes.all.peak, first);
    if bench.capabilities().caches && bench.capabilities().segments.is_shared() {
        let before = allocator.stats().num_device_alloc;
        round(&allocator);
        assert_eq!(allocator.stats().num_device_alloc, before, "what is kept should serve the round again");
    }
    if bench.capabilities().follows_pytorch {
        // The small pool's one segment, and one of 20 MiB for 3 and 12 MiB.
        assert_eq!(allocator.stats().num_device_alloc, 2);
    }
}

pub(super) fn freed_memory_stays_with_its_stream_where_that_is_said(bench: &Bench) {
    let (allocator, driver) = (bench.build(), bench.driver.as_ref());
    let [owner, other] = bench.streams();
    let block = allocator.take(40 * MIB, owner);
    let reserved = allocator.reserved();
    allocator.give(block, owner);
    // Nothing of its work is left.
    driver.device_synchronize().unwrap();
    let block = allocator.take(40 * MIB, other);
    let grows = allocator.reserved() > reserved;
    // Where it may serve others, new memory may still come first.
    assert!(grows || bench.capabilities().streams == StreamUse::Any, "another stream has the memory");
    allocator.give(block, other);
}

pub(super) fn statistics_agree_with_what_was_done(bench: &Bench) {
    let (allocator, stream, mut random) = (bench.build(), bench.stream(), Random::new(8));
    let (mut live, mut allocated, mut freed) = (Vec::new(), 0, 0);
    for step in 0..600 {
        let grows = random.below(100) < if step < 400 { 60 } else { 20 };
        if grows || live.is_empty() {
            live.push(allocator.take(random.size(23), stream));
            allocated += 1;
        } else {
            let block = live.swap_remove(random.below(live.len() as u64) as usize);
            allocator.give(block, stream);
            freed += 1;
        }
        let stats = allocator.stats();
        check_stats(&stats);
        let gauge = stats.allocation.all;
        assert_eq!((gauge.current, gauge.allocated, gauge.freed), (live.len() as u64, allocated, freed));
        assert_eq!(stats.allocated_bytes.all.current, live.iter().map(Block::bytes).sum::<u64>());
        assert_eq!(stats.requested_bytes.all.current, live.iter().map(Block::requested).sum::<u64>());
        assert!(stats.requested_bytes.all.current <= stats.allocated_bytes.all.current);
        assert_eq!(stats.active.all.current, live.len() as u64, "nothing is pending on one stream");
        let calls = stats.num_device_alloc - stats.num_device_free;
        match bench.capabilities().segments {
            // Calls map parts of segments.
            SegmentUse::Expandable => assert!(calls > 0 || live.is_empty()),
            SegmentUse::Many => assert_eq!(Some(calls), stats.segment.map(|gauge| gauge.all.current)),
            SegmentUse::One | SegmentUse::Hidden => assert_eq!(calls, live.len() as u64),
        }
    }
    allocator.give_all(live, stream);
    check_nothing_held(&allocator.stats());
}

pub(super) fn peaks_are_kept_and_start_again(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let blocks: Vec<Block> = (0..4).map(|_| allocator.take(12 * MIB, stream)).collect();
    let full = allocator.stats();
    let mut blocks = blocks.into_iter();
    let kept = blocks.next().unwrap();
    allocator.give_all(blocks, stream);
    let stats = allocator.stats();
    for (now, then) in [
        (stats.allocation, full.allocation),
        (stats.allocated_bytes, full.allocated_bytes),
        (stats.active_bytes, full.active_bytes),
        (stats.requested_bytes, full.requested_bytes),
        (stats.reserved_bytes, full.reserved_bytes),
    ] {
        assert_eq!(now.all.peak, then.all.current);
    }
    allocator.reset_peaks();
    let stats = allocator.stats();
    for gauge in [stats.allocation, stats.active, stats.allocated_bytes, stats.active_bytes, stats.requested_bytes] {
        assert_eq!(gauge.all.peak, gauge.all.current);
    }
    if bench.capabilities().segments != SegmentUse::Hidden {
        assert_eq!(stats.reserved_bytes.all.peak, stats.reserved_bytes.all.current);
    }
    assert_eq!(stats.allocation.all.allocated, 4, "running totals go on");
    allocator.give(kept, stream);
}

pub(super) fn trim_returns_idle_memory(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let kept = allocator.take(2 * MIB, stream);
    let idle: Vec<Block> = (0..8).map(|_| allocator.take(40 * MIB, stream)).collect();
    allocator.give_all(idle, stream);
    let before = allocator.reserved();
    let keep = before / 2;
    // Where a segment goes back as a whole, the one with the block that is still held stays, however large it is.
    let in_parts = bench.capabilities().segments == SegmentUse::Expandable;
    let holds = |segment: &SegmentInfo| segment.blocks.iter().any(|block| block.state == BlockState::Allocated);
    let in_use = allocator.snapshot().filter(|_| !in_parts).map(|snapshot| {
        let segments = snapshot.segments.iter().filter(|segment| holds(segment));
        segments.map(|segment| segment.bytes).sum::<u64>()
    });
    let first = allocator.trim(keep).unwrap();
    let middle = allocator.reserved();
    assert_eq!(before - middle, first, "trim should say what went");
    // A driver's pool keeps at least as much as it is asked to, in whole granules.
    let granule = if bench.capabilities().segments == SegmentUse::Hidden { 32 * MIB } else { 0 };
    assert!(middle <= keep.max(in_use.unwrap_or(2 * MIB)) + granule, "{middle} of {before} stayed");
    let second = allocator.trim(0).unwrap();
    let after = allocator.reserved();
    assert_eq!(middle - after, second);
    check_stats(&allocator.stats());
    match in_use {
        Some(in_use) => assert_eq!(after, in_use, "one segment is still in use"),
        None => assert!((2 * MIB..=32 * MIB).contains(&after), "one block is still held: {after}"),
    }
    allocator.give(kept, stream);
    allocator.check_all_returns();
    assert_eq!(allocator.trim(0).unwrap(), 0);
    let block = allocator.take(MIB, stream);
    allocator.give(block, stream);
}

pub(super) fn a_recorded_use_delays_the_reuse_only(bench: &Bench) {
    let (allocator, driver) = (bench.build(), bench.driver.as_ref());
    let [owner, user] = bench.streams();
    let one = allocator.take(3 * MIB, owner);
    allocator.use_on(&one, user);
    allocator.record_use(&one, user).unwrap();
    allocator.record_use(&one, user).unwrap();
    allocator.record_use(&one, owner).unwrap();
    let path = allocator.give(one, owner);
    assert_eq!(path, bench.capabilities().used_elsewhere);
    let stats = allocator.stats();
    assert_eq!(stats.allocation.all.current, 0);
    check_stats(&stats);
    driver.device_synchronize().unwrap();
    let reserved = stats.reserved_bytes.all.current;
    let again = allocator.take(3 * MIB, owner);
    let stats = allocator.stats();
    assert_eq!(stats.active.all.current, 1, "the pending free should be done by now");
    if bench.capabilities().caches && bench.capabilities().segments.is_shared() {
        assert_eq!(stats.reserved_bytes.all.current, reserved, "the block should be used again");
    }
    allocator.record_use(&again, owner).unwrap();
    allocator.give(again, owner);
    check_nothing_held(&allocator.stats());
}

pub(super) fn a_foreign_block_is_refused(bench: &Bench) {
    let (mine, other) = (bench.build(), bench.build());
    let stream = bench.stream();
    let own = mine.take(4096, stream);
    let foreign = other.take(4096, stream);
    let before = mine.stats();
    let error = mine.record_use(&foreign, stream).unwrap_err();
    assert!(matches!(error, AllocError::ForeignBlock { .. }), "{error}");
    let addr = foreign.addr().get();
    match mine.try_give(foreign, stream) {
        Err(AllocError::ForeignBlock { addr: named, .. }) => assert_eq!(named, addr),
        other => panic!("a foreign block was taken: {other:?}"),
    }
    assert_eq!(mine.stats(), before, "a refusal should change nothing");
    // Another device hands out the same addresses: only the token tells them apart. There may be one GPU.
    if bench.device != Device::Cuda {
        let elsewhere = Bench::open(bench.selection.clone(), bench.device, GIB);
        let (theirs, there) = (elsewhere.build(), elsewhere.stream());
        let strange = theirs.take(4096, there);
        let error = mine.record_use(&strange, stream).unwrap_err();
        assert!(matches!(error, AllocError::ForeignBlock { .. }), "{error}");
        let error = mine.try_give(strange, stream).unwrap_err();
        assert!(matches!(error, AllocError::ForeignBlock { .. }), "{error}");
        assert_eq!(mine.stats(), before, "a refusal should change nothing");
    }
    mine.give(own, stream);
    check_nothing_held(&mine.stats());
    assert_eq!(other.stats().allocation.all.current, 1);
}

/// Allocates and frees blocks of many sizes on some streams, uses some of them elsewhere, and looks after each step.
fn churn(allocator: &Subject, streams: &[StreamId], steps: u32, mut look: impl FnMut(&[(Block, StreamId)])) {
    let (mut random, mut live) = (Random::new(13), Vec::new());
    for _ in 0..steps {
        let stream = streams[random.below(streams.len() as u64) as usize];
        if random.below(5) < 3 || live.is_empty() {
            live.push((allocator.take(random.size(24), stream), stream));
        } else {
            let (block, owner) = live.swap_remove(random.below(live.len() as u64) as usize);
            if random.below(3) == 0 {
                allocator.record_use(&block, stream).unwrap();
            }
            allocator.give(block, owner);
        }
        look(&live);
    }
    allocator.give_each(live);
}

pub(super) fn the_peak_ledger_sums_to_what_is_not_in_use(bench: &Bench) {
    let allocator = bench.build();
    let mut highest = 0;
    churn(&allocator, &bench.streams::<3>(), 500, |_| {
        let ledger = allocator.ledger_at_peak();
        check_ledger(&ledger);
        assert!(ledger.reserved >= highest, "a peak does not fall");
        highest = ledger.reserved;
    });
    assert!(highest > 0);
    assert_eq!(highest, allocator.stats().reserved_bytes.all.peak);
}

pub(super) fn the_peak_ledger_follows_a_reset(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    for bytes in [200 * MIB, 60 * MIB] {
        let block = allocator.take(bytes, stream);
        assert_eq!(allocator.ledger_at_peak().requested, bytes);
        assert!(allocator.ledger_at_peak().reserved >= bytes);
        allocator.give(block, stream);
        allocator.trim(0).unwrap();
        allocator.reset_peaks();
        assert_eq!(allocator.ledger_at_peak().reserved, 0, "after a reset the peak is what is held now");
    }
}

fn freed_bytes(snapshot: &Snapshot) -> u64 {
    let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
    blocks.filter(|block| block.state != BlockState::Allocated).map(|block| block.bytes).sum()
}

pub(super) fn snapshots_are_whole(bench: &Bench) {
    let (allocator, streams) = (bench.build(), bench.streams::<2>());
    churn(&allocator, &streams, 400, |live| {
        let Some(snapshot) = allocator.snapshot() else {
            return assert!(!bench.capabilities().snapshot, "a snapshot is missing");
        };
        check_snapshot(&snapshot, bench.capabilities().coalesces, streams[0]);
        let stats = allocator.stats();
        let reserved: u64 = snapshot.segments.iter().map(|segment| segment.bytes).sum();
        assert_eq!(reserved, stats.reserved_bytes.all.current);
        assert_eq!(reserved - freed_bytes(&snapshot), stats.allocated_bytes.all.current);
        for (block, _) in live {
            let found = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
            let found = found.filter(|info| info.addr == block.addr()).collect::<Vec<_>>();
            assert!(found.len() == 1 && found[0].bytes == block.bytes(), "{block:?} is not in the snapshot");
            assert_eq!((found[0].requested, found[0].state), (block.requested(), BlockState::Allocated));
        }
    });
}

pub(super) fn dropping_returns_everything(bench: &Bench) {
    let streams = bench.streams::<2>();
    let (allocator, mut random) = (bench.build(), Random::new(34));
    for _ in 0..100 {
        let block = allocator.take(random.size(26), streams[0]);
        if random.below(2) == 0 {
            // Still queued when the allocator goes.
            allocator.use_on(&block, streams[1]);
            allocator.record_use(&block, streams[1]).unwrap();
        }
        allocator.give(block, streams[0]);
    }
    allocator.check_drop_returns_all();
}

pub(super) fn reports_and_names_are_complete(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let backend = bench.selection.backend();
    assert_eq!(allocator.name(), backend.name);
    backends::register(backend).unwrap();
    assert_eq!(backends::find(allocator.name()).unwrap(), backend);
    let error = allocator.try_take(1 << 45, stream).unwrap_err();
    let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    assert_eq!(report.allocator, backend.name);
    assert_eq!(report.requested_bytes, 1 << 45);
    assert!(report.needed_bytes >= 1 << 45);
    let (free, total) = report.device_bytes.unwrap();
    assert!(free <= total && total >= 64 * GIB);
    assert!(report.to_string().contains("32 TiB"), "{report}");
    assert_eq!(allocator.stats().num_ooms, 1);
}

pub(super) fn out_of_memory_is_reported_and_passes(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    // A GPU is filled in parts of an eighth, so that this stays quick.
    let part = if bench.device == Device::Cuda { allocator.room / 8 } else { 4 * MIB };
    let (mut live, error) = allocator.take_until_full(part, stream);
    assert!(live.len() >= 4, "only {} parts of {part} in {}", live.len(), allocator.room);
    let AllocError::OutOfMemory(report) = &error else { panic!("{error}") };
    assert!(error.is_out_of_memory());
    let held: u64 = live.iter().map(Block::bytes).sum();
    assert_eq!((report.requested_bytes, report.active_bytes), (part, held));
    assert!(report.reserved_bytes >= held);
    let stats = allocator.stats();
    assert_eq!((stats.num_ooms, stats.allocation.all.current), (1, live.len() as u64));
    check_stats(&stats);
    // As much as was given back can be had again, also in one piece when everything is back, unless it stays in segments.
    for _ in 0..2 {
        allocator.give(live.pop().unwrap(), stream);
    }
    for _ in 0..2 {
        live.push(allocator.take(part, stream));
    }
    let pieces = if bench.capabilities().keeps_segments { 1 } else { live.len() as u64 / 2 };
    let whole = pieces * part;
    allocator.give_all(live, stream);
    let block = allocator.take(whole, stream);
    allocator.give(block, stream);
    check_nothing_held(&allocator.stats());
    allocator.check_drop_returns_all();
}
