//! Checks of one thread: requests, blocks, statistics, snapshots, trims, running out of memory.

use super::demand::{Outcome as _, demand, demand_eq};
use super::subject::Subject;
use super::support::{
    GIB, KIB, MIB, Random, check_ledger, check_nothing_held, check_snapshot, check_stats, read, write,
};
use super::{Bench, Device};
use vramlab_device::{Bytes, StreamId};
use vramlab_policies::backends::{self, SegmentUse, StreamUse};
use vramlab_policies::contract::{AllocError, Block, BlockState, Request, SegmentInfo, Snapshot};

/// Replaces all other checks, on a device that lacks a required feature.
pub(super) fn a_device_that_lacks_what_is_needed_is_refused(bench: &Bench) {
    let error = bench.selection.build(&bench.driver).refused();
    demand!(
        matches!(error, AllocError::Unsupported { .. }),
        came = error,
        "a device that lacks what `needs` names is refused"
    );
}

pub(super) fn zero_bytes_are_refused(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let error = allocator.try_take(0, stream).refused();
    demand!(
        matches!(error, AllocError::InvalidRequest { bytes: 0, .. }),
        came = error,
        "a request of no bytes is invalid"
    );
    demand_eq!(allocator.stats().allocation.all.allocated, 0, "a refused request is not counted as allocated");
    demand_eq!(allocator.stats().num_device_alloc, 0, "a request that is never served calls no driver");
}

pub(super) fn a_huge_request_is_refused_and_the_allocator_stays_usable(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    for bytes in [1 << 50, 1 << 62, (1 << 62) + 1, 1 << 63, u64::MAX - 511, u64::MAX] {
        let error = allocator.try_take(bytes, stream).refused();
        demand!(
            matches!(error, AllocError::OutOfMemory(_) | AllocError::InvalidRequest { .. }),
            came = error,
            "a request that never fits is out of memory or invalid"
        );
        demand!(!error.to_string().contains('\n'), came = error, "an error is one line");
    }
    demand_eq!(allocator.stats().allocation.all.allocated, 0, "a refused request is not counted as allocated");
    let block = allocator.take(MIB, stream);
    allocator.give(block, stream);
    check_nothing_held(&allocator.stats());
}

pub(super) fn alignment_up_to_256_is_kept_and_512_refused(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let mut blocks = Vec::new();
    for align in (0..=8).map(|log2| 1 << log2) {
        for bytes in [1, 3, 255, 256, 257, 4097, MIB + 1, 11 * MIB + 3] {
            let block = allocator.allocate(Request { bytes, align }, stream).granted();
            demand!(
                block.addr().get().is_multiple_of(align),
                came = format_args!("{block:?}"),
                "a block lies at a multiple of {align}"
            );
            demand!(
                block.bytes() >= bytes && block.requested() == bytes,
                came = format_args!("{block:?}"),
                "a block holds what was requested"
            );
            blocks.push(block);
        }
    }
    for align in [0, 3, 100, 512, 1 << 40] {
        let error = allocator.allocate(Request { bytes: 1024, align }, stream).refused();
        demand!(
            matches!(error, AllocError::InvalidRequest { .. }),
            came = error,
            "an alignment above 256 or not a power of two is invalid"
        );
    }
    allocator.give_all(blocks, stream);
    check_nothing_held(&allocator.stats());
}

