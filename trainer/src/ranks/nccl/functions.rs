//! The functions of NCCL's library, with the types of `nccl.h`.

use super::Id;
use libloading::{Error, Library};
use std::ffi::{c_char, c_int, c_void};

pub(super) const SUCCESS: c_int = 0;
/// `ncclFloat32`.
pub(super) const FLOAT32: c_int = 7;
/// `ncclSum`.
pub(super) const SUM: c_int = 0;
/// `NCCL_WIN_COLL_SYMMETRIC`: every rank registers the same offsets.
pub(super) const SYMMETRIC: c_int = 1;
/// `ncclStatGpuMemTotal`.
pub(super) const TOTAL_MEMORY: c_int = 3;

pub(super) type RawComm = *mut c_void;
type Register = unsafe extern "C" fn(RawComm, *mut c_void, usize, *mut *mut c_void) -> c_int;
type RegisterWindow = unsafe extern "C" fn(RawComm, *mut c_void, usize, *mut *mut c_void, c_int) -> c_int;
/// Ends a registration: of a communicator and a handle.
type Deregister = unsafe extern "C" fn(RawComm, *mut c_void) -> c_int;

/// The functions of the library. Those that older versions lack are absent there.
#[derive(Debug)]
pub(super) struct Functions {
    pub(super) get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) get_unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    pub(super) comm_init_rank: unsafe extern "C" fn(*mut RawComm, c_int, Id, c_int) -> c_int,
    pub(super) all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> c_int,
    pub(super) all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> c_int,
    pub(super) comm_abort: unsafe extern "C" fn(RawComm) -> c_int,
    pub(super) comm_destroy: unsafe extern "C" fn(RawComm) -> c_int,
    pub(super) get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(super) get_last_error: Option<unsafe extern "C" fn(RawComm) -> *const c_char>,
    /// Since 2.19, as is registration.
    pub(super) mem_alloc: Option<unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int>,
    pub(super) mem_free: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    pub(super) register: Option<Register>,
    pub(super) deregister: Option<Deregister>,
    /// Since 2.27.
    pub(super) register_window: Option<RegisterWindow>,
    pub(super) deregister_window: Option<Deregister>,
    /// Since 2.29.
    pub(super) memory_stats: Option<unsafe extern "C" fn(RawComm, c_int, *mut u64) -> c_int>,
}

impl Functions {
    /// Those of a loaded library.
    ///
    /// # Errors
    /// A function is missing that every version has.
    pub(super) fn of(library: &Library) -> Result<Self, Error> {
        /// # Safety
        /// The function of this name has the type `F`.
        unsafe fn function<F: Copy>(library: &Library, name: &str) -> Result<F, Error> {
            // SAFETY: the caller promises the type.
            unsafe { library.get::<F>(name) }.map(|symbol| *symbol)
        }
        // SAFETY (of each call below): the type is that of `nccl.h`.
        Ok(Self {
            // SAFETY: as above.
            get_version: unsafe { function(library, "ncclGetVersion")? },
            // SAFETY: as above.
            get_unique_id: unsafe { function(library, "ncclGetUniqueId")? },
            // SAFETY: as above.
            comm_init_rank: unsafe { function(library, "ncclCommInitRank")? },
            // SAFETY: as above.
            all_reduce: unsafe { function(library, "ncclAllReduce")? },
            // SAFETY: as above.
            all_gather: unsafe { function(library, "ncclAllGather")? },
            // SAFETY: as above.
            comm_abort: unsafe { function(library, "ncclCommAbort")? },
            // SAFETY: as above.
            comm_destroy: unsafe { function(library, "ncclCommDestroy")? },
            // SAFETY: as above.
            get_error_string: unsafe { function(library, "ncclGetErrorString")? },
            // SAFETY: as above.
            get_last_error: unsafe { function(library, "ncclGetLastError") }.ok(),
            // SAFETY: as above.
            mem_alloc: unsafe { function(library, "ncclMemAlloc") }.ok(),
            // SAFETY: as above.
            mem_free: unsafe { function(library, "ncclMemFree") }.ok(),
            // SAFETY: as above.
            register: unsafe { function(library, "ncclCommRegister") }.ok(),
            // SAFETY: as above.
            deregister: unsafe { function(library, "ncclCommDeregister") }.ok(),
            // SAFETY: as above.
            register_window: unsafe { function(library, "ncclCommWindowRegister") }.ok(),
            // SAFETY: as above.
            deregister_window: unsafe { function(library, "ncclCommWindowDeregister") }.ok(),
            // SAFETY: as above.
            memory_stats: unsafe { function(library, "ncclCommMemStats") }.ok(),
        })
    }
}
