//! A value for each thread, behind a lock that other threads take only to read it.

use crate::sync::{SpinGuard, SpinLock};
use std::cell::Cell;
use std::sync::{Mutex, PoisonError};
use thread_local::ThreadLocal;

thread_local! {
    /// Whether this thread has dropped its variables, so that it has no slot any more and can get none.
    static HAS_ENDED: Cell<bool> = const { Cell::new(false) };
    static END: End = const { End };
}

/// Notes the end of a thread, before `thread_local` does: it is made later, and the last one made is dropped first.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        HAS_ENDED.set(true);
    }
}

/// One thread's value, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Slot<T>(SpinLock<T>);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct PerThread<T: Send> {
    slots: ThreadLocal<Slot<T>>,
    /// The value of threads that have dropped their variables and continue, as in handlers of `atexit`.
    ended: Slot<T>,
    /// Held while values are made or collected, so that a collector misses none.
    all: Mutex<()>,
}

impl<T: Send + Default> PerThread<T> {
    /// No values yet; each is made when its thread first enters.
    pub(super) fn new() -> Self {
        let ended = Slot(SpinLock::new(T::default()));
        Self { slots: ThreadLocal::new(), ended, all: Mutex::default() }
    }

    /// This thread's value, until the guard is dropped. Collectors wait for that.
    #[inline(always)]
    pub(super) fn enter(&self) -> SpinGuard<'_, T> {
        match self.slots.get() {
            Some(slot) => slot.0.lock(),
            None => self.first(),
        }
    }

    #[cold]
    fn first(&self) -> SpinGuard<'_, T> {
        if HAS_ENDED.get() {
            return self.ended.0.lock();
        }
        let _all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = self.slots.get_or(|| Slot(SpinLock::new(T::default())));
        let _ = END.try_with(|_| ());
        slot.0.lock()
    }

    /// Passes every thread's value to `visit` at one moment at which no thread is inside.
    pub(super) fn collect<R>(&self, visit: impl FnMut(&mut T) -> R) -> Vec<R> {
        let _all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = self.slots.iter().chain([&self.ended]);
        let mut values: Vec<SpinGuard<'_, T>> = slots.map(|slot| slot.0.lock()).collect();
        values.iter_mut().map(|value| &mut **value).map(visit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn collectors_see_whole_operations_and_lose_none() {
        let counts = &PerThread::<(u64, u64)>::new();
        let mut total = 0;
        let mut add = |(first, second): (u64, u64)| {
            assert_eq!(first, second, "a thread was inside");
            total += first;
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..100_000 {
                            let mut value = counts.enter();
                            value.0 += 1;
                            value.1 += 1;
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

    #[test]
    fn a_thread_that_has_dropped_its_variables_enters_too() {
        static COUNTS: std::sync::OnceLock<PerThread<u64>> = std::sync::OnceLock::new();
        struct Late;
        impl Drop for Late {
            fn drop(&mut self) {
                *COUNTS.get_or_init(PerThread::new).enter() += 1;
            }
        }
        thread_local!(static LATE: Late = const { Late });
        let thread = thread::spawn(|| {
            // The first one made is dropped last.
            LATE.with(|_| ());
            *COUNTS.get_or_init(PerThread::new).enter() += 1;
        });
        thread.join().unwrap();
        assert_eq!(COUNTS.get_or_init(PerThread::new).collect(|value| *value), [1, 1]);
    }

    #[test]
    fn a_panic_inside_lets_go() {
        let values = PerThread::<u64>::new();
        let broken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _inside = values.enter();
            panic!("inside");
        }));
        assert!(broken.is_err());
        *values.enter() += 1;
        assert_eq!(values.collect(|value| *value), [1, 0]);
    }
}
