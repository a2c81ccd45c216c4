//! # `pytorch`: PyTorch's native caching allocator, to be read
//!
//! This is the policy by which PyTorch 2.11 serves `torch.empty(…, device="cuda")`, without expandable segments. Given the
//! same requests and the same answers of the device it puts every block at the same address, takes and returns the same
//! segments, and counts the same statistics. [`caching`](super::caching) follows the same rules, written for speed.
//!
//! *Idea.* `cudaMalloc` is slow and `cudaFree` waits for the whole device, so a training step should call neither. The
//! allocator therefore keeps the segments that the device gave, and cuts them into blocks. After the first step the cache
//! has what a step needs.
//!
//! *A request* (`allocate`):
//! 1. Frees that waited for other streams are carried out where these are done.
//! 2. The size is rounded up to 512 bytes, or to steps between powers of two if `roundup_power2_divisions` says so.
//! 3. Up to 1 MiB the small pool serves it, above that the large pool. Pools share no segments, so that small blocks do not
//!    cut up large ones.
//! 4. Among the free blocks of its stream and pool the smallest that fits is taken; of equal ones that with the lowest
//!    address. Other streams' blocks are not looked at, because work of those streams may still use them.
//! 5. When none fits, the `ladder` is climbed: a segment from the device, and if it has no memory, what is cached goes back
//!    first. Small requests share segments of 2 MiB, and those below 10 MiB segments of 20 MiB. Larger ones get a segment of
//!    their own, in multiples of 2 MiB.
//! 6. What is left of the block is cut off and stays free, if it is worth keeping: at least 512 bytes in the small pool,
//!    more than 1 MiB in the large one.
//!
//! *A free* (`free`). The stream's own uses of the block were queued before its next ones will be, so it may reuse the block
//! at once. The block is joined with free neighbours in its segment. If other streams use it (`record_stream`), it first
//! waits for an event on each of them; inside a capture, where no event tells, for its end, or for the graph's own order
//! (`graph_capture_record_stream_reuse`).
//!
//! *Large blocks* may be kept whole: with `max_split_size` blocks of at least that size are never cut, and serve only
//! requests that are as large and at most `max_non_split_rounding` smaller.
//!
//! *Private pools.* A request of a stream that is being captured into a graph, or that a program lets into a private pool, is
//! served from that pool by the same rules. Its `owner` says so; no other request sees those blocks, and the segments stay
//! until the graph is gone or the pool is released.
//!
//! *Good at* programs that repeat themselves. *Bad at* sizes that keep changing: rests pile up between live blocks, in
//! segments that cannot go back. Also bad at blocks that are used on several streams: each stream keeps its own.
//!
//! *Cost.* O(log n) in the free blocks for a request and for a free, and no driver call on a hit. One lock for all threads.
//!
//! *Source.* PyTorch 2.11, `c10/cuda/CUDACachingAllocator.cpp`; its functions are named where their rules are.

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
    summary: "PyTorch's native policy as text: the rules that caching follows, put together from parts",
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

/// 6. When a rest is cut off: `should_split`. Which blocks are too large to serve: `get_free_block`.
pub(super) fn split(settings: &PyTorchSettings) -> Split {
    Split::Torch { max_split: settings.max_split(), max_non_split_rounding: settings.max_non_split_rounding }
}

/// 5. What is done when no free block fits, in order, until one of the steps gives a block.
pub(super) fn ladder(settings: &PyTorchSettings) -> Ladder {
    let mut steps = Vec::new();
    // Above a share of the limit, segments that have long been idle make room: a program that works near its limit would
    // otherwise be refused memory over and over. `garbage_collect_cached_blocks`
    if let Some(above) = settings.collect_above() {
        steps.push(Step::CollectGarbage { above });
    }
    // The device is asked, unless that would pass the limit. `alloc_block`
    steps.push(Step::Segment);
    // Segments that may not be split are many and large; just enough of them go. `release_available_cached_blocks`
    if let Some(max_split) = settings.max_split_size {
        steps.push(Step::ReleaseOversize { max_split });
    }
    // All pending frees are waited for, and everything idle goes. `release_cached_blocks`
    steps.push(Step::ReleaseCached);
    // PyTorch does not look whether the wait made a block that fits; this setting of ours does.
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
