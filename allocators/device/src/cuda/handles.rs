//! The handles that a driver has made. CUDA trusts its handles, so only live handles that were made here reach it: a forged one,
//! one of another driver and one from before this driver was opened are errors.
//!
//! A look-up uses a table behind a lock. Only calls to the driver need one, never a hit in a cache.
#![forbid(unsafe_code)]

use super::{CallKind, DriverResult};
use crate::DriverError;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

type Table = BTreeMap<u64, u64>;

/// The live handles of one kind: CUDA's handles by our ids.
#[derive(Debug)]
pub(super) struct Live {
    what: &'static str,
    table: RwLock<Table>,
}

impl Live {
    pub(super) fn new(what: &'static str) -> Self {
        Self { what, table: RwLock::default() }
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a handle that CUDA has just made; its id is the handle's value. CUDA may reuse a value after its destruction.
    pub(super) fn insert(&self, raw: u64) -> u64 {
        self.write().insert(raw, raw);
        raw
    }

    /// Adds it under an id that this process never reuses, so that the id of a destroyed object stays an error.
    pub(super) fn insert_once(&self, raw: u64) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Relaxed);
        self.write().insert(id, raw);
        id
    }

    fn unknown(&self, call: CallKind, id: u64) -> DriverError {
        DriverError::new(call, DriverError::INVALID_HANDLE, format!("no {} {id:#x} of this driver", self.what))
    }

    /// CUDA's handle of a live id.
    #[inline]
    pub(super) fn get(&self, call: CallKind, id: u64) -> DriverResult<u64> {
        let handle = self.read().get(&id).copied();
        handle.ok_or_else(|| self.unknown(call, id))
    }

    /// Destroys a handle by `destroy`, which gets CUDA's. It is removed first, because CUDA may reuse its value immediately, and
    /// added again should CUDA refuse.
    pub(super) fn remove(
        &self,
        call: CallKind,
        id: u64,
        destroy: impl FnOnce(u64) -> DriverResult<()>,
    ) -> DriverResult<()> {
        let raw = self.write().remove(&id).ok_or_else(|| self.unknown(call, id))?;
        destroy(raw).inspect_err(|_| {
            self.write().insert(id, raw);
        })
    }
}

/// The live handles of a driver.
#[derive(Debug)]
pub(super) struct Handles {
    pub(super) streams: Live,
    pub(super) events: Live,
    pub(super) pools: Live,
    pub(super) physical: Live,
    pub(super) graphs: Live,
}

impl Handles {
    pub(super) fn new() -> Self {
        let [streams, events, pools, physical, graphs] =
            ["stream", "event", "pool", "physical memory", "graph"].map(Live::new);
        Self { streams, events, pools, physical, graphs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: CallKind = CallKind::EventRecord;

    #[test]
    fn only_live_handles_of_their_own_table_are_found() {
        let (mine, theirs) = (Live::new("event"), Live::new("event"));
        let (a, b) = (mine.insert(0x7f00_0000_1000), theirs.insert(0x7f00_0000_2000));
        assert_eq!(mine.get(CALL, a), Ok(0x7f00_0000_1000));
        for forged in [b, 0, 1, u64::MAX] {
            let error = mine.get(CALL, forged).unwrap_err();
            assert_eq!((error.call, error.code), (CALL, DriverError::INVALID_HANDLE));
            assert_eq!(error.context, format!("no event {forged:#x} of this driver"));
        }
        mine.remove(CALL, a, |_| Ok(())).unwrap();
        mine.get(CALL, a).unwrap_err();
        mine.remove(CALL, a, |_| panic!("it was removed")).unwrap_err();
    }

    #[test]
    fn what_cuda_refuses_to_destroy_stays() {
        let live = Live::new("stream");
        let id = live.insert(7);
        let refused = || DriverError::new(CALL, DriverError::ILLEGAL_STATE, "");
        assert_eq!(live.remove(CALL, id, |_| Err(refused())), Err(refused()));
        assert_eq!(live.get(CALL, id), Ok(7));
    }

    #[test]
    fn an_id_that_is_used_once_never_names_what_comes_after() {
        let live = Live::new("graph");
        let first = live.insert_once(7);
        live.remove(CALL, first, |_| Ok(())).unwrap();
        // CUDA reuses the value.
        let second = live.insert_once(7);
        live.get(CALL, first).unwrap_err();
        assert_eq!(live.get(CALL, second), Ok(7));
    }
}
