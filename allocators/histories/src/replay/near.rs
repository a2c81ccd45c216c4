//! Segments near where they were recorded, for a replay under other settings than those of the recording.
//!
//! Between free blocks of one size allocators take the one with the lowest address, so what a setting would have done depends on
//! where the driver would have put its segments. A driver has things of its own in the range that a model does not know; the
//! history shows what they left. A segment comes where the recorded program's next one of that size was; without one of that
//! size, at the beginning of the next larger one that is not taken, of which the rest stays for others: the driver fills the
//! same gaps, whatever is asked for. Further ones come below all of these, as the driver fills the range from the top
//! downwards, in the order of the device's own addresses.

use crate::history::SegmentEvent;
use std::collections::{BTreeMap, BTreeSet};
use vramlab_device::{CallKind, DeviceAddr, Driver, DriverError, DriverResult};

/// Distances between addresses are kept in multiples of this.
const GRANULE: u64 = 32 << 20;
/// What is left of a place begins at a multiple of this, as memory of the device does.
const PAGE: u64 = 2 << 20;

/// What the recording had, and what is out.
#[derive(Debug)]
pub(super) struct Near {
    /// By size: recorded segments, or what is left of them, as their number in the recorded order and their address.
    recorded: BTreeMap<u64, BTreeSet<(usize, u64)>>,
    /// The lowest recorded address.
    lowest: u64,
    /// How far the device's own addresses are moved down to lie below the recorded ones.
    down: Option<u64>,
    /// Segments that are out.
    pub(super) held: HandedOut,
}

impl Near {
    pub(super) fn new(segments: impl Iterator<Item = SegmentEvent>) -> Self {
        let mut near = Self { recorded: BTreeMap::new(), lowest: u64::MAX, down: None, held: HandedOut::default() };
        for (number, segment) in segments.filter(|segment| !segment.released && segment.part.is_none()).enumerate() {
            near.recorded.entry(segment.bytes).or_default().insert((number, segment.addr));
            near.lowest = near.lowest.min(segment.addr);
        }
        near
    }

    /// The next recorded place that is free: of that size, else the beginning of a larger one. Logarithmic in the segments and
    /// linear in their sizes, of which programs have few.
    fn next(&mut self, bytes: u64) -> Option<u64> {
        loop {
            let first = |places: &BTreeSet<(usize, u64)>| places.first().copied();
            let exact = self.recorded.get(&bytes).and_then(first).map(|place| (place, bytes));
            let larger = || {
                let sizes = self.recorded.range(bytes..).filter_map(|(size, places)| Some((first(places)?, *size)));
                sizes.min_by_key(|((number, _), _)| *number)
            };
            let ((number, addr), size) = exact.or_else(larger)?;
            self.recorded.get_mut(&size)?.remove(&(number, addr));
            if self.held.is_free(addr, bytes) {
                let rest = (addr + bytes).next_multiple_of(PAGE);
                if let Some(left) = (addr + size).checked_sub(rest).filter(|left| *left > 0) {
                    self.recorded.entry(left).or_default().insert((number, rest));
                }
                return Some(addr);
            }
        }
    }

    /// Below the recorded ones, or the device's own address where there is no room.
    fn below(&mut self, own: DeviceAddr, bytes: u64) -> u64 {
        let end = own.get().saturating_add(bytes).next_multiple_of(GRANULE);
        let down = *self.down.get_or_insert(end.saturating_sub(self.lowest / GRANULE * GRANULE));
        own.get().checked_sub(down).filter(|addr| *addr > 0 && self.held.is_free(*addr, bytes)).unwrap_or(own.get())
    }

    pub(super) fn mem_alloc(&mut self, inner: &dyn Driver, bytes: u64) -> DriverResult<DeviceAddr> {
        let own = inner.mem_alloc(bytes)?;
        let addr = self.next(bytes).unwrap_or_else(|| self.below(own, bytes));
        let Some(handed) = DeviceAddr::new(addr).filter(|_| self.held.is_free(addr, bytes)) else {
            // SAFETY: it was handed out above and given to no caller.
            unsafe { inner.mem_free(own) }?;
            let text = format!("no address for {bytes} bytes beside the recorded ones");
            return Err(DriverError::new(CallKind::MemAlloc, DriverError::INVALID_VALUE, text));
        };
        self.held.add(addr, bytes, own);
        Ok(handed)
    }
}

/// By the address that was handed out: bytes and the device's own address.
#[derive(Debug, Default)]
pub(super) struct HandedOut(BTreeMap<u64, (u64, DeviceAddr)>);

impl HandedOut {
    pub(super) fn add(&mut self, addr: u64, bytes: u64, own: DeviceAddr) {
        self.0.insert(addr, (bytes, own));
    }

    pub(super) fn remove(&mut self, addr: DeviceAddr) {
        self.0.remove(&addr.get());
    }

    /// Size and own address of what was handed out at an address.
    pub(super) fn get(&self, addr: u64) -> Option<(u64, DeviceAddr)> {
        self.0.get(&addr).copied()
    }

    /// Whether nothing is out in a range of addresses.
    pub(super) fn is_free(&self, addr: u64, bytes: u64) -> bool {
        let below = self.0.range(..addr.saturating_add(bytes)).next_back();
        below.is_none_or(|(start, (held, _))| start + held <= addr)
    }

    /// The device's own address for one inside of what was handed out.
    pub(super) fn own(&self, addr: DeviceAddr) -> Option<DeviceAddr> {
        let (start, (bytes, own)) = self.0.range(..=addr.get()).next_back()?;
        (addr.get() < start + bytes).then(|| own.offset(addr.get() - start))
    }

    /// Gives a segment back to the device.
    pub(super) fn mem_free(&mut self, inner: &dyn Driver, addr: DeviceAddr) -> DriverResult<()> {
        let Some((_, own)) = self.get(addr.get()) else {
            let text = format!("no segment at {:#x}", addr.get());
            return Err(DriverError::new(CallKind::MemFree, DriverError::INVALID_VALUE, text));
        };
        // SAFETY: the device handed this address out for the segment, which is freed once: it is removed below.
        unsafe { inner.mem_free(own) }?;
        self.remove(addr);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use vramlab_device::NullDriver;

    #[test]
    fn a_segment_of_a_size_that_was_not_recorded_fills_the_place_of_the_next_larger_one() {
        const MIB: u64 = 1 << 20;
        let recorded = [(3000, 16), (1000, 32), (2000, 64)];
        let segments = recorded.map(|(addr, mib)| SegmentEvent::made(addr * MIB, mib * MIB, 0));
        let mut near = Near::new(segments.into_iter());
        let driver = NullDriver::new(1 << 40);
        let mut place = |mib: u64| near.mem_alloc(&driver, mib * MIB).unwrap().get() / MIB;
        assert_eq!(place(16), 3000, "one of its own size comes first");
        assert_eq!(place(20), 1000, "without one the next that is large enough, in the recorded order");
        assert_eq!(place(32), 2000, "that one is taken now");
        assert_eq!(place(12), 1020, "what is left of a place is one, too");
        assert_eq!(place(15), 2032);
        assert_eq!(place(16), 2048, "and begins where memory of a device can");
        assert!(place(64) < 1000, "where none is large enough it is below all of them");
    }
}
