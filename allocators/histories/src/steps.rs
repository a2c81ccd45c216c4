//! Steps of readers and compilation, counted in tests: no clock can check how work grows with a file.

/// Counts steps of this thread. Does nothing outside tests.
#[inline]
pub(crate) fn count(steps: usize) {
    #[cfg(test)]
    tests::take(steps);
    #[cfg(not(test))]
    let _ = steps;
}

/// A million items of any kind must take about a million steps.
#[cfg(test)]
mod tests {
    mod histories;
    mod reading;

    use std::cell::Cell;

    /// Number of items.
    const MANY: u64 = 1_000_000;

    std::thread_local! {
        static TAKEN: Cell<u64> = const { Cell::new(0) };
        static MOST: Cell<u64> = const { Cell::new(u64::MAX) };
    }

    /// Takes steps. Panics beyond the limit, so that quadratic work fails instead of hanging.
    pub(super) fn take(steps: usize) {
        let taken = TAKEN.get() + steps as u64;
        TAKEN.set(taken);
        assert!(taken <= MOST.get(), "more than {} steps", MOST.get());
    }

    /// Runs `work` on `items` items, each of which may take as many steps as a binary search and twelve more.
    fn linear<T>(name: &str, items: u64, work: impl FnOnce() -> T) -> T {
        TAKEN.set(0);
        MOST.set(items * u64::from(items.ilog2() + 12));
        let out = work();
        MOST.set(u64::MAX);
        let taken = TAKEN.get();
        assert!(taken >= items, "{name}: only {taken} steps were counted for {items} items");
        println!("{name}: {taken} steps, {:.2} an item", taken as f64 / items as f64);
        out
    }
}
