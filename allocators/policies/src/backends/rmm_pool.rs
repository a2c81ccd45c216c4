//! # `rmm-pool`: RMM's pool, whose streams take each other's memory
//!
//! The policy of `rmm::mr::pool_memory_resource` of NVIDIA's RAPIDS. Given the same requests on the same streams, and the same
//! memory from the device, every block has the address that RMM returns (`vramlab replay HISTORY --alloc rmm-pool --against FILE`).
//!
//! *Idea.* A few large blocks from the device, split exactly. Each stream has a list of free blocks. A stream without a fitting
//! block takes one of another, and its later work waits on the device for an event: the host never waits.
//!
//! *A request* (`allocate`):
//! 1. The size is rounded up to 256 bytes. There are no classes and no pools.
//! 2. The smallest block of the own list that fits is taken; of equal blocks the one with the lowest address.
//! 3. Otherwise the other streams' lists are searched, in the order of the streams' first requests. The first list with a fitting
//!    block serves the request. The remainder of the block stays in that list.
//! 4. Otherwise the lists of the other streams are taken over completely, one after another, each coalesced with the own list,
//!    until a fitting block exists.
//! 5. Otherwise the device is asked for the current size of the pool, so that it doubles; for half of that if it refuses, and so on
//!    down to the size of the request. With a `maximum_pool_size` it is half of the remaining bytes up to that. If less remains
//!    than the request needs, entirely free blocks of the device are released first, from the lowest address up, until enough
//!    remains.
//! 6. The remainder of a block is always split off.
//!
//! *A free* (`free`). The block is coalesced with adjacent free blocks in the list of its stream, and an event is recorded on the
//! stream. Blocks from two allocations of the device never coalesce.
//!
//! *The first block* is in the list of the legacy default stream, which precedes all others. No driver here creates that stream, so
//! every stream takes from this list by step 3: remainders stay there, and adjacent blocks that a stream frees do not coalesce with
//! them before step 4. (In a program that works on the default stream itself, RMM coalesces both.)
//!
//! *The event that is too old.* After step 4 a stream has blocks that others freed. Its own event was recorded before it waited for
//! those, so a third stream that takes such a block waits for too little, and may write while the first still reads
//! (<https://github.com/rapidsai/rmm/issues/2489>). `record_after_merge` records the event again, as RMM's fix does
//! (<https://github.com/rapidsai/rmm/pull/2490>). Without it the pool is RMM's before the fix: all addresses are the same, but the
//! results of three streams may be wrong.
//!
//! *Differences from RMM.* Streams are ordered by their first request. RMM orders them by the addresses of their events. The first
//! block is allocated at the first request, and is at most half of the device's memory. RMM does not know uses on other streams: a
//! free that was announced (`record_use`) waits for them as in [`pytorch`](super::pytorch). Without a maximum RMM releases memory
//! only at its end; here also when the program requests it (`trim`), if a block of the device is entirely free. Private pools of
//! graphs are [`Pooled`]'s.
//!
//! *Good at* few driver calls and at short-lived streams. *Bad at* memory: doubling reserves up to twice the needed bytes, and a
//! stream that took a block waits for unrelated work.
//!
//! *Cost.* O(log n) in the free blocks, and in step 3 for each stream. Step 4 visits whole lists. An event is recorded at each
//! free. (RMM's lists are searched from the front, so its requests take time in proportion to the free blocks.)
//!
//! *Source.* RMM 26.10: `detail/stream_ordered_memory_resource.hpp`, `detail/coalescing_free_list.hpp`,
//! `detail/pool_memory_resource_impl.cpp`; its functions are named where their rules are.

use super::pooled::{Found, Policy, Pooled, Rules};
use super::registry::{Backend, Capabilities, StreamUse, With};
use crate::contract::{GUARANTEED_ALIGN, Path};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, Miss, SegmentSize, Segments as _, Step};
use crate::policy::size::Size;
use crate::policy::split::Split;
use crate::space::{FreeList, Owner};
use std::sync::Arc;
use vramlab_device::settings::{Settings as _, bytes, switch};
use vramlab_device::{Driver, DriverError, StreamId};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "rmm-pool",
    summary: "RMM's pool: exact splits, streams that take each other's blocks, a pool that doubles",
    capabilities: Capabilities {
        streams: StreamUse::Any,
        coalesces: false,
        keeps_segments: true,
        ..Pooled::<RmmPool>::CAPABILITIES
    },
    compared: false,
    constructor: &With(|driver, settings: &RmmPoolSettings| Ok(Arc::new(RmmPool::new(driver, *settings)))),
};

vramlab_device::settings! {
    /// Settings of RMM's pool.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RmmPoolSettings {
        /// Bytes that the device allocates at the first request.
        pub initial_pool_size: u64 = 256 << 20, bytes().at_most(1 << 48);
        /// Maximum of reserved bytes.
        pub maximum_pool_size: Option<u64> = None, bytes().at_most(1 << 48).or("none");
        /// Record a stream's event again when it took over the lists of others: RMM's fix of a race between three streams.
        pub record_after_merge: bool = true, switch();
    }
    check RmmPoolSettings::consistent;
}

