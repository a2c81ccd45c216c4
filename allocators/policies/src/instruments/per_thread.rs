//! A value for each thread, which that thread enters without a locked instruction.
//!
//! The owner marks its slot busy with a plain store and looks whether a collector is at work; a collector says so and then
//! has every running thread of the process pass a memory barrier (`membarrier`, Linux 4.14), after which each owner has
//! either seen the collector or is seen to be busy. So the rare side pays for the ordering that the hot side would
//! need. Where the system has no such call the owner takes the barrier itself. (An asymmetric Dekker lock; compare
//! `folly/synchronization/AsymmetricThreadFence.h`.)

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, compiler_fence, fence};
use std::sync::{Mutex, PoisonError};
use std::{fmt, thread};
use thread_local::ThreadLocal;

/// One thread's value, on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Slot<T> {
    busy: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is touched only by the owner while `busy` is set, or by a collector that has seen it unset after it
// announced itself; `PerThread` sees to both, and orders one after the other by `busy` and `attention`.
unsafe impl<T: Send> Sync for Slot<T> {}

/// See the [module](self).
pub(super) struct PerThread<T: Send> {
    slots: ThreadLocal<Slot<T>>,
    /// What an owner has to heed: [`COLLECTING`], [`OWN_BARRIER`].
    attention: AtomicU8,
    collectors: Mutex<()>,
}

/// A collector is at work: owners wait.
const COLLECTING: u8 = 1;
/// Collectors cannot make other threads pass a barrier: owners do so themselves.
const OWN_BARRIER: u8 = 2;

impl<T: Send> fmt::Debug for PerThread<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerThread").field("attention", &self.attention).finish_non_exhaustive()
    }
}

impl<T: Send + Default> PerThread<T> {
    /// No values yet; each is made when its thread first enters.
    pub(super) fn new() -> Self {
        let attention = AtomicU8::new(if barrier::register() { 0 } else { OWN_BARRIER });
        Self { slots: ThreadLocal::new(), attention, collectors: Mutex::default() }
    }

    /// This thread's value, until the guard is dropped. Collectors wait for that.
    ///
    /// # Panics
    /// When this thread is inside already.
    #[inline(always)]
    pub(super) fn enter(&self) -> Inside<'_, T> {
        let slot = match self.slots.get() {
            Some(slot) => slot,
            None => self.first(),
        };
        // Only this thread sets the mark of its slot.
        if slot.busy.load(Ordering::Relaxed) {
            refuse();
        }
        slot.busy.store(true, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        if self.attention.load(Ordering::Acquire) != 0 {
            self.wait(slot);
        }
        Inside { slot, here: PhantomData }
    }

    /// What a thread finds when it comes for the first time.
    #[cold]
    fn first(&self) -> &Slot<T> {
        self.slots.get_or_default()
    }

    /// Marks the slot again once no collector is at work, where the owner takes the barrier itself or has seen a
    /// collector.
    #[cold]
    fn wait(&self, slot: &Slot<T>) {
        loop {
            fence(Ordering::SeqCst);
            if self.attention.load(Ordering::Acquire) & COLLECTING == 0 {
                return;
            }
            slot.busy.store(false, Ordering::Release);
            while self.attention.load(Ordering::Acquire) & COLLECTING != 0 {
                thread::yield_now();
            }
            slot.busy.store(true, Ordering::Relaxed);
        }
    }

    /// Shows every thread's value to `visit` at one moment at which no thread is inside.
    ///
    /// # Panics
    /// When this thread is inside: it would wait for itself.
    pub(super) fn collect<R>(&self, visit: impl FnMut(&mut T) -> R) -> Vec<R> {
        let inside = self.slots.get().is_some_and(|own| own.busy.load(Ordering::Relaxed));
        assert!(!inside, "an operation should not collect from its own instrument");
        let _one = self.collectors.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.attention.fetch_or(COLLECTING, Ordering::SeqCst);
        let done = Done(&self.attention);
        fence(Ordering::SeqCst);
        if before & OWN_BARRIER == 0 {
            barrier::everywhere();
        }
        // A slot that is made from here on belongs to a thread that will see `attention`, so it is missed rightly; one
        // that was made before is in the iteration.
        for slot in &self.slots {
            while slot.busy.load(Ordering::Acquire) {
                thread::yield_now();
            }
        }
        let mut visit = visit;
        // SAFETY: no owner is inside, as was just seen, and none enters until `COLLECTING` is unset; the lock above
        // keeps other collectors out.
        let all = self.slots.iter().map(|slot| visit(unsafe { &mut *slot.value.get() })).collect();
        drop(done);
        all
    }
}

