//! Memory, streams, events and copies on CUDA.

use super::{CudaDriver, check, refusal, size};
use crate::Clock;
use crate::{
    CallKind, DeviceAddr, DeviceDescription, DeviceKind, Driver, DriverResult, EventId, GraphDriver, MemInfo,
    PoolDriver, StreamId, VmmDriver,
};
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags, CUstreamCaptureStatus};
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

// SAFETY: CUDA keeps these promises for live handles, and no others reach it (`handles`).
unsafe impl Driver for CudaDriver {
    fn describe(&self) -> DeviceDescription {
        let (major, minor) = self.info.compute_capability;
        DeviceDescription {
            kind: DeviceKind::Cuda,
            name: self.info.name.clone(),
            driver_version: Some(self.version.to_string()),
            compute_capability: Some(format!("{major}.{minor}")),
            total_bytes: self.info.total_bytes,
            virtual_time: false,
            pools: self.info.pools,
            vmm: self.info.vmm,
        }
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn blocked_ns(&self) -> Option<u64> {
        // CUDA does not report it; the meter estimates it.
        None
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both pointers are to live integers of the type that the call writes.
        self.call(CallKind::MemGetInfo, || unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        // CAST: widening.
        Ok(MemInfo { free: free as u64, total: total as u64 })
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        // SAFETY: the pointer is to a live address of the type that the call writes.
        self.placing_call(CallKind::MemAlloc, bytes, |addr| unsafe { sys::cuMemAlloc_v2(addr, size(bytes)) })
    }

    unsafe fn mem_free(&self, addr: DeviceAddr) -> DriverResult<()> {
        // SAFETY: the caller promises an address from `mem_alloc` that is freed once.
        self.call(CallKind::MemFree, || unsafe { sys::cuMemFree_v2(addr.get()) })
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        let mut stream: CUstream = ptr::null_mut();
        // CAST: the flag's value.
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a live handle of the type that the call writes.
        self.call(CallKind::StreamCreate, || unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        // CAST: a handle is kept as its value.
        Ok(StreamId::made(self.live.streams.insert(stream as u64)))
    }

    unsafe fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        self.live.streams.remove(CallKind::StreamDestroy, stream.get(), |raw| {
            // SAFETY: a live stream of this driver, which the caller promises not to use afterwards; queued work still completes.
            self.call(CallKind::StreamDestroy, || unsafe { sys::cuStreamDestroy_v2(raw as CUstream) })
        })
    }

    unsafe fn stream_adopt(&self, handle: u64) -> DriverResult<StreamId> {
        // `CU_STREAM_LEGACY` is the stream that null stands for.
        let handle = if handle == 1 { 0 } else { handle };
        Ok(StreamId::made(self.live.streams.insert(handle)))
    }

    fn stream_forget(&self, stream: StreamId) -> DriverResult<()> {
        self.live.streams.remove(CallKind::StreamDestroy, stream.get(), |_| Ok(()))
    }

    fn note_capture(&self, open: bool) {
        self.noted_captures.note(open);
    }

    fn is_capture_noted(&self) -> bool {
        self.noted_captures.any()
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        let stream = self.stream(CallKind::StreamSynchronize, stream)?;
        // SAFETY: the stream is live (looked up above).
        self.call(CallKind::StreamSynchronize, || unsafe { sys::cuStreamSynchronize(stream) })
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        let stream = self.stream(CallKind::StreamWaitEvent, stream)?;
        let event = self.event(CallKind::StreamWaitEvent, event)?;
        // SAFETY: stream and event are live (looked up above); 0 is the default flag.
        self.call(CallKind::StreamWaitEvent, || unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
    }

    fn stream_is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        let stream = self.stream(CallKind::StreamIsCapturing, stream)?;
        // Room for the status as a number, so that a value that cudarc's enum does not know does no harm.
        let mut status = 0u32;
        // SAFETY: the stream is live (looked up above), and a u32 has the size and alignment of the
        // status.
        self.call(CallKind::StreamIsCapturing, || unsafe {
            sys::cuStreamIsCapturing(stream, (&raw mut status).cast())
        })?;
        // CAST: the enum's value. An invalidated capture is still one: it has to be ended.
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32)
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        // SAFETY: takes nothing; the context is current.
        self.call(CallKind::DeviceSynchronize, || unsafe { sys::cuCtxSynchronize() })
    }

    fn event_create(&self, timing: bool) -> DriverResult<EventId> {
        let flags = if timing { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let mut event: CUevent = ptr::null_mut();
        // CAST: the flag's value.
        let flags = flags as u32;
        // SAFETY: the pointer is to a live handle of the type that the call writes.
        self.call(CallKind::EventCreate, || unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        // CAST: a handle is kept as its value.
        Ok(EventId::made(self.live.events.insert(event as u64)))
    }

    unsafe fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        self.live.events.remove(CallKind::EventDestroy, event.get(), |raw| {
            // SAFETY: a live event of this driver, which the caller promises not to use afterwards; CUDA keeps it
            // while work waits for it.
            self.call(CallKind::EventDestroy, || unsafe { sys::cuEventDestroy_v2(raw as CUevent) })
        })
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let stream = self.stream(CallKind::EventRecord, stream)?;
        let event = self.event(CallKind::EventRecord, event)?;
        // SAFETY: event and stream are live (looked up above).
        self.call(CallKind::EventRecord, || unsafe { sys::cuEventRecord(event, stream) })
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let event = self.event(CallKind::EventQuery, event)?;
        let _entered = self.enter(CallKind::EventQuery)?;
        // SAFETY: the event is live (looked up above).
        match unsafe { sys::cuEventQuery(event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check(CallKind::EventQuery, result).map(|()| true),
        }
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        let event = self.event(CallKind::EventSynchronize, event)?;
        // SAFETY: the event is live (looked up above).
        self.call(CallKind::EventSynchronize, || unsafe { sys::cuEventSynchronize(event) })
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> DriverResult<u64> {
        let start = self.event(CallKind::EventElapsed, start)?;
        let end = self.event(CallKind::EventElapsed, end)?;
        let mut milliseconds = 0f32;
        // SAFETY: both events are live (looked up above), the pointer is to a live number of the type that the call writes,
        // and the function's type was checked where it was looked up.
        self.call(CallKind::EventElapsed, || unsafe { (self.elapsed)(&raw mut milliseconds, start, end) })?;
        let nanoseconds = (f64::from(milliseconds) * 1e6).round();
        if nanoseconds >= 0.0 {
            // CAST: not negative, and 2^64 ns are centuries.
            Ok(nanoseconds as u64)
        } else {
            let context = format!("the end comes {} ms before the start", -milliseconds);
            Err(refusal(CallKind::EventElapsed, CUresult::CUDA_ERROR_INVALID_VALUE, context))
        }
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        let mut memory: *mut c_void = ptr::null_mut();
        // SAFETY: the pointer is to a live pointer of the type that the call writes. No flags: write-combined memory
        // would be slow to read on the host, and with unified addressing every context may use it anyway.
        self.sized_call(CallKind::HostAlloc, bytes as u64, || unsafe {
            sys::cuMemHostAlloc(&raw mut memory, bytes, 0)
        })?;
        let memory = NonNull::new(memory.cast::<u8>()).ok_or_else(|| {
            refusal(CallKind::HostAlloc, CUresult::CUDA_ERROR_INVALID_VALUE, "the driver returned null".into())
        })?;
        // SAFETY: the driver has just allocated `bytes` bytes here, and no other code knows of them.
        unsafe { memory.write_bytes(0, bytes) };
        Ok(memory)
    }

    unsafe fn host_free(&self, ptr: NonNull<u8>, _bytes: usize) -> DriverResult<()> {
        // SAFETY: the caller promises memory from `host_alloc` that is freed once and that no queued copy uses.
        self.call(CallKind::HostFree, || unsafe { sys::cuMemFreeHost(ptr.as_ptr().cast()) })
    }

    unsafe fn host_register(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        // SAFETY: the caller promises memory of this process that stays allocated until it is unregistered. No flags: with unified
        // addressing the device uses the host's address.
        self.sized_call(CallKind::HostRegister, bytes as u64, || unsafe {
            sys::cuMemHostRegister_v2(ptr.as_ptr().cast(), bytes, 0)
        })
    }

    unsafe fn host_unregister(&self, ptr: NonNull<u8>) -> DriverResult<()> {
        // SAFETY: the caller promises that no queued copy uses the memory; the driver refuses an address that is not registered.
        self.call(CallKind::HostUnregister, || unsafe { sys::cuMemHostUnregister(ptr.as_ptr().cast()) })
    }

    // Pageable memory must be staged before the GPU can fetch it, and the driver stages within the call: when it returns, `src` has
    // been read (PyTorch's non-blocking copies rely on the same). A GPU that walks the host's page tables needs no staging and may
    // read later; NVIDIA's reference says only that the call "might be synchronous". In that case we wait, since our contract lets
    // the caller reuse or free `src` on return.
    // <https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html>
    unsafe fn copy_to_device(&self, dst: DeviceAddr, src: &[u8], stream: StreamId) -> DriverResult<()> {
        // SAFETY: the caller promises the target; the source is a slice, which the driver has read on return where it
        // stages, and which stays borrowed until the wait below has ended where it does not.
        unsafe { self.copy_to_device_async(dst, NonNull::from(src).cast(), src.len(), stream) }?;
        if src.is_empty() || !self.info.host_page_tables {
            return Ok(());
        }
        let stream = self.stream(CallKind::CopyToDevice, stream)?;
        // SAFETY: the stream is live (looked up above).
        self.call(CallKind::CopyToDevice, || unsafe { sys::cuStreamSynchronize(stream) })
    }

    unsafe fn copy_to_device_async(
        &self,
        dst: DeviceAddr,
        src: NonNull<u8>,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        let stream = self.stream(CallKind::CopyToDevice, stream)?;
        // SAFETY: the caller promises that both sides hold `bytes` bytes until the stream has passed this copy.
        self.sized_call(CallKind::CopyToDevice, bytes as u64, || unsafe {
            sys::cuMemcpyHtoDAsync_v2(dst.get(), src.as_ptr().cast(), bytes, stream)
        })
    }

    unsafe fn copy_to_host(&self, dst: &mut [u8], src: DeviceAddr, stream: StreamId) -> DriverResult<()> {
        if dst.is_empty() {
            return Ok(());
        }
        let stream = self.stream(CallKind::CopyToHost, stream)?;
        // SAFETY: the caller promises the source; the target is a slice, and is borrowed until the wait below has
        // ended.
        self.sized_call(CallKind::CopyToHost, dst.len() as u64, || unsafe {
            sys::cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src.get(), dst.len(), stream)
        })?;
        // SAFETY: the stream is live (looked up above).
        self.call(CallKind::CopyToHost, || unsafe { sys::cuStreamSynchronize(stream) })
    }

    unsafe fn copy_to_host_async(
        &self,
        dst: NonNull<u8>,
        src: DeviceAddr,
        bytes: usize,
        stream: StreamId,
    ) -> DriverResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        let stream = self.stream(CallKind::CopyToHost, stream)?;
        // SAFETY: the caller promises that both sides hold `bytes` bytes until the stream has passed this copy.
        self.sized_call(CallKind::CopyToHost, bytes as u64, || unsafe {
            sys::cuMemcpyDtoHAsync_v2(dst.as_ptr().cast(), src.get(), bytes, stream)
        })
    }

    unsafe fn fill_bytes(&self, dst: DeviceAddr, value: u8, bytes: u64, stream: StreamId) -> DriverResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        let stream = self.stream(CallKind::Memset, stream)?;
        // SAFETY: the caller promises that `dst` holds `bytes` bytes until the stream has passed this call.
        self.sized_call(CallKind::Memset, bytes, || unsafe {
            sys::cuMemsetD8Async(dst.get(), value, size(bytes), stream)
        })
    }

    fn pools(&self) -> Option<&dyn PoolDriver> {
        if self.info.pools { Some(self) } else { None }
    }

    fn vmm(&self) -> Option<&dyn VmmDriver> {
        if self.info.vmm { Some(self) } else { None }
    }

    fn graphs(&self) -> Option<&dyn GraphDriver> {
        Some(self)
    }
}
