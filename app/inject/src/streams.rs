//! Streams of the program, as far as reuse of memory needs to know them.
//!
//! Memory of `cuMemAlloc` may be used on every stream at once, so a free has to be ordered before the next use *on all streams*:
//!
//! - **Work on the legacy default stream only** ([`MULTI`] is 0): the next owner's work comes later on the same stream. Nothing has to be
//!   waited for.
//! - **Work on other streams**: a block is used again when the work of all streams that was queued before the free has completed. Each
//!   stream that has had work gets an event. Libraries make streams in stock (PyTorch 32 at once), and a call of the driver for each of
//!   them would cost more than the allocation. Per-thread default streams of other threads have no handle here. An event on the legacy stream waits for them, as for every blocking stream. But later work of blocking streams
//!   also waits for that event, so that it would order them among each other: it is recorded only where the legacy stream or a
//!   per-thread one has had work, or where the blocking streams are many.
//! - **From one to the other**: before its first work on another stream, the program waits once for the device, so that blocks that
//!   were used again without an event are not used by two streams that nothing orders. Work is seen at the driver's entry points.
//! - **While work is captured into a graph**, no event is recorded, as it would become a part of the graph; freed memory waits for the end of
//!   the capture.

use crate::entries::Blocked;
use crate::guard::{Guard, uncancelled};
use crate::real::{address, real};
use crate::{record, serve, settings};
use std::collections::HashMap;
use std::panic::catch_unwind;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab_histories::calls::Counter;

/// Whether there was work on another stream than the legacy one: 0 no, 1 the first is about to be queued, 2 yes. Trampolines read it.
pub(crate) static MULTI: AtomicU8 = AtomicU8::new(0);

/// How often work was queued, roughly: trampolines raise it without a lock.
pub(crate) static QUEUED: AtomicU32 = AtomicU32::new(0);
/// The last queued work: a kernel's handle, or the number of an entry point. Trampolines write it.
pub(crate) static LAST: AtomicU64 = AtomicU64::new(0);
/// Streams that have had work, each at its [`slot`]. Trampolines call [`note`] for a stream that is not here.
pub(crate) static WORKED: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];
/// Two streams that share a slot cost a call of [`note`] whenever work goes from one to the other.
const SLOTS: usize = 256;
/// 1 once the legacy stream or a thread's default stream has had work. Trampolines write it.
pub(crate) static LEGACY_WORK: AtomicU8 = AtomicU8::new(0);

static CHANGING: Mutex<()> = Mutex::new(());
/// Streams that the program made, and others that had work.
static MADE: Mutex<Vec<Made>> = Mutex::new(Vec::new());
/// Most blocking streams that get events of their own.
const BLOCKING: usize = 8;

/// A stream of the program.
#[derive(Clone, Copy, Debug)]
struct Made {
    context: u64,
    stream: u64,
    non_blocking: bool,
    has_work: bool,
}
/// A context that may have work.
#[derive(Clone, Copy, Debug)]
struct Context {
    context: u64,
    device: i32,
    /// Whether the program made it by `cuCtxCreate`.
    own: bool,
}

static CONTEXTS: Mutex<Vec<Context>> = Mutex::new(Vec::new());

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

/// Called by trampolines before work on a stream that is not the legacy one and not in [`WORKED`]. Returns the real function.
pub(crate) extern "C-unwind" fn note(number: u32, stream: u64) -> *const () {
    uncancelled(|| {
        let noted = catch_unwind(|| {
            // Work of the allocator's own is on streams of the program that have had work.
            if let Some(_guard) = Guard::enter() {
                become_multi();
                begin_work(stream);
            }
        });
        if noted.is_err() {
            MULTI.store(2, SeqCst);
        }
        // CAST: a number of an entry point.
        catch_unwind(|| address(number as usize)).unwrap_or_else(|_| crate::real::bind(number))
    })
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

/// Where a stream is in [`WORKED`]. Trampolines compute the same.
fn slot(stream: u64) -> &'static AtomicU64 {
    // CAST: below `SLOTS`.
    &WORKED[(stream >> 6) as usize % SLOTS]
}

/// Notes that a stream has work from now on.
fn begin_work(stream: u64) {
    if stream > PER_THREAD {
        let mut made = lock(&MADE);
        match made.iter_mut().find(|one| one.stream == stream) {
            Some(known) => known.has_work = true,
            // An event of its own is right for a stream of either kind.
            None => made.push(Made { context: serve::context(), stream, non_blocking: true, has_work: true }),
        }
    }
    slot(stream).store(stream, Release);
}

/// Notes that every stream may have work from now on.
pub(crate) fn begin_work_everywhere() {
    become_multi();
    lock(&MADE).iter_mut().for_each(|stream| stream.has_work = true);
    LEGACY_WORK.store(1, Release);
}

/// Notes a context. `own`: the program made it by `cuCtxCreate`.
pub(crate) fn context_known(context: u64, device: i32, own: bool) {
    let mut known = lock(&CONTEXTS);
    if context != 0 && known.iter().all(|one| one.context != context) {
        known.push(Context { context, device, own });
    }
}

/// Notes the current context, if it is the primary one of its device; whether it is followed. One that is neither primary nor made by
/// `cuCtxCreate`, such as a green context, ends unnoticed.
pub(crate) fn follow(context: u64) -> bool {
    if lock(&CONTEXTS).iter().any(|one| one.context == context) {
        return true;
    }
    let device = serve::device();
    let primary = serve::is_primary(context, device);
    if primary {
        context_known(context, device, false);
    }
    primary
}

