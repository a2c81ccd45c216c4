//! Private pools: memory of a pool serves no other request, and is released with the pool.

use super::Bench;
use super::demand::{Outcome as _, demand, demand_eq};
use super::subject::{Range, Subject, assert_apart, overlap, range};
use super::support::{MIB, Random, check_nothing_held, check_stats};
use std::collections::BTreeSet;
use vramlab_device::StreamId;
use vramlab_policies::backends::SegmentUse;
use vramlab_policies::contract::{AllocError, Block, PrivatePool, Request, Snapshot};
use vramlab_policies::instruments::restored_streams;

/// Forty blocks of many sizes, written to.
fn forty(allocator: &Subject, stream: StreamId, seed: u64) -> Vec<Block> {
    let mut random = Random::new(seed);
    let mut one = || allocator.take(random.size(23), stream);
    (0..40).map(|_| one()).inspect(|block| allocator.use_on(block, stream)).collect()
}

/// Forty blocks of many sizes from a pool, written to.
fn forty_of(allocator: &Subject, pool: PrivatePool, stream: StreamId, seed: u64) -> Vec<Block> {
    allocator.pool_begin(pool, stream).granted();
    let blocks = forty(allocator, stream, seed);
    allocator.pool_end(stream).granted();
    blocks
}

/// Frees some blocks; returns their ranges.
fn free_all(allocator: &Subject, blocks: Vec<Block>, stream: StreamId) -> Vec<Range> {
    let lay = blocks.iter().map(range).collect();
    allocator.give_all(blocks, stream);
    lay
}

pub(super) fn a_private_pool_shares_no_memory(bench: &Bench) {
    let streams = bench.streams::<2>();
    let allocator = bench.build();
    let [first, second] = [0, 1].map(|_| allocator.pool_create().granted());
    // All of it is free and cached at the next request, so an allocator that searches another pool's memory takes it.
    let mut before: Vec<(Option<(PrivatePool, StreamId)>, Range)> = Vec::new();
    for seed in 0..3 {
        for stream in streams {
            for pool in [None, Some(first), Some(second)] {
                let segments = allocator.snapshot().map(|snapshot| {
                    let segments = snapshot.segments.iter();
                    segments.map(|segment| (segment.addr.get(), segment.bytes)).collect::<Vec<Range>>()
                });
                let blocks = match pool {
                    Some(pool) => forty_of(&allocator, pool, stream, seed),
                    None => forty(&allocator, stream, seed),
                };
                // Memory that an allocator released before it grew is the device's again, and the device may give it to anyone.
                before.retain(|(_, range)| {
                    segments.as_ref().is_none_or(|known| known.iter().any(|segment| overlap(*segment, *range)))
                });
                // Outside of pools a stream may take another's memory.
                let part = pool.map(|pool| (pool, stream));
                let others = before.iter().filter(|(of, _)| *of != part).map(|(_, range)| *range);
                assert_apart(&blocks, &others.collect::<Vec<_>>());
                before.extend(free_all(&allocator, blocks, stream).into_iter().map(|range| (part, range)));
                check_stats(&allocator.stats());
            }
        }
    }
    // Memory of a pool returns to the pool, and to its stream.
    let reserved = allocator.reserved();
    let blocks = forty_of(&allocator, first, streams[0], 2);
    demand_eq!(allocator.reserved(), reserved, "a pool reuses its memory");
    free_all(&allocator, blocks, streams[0]);
}

pub(super) fn memory_of_a_private_pool_stays_until_it_is_released(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let stream = bench.stream();
    let allocator = bench.build();
    let [first, second] = [0, 1].map(|_| allocator.pool_create().granted());
    let blocks = [first, second].map(|pool| forty_of(&allocator, pool, stream, 1));
    let [lay, kept] = blocks.map(|blocks| free_all(&allocator, blocks, stream));
    demand!(allocator.pool_trim(first).is_err(), "a pool is trimmed only after its release");
    driver.device_synchronize().granted();
    allocator.trim(0).granted();
    let blocks = forty(&allocator, stream, 2);
    assert_apart(&blocks, &[lay, kept.clone()].concat());
    allocator.pool_release(first).granted();
    demand!(allocator.pool_trim(first).granted() > 0, "trim releases the idle memory of a released pool");
    demand_eq!(allocator.pool_trim(first).granted(), 0, "nothing is left to release");
    free_all(&allocator, blocks, stream);
    allocator.trim(0).granted();
    let blocks = forty(&allocator, stream, 3);
    assert_apart(&blocks, &kept);
    free_all(&allocator, blocks, stream);
    // A pool can be released while a block is live, which is then freed as usual.
    let blocks = forty_of(&allocator, second, stream, 4);
    allocator.pool_release(second).granted();
    check_stats(&allocator.stats());
    free_all(&allocator, blocks, stream);
    driver.device_synchronize().granted();
    allocator.check_all_returns();
}

