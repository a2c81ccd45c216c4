//! Stream-ordered pools on CUDA.
//!
//! Each pool is made here and is our own: the device's default pool belongs to the whole process, and a threshold set
//! on it would show in everybody's measurements.

use super::{CudaDriver, address, check, check_for, size};
use crate::bytes::Bytes;
use crate::{CallKind, DeviceAddr, DriverResult, PoolCounters, PoolDriver, PoolId, PoolSettings, StreamId};
use cudarc::driver::sys::{
    self, CUmemAllocationHandleType, CUmemAllocationType, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
};
use std::ffi::c_int;
use std::ptr;

use CUmemPool_attribute::{
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as RESERVED,
    CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as RESERVED_HIGH,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES as REUSE_INTERNAL,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC as REUSE_OPPORTUNISTIC,
    CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES as REUSE_EVENTS, CU_MEMPOOL_ATTR_USED_MEM_CURRENT as USED,
    CU_MEMPOOL_ATTR_USED_MEM_HIGH as USED_HIGH,
};

impl CudaDriver {
    /// CUDA's handle of a live pool of this driver.
    fn pool(&self, call: CallKind, pool: PoolId) -> DriverResult<CUmemoryPool> {
        // CAST: a handle is kept as its value.
        self.live.pools.get(call, pool.get()).map(|raw| raw as CUmemoryPool)
    }
}

/// Sets an attribute of 64 bits: the release threshold, or a peak.
fn set_wide(pool: CUmemoryPool, attribute: CUmemPool_attribute, mut value: u64) -> DriverResult<()> {
    // SAFETY: `pool` is live (callers), and the pointer is to a live u64, the type that the driver's reference gives
    // for the attributes that callers pass here.
    let result = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast()) };
    check(CallKind::PoolAttribute, result)
}

/// Sets a switch: one of the three reuse policies.
fn set_switch(pool: CUmemoryPool, attribute: CUmemPool_attribute, on: bool) -> DriverResult<()> {
    let mut value = c_int::from(on);
    // SAFETY: `pool` is live (callers), and the pointer is to a live int, the type that the driver's reference gives
    // for the attributes that callers pass here.
    let result = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast()) };
    check(CallKind::PoolAttribute, result)
}

/// Reads an attribute of 64 bits: the release threshold or a counter.
fn wide(pool: CUmemoryPool, attribute: CUmemPool_attribute) -> DriverResult<u64> {
    let mut value = 0u64;
    // SAFETY: `pool` is live (callers), and the pointer is to a live u64, the type that the driver's reference gives
    // for the attributes that callers pass here.
    let result = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) };
    check(CallKind::PoolAttribute, result)?;
    Ok(value)
}

/// Reads a switch: one of the three reuse policies.
fn switch(pool: CUmemoryPool, attribute: CUmemPool_attribute) -> DriverResult<bool> {
    let mut value: c_int = 0;
    // SAFETY: `pool` is live (callers), and the pointer is to a live int, the type that the driver's reference gives
    // for the attributes that callers pass here.
    let result = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) };
    check(CallKind::PoolAttribute, result)?;
    Ok(value != 0)
}

fn apply(pool: CUmemoryPool, settings: PoolSettings) -> DriverResult<()> {
    set_wide(pool, RELEASE_THRESHOLD, settings.release_threshold)?;
    set_switch(pool, REUSE_EVENTS, settings.reuse_follow_event_dependencies)?;
    set_switch(pool, REUSE_OPPORTUNISTIC, settings.reuse_allow_opportunistic)?;
    set_switch(pool, REUSE_INTERNAL, settings.reuse_allow_internal_dependencies)
}

impl PoolDriver for CudaDriver {
    fn pool_create(&self, settings: PoolSettings) -> DriverResult<PoolId> {
        self.bind(CallKind::PoolCreate)?;
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            // No handle type: the pool is not shared with other processes.
            handleTypes: CUmemAllocationHandleType(0),
            location: self.location(),
            win32SecurityAttributes: ptr::null_mut(),
            // As large as the device allows.
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool: CUmemoryPool = ptr::null_mut();
        // SAFETY: both pointers are to live values of the types that the call reads and writes; what is reserved is
        // zero.
        let result = unsafe { sys::cuMemPoolCreate(&raw mut pool, &raw const properties) };
        check(CallKind::PoolCreate, result)?;
        if let Err(error) = apply(pool, settings) {
            // SAFETY: the pool was made above, nothing was allocated from it and no other code has its handle.
            // Its result does not matter: the error that is returned says what went wrong first.
            unsafe { sys::cuMemPoolDestroy(pool) };
            return Err(error);
        }
        // CAST: a handle is kept as its value.
        Ok(PoolId::made(self.live.pools.insert(pool as u64)))
    }

