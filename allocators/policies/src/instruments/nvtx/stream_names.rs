//! Names of streams for a profiler, which the crate `nvtx` does not support.
//!
//! NVTX has no library of its own. A program has tables of function pointers; the tool, a shared object that
//! `NVTX_INJECTION64_PATH` names, fills in those that it supports when its entry point is called. Each shared object or static copy
//! of NVTX in a process does so for itself, so this one exists in addition to that of the crate. Of its tables, one function of one
//! is used here; Nsight Systems does not attach where the core tables are missing.
//!
//! Source: `nvtxDetail/nvtxTypes.h` and `nvtxInit.h` of NVTX 3, <https://github.com/NVIDIA/NVTX>.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};
use vramlab_device::StreamId;

/// `NVTX_ETID_CALLBACKS` and `NVTX_ETID_VERSIONINFO`: the tables that a tool may request.
const CALLBACKS_ID: u32 = 1;
const VERSION_ID: u32 = 3;
/// `NVTX_VERSION`.
const VERSION: u32 = 3;
/// The tables: `NVTX_CB_MODULE_CORE`, `_CUDA`, `_CUDART`, `_CORE2`, each with its `NVTX_CBID_…_SIZE`: its ids, and slot 0, which
/// stands for none.
const MODULES: [(c_int, usize); 4] = [(1, 16), (2, 9), (4, 7), (5, 16)];
/// Place of `NVTX_CB_MODULE_CUDA` among them.
const CUDA: usize = 1;
/// `NVTX_CBID_CUDA_NameCuStreamA`; ids count from 1.
const NAME_STREAM: usize = 5;
/// The largest size.
const SIZE: usize = 16;

/// `nvtxNameCuStreamA`.
type NameStream = unsafe extern "C" fn(stream: *mut c_void, name: *const c_char);
/// A tool's `InitializeInjectionNvtx2`; returns 0 when it does not support this.
type Entry = unsafe extern "C" fn(export: ExportFn) -> c_int;
type ExportFn = extern "C" fn(table: u32) -> *const c_void;

/// A slot for the address of a function; null until a tool has filled it in.
type Slot = AtomicPtr<c_void>;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    size: usize,
    functions: unsafe extern "C" fn(module: c_int, table: *mut *const *const Slot, size: *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    tool_says: extern "C" fn(version: u32),
}

/// The slots of the functions: a list that the tool walks, closed by a null.
#[repr(transparent)]
struct Table([*const Slot; SIZE + 1]);

// SAFETY: the list is never written, and its targets are atomic.
unsafe impl Sync for Table {}

static SLOTS: [[Slot; SIZE]; MODULES.len()] =
    [const { [const { AtomicPtr::new(ptr::null_mut()) }; SIZE] }; MODULES.len()];
static TABLES: [Table; MODULES.len()] = [table(0), table(1), table(2), table(3)];

const fn table(module: usize) -> Table {
    let mut list = [ptr::null(); SIZE + 1];
    let mut id = 1;
    while id < MODULES[module].1 {
        list[id] = &raw const SLOTS[module][id];
        id += 1;
    }
    Table(list)
}

static CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), functions };
static VERSION_INFO: VersionInfo =
    VersionInfo { size: size_of::<VersionInfo>(), version: VERSION, reserved: 0, tool_says };

extern "C" fn tool_says(_version: u32) {}

extern "C" fn export(table: u32) -> *const c_void {
    match table {
        CALLBACKS_ID => (&raw const CALLBACKS).cast(),
        VERSION_ID => (&raw const VERSION_INFO).cast(),
        _ => ptr::null(),
    }
}

/// Gives a tool the slots of a module's functions; returns 0 for an unknown module.
///
/// # Safety
/// Both pointers are null or may be written.
unsafe extern "C" fn functions(module: c_int, table: *mut *const *const Slot, size: *mut c_uint) -> c_int {
    let Some(place) = MODULES.iter().position(|known| known.0 == module) else { return 0 };
    if !table.is_null() {
        // SAFETY: the caller says that the pointer may be written.
        unsafe { *table = TABLES[place].0.as_ptr() };
    }
    if !size.is_null() {
        // SAFETY: as above. CAST: a handful.
        unsafe { *size = MODULES[place].1 as c_uint };
    }
    1
}

