//! Expandable segments in a history: ranges of addresses whose memory comes and goes in parts.
//!
//! PyTorch reports each part that is mapped or unmapped. It does not say where a range of addresses begins, but its first part
//! is at its start. Parts of the small pool are one handle of 2 MiB, larger ones are of the large pool.

use super::ReplayError;
use super::builder::{HistoryBuilder, wrong};
use super::gaps::Gaps;
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
        let round = |bytes: u64| round_size(bytes, &settings.roundup_power2_divisions);
        let rounded = round(bytes);
        // Blocks whose frees were held up lay between what was free.
        let held_up = self.completions.iter().chain(&self.before);
        let gaps = Gaps::between(held_up.map(|done| (done.addr, done.addr + done.size.unwrap_or(round(done.bytes)))));
        let fits = |part: &SegmentEvent| {
            part.released
                && part.stream == stream
                && part.part == Some(pool_of(rounded))
                && gaps.largest_in(part.addr, part.addr + part.bytes) >= rounded
        };
        // Had one of the parts been there, the request would have got it: they were gone before.
        if settings.max_split_size.is_none() && self.segments.iter().any(fits) {
            return Cause::Trim;
        }
        // After `empty_cache` a block that stayed would have served, and nothing would have been mapped.
        let serves_by_waiting = self.segments.iter().any(|part| !part.released)
            && settings.max_split_size.is_none()
            && self.held_up_fits(settings, bytes, stream, |done| !self.is_gone(done.addr));
        let over = |limit: u64| self.reserved.saturating_add(segment_size(rounded)) > limit;
        match settings.memory_limit {
            Some(limit) if over(limit) => Cause::Retry,
            None if otherwise == Cause::Trim && (serves_by_waiting || self.is_refused(segment_size(rounded))) => {
                Cause::Full
            }
            _ => otherwise,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::windows::Completion;
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
    #[test]
    fn a_held_up_block_could_not_serve_before_its_free_completed() {
        let part = |addr: u64, bytes: u64, released: bool| {
            let (stream, part) = (0, Some(PoolKind::Large));
            SegmentEvent { addr, bytes, stream, part, op: 0, released, refused: false }
        };
        let held_up = |addr: u64, mib: u64| {
            let (op, size, stream) = (0, Some(mib * MIB), 0);
            Completion { op, addr, bytes: mib * MIB, size, stream, after_release: false }
        };
        let (gone, kept) = (1 << 40, 2 << 40);
        let window = |completion| Window {
            completions: Vec::from([completion]),
            segments: Vec::from([part(gone, 40 * MIB, true), part(4 << 40, 20 * MIB, false)]),
            reserved: 80 * MIB,
            released: true,
            ..Window::default()
        };
        let cause = |completion, limit: Option<u64>, mib: u64| {
            let settings = CachingSettings { memory_limit: limit.map(|mib| mib * MIB), ..CachingSettings::default() };
            window(completion).cause(&settings, End::Alloc { bytes: mib * MIB, stream: 0 })
        };
        // 15 MiB were free on each side of the block in what went back: enough for 12, not for 16.
        let between = gone + 15 * MIB;
        assert_eq!(cause(held_up(between, 10), Some(90), 12), Cause::Trim);
        assert_eq!(cause(held_up(between, 10), Some(90), 16), Cause::Retry);
        // After `empty_cache` the block that stayed would have served, unless it is too small: the device was full.
        assert_eq!(cause(held_up(kept, 16), None, 16), Cause::Trim, "40 MiB in one piece were free");
        let small = |mib| Window {
            segments: Vec::from([part(gone, 2 * MIB, true), part(4 << 40, 20 * MIB, false)]),
            ..window(held_up(kept, mib))
        };
        let end = End::Alloc { bytes: 16 * MIB, stream: 0 };
        assert_eq!(small(16).cause(&CachingSettings::default(), end), Cause::Full);
        assert_eq!(small(15).cause(&CachingSettings::default(), end), Cause::Trim);
    }
}
