//! Private pools and their checkpoints.

use crate::allocator::{Allocator, Checkpoint};
use crate::arguments::{allocator, conclude_and_tell, give, missing};
use crate::error::{Status, answer, attempt};
use std::ffi::c_void;
use std::mem::ManuallyDrop;

/// Creates a private pool. Its number is not 0 and is never reused.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_pool_create(vramlab: *mut Allocator, out: *mut u64) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the pool", || allocator(vramlab)?.pool_create()) })
}

/// Announces that a private pool gets no more requests. Its free segments are released when free segments are released the next
/// time.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_pool_release(vramlab: *mut Allocator, pool: u64) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }?.pool_release(pool))
}

/// Releases the free segments of a released private pool. `released` may be null.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_pool_trim(vramlab: *mut Allocator, pool: u64, released: *mut u64) -> Status {
    let trimmed = attempt(|| {
        // SAFETY: as promised.
        let bytes = unsafe { allocator(vramlab) }?.pool_trim(pool)?;
        // SAFETY: as promised.
        if let Some(released) = unsafe { released.as_mut() } {
            *released = bytes;
        }
        Ok(())
    });
    // SAFETY: as promised.
    unsafe { conclude_and_tell(vramlab, trimmed, None) }
}

/// Records the current state of a private pool. The status is `VRAMLAB_STATUS_INCAPABLE` where the allocator cannot restore it.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_pool_checkpoint(
    vramlab: *mut Allocator,
    pool: u64,
    out: *mut *mut Checkpoint,
) -> Status {
    answer(|| {
        // SAFETY: as promised.
        unsafe {
            give(out, "the checkpoint", || Ok(Box::into_raw(Box::new(allocator(vramlab)?.pool_checkpoint(pool)?))))
        }
    })
}

/// Restores a private pool to a checkpoint: every live block of it is freed, and passed to `freed`; then the blocks that were live
/// at the checkpoint are live again at their addresses, and passed to `created`. Both may be null. They are called after the
/// restore, while no lock is held.
///
/// A restore that fails changes nothing: the live blocks stay live. It fails with `VRAMLAB_STATUS_LIVE` or `VRAMLAB_STATUS_UNKNOWN`
/// when the pool was released, when memory of the checkpoint was released to the device, and when a block there is freed or live
/// and other streams still use it.
///
/// # Safety
/// See the top of this file; the callbacks may be called with `context`. No other thread allocates from the pool meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_pool_restore(
    vramlab: *mut Allocator,
    checkpoint: *const Checkpoint,
    context: *mut c_void,
    freed: Option<unsafe extern "C-unwind" fn(*mut c_void, u64)>,
    created: Option<unsafe extern "C-unwind" fn(*mut c_void, u64, u64, u64)>,
) -> Status {
    // A callback that does not return leaks the lists, see `notices`.
    let mut lists = ManuallyDrop::new((Vec::new(), Vec::new()));
    let restored = attempt(|| {
        // SAFETY: null, or a checkpoint that was not freed (the program's promise).
        let checkpoint = unsafe { checkpoint.as_ref() }.ok_or_else(|| missing("the checkpoint"))?;
        // SAFETY: as promised.
        *lists = unsafe { allocator(vramlab) }?.pool_restore(checkpoint)?;
        Ok(())
    });
    // SAFETY: as promised.
    let status = unsafe { conclude_and_tell(vramlab, restored, None) };
    for &address in &lists.0 {
        // SAFETY: may be called (the program's promise).
        freed.inspect(|freed| unsafe { freed(context, address) });
    }
    for &(address, bytes, stream) in &lists.1 {
        // SAFETY: may be called (the program's promise).
        created.inspect(|created| unsafe { created(context, address, bytes, stream) });
    }
    drop(ManuallyDrop::into_inner(lists));
    status
}

/// Frees a checkpoint. Null is fine.
///
/// # Safety
/// It came from this library and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_checkpoint_free(checkpoint: *mut Checkpoint) {
    if !checkpoint.is_null() {
        // SAFETY: it was made by `vramlab_pool_checkpoint` (the program's promise).
        drop(unsafe { Box::from_raw(checkpoint) });
    }
}