/// Has a tool fill in the table; its function for names of streams, if it has one.
///
/// # Safety
/// `entry` is the entry point of an NVTX 3 tool that stays loaded.
unsafe fn attach(entry: Entry) -> Option<NameStream> {
    // SAFETY: the caller's promise; the tables are static.
    if unsafe { entry(export) } == 0 {
        return None;
    }
    // Relaxed: the tool wrote on this thread, before its entry point returned.
    let function = SLOTS[CUDA][NAME_STREAM].load(Relaxed);
    // SAFETY: by NVTX's contract a tool puts a function of this type into this slot, or null.
    unsafe { std::mem::transmute::<*mut c_void, Option<NameStream>>(function) }
}

/// The function of the tool that is attached to this process.
pub(super) fn attached() -> Option<NameStream> {
    static FOUND: OnceLock<Option<NameStream>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let path = std::env::var_os("NVTX_INJECTION64_PATH").filter(|path| !path.is_empty())?;
        // SAFETY: the tool's own library, which the crate `nvtx` loads in the same way.
        let library = unsafe { libloading::Library::new(path) }.ok()?;
        // SAFETY: NVTX fixes the type behind this name.
        let entry = *unsafe { library.get::<Entry>(b"InitializeInjectionNvtx2\0") }.ok()?;
        // The function that it filled in is called as long as the process lives.
        std::mem::forget(library);
        // SAFETY: an entry point of NVTX, in a library that is never unloaded.
        unsafe { attach(entry) }
    })
}

/// Names a stream for the attached tool, if there is one.
///
/// # Safety
/// `stream` is a live stream of the CUDA driver.
pub(super) unsafe fn name(stream: StreamId, name: &str) {
    let (Some(function), Ok(name)) = (attached(), CString::new(name)) else { return };
    // SAFETY: the tool's function, which copies the name; the handle is CUDA's (the caller's promise).
    unsafe { function(ptr::without_provenance_mut(stream.get() as usize), name.as_ptr()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;
    use std::sync::Mutex;

    static NAMED: Mutex<Vec<(usize, String)>> = Mutex::new(Vec::new());

    unsafe extern "C" fn record(stream: *mut c_void, name: *const c_char) {
        // SAFETY: the test below passes a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned();
        NAMED.lock().unwrap().push((stream.addr(), name));
    }

    /// A tool as NVTX describes it.
    unsafe extern "C" fn tool(export: ExportFn) -> c_int {
        assert!(export(99).is_null());
        let callbacks = export(CALLBACKS_ID).cast::<Callbacks>();
        // SAFETY: this is the table that the id stands for.
        let functions = unsafe { (*callbacks).functions };
        let (mut table, mut size) = (ptr::null::<*const Slot>(), 0);
        // SAFETY: both places may be written.
        assert_eq!(unsafe { functions(3, &raw mut table, &raw mut size) }, 0);
        // As Nsight Systems does: the core tables first, and nothing more where one is missing.
        for (module, known) in [(1, 16), (5, 16), (4, 7), (2, 9)] {
            // SAFETY: as above.
            assert_eq!(unsafe { functions(module, &raw mut table, &raw mut size) }, 1);
            assert_eq!(size, known);
            // SAFETY: the list has that many places and a null.
            let list = unsafe { std::slice::from_raw_parts(table, known as usize + 1) };
            assert!(list[0].is_null() && list[known as usize].is_null());
            assert!(list[1..known as usize].iter().all(|slot| !slot.is_null()));
        }
        // SAFETY: the table of the CUDA driver, the last requested.
        let list = unsafe { std::slice::from_raw_parts(table, 9) };
        // SAFETY: the places point to slots that live as long as the program.
        unsafe { &*list[NAME_STREAM] }.store(record as *mut c_void, Relaxed);
        1
    }

    unsafe extern "C" fn unwilling(_: ExportFn) -> c_int {
        0
    }

    #[test]
    fn a_tool_hears_of_names() {
        // SAFETY: an entry point, of this test.
        assert!(unsafe { attach(unwilling) }.is_none());
        // SAFETY: as above.
        let function = unsafe { attach(tool) }.unwrap();
        // SAFETY: the tool's function.
        unsafe { function(ptr::without_provenance_mut(7), c"compute".as_ptr()) };
        assert_eq!(*NAMED.lock().unwrap(), [(7, "compute".to_owned())]);
    }

    /// Run under Nsight Systems (`nsys profile --trace=cuda,nvtx`) this shows that the real tool attaches.
    #[test]
    fn the_tool_of_this_process_is_found() {
        let there = std::env::var_os("NVTX_INJECTION64_PATH").is_some_and(|path| !path.is_empty());
        assert_eq!(attached().is_some(), there);
    }
}
