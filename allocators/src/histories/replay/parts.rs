//! Expandable segments in a history: ranges of addresses whose memory comes and goes in parts.
//!
//! PyTorch reports each part that is mapped or unmapped. It does not say where a range of addresses begins, but its first part
//! is at its start. Parts of the small pool are one handle of 2 MiB, larger ones are of the large pool.

use super::ReplayError;
use super::builder::{HistoryBuilder, wrong};
use super::windows::{Cause, End, SegmentEvent, Window};
use crate::backends::CachingSettings;
use crate::contract::{GUARANTEED_ALIGN, PoolKind};
use crate::histories::trace::{Event, Segment};
use crate::policy::size::torch::{SMALL_SEGMENT, pool_of, round_size, segment_size};
use std::collections::BTreeMap;

/// The parts that are mapped, joined where they touch: end by first address.
#[derive(Debug, Default)]
pub(super) struct Mapped(BTreeMap<u64, u64>);

impl Mapped {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether all of `start..end` is mapped.
    pub(super) fn contains(&self, start: u64, end: u64) -> bool {
        self.0.range(..=start).next_back().is_some_and(|(_, last)| *last >= end)
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.0.range(..end).next_back().is_some_and(|(_, last)| *last > start)
    }

    fn insert(&mut self, mut start: u64, mut end: u64) {
        if let Some((&before, _)) = self.0.range(..start).next_back().filter(|(_, last)| **last == start) {
            start = before;
        }
        if let Some(last) = self.0.remove(&end) {
            end = last;
        }
        self.0.insert(start, end);
    }

    /// Takes out what is mapped as a whole.
    fn remove(&mut self, start: u64, end: u64) {
        let Some((&first, &last)) = self.0.range(..=start).next_back() else { return };
        self.0.remove(&first);
        if first < start {
            self.0.insert(first, start);
        }
        if end < last {
            self.0.insert(end, last);
        }
    }
}

fn pool(bytes: u64) -> PoolKind {
    if bytes <= SMALL_SEGMENT { PoolKind::Small } else { PoolKind::Large }
}

impl HistoryBuilder {
    /// A part was mapped.
    pub(super) fn map_part(&mut self, event: &Event) -> Result<(), ReplayError> {
        let Event { addr, bytes, stream, .. } = *event;
        if bytes == 0 || addr == 0 || !addr.is_multiple_of(GUARANTEED_ALIGN) {
            return Err(wrong(self.number, format!("a mapping of {bytes} bytes at {addr:#x}")));
        }
        let (start, end) = (addr, addr + bytes);
        let plain = self.held.range(..end).next_back().is_some_and(|(held, size)| held + size > start);
        if plain || self.mapped.overlaps(start, end) {
            let what = format!("the mapping of {bytes} bytes at {addr:#x} overlaps memory that is there");
            return Err(wrong(self.number, what));
        }
        self.expandable = true;
        self.mapped.insert(start, end);
        self.pools.insert(start, pool(bytes));
        self.most_held = self.most_held.max(self.held.len() + self.mapped.len());
        let part = Some(pool(bytes));
        self.note_segment(SegmentEvent { addr, bytes, stream, part, op: 0, released: false, refused: false });
        Ok(())
    }

    /// A part was unmapped.
    pub(super) fn unmap_part(&mut self, event: &Event) {
        let Event { addr, bytes, stream, .. } = *event;
        self.expandable = true;
        let known = self.mapped.contains(addr, addr + bytes);
        // Of handles of the large pool nothing as small is unmapped.
        let part = self.pools.range(..=addr).next_back().map(|(_, pool)| *pool).filter(|_| known).or(Some(pool(bytes)));
        self.note_segment(SegmentEvent { addr, bytes, stream, part, op: 0, released: true, refused: false });
        if known {
            self.mapped.remove(addr, addr + bytes);
        } else {
            self.outside.get_or_insert(self.number);
        }
    }

