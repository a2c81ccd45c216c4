//! # `pytorch-expandable`: PyTorch's allocator with expandable segments, written to be read
//!
//! This is the policy by which PyTorch 2.11 serves `torch.empty(…, device="cuda")` under
//! `PYTORCH_ALLOC_CONF=expandable_segments:True`. Given the same requests and the same results of the device it returns the same
//! addresses, maps and unmaps the same ranges in the same order, and counts the same statistics.
//!
//! *Idea.* The native policy ([`pytorch`](super::pytorch)) allocates segments of fixed sizes. When sizes change, the remainder of a
//! segment is often too small for the next request, and the segment is not releasable while one block in it is live. Here a segment
//! is a range of addresses that is larger than the device's memory. Memory is mapped in it on demand, so free memory at its end is
//! never too small: it grows.
//!
//! *A request* (`allocate`):
//! 1. Deferred frees whose streams have completed take effect; the size is rounded up; up to 1 MiB the small pool serves it, above
//!    that the large pool. All this is as in `pytorch`.
//! 2. Best fit among the free blocks of the stream and pool, where a block in front of a hole counts with the size of both
//!    together. From the smallest block that fits the search continues to the next larger one while that counts for less (`find`).
//!    So memory at the growing end stays unsplit while there is an inner block.
//! 3. When none fits, memory is mapped: in the lowest run of free blocks and holes that is large enough, only the missing bytes, in
//!    whole handles of 2 MiB (small pool) or 20 MiB (large pool). Without such a run a new range of addresses is reserved: nine
//!    eighths of the device's memory, one for each stream and pool.
//! 4. Where the limit or the device refuses (`grow`), all deferred frees are waited for, all free memory is unmapped in whole
//!    handles, and mapping is tried again.
//! 5. The remainder of the block is split off and stays free, from 512 bytes on.
//!
//! *A free* is that of `pytorch`. Free blocks coalesce across handles.
//!
//! *Graphs.* A private pool has ranges of its own.
//!
//! *Known faults* of PyTorch are reproduced. Each has a setting that fixes it:
//! - After memory was released, free blocks are not searched again (`retry_fit_after_sync`; pytorch #189504).
//! - A request can need several holes. When the memory ends after the first, the new memory stays mapped (`rollback`; #188008).
//! - The limit is compared with a whole segment of the native policy, 20 MiB for 2 MiB, although only the missing bytes are mapped.
//!   So it refuses too early, and by the last handle too late (`limit_shortfall`). A limit that is set at run time is enforced: the
//!   bytes to be mapped are compared with it, too.
//! - Each retry releases its handles and creates new ones (`reuse_handles`; #166116).
//! - Nine eighths of the memory for each stream and pool use up the addresses when there are many streams
//!   (`expandable_segments_reserve`; #192269).
//!
//! Garbage collection and the release of oversize blocks have no effect here: PyTorch excludes expandable segments.
//!
//! *Good at* sizes that keep changing, on one stream. *Bad at* several streams: free memory of one serves no other until
//! a retry has unmapped it. A retry waits for each stream and unmaps everything.
//!
//! Also *bad at* a few large sizes that recur. A native segment of 10 MiB or more is as large as its request and serves that size
//! again; in one range smaller blocks split such a hole. PyTorch's GPT-2 under FSDP reserves 10,748 MiB here and 10,400 natively.
//! Its two streams for communication are not the reason: they take 660 MiB here and 688 there. The main stream takes 10,088 instead
//! of 9,712, with at most 9,442 active. The last mapping there is for a request of 1,178 MiB, while 1,323 MiB are free but
//! fragmented.
//!
//! *Cost.* As `pytorch`, and in 2 a step for each skipped block, in 3 a step for each hole. Mapping 20 MiB takes about 30 µs on an
//! H200, of which `cuMemSetAccess` is 20 (`experiments calibrate`).
//!
//! *Source.* PyTorch 2.11, `c10/cuda/CUDACachingAllocator.cpp`; its functions are named where their rules are.

use super::pooled::{Found, Policy, Pooled, Rules};
use super::pytorch::PyTorchSettings;
use super::registry::{Backend, Capabilities, Needs, SegmentUse, With};
use crate::contract::{AllocError, Path};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, Miss, Segments as _, release_cached};
use crate::policy::size::Size;
use crate::policy::size::torch::{LARGE_SEGMENT, SMALL_SEGMENT};
use crate::policy::source::{Expandable, Sizes, Source};
use crate::policy::split::Split;
use crate::policy::stream::Stream;
use crate::space::{Account, BlockId, FreeList, Space};
use std::sync::Arc;
use vramlab_device::settings::{Settings as _, bytes, switch};
use vramlab_device::{Driver, DriverError};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "pytorch-expandable",
    summary: "PyTorch's policy with expandable segments: memory is mapped behind large ranges of addresses",
    capabilities: Capabilities {
        needs: Needs::Vmm,
        segments: SegmentUse::Expandable,
        restores: false,
        ..Pooled::<PyTorchExpandable>::CAPABILITIES
    },
    compared: false,
    constructor: &With(|driver, settings: &ExpandableSettings| {
        Ok(Arc::new(PyTorchExpandable::new(driver, *settings)?))
    }),
};

vramlab_device::settings! {
    /// Settings under PyTorch's names, and switches for its faults.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct ExpandableSettings extends torch: PyTorchSettings {
        /// Unmap the memory mapped for a request that does not get all of it. PyTorch does not.
        pub rollback: bool = false, switch();
        /// Compare the limit with the bytes to be mapped. PyTorch compares it with a segment of its native policy.
        pub limit_shortfall: bool = false, switch();
        /// Map the handles that a retry has unmapped, and release only the others. PyTorch releases all.
        pub reuse_handles: bool = false, switch();
        /// Addresses that a segment reserves; larger requests are refused. PyTorch: nine eighths of the device's memory.
        pub expandable_segments_reserve: Option<u64> = None, bytes().at_least(20 << 20).or("none");
    }
}

