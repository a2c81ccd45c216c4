//! Entry points that change the state on which memory depends: finding functions, streams, captures, contexts.

use crate::forward::at;
use crate::guard::{call, watch_forks};
use crate::real::{find, has, in_place_of, in_place_of_name, real};
use crate::serve::{self, INVALID_VALUE, SUCCESS};
use crate::streams;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::Ordering::Relaxed;

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuInit(flags: u32) -> i32 {
    let pass = || real!(cuInit(flags => u32));
    call(pass, || {
        let code = pass();
        if code == SUCCESS {
            watch_forks();
        }
        code
    })
}

/// Puts a function of this library in the place of the driver's.
///
/// # Safety
/// The driver has written `out` and read `name`.
unsafe fn replace(out: *mut *const (), name: *const c_char, version: i32, flags: u64) {
    if out.is_null() {
        return;
    }
    // SAFETY: the driver has written it.
    let found = unsafe { *out };
    if found.is_null() || name.is_null() {
        return;
    }
    // SAFETY: the driver has read the name.
    let name = unsafe { CStr::from_ptr(name) };
    if let Some(here) = in_place_of(found).or_else(|| in_place_of_name(name, version, flags)) {
        // SAFETY: as above.
        unsafe { *out = here as *const () };
    }
}

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: i32 = 500;

/// Answers for a driver before 11.3, which has no `cuGetProcAddress`.
///
/// # Safety
/// `out` may be written, and `name` ends with a zero byte, or they are null.
unsafe fn answer(name: *const c_char, out: *mut *const (), version: i32, flags: u64) -> i32 {
    if out.is_null() || name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise.
    let found = find(unsafe { CStr::from_ptr(name) }, version, flags);
    // SAFETY: the caller's promise.
    unsafe { *out = found.unwrap_or(std::ptr::null()) };
    if found.is_some() { SUCCESS } else { NOT_FOUND }
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGetProcAddress(
    name: *const c_char,
    out: *mut *const (),
    version: i32,
    flags: u64,
) -> i32 {
    let pass = || {
        real!(cuGetProcAddress(
            name => *const c_char, out => *mut *const (), version => i32, flags => u64
        ))
    };
    // SAFETY: the caller's promise.
    call(pass, || unsafe { first_abi(name, out, version, flags, pass) })
}

/// `cuGetProcAddress` of the first ABI, which the driver answers by `pass`.
///
/// # Safety
/// As of the driver's function.
unsafe fn first_abi(
    name: *const c_char,
    out: *mut *const (),
    version: i32,
    flags: u64,
    pass: impl FnOnce() -> i32,
) -> i32 {
    if !has(at::cuGetProcAddress) && has(at::cuInit) {
        // SAFETY: the caller's promise.
        return unsafe { answer(name, out, version, flags) };
    }
    let code = pass();
    if code == SUCCESS {
        // SAFETY: the driver has written it.
        unsafe { replace(out, name, version, flags) };
    }
    code
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGetProcAddress_v2(
    name: *const c_char,
    out: *mut *const (),
    version: i32,
    flags: u64,
    status: *mut c_void,
) -> i32 {
    let pass = || {
        real!(cuGetProcAddress_v2(
            name => *const c_char, out => *mut *const (), version => i32, flags => u64, status => *mut c_void
        ))
    };
    call(pass, || {
        if !has(at::cuGetProcAddress_v2) && has(at::cuInit) {
            // A driver before 12.0. The first ABI says by its code whether there is such a function, the second by a status.
            let pass = || {
                real!(cuGetProcAddress(
                    name => *const c_char, out => *mut *const (), version => i32, flags => u64
                ))
            };
            // SAFETY: the caller's promise.
            let code = unsafe { first_abi(name, out, version, flags, pass) };
            if !status.is_null() {
                // SAFETY: the caller's promise: an enum, which is as large as an integer.
                unsafe { *status.cast::<i32>() = i32::from(code == NOT_FOUND) };
            }
            return if code == NOT_FOUND { SUCCESS } else { code };
        }
        let code = pass();
        if code == SUCCESS {
            // SAFETY: the driver has written it.
            unsafe { replace(out, name, version, flags) };
        }
        code
    })
}

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuStreamCreate(out: *mut u64, flags: u32) -> i32 {
    let pass = || real!(cuStreamCreate(out => *mut u64, flags => u32));
    // SAFETY: the driver has written it.
    call(pass, || unsafe { made(pass(), out, flags) })
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuStreamCreateWithPriority(out: *mut u64, flags: u32, priority: i32) -> i32 {
    let pass = || real!(cuStreamCreateWithPriority(out => *mut u64, flags => u32, priority => i32));
    // SAFETY: the driver has written it.
    call(pass, || unsafe { made(pass(), out, flags) })
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGreenCtxStreamCreate(
    out: *mut u64,
    context: u64,
    flags: u32,
    priority: i32,
) -> i32 {
    let pass = || real!(cuGreenCtxStreamCreate(out => *mut u64, context => u64, flags => u32, priority => i32));
    // SAFETY: the driver has written it. Such a stream never waits for the legacy one.
    call(pass, || unsafe { made(pass(), out, flags | NON_BLOCKING) })
}

/// # Safety
/// The driver has written `out` if `code` is success.
unsafe fn made(code: i32, out: *const u64, flags: u32) -> i32 {
    if code == SUCCESS && !out.is_null() {
        // SAFETY: the driver has written it.
        streams::made(serve::context(), unsafe { *out }, flags & NON_BLOCKING != 0);
    }
    code
}

macro_rules! stream_destroy {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C-unwind" fn $name(stream: u64) -> i32 {
            let pass = || real!($name(stream => u64));
            call(pass, || {
                serve::stream_gone(stream);
                streams::gone(stream);
                pass()
            })
        }
    };
}

stream_destroy!(cuStreamDestroy);
stream_destroy!(cuStreamDestroy_v2);

/// Launches kernels on several devices. Their streams are in a list that nothing else here reads, so that each stream is taken to work.
///
/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuLaunchCooperativeKernelMultiDevice(
    list: *mut u8,
    devices: u32,
    flags: u32,
) -> i32 {
    let pass = || real!(cuLaunchCooperativeKernelMultiDevice(list => *mut u8, devices => u32, flags => u32));
    call(pass, || {
        streams::begin_work_everywhere();
        streams::QUEUED.fetch_add(1, Relaxed);
        pass()
    })
}

/// Begins a capture by `pass`. Events order memory before, so that no wait falls into it.
fn begin(stream: u64, per_thread: bool, pass: impl FnOnce() -> i32) -> i32 {
    streams::become_multi();
    let code = pass();
    if code == SUCCESS {
        streams::capture_begun(named(stream, per_thread));
    }
    code
}

/// The stream that a function means, since null stands for the thread's own stream in some.
fn named(stream: u64, per_thread: bool) -> u64 {
    match stream {
        0 if per_thread => streams::PER_THREAD,
        0 => streams::LEGACY,
        other => other,
    }
}

macro_rules! begin_capture {
    ($name:ident, $per_thread:literal $(, $argument:ident: $type:ty)*) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(stream: u64 $(, $argument: $type)*) -> i32 {
            let pass = || real!($name(stream => u64 $(, $argument => $type)*));
            call(pass, || begin(stream, $per_thread, pass))
        }
    };
}

begin_capture!(cuStreamBeginCapture, false);
begin_capture!(cuStreamBeginCapture_ptsz, true);
begin_capture!(cuStreamBeginCapture_v2, false, mode: i32);
begin_capture!(cuStreamBeginCapture_v2_ptsz, true, mode: i32);
begin_capture!(
    cuStreamBeginCaptureToGraph, false,
    graph: u64, nodes: *const c_void, edges: *const c_void, count: usize, mode: i32
);
begin_capture!(
    cuStreamBeginCaptureToGraph_ptsz, true,
    graph: u64, nodes: *const c_void, edges: *const c_void, count: usize, mode: i32
);

macro_rules! end_capture {
    ($name:ident, $per_thread:literal) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(stream: u64, graph: *mut c_void) -> i32 {
            let pass = || real!($name(stream => u64, graph => *mut c_void));
            call(pass, || {
                let code = pass();
                // Also one that was invalidated has ended.
                streams::capture_ended(named(stream, $per_thread));
                code
            })
        }
    };
}

