//! Steps that readers and the compilation of histories take, counted in tests: how work grows with a file is a promise
//! that no clock can hold.

/// Counts steps of this thread. Nothing outside tests.
#[inline]
pub(crate) fn count(steps: usize) {
    #[cfg(test)]
    tests::take(steps);
    #[cfg(not(test))]
    let _ = steps;
}

/// A million of whatever a file can hold takes a number of steps that is near a million.
#[cfg(test)]
mod tests {
    mod histories;
    mod reading;

    use std::cell::Cell;

    /// Items of a shape.
    const MANY: u64 = 1_000_000;

    std::thread_local! {
        static TAKEN: Cell<u64> = const { Cell::new(0) };
        static MOST: Cell<u64> = const { Cell::new(u64::MAX) };
    }

    /// Takes steps. Panics beyond the limit, so that what is quadratic fails and does not hang.
    pub(super) fn take(steps: usize) {
        let taken = TAKEN.get() + steps as u64;
        TAKEN.set(taken);
        assert!(taken <= MOST.get(), "more than {} steps", MOST.get());
    }

    /// Runs `work` on `items` items, for each of which it may take as many steps as a binary search and twelve more.
    fn linear<T>(what: &str, items: u64, work: impl FnOnce() -> T) -> T {
        TAKEN.set(0);
        MOST.set(items * u64::from(items.ilog2() + 12));
        let out = work();
        MOST.set(u64::MAX);
        let taken = TAKEN.get();
        assert!(taken >= items, "{what}: only {taken} steps were counted for {items} items");
        println!("{what}: {taken} steps, {:.2} an item", taken as f64 / items as f64);
        out
    }
}
