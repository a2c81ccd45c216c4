//! Pinned memory of the host as a device of the library (`host:cuda`): one GPU's driver pins it, and streams of every GPU may copy
//! from it.
//!
//! An event belongs to the GPU of its stream, so a stream is named by both. A GPU is opened when its first stream is announced; the one
//! that pins is opened with the device.

use crate::device::{Allocators, Device};
use crate::error::{Failure, Outcome, Status};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::{
    CallKind, Clock, DeviceAddr, DeviceDescription, Driver, DriverError, DriverResult, EventId, GraphDriver, MemInfo,
    PoolDriver, StreamId, VmmDriver,
};

/// Times of calls that pin host memory, or release it, in nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    /// Number of calls since the last `vramlab_reset_accumulated`.
    pub count: u64,
    /// Their sum.
    pub total_ns: u64,
    /// The longest since the last `vramlab_reset_peaks`.
    pub max_ns: u64,
    /// The shortest since then; 0 where there was none.
    pub min_ns: u64,
}

impl Durations {
    fn add(&mut self, ns: u64) {
        self.count += 1;
        self.total_ns += ns;
        self.min_ns = if self.max_ns == 0 { ns } else { self.min_ns.min(ns) };
        self.max_ns = self.max_ns.max(ns);
    }
}

/// Calls that pin host memory and release it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// Calls that pin.
    pub alloc: Durations,
    /// Calls that release.
    pub free: Durations,
}

/// A stream of the program, by the GPU's number; the host itself has none.
type Stream = Option<(u32, StreamId)>;

