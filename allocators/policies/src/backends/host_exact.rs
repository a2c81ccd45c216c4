//! # `host-exact`: pinned host memory without rounding
//!
//! A policy of ours for pinned host memory. PyTorch rounds a pinned request up to a power of two and never splits or coalesces a
//! block, so a program can pin twice what it asks for. Here a block has the size of its request, in steps of 256 bytes.
//!
//! *A request* (`allocate`):
//! 1. Deferred frees whose copies have completed take effect.
//! 2. The size is rounded up to 256 bytes.
//! 3. The smallest free block that fits is taken; of equal blocks the one with the lowest address. The remainder is split off.
//! 4. When none fits, idle segments are released first, the smallest first, until as much is released as the request needs: no
//!    segment stays pinned that serves nothing while another is pinned beside it. `keep_idle` leaves them.
//! 5. A segment of the size of the request is pinned, in whole pages of 4 KiB. Requests below 1 MiB share segments of 2 MiB, because
//!    a pinning call costs much more than a page.
//! 6. If the host refuses, all deferred frees are waited for, idle segments are released, and the host is asked again.
//!
//! *A free* (`free`). The block is coalesced with free neighbours in its segment. If streams were announced that copy from or to it
//! (`record_use`), the free is deferred until an event on each of them has completed. Each stream has a queue of its own, so a stuck
//! event holds only what waits for its stream.
//!
//! *Good at* large requests that differ in size: weights, optimizer states, caches of keys and values. *Bad at* programs whose sizes
//! keep growing: a larger request releases and pins again, at 0.1 to 0.5 s a GiB.
//!
//! *Cost.* O(log n) in the free blocks for a request and for a free; step 4 lists the segments.
//!
//! *Source.* None: best fit with splits, as [`pytorch`](super::pytorch) has it for the GPU.

use super::pooled::{Found, Policy, Pooled, Rules};
use super::registry::{Backend, Capabilities, MemoryKind, With};
use crate::contract::GUARANTEED_ALIGN;
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, Miss, SegmentSize, Segments as _};
use crate::policy::size::{Size, SizeRule};
use crate::policy::split::Split;
use std::sync::Arc;
use vramlab_device::settings::{Settings as _, bytes, switch};
use vramlab_device::{Driver, DriverError, HOST_PAGE};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "host-exact",
    summary: "pinned host memory: blocks of the requested size, best fit, split and coalesced",
    capabilities: Capabilities { memory: MemoryKind::Host, ..Pooled::<HostExact>::CAPABILITIES },
    compared: true,
    constructor: &With(|driver, settings: &HostExactSettings| Ok(Arc::new(HostExact::new(driver, *settings)))),
};

/// Requests below this share segments.
const SMALL: u64 = 1 << 20;
/// A segment that small requests share.
const SHARED: u64 = 2 << 20;

vramlab_device::settings! {
    /// Settings of `host-exact`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct HostExactSettings {
        /// Maximum of pinned bytes.
        pub memory_limit: Option<u64> = None, bytes().or("none");
        /// Keep idle segments that a request does not fit into, which saves calls and costs memory.
        pub keep_idle: bool = false, switch();
    }
}

/// Sizes in steps of 256 bytes, and segments in pages.
#[derive(Debug)]
struct Exact;

impl SizeRule for Exact {
    fn granule(&self) -> u64 {
        GUARANTEED_ALIGN
    }

    fn round(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(GUARANTEED_ALIGN)
    }

    fn segment(&self, rounded: u64) -> u64 {
        if rounded < SMALL { SHARED } else { rounded.next_multiple_of(HOST_PAGE) }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct HostExact {
    rules: Rules,
    keep_idle: bool,
}

impl HostExact {
    /// An allocator over a driver of pinned memory.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: HostExactSettings) -> Pooled<Self> {
        let heap = Heap::plain(driver, settings.memory_limit, Fit::best());
        // 6.
        let ladder = Ladder::releasing(SegmentSize::OfClass);
        // 2. and 5., and 3.
        let (size, split) = (Size::Custom(&Exact), Split::Always);
        let rules = Rules { name: BACKEND.name, settings: settings.json(), size, split, ladder };
        Pooled::over(heap, Self { rules, keep_idle: settings.keep_idle })
    }

    /// 4. None of the idle segments holds the request, or one of them would have served it.
    fn release_idle(&self, heap: &mut Heap, miss: &Miss) -> Result<(), DriverError> {
        if self.keep_idle || heap.is_capturing() || miss.list.owner.private.is_some() {
            return Ok(());
        }
        let mut idle = heap.idle_segments();
        idle.retain(|idle| idle.list == miss.list);
        let mut released = 0;
        for idle in idle {
            if released >= miss.segment {
                break;
            }
            released += heap.release(idle.segment)?;
        }
        Ok(())
    }
}

impl Policy for HostExact {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    fn grow(&self, heap: &mut Heap, miss: &Miss) -> Result<Found, DriverError> {
        self.release_idle(heap, miss)?;
        let again = |heap: &mut Heap| Ok(self.find_again(heap, miss.list, miss.bytes)?.map(|(block, _)| block));
        self.rules.ladder.climb(heap, miss, again)
    }
}
