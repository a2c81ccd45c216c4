//! The record of this process's memory calls: a file in shared memory, which is complete however the process ends
//! ([`calls`](vramlab_histories::calls)).

mod map;

use crate::settings;
use map::Map;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};
use std::sync::{Mutex, Once, PoisonError};
use vramlab_histories::calls::{COUNT, COUNTERS, CallRecord, Counter, HEADER, WORDS, behind_line};

/// Names of what calls waited behind, with their numbers.
static BEHIND: Mutex<BTreeMap<String, u16>> = Mutex::new(BTreeMap::new());
/// Whether `BEHIND` is this process's.
static BEHIND_KNOWN: AtomicBool = AtomicBool::new(false);
/// The last queued work when its name was last looked up, and the number of that name.
static BEHIND_LAST: Mutex<(u64, u16)> = Mutex::new((u64::MAX, 0));

/// Writes lines into the notes.
pub(crate) fn note(lines: &str) {
    if let Some(map) = map() {
        map.note(lines);
    }
}

/// The number of what was queued last, for a call that waited for it; 0 if that has no name.
pub(crate) fn behind() -> u16 {
    if !is_on() {
        return 0;
    }
    let last = crate::streams::LAST.load(Acquire);
    let lock = |mutex: &'static Mutex<(u64, u16)>| mutex.try_lock().ok();
    if let Some(known) = lock(&BEHIND_LAST)
        && known.0 == last
        && BEHIND_KNOWN.load(Acquire)
    {
        return known.1;
    }
    let Some(name) = crate::streams::last_work() else { return 0 };
    let Ok(mut names) = BEHIND.try_lock() else { return 0 };
    if !BEHIND_KNOWN.swap(true, AcqRel) {
        names.clear();
    }
    let number = match names.get(&name) {
        Some(number) => *number,
        None => {
            let Ok(number) = u16::try_from(names.len() + 1) else { return 0 };
            note(&behind_line(number, &name));
            names.insert(name, number);
            number
        }
    };
    if let Some(mut known) = lock(&BEHIND_LAST) {
        *known = (last, number);
    }
    number
}

/// Forgets which kernel was queued last: its module is about to be unloaded.
pub(crate) fn forget_behind() {
    crate::streams::LAST.store(0, Release);
    *BEHIND_LAST.lock().unwrap_or_else(PoisonError::into_inner) = (u64::MAX, 0);
}

/// The file of this process, once one is open. Never unmapped.
static MAP: AtomicPtr<Map> = AtomicPtr::new(std::ptr::null_mut());
/// Whether opening was tried.
static TRIED: AtomicBool = AtomicBool::new(false);
static OPENING: Mutex<()> = Mutex::new(());

/// The time if calls are recorded, else 0: reading the clock costs as much as a small allocation.
pub(crate) fn start() -> u64 {
    if is_on() { now() } else { 0 }
}

/// Nanoseconds of the monotonic clock.
pub(crate) fn now() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

fn clock(which: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is live, and both clocks exist on every Linux.
    unsafe { libc::clock_gettime(which, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// The system's number of this thread.
fn thread() -> u32 {
    thread_local! {
        /// The number, and the process in which it was asked for.
        static NUMBER: std::cell::Cell<(u32, u32)> = const { std::cell::Cell::new((0, 0)) };
    }
    // SAFETY: takes nothing and returns a number.
    let ask = || unsafe { libc::gettid() }.unsigned_abs();
    let known = NUMBER.try_with(|number| {
        if number.get().0 == 0 || number.get().1 != process() {
            number.set((ask(), process()));
        }
        number.get().0
    });
    known.unwrap_or_else(|_| ask())
}

/// Raised in each child process.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// A number that differs from that of the process that this one was forked from.
pub(crate) fn process() -> u32 {
    PROCESS.load(Relaxed)
}

/// A child process writes a file of its own.
extern "C" fn forget() {
    // The parent's locks may be held by threads that the child does not have.
    PROCESS.fetch_add(1, Relaxed);
    crate::stacks::forget();
    BEHIND_KNOWN.store(false, Release);
    MAP.store(std::ptr::null_mut(), Release);
    TRIED.store(false, Release);
}

fn map() -> Option<&'static Map> {
    let known = MAP.load(Acquire);
    if !known.is_null() {
        // SAFETY: it came from a box that is never dropped.
        return Some(unsafe { &*known });
    }
    if TRIED.load(Acquire) {
        return None;
    }
    open()
}

#[cold]
fn open() -> Option<&'static Map> {
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if TRIED.load(Acquire) {
        // SAFETY: as in `map`.
        return unsafe { MAP.load(Acquire).as_ref() };
    }
    static FORKS: Once = Once::new();
    // SAFETY: the function only changes atomics, which is allowed in a child.
    FORKS.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(forget)) });
    let folder = settings::get().record.as_ref();
    let opened = folder.and_then(|folder| {
        let said = |error: &std::io::Error| {
            // A process that outlives `vramlab run` no longer finds the folder. That is not worth a line.
            if error.kind() != std::io::ErrorKind::NotFound {
                settings::say(&format!("calls are not recorded: {}: {error}", folder.display()));
            }
        };
        Map::make(folder).inspect_err(said).ok()
    });
    if let Some(map) = opened {
        MAP.store(Box::into_raw(Box::new(map)), Release);
    }
    TRIED.store(true, Release);
    // SAFETY: as in `map`.
    unsafe { MAP.load(Acquire).as_ref() }
}

