//! # `pytorch`: PyTorch's native caching allocator, written to be read
//!
//! This is the policy by which PyTorch 2.11 serves `torch.empty(…, device="cuda")`, without expandable segments. Given the same
//! requests and the same results of the device it returns the same addresses, allocates and releases the same segments, and counts
//! the same statistics. [`caching`](super::caching) follows the same rules, written for speed.
//!
//! *Idea.* `cudaMalloc` is slow and `cudaFree` waits for the whole device, so a training step should call neither. The allocator
//! therefore keeps the device's segments, and splits them into blocks. After the first step the cache has enough memory for a step.
//!
//! *A request* (`allocate`):
//! 1. Deferred frees whose streams have completed take effect.
//! 2. The size is rounded up to 512 bytes, or to steps between powers of two if `roundup_power2_divisions` says so.
//! 3. Up to 1 MiB the small pool serves it, above that the large pool. Pools share no segments, so that small blocks do not
//!    cut up large ones.
//! 4. The smallest free block of its stream and pool that fits is taken; of equal blocks the one with the lowest address. Other
//!    streams' blocks are not searched, because work of those streams may still use them.
//! 5. When none fits, the `ladder` is tried: a segment from the device, and if it has no memory, after a cache flush. Small
//!    requests share segments of 2 MiB, and those below 10 MiB segments of 20 MiB. Larger ones get a segment of their own, in
//!    multiples of 2 MiB (`policy/size/torch.rs`, tested by its `segments_by_size`).
//! 6. The remainder of the block is split off and stays free, if it is at least 512 bytes in the small pool, or more than 1 MiB in
//!    the large one.
//!
//! *A free* (`free`). The stream's own uses of the block were queued before its later work, so it may reuse the block immediately.
//! The block is coalesced with free neighbours in its segment. If other streams use it (`record_stream`), the free is deferred
//! until an event on each of them completes; inside a capture, which has no such events, until its end, or by the graph's own order
//! (`graph_capture_record_stream_reuse`).
//!
//! *Large blocks* may be kept unsplit: with `max_split_size` blocks of at least that size are never split, and serve only requests
//! that are as large and at most `max_non_split_rounding` smaller.
//!
//! *Private pools.* A request of a stream that is being captured into a graph, or that is in a private pool of the program, is
//! served from that pool by the same rules. The request's `owner` identifies the pool; no other request gets those blocks, and the
//! segments stay reserved until the graph is destroyed or the pool is released.
//!
//! *Good at* programs that repeat themselves. *Bad at* sizes that keep changing: remainders accumulate between live blocks, in
//! segments that are not releasable. Also bad at blocks that are used on several streams: each stream keeps its own.
//!
//! *Cost.* O(log n) in the free blocks for a request and for a free, and no driver call on a hit. One lock for all threads.
//!
//! *Source.* PyTorch 2.11, `c10/cuda/CUDACachingAllocator.cpp`; its functions are named where their rules are.

pub mod conf;
mod settings;

pub use settings::PyTorchSettings;
pub(crate) use settings::expandable_segments;

use super::pooled::{Policy, Pooled, Rules};
use super::registry::{Backend, Capabilities, TorchAllocator, Varying, of_torch};
use crate::contract::PoolKind;
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, SegmentSize, Step};
use crate::policy::size::Size;
use crate::policy::source::Source;
use crate::policy::split::Split;
use crate::policy::stream::Stream;
use crate::space::{Account, FreeList, Space};
use std::sync::Arc;
use vramlab_device::settings::Settings as _;
use vramlab_device::{Driver, DriverError};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "pytorch",
    summary: "PyTorch's native policy as text: the rules that caching follows, composed of parts",
    capabilities: Capabilities { follows_pytorch: true, ..Pooled::<PyTorch>::CAPABILITIES },
    // With its default settings it places every block where `caching` does.
    compared: false,
    constructor: &Varying {
        capabilities: |default, settings: &PyTorchSettings| Capabilities {
            follows_pytorch: settings.follows_pytorch(),
            ..default
        },
        build: |driver, settings| Ok(Arc::new(PyTorch::new(driver, *settings))),
    },
};

/// PyTorch's rules, see the [module](self).
#[derive(Debug)]
pub struct PyTorch {
    settings: PyTorchSettings,
    rules: Rules,
}

impl PyTorch {
    /// An allocator with these rules on a device.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: PyTorchSettings) -> Pooled<Self> {
        let space = Space::new(Account::with_pools(settings.max_split()));
        // 4. `get_free_block`: best fit by (stream, size, address), and no block of another stream.
        let source = Source::Plain { driver, limit: settings.memory_limit };
        let heap = Heap::new(space, Fit::best(), Stream::Own, source);
        Pooled::over(heap, Self { rules: rules(&settings), settings })
    }
}

/// The parts, for policies that fall back on them.
pub(super) fn rules(settings: &PyTorchSettings) -> Rules {
    Rules {
        name: BACKEND.name,
        settings: settings.json(),
        // 2. `round_size`, and 3. `get_pool`. For 5. `get_allocation_size`.
        size: Size::Torch(settings.roundup_power2_divisions),
        split: split(settings),
        ladder: ladder(settings),
    }
}

/// 6. When a remainder is split off: `should_split`. Which blocks are too large to serve: `get_free_block`.
pub(super) fn split(settings: &PyTorchSettings) -> Split {
    Split::Torch { max_split: settings.max_split(), max_non_split_rounding: settings.max_non_split_rounding }
}

/// 5. The steps when no free block fits, in order, until one of them returns a block.
pub(super) fn ladder(settings: &PyTorchSettings) -> Ladder {
    let mut steps = Vec::new();
    // Above a fraction of the limit, segments that have been idle for long are released: a program that works near its limit would
    // otherwise be refused memory repeatedly. `garbage_collect_cached_blocks`
    if let Some(above) = settings.collect_above() {
        steps.push(Step::CollectGarbage { above });
    }
    // The device is asked, unless that would exceed the limit. `alloc_block`
    steps.push(Step::Segment);
    // Segments that may not be split are many and large; only as many as necessary are released. `release_available_cached_blocks`
    if let Some(max_split) = settings.max_split_size {
        steps.push(Step::ReleaseOversize { max_split });
    }
    // All deferred frees are waited for, and all idle segments are released. `release_cached_blocks`
    steps.push(Step::ReleaseCached);
    // PyTorch does not check whether the wait made a fitting block reusable; this setting of ours does.
    if settings.retry_fit_after_sync {
        steps.push(Step::FitAgain);
    }
    // The device is asked for the last time. After that PyTorch raises `torch.OutOfMemoryError`.
    steps.push(Step::SegmentAgain);
    Ladder { steps, size: SegmentSize::OfClass }
}

/// Requests go [step by step](super::pooled::serve) as in `DeviceCachingAllocator::malloc`, and frees as in
/// `DeviceCachingAllocator::free`.
impl Policy for PyTorch {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Idle segments of the large pool grow older with each search, for the collection on the ladder.
    fn prepare(&mut self, heap: &mut Heap, list: FreeList) -> Result<(), DriverError> {
        if list.pool == Some(PoolKind::Large) && self.settings.collect_above().is_some() {
            heap.space_mut().count_search();
        }
        Ok(())
    }

    fn set_memory_limit(&mut self, heap: &mut Heap, bytes: Option<u64>) -> bool {
        heap.set_limit(bytes);
        self.settings.memory_limit = bytes;
        self.rules = rules(&self.settings);
        true
    }

    fn against_fragmentation(&self) -> Option<String> {
        self.settings.against_fragmentation(Some(of_torch(TorchAllocator::Expandable).name))
    }
}
