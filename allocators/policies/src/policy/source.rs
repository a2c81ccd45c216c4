//! Part `source`: where segments come from.

mod expandable;
mod mapped;

pub use expandable::{Expandable, Sizes};

use super::heap::shared::Shared;
use super::pages::Pages;
use crate::contract::PoolKind;
use crate::space::{BlockId, FreeList};
use mapped::Mapped;
use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab_device::{DeviceAddr, Driver, DriverError, EventId};

/// A source of segments on a device.
#[derive(Debug)]
pub enum Source {
    /// One call of the driver a segment (`cuMemAlloc`, `cuMemFree`), all at addresses of their own.
    Plain {
        /// The device.
        driver: Arc<dyn Driver>,
        /// Most bytes that may be held from it at once.
        limit: Option<u64>,
    },
    /// Ranges of addresses, each behind which memory comes and goes in parts.
    Expandable(Expandable),
}

/// Why a call for whole segments has nothing to do with an expandable source, and one for parts with a plain one.
const IN_PARTS: &str = "memory of this source should come and go in parts";
const IN_SEGMENTS: &str = "memory of this source should come and go in whole segments";

impl Source {
    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        match self {
            Self::Plain { driver, .. } => driver,
            Self::Expandable(expandable) => expandable.driver(),
        }
    }

    /// Most bytes that may be held from the device.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        match self {
            Self::Plain { limit, .. } => *limit,
            Self::Expandable(expandable) => expandable.limit,
        }
    }

    /// Changes the most bytes that may be held.
    pub(super) fn set_limit(&mut self, bytes: Option<u64>) {
        match self {
            Self::Plain { limit, .. } => *limit = bytes,
            Self::Expandable(expandable) => expandable.limit = bytes,
        }
    }

    /// The source as one whose memory comes in parts.
    ///
    /// # Panics
    /// When it is none.
    pub(super) fn expandable(&mut self) -> &mut Expandable {
        match self {
            Self::Expandable(expandable) => expandable,
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// What is mapped, of a source whose memory comes in parts.
    ///
    /// # Panics
    /// When it is none.
    pub(super) fn mapped(&self) -> &Mapped {
        match self {
            Self::Expandable(expandable) => &expandable.mapped,
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// Unmapped ranges by free list and address, of a source whose memory comes in parts.
    ///
    /// # Panics
    /// When it is none.
    pub(super) fn holes(&self) -> &BTreeMap<(FreeList, u64), BlockId> {
        match self {
            Self::Expandable(expandable) => &expandable.holes,
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// Pages that stay mapped, of a source whose memory comes in parts.
    ///
    /// # Panics
    /// When it is none.
    pub(super) fn shared(&self) -> &Shared {
        match self {
            Self::Expandable(expandable) => &expandable.shared,
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// The last uses of pages, for a policy that moves them.
    pub(super) fn pages(&self) -> Option<&Pages> {
        match self {
            Self::Expandable(expandable) => expandable.pages.as_ref(),
            Self::Plain { .. } => None,
        }
    }

    /// Lets every exported page be unmapped again, at the end.
    pub(super) fn end_exports(&mut self) {
        if let Self::Expandable(expandable) = self {
            expandable.shared = Shared::default();
        }
    }

    /// Every event of pages, for the end.
    pub(super) fn take_events(&mut self) -> Vec<EventId> {
        match self {
            Self::Expandable(expandable) => expandable.pages.as_mut().map_or_else(Vec::new, Pages::take_events),
            Self::Plain { .. } => Vec::new(),
        }
    }

    /// Bytes in which memory of a pool comes and goes in parts.
    ///
    /// # Panics
    /// When it does not.
    pub(super) fn handle_bytes(&self, pool: Option<PoolKind>) -> u64 {
        match self {
            Self::Expandable(expandable) => expandable.handle_bytes(pool),
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// Whether memory comes and goes in parts.
    #[must_use]
    pub fn is_expandable(&self) -> bool {
        matches!(self, Self::Expandable(_))
    }

    /// The address of a new segment; `None` when the device has no memory, or when `reserved` bytes are held and as many
    /// more would pass the limit.
    ///
    /// # Errors
    /// Any other error of the driver.
    pub(super) fn allocate(&self, bytes: u64, reserved: u64) -> Result<Option<u64>, DriverError> {
        let Self::Plain { driver, limit } = self else { unreachable!("{IN_PARTS}") };
        if limit.is_some_and(|limit| reserved.saturating_add(bytes) > limit) {
            return Ok(None);
        }
        match driver.mem_alloc(bytes) {
            Ok(addr) => Ok(Some(addr.get())),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives a segment back, which waits until the whole device is idle.
    ///
    /// # Errors
    /// Those of the driver: then the segment is still held.
    ///
    /// # Safety
    /// The segment came from this source, is given back once, and only work that is queued still uses it.
    pub(super) unsafe fn release(&self, addr: DeviceAddr) -> Result<(), DriverError> {
        let Self::Plain { driver, .. } = self else { unreachable!("{IN_PARTS}") };
        // SAFETY: the caller promises it, and the call itself waits for queued work.
        unsafe { driver.mem_free(addr) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab_device::NullDriver;

    #[test]
    fn a_limit_and_a_full_device_are_no_errors() {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(4 << 20));
        let source = Source::Plain { driver: Arc::clone(&driver), limit: Some(3 << 20) };
        assert_eq!(source.allocate(2 << 20, (1 << 20) + 1).unwrap(), None, "past the limit");
        let addr = source.allocate(2 << 20, 1 << 20).unwrap().unwrap();
        let source = Source::Plain { driver, limit: None };
        assert_eq!(source.allocate(4 << 20, 0).unwrap(), None, "past the device's memory");
        // SAFETY: made above, and not used.
        unsafe { source.release(DeviceAddr::new(addr).unwrap()) }.unwrap();
        assert!(source.allocate(4 << 20, 0).unwrap().is_some());
    }
}
