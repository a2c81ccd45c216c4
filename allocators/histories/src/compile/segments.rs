//! First stage: the segments of the recording, and evidence of earlier memory.
//!
//! Expandable segments are mapped and unmapped in ranges, and PyTorch reports each range. It does not report where the address
//! range of a segment begins, but its first mapped range is at its start. Ranges of the small pool are one handle of 2 MiB;
//! larger ones are of the large pool, and so is a range right after one of that pool.

use crate::formats::{Action, Event, Segment};
use crate::history::SegmentEvent;
use std::collections::BTreeMap;
use vramlab_device::ranges::Ranges;
use vramlab_policies::contract::{GUARANTEED_ALIGN, PoolKind};
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

/// Segments and mapped ranges of expandable segments, event by event.
#[derive(Clone, Debug, Default)]
pub(super) struct Segments {
    /// Segments that the recording allocated, by address.
    reserved_segments: BTreeMap<u64, u64>,
    /// Mapped ranges of expandable segments, and the pool of every range.
    mapped: Ranges,
    pools: BTreeMap<u64, PoolKind>,
    /// Addresses of segments that the recording allocated.
    made: Ranges,
    /// Segments that the recording released without having allocated them.
    pub(super) departed: Vec<SegmentEvent>,
    /// Their addresses.
    left: Ranges,
    /// Bytes reserved beyond the initial memory; wraps below zero.
    pub(super) reserved: u64,
    /// Maximum of that.
    pub(super) most_reserved: i64,
    /// Whether ranges were mapped or unmapped.
    pub(super) expandable: bool,
}

/// The pool of a mapped range.
fn pool(bytes: u64) -> PoolKind {
    if bytes <= SMALL_SEGMENT { PoolKind::Small } else { PoolKind::Large }
}

impl Segments {
    /// A segment was allocated.
    pub(super) fn make(&mut self, event: &Event) -> Result<SegmentEvent, String> {
        let Event { addr, bytes, stream, .. } = *event;
        if bytes == 0 || addr == 0 {
            return Err(format!("a segment of {bytes} bytes at {addr:#x}"));
        }
        if !addr.is_multiple_of(GUARANTEED_ALIGN) {
            return Err(format!(
                "the segment of {bytes} bytes at {addr:#x} does not begin at a multiple of {GUARANTEED_ALIGN}, as device \
                 memory does"
            ));
        }
        if let Some((start, size)) = self.held_in(addr, bytes) {
            return Err(format!(
                "the segment of {bytes} bytes at {addr:#x} overlaps the segment of {size} bytes at {start:#x}"
            ));
        }
        self.reserved_segments.insert(addr, bytes);
        self.made.insert(addr, addr + bytes);
        Ok(self.grow(SegmentEvent::made(addr, bytes, stream)))
    }

    /// A range was mapped.
    pub(super) fn map(&mut self, event: &Event) -> Result<SegmentEvent, String> {
        let Event { addr, bytes, stream, .. } = *event;
        if bytes == 0 || addr == 0 || !addr.is_multiple_of(GUARANTEED_ALIGN) {
            return Err(format!("a mapping of {bytes} bytes at {addr:#x}"));
        }
        if self.held_in(addr, bytes).is_some() || self.mapped.overlaps(addr, addr + bytes) {
            return Err(format!("the mapping of {bytes} bytes at {addr:#x} overlaps mapped memory"));
        }
        self.expandable = true;
        // Address ranges are far apart, so memory right after a mapped range belongs to the same one: `remap` maps no more there
        // than it needs.
        let behind = self.mapped.contains(addr - 1, addr);
        let before = self.pools.range(..addr).next_back().map(|(_, pool)| *pool).filter(|_| behind);
        let of = if before == Some(PoolKind::Large) { PoolKind::Large } else { pool(bytes) };
        self.mapped.insert(addr, addr + bytes);
        self.pools.insert(addr, of);
        Ok(self.grow(SegmentEvent::made(addr, bytes, stream).part_of(of)))
    }

    fn grow(&mut self, event: SegmentEvent) -> SegmentEvent {
        self.reserved = self.reserved.wrapping_add(event.bytes);
        self.most_reserved = self.most_reserved.max(self.reserved.cast_signed());
        event
    }

    /// A segment was released, in the event of this number. Returns whether the recording had allocated it.
    pub(super) fn release(&mut self, event: &Event, number: u64) -> (SegmentEvent, bool) {
        let Event { addr, bytes, stream, .. } = *event;
        let (known_bytes, end) = (self.reserved_segments.remove(&addr), addr + bytes);
        let known = |ranges: &Ranges| ranges.overlaps(addr, end);
        let departed = known_bytes.is_none() && bytes > 0 && addr > 0 && !known(&self.made) && !known(&self.left);
        let event = SegmentEvent { event: number, ..SegmentEvent::made(addr, bytes, stream).released() };
        if departed {
            self.left.insert(addr, end);
            self.departed.push(event);
        }
        // The released size is the allocated one, whatever the event contains; unknown segments release nothing.
        self.shrink(known_bytes.unwrap_or(if departed { bytes } else { 0 }));
        (event, known_bytes.is_some())
    }

