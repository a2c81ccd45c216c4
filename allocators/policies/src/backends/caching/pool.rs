//! Private pools of programs (PyTorch's `MemPool`): a shard for each stream that allocates from one.
//!
//! While a stream is in a pool, `waiting` is not zero, so that every request searches for one. Otherwise there is no search.

use super::Caching;
use super::growth::Found;
use super::not_held;
use super::shard::Shard;
use crate::backends::private_pools::{PrivatePools, obstacle};
use crate::backends::restore::Restores as _;
use crate::contract::{AllocError, Block, DeviceAllocator, PrivatePool, RestoreError, Snapshot};
use crate::space::{FreeList, Owner};
use crate::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Release;
use vramlab_device::StreamId;

/// The pools, and the number of the shard of each stream that allocated from one.
#[derive(Debug, Default)]
pub(super) struct Pools {
    pub(super) known: PrivatePools,
    shards: BTreeMap<(PrivatePool, StreamId), u32>,
}

impl Caching {
    /// Serves requests of a stream from a pool.
    pub(super) fn begin_pool(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        let pools = &mut *lock(&self.pools);
        pools.known.begin(self.name(), pool, stream)?;
        pools.shards.entry((pool, stream)).or_insert_with(|| self.private_shard(stream, pool.id()).id);
        self.waiting.fetch_add(1, Release);
        Ok(())
    }

    /// The shard of the private pool that a stream is in.
    pub(super) fn shard_in_pool(&self, stream: StreamId) -> Option<&Shard> {
        let pools = &*lock(&self.pools);
        let pool = pools.known.pool_of(stream)?;
        pools.shards.get(&(pool, stream)).and_then(|shard| self.shards.by_id(*shard))
    }

    /// The shard of a stream's part of an existing pool.
    pub(super) fn shard_of_pool(&self, pool: PrivatePool, stream: StreamId) -> Result<&Shard, AllocError> {
        let pools = &mut *lock(&self.pools);
        pools.known.need(self.name(), pool)?;
        let known = pools.shards.get(&(pool, stream)).and_then(|shard| self.shards.by_id(*shard));
        Ok(known.unwrap_or_else(|| {
            let made = self.private_shard(stream, pool.id());
            pools.shards.insert((pool, stream), made.id);
            made
        }))
    }

    /// Whether a private pool can be restored to a checkpoint when some blocks are freed.
    fn check_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: &[(Block, StreamId)],
    ) -> Result<(), AllocError> {
        lock(&self.pools).known.need(self.name(), pool)?;
        // Blocks that other streams use are deferred once they are freed.
        self.wait_and_process_events(None)?;
        let mut given = BTreeSet::new();
        for (block, _) in held {
            let Some(shard) = self.shard_of(block) else { return Err(not_held(self.name(), block)) };
            let mut locked = shard.lock();
            let Some(index) = Self::find(locked.cache(), block) else { return Err(not_held(self.name(), block)) };
            if locked.uses().get(&index).is_none_or(Vec::is_empty) {
                given.insert(block.addr());
            }
        }
        let of_pool: Vec<u32> = {
            let pools = lock(&self.pools);
            pools.shards.iter().filter(|((of, _), _)| *of == pool).map(|(_, shard)| *shard).collect()
        };
        let shards = of_pool.iter().filter_map(|shard| self.shards.by_id(*shard));
        let mut segments: Vec<_> =
            shards.flat_map(|shard| shard.lock().cache().segments(shard.stream, Some(pool.id()))).collect();
        segments.sort_unstable_by_key(|segment| segment.addr);
        obstacle(&Snapshot { segments }, checkpoint, |addr| given.contains(&addr))
            .map_err(|reason| AllocError::PrivatePool { allocator: self.name(), reason })
    }

    /// See [`PrivatePools::pool_restore`](crate::contract::PrivatePools::pool_restore). Takes time in proportion to the blocks of the pool.
    pub(super) fn restore_pool(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        if let Err(error) = self.check_restore(pool, checkpoint, &held) {
            return Err(RestoreError { held, error });
        }
        for (block, _) in held {
            // Blocks elsewhere in the pool may wait for other streams. One whose stream records no event is stranded, and `trim`
            // reports it.
            if let Err(AllocError::Driver(error)) = self.free(block) {
                lock(&self.pending).note_error(error);
            }
        }
        let grown = &mut self.grown();
        let mut restored = Vec::new();
        for segment in checkpoint.segments.iter().filter(|segment| !segment.is_idle()) {
            let (addr, bytes) = (segment.addr.get(), segment.bytes);
            let owner = Owner { stream: segment.stream, private: Some(pool.id()) };
            let list = FreeList { owner, pool: segment.pool };
            let complete = {
                let cache = &mut *self.totals.enter(self.shard_of_list(list), &self.shards);
                let there = cache.blocks().iter().find(|(_, block)| (block.addr, block.bytes) == (addr, bytes));
                let indices = there.map(|(index, _)| index);
                indices.and_then(|index| cache.remove_segment(index, addr))
            };
            let Some(complete) = complete else {
                // Blocks that are live again by then are freed; they were just allocated, so their free cannot fail.
                restored.into_iter().for_each(|block| _ = self.free(block));
                let reason = format!("the segment of pool {pool} at {addr:#x} was taken by another thread meanwhile");
                let error = AllocError::PrivatePool { allocator: self.name(), reason };
                return Err(RestoreError { held: Vec::new(), error });
            };
            restored.extend(grown.cut(list, Found::New(complete), &segment.parts()));
        }
        Ok(restored)
    }

    /// Lets the segments of a pool be released.
    pub(super) fn release_pool(&self, pool: PrivatePool) -> Result<(), AllocError> {
        let pools = &mut *lock(&self.pools);
        pools.known.release(self.name(), pool)?;
        pools.shards.retain(|(of, _), shard| {
            let shard = self.shards.by_id(*shard).filter(|_| *of == pool);
            shard.inspect(|shard| shard.lock().unpin()).is_none()
        });
        Ok(())
    }
}
