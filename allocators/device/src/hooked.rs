//! The one wrapper for drivers: it forwards every call, and a [`Hook`] runs around each.
//!
//! The meter, fault injection, counting and replay are hooks. None of them forwards a call itself, and the traits of drivers have
//! no methods with a default, so a wrapper cannot forget a method that is added to a trait.

use super::{
    CallKind, CapturedWork, DeviceAddr, DeviceDescription, Driver, DriverResult, EventId, GraphDriver, GraphId,
    MemInfo, MemoryProperties, PhysicalHandle, PoolCounters, PoolDriver, PoolId, PoolSettings, ShareKind, Shareable,
    StreamId, VmmDriver,
};
use crate::Clock;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// The arguments of a call, for hooks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallArguments {
    /// Bytes, for calls that have a size.
    pub bytes: u64,
    /// Address, for calls that take one.
    pub addr: Option<DeviceAddr>,
    /// Event, for calls that take one.
    pub event: Option<EventId>,
    /// Stream, for calls that queue work on one or wait for one.
    pub stream: Option<StreamId>,
}

/// The result of a call, for hooks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallOutcome {
    /// Whether the call succeeded.
    pub ok: bool,
    /// The address that the call returned, if it returns one.
    pub addr: Option<DeviceAddr>,
    /// The result of a query.
    pub answer: Option<bool>,
}

trait CallResult {
    /// The conversion of a successful result for hooks.
    fn outcome(&self) -> CallOutcome {
        CallOutcome { ok: true, ..CallOutcome::default() }
    }
}

impl CallResult for bool {
    fn outcome(&self) -> CallOutcome {
        CallOutcome { ok: true, answer: Some(*self), ..CallOutcome::default() }
    }
}

impl CallResult for DeviceAddr {
    fn outcome(&self) -> CallOutcome {
        CallOutcome { ok: true, addr: Some(*self), ..CallOutcome::default() }
    }
}

macro_rules! only_success { ($($kind:ty),+) => { $(impl CallResult for $kind {})+ }; }
only_success!((), u64, MemInfo, StreamId, EventId, GraphId, PhysicalHandle, PoolId, PoolSettings, PoolCounters);
only_success!(NonNull<u8>, Option<CapturedWork>, Shareable);

/// The code that a wrapper runs around the calls of its driver. [`HookedDriver`] forwards the calls, so a wrapper overrides only
/// the calls that it changes.
///
/// # Safety
/// The resulting driver keeps the contract of [`Driver`], given that the wrapped one does. A wrapper that only overrides
/// [`before`](Self::before) and [`after`](Self::after) always does so. One that returns addresses of its own releases them in
/// [`mem_free`](Self::mem_free) and [`address_free`](Self::address_free), and returns the wrapped driver's address in
/// [`own_addr`](Self::own_addr).
pub unsafe trait Hook: Send + Sync + fmt::Debug {
    /// State of the hook from before a call until after it.
    type Before;

    /// Runs before each call, and may refuse it.
    ///
    /// # Errors
    /// The hook's own refusal: the call is not made, and [`after`](Self::after) does not run.
    fn before(&self, inner: &dyn Driver, kind: CallKind, arguments: CallArguments) -> DriverResult<Self::Before>;

    /// Runs after each call that was made.
    fn after(
        &self,
        _inner: &dyn Driver,
        _kind: CallKind,
        _arguments: CallArguments,
        _before: Self::Before,
        _outcome: CallOutcome,
    ) {
    }

    /// Free and total memory: [`Driver::mem_info`].
    ///
    /// # Errors
    /// Those of the call.
    fn mem_info(&self, inner: &dyn Driver) -> DriverResult<MemInfo> {
        inner.mem_info()
    }

    /// A new segment: [`Driver::mem_alloc`].
    ///
    /// # Errors
    /// Those of the call.
    fn mem_alloc(&self, inner: &dyn Driver, bytes: u64) -> DriverResult<DeviceAddr> {
        inner.mem_alloc(bytes)
    }

