//! Block maps: addresses of a recording's blocks, as recorded and under other allocators.

use super::data::Columns;
use super::source::Source;
use super::timeline::Timeline;
use crate::history::{Devices, Trace, adopted, failed, is_as_recorded};
use anyhow::Result;
use std::collections::BTreeMap;
use vramlab::histories::memory::{BlockLifetime, NEVER, SegmentLifetime, SegmentLifetimes};
use vramlab::histories::replay::{
    Addresses, BlockPlace, History, LedgerAt, ReplayReport, ReplaySettings, SegmentChange, Watched, replay_watched,
};
use vramlab::{Ledger, Path, Selection};

/// Number of ledgers over a recording; more than the columns of a screen.
const LEDGERS: usize = 1500;

/// A map before packing: one placement for each block of the timeline.
pub(super) struct Map {
    pub(super) name: String,
    pub(super) places: Vec<BlockPlace>,
    pub(super) segments: Vec<SegmentLifetime>,
    /// Number of failed allocations.
    pub(super) failed: u64,
}

/// A replay for the page.
pub(super) struct Replayed {
    pub(super) map: Map,
    pub(super) report: ReplayReport,
    /// Ledgers by event.
    pub(super) ledgers: Vec<(u32, Ledger)>,
    /// Whether every block and segment address matches the recording.
    pub(super) as_recorded: bool,
}

/// Replays a recording and returns the placement of its blocks. `None` without events, or if recorded addresses are requested and
/// cannot be reproduced.
///
/// # Errors
/// As for a replay.
pub(super) fn replayed(
    source: &Source,
    selection: &Selection,
    devices: &Devices,
    addresses: Addresses,
) -> Result<Option<Replayed>> {
    let recorded = addresses == Addresses::Recorded;
    let Some(Trace { history, settings, .. }) = &source.compiled else { return Ok(None) };
    if recorded && history.check_comparable().is_err() {
        return Ok(None);
    }
    let (backend, outside) = adopted(selection, settings);
    // CAST: a number of allocations in memory.
    let every = (2 * history.allocations() as usize).div_ceil(LEDGERS).max(1);
    let mut watched = Watched::every(every);
    let how = ReplaySettings { addresses, ..ReplaySettings::default() };
    let report = replay_watched(history, &backend, &devices.make(outside)?, &how, &mut watched)
        .map_err(|error| failed(&source.file, error))?;
    let timeline = &source.timeline;
    let Some(events) = events_of_allocations(timeline, history, watched.places.len()) else { return Ok(None) };
    let ledgers = ledgers(&watched.ledgers, &events, timeline);
    let map = Map {
        name: selection.to_string(),
        places: aligned(timeline, watched.places, recorded),
        segments: segments(&watched.segments, &events, timeline),
        failed: report.failed_allocations,
    };
    let as_recorded = is_as_recorded(&report);
    Ok(Some(Replayed { map, report, ledgers, as_recorded }))
}

/// The event of each allocation of a replay, starting with blocks from before recording started. `None` if the replay's allocations
/// differ from the timeline's.
fn events_of_allocations(timeline: &Timeline, history: &History, places: usize) -> Option<Vec<u32>> {
    // CAST: a number of blocks in memory.
    let before = history.prologue_allocations() as usize;
    let recorded = timeline.blocks[timeline.before()..].iter().map(|life| life.start);
    let events: Vec<u32> = std::iter::repeat_n(0, before).chain(recorded).collect();
    (events.len() == places).then_some(events)
}

/// Ledgers by event: the later of the last allocation and the last free request before the ledger. The ledger after the last
/// operation follows all events.
fn ledgers(taken: &[LedgerAt], events: &[u32], timeline: &Timeline) -> Vec<(u32, Ledger)> {
    let before = timeline.blocks[..timeline.before()].iter().filter(|life| life.freed == 0).count();
    let requests = timeline.blocks.iter().map(|life| life.freed).filter(|freed| *freed != NEVER);
    let mut requests: Vec<u32> = requests.collect();
    requests.sort_unstable();
    // Frees requested before recording started are not replayed.
    requests.drain(..before);
    let nth = |list: &[u32], count: usize| count.checked_sub(1).and_then(|at| list.get(at)).copied().unwrap_or(0);
    let event = |at: &LedgerAt| (nth(events, at.allocations).max(nth(&requests, at.frees)), at.ledger);
    let mut out: Vec<(u32, Ledger)> = taken.iter().map(event).collect();
    if let Some(last) = out.last_mut() {
        // CAST: a replayable recording has fewer than 2^32 events.
        last.0 = timeline.events() as u32;
    }
    out
}

