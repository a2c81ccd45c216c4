//! The real device: the CUDA driver API, loaded at run time through cudarc's raw bindings.
//!
//! All `unsafe` code for CUDA is in this file and its folder. Three invariants hold throughout, and the `SAFETY` comments refer to
//! them:
//! - **the library is loaded**: a [`CudaDriver`] exists only after [`probe`](CudaDriver::probe)'s checks, and cudarc never unloads
//!   the library;
//! - **the context is current**: each call uses `CudaDriver::call`, or holds the result of `enter`, which makes this device's
//!   primary context current on the calling thread;
//! - **handles are live**: the handle of a [`StreamId`], [`EventId`], [`PoolId`](super::PoolId),
//!   [`PhysicalHandle`](super::PhysicalHandle) or [`GraphId`](super::GraphId) is looked up in a table of the objects that this
//!   driver created and did not destroy, and an id that is not in it is an error. A caller that destroys an object promises that no
//!   other call uses it meanwhile. Handles are stored as numbers, so the driver is `Send` and `Sync` without an `unsafe impl`; the
//!   API itself may be called from any thread.
//!
//! The raw layer is used instead of cudarc's safe one, because that one records events around every argument and decides by itself
//! how memory is freed: both would distort the measurements.
//!
//! <https://docs.nvidia.com/cuda/cuda-driver-api/>

mod driver;
mod graphs;
mod handles;
mod peers;
mod pools;
mod probe;
mod vmm;

pub use probe::{CudaDeviceInfo, CudaUnavailable, CudaVersion};

use super::{CallKind, DeviceAddr, DriverResult, EventId, StreamId};
use crate::DriverError;
use crate::MonotonicClock;
use crate::bytes::Bytes;
use crate::graph::NotedCaptures;
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUevent, CUmemLocation, CUmemLocationType, CUresult, CUstream, CUstreamCaptureMode,
};
use handles::Handles;
use std::cell::Cell;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

thread_local! {
    /// Serial number of the driver whose context is current on this thread; 0 before the first call.
    static BOUND: Cell<u64> = const { Cell::new(0) };
}

/// Serial numbers of drivers. A context's address could be reused after its release, a serial number never is.
static NEXT_SERIAL: AtomicU64 = AtomicU64::new(1);

type ElapsedFn = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;

/// A CUDA GPU, through its primary context.
pub struct CudaDriver {
    serial: u64,
    device: CUdevice,
    /// The primary context's handle.
    context: u64,
    version: CudaVersion,
    info: CudaDeviceInfo,
    elapsed: ElapsedFn,
    clock: Arc<MonotonicClock>,
    live: Handles,
    /// The properties of created memory.
    memory: vmm::Requested,
    /// Other GPUs that may use new memory.
    peers: OnceLock<Vec<CUdevice>>,
    noted_captures: NotedCaptures,
    /// Held while a capture is ended or its graph is read, so that no node is destroyed meanwhile.
    captured: Mutex<()>,
    /// Whether other code of the program chooses each thread's context, so that every call restores it.
    guest: bool,
}

impl CudaDriver {
    /// The GPUs of this machine. Never panics, also where the driver or the library is missing.
    ///
    /// # Errors
    /// [`CudaUnavailable`] with the reason why no GPU can be used; with `Ok` there is at least one.
    pub fn probe() -> Result<Vec<CudaDeviceInfo>, CudaUnavailable> {
        probe::start(CudaVersion::NEEDED)?;
        let count = probe::device_count()?;
        (0..count).map(|ordinal| probe::device(ordinal, count).map(|(_, info)| info)).collect()
    }

    /// Opens a GPU and makes it current on this thread. The first one of a process takes about a second.
    ///
    /// # Errors
    /// [`CudaUnavailable`] with the reason why that GPU cannot be used.
    pub fn new(ordinal: usize) -> Result<Self, CudaUnavailable> {
        Self::open(ordinal, CudaVersion::NEEDED)
    }

    fn open(ordinal: usize, needed: CudaVersion) -> Result<Self, CudaUnavailable> {
        let version = probe::start(needed)?;
        let (device, info) = probe::device(ordinal, probe::device_count()?)?;
        let elapsed = elapsed_function()?;
        let memory = vmm::Requested::new(info.memory);
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: `device` came from cuDeviceGet and the pointer is to a live handle of the type that the call writes.
        // The context that is retained here is released by `Drop`, once.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check(CallKind::DeviceQuery, result)?;
        let driver = Self {
            // Relaxed: only uniqueness matters.
            serial: NEXT_SERIAL.fetch_add(1, Relaxed),
            device,
            // CAST: a handle is kept as its value.
            context: context as u64,
            version,
            info,
            elapsed,
            clock: Arc::new(MonotonicClock::new()),
            live: Handles::new(),
            memory,
            peers: OnceLock::new(),
            noted_captures: NotedCaptures::default(),
            captured: Mutex::new(()),
            guest: false,
        };
        driver.bind_to_thread()?;
        Ok(driver)
    }