impl RmmPoolSettings {
    fn consistent(&self) -> Result<(), String> {
        let Self { initial_pool_size: initial, maximum_pool_size: maximum, .. } = *self;
        let sizes = [("initial_pool_size", Some(initial)), ("maximum_pool_size", maximum)];
        for (name, size) in sizes.into_iter().filter_map(|(name, size)| size.map(|size| (name, size))) {
            if !size.is_multiple_of(GUARANTEED_ALIGN) {
                return Err(format!("{name} is {size}; RMM's pool takes multiples of {GUARANTEED_ALIGN}"));
            }
        }
        match maximum.filter(|maximum| *maximum < initial) {
            Some(maximum) => Err(format!(
                "maximum_pool_size ({maximum}) is less than initial_pool_size ({initial}); make it at least as large"
            )),
            None => Ok(()),
        }
    }
}

/// RMM's rules, see the [module](self).
#[derive(Debug)]
pub struct RmmPool {
    settings: RmmPoolSettings,
    rules: Rules,
    /// Whether the initial block was allocated.
    begun: bool,
}

impl RmmPool {
    /// An allocator with these rules on a device.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: RmmPoolSettings) -> Pooled<Self> {
        Self::named(BACKEND.name, driver, settings)
    }

    /// The same rules under the name of another entry.
    pub(super) fn named(name: &'static str, driver: Arc<dyn Driver>, settings: RmmPoolSettings) -> Pooled<Self> {
        let heap = Heap::plain(driver, None, Fit::best()).with_steals();
        // 5. `expand_pool`. RMM gives up then; announced uses, which it does not know, are waited for first.
        let steps = vec![Step::Segment, Step::WaitForFrees, Step::FitAgain];
        let ladder = Ladder { steps, size: SegmentSize::AsMuchAgain { maximum: settings.maximum_pool_size } };
        // 1., and 6. `allocate_from_block`
        let (size, split) = (Size::Multiple(GUARANTEED_ALIGN), Split::Always);
        let rules = Rules { name, settings: settings.json(), size, split, ladder };
        Pooled::over(heap, Self { settings, rules, begun: false })
    }

    /// `reclaim_free_blocks`: makes room below the maximum. By now all free memory is in the list of the request's stream.
    fn reclaim(&self, heap: &mut Heap, miss: &Miss) -> Result<(), DriverError> {
        let Some(maximum) = self.settings.maximum_pool_size.filter(|maximum| miss.bytes <= *maximum) else {
            return Ok(());
        };
        let left = |heap: &Heap| maximum.saturating_sub(heap.reserved());
        if miss.bytes <= left(heap).next_multiple_of(GUARANTEED_ALIGN) {
            return Ok(());
        }
        let mut idle = heap.idle_segments();
        idle.retain(|idle| heap.space()[heap.space()[idle.segment].first].list == miss.list);
        idle.sort_unstable_by_key(|idle| idle.addr);
        for idle in idle {
            if miss.bytes <= left(heap) {
                break;
            }
            heap.release(idle.segment)?;
        }
        Ok(())
    }
}

impl Policy for RmmPool {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    /// `initialize_pool`
    fn prepare(&mut self, heap: &mut Heap, list: FreeList) -> Result<(), DriverError> {
        if self.begun || list.owner.private.is_some() {
            return Ok(());
        }
        // RMM refuses to work where the device has less. Here some memory remains for others, such as the graphs' pools.
        let most =
            heap.driver().mem_info().map_or(u64::MAX, |info| info.free / 2 / GUARANTEED_ALIGN * GUARANTEED_ALIGN);
        let mut bytes = self.settings.initial_pool_size.min(most);
        let legacy = FreeList { owner: Owner::of(StreamId::NONE), ..list };
        while bytes >= GUARANTEED_ALIGN && heap.new_segment(legacy, bytes)?.is_none() {
            bytes /= 2;
        }
        self.begun = true;
        Ok(())
    }

    /// `get_block`, and its two forms of `get_block_from_other_stream`.
    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        if let Some(block) = heap.find(list, bytes, u64::MAX) {
            return Ok(Some((block, Path::Hit)));
        }
        let block = match heap.steal(list, bytes, u64::MAX)? {
            Some(block) => Some(block),
            None => heap.take_over(list, bytes, u64::MAX, self.settings.record_after_merge)?,
        };
        Ok(block.map(|block| (block, Path::WaitInserted)))
    }

    /// `expand_pool`
    fn grow(&self, heap: &mut Heap, miss: &Miss) -> Result<Found, DriverError> {
        self.reclaim(heap, miss)?;
        let again = |heap: &mut Heap| Ok(self.find(heap, miss.list, miss.bytes)?.map(|(block, _)| block));
        self.rules.ladder.climb(heap, miss, again)
    }
}
