//! The private pools of a recording, in an allocator that has them.

use crate::history::{History, PrivatePools};
use vramlab_device::StreamId;
use vramlab_policies::contract::{AllocError, DeviceAllocator, PrivatePool};

/// Directs each request to its pool.
#[derive(Debug)]
pub(super) struct Pools<'a> {
    allocator: &'a dyn DeviceAllocator,
    streams: &'a [StreamId],
    /// By number, from 1.
    pools: Vec<PrivatePool>,
    /// Pools to release, and the operation before which to do so.
    released: &'a [(u32, u32)],
    /// Pools to delete, and the operation before which to do so.
    deleted: &'a [(u32, u32)],
    /// Pools that release their free segments, and in which operation.
    trimmed: &'a [(u32, u32)],
    /// The current pool of each stream, 0 for none.
    current: Vec<u32>,
}

impl<'a> Pools<'a> {
    /// Creates the pools. Allocators that release several together do so in the order of creation.
    pub(super) fn new(
        history: &'a History,
        allocator: &'a dyn DeviceAllocator,
        streams: &'a [StreamId],
    ) -> Result<Self, AllocError> {
        let pools = (0..history.pools.count).map(|_| allocator.pool_create()).collect::<Result<_, _>>()?;
        let PrivatePools { released, deleted, trimmed, .. } = &history.pools;
        Ok(Self { allocator, streams, pools, released, deleted, trimmed, current: vec![0; streams.len()] })
    }

    fn pool(&self, number: u32) -> PrivatePool {
        self.pools[number as usize - 1]
    }

    /// Releases the pools that serve no request from operation `op` on, and deletes those that are due.
    #[inline]
    pub(super) fn release_until(&mut self, op: u32) -> Result<(), AllocError> {
        while let Some((&(_, pool), rest)) = self.released.split_first().filter(|((at, _), _)| *at <= op) {
            self.released = rest;
            self.release(pool)?;
        }
        while let Some((&(_, pool), rest)) = self.deleted.split_first().filter(|((at, _), _)| *at <= op) {
            self.deleted = rest;
            self.release(pool)?;
            self.allocator.pool_trim(self.pool(pool))?;
        }
        Ok(())
    }

    fn release(&mut self, pool: u32) -> Result<(), AllocError> {
        for stream in 0..self.current.len() {
            if self.current[stream] == pool {
                self.enter(stream, 0)?;
            }
        }
        self.allocator.pool_release(self.pool(pool))
    }

    /// Directs the next requests of a stream to a pool.
    #[inline]
    pub(super) fn enter(&mut self, stream: usize, pool: u32) -> Result<(), AllocError> {
        let before = std::mem::replace(&mut self.current[stream], pool);
        if before == pool {
            return Ok(());
        }
        if before != 0 {
            self.allocator.pool_end(self.streams[stream])?;
        }
        if pool != 0 { self.allocator.pool_begin(self.pool(pool), self.streams[stream]) } else { Ok(()) }
    }

    /// Directs all streams to the default pool.
    pub(super) fn leave(&mut self) -> Result<(), AllocError> {
        (0..self.current.len()).try_for_each(|stream| self.enter(stream, 0))
    }

    /// In operation `op`, releases the free segments of released pools.
    pub(super) fn trim(&mut self, op: u32) -> Result<(), AllocError> {
        while let Some((&(_, pool), rest)) = self.trimmed.split_first().filter(|((at, _), _)| *at <= op) {
            self.trimmed = rest;
            self.allocator.pool_trim(self.pool(pool))?;
        }
        Ok(())
    }
}
