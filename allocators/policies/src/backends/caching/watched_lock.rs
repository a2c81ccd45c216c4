//! A shard's lock, for threads that share one stream.
//!
//! A call reads and writes a dozen cache lines of a shard. A lock that is passed on in the order of arrival moves them to another
//! core at each call. This one is unfair on purpose: a thread that returns soon finds it free, so that the lines stay in one core
//! for a run of calls. Waiting threads must not disturb that run: each read of the lock takes its line away from the working core.
//! So one of them, the watcher, polls the lock, and the others poll a second word.

use crate::sync::{AtomicBool, SpinGuard, UnsafeCell, restless, yield_now};
use std::fmt;
use std::hint::spin_loop;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Pauses before the watcher's first poll: about as long as a call takes.
const FIRST_PAUSES: u32 = 16;
/// Maximum of pauses between two polls of the watcher. They double up to here, so that the holder gets a run of calls.
const MOST_PAUSES: u32 = 64;
/// Polls of the watcher before it yields its time slice between any two, as the holder may not be running.
const WATCHES: u32 = 20;
/// Pauses between two polls of any other thread at the second word. Waits are long where many threads wait.
const POLL_PAUSES: u32 = 32;
/// Polls of the second word before a thread yields its time slice between any two; after the same number it polls the lock itself.
const POLLS: u32 = 16;

/// Two cache lines, as processors fetch lines in pairs.
#[repr(align(128))]
struct CachePadded<T>(T);

/// A lock for critical sections of a few dozen instructions without calls to a device.
///
/// Taking it when it is free costs one atomic exchange, and releasing it a plain store. Its two words and its value are on cache
/// lines of their own: 256 bytes in addition to the value. The order of waiting threads is not defined.
pub(super) struct WatchedLock<T> {
    taken: CachePadded<AtomicBool>,
    watched: CachePadded<AtomicBool>,
    value: CachePadded<UnsafeCell<T>>,
}

// SAFETY: the value is accessed through a guard only, and `taken` allows one guard at a time; so threads get it one after the
// other, which `T: Send` allows.
unsafe impl<T: Send> Sync for WatchedLock<T> {}
// SAFETY: the lock owns its value.
unsafe impl<T: Send> Send for WatchedLock<T> {}

impl<T> WatchedLock<T> {
    pub(super) fn new(value: T) -> Self {
        let free = || CachePadded(AtomicBool::new(false));
        Self { taken: free(), watched: free(), value: CachePadded(UnsafeCell::new(value)) }
    }

    #[inline]
    pub(super) fn lock(&self) -> SpinGuard<'_, T> {
        restless::pause();
        if self.taken.0.compare_exchange(false, true, Acquire, Relaxed).is_err() {
            self.wait();
        }
        // SAFETY: this thread has set `taken`, here or in `wait`, and guards of the value are made only here.
        unsafe { SpinGuard::holding(&self.value.0, &self.taken.0) }
    }

    /// Returns with the lock.
    #[cold]
    fn wait(&self) {
        let mut looks = 0u32;
        while !take(&self.watched.0) {
            looks = looks.wrapping_add(1);
            pause(POLL_PAUSES);
            if looks >= POLLS || cfg!(loom) {
                yield_now();
            }
            // A watcher that is not running would block all others at a free lock.
            if looks.is_multiple_of(POLLS) && take(&self.taken.0) {
                return;
            }
        }
        self.watch();
        self.watched.0.store(false, Release);
    }

    /// Returns with the lock; the caller is the watcher.
    fn watch(&self) {
        let (mut pauses, mut looks) = (FIRST_PAUSES, 0u32);
        loop {
            pause(pauses);
            if take(&self.taken.0) {
                return;
            }
            pauses = (pauses * 2).min(MOST_PAUSES);
            looks = looks.saturating_add(1);
            if looks >= WATCHES || cfg!(loom) {
                yield_now();
            }
        }
    }
}

/// Sets a word unless it is set. Reads first, as a failed exchange takes the line away from its owner, too.
fn take(word: &AtomicBool) -> bool {
    !word.load(Relaxed) && word.compare_exchange(false, true, Acquire, Relaxed).is_ok()
}

fn pause(times: u32) {
    if !cfg!(loom) {
        (0..times).for_each(|_| spin_loop());
    }
}

impl<T: fmt::Debug> fmt::Debug for WatchedLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WatchedLock").field(&*self.lock()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn no_update_is_lost_and_no_thread_waits_for_ever() {
        // More threads than cores, some of which are suspended while they hold the lock. Miri runs a thread at a time, slowly.
        let (threads, rounds) = if cfg!(miri) { (3, 20) } else { (24, 4_000u64) };
        let (done, over) = mpsc::channel();
        thread::spawn(move || {
            let lock = WatchedLock::new([0u64; 2]);
            thread::scope(|scope| {
                for thread in 0..threads {
                    let lock = &lock;
                    scope.spawn(move || {
                        for round in 0..rounds {
                            let mut value = lock.lock();
                            let before = value[0];
                            assert_eq!(before, value[1], "another thread is between the two writes");
                            value[0] = before + 1;
                            if (round + thread) % 64 == 0 {
                                thread::yield_now();
                            }
                            value[1] = before + 1;
                        }
                    });
                }
            });
            let value = *lock.lock();
            done.send(value).expect("the test should wait");
        });
        let value = over.recv_timeout(Duration::from_secs(120)).expect("each thread should get the lock and end");
        assert_eq!(value, [threads * rounds; 2]);
    }

    #[test]
    fn words_and_value_lie_on_lines_of_their_own() {
        let lock = WatchedLock::new(0u64);
        let mut at = [&raw const lock.taken as usize, &raw const lock.watched as usize, &raw const lock.value as usize];
        at.sort_unstable();
        assert!(at.windows(2).all(|pair| pair[1] - pair[0] >= 128), "{at:?}");
    }
}