    /// Opens a GPU in a program whose other parts use CUDA by themselves and choose the context of each thread: every call checks
    /// which context is current, which takes some nanoseconds, and restores it.
    ///
    /// # Errors
    /// [`CudaUnavailable`] with the reason why that GPU cannot be used.
    pub fn as_guest(ordinal: usize) -> Result<Self, CudaUnavailable> {
        Self::as_guest_since(ordinal, CudaVersion::NEEDED)
    }

    /// As [`as_guest`](Self::as_guest), on a driver of version `oldest` or later. On one before [`CudaVersion::NEEDED`] only memory, streams
    /// and events may be asked for: a call about graphs or captures that libcuda lacks panics.
    ///
    /// # Errors
    /// [`CudaUnavailable`] with the reason why that GPU cannot be used.
    pub fn as_guest_since(ordinal: usize, oldest: CudaVersion) -> Result<Self, CudaUnavailable> {
        probe::start(oldest)?;
        let before = current_context()?;
        let opened = Self::open(ordinal, oldest).map(|mut driver| {
            driver.guest = true;
            driver
        });
        // SAFETY: the context was current on this thread before, so it is live, or null, which makes none current.
        check(CallKind::DeviceQuery, unsafe { sys::cuCtxSetCurrent(before) })?;
        BOUND.set(0);
        opened
    }

    /// The driver's description of this GPU.
    #[must_use]
    pub fn info(&self) -> &CudaDeviceInfo {
        &self.info
    }

    /// The newest CUDA version that the driver supports.
    #[must_use]
    pub fn driver_version(&self) -> CudaVersion {
        self.version
    }

    /// The handle of a stream of this driver, for kernel launches and libraries.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` when this driver has no such stream.
    pub fn raw_stream(&self, stream: StreamId) -> DriverResult<CUstream> {
        self.stream(CallKind::KernelLaunch, stream)
    }

    /// CUDA's handle of a live stream of this driver.
    #[inline]
    fn stream(&self, call: CallKind, stream: StreamId) -> DriverResult<CUstream> {
        // CAST: a handle is kept as its value.
        self.live.streams.get(call, stream.get()).map(|raw| raw as CUstream)
    }

    /// CUDA's handle of a live event of this driver.
    #[inline]
    fn event(&self, call: CallKind, event: EventId) -> DriverResult<CUevent> {
        // CAST: a handle is kept as its value.
        self.live.events.get(call, event.get()).map(|raw| raw as CUevent)
    }

    /// Makes this device's context current on the calling thread. The methods here do so by themselves; call it before CUDA calls
    /// that do not use them, and after another library has made a different context current.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn bind_to_thread(&self) -> DriverResult<()> {
        self.bind_anew(CallKind::DeviceQuery)
    }

    /// Starts collection in an attached profiler; without one nothing happens.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn profiler_start(&self) -> DriverResult<()> {
        // SAFETY: takes nothing; the context is current.
        self.call(CallKind::DeviceQuery, || unsafe { sys::cuProfilerStart() })
    }

    /// Stops collection in an attached profiler; without one nothing happens.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn profiler_stop(&self) -> DriverResult<()> {
        // SAFETY: takes nothing; the context is current.
        self.call(CallKind::DeviceQuery, || unsafe { sys::cuProfilerStop() })
    }

    /// Makes a call of the CUDA API with the context current.
    #[inline]
    fn call(&self, kind: CallKind, call: impl FnOnce() -> CUresult) -> DriverResult<()> {
        let _entered = self.enter(kind)?;
        check(kind, call())
    }

    /// As [`call`](Self::call), for a call whose error contains its size.
    #[inline]
    fn sized_call(&self, kind: CallKind, bytes: u64, call: impl FnOnce() -> CUresult) -> DriverResult<()> {
        let _entered = self.enter(kind)?;
        check_for(kind, call(), || Bytes(bytes).to_string())
    }

    /// Makes the context current unless it is, one comparison on the hot path, and the thread's capture mode relaxed while a
    /// capture of the program's own is open. Returns the state that the end of the call restores.
    #[inline]
    fn enter(&self, call: CallKind) -> DriverResult<Entered> {
        if BOUND.get() != self.serial {
            if self.guest {
                return self.enter_as_guest(call);
            }
            self.bind_anew(call)?;
        }
        self.relax(call, false)
    }

    #[cold]
    fn enter_as_guest(&self, call: CallKind) -> DriverResult<Entered> {
        // CAST: a handle is kept as its value.
        let context = self.context as CUcontext;
        let pops = current_context()? != context;
        if pops {
            // SAFETY: the context was retained by `new` and lives until `Drop`.
            check(call, unsafe { sys::cuCtxPushCurrent_v2(context) })?;
        }
        self.relax(call, pops)
    }

    #[inline]
    fn relax(&self, call: CallKind, pops: bool) -> DriverResult<Entered> {
        let mut entered = Entered { pops, mode: None };
        if self.noted_captures.any() {
            entered.mode = Some(exchange_mode(call, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?);
        }
        Ok(entered)
    }

    #[cold]
    fn bind_anew(&self, call: CallKind) -> DriverResult<()> {
        // SAFETY: the context was retained by `new` and lives until `Drop`.
        let result = unsafe { sys::cuCtxSetCurrent(self.context as CUcontext) };
        check_for(call, result, || format!("making the context of GPU {} current", self.info.ordinal))?;
        BOUND.set(self.serial);
        Ok(())
    }

    /// Makes a call that allocates `bytes` bytes and writes their address.
    #[inline]
    fn placing_call(
        &self,
        kind: CallKind,
        bytes: u64,
        call: impl FnOnce(*mut u64) -> CUresult,
    ) -> DriverResult<DeviceAddr> {
        let mut addr = 0;
        self.sized_call(kind, bytes, || call(&raw mut addr))?;
        let zero = || "the driver returned the address zero".into();
        DeviceAddr::new(addr).ok_or_else(|| refusal(kind, CUresult::CUDA_ERROR_INVALID_VALUE, zero()))
    }

    /// This device as a location of memory.
    fn location(&self) -> CUmemLocation {
        location_of(self.device)
    }
}

