//! Names of what a driver made: addresses, streams, events, pools, physical memory, graphs.

use crate::DriverResult;
use std::num::NonZeroU64;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// Address in device memory; opaque to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddr(NonZeroU64);

impl DeviceAddr {
    /// Wraps an address; `None` for zero, which no device hands out.
    #[must_use]
    pub fn new(addr: u64) -> Option<Self> {
        NonZeroU64::new(addr).map(Self)
    }

    /// An address that a device has handed out.
    ///
    /// # Panics
    /// When it is zero, which no device hands out.
    #[inline]
    pub fn handed_out(addr: u64) -> Self {
        Self::new(addr).expect("no segment and no range should lie at address zero")
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

    /// The address `bytes` further on.
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
        /// A driver makes it. Other code cannot make one without `unsafe`, so code that keeps a handle private knows every
        /// use of it:
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
            /// A driver to which the handle is given made it under this value, and the thing that it stands for belongs to
            /// the caller; or the handle is given to no driver.
            #[must_use]
            pub const unsafe fn from_raw(raw: u64) -> Self {
                Self(raw)
            }

            /// Of something that a device of this crate has just made.
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
    /// Where no stream is known. It has the value of CUDA's legacy default stream, which no driver here makes.
    pub const NONE: Self = Self(0);
}

// Graphs: the work of a stream captured once and launched many times.

/// How many captures a program has open that the driver did not begin, see [`Driver::note_capture`](super::Driver::note_capture).
#[derive(Debug, Default)]
pub(crate) struct NotedCaptures(AtomicUsize);

impl NotedCaptures {
    /// One more, or one less; an end without a beginning changes nothing.
    pub(crate) fn note(&self, open: bool) {
        if open {
            self.0.fetch_add(1, Release);
        } else {
            let _ = self.0.fetch_update(Release, Acquire, |open| open.checked_sub(1));
        }
    }

    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.0.load(Acquire) != 0
    }
}

/// The device's account of memory that graphs allocate for themselves, in bytes. It covers the graphs of all programs on the
/// device. Plain memory that captured kernels use is not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphMemory {
    /// Belongs to graphs.
    pub used: u64,
    /// Highest `used`.
    pub used_high: u64,
    /// Held from the device for graphs.
    pub reserved: u64,
    /// Highest `reserved`.
    pub reserved_high: u64,
}

/// Stream capture and graphs (`cuStreamBeginCapture`, `cuGraphLaunch`, ...).
///
/// # What a capture takes
/// Between [`capture_begin`](Self::capture_begin) and [`capture_end`](Self::capture_end) work that is queued on the
/// stream is noted and not run: kernels, fills, copies from page-locked memory, stream-ordered allocations and frees. A
/// stream that waits for an event recorded in the capture joins it; the first stream has to wait for the work of the
/// joined ones before the end. Plain memory is allocated and freed at once, as outside of a capture (CUDA's relaxed mode).
///
/// Waiting for a capturing stream, for the device or for a captured event, and asking after them, fails with
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` or `CUDA_ERROR_CAPTURED_EVENT`; so does what waits by itself, such as a copy to
/// the host. The capture is then invalid: its end is an error. A copy from pageable memory must not be captured, because
/// a launch would read the source again.
/// <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html>
pub trait GraphDriver {
    /// Starts to capture what is queued on `stream`.
    fn capture_begin(&self, stream: StreamId) -> DriverResult<()>;

    /// Ends the capture and makes its graph ready for its first launch. What a launch allocates and does not free is freed
    /// by the next launch. After an error there is no graph, and the stream no longer captures unless it never did.
    fn capture_end(&self, stream: StreamId) -> DriverResult<GraphId>;

    /// Ends the capture, also one that has become invalid, and throws away what was captured.
    fn capture_abort(&self, stream: StreamId) -> DriverResult<()>;

    /// Queues everything that was captured: one call for any number of kernels. Launches of one graph run one after
    /// another, also on different streams.
    ///
    /// A graph that was destroyed, or that another driver made, is `CUDA_ERROR_INVALID_HANDLE`.
    ///
    /// # Safety
    /// The memory that captured work uses has not been given back: blocks of the capture belong to the graph until
    /// `DeviceAllocator::capture_release`.
    unsafe fn graph_launch(&self, graph: GraphId, stream: StreamId) -> DriverResult<()>;

    /// Destroys a graph; the addresses of its stream-ordered allocations are free for other graphs.
    ///
    /// # Safety
    /// The graph came from [`capture_end`](Self::capture_end), is destroyed once and not used afterwards, and its last
    /// launch has finished.
    unsafe fn graph_destroy(&self, graph: GraphId) -> DriverResult<()>;

    /// The account of memory that graphs allocate for themselves.
    fn graph_memory(&self) -> DriverResult<GraphMemory>;

    /// Gives back what is reserved for graphs and used by none.
    fn graph_trim(&self) -> DriverResult<()>;
}
