//! A simulated GPU.
//!
//! *Memory* is host memory, so that kernels really compute, or none, for replays of recordings that are larger than the machine.
//! *Time* is virtual: a host clock and one clock for each stream. Each call costs the time in the [`Profile`] and blocks as the
//! real call blocks: a free of plain memory waits for the whole device, a pool above its release threshold releases memory at a
//! synchronise, a launch blocks when the queue is full, a graph is one call however many kernels it has. Nothing reads a real
//! clock, so a run repeats exactly.
//!
//! Kernels and copies take effect when they are queued, in the host's order; a correctly synchronised program cannot observe that.

#[cfg_attr(not(target_os = "linux"), path = "sim/no_backing.rs")]
mod backing;
mod graphs;
mod heap;
mod host_memory;
mod host_room;
mod l2;
mod links;
mod pools;
mod profile;
mod timeline;
mod vmm;

pub use host_room::{HostBound, HostRoom};
pub use links::Ranks;
pub use profile::{
    Copies, CostBySize, GraphCosts, KernelCost, LinkCosts, MemoryCost, PlainMemory, PoolMemory, Profile, ProfileError,
    Queues, VirtualMemory,
};

use super::plain_range::PlainRange;
use super::{
    CallKind, DeviceAddr, DeviceDescription, DeviceKind, Driver, DriverResult, EventId, GraphDriver, MemInfo,
    PoolDriver, StreamId, VmmDriver,
};
use crate::Clock;
use crate::DriverError;
use crate::bytes::Bytes;
use crate::graph::NotedCaptures;
use crate::host::{HostCosts, Pinning};
use graphs::{Graphs, Node};
use heap::{Heap, Packing};
use host_memory::{HostMemoryMap, NoRoom};
use l2::L2;
use pools::Pool;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use timeline::{Order, Recorded, Timeline};

/// First address of plain memory; pools and reservations have ranges of their own above it.
const SMALL_BASE: u64 = 1 << 41;
const LARGE_BASE: u64 = 1 << 42;
/// Size of each range.
const RANGE: u64 = 1 << 40;
/// Page-locked host memory is aligned to a host page.
const HOST_ALIGN: usize = 4096;
/// Threads that are taken to touch host memory before it is registered: the fewest of the published times.
pub const SIM_REGISTER_THREADS: u32 = 4;

/// The memory behind the simulated addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimMemory {
    /// Host memory: kernels compute on it.
    Host,
    /// None: only addresses, for replays.
    None,
}

/// The simulated GPU. See the [module](self) for what it simulates.
#[derive(Debug)]
pub struct SimDriver {
    profile: Profile,
    memory: SimMemory,
    /// What registering host memory costs, which no profile has.
    host_costs: HostCosts,
    state: Arc<Mutex<State>>,
    noted_captures: NotedCaptures,
    /// The other GPUs, once they are known.
    ranks: OnceLock<Arc<dyn Ranks>>,
}

#[derive(Debug)]
struct State {
    time: Timeline,
    /// Plain memory smaller than a page, packed into pages.
    small: Heap,
    /// Plain memory in pages of its own.
    large: PlainRange,
    pools: BTreeMap<u64, Pool>,
    next_pool: u64,
    events: BTreeMap<u64, Option<Recorded>>,
    next_event: u64,
    host: HostMemoryMap,
    /// Bytes of registered host memory by its address.
    registered: BTreeMap<usize, usize>,
    vmm: vmm::Space,
    graphs: Graphs,
    /// Absent where the profile has no cache, and where there is no memory.
    l2: Option<L2>,
    /// End of the last collective.
    links_free_ns: u64,
}

/// The virtual host clock.
#[derive(Debug)]
struct VirtualClock(Arc<Mutex<State>>);