/// The contexts that may have work, and `current`.
pub(crate) fn contexts(current: u64) -> Vec<u64> {
    let known = lock(&CONTEXTS);
    let others = known.iter().map(|one| one.context).filter(|context| *context != current);
    std::iter::once(current).chain(others).collect()
}

/// The primary context of a device, if it is known.
pub(crate) fn primary_of(device: i32) -> Vec<u64> {
    lock(&CONTEXTS).iter().filter(|one| one.device == device && !one.own).map(|one| one.context).collect()
}

/// Notes a stream that was made.
pub(crate) fn made(context: u64, stream: u64, non_blocking: bool) {
    follow(context);
    lock(&MADE).push(Made { context, stream, non_blocking, has_work: false });
}

/// Whether a stream of the program does not wait for the legacy one.
pub(crate) fn is_non_blocking(stream: u64) -> bool {
    lock(&MADE).iter().any(|one| one.stream == stream && one.non_blocking)
}

/// Forgets a stream that is about to be destroyed.
pub(crate) fn gone(stream: u64) {
    let mut made = lock(&MADE);
    // The driver completes the work of a destroyed stream; an event on the legacy stream waits for a blocking one.
    if made.iter().any(|one| one.stream == stream && one.has_work && !one.non_blocking) {
        LEGACY_WORK.store(1, Release);
    }
    made.retain(|one| one.stream != stream);
    // The driver may give the handle to the next stream.
    let _ = slot(stream).compare_exchange(stream, 0, SeqCst, Relaxed);
}

/// Forgets the streams of a context.
pub(crate) fn context_gone(context: u64) {
    lock(&CONTEXTS).retain(|one| one.context != context);
    lock(&MADE).retain(|one| one.context != context);
    WORKED.iter().for_each(|stream| stream.store(0, Release));
}

/// The streams on which events have to be recorded so that all work of a context is ordered before them.
pub(crate) fn of_context(context: u64) -> Vec<u64> {
    let made = lock(&MADE);
    let here = || made.iter().filter(|one| one.context == context && one.has_work);
    let blocking = here().filter(|one| !one.non_blocking).count();
    let legacy = blocking > BLOCKING || here().next().is_none() || LEGACY_WORK.load(Acquire) != 0;
    let single = |one: &&Made| one.non_blocking || blocking <= BLOCKING;
    legacy.then_some(LEGACY).into_iter().chain(here().filter(single).map(|one| one.stream)).collect()
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

/// Names of kernels by handle, as the program looked them up. The driver is not asked for the name of a handle: it may be of a kernel or
/// of a function, and of a module that is gone.
static KERNELS_KNOWN: Mutex<Option<HashMap<u64, String>>> = Mutex::new(None);

/// Notes a kernel that the program looked up.
pub(crate) fn kernel(handle: u64, name: &std::ffi::CStr) {
    if record::is_on() {
        let name = name.to_string_lossy().into_owned();
        lock(&KERNELS_KNOWN).get_or_insert_default().insert(handle, name);
    }
}

/// Notes that a kernel has another handle, too.
pub(crate) fn kernel_alias(handle: u64, of: u64) {
    let mut known = lock(&KERNELS_KNOWN);
    if let Some(known) = known.as_mut()
        && let Some(name) = known.get(&of).cloned()
    {
        known.insert(handle, name);
    }
}

/// The last queued work, in words: `None` if there was none, or the program looked the kernel up in another way.
pub(crate) fn last_work() -> Option<String> {
    const KERNELS: u64 = 1 << 16;
    let last = LAST.load(Acquire);
    if last < KERNELS {
        let number = usize::try_from(last).ok().filter(|_| QUEUED.load(Relaxed) > 0)?;
        return crate::forward::NAMES.get(number).map(|name| name.to_string_lossy().into_owned());
    }
    lock(&KERNELS_KNOWN).as_ref()?.get(&last).cloned()
}

/// By device, the count of queued work after which the device was last idle.
static IDLE_AT: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];
/// The shortest wait so far: what waiting for an idle device costs. 0 before the first.
static SHORTEST: AtomicU64 = AtomicU64::new(0);

/// Waits for the current context, unless nothing was queued since the last wait. The driver's free waits as well; waiting before it
/// divides its time exactly into waiting and the driver's own work.
pub(crate) fn wait() -> Blocked {
    let device = usize::try_from(serve::device()).unwrap_or(0) % IDLE_AT.len();
    let queued = QUEUED.load(Acquire);
    if IDLE_AT[device].load(Acquire) == queued {
        return Blocked::default();
    }
    let blocked = wait_always();
    IDLE_AT[device].store(queued, Release);
    blocked
}

/// Waits for the current context. The time is that beyond a wait for an idle device.
pub(crate) fn wait_always() -> Blocked {
    let timed = || {
        let start = record::now();
        real!(cuCtxSynchronize());
        record::now().saturating_sub(start).max(1)
    };
    let took = timed();
    if SHORTEST.load(Relaxed) == 0 {
        // The device is idle now.
        SHORTEST.store(timed(), Relaxed);
    }
    let ns = took.saturating_sub(SHORTEST.fetch_min(took, Relaxed));
    let behind = if ns > 0 { record::behind() } else { 0 };
    Blocked { ns, behind }
}