pub(super) fn a_recorded_use_delays_the_reuse_in_a_private_pool(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let [own, other] = bench.streams();
    let allocator = bench.build();
    let pool = allocator.pool_create().granted();
    allocator.pool_begin(pool, own).granted();
    let block = allocator.take(3 * MIB, own);
    let lay = range(&block);
    allocator.use_on(&block, other);
    allocator.record_use(&block, other).granted();
    allocator.give(block, own);
    driver.device_synchronize().granted();
    let again = allocator.take(3 * MIB, own);
    demand!(
        !bench.capabilities().caches || overlap(range(&again), lay),
        "a block is reused once its uses have completed"
    );
    allocator.give(again, own);
    allocator.pool_end(own).granted();
    allocator.pool_release(pool).granted();
    allocator.trim(0).granted();
    check_nothing_held(&allocator.stats());
}

pub(super) fn a_named_pool_serves_beside_the_others(bench: &Bench) {
    let streams = bench.streams::<2>();
    let allocator = bench.build();
    let pools = [0, 1].map(|_| allocator.pool_create().granted());
    let mut random = Random::new(5);
    let mut live: Vec<(Block, StreamId)> = Vec::new();
    let mut lay: Vec<(Option<PrivatePool>, Range)> = Vec::new();
    for round in 0..120 {
        let (stream, pool) = (streams[round % 2], [None, Some(pools[0]), Some(pools[1])][round % 3]);
        let request = Request::new(random.size(22));
        let block = match pool {
            Some(pool) => allocator.allocate_in(request, stream, pool).granted(),
            None => allocator.allocate(request, stream).granted(),
        };
        allocator.use_on(&block, stream);
        let others = lay.iter().filter(|(of, _)| *of != pool).map(|(_, range)| *range).collect::<Vec<_>>();
        assert_apart(std::slice::from_ref(&block), &others);
        lay.push((pool, range(&block)));
        live.push((block, stream));
        if round % 4 == 3 {
            allocator.give_each([live.remove(round % live.len())]);
        }
        check_stats(&allocator.stats());
    }
    // The snapshot contains the pool of each segment.
    for segment in allocator.snapshot().iter().flat_map(|snapshot| &snapshot.segments) {
        let inside = |of: &Range| (segment.addr.get()..segment.addr.get() + segment.bytes).contains(&of.0);
        for (pool, _) in lay.iter().filter(|(_, range)| inside(range)) {
            demand_eq!(segment.private, pool.map(PrivatePool::id), "a snapshot names the pool of each segment");
        }
    }
    allocator.give_each(live);
    for pool in pools {
        allocator.pool_release(pool).granted();
        let refused = allocator.allocate_in(Request::new(1), streams[0], pool).refused();
        demand!(matches!(refused, AllocError::PrivatePool { .. }), came = refused, "a released pool serves no request");
    }
    bench.driver.device_synchronize().granted();
    allocator.check_all_returns();
}

/// Blocks of a segment: sizes, and the requested bytes of active ones.
type Parts = Vec<(u64, Option<u64>)>;

/// A pool's segments with active blocks: free neighbours count as one.
fn in_use(checkpoint: &Snapshot) -> Vec<(u64, Parts)> {
    let used = checkpoint.segments.iter().filter(|segment| !segment.is_idle());
    used.map(|segment| (segment.addr.get(), segment.parts())).collect()
}