    /// Releases a segment: [`Driver::mem_free`].
    ///
    /// # Errors
    /// Those of the call.
    ///
    /// # Safety
    /// `addr` came from [`mem_alloc`](Self::mem_alloc) of this hook and is freed once.
    unsafe fn mem_free(&self, inner: &dyn Driver, addr: DeviceAddr) -> DriverResult<()> {
        // SAFETY: passed on: by default the address is the inner driver's.
        unsafe { inner.mem_free(addr) }
    }

    /// A range of addresses: [`VmmDriver::address_reserve`].
    ///
    /// # Errors
    /// Those of the call.
    fn address_reserve(&self, inner: &dyn VmmDriver, bytes: u64) -> DriverResult<DeviceAddr> {
        inner.address_reserve(bytes)
    }

    /// Releases a range of addresses: [`VmmDriver::address_free`].
    ///
    /// # Errors
    /// Those of the call.
    ///
    /// # Safety
    /// The range came from [`address_reserve`](Self::address_reserve) of this hook, nothing is mapped in it, and it is released
    /// once.
    unsafe fn address_free(&self, inner: &dyn VmmDriver, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        // SAFETY: passed on: by default the address is the inner driver's.
        unsafe { inner.address_free(addr, bytes) }
    }

    /// Whether an event has completed: [`Driver::event_query`].
    ///
    /// # Errors
    /// Those of the call.
    fn event_query(&self, inner: &dyn Driver, event: EventId) -> DriverResult<bool> {
        inner.event_query(event)
    }

    /// The wrapped driver's address for an address inside memory from [`mem_alloc`](Self::mem_alloc) or a range from
    /// [`address_reserve`](Self::address_reserve).
    fn own_addr(&self, addr: DeviceAddr) -> DeviceAddr {
        addr
    }
}

/// A driver whose calls pass through a [`Hook`].
#[derive(Debug)]
pub struct HookedDriver<H> {
    pub(super) inner: Arc<dyn Driver>,
    pub(super) hook: H,
}

const NO_ARGUMENTS: CallArguments = CallArguments { bytes: 0, addr: None, event: None, stream: None };

fn of_bytes(bytes: u64) -> CallArguments {
    CallArguments { bytes, ..NO_ARGUMENTS }
}

fn of_memory(addr: DeviceAddr, bytes: u64) -> CallArguments {
    CallArguments { bytes, addr: Some(addr), ..NO_ARGUMENTS }
}

fn of_event(event: EventId) -> CallArguments {
    CallArguments { event: Some(event), ..NO_ARGUMENTS }
}

impl CallArguments {
    fn on(self, stream: StreamId) -> Self {
        Self { stream: Some(stream), ..self }
    }
}

impl<H: Hook> HookedDriver<H> {
    /// Wraps a driver.
    #[must_use]
    pub fn with_hook(inner: Arc<dyn Driver>, hook: H) -> Self {
        Self { inner, hook }
    }

    /// The hook.
    #[must_use]
    pub fn hook(&self) -> &H {
        &self.hook
    }

    fn call<T: CallResult>(
        &self,
        kind: CallKind,
        arguments: CallArguments,
        call: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        let inner = self.inner.as_ref();
        let before = self.hook.before(inner, kind, arguments)?;
        let result = call();
        let outcome = result.as_ref().map_or(CallOutcome::default(), CallResult::outcome);
        self.hook.after(inner, kind, arguments, before, outcome);
        result
    }

    fn inner_pools(&self) -> &dyn PoolDriver {
        self.inner.pools().expect("pools() should have been asked first")
    }

    fn inner_graphs(&self) -> &dyn GraphDriver {
        self.inner.graphs().expect("graphs() should have been asked first")
    }

    fn inner_vmm(&self) -> &dyn VmmDriver {
        self.inner.vmm().expect("vmm() should have been asked first")
    }
}