/// Lets the owners in again, also when a visit panics.
struct Done<'a>(&'a AtomicU8);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_and(!COLLECTING, Ordering::Release);
    }
}

#[cold]
fn refuse() -> ! {
    panic!("an operation should not call back into its own instrument")
}

/// A thread's own value, while it is inside.
pub(super) struct Inside<'a, T> {
    slot: &'a Slot<T>,
    /// Must not go to another thread.
    here: PhantomData<*const ()>,
}

impl<T> Deref for Inside<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `enter` made this guard for the slot's own thread, which it cannot leave, with `busy` set and no
        // collector at work; a second guard is refused there.
        unsafe { &*self.slot.value.get() }
    }
}

impl<T> DerefMut for Inside<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for `deref`; the guard is borrowed for as long as the value is.
        unsafe { &mut *self.slot.value.get() }
    }
}

impl<T> Drop for Inside<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.slot.busy.store(false, Ordering::Release);
    }
}

/// Barriers in other threads.
#[cfg(all(target_os = "linux", not(miri)))]
mod barrier {
    use std::sync::OnceLock;

    /// Commands of membarrier(2).
    const PRIVATE_EXPEDITED: i32 = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: i32 = 1 << 4;

    fn call(command: i32) -> bool {
        // SAFETY: the call takes numbers and touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    /// Announces once that this process will use [`everywhere`]; whether it may.
    pub(super) fn register() -> bool {
        static REGISTERED: OnceLock<bool> = OnceLock::new();
        *REGISTERED.get_or_init(|| call(REGISTER_PRIVATE_EXPEDITED) && call(PRIVATE_EXPEDITED))
    }

    /// Every running thread of this process passes a full barrier before this returns.
    pub(super) fn everywhere() {
        assert!(call(PRIVATE_EXPEDITED), "membarrier should go on working once it is registered");
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod barrier {
    pub(super) fn register() -> bool {
        false
    }

    pub(super) fn everywhere() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectors_see_whole_operations_and_lose_none() {
        for asymmetric in [true, false] {
            let counts = PerThread::<(u64, u64)>::new();
            if !asymmetric {
                counts.attention.fetch_or(OWN_BARRIER, Ordering::SeqCst);
            }
            let (counts, mut total) = (&counts, 0);
            let mut add = |(first, second): (u64, u64)| {
                assert_eq!(first, second, "a thread was seen inside");
                total += first;
            };
            thread::scope(|scope| {
                let workers: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            for _ in 0..100_000 {
                                let mut own = counts.enter();
                                own.0 += 1;
                                own.1 += 1;
                            }
                        })
                    })
                    .collect();
                while !workers.iter().all(thread::ScopedJoinHandle::is_finished) {
                    counts.collect(std::mem::take).into_iter().for_each(&mut add);
                }
            });
            counts.collect(std::mem::take).into_iter().for_each(&mut add);
            assert_eq!(total, 400_000);
        }
    }

    #[test]
    fn a_panic_inside_lets_go() {
        let values = PerThread::<u64>::new();
        let broken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _inside = values.enter();
            let _twice = values.enter();
        }));
        assert!(broken.is_err(), "entering twice should be refused");
        let broken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _inside = values.enter();
            values.collect(|value| *value)
        }));
        assert!(broken.is_err(), "a thread should not wait for itself");
        *values.enter() += 1;
        assert_eq!(values.collect(|value| *value), [1]);
    }
}