#[derive(Debug, Default)]
struct Streams {
    by_id: FxHashMap<StreamId, Stream>,
    ids: FxHashMap<(u32, StreamId), StreamId>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Host {
    /// `cuda` or `sim`.
    kind: String,
    /// The GPU that pins.
    primary: u32,
    pins: Arc<Device>,
    clock: Arc<dyn Clock>,
    devices: Mutex<BTreeMap<u32, Arc<Device>>>,
    streams: Mutex<Streams>,
    /// Each event, and the GPU's event that it stands for: none before its first record, and for one of the host.
    events: Mutex<FxHashMap<EventId, Option<(u32, EventId)>>>,
    next: AtomicU64,
    captures: AtomicUsize,
    pinning: Mutex<Pinning>,
    /// The allocators over this device.
    allocators: Allocators,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(call: CallKind, what: &str) -> DriverError {
    DriverError::new(call, DriverError::INVALID_HANDLE, format!("no {what} of this host"))
}

fn unsupported(call: CallKind) -> DriverError {
    DriverError::new(call, DriverError::NOT_SUPPORTED, "the host has pinned memory only")
}

impl Host {
    /// The host, whose memory a GPU pins: `cuda`, `cuda:1`, `sim`, `sim:1`.
    pub(crate) fn open(gpu: &str, allocators: Allocators) -> Outcome<Self> {
        let (kind, number) = gpu.split_once(':').unwrap_or((gpu, "0"));
        let primary = number.parse().ok().filter(|_| ["cuda", "sim"].contains(&kind)).ok_or_else(|| {
            let text = "write host:cuda or host:sim, also with the number of a GPU, such as host:cuda:0";
            Failure::new(Status::Unknown, format!("'host:{gpu}' is not a device: {text}"))
        })?;
        let pins = Device::open(&format!("{kind}:{primary}"))?;
        Ok(Self {
            kind: kind.to_owned(),
            primary,
            clock: pins.driver().clock(),
            devices: Mutex::new(BTreeMap::from([(primary, Arc::clone(&pins))])),
            pins,
            streams: Mutex::default(),
            events: Mutex::default(),
            next: AtomicU64::new(1),
            captures: AtomicUsize::new(0),
            pinning: Mutex::default(),
            allocators,
        })
    }

    /// The GPU that pins.
    pub(crate) fn primary(&self) -> u32 {
        self.primary
    }

    /// A GPU, opened if necessary.
    pub(crate) fn gpu(self: &Arc<Self>, number: u32) -> Outcome<Arc<Device>> {
        match lock(&self.devices).entry(number) {
            Entry::Occupied(entry) => Ok(Arc::clone(entry.get())),
            Entry::Vacant(entry) => {
                let device = Device::open(&format!("{}:{number}", self.kind))?;
                for _ in 0..self.captures.load(Acquire) {
                    device.driver().note_capture(true);
                }
                device.add_host(number, Arc::downgrade(self));
                Ok(Arc::clone(entry.insert(device)))
            }
        }
    }

    /// Follows the streams of the GPU that pins.
    pub(crate) fn follow(self: &Arc<Self>) {
        self.pins.add_host(self.primary, Arc::downgrade(self));
    }

    /// The stream of a GPU with this handle.
    pub(crate) fn stream(self: &Arc<Self>, number: u32, handle: u64) -> Outcome<StreamId> {
        let stream = self.gpu(number)?.stream(handle)?;
        Ok(self.intern(number, stream))
    }

    fn intern(&self, number: u32, stream: StreamId) -> StreamId {
        let streams = &mut *lock(&self.streams);
        let id = *streams.ids.entry((number, stream)).or_insert_with(|| self.new_stream());
        streams.by_id.insert(id, Some((number, stream)));
        id
    }

    fn new_id(&self) -> u64 {
        // Relaxed: only uniqueness matters.
        self.next.fetch_add(1, Relaxed)
    }

    fn new_stream(&self) -> StreamId {
        // SAFETY: this driver makes the stream under this value, which it never reuses.
        unsafe { StreamId::from_raw(self.new_id()) }
    }

    /// Lets the allocators forget a stream of a GPU whose work has completed. With `last` this driver forgets it, too.
    pub(crate) fn forget(&self, number: u32, stream: StreamId, last: bool) {
        let id = {
            let streams = &mut *lock(&self.streams);
            let Some(id) = streams.ids.get(&(number, stream)).copied() else { return };
            if last {
                streams.ids.remove(&(number, stream));
                streams.by_id.remove(&id);
            }
            id
        };
        for allocator in lock(&self.allocators).iter().filter_map(std::sync::Weak::upgrade) {
            allocator.forget_stream(id);
        }
    }

    pub(crate) fn pinning(&self) -> Pinning {
        *lock(&self.pinning)
    }

    pub(crate) fn reset_longest(&self) {
        let pinning = &mut *lock(&self.pinning);
        for durations in [&mut pinning.alloc, &mut pinning.free] {
            (durations.max_ns, durations.min_ns) = (0, 0);
        }
    }

    pub(crate) fn reset_sums(&self) {
        let pinning = &mut *lock(&self.pinning);
        for durations in [&mut pinning.alloc, &mut pinning.free] {
            (durations.count, durations.total_ns) = (0, 0);
        }
    }

    fn opened(&self) -> Vec<Arc<Device>> {
        lock(&self.devices).values().cloned().collect()
    }

    fn driver_of(&self, call: CallKind, number: u32) -> DriverResult<Arc<Device>> {
        lock(&self.devices).get(&number).cloned().ok_or_else(|| unknown(call, "GPU"))
    }

    fn find(&self, call: CallKind, stream: StreamId) -> DriverResult<Stream> {
        lock(&self.streams).by_id.get(&stream).copied().ok_or_else(|| unknown(call, "stream"))
    }

    fn event(&self, call: CallKind, event: EventId) -> DriverResult<Option<(u32, EventId)>> {
        lock(&self.events).get(&event).copied().ok_or_else(|| unknown(call, "event"))
    }

    fn pin_driver(&self) -> &dyn Driver {
        self.pins.driver().as_ref()
    }
}

// SAFETY (for every unsafe call below): the contract of each method here is that of the GPU's method of the same name, and handles are
// looked up in tables of those that this driver has made.
//
// SAFETY: memory is that of the GPU that pins; an event is recorded on the GPU of its stream, and is complete when that GPU says so.
unsafe impl Driver for Host {
    fn describe(&self) -> DeviceDescription {
        self.pin_driver().describe()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock)
    }

    fn blocked_ns(&self) -> Option<u64> {
        self.pin_driver().blocked_ns()
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        self.pin_driver().mem_info()
    }

    fn mem_alloc(&self, _bytes: u64) -> DriverResult<DeviceAddr> {
        Err(unsupported(CallKind::MemAlloc))
    }

    unsafe fn mem_free(&self, _addr: DeviceAddr) -> DriverResult<()> {
        Err(unsupported(CallKind::MemFree))
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        let id = self.new_stream();
        lock(&self.streams).by_id.insert(id, None);
        Ok(id)
    }

    unsafe fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        self.stream_forget(stream)
    }

