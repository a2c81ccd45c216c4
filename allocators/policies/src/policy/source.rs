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
#[allow(clippy::large_enum_variant, reason = "an allocator has one, and never moves it")]
pub enum Source {
    /// Each segment is one driver allocation (`cuMemAlloc`, `cuMemFree`) with its own address.
    Plain {
        /// The device.
        driver: Arc<dyn Driver>,
        /// Maximum of reserved bytes.
        limit: Option<u64>,
    },
    /// Expandable segments: ranges of addresses in which memory is mapped and unmapped.
    Expandable(Expandable),
}

/// The functions for whole segments exclude an expandable source, and those for mapped ranges a plain one.
const IN_PARTS: &str = "this source should map and unmap ranges";
const IN_SEGMENTS: &str = "this source should allocate and release whole segments";

impl Source {
    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        match self {
            Self::Plain { driver, .. } => driver,
            Self::Expandable(expandable) => expandable.driver(),
        }
    }

    /// Maximum of reserved bytes.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        match self {
            Self::Plain { limit, .. } => *limit,
            Self::Expandable(expandable) => expandable.limit,
        }
    }

    /// Changes the maximum of reserved bytes.
    pub(super) fn set_limit(&mut self, bytes: Option<u64>) {
        match self {
            Self::Plain { limit, .. } => *limit = bytes,
            Self::Expandable(expandable) => expandable.limit = bytes,
        }
    }

    /// The source as an expandable one.
    ///
    /// # Panics
    /// When it is plain.
    pub(super) fn expandable(&mut self) -> &mut Expandable {
        match self {
            Self::Expandable(expandable) => expandable,
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// The mapped pages of an expandable source.
    ///
    /// # Panics
    /// When it is plain.
    pub(super) fn mapped(&self) -> &Mapped {
        match self {
            Self::Expandable(expandable) => &expandable.mapped,
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// Unmapped ranges of an expandable source, by free list and address.
    ///
    /// # Panics
    /// When it is plain.
    pub(super) fn holes(&self) -> &BTreeMap<(FreeList, u64), BlockId> {
        match self {
            Self::Expandable(expandable) => &expandable.holes,
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// Pages of an expandable source that stay mapped.
    ///
    /// # Panics
    /// When it is plain.
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

    /// Bytes of a handle in a pool of an expandable source.
    ///
    /// # Panics
    /// When it is plain.
    pub(super) fn handle_bytes(&self, pool: Option<PoolKind>) -> u64 {
        match self {
            Self::Expandable(expandable) => expandable.handle_bytes(pool),
            Self::Plain { .. } => unreachable!("{IN_SEGMENTS}"),
        }
    }

    /// Whether segments are expandable.
    #[must_use]
    pub fn is_expandable(&self) -> bool {
        matches!(self, Self::Expandable(_))
    }

    /// The address of a new segment; `None` when the device has no memory, or when the limit does not allow `bytes` beyond the
    /// `reserved` ones.
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

    /// Releases a segment, which waits until the whole device is idle.
    ///
    /// # Errors
    /// Those of the driver: the segment is still reserved then.
    ///
    /// # Safety
    /// The segment came from this source, is released once, and only queued work still uses it.
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
