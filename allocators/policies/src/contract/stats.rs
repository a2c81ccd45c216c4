//! Statistics under PyTorch's names, so that they compare to `torch.cuda.memory_stats` without translation.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use vramlab_device::PoolCounters;

/// The kind of a peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeakKind {
    /// The highest value.
    #[default]
    Exact,
    /// An upper bound: the value was never higher, and may never have been that high.
    AtMost,
}

/// A quantity over time: its level, its peak, and the sums of increases and decreases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauge {
    /// Value now.
    pub current: u64,
    /// Highest value since the start or the last [`Gauge::reset_peak`].
    pub peak: u64,
    /// Whether `peak` is exact or a bound.
    pub peak_is: PeakKind,
    /// Sum of all increases ("allocated" in PyTorch's keys).
    pub allocated: u64,
    /// Sum of all decreases ("freed").
    pub freed: u64,
}

impl Gauge {
    /// Adds `amount`.
    pub fn increase(&mut self, amount: u64) {
        self.current += amount;
        self.allocated += amount;
        self.peak = self.peak.max(self.current);
    }

    /// Subtracts `amount`.
    pub fn decrease(&mut self, amount: u64) {
        debug_assert!(self.current >= amount, "a gauge should not go below zero");
        self.current = self.current.saturating_sub(amount);
        self.freed += amount;
    }

    /// Subtracts the sums of `before`, which was taken earlier.
    fn start_at(&mut self, before: &Self) {
        self.allocated = self.allocated.saturating_sub(before.allocated);
        self.freed = self.freed.saturating_sub(before.freed);
    }

    /// Restarts the peak from the current value.
    pub fn reset_peak(&mut self) {
        (self.peak, self.peak_is) = (self.current, PeakKind::Exact);
    }
}

/// The size class of PyTorch's policy that a quantity belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PoolKind {
    /// Requests of at most 1 MiB after rounding.
    Small,
    /// Everything larger.
    #[default]
    Large,
}

/// One quantity for all memory and, where a backend has them, for its two pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PooledGauge {
    /// All memory.
    pub all: Gauge,
    /// `None` for a backend without a small pool.
    pub small_pool: Option<Gauge>,
    /// `None` for a backend without a large pool.
    pub large_pool: Option<Gauge>,
}

impl PooledGauge {
    /// A gauge that also counts by pool.
    #[must_use]
    pub fn with_pools() -> Self {
        Self { all: Gauge::default(), small_pool: Some(Gauge::default()), large_pool: Some(Gauge::default()) }
    }

    fn pool(&mut self, pool: PoolKind) -> Option<&mut Gauge> {
        match pool {
            PoolKind::Small => self.small_pool.as_mut(),
            PoolKind::Large => self.large_pool.as_mut(),
        }
    }

    /// Adds `amount` to the total and to `pool`.
    pub fn increase(&mut self, pool: PoolKind, amount: u64) {
        self.all.increase(amount);
        if let Some(gauge) = self.pool(pool) {
            gauge.increase(amount);
        }
    }

    /// Subtracts `amount` from the total and from `pool`.
    pub fn decrease(&mut self, pool: PoolKind, amount: u64) {
        self.all.decrease(amount);
        if let Some(gauge) = self.pool(pool) {
            gauge.decrease(amount);
        }
    }

    /// Adds a signed change.
    pub fn change(&mut self, pool: PoolKind, amount: i64) {
        if amount >= 0 {
            self.increase(pool, amount.unsigned_abs())
        } else {
            self.decrease(pool, amount.unsigned_abs())
        }
    }

    fn each(&mut self) -> [Option<&mut Gauge>; 3] {
        [Some(&mut self.all), self.small_pool.as_mut(), self.large_pool.as_mut()]
    }

    fn start_at(&mut self, before: &mut Self) {
        let each = self.each().into_iter().zip(before.each());
        each.filter_map(|(now, before)| now.zip(before)).for_each(|(now, before)| now.start_at(before));
    }

    /// Restarts the peaks from the current values.
    pub fn reset_peak(&mut self) {
        self.each().into_iter().flatten().for_each(Gauge::reset_peak);
    }
}

