//! Which calls are the program's, and which are made on its behalf in here.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, calls of this thread pass to the driver.
#[must_use]
pub(crate) struct Guard(());

impl Guard {
    /// `None`: this thread's call is made in here.
    pub(crate) fn enter() -> Option<Self> {
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

/// Makes a call of the program's: `here` inside a guard, `pass` where the call was made in here. `CUDA_ERROR_UNKNOWN` after a panic,
/// which never leaves the library.
pub(crate) fn call(pass: impl FnOnce() -> i32, here: impl FnOnce() -> i32) -> i32 {
    const UNKNOWN: i32 = 999;
    let run = || match Guard::enter() {
        None => pass(),
        Some(_guard) => here(),
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or(UNKNOWN)
}
