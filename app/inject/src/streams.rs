//! Streams of the program, as far as reuse of memory needs to know them.
//!
//! Memory of `cuMemAlloc` may be used on every stream at once, so a free has to be ordered before the next use *on all streams*:
//!
//! - **Work on the legacy default stream only** ([`MULTI`] is 0): the next owner's work comes later on the same stream. Nothing has to be
//!   waited for.
//! - **Work on other streams**: a block is used again when the work of all streams that was queued before the free has completed. An
//!   event on the legacy stream waits for every blocking stream of the context, per-thread default streams included, also those of
//!   other threads; each non-blocking stream gets an event of its own. Streams cannot be missed: this library sees each non-blocking
//!   stream being made.
//! - **From one to the other**: before its first work on another stream, the program waits once for the device, so that blocks that
//!   were used again without an event are not used by two streams that nothing orders. Work is seen at the driver's entry points.
//! - **While work is captured into a graph**, no event is recorded, as it would become a part of the graph; freed memory waits for the end of
//!   the capture.

use crate::guard::Guard;
use crate::real::address;
use crate::{record, serve, settings};
use std::panic::catch_unwind;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU8, AtomicUsize};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab_histories::calls::Counter;

/// Whether there was work on another stream than the legacy one: 0 no, 1 the first is about to be queued, 2 yes. Trampolines read it.
pub(crate) static MULTI: AtomicU8 = AtomicU8::new(0);

static CHANGING: Mutex<()> = Mutex::new(());
/// Non-blocking streams, with their contexts.
static NON_BLOCKING: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
/// Streams that are captured, as the program named them, with the thread for per-thread streams.
static CAPTURED: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// The legacy default stream as a handle.
pub(crate) const LEGACY: u64 = 1;
/// The calling thread's default stream as a handle.
pub(crate) const PER_THREAD: u64 = 2;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called by trampolines before work on another stream than the legacy one, until [`MULTI`] is 2. Returns the real function.
pub(crate) extern "C" fn note(number: u32) -> *const () {
    let noted = catch_unwind(|| {
        // Work of the allocator's own is on streams of the program that have had work.
        if let Some(_guard) = Guard::enter() {
            become_multi();
        }
    });
    if noted.is_err() {
        MULTI.store(2, SeqCst);
    }
    // CAST: a number of an entry point.
    catch_unwind(|| address(number as usize)).unwrap_or_else(|_| crate::real::bind(number))
}

/// Lets reuse of memory be ordered by events from now on. A [guard](Guard) is held.
pub(crate) fn become_multi() {
    if is_multi() {
        return;
    }
    let _changing = lock(&CHANGING);
    if is_multi() {
        return;
    }
    // Frees from here on record events.
    MULTI.store(1, SeqCst);
    if settings::get().alloc.is_some() && !is_capturing() {
        serve::synchronize_all();
        record::count(Counter::Streams, 1);
    }
    MULTI.store(2, SeqCst);
}

/// Whether all work is over, or all on the legacy stream.
pub(crate) fn is_single() -> bool {
    MULTI.load(SeqCst) == 0
}

fn is_multi() -> bool {
    MULTI.load(Acquire) == 2
}

/// Notes a stream that was made.
pub(crate) fn made(context: u64, stream: u64, non_blocking: bool) {
    if non_blocking {
        lock(&NON_BLOCKING).push((context, stream));
    }
}

/// Forgets a stream that is about to be destroyed.
pub(crate) fn gone(stream: u64) {
    lock(&NON_BLOCKING).retain(|(_, one)| *one != stream);
}

/// Forgets the streams of a context.
pub(crate) fn context_gone(context: u64) {
    lock(&NON_BLOCKING).retain(|(of, _)| *of != context);
}

/// The streams on which events have to be recorded so that all work of a context is ordered before them.
pub(crate) fn of_context(context: u64) -> Vec<u64> {
    let streams = lock(&NON_BLOCKING);
    [LEGACY].into_iter().chain(streams.iter().filter(|(of, _)| *of == context).map(|(_, stream)| *stream)).collect()
}

/// Whether work is being captured anywhere.
pub(crate) fn is_capturing() -> bool {
    CAPTURES.load(Acquire) > 0
}

fn key(stream: u64) -> (u64, u64) {
    // SAFETY: takes nothing and returns a number.
    let thread = if stream == PER_THREAD { unsafe { libc::pthread_self() } } else { 0 };
    // CAST: its value is all that counts.
    (stream, thread as u64)
}

/// Notes that the capture of a stream has begun.
pub(crate) fn capture_begun(stream: u64) {
    lock(&CAPTURED).push(key(stream));
    CAPTURES.fetch_add(1, Release);
}

/// Notes that the capture of a stream has ended, if it was known.
pub(crate) fn capture_ended(stream: u64) {
    let key = key(stream);
    let mut captured = lock(&CAPTURED);
    if let Some(at) = captured.iter().position(|one| *one == key) {
        captured.swap_remove(at);
        CAPTURES.fetch_sub(1, Relaxed);
    }
}
