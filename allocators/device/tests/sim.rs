//! The simulated device where allocators lean on it: what is held, where addresses lie, how the account adds up.

use crate::common::{self, GIB, MIB, Random, free_bytes, sim, work};
use std::collections::BTreeMap;
use vramlab_device::sim::{KernelCost, MemoryCost};
use vramlab_device::{
    CallKind, DeviceAddr, Driver, DriverError, PoolSettings, Profile, SimDriver, StreamId, VmmDriver, sim::SimMemory,
};
use vramlab_device::{PoolDriver, PoolId};

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
fn a_pools_peaks_stay_when_it_grows_again_to_less() {
    let sim = sim(GIB, SimMemory::None);
    let (stream, pool) = (sim.stream_create().unwrap(), pool(&sim, u64::MAX));
    let counters = || sim.pool_counters(pool).unwrap();
    let round = |bytes| {
        let addr = sim.mem_alloc_async(pool, bytes, stream).unwrap();
        assert_eq!((counters().reserved, counters().used), (bytes, bytes));
        give(&sim, addr, stream);
        sim.device_synchronize().unwrap();
        sim.pool_trim_to(pool, 0).unwrap();
        assert_eq!((counters().reserved, counters().used), (0, 0));
        (counters().reserved_high, counters().used_high)
    };
    assert_eq!(round(128 * MIB), (128 * MIB, 128 * MIB));
    assert_eq!(round(32 * MIB), (128 * MIB, 128 * MIB), "less than before");
    assert_eq!(sim.pool_reserved_high(pool).unwrap(), 128 * MIB);
    sim.pool_reset_peaks(pool).unwrap();
    assert_eq!(round(32 * MIB), (32 * MIB, 32 * MIB), "from the reset on");
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
        let requested: u64 = live.values().sum();
        assert!(used >= requested && used.is_multiple_of(2 * MIB), "{used} held for {requested}");
        assert!(used <= 2 * (requested + 2 * MIB * live.len() as u64), "{used} held for {requested}");
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
        let mut addresses = Vec::new();
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
            addresses.push((live.last().map(|addr| addr.get()), sim.clock().now_ns(), sim.blocked_ns()));
        }
        addresses
    };
    assert!(run() == run());
}

/// A device whose kernels take 1 us, and 9 us with all their data in memory; the cache holds 1 MiB.
fn cached(memory: SimMemory) -> SimDriver {
    let cold = MemoryCost { fixed_ns: 9000.0, iteration_ns: 0.0, bytes_per_ns: 1e9 };
    let cost = KernelCost {
        fixed_ns: 1000.0,
        iteration_ns: 0.0,
        blocks_per_wave: 1,
        bytes_per_ns: 1e9,
        from_memory: Some(cold),
    };
    SimDriver::new(Profile { default_kernel: cost, l2_bytes: Some(MIB), ..common::profile(GIB) }, memory)
}

#[test]
fn a_kernel_takes_longer_on_data_that_left_the_cache() {
    let sim = cached(SimMemory::Host);
    let stream = sim.stream_create().unwrap();
    let launch = |buffers: &[(u64, u64)]| {
        let before = sim.busy_ns();
        sim.launch(stream, "test", (1, 1), 0, buffers).unwrap();
        sim.busy_ns() - before
    };
    let (a, b) = (sim.mem_alloc(MIB).unwrap().get(), sim.mem_alloc(8 * MIB).unwrap().get());
    assert_eq!(launch(&[(a, MIB)]), 9000, "nobody has touched it");
    assert_eq!(launch(&[(a, MIB)]), 1000);
    assert_eq!(launch(&[(a, MIB / 2), (b, MIB / 2)]), 5000, "half of the data");
    assert_eq!(launch(&[(b, 8 * MIB)]), 9000, "more than fits");
    assert_eq!(launch(&[(a, MIB)]), 9000);
    assert_eq!(launch(&[]), 1000, "without data there is nothing to miss");
    // Copies and fills pass through the cache.
    common::write(&sim, DeviceAddr::new(b).unwrap(), &vec![0; MIB as usize], stream);
    assert_eq!(launch(&[(b, MIB)]), 1000);
    common::fill(&sim, DeviceAddr::new(a).unwrap(), 0, MIB, stream);
    assert_eq!(launch(&[(a, MIB)]), 1000);
    // It knows addresses, not blocks.
    // SAFETY: allocated above, freed once.
    unsafe { sim.mem_free(DeviceAddr::new(a).unwrap()) }.unwrap();
    assert_eq!(sim.mem_alloc(MIB).unwrap().get(), a);
    assert_eq!(launch(&[(a, MIB)]), 1000);
}