pub(super) fn a_pool_goes_back_to_its_checkpoint(bench: &Bench) {
    let streams = bench.streams::<2>();
    let allocator = bench.build();
    let pool = allocator.pool_create().granted();
    let outside = forty(&allocator, streams[0], 1);
    let mut random = Random::new(9);
    let mut take = |count: usize| -> Vec<(Block, StreamId)> {
        let mut one = |round: usize| {
            let stream = streams[round % 2];
            (allocator.allocate_in(Request::new(random.size(23)), stream, pool).granted(), stream)
        };
        (0..count).map(&mut one).collect()
    };
    let mut live = take(40);
    for at in (0..live.len()).rev().step_by(3) {
        allocator.give_each([live.remove(at)]);
    }
    let checkpoint = allocator.pool_checkpoint(pool).granted();
    let sorted = |live: &[(Block, StreamId)]| {
        let lie = live.iter().map(|(block, stream)| (range(block), block.requested(), *stream));
        lie.collect::<BTreeSet<(Range, u64, StreamId)>>()
    };
    let expected = sorted(&live);
    for _ in 0..3 {
        live.extend(take(30));
        for at in (0..live.len()).rev().step_by(2) {
            allocator.give_each([live.remove(at)]);
        }
        // SAFETY: these are the live blocks of the pool, and no work uses them.
        let restored = unsafe { allocator.pool_restore(pool, &checkpoint, std::mem::take(&mut live)) }.granted();
        let streams = restored_streams(&checkpoint);
        live = restored.into_iter().zip(streams).collect();
        demand_eq!(sorted(&live), expected, "every block of the checkpoint is held where it was");
        check_stats(&allocator.stats());
        // Expandable memory may have grown at both ends since.
        if bench.capabilities().segments != SegmentUse::Expandable {
            let now = allocator.pool_checkpoint(pool).granted();
            demand_eq!(in_use(&now), in_use(&checkpoint), "segments are cut as at the checkpoint");
        }
        // A restored block is memory like any other.
        live.iter().for_each(|(block, stream)| allocator.use_on(block, *stream));
    }
    // A live block that is not passed in prevents the restore: then nothing changes.
    let (kept, stream) = live.remove(0);
    let before = (allocator.pool_checkpoint(pool).granted(), allocator.stats());
    let refuse = |by: &Subject<'_>, live: Vec<(Block, StreamId)>| {
        let given = sorted(&live);
        // SAFETY: these are the live blocks of the pool except for those in the way, so memory of the checkpoint is in use.
        let refused = unsafe { by.pool_restore(pool, &checkpoint, live) }.refused();
        demand!(
            matches!(refused.error, AllocError::PrivatePool { .. }),
            came = refused,
            "a pool with a live or used block does not go back"
        );
        demand_eq!(sorted(&refused.held), given, "a refusal returns the blocks that were given");
        refused.held
    };
    live = refuse(&allocator, live);
    demand_eq!((allocator.pool_checkpoint(pool).granted(), allocator.stats()), before, "a refusal changes nothing");
    live.push((kept, stream));
    // So does a block that another stream uses, live or freed.
    let other = bench.stream();
    allocator.record_use(&live[0].0, other).granted();
    live = refuse(&allocator, live);
    let stranger = bench.build();
    live = refuse(&stranger, live);
    allocator.forget_stream(other);
    // SAFETY: these are the live blocks of the pool, and no work uses them.
    let restored = unsafe { allocator.pool_restore(pool, &checkpoint, live) }.granted();
    live = restored.into_iter().zip(restored_streams(&checkpoint)).collect();
    demand_eq!(sorted(&live), expected, "every block of the checkpoint is held where it was");
    allocator.give_each(live);
    let left = allocator.pool_checkpoint(pool).granted();
    demand!(left.segments.iter().all(|segment| segment.is_idle()), "a restored block is held once");
    allocator.give_all(outside, streams[0]);
    allocator.pool_release(pool).granted();
    bench.driver.device_synchronize().granted();
    drop(stranger);
    allocator.check_all_returns();
}

pub(super) fn checkpoints_are_refused(bench: &Bench) {
    let (allocator, stream) = (bench.build(), bench.stream());
    let pool = allocator.pool_create().granted();
    let block = allocator.allocate_in(Request::new(3 * MIB), stream, pool).granted();
    let refused = allocator.pool_checkpoint(pool).refused();
    demand!(
        matches!(refused, AllocError::Incapable { .. }),
        came = refused,
        "checkpoints are refused where `checkpoints` says so"
    );
    // SAFETY: this is the only block of the pool, and no work uses it.
    let refused = unsafe { allocator.pool_restore(pool, &Snapshot::default(), vec![(block, stream)]) }.refused();
    demand!(
        matches!(refused.error, AllocError::Incapable { .. }),
        came = refused,
        "checkpoints are refused where `checkpoints` says so"
    );
    allocator.give_each(refused.held);
    check_nothing_held(&allocator.stats());
}

pub(super) fn private_pools_out_of_order_are_refused(bench: &Bench) {
    let stream = bench.stream();
    let (allocator, stranger) = (bench.build(), bench.build());
    let refused = |outcome: Result<(), AllocError>, word: &str| {
        let error = outcome.refused();
        demand!(
            matches!(error, AllocError::PrivatePool { .. }) && error.to_string().contains(word),
            came = error,
            "a pool is made, used and released in that order: the error says `{word}`"
        );
    };
    let [pool, other] = [0, 1].map(|_| allocator.pool_create().granted());
    refused(stranger.pool_begin(pool, stream), "there is no pool");
    refused(stranger.pool_release(pool), "there is no pool");
    refused(allocator.pool_end(stream), "is not in a pool");
    allocator.pool_begin(pool, stream).granted();
    refused(allocator.pool_begin(other, stream), "end that first");
    refused(allocator.pool_release(pool), "end that first");
    allocator.pool_end(stream).granted();
    allocator.pool_release(pool).granted();
    refused(allocator.pool_release(pool), "released");
    refused(allocator.pool_begin(pool, stream), "released");
    refused(allocator.pool_trim(other).map(|_| ()), "not been released");
}

/// For backends without private pools.
pub(super) fn private_pools_are_refused(bench: &Bench) {
    let error = bench.build().pool_create().refused();
    demand!(
        matches!(error, AllocError::Incapable { .. }),
        came = error,
        "private pools are refused where `private_pools` says so"
    );
}
