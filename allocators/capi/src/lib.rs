//! libvramlab: the allocators as a C library, without knowledge of PyTorch or Python.
//!
//! A program opens an allocator on a device by name, allocates and frees on streams that it made itself, and asks for
//! statistics and snapshots. The header `include/vramlab.h` is made from this file.
//!
//! # Safety
//! These promises of the program apply to every function; the `SAFETY` lines below refer to them:
//! - a `vramlab` pointer is null, or came from `vramlab_open` and was not closed; the same applies to checkpoints. Null is an
//!   error.
//! - other pointers are null or point to memory of their type, which no other thread uses during the call. Texts end with a zero
//!   byte.
//! - a stream is the handle of a live CUDA stream of the device, until `vramlab_stream_gone`; on a simulated device any number. No
//!   thread ends a capture of it while another thread's call names it.
//! - work that uses a block is queued before its free, on the block's stream or on streams that were recorded for it.
//!
//! Any thread may call, at any time of its life and the process's, also in handlers of `atexit` and destructors of thread-specific
//! data. In a child after `fork` every call is an error.

mod allocator;
mod device;
mod driver;
mod error;
mod held;
mod host;
mod notices;
mod records;

pub use allocator::pinned::*;
pub use allocator::shared::*;
pub use allocator::{Allocator, Checkpoint};
pub use driver::{SegmentAction, SegmentEvent};
pub use error::Status;
pub use host::{Durations, Pinning};
pub use records::{BlockRecord, BlockStateRecord, Gauge, Pooled, SegmentRecord, StatsRecord};

use allocator::{allocators_json, torch_conf_json};
use error::{Attempt, Failure, Outcome, answer, attempt, conclude, last, watch_forks};
use notices::Callback;
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::path::Path;

/// Number of this interface. It changes when a program that was built with an older header no longer works.
pub const VRAMLAB_ABI: u32 = 1;
/// No limit, for `vramlab_set_limit`.
pub const VRAMLAB_NO_LIMIT: u64 = u64::MAX;
/// The allocator has private pools.
pub const VRAMLAB_CAN_POOLS: u32 = 1;
/// Private pools can be restored to a checkpoint.
pub const VRAMLAB_CAN_CHECKPOINT: u32 = 2;
/// The allocator knows its segments and blocks.
pub const VRAMLAB_CAN_SNAPSHOT: u32 = 4;
/// Segments are ranges of addresses that are mapped in parts.
pub const VRAMLAB_CAN_EXPAND: u32 = 8;
/// Every block has the address that PyTorch's allocator would return.
pub const VRAMLAB_FOLLOWS_PYTORCH: u32 = 16;

fn missing(what: &str) -> Failure {
    Failure::new(Status::Invalid, format!("{what} is a null pointer"))
}

/// # Safety
/// See the top of this file.
unsafe fn allocator<'a>(pointer: *const Allocator) -> Outcome<&'a Allocator> {
    // SAFETY: null, or open (the program's promise).
    unsafe { pointer.as_ref() }.ok_or_else(|| missing("the allocator"))
}

/// # Safety
/// See the top of this file.
unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Outcome<&'a str> {
    if pointer.is_null() {
        return Err(missing(what));
    }
    // SAFETY: a text that ends with a zero byte (the program's promise).
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Failure::new(Status::Invalid, format!("{what} is not UTF-8")))
}

/// Writes a result to the program's pointer.
///
/// # Safety
/// See the top of this file.
unsafe fn give<T>(out: *mut T, what: &str, value: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
    if out.is_null() {
        return Err(missing(what));
    }
    let value = value()?;
    // SAFETY: not null, so it points to memory of this type (the program's promise), whatever its contents.
    unsafe { out.write(value) };
    Ok(())
}

/// Ends a call that may have changed segments or made blocks reusable: calls the program's callbacks, then returns the result.
/// `block` is memory that the call returns to the program.
///
/// # Safety
/// See the top of this file.
unsafe fn conclude_and_tell(vramlab: *const Allocator, attempt: Attempt, block: Option<Range<u64>>) -> Status {
    // In a forked child locks may stay locked.
    if !matches!(&*attempt, Err(failure) if failure.status == Status::Forked)
        // SAFETY: null, or open (the program's promise).
        && let Some(allocator) = unsafe { vramlab.as_ref() }
    {
        allocator.deliver(block);
    }
    conclude(attempt)
}

/// Ends an allocation of `bytes`, whose address is written.
///
/// # Safety
/// See the top of this file.
unsafe fn conclude_allocation(vramlab: *const Allocator, attempt: Attempt, bytes: u64, out: *const u64) -> Status {
    let served = attempt.is_ok();
    // SAFETY: the allocation succeeded, so it was written.
    let block = served.then(|| unsafe { out.read() }).map(|address| address..address.saturating_add(bytes));
    // SAFETY: as promised.
    unsafe { conclude_and_tell(vramlab, attempt, block) }
}

