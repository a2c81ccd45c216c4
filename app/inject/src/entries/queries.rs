//! Questions about memory, answered as for an allocation of its own.
//!
//! What would give other processes or devices the memory around a block is refused, in words: the handle of a block would be the
//! handle of its whole segment. The rule is known beforehand: a block may be exported where it is a whole segment, as each is under `naive`.

use crate::guard::call;
use crate::real::real;
use crate::serve::{self, SUCCESS};
use crate::{host, record, settings};
use std::ffi::c_void;
use vramlab_histories::calls::Counter;

/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: i32 = 801;

// CUpointer_attribute.
const BUFFER_ID: i32 = 7;
const RANGE_START_ADDR: i32 = 11;
const RANGE_SIZE: i32 = 12;

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, addr: u64) -> i32 {
    let pass = || real!(cuMemGetAddressRange_v2(base => *mut u64, bytes => *mut usize, addr => u64));
    call(pass, || {
        let code = pass();
        if code == SUCCESS
            && let Some(range) = serve::range_of(addr).or_else(|| host::range_of(addr))
        {
            if !base.is_null() {
                // SAFETY: the driver has written it.
                unsafe { *base = range.base };
            }
            if !bytes.is_null() {
                // SAFETY: as above. CAST: a size in memory.
                unsafe { *bytes = range.bytes as usize };
            }
        }
        code
    })
}

/// Corrects an answer of the driver about a block.
///
/// # Safety
/// The driver has written `data` for this attribute.
unsafe fn correct(data: *mut c_void, attribute: i32, addr: u64) {
    let Some(range) = serve::range_of(addr).or_else(|| host::range_of(addr)) else { return };
    let value = match attribute {
        BUFFER_ID => range.buffer_id,
        RANGE_START_ADDR => range.base,
        RANGE_SIZE => range.bytes,
        _ => return,
    };
    // SAFETY: these attributes have 8 bytes.
    unsafe { data.cast::<u64>().write_unaligned(value) };
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuPointerGetAttribute(data: *mut c_void, attribute: i32, addr: u64) -> i32 {
    let ask = |addr: u64| real!(cuPointerGetAttribute(data => *mut c_void, attribute => i32, addr => u64));
    call(
        || ask(addr),
        || {
            let code = ask(host::address_for_driver(addr));
            if code == SUCCESS {
                // SAFETY: the driver has written it.
                unsafe { correct(data, attribute, addr) };
            }
            code
        },
    )
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuPointerGetAttributes(
    count: u32,
    attributes: *const i32,
    data: *mut *mut c_void,
    addr: u64,
) -> i32 {
    let ask = |addr: u64| {
        real!(cuPointerGetAttributes(
            count => u32, attributes => *const i32, data => *mut *mut c_void, addr => u64
        ))
    };
    call(
        || ask(addr),
        || {
            let code = ask(host::address_for_driver(addr));
            if code == SUCCESS {
                // CAST: a count of entries in memory.
                for at in 0..count as usize {
                    // SAFETY: the driver has read as many attributes and written where the pointers lead.
                    unsafe { correct(*data.add(at), *attributes.add(at), addr) };
                }
            }
            code
        },
    )
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    let pass = || real!(cuMemGetInfo_v2(free => *mut usize, total => *mut usize));
    call(pass, || {
        let code = pass();
        // Cached memory goes back when memory is short.
        if code == SUCCESS
            && !free.is_null()
            && let Some(served) = serve::current()
        {
            // SAFETY: the driver has written it. CAST: a size in memory.
            unsafe { *free += served.cached() as usize };
        }
        code
    })
}

/// Whether a block may be exported: the driver's own range is no larger.
fn is_whole_segment(addr: u64) -> bool {
    let Some(range) = serve::range_of(addr) else { return true };
    let (mut base, mut bytes) = (0_u64, 0_usize);
    let code = real!(cuMemGetAddressRange_v2(&raw mut base => *mut u64, &raw mut bytes => *mut usize, addr => u64));
    code == SUCCESS && (base, bytes as u64) == (range.base, range.bytes)
}

fn refuse(function: &str) -> i32 {
    record::count(Counter::Refused, 1);
    let name = settings::get().alloc.as_ref().map_or("the allocator", |alloc| alloc.name());
    settings::say(&format!(
        "{function} was refused (CUDA_ERROR_NOT_SUPPORTED): the memory is a part of a segment of {name}, and its \
         neighbours would be exported with it; run this program with --alloc naive or --free driver"
    ));
    NOT_SUPPORTED
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuIpcGetMemHandle(handle: *mut c_void, addr: u64) -> i32 {
    let pass = || real!(cuIpcGetMemHandle(handle => *mut c_void, addr => u64));
    call(pass, || if is_whole_segment(addr) { pass() } else { refuse("cuIpcGetMemHandle") })
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    addr: u64,
    bytes: usize,
    kind: i32,
    flags: u64,
) -> i32 {
    let pass = || {
        real!(cuMemGetHandleForAddressRange(
            handle => *mut c_void, addr => u64, bytes => usize, kind => i32, flags => u64
        ))
    };
    call(pass, || if is_whole_segment(addr) { pass() } else { refuse("cuMemGetHandleForAddressRange") })
}
