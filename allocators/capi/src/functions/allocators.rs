//! The library and its allocators: versions, errors, and which allocators can be opened.

use crate::allocator::{self, Allocator, allocators_json, torch_conf_json};
use crate::arguments::{allocator, c_text, give, text};
use crate::error::{Failure, Status, answer, last, open_watching_forks};
use crate::{VRAMLAB_ABI, VRAMLAB_NO_LIMIT};
use std::ffi::{CString, c_char};

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
        let open = || Ok(Box::into_raw(Box::new(Allocator::open(name, device)?)));
        // SAFETY: as promised.
        open_watching_forks(|| unsafe { give(out, "the result", open) })
    })
}

/// Whether `vramlab_open` would accept an allocator of a GPU's memory and its settings. Opens nothing. It also refuses a setting that
/// has no effect beside the others, such as `garbage_collection_threshold` without `memory_limit`: `vramlab_open` accepts it, because
/// `vramlab_set_limit` may set the limit later.
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

/// Every allocator of a GPU's memory with its settings and their defaults, as JSON.
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
