//! What the simulated GPU does in each call of a driver: its effect on memory, and the time that it costs or waits.

use super::graphs::Node;
use super::host_memory::NoRoom;
use super::timeline::Order;
use super::{SIM_REGISTER_THREADS, SimDriver, SimMemory, VirtualClock, no_host_memory, vmm};
use crate::bytes::Bytes;
use crate::host::Pinning;
use crate::{
    CallKind, Clock, DeviceAddr, DeviceDescription, DeviceKind, Driver, DriverError, DriverResult, EventId,
    GraphDriver, MemInfo, PoolDriver, StreamId, VmmDriver,
};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

/// Page-locked host memory is aligned to a host page.
const HOST_ALIGN: usize = 4096;

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
