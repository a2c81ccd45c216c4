//! The memory that an allocator has reserved: its limit, its statistics, its segments and blocks.

use crate::allocator::Allocator;
use crate::arguments::{allocator, c_text, conclude_and_tell, give, text};
use crate::error::{Status, answer, attempt};
use crate::records::{BlockRecord, SegmentRecord, StatsRecord};
use std::ffi::{c_char, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;

/// Waits for deferred frees, and releases free segments while more than `keep_bytes` are reserved. `released` may be null.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_trim(vramlab: *mut Allocator, keep_bytes: u64, released: *mut u64) -> Status {
    let trimmed = attempt(|| {
        // SAFETY: as promised.
        let bytes = unsafe { allocator(vramlab) }?.trim(keep_bytes)?;
        // SAFETY: as promised.
        if let Some(released) = unsafe { released.as_mut() } {
            *released = bytes;
        }
        Ok(())
    });
    // SAFETY: as promised.
    unsafe { conclude_and_tell(vramlab, trimmed, None) }
}

/// Sets the maximum of reserved bytes, at any time. Nothing is released immediately: memory above a lower limit stays until a
/// request meets it, and does not grow.
///
/// The limit is respected when a call has returned. `stream-ordered` may exceed it inside a call, because the driver reports only
/// afterwards how much its pool allocated; and memory that a CUDA graph allocates for itself is not counted. The setting
/// `memory_limit` of `pytorch-expandable` and `pytorch` with expandable segments is PyTorch's, which can be exceeded by less than
/// one handle of 20 MiB; this one is not. `rmm-arena` keeps its initial size.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_set_limit(vramlab: *mut Allocator, bytes: u64) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }.map(|allocator| allocator.set_limit(bytes)))
}

/// Free and total memory of the device in bytes.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_memory(vramlab: *mut Allocator, free: *mut u64, total: *mut u64) -> Status {
    answer(|| {
        // SAFETY: as promised.
        let (free_now, in_all) = unsafe { allocator(vramlab) }?.memory()?;
        // SAFETY: as promised.
        unsafe { give(free, "free", || Ok(free_now)) }?;
        // SAFETY: as promised.
        unsafe { give(total, "total", || Ok(in_all)) }
    })
}

/// The statistics. Takes the allocator's lock.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_read_stats(vramlab: *mut Allocator, out: *mut StatsRecord) -> Status {
    let read = |allocator: &Allocator| StatsRecord::from_stats(&allocator.stats(), allocator.setting("max_split_size"));
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || allocator(vramlab).map(read)) })
}

/// The known statistics as JSON: one object, under the keys of `torch.cuda.memory_stats` and the allocator's own.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_stats_json(vramlab: *mut Allocator, out: *mut *mut c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || c_text(allocator(vramlab)?.stats_json())) })
}

/// Restarts every peak from its current value.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_reset_peaks(vramlab: *mut Allocator) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }.map(Allocator::reset_peaks))
}

/// Restarts every sum and count from zero.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_reset_accumulated(vramlab: *mut Allocator) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }.map(Allocator::reset_accumulated))
}

/// Calls `segment` for each segment in address order, and after each `block` for its blocks in order. All values are from one
/// moment; no lock is held during the callbacks. The callbacks may call the library, and may be left by `longjmp` or an exception,
/// which leaks the copy's memory.
///
/// # Safety
/// See the top of this file; the callbacks may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_visit(
    vramlab: *mut Allocator,
    context: *mut c_void,
    segment: Option<unsafe extern "C-unwind" fn(*mut c_void, *const SegmentRecord)>,
    block: Option<unsafe extern "C-unwind" fn(*mut c_void, *const BlockRecord)>,
) -> Status {
    // A callback that does not return leaks it, see `notices`.
    let mut snapshot = ManuallyDrop::new(None);
    let status = answer(|| {
        // SAFETY: as promised.
        *snapshot = Some(unsafe { allocator(vramlab) }?.snapshot()?);
        Ok(())
    });
    for info in snapshot.iter().flat_map(|snapshot| &snapshot.segments) {
        let record = SegmentRecord::from_info(info);
        // SAFETY: may be called (the program's promise); the record lives until it returns.
        segment.inspect(|segment| unsafe { segment(context, &raw const record) });
        for info in &info.blocks {
            let record = BlockRecord::from_info(info);
            // SAFETY: as for segments.
            block.inspect(|block| unsafe { block(context, &raw const record) });
        }
    }
    drop(ManuallyDrop::into_inner(snapshot));
    status
}

/// Writes segments and blocks to a file in PyTorch's layout: a pickle, or JSON for a name that ends in `.json`. The file is written
/// atomically.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_snapshot(vramlab: *mut Allocator, path: *const c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab)?.write_snapshot(Path::new(text(path, "the path")?)) })
}

/// The live block that begins at an address.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_block_at(vramlab: *mut Allocator, address: u64, out: *mut BlockRecord) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the block", || allocator(vramlab)?.block(address)) })
}

/// The segment around an address: its begin, and its size in bytes. Expandable segments have none that another process could open.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_base(
    vramlab: *mut Allocator,
    address: u64,
    base: *mut u64,
    bytes: *mut u64,
) -> Status {
    answer(|| {
        // SAFETY: as promised.
        let (start, size) = unsafe { allocator(vramlab) }?.base(address)?;
        // SAFETY: as promised.
        unsafe { give(base, "base", || Ok(start)) }?;
        // SAFETY: as promised.
        unsafe { give(bytes, "bytes", || Ok(size)) }
    })
}
