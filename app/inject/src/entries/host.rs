//! Pinned host memory: what an allocator of it serves (`--host-alloc`), and what the driver does.
//!
//! The driver answers every question about a block, since it pinned the segment with the block's own flags. Where a freed block was, it is
//! asked about an address that it does not know, so that the code is its own.

use super::memory::fill;
use super::other::give_back;
use super::{About, Blocked, pass_timed, recorded};
use crate::guard::call;
use crate::host::{self, FreeOutcome, Kind};
use crate::real::real;
use crate::record;
use crate::serve::SUCCESS;
use std::ffi::c_void;
use vramlab_histories::calls::{Call, Served};

/// Pinned memory of the allocator, or of the driver.
///
/// # Safety
/// `out` is null or may be written.
unsafe fn allocate(out: *mut *mut c_void, bytes: usize, kind: Kind, pass: impl FnMut() -> i32) -> i32 {
    let about = About::new(Call::HostAlloc, bytes as u64);
    let start = record::start();
    let served = if out.is_null() { None } else { host::allocate(bytes as u64, kind) };
    match served {
        Some(Ok(addr)) => {
            // SAFETY: not null, and the caller says that it may be written. CAST: an address.
            unsafe { *out = addr as *mut c_void };
            fill(record::place(), about, addr, start);
            SUCCESS
        }
        Some(Err(code)) => {
            if record::is_on() {
                record::place().fill(recorded(about, Served::Allocator, 0, start, Blocked::default(), code));
            }
            code
        }
        // SAFETY: the driver has written it. CAST: an address.
        None => pass_timed(about, pass, || unsafe { *out } as u64),
    }
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: u32) -> i32 {
    let pass = || real!(cuMemHostAlloc(out => *mut *mut c_void, bytes => usize, flags => u32));
    // SAFETY: the caller's promise.
    call(pass, || unsafe { allocate(out, bytes, Kind::Flags(flags), pass) })
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) -> i32 {
    let pass = || real!(cuMemAllocHost_v2(out => *mut *mut c_void, bytes => usize));
    // SAFETY: the caller's promise.
    call(pass, || unsafe { allocate(out, bytes, Kind::Plain, pass) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemFreeHost(at: *mut c_void) -> i32 {
    let free = |addr: u64| real!(cuMemFreeHost(addr => u64));
    // CAST: an address.
    let addr = at as u64;
    let here = || {
        let start = record::start();
        let (freed, place) = host::free(addr, record::place);
        match freed {
            FreeOutcome::Block(bytes, blocked) => {
                if let Some(place) = place.filter(|_| record::is_on()) {
                    let about = About::new(Call::HostFree, bytes);
                    place.fill(recorded(about, Served::Allocator, addr, start, blocked, SUCCESS));
                }
                SUCCESS
            }
            // A second free, or one inside a block.
            FreeOutcome::NoBlock => give_back(Call::HostFree, addr, 0, || free(host::foreign_address())),
            FreeOutcome::Foreign => give_back(Call::HostFree, addr, 0, || free(addr)),
        }
    };
    call(|| free(addr), here)
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemHostGetFlags(flags: *mut u32, at: *mut c_void) -> i32 {
    let ask = |addr: u64| real!(cuMemHostGetFlags(flags => *mut u32, addr => u64));
    // CAST: an address.
    call(|| ask(at as u64), || ask(host::address_for_driver(at as u64)))
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemHostGetDevicePointer_v2(out: *mut u64, at: *mut c_void, flags: u32) -> i32 {
    let ask = |addr: u64| real!(cuMemHostGetDevicePointer_v2(out => *mut u64, addr => u64, flags => u32));
    // CAST: an address.
    call(|| ask(at as u64), || ask(host::address_for_driver(at as u64)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: u32) -> i32 {
    let pass = || real!(cuMemHostRegister_v2(at => *mut c_void, bytes => usize, flags => u32));
    // CAST: an address.
    call(pass, || pass_timed(About::new(Call::HostRegister, bytes as u64), pass, || at as u64))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemHostUnregister(at: *mut c_void) -> i32 {
    let pass = || real!(cuMemHostUnregister(at => *mut c_void));
    // CAST: an address.
    call(pass, || give_back(Call::HostUnregister, at as u64, 0, pass))
}