fn c_text(text: String) -> Outcome<*mut c_char> {
    let text = CString::new(text).map_err(|_| Failure::new(Status::Internal, "a text contains a zero byte"))?;
    Ok(text.into_raw())
}

/// The number of this interface: [`VRAMLAB_ABI`] of the header that the library was built with.
#[unsafe(no_mangle)]
pub extern "C" fn vramlab_abi() -> u32 {
    VRAMLAB_ABI
}

/// The version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn vramlab_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The text of this thread's last failing call; empty before the first. It lives until the thread's next failing call or the
/// thread's end. A text of more than 4095 bytes is truncated.
#[unsafe(no_mangle)]
pub extern "C" fn vramlab_error() -> *const c_char {
    last()
}

/// The name of a status. The text lives forever.
#[unsafe(no_mangle)]
pub extern "C" fn vramlab_status_name(status: i32) -> *const c_char {
    Status::name(status).as_ptr()
}

/// Frees a text that a call returned. Null is fine.
///
/// # Safety
/// It came from this library and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: it was made by `c_text` (the program's promise).
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Opens an allocator: `NAME` or `NAME:key=value,key=value`, as in the programs of this project. The device is `cuda`, `cuda:N`,
/// `sim` (a simulated H200), `sim:N` (further ones) or `sim:FILE` (with a profile), or `host:` before one of the first four: pinned
/// memory of the host, for allocators such as `host-exact`, see `vramlab_record_stream_on`. Opening the first allocator on a GPU
/// takes about a second.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_open(name: *const c_char, device: *const c_char, out: *mut *mut Allocator) -> Status {
    answer(|| {
        // SAFETY: texts and pointer are as promised.
        let (name, device) = unsafe { (text(name, "the allocator's name")?, text(device, "the device")?) };
        // SAFETY: as promised.
        unsafe { give(out, "the result", || Ok(Box::into_raw(Box::new(Allocator::open(name, device)?)))) }?;
        watch_forks();
        Ok(())
    })
}

/// Whether `vramlab_open` would accept an allocator of a GPU's memory and its settings. Opens nothing.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_check(name: *const c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { text(name, "the allocator's name") }.and_then(|name| allocator::check(name, "")))
}

/// Closes an allocator: waits for the device, and releases everything, also live blocks. In a callback of `vramlab_on_segment` or
/// `vramlab_on_free` the status is `VRAMLAB_STATUS_LIVE`, and nothing is closed: its call has not returned.
///
/// # Safety
/// See the top of this file; no other thread uses the allocator or will.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_close(vramlab: *mut Allocator) -> Status {
    answer(|| {
        // SAFETY: null, or open (the program's promise).
        if unsafe { allocator(vramlab) }?.is_calling_back() {
            let text = "the allocator cannot be closed in one of its callbacks; close it when the call has returned";
            return Err(Failure::new(Status::Live, text));
        }
        // SAFETY: it came from `vramlab_open` and is closed once (the program's promise).
        unsafe { Box::from_raw(vramlab) }.close()
    })
}

/// Every allocator with its settings and their defaults, as JSON.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_allocators_json(out: *mut *mut c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || c_text(allocators_json())) })
}

/// The settings that an allocator follows of PyTorch's, as JSON. `name` is as for `vramlab_open`, `conf` is the text of
/// `PYTORCH_CUDA_ALLOC_CONF`, and `limit` is the memory limit in bytes or `VRAMLAB_NO_LIMIT`. Opens nothing. The result is an
/// object:
///
/// - `settings`: names and values, to append to `name`. A setting that `name` gives is not among them.
/// - `ignored`: keys that the allocator does not have, each with a hint in brackets where there is one.
/// - `fixed`: keys that count only when the allocator is opened. PyTorch itself follows the others.
///
/// `VRAMLAB_STATUS_UNKNOWN` where the name is unknown or PyTorch would refuse the text. The text may have keys of a newer PyTorch.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_torch_conf_json(
    name: *const c_char,
    conf: *const c_char,
    limit: u64,
    out: *mut *mut c_char,
) -> Status {
    answer(|| {
        // SAFETY: as promised.
        let name = unsafe { text(name, "the allocator's name") }?;
        // SAFETY: as promised.
        let conf = unsafe { text(conf, "PyTorch's settings") }?;
        let limit = (limit != VRAMLAB_NO_LIMIT).then_some(limit);
        // SAFETY: as promised.
        unsafe { give(out, "the result", || c_text(torch_conf_json(name, conf, limit)?)) }
    })
}

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
/// remain, only the status is lost. The callback counts as running until its thread's next call.
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

/// Writes the records since the last call to a file, one line of JSON each. The file is written atomically.
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