impl Clock for VirtualClock {
    fn now_ns(&self) -> u64 {
        lock(&self.0).time.now_ns()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A panic while the lock was held is a bug that has been reported already; the state stays usable.
    state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl State {
    fn held(&self) -> u64 {
        self.small.held_bytes()
            + self.large.held_bytes()
            + self.pools.values().map(|pool| pool.heap.held_bytes()).sum::<u64>()
            + self.vmm.created_bytes()
            + self.graphs.held_bytes()
    }

    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        self.host.translate(addr, bytes).or_else(|| self.vmm.translate(addr, bytes))
    }

    /// Notes the buffers of the last work on a stream.
    fn note_use(&mut self, stream: StreamId, buffers: &[(u64, u64)]) {
        let (now, end) = (self.time.now_ns(), self.time.mark(stream.get()).time_ns);
        self.vmm.note_use(buffers, now, end);
    }

    /// Marks buffers as used in the cache; returns the share of their bytes that was not in it.
    fn access(&mut self, buffers: &[(u64, u64)]) -> f64 {
        self.l2.as_mut().map_or(0.0, |cache| cache.access(buffers))
    }

    /// Frees plain memory; returns its bytes, and whether pages were released to the device.
    fn free_plain(&mut self, addr: u64) -> Option<(u64, bool)> {
        if addr >= LARGE_BASE {
            return Some((self.large.free(addr)?, true));
        }
        let bytes = self.small.free(addr, None)?;
        Some((bytes, self.small.release(0) > 0))
    }

    fn need_stream(&self, call: CallKind, stream: StreamId) -> DriverResult<()> {
        if self.time.has_stream(stream.get()) {
            return Ok(());
        }
        Err(DriverError::no_such(call, "stream", stream.get()))
    }

    fn recorded(&self, call: CallKind, event: EventId) -> DriverResult<Option<&Recorded>> {
        let known = self.events.get(&event.get()).map(Option::as_ref);
        known.ok_or_else(|| DriverError::no_such(call, "event", event.get()))
    }
}

impl SimDriver {
    /// A simulated GPU with the given profile.
    #[must_use]
    pub fn new(profile: Profile, memory: SimMemory) -> Self {
        let page = profile.plain.page_bytes;
        let state = State {
            time: Timeline::new(profile.queues.depth),
            small: Heap::new(SMALL_BASE, RANGE, page, profile.plain.align_bytes, Packing::Within),
            large: PlainRange::new(LARGE_BASE, RANGE, page),
            pools: BTreeMap::new(),
            next_pool: 0,
            events: BTreeMap::new(),
            next_event: 1,
            host: HostMemoryMap::default(),
            registered: BTreeMap::new(),
            vmm: vmm::Space::default(),
            graphs: Graphs::default(),
            l2: profile.l2_bytes.filter(|_| memory == SimMemory::Host).map(L2::new),
            links_free_ns: 0,
        };
        let (state, noted_captures) = (Arc::new(Mutex::new(state)), NotedCaptures::default());
        let host_costs = HostCosts::h100x8();
        Self { profile, memory, host_costs, state, noted_captures, ranks: OnceLock::new() }
    }

    /// A simulated device with at most `bytes` of host memory behind its blocks at a time. Without this the device asks the system
    /// how much is left before it allocates more.
    #[must_use]
    pub fn with_host_limit(self, bytes: u64) -> Self {
        self.lock().host = HostMemoryMap::limited(bytes);
        self
    }

    /// The profile in use.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Locks the state for a call that costs the host `ns`, also when it fails.
    fn charge(&self, ns: u64) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.time.spend(ns);
        state
    }

    /// Queues a kernel of `geometry`, its blocks and the iterations of each, that works on `buffers`, each an address and bytes:
    /// the part of them in the L2 cache decides how long it takes. The caller computes its effect on host memory itself,
    /// immediately; see [`translate`](Self::translate).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for an unknown stream.
    pub fn launch(
        &self,
        stream: StreamId,
        kernel: &str,
        geometry: (u64, u64),
        bytes: u64,
        buffers: &[(u64, u64)],
    ) -> DriverResult<()> {
        let mut state = self.lock();
        state.need_stream(CallKind::KernelLaunch, stream)?;
        state.time.spend(self.profile.queues.launch_ns);
        self.queue(&mut state, stream, Node::kernel(kernel, geometry, bytes, buffers));
        Ok(())
    }

    /// The host works on its own program for the time that the profile has for each driver call ([`Profile::program_ns_per_call`]
    /// and [`Profile::program_ns_per_memory_call`]), here for a call of this kind. The client calls this between its driver calls;
    /// a driver call does not include it, so a measurement of the call returns its own cost.
    pub fn run_program(&self, call: CallKind) {
        let memory = self.profile.program_ns_per_memory_call.filter(|_| call.moves_memory());
        self.lock().time.spend(memory.unwrap_or(self.profile.program_ns_per_call));
    }

