//! Statistics, segments and blocks as C structures.

use vramlab_policies::contract::{BlockInfo, SegmentInfo, Stats};
use vramlab_policies::{BlockState, PoolKind, PooledGauge};

/// A quantity over time.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauge {
    /// Value now.
    pub current: u64,
    /// Highest value since the start or the last `vramlab_reset_peaks`. With several threads that use several streams at a time,
    /// that of `caching` is an upper bound: it adds up the peaks of the streams.
    pub peak: u64,
    /// Sum of all increases.
    pub allocated: u64,
    /// Sum of all decreases.
    pub freed: u64,
}

/// A quantity for all memory and for PyTorch's two pools; zero where an allocator does not have them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Pooled {
    /// All memory.
    pub all: Gauge,
    /// The small pool.
    pub small_pool: Gauge,
    /// The large pool.
    pub large_pool: Gauge,
}

/// PyTorch's statistics, in bytes and numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StatsRecord {
    /// Live blocks.
    pub allocation: Pooled,
    /// Segments.
    pub segment: Pooled,
    /// Live blocks and deferred frees.
    pub active: Pooled,
    /// Free blocks in segments that are partly in use.
    pub inactive_split: Pooled,
    /// Bytes of `allocation`.
    pub allocated_bytes: Pooled,
    /// Reserved bytes. Of `stream-ordered` the sums are 0, because its driver does not report them.
    pub reserved_bytes: Pooled,
    /// Bytes of `active`.
    pub active_bytes: Pooled,
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: Pooled,
    /// Requested bytes, before rounding.
    pub requested_bytes: Pooled,
    /// Blocks of at least `max_split_size`.
    pub oversize_allocations: Gauge,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Gauge,
    /// Requests that were repeated after a cache flush.
    pub num_alloc_retries: u64,
    /// Requests that were refused for lack of memory.
    pub num_ooms: u64,
    /// Number of waits for all deferred frees.
    pub num_sync_all_streams: u64,
    /// Allocation calls of the driver.
    pub num_device_alloc: u64,
    /// Free calls of the driver.
    pub num_device_free: u64,
    /// The setting of that name, `UINT64_MAX` for none.
    pub max_split_size: u64,
}

/// A segment, for `vramlab_visit`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SegmentRecord {
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Stream that its free blocks serve.
    pub stream: u64,
    /// Private pool that it belongs to; 0 for none.
    pub pool: u64,
    /// Whether it belongs to the large pool.
    pub is_large: bool,
    /// Whether it is a mapped range of an expandable segment.
    pub expandable: bool,
    /// Bytes in live blocks.
    pub allocated_bytes: u64,
    /// Bytes in live blocks and deferred frees.
    pub active_bytes: u64,
    /// Requested bytes in those.
    pub requested_bytes: u64,
}

/// The state of a block.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockStateRecord {
    /// Live.
    Allocated = 0,
    /// Freed, and still used by a stream.
    PendingFree = 1,
    /// Reusable.
    Free = 2,
}

/// A block of a segment, for `vramlab_visit`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlockRecord {
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Requested bytes; 0 for a free block.
    pub requested: u64,
    /// Its state.
    pub state: BlockStateRecord,
}

fn gauge(gauge: &vramlab_policies::Gauge) -> Gauge {
    let vramlab_policies::Gauge { current, peak, allocated, freed, .. } = *gauge;
    Gauge { current, peak, allocated, freed }
}

fn pooled(of: &PooledGauge) -> Pooled {
    let part = |part: &Option<vramlab_policies::Gauge>| part.as_ref().map(gauge).unwrap_or_default();
    Pooled { all: gauge(&of.all), small_pool: part(&of.small_pool), large_pool: part(&of.large_pool) }
}

impl StatsRecord {
    /// Unknown values are 0.
    pub(crate) fn from_stats(stats: &Stats, max_split_size: Option<u64>) -> Self {
        let or_none = |of: &Option<PooledGauge>| of.as_ref().map(pooled).unwrap_or_default();
        let plain = |of: &Option<vramlab_policies::Gauge>| of.as_ref().map(gauge).unwrap_or_default();
        Self {
            allocation: pooled(&stats.allocation),
            segment: or_none(&stats.segment),
            active: pooled(&stats.active),
            inactive_split: or_none(&stats.inactive_split),
            allocated_bytes: pooled(&stats.allocated_bytes),
            reserved_bytes: pooled(&stats.reserved_bytes),
            active_bytes: pooled(&stats.active_bytes),
            inactive_split_bytes: or_none(&stats.inactive_split_bytes),
            requested_bytes: pooled(&stats.requested_bytes),
            oversize_allocations: plain(&stats.oversize_allocations),
            oversize_segments: plain(&stats.oversize_segments),
            num_alloc_retries: stats.num_alloc_retries,
            num_ooms: stats.num_ooms,
            num_sync_all_streams: stats.num_sync_all_streams,
            num_device_alloc: stats.num_device_alloc,
            num_device_free: stats.num_device_free,
            max_split_size: max_split_size.unwrap_or(u64::MAX),
        }
    }
}

impl SegmentRecord {
    pub(crate) fn from_info(info: &SegmentInfo) -> Self {
        let sum = |of: fn(&BlockInfo) -> u64| info.blocks.iter().map(of).sum();
        Self {
            address: info.addr.get(),
            bytes: info.bytes,
            stream: info.stream.get(),
            pool: info.private.map_or(0, |private| private.get()),
            is_large: info.pool != Some(PoolKind::Small),
            expandable: info.expandable,
            allocated_bytes: sum(|block| if block.state == BlockState::Allocated { block.bytes } else { 0 }),
            active_bytes: sum(|block| if block.state == BlockState::Free { 0 } else { block.bytes }),
            requested_bytes: sum(|block| if block.state == BlockState::Free { 0 } else { block.requested }),
        }
    }
}

impl BlockRecord {
    pub(crate) fn from_info(info: &BlockInfo) -> Self {
        let state = match info.state {
            BlockState::Allocated => BlockStateRecord::Allocated,
            BlockState::PendingFree => BlockStateRecord::PendingFree,
            BlockState::Free => BlockStateRecord::Free,
        };
        Self { address: info.addr.get(), bytes: info.bytes, requested: info.requested, state }
    }
}
