//! The real driver: found by its path, since its name leads here, and opened when the program first calls a function of it.

use crate::forward::{Entry, HERE, NAMES, SLOTS, at, is_written};
use crate::guard::uncancelled;
use crate::settings;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Release};
use vramlab_device::libcuda;

/// `CUDA_ERROR_NOT_FOUND`: what a function answers that the driver does not have.
const NOT_FOUND: i32 = 500;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: i32 = 100;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;
/// The version of CUDA from which functions have a second ABI.
const SECOND_ABI: i32 = 3020;

/// An open library. It is never closed.
#[derive(Clone, Copy)]
struct Library(usize);

impl Library {
    fn open(path: &Path) -> Option<Self> {
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: the path ends with a zero byte. Initialisers of libcuda are sound, as NVIDIA promises.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        // CAST: a handle is kept as its value.
        (!handle.is_null()).then_some(Self(handle as usize))
    }

    fn symbol(self, name: &CStr) -> *mut () {
        // SAFETY: the library is open, and the name ends with a zero byte.
        unsafe { libc::dlsym(self.0 as *mut c_void, name.as_ptr()).cast() }
    }
}

/// The real driver, or nothing where there is none.
///
/// Opened while no lock is held: the dynamic linker has one of its own, which a thread holds that runs a library's initialisers. Where
/// these call CUDA, each of two threads would wait for the other's lock. A library that is opened twice is the same one.
fn library() -> Option<Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    if let Some(known) = LIBRARY.get() {
        return *known;
    }
    let candidates = libcuda::candidates(settings::get().driver.as_deref());
    let found = candidates.into_iter().filter(|path| !is_this_library(path)).find_map(|path| Library::open(&path));
    if LIBRARY.set(found).is_ok() && found.is_none() {
        settings::say("no libcuda.so.1 was found besides this library: the program finds no GPU");
    }
    *LIBRARY.get()?
}

/// Whether a file is the library that this code is in.
fn is_this_library(path: &Path) -> bool {
    let this = this_library().and_then(|path| path.metadata().ok());
    let other = path.metadata().ok();
    this.zip(other).is_some_and(|(this, other)| (this.dev(), this.ino()) == (other.dev(), other.ino()))
}

/// The file that this code was loaded from.
fn this_library() -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address is in this library, and the structure is live.
    let found = unsafe { libc::dladdr(this_library as *const c_void, info.as_mut_ptr()) };
    if found == 0 {
        return None;
    }
    // SAFETY: `dladdr` filled it, and the name lives as long as the library, or is null.
    let name = unsafe { info.assume_init().dli_fname };
    // SAFETY: as above.
    (!name.is_null()).then(|| PathBuf::from(std::ffi::OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes())))
}

unsafe extern "C" fn not_found() -> i32 {
    NOT_FOUND
}

unsafe extern "C" fn no_device() -> i32 {
    NO_DEVICE
}

/// The real function of a number, or one that answers that it is missing.
pub(crate) fn address(number: usize) -> *const () {
    let known = SLOTS[number].load(Acquire);
    if !known.is_null() {
        return known;
    }
    let found = match library() {
        Some(library) => match library.symbol(NAMES[number]) {
            null if null.is_null() => not_found as *mut (),
            found => found,
        },
        None => no_device as *mut (),
    };
    SLOTS[number].store(found, Release);
    found
}

/// Whether the real driver has a function.
pub(crate) fn has(number: usize) -> bool {
    let address = address(number);
    !ptr::eq(address, not_found as *const ()) && !ptr::eq(address, no_device as *const ())
}

/// Called by trampolines whose slot is empty.
pub(crate) extern "C-unwind" fn bind(number: u32) -> *const () {
    // CAST: a number of an entry point.
    uncancelled(|| std::panic::catch_unwind(|| address(number as usize)).unwrap_or(not_found as *const ()))
}

/// Our function in place of one of the driver's, by the latter's address: this is how answers of `cuGetProcAddress` are replaced.
/// Whatever name, version and flags were asked for, the driver has chosen, and only its choice is looked at.
pub(crate) fn in_place_of(real: *const ()) -> Option<Entry> {
    static PLACES: OnceLock<HashMap<usize, Entry>> = OnceLock::new();
    let find_all = || {
        let ours = HERE.iter().enumerate().filter_map(|(number, here)| Some((number, (*here)?)));
        // CAST: addresses as keys.
        ours.filter(|(number, _)| has(*number)).map(|(number, here)| (address(number) as usize, here)).collect()
    };
    // While no lock is held, as in `library`.
    let places = PLACES.get().unwrap_or_else(|| {
        let found = find_all();
        PLACES.get_or_init(|| found)
    });
    places.get(&(real as usize)).copied()
}

/// As [`in_place_of`], where the driver answered with an address that it does not export: by the name that was asked for, and only for
/// functions that are written here. Since CUDA 3.2 those with a second ABI mean that one.
pub(crate) fn in_place_of_name(name: &CStr, version: i32, flags: u64) -> Option<Entry> {
    let name = name.to_str().ok()?;
    let twin = if flags & PER_THREAD != 0 { "_ptsz" } else { "" };
    let second = if version >= SECOND_ABI { "_v2" } else { "" };
    let written = |wanted: &str| {
        let number = NAMES.iter().position(|one| one.to_bytes() == wanted.as_bytes())?;
        HERE[number].filter(|_| is_written(number) && has(number))
    };
    [format!("{name}{second}{twin}"), format!("{name}{twin}"), format!("{name}{second}"), name.to_owned()]
        .iter()
        .find_map(|wanted| written(wanted))
}

/// The function of a name, as `cuGetProcAddress` of the driver would answer, on drivers that have no such function (before 11.3): ours,
/// or the driver's. Programs find ours in this library and rely on it.
pub(crate) fn find(name: &CStr, version: i32, flags: u64) -> Option<*const ()> {
    let text = name.to_str().ok()?;
    if text == "cuGetProcAddress" {
        const SECOND: i32 = 12000;
        let second =
            NAMES.iter().position(|one| one.to_bytes() == b"cuGetProcAddress_v2").filter(|_| version >= SECOND);
        let here = HERE[second.unwrap_or(at::cuGetProcAddress)]?;
        return Some(here as *const ());
    }
    let twins: &[&str] = if flags & PER_THREAD != 0 { &["_ptsz", ""] } else { &[""] };
    let abis: &[&str] = if version >= SECOND_ABI { &["_v3", "_v2", ""] } else { &[""] };
    let names = twins.iter().flat_map(|twin| abis.iter().map(move |abi| format!("{text}{abi}{twin}")));
    names.into_iter().find_map(|wanted| {
        if let Some(number) = NAMES.iter().position(|one| one.to_bytes() == wanted.as_bytes()) {
            let real = || HERE[number].map_or_else(|| address(number), |here| here as *const ());
            return has(number).then(real);
        }
        let symbol = library()?.symbol(&CString::new(wanted).ok()?);
        (!symbol.is_null()).then_some(symbol.cast_const())
    })
}

/// Calls the driver's function of a name: `real!(cuMemFree_v2(addr: u64))`.
macro_rules! real {
    ($name:ident($($value:expr => $type:ty),* $(,)?)) => {{
        let address = $crate::real::address($crate::forward::at::$name);
        // SAFETY: the driver's function of this name has this type in cuda.h.
        let function = unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn($($type),*) -> i32>(address) };
        // SAFETY: the program's own arguments, or ones that fit, as the caller says.
        unsafe { function($($value),*) }
    }};
}
pub(crate) use real;
