//! A device whose calls cost nothing: addresses only, for benchmarks of bookkeeping.

mod captures;

use super::plain_range::PlainRange;
use super::{
    CallKind, DeviceAddr, DeviceDescription, DeviceKind, Driver, DriverResult, EventId, GraphDriver, MemInfo,
    MemoryProperties, PhysicalHandle, PoolCounters, PoolDriver, PoolId, PoolSettings, ShareKind, Shareable, StreamId,
    VmmDriver,
};
use crate::DriverError;
use crate::graph::NotedCaptures;
use crate::mappings::Mappings;
use crate::{Clock, MonotonicClock};
use captures::Graphs;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};

/// Memory of pools gets addresses upwards from here, plain memory downwards from the other end.
const BASE: u64 = 1 << 41;
const PLAIN_BASE: u64 = 1 << 46;
const PLAIN_END: u64 = 1 << 51;
/// Segments start at multiples of this, as a GPU's do.
const PAGE: u64 = 2 << 20;

/// Allocates addresses up to a budget, those of plain memory in the order of a GPU's driver; work completes when it is queued.
/// There is no memory behind the addresses, so copies are refused.
#[derive(Debug)]
pub struct NullDriver {
    total: u64,
    next_addr: AtomicU64,
    next_handle: AtomicU64,
    used: AtomicU64,
    /// Bytes of each block, and its pool.
    blocks: Mutex<HashMap<u64, (u64, Option<u64>)>>,
    plain: Mutex<PlainRange>,
    pools: Mutex<HashMap<u64, (PoolSettings, PoolCounters)>>,
    graphs: Mutex<Graphs>,
    vmm: Mutex<Mappings<(), ()>>,
    /// Number of capturing streams, so that an allocation knows without a lock when there are none.
    capturing: AtomicUsize,
    noted_captures: NotedCaptures,
    clock: Arc<MonotonicClock>,
}

fn no_memory(call: CallKind) -> DriverError {
    DriverError::new(call, DriverError::NOT_SUPPORTED, "the null device has no memory to copy")
}

impl NullDriver {
    /// A device of `total` bytes.
    #[must_use]
    pub fn new(total: u64) -> Self {
        Self {
            total,
            next_addr: AtomicU64::new(BASE),
            next_handle: AtomicU64::new(1),
            used: AtomicU64::new(0),
            blocks: Mutex::default(),
            plain: Mutex::new(PlainRange::new(PLAIN_BASE, PLAIN_END - PLAIN_BASE, PAGE)),
            pools: Mutex::default(),
            graphs: Mutex::default(),
            vmm: Mutex::default(),
            capturing: AtomicUsize::new(0),
            noted_captures: NotedCaptures::default(),
            clock: Arc::new(MonotonicClock::new()),
        }
    }

