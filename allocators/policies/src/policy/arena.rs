//! A segment in which the policy chooses the address of each block, for any stream.

use super::Heap;
use super::grow::Segments as _;
use crate::space::{BlockId, FreeList, Owner, SegmentId};
use vramlab_device::DriverError;

/// The segment. Its heap has [`Stream::Arena`](super::stream::Stream::Arena), and no search uses its free list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arena {
    segment: SegmentId,
    list: FreeList,
    addr: u64,
}

impl Arena {
    /// Reserves a segment; `None` when there is no memory.
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn reserve(heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Option<Self>, DriverError> {
        let block = heap.new_segment(list, bytes)?;
        Ok(block.map(|block| &heap.space()[block]).map(|block| Self { segment: block.segment, list, addr: block.addr }))
    }

    /// First address.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// Whether it is still reserved: the heap may have released it while no block was live.
    pub(crate) fn is_reserved(&self, heap: &Heap) -> bool {
        // A later segment may have the same number, but is of another list: there is one arena at a time.
        let segment = heap.space().find_segment(self.segment);
        segment.is_some_and(|segment| (segment.list, segment.addr) == (self.list, self.addr))
    }

    /// The free block with all of `bytes` from `offset` on. O(log n).
    pub(crate) fn find(&self, heap: &mut Heap, offset: u64, bytes: u64) -> Option<BlockId> {
        heap.free_around(self.addr + offset, bytes).filter(|block| heap.space()[*block].segment == self.segment)
    }

    /// Takes `bytes` from `offset` on for `owner`, who requested `requested` of them, out of the block that [`find`](Self::find)
    /// returned.
    pub(crate) fn take(
        &self,
        heap: &mut Heap,
        block: BlockId,
        (offset, bytes): (u64, u64),
        owner: Owner,
        requested: u64,
    ) -> BlockId {
        heap.take_at(block, self.addr + offset, FreeList { owner, ..self.list }, bytes, requested)
    }
}
