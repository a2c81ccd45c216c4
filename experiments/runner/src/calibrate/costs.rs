//! The costs of a device profile, each a median: from the calls that were measured, and from calls in a program's
//! pattern.

use super::measure::{Condition, Measurement};
use super::{Bench, median};
use anyhow::{Context, Result};
use vramlab::device::sim::{Copies, CostBySize, PlainMemory, PoolMemory, Queues, VirtualMemory};
use vramlab::device::{MemInfo, PoolSettings};
use vramlab::{DeviceAddr, Profile};

/// Sizes of plain memory whose free is measured: multiples of a page.
pub(super) const PAGE_SIZES: [u64; 3] = [2 << 20, 32 << 20, 256 << 20];
pub(super) const COPY_SIZES: [u64; 6] = [256, 4096, 64 << 10, 196 << 10, 1568 << 10, 12544 << 10];
/// Repeats of each call.
const REPEATS: usize = 51;
/// Bytes of a block of a training step.
const BLOCK: u64 = 196 << 10;

/// The costs of a profile, except those of kernels. `memory` describes the device before the first measurement.
pub(super) fn costs(bench: &Bench, memory: MemInfo, calls: &[Measurement], base: Profile) -> Result<Profile> {
    let live_bytes = bench.large.1 * 4;
    let pool = match &base.pool {
        Some(pool) => bench.pool(pool).context("pools")?,
        None => None,
    };
    Ok(Profile {
        total_bytes: memory.total,
        context_bytes: memory.total - memory.free - live_bytes.next_multiple_of(base.plain.page_bytes),
        plain: bench.plain(&base.plain, calls).context("plain memory")?,
        pool,
        vmm: bench.vmm(calls).context("virtual memory")?,
        queues: bench.queues().context("queues")?,
        copies: bench.copies(calls).context("copies")?,
        ..base
    })
}

/// Cost of a call on the idle device, over the sizes that pass the filter.
fn by_size(calls: &[Measurement], call: &str, wanted: impl Fn(u64) -> bool) -> CostBySize {
    in_condition(calls, call, Condition::Idle, wanted)
}

/// Cost of a call in a condition, over the sizes that pass the filter.
fn in_condition(calls: &[Measurement], call: &str, condition: Condition, wanted: impl Fn(u64) -> bool) -> CostBySize {
    let rows = calls.iter().filter(|row| row.call == call && row.condition == condition);
    CostBySize::new(rows.filter_map(|row| Some((row.bytes.filter(|bytes| wanted(*bytes))?, row.p50_ns))).collect())
}

impl Bench {
    fn median_of<T, E>(&self, call: impl FnMut() -> Result<T, E>) -> Result<u64>
    where
        anyhow::Error: From<E>,
    {
        Ok(median(self.times(REPEATS, call)?))
    }

