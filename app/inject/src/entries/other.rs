//! Memory of other kinds: recorded, and passed to the driver.

use super::{About, Blocked, pass_timed, recorded};
use crate::guard::call;
use crate::pool;
use crate::real::real;
use crate::record;
use crate::serve::SUCCESS;
use crate::streams;
use std::ffi::{CStr, c_char, c_void};
use vramlab_histories::calls::{Call, Served};

/// Records a call that gives something back.
pub(super) fn give_back(call: Call, addr: u64, bytes: u64, pass: impl FnOnce() -> i32) -> i32 {
    if !record::is_on() {
        return pass();
    }
    let start = record::start();
    let place = record::place();
    let code = pass();
    place.fill(recorded(About::new(call, bytes), Served::Driver, addr, start, Blocked::default(), code));
    code
}

/// The beginning of `CUmemAllocationProp`.
#[repr(C)]
struct MemoryProperties {
    kind: u32,
    handle_types: u32,
    /// The type of the location: a GPU is 1, and the host's are higher.
    location: u32,
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemCreate(
    out: *mut u64,
    bytes: usize,
    properties: *const c_void,
    flags: u64,
) -> i32 {
    let pass = || real!(cuMemCreate(out => *mut u64, bytes => usize, properties => *const c_void, flags => u64));
    // SAFETY: the driver has written it.
    let handle = || unsafe { *out };
    let properties = properties.cast::<MemoryProperties>();
    // SAFETY: the program passes such a structure, or null.
    let location = if properties.is_null() { 0 } else { u64::from(unsafe { (*properties).location }) };
    call(pass, || pass_timed(About { stream: location, ..About::new(Call::Create, bytes as u64) }, pass, handle))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemRelease(handle: u64) -> i32 {
    let pass = || real!(cuMemRelease(handle => u64));
    call(pass, || give_back(Call::Release, handle, 0, pass))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemMap(addr: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> i32 {
    let pass = || real!(cuMemMap(addr => u64, bytes => usize, offset => usize, handle => u64, flags => u64));
    call(pass, || pass_timed(About::new(Call::Map, bytes as u64), pass, || addr))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemUnmap(addr: u64, bytes: usize) -> i32 {
    let pass = || real!(cuMemUnmap(addr => u64, bytes => usize));
    call(pass, || give_back(Call::Unmap, addr, bytes as u64, pass))
}

macro_rules! array_create {
    ($name:ident) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(out: *mut u64, descriptor: *const c_void) -> i32 {
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
pub(crate) extern "C-unwind" fn cuArrayDestroy(array: u64) -> i32 {
    let pass = || real!(cuArrayDestroy(array => u64));
    call(pass, || give_back(Call::ArrayDestroy, array, 0, pass))
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMipmappedArrayCreate(
    out: *mut u64,
    descriptor: *const c_void,
    levels: u32,
) -> i32 {
    let pass = || real!(cuMipmappedArrayCreate(out => *mut u64, descriptor => *const c_void, levels => u32));
    // SAFETY: the driver has written it.
    let handle = || unsafe { *out };
    call(pass, || pass_timed(About::new(Call::MipmapCreate, 0), pass, handle))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMipmappedArrayDestroy(array: u64) -> i32 {
    let pass = || real!(cuMipmappedArrayDestroy(array => u64));
    call(pass, || give_back(Call::MipmapDestroy, array, 0, pass))
}

/// The end of `CUDA_MEM_ALLOC_NODE_PARAMS`, behind the properties of the pool.
#[repr(C)]
struct AllocNode {
    properties: [u8; 88],
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    addr: u64,
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGraphAddMemAllocNode(
    node: *mut u64,
    graph: u64,
    dependencies: *const u64,
    count: usize,
    parameters: *mut c_void,
) -> i32 {
    let pass = || {
        real!(cuGraphAddMemAllocNode(
            node => *mut u64, graph => u64, dependencies => *const u64, count => usize, parameters => *mut c_void
        ))
    };
    call(pass, || {
        let node = parameters.cast::<AllocNode>();
        // SAFETY: the program passes such a structure, or null.
        let bytes = if node.is_null() { 0 } else { unsafe { (*node).bytes } };
        // SAFETY: as above; the driver has written the address.
        pass_timed(About::new(Call::GraphAlloc, bytes as u64), pass, || unsafe { (*node).addr })
    })
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGraphAddMemFreeNode(
    node: *mut u64,
    graph: u64,
    dependencies: *const u64,
    count: usize,
    addr: u64,
) -> i32 {
    let pass = || {
        real!(cuGraphAddMemFreeNode(
            node => *mut u64, graph => u64, dependencies => *const u64, count => usize, addr => u64
        ))
    };
    call(pass, || give_back(Call::GraphFree, addr, 0, pass))
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAddressReserve(
    out: *mut u64,
    bytes: usize,
    alignment: usize,
    addr: u64,
    flags: u64,
) -> i32 {
    let pass = || {
        real!(cuMemAddressReserve(
            out => *mut u64, bytes => usize, alignment => usize, addr => u64, flags => u64
        ))
    };
    // SAFETY: the driver has written it.
    call(pass, || pass_timed(About::new(Call::Reserve, bytes as u64), pass, || unsafe { *out }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemAddressFree(addr: u64, bytes: usize) -> i32 {
    let pass = || real!(cuMemAddressFree(addr => u64, bytes => usize));
    call(pass, || give_back(Call::Unreserve, addr, bytes as u64, pass))
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolCreate(out: *mut u64, properties: *const c_void) -> i32 {
    let pass = || real!(cuMemPoolCreate(out => *mut u64, properties => *const c_void));
    // SAFETY: the driver has written it.
    call(pass, || pass_timed(About::new(Call::PoolCreate, 0), pass, || unsafe { *out }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemPoolDestroy(pool: u64) -> i32 {
    let pass = || real!(cuMemPoolDestroy(pool => u64));
    call(pass, || give_back(Call::PoolDestroy, pool, 0, pass))
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemPoolTrimTo(pool: u64, keep: usize) -> i32 {
    let pass = || real!(cuMemPoolTrimTo(pool => u64, keep => usize));
    call(pass, || give_back(Call::PoolTrim, pool, keep as u64, pass))
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAdvise(addr: u64, bytes: usize, advice: i32, device: i32) -> i32 {
    let pass = || real!(cuMemAdvise(addr => u64, bytes => usize, advice => i32, device => i32));
    call(pass, || {
        pool::forget(addr);
        pass()
    })
}

/// `location` is a structure of two integers, which is passed as one word.
///
/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAdvise_v2(addr: u64, bytes: usize, advice: i32, location: u64) -> i32 {
    let pass = || real!(cuMemAdvise_v2(addr => u64, bytes => usize, advice => i32, location => u64));
    call(pass, || {
        pool::forget(addr);
        pass()
    })
}

macro_rules! attach {
    ($name:ident) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(stream: u64, addr: u64, bytes: usize, flags: u32) -> i32 {
            let pass = || real!($name(stream => u64, addr => u64, bytes => usize, flags => u32));
            call(pass, || {
                // It counts as work, since later work on the stream depends on it.
                streams::become_multi();
                pool::forget(addr);
                pass()
            })
        }
    };
}

attach!(cuStreamAttachMemAsync);
attach!(cuStreamAttachMemAsync_ptsz);

macro_rules! get_kernel {
    ($name:ident) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(out: *mut u64, of: u64, name: *const c_char) -> i32 {
            let pass = || real!($name(out => *mut u64, of => u64, name => *const c_char));
            call(pass, || {
                let code = pass();
                if code == SUCCESS && !out.is_null() && !name.is_null() {
                    // SAFETY: the driver has written the handle and read the name.
                    unsafe { streams::kernel(*out, CStr::from_ptr(name)) };
                }
                code
            })
        }
    };
}

get_kernel!(cuModuleGetFunction);
get_kernel!(cuLibraryGetKernel);

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuKernelGetFunction(out: *mut u64, kernel: u64) -> i32 {
    let pass = || real!(cuKernelGetFunction(out => *mut u64, kernel => u64));
    call(pass, || {
        let code = pass();
        if code == SUCCESS && !out.is_null() {
            // SAFETY: the driver has written it.
            streams::kernel_alias(unsafe { *out }, kernel);
        }
        code
    })
}

macro_rules! unload {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C-unwind" fn $name(module: u64) -> i32 {
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