/// A device as a location of memory.
fn location_of(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver")
            .field("ordinal", &self.info.ordinal)
            .field("name", &self.info.name)
            .finish_non_exhaustive()
    }
}

/// The state that the end of a call restores on its thread.
#[must_use]
struct Entered {
    /// A context was pushed.
    pops: bool,
    /// The previous capture mode.
    mode: Option<CUstreamCaptureMode>,
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        // Errors of earlier work can surface here; the call itself has returned them or the next one will.
        if let Some(mode) = self.mode {
            let _ = exchange_mode(CallKind::StreamIsCapturing, mode);
        }
        if self.pops {
            let mut popped: CUcontext = ptr::null_mut();
            // SAFETY: the pointer is to a live handle of the type that the call writes; `enter_as_guest` pushed the context
            // on this thread.
            unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}

/// The context that is current on this thread; null if none is.
fn current_context() -> DriverResult<CUcontext> {
    let mut current: CUcontext = ptr::null_mut();
    // SAFETY: the pointer is to a live handle of the type that the call writes.
    check(CallKind::DeviceQuery, unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
    Ok(current)
}

/// Sets the capture mode of this thread; returns the previous one.
fn exchange_mode(call: CallKind, mode: CUstreamCaptureMode) -> DriverResult<CUstreamCaptureMode> {
    let mut mode = mode;
    // SAFETY: the pointer is to a live mode, which the call reads and writes with one of those that this thread had set.
    check(call, unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) })?;
    Ok(mode)
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        // The result is ignored: either the context was destroyed already, which is fine, or an earlier error has broken it, and
        // that one was returned by its call.
        // SAFETY: `new` retained the context once and this releases it once; no call to this driver can follow. The library stays
        // loaded to the end of the process, and during that it returns CUDA_ERROR_DEINITIALIZED.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// `cuEventElapsedTime` under its first name, which every driver still exports, or under the name of CUDA 12.8. The first name is
/// tried first, because a profiler older than the driver does not know the second and then refuses the whole capture (seen with
/// Nsight Systems 2023.4 under driver 580). cudarc binds only the second, and panics where it is missing.
fn elapsed_function() -> DriverResult<ElapsedFn> {
    // SAFETY: the library is there, so that this does not panic; it has been loaded before and stays loaded.
    let library = unsafe { sys::culib() };
    let names: [&[u8]; 2] = [b"cuEventElapsedTime\0", b"cuEventElapsedTime_v2\0"];
    // SAFETY: both names stand for a function of this type in NVIDIA's cuda.h.
    let function =
        names.into_iter().find_map(|name| unsafe { library.get::<ElapsedFn>(name) }.ok().map(|found| *found));
    function.ok_or_else(|| {
        refusal(CallKind::EventElapsed, CUresult::CUDA_ERROR_NOT_FOUND, "libcuda has no such function".into())
    })
}

// CUresult is an enum in cudarc: a driver newer than CUDA 13.0 must not return a code that 13.0 lacks. The later codes known today
// (47, 227, 917 to 919) belong to multicast, loader, detached-stream and fabric calls, none of which is made here.
#[inline]
fn check(call: CallKind, result: CUresult) -> DriverResult<()> {
    check_for(call, result, String::new)
}

/// As [`check`], with a description of the request for an error.
#[inline]
fn check_for(call: CallKind, result: CUresult, context: impl FnOnce() -> String) -> DriverResult<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        failed => Err(refusal(call, failed, context())),
    }
}

/// The enum's own name, not cudarc's error type, whose formatting calls into the driver.
#[cold]
fn refusal(call: CallKind, result: CUresult, context: String) -> DriverError {
    // CAST: the enum has the driver's codes as its values.
    DriverError { call, code: result as u32, name: format!("{result:?}"), context }
}

/// A size for the driver. Where the host has 32 bits a larger one becomes the largest, which the driver refuses.
fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
