//! `expandable_segments`: memory is mapped behind large ranges of addresses, PyTorch's rules for which
//! [`pytorch-expandable`](crate::backends::expandable) is the text.
//!
//! Only what is done when no free block fits is here, and what gives memory back. One thread at a time is here, and holds no
//! shard's lock while it calls the device. What keeps others from memory on its way is in
//! [`holes`](crate::backends::caching::core::block_cache).

use super::growth::{Growth, Idle};
use super::shard::Shard;
use super::{BACKEND, Caching, hand_out};
use crate::backends::CachingSettings;
use crate::backends::caching::core::block_cache::{Cut, Wanted};
use crate::backends::caching::core::blocks::{BlockIndex, MAX_BLOCK};
use crate::backends::expandable::needed_for;
use crate::contract::{AllocError, Block, CaptureId, Path, PoolKind};
use crate::device::{Driver, DriverError};
use crate::policy::size::torch::{LARGE_SEGMENT, SMALL_SEGMENT, segment_size};
use crate::policy::source::{Expandable, Sizes};
use crate::policy::split::Split;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most addresses of a range: no block of it is larger than a record can say, in whole handles of any device.
const MOST_RESERVED: u64 = MAX_BLOCK >> 30 << 30;

/// The ranges of addresses, and what is mapped behind them.
#[derive(Debug)]
pub(super) struct Expansion {
    source: Expandable,
    /// By first address.
    ranges: BTreeMap<u64, Range>,
    /// Numbers of ranges that are gone, the last first.
    vacant: Vec<usize>,
    /// Addresses without memory, by shard, pool and address.
    holes: BTreeMap<(u32, PoolKind, u64), BlockIndex>,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug)]
struct Range {
    /// In the order in which ranges go back.
    number: usize,
    shard: u32,
    pool: PoolKind,
    /// The record in front of its blocks.
    head: BlockIndex,
    addr: u64,
    bytes: u64,
    mapped: u64,
}

/// It is the setting that a device cannot serve, not the backend.
const NEEDED: &str = "virtual memory management for expandable_segments (pytorch and caching do without it)";

impl Expansion {
    /// No ranges yet.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] on a device without virtual memory management; [`AllocError::Driver`] when it does not say
    /// its granularity.
    pub(super) fn new(driver: Arc<dyn Driver>, settings: &CachingSettings) -> Result<Self, AllocError> {
        // PyTorch takes nine eighths of the device's memory.
        let total = driver.describe().total_bytes;
        let reserve = (total.saturating_add(total / 8) > MOST_RESERVED).then_some(MOST_RESERVED);
        let sizes = Sizes { small: SMALL_SEGMENT, large: LARGE_SEGMENT, reserve };
        let source = Expandable::new(BACKEND.name, driver, settings.memory_limit, sizes).map_err(needed_for(NEEDED))?;
        Ok(Self { source, ranges: BTreeMap::new(), vacant: Vec::new(), holes: BTreeMap::new() })
    }

    /// The records in front of the blocks of a shard's ranges.
    pub(super) fn heads_of(&self, shard: &Shard) -> impl Iterator<Item = BlockIndex> {
        self.ranges.values().filter(|range| range.shard == shard.id).map(|range| range.head)
    }

    /// The range that an address lies in.
    fn range(&mut self, addr: u64) -> &mut Range {
        let below = self.ranges.range_mut(..=addr).next_back();
        below.map(|(_, range)| range).expect("every block lies in a range")
    }
}

impl Caching {
    /// Whether memory comes and goes in parts.
    pub(super) fn is_expandable(&self) -> bool {
        matches!(self.split, Split::TorchExpandable { .. })
    }

    // Memory comes.

    /// The steps that PyTorch takes, in order, until one of them gives a block.
    pub(super) fn climb_expandable(
        &self,
        growth: &mut Growth,
        shard: &Shard,
        wanted: Wanted,
    ) -> Result<Block, AllocError> {
        if let Some(block) = self.map(growth, shard, wanted, Path::DriverAlloc)? {
            return Ok(block);
        }
        // Not for a private pool, nor while a graph is captured (`captures_underway`). Then nothing can be waited for.
        if !self.any_capture() && shard.lock().private().is_none() {
            self.release_cached(growth, 0)?;
            if self.settings.retry_fit_after_sync
                && let Some(served) = self.serve_expandable(shard, wanted)
            {
                return Ok(hand_out(shard, served, wanted.requested, Path::Retry));
            }
            growth.count_retry();
            if let Some(block) = self.map(growth, shard, wanted, Path::Retry)? {
                return Ok(block);
            }
        }
        growth.count_refusal();
        Err(self.out_of_memory(growth, shard, wanted))
    }

