//! Stream-ordered pools on CUDA.
//!
//! Each pool is created here and is our own: the device's default pool belongs to the whole process, and a threshold set on it
//! would change the measurements of all other code in it.

use super::{CudaDriver, size};
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

    /// Reads an attribute: a `u64` for the threshold and the counters, a `c_int` for the reuse policies.
    fn read<T: Default>(&self, pool: CUmemoryPool, attribute: CUmemPool_attribute) -> DriverResult<T> {
        let mut value = T::default();
        // SAFETY: `pool` is live (callers), and the pointer is to a live value of the type that the driver's reference
        // gives for the attribute (callers).
        self.call(CallKind::PoolAttribute, || unsafe {
            sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast())
        })?;
        Ok(value)
    }

    /// Sets an attribute, of the types that [`read`](Self::read) names.
    fn write<T>(&self, pool: CUmemoryPool, attribute: CUmemPool_attribute, mut value: T) -> DriverResult<()> {
        // SAFETY: as in `read`.
        self.call(CallKind::PoolAttribute, || unsafe {
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast())
        })
    }

    fn apply(&self, pool: CUmemoryPool, settings: PoolSettings) -> DriverResult<()> {
        self.write(pool, RELEASE_THRESHOLD, settings.release_threshold)?;
        self.write(pool, REUSE_EVENTS, c_int::from(settings.reuse_follow_event_dependencies))?;
        self.write(pool, REUSE_OPPORTUNISTIC, c_int::from(settings.reuse_allow_opportunistic))?;
        self.write(pool, REUSE_INTERNAL, c_int::from(settings.reuse_allow_internal_dependencies))
    }
}

impl PoolDriver for CudaDriver {
    fn pool_create(&self, settings: PoolSettings) -> DriverResult<PoolId> {
        // Without a handle type a pool cannot be shared with other processes.
        let descriptor = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let handles = if self.is_open() && self.info.memory.file_descriptors { descriptor.0 } else { 0 };
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: CUmemAllocationHandleType(handles),
            location: self.location(),
            win32SecurityAttributes: ptr::null_mut(),
            // As large as the device allows.
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool: CUmemoryPool = ptr::null_mut();
        // SAFETY: both pointers are to live values of the types that the call reads and writes; reserved fields are zero.
        self.call(CallKind::PoolCreate, || unsafe { sys::cuMemPoolCreate(&raw mut pool, &raw const properties) })?;
        // SAFETY: the pool was made above.
        let opened = self.apply(pool, settings).and_then(|()| unsafe { self.open_pool(pool) });
        if let Err(error) = opened {
            // SAFETY: the pool was made above, nothing was allocated from it and no other code has its handle.
            // Its result is ignored: the returned error is that of the first failure.
            unsafe { sys::cuMemPoolDestroy(pool) };
            return Err(error);
        }
        // CAST: a handle is kept as its value.
        Ok(PoolId::made(self.live.pools.insert(pool as u64)))
    }

    unsafe fn pool_destroy(&self, pool: PoolId) -> DriverResult<()> {
        self.live.pools.remove(CallKind::PoolDestroy, pool.get(), |raw| {
            // SAFETY: a live pool of this driver; the caller promises that it is empty and not used afterwards.
            self.call(CallKind::PoolDestroy, || unsafe { sys::cuMemPoolDestroy(raw as CUmemoryPool) })
        })
    }

    fn pool_settings(&self, pool: PoolId) -> DriverResult<PoolSettings> {
        let pool = self.pool(CallKind::PoolAttribute, pool)?;
        Ok(PoolSettings {
            release_threshold: self.read(pool, RELEASE_THRESHOLD)?,
            reuse_follow_event_dependencies: self.read::<c_int>(pool, REUSE_EVENTS)? != 0,
            reuse_allow_opportunistic: self.read::<c_int>(pool, REUSE_OPPORTUNISTIC)? != 0,
            reuse_allow_internal_dependencies: self.read::<c_int>(pool, REUSE_INTERNAL)? != 0,
        })
    }

    fn pool_counters(&self, pool: PoolId) -> DriverResult<PoolCounters> {
        let pool = self.pool(CallKind::PoolAttribute, pool)?;
        Ok(PoolCounters {
            reserved: self.read(pool, RESERVED)?,
            reserved_high: self.read(pool, RESERVED_HIGH)?,
            used: self.read(pool, USED)?,
            used_high: self.read(pool, USED_HIGH)?,
        })
    }

    fn pool_reserved_high(&self, pool: PoolId) -> DriverResult<u64> {
        self.read(self.pool(CallKind::PoolAttribute, pool)?, RESERVED_HIGH)
    }

    fn pool_reset_peaks(&self, pool: PoolId) -> DriverResult<()> {
        let pool = self.pool(CallKind::PoolAttribute, pool)?;
        // Zero is the only value that the driver takes for them; they then restart from the current ones.
        [RESERVED_HIGH, USED_HIGH].into_iter().try_for_each(|peak| self.write(pool, peak, 0u64))
    }

    fn pool_trim_to(&self, pool: PoolId, keep_bytes: u64) -> DriverResult<()> {
        let pool = self.pool(CallKind::PoolTrim, pool)?;
        // SAFETY: the pool is live (ids come from `pool_create`); trimming releases only memory that is not allocated.
        self.call(CallKind::PoolTrim, || unsafe { sys::cuMemPoolTrimTo(pool, size(keep_bytes)) })
    }

    fn mem_alloc_async(&self, pool: PoolId, bytes: u64, stream: StreamId) -> DriverResult<DeviceAddr> {
        let stream = self.stream(CallKind::MemAllocAsync, stream)?;
        let pool = self.pool(CallKind::MemAllocAsync, pool)?;
        // SAFETY: pool and stream are live (ids come from `pool_create` and `stream_create`) and the pointer is to a
        // live address of the type that the call writes.
        self.placing_call(CallKind::MemAllocAsync, bytes, |addr| unsafe {
            sys::cuMemAllocFromPoolAsync(addr, size(bytes), pool, stream)
        })
    }

    unsafe fn mem_free_async(&self, addr: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        let stream = self.stream(CallKind::MemFreeAsync, stream)?;
        // SAFETY: the caller promises an address from `mem_alloc_async` that is freed once, after its last use in
        // stream order.
        self.call(CallKind::MemFreeAsync, || unsafe { sys::cuMemFreeAsync(addr.get(), stream) })
    }
}
