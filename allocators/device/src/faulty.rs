//! Fault injection: the k-th call of a kind fails, once.

use super::hooked::{CallArguments, Hook, HookedDriver};
use super::{CallKind, Driver, DriverResult};
use crate::DriverError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// The planned failure.
#[derive(Debug, Default)]
pub struct Faults {
    plan: Mutex<Option<(CallKind, u64, u32)>>,
    injected: AtomicU64,
}

// SAFETY: changes no call.
unsafe impl Hook for Faults {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, kind: CallKind, _arguments: CallArguments) -> DriverResult<()> {
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((planned, left, code)) = plan.as_mut()
            && *planned == kind
        {
            if *left == 0 {
                let error = DriverError::new(kind, *code, "injected fault");
                *plan = None;
                self.injected.fetch_add(1, Relaxed);
                return Err(error);
            }
            *left -= 1;
        }
        Ok(())
    }
}

/// A driver whose calls can be made to fail. The inner driver does not get a call that fails here.
pub type FaultyDriver = HookedDriver<Faults>;

impl FaultyDriver {
    /// Wraps a driver; nothing fails until [`fail`](Self::fail).
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        Self { inner, hook: Faults::default() }
    }

    /// Makes the call of `kind` after the next `skip` ones fail with `code`, once. Replaces an earlier plan.
    pub fn fail(&self, kind: CallKind, skip: u64, code: u32) {
        *self.hook.plan.lock().unwrap_or_else(PoisonError::into_inner) = Some((kind, skip, code));
    }

    /// Number of injected faults.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.hook.injected.load(Relaxed)
    }

    /// Removes a plan that was not carried out.
    pub fn clear(&self) {
        *self.hook.plan.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