    unsafe fn stream_adopt(&self, handle: u64) -> DriverResult<StreamId> {
        Ok(self.intern(self.primary, self.pins.stream(handle)?))
    }

    fn stream_forget(&self, stream: StreamId) -> DriverResult<()> {
        let streams = &mut *lock(&self.streams);
        let known = streams.by_id.remove(&stream).ok_or_else(|| unknown(CallKind::StreamDestroy, "stream"))?;
        known.inspect(|of| _ = streams.ids.remove(of));
        Ok(())
    }

    fn note_capture(&self, open: bool) {
        // The lock keeps a GPU that is opened meanwhile from missing it.
        let devices = lock(&self.devices);
        if open {
            self.captures.fetch_add(1, AcqRel);
        } else if self.captures.fetch_update(AcqRel, Acquire, |captures| captures.checked_sub(1)).is_err() {
            return;
        }
        devices.values().for_each(|device| device.driver().note_capture(open));
    }

    fn is_capture_noted(&self) -> bool {
        self.captures.load(Acquire) != 0 || self.opened().iter().any(|device| device.driver().is_capture_noted())
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        let call = CallKind::StreamSynchronize;
        match self.find(call, stream)? {
            None => Ok(()),
            Some((number, stream)) => self.driver_of(call, number)?.driver().stream_synchronize(stream),
        }
    }

    fn stream_wait_event(&self, _stream: StreamId, _event: EventId) -> DriverResult<()> {
        Err(unsupported(CallKind::StreamWaitEvent))
    }

