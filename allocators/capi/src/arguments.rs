//! What the functions of the library have in common: they read the program's pointers, write results to them, and end a call.

use crate::allocator::Allocator;
use crate::error::{Attempt, Failure, Outcome, Status, conclude};
use std::ffi::{CStr, CString, c_char};
use std::ops::Range;

pub(crate) fn missing(what: &str) -> Failure {
    Failure::new(Status::Invalid, format!("{what} is a null pointer"))
}

/// # Safety
/// See the top of `lib.rs`.
pub(crate) unsafe fn allocator<'a>(pointer: *const Allocator) -> Outcome<&'a Allocator> {
    // SAFETY: null, or open (the program's promise).
    unsafe { pointer.as_ref() }.ok_or_else(|| missing("the allocator"))
}

/// # Safety
/// See the top of `lib.rs`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Outcome<&'a str> {
    if pointer.is_null() {
        return Err(missing(what));
    }
    // SAFETY: a text that ends with a zero byte (the program's promise).
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Failure::new(Status::Invalid, format!("{what} is not UTF-8")))
}

/// Writes a result to the program's pointer.
///
/// # Safety
/// See the top of `lib.rs`.
pub(crate) unsafe fn give<T>(out: *mut T, what: &str, value: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
    if out.is_null() {
        return Err(missing(what));
    }
    let value = value()?;
    // SAFETY: not null, so it points to memory of this type (the program's promise), whatever its contents.
    unsafe { out.write(value) };
    Ok(())
}

/// Ends a call that may have changed segments or made blocks reusable: calls the program's callbacks, then returns the result.
/// `block` is memory that the call returns to the program.
///
/// # Safety
/// See the top of `lib.rs`.
pub(crate) unsafe fn conclude_and_tell(
    vramlab: *const Allocator,
    attempt: Attempt,
    block: Option<Range<u64>>,
) -> Status {
    // In a forked child locks may stay locked.
    if !matches!(&*attempt, Err(failure) if failure.status == Status::Forked)
        // SAFETY: null, or open (the program's promise).
        && let Some(allocator) = unsafe { vramlab.as_ref() }
    {
        allocator.deliver(block);
    }
    conclude(attempt)
}

/// Ends an allocation of `bytes`, whose address is written.
///
/// # Safety
/// See the top of `lib.rs`.
pub(crate) unsafe fn conclude_allocation(
    vramlab: *const Allocator,
    attempt: Attempt,
    bytes: u64,
    out: *const u64,
) -> Status {
    let served = attempt.is_ok();
    // SAFETY: the allocation succeeded, so it was written.
    let block = served.then(|| unsafe { out.read() }).map(|address| address..address.saturating_add(bytes));
    // SAFETY: as promised.
    unsafe { conclude_and_tell(vramlab, attempt, block) }
}

pub(crate) fn c_text(text: String) -> Outcome<*mut c_char> {
    let text = CString::new(text).map_err(|_| Failure::new(Status::Internal, "a text contains a zero byte"))?;
    Ok(text.into_raw())
}