// SAFETY (for every unsafe call below): the contract of each method here is that of the inner driver's method of the same name, so
// the caller's promise is passed on; a hook that returns addresses of its own promises their validity.
//
// SAFETY: so the inner driver's promises hold for this one.
unsafe impl<H: Hook> Driver for HookedDriver<H> {
    fn describe(&self) -> DeviceDescription {
        self.inner.describe()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.inner.clock()
    }

    fn blocked_ns(&self) -> Option<u64> {
        self.inner.blocked_ns()
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        self.call(CallKind::MemGetInfo, NO_ARGUMENTS, || self.hook.mem_info(self.inner.as_ref()))
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        self.call(CallKind::MemAlloc, of_bytes(bytes), || self.hook.mem_alloc(self.inner.as_ref(), bytes))
    }

    unsafe fn mem_free(&self, addr: DeviceAddr) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::MemFree, of_memory(addr, 0), || unsafe { self.hook.mem_free(self.inner.as_ref(), addr) })
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        self.call(CallKind::StreamCreate, NO_ARGUMENTS, || self.inner.stream_create())
    }

    unsafe fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::StreamDestroy, NO_ARGUMENTS.on(stream), || unsafe { self.inner.stream_destroy(stream) })
    }

    unsafe fn stream_adopt(&self, handle: u64) -> DriverResult<StreamId> {
        // SAFETY: passed on.
        unsafe { self.inner.stream_adopt(handle) }
    }

    fn stream_forget(&self, stream: StreamId) -> DriverResult<()> {
        self.inner.stream_forget(stream)
    }

    fn note_capture(&self, open: bool) {
        self.inner.note_capture(open);
    }

    fn is_capture_noted(&self) -> bool {
        self.inner.is_capture_noted()
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        self.call(CallKind::StreamSynchronize, NO_ARGUMENTS.on(stream), || self.inner.stream_synchronize(stream))
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.call(CallKind::StreamWaitEvent, of_event(event).on(stream), || self.inner.stream_wait_event(stream, event))
    }

    fn stream_is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        self.call(CallKind::StreamIsCapturing, NO_ARGUMENTS.on(stream), || self.inner.stream_is_capturing(stream))
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        self.call(CallKind::DeviceSynchronize, NO_ARGUMENTS, || self.inner.device_synchronize())
    }

    fn event_create(&self, timing: bool) -> DriverResult<EventId> {
        self.call(CallKind::EventCreate, NO_ARGUMENTS, || self.inner.event_create(timing))
    }

    unsafe fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::EventDestroy, of_event(event), || unsafe { self.inner.event_destroy(event) })
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.call(CallKind::EventRecord, of_event(event).on(stream), || self.inner.event_record(event, stream))
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        self.call(CallKind::EventQuery, of_event(event), || self.hook.event_query(self.inner.as_ref(), event))
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        self.call(CallKind::EventSynchronize, of_event(event), || self.inner.event_synchronize(event))
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> DriverResult<u64> {
        self.call(CallKind::EventElapsed, NO_ARGUMENTS, || self.inner.event_elapsed_ns(start, end))
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        self.call(CallKind::HostAlloc, of_bytes(bytes as u64), || self.inner.host_alloc(bytes))
    }

    unsafe fn host_free(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::HostFree, of_bytes(bytes as u64), || unsafe { self.inner.host_free(ptr, bytes) })
    }

    unsafe fn host_register(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::HostRegister, of_bytes(bytes as u64), || unsafe { self.inner.host_register(ptr, bytes) })
    }

    unsafe fn host_unregister(&self, ptr: NonNull<u8>) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::HostUnregister, NO_ARGUMENTS, || unsafe { self.inner.host_unregister(ptr) })
    }

    unsafe fn copy_to_device(&self, dst: DeviceAddr, src: &[u8], stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::CopyToDevice, of_memory(dst, src.len() as u64).on(stream), || unsafe {
            self.inner.copy_to_device(self.hook.own_addr(dst), src, stream)
        })
    }

    unsafe fn copy_to_device_async(
        &self,
        dst: DeviceAddr,
        src: NonNull<u8>,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::CopyToDevice, of_memory(dst, bytes as u64).on(stream), || unsafe {
            self.inner.copy_to_device_async(self.hook.own_addr(dst), src, bytes, stream)
        })
    }

    unsafe fn copy_to_host(&self, dst: &mut [u8], src: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::CopyToHost, of_memory(src, dst.len() as u64).on(stream), || unsafe {
            self.inner.copy_to_host(dst, self.hook.own_addr(src), stream)
        })
    }

    unsafe fn copy_to_host_async(
        &self,
        dst: NonNull<u8>,
        src: DeviceAddr,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::CopyToHost, of_memory(src, bytes as u64).on(stream), || unsafe {
            self.inner.copy_to_host_async(dst, self.hook.own_addr(src), bytes, stream)
        })
    }

    unsafe fn fill_bytes(&self, dst: DeviceAddr, value: u8, bytes: u64, stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::Memset, of_memory(dst, bytes).on(stream), || unsafe {
            self.inner.fill_bytes(self.hook.own_addr(dst), value, bytes, stream)
        })
    }

    fn pools(&self) -> Option<&dyn PoolDriver> {
        self.inner.pools().map(|_| self as _)
    }

    fn vmm(&self) -> Option<&dyn VmmDriver> {
        self.inner.vmm().map(|_| self as _)
    }

    fn graphs(&self) -> Option<&dyn GraphDriver> {
        self.inner.graphs().map(|_| self as _)
    }
}

