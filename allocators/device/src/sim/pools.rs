//! Stream-ordered pools of the simulated device.
//!
//! A pool is a range of addresses that grows by 32 MiB granules as an H200's does: an allocation that does not fit reserves only
//! the missing granules, and a synchronise or a trim releases empty granules while more than the release threshold is reserved.

use super::heap::{Heap, Packing};
use super::timeline::Order;
use super::{PoolMemory, RANGE, SimDriver};
use crate::DriverError;
use crate::{CallKind, DeviceAddr, DriverResult, PoolCounters, PoolDriver, PoolId, PoolSettings, StreamId};
use std::collections::BTreeMap;

const POOL_BASE: u64 = 1 << 43;

#[derive(Debug)]
pub(super) struct Pool {
    pub(super) heap: Heap,
    pub(super) settings: PoolSettings,
    counters: PoolCounters,
}

impl SimDriver {
    fn pool_costs(&self, call: CallKind) -> DriverResult<&PoolMemory> {
        self.profile
            .pool
            .as_ref()
            .ok_or_else(|| DriverError::new(call, DriverError::NOT_SUPPORTED, "the profile has no pools"))
    }

    /// Reads or sets `count` attributes of a pool, at the cost of that many calls.
    fn attributes<T>(&self, pool: PoolId, count: u64, with: impl FnOnce(&mut Pool) -> T) -> DriverResult<T> {
        let costs = self.pool_costs(CallKind::PoolAttribute)?;
        let mut state = self.charge(count * costs.attribute_ns);
        find(&mut state.pools, CallKind::PoolAttribute, pool).map(with)
    }
}

fn find(pools: &mut BTreeMap<u64, Pool>, call: CallKind, pool: PoolId) -> DriverResult<&mut Pool> {
    pools.get_mut(&pool.get()).ok_or_else(|| DriverError::no_such(call, "pool", pool.get()))
}

impl PoolDriver for SimDriver {
    fn pool_create(&self, settings: PoolSettings) -> DriverResult<PoolId> {
        let costs = self.pool_costs(CallKind::PoolCreate)?;
        let mut state = self.charge(costs.create_ns);
        let id = state.next_pool;
        state.next_pool += 1;
        let heap = Heap::new(POOL_BASE + id * RANGE, RANGE, costs.granule_bytes, costs.align_bytes, Packing::Across);
        state.pools.insert(id, Pool { heap, settings, counters: PoolCounters::default() });
        Ok(PoolId::made(id))
    }

    unsafe fn pool_destroy(&self, pool: PoolId) -> DriverResult<()> {
        let mut state = self.lock();
        if !find(&mut state.pools, CallKind::PoolDestroy, pool)?.heap.is_empty() {
            return Err(DriverError::invalid_value(CallKind::PoolDestroy, "blocks of the pool are still allocated"));
        }
        state.pools.remove(&pool.get());
        Ok(())
    }

    fn pool_settings(&self, pool: PoolId) -> DriverResult<PoolSettings> {
        self.attributes(pool, 4, |pool| pool.settings)
    }

    fn pool_counters(&self, pool: PoolId) -> DriverResult<PoolCounters> {
        self.attributes(pool, 4, |pool| PoolCounters { reserved: pool.heap.held_bytes(), ..pool.counters })
    }

    fn pool_reserved_high(&self, pool: PoolId) -> DriverResult<u64> {
        self.attributes(pool, 1, |pool| pool.counters.reserved_high)
    }

    fn pool_reset_peaks(&self, pool: PoolId) -> DriverResult<()> {
        self.attributes(pool, 2, |Pool { heap, counters, .. }| {
            (counters.reserved_high, counters.used_high) = (heap.held_bytes(), counters.used);
        })
    }

    fn pool_trim_to(&self, pool: PoolId, keep_bytes: u64) -> DriverResult<()> {
        let call = CallKind::PoolTrim;
        let costs = self.pool_costs(call)?;
        let state = &mut *self.lock();
        let pool = find(&mut state.pools, call, pool)?;
        pool.heap.settle(|mark| state.time.has_passed(mark));
        let released = pool.heap.release(keep_bytes);
        state.time.spend(costs.attribute_ns + released * costs.release_ns_per_granule);
        Ok(())
    }

    fn mem_alloc_async(&self, pool: PoolId, bytes: u64, stream: StreamId) -> DriverResult<DeviceAddr> {
        let call = CallKind::MemAllocAsync;
        let costs = self.pool_costs(call)?;
        if bytes == 0 {
            return Err(DriverError::invalid_value(call, "zero bytes"));
        }
        let state = &mut *self.lock();
        state.need_stream(call, stream)?;
        let settings = find(&mut state.pools, call, pool)?.settings;
        if state.graphs.is_capturing(stream) {
            return self.alloc_captured(state, costs, bytes, stream);
        }
        let budget = self.free_bytes(state);
        let pool = find(&mut state.pools, call, pool)?;
        let time = &state.time;
        let placed = pool.heap.place(bytes, budget, |freed| {
            let ordered = settings.reuse_follow_event_dependencies && time.is_ordered_after(stream.get(), freed);
            let finished = settings.reuse_allow_opportunistic && time.has_passed(freed);
            match (stream.get() == freed.stream || ordered || finished, settings.reuse_allow_internal_dependencies) {
                (true, _) => Order::Usable,
                (false, true) => Order::AfterWait,
                (false, false) => Order::Unusable,
            }
        });
        state.time.spend(costs.alloc_ns);
        let Some(placed) = placed else { return Err(DriverError::out_of_memory(call)) };
        state.time.spend(placed.new_granules * costs.grow_ns_per_granule);
        if let Some(mark) = placed.wait_for {
            state.time.wait_for_mark(stream.get(), mark);
        }
        let backed = self.back(call, &mut state.host, placed.addr, bytes);
        let addr = backed.inspect_err(|_| _ = pool.heap.free(placed.addr, None))?;
        pool.counters.take(bytes.next_multiple_of(costs.align_bytes), pool.heap.held_bytes());
        Ok(addr)
    }

    unsafe fn mem_free_async(&self, addr: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        let call = CallKind::MemFreeAsync;
        let costs = self.pool_costs(call)?;
        let state = &mut *self.lock();
        state.need_stream(call, stream)?;
        if state.graphs.is_capturing(stream) {
            return self.free_captured(state, costs, addr, stream);
        }
        let mark = state.time.step(stream.get());
        let id = addr.get().checked_sub(POOL_BASE).map(|offset| offset / RANGE);
        let freed = id.and_then(|id| state.pools.get_mut(&id)).and_then(|pool| {
            let len = pool.heap.free(addr.get(), Some(mark))?;
            pool.counters.used -= len;
            Some(())
        });
        if freed.is_none() {
            return Err(DriverError::no_block(call, addr));
        }
        state.time.spend(costs.free_ns);
        state.time.delay_by_free(stream.get(), costs.stream_ns);
        state.host.unback(addr.get());
        Ok(())
    }
}
