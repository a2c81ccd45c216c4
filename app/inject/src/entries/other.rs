//! Memory of other kinds: recorded, and passed to the driver.

use super::{About, Blocked, pass_timed, recorded};
use crate::guard::call;
use crate::real::real;
use crate::record;
use std::ffi::c_void;
use vramlab_histories::calls::{Call, Served};

/// Records a call that gives something back.
fn give_back(call: Call, addr: u64, bytes: u64, pass: impl FnOnce() -> i32) -> i32 {
    if !record::is_on() {
        return pass();
    }
    let start = record::start();
    let place = record::place();
    let code = pass();
    place.fill(recorded(About::new(call, bytes), Served::Driver, addr, start, Blocked::default(), code));
    code
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: u32) -> i32 {
    let pass = || real!(cuMemHostAlloc(out => *mut *mut c_void, bytes => usize, flags => u32));
    // SAFETY: the driver has written it. CAST: an address.
    let addr = || unsafe { *out } as u64;
    call(pass, || pass_timed(About::new(Call::HostAlloc, bytes as u64), pass, addr))
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) -> i32 {
    let pass = || real!(cuMemAllocHost_v2(out => *mut *mut c_void, bytes => usize));
    // SAFETY: the driver has written it. CAST: an address.
    let addr = || unsafe { *out } as u64;
    call(pass, || pass_timed(About::new(Call::HostAlloc, bytes as u64), pass, addr))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeHost(at: *mut c_void) -> i32 {
    let pass = || real!(cuMemFreeHost(at => *mut c_void));
    // CAST: an address.
    call(pass, || give_back(Call::HostFree, at as u64, 0, pass))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: u32) -> i32 {
    let pass = || real!(cuMemHostRegister_v2(at => *mut c_void, bytes => usize, flags => u32));
    // CAST: an address.
    call(pass, || pass_timed(About::new(Call::HostRegister, bytes as u64), pass, || at as u64))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostUnregister(at: *mut c_void) -> i32 {
    let pass = || real!(cuMemHostUnregister(at => *mut c_void));
    // CAST: an address.
    call(pass, || give_back(Call::HostUnregister, at as u64, 0, pass))
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemCreate(out: *mut u64, bytes: usize, properties: *const c_void, flags: u64) -> i32 {
    let pass = || real!(cuMemCreate(out => *mut u64, bytes => usize, properties => *const c_void, flags => u64));
    // SAFETY: the driver has written it.
    let handle = || unsafe { *out };
    call(pass, || pass_timed(About::new(Call::Create, bytes as u64), pass, handle))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemRelease(handle: u64) -> i32 {
    let pass = || real!(cuMemRelease(handle => u64));
    call(pass, || give_back(Call::Release, handle, 0, pass))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemMap(addr: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> i32 {
    let pass = || real!(cuMemMap(addr => u64, bytes => usize, offset => usize, handle => u64, flags => u64));
    call(pass, || pass_timed(About::new(Call::Map, bytes as u64), pass, || addr))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemUnmap(addr: u64, bytes: usize) -> i32 {
    let pass = || real!(cuMemUnmap(addr => u64, bytes => usize));
    call(pass, || give_back(Call::Unmap, addr, bytes as u64, pass))
}

macro_rules! array_create {
    ($name:ident) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(out: *mut u64, descriptor: *const c_void) -> i32 {
            let pass = || real!($name(out => *mut u64, descriptor => *const c_void));
            // SAFETY: the driver has written it.
            let handle = || unsafe { *out };
            // How many bytes an array takes is the driver's secret.
            call(pass, || pass_timed(About::new(Call::ArrayCreate, 0), pass, handle))
        }
    };
}

array_create!(cuArrayCreate_v2);
array_create!(cuArray3DCreate_v2);

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuArrayDestroy(array: u64) -> i32 {
    let pass = || real!(cuArrayDestroy(array => u64));
    call(pass, || give_back(Call::ArrayDestroy, array, 0, pass))
}

macro_rules! unload {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name(module: u64) -> i32 {
            let pass = || real!($name(module => u64));
            call(pass, || {
                record::forget_behind();
                pass()
            })
        }
    };
}

unload!(cuModuleUnload);
unload!(cuLibraryUnload);
