//! NCCL, loaded when a run has several GPUs: sums over the ranks' GPUs.
//!
//! The library is found by its file name, `libnccl.so.2`, which is the only one that NVIDIA's wheels have; bindings that load other
//! names do not find it. Functions and types are those of `nccl.h`, which have not changed since NCCL 2.7.
//! <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html>

use crate::error::{Result, TrainError};
use libloading::Library;
use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Names a library or its directory instead of the search.
const VARIABLE: &str = "VRAMLAB_NCCL";
const FILE: &str = "libnccl.so.2";
const ID_BYTES: usize = 128;

/// `ncclUniqueId`: how the ranks of a communicator find each other.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Id([c_char; ID_BYTES]);

impl Id {
    /// Its bytes, for the other ranks.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        // CAST: a byte, whatever sign C gives it.
        self.0.iter().map(|byte| *byte as u8).collect()
    }

    /// The id with these bytes; `None` if they are not as many as an id has.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ID_BYTES] = bytes.try_into().ok()?;
        // CAST: as above.
        Some(Self(bytes.map(|byte| byte as c_char)))
    }
}

const SUCCESS: c_int = 0;
/// `ncclFloat32`.
const FLOAT32: c_int = 7;
/// `ncclSum`.
const SUM: c_int = 0;

type RawComm = *mut c_void;

/// The functions of the library.
#[derive(Debug)]
struct Functions {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    comm_init_rank: unsafe extern "C" fn(*mut RawComm, c_int, Id, c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> c_int,
    comm_abort: unsafe extern "C" fn(RawComm) -> c_int,
    comm_destroy: unsafe extern "C" fn(RawComm) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_last_error: Option<unsafe extern "C" fn(RawComm) -> *const c_char>,
}

/// The loaded library. It is never unloaded, because threads of its own may be in it.
#[derive(Debug)]
pub(crate) struct Nccl {
    functions: Functions,
    /// The file.
    pub(crate) path: String,
    /// Its version, such as `2.28.9`.
    pub(crate) version: String,
}

/// Places to look for the library, in order.
fn candidates() -> Vec<PathBuf> {
    if let Some(given) = env::var_os(VARIABLE).filter(|given| !given.is_empty()) {
        let given = PathBuf::from(given);
        return vec![if given.is_dir() { given.join(FILE) } else { given }];
    }
    // A name without a directory is searched for by the loader: LD_LIBRARY_PATH, then the system's directories.
    let mut out = vec![PathBuf::from(FILE)];
    for root in python_roots() {
        let Ok(versions) = std::fs::read_dir(root.join("lib")) else { continue };
        for version in versions.flatten().map(|entry| entry.path()) {
            let is_python = version.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"));
            for packages in ["site-packages", "dist-packages"] {
                let file = version.join(packages).join("nvidia/nccl/lib").join(FILE);
                if is_python && file.is_file() {
                    out.push(file);
                }
            }
        }
    }
    out
}

/// The prefixes of the Pythons that a shell here would start: of the active environment, and of `python3` on the search path.
fn python_roots() -> Vec<PathBuf> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let paths = env::var_os("PATH").unwrap_or_default();
    let programs: Vec<PathBuf> =
        env::split_paths(&paths).map(|path| path.join("python3")).filter(|path| path.exists()).collect();
    // A link such as /usr/bin/python3 leads to another prefix than the one that its environment has; both count.
    let resolved = programs.iter().filter_map(|program| program.canonicalize().ok());
    let programs = programs.iter().cloned().chain(resolved.collect::<Vec<_>>());
    let prefixes = programs.filter_map(|program| program.parent().and_then(Path::parent).map(Path::to_owned));
    let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".local"));
    let mut out: Vec<PathBuf> = Vec::new();
    for root in active.chain(prefixes).chain(home).chain(["/usr/local".into(), "/usr".into()]) {
        if !out.contains(&root) {
            out.push(root);
        }
    }
    out
}