#[test]
fn addresses_without_memory_have_no_cache() {
    let sim = cached(SimMemory::None);
    let stream = sim.stream_create().unwrap();
    let addr = sim.mem_alloc(MIB).unwrap();
    sim.launch(stream, "test", (1, 1), 0, &[(addr.get(), MIB)]).unwrap();
    assert_eq!(sim.busy_ns(), 1000);
}

#[test]
fn a_program_takes_its_own_time_between_calls_and_in_none() {
    let profile = Profile { program_ns_per_call: 400, program_ns_per_memory_call: Some(150), ..common::profile(GIB) };
    let sim = SimDriver::new(profile.clone(), SimMemory::None);
    let (clock, stream) = (sim.clock(), sim.stream_create().unwrap());
    let start = clock.now_ns();
    sim.launch(stream, "test", (1, 1), 0, &[]).unwrap();
    let launched = clock.now_ns();
    assert_eq!(launched - start, sim.profile().queues.launch_ns);
    sim.run_program(CallKind::KernelLaunch);
    assert_eq!(clock.now_ns() - launched, 400);
    sim.run_program(CallKind::MemAllocAsync);
    assert_eq!(clock.now_ns() - launched, 400 + 150, "less is done around a call for memory");
    assert_eq!(sim.blocked_ns(), Some(0), "work is no wait");
    let alike = SimDriver::new(Profile { program_ns_per_memory_call: None, ..profile }, SimMemory::None);
    alike.run_program(CallKind::MemFree);
    assert_eq!(alike.clock().now_ns(), 400, "as any other call where the profile has no figure of its own");
}

/// The host time of a call without waits, and the delay that it causes in the stream.
fn costs(sim: &SimDriver, stream: StreamId, call: impl FnOnce()) -> (u64, u64) {
    let ready = common::ready_ns(sim, stream);
    let (before, waited) = (sim.clock().now_ns(), sim.blocked_ns().unwrap());
    call();
    let took = sim.clock().now_ns() - before - (sim.blocked_ns().unwrap() - waited);
    (took, common::ready_ns(sim, stream) - ready)
}

#[test]
fn a_pool_pays_for_each_granule_that_it_takes_and_gives_back() {
    let sim = sim(GIB, SimMemory::None);
    let (stream, pool, prices) = (sim.stream_create().unwrap(), pool(&sim, 0), sim.profile().pool.clone().unwrap());
    let mut addr = None;
    let mut take = |bytes| costs(&sim, stream, || addr = Some(sim.mem_alloc_async(pool, bytes, stream).unwrap())).0;
    assert_eq!(take(100 * MIB), prices.alloc_ns + 4 * prices.grow_ns_per_granule);
    assert_eq!(take(MIB), prices.alloc_ns, "there is room in the fourth");
    assert_eq!(take(64 * MIB), prices.alloc_ns + 2 * prices.grow_ns_per_granule, "what is missing");
    give(&sim, addr.unwrap(), stream);
    let synchronise = || costs(&sim, stream, || sim.stream_synchronize(stream).unwrap()).0;
    let price = sim.profile().queues.stream_synchronize_ns;
    assert_eq!(synchronise(), price + 2 * prices.release_ns_per_granule);
    assert_eq!(synchronise(), price, "nothing is left to give back");
}