    fn stream_is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        let call = CallKind::StreamIsCapturing;
        match self.find(call, stream)? {
            None => Ok(false),
            Some((number, stream)) => self.driver_of(call, number)?.driver().stream_is_capturing(stream),
        }
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        self.opened().iter().try_for_each(|device| device.driver().device_synchronize())
    }

    fn event_create(&self, _timing: bool) -> DriverResult<EventId> {
        // SAFETY: this driver makes the event under this value, which it never reuses.
        let event = unsafe { EventId::from_raw(self.new_id()) };
        lock(&self.events).insert(event, None);
        Ok(event)
    }

    unsafe fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        let call = CallKind::EventDestroy;
        match lock(&self.events).remove(&event).ok_or_else(|| unknown(call, "event"))? {
            None => Ok(()),
            // SAFETY: passed on.
            Some((number, event)) => unsafe { self.driver_of(call, number)?.driver().event_destroy(event) },
        }
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let call = CallKind::EventRecord;
        let before = self.event(call, event)?;
        let now = match (self.find(call, stream)?, before) {
            (None, before) => {
                if let Some((number, of_gpu)) = before {
                    // SAFETY: it is removed from the table below, so nothing names it afterwards.
                    unsafe { self.driver_of(call, number)?.driver().event_destroy(of_gpu) }?;
                }
                None
            }
            (Some((number, stream)), Some((same, of_gpu))) if number == same => {
                return self.driver_of(call, number)?.driver().event_record(of_gpu, stream);
            }
            (Some((number, stream)), before) => {
                let device = self.driver_of(call, number)?;
                let of_gpu = device.driver().event_create(false)?;
                if let Err(error) = device.driver().event_record(of_gpu, stream) {
                    // SAFETY: just made, and nothing has it.
                    let _ = unsafe { device.driver().event_destroy(of_gpu) };
                    return Err(error);
                }
                if let Some((other, of_other)) = before {
                    // SAFETY: it is replaced in the table below, so nothing names it afterwards.
                    let _ = unsafe { self.driver_of(call, other)?.driver().event_destroy(of_other) };
                }
                Some((number, of_gpu))
            }
        };
        lock(&self.events).insert(event, now);
        Ok(())
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let call = CallKind::EventQuery;
        match self.event(call, event)? {
            None => Ok(true),
            Some((number, event)) => self.driver_of(call, number)?.driver().event_query(event),
        }
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        let call = CallKind::EventSynchronize;
        match self.event(call, event)? {
            None => Ok(()),
            Some((number, event)) => self.driver_of(call, number)?.driver().event_synchronize(event),
        }
    }

    fn event_elapsed_ns(&self, _start: EventId, _end: EventId) -> DriverResult<u64> {
        Err(unsupported(CallKind::EventElapsed))
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        let start = self.clock.now_ns();
        let memory = self.pin_driver().host_alloc(bytes)?;
        lock(&self.pinning).alloc.add(self.clock.now_ns().saturating_sub(start));
        Ok(memory)
    }

    unsafe fn host_free(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        let start = self.clock.now_ns();
        // SAFETY: passed on.
        unsafe { self.pin_driver().host_free(ptr, bytes) }?;
        lock(&self.pinning).free.add(self.clock.now_ns().saturating_sub(start));
        Ok(())
    }

    unsafe fn host_register(&self, ptr: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        let start = self.clock.now_ns();
        // SAFETY: passed on.
        unsafe { self.pin_driver().host_register(ptr, bytes) }?;
        lock(&self.pinning).alloc.add(self.clock.now_ns().saturating_sub(start));
        Ok(())
    }

    unsafe fn host_unregister(&self, ptr: NonNull<u8>) -> DriverResult<()> {
        let start = self.clock.now_ns();
        // SAFETY: passed on.
        unsafe { self.pin_driver().host_unregister(ptr) }?;
        lock(&self.pinning).free.add(self.clock.now_ns().saturating_sub(start));
        Ok(())
    }

    unsafe fn copy_to_device(&self, _dst: DeviceAddr, _src: &[u8], _stream: StreamId) -> DriverResult<()> {
        Err(unsupported(CallKind::CopyToDevice))
    }

    unsafe fn copy_to_device_async(
        &self,
        _dst: DeviceAddr,
        _src: NonNull<u8>,
        _bytes: usize,
        _stream: StreamId,
    ) -> DriverResult<()> {
        Err(unsupported(CallKind::CopyToDevice))
    }

    unsafe fn copy_to_host(&self, _dst: &mut [u8], _src: DeviceAddr, _stream: StreamId) -> DriverResult<()> {
        Err(unsupported(CallKind::CopyToHost))
    }

    unsafe fn copy_to_host_async(
        &self,
        _dst: NonNull<u8>,
        _src: DeviceAddr,
        _bytes: usize,
        _stream: StreamId,
    ) -> DriverResult<()> {
        Err(unsupported(CallKind::CopyToHost))
    }

    unsafe fn fill_bytes(&self, _dst: DeviceAddr, _value: u8, _bytes: u64, _stream: StreamId) -> DriverResult<()> {
        Err(unsupported(CallKind::Memset))
    }

    fn pools(&self) -> Option<&dyn PoolDriver> {
        None
    }

    fn vmm(&self) -> Option<&dyn VmmDriver> {
        None
    }

    fn graphs(&self) -> Option<&dyn GraphDriver> {
        None
    }
}
