//! NCCL, loaded when a run has several GPUs: sums over the ranks' GPUs.
//!
//! The library is found by its file name, `libnccl.so.2`, which is the only one that NVIDIA's wheels have; bindings that load other
//! names do not find it. Functions and types are those of `nccl.h`, which have not changed since the version that added them.
//! <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html>

mod communicator;
mod functions;

pub(crate) use communicator::{Collective, Communicator, Registering, Registration};

use crate::error::{Result, TrainError};
use functions::{Functions, RawComm, SUCCESS};
use libloading::Library;
use std::env;
use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vramlab::DeviceAddr;

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
        let functions = Functions::of(&library).map_err(|error| one_line(&error.to_string()))?;
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

    /// Device memory of NCCL's own kind, on the GPU whose context is current: other processes and GPUs can use it. Maps memory in
    /// each call.
    ///
    /// # Errors
    /// [`TrainError::Nccl`], also where the version has no such function.
    pub(crate) fn mem_alloc(&self, bytes: u64) -> Result<DeviceAddr> {
        const CALL: &str = "ncclMemAlloc";
        let missing = |reason: &str| TrainError::Nccl { call: CALL, reason: reason.to_owned() };
        let allocate = self.functions.mem_alloc.ok_or_else(|| missing("this version has no such function"))?;
        let mut memory = std::ptr::null_mut();
        // CAST: a size in memory fits.
        // SAFETY: the pointer is to a live pointer, which the call writes; a GPU's context is current (the caller).
        let code = unsafe { allocate(&raw mut memory, bytes as usize) };
        self.check(CALL, code)?;
        // CAST: an address as a number.
        DeviceAddr::new(memory as u64).ok_or_else(|| missing("it returned no address"))
    }

    /// Frees memory.
    ///
    /// # Errors
    /// [`TrainError::Nccl`].
    ///
    /// # Safety
    /// The memory came from [`mem_alloc`](Self::mem_alloc), is freed once, and neither work nor a registration uses it any more.
    pub(crate) unsafe fn mem_free(&self, addr: DeviceAddr) -> Result<()> {
        let Some(free) = self.functions.mem_free else { return Ok(()) };
        // CAST: an address is kept as a number.
        // SAFETY: the caller promises the memory.
        let code = unsafe { free(addr.get() as *mut std::ffi::c_void) };
        self.check("ncclMemFree", code)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_void;

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
        #include <stdlib.h>
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
        int ncclAllGather(const float *from, float *to, size_t count, int type, int *comm, void *stream) {
            if (comm != state || type != 7 || stream != (void *)42) return 5;
            for (int rank = 0; rank < comm[0]; rank++) memcpy(to + rank * count, from, count * 4);
            return 0;
        }
        int ncclMemAlloc(void **memory, size_t size) { if (size > 1 << 20) return 4; *memory = malloc(size); return 0; }
        int ncclMemFree(void *memory) { free(memory); return 0; }
        static char registered[4];
        int ncclCommRegister(int *comm, void *memory, size_t size, void **handle) {
            if (size == 3) return 4;
            *handle = size == 5 ? 0 : registered; return comm == state && memory ? 0 : 5;
        }
        int ncclCommDeregister(int *comm, void *handle) { return comm == state && handle == registered ? 0 : 5; }
        int ncclCommWindowRegister(int *comm, void *memory, size_t size, void **window, int flags) {
            *window = registered + 1; return comm == state && memory && size && flags == 1 ? 0 : 5;
        }
        int ncclCommWindowDeregister(int *comm, void *window) { return comm == state && window == registered + 1 ? 0 : 5; }
        int ncclCommMemStats(int *comm, int which, unsigned long long *bytes) {
            *bytes = 1000 + which; return comm == state ? 0 : 5;
        }
        int ncclCommAbort(int *comm) { comm[2]++; return 0; }
        int ncclCommDestroy(int *comm) { comm[3]++; return 0; }
        const char *ncclGetErrorString(int code) { return code == 4 ? "invalid argument" : "invalid usage"; }
        const char *ncclGetLastError(void *comm) { return last; }
    "#;

    /// The stand-in, and the directory of its file.
    fn stand_in() -> (tempfile::TempDir, Arc<Nccl>) {
        let directory = tempfile::TempDir::new().unwrap();
        let (source, file) = (directory.path().join("nccl.c"), directory.path().join(FILE));
        std::fs::write(&source, STAND_IN).unwrap();
        let compiler =
            std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&file).arg(&source).status();
        assert!(compiler.unwrap().success());
        let nccl = Arc::new(Nccl::open(&file).unwrap());
        (directory, nccl)
    }

    #[test]
    #[ignore = "needs a C compiler"]
    fn memory_is_allocated_registered_and_counted_as_nccl_declares_it() {
        let (_directory, nccl) = stand_in();
        let communicator = Communicator::new(Arc::clone(&nccl), nccl.new_id().unwrap(), 0, 2).unwrap();
        assert_eq!(communicator.memory(), Some(1003), "the total is the fourth statistic");
        assert!(nccl.mem_alloc(2 << 20).unwrap_err().to_string().starts_with("ncclMemAlloc: invalid argument"));
        let memory = nccl.mem_alloc(4096).unwrap();
        let register = |by, bytes| {
            // SAFETY: the stand-in does not use the memory, which is freed below.
            unsafe { communicator.register(by, memory.get(), bytes) }
        };
        for by in [Registering::Buffer, Registering::Window] {
            let registration = register(by, 4096).unwrap().unwrap();
            communicator.deregister(&registration).unwrap();
        }
        assert_eq!(register(Registering::Buffer, 5).unwrap(), None, "NCCL accepted it and registered nothing");
        assert!(register(Registering::Buffer, 3).unwrap_err().to_string().starts_with("ncclCommRegister: "));
        let values = [1f32, 2.0];
        let mut gathered = [0f32; 4];
        // CAST: pointers as the numbers of their addresses.
        let places = (values.as_ptr() as u64, gathered.as_mut_ptr() as u64);
        // SAFETY: the stand-in takes this number for a stream; there is room for the values of two ranks.
        unsafe { communicator.collect(Collective::AllGather, places, 2, 42 as *mut c_void) }.unwrap();
        assert_eq!(gathered, [1.0, 2.0, 1.0, 2.0]);
        // SAFETY: allocated above and freed once.
        unsafe { nccl.mem_free(memory) }.unwrap();
    }

    #[test]
    #[ignore = "needs a C compiler"]
    fn functions_are_called_as_nccl_declares_them() {
        let (directory, nccl) = stand_in();
        let file = directory.path().join(FILE);
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