    fn plain(&self, base: &PlainMemory, calls: &[Measurement]) -> Result<PlainMemory> {
        let driver = self.driver();
        // SAFETY: every address freed here was just allocated here and is used by nothing.
        let free = |addr: DeviceAddr| unsafe { driver.mem_free(addr) };
        // Blocks of a step, several live and with launches between, as in a program; in a tight loop of pairs the
        // driver's code and data stay in the nearest caches, and a call takes half as long.
        let keep = driver.mem_alloc(1024)?;
        let (mut allocs, mut frees) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let mut live = Vec::new();
            for _ in 0..8 {
                self.fill(1)?;
                let (ns, addr) = self.time(|| driver.mem_alloc(BLOCK))?;
                allocs.push(ns);
                live.push(addr);
            }
            for addr in live {
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
            // Allocations while a kernel runs, by a program that does not wait; a free waits for the idle device
            // anyway.
            alloc_ns: in_condition(calls, "mem_alloc", Condition::Busy, |_| true),
            alloc_in_page_ns: median(allocs),
            free_ns: by_size(calls, "mem_free", |bytes| PAGE_SIZES.contains(&bytes)),
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
            let (ns, addr) = self.time(|| pools.mem_alloc_async(pool, BLOCK, self.stream))?;
            allocs.push(ns);
            self.fill(1)?;
            frees.push(self.time(|| free(addr))?.0);
        }
        self.settle()?;
        let (alloc_ns, free_ns) = (median(allocs), median(frees));
        let attribute_ns = self.median_of(|| pools.pool_counters(pool))? / 4;
        // Device time: a free and an allocation between kernels, compared with the kernels only, queued behind a long
        // one.
        const QUEUED: u64 = 200;
        let one = |with_pool: bool| -> Result<()> {
            let addr = with_pool.then(|| pools.mem_alloc_async(pool, BLOCK, self.stream)).transpose()?;
            self.fill(1)?;
            Ok(addr.map_or(Ok(()), free)?)
        };
        let stretch = |with_pool| self.queued_ns(|| (0..QUEUED).try_for_each(|_| one(with_pool)));
        let with = median((0..5).map(|_| stretch(true)).collect::<Result<_>>()?);
        let without = median((0..5).map(|_| stretch(false)).collect::<Result<_>>()?);
        free(first)?;
        self.settle()?;
        // SAFETY: no block of the pool is live.
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
        // SAFETY: no block of the pool is live.
        unsafe { pools.pool_destroy(pool)? };
        Ok(Some(PoolMemory {
            granule_bytes,
            align_bytes: base.align_bytes,
            create_ns,
            alloc_ns,
            grow_ns_per_granule: median(grow),
            free_ns,
            stream_ns: with.saturating_sub(without) / QUEUED,
            release_ns_per_granule: median(release),
            attribute_ns,
        }))
    }

    fn vmm(&self, calls: &[Measurement]) -> Result<Option<VirtualMemory>> {
        let Some(vmm) = self.driver().vmm() else { return Ok(None) };
        let cost = |call| by_size(calls, call, |_| true);
        Ok(Some(VirtualMemory {
            granularity_bytes: vmm.granularity()?,
            reserve_ns: cost("mem_address_reserve"),
            create_ns: cost("mem_create"),
            map_ns: cost("mem_map"),
            set_access_ns: cost("mem_set_access"),
            unmap_ns: cost("mem_unmap"),
            release_ns: cost("mem_release"),
        }))
    }

    fn queues(&self) -> Result<Queues> {
        let driver = self.driver();
        let launch_ns = self.median_of(|| self.fill(1))?;
        self.settle()?;
        let stream_synchronize_ns = self.median_of(|| driver.stream_synchronize(self.stream))?;
        let device_synchronize_ns = self.median_of(|| driver.device_synchronize())?;
        // Launch, then wait: the time of the wait, less the kernel and an idle wait, is the latency to the device and
        // back.
        let mut waits = Vec::new();
        for _ in 0..REPEATS {
            self.fill(1)?;
            waits.push(self.time(|| driver.stream_synchronize(self.stream))?.0);
        }
        let kernel_ns = self.queued_kernel_ns()?;
        let start_latency_ns = median(waits).saturating_sub(kernel_ns + stream_synchronize_ns);
        // SAFETY: just created and used by nothing.
        let destroy = |event| unsafe { driver.event_destroy(event) };
        let (creates, destroys) = self.pairs(REPEATS, || Ok(()), || driver.event_create(false), destroy)?;
        let event = driver.event_create(false)?;
        let event_record_ns = self.median_of(|| driver.event_record(event, self.stream))?;
        self.settle()?;
        let event_query_ns = self.median_of(|| driver.event_query(event))?;
        let event_wait_ns = self.median_of(|| driver.stream_wait_event(self.stream, event))?;
        self.settle()?;
        destroy(event)?;
        // SAFETY: just created and used by nothing.
        let end = |stream| unsafe { driver.stream_destroy(stream) };
        let (streams, _) = self.pairs(REPEATS, || Ok(()), || driver.stream_create(), end)?;
        Ok(Queues {
            launch_ns,
            start_latency_ns,
            depth: self.queue_depth()?,
            stream_synchronize_ns,
            device_synchronize_ns,
            stream_create_ns: median(streams),
            event_create_ns: median(creates),
            event_destroy_ns: median(destroys),
            event_record_ns,
            event_query_ns,
            event_wait_ns,
            mem_get_info_ns: self.median_of(|| driver.mem_info())?,
        })
    }

