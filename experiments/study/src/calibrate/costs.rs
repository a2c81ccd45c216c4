//! The costs of a device profile: the median of repeated calls, or device time by events.

use super::{Bench, MIB, median};
use anyhow::{Context, Result};
use vramlab::device::PoolSettings;
use vramlab::device::sim::{Copies, CostBySize, PlainMemory, PoolMemory, Queues, VirtualMemory};
use vramlab::{DeviceAddr, Profile};

/// Sizes at which calls that take whole pages are measured.
pub(super) const PAGE_SIZES: [u64; 3] = [2 * MIB, 32 * MIB, 256 * MIB];
pub(super) const MAPPING_SIZES: [u64; 3] = [2 * MIB, 20 * MIB, 256 * MIB];
pub(super) const COPY_SIZES: [u64; 6] = [256, 4096, 64 << 10, 196 << 10, 1568 << 10, 12544 << 10];
/// Repeats of each call.
pub(super) const REPEATS: usize = 51;

/// The costs of a profile, kernels excepted.
pub(super) fn costs(bench: &Bench, name: String, base: Profile, source: &str) -> Result<Profile> {
    let info = bench.driver().mem_info()?;
    let held = bench.large.1 * 4;
    let pool = match &base.pool {
        Some(pool) => bench.pool(pool).context("pools")?,
        None => None,
    };
    Ok(Profile {
        name,
        source: source.to_owned(),
        total_bytes: info.total,
        context_bytes: info.total - info.free - held.next_multiple_of(base.plain.page_bytes),
        plain: bench.plain(&base.plain).context("plain memory")?,
        pool,
        vmm: bench.vmm().context("virtual memory")?,
        queues: bench.queues().context("queues")?,
        copies: bench.copies().context("copies")?,
        ..base
    })
}