impl<H: Hook> GraphDriver for HookedDriver<H> {
    fn capture_begin(&self, stream: StreamId) -> DriverResult<()> {
        self.call(CallKind::CaptureBegin, NO_ARGUMENTS.on(stream), || self.inner_graphs().capture_begin(stream))
    }

    fn capture_end(&self, stream: StreamId) -> DriverResult<GraphId> {
        self.call(CallKind::CaptureEnd, NO_ARGUMENTS.on(stream), || self.inner_graphs().capture_end(stream))
    }

    fn capture_abort(&self, stream: StreamId) -> DriverResult<()> {
        self.call(CallKind::CaptureAbort, NO_ARGUMENTS.on(stream), || self.inner_graphs().capture_abort(stream))
    }

    fn capture_front(&self, stream: StreamId) -> DriverResult<Option<CapturedWork>> {
        self.call(CallKind::StreamIsCapturing, NO_ARGUMENTS.on(stream), || self.inner_graphs().capture_front(stream))
    }

    fn capture_past(&self, stream: StreamId, past: &mut CapturedWork) -> DriverResult<()> {
        self.call(CallKind::StreamIsCapturing, NO_ARGUMENTS.on(stream), || {
            self.inner_graphs().capture_past(stream, past)
        })
    }

    unsafe fn graph_launch(&self, graph: GraphId, stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::GraphLaunch, NO_ARGUMENTS.on(stream), || unsafe {
            self.inner_graphs().graph_launch(graph, stream)
        })
    }

    unsafe fn graph_destroy(&self, graph: GraphId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::GraphDestroy, NO_ARGUMENTS, || unsafe { self.inner_graphs().graph_destroy(graph) })
    }

    fn graph_memory(&self) -> DriverResult<PoolCounters> {
        self.call(CallKind::GraphMemory, NO_ARGUMENTS, || self.inner_graphs().graph_memory())
    }

    fn graph_trim(&self) -> DriverResult<()> {
        self.call(CallKind::GraphTrim, NO_ARGUMENTS, || self.inner_graphs().graph_trim())
    }
}

