//! Memory of the device: what an allocator serves.

use super::{About, Blocked, pass_timed, recorded, recorded_on};
use crate::guard::call;
use crate::pool;
use crate::real::real;
use crate::record::Place;
use crate::serve::{self, INVALID_VALUE, SUCCESS};
use crate::{record, settings, streams};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use vramlab_histories::calls::{Call, Counter, Served};

/// Live memory that the driver served: the call, and its bytes.
static DRIVERS: Mutex<BTreeMap<u64, (Call, u64)>> = Mutex::new(BTreeMap::new());

/// Notes memory of the driver, so that its free is known.
pub(super) fn driver_made(addr: u64, call: Call, bytes: u64) {
    if record::is_on() {
        DRIVERS.lock().unwrap_or_else(PoisonError::into_inner).insert(addr, (call, bytes));
    }
}

/// Forgets memory of the driver.
pub(super) fn driver_gone(addr: u64) -> Option<(Call, u64)> {
    if !record::is_on() {
        return None;
    }
    DRIVERS.lock().unwrap_or_else(PoisonError::into_inner).remove(&addr)
}

/// Serves a request from the allocator of the current context, or by the driver (`pass`).
///
/// # Safety
/// `out` is null or may be written.
unsafe fn allocate(about: About, out: *mut u64, may_serve: bool, pass: impl FnMut() -> i32) -> i32 {
    let start = record::start();
    let serves = may_serve && !out.is_null() && about.bytes > 0 && !streams::is_capturing();
    let served = if serves { serve::current() } else { None };
    let served = served.and_then(|served| Some((served.device, served.allocate(about.bytes, about.stream, start)?)));
    let Some((device, served)) = served else {
        if settings::get().alloc.is_some() {
            record::count(Counter::Passed, 1);
        }
        // SAFETY: the driver has written it.
        let read = || unsafe { *out };
        let code = pass_timed(about, pass, || {
            driver_made(read(), about.call, about.bytes);
            read()
        });
        return code;
    };
    let (addr, code) = match served {
        Ok(addr) => {
            // SAFETY: not null, and the caller says that it may be written.
            unsafe { *out = addr };
            (addr, SUCCESS)
        }
        Err(code) => (0, code),
    };
    if record::is_on() {
        let done = recorded_on(device, about, Served::Allocator, addr, start, Blocked::default(), code);
        record::place().fill(done);
    }
    code
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAlloc_v2(out: *mut u64, bytes: usize) -> i32 {
    let pass = || real!(cuMemAlloc_v2(out => *mut u64, bytes => usize));
    // SAFETY: the caller's promise.
    call(pass, || unsafe { allocate(About::new(Call::Alloc, bytes as u64), out, true, pass) })
}

/// Rows begin at multiples of this, so that textures can be bound to them.
const PITCH: usize = 512;

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAllocPitch_v2(
    out: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> i32 {
    let pass = || {
        real!(cuMemAllocPitch_v2(
            out => *mut u64, pitch => *mut usize, width => usize, height => usize, element => u32
        ))
    };
    call(pass, || {
        let row = width.checked_next_multiple_of(PITCH);
        let bytes = row.and_then(|row| row.checked_mul(height));
        let valid = !pitch.is_null() && matches!(element, 4 | 8 | 16) && bytes.is_some();
        let bytes = bytes.unwrap_or(usize::MAX);
        // SAFETY: the caller's promise.
        let code = unsafe { allocate(About::new(Call::Pitch, bytes as u64), out, valid, pass) };
        // SAFETY: it is not null where the call succeeded, and the driver has written the address.
        if code == SUCCESS && serve::holder(unsafe { *out }).is_some() {
            // SAFETY: the caller's promise.
            unsafe { *pitch = row.unwrap_or(width) };
        }
        code
    })
}

/// # Safety
/// As of the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAllocManaged(out: *mut u64, bytes: usize, flags: u32) -> i32 {
    let pass = || real!(cuMemAllocManaged(out => *mut u64, bytes => usize, flags => u32));
    call(pass, || {
        let about = About::new(Call::Managed, bytes as u64);
        if !out.is_null() {
            let start = record::start();
            if let Some(addr) = pool::take(bytes as u64, flags) {
                // SAFETY: not null, and the caller says that it may be written.
                unsafe { *out = addr };
                fill(record::place(), about, addr, start);
                return SUCCESS;
            }
        }
        let code = pass_timed(about, pass, || {
            // SAFETY: the driver has written it.
            let addr = unsafe { *out };
            driver_made(addr, Call::Managed, bytes as u64);
            addr
        });
        if code == SUCCESS && !out.is_null() {
            // SAFETY: the driver has written it.
            pool::made(bytes as u64, flags, unsafe { *out });
        }
        code
    })
}

/// Records a call that kept memory served.
pub(super) fn fill(place: Place, about: About, addr: u64, start: u64) {
    if record::is_on() {
        place.fill(recorded(about, Served::Allocator, addr, start, Blocked::default(), SUCCESS));
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn cuMemFree_v2(addr: u64) -> i32 {
    call(|| real!(cuMemFree_v2(addr => u64)), || free(addr))
}

fn free(addr: u64) -> i32 {
    let start = record::start();
    if let Some(held) = serve::take(addr) {
        let about = About { call: Call::Free, bytes: held.bytes, stream: held.handle };
        let place = record::place();
        let served = held.served;
        let blocked = served.free(held, start);
        if record::is_on() {
            place.fill(recorded_on(served.device, about, Served::Allocator, addr, start, blocked, SUCCESS));
        }
        return SUCCESS;
    }
    // A second free, or one inside an allocation: the driver would take a whole segment for the program's.
    if serve::owns(addr) {
        let place = record::place();
        place.fill(recorded(
            About::new(Call::Free, 0),
            Served::Allocator,
            addr,
            start,
            Blocked::default(),
            INVALID_VALUE,
        ));
        return INVALID_VALUE;
    }
    if let Some((bytes, place)) = pool::keep(addr, record::place) {
        fill(place, About::new(Call::Free, bytes), addr, start);
        return SUCCESS;
    }
    let known = driver_gone(addr);
    if !record::is_on() {
        return real!(cuMemFree_v2(addr => u64));
    }
    let place = record::place();
    let (made, bytes) = known.map_or((None, 0), |(made, bytes)| (Some(made), bytes));
    // The driver's free waits for the device. Waiting before it divides its time exactly into waiting and the driver's own work.
    let waits = matches!(made, Some(Call::Alloc | Call::Pitch | Call::Managed)) && !streams::is_capturing();
    let blocked = if waits { streams::wait() } else { Blocked::default() };
    let code = real!(cuMemFree_v2(addr => u64));
    if code != SUCCESS
        && let Some((made, bytes)) = known
    {
        driver_made(addr, made, bytes);
    }
    place.fill(recorded(About::new(Call::Free, bytes), Served::Driver, addr, start, blocked, code));
    code
}

/// Memory in the order of a stream. `per_thread`: null is the calling thread's default stream.
///
/// # Safety
/// `out` is null or may be written.
unsafe fn allocate_async(
    about: About,
    out: *mut u64,
    per_thread: bool,
    from: Option<u64>,
    pass: impl FnMut() -> i32,
) -> i32 {
    let own = is_per_thread(about.stream, per_thread);
    if about.stream > streams::LEGACY || own {
        streams::become_multi();
    }
    // A thread's default stream has one name for all threads, so that the driver serves it.
    let serves = !own && from.is_none_or(is_default_pool);
    // SAFETY: passed on.
    unsafe { allocate(about, out, serves, pass) }
}

fn is_per_thread(stream: u64, per_thread: bool) -> bool {
    stream == streams::PER_THREAD || (per_thread && stream == 0)
}

/// Whether a pool is one that the device gives memory from by itself. Others have properties of their own.
fn is_default_pool(pool: u64) -> bool {
    let device = serve::device();
    let (mut default, mut now) = (0_u64, 0_u64);
    let known = real!(cuDeviceGetDefaultMemPool(&raw mut default => *mut u64, device => i32)) == SUCCESS
        && real!(cuDeviceGetMemPool(&raw mut now => *mut u64, device => i32)) == SUCCESS;
    known && pool == default && pool == now
}

macro_rules! allocate_async {
    ($name:ident, $per_thread:literal) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(out: *mut u64, bytes: usize, stream: u64) -> i32 {
            let pass = || real!($name(out => *mut u64, bytes => usize, stream => u64));
            let about = About { call: Call::AllocAsync, bytes: bytes as u64, stream };
            // SAFETY: the caller's promise.
            call(pass, || unsafe { allocate_async(about, out, $per_thread, None, pass) })
        }
    };
}

allocate_async!(cuMemAllocAsync, false);
allocate_async!(cuMemAllocAsync_ptsz, true);

macro_rules! allocate_from_pool {
    ($name:ident, $per_thread:literal) => {
        /// # Safety
        /// As of the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(out: *mut u64, bytes: usize, pool: u64, stream: u64) -> i32 {
            let pass = || real!($name(out => *mut u64, bytes => usize, pool => u64, stream => u64));
            let about = About { call: Call::FromPool, bytes: bytes as u64, stream };
            // SAFETY: the caller's promise.
            call(pass, || unsafe { allocate_async(about, out, $per_thread, Some(pool), pass) })
        }
    };
}

allocate_from_pool!(cuMemAllocFromPoolAsync, false);
allocate_from_pool!(cuMemAllocFromPoolAsync_ptsz, true);

/// Frees in the order of a stream.
fn free_async(addr: u64, stream: u64, per_thread: bool, pass: impl FnOnce() -> i32) -> i32 {
    let start = record::start();
    let ordering = if is_per_thread(stream, per_thread) { streams::PER_THREAD } else { stream };
    if ordering > streams::LEGACY {
        streams::become_multi();
    }
    let place = record::place();
    let Some((served, _, bytes)) = serve::holder(addr) else {
        let inside = serve::owns(addr);
        let bytes = if inside { 0 } else { driver_gone(addr).map_or(0, |(_, bytes)| bytes) };
        let code = if inside {
            INVALID_VALUE
        } else {
            // Managed memory that is freed in this way is the driver's again.
            pool::forget(addr);
            pass()
        };
        let by = if inside { Served::Allocator } else { Served::Driver };
        let about = About { call: Call::FreeAsync, bytes, stream };
        place.fill(recorded(about, by, addr, start, Blocked::default(), code));
        return code;
    };
    // As the driver, which refuses memory that was not allocated in the capture.
    let code = match streams::is_capturing() && captures(ordering) {
        true => INVALID_VALUE,
        false => match serve::take(addr) {
            Some(held) => {
                served.free_on(held, ordering);
                SUCCESS
            }
            None => INVALID_VALUE,
        },
    };
    place.fill(recorded(
        About { call: Call::FreeAsync, bytes, stream },
        Served::Allocator,
        addr,
        start,
        Blocked::default(),
        code,
    ));
    code
}

/// Whether work on a stream is being captured.
fn captures(stream: u64) -> bool {
    let mut status = 0_u32;
    real!(cuStreamIsCapturing(stream => u64, &raw mut status => *mut u32)) == SUCCESS && status != 0
}

macro_rules! free_async {
    ($name:ident, $per_thread:literal) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C-unwind" fn $name(addr: u64, stream: u64) -> i32 {
            let pass = || real!($name(addr => u64, stream => u64));
            call(pass, || free_async(addr, stream, $per_thread, pass))
        }
    };
}

free_async!(cuMemFreeAsync, false);
free_async!(cuMemFreeAsync_ptsz, true);
