//! Names of what a driver made: addresses, streams, events, pools, physical memory.

use std::num::NonZeroU64;

/// Address in device memory; opaque to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddr(NonZeroU64);

impl DeviceAddr {
    /// Wraps an address; `None` for zero, which no device hands out.
    #[must_use]
    pub fn new(addr: u64) -> Option<Self> {
        NonZeroU64::new(addr).map(Self)
    }

    /// The address with `bits`, which are zero in it, set.
    #[inline(always)]
    pub(crate) fn with_low_bits(self, bits: u64) -> Self {
        Self(self.0 | bits)
    }

    /// The address without the bits of `mask`, which are not all of it.
    #[inline(always)]
    pub(crate) fn without_low_bits(self, mask: u64) -> Self {
        Self::new(self.get() & !mask).expect("an address should have more than its low bits")
    }

    /// The address as a number, as kernels take it.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// The address `bytes` further on.
    ///
    /// # Panics
    /// When the address space ends before.
    #[must_use]
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0.checked_add(bytes).expect("an address inside a block should not overflow"))
    }
}

/// A stream of the driver that made it. Ordered by value, as PyTorch orders its streams by handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// An event of the driver that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub u64);

/// A pool of the driver that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolId(pub u64);

/// Physical memory that can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PhysicalHandle(pub u64);
