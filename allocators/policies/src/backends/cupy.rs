//! # `cupy`: CuPy's memory pool
//!
//! The policy of `cupy.cuda.MemoryPool`, which serves NumPy-like programs on a GPU.
//!
//! *Idea.* Minimal machinery: segments are kept as they were allocated, and split exactly.
//!
//! *A request* (`allocate`):
//! 1. The size is rounded up to 512 bytes.
//! 2. The smallest free block of the stream that fits is taken; of equal blocks the oldest one.
//! 3. Any remainder is split off. It is a block of its own, and is not coalesced before it is used and freed again or a neighbour
//!    is freed.
//! 4. When none fits, a segment of exactly this size is allocated. If the device has no memory, or the limit would be exceeded, all
//!    blocks that are whole segments are released, and the device is asked again.
//!
//! *A free* (`free`). The block returns to the stream that allocated it, and is coalesced with the free blocks behind it and in
//! front of it.
//!
//! *Differences from CuPy.* Among blocks of one size CuPy takes the one whose object has the lowest address on the host, which no
//! program controls; here it is the oldest. CuPy does not wait for other streams: a free that was announced to other streams
//! (`record_use`) waits for them as in [`pytorch`](super::pytorch). Python's garbage collector, which CuPy runs before it gives up,
//! is not modelled.
//!
//! *Good at* programs that repeat the same sizes, and at reserving no more than was requested. *Bad at* sizes that change: each
//! larger one is a driver call, and split segments are not released.
//!
//! *Cost.* O(log n) in the free blocks for a request and for a free.
//!
//! *Source.* CuPy `cupy/cuda/memory.pyx`, `SingleDeviceMemoryPool`; its functions are named where their rules are.

use super::pooled::{Pooled, Rules};
use super::registry::{Backend, With};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, SegmentSize};
use crate::policy::size::Size;
use crate::policy::split::Split;
use std::sync::Arc;
use vramlab_device::Driver;
use vramlab_device::settings::{Settings as _, bytes};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "cupy",
    summary: "CuPy's pool: segments of exactly the requested size, split exactly, one set of blocks per stream",
    capabilities: Pooled::<Rules>::CAPABILITIES,
    compared: false,
    constructor: &With(|driver, settings: &CuPySettings| Ok(Arc::new(settings.build(driver)))),
};

vramlab_device::settings! {
    /// Settings of CuPy's pool.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CuPySettings {
        /// Maximum of reserved bytes: CUPY_GPU_MEMORY_LIMIT.
        pub memory_limit: Option<u64> = None, bytes().or("none");
    }
}

impl CuPySettings {
    /// An allocator with these settings on a device.
    #[must_use]
    pub fn build(&self, driver: Arc<dyn Driver>) -> Pooled<Rules> {
        // 2. `_get_chunk`
        let heap = Heap::plain(driver, self.memory_limit, Fit::oldest());
        // 4. `_try_malloc`: `free_all_blocks`, and the device again. Waiting for announced uses may make a fitting block reusable.
        let ladder = Ladder::releasing(SegmentSize::Exact);
        // 1. `_round_size`, and 3. `_Chunk.split`. A free is `_Chunk.merge`.
        let (size, split) = (Size::Multiple(512), Split::Always);
        Pooled::over(heap, Rules { name: BACKEND.name, settings: self.json(), size, split, ladder })
    }
}
