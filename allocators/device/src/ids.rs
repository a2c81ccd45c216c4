//! Ids of objects that a driver made: addresses, streams, events, pools, physical memory, graphs.

use std::num::NonZeroU64;

/// Address in device memory; opaque to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddr(NonZeroU64);

impl DeviceAddr {
    /// Wraps an address; `None` for zero, which no device returns.
    #[must_use]
    pub fn new(addr: u64) -> Option<Self> {
        NonZeroU64::new(addr).map(Self)
    }

    /// An address that a device has returned.
    ///
    /// # Panics
    /// When it is zero, which no device returns.
    #[inline]
    pub fn handed_out(addr: u64) -> Self {
        Self::new(addr).expect("the address of a segment or range should not be zero")
    }

    /// The address with `bits`, which are zero in it, set.
    #[inline(always)]
    pub fn with_low_bits(self, bits: u64) -> Self {
        Self(self.0 | bits)
    }

    /// The address without the bits of `mask`, which are not all of it.
    #[inline(always)]
    pub fn without_low_bits(self, mask: u64) -> Self {
        Self::new(self.get() & !mask).expect("an address should have more than its low bits")
    }

    /// The address as a number, as kernels take it.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// The address `bytes` later.
    ///
    /// # Panics
    /// When the address space ends before.
    #[must_use]
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0.checked_add(bytes).expect("an address inside a block should not overflow"))
    }
}

macro_rules! handles {
    ($($(#[doc = $doc:literal])+ #[derive($($more:ident),*)] $name:ident;)+) => {$(
        $(#[doc = $doc])+
        ///
        /// A driver makes it. Other code cannot make one without `unsafe`, so code that keeps a handle private knows every use of
        /// it:
        ///
        /// ```compile_fail,E0423
        #[doc = concat!("let forged = vramlab_device::", stringify!($name), "(7);")]
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, $($more),*)]
        pub struct $name(u64);

        impl $name {
            /// The handle with this value, for implementations of [`Driver`](super::Driver).
            ///
            /// # Safety
            /// A driver that gets the handle made it under this value, and its object belongs to the caller; or no driver gets the
            /// handle.
            #[must_use]
            pub const unsafe fn from_raw(raw: u64) -> Self {
                Self(raw)
            }

            /// The id of an object that a device of this crate has just made.
            pub(super) const fn made(raw: u64) -> Self {
                Self(raw)
            }

            /// The handle's value.
            #[must_use]
            pub const fn get(self) -> u64 {
                self.0
            }
        }
    )+};
}

handles! {
    /// A stream of the driver that made it. Ordered by value, as PyTorch orders its streams by handle.
    #[derive(PartialOrd, Ord)]
    StreamId;
    /// An event of the driver that made it.
    #[derive(PartialOrd, Ord)]
    EventId;
    /// A stream-ordered pool of the driver that made it.
    #[derive()]
    PoolId;
    /// Physical memory that can be mapped, of the driver that made it.
    #[derive()]
    PhysicalHandle;
    /// A graph that is ready to be launched, of the driver that made it.
    #[derive(PartialOrd, Ord)]
    GraphId;
}

impl StreamId {
    /// Stands for an unknown stream. It has the value of CUDA's legacy default stream, which no driver here creates.
    pub const NONE: Self = Self(0);
}
