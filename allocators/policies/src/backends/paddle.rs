//! # `paddle`: PaddlePaddle's growing best fit, which allocates the end of a block
//!
//! The policy of `AutoGrowthBestFitAllocator`, PaddlePaddle's default, with its `StreamSafe` wrapper.
//!
//! *Idea.* Best fit over chunks that are allocated on demand. A block is split at its *end*, so the free part keeps its address and
//! only becomes shorter. All other policies here allocate the front.
//!
//! *A request* (`allocate`):
//! 1. The size is rounded up to 256 bytes.
//! 2. The smallest free block of the stream that fits is taken; of equal blocks the one with the lowest address.
//! 3. Its last bytes are allocated. Its front stays free.
//! 4. When none fits, a chunk of `chunk_size` is allocated, or of the size of the request if that is more. Its end is allocated,
//!    too. If the device has no memory, unused chunks are released, and the device is asked again.
//!
//! *A free* (`free`). The block is coalesced with the free blocks in front of it and behind it. If other streams use it, the free
//! is deferred until an event on each of them completes.
//!
//! *Differences from PaddlePaddle.* The events are recorded behind the work that was queued before the free; there behind the work
//! that was queued when the use was announced.
//!
//! *Good at* the workloads of other best-fit allocators. *Bad at* sizes that keep changing, and at small chunks: with the default
//! of 1 MiB most larger requests are a driver call.
//!
//! *Cost.* O(log n) in the free blocks for a request and for a free.
//!
//! *Source.* PaddlePaddle `paddle/phi/core/memory/allocation/auto_growth_best_fit_allocator.cc`,
//! `stream_safe_cuda_allocator.cc`; its functions are named where their rules are.

use super::pooled::{Policy, Pooled, Rules};
use super::registry::{Backend, With};
use crate::contract::GUARANTEED_ALIGN;
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, SegmentSize};
use crate::policy::size::Size;
use crate::policy::split::Split;
use crate::space::{BlockId, FreeList};
use std::sync::Arc;
use vramlab_device::Driver;
use vramlab_device::settings::{Settings as _, bytes};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "paddle",
    summary: "PaddlePaddle's growing best fit, which allocates the end of a block",
    capabilities: Pooled::<Paddle>::CAPABILITIES,
    compared: false,
    constructor: &With(|driver, settings: &PaddleSettings| Ok(Arc::new(Paddle::new(driver, *settings)))),
};

vramlab_device::settings! {
    /// Settings of PaddlePaddle's growing best fit.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct PaddleSettings {
        /// Bytes of a chunk, if the request is not larger: FLAGS_auto_growth_chunk_size_in_mb.
        pub chunk_size: u64 = 1 << 20, bytes().at_least(GUARANTEED_ALIGN).at_most(1 << 48);
        /// Maximum of reserved bytes.
        pub memory_limit: Option<u64> = None, bytes().or("none");
    }
    check PaddleSettings::consistent;
}

impl PaddleSettings {
    fn consistent(&self) -> Result<(), String> {
        match self.chunk_size.is_multiple_of(GUARANTEED_ALIGN) {
            true => Ok(()),
            false => {
                Err(format!("chunk_size is {}; chunks are multiples of {GUARANTEED_ALIGN} bytes", self.chunk_size))
            }
        }
    }
}

/// PaddlePaddle's rules, see the [module](self).
#[derive(Debug)]
pub struct Paddle {
    rules: Rules,
    chunk_size: u64,
}

impl Paddle {
    /// An allocator with these rules on a device.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: PaddleSettings) -> Pooled<Self> {
        let heap = Heap::plain(driver, settings.memory_limit, Fit::best());
        // 4. `AllocateImpl`; `FreeIdleChunks`, and the device again.
        let ladder = Ladder::releasing(SegmentSize::OfClass);
        let (size, split) = (Size::Multiple(GUARANTEED_ALIGN), Split::Always);
        let rules = Rules { name: BACKEND.name, settings: settings.json(), size, split, ladder };
        Pooled::over(heap, Self { rules, chunk_size: settings.chunk_size })
    }
}

impl Policy for Paddle {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    /// `realloc_size`
    fn segment(&self, bytes: u64) -> u64 {
        bytes.max(self.chunk_size)
    }

    /// 3. The end of the block.
    fn take(&self, heap: &mut Heap, block: BlockId, list: FreeList, bytes: u64, requested: u64) -> (BlockId, bool) {
        let end = heap.take_end(block, list, bytes, requested);
        (end, end != block)
    }
}