end_capture!(cuStreamEndCapture, false);
end_capture!(cuStreamEndCapture_ptsz, true);

macro_rules! reset {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C-unwind" fn $name(device: i32) -> i32 {
            let pass = || real!($name(device => i32));
            call(pass, || {
                let code = pass();
                if code == SUCCESS {
                    serve::device_gone(device);
                }
                code
            })
        }
    };
}

reset!(cuDevicePrimaryCtxReset);
reset!(cuDevicePrimaryCtxReset_v2);

macro_rules! release {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C-unwind" fn $name(device: i32) -> i32 {
            let pass = || real!($name(device => i32));
            call(pass, || {
                let code = pass();
                if code == SUCCESS && !is_active(device) {
                    serve::device_gone(device);
                }
                code
            })
        }
    };
}

release!(cuDevicePrimaryCtxRelease);
release!(cuDevicePrimaryCtxRelease_v2);

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuDevicePrimaryCtxRetain(out: *mut u64, device: i32) -> i32 {
    let pass = || real!(cuDevicePrimaryCtxRetain(out => *mut u64, device => i32));
    // SAFETY: the driver has written it.
    call(pass, || unsafe { context_known(pass(), out, device, false) })
}

/// # Safety
/// The driver has written `out` if `code` is success.
unsafe fn context_known(code: i32, out: *const u64, device: i32, own: bool) -> i32 {
    if code == SUCCESS && !out.is_null() {
        // SAFETY: the driver has written it.
        streams::context_known(unsafe { *out }, device, own);
    }
    code
}

macro_rules! context_create {
    ($name:ident $(, $argument:ident: $type:ty)*) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(out: *mut u64, $($argument: $type,)* device: i32) -> i32 {
            let pass = || real!($name(out => *mut u64, $($argument => $type,)* device => i32));
            // SAFETY: the driver has written it.
            call(pass, || unsafe { context_known(pass(), out, device, true) })
        }
    };
}

context_create!(cuCtxCreate_v2, flags: u32);
context_create!(cuCtxCreate_v3, affinity: *const c_void, count: i32, flags: u32);
context_create!(cuCtxCreate_v4, parameters: *const c_void, flags: u32);

macro_rules! context_destroy {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C-unwind" fn $name(context: u64) -> i32 {
            let pass = || real!($name(context => u64));
            call(pass, || {
                let code = pass();
                if code == SUCCESS {
                    serve::context_destroyed(context);
                }
                code
            })
        }
    };
}

context_destroy!(cuCtxDestroy);
context_destroy!(cuCtxDestroy_v2);

/// Whether a device's primary context is there.
pub(crate) fn is_active(device: i32) -> bool {
    let (mut flags, mut active) = (0_u32, 0_i32);
    if !has(at::cuDevicePrimaryCtxGetState) {
        return true;
    }
    let code =
        real!(cuDevicePrimaryCtxGetState(device => i32, &raw mut flags => *mut u32, &raw mut active => *mut i32));
    code != SUCCESS || active != 0
}
