//! The private pools of an allocator, and the streams that are in one.

use crate::contract::{AllocError, BlockState, CaptureId, PrivatePool, SegmentInfo, Snapshot};
use std::collections::{BTreeMap, BTreeSet};
use vramlab_device::{DeviceAddr, StreamId};

/// Pools that are not released, and the streams that are in one.
#[derive(Debug, Default)]
pub(super) struct PrivatePools {
    alive: BTreeSet<PrivatePool>,
    routes: BTreeMap<StreamId, PrivatePool>,
}

fn refused<T>(allocator: &'static str, reason: String) -> Result<T, AllocError> {
    Err(AllocError::PrivatePool { allocator, reason })
}

impl PrivatePools {
    /// Makes a pool.
    pub(super) fn create(&mut self) -> PrivatePool {
        let pool = PrivatePool::next();
        self.alive.insert(pool);
        pool
    }

    /// An error unless this allocator has the pool.
    pub(super) fn need(&self, allocator: &'static str, pool: PrivatePool) -> Result<(), AllocError> {
        if self.alive.contains(&pool) {
            return Ok(());
        }
        refused(allocator, format!("there is no pool {pool}, or it has been released"))
    }

    /// Serves a stream's requests from a pool.
    pub(super) fn begin(
        &mut self,
        allocator: &'static str,
        pool: PrivatePool,
        stream: StreamId,
    ) -> Result<(), AllocError> {
        self.need(allocator, pool)?;
        if let Some(other) = self.routes.get(&stream) {
            return refused(allocator, format!("stream {} is in pool {other}; end that first", stream.get()));
        }
        self.routes.insert(stream, pool);
        Ok(())
    }

    /// Ends `begin`: the stream's requests are served as before.
    pub(super) fn end(&mut self, allocator: &'static str, stream: StreamId) -> Result<(), AllocError> {
        match self.routes.remove(&stream) {
            Some(_) => Ok(()),
            None => refused(allocator, format!("stream {} is not in a pool", stream.get())),
        }
    }

    /// The pool that serves a stream's requests.
    pub(super) fn pool_of(&self, stream: StreamId) -> Option<PrivatePool> {
        self.routes.get(&stream).copied()
    }

    /// Ends requests to a pool. Returns its number as an owner.
    pub(super) fn release(&mut self, allocator: &'static str, pool: PrivatePool) -> Result<CaptureId, AllocError> {
        self.need(allocator, pool)?;
        if let Some((stream, _)) = self.routes.iter().find(|(_, route)| **route == pool) {
            return refused(allocator, format!("stream {} is in pool {pool}; end that first", stream.get()));
        }
        self.alive.remove(&pool);
        Ok(pool.id())
    }

    /// An error unless a pool was released.
    pub(super) fn need_released(&self, allocator: &'static str, pool: PrivatePool) -> Result<(), AllocError> {
        if self.alive.contains(&pool) {
            return refused(allocator, format!("pool {pool} has not been released"));
        }
        Ok(())
    }
}

/// An error if a private pool cannot be restored to a checkpoint: all memory of live blocks of the checkpoint must still be
/// reserved `now`, in a segment of the same list, and free or in blocks that are `given`. A segment of fixed size must be the same
/// one.
pub(super) fn obstacle(
    now: &Snapshot,
    checkpoint: &Snapshot,
    given: impl Fn(DeviceAddr) -> bool,
) -> Result<(), String> {
    for segment in checkpoint.segments.iter().filter(|segment| !segment.is_idle()) {
        let (start, end) = (segment.addr.get(), segment.addr.get() + segment.bytes);
        let before = now.segments.partition_point(|other| other.addr.get() <= start);
        let around = before.checked_sub(1).map(|at| &now.segments[at]).filter(|around| is_same(around, segment));
        let Some(around) = around else {
            return Err(format!("memory of the checkpoint at {start:#x} was released"));
        };
        let inside = around.blocks.iter().filter(|block| {
            let addr = block.addr.get();
            addr < end && start < addr + block.bytes
        });
        for block in inside {
            let goes = match block.state {
                BlockState::Free => true,
                BlockState::Allocated => given(block.addr),
                BlockState::PendingFree => false,
            };
            if !goes {
                let addr = block.addr.get();
                return Err(format!("memory of the checkpoint at {addr:#x} is in use, or another stream uses it"));
            }
        }
    }
    Ok(())
}

/// Whether a segment of a checkpoint is inside a segment that is reserved now.
fn is_same(now: &SegmentInfo, before: &SegmentInfo) -> bool {
    let (now_end, end) = (now.addr.get() + now.bytes, before.addr.get() + before.bytes);
    let covers = match before.expandable {
        true => now.addr <= before.addr && end <= now_end,
        false => now.addr == before.addr && now.bytes == before.bytes,
    };
    covers && (now.stream, now.pool, now.expandable) == (before.stream, before.pool, before.expandable)
}