/// Panics when two blocks share a byte.
fn assert_disjoint<'a>(blocks: impl Iterator<Item = &'a Block>) {
    let mut ranges: Vec<(u64, u64)> = blocks.map(|block| (block.addr().get(), block.bytes())).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        demand!(pair[0].0 + pair[0].1 <= pair[1].0, came = format_args!("{pair:#x?}"), "live blocks share no byte");
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
            demand_eq!(
                &read(driver, block.addr(), block.requested(), stream),
                pattern,
                "a live block keeps its contents"
            );
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
        demand_eq!(round(&allocator), first, "the same round should need the same memory");
    }
    demand_eq!(allocator.stats().reserved_bytes.all.peak, first, "a peak is the highest value there was");
    if bench.capabilities().caches && bench.capabilities().segments.is_shared() {
        let before = allocator.stats().num_device_alloc;
        round(&allocator);
        demand_eq!(allocator.stats().num_device_alloc, before, "what is kept should serve the round again");
    }
    if bench.capabilities().follows_pytorch {
        // The small pool's one segment, and one of 20 MiB for 3 and 12 MiB.
        demand_eq!(allocator.stats().num_device_alloc, 2, "PyTorch needs a segment of 2 and one of 20 MiB here");
    }
}

pub(super) fn freed_memory_stays_with_its_stream_where_that_is_said(bench: &Bench) {
    let (allocator, driver) = (bench.build(), bench.driver.as_ref());
    let [owner, other] = bench.streams();
    let block = allocator.take(40 * MIB, owner);
    let reserved = allocator.reserved();
    allocator.give(block, owner);
    // Nothing of its work remains.
    driver.device_synchronize().granted();
    let block = allocator.take(40 * MIB, other);
    let grows = allocator.reserved() > reserved;
    // Where it may serve others, new memory may still be allocated first.
    demand!(
        grows || bench.capabilities().streams == StreamUse::Any,
        "freed memory stays with its stream, unless `streams` says otherwise"
    );
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
        demand_eq!(
            (gauge.current, gauge.allocated, gauge.freed),
            (live.len() as u64, allocated, freed),
            "blocks are counted as they come and go"
        );
        demand_eq!(
            stats.allocated_bytes.all.current,
            live.iter().map(Block::bytes).sum::<u64>(),
            "allocated bytes are the live blocks"
        );
        demand_eq!(
            stats.requested_bytes.all.current,
            live.iter().map(Block::requested).sum::<u64>(),
            "requested bytes are what was asked for"
        );
        demand!(stats.requested_bytes.all.current <= stats.allocated_bytes.all.current);
        demand_eq!(stats.active.all.current, live.len() as u64, "nothing is pending on one stream");
        let calls = stats.num_device_alloc - stats.num_device_free;
        match bench.capabilities().segments {
            // Calls map parts of segments.
            SegmentUse::Expandable => demand!(calls > 0 || live.is_empty(), "live blocks have memory of the device"),
            SegmentUse::Many | SegmentUse::Stitched => demand_eq!(
                Some(calls),
                stats.segment.map(|gauge| gauge.all.current),
                "each segment is one call of the driver (`segments` is many)"
            ),
            SegmentUse::One | SegmentUse::Hidden => {
                demand_eq!(calls, live.len() as u64, "each block is one call of the driver (`segments`)")
            }
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
    let last = blocks.next().granted();
    allocator.give_all(blocks, stream);
    let stats = allocator.stats();
    for (now, then) in [
        (stats.allocation, full.allocation),
        (stats.allocated_bytes, full.allocated_bytes),
        (stats.active_bytes, full.active_bytes),
        (stats.requested_bytes, full.requested_bytes),
        (stats.reserved_bytes, full.reserved_bytes),
    ] {
        demand_eq!(now.all.peak, then.all.current, "a peak stays when blocks are freed");
    }
    allocator.reset_peaks();
    let stats = allocator.stats();
    for gauge in [stats.allocation, stats.active, stats.allocated_bytes, stats.active_bytes, stats.requested_bytes] {
        demand_eq!(gauge.all.peak, gauge.all.current, "a reset sets peaks to current values");
    }
    if bench.capabilities().segments != SegmentUse::Hidden {
        demand_eq!(
            stats.reserved_bytes.all.peak,
            stats.reserved_bytes.all.current,
            "a reset sets peaks to current values"
        );
    }
    demand_eq!(stats.allocation.all.allocated, 4, "running totals go on");
    allocator.give(last, stream);
}

pub(super) fn trim_returns_idle_memory(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let live = allocator.take(2 * MIB, stream);
    let idle: Vec<Block> = (0..8).map(|_| allocator.take(40 * MIB, stream)).collect();
    allocator.give_all(idle, stream);
    let before = allocator.reserved();
    let keep = before / 2;
    // Where segments are released as a whole, the one with the live block stays, however large it is.
    let in_parts = bench.capabilities().segments == SegmentUse::Expandable;
    let holds = |segment: &SegmentInfo| segment.blocks.iter().any(|block| block.state == BlockState::Allocated);
    let in_use = allocator.snapshot().filter(|_| !in_parts).map(|snapshot| {
        let segments = snapshot.segments.iter().filter(|segment| holds(segment));
        segments.map(|segment| segment.bytes).sum::<u64>()
    });
    let first = allocator.trim(keep).granted();
    let middle = allocator.reserved();
    demand_eq!(first, before - middle, "trim returns the bytes that were released");
    // A CUDA memory pool keeps at least the requested amount, in whole granules.
    let granule = if bench.capabilities().segments == SegmentUse::Hidden { 32 * MIB } else { 0 };
    demand!(
        middle <= keep.max(in_use.unwrap_or(2 * MIB)) + granule,
        came = format_args!("{} of {} reserved", Bytes(middle), Bytes(before)),
        "trim keeps no more than {}, but for segments in use",
        Bytes(keep)
    );
    let second = allocator.trim(0).granted();
    let after = allocator.reserved();
    demand_eq!(second, middle - after, "trim returns the bytes that were released");
    check_stats(&allocator.stats());
    match in_use {
        Some(in_use) => demand_eq!(after, in_use, "trim releases all but the segments in use"),
        None => demand!(
            (2 * MIB..=32 * MIB).contains(&after),
            came = format_args!("{} reserved", Bytes(after)),
            "trim releases all but the block that is held"
        ),
    }
    allocator.give(live, stream);
    allocator.check_all_returns();
    demand_eq!(allocator.trim(0).granted(), 0, "nothing is left to release");
    let block = allocator.take(MIB, stream);
    allocator.give(block, stream);
}

pub(super) fn a_recorded_use_delays_the_reuse_only(bench: &Bench) {
    let (allocator, driver) = (bench.build(), bench.driver.as_ref());
    let [owner, user] = bench.streams();
    let one = allocator.take(3 * MIB, owner);
    allocator.use_on(&one, user);
    allocator.record_use(&one, user).granted();
    allocator.record_use(&one, user).granted();
    allocator.record_use(&one, owner).granted();
    let path = allocator.give(one, owner);
    demand_eq!(
        path,
        bench.capabilities().used_elsewhere,
        "a free of a block used elsewhere takes the path that `used_elsewhere` names"
    );
    let stats = allocator.stats();
    demand_eq!(stats.allocation.all.current, 0, "a freed block is no longer allocated");
    check_stats(&stats);
    driver.device_synchronize().granted();
    let reserved = stats.reserved_bytes.all.current;
    let again = allocator.take(3 * MIB, owner);
    let stats = allocator.stats();
    demand_eq!(stats.active.all.current, 1, "the pending free should be done by now");
    if bench.capabilities().caches && bench.capabilities().segments.is_shared() {
        demand_eq!(stats.reserved_bytes.all.current, reserved, "the block should be used again");
    }
    allocator.record_use(&again, owner).granted();
    allocator.give(again, owner);
    check_nothing_held(&allocator.stats());
}

pub(super) fn a_foreign_block_is_refused(bench: &Bench) {
    let (mine, other) = (bench.build(), bench.build());
    let stream = bench.stream();
    let block = mine.take(4096, stream);
    let foreign = other.take(4096, stream);
    let before = mine.stats();
    let error = mine.record_use(&foreign, stream).refused();
    demand!(matches!(error, AllocError::ForeignBlock { .. }), came = error, "a block of another allocator is refused");
    let addr = foreign.addr().get();
    match mine.try_give(foreign, stream) {
        Err(AllocError::ForeignBlock { addr: named, .. }) => demand_eq!(named, addr, "the error names the block"),
        other => super::demand::fail(&format!("{other:?}"), "a block of another allocator is refused"),
    }
    demand_eq!(mine.stats(), before, "a refusal should change nothing");
    // Another device returns the same addresses: only the token distinguishes them. There may be one GPU.
    if bench.device != Device::Cuda {
        let elsewhere = Bench::open(bench.selection.clone(), bench.device, GIB);
        let (theirs, there) = (elsewhere.build(), elsewhere.stream());
        let strange = theirs.take(4096, there);
        let error = mine.record_use(&strange, stream).refused();
        demand!(
            matches!(error, AllocError::ForeignBlock { .. }),
            came = error,
            "a block of another allocator is refused"
        );
        let error = mine.try_give(strange, stream).refused();
        demand!(
            matches!(error, AllocError::ForeignBlock { .. }),
            came = error,
            "a block of another allocator is refused"
        );
        demand_eq!(mine.stats(), before, "a refusal should change nothing");
    }
    mine.give(block, stream);
    check_nothing_held(&mine.stats());
    demand_eq!(other.stats().allocation.all.current, 1, "a refused block stays with its owner");
}

/// Allocates and frees blocks of many sizes on some streams, uses some of them elsewhere, and checks after each step.
fn churn(allocator: &Subject, streams: &[StreamId], steps: u32, mut look: impl FnMut(&[(Block, StreamId)])) {
    let (mut random, mut live) = (Random::new(13), Vec::new());
    for _ in 0..steps {
        let stream = streams[random.below(streams.len() as u64) as usize];
        if random.below(5) < 3 || live.is_empty() {
            live.push((allocator.take(random.size(24), stream), stream));
        } else {
            let (block, owner) = live.swap_remove(random.below(live.len() as u64) as usize);
            if random.below(3) == 0 {
                allocator.record_use(&block, stream).granted();
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
        demand!(
            ledger.reserved >= highest,
            came = format_args!("{} after {highest}", ledger.reserved),
            "a peak does not fall"
        );
        highest = ledger.reserved;
    });
    demand!(highest > 0, "the ledger has a peak once memory was reserved");
    demand_eq!(highest, allocator.stats().reserved_bytes.all.peak, "the ledger is of the peak");
}

pub(super) fn the_peak_ledger_follows_a_reset(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    for bytes in [200 * MIB, 60 * MIB] {
        let block = allocator.take(bytes, stream);
        demand_eq!(allocator.ledger_at_peak().requested, bytes, "the ledger has the bytes requested at the peak");
        demand!(allocator.ledger_at_peak().reserved >= bytes, "the ledger has the bytes reserved at the peak");
        allocator.give(block, stream);
        allocator.trim(0).granted();
        allocator.reset_peaks();
        demand_eq!(allocator.ledger_at_peak().reserved, 0, "a reset sets the peak to what is reserved");
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
            demand!(!bench.capabilities().snapshot, "there is a snapshot where `snapshot` says so");
            return;
        };
        check_snapshot(&snapshot, bench.capabilities().coalesces, streams[0]);
        let stats = allocator.stats();
        let reserved: u64 = snapshot.segments.iter().map(|segment| segment.bytes).sum();
        demand_eq!(reserved, stats.reserved_bytes.all.current, "a snapshot has all reserved bytes");
        demand_eq!(
            reserved - freed_bytes(&snapshot),
            stats.allocated_bytes.all.current,
            "a snapshot has all allocated bytes"
        );
        for (block, _) in live {
            let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
            let blocks = blocks.filter(|info| info.addr == block.addr()).collect::<Vec<_>>();
            demand!(
                blocks.len() == 1 && blocks[0].bytes == block.bytes(),
                came = format_args!("no {block:?}"),
                "a snapshot has every live block"
            );
            demand_eq!(
                (blocks[0].requested, blocks[0].state),
                (block.requested(), BlockState::Allocated),
                "a snapshot has blocks as they are"
            );
        }
    });
}

