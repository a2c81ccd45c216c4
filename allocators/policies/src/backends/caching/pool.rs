//! Private pools that programs make (PyTorch's `MemPool`): a shard for each stream that asks one for memory.
//!
//! While a stream is in a pool, `waiting` is not zero, so that every request looks for one. Otherwise nothing is looked at.

use super::Caching;
use super::shard::Shard;
use crate::backends::private_pools::PrivatePools;
use crate::contract::{AllocError, DeviceAllocator, PrivatePool};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Release;
use vramlab_device::StreamId;

/// The pools, and the number of the shard of each stream that asked one for memory.
#[derive(Debug, Default)]
pub(super) struct Pools {
    pub(super) known: PrivatePools,
    shards: BTreeMap<(PrivatePool, StreamId), u32>,
}

impl Caching {
    /// Lets requests of a stream go to a pool.
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
        let pool = pools.known.of(stream)?;
        pools.shards.get(&(pool, stream)).and_then(|shard| self.shards.by_id(*shard))
    }

    /// Lets the segments of a pool go back.
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