    /// Device time of the shortest kernel among others of its kind.
    fn queued_kernel_ns(&self) -> Result<u64> {
        const QUEUED: u64 = 400;
        Ok(self.queued_ns(|| (0..QUEUED).try_for_each(|_| self.fill(1)))? / QUEUED)
    }

    /// The number of operations that a stream queues before a launch waits: the first launch that takes a hundred
    /// times the median behind long kernels.
    fn queue_depth(&self) -> Result<usize> {
        const MOST: usize = 20_000;
        // Enough work that none of it ends while the queue fills.
        const LONG: usize = 8;
        self.settle()?;
        for _ in 0..LONG {
            self.fill(self.large.1)?;
        }
        let mut times = Vec::new();
        while times.len() < MOST {
            let ns = self.time(|| self.fill(1))?.0;
            let usual = median(times.iter().copied().take(50).collect());
            if times.len() > 50 && ns > 100 * usual {
                break;
            }
            times.push(ns);
        }
        self.settle()?;
        // The queue also contains the long kernels.
        Ok(times.len() + LONG)
    }

    fn copies(&self, calls: &[Measurement]) -> Result<Copies> {
        let driver = self.driver();
        let largest = COPY_SIZES.into_iter().max().unwrap_or(0);
        // CAST: sizes of this list are far below the address space.
        let len = |bytes: u64| bytes as usize;
        let mut pageable = vec![1u8; len(largest)];
        let target = driver.mem_alloc(largest)?;
        let pinned = driver.host_alloc(len(largest))?;
        let mut costs: [Vec<(u64, u64)>; 3] = Default::default();
        let mut pinned_ns = Vec::new();
        for bytes in COPY_SIZES {
            let mut times: [Vec<u64>; 3] = Default::default();
            for _ in 0..REPEATS {
                let part = &mut pageable[..len(bytes)];
                // SAFETY: the target holds `largest` bytes and lives to the end of this function, after a synchronise.
                times[0].push(self.time(|| unsafe { driver.copy_to_device(target, part, self.stream) })?.0);
                // Behind a kernel, so that the events enclose only the copy, without the latency of its launch.
                self.fill(self.large.1 / 16)?;
                times[1].push(self.device_ns(|| {
                    // SAFETY: as above; the page-locked memory is as large and lives as long.
                    let copy = || unsafe { driver.copy_to_device_async(target, pinned, len(bytes), self.stream) };
                    pinned_ns.push(self.time(copy)?.0);
                    Ok(())
                })?);
                // SAFETY: the target is at least as large.
                times[2].push(self.time(|| unsafe { driver.copy_to_host(part, target, self.stream) })?.0);
            }
            for (list, ns) in costs.iter_mut().zip(times.map(median)) {
                list.push((bytes, ns));
            }
        }
        // SAFETY: the target is at least as large.
        let memset_ns = self.median_of(|| unsafe { driver.fill_bytes(target, 0, 4096, self.stream) })?;
        self.settle()?;
        // SAFETY: all work on it is done (`settle`), and it is freed once, with its size.
        unsafe { driver.host_free(pinned, len(largest))? };
        // SAFETY: as above.
        unsafe { driver.mem_free(target)? };
        let [pageable_to_device_ns, to_device_ns, to_host_ns] = costs.map(CostBySize::new);
        Ok(Copies {
            pageable_to_device_ns,
            pinned_to_device_ns: median(pinned_ns),
            to_device_ns,
            to_host_ns,
            memset_ns,
            host_alloc_ns: by_size(calls, "host_alloc", |_| true),
            host_free_ns: by_size(calls, "host_free", |_| true),
        })
    }
}