    /// The host address of `addr..addr + bytes`; `None` unless all of it is in one live block with host memory. It is valid until
    /// the block is freed.
    #[must_use]
    pub fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        self.lock().translate(addr, bytes)
    }

    /// Device time spent in kernels and copies so far, over all streams, in nanoseconds.
    #[must_use]
    pub fn busy_ns(&self) -> u64 {
        self.lock().time.busy_ns()
    }

    fn need_memory(&self, call: CallKind, state: &State, addr: DeviceAddr, bytes: usize) -> DriverResult<NonNull<u8>> {
        state.translate(addr.get(), bytes as u64).ok_or_else(|| {
            let why = match self.memory {
                SimMemory::Host => "is not inside one live block",
                SimMemory::None => "has no host memory behind it on this device",
            };
            DriverError::new(call, DriverError::ILLEGAL_ADDRESS, format!("{:#x} + {bytes} {why}", addr.get()))
        })
    }

    /// Adds host memory to a new block. After an error the caller undoes the placement.
    fn back(&self, call: CallKind, host: &mut HostMemoryMap, addr: u64, bytes: u64) -> DriverResult<DeviceAddr> {
        if self.memory == SimMemory::Host {
            host.back(addr, bytes).map_err(|error| no_host_memory(call, bytes, error))?;
        }
        Ok(DeviceAddr::handed_out(addr))
    }

    fn free_bytes(&self, state: &State) -> u64 {
        self.profile.total_bytes - self.profile.context_bytes - state.held()
    }

    /// Ends a call that waited: the call itself costs `ns`, and each pool above its threshold releases empty granules.
    fn after_wait(&self, state: &mut State, ns: u64) {
        state.time.spend(ns);
        let Some(costs) = &self.profile.pool else { return };
        let mut released = 0;
        for pool in state.pools.values_mut() {
            pool.heap.settle(|mark| state.time.has_passed(mark));
            released += pool.heap.release(pool.settings.release_threshold);
        }
        state.time.spend(released * costs.release_ns_per_granule);
    }
}

/// The simulated device has room for a block and the simulating machine has not. That is not an out-of-memory of the device, under
/// which allocators would release their caches: the result of a run must not depend on the machine.
fn no_host_memory(call: CallKind, bytes: u64, NoRoom(room): NoRoom) -> DriverError {
    let left = room.map_or_else(|| "it was refused".to_owned(), |room| format!("there are {room}"));
    let context = format!(
        "the simulated GPU needs {} more of this machine's memory, and {left}; use a smaller model or batch, more memory, or a GPU",
        Bytes(bytes)
    );
    DriverError::new(call, DriverError::OPERATING_SYSTEM, context)
}

// SAFETY: host memory comes from the allocator of this process and belongs to its caller, heaps place no two blocks at one address
// (their tests), and handles are looked up.
unsafe impl Driver for SimDriver {
    fn describe(&self) -> DeviceDescription {
        DeviceDescription {
            kind: DeviceKind::Sim,
            name: format!("{} (simulated)", self.profile.name),
            driver_version: None,
            compute_capability: None,
            total_bytes: self.profile.total_bytes,
            virtual_time: true,
            pools: self.pools().is_some(),
            vmm: self.vmm().is_some(),
        }
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(VirtualClock(Arc::clone(&self.state)))
    }

    fn blocked_ns(&self) -> Option<u64> {
        Some(self.lock().time.blocked_ns())
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        let state = self.charge(self.profile.queues.mem_get_info_ns);
        Ok(MemInfo { free: self.free_bytes(&state), total: self.profile.total_bytes })
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        let call = CallKind::MemAlloc;
        if bytes == 0 {
            return Err(DriverError::invalid_value(call, "zero bytes"));
        }
        let mut state = self.lock();
        let budget = self.free_bytes(&state);
        let costs = &self.profile.plain;
        let placed = if bytes < costs.page_bytes {
            let placed = state.small.place(bytes, budget, |_| Order::Usable);
            placed.map(|placed| (placed.addr, placed.new_granules > 0))
        } else {
            state.large.place(bytes, budget).map(|addr| (addr, true))
        };
        let Some((addr, takes_pages)) = placed else {
            state.time.spend(costs.alloc_in_page_ns);
            return Err(DriverError::out_of_memory(call));
        };
        state.time.spend(if takes_pages { costs.alloc_ns.at(bytes) } else { costs.alloc_in_page_ns });
        self.back(call, &mut state.host, addr, bytes).inspect_err(|_| _ = state.free_plain(addr))
    }

