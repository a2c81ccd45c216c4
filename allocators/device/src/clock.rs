//! Clocks. Only instruments read them.
//!
//! The machine's clock is the processor's time-stamp counter where that is reliable, because reading it takes half as long as
//! asking the system. A read waits until earlier work has completed (`lfence`), as the system's own does: an unfenced one, which
//! libraries offer, may happen while an earlier lock is still being waited for, and then the times of two threads no longer show
//! which came first.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// A clock in nanoseconds since a fixed point.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Nanoseconds since the clock's start; never decreases. Read after the work before the call and before the work after it.
    fn now_ns(&self) -> u64;

    /// The machine's clock, if this is it: it is then read without a virtual call.
    fn machine(&self) -> Option<MonotonicClock> {
        None
    }
}

/// The machine's monotonic clock.
///
/// By the time-stamp counter where the processor guarantees one rate in every power state and Linux has found it to agree between
/// the processors (x86-64), by the system's clock elsewhere. The first clock of a process takes 2 ms to compare the counter with
/// the system's clock; the two then differ by some 0.002 %. Like the system's clock it should not be read across a suspend of the
/// machine.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock(Source);

#[derive(Clone, Copy, Debug)]
enum Source {
    #[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
    Counter {
        start: u64,
        /// Nanoseconds per tick, times 2^64.
        scale: u64,
    },
    System(Instant),
}

impl MonotonicClock {
    /// A clock that starts now.
    #[must_use]
    pub fn new() -> Self {
        #[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
        if let Some(scale) = counter::scale() {
            return Self(Source::Counter { start: counter::read(), scale });
        }
        Self(Source::System(Instant::now()))
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    #[inline]
    fn now_ns(&self) -> u64 {
        match self.0 {
            #[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
            Source::Counter { start, scale } => nanoseconds(counter::read().saturating_sub(start), scale),
            // CAST: 2^64 nanoseconds are 584 years.
            Source::System(start) => start.elapsed().as_nanos() as u64,
        }
    }

    fn machine(&self) -> Option<MonotonicClock> {
        Some(*self)
    }
}

/// The length of a tick.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Nanoseconds per tick times 2^64; 0 where ticks are nanoseconds.
    per_tick: u64,
}

impl Scale {
    /// Ticks are nanoseconds.
    pub const NANOSECONDS: Self = Self { per_tick: 0 };

    /// Converts ticks to nanoseconds.
    #[inline(always)]
    pub fn nanoseconds(self, ticks: u64) -> u64 {
        if self.per_tick == 0 { ticks } else { nanoseconds(ticks, self.per_tick) }
    }
}

/// Ticks by their scale.
#[inline]
fn nanoseconds(ticks: u64, per_tick: u64) -> u64 {
    // CAST: the upper half of the product.
    ((u128::from(ticks) * u128::from(per_tick)) >> 64) as u64
}

/// A clock for instruments. It is read in ticks, which are converted to nanoseconds when they are reported: the multiplication is
/// cheap, but the next call waits for dependent results.
#[derive(Clone, Debug)]
pub struct Reader {
    /// Ticks at the clock's start.
    start: u64,
    scale: Scale,
    /// Set where it is not the time-stamp counter.
    other: Option<Arc<dyn Clock>>,
}

impl Reader {
    /// A reader of a clock: of the time-stamp counter itself where the clock uses it.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        match clock.machine() {
            #[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
            Some(MonotonicClock(Source::Counter { start, scale })) => {
                Self { start, scale: Scale { per_tick: scale }, other: None }
            }
            _ => Self { start: 0, scale: Scale::NANOSECONDS, other: Some(clock) },
        }
    }

    /// The length of its ticks.
    pub fn scale(&self) -> Scale {
        self.scale
    }

    /// Ticks since a fixed point, read while earlier instructions may be in flight: waiting for them would take as long as a cached
    /// allocation. An interval is off by the time of the instructions in flight.
    #[inline(always)]
    pub fn read(&self) -> u64 {
        match &self.other {
            #[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
            None => counter::read_at_once(),
            #[cfg(not(all(target_os = "linux", target_arch = "x86_64", not(miri))))]
            None => unreachable!("only the time-stamp counter is read without a clock"),
            Some(clock) => Self::read_other(clock.as_ref()),
        }
    }

    /// Ticks since the clock's start, read like [`read`](Self::read).
    #[inline(always)]
    pub fn now(&self) -> u64 {
        self.read().saturating_sub(self.start)
    }

    /// Not inlined, so that it takes no registers where the counter is read.
    #[cold]
    #[inline(never)]
    fn read_other(clock: &dyn Clock) -> u64 {
        clock.now_ns()
    }
}

