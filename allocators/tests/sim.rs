//! The simulated device where allocators lean on it: what is held, where addresses lie, how the account adds up.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use allocators::device::{PoolDriver, PoolId};
use allocators::{DeviceAddr, Driver, PoolSettings, SimDriver, SimMemory, StreamId, VmmDriver};
use common::{GIB, MIB, Random, free_bytes, sim};
use std::collections::BTreeMap;

fn give(sim: &SimDriver, addr: DeviceAddr, stream: StreamId) {
    // SAFETY: tests free what they allocated, once.
    unsafe { sim.mem_free_async(addr, stream) }.unwrap();
}

fn pool(sim: &SimDriver, release_threshold: u64) -> PoolId {
    sim.pool_create(PoolSettings { release_threshold, ..PoolSettings::default() }).unwrap()
}

#[test]
fn a_pool_uses_the_held_end_of_a_free_range_before_it_grows() {
    let sim = sim(96 * MIB, SimMemory::None);
    let (stream, pool) = (sim.stream_create().unwrap(), pool(&sim, 0));
    let sizes = [32 * MIB, 16 * MIB, 16 * MIB];
    let blocks = sizes.map(|bytes| sim.mem_alloc_async(pool, bytes, stream).unwrap());
    give(&sim, blocks[0], stream);
    give(&sim, blocks[1], stream);
    sim.stream_synchronize(stream).unwrap();
    // The first granule went; half of the second is free.
    assert_eq!(sim.pool_counters(pool).unwrap().reserved, 32 * MIB);
    let again = sim.mem_alloc_async(pool, 16 * MIB, stream).unwrap();
    assert_eq!(again, blocks[1]);
    assert_eq!(sim.pool_counters(pool).unwrap().reserved, 32 * MIB);
    // And when the device is full, that is the difference to running out.
    give(&sim, again, stream);
    sim.stream_synchronize(stream).unwrap();
    let plain = sim.mem_alloc(64 * MIB).unwrap();
    assert_eq!(free_bytes(sim.as_ref()), 0);
    sim.mem_alloc_async(pool, 16 * MIB, stream).unwrap();
    // SAFETY: allocated above, freed once.
    unsafe { sim.mem_free(plain) }.unwrap();
}

#[test]
fn a_trimmed_pool_keeps_at_least_what_it_is_told_to() {
    // As an H200 does (driver 580.159): 352 MiB trimmed to 176 leave 192, the next whole granule.
    let sim = sim(GIB, SimMemory::None);
    let (stream, pool) = (sim.stream_create().unwrap(), pool(&sim, u64::MAX));
    let addr = sim.mem_alloc_async(pool, 352 * MIB, stream).unwrap();
    give(&sim, addr, stream);
    sim.device_synchronize().unwrap();
    for (keep, left) in [(400, 352), (176, 192), (192, 192), (1, 32), (0, 0)] {
        sim.pool_trim_to(pool, keep * MIB).unwrap();
        assert_eq!(sim.pool_counters(pool).unwrap().reserved, left * MIB, "{keep}");
    }
}

#[test]
fn pools_plain_memory_and_reservations_never_share_addresses() {
    let sim = sim(64 * GIB, SimMemory::None);
    let stream = sim.stream_create().unwrap();
    let mut ranges: Vec<(u64, u64)> = (0..60)
        .map(|_| {
            let pool = pool(&sim, u64::MAX);
            (sim.mem_alloc_async(pool, MIB, stream).unwrap().get(), MIB)
        })
        .collect();
    for bytes in [512, MIB, 2 * MIB, 300 * MIB] {
        ranges.push((sim.mem_alloc(bytes).unwrap().get(), bytes));
    }
    for _ in 0..4 {
        ranges.push((sim.address_reserve(1 << 41).unwrap().get(), 1 << 41));
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{:#x?}", pair);
    }
}

#[test]
fn plain_memory_is_accounted_in_pages() {
    let sim = sim(GIB, SimMemory::None);
    let (start, mut random, mut live) = (free_bytes(sim.as_ref()), Random::new(4), BTreeMap::new());
    for _ in 0..2_000 {
        if random.below(9) < 5 || live.is_empty() {
            let bytes = random.size(24);
            let Ok(addr) = sim.mem_alloc(bytes) else { continue };
            let after = live.range(addr..).next().map(|(next, _): (&DeviceAddr, &u64)| next.get());
            assert!(after.is_none_or(|next| addr.get() + bytes <= next));
            live.insert(addr, bytes);
        } else {
            let addr = *live.keys().nth(random.below(live.len() as u64) as usize).unwrap();
            live.remove(&addr);
            // SAFETY: allocated above, freed once.
            unsafe { sim.mem_free(addr) }.unwrap();
        }
        let used = start - free_bytes(sim.as_ref());
        let wanted: u64 = live.values().sum();
        assert!(used >= wanted && used.is_multiple_of(2 * MIB), "{used} held for {wanted}");
        assert!(used <= 2 * (wanted + 2 * MIB * live.len() as u64), "{used} held for {wanted}");
    }
    for addr in live.into_keys() {
        // SAFETY: allocated above, freed once.
        unsafe { sim.mem_free(addr) }.unwrap();
    }
    assert_eq!(free_bytes(sim.as_ref()), start);
}

#[test]
fn the_same_calls_give_the_same_times_and_addresses() {
    let run = || {
        let sim = sim(GIB, SimMemory::None);
        let (stream, pool, mut random) = (sim.stream_create().unwrap(), pool(&sim, 0), Random::new(6));
        let mut seen = Vec::new();
        let mut live = Vec::new();
        for _ in 0..300 {
            common::work(&sim, stream, random.below(5_000));
            live.push(sim.mem_alloc_async(pool, random.size(22), stream).unwrap());
            if random.below(2) == 0 {
                give(&sim, live.swap_remove(random.below(live.len() as u64) as usize), stream);
            }
            if random.below(20) == 0 {
                sim.stream_synchronize(stream).unwrap();
            }
            seen.push((live.last().map(|addr| addr.get()), sim.clock().now_ns(), sim.blocked_ns()));
        }
        seen
    };
    assert!(run() == run());
}