    fn handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Relaxed)
    }

    /// Takes bytes of the budget.
    fn claim(&self, call: CallKind, bytes: u64) -> DriverResult<()> {
        let fits =
            self.used.fetch_update(Relaxed, Relaxed, |used| used.checked_add(bytes).filter(|sum| *sum <= self.total));
        fits.map(|_| ()).map_err(|_| DriverError::out_of_memory(call))
    }

    fn take(
        &self,
        call: CallKind,
        bytes: u64,
        pool: Option<u64>,
        place: impl FnOnce() -> DriverResult<u64>,
    ) -> DriverResult<DeviceAddr> {
        if bytes == 0 {
            return Err(DriverError::invalid_value(call, "zero bytes"));
        }
        self.claim(call, bytes)?;
        let addr = place()?;
        lock(&self.blocks).insert(addr, (bytes, pool));
        Ok(DeviceAddr::handed_out(addr))
    }

    /// Stream-ordered memory, at new addresses.
    fn take_async(&self, bytes: u64, pool: Option<u64>) -> DriverResult<DeviceAddr> {
        let fresh = || Ok(self.next_addr.fetch_add(bytes.next_multiple_of(PAGE), Relaxed));
        self.take(CallKind::MemAllocAsync, bytes, pool, fresh)
    }

    /// Removes a block; returns its bytes and its pool.
    fn give(&self, call: CallKind, addr: DeviceAddr) -> DriverResult<(u64, Option<u64>)> {
        let block = lock(&self.blocks).remove(&addr.get());
        let (bytes, pool) = block.ok_or_else(|| DriverError::no_block(call, addr))?;
        self.used.fetch_sub(bytes, Relaxed);
        Ok((bytes, pool))
    }

    /// Makes a change that may release memory, which then no longer counts as used.
    fn shrink<T>(&self, with: impl FnOnce(&mut Mappings<(), ()>) -> DriverResult<T>) -> DriverResult<T> {
        let mut vmm = lock(&self.vmm);
        let before = vmm.created_bytes();
        let result = with(&mut vmm);
        self.used.fetch_sub(before - vmm.created_bytes(), Relaxed);
        result
    }

    fn with_pool<T>(
        &self,
        call: CallKind,
        pool: PoolId,
        with: impl FnOnce(&mut (PoolSettings, PoolCounters)) -> T,
    ) -> DriverResult<T> {
        let mut pools = lock(&self.pools);
        let pool_state = pools.get_mut(&pool.get());
        pool_state.map(with).ok_or_else(|| DriverError::no_such(call, "pool", pool.get()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: there is no memory, no two blocks have the same addresses, and handles are numbers.
unsafe impl Driver for NullDriver {
    fn describe(&self) -> DeviceDescription {
        DeviceDescription {
            kind: DeviceKind::Null,
            name: "null".into(),
            driver_version: None,
            compute_capability: None,
            total_bytes: self.total,
            virtual_time: false,
            pools: true,
            vmm: true,
        }
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock) as _
    }

    fn blocked_ns(&self) -> Option<u64> {
        Some(0)
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        Ok(MemInfo { free: self.total - self.used.load(Relaxed), total: self.total })
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        self.take(CallKind::MemAlloc, bytes, None, || {
            lock(&self.plain).place(bytes, u64::MAX).ok_or_else(|| {
                self.used.fetch_sub(bytes, Relaxed);
                DriverError::new(CallKind::MemAlloc, DriverError::OUT_OF_MEMORY, "no addresses")
            })
        })
    }

    unsafe fn mem_free(&self, addr: DeviceAddr) -> DriverResult<()> {
        self.give(CallKind::MemFree, addr)?;
        lock(&self.plain).free(addr.get());
        Ok(())
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        Ok(StreamId::made(self.handle()))
    }

    unsafe fn stream_destroy(&self, _stream: StreamId) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn stream_adopt(&self, handle: u64) -> DriverResult<StreamId> {
        Ok(StreamId::made(handle))
    }

    fn stream_forget(&self, _stream: StreamId) -> DriverResult<()> {
        Ok(())
    }

    fn note_capture(&self, open: bool) {
        self.noted_captures.note(open);
    }

    fn is_capture_noted(&self) -> bool {
        self.noted_captures.any()
    }

    fn stream_synchronize(&self, _stream: StreamId) -> DriverResult<()> {
        Ok(())
    }

    fn stream_wait_event(&self, _stream: StreamId, _event: EventId) -> DriverResult<()> {
        Ok(())
    }

    fn stream_is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        Ok(self.capturing.load(Acquire) != 0 && lock(&self.graphs).is_capturing(stream))
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        Ok(())
    }

    fn event_create(&self, _timing: bool) -> DriverResult<EventId> {
        Ok(EventId::made(self.handle()))
    }

    unsafe fn event_destroy(&self, _event: EventId) -> DriverResult<()> {
        Ok(())
    }

    fn event_record(&self, _event: EventId, _stream: StreamId) -> DriverResult<()> {
        Ok(())
    }

    fn event_query(&self, _event: EventId) -> DriverResult<bool> {
        Ok(true)
    }

    fn event_synchronize(&self, _event: EventId) -> DriverResult<()> {
        Ok(())
    }

    fn event_elapsed_ns(&self, _start: EventId, _end: EventId) -> DriverResult<u64> {
        Ok(0)
    }

    fn host_alloc(&self, _bytes: usize) -> DriverResult<NonNull<u8>> {
        Err(no_memory(CallKind::HostAlloc))
    }

    unsafe fn host_free(&self, _ptr: NonNull<u8>, _bytes: usize) -> DriverResult<()> {
        Err(no_memory(CallKind::HostFree))
    }

    unsafe fn host_register(&self, _ptr: NonNull<u8>, _bytes: usize) -> DriverResult<()> {
        Err(no_memory(CallKind::HostRegister))
    }

    unsafe fn host_unregister(&self, _ptr: NonNull<u8>) -> DriverResult<()> {
        Err(no_memory(CallKind::HostUnregister))
    }

    unsafe fn copy_to_device(&self, _dst: DeviceAddr, _src: &[u8], _stream: StreamId) -> DriverResult<()> {
        Err(no_memory(CallKind::CopyToDevice))
    }

    unsafe fn copy_to_device_async(&self, _: DeviceAddr, _: NonNull<u8>, _: usize, _: StreamId) -> DriverResult<()> {
        Err(no_memory(CallKind::CopyToDevice))
    }

    unsafe fn copy_to_host(&self, _dst: &mut [u8], _src: DeviceAddr, _stream: StreamId) -> DriverResult<()> {
        Err(no_memory(CallKind::CopyToHost))
    }

    unsafe fn copy_to_host_async(&self, _: NonNull<u8>, _: DeviceAddr, _: usize, _: StreamId) -> DriverResult<()> {
        Err(no_memory(CallKind::CopyToHost))
    }

    unsafe fn fill_bytes(&self, _dst: DeviceAddr, _value: u8, _bytes: u64, _stream: StreamId) -> DriverResult<()> {
        Ok(())
    }

    fn pools(&self) -> Option<&dyn PoolDriver> {
        Some(self)
    }

    fn vmm(&self) -> Option<&dyn VmmDriver> {
        Some(self)
    }

    fn graphs(&self) -> Option<&dyn GraphDriver> {
        Some(self)
    }
}

impl PoolDriver for NullDriver {
    fn pool_create(&self, settings: PoolSettings) -> DriverResult<PoolId> {
        let id = self.handle();
        lock(&self.pools).insert(id, (settings, PoolCounters::default()));
        Ok(PoolId::made(id))
    }

    unsafe fn pool_destroy(&self, pool: PoolId) -> DriverResult<()> {
        lock(&self.pools).remove(&pool.get());
        Ok(())
    }

    fn pool_settings(&self, pool: PoolId) -> DriverResult<PoolSettings> {
        self.with_pool(CallKind::PoolAttribute, pool, |(settings, _)| *settings)
    }

    fn pool_counters(&self, pool: PoolId) -> DriverResult<PoolCounters> {
        self.with_pool(CallKind::PoolAttribute, pool, |(_, counters)| *counters)
    }

    fn pool_reserved_high(&self, pool: PoolId) -> DriverResult<u64> {
        self.pool_counters(pool).map(|counters| counters.reserved_high)
    }

    fn pool_reset_peaks(&self, pool: PoolId) -> DriverResult<()> {
        self.with_pool(CallKind::PoolAttribute, pool, |(_, counters)| {
            (counters.reserved_high, counters.used_high) = (counters.reserved, counters.used);
        })
    }

    fn pool_trim_to(&self, _pool: PoolId, _keep_bytes: u64) -> DriverResult<()> {
        Ok(())
    }

    fn mem_alloc_async(&self, pool: PoolId, bytes: u64, stream: StreamId) -> DriverResult<DeviceAddr> {
        if self.capturing.load(Acquire) != 0
            && let Some(captured) = self.alloc_captured(bytes, stream)
        {
            return captured;
        }
        self.with_pool(CallKind::MemAllocAsync, pool, |(_, counters)| {
            let addr = self.take_async(bytes, Some(pool.get()))?;
            // This pool reserves exactly the allocated memory.
            counters.take(bytes, counters.used + bytes);
            Ok(addr)
        })?
    }

    unsafe fn mem_free_async(&self, addr: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        if self.capturing.load(Acquire) != 0
            && let Some(captured) = self.free_captured(addr, stream)
        {
            return captured;
        }
        let (bytes, pool) = self.give(CallKind::MemFreeAsync, addr)?;
        if let Some(id) = pool
            && let Some((_, counters)) = lock(&self.pools).get_mut(&id)
        {
            counters.used -= bytes;
            counters.reserved = counters.used;
        }
        Ok(())
    }
}

fn not_shared(call: CallKind) -> DriverError {
    DriverError::new(call, DriverError::NOT_SUPPORTED, "the null device has no memory to share")
}

fn need_pages(call: CallKind, bytes: u64) -> DriverResult<()> {
    let is_whole = bytes > 0 && bytes.is_multiple_of(PAGE);
    if is_whole { Ok(()) } else { Err(DriverError::invalid_value(call, "ranges and handles are whole pages")) }
}

impl VmmDriver for NullDriver {
    fn granularity(&self) -> DriverResult<u64> {
        Ok(PAGE)
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        need_pages(CallKind::MemAddressReserve, bytes)?;
        lock(&self.vmm).reserve(bytes, ())
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        lock(&self.vmm).free_reservation(addr.get(), bytes)
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        need_pages(CallKind::MemCreate, bytes)?;
        self.claim(CallKind::MemCreate, bytes)?;
        Ok(lock(&self.vmm).create(bytes, ()))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        lock(&self.vmm).map(addr.get(), bytes, handle, |(), _, ()| true)
    }

    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        lock(&self.vmm).set_access(addr.get(), bytes)
    }

    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        self.shrink(|vmm| vmm.unmap(addr.get(), bytes))
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        self.shrink(|vmm| vmm.release(handle)).map(|_| ())
    }

    fn memory_properties(&self) -> MemoryProperties {
        MemoryProperties::NONE
    }

    fn export(&self, _handle: PhysicalHandle, _kind: ShareKind) -> DriverResult<Shareable> {
        Err(not_shared(CallKind::MemExport))
    }

    fn import(&self, _shared: &Shareable) -> DriverResult<PhysicalHandle> {
        Err(not_shared(CallKind::MemImport))
    }
}
