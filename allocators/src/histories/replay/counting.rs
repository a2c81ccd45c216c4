//! Counts driver calls by kind, without a clock.

use crate::device::{CallArguments, CallKind, CallResult, Driver, DriverResult, Hook};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One count for each kind of call. A call costs one atomic addition more.
#[derive(Debug)]
pub(super) struct CallCounter([AtomicU64; CallKind::ALL.len()]);

impl Default for CallCounter {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl CallCounter {
    /// Calls so far by name; kinds that were not called are left out.
    pub(super) fn read(&self) -> BTreeMap<&'static str, u64> {
        let counts = CallKind::ALL.iter().map(|&kind| (kind.name(), self.0[kind as usize].load(Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    pub(super) fn reset(&self) {
        self.0.iter().for_each(|count| count.store(0, Relaxed));
    }
}

// SAFETY: changes no call.
unsafe impl Hook for CallCounter {
    fn around<T: CallResult>(
        &self,
        _inner: &dyn Driver,
        kind: CallKind,
        _arguments: CallArguments,
        call: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        // CAST: the kind's position in `ALL`.
        self.0[kind as usize].fetch_add(1, Relaxed);
        call()
    }
}