    unsafe fn pool_destroy(&self, pool: PoolId) -> DriverResult<()> {
        self.bind(CallKind::PoolDestroy)?;
        self.live.pools.remove(CallKind::PoolDestroy, pool.get(), |raw| {
            // SAFETY: a live pool of this driver; the caller promises that it is empty and not used afterwards.
            let result = unsafe { sys::cuMemPoolDestroy(raw as CUmemoryPool) };
            check(CallKind::PoolDestroy, result)
        })
    }

    fn pool_settings(&self, pool: PoolId) -> DriverResult<PoolSettings> {
        self.bind(CallKind::PoolAttribute)?;
        let pool = self.pool(CallKind::PoolAttribute, pool)?;
        Ok(PoolSettings {
            release_threshold: wide(pool, RELEASE_THRESHOLD)?,
            reuse_follow_event_dependencies: switch(pool, REUSE_EVENTS)?,
            reuse_allow_opportunistic: switch(pool, REUSE_OPPORTUNISTIC)?,
            reuse_allow_internal_dependencies: switch(pool, REUSE_INTERNAL)?,
        })
    }

    fn pool_counters(&self, pool: PoolId) -> DriverResult<PoolCounters> {
        self.bind(CallKind::PoolAttribute)?;
        let pool = self.pool(CallKind::PoolAttribute, pool)?;
        Ok(PoolCounters {
            reserved: wide(pool, RESERVED)?,
            reserved_high: wide(pool, RESERVED_HIGH)?,
            used: wide(pool, USED)?,
            used_high: wide(pool, USED_HIGH)?,
        })
    }

    fn pool_reserved_high(&self, pool: PoolId) -> DriverResult<u64> {
        self.bind(CallKind::PoolAttribute)?;
        let pool = self.pool(CallKind::PoolAttribute, pool)?;
        wide(pool, RESERVED_HIGH)
    }

    fn pool_reset_peaks(&self, pool: PoolId) -> DriverResult<()> {
        self.bind(CallKind::PoolAttribute)?;
        let pool = self.pool(CallKind::PoolAttribute, pool)?;
        // Zero is the one value that the driver takes for them; they then start from the current ones.
        [RESERVED_HIGH, USED_HIGH].into_iter().try_for_each(|peak| set_wide(pool, peak, 0))
    }

    fn pool_trim_to(&self, pool: PoolId, keep_bytes: u64) -> DriverResult<()> {
        self.bind(CallKind::PoolTrim)?;
        let pool = self.pool(CallKind::PoolTrim, pool)?;
        // SAFETY: the pool is live (ids come from `pool_create`); trimming touches only memory that is not allocated.
        let result = unsafe { sys::cuMemPoolTrimTo(pool, size(keep_bytes)) };
        check(CallKind::PoolTrim, result)
    }

    fn mem_alloc_async(&self, pool: PoolId, bytes: u64, stream: StreamId) -> DriverResult<DeviceAddr> {
        self.bind(CallKind::MemAllocAsync)?;
        let stream = self.stream(CallKind::MemAllocAsync, stream)?;
        let pool = self.pool(CallKind::MemAllocAsync, pool)?;
        let mut addr = 0;
        // SAFETY: pool and stream are live (ids come from `pool_create` and `stream_create`) and the pointer is to a
        // live address of the type that the call writes.
        let result = unsafe { sys::cuMemAllocFromPoolAsync(&raw mut addr, size(bytes), pool, stream) };
        check_for(CallKind::MemAllocAsync, result, || Bytes(bytes).to_string())?;
        address(CallKind::MemAllocAsync, addr)
    }

    unsafe fn mem_free_async(&self, addr: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        self.bind(CallKind::MemFreeAsync)?;
        let stream = self.stream(CallKind::MemFreeAsync, stream)?;
        // SAFETY: the caller promises an address from `mem_alloc_async` that is freed once, after its last use in
        // stream order.
        let result = unsafe { sys::cuMemFreeAsync(addr.get(), stream) };
        check(CallKind::MemFreeAsync, result)
    }
}