/// Pages of free memory that were unmapped to be mapped where a request needed memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steals {
    /// Requests that took pages.
    pub requests: u64,
    /// Number of pages.
    pub pages: u64,
    /// Bytes in them.
    pub bytes: u64,
}

/// Counts of an allocator's operations, in PyTorch's terms. A quantity that a backend cannot know is `None` and is left out of the
/// serialised form; it is never reported as zero. The default is that of a backend without pools: quantities that only some
/// backends know are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Live blocks.
    pub allocation: PooledGauge,
    /// Reserved segments.
    pub segment: Option<PooledGauge>,
    /// Live blocks and deferred frees.
    pub active: PooledGauge,
    /// Free blocks that are not releasable because their segment is partly used.
    pub inactive_split: Option<PooledGauge>,
    /// Bytes of `allocation` blocks, after rounding.
    pub allocated_bytes: PooledGauge,
    /// Reserved bytes.
    pub reserved_bytes: PooledGauge,
    /// Whether the running totals of `reserved_bytes` are unknown, and only its level and peak are known.
    pub reserved_totals_unknown: bool,
    /// Bytes of `active` blocks.
    pub active_bytes: PooledGauge,
    /// Bytes of `inactive_split` blocks.
    pub inactive_split_bytes: Option<PooledGauge>,
    /// Requested bytes, before rounding, until the block is reusable.
    pub requested_bytes: PooledGauge,
    /// Bytes of deferred frees that wait for a destroyed stream, for which there is no event. They become reusable when the
    /// allocator next waits for the whole device: when memory runs out, or at [`trim`](crate::DeviceAllocator::trim). Absent while
    /// there never were any.
    pub stranded_bytes: Option<Gauge>,
    /// Blocks of at least `max_split_size`.
    pub oversize_allocations: Option<Gauge>,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Option<Gauge>,
    /// Device allocations that were repeated after a cache flush.
    pub num_alloc_retries: u64,
    /// Requests refused for lack of memory.
    pub num_ooms: u64,
    /// Number of waits for all pending events.
    pub num_sync_all_streams: u64,
    /// The driver's counters of memory that belongs to graphs, for a backend whose captured blocks are such memory; absent before
    /// its first capture.
    pub graph_memory: Option<PoolCounters>,
    /// Requests that were served at the planned address; absent without a plan.
    pub num_planned: Option<u64>,
    /// Other requests, because the plan does not have them or their address was not free; absent without a plan.
    pub num_unplanned: Option<u64>,
    /// Free pages that were moved; absent for a policy that does not move pages.
    pub steals: Option<Steals>,
    /// Successful allocation calls to the driver.
    pub num_device_alloc: u64,
    /// Successful free calls to the driver.
    pub num_device_free: u64,
}

impl Stats {
    /// Statistics of a backend with PyTorch's small and large pools.
    #[must_use]
    pub fn with_pools() -> Self {
        let pooled = PooledGauge::with_pools();
        Self {
            allocation: pooled,
            segment: Some(pooled),
            active: pooled,
            inactive_split: Some(pooled),
            allocated_bytes: pooled,
            reserved_bytes: pooled,
            active_bytes: pooled,
            inactive_split_bytes: Some(pooled),
            requested_bytes: pooled,
            oversize_allocations: Some(Gauge::default()),
            oversize_segments: Some(Gauge::default()),
            ..Self::default()
        }
    }

    /// Counts the allocation of a block of `bytes` for a request of `requested`.
    pub(crate) fn count_taken(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.count_held(pool, bytes);
        self.active.increase(pool, 1);
        self.active_bytes.increase(pool, bytes);
        self.requested_bytes.increase(pool, requested);
    }

    /// Counts the allocation of a block that was counted as active all the time.
    pub(crate) fn count_held(&mut self, pool: PoolKind, bytes: u64) {
        self.allocation.increase(pool, 1);
        self.allocated_bytes.increase(pool, bytes);
    }

    /// Counts a free request. Until the block [is reusable](Self::count_reusable) it is active.
    pub(crate) fn count_let_go(&mut self, pool: PoolKind, bytes: u64) {
        self.allocation.decrease(pool, 1);
        self.allocated_bytes.decrease(pool, bytes);
    }

