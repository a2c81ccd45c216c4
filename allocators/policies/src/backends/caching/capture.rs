//! Memory of graph captures (PyTorch's private pools): each has a shard of its own that is not in the streams' table.
//!
//! While a capture is open, `waiting` is not zero, so that every request searches for one; and the stream's live blocks are flagged
//! as shared, so that their frees do. Without a capture there is no search.

use super::blocks::State;
use super::shard::Shard;
use super::{BlockIndex, Caching};
use crate::backends::captures::need_graphs;
use crate::contract::{AllocError, CaptureId, DeviceAllocator};
use crate::policy::grow::release_private;
use crate::sync::lock;
use std::sync::atomic::Ordering::{Acquire, Release};
use vramlab_device::StreamId;

/// The state of a capture.
#[derive(Debug)]
pub(super) struct Pool {
    /// Number of its shard.
    shard: u32,
    /// Blocks whose free is deferred to the end, by shard and record.
    waiting: Vec<(u32, BlockIndex)>,
}

/// Number and bytes of live blocks.
fn held(shard: &Shard) -> (usize, u64) {
    let shard = shard.lock();
    let live = shard.cache().blocks().iter().filter(|(_, block)| block.state == State::Allocated);
    live.fold((0, 0), |(blocks, bytes), (_, block)| (blocks + 1, bytes + block.bytes))
}

/// Gives a shard to another private pool if it has no segment; true if so. PyTorch serves no pool from another's leftover memory.
fn claim(shard: &Shard, private: CaptureId) -> bool {
    let mut shard = shard.lock();
    let vacant = !shard.is_pinned() && shard.cache().blocks().iter().next().is_none();
    if vacant {
        shard.pin(private);
    }
    vacant
}

impl Caching {
    /// Sets the shared flag of every live block of a stream, so that its free searches for a capture; or clears the flag of those
    /// that no other stream was announced to use.
    fn flag_held(&self, shard: &Shard, shared: bool) {
        let mut counted = self.totals.enter(shard, &self.shards);
        let (cache, uses) = counted.parts();
        let live = cache.blocks().iter().filter(|(_, block)| block.state == State::Allocated);
        let flagged = live.map(|(index, _)| index).filter(|index| shared || !uses.contains_key(index));
        for index in flagged.collect::<Vec<_>>() {
            cache.set_shared(index, shared);
        }
    }

    /// Whether any capture is open.
    pub(super) fn any_capture(&self) -> bool {
        self.capturing.load(Acquire) != 0
    }

    /// Whether any graph is being captured, also by other parts of the program.
    pub(super) fn is_capturing(&self) -> bool {
        self.any_capture() || self.driver.is_capture_noted()
    }

    /// The shard that serves a stream: that of its open capture, or of its private pool, if it has one.
    pub(super) fn shard_for(&self, stream: StreamId) -> &Shard {
        let captured = match self.any_capture() {
            true => lock(&self.captures).open_on(stream).and_then(|pool| self.shards.by_id(pool.shard)),
            false => None,
        };
        captured.or_else(|| self.shard_in_pool(stream)).unwrap_or_else(|| self.shards.of_stream(stream))
    }

    pub(super) fn begin_capture(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        need_graphs(self.name(), self.driver.as_ref())?;
        let captures = &mut *lock(&self.captures);
        captures.need_none_on(self.name(), stream)?;
        let pool = |capture| Pool { shard: self.private_shard(stream, capture).id, waiting: Vec::new() };
        let capture = captures.begin(stream, pool);
        self.flag_held(self.shards.of_stream(stream), true);
        self.waiting.fetch_add(1, Release);
        self.capturing.fetch_add(1, Release);
        Ok(capture)
    }

    /// A pinned shard for a stream's part of a private pool: an empty one of an earlier pool, or a new one.
    pub(super) fn private_shard(&self, stream: StreamId, private: CaptureId) -> &Shard {
        let mut shards = self.shards.private().into_iter().filter(|shard| shard.stream == stream);
        shards.find(|shard| claim(shard, private)).unwrap_or_else(|| {
            let made = self.shards.make_private(stream);
            made.lock().pin(private);
            made
        })
    }

