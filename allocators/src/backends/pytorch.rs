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
//! waits for an event on each of them.
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

use super::caching::CachingSettings;
use super::pooled::{Policy, Pooled};
use super::registry::{Backend, Capabilities, TorchAllocator, Varying, of_torch};
use crate::contract::{AllocError, Path, PoolKind};
use crate::device::{Driver, StreamId};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, Miss, SegmentSize, Step};
use crate::policy::size::Size;
use crate::policy::source::Source;
use crate::policy::split::Split;
use crate::policy::stream::Stream;
use crate::settings::Settings as _;
use crate::space::{Account, BlockId, FreeList, Owner, Space};
use std::sync::Arc;

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "pytorch",
    summary: "PyTorch's native policy as text: the rules that caching follows, put together from parts",
    capabilities: Capabilities { follows_pytorch: true, ..Pooled::<PyTorch>::CAPABILITIES },
    // With its default settings it places every block where `caching` does.
    compared: false,
    constructor: &Varying {
        capabilities: |default, settings: &CachingSettings| Capabilities {
            follows_pytorch: settings.follows_pytorch(),
            ..default
        },
        build: |driver, settings| Ok(Arc::new(PyTorch::new(driver, *settings))),
    },
};

/// PyTorch's rules, see the [module](self).
#[derive(Debug)]
pub struct PyTorch {
    settings: CachingSettings,
    /// `round_size`, `get_pool`, `get_allocation_size`.
    size: Size,
    /// `should_split`, and what `get_free_block` says of oversize blocks.
    split: Split,
    ladder: Ladder,
}

impl PyTorch {
    /// An allocator with these rules on a device.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: CachingSettings) -> Pooled<Self> {
        let max_split = settings.max_split_size.unwrap_or(u64::MAX);
        let space = Space::new(Account::with_pools(max_split));
        // Best fit by (stream, size, address), and no block of another stream.
        let source = Source::Plain { driver, limit: settings.memory_limit };
        let heap = Heap::new(space, Fit::best(), Stream::Own, source);
        Pooled::over(heap, Self::rules(settings))
    }

    /// The rules by themselves, for policies that fall back on them.
    pub(super) fn rules(settings: CachingSettings) -> Self {
        let size = Size::Torch(settings.roundup_power2_divisions);
        Self { size, split: split(&settings), ladder: Self::ladder(&settings), settings }
    }

    /// What is done when no free block fits, in order, until one of the steps gives a block.
    pub(super) fn ladder(settings: &CachingSettings) -> Ladder {
        let mut steps = Vec::new();
        // Above a share of the limit, segments that have long been idle make room: a program that works near its limit would
        // otherwise be refused memory over and over. `garbage_collect_cached_blocks`
        if let Some(above) = collect_above(settings) {
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
}

/// When a rest is cut off, and which blocks are too large to serve.
pub(super) fn split(settings: &CachingSettings) -> Split {
    let max_split = settings.max_split_size.unwrap_or(u64::MAX);
    Split::Torch { max_split, max_non_split_rounding: settings.max_non_split_rounding }
}

/// Bytes above which idle segments are collected; `None` when they never are.
pub(super) fn collect_above(settings: &CachingSettings) -> Option<u64> {
    let limit = settings.memory_limit.filter(|_| settings.garbage_collection_threshold > 0.0)?;
    // CAST: PyTorch computes it in the same way, in a double cut to an integer.
    Some((settings.garbage_collection_threshold * limit as f64) as u64)
}

impl Policy for PyTorch {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        self.settings.json()
    }

    fn size(&self) -> &Size {
        &self.size
    }

    fn against_fragmentation(&self) -> Option<String> {
        self.settings.against_fragmentation(Some(of_torch(TorchAllocator::Expandable).name))
    }

    /// `DeviceCachingAllocator::malloc`.
    fn allocate(&mut self, heap: &mut Heap, owner: Owner, requested: u64) -> Result<(BlockId, Path), AllocError> {
        // 1. `process_events`
        heap.process_events()?;
        // 2. `round_size`, and 3. `get_pool`
        let bytes = self.size.round(requested);
        let list = FreeList { owner, pool: self.size.pool(bytes) };
        if list.pool == Some(PoolKind::Large) && collect_above(&self.settings).is_some() {
            // Idle segments grow older with each search, for the collection on the ladder.
            heap.space_mut().count_search();
        }
        // 4. `get_free_block`
        let largest = self.split.largest(bytes);
        let find = |heap: &mut Heap| heap.find(list, bytes, largest);
        // 5. `get_allocation_size`, and what follows
        let miss = Miss { list, bytes, segment: self.size.segment(bytes) };
        let found = match find(heap) {
            Some(block) => Some((block, Path::Hit)),
            None => self.ladder.climb(heap, &miss, |heap| Ok(find(heap)))?,
        };
        let (block, path) = found.ok_or_else(|| heap.out_of_memory(BACKEND.name, &miss, requested))?;
        // 6. `should_split`, `alloc_found_block`
        let size = heap.space()[block].bytes;
        let cut = self.split.cuts(list.pool, bytes, size);
        heap.take(block, list, if cut { bytes } else { size }, requested);
        Ok((block, if cut && path == Path::Hit { Path::Split } else { path }))
    }

    fn free(&mut self, heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
        free(heap, block, users)
    }
}

/// `DeviceCachingAllocator::free`. `users` are the other streams that were announced to use the block.
pub(super) fn free(heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
    if !users.is_empty() {
        // `insert_events`: an event is queued on each, and looked at when the next request comes.
        heap.put_after(block, users)?;
        return Ok(Path::Deferred);
    }
    // `free_block`: joined with the free blocks in front of it and behind it, and put into the free list.
    let joined = heap.put(block);
    heap.take_event_error()?;
    Ok(if joined { Path::Coalesce } else { Path::Hit })
}