/// PyTorch's rules with expandable segments, see the [module](self).
#[derive(Debug)]
pub struct PyTorchExpandable {
    settings: ExpandableSettings,
    rules: Rules,
    /// Whether the limit was set at run time. Such a limit is enforced; that of the settings is PyTorch's.
    holds_limit: bool,
}

impl PyTorchExpandable {
    /// An allocator with these rules on a device.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] on a device without virtual memory management.
    pub fn new(driver: Arc<dyn Driver>, settings: ExpandableSettings) -> Result<Pooled<Self>, AllocError> {
        let reserve = settings.expandable_segments_reserve;
        let sizes = Sizes { small: SMALL_SEGMENT, large: LARGE_SEGMENT, reserve };
        let source = Expandable::new(BACKEND.name, driver, settings.torch.memory_limit, sizes)?;
        let space = Space::new(Account::with_pools(settings.torch.max_split()));
        let heap = Heap::new(space, Fit::best(), Stream::Own, Source::Expandable(source));
        Ok(Pooled::over(heap, Self::of(settings)))
    }

    /// The policy without a heap.
    pub(super) fn of(settings: ExpandableSettings) -> Self {
        let (name, json, ladder) = (BACKEND.name, settings.json(), Ladder::default());
        // `round_size`, `get_pool`, `get_allocation_size`
        let size = Size::Torch(settings.torch.roundup_power2_divisions);
        let rules = Rules { name, settings: json, size, split: split(&settings.torch), ladder };
        Self { settings, rules, holds_limit: false }
    }

    fn release_and_map(&self, heap: &mut Heap, miss: &Miss) -> Result<Option<BlockId>, DriverError> {
        release_cached(heap, 0)?;
        if self.settings.torch.retry_fit_after_sync
            && let Some((block, _)) = self.find(heap, miss.list, miss.bytes)?
        {
            return Ok(Some(block));
        }
        // `alloc_block` with `isRetry`
        heap.space_mut().account_mut().count_retry();
        self.map(heap, miss)
    }

    /// `alloc_block` and `try_allocate_expandable_block`.
    fn map(&self, heap: &mut Heap, miss: &Miss) -> Result<Option<BlockId>, DriverError> {
        let reserved = heap.space().account().reserved();
        let limit = heap.limit();
        let passes_limit = |more: u64| limit.is_some_and(|limit| reserved + more > limit);
        if !self.settings.limit_shortfall && passes_limit(miss.segment) {
            return Ok(None);
        }
        let Some(first) = heap.find_hole(miss.list, miss.bytes)? else { return Ok(None) };
        let compares_shortfall = self.settings.limit_shortfall || self.holds_limit;
        if compares_shortfall && passes_limit(heap.shortfall(first, miss.bytes, 1)) {
            return Ok(None);
        }
        heap.fill(first, miss.bytes, 1, self.settings.rollback)
    }
}

/// `should_split`, and the rule of `get_free_block` for oversize blocks.
pub(super) fn split(settings: &PyTorchSettings) -> Split {
    Split::TorchExpandable { max_split: settings.max_split(), max_non_split_rounding: settings.max_non_split_rounding }
}

/// Names the setting that needs a missing capability of the device, where the backend itself does not need it.
pub(super) fn needed_for(setting: &'static str) -> impl Fn(AllocError) -> AllocError {
    move |error| match error {
        AllocError::Unsupported { allocator, device, .. } => {
            AllocError::Unsupported { allocator, capability: setting, device }
        }
        other => other,
    }
}

/// `get_free_block`: a block of at least `bytes` that is not larger than `largest`.
pub(super) fn find(heap: &mut Heap, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
    let counts_for = |heap: &Heap, block: BlockId| {
        let hole = heap.hole_behind(block).map_or(0, |hole| heap.space()[hole].bytes);
        heap.space()[block].bytes + hole
    };
    let mut best = heap.find(list, bytes, u64::MAX)?;
    // Only as long as each counts for less than the one before: the minimum of all may follow later. Behind a block without a hole
    // none counts for less.
    while heap.hole_behind(best).is_some()
        && let Some(next) = heap.next_larger(best).filter(|next| counts_for(heap, *next) < counts_for(heap, best))
    {
        best = next;
    }
    Some(best).filter(|best| heap.space()[*best].bytes <= largest)
}

/// Requests go [step by step](super::pooled::serve) as in `DeviceCachingAllocator::malloc`.
impl Policy for PyTorchExpandable {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        Ok(find(heap, list, bytes, self.rules.split.largest(bytes)).map(|block| (block, Path::Hit)))
    }

    fn set_memory_limit(&mut self, heap: &mut Heap, bytes: Option<u64>) -> bool {
        self.holds_limit = true;
        heap.set_limit(bytes);
        true
    }

    fn grow(&self, heap: &mut Heap, miss: &Miss) -> Result<Found, DriverError> {
        // `alloc_block`
        if let Some(block) = self.map(heap, miss)? {
            return Ok(Some((block, Path::DriverAlloc)));
        }
        // `release_cached_blocks`: not for a private pool, nor while a graph is captured, when no wait is allowed.
        if heap.is_capturing() || miss.list.owner.private.is_some() {
            return Ok(None);
        }
        if self.settings.reuse_handles {
            heap.keep_handles();
        }
        let block = self.release_and_map(heap, miss);
        if self.settings.reuse_handles {
            heap.release_handles()?;
        }
        Ok(block?.map(|block| (block, Path::Retry)))
    }
}
