//! Clocks. Only instruments read them.

use std::fmt;
use std::time::Instant;

/// Something that tells the time in nanoseconds since a fixed point.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Nanoseconds since the clock's start; never goes back.
    fn now_ns(&self) -> u64;
}

/// The machine's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock(Instant);

impl MonotonicClock {
    /// A clock that starts now.
    #[must_use]
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now_ns(&self) -> u64 {
        // CAST: 2^64 nanoseconds are 584 years.
        self.0.elapsed().as_nanos() as u64
    }
}