    /// Counts a freed block that no stream uses any more.
    pub(crate) fn count_reusable(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.active.decrease(pool, 1);
        self.active_bytes.decrease(pool, bytes);
        self.requested_bytes.decrease(pool, requested);
    }

    /// Counts memory that the device allocated.
    pub(crate) fn count_reserved(&mut self, pool: PoolKind, bytes: u64) {
        self.num_device_alloc += 1;
        self.reserved_bytes.increase(pool, bytes);
    }

    /// Counts memory that was released to the device.
    pub(crate) fn count_released(&mut self, pool: PoolKind, bytes: u64) {
        self.num_device_free += 1;
        self.reserved_bytes.decrease(pool, bytes);
    }

    /// Counts a new segment; from `oversize` bytes on it is counted as oversize, too.
    pub(crate) fn count_segment(&mut self, pool: PoolKind, bytes: u64, oversize: u64) {
        self.count_reserved(pool, bytes);
        self.segment.iter_mut().for_each(|gauge| gauge.increase(pool, 1));
        self.oversize_segments.iter_mut().filter(|_| bytes >= oversize).for_each(|gauge| gauge.increase(1));
    }

    /// Counts a released segment, see [`count_segment`](Self::count_segment).
    pub(crate) fn count_segment_released(&mut self, pool: PoolKind, bytes: u64, oversize: u64) {
        self.count_released(pool, bytes);
        self.segment.iter_mut().for_each(|gauge| gauge.decrease(pool, 1));
        self.oversize_segments.iter_mut().filter(|_| bytes >= oversize).for_each(|gauge| gauge.decrease(1));
    }

    /// Restarts every peak from its current value (`torch.cuda.reset_peak_memory_stats`).
    pub fn reset_peaks(&mut self) {
        self.pooled_mut().into_iter().flatten().for_each(PooledGauge::reset_peak);
        self.plain_mut().into_iter().flatten().for_each(Gauge::reset_peak);
    }

