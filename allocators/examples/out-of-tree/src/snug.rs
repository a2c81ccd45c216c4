//! # `snug`: blocks that are never cut, put together from the library's parts
//!
//! *Policy.* A request is rounded up to a multiple of 512 bytes. The smallest free block of its stream serves it, as a whole, if
//! the request fills three quarters of it. Else it gets a segment of exactly its size. When the device has no memory left, idle
//! segments go back to it, and it is asked once more. A free makes the block reusable for its stream: at once, or when the
//! other streams that use it are done.
//!
//! *Good at* programs that ask for the same sizes over and over: nothing fragments. *Bad at* sizes that keep changing.

use std::sync::Arc;
use vramlab::backends::{Backend, Capabilities, Policy, Pooled, With};
use vramlab::policy::grow::{Ladder, Miss, SegmentSize, Step};
use vramlab::policy::{Heap, fit::Fit, size::Size, source::Source, stream::Stream};
use vramlab::settings::{NoSettings, Settings};
use vramlab::space::{Account, BlockId, FreeList, Owner, Space};
use vramlab::{AllocError, Driver, Path, StreamId};

/// The entry: what lists, help and tests know of this backend.
pub static BACKEND: Backend = Backend {
    name: "snug",
    summary: "serves a request with a whole block of about its size, and cuts none",
    capabilities: Capabilities { coalesces: false, ..Pooled::<Snug>::CAPABILITIES },
    compared: true,
    constructor: &With(|driver, _: &NoSettings| Ok(Arc::new(Snug::on(driver)))),
};

/// See the [module](self).
#[derive(Debug)]
pub struct Snug {
    size: Size,
    ladder: Ladder,
}

impl Snug {
    /// An allocator with this policy on `driver`.
    pub fn on(driver: Arc<dyn Driver>) -> Pooled<Self> {
        let source = Source::Plain { driver, limit: None };
        let heap = Heap::new(Space::new(Account::new()), Fit::best(), Stream::Own, source);
        let steps = vec![Step::Segment, Step::ReleaseCached, Step::SegmentAgain];
        let ladder = Ladder { steps, size: SegmentSize::Exact };
        // SAFETY: the heap is new. `allocate` takes the block that it names; `free` puts back the one that it is given, behind
        // its users if there are any.
        unsafe { Pooled::new(heap, Self { size: Size::Torch(Default::default()), ladder }) }
    }
}

impl Policy for Snug {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        NoSettings::default().json()
    }

    fn size(&self) -> &Size {
        &self.size
    }

    fn allocate(&mut self, heap: &mut Heap, owner: Owner, requested: u64) -> Result<(BlockId, Path), AllocError> {
        heap.process_events()?;
        let bytes = self.size.round(requested);
        let miss = Miss { list: FreeList { owner, pool: None }, bytes, segment: bytes };
        let find = |heap: &mut Heap| heap.find(miss.list, bytes, bytes + bytes / 3);
        let found = match find(heap) {
            Some(block) => Some((block, Path::Hit)),
            None => self.ladder.climb(heap, &miss, |heap| Ok(find(heap)))?,
        };
        let (block, path) = found.ok_or_else(|| heap.out_of_memory(self.name(), &miss, requested))?;
        heap.take(block, miss.list, heap.space()[block].bytes, requested);
        Ok((block, path))
    }

    fn free(&mut self, heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
        if !users.is_empty() {
            return Ok(heap.put_after(block, users).map(|()| Path::Deferred)?);
        }
        heap.put(block);
        Ok(Path::Hit)
    }
}