pub(super) fn dropping_returns_everything(bench: &Bench) {
    let streams = bench.streams::<2>();
    let (allocator, mut random) = (bench.build(), Random::new(34));
    for _ in 0..100 {
        let block = allocator.take(random.size(26), streams[0]);
        if random.below(2) == 0 {
            // Still queued when the allocator is dropped.
            allocator.use_on(&block, streams[1]);
            allocator.record_use(&block, streams[1]).granted();
        }
        allocator.give(block, streams[0]);
    }
    allocator.check_drop_returns_all();
}

pub(super) fn reports_and_names_are_complete(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let backend = bench.selection.backend();
    demand_eq!(allocator.name(), backend.name, "an allocator has the name of its entry");
    backends::register(backend).granted();
    demand_eq!(backends::find(allocator.name()).granted(), backend, "the list has the entry under its name");
    let error = allocator.try_take(1 << 45, stream).refused();
    let AllocError::OutOfMemory(report) = error else {
        super::demand::fail(&error.to_string(), "a request above the device's memory is out of memory")
    };
    demand_eq!(report.allocator, backend.name, "the report names the allocator");
    demand_eq!(report.requested_bytes, 1 << 45, "the report has the request");
    demand!(report.needed_bytes >= 1 << 45, came = report, "a segment holds the request");
    let (free, total) = report.device_bytes.granted();
    demand!(free <= total && total >= 64 * GIB, came = report, "the report has the device's memory");
    demand!(report.to_string().contains("32 TiB"), came = report, "the report has the request");
    demand_eq!(allocator.stats().num_ooms, 1, "a refusal is counted once");
}