#[test]
fn pool_frees_take_stream_time_once_between_two_kernels() {
    let sim = sim(GIB, SimMemory::None);
    let (stream, pool, prices) =
        (sim.stream_create().unwrap(), pool(&sim, u64::MAX), sim.profile().pool.clone().unwrap());
    let first = sim.mem_alloc_async(pool, MIB, stream).unwrap();
    // Behind a long kernel, so that the host's own time does not show.
    common::work(&sim, stream, 50_000_000);
    let mut addr = None;
    let (host, device) = costs(&sim, stream, || addr = Some(sim.mem_alloc_async(pool, MIB, stream).unwrap()));
    assert_eq!((host, device), (prices.alloc_ns, 0));
    let another = sim.mem_alloc_async(pool, MIB, stream).unwrap();
    let free = |addr| costs(&sim, stream, || give(&sim, addr, stream));
    assert_eq!(free(first), (prices.free_ns, prices.stream_ns));
    assert_eq!(free(addr.unwrap()), (prices.free_ns, 0), "behind a free");
    common::work(&sim, stream, 50_000_000);
    assert_eq!(free(another), (prices.free_ns, prices.stream_ns), "behind a kernel");
}

#[test]
fn plain_memory_costs_by_the_pages_that_it_takes_and_gives_back() {
    let sim = sim(GIB, SimMemory::None);
    let (stream, plain) = (sim.stream_create().unwrap(), sim.profile().plain.clone());
    let take = |bytes: u64| {
        let mut addr = None;
        let ns = costs(&sim, stream, || addr = Some(sim.mem_alloc(bytes).unwrap())).0;
        (addr.unwrap(), ns)
    };
    // SAFETY: tests free what they allocated, once.
    let free = |addr| costs(&sim, stream, || unsafe { sim.mem_free(addr) }.unwrap()).0;
    let ((first, new_page), (second, in_page)) = (take(1000), take(1000));
    assert_eq!((new_page, in_page), (plain.alloc_ns.at(1000), plain.alloc_in_page_ns));
    assert_eq!(free(first), plain.free_in_page_ns, "the page stays");
    assert_eq!(free(second), plain.free_ns.at(1000), "the page goes");
    assert_ne!(plain.free_ns.at(1000), plain.free_in_page_ns);
    let (large, ns) = take(100 * MIB);
    assert_eq!(ns, plain.alloc_ns.at(100 * MIB));
    assert_eq!(free(large), plain.free_ns.at(100 * MIB));
}

#[test]
fn plain_free_waits_for_all_streams_if_the_profile_has_it() {
    for drains in [true, false] {
        let mut profile = common::profile(GIB);
        profile.plain.free_drains_device = drains;
        let sim = SimDriver::new(profile, SimMemory::None);
        let streams = [(); 2].map(|()| sim.stream_create().unwrap());
        let addr = sim.mem_alloc(MIB).unwrap();
        for (stream, ns) in streams.into_iter().zip([20_000_000, 50_000_000]) {
            common::work(&sim, stream, ns);
        }
        let ready = streams.map(|stream| common::ready_ns(&sim, stream)).into_iter().max().unwrap();
        let waited = sim.blocked_ns().unwrap();
        let before = sim.clock().now_ns();
        // SAFETY: allocated above, freed once.
        unsafe { sim.mem_free(addr) }.unwrap();
        let waits = sim.blocked_ns().unwrap() - waited;
        assert_eq!(waits, if drains { ready - before } else { 0 });
        assert_eq!(sim.clock().now_ns() - before, waits + sim.profile().plain.free_ns.at(MIB));
    }
}

