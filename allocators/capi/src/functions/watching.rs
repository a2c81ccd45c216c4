//! Callbacks, records and times of what an allocator does, and its settings.

use crate::allocator::Allocator;
use crate::arguments::{allocator, c_text, give, text};
use crate::driver::SegmentEvent;
use crate::error::{Status, answer};
use crate::notices::Callback;
use std::ffi::{c_char, c_void};
use std::path::Path;

/// Sets the function that is called when a segment is allocated, freed, mapped or unmapped; null sets none. It may be replaced at any
/// time, also in a callback.
///
/// The callback runs on the thread whose call caused the event, before that call returns, while no lock is held. An allocator's events are
/// delivered one at a time, in the order of the driver's calls: the free of an address is delivered before its next allocation. No call
/// returns a block in memory whose event was not delivered.
///
/// So a call may wait for a callback that runs on another thread. A callback must not take a lock that a thread holds while it calls this
/// library: that thread then waits for five seconds. After that, and when a callback calls the library while another thread's callback
/// runs, that other thread delivers the events as soon as its callback has returned, in the same order. A call inside a
/// callback never waits for another callback, and may deliver events that precede its own.
///
/// A callback may call every function but `vramlab_close`. It may be left by `longjmp` or by a C++ exception: the effects of its call
/// remain, only the status is lost. The callback counts as running until its thread's next call that is made no more than 8 KiB deeper
/// on the stack.
///
/// # Safety
/// See the top of this file; the callback may be called with `context` from any thread, until another one was set and every call
/// that was under way has returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_on_segment(
    vramlab: *mut Allocator,
    context: *mut c_void,
    callback: Option<unsafe extern "C-unwind" fn(*mut c_void, *const SegmentEvent)>,
) -> Status {
    answer(|| {
        // CAST: the context belongs to the program, and is only passed back to it.
        let callback = callback.map(|function| Callback { context: context as usize, function });
        // SAFETY: as promised.
        unsafe { allocator(vramlab) }.map(|allocator| allocator.on_segment(callback))
    })
}

/// Sets the function that is called, with its address, when a block that other streams used has been freed and is reusable: in its free, or
/// in a later call that finds that those streams have completed their use. Null sets none. The rules of `vramlab_on_segment` hold, and
/// events of both kinds are delivered one at a time. A block's event is delivered before its segment is freed, and that of a
/// deferred free before the memory serves another request. Memory that is reusable immediately may serve another thread's request before
/// its event is delivered.
///
/// # Safety
/// As of `vramlab_on_segment`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_on_free(
    vramlab: *mut Allocator,
    context: *mut c_void,
    callback: Option<unsafe extern "C-unwind" fn(*mut c_void, u64)>,
) -> Status {
    answer(|| {
        // CAST: the context belongs to the program, and is only passed back to it.
        let callback = callback.map(|function| Callback { context: context as usize, function });
        // SAFETY: as promised.
        unsafe { allocator(vramlab) }.map(|allocator| allocator.on_free(callback))
    })
}

/// Starts or stops recording every allocation and free: 64 bytes each until they are written.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_trace(vramlab: *mut Allocator, on: bool) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }.map(|allocator| allocator.trace(on)))
}

/// Writes the records since the last call that succeeded to a file, one line of JSON each. The file is written atomically.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_trace_write(vramlab: *mut Allocator, path: *const c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab)?.write_trace(Path::new(text(path, "the path")?)) })
}

/// Starts or stops timing every allocation and free.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_latency(vramlab: *mut Allocator, on: bool) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }.map(|allocator| allocator.latency(on)))
}

/// The measured times, as JSON: percentiles in nanoseconds by operation and path.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_latency_json(vramlab: *mut Allocator, out: *mut *mut c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || c_text(allocator(vramlab)?.latency_json()?)) })
}

/// The driver calls that the allocator made, as JSON: number and time of each kind.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_calls_json(vramlab: *mut Allocator, out: *mut *mut c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || c_text(allocator(vramlab)?.calls_json()?)) })
}

/// The capabilities of the allocator: a sum of `VRAMLAB_CAN_*` and `VRAMLAB_FOLLOWS_PYTORCH`.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_can(vramlab: *mut Allocator, out: *mut u32) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || allocator(vramlab).map(Allocator::can)) })
}

/// The allocator's name and the effective settings, as JSON.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_settings_json(vramlab: *mut Allocator, out: *mut *mut c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || c_text(allocator(vramlab)?.settings_json())) })
}