pub(super) fn out_of_memory_is_reported_and_passes(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    // A GPU is filled in eighths, so that this is fast.
    let part = if bench.device == Device::Cuda { allocator.room / 8 } else { bench.scaled(4 * MIB) };
    let (mut live, error) = allocator.take_until_full(part, stream);
    demand!(
        live.len() >= 4,
        came = format_args!("{} blocks, then {error}", live.len()),
        "{} hold at least 4 blocks of {}",
        Bytes(allocator.room),
        Bytes(part)
    );
    let AllocError::OutOfMemory(report) = &error else {
        super::demand::fail(&error.to_string(), "a full device is out of memory")
    };
    demand!(error.is_out_of_memory(), came = error, "a full device is out of memory");
    let bytes: u64 = live.iter().map(Block::bytes).sum();
    demand_eq!(
        (report.requested_bytes, report.active_bytes),
        (part, bytes),
        "the report has the request, and what is live"
    );
    demand!(report.reserved_bytes >= bytes, came = report, "what is live is reserved");
    let stats = allocator.stats();
    demand_eq!(
        (stats.num_ooms, stats.allocation.all.current),
        (1, live.len() as u64),
        "a refusal is counted once and changes nothing else"
    );
    check_stats(&stats);
    // The freed amount can be allocated again, also in one piece when everything is free, unless it stays in segments.
    for _ in 0..2 {
        allocator.give(live.pop().granted(), stream);
    }
    for _ in 0..2 {
        live.push(allocator.take(part, stream));
    }
    let pieces = if bench.capabilities().keeps_segments { 1 } else { live.len() as u64 / 2 };
    let total = pieces * part;
    allocator.give_all(live, stream);
    let block = allocator.take(total, stream);
    allocator.give(block, stream);
    check_nothing_held(&allocator.stats());
    allocator.check_drop_returns_all();
}
