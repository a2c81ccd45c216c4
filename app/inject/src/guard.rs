//! Which calls are the program's, and which are made on its behalf in here.

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this process was forked from one in which CUDA had started. CUDA does not work in it, and locks may be held for ever by
/// threads that it does not have.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn forked() {
    FORKED.store(true, Relaxed);
}

/// CUDA has started in this process: calls of its children pass to the driver, which refuses them.
pub(crate) fn watch_forks() {
    static ONCE: Once = Once::new();
    // SAFETY: the function only stores into an atomic, which is allowed in a child.
    ONCE.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(forked)) });
}

/// While it lives, calls of this thread pass to the driver.
#[must_use]
pub(crate) struct Guard(());

impl Guard {
    /// `None`: this thread's call is made in here, or the process was forked.
    pub(crate) fn enter() -> Option<Self> {
        if FORKED.load(Relaxed) {
            return None;
        }
        // A thread that ends has no such variable any more: its calls pass.
        let inside = INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true);
        // Made only where it is returned: one that is dropped ends the state.
        if inside { None } else { Some(Self(())) }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }
}

const UNCANCELLABLE: c_int = 1;

unsafe extern "C-unwind" {
    /// Of POSIX. An asynchronous cancellation that waited takes place inside of the call that allows it.
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Makes calls during which the thread is not cancelled (`pthread_cancel`): locks of the library and of the driver would stay locked, and
/// Rust ends the process where the C library unwinds through `catch_unwind`. A cancellation waits for the next point after the calls.
#[inline(always)]
pub(crate) fn uncancelled<T: Copy>(calls: impl FnOnce() -> T) -> T {
    /// A function of its own, so that its callers have nothing to clean up: the C library could not end a thread through those that have.
    #[inline(never)]
    fn apart<T>(calls: impl FnOnce() -> T) -> T {
        calls()
    }
    let mut before = UNCANCELLABLE;
    // SAFETY: the integer is this function's own and live.
    unsafe { pthread_setcancelstate(UNCANCELLABLE, &raw mut before) };
    let out = apart(calls);
    if before != UNCANCELLABLE {
        // SAFETY: null asks for no earlier state. If the thread ends in here, frames of entry points end with it, where nothing is
        // to be dropped: they are "C-unwind" for that.
        unsafe { pthread_setcancelstate(before, std::ptr::null_mut()) };
    }
    out
}

/// Makes a call of the program's: `here` inside a guard, `pass` where the call was made in here or the process was forked.
/// `CUDA_ERROR_UNKNOWN` after a panic, which never leaves the library.
#[inline(always)]
pub(crate) fn call(pass: impl FnOnce() -> i32, here: impl FnOnce() -> i32) -> i32 {
    const UNKNOWN: i32 = 999;
    let run = || match Guard::enter() {
        None => pass(),
        Some(_guard) => here(),
    };
    uncancelled(|| catch_unwind(AssertUnwindSafe(run)).unwrap_or(UNKNOWN))
}