    /// Defers the free of a block to the end of a capture, if it belongs to the capture or its stream; false when there is no such
    /// capture.
    pub(super) fn defer_to_capture(&self, shard: &Shard, index: BlockIndex) -> bool {
        let reuses = lock(&self.pending).reuses_in_captures();
        let captures = &mut *lock(&self.captures);
        let Some(pool) = captures.open_on(shard.stream) else { return false };
        if pool.shard != shard.id && self.shards.is_private(shard) {
            // Of an earlier capture of the stream.
            return false;
        }
        if pool.shard == shard.id && reuses {
            return false;
        }
        self.totals.step(shard, &self.shards, |counted, waiting| {
            let (cache, uses) = counted.parts();
            let block = cache.blocks()[index];
            waiting.add_block(block.pool, block.bytes, block.requested);
            if pool.shard == shard.id {
                // Other streams used it in the graph, which ends with the capture.
                uses.remove(&index);
            }
            cache.defer(index);
        });
        pool.waiting.push((shard.id, index));
        true
    }

    pub(super) fn end_capture(&self, capture: CaptureId) -> Result<(), AllocError> {
        let (waiting, (blocks, bytes)) = {
            let captures = &mut *lock(&self.captures);
            let (stream, pool) = captures.find_open(self.name(), capture)?;
            let (shard, waiting) = (pool.shard, std::mem::take(&mut pool.waiting));
            self.flag_held(self.shards.of_stream(stream), false);
            captures.end(stream);
            self.capturing.fetch_sub(1, Release);
            self.waiting.fetch_sub(1, Release);
            (waiting, self.shards.by_id(shard).map_or((0, 0), held))
        };
        let mut freed = Ok(());
        for (shard, index) in waiting {
            freed = freed.and(self.free_after_capture(shard, index));
        }
        if blocks > 0 {
            return Err(AllocError::CaptureLive { allocator: self.name(), blocks, bytes });
        }
        Ok(freed?)
    }

    pub(super) fn release_capture(&self, capture: CaptureId) -> Result<(), AllocError> {
        let pool = lock(&self.captures).release(self.name(), capture)?;
        let Some(shard) = self.shards.by_id(pool.shard) else { return Ok(()) };
        let grown = &mut self.grown();
        shard.lock().unpin();
        release_private(grown, capture)?;
        Ok(())
    }

    /// Lets every segment be released, whatever captures there were; frees deferred to the end of a capture take effect.
    pub(super) fn unpin_all(&self) {
        let mut captures = std::mem::take(&mut *lock(&self.captures));
        self.capturing.store(0, Release);
        for (shard, index) in captures.each().flat_map(|(_, pool)| std::mem::take(&mut pool.waiting)) {
            // An error cannot be returned here; the block then waits like any other.
            let _ = self.free_after_capture(shard, index);
        }
        for shard in self.shards.private() {
            shard.lock().unpin();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::backends::{Caching, CachingSettings};
    use crate::contract::{DeviceAllocator, GraphMemory as _, Request};
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Acquire;
    use vramlab_device::{Driver, NullDriver};

    #[test]
    fn nothing_is_looked_at_once_a_capture_has_ended() {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 40));
        let (caching, stream) = (Caching::new(driver, CachingSettings::default()), crate::stream(1));
        let flagged = || {
            let shard = caching.shards.of_stream(stream).lock();
            shard.cache().blocks().iter().filter(|(_, block)| block.shared).count()
        };
        let blocks = [100, 3 << 20, 12 << 20].map(|bytes| caching.allocate(Request::new(bytes), stream).unwrap());
        caching.record_use(&blocks[0], crate::stream(2)).unwrap();
        let id = caching.capture_begin(stream).unwrap();
        assert_eq!((flagged(), caching.waiting.load(Acquire)), (3, 1));
        caching.capture_end(id).unwrap();
        // A block that another stream was announced to use stays flagged.
        assert_eq!((flagged(), caching.waiting.load(Acquire), caching.any_capture()), (1, 0, false));
        for block in blocks {
            // SAFETY: the null device queues no work.
            unsafe { caching.deallocate(block, stream) }.unwrap();
        }
        caching.capture_release(id).unwrap();
    }
}
