//! The L2 cache of the simulated GPU: the part of a launch's data that comes from it, the rest comes from memory.
//!
//! Recency decides: the sectors used last, as many as fit, are in the cache. Reads and writes count equally, since both leave their
//! data in it, and so do addresses that were freed and allocated again: the cache knows addresses, not blocks. Real replacement is
//! neither exact nor public; `l2_bytes` of a profile is the size at which this model matches the times of kernels, which is below
//! the size on the data sheet (an H200's 50 MB are two halves, and data that multiprocessors on both sides read are in both).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// The unit of the model: fine enough for layers of some hundred KiB, and a layer of 16 MiB is 256 of them.
pub(super) const SECTOR: u64 = 64 << 10;

/// The sectors in the cache, by age.
#[derive(Debug)]
pub(super) struct L2 {
    /// Maximum number of sectors.
    capacity: u64,
    clock: u64,
    /// Time of each sector's last use.
    touched: BTreeMap<u64, u64>,
    /// Sectors by the time of their last use, oldest first.
    by_age: BTreeMap<u64, u64>,
}

impl L2 {
    /// An empty cache.
    pub(super) fn new(bytes: u64) -> Self {
        Self { capacity: (bytes / SECTOR).max(1), clock: 0, touched: BTreeMap::new(), by_age: BTreeMap::new() }
    }

    /// Uses the buffers of a launch, `(address, bytes)`; returns the share of their bytes that was not in the cache, from 0 to 1; 0
    /// without buffers. O(log n) for each sector, and never more sectors of a buffer than the cache has.
    pub(super) fn access(&mut self, buffers: &[(u64, u64)]) -> f64 {
        let missed = buffers.iter().map(|&(addr, bytes)| self.missing(addr, bytes)).sum::<u64>();
        let all = buffers.iter().fold(0u64, |sum, &(_, bytes)| sum.saturating_add(bytes));
        // Only now, because a kernel works on all its buffers simultaneously: one must not evict another before it is read.
        for &(addr, bytes) in buffers {
            self.touch(addr, bytes);
        }
        // CAST: sizes of buffers, far below 2^53.
        if all == 0 { 0.0 } else { (missed as f64 / all as f64).min(1.0) }
    }

    /// First and last sector; none for an empty range.
    fn sectors(addr: u64, bytes: u64) -> Option<(u64, u64)> {
        (bytes > 0).then(|| (addr / SECTOR, addr.saturating_add(bytes - 1) / SECTOR))
    }

    /// Bytes of a range that are not in the cache. A launch that reads more than the cache has finds none of it: the end evicts the
    /// beginning before it is read again.
    fn missing(&self, addr: u64, bytes: u64) -> u64 {
        let Some((first, last)) = Self::sectors(addr, bytes) else { return 0 };
        if last - first >= self.capacity {
            return bytes;
        }
        let overlap = |sector: u64| {
            let start = sector * SECTOR;
            addr.saturating_add(bytes).min(start.saturating_add(SECTOR)) - addr.max(start)
        };
        bytes - self.touched.range(first..=last).map(|(&sector, _)| overlap(sector)).sum::<u64>().min(bytes)
    }

    fn touch(&mut self, addr: u64, bytes: u64) {
        let Some((first, last)) = Self::sectors(addr, bytes) else { return };
        for sector in first.max((last + 1).saturating_sub(self.capacity))..=last {
            self.clock += 1;
            if let Some(before) = self.touched.insert(sector, self.clock) {
                self.by_age.remove(&before);
            }
            self.by_age.insert(self.clock, sector);
        }
        while self.touched.len() as u64 > self.capacity {
            let Some((_, oldest)) = self.by_age.pop_first() else { break };
            self.touched.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 1 << 41;

    fn at(sector: u64) -> u64 {
        BASE + sector * SECTOR
    }

    #[test]
    fn what_was_touched_is_there_until_as_much_as_fits_came_after() {
        let mut cache = L2::new(4 * SECTOR);
        assert_eq!(cache.access(&[(at(0), SECTOR)]), 1.0);
        assert_eq!(cache.access(&[(at(0), SECTOR)]), 0.0);
        cache.access(&[(at(10), 3 * SECTOR)]);
        assert_eq!(cache.access(&[(at(0), SECTOR)]), 0.0, "four fit");
        cache.access(&[(at(20), 3 * SECTOR)]);
        assert_eq!(cache.access(&[(at(0), SECTOR), (at(20), 3 * SECTOR)]), 0.0);
        // 0 was used before 20 to 22, so it is evicted first.
        cache.access(&[(at(30), SECTOR)]);
        assert_eq!(cache.access(&[(at(20), 3 * SECTOR)]), 0.0);
        assert_eq!(cache.access(&[(at(0), SECTOR)]), 1.0);
    }

    #[test]
    fn a_share_counts_bytes() {
        let mut cache = L2::new(8 * SECTOR);
        cache.access(&[(at(0), SECTOR)]);
        assert_eq!(cache.access(&[(at(0) + SECTOR / 2, SECTOR)]), 0.5);
        cache.access(&[(at(4), SECTOR)]);
        assert_eq!(cache.access(&[(at(4), SECTOR), (at(6), 2 * SECTOR), (at(1), SECTOR)]), 0.5);
        assert_eq!(cache.access(&[]), 0.0);
        assert_eq!(cache.access(&[(at(4), 0)]), 0.0);
    }

    #[test]
    fn more_than_fits_is_never_found_and_leaves_its_end() {
        let mut cache = L2::new(4 * SECTOR);
        for _ in 0..2 {
            assert_eq!(cache.access(&[(at(0), 6 * SECTOR)]), 1.0);
        }
        assert_eq!(cache.access(&[(at(2), 4 * SECTOR)]), 0.0);
        assert_eq!(cache.access(&[(at(0), 2 * SECTOR)]), 1.0);
        // A range as large as the address space costs no more than the cache has sectors.
        assert_eq!(cache.access(&[(0, u64::MAX)]), 1.0);
        assert_eq!(cache.touched.len(), 4);
    }

    #[test]
    fn buffers_of_one_launch_do_not_evict_each_other() {
        let mut cache = L2::new(4 * SECTOR);
        cache.access(&[(at(0), 2 * SECTOR)]);
        assert_eq!(cache.access(&[(at(10), 4 * SECTOR), (at(0), 2 * SECTOR)]), 4.0 / 6.0);
    }

    #[test]
    fn the_same_accesses_give_the_same_shares() {
        let run = || {
            let mut cache = L2::new(16 * SECTOR);
            let mut random = 1u64;
            let share = |_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                cache.access(&[(BASE + (random >> 44), (random >> 20) % (3 * SECTOR))])
            };
            (0..500).map(share).collect::<Vec<f64>>()
        };
        let shares = run();
        assert_eq!(shares, run());
        assert!(shares.contains(&0.0) && shares.contains(&1.0));
    }
}
