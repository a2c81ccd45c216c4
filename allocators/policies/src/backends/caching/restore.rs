//! Segments and blocks of another allocator, taken over before the first allocation.

use super::block_cache::Served;
use super::growth::{Found, Grown};
use super::{Caching, hand_out};
use crate::backends::restore::{Restores, restore};
use crate::contract::{AllocError, Block, DeviceAllocator, Path, Snapshot};
use crate::policy::size::Size;
use crate::space::{FreeList, Owner};
use std::sync::atomic::Ordering::Relaxed;
use vramlab_device::{DeviceAddr, DriverError, StreamId};

impl Caching {
    /// See [`restore`](crate::contract::Takeover::restore).
    pub(super) fn take_over(
        &self,
        snapshot: &Snapshot,
        age: &dyn Fn(DeviceAddr) -> u64,
    ) -> Result<Vec<Block>, AllocError> {
        // The number of searches only grows, so it starts at the oldest age.
        if self.collects {
            let oldest = snapshot.segments.iter().map(|segment| age(segment.addr)).max().unwrap_or(0);
            self.searches.fetch_max(oldest, Relaxed);
        }
        let owner = |stream: StreamId| Owner { stream, private: self.shard_for(stream).lock().private() };
        let size = Size::Torch(self.settings.roundup_power2_divisions);
        restore(&mut self.grown(), (self.name(), &size, &owner), snapshot, age)
    }
}

impl Restores for Grown<'_> {
    type Held = Block;

    fn give_back(&mut self, segment: Found) -> Result<(), DriverError> {
        let Found::New(segment) = segment else { return Ok(()) };
        // SAFETY: the device allocated it, and no client has seen it yet.
        unsafe { Grown::give_back(self, &segment) }
    }

    fn leave_whole(&mut self, list: FreeList, segment: Found, age: u64) {
        let (caching, Found::New(segment)) = (self.caching, segment) else { return };
        let freed_at = caching.searches.load(Relaxed).saturating_sub(age);
        caching.totals.enter(caching.shard_of_list(list), &caching.shards).restore_segment(segment, freed_at);
    }

    fn cut(&mut self, list: FreeList, segment: Found, parts: &[(u64, Option<u64>)]) -> Vec<Block> {
        let (caching, Found::New(segment)) = (self.caching, segment) else { return Vec::new() };
        let shard = caching.shard_of_list(list);
        let cache = &mut *caching.totals.enter(shard, &caching.shards);
        let live = cache.add_segment(segment, parts).into_iter().map(|index| {
            let block = cache.blocks()[index];
            let served = Served { index, addr: block.addr, bytes: block.bytes, split: false };
            caching.count_oversize(served);
            hand_out(shard, served, block.requested, Path::DriverAlloc)
        });
        live.collect()
    }
}
