//! The private pools of a history, kept in an allocator that has such.

use crate::history::History;
use vramlab_device::StreamId;
use vramlab_policies::contract::{AllocError, DeviceAllocator, PrivatePool};

/// Lets each request go to its pool.
#[derive(Debug)]
pub(super) struct Pools<'a> {
    allocator: &'a dyn DeviceAllocator,
    streams: &'a [StreamId],
    /// By number, from 1.
    pools: Vec<PrivatePool>,
    /// Those that are still to be released, and before which operation.
    released: &'a [(u32, u32)],
    /// Those that give memory back, and in which operation.
    trimmed: &'a [(u32, u32)],
    /// The pool that each stream is in, 0 for none.
    current: Vec<u32>,
}

impl<'a> Pools<'a> {
    /// Makes the pools. Allocators that give back several at once do so in the order in which they were made.
    pub(super) fn new(
        history: &'a History,
        allocator: &'a dyn DeviceAllocator,
        streams: &'a [StreamId],
    ) -> Result<Self, AllocError> {
        let pools = (0..history.pools.count).map(|_| allocator.pool_create()).collect::<Result<_, _>>()?;
        let (released, trimmed) = (&history.pools.released, &history.pools.trimmed);
        Ok(Self { allocator, streams, pools, released, trimmed, current: vec![0; streams.len()] })
    }

    fn pool(&self, number: u32) -> PrivatePool {
        self.pools[number as usize - 1]
    }

    /// Releases the pools that are asked for nothing from operation `op` on.
    #[inline]
    pub(super) fn release_until(&mut self, op: u32) -> Result<(), AllocError> {
        while let Some((&(_, pool), rest)) = self.released.split_first().filter(|((at, _), _)| *at <= op) {
            self.released = rest;
            for stream in 0..self.current.len() {
                if self.current[stream] == pool {
                    self.enter(stream, 0)?;
                }
            }
            self.allocator.pool_release(self.pool(pool))?;
        }
        Ok(())
    }

    /// Lets the next requests of a stream go to a pool.
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

    /// Lets no stream's requests go to a pool.
    pub(super) fn leave(&mut self) -> Result<(), AllocError> {
        (0..self.current.len()).try_for_each(|stream| self.enter(stream, 0))
    }

    /// Gives back in operation `op` what is idle of released pools.
    pub(super) fn trim(&mut self, op: u32) -> Result<(), AllocError> {
        while let Some((&(_, pool), rest)) = self.trimmed.split_first().filter(|((at, _), _)| *at <= op) {
            self.trimmed = rest;
            self.allocator.pool_trim(self.pool(pool))?;
        }
        Ok(())
    }
}
