//! Steps that readers and the compilation of histories take, counted in tests: how work grows with a file is a promise
//! that no clock can hold.

#[cfg(test)]
mod tests;

/// Counts steps of this thread. Nothing outside tests.
#[inline]
pub(crate) fn count(steps: usize) {
    #[cfg(test)]
    tests::take(steps);
    #[cfg(not(test))]
    let _ = steps;
}