    unsafe fn mem_free(&self, addr: DeviceAddr) -> DriverResult<()> {
        let mut state = self.lock();
        let costs = &self.profile.plain;
        let Some((bytes, pages_went)) = state.free_plain(addr.get()) else {
            return Err(DriverError::no_block(CallKind::MemFree, addr));
        };
        if costs.free_drains_device {
            state.time.synchronize_device();
        }
        state.time.spend(if pages_went { costs.free_ns.at(bytes) } else { costs.free_in_page_ns });
        state.host.unback(addr.get());
        Ok(())
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        let mut state = self.charge(self.profile.queues.stream_create_ns);
        Ok(StreamId::made(state.time.create_stream()))
    }

    unsafe fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        let mut state = self.lock();
        state.refuse_capturing(CallKind::StreamDestroy, stream)?;
        state.time.destroy_stream(stream.get());
        Ok(())
    }

    unsafe fn stream_adopt(&self, handle: u64) -> DriverResult<StreamId> {
        // As on a GPU, both numbers stand for the legacy default stream.
        let handle = if handle == 1 { 0 } else { handle };
        self.lock().time.adopt_stream(handle);
        Ok(StreamId::made(handle))
    }

    fn stream_forget(&self, stream: StreamId) -> DriverResult<()> {
        let mut state = self.lock();
        state.need_stream(CallKind::StreamDestroy, stream)?;
        state.refuse_capturing(CallKind::StreamDestroy, stream)?;
        state.time.destroy_stream(stream.get());
        Ok(())
    }

    fn note_capture(&self, open: bool) {
        self.noted_captures.note(open);
    }

    fn is_capture_noted(&self) -> bool {
        self.noted_captures.any()
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        let mut state = self.lock();
        state.refuse_capturing(CallKind::StreamSynchronize, stream)?;
        state.time.synchronize_stream(stream.get());
        self.after_wait(&mut state, self.profile.queues.stream_synchronize_ns);
        Ok(())
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        let mut state = self.lock();
        state.need_stream(CallKind::StreamWaitEvent, stream)?;
        let recorded = state.recorded(CallKind::StreamWaitEvent, event)?.cloned();
        state.time.spend(self.profile.queues.event_wait_ns);
        if state.wait_captured(stream, event, recorded.is_some())? {
            return Ok(());
        }
        // Waiting for an event that was never recorded is a no-op, as in CUDA.
        if let Some(recorded) = recorded {
            state.time.wait_for(stream.get(), &recorded);
        }
        Ok(())
    }

    fn stream_is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        let state = self.lock();
        state.need_stream(CallKind::StreamIsCapturing, stream)?;
        Ok(state.graphs.is_capturing(stream))
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        let mut state = self.lock();
        state.refuse_any_capture(CallKind::DeviceSynchronize)?;
        state.time.synchronize_device();
        self.after_wait(&mut state, self.profile.queues.device_synchronize_ns);
        Ok(())
    }

    fn event_create(&self, _timing: bool) -> DriverResult<EventId> {
        let mut state = self.charge(self.profile.queues.event_create_ns);
        let id = state.next_event;
        state.next_event += 1;
        state.events.insert(id, None);
        Ok(EventId::made(id))
    }

    unsafe fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        let mut state = self.lock();
        state.recorded(CallKind::EventDestroy, event)?;
        state.time.spend(self.profile.queues.event_destroy_ns);
        state.graphs.forget_event(event);
        state.events.remove(&event.get());
        Ok(())
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let mut state = self.lock();
        state.need_stream(CallKind::EventRecord, stream)?;
        state.recorded(CallKind::EventRecord, event)?;
        state.time.spend(self.profile.queues.event_record_ns);
        if state.record_captured(event, stream) {
            return Ok(());
        }
        let recorded = state.time.record(stream.get());
        state.events.insert(event.get(), Some(recorded));
        Ok(())
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let mut state = self.lock();
        state.refuse_captured_event(CallKind::EventQuery, event)?;
        let completed =
            state.recorded(CallKind::EventQuery, event)?.is_none_or(|recorded| state.time.has_passed(recorded.mark));
        state.time.spend(self.profile.queues.event_query_ns);
        Ok(completed)
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        let mut state = self.lock();
        state.refuse_captured_event(CallKind::EventSynchronize, event)?;
        if let Some(mark) = state.recorded(CallKind::EventSynchronize, event)?.map(|recorded| recorded.mark) {
            state.time.synchronize_mark(mark);
        }
        self.after_wait(&mut state, self.profile.queues.stream_synchronize_ns);
        Ok(())
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> DriverResult<u64> {
        let mut state = self.lock();
        let call = CallKind::EventElapsed;
        state.refuse_captured_event(call, start)?;
        state.refuse_captured_event(call, end)?;
        let time = |event| -> DriverResult<u64> {
            let recorded = state.recorded(call, event)?.map(|recorded| recorded.mark.time_ns);
            recorded.ok_or_else(|| DriverError::new(call, DriverError::INVALID_HANDLE, "the event was never recorded"))
        };
        Ok(time(end)?.saturating_sub(time(start)?))
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        let layout = host_layout(bytes)?;
        let mut state = self.charge(self.profile.copies.host_alloc_ns.at(bytes as u64));
        let refused = |error| no_host_memory(CallKind::HostAlloc, bytes as u64, error);
        state.host.ask(bytes as u64).map_err(refused)?;
        // SAFETY: `host_layout` refuses a size of zero.
        NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| {
            state.host.give(bytes as u64);
            refused(NoRoom(None))
        })
    }

    unsafe fn host_free(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        let layout = host_layout(bytes)?;
        let mut state = self.charge(self.profile.copies.host_free_ns.at(bytes as u64));
        state.host.give(bytes as u64);
        // SAFETY: the caller promises that `ptr` came from `host_alloc` with this size.
        unsafe { dealloc(ptr.as_ptr(), layout) };
        Ok(())
    }

    /// Costs what touching the memory by [`SIM_REGISTER_THREADS`] threads and registering it was measured to take.
    unsafe fn host_register(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        let call = CallKind::HostRegister;
        let end = ptr.as_ptr().addr().checked_add(bytes).filter(|_| bytes > 0);
        let end = end.ok_or_else(|| DriverError::invalid_value(call, format!("{bytes} bytes")))?;
        let cost = self.host_costs.pin_ns(bytes as u64, Pinning::Register { threads: SIM_REGISTER_THREADS });
        let mut state = self.charge(cost.unwrap_or(0));
        if state.registered.range(..end).next_back().is_some_and(|(start, bytes)| start + bytes > ptr.as_ptr().addr()) {
            let context = format!("a part of {} at {ptr:p}", Bytes(bytes as u64));
            return Err(DriverError::new(call, DriverError::HOST_MEMORY_ALREADY_REGISTERED, context));
        }
        state.registered.insert(ptr.as_ptr().addr(), bytes);
        Ok(())
    }

    /// Costs what freeing page-locked memory of this size does.
    unsafe fn host_unregister(&self, ptr: NonNull<u8>) -> DriverResult<()> {
        let mut state = self.lock();
        let bytes = state.registered.remove(&ptr.as_ptr().addr()).ok_or_else(|| {
            let context = format!("no registered memory begins at {ptr:p}");
            DriverError::new(CallKind::HostUnregister, DriverError::HOST_MEMORY_NOT_REGISTERED, context)
        })?;
        state.time.spend(self.profile.copies.host_free_ns.at(bytes as u64));
        Ok(())
    }

    unsafe fn copy_to_device(&self, dst: DeviceAddr, src: &[u8], stream: StreamId) -> DriverResult<()> {
        let mut state = self.lock();
        state.refuse_capturing(CallKind::CopyToDevice, stream)?;
        let target = self.need_memory(CallKind::CopyToDevice, &state, dst, src.len())?;
        // SAFETY: `target` is valid for `src.len()` bytes and host memory of ours, so it does not overlap `src`.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), target.as_ptr(), src.len()) };
        state.time.spend(self.profile.copies.pageable_to_device_ns.at(src.len() as u64));
        self.queue(&mut state, stream, Node::copy(dst.get(), src.len() as u64));
        Ok(())
    }

    unsafe fn copy_to_device_async(
        &self,
        dst: DeviceAddr,
        src: NonNull<u8>,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()> {
        let mut state = self.lock();
        state.need_stream(CallKind::CopyToDevice, stream)?;
        let target = self.need_memory(CallKind::CopyToDevice, &state, dst, bytes)?;
        if !state.graphs.is_capturing(stream) {
            // SAFETY: `target` is valid for `bytes`; the caller promises the same of `src`; the two are different
            // allocations.
            unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), target.as_ptr(), bytes) };
        }
        state.time.spend(self.profile.copies.pinned_to_device_ns);
        self.queue(&mut state, stream, Node::copy(dst.get(), bytes as u64));
        Ok(())
    }

    unsafe fn copy_to_host(&self, dst: &mut [u8], src: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        let mut state = self.lock();
        state.refuse_capturing(CallKind::CopyToHost, stream)?;
        let source = self.need_memory(CallKind::CopyToHost, &state, src, dst.len())?;
        // SAFETY: `source` is valid for `dst.len()` bytes and `dst` is an exclusive slice elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), dst.as_mut_ptr(), dst.len()) };
        state.time.synchronize_stream(stream.get());
        self.after_wait(&mut state, self.profile.copies.to_host_ns.at(dst.len() as u64));
        Ok(())
    }

    /// Takes as long as a copy to the device: the link is as fast in both directions.
    unsafe fn copy_to_host_async(
        &self,
        dst: NonNull<u8>,
        src: DeviceAddr,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()> {
        let mut state = self.lock();
        // A launch of a graph computes nothing here, so the copy would never be made.
        state.refuse_capturing(CallKind::CopyToHost, stream)?;
        let source = self.need_memory(CallKind::CopyToHost, &state, src, bytes)?;
        // SAFETY: `source` is valid for `bytes`; the caller promises the same of `dst`; the two are different allocations.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), dst.as_ptr(), bytes) };
        state.time.spend(self.profile.copies.pinned_to_device_ns);
        self.queue(&mut state, stream, Node::copy(src.get(), bytes as u64));
        Ok(())
    }

    unsafe fn fill_bytes(&self, dst: DeviceAddr, value: u8, bytes: u64, stream: StreamId) -> DriverResult<()> {
        let mut state = self.lock();
        state.need_stream(CallKind::Memset, stream)?;
        if self.memory == SimMemory::Host && !state.graphs.is_capturing(stream) {
            let len = usize::try_from(bytes).map_err(|_| DriverError::out_of_memory(CallKind::Memset))?;
            let target = self.need_memory(CallKind::Memset, &state, dst, len)?;
            // SAFETY: `target` is valid for `len` bytes.
            unsafe { target.as_ptr().write_bytes(value, len) };
        }
        state.time.spend(self.profile.copies.memset_ns);
        self.queue(&mut state, stream, Node::kernel("memset", (1, 1), bytes, &[(dst.get(), bytes)]));
        Ok(())
    }

    fn pools(&self) -> Option<&dyn PoolDriver> {
        self.profile.pool.is_some().then_some(self as _)
    }

    fn vmm(&self) -> Option<&dyn VmmDriver> {
        let possible = self.memory == SimMemory::None || vmm::CAN_BACK;
        (self.profile.vmm.is_some() && possible).then_some(self as _)
    }

    fn graphs(&self) -> Option<&dyn GraphDriver> {
        Some(self)
    }
}

fn host_layout(bytes: usize) -> DriverResult<Layout> {
    let layout = Layout::from_size_align(bytes, HOST_ALIGN).ok().filter(|layout| layout.size() > 0);
    layout.ok_or_else(|| DriverError::invalid_value(CallKind::HostAlloc, format!("{bytes} bytes")))
}