impl Nccl {
    /// Finds and loads the library.
    ///
    /// # Errors
    /// [`TrainError::Input`] that says where it was looked for.
    pub(crate) fn load() -> Result<Arc<Self>> {
        let is_given = env::var_os(VARIABLE).is_some_and(|given| !given.is_empty());
        Self::load_one_of(candidates(), is_given)
    }

    /// Loads the first of these files that is the library. `is_given` if the user named it.
    fn load_one_of(candidates: Vec<PathBuf>, is_given: bool) -> Result<Arc<Self>> {
        let mut failed = Vec::new();
        for path in candidates {
            match Self::open(&path) {
                Ok(nccl) => return Ok(Arc::new(nccl)),
                Err(error) => failed.push(format!("{}: {error}", path.display())),
            }
        }
        let searched = if is_given {
            format!("{VARIABLE} cannot be used")
        } else {
            format!(
                "no {FILE} among the system's libraries, in LD_LIBRARY_PATH, and in nvidia/nccl/lib of the packages of each python3 \
                 on PATH"
            )
        };
        Err(TrainError::Input(format!(
            "several GPUs need NCCL: {searched} ({}); install it (`pip install nvidia-nccl-cu13`), or set {VARIABLE} to \
             the file",
            failed.join("; ")
        )))
    }

    fn open(path: &Path) -> std::result::Result<Self, String> {
        // SAFETY: the initialisers of NVIDIA's library have no conditions.
        let library = unsafe { Library::new(path) }.map_err(|error| one_line(&error.to_string()))?;
        let functions = functions(&library).map_err(|error| one_line(&error.to_string()))?;
        std::mem::forget(library);
        let mut version = 0;
        // SAFETY: the function of this name takes a pointer to an int, which is live.
        if unsafe { (functions.get_version)(&raw mut version) } != SUCCESS {
            return Err("it does not tell its version".to_owned());
        }
        let version = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
        Ok(Self { functions, path: path.display().to_string(), version })
    }

    /// A new id, for one communicator.
    ///
    /// # Errors
    /// [`TrainError::Nccl`].
    pub(crate) fn new_id(&self) -> Result<Id> {
        let mut id = Id([0; ID_BYTES]);
        // SAFETY: the pointer is to an id, which is live.
        let code = unsafe { (self.functions.get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes any code; the text is a constant of the library.
        let text = unsafe { text((self.functions.get_error_string)(code)) };
        // SAFETY: a null communicator stands for the whole process; the text lives until the next error of this thread.
        let last = self.functions.get_last_error.map(|last| unsafe { text_of_last(last) }).unwrap_or_default();
        let reason = if last.is_empty() { text } else { format!("{text}: {last}") };
        Err(TrainError::Nccl { call, reason: one_line(&reason) })
    }
}

/// # Safety
/// The function is `ncclGetLastError`.
unsafe fn text_of_last(last: unsafe extern "C" fn(RawComm) -> *const c_char) -> String {
    // SAFETY: the caller promises which function it is; it takes a null communicator.
    let message = unsafe { last(std::ptr::null_mut()) };
    // SAFETY: its result is null or a text that lives until the next error of this thread.
    unsafe { text(message) }
}

/// # Safety
/// The pointer is null or of a text that ends in a zero and is live.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller promises the text.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn functions(library: &Library) -> std::result::Result<Functions, libloading::Error> {
    /// # Safety
    /// The function of this name has the type `F`.
    unsafe fn function<F: Copy>(library: &Library, name: &str) -> std::result::Result<F, libloading::Error> {
        // SAFETY: the caller promises the type.
        unsafe { library.get::<F>(name) }.map(|symbol| *symbol)
    }
    // SAFETY (of each call below): the type is that of `nccl.h`.
    Ok(Functions {
        // SAFETY: as above.
        get_version: unsafe { function(library, "ncclGetVersion")? },
        // SAFETY: as above.
        get_unique_id: unsafe { function(library, "ncclGetUniqueId")? },
        // SAFETY: as above.
        comm_init_rank: unsafe { function(library, "ncclCommInitRank")? },
        // SAFETY: as above.
        all_reduce: unsafe { function(library, "ncclAllReduce")? },
        // SAFETY: as above.
        comm_abort: unsafe { function(library, "ncclCommAbort")? },
        // SAFETY: as above.
        comm_destroy: unsafe { function(library, "ncclCommDestroy")? },
        // SAFETY: as above.
        get_error_string: unsafe { function(library, "ncclGetErrorString")? },
        // SAFETY: as above.
        get_last_error: unsafe { function(library, "ncclGetLastError") }.ok(),
    })
}

/// A communicator's handle, as a number.
#[derive(Debug, PartialEq, Eq)]
enum Handle {
    Live(usize),
    Aborted,
}

/// A communicator: one rank of those that sum together.
#[derive(Debug)]
pub(crate) struct Communicator {
    nccl: Arc<Nccl>,
    /// Held for each call, so that an abort never frees what a call uses.
    handle: Mutex<Handle>,
}

impl Communicator {
    /// Joins the communicator with this id on the GPU whose context is current. Returns when all ranks have joined.
    ///
    /// # Errors
    /// [`TrainError::Nccl`].
    pub(crate) fn new(nccl: Arc<Nccl>, id: Id, rank: u32, size: u32) -> Result<Self> {
        let mut raw: RawComm = std::ptr::null_mut();
        // CAST: fewer than 2^31 ranks, each of which is a process.
        let (rank, size) = (rank as c_int, size as c_int);
        // SAFETY: the pointer is to a handle of the type that the call writes; a GPU's context is current.
        let code = unsafe { (nccl.functions.comm_init_rank)(&raw mut raw, size, id, rank) };
        nccl.check("ncclCommInitRank", code)?;
        // CAST: a handle is kept as its value, because NCCL may be called from any thread.
        Ok(Self { nccl, handle: Mutex::new(Handle::Live(raw as usize)) })
    }

