//! # `cupy`: CuPy's memory pool
//!
//! The policy of `cupy.cuda.MemoryPool`, which serves NumPy-like programs on a GPU.
//!
//! *Idea.* As little machinery as possible: what was taken from the device is kept as it was, and cut exactly.
//!
//! *A request* (`allocate`):
//! 1. The size is rounded up to 512 bytes.
//! 2. Of the stream's free blocks the smallest that fits is taken; of equal ones the one that was made first.
//! 3. Any rest is cut off. It is a block of its own, and is not joined with anything before it is used and freed again or a
//!    neighbour is freed.
//! 4. When none fits, exactly as much is taken from the device. If it has no memory, or the limit would be passed, all blocks
//!    that are whole segments go back, and it is asked again.
//!
//! *A free* (`free`). The block goes back to the stream that allocated it, and is joined with the free blocks behind it and in
//! front of it.
//!
//! *What is different from CuPy.* Among blocks of one size CuPy takes the one whose object has the lowest address on the
//! host, which no program decides; here it is the oldest. CuPy waits for nobody: a free that was announced to other streams
//! (`record_use`) waits for them as in [`pytorch`](super::pytorch). Python's garbage collector, which CuPy runs before it gives
//! up, is not here.
//!
//! *Good at* programs that ask for the same sizes again, and at reserving no more than was asked for. *Bad at* sizes that
//! change: each larger one is a call of the device, and what was cut up does not go back.
//!
//! *Cost.* O(log n) in the free blocks for a request and for a free.
//!
//! *Source.* CuPy `cupy/cuda/memory.pyx`, `SingleDeviceMemoryPool`; its functions are named where their rules are.

use super::pooled::{Policy, Pooled};
use super::registry::{Backend, With};
use crate::contract::{AllocError, Path};
use crate::device::{Driver, StreamId};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, Miss, SegmentSize, Step};
use crate::policy::size::Size;
use crate::policy::source::Source;
use crate::policy::stream::Stream;
use crate::settings::{Settings as _, bytes};
use crate::space::{Account, BlockId, FreeList, Owner, Space};
use std::sync::Arc;

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "cupy",
    summary: "CuPy's pool: segments of exactly what was asked for, cut exactly, one set of blocks a stream",
    capabilities: Pooled::<CuPy>::CAPABILITIES,
    compared: false,
    constructor: &With(|driver, settings: &CuPySettings| Ok(Arc::new(CuPy::new(driver, *settings)))),
};

crate::settings! {
    /// Settings of CuPy's pool.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CuPySettings {
        /// Most bytes that may be reserved: CUPY_GPU_MEMORY_LIMIT.
        pub memory_limit: Option<u64> = None, bytes().or("none");
    }
}

/// CuPy's rules, see the [module](self).
#[derive(Debug)]
pub struct CuPy {
    settings: CuPySettings,
    size: Size,
    ladder: Ladder,
}

impl CuPy {
    /// An allocator with these rules on a device.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: CuPySettings) -> Pooled<Self> {
        let source = Source::Plain { driver, limit: settings.memory_limit };
        let heap = Heap::new(Space::new(Account::new()), Fit::oldest(), Stream::Own, source);
        // `_try_malloc`: `free_all_blocks`, and the device again. Waiting for announced uses may make a block that fits.
        let steps = vec![Step::Segment, Step::ReleaseCached, Step::FitAgain, Step::SegmentAgain];
        let ladder = Ladder { steps, size: SegmentSize::Exact };
        // `_round_size`
        Pooled::over(heap, Self { settings, size: Size::Multiple(512), ladder })
    }
}

impl Policy for CuPy {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        self.settings.json()
    }

    fn size(&self) -> &Size {
        &self.size
    }

    /// `_malloc`.
    fn allocate(&mut self, heap: &mut Heap, owner: Owner, requested: u64) -> Result<(BlockId, Path), AllocError> {
        heap.process_events()?;
        // 1.
        let bytes = self.size.round(requested);
        let list = FreeList { owner, pool: None };
        let miss = Miss { list, bytes, segment: self.size.segment(bytes) };
        let find = |heap: &mut Heap| heap.find(list, bytes, u64::MAX);
        // 2. `_get_chunk`, and 4.
        let found = match find(heap) {
            Some(block) => Some((block, Path::Hit)),
            None => self.ladder.climb(heap, &miss, |heap| Ok(find(heap)))?,
        };
        let (block, path) = found.ok_or_else(|| heap.out_of_memory(BACKEND.name, &miss, requested))?;
        // 3. `_Chunk.split`
        let cut = heap.space()[block].bytes > bytes;
        heap.take(block, list, bytes, requested);
        Ok((block, if cut && path == Path::Hit { Path::Split } else { path }))
    }

    /// `free`, `_Chunk.merge`.
    fn free(&mut self, heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
        super::pytorch::free(heap, block, users)
    }
}