/// The time-stamp counter.
#[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
mod counter {
    use std::arch::x86_64::{__cpuid, _mm_lfence, _rdtsc};
    use std::sync::OnceLock;
    use std::time::{Duration, Instant};

    /// Time for which the counter is compared with the system's clock.
    const CALIBRATION: Duration = Duration::from_millis(2);
    /// Number of reads of both clocks, of which the closest pair is taken.
    const TRIES: usize = 16;

    /// Ticks, read after earlier work has completed.
    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: every x86-64 processor has this instruction; it touches no memory.
        unsafe { _mm_lfence() };
        read_at_once()
    }

    /// Ticks, read while instructions before may still be in flight.
    #[inline]
    pub(super) fn read_at_once() -> u64 {
        // SAFETY: every x86-64 processor has this instruction; it accesses no memory. `trusted` was checked first: the system lets
        // programs read the counter where it lists it.
        unsafe { _rdtsc() }
    }

    /// Nanoseconds per tick times 2^64, measured once in a process; `None` where the counter is not reliable, or is slower than one
    /// tick a nanosecond.
    pub(super) fn scale() -> Option<u64> {
        static SCALE: OnceLock<Option<u64>> = OnceLock::new();
        *SCALE.get_or_init(|| trusted().then(calibrate).flatten())
    }

    /// Whether the processor guarantees a constant rate and Linux lists the counter. Linux removes it from its list when it has
    /// found that processors differ.
    fn trusted() -> bool {
        let list = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/available_clocksource");
        list.is_ok_and(|list| list.split_whitespace().any(|name| name == "tsc")) && invariant()
    }

    #[allow(unused_unsafe, reason = "later compilers hold the instruction for safe")]
    fn invariant() -> bool {
        const ADVANCED_POWER_MANAGEMENT: u32 = 0x8000_0007;
        // SAFETY: every x86-64 processor has this instruction; it touches no memory.
        let largest = unsafe { __cpuid(0x8000_0000) }.eax;
        // SAFETY: as above.
        largest >= ADVANCED_POWER_MANAGEMENT && unsafe { __cpuid(ADVANCED_POWER_MANAGEMENT) }.edx & (1 << 8) != 0
    }

    /// Both clocks at one moment: the try whose two reads of the counter are closest.
    fn both() -> (u64, Instant) {
        let once = || {
            let before = read();
            let time = Instant::now();
            let width = read().saturating_sub(before);
            (width, before + width / 2, time)
        };
        let (_, ticks, time) = (0..TRIES).map(|_| once()).min_by_key(|(width, ..)| *width).unwrap_or_else(once);
        (ticks, time)
    }

    fn calibrate() -> Option<u64> {
        let (first, start) = both();
        while start.elapsed() < CALIBRATION {
            std::hint::spin_loop();
        }
        let (last, end) = both();
        let ticks = last.checked_sub(first).filter(|ticks| *ticks > 0)?;
        let scale = ((end - start).as_nanos() << 64) / u128::from(ticks);
        u64::try_from(scale).ok().filter(|scale| *scale > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_never_goes_back_and_agrees_with_the_system() {
        let (clock, start) = (MonotonicClock::new(), Instant::now());
        let mut last = clock.now_ns();
        while start.elapsed().as_millis() < 20 {
            let now = clock.now_ns();
            assert!(now >= last, "{now} after {last}");
            last = now;
        }
        // Once more, in case the thread was kept waiting in its last round.
        let largest = clock.now_ns();
        // Both measured the same interval, whatever the machine did in between; the bound only catches a wrong unit.
        let between = |ns: u64| (10_000_000..1_000_000_000_000).contains(&ns);
        assert!(between(largest), "{largest} ns for at least 20 ms");
    }

    #[test]
    fn ticks_are_told_as_the_clock_tells_them() {
        let clock = MonotonicClock::new();
        let reader = Reader::new(Arc::new(clock));
        for _ in 0..1_000 {
            let (before, ticks, after) = (clock.now_ns(), reader.now(), clock.now_ns());
            let ns = reader.scale().nanoseconds(ticks);
            // Read at once, so by what is in flight before or after its turn.
            assert!((before.saturating_sub(10_000)..=after + 10_000).contains(&ns), "{before}, {ns}, {after}");
        }
    }

    #[test]
    fn a_handover_between_threads_is_seen_in_the_times() {
        let clock = MonotonicClock::new();
        if matches!(clock.0, Source::System(_)) {
            println!("skipped: the system's clock is in use here");
            return;
        }
        // The time under the lock must be larger than every earlier one.
        let last = std::sync::Mutex::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        let mut last = last.lock().unwrap();
                        let now = clock.now_ns();
                        assert!(now >= *last, "{now} after {last}");
                        *last = now;
                    }
                });
            }
        });
    }
}
