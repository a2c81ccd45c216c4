//! The result of a call of the library: a status, and a text that the thread can read.
//!
//! No panic crosses the border to C: it is a bug of this library, which is returned as [`Status::Internal`].

use std::cell::Cell;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use vramlab_device::{CudaUnavailable, DeviceNameError, DriverError};
use vramlab_histories::formats::WriteError;
use vramlab_policies::AllocError;
use vramlab_policies::backends::SelectionError;

/// The result of a call. `vramlab_error` has the text of the thread's last failure.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// Neither the allocator nor the device has the memory, or the limit does not allow it.
    OutOfMemory = 1,
    /// An argument that is never valid: a null pointer, more than 4 EiB, a text that is not UTF-8.
    Invalid = 2,
    /// There is no allocator, setting, value, device or pool of this name; the text contains the most similar name.
    Unknown = 3,
    /// That GPU does not exist, or cannot be used.
    NoDevice = 4,
    /// No live block of this allocator begins at the address: it is foreign, was freed before, or belongs to another device.
    Foreign = 5,
    /// The allocator or the device does not support this.
    Incapable = 6,
    /// A call of the driver failed.
    Driver = 7,
    /// Something is still in use.
    Live = 8,
    /// The process was forked from the one that opened the allocator.
    Forked = 9,
    /// A file could not be written.
    Io = 10,
    /// A bug of this library.
    Internal = 11,
}

impl Status {
    const NAMES: [&'static CStr; 12] = [
        c"ok",
        c"out of memory",
        c"invalid argument",
        c"unknown name",
        c"no such device",
        c"foreign address",
        c"not supported",
        c"driver error",
        c"in use",
        c"forked process",
        c"file error",
        c"internal error",
    ];

    /// The name of a status. The number may come from C, so it may be unknown.
    pub(crate) fn name(number: i32) -> &'static CStr {
        usize::try_from(number).ok().and_then(|at| Self::NAMES.get(at).copied()).unwrap_or(c"no such status")
    }
}

/// An error of a call.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }
}

/// The result of a call.
pub(crate) type Outcome<T> = Result<T, Failure>;

impl From<AllocError> for Failure {
    fn from(error: AllocError) -> Self {
        let status = match &error {
            AllocError::OutOfMemory(_) => Status::OutOfMemory,
            AllocError::InvalidRequest { .. } => Status::Invalid,
            AllocError::ForeignBlock { .. } => Status::Foreign,
            AllocError::Incapable { .. } | AllocError::Unsupported { .. } | AllocError::Overrun { .. } => {
                Status::Incapable
            }
            AllocError::File { .. } => Status::Unknown,
            AllocError::PrivatePool { .. } | AllocError::Capture { .. } | AllocError::CaptureLive { .. } => {
                Status::Live
            }
            AllocError::Driver(_) => Status::Driver,
            _ => Status::Internal,
        };
        Self::new(status, error.to_string())
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self::new(Status::Driver, error.to_string())
    }
}

impl From<SelectionError> for Failure {
    fn from(error: SelectionError) -> Self {
        let text = match error {
            SelectionError::HostMemory(name) => {
                format!("{name} allocates pinned host memory, not a GPU's; open it on a device such as host:cuda")
            }
            _ => error.to_string(),
        };
        Self::new(Status::Unknown, text)
    }
}

impl From<DeviceNameError> for Failure {
    fn from(error: DeviceNameError) -> Self {
        Self::new(Status::Unknown, error.to_string())
    }
}

impl From<CudaUnavailable> for Failure {
    fn from(error: CudaUnavailable) -> Self {
        Self::new(Status::NoDevice, error.to_string())
    }
}

impl From<WriteError> for Failure {
    fn from(error: WriteError) -> Self {
        Self::new(Status::Io, error.to_string())
    }
}

impl From<vramlab_device::output::OutputError> for Failure {
    fn from(error: vramlab_device::output::OutputError) -> Self {
        Self::new(Status::Io, error.to_string())
    }
}

/// Maximum length of a text in bytes, with the zero byte at its end.
const MOST_TEXT: usize = 4096;

thread_local! {
    /// It has nothing to drop, so that it exists as long as its thread: also in destructors of thread-specific data and in
    /// `atexit`.
    static LAST: [Cell<u8>; MOST_TEXT] = const { [const { Cell::new(0) }; MOST_TEXT] };
}

/// The thread's last failure, as C reads it; valid until the thread's next one.
pub(crate) fn last() -> *const std::ffi::c_char {
    LAST.with(|last| last.as_ptr().cast())
}

/// Notes the text of a failing call, as one line. A text that is too long is truncated between two characters.
fn note(text: &str) {
    let end = (0..MOST_TEXT).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let text = &text[..end];
    LAST.with(|last| {
        // A zero byte would end the text for C, and names of the program may contain ends of lines.
        let bytes = text.bytes().map(|byte| if byte.is_ascii_control() { b' ' } else { byte });
        last.iter().zip(bytes.chain([0])).for_each(|(at, byte)| at.set(byte));
    });
}

/// The result of a call that is returned later, because the program's callbacks run before. They may be left by `longjmp`, so there
/// is nothing to drop; the text of a failure is lost then.
pub(crate) type Attempt = ManuallyDrop<Outcome<()>>;

/// Runs the body of a function of the library.
pub(crate) fn attempt(call: impl FnOnce() -> Outcome<()>) -> Attempt {
    let outcome = catch_unwind(AssertUnwindSafe(|| needs_own_process().and_then(|()| call())));
    ManuallyDrop::new(outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Failure::new(Status::Internal, format!("a bug in libvramlab: {text}; please report it")))
    }))
}

/// Returns the result of a call.
pub(crate) fn conclude(attempt: Attempt) -> Status {
    match ManuallyDrop::into_inner(attempt) {
        Ok(()) => Status::Ok,
        Err(failure) => {
            note(&failure.text);
            failure.status
        }
    }
}

/// Runs the body of a function that calls no callback.
pub(crate) fn answer(call: impl FnOnce() -> Outcome<()>) -> Status {
    conclude(attempt(call))
}

/// Whether this process was forked from one that had opened an allocator, or was opening one.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Number of allocators that were opened or are being opened.
static OPENED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn forked() {
    if OPENED.load(Acquire) > 0 {
        FORKED.store(true, Relaxed);
    }
}

/// Opens an allocator. Children that are forked from its begin on are notified that they are forked: a GPU cannot be used in them, and
/// locks may stay locked. If it fails, children may open one themselves.
pub(crate) fn open_watching_forks(open: impl FnOnce() -> Outcome<()>) -> Outcome<()> {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    // Two threads may do so, and no child waits for one of them.
    if !WATCHED.load(Acquire) {
        // SAFETY: the function has C's calling convention, and loads and stores atomics, which is allowed after a fork. A failure leaves
        // children without the message.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        WATCHED.store(true, Release);
    }
    OPENED.fetch_add(1, AcqRel);
    open().inspect_err(|_| _ = OPENED.fetch_sub(1, AcqRel))
}

fn needs_own_process() -> Outcome<()> {
    if !FORKED.load(Relaxed) {
        return Ok(());
    }
    let text = "this process was forked from one that had opened an allocator; open it in the child alone, or start the child by \
                spawn";
    Err(Failure::new(Status::Forked, text))
}
