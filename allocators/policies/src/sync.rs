//! The lock by which threads share a shard, for a few dozen instructions. Under `--cfg loom` the same code runs on loom's
//! primitives, so that its models check the released code.

#[cfg(loom)]
mod primitives {
    pub(crate) use loom::cell::{MutPtr, UnsafeCell};
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use loom::thread::{ThreadId, yield_now};

    /// The calling thread.
    pub(crate) fn this_thread() -> ThreadId {
        loom::thread::current().id()
    }
}

#[cfg(not(loom))]
mod primitives {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
    pub(crate) use std::sync::{Mutex, MutexGuard};
    pub(crate) use std::thread::yield_now;

    /// The number of a thread, unique in the process.
    pub(crate) type ThreadId = u64;

    /// The calling thread. Unlike `std::thread::current` it works until the thread has ended.
    pub(crate) fn this_thread() -> ThreadId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        std::thread_local!(static OWN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });
        if OWN.get() == 0 {
            // Relaxed: only uniqueness matters.
            OWN.set(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        }
        OWN.get()
    }

    /// `std::cell::UnsafeCell` under loom's interface.
    #[derive(Debug, Default)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        #[inline(always)]
        pub(crate) fn get_mut(&self) -> MutPtr<T> {
            MutPtr(self.0.get())
        }
    }

    /// A pointer for writing.
    #[derive(Debug)]
    pub(crate) struct MutPtr<T>(*mut T);

    impl<T> MutPtr<T> {
        /// # Safety
        /// No other code uses the value while the reference lives.
        #[expect(clippy::mut_from_ref, reason = "loom's interface")]
        #[inline(always)]
        pub(crate) unsafe fn deref(&self) -> &mut T {
            // SAFETY: the caller promises exclusive use, and the pointer is that of a live cell.
            unsafe { &mut *self.0 }
        }

        /// The bare pointer, for uses that are not exclusive.
        #[inline(always)]
        pub(crate) fn with<R>(&self, use_it: impl FnOnce(*mut T) -> R) -> R {
            use_it(self.0)
        }
    }
}

use primitives::MutPtr;
pub(crate) use primitives::{
    AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, ThreadId, UnsafeCell, this_thread, yield_now,
};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Locks a mutex. A value that a panicking thread left is used as it is: every holder restores the invariants before it calls
/// anything that can panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    restless::pause();
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads of stress tests yield their time slice at some of the locks that they take, so that more orders of events between two
/// locks occur. On a machine with two cores such orders are rare. Builds without debug assertions have none of this, nor do builds
/// under loom, which tries every order itself.
pub mod restless {
    #[cfg(all(debug_assertions, not(loom)))]
    thread_local!(static STATE: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });

    /// From now on this thread pauses at one lock of sixteen, chosen by the seed.
    #[inline]
    pub fn begin(seed: u64) {
        #[cfg(all(debug_assertions, not(loom)))]
        STATE.set(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        #[cfg(not(all(debug_assertions, not(loom))))]
        let _ = seed;
    }

    #[inline(always)]
    pub(crate) fn pause() {
        // A thread that ends may lock after its variables are gone.
        #[cfg(all(debug_assertions, not(loom)))]
        let _ = STATE.try_with(|state| {
            let mut word = state.get();
            if word != 0 {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                state.set(word);
                if word >> 60 == 0 {
                    super::yield_now();
                }
            }
        });
    }
}

/// A lock for critical sections of a few dozen instructions without calls to a device.
///
/// Taking it when it is free costs one atomic exchange, and releasing it a plain store, where a [`std::sync::Mutex`] needs a second
/// exchange to see whether a thread sleeps. A thread that finds it taken spins shortly and then yields its time slice.
pub(crate) struct SpinLock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed through a guard only, and `taken` allows one guard at a time; so threads get it one after the
// other, which `T: Send` allows.
unsafe impl<T: Send> Sync for SpinLock<T> {}
// SAFETY: the lock owns its value.
unsafe impl<T: Send> Send for SpinLock<T> {}

/// Number of tries before yielding the time slice.
const SPINS: u32 = 64;

impl<T> SpinLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> SpinGuard<'_, T> {
        restless::pause();
        if self.taken.compare_exchange(false, true, Acquire, Relaxed).is_err() {
            self.wait();
        }
        SpinGuard { value: self.value.get_mut(), taken: &self.taken }
    }

    #[cold]
    fn wait(&self) {
        let mut looks = 0;
        loop {
            if !self.taken.load(Relaxed) && self.taken.compare_exchange(false, true, Acquire, Relaxed).is_ok() {
                return;
            }
            looks += 1;
            if looks < SPINS && !cfg!(loom) {
                std::hint::spin_loop();
            } else {
                yield_now();
            }
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for SpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SpinLock").field(&*self.lock()).finish()
    }
}

/// The value while the lock is held.
pub(crate) struct SpinGuard<'a, T> {
    value: MutPtr<T>,
    taken: &'a AtomicBool,
}

impl<'a, T> SpinGuard<'a, T> {
    /// The guard of a lock that stores its word and its value separately. It clears `taken` when dropped.
    ///
    /// # Safety
    /// The caller has changed `taken` from false to true, and uses of `value` are by guards with this `taken` only.
    #[inline(always)]
    pub(crate) unsafe fn holding(value: &'a UnsafeCell<T>, taken: &'a AtomicBool) -> Self {
        Self { value: value.get_mut(), taken }
    }
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so `taken` is ours, and no other guard has the value. The reference is shared, as others from
        // this guard may still live.
        self.value.with(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed exclusively.
        unsafe { self.value.deref() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.taken.store(false, Release);
    }
}
