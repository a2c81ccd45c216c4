//! Counts driver calls by kind, and measures their time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use vramlab_device::{CallArguments, CallKind, CallOutcome, Clock, DeviceKind, Driver, DriverResult, Hook};
use vramlab_policies::contract::Path;

/// Counts for each kind of call, and the total time. A call costs two additional atomic additions, and two reads of the clock
/// where calls take time.
#[derive(Debug)]
pub(super) struct CallCounter {
    kinds: [AtomicU64; CallKind::COUNT],
    all: AtomicU64,
    ns: AtomicU64,
    /// The device's clock; `None` on a device whose calls cost nothing.
    clock: Option<Arc<dyn Clock>>,
}

/// Driver calls and their host time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Spent {
    pub(super) calls: u64,
    pub(super) ns: u64,
}

impl CallCounter {
    pub(super) fn new(driver: &dyn Driver) -> Self {
        let takes_time = driver.describe().kind != DeviceKind::Null;
        Self {
            kinds: std::array::from_fn(|_| AtomicU64::new(0)),
            all: AtomicU64::new(0),
            ns: AtomicU64::new(0),
            clock: takes_time.then(|| driver.clock()),
        }
    }

    /// Calls so far by name, without kinds that did not occur.
    pub(super) fn read(&self) -> BTreeMap<&'static str, u64> {
        let counts = CallKind::ALL.iter().map(|&kind| (kind.name(), self.kinds[kind as usize].load(Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    pub(super) fn reset(&self) {
        self.kinds.iter().chain([&self.all, &self.ns]).for_each(|count| count.store(0, Relaxed));
    }

    /// All calls so far.
    pub(super) fn spent(&self) -> Spent {
        Spent { calls: self.all.load(Relaxed), ns: self.ns.load(Relaxed) }
    }

    /// Whether calls take measured time.
    pub(super) fn measures(&self) -> bool {
        self.clock.is_some()
    }
}

// SAFETY: changes no call.
unsafe impl Hook for CallCounter {
    /// Start of the call, where calls take time.
    type Before = Option<u64>;

    fn before(&self, _inner: &dyn Driver, kind: CallKind, _arguments: CallArguments) -> DriverResult<Option<u64>> {
        // CAST: the kind's position in `ALL`.
        self.kinds[kind as usize].fetch_add(1, Relaxed);
        self.all.fetch_add(1, Relaxed);
        Ok(self.clock.as_ref().map(|clock| clock.now_ns()))
    }

    fn after(
        &self,
        _inner: &dyn Driver,
        _kind: CallKind,
        _arguments: CallArguments,
        start: Option<u64>,
        _outcome: CallOutcome,
    ) {
        if let (Some(clock), Some(start)) = (&self.clock, start) {
            self.ns.fetch_add(clock.now_ns().saturating_sub(start), Relaxed);
        }
    }
}

/// Requests on one path, and their driver calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Number of requests.
    pub count: u64,
    /// Driver calls inside them.
    pub driver_calls: u64,
    /// Host time in these calls, waits included; 0 on a device whose calls cost nothing.
    pub driver_ns: u64,
}

/// Requests by path.
#[derive(Debug, Default)]
pub(super) struct ByPath([Requests; Path::COUNT]);

impl ByPath {
    /// Adds a request with the driver's totals `before` and `now`, after it.
    #[inline]
    pub(super) fn add(&mut self, path: Path, before: Spent, now: Spent) {
        // CAST: the path's position in `ALL`.
        let requests = &mut self.0[path as usize];
        requests.count += 1;
        requests.driver_calls += now.calls - before.calls;
        requests.driver_ns += now.ns - before.ns;
    }

    /// Paths that occurred, by name.
    pub(super) fn read(&self) -> BTreeMap<&'static str, Requests> {
        let named = Path::ALL.iter().map(|path| path.name()).zip(self.0);
        named.filter(|(_, requests)| requests.count > 0).collect()
    }
}