    /// These statistics with sums and counts relative to those of `before`, which were taken earlier; levels and peaks stay as they
    /// are.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let (mut out, mut before) = (self.clone(), before.clone());
        let pooled = out.pooled_mut().into_iter().zip(before.pooled_mut());
        pooled.filter_map(|(now, before)| now.zip(before)).for_each(|(now, before)| now.start_at(before));
        let plain = out.plain_mut().into_iter().zip(before.plain_mut());
        plain.filter_map(|(now, before)| now.zip(before)).for_each(|(now, before)| now.start_at(before));
        let counts = |stats: &Self| {
            let Steals { requests, pages, bytes } = stats.steals.unwrap_or_default();
            [requests, pages, bytes, stats.num_planned.unwrap_or(0), stats.num_unplanned.unwrap_or(0)]
        };
        let (now, then) = (counts(self), counts(&before));
        let [requests, pages, bytes, planned, unplanned] = std::array::from_fn(|at| now[at] - then[at]);
        Self {
            num_alloc_retries: self.num_alloc_retries - before.num_alloc_retries,
            num_ooms: self.num_ooms - before.num_ooms,
            num_sync_all_streams: self.num_sync_all_streams - before.num_sync_all_streams,
            num_planned: self.num_planned.map(|_| planned),
            num_unplanned: self.num_unplanned.map(|_| unplanned),
            steals: self.steals.map(|_| Steals { requests, pages, bytes }),
            num_device_alloc: self.num_device_alloc - before.num_device_alloc,
            num_device_free: self.num_device_free - before.num_device_free,
            ..out
        }
    }

    /// Names of the gauges whose peaks are upper bounds ([`PeakKind::AtMost`]). Under `caching` with several threads that do not
    /// take turns, the peaks of streams are added up, which need not have occurred at the same time.
    #[must_use]
    pub fn upper_bounds(&self) -> Vec<&'static str> {
        let bound = |gauge: &PooledGauge| gauge.all.peak_is == PeakKind::AtMost;
        self.pooled().into_iter().filter(|(_, gauge)| gauge.is_some_and(bound)).map(|(name, _)| name).collect()
    }

    /// The gauges without pools.
    fn plain_mut(&mut self) -> [Option<&mut Gauge>; 3] {
        [&mut self.stranded_bytes, &mut self.oversize_allocations, &mut self.oversize_segments].map(Option::as_mut)
    }

    /// The gauges by pool, in the order of [`pooled`](Self::pooled).
    fn pooled_mut(&mut self) -> [Option<&mut PooledGauge>; 9] {
        [
            Some(&mut self.allocation),
            self.segment.as_mut(),
            Some(&mut self.active),
            self.inactive_split.as_mut(),
            Some(&mut self.allocated_bytes),
            Some(&mut self.reserved_bytes),
            Some(&mut self.active_bytes),
            self.inactive_split_bytes.as_mut(),
            Some(&mut self.requested_bytes),
        ]
    }

    /// The gauges by pool, in a fixed order.
    #[must_use]
    pub fn pooled(&self) -> [(&'static str, Option<&PooledGauge>); 9] {
        [
            ("allocation", Some(&self.allocation)),
            ("segment", self.segment.as_ref()),
            ("active", Some(&self.active)),
            ("inactive_split", self.inactive_split.as_ref()),
            ("allocated_bytes", Some(&self.allocated_bytes)),
            ("reserved_bytes", Some(&self.reserved_bytes)),
            ("active_bytes", Some(&self.active_bytes)),
            ("inactive_split_bytes", self.inactive_split_bytes.as_ref()),
            ("requested_bytes", Some(&self.requested_bytes)),
        ]
    }

    /// Every known value as `("allocated_bytes.all.peak", value)`, in a fixed order.
    #[must_use]
    pub fn entries(&self) -> Vec<(String, u64)> {
        let mut out = Vec::with_capacity(128);
        let mut push = |name: String, gauge: &Gauge| {
            let values = [gauge.current, gauge.peak, gauge.allocated, gauge.freed];
            for (key, value) in ["current", "peak", "allocated", "freed"].into_iter().zip(values) {
                out.push((format!("{name}.{key}"), value));
            }
        };
        for (name, gauge) in self.pooled() {
            let Some(gauge) = gauge else { continue };
            push(format!("{name}.all"), &gauge.all);
            for (pool, gauge) in [("small_pool", &gauge.small_pool), ("large_pool", &gauge.large_pool)] {
                if let Some(gauge) = gauge {
                    push(format!("{name}.{pool}"), gauge);
                }
            }
        }
        for (name, gauge) in [
            ("stranded_bytes", &self.stranded_bytes),
            ("oversize_allocations", &self.oversize_allocations),
            ("oversize_segments", &self.oversize_segments),
        ] {
            if let Some(gauge) = gauge {
                push(name.to_owned(), gauge);
            }
        }
        for (name, value) in [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
        ] {
            out.push((name.to_owned(), value));
        }
        for (name, value) in [("num_planned", self.num_planned), ("num_unplanned", self.num_unplanned)] {
            out.extend(value.map(|value| (name.to_owned(), value)));
        }
        if let Some(Steals { requests, pages, bytes }) = self.steals {
            let counts = [("num_steals", requests), ("num_stolen_pages", pages), ("num_stolen_bytes", bytes)];
            out.extend(counts.map(|(name, value)| (name.to_owned(), value)));
        }
        if let Some(memory) = &self.graph_memory {
            for (name, current, peak) in [
                ("graph_used_bytes", memory.used, memory.used_high),
                ("graph_reserved_bytes", memory.reserved, memory.reserved_high),
            ] {
                out.push((format!("{name}.current"), current));
                out.push((format!("{name}.peak"), peak));
            }
        }
        if self.reserved_totals_unknown {
            out.retain(|(key, _)| key != "reserved_bytes.all.allocated" && key != "reserved_bytes.all.freed");
        }
        out
    }
}

impl Serialize for Stats {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entries = self.entries();
        let mut map = serializer.serialize_map(Some(entries.len()))?;
        for (key, value) in entries {
            map.serialize_entry(&key, &value)?;
        }
        map.end()
    }
}