impl<H: Hook> PoolDriver for HookedDriver<H> {
    fn pool_create(&self, settings: PoolSettings) -> DriverResult<PoolId> {
        self.call(CallKind::PoolCreate, NO_ARGUMENTS, || self.inner_pools().pool_create(settings))
    }

    unsafe fn pool_destroy(&self, pool: PoolId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::PoolDestroy, NO_ARGUMENTS, || unsafe { self.inner_pools().pool_destroy(pool) })
    }

    fn pool_settings(&self, pool: PoolId) -> DriverResult<PoolSettings> {
        self.call(CallKind::PoolAttribute, NO_ARGUMENTS, || self.inner_pools().pool_settings(pool))
    }

    fn pool_counters(&self, pool: PoolId) -> DriverResult<PoolCounters> {
        self.call(CallKind::PoolAttribute, NO_ARGUMENTS, || self.inner_pools().pool_counters(pool))
    }

    fn pool_reserved_high(&self, pool: PoolId) -> DriverResult<u64> {
        self.call(CallKind::PoolAttribute, NO_ARGUMENTS, || self.inner_pools().pool_reserved_high(pool))
    }

    fn pool_reset_peaks(&self, pool: PoolId) -> DriverResult<()> {
        self.call(CallKind::PoolAttribute, NO_ARGUMENTS, || self.inner_pools().pool_reset_peaks(pool))
    }

    fn pool_trim_to(&self, pool: PoolId, keep_bytes: u64) -> DriverResult<()> {
        self.call(CallKind::PoolTrim, NO_ARGUMENTS, || self.inner_pools().pool_trim_to(pool, keep_bytes))
    }

    fn mem_alloc_async(&self, pool: PoolId, bytes: u64, stream: StreamId) -> DriverResult<DeviceAddr> {
        self.call(CallKind::MemAllocAsync, of_bytes(bytes).on(stream), || {
            self.inner_pools().mem_alloc_async(pool, bytes, stream)
        })
    }

    unsafe fn mem_free_async(&self, addr: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::MemFreeAsync, of_memory(addr, 0).on(stream), || unsafe {
            self.inner_pools().mem_free_async(addr, stream)
        })
    }
}

impl<H: Hook> VmmDriver for HookedDriver<H> {
    fn granularity(&self) -> DriverResult<u64> {
        self.call(CallKind::DeviceQuery, NO_ARGUMENTS, || self.inner_vmm().granularity())
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        self.call(CallKind::MemAddressReserve, of_bytes(bytes), || self.hook.address_reserve(self.inner_vmm(), bytes))
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::MemAddressFree, of_memory(addr, bytes), || unsafe {
            self.hook.address_free(self.inner_vmm(), addr, bytes)
        })
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        self.call(CallKind::MemCreate, of_bytes(bytes), || self.inner_vmm().create(bytes))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::MemMap, of_memory(addr, bytes), || unsafe {
            self.inner_vmm().map(self.hook.own_addr(addr), bytes, handle)
        })
    }

    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::MemSetAccess, of_memory(addr, bytes), || unsafe {
            self.inner_vmm().set_access(self.hook.own_addr(addr), bytes)
        })
    }

    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::MemUnmap, of_memory(addr, bytes), || unsafe {
            self.inner_vmm().unmap(self.hook.own_addr(addr), bytes)
        })
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        // SAFETY: passed on.
        self.call(CallKind::MemRelease, NO_ARGUMENTS, || unsafe { self.inner_vmm().release(handle) })
    }

    fn memory_properties(&self) -> MemoryProperties {
        self.inner_vmm().memory_properties()
    }

    fn export(&self, handle: PhysicalHandle, kind: ShareKind) -> DriverResult<Shareable> {
        self.call(CallKind::MemExport, NO_ARGUMENTS, || self.inner_vmm().export(handle, kind))
    }

    fn import(&self, shared: &Shareable) -> DriverResult<PhysicalHandle> {
        self.call(CallKind::MemImport, NO_ARGUMENTS, || self.inner_vmm().import(shared))
    }
}