    /// A range was unmapped. Returns whether the recording had mapped it.
    pub(super) fn unmap(&mut self, event: &Event) -> (SegmentEvent, bool) {
        let Event { addr, bytes, stream, .. } = *event;
        self.expandable = true;
        let known = self.mapped.contains(addr, addr + bytes);
        // Ranges as small as this are not unmapped from handles of the large pool.
        let of = self.pools.range(..=addr).next_back().map(|(_, pool)| *pool).filter(|_| known);
        if known {
            self.mapped.remove(addr, addr + bytes);
        }
        self.shrink(bytes);
        (SegmentEvent::made(addr, bytes, stream).part_of(of.unwrap_or(pool(bytes))).released(), known)
    }

    fn shrink(&mut self, bytes: u64) {
        self.reserved = self.reserved.wrapping_sub(bytes);
    }

    /// A segment that overlaps a range of addresses.
    pub(super) fn held_in(&self, addr: u64, bytes: u64) -> Option<(u64, u64)> {
        let (start, size) = self.reserved_segments.range(..addr + bytes).next_back()?;
        (start + size > addr).then_some((*start, *size))
    }

    /// The segment that contains only part of a range of addresses.
    pub(super) fn cut_off(&self, addr: u64, bytes: u64) -> Option<(u64, u64)> {
        self.held_in(addr, bytes).filter(|(start, size)| *start > addr || start + size < addr + bytes)
    }

    /// Whether a segment is released that the recording released before.
    pub(super) fn was_released_before(&self, event: &Event) -> bool {
        let Event { action, addr, bytes, .. } = *event;
        let plain = action == Action::SegmentFree && bytes > 0;
        plain && !self.reserved_segments.contains_key(&addr) && self.made.overlaps(addr, addr + bytes)
    }

    /// Size of the memory that a segment event adds or removes.
    pub(super) fn changed(&self, event: &Event) -> u64 {
        let reserved = self.reserved_segments.get(&event.addr).filter(|_| event.action == Action::SegmentFree);
        reserved.copied().unwrap_or(event.bytes)
    }

    /// Whether a range of addresses is in one segment, or in mapped ranges.
    pub(super) fn contain(&self, addr: u64, bytes: u64) -> bool {
        let plain =
            self.reserved_segments.range(..=addr).next_back().is_some_and(|(start, size)| start + size >= addr + bytes);
        plain || self.mapped.contains(addr, addr + bytes)
    }

    /// Whether the recording allocated any.
    pub(super) fn shows_some(&self) -> bool {
        !self.made.is_empty() || !self.pools.is_empty()
    }

    /// Whether a segment of the recording is reserved.
    pub(super) fn holds(&self, addr: u64, bytes: u64) -> bool {
        self.reserved_segments.get(&addr) == Some(&bytes)
    }

    pub(super) fn count(&self) -> usize {
        self.reserved_segments.len()
    }

    /// Whether the recording allocated or released segments in a range of addresses.
    pub(super) fn knows(&self, start: u64, end: u64) -> bool {
        self.made.overlaps(start, end) || self.left.overlaps(start, end)
    }

    /// Entries of the maps from addresses to sizes, and of the maps of ranges.
    pub(super) fn entries(&self) -> (usize, usize) {
        (self.reserved_segments.len() + self.made.len() + self.left.len(), self.mapped.len() + self.pools.len())
    }

    /// Why ranges that are mapped at the end were not mapped by the recording.
    pub(super) fn mapped_before(&self, ending: &[Segment]) -> Option<String> {
        let expandable = ending.iter().filter(|segment| segment.is_expandable);
        let strange = expandable.filter(|segment| {
            let end = segment.address.saturating_add(segment.total_size);
            !self.mapped.contains(segment.address, end)
        });
        let first = strange.map(|segment| segment.address).min()?;
        Some(format!("the recording is incomplete: it does not show how the memory at {first:#x} was mapped"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_range_after_one_of_the_large_pool_joins_that_pool() {
        const MIB: u64 = 1 << 20;
        let mut segments = Segments::default();
        let mut map = |addr, bytes| {
            let event = Event { action: Action::SegmentMap, device: 0, addr, bytes, stream: 0, time_ns: 0 };
            segments.map(&event).unwrap().part
        };
        assert_eq!(map(1 << 30, 12 * MIB), Some(PoolKind::Large));
        assert_eq!(map((1 << 30) + 12 * MIB, 2 * MIB), Some(PoolKind::Large));
        assert_eq!(map((1 << 30) + 14 * MIB, 2 * MIB), Some(PoolKind::Large), "the range before it was");
        assert_eq!(map(1 << 40, 2 * MIB), Some(PoolKind::Small), "another range");
        assert_eq!(map((1 << 40) + 2 * MIB, 2 * MIB), Some(PoolKind::Small));
    }
}