    /// Why parts that were mapped at the end, by what the history says of that, did not come in its course.
    pub(super) fn mapped_before(&self, ending: &[Segment]) -> Option<String> {
        let expandable = ending.iter().filter(|segment| segment.is_expandable);
        let strange = expandable.filter(|segment| {
            let end = segment.address.saturating_add(segment.total_size);
            !self.mapped.contains(segment.address, end)
        });
        let first = strange.map(|segment| segment.address).min()?;
        Some(format!("the history is incomplete: it does not show how the memory at {first:#x} was mapped"))
    }
}

impl Window {
    /// Why parts were unmapped in this window.
    pub(super) fn cause_of_parts(&self, settings: &CachingSettings, end: End) -> Cause {
        let (bytes, stream, otherwise) = match end {
            End::Other => return Cause::Trim,
            End::Alloc { bytes, stream } => (bytes, stream, Cause::Trim),
            End::Refused { bytes, stream } => (bytes, stream, Cause::Retry),
        };
        // Within a request the client empties no cache: the device had memory for the first hole and none for the next.
        if !self.segments[0].released {
            return Cause::Device;
        }
        let rounded = round_size(bytes, &settings.roundup_power2_divisions);
        let fits = |part: &SegmentEvent| {
            part.released && part.stream == stream && part.part == Some(pool_of(rounded)) && part.bytes >= rounded
        };
        // Had one of the parts been there, the request would have got it: they were gone before.
        if settings.max_split_size.is_none() && self.segments.iter().any(fits) {
            return Cause::Trim;
        }
        let over = |limit: u64| self.reserved.saturating_add(segment_size(rounded)) > limit;
        match settings.memory_limit {
            Some(limit) if over(limit) => Cause::Retry,
            None if otherwise == Cause::Trim && self.is_refused(segment_size(rounded)) => Cause::Full,
            _ => otherwise,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn parts_join_where_they_touch_and_come_apart_again() {
        let mut mapped = Mapped::default();
        for (start, end) in [(10, 20), (30, 40), (20, 30)] {
            assert!(!mapped.overlaps(start, end));
            mapped.insert(start, end);
        }
        assert!(mapped.contains(10, 40) && mapped.len() == 1);
        mapped.remove(15, 25);
        assert!(
            mapped.contains(10, 15) && mapped.contains(25, 40) && !mapped.contains(10, 16) && mapped.overlaps(24, 26)
        );
        mapped.remove(10, 15);
        mapped.remove(30, 40);
        assert_eq!(mapped.0.into_iter().collect::<Vec<_>>(), [(25, 30)]);
    }

    #[test]
    fn the_limit_counts_a_segment_of_the_native_policy() {
        let part = |mib: i64| SegmentEvent {
            addr: 1 << 40,
            bytes: mib.unsigned_abs() * MIB,
            stream: 0,
            part: Some(PoolKind::Large),
            op: 0,
            released: mib < 0,
            refused: false,
        };
        let window = |parts: &[i64]| Window {
            segments: parts.iter().map(|mib| part(*mib)).collect(),
            reserved: 80 * MIB,
            released: true,
            ..Window::default()
        };
        let alloc = |mib: u64| End::Alloc { bytes: mib * MIB, stream: 0 };
        let limited = |mib: u64| CachingSettings { memory_limit: Some(mib * MIB), ..CachingSettings::default() };
        let cause = |parts: &[i64], end, mib| window(parts).cause(&limited(mib), end);
        // Two MiB count as 20.
        assert_eq!(cause(&[-20, 20], alloc(2), 99), Cause::Trim, "20 MiB would have served it");
        assert_eq!(cause(&[-20, 40], alloc(30), 109), Cause::Retry);
        assert_eq!(cause(&[-20, 40], alloc(30), 110), Cause::Trim);
        assert_eq!(cause(&[-20], End::Other, 99), Cause::Trim);
        assert_eq!(cause(&[-20], End::Refused { bytes: 30 * MIB, stream: 0 }, 109), Cause::Retry);
        assert_eq!(cause(&[20, -20, 20], alloc(30), 200), Cause::Device);
    }
}
