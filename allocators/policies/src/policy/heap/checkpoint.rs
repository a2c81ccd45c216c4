//! Private pools at a checkpoint (PyTorch's `setCheckpointPoolState`, which graphs of compiled programs need).

use super::Heap;
use crate::contract::{CaptureId, SegmentInfo, Snapshot};
use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::{BTreeMap, BTreeSet};

impl Heap {
    /// Splits the free memory of a private pool as at a checkpoint, and takes the blocks that were live then: they are returned in
    /// address order. The pool has no live block before.
    ///
    /// # Errors
    /// Names the missing memory. Blocks that were taken before are free again.
    pub(crate) fn cut_as_before(&mut self, private: CaptureId, checkpoint: &Snapshot) -> Result<Vec<BlockId>, String> {
        let lists: BTreeSet<FreeList> = self.free_of(private).map(|block| block.list).collect();
        for list in lists {
            self.join(list);
        }
        let mut free: BTreeMap<u64, FreeBlock> = self.free_of(private).map(|block| (block.addr, block)).collect();
        let mut live = Vec::new();
        for segment in checkpoint.segments.iter().filter(|segment| !segment.is_idle()) {
            let (from, end) = (segment.addr.get(), segment.addr.get() + segment.bytes);
            let around = free.range(..=from).next_back().map(|(_, block)| *block);
            let Some(block) = around.filter(|block| block.addr + block.bytes >= end) else {
                live.into_iter().for_each(|block| {
                    self.put(block);
                });
                return Err(format!("memory of the checkpoint at {from:#x} was released or is in use"));
            };
            free.remove(&block.addr);
            let rest = self.cut_segment(block, segment, &mut live);
            free.extend(rest.map(|rest| (rest.addr, rest)));
        }
        Ok(live)
    }

    fn free_of(&self, private: CaptureId) -> impl Iterator<Item = FreeBlock> {
        self.space.free_blocks().filter(move |block| block.list.owner.private == Some(private))
    }

    /// Takes the live blocks of a segment's range out of a free block. Returns the free remainder behind the range.
    fn cut_segment(&mut self, block: FreeBlock, segment: &SegmentInfo, held: &mut Vec<BlockId>) -> Option<FreeBlock> {
        let before = segment.addr.get() - block.addr;
        let gap = (before > 0).then_some((before, None));
        let mut next = Some(block.id);
        for (bytes, requested) in gap.into_iter().chain(segment.parts()) {
            let at = next?;
            let is_whole = self.space[at].bytes == bytes;
            next = match requested {
                Some(requested) => {
                    self.take(at, block.list, bytes, requested);
                    held.push(at);
                    self.space[at].next.filter(|_| !is_whole)
                }
                None if is_whole => None,
                None => Some(self.cut(at, bytes)),
            };
        }
        next.map(|rest| self.space.as_free(rest))
    }
}
