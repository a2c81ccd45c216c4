//! The segments of a heap, for a [ladder](crate::policy::grow::Ladder) to allocate and release.

use super::Heap;
use crate::contract::OomReport;
use crate::policy::grow::{Idle, Segments, release_order};
use crate::space::{BlockId, FreeList, Segment, SegmentId};
use vramlab_device::{DeviceAddr, DriverError};

impl Segments for Heap {
    type Block = BlockId;
    type Segment = SegmentId;

    fn reserved(&self) -> u64 {
        self.space.account().reserved()
    }

    fn limit(&self) -> Option<u64> {
        self.source.limit()
    }

    fn largest_segment(&self, list: FreeList) -> u64 {
        let segments = self.space.segments().filter(|(_, segment)| segment.list == list);
        segments.map(|(_, segment)| segment.bytes).max().unwrap_or(0)
    }

    fn is_capturing(&self) -> bool {
        self.captures > 0 || self.source.driver().is_capture_noted()
    }

    /// A new segment is one free block. Expandable segments grow by the bytes that a block of `bytes` needs, see
    /// [`extend`](Self::extend).
    fn new_segment(&mut self, list: FreeList, bytes: u64) -> Result<Option<BlockId>, DriverError> {
        if self.source.is_expandable() {
            return self.extend(list, bytes);
        }
        let Some(addr) = self.source.allocate(bytes, self.reserved())? else { return Ok(None) };
        if list.owner.private.is_none() {
            self.stream.came(list.owner.stream);
        }
        let block = self.space.add_segment(list, addr, bytes);
        self.fit.insert_new(self.space.as_free(block));
        Ok(Some(block))
    }

    fn idle_segments(&self) -> Vec<Idle> {
        let idle = self.space.segments().filter(|(_, segment)| segment.busy == 0 && !segment.expandable);
        let mut segments: Vec<Idle> = idle
            .filter(|(_, segment)| !self.is_pinned(segment.list))
            .map(|(id, &Segment { list, addr, bytes, first, .. })| Idle {
                segment: id,
                list,
                addr,
                bytes,
                age: self.space.age(first),
            })
            .collect();
        segments.sort_unstable_by_key(|idle| release_order(idle.list, idle.bytes, idle.addr));
        segments
    }

    fn segment_that_fits(&mut self, list: FreeList, bytes: u64) -> Option<u64> {
        let block = self.find(list, bytes, u64::MAX)?;
        Some(self.space[self.space[block].segment].addr)
    }

    /// # Panics
    /// When a block of it is live or pending, or it is expandable.
    fn release(&mut self, segment: SegmentId) -> Result<u64, DriverError> {
        let Segment { addr, bytes, busy, expandable, .. } = self.space[segment];
        assert!(busy == 0 && !expandable, "only an idle segment is releasable");
        let addr = DeviceAddr::new(addr).expect("a segment's address is not zero");
        // SAFETY: every segment of the space that is not expandable came from the source, see `new_segment`. None of its blocks is
        // live or pending, so only work uses it that is queued on the streams that freed its blocks. It is removed below, so it is
        // released once.
        unsafe { self.source.release(addr) }?;
        let blocks = self.space.remove_segment(segment);
        blocks.into_iter().for_each(|block| self.fit.remove(block));
        Ok(bytes)
    }

    fn release_parts(&mut self, keep: u64, filter: impl Fn(&FreeList) -> bool) -> Result<u64, DriverError> {
        self.unmap_free(keep, filter)
    }

    fn synchronize(&mut self) -> Result<(), DriverError> {
        self.space.account_mut().count_wait();
        let (capturing, mut done) = (self.is_capturing(), Vec::new());
        let outcome = self.pending.synchronize(self.source.driver().as_ref(), capturing, &mut done);
        self.put_completed(done);
        // A device with an open capture cannot be waited for; if the wait is refused, the state does not change.
        if !capturing && self.stream.sets_aside() && self.source.driver().device_synchronize().is_ok() {
            self.stream.synchronized();
        }
        self.take_event_error().and(outcome)
    }

    fn count_retry(&mut self) {
        self.space.account_mut().count_retry();
    }

    fn count_refusal(&mut self) {
        self.space.account_mut().count_refusal();
    }

    fn refusal(&self, allocator: &str, list: FreeList, requested: u64, needed: u64) -> OomReport {
        let mut largest = 0;
        let mut others = 0;
        for block in self.space.free_blocks() {
            if block.list == list {
                largest = block.bytes.max(largest);
            } else if block.list.owner != list.owner && !self.is_pinned(block.list) {
                others += block.bytes;
            }
        }
        // The policy adds its setting.
        OomReport::new(allocator, requested)
            .needing(needed)
            .with_memory(self.reserved(), self.space.account().stats().active_bytes.all.current)
            .with_free(largest, others)
            .with_limit(self.source.limit())
            .with_device(self.source.driver().as_ref())
    }
}