    /// PyTorch's `alloc_block` and `try_allocate_expandable_block`: puts memory into the lowest holes that suffice, as much as a
    /// request lacks. `None` when the limit or the device refuses; what came until then stays, free.
    fn map(
        &self,
        growth: &mut Growth,
        shard: &Shard,
        wanted: Wanted,
        path: Path,
    ) -> Result<Option<Block>, DriverError> {
        // PyTorch compares the limit with a segment of fixed size.
        let limit = self.settings.memory_limit.unwrap_or(u64::MAX);
        if growth.held().saturating_add(segment_size(wanted.rounded)) > limit {
            return Ok(None);
        }
        loop {
            let Some(claimed) = self.claim(growth, shard, wanted)? else { return Ok(None) };
            let filled = self.fill(growth, shard, claimed, wanted);
            let mut cache = self.totals.enter(shard, &self.shards);
            if filled == Ok(Filled::Enough) {
                let served = cache.serve_claim(claimed, wanted, &self.split);
                drop(cache);
                self.count_oversize(served);
                return Ok(Some(hand_out(shard, served, wanted.requested, path)));
            }
            cache.drop_claim(claimed);
            drop(cache);
            if filled? == Filled::NoMemory {
                return Ok(None);
            }
        }
    }

    /// Claims the first block of the lowest run of free blocks and holes that a request fits in, a new range where there is
    /// none. `None` when there are no addresses.
    fn claim(&self, growth: &mut Growth, shard: &Shard, wanted: Wanted) -> Result<Option<BlockIndex>, DriverError> {
        let (expansion, pool, bytes) = (growth.expansion(), wanted.pool, wanted.rounded);
        let mut cache = self.totals.enter(shard, &self.shards);
        let mut holes = expansion.holes.range((shard.id, pool, 0)..=(shard.id, pool, u64::MAX));
        if let Some(claimed) = holes.find_map(|(_, hole)| cache.claim(*hole, bytes)) {
            return Ok(Some(claimed));
        }
        drop(cache);
        let Some((addr, size)) = expansion.source.reserve(Some(pool), bytes)? else { return Ok(None) };
        let mut cache = self.totals.enter(shard, &self.shards);
        let (head, hole) = cache.add_range(addr, size, pool);
        let number = expansion.vacant.pop().unwrap_or(expansion.ranges.len());
        expansion.ranges.insert(addr, Range { number, shard: shard.id, pool, head, addr, bytes: size, mapped: 0 });
        expansion.holes.insert((shard.id, pool, addr), hole);
        Ok(cache.claim(hole, bytes))
    }

    /// Maps memory behind what is claimed until a request fits: PyTorch's `map_block` once for each hole.
    fn fill(
        &self,
        growth: &mut Growth,
        shard: &Shard,
        claimed: BlockIndex,
        wanted: Wanted,
    ) -> Result<Filled, DriverError> {
        let pool = wanted.pool;
        loop {
            let (have, hole) = shard.lock().cache().claimed(claimed);
            if have >= wanted.rounded {
                return Ok(Filled::Enough);
            }
            let Some((addr, size)) = hole else { return Ok(Filled::Cut) };
            let expansion = growth.expansion();
            let unit = expansion.source.handle_bytes(Some(pool));
            let part = (wanted.rounded - have).next_multiple_of(unit).min(size);
            // SAFETY: a hole is an unmapped part of a range from `reserve`. Ranges are whole handles, and so are the parts that
            // are mapped and unmapped, so holes are, too. Whoever maps holds `growth`.
            if !unsafe { expansion.source.map(addr, part, unit) }? {
                return Ok(Filled::NoMemory);
            }
            let rest = self.totals.enter(shard, &self.shards).extend_claim(claimed, part);
            expansion.holes.remove(&(shard.id, pool, addr));
            if let Some(rest) = rest {
                expansion.holes.insert((shard.id, pool, addr + part), rest);
            }
            expansion.range(addr).mapped += part;
            growth.mapped(pool, part);
        }
    }

