//! The private pools of an allocator: which there are, and which streams' requests go to one.

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

    /// An error unless a pool is one of these.
    pub(super) fn need(&self, allocator: &'static str, pool: PrivatePool) -> Result<(), AllocError> {
        if self.alive.contains(&pool) {
            return Ok(());
        }
        refused(allocator, format!("there is no pool {pool}, or it has been released"))
    }

    /// Lets a stream's requests go to a pool.
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

    /// Lets a stream's requests go where they went before.
    pub(super) fn end(&mut self, allocator: &'static str, stream: StreamId) -> Result<(), AllocError> {
        match self.routes.remove(&stream) {
            Some(_) => Ok(()),
            None => refused(allocator, format!("stream {} is in no pool", stream.get())),
        }
    }

    /// The pool that a stream's requests go to.
    pub(super) fn of(&self, stream: StreamId) -> Option<PrivatePool> {
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

    /// An error while a pool may be asked for memory.
    pub(super) fn need_released(&self, allocator: &'static str, pool: PrivatePool) -> Result<(), AllocError> {
        if self.alive.contains(&pool) {
            return refused(allocator, format!("pool {pool} has not been released"));
        }
        Ok(())
    }
}

/// What keeps a private pool from going back to a checkpoint: all memory where the checkpoint holds something has to be there `now`, in a
/// segment of the same list, and free or in blocks that are `given` back. A segment of fixed size has to be the same one.
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
            return Err(format!("memory of the checkpoint at {start:#x} is not there"));
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

/// Whether a segment of a checkpoint lies in one that is there now.
fn is_same(now: &SegmentInfo, before: &SegmentInfo) -> bool {
    let (now_end, end) = (now.addr.get() + now.bytes, before.addr.get() + before.bytes);
    let covers = match before.expandable {
        true => now.addr <= before.addr && end <= now_end,
        false => now.addr == before.addr && now.bytes == before.bytes,
    };
    covers && (now.stream, now.pool, now.expandable) == (before.stream, before.pool, before.expandable)
}
