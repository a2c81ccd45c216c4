//! Restoring a snapshot: segments and blocks of another allocator, taken over before the first allocation.

use super::growth::Growth;
use super::{Caching, hand_out};
use crate::backends::caching::block_cache::{Served, Wanted};
use crate::backends::caching::blocks::BlockRecord;
use crate::contract::AllocError;
use crate::contract::PoolKind;
use crate::contract::{Block, Path};
use crate::contract::{BlockState, SegmentInfo, Snapshot};
use crate::policy::size::torch::MIN_BLOCK;
use std::sync::atomic::Ordering::Relaxed;
use vramlab_device::DeviceAddr;

impl Caching {
    /// See [`restore`](crate::DeviceAllocator::restore).
    pub(super) fn take_over(
        &self,
        snapshot: &Snapshot,
        age: &dyn Fn(DeviceAddr) -> u64,
    ) -> Result<Vec<Block>, AllocError> {
        snapshot.segments.iter().try_for_each(check)?;
        let growth = &mut *self.lock_growth();
        let made = self.make_segments(growth, &snapshot.segments)?;
        let mut blocks = Vec::new();
        // The count of searches only grows, so it starts where the oldest age can be told.
        let oldest = made.iter().map(|(segment, _)| age(segment.addr)).max().unwrap_or(0);
        if self.collects {
            self.searches.fetch_max(oldest, Relaxed);
        }
        for (segment, addr) in made {
            let shard = self.shard_for(segment.stream);
            let in_use = |state: BlockState| state != BlockState::Free;
            let record = BlockRecord::segment(addr, segment.bytes, pool_of(segment));
            let cache = &mut *self.totals.enter(shard, &self.shards);
            if segment.blocks.len() == 1 && !in_use(segment.blocks[0].state) {
                let freed_at = self.searches.load(Relaxed).saturating_sub(age(segment.addr));
                cache.restore_segment(record, freed_at);
                continue;
            }
            let parts: Vec<(u64, Option<u64>)> = segment
                .blocks
                .iter()
                .map(|block| (block.bytes, in_use(block.state).then_some(block.requested)))
                .collect();
            let used = cache.add_segment(record, &parts);
            for index in used {
                let block = cache.blocks()[index];
                let served = Served { index, addr: block.addr, bytes: block.bytes, split: false };
                self.count_oversize(served);
                blocks.push(hand_out(shard, served, block.requested, Path::DriverAlloc));
            }
        }
        Ok(blocks)
    }

    /// Takes the segments from the device, the last first: drivers hand addresses out from the top downwards, so they come to lie
    /// in their order. Those without a block in use only if there is memory for all.
    fn make_segments<'a>(
        &self,
        growth: &mut Growth,
        segments: &'a [SegmentInfo],
    ) -> Result<Vec<(&'a SegmentInfo, u64)>, AllocError> {
        let in_use = |segment: &SegmentInfo| segment.blocks.iter().any(|block| block.state != BlockState::Free);
        let mut made: Vec<(&SegmentInfo, u64)> = Vec::with_capacity(segments.len());
        let mut cached = true;
        for segment in segments.iter().rev() {
            if !cached && !in_use(segment) {
                continue;
            }
            loop {
                match self.new_segment(growth, pool_of(segment), segment.bytes, false) {
                    Ok(Some(addr)) => {
                        made.push((segment, addr));
                        break;
                    }
                    Ok(None) if cached => {
                        cached = false;
                        let (kept, idle) = made.into_iter().partition(|(segment, _)| in_use(segment));
                        made = kept;
                        self.give_back(growth, idle)?;
                        if !in_use(segment) {
                            break;
                        }
                    }
                    Ok(None) => {
                        let shard = self.shard_for(segment.stream);
                        let bytes = segment.bytes;
                        let wanted = Wanted { pool: pool_of(segment), rounded: bytes, requested: bytes, now: 0 };
                        let error = self.out_of_memory(growth, shard, wanted);
                        self.give_back(growth, made)?;
                        return Err(error);
                    }
                    Err(error) => {
                        self.give_back(growth, made)?;
                        return Err(error.into());
                    }
                }
            }
        }
        made.reverse();
        Ok(made)
    }

    fn give_back(&self, growth: &mut Growth, segments: Vec<(&SegmentInfo, u64)>) -> Result<(), AllocError> {
        for (segment, addr) in segments {
            // SAFETY: the device gave it for this segment, which no client has seen yet.
            unsafe { self.driver.mem_free(DeviceAddr::handed_out(addr)) }?;
            growth.removed(&self.settings, pool_of(segment), segment.bytes);
        }
        Ok(())
    }
}

fn pool_of(segment: &SegmentInfo) -> PoolKind {
    segment.pool.unwrap_or(PoolKind::Large)
}

/// Refuses what is no segment cut into blocks.
fn check(segment: &SegmentInfo) -> Result<(), AllocError> {
    let sizes = segment.blocks.iter().map(|block| block.bytes);
    let whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(MIN_BLOCK);
    let apart = |pair: &[crate::contract::BlockInfo]| pair.iter().any(|block| block.state != BlockState::Free);
    if segment.blocks.is_empty()
        || !sizes.clone().all(whole)
        || sizes.sum::<u64>() != segment.bytes
        || segment.blocks.iter().any(|block| block.requested > block.bytes)
        || !segment.blocks.windows(2).all(apart)
    {
        return Err(AllocError::InvalidRequest {
            bytes: segment.bytes,
            align: 1,
            reason: "the blocks of a segment do not fill it",
        });
    }
    Ok(())
}