    // Memory goes.

    /// PyTorch's `release_blocks` with expandable segments: takes the memory of free blocks, in whole handles, from the large
    /// pool, the small one and those of graphs, or from that of one graph, while more than `keep` bytes are held; then gives
    /// back ranges that have none. Returns the bytes that went. Nothing happens while a graph is being captured, because nothing
    /// can be waited for then.
    pub(super) fn release_parts(
        &self,
        growth: &mut Growth,
        keep: u64,
        private: Option<CaptureId>,
    ) -> Result<u64, DriverError> {
        if self.any_capture() {
            return Ok(0);
        }
        growth.expansion().source.release_again()?;
        let of_streams = [PoolKind::Large, PoolKind::Small].into_iter().filter(|_| private.is_none());
        let mut free: Vec<Idle<'_>> = of_streams.flat_map(|pool| self.all_idle(pool)).collect();
        free.extend(self.private_idle());
        free.retain(|idle| private.is_none() || idle.shard.lock().private() == private);
        let mut released = 0;
        for idle in free {
            let most = growth.held().saturating_sub(keep);
            if most == 0 {
                break;
            }
            released += self.unmap(growth, &idle, most)?;
        }
        let expansion = growth.expansion();
        let mut empty: Vec<Range> = expansion.ranges.values().copied().filter(|range| range.mapped == 0).collect();
        empty.sort_unstable_by_key(|range| range.number);
        for Range { number, shard, pool, head, addr, bytes, .. } in empty {
            // SAFETY: the range came from `reserve`, nothing of it is mapped, and it is forgotten here, so it is given back once.
            unsafe { expansion.source.give_back(addr, bytes) }?;
            expansion.holes.remove(&(shard, pool, addr));
            expansion.ranges.remove(&addr);
            expansion.vacant.push(number);
            if let Some(shard) = self.shards.by_id(shard) {
                self.totals.enter(shard, &self.shards).remove_range(head);
            }
        }
        Ok(released)
    }

    /// PyTorch's `unmap_block`: takes the whole handles from a free block, those at its end, until `most` bytes have gone. Says
    /// how many went; none when another thread took the block meanwhile.
    fn unmap(&self, growth: &mut Growth, idle: &Idle<'_>, most: u64) -> Result<u64, DriverError> {
        let (shard, expansion) = (idle.shard, growth.expansion());
        let Range { pool, addr: base, .. } = *expansion.range(idle.addr);
        let unit = expansion.source.handle_bytes(Some(pool));
        let cut = self.totals.enter(shard, &self.shards).cut_out(idle.index, idle.addr, base, unit, most);
        let Some(cut @ Cut { addr, bytes, .. }) = cut else { return Ok(0) };
        let (gone, outcome) = match self.wait_for_uses(shard) {
            // SAFETY: free blocks are mapped, and the part is whole handles, which nobody can take any more. What used it has been
            // waited for.
            Ok(()) => unsafe { expansion.source.unmap(addr, bytes, unit) },
            Err(error) => (0, Err(error)),
        };
        let closed = self.totals.enter(shard, &self.shards).close_cut(cut, gone);
        if let Some((hole, absorbed)) = closed {
            for addr in absorbed.into_iter().flatten() {
                expansion.holes.remove(&(shard.id, pool, addr));
            }
            expansion.holes.insert((shard.id, pool, hole.addr), hole.index);
            expansion.range(base).mapped -= gone;
            growth.unmapped(pool, gone);
        }
        outcome.map(|()| gone)
    }

    /// Waits for work that uses free blocks of a shard: `cuMemUnmap` does not.
    fn wait_for_uses(&self, shard: &Shard) -> Result<(), DriverError> {
        // A graph may have been launched on any stream.
        if shard.lock().private().is_some() {
            return self.driver.device_synchronize();
        }
        match self.driver.stream_synchronize(shard.stream) {
            // The stream is gone, and its work may not be over.
            Err(error) if error.code == DriverError::INVALID_HANDLE => self.driver.device_synchronize(),
            waited => waited,
        }
    }
}

/// What became of a request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filled {
    /// It fits into what is claimed.
    Enough,
    /// The device has no more.
    NoMemory,
    /// Another thread took what lies behind, so that there has to be another place.
    Cut,
}