    /// Queues the sum over all ranks of `values` f32 at `addr`, in place.
    ///
    /// # Errors
    /// [`TrainError::Nccl`], also after an [abort](Self::abort).
    ///
    /// # Safety
    /// The memory is valid for the values until the stream, a live one of the communicator's GPU, has passed the call.
    pub(crate) unsafe fn all_reduce(&self, addr: u64, values: u64, stream: *mut c_void) -> Result<()> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let Handle::Live(raw) = *handle else {
            return Err(TrainError::Nccl { call: "ncclAllReduce", reason: "another rank failed".to_owned() });
        };
        // CAST: addresses and handles are kept as numbers; a size in memory fits.
        let (memory, count, raw) = (addr as *mut c_void, values as usize, raw as RawComm);
        // SAFETY: the handle is live while the lock is held; the caller promises memory and stream.
        let code = unsafe { (self.nccl.functions.all_reduce)(memory, memory, count, FLOAT32, SUM, raw, stream) };
        self.nccl.check("ncclAllReduce", code)
    }

    /// Ends the kernels that wait for other ranks. Does nothing while a call is under way: it may be that call which waits.
    pub(crate) fn abort(&self) {
        let Ok(mut handle) = self.handle.try_lock() else { return };
        if let Handle::Live(raw) = std::mem::replace(&mut *handle, Handle::Aborted) {
            // SAFETY: the handle was live, and no later call uses it. An error leaves the end to the process.
            let _ = unsafe { (self.nccl.functions.comm_abort)(raw as RawComm) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Handle::Live(raw) = *handle {
            // SAFETY: the handle is live and is used no more. An error leaves the rest to the process.
            let _ = unsafe { (self.nccl.functions.comm_destroy)(raw as RawComm) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_travels_as_bytes() {
        let bytes: Vec<u8> = (0..=255).step_by(2).collect();
        assert_eq!(Id::from_bytes(&bytes).map(|id| id.bytes()), Some(bytes.clone()));
        assert!(Id::from_bytes(&bytes[1..]).is_none());
    }

    #[test]
    fn a_file_that_is_not_nccl_is_refused_in_one_line() {
        let directory = tempfile::TempDir::new().unwrap();
        let text = directory.path().join(FILE);
        std::fs::write(&text, "no library").unwrap();
        // A library of every Linux system has other functions.
        for path in [directory.path().join("missing"), text, "libc.so.6".into()] {
            let error = Nccl::open(&path).unwrap_err();
            assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_missing_library_is_one_line_that_says_where_it_was_looked_for() {
        let line = |is_given| {
            let error = Nccl::load_one_of(vec!["/nonexistent/libnccl.so.2".into()], is_given).unwrap_err();
            assert_eq!(error.exit_code(), terminal::exit::BAD_INPUT);
            error.to_string()
        };
        for (is_given, words) in [(true, "VRAMLAB_NCCL cannot be used"), (false, "in LD_LIBRARY_PATH")] {
            let line = line(is_given);
            assert!(line.contains(words) && line.contains("/nonexistent/libnccl.so.2: "), "{line}");
            assert!(line.contains("pip install nvidia-nccl-cu13") && !line.contains('\n'), "{line}");
        }
    }

    /// Functions of NCCL's types whose results tell what they were called with.
    const STAND_IN: &str = r#"
        #include <stddef.h>
        #include <string.h>
        typedef struct { char internal[128]; } Id;
        static int state[4];
        static const char *last = "";
        int ncclGetVersion(int *version) { *version = 22809; return 0; }
        int ncclGetUniqueId(Id *id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 2); return 0; }
        int ncclCommInitRank(void **comm, int size, Id id, int rank) {
            for (int i = 0; i < 128; i++) if (id.internal[i] != (char)(i * 2)) { last = "another\n  id"; return 4; }
            state[0] = size; state[1] = rank; *comm = state; return 0;
        }
        int ncclAllReduce(const float *from, float *to, size_t count, int type, int op, int *comm, void *stream) {
            if (comm != state || type != 7 || op != 0 || stream != (void *)42) return 5;
            for (size_t i = 0; i < count; i++) to[i] = from[i] * comm[0] + comm[1];
            return 0;
        }
        int ncclCommAbort(int *comm) { comm[2]++; return 0; }
        int ncclCommDestroy(int *comm) { comm[3]++; return 0; }
        const char *ncclGetErrorString(int code) { return code == 4 ? "invalid argument" : "invalid usage"; }
        const char *ncclGetLastError(void *comm) { return last; }
    "#;

    #[test]
    #[ignore = "needs a C compiler"]
    fn functions_are_called_as_nccl_declares_them() {
        let directory = tempfile::TempDir::new().unwrap();
        let (source, file) = (directory.path().join("nccl.c"), directory.path().join(FILE));
        std::fs::write(&source, STAND_IN).unwrap();
        let compiler =
            std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&file).arg(&source).status();
        assert!(compiler.unwrap().success());
        let nccl = Arc::new(Nccl::open(&file).unwrap());
        assert_eq!((nccl.version.as_str(), nccl.path.as_str()), ("2.28.9", file.to_str().unwrap()));
        let id = nccl.new_id().unwrap();
        let other = Id::from_bytes(&[7; ID_BYTES]).unwrap();
        let error = Communicator::new(Arc::clone(&nccl), other, 0, 2).unwrap_err().to_string();
        assert_eq!(error, "ncclCommInitRank: invalid argument: another id; NCCL_DEBUG=WARN prints more");
        let communicator = Communicator::new(Arc::clone(&nccl), id, 1, 3).unwrap();
        let mut values = [1f32, 2.0, 3.0, 4.0];
        // CAST: a pointer as the number of its address.
        let addr = values.as_mut_ptr() as u64;
        // SAFETY: the stand-in takes any number for a stream, and three of the values.
        let sum = |stream: usize| unsafe { communicator.all_reduce(addr, 3, stream as *mut c_void) };
        sum(42).unwrap();
        assert!(sum(41).unwrap_err().to_string().contains("ncclAllReduce: invalid usage"));
        assert_eq!(values, [4.0, 7.0, 10.0, 4.0]);
        communicator.abort();
        communicator.abort();
        // SAFETY: as above; the communicator is aborted, so that nothing is called.
        assert!(unsafe { communicator.all_reduce(addr, 3, 42 as *mut c_void) }.is_err());
    }
}