/// A placement for each block of the timeline. Blocks from before recording started are matched by address, or by order if another
/// allocator placed them.
fn aligned(timeline: &Timeline, places: Vec<BlockPlace>, recorded: bool) -> Vec<BlockPlace> {
    let nowhere = BlockPlace { addr: 0, bytes: 0, path: None };
    let (known, recorded_later) = places.split_at(places.len() - (timeline.blocks.len() - timeline.before()));
    let before = &timeline.blocks[..timeline.before()];
    let mut out: Vec<BlockPlace> = if recorded {
        let by_addr: BTreeMap<u64, BlockPlace> = known.iter().map(|place| (place.addr, *place)).collect();
        before.iter().map(|life| by_addr.get(&life.addr).copied().unwrap_or(nowhere)).collect()
    } else if known.len() == before.len() {
        known.to_vec()
    } else {
        vec![nowhere; before.len()]
    };
    out.extend_from_slice(recorded_later);
    out
}

/// Lifetimes of the replay's segments in events; each segment belongs to the stream of its request.
fn segments(changes: &[SegmentChange], events: &[u32], timeline: &Timeline) -> Vec<SegmentLifetime> {
    let mut lifetimes = SegmentLifetimes::default();
    let requests = &timeline.blocks[timeline.before()..];
    let before = events.len() - requests.len();
    for change in changes {
        let at = events.get(change.allocation).or(events.last()).copied().unwrap_or(0);
        if change.taken {
            let request = change.allocation.checked_sub(before).and_then(|number| requests.get(number));
            lifetimes.take(SegmentLifetime {
                start: at,
                end: NEVER,
                addr: change.addr,
                bytes: change.bytes,
                stream: request.map(|life| life.stream),
                small: None,
                expandable: false,
                private: None,
                before: change.allocation < before,
            });
        } else {
            lifetimes.give_back(at, change.addr, change.bytes);
        }
    }
    lifetimes.finish()
}

/// The map of the recording itself. Block sizes and paths come from `placements` where known.
pub(super) fn recorded(timeline: &Timeline, placements: Option<&[BlockPlace]>) -> Map {
    let placement = |(number, life): (usize, &BlockLifetime)| {
        let known = placements.and_then(|all| all.get(number)).filter(|placement| placement.addr == life.addr);
        let bytes = known.map_or(life.bytes, |placement| placement.bytes).max(life.bytes);
        BlockPlace { addr: life.addr, bytes, path: known.and_then(|placement| placement.path) }
    };
    let places = timeline.blocks.iter().enumerate().map(placement).collect();
    Map { name: "as recorded".to_owned(), places, segments: timeline.segments.clone(), failed: 0 }
}

/// The length of a lifetime for the page. A lifetime without an end extends beyond the last event.
pub(super) fn length(start: u32, end: u32, events: usize) -> u64 {
    // CAST: a replayable recording has fewer than 2^32 events.
    let end = if end == NEVER { events as u64 } else { u64::from(end) };
    end - u64::from(start)
}

impl Map {
    /// The columns for `data.js`, and the unit of offsets.
    pub(super) fn columns(&self, timeline: &Timeline) -> (Columns, u64) {
        let placed = || self.places.iter().filter(|place| place.bytes > 0);
        let lanes = AddressRanges::new(
            self.segments.iter().map(|segment| (segment.addr, segment.bytes)),
            placed().map(|place| (place.addr, place.bytes)),
        );
        let at = |addr| lanes.place(addr).unwrap_or(0);
        let used = placed().map(|place| at(place.addr)).chain(self.segments.iter().map(|segment| at(segment.addr)));
        let unit = 1 << used.fold(0, |bits, place| bits | place).trailing_zeros().min(12);
        let mut columns = Columns::default();
        columns.push(lanes.list().iter().map(|lane| lane.addr));
        columns.push(lanes.list().iter().map(|lane| lane.bytes));
        columns.push(self.places.iter().map(|place| if place.bytes == 0 { 0 } else { at(place.addr) / unit }));
        columns.push(self.places.iter().map(|place| place.bytes));
        columns.push(self.places.iter().map(|place| match (place.bytes, place.path) {
            // CAST: a small enumeration.
            (_, Some(path)) => path as u64 + 1,
            (_, None) => 0,
        }));
        columns.push(self.segments.iter().map(|held| u64::from(held.start)));
        columns.push(self.segments.iter().map(|held| length(held.start, held.end, timeline.events())));
        columns.push(self.segments.iter().map(|held| at(held.addr) / unit));
        columns.push(self.segments.iter().map(|held| held.bytes));
        columns.push(self.segments.iter().map(|held| held.stream.map_or(0, |stream| timeline.streams.number(stream))));
        let pools = self.pools();
        // CAST: a position in a short list.
        let pool = |held: &SegmentLifetime| pools.iter().position(|pool| *pool == words(held)).unwrap_or(0) as u64;
        columns.push(self.segments.iter().map(pool));
        columns.push(self.segments.iter().map(|held| u64::from(held.before)));
        (columns, unit)
    }