#[test]
fn block_without_host_memory_is_refused_and_leaves_nothing() {
    let sim = SimDriver::new(common::profile(GIB), SimMemory::Host).with_host_limit(40 * MIB);
    let (stream, start) = (sim.stream_create().unwrap(), free_bytes(&sim));
    let pool = pool(&sim, 0);
    let check = |error: vramlab_device::DriverError| {
        assert!(!error.is_out_of_memory(), "the device has room: {error}");
        let text = error.to_string();
        assert!(text.contains("50 MiB more of this machine's memory") && text.contains("40 MiB"), "{text}");
    };
    check(sim.mem_alloc(50 * MIB).unwrap_err());
    check(sim.mem_alloc_async(pool, 50 * MIB, stream).unwrap_err());
    check(sim.host_alloc(50 << 20).unwrap_err());
    sim.device_synchronize().unwrap();
    assert_eq!(free_bytes(&sim), start);
    // Released memory can be allocated again, as a whole and in other sizes.
    for bytes in [40 * MIB, 30 * MIB, 40 * MIB] {
        let addr = sim.mem_alloc(bytes).unwrap();
        assert!(sim.mem_alloc(20 * MIB).is_err());
        // SAFETY: allocated above, freed once.
        unsafe { sim.mem_free(addr) }.unwrap();
    }
    let pinned = sim.host_alloc(40 << 20).unwrap();
    assert!(sim.mem_alloc(MIB).is_err());
    // SAFETY: allocated above, freed once.
    unsafe { sim.host_free(pinned, 40 << 20) }.unwrap();
    assert!(sim.mem_alloc(40 * MIB).is_ok());
}

#[test]
fn memory_that_queued_work_uses_cannot_be_unmapped() {
    const PAGE: u64 = 2 << 20;
    for memory in [SimMemory::None, SimMemory::Host] {
        let sim = SimDriver::new(Profile::h200(), memory);
        let vmm = sim.vmm().unwrap();
        let streams = [sim.stream_create().unwrap(), sim.stream_create().unwrap()];
        let base = vmm.address_reserve(4 * PAGE).unwrap();
        let page = |number: u64| DeviceAddr::new(base.get() + number * PAGE).unwrap();
        // SAFETY: pages of the range, each mapped once; the work below stays inside of them.
        unsafe {
            for number in 0..3 {
                vmm.map(page(number), PAGE, vmm.create(PAGE).unwrap()).unwrap();
            }
            vmm.set_access(base, 3 * PAGE).unwrap();
            work(&sim, streams[0], 1_000_000);
            sim.fill_bytes(page(0), 1, PAGE, streams[0]).unwrap();
            sim.launch(streams[1], "test", (1, 1), 1000 * PAGE, &[(page(1).get() + 512, 512)]).unwrap();
        }
        // SAFETY: whole mappings; whether work uses them is what is asked.
        let unmap = |number| unsafe { vmm.unmap(page(number), PAGE) };
        let refused = |number| unmap(number).is_err_and(|error| error.code == DriverError::ILLEGAL_ADDRESS);
        assert!(refused(0) && refused(1));
        unmap(2).unwrap();
        sim.stream_synchronize(streams[0]).unwrap();
        unmap(0).unwrap();
        sim.stream_synchronize(streams[1]).unwrap();
        unmap(1).unwrap();
    }
}

#[test]
fn memory_that_a_graph_uses_cannot_be_unmapped_while_it_runs() {
    const PAGE: u64 = 2 << 20;
    let sim = SimDriver::new(Profile::h200(), SimMemory::None);
    let (vmm, graphs) = (sim.vmm().unwrap(), sim.graphs().unwrap());
    let stream = sim.stream_create().unwrap();
    let base = vmm.address_reserve(PAGE).unwrap();
    // SAFETY: one page, mapped once; the graph works inside of it.
    unsafe {
        vmm.map(base, PAGE, vmm.create(PAGE).unwrap()).unwrap();
        graphs.capture_begin(stream).unwrap();
        sim.fill_bytes(base, 1, PAGE, stream).unwrap();
        let graph = graphs.capture_end(stream).unwrap();
        work(&sim, stream, 1_000_000);
        graphs.graph_launch(graph, stream).unwrap();
        assert!(vmm.unmap(base, PAGE).is_err());
        sim.stream_synchronize(stream).unwrap();
        vmm.unmap(base, PAGE).unwrap();
    }
}
