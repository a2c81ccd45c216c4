//! Segment addresses near the recorded ones, for a replay under other settings.
//!
//! Among free blocks of one size allocators take the lowest address, so the result of a setting depends on the driver's segment
//! addresses. A driver has allocations of its own in the range, which a model does not know; the recording shows the gaps between
//! them. A segment gets the address of the recorded program's next segment of that size; without one, the start of the next
//! larger one that is free, whose remainder stays available: the driver fills the same gaps, whatever the request. Other segments
//! are placed below all of these, as the driver fills the range from the top downwards, in the order of the device's own
//! addresses.

use crate::history::SegmentEvent;
use crate::steps;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use vramlab_device::{CallKind, DeviceAddr, Driver, DriverError, DriverResult};

/// Granularity of distances between addresses.
const GRANULE: u64 = 32 << 20;
/// Alignment of the remainder of a recorded segment, as of device memory.
const PAGE: u64 = 2 << 20;

/// Recorded segments, and allocated ones.
#[derive(Debug)]
pub(super) struct Near {
    /// Address of each recorded segment or its remainder, in recorded order.
    addresses: Vec<u64>,
    /// Their bytes; 0 if in use.
    bytes: Largest,
    /// Their numbers by size.
    recorded: BTreeMap<u64, BTreeSet<usize>>,
    /// The lowest recorded address.
    lowest: u64,
    /// Offset that moves the device's own addresses below the recorded ones.
    down: Option<u64>,
    /// Allocated segments.
    pub(super) allocated: AllocatedRanges,
}

impl Near {
    pub(super) fn new(segments: impl Iterator<Item = SegmentEvent>) -> Self {
        let made = segments.filter(|segment| !segment.released && segment.part.is_none());
        let (addresses, sizes): (Vec<u64>, Vec<u64>) = made.map(|segment| (segment.addr, segment.bytes)).unzip();
        let mut recorded = BTreeMap::<u64, BTreeSet<usize>>::new();
        for (number, bytes) in sizes.iter().enumerate() {
            recorded.entry(*bytes).or_default().insert(number);
        }
        let lowest = addresses.iter().copied().min().unwrap_or(u64::MAX);
        let (bytes, allocated) = (Largest::new(&sizes), AllocatedRanges::default());
        Self { addresses, bytes, recorded, lowest, down: None, allocated }
    }

    /// The next free recorded address: of that size, else the start of a larger segment. Logarithmic in the segments.
    fn next(&mut self, bytes: u64) -> Option<u64> {
        loop {
            let exact = self.recorded.get(&bytes).and_then(|numbers| numbers.first().copied());
            let number = exact.or_else(|| self.bytes.first(bytes))?;
            let (addr, size) = (self.addresses[number], self.bytes.get(number));
            self.set(number, addr, 0);
            if self.allocated.is_free(addr, bytes) {
                let rest = (addr + bytes).next_multiple_of(PAGE);
                if let Some(left) = (addr + size).checked_sub(rest).filter(|left| *left > 0) {
                    self.set(number, rest, left);
                }
                return Some(addr);
            }
        }
    }

    /// Replaces a recorded segment by its remainder; one of 0 bytes is in use.
    fn set(&mut self, number: usize, addr: u64, bytes: u64) {
        if let Entry::Occupied(mut numbers) = self.recorded.entry(self.bytes.get(number)) {
            numbers.get_mut().remove(&number);
            if numbers.get().is_empty() {
                numbers.remove();
            }
        }
        if bytes > 0 {
            self.recorded.entry(bytes).or_default().insert(number);
        }
        self.addresses[number] = addr;
        self.bytes.set(number, bytes);
    }

    /// An address below the recorded ones, or the device's own address if there is no room.
    fn below(&mut self, inner_block: DeviceAddr, bytes: u64) -> u64 {
        let end = inner_block.get().saturating_add(bytes).next_multiple_of(GRANULE);
        let down = *self.down.get_or_insert(end.saturating_sub(self.lowest / GRANULE * GRANULE));
        inner_block
            .get()
            .checked_sub(down)
            .filter(|addr| *addr > 0 && self.allocated.is_free(*addr, bytes))
            .unwrap_or(inner_block.get())
    }

    pub(super) fn mem_alloc(&mut self, inner: &dyn Driver, bytes: u64) -> DriverResult<DeviceAddr> {
        let inner_block = inner.mem_alloc(bytes)?;
        let addr = self.next(bytes).unwrap_or_else(|| self.below(inner_block, bytes));
        let Some(handed) = DeviceAddr::new(addr).filter(|_| self.allocated.is_free(addr, bytes)) else {
            // SAFETY: allocated above and returned to no caller.
            unsafe { inner.mem_free(inner_block) }?;
            let text = format!("no address for {bytes} bytes next to the recorded ones");
            return Err(DriverError::new(CallKind::MemAlloc, DriverError::INVALID_VALUE, text));
        };
        self.allocated.add(addr, bytes, inner_block);
        Ok(handed)
    }
}