impl Bench {
    fn plain(&self, base: &PlainMemory) -> Result<PlainMemory> {
        let driver = self.driver();
        // SAFETY: every address freed here was just allocated here and is used by nothing.
        let free = |addr: DeviceAddr| unsafe { driver.mem_free(addr) };
        let (mut alloc, mut freed) = (Vec::new(), Vec::new());
        for bytes in PAGE_SIZES {
            let (first, second) = self.pairs(|| driver.mem_alloc(bytes), free)?;
            alloc.push((bytes, first));
            freed.push((bytes, second));
        }
        // Blocks of a step, several at a time and with launches between, as a program asks for them; in a tight loop
        // of pairs the driver's code and data stay in the nearest caches, and a call takes half as long.
        const BLOCK: u64 = 196 << 10;
        let keep = driver.mem_alloc(1024)?;
        let (mut allocs, mut frees) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let mut held = Vec::new();
            for _ in 0..8 {
                self.fill(1)?;
                let (ns, addr) = self.time(|| driver.mem_alloc(BLOCK))?;
                allocs.push(ns);
                held.push(addr);
            }
            for addr in held {
                self.fill(1)?;
                self.settle()?;
                frees.push(self.time(|| free(addr))?.0);
            }
        }
        free(keep)?;
        // Behind a kernel that runs for milliseconds, a free that waits takes as long.
        let addr = driver.mem_alloc(BLOCK)?;
        self.fill(self.large.1)?;
        let (behind, ()) = self.time(|| free(addr))?;
        let (rest, ()) = self.time(|| driver.device_synchronize())?;
        Ok(PlainMemory {
            page_bytes: base.page_bytes,
            align_bytes: base.align_bytes,
            alloc_ns: CostBySize::new(alloc),
            alloc_in_page_ns: median(allocs),
            free_ns: CostBySize::new(freed),
            free_in_page_ns: median(frees),
            free_drains_device: behind > rest,
        })
    }

    fn pool(&self, base: &PoolMemory) -> Result<Option<PoolMemory>> {
        let driver = self.driver();
        let Some(pools) = driver.pools() else { return Ok(None) };
        let keep = PoolSettings::default();
        let (create_ns, pool) = self.time(|| pools.pool_create(keep))?;
        // SAFETY: every address given to this closure was just allocated from this pool and is used by nothing later.
        let free = |addr: DeviceAddr| unsafe { pools.mem_free_async(addr, self.stream) };
        let first = pools.mem_alloc_async(pool, 512, self.stream)?;
        let granule_bytes = pools.pool_counters(pool)?.reserved;
        let (mut allocs, mut frees) = (Vec::new(), Vec::new());
        for _ in 0..4 * REPEATS {
            self.fill(1)?;
            let (ns, addr) = self.time(|| pools.mem_alloc_async(pool, 196 << 10, self.stream))?;
            allocs.push(ns);
            self.fill(1)?;
            frees.push(self.time(|| free(addr))?.0);
        }
        self.settle()?;
        let (alloc_ns, free_ns) = (median(allocs), median(frees));
        let attribute_ns = self.median_of(|| pools.pool_counters(pool).map(|_| ()))? / 4;
        // Device time: pairs of pool operations between kernels, against the kernels alone, queued behind a long one.
        const QUEUED: u64 = 200;
        let stretch = |with_pool: bool| -> Result<u64> {
            let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
            self.fill(self.large.1)?;
            driver.event_record(start, self.stream)?;
            for _ in 0..QUEUED {
                if with_pool {
                    let addr = pools.mem_alloc_async(pool, 196 << 10, self.stream)?;
                    self.fill(1)?;
                    free(addr)?;
                } else {
                    self.fill(1)?;
                }
            }
            driver.event_record(end, self.stream)?;
            self.settle()?;
            let ns = driver.event_elapsed_ns(start, end)?;
            for event in [start, end] {
                // SAFETY: both have completed and are used nowhere else.
                unsafe { driver.event_destroy(event)? };
            }
            Ok(ns)
        };
        let with = median((0..5).map(|_| stretch(true)).collect::<Result<_>>()?);
        let without = median((0..5).map(|_| stretch(false)).collect::<Result<_>>()?);
        free(first)?;
        self.settle()?;
        // SAFETY: nothing of the pool is in use.
        unsafe { pools.pool_destroy(pool)? };
        // Growth and release: a pool that keeps nothing, and blocks of eight granules.
        const GRANULES: u64 = 8;
        let pool = pools.pool_create(PoolSettings { release_threshold: 0, ..keep })?;
        let idle = self.median_of(|| driver.stream_synchronize(self.stream))?;
        let (mut grow, mut release) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let (ns, addr) = self.time(|| pools.mem_alloc_async(pool, GRANULES * granule_bytes, self.stream))?;
            grow.push(ns.saturating_sub(alloc_ns) / GRANULES);
            // SAFETY: just allocated from this pool and used by nothing.
            unsafe { pools.mem_free_async(addr, self.stream)? };
            let (ns, ()) = self.time(|| driver.stream_synchronize(self.stream))?;
            release.push(ns.saturating_sub(idle) / GRANULES);
        }
        // SAFETY: nothing of the pool is in use.
        unsafe { pools.pool_destroy(pool)? };
        Ok(Some(PoolMemory {
            granule_bytes,
            align_bytes: base.align_bytes,
            create_ns,
            alloc_ns,
            grow_ns_per_granule: median(grow),
            free_ns,
            stream_ns: with.saturating_sub(without) / (2 * QUEUED),
            release_ns_per_granule: median(release),
            attribute_ns,
        }))
    }

    fn vmm(&self) -> Result<Option<VirtualMemory>> {
        let Some(vmm) = self.driver().vmm() else { return Ok(None) };
        let granularity_bytes = vmm.granularity()?;
        let mut costs: [Vec<(u64, u64)>; 6] = Default::default();
        for bytes in MAPPING_SIZES {
            let bytes = bytes.next_multiple_of(granularity_bytes);
            let mut times: [Vec<u64>; 6] = Default::default();
            for _ in 0..REPEATS / 3 {
                let (reserve, addr) = self.time(|| vmm.address_reserve(bytes))?;
                let (create, handle) = self.time(|| vmm.create(bytes))?;
                // SAFETY: a fresh reservation and a fresh handle of the same size; what is mapped is unmapped below.
                let (map, ()) = self.time(|| unsafe { vmm.map(addr, bytes, handle) })?;
                // SAFETY: just mapped.
                let (access, ()) = self.time(|| unsafe { vmm.set_access(addr, bytes) })?;
                // SAFETY: mapped above and used by nothing.
                let (unmap, ()) = self.time(|| unsafe { vmm.unmap(addr, bytes) })?;
                // SAFETY: released once.
                let (release, ()) = self.time(|| unsafe { vmm.release(handle) })?;
                // SAFETY: reserved above with this size; nothing is mapped in it.
                unsafe { vmm.address_free(addr, bytes)? };
                for (list, ns) in times.iter_mut().zip([reserve, create, map, access, unmap, release]) {
                    list.push(ns);
                }
            }
            for (list, ns) in costs.iter_mut().zip(times.map(median)) {
                list.push((bytes, ns));
            }
        }
        let [reserve_ns, create_ns, map_ns, set_access_ns, unmap_ns, release_ns] = costs.map(CostBySize::new);
        Ok(Some(VirtualMemory {
            granularity_bytes,
            reserve_ns,
            create_ns,
            map_ns,
            set_access_ns,
            unmap_ns,
            release_ns,
        }))
    }

    fn queues(&self) -> Result<Queues> {
        let driver = self.driver();
        let launches = (0..REPEATS).map(|_| self.time_launch()).collect::<Result<_>>()?;
        self.settle()?;
        let stream_synchronize_ns = self.median_of(|| driver.stream_synchronize(self.stream))?;
        let device_synchronize_ns = self.median_of(|| driver.device_synchronize())?;
        // Launch, then wait: what the wait takes beyond the kernel and an idle wait is the way to the device and back.
        let mut waits = Vec::new();
        for _ in 0..REPEATS {
            self.fill(1)?;
            waits.push(self.time(|| driver.stream_synchronize(self.stream))?.0);
        }
        let kernel_ns = self.queued_kernel_ns()?;
        let start_latency_ns = median(waits).saturating_sub(kernel_ns + stream_synchronize_ns);
        let (event_create_ns, event_destroy_ns) = self.pairs(
            || driver.event_create(false),
            // SAFETY: just created and used by nothing.
            |event| unsafe { driver.event_destroy(event) },
        )?;
        let event = driver.event_create(false)?;
        let event_record_ns = self.median_of(|| driver.event_record(event, self.stream))?;
        self.settle()?;
        let event_query_ns = self.median_of(|| driver.event_query(event).map(|_| ()))?;
        let event_wait_ns = self.median_of(|| driver.stream_wait_event(self.stream, event))?;
        self.settle()?;
        // SAFETY: completed and used nowhere else.
        unsafe { driver.event_destroy(event)? };
        let (stream_create_ns, _) = self.pairs(
            || driver.stream_create(),
            // SAFETY: just created and used by nothing.
            |stream| unsafe { driver.stream_destroy(stream) },
        )?;
        Ok(Queues {
            launch_ns: median(launches),
            start_latency_ns,
            depth: self.queue_depth()?,
            stream_synchronize_ns,
            device_synchronize_ns,
            stream_create_ns,
            event_create_ns,
            event_destroy_ns,
            event_record_ns,
            event_query_ns,
            event_wait_ns,
            mem_get_info_ns: self.median_of(|| driver.mem_info().map(|_| ()))?,
        })
    }

    pub(super) fn time_launch(&self) -> Result<u64> {
        let start = self.clock.now_ns();
        self.fill(1)?;
        Ok(self.clock.now_ns() - start)
    }

    /// Device time of a shortest kernel among others of its kind.
    fn queued_kernel_ns(&self) -> Result<u64> {
        const QUEUED: u64 = 400;
        let driver = self.driver();
        let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
        self.fill(self.large.1)?;
        driver.event_record(start, self.stream)?;
        for _ in 0..QUEUED {
            self.fill(1)?;
        }
        driver.event_record(end, self.stream)?;
        self.settle()?;
        let ns = driver.event_elapsed_ns(start, end)? / QUEUED;
        for event in [start, end] {
            // SAFETY: both have completed and are used nowhere else.
            unsafe { driver.event_destroy(event)? };
        }
        Ok(ns)
    }

    /// How many operations a stream takes before a launch waits: the first launch that takes a hundred times as long
    /// as the median behind long kernels.
    fn queue_depth(&self) -> Result<usize> {
        const MOST: usize = 20_000;
        // Enough work that none of it ends while the queue fills up.
        const LONG: usize = 8;
        self.settle()?;
        for _ in 0..LONG {
            self.fill(self.large.1)?;
        }
        let mut times = Vec::new();
        while times.len() < MOST {
            let ns = self.time_launch()?;
            let usual = median(times.iter().copied().take(50).collect());
            if times.len() > 50 && ns > 100 * usual {
                break;
            }
            times.push(ns);
        }
        self.settle()?;
        // The long kernels are in the queue too.
        Ok(times.len() + LONG)
    }

    fn copies(&self) -> Result<Copies> {
        let driver = self.driver();
        let largest = COPY_SIZES.into_iter().max().unwrap_or(0) as usize;
        let mut pageable = vec![1u8; largest];
        let target = driver.mem_alloc(largest as u64)?;
        let pinned = driver.host_alloc(largest)?;
        let (mut from_pageable, mut on_device, mut to_host) = (Vec::new(), Vec::new(), Vec::new());
        let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
        let mut pinned_ns = Vec::new();
        for bytes in COPY_SIZES {
            // CAST: sizes of this list are far below the address space.
            let len = bytes as usize;
            let mut times: [Vec<u64>; 3] = Default::default();
            for _ in 0..REPEATS {
                // SAFETY: the target holds `largest` bytes and lives to the end of this function, after a synchronise.
                let copy = || unsafe { driver.copy_to_device(target, &pageable[..len], self.stream) };
                times[0].push(self.time(copy)?.0);
                // Behind a kernel, so that the events enclose the copy and not the way of its launch to the device.
                self.fill(self.large.1 / 16)?;
                driver.event_record(start, self.stream)?;
                // SAFETY: as above; the page-locked memory is as large and lives as long.
                let copy = || unsafe { driver.copy_to_device_async(target, pinned, len, self.stream) };
                pinned_ns.push(self.time(copy)?.0);
                driver.event_record(end, self.stream)?;
                self.settle()?;
                times[1].push(driver.event_elapsed_ns(start, end)?);
                // SAFETY: the target holds `len` bytes.
                let copy = || unsafe { driver.copy_to_host(&mut pageable[..len], target, self.stream) };
                times[2].push(self.time(copy)?.0);
            }
            let [first, second, third] = times.map(median);
            from_pageable.push((bytes, first));
            on_device.push((bytes, second));
            to_host.push((bytes, third));
        }
        // SAFETY: the target holds one byte and more.
        let memset_ns = self.median_of(|| unsafe { driver.fill_bytes(target, 0, 4096, self.stream) })?;
        self.settle()?;
        let (mut host_alloc, mut host_free) = (Vec::new(), Vec::new());
        for bytes in [MIB, 16 * MIB] {
            let free = |ptr| {
                // SAFETY: just allocated with this size and used by nothing.
                unsafe { driver.host_free(ptr, bytes as usize) }
            };
            let (first, second) = self.pairs(|| driver.host_alloc(bytes as usize), free)?;
            host_alloc.push((bytes, first));
            host_free.push((bytes, second));
        }
        // SAFETY: all work on them is done (`settle`), and each is given back once.
        unsafe {
            driver.host_free(pinned, largest)?;
        }
        // SAFETY: as above.
        unsafe {
            driver.mem_free(target)?;
        }
        Ok(Copies {
            pageable_to_device_ns: CostBySize::new(from_pageable),
            pinned_to_device_ns: median(pinned_ns),
            to_device_ns: CostBySize::new(on_device),
            to_host_ns: CostBySize::new(to_host),
            memset_ns,
            host_alloc_ns: CostBySize::new(host_alloc),
            host_free_ns: CostBySize::new(host_free),
        })
    }
}
