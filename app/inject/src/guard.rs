//! Which calls are the program's, and which are made on its behalf in here.

use std::cell::Cell;
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

/// Makes a call of the program's: `here` inside a guard, `pass` where the call was made in here or the process was forked.
/// `CUDA_ERROR_UNKNOWN` after a panic, which never leaves the library.
pub(crate) fn call(pass: impl FnOnce() -> i32, here: impl FnOnce() -> i32) -> i32 {
    const UNKNOWN: i32 = 999;
    let run = || match Guard::enter() {
        None => pass(),
        Some(_guard) => here(),
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or(UNKNOWN)
}