    /// Kinds of segments as text, in the order of their first use; the first is empty, for unknown.
    pub(super) fn pools(&self) -> Vec<String> {
        let mut out = vec![String::new()];
        for segment in &self.segments {
            let words = words(segment);
            if !out.contains(&words) {
                out.push(words);
            }
        }
        out
    }
}

/// The kind of a segment in a few words; empty if unknown.
fn words(segment: &SegmentLifetime) -> String {
    let kind = segment.small.map(|small| if small { "small requests" } else { "large requests" }.to_owned());
    let expandable = segment.expandable.then(|| "expandable".to_owned());
    let private = segment.private.map(|(major, minor)| format!("private pool {major}.{minor}"));
    kind.into_iter().chain(expandable).chain(private).collect::<Vec<String>>().join(", ")
}

/// Names of the paths in the order of their numbers in a map; 0 stands for an unknown path.
pub(super) fn path_names() -> Vec<&'static str> {
    std::iter::once("").chain(Path::ALL.into_iter().map(Path::name)).collect()
}

/// Blocks closer than this are drawn in one lane, including the gap between them.
const NEAR: u64 = 2 << 20;

/// A range of addresses used at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddressRange {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    /// Its offset when the lanes are placed one after the other.
    place: u64,
}

/// All lanes of a map in address order.
#[derive(Debug, Default)]
pub(super) struct AddressRanges(Vec<AddressRange>);

impl AddressRanges {
    /// The lanes for ranges of addresses and bytes. Adjacent `segments` form one lane; so do neighbouring `blocks` outside of
    /// segments.
    pub(super) fn new(segments: impl Iterator<Item = (u64, u64)>, blocks: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut lanes = merged(segments.collect(), 0);
        let inside = |lanes: &[(u64, u64)], addr: u64| {
            let after = lanes.partition_point(|(start, _)| *start <= addr);
            after > 0 && lanes[after - 1].1 > addr
        };
        let outside: Vec<(u64, u64)> = blocks.filter(|(addr, _)| !inside(&lanes, *addr)).collect();
        if !outside.is_empty() {
            let ranges = lanes.iter().map(|(start, end)| (*start, end - start));
            let outside = merged(outside, NEAR).into_iter().map(|(start, end)| (start, end - start));
            lanes = merged(ranges.chain(outside).collect(), 0);
        }
        let mut place = 0;
        let lane = |(addr, end): (u64, u64)| {
            let lane = AddressRange { addr, bytes: end - addr, place };
            place += lane.bytes;
            lane
        };
        Self(lanes.into_iter().map(lane).collect())
    }

    /// The offset at which an address is drawn; `None` outside of all lanes.
    pub(super) fn place(&self, addr: u64) -> Option<u64> {
        let after = self.0.partition_point(|lane| lane.addr <= addr);
        let lane = self.0.get(after.checked_sub(1)?)?;
        (addr < lane.addr + lane.bytes).then(|| lane.place + (addr - lane.addr))
    }

    pub(super) fn list(&self) -> &[AddressRange] {
        &self.0
    }
}

/// Start and end of the merged ranges; gaps smaller than `near` are closed.
fn merged(mut ranges: Vec<(u64, u64)>, near: u64) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (addr, bytes) in ranges.into_iter().filter(|(_, bytes)| *bytes > 0) {
        let end = addr.saturating_add(bytes);
        match out.last_mut() {
            Some(last) if addr <= last.1.saturating_add(near) => last.1 = last.1.max(end),
            _ => out.push((addr, end)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_placed_one_after_the_other() {
        let segments = [(1000, 500), (1500, 500), (9000, 1000)];
        let lanes = AddressRanges::new(segments.into_iter(), [(9100, 5)].into_iter());
        assert_eq!(lanes.list().len(), 2, "adjacent segments are one lane");
        assert_eq!(lanes.place(1999), Some(999));
        assert_eq!(lanes.place(9000), Some(1000));
        assert_eq!((lanes.place(2000), lanes.place(999), lanes.place(10_000)), (None, None, None));
    }

    #[test]
    fn blocks_without_segments_get_lanes() {
        let lanes = AddressRanges::new(std::iter::empty(), [(4096, 512), (8192, 512), (1 << 40, 512)].into_iter());
        assert_eq!(lanes.list().iter().map(|lane| lane.bytes).collect::<Vec<_>>(), [4608, 512]);
        assert_eq!(lanes.place(1 << 40), Some(4608));
    }
}
