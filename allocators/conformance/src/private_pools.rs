//! Private pools: memory of a pool serves no other request, and goes back when the pool is released.

use super::Bench;
use super::subject::{Range, Subject, assert_apart, overlap, range};
use super::support::{MIB, Random, check_nothing_held, check_stats};
use vramlab_device::StreamId;
use vramlab_policies::contract::{AllocError, Block, PrivatePool};

/// Forty blocks of many sizes, written to.
fn forty(allocator: &Subject, stream: StreamId, seed: u64) -> Vec<Block> {
    let mut random = Random::new(seed);
    let mut one = || allocator.take(random.size(23), stream);
    (0..40).map(|_| one()).inspect(|block| allocator.use_on(block, stream)).collect()
}

/// Forty blocks of many sizes from a pool, written to.
fn forty_of(allocator: &Subject, pool: PrivatePool, stream: StreamId, seed: u64) -> Vec<Block> {
    allocator.pool_begin(pool, stream).unwrap();
    let blocks = forty(allocator, stream, seed);
    allocator.pool_end(stream).unwrap();
    blocks
}

/// Frees some blocks; where they lay.
fn free_all(allocator: &Subject, blocks: Vec<Block>, stream: StreamId) -> Vec<Range> {
    let lay = blocks.iter().map(range).collect();
    allocator.give_all(blocks, stream);
    lay
}

pub(super) fn a_private_pool_shares_no_memory(bench: &Bench) {
    let streams = bench.streams::<2>();
    let allocator = bench.build();
    let [first, second] = [0, 1].map(|_| allocator.pool_create().unwrap());
    // All of it is free and cached when the next one asks, so an allocator that looks into another's memory takes it.
    let mut before: Vec<(Option<(PrivatePool, StreamId)>, Range)> = Vec::new();
    for seed in 0..3 {
        for stream in streams {
            for pool in [None, Some(first), Some(second)] {
                let blocks = match pool {
                    Some(pool) => forty_of(&allocator, pool, stream, seed),
                    None => forty(&allocator, stream, seed),
                };
                // Outside of pools a stream may take another's memory.
                let part = pool.map(|pool| (pool, stream));
                let others = before.iter().filter(|(of, _)| *of != part).map(|(_, range)| *range);
                assert_apart(&blocks, &others.collect::<Vec<_>>());
                before.extend(free_all(&allocator, blocks, stream).into_iter().map(|range| (part, range)));
                check_stats(&allocator.stats());
            }
        }
    }
    // Memory of a pool comes back to the pool, and to its stream.
    let held = allocator.reserved();
    let blocks = forty_of(&allocator, first, streams[0], 2);
    assert_eq!(allocator.reserved(), held);
    free_all(&allocator, blocks, streams[0]);
}

pub(super) fn memory_of_a_private_pool_stays_until_it_is_released(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let stream = bench.stream();
    let allocator = bench.build();
    let [first, second] = [0, 1].map(|_| allocator.pool_create().unwrap());
    let blocks = [first, second].map(|pool| forty_of(&allocator, pool, stream, 1));
    let [lay, kept] = blocks.map(|blocks| free_all(&allocator, blocks, stream));
    assert!(allocator.pool_trim(first).is_err(), "it can be asked for memory");
    driver.device_synchronize().unwrap();
    allocator.trim(0).unwrap();
    let blocks = forty(&allocator, stream, 2);
    assert_apart(&blocks, &[lay, kept.clone()].concat());
    allocator.pool_release(first).unwrap();
    assert!(allocator.pool_trim(first).unwrap() > 0, "all of it was idle");
    assert_eq!(allocator.pool_trim(first).unwrap(), 0);
    free_all(&allocator, blocks, stream);
    allocator.trim(0).unwrap();
    let blocks = forty(&allocator, stream, 3);
    assert_apart(&blocks, &kept);
    free_all(&allocator, blocks, stream);
    // A pool can be released while a block is held, which is then freed as any other.
    let held = forty_of(&allocator, second, stream, 4);
    allocator.pool_release(second).unwrap();
    check_stats(&allocator.stats());
    free_all(&allocator, held, stream);
    driver.device_synchronize().unwrap();
    allocator.check_all_returns();
}

pub(super) fn a_recorded_use_delays_the_reuse_in_a_private_pool(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let [own, other] = bench.streams();
    let allocator = bench.build();
    let pool = allocator.pool_create().unwrap();
    allocator.pool_begin(pool, own).unwrap();
    let block = allocator.take(3 * MIB, own);
    let lay = range(&block);
    allocator.use_on(&block, other);
    allocator.record_use(&block, other).unwrap();
    allocator.give(block, own);
    driver.device_synchronize().unwrap();
    let again = allocator.take(3 * MIB, own);
    assert!(!bench.capabilities().caches || overlap(range(&again), lay), "its use is over");
    allocator.give(again, own);
    allocator.pool_end(own).unwrap();
    allocator.pool_release(pool).unwrap();
    allocator.trim(0).unwrap();
    check_nothing_held(&allocator.stats());
}

pub(super) fn private_pools_out_of_order_are_refused(bench: &Bench) {
    let stream = bench.stream();
    let (allocator, stranger) = (bench.build(), bench.build());
    let refused = |outcome: Result<(), AllocError>, word: &str| {
        let error = outcome.unwrap_err();
        assert!(matches!(error, AllocError::PrivatePool { .. }) && error.to_string().contains(word), "{error}");
    };
    let [pool, other] = [0, 1].map(|_| allocator.pool_create().unwrap());
    refused(stranger.pool_begin(pool, stream), "there is no pool");
    refused(stranger.pool_release(pool), "there is no pool");
    refused(allocator.pool_end(stream), "in no pool");
    allocator.pool_begin(pool, stream).unwrap();
    refused(allocator.pool_begin(other, stream), "end that first");
    refused(allocator.pool_release(pool), "end that first");
    allocator.pool_end(stream).unwrap();
    allocator.pool_release(pool).unwrap();
    refused(allocator.pool_release(pool), "released");
    refused(allocator.pool_begin(pool, stream), "released");
    refused(allocator.pool_trim(other).map(|_| ()), "not been released");
}

/// For backends that say so in their capabilities.
pub(super) fn private_pools_are_refused(bench: &Bench) {
    let error = bench.build().pool_create().unwrap_err();
    assert!(matches!(error, AllocError::Incapable { .. }), "{error}");
}