/// Whether calls are recorded.
pub(crate) fn is_on() -> bool {
    map().is_some()
}

/// The place of a record, which orders it among the others. A free takes its place before it takes effect, an allocation afterwards:
/// so an address is free in the record before it is allocated again.
#[must_use]
pub(crate) struct Place(Option<(&'static Map, u64)>);

/// Takes the next place.
pub(crate) fn place() -> Place {
    let Some(map) = map() else { return Place(None) };
    let record = map.word(COUNT).fetch_add(1, AcqRel);
    if map.has_room(record) {
        return Place(Some((map, record)));
    }
    map.word(COUNT).fetch_sub(1, AcqRel);
    count(Counter::Dropped, 1);
    Place(None)
}

impl Place {
    /// Writes the record. The thread is filled in here.
    pub(crate) fn fill(self, record: CallRecord) {
        let Some((map, at)) = self.0 else { return };
        let words = CallRecord { thread: thread(), ..record }.words();
        let Ok(first) = usize::try_from(at) else { return };
        let first = HEADER / 8 + first * WORDS;
        for (offset, word) in words.iter().enumerate().skip(1) {
            map.word(first + offset).store(*word, Relaxed);
        }
        // A complete entry has a first word.
        map.word(first).store(words[0], Release);
    }
}

/// Raises a number of the header.
pub(crate) fn count(counter: Counter, by: u64) {
    if let Some(map) = map() {
        // CAST: the discriminant.
        map.word(COUNTERS + counter as usize).fetch_add(by, Relaxed);
    }
}

/// Counts memory that the allocator took from the driver, or gave back.
pub(crate) fn reserve(more: u64, less: u64) {
    reserve_in(Counter::Reserved, Counter::ReservedPeak, more, less);
}

/// Counts pinned memory that its allocator took from the driver, or gave back.
pub(crate) fn host_reserve(more: u64, less: u64) {
    reserve_in(Counter::HostReserved, Counter::HostReservedPeak, more, less);
}

fn reserve_in(now: Counter, peak: Counter, more: u64, less: u64) {
    let Some(map) = map() else { return };
    // CAST: discriminants.
    let (now, peak) = (now as usize, peak as usize);
    let before = map.word(COUNTERS + now).fetch_add(more.wrapping_sub(less), Relaxed);
    map.word(COUNTERS + peak).fetch_max(before.wrapping_add(more).wrapping_sub(less), Relaxed);
}

/// Counts a call of the driver that an allocator made for memory.
pub(crate) fn driver_call(start_ns: u64) {
    driver_call_in(Counter::DriverCalls, Counter::DriverNs, start_ns);
}

/// Counts a call of the driver that the allocator of pinned memory made.
pub(crate) fn host_driver_call(start_ns: u64) {
    driver_call_in(Counter::HostDriverCalls, Counter::HostDriverNs, start_ns);
}

fn driver_call_in(calls: Counter, ns: Counter, start_ns: u64) {
    let took = if is_on() { now().saturating_sub(start_ns) } else { 0 };
    count(calls, 1);
    count(ns, took);
}
