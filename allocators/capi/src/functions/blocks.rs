//! Blocks of memory, and the streams that use them.

use crate::allocator::Allocator;
use crate::arguments::{allocator, conclude_allocation, conclude_and_tell, give};
use crate::error::{Failure, Status, answer, attempt};

/// Allocates `bytes` for work on a stream. For 0 bytes the address is 0, which needs no free.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_allocate(
    vramlab: *mut Allocator,
    bytes: u64,
    stream: u64,
    out: *mut u64,
) -> Status {
    // SAFETY: as promised.
    let served = attempt(|| unsafe { give(out, "the address", || allocator(vramlab)?.allocate(0, bytes, stream)) });
    // SAFETY: as promised.
    unsafe { conclude_allocation(vramlab, served, bytes, out) }
}

/// Allocates from the memory of a private pool.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_allocate_in(
    vramlab: *mut Allocator,
    pool: u64,
    bytes: u64,
    stream: u64,
    out: *mut u64,
) -> Status {
    let served = attempt(|| {
        if pool == 0 {
            return Err(Failure::new(Status::Unknown, "0 is not a private pool"));
        }
        // SAFETY: as promised.
        unsafe { give(out, "the address", || allocator(vramlab)?.allocate(pool, bytes, stream)) }
    });
    // SAFETY: as promised.
    unsafe { conclude_allocation(vramlab, served, bytes, out) }
}

/// Frees the block that begins at an address. Address 0 is fine. With `VRAMLAB_STATUS_DRIVER` the program no longer owns the block,
/// but its memory is reusable only after a wait for the device, as in `vramlab_trim`; until then it counts as active and requested.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_free(vramlab: *mut Allocator, address: u64) -> Status {
    // SAFETY: as promised.
    let freed = attempt(|| unsafe { allocator(vramlab) }?.free(address));
    // SAFETY: as promised.
    unsafe { conclude_and_tell(vramlab, freed, None) }
}

/// Announces that work queued so far on a stream, not the block's own, uses a block: its memory serves no other request before that
/// work has completed.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_record_stream(vramlab: *mut Allocator, address: u64, stream: u64) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }?.record_stream(address, stream))
}

/// Announces that a stream is about to be destroyed. Waits for the device; then no block waits for the stream any more. This covers
/// every allocator of the process on that device, so one call is enough. Blocks of the stream can be freed as usual, before, during
/// and after the call, and so can blocks that it was recorded for. After the call nothing of this library names the stream any
/// more.
///
/// # Safety
/// See the top of this file; the stream is still there, and no other thread's call names it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_stream_gone(vramlab: *mut Allocator, stream: u64) -> Status {
    // SAFETY: as promised.
    let result = attempt(|| unsafe { allocator(vramlab) }?.stream_gone(stream));
    // SAFETY: as promised.
    unsafe { conclude_and_tell(vramlab, result, None) }
}

/// Announces that the program began to capture a graph on the device, or that such a capture has ended. Calls are counted. While a
/// capture is open the library does not wait for the device, and records no event on a stream that is captured.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_capturing(vramlab: *mut Allocator, open: bool) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }.map(|allocator| allocator.capturing(open)))
}

/// Sets whether a block that is freed while the program captures a graph, after other streams used it there, may be reused within
/// that capture, once its stream follows their work. Off by default: it is reusable after the capture. The status is
/// `VRAMLAB_STATUS_INCAPABLE` where the allocator does not support this.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_reuse_in_captures(vramlab: *mut Allocator, on: bool) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }?.reuse_in_captures(on))
}