/// By returned address: bytes and the device's own address.
#[derive(Debug, Default)]
pub(super) struct AllocatedRanges(BTreeMap<u64, (u64, DeviceAddr)>);

impl AllocatedRanges {
    pub(super) fn add(&mut self, addr: u64, bytes: u64, inner_block: DeviceAddr) {
        self.0.insert(addr, (bytes, inner_block));
    }

    pub(super) fn remove(&mut self, addr: DeviceAddr) {
        self.0.remove(&addr.get());
    }

    /// Size and own address of the segment at an address.
    pub(super) fn get(&self, addr: u64) -> Option<(u64, DeviceAddr)> {
        self.0.get(&addr).copied()
    }

    /// Whether nothing is allocated in a range of addresses.
    pub(super) fn is_free(&self, addr: u64, bytes: u64) -> bool {
        let below = self.0.range(..addr.saturating_add(bytes)).next_back();
        below.is_none_or(|(start, (size, _))| start + size <= addr)
    }

    /// The device's own address for one inside a segment.
    pub(super) fn inner_addr(&self, addr: DeviceAddr) -> Option<DeviceAddr> {
        let (start, (bytes, inner_block)) = self.0.range(..=addr.get()).next_back()?;
        (addr.get() < start + bytes).then(|| inner_block.offset(addr.get() - start))
    }

    /// Releases a segment to the device.
    pub(super) fn mem_free(&mut self, inner: &dyn Driver, addr: DeviceAddr) -> DriverResult<()> {
        let Some((_, inner_block)) = self.get(addr.get()) else {
            let text = format!("no segment at {:#x}", addr.get());
            return Err(DriverError::new(CallKind::MemFree, DriverError::INVALID_VALUE, text));
        };
        // SAFETY: the device returned this address for the segment, which is freed once: it is removed below.
        unsafe { inner.mem_free(inner_block) }?;
        self.remove(addr);
        Ok(())
    }
}

/// Numbers in order, as the leaves of a complete tree in which each node has the larger of its children.
#[derive(Debug)]
struct Largest(Vec<u64>);

impl Largest {
    fn new(numbers: &[u64]) -> Self {
        let leaves = numbers.len().next_power_of_two();
        let mut nodes = vec![0; 2 * leaves];
        nodes[leaves..leaves + numbers.len()].copy_from_slice(numbers);
        for at in (1..leaves).rev() {
            nodes[at] = nodes[2 * at].max(nodes[2 * at + 1]);
        }
        Self(nodes)
    }

    fn leaves(&self) -> usize {
        self.0.len() / 2
    }

    fn get(&self, at: usize) -> u64 {
        self.0[self.leaves() + at]
    }

    fn set(&mut self, at: usize, number: u64) {
        let mut at = self.leaves() + at;
        self.0[at] = number;
        while at > 1 {
            at /= 2;
            self.0[at] = self.0[2 * at].max(self.0[2 * at + 1]);
        }
    }

    /// The first place with at least `least`, and not 0.
    fn first(&self, least: u64) -> Option<usize> {
        let least = least.max(1);
        let mut at = 1;
        if self.0[at] < least {
            return None;
        }
        while at < self.leaves() {
            steps::count(1);
            at = if self.0[2 * at] >= least { 2 * at } else { 2 * at + 1 };
        }
        Some(at - self.leaves())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use vramlab_device::NullDriver;

    #[test]
    fn unrecorded_size_uses_the_next_larger_recorded_segment() {
        const MIB: u64 = 1 << 20;
        let recorded = [(3000, 16), (1000, 32), (2000, 64)];
        let segments = recorded.map(|(addr, mib)| SegmentEvent::made(addr * MIB, mib * MIB, 0));
        let mut near = Near::new(segments.into_iter());
        let driver = NullDriver::new(1 << 40);
        let mut address = |mib: u64| near.mem_alloc(&driver, mib * MIB).unwrap().get() / MIB;
        assert_eq!(address(16), 3000, "a segment of the same size comes first");
        assert_eq!(address(20), 1000, "without one, the next large enough segment in recorded order");
        assert_eq!(address(32), 2000, "that segment is in use now");
        assert_eq!(address(12), 1020, "the remainder of a segment is available");
        assert_eq!(address(15), 2032);
        assert_eq!(address(16), 2048, "and starts at an aligned address");
        assert!(address(64) < 1000, "below all of them if none is large enough");
    }
}
