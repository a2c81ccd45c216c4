//! A history in memory: its events with where they came from, and what was there before the first of them.

use super::How;
use super::events::{Events, Recorded};
use crate::history::{no_events, say_cut};
use anyhow::{Context, Result, anyhow};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use vramlab::BlockState;
use vramlab::backends::CachingSettings;
use vramlab::histories::replay::{MAX_BYTES, recorded_settings};
use vramlab::histories::trace::{
    Action, Annotation, Event, Format, Origin, Origins, ReadError, SegmentType, Summary, TextId, read_origins,
};

/// The index of what was there before the first event.
pub(super) const START: usize = usize::MAX;

/// The events of one GPU and what else its history says.
pub(super) struct Recording {
    pub(super) events: Events,
    pub(super) origins: Origins,
    pub(super) summary: Summary,
    pub(super) settings: CachingSettings,
    /// Whether the recorded allocator followed PyTorch's rules.
    pub(super) pytorch: bool,
    pub(super) device: u16,
    /// Events of the file before the first of this GPU.
    pub(super) skipped: u64,
    pub(super) before: Before,
    /// Times at which an annotation begins or ends, and the innermost one from then on.
    ranges: Vec<(u64, Option<TextId>)>,
}

/// What was there before the first event, as far as the history tells it.
#[derive(Debug, Default)]
pub(super) struct Before {
    pub(super) segments: Vec<SegmentBefore>,
    pub(super) blocks: Vec<BlockBefore>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentBefore {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    pub(super) stream: u64,
    pub(super) expandable: bool,
    pub(super) small: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct BlockBefore {
    pub(super) addr: u64,
    pub(super) requested: u64,
    /// Where the end tells it.
    pub(super) bytes: Option<u64>,
    pub(super) stream: u64,
    pub(super) pending: bool,
    pub(super) origin: Origin,
}

impl Recording {
    /// Reads a file.
    pub(super) fn read(path: &Path, how: &How) -> Result<Self> {
        let (gpu, limit) = (how.gpu, how.limit);
        let options = how.read.keeping(path);
        let mut events = Events::new(&options.budget);
        let (mut number, mut device, mut skipped) = (0_u64, gpu, 0);
        let (summary, origins) = read_origins(path, &options, &mut |event, origin, _| {
            number += 1;
            let Event { action, addr, bytes, stream, time_ns, .. } = event;
            match device {
                Some(device) if device == event.device => {}
                Some(_) if gpu.is_some() => {
                    skipped += u64::from(events.is_empty());
                    return Ok(());
                }
                Some(first) => {
                    return Err(ReadError::stop(format!(
                        "there are events of GPU {first} and of GPU {}; choose one with --gpu",
                        event.device
                    )));
                }
                None => device = Some(event.device),
            }
            // The device's free bytes stand in the place of an address.
            let end = if action == Action::Oom { Some(bytes) } else { addr.checked_add(bytes) };
            if bytes > MAX_BYTES || end.is_none() {
                return Err(ReadError::stop(format!("event {number}: {addr:#x} + {bytes} is no range of addresses")));
            }
            let recorded = Recorded { addr, bytes, stream, time_ns, origin, action };
            events.push(recorded).map_err(ReadError::stop)
        })?;
        say_cut(path, &summary);
        let held = summary.segments.iter().map(|segment| segment.device);
        let device = device.or_else(|| held.min()).unwrap_or(0);
        let mine = summary.segments.iter().any(|segment| segment.device == device);
        if events.is_empty() && !mine {
            return Err(no_events(path, gpu, &summary));
        }
        let mut settings =
            recorded_settings(&summary.allocator_settings).with_context(|| path.display().to_string())?;
        settings.memory_limit = limit.map(|limit| limit.0).or(settings.memory_limit);
        let pytorch = matches!(summary.format, Format::SnapshotPickle | Format::SnapshotJson);
        let mut out = Self {
            events,
            origins,
            summary,
            settings,
            pytorch,
            device,
            skipped,
            before: Before::default(),
            ranges: Vec::new(),
        };
        out.before = out.look_back();
        out.ranges = out.annotated();
        if out.events.len() > u32::MAX as usize - 2 {
            return Err(anyhow!("{}: there are more than four billion events", path.display()));
        }
        Ok(out)
    }

    /// The number of an event in the file, from 1.
    pub(super) fn number(&self, index: usize) -> u64 {
        // CAST: a length in memory.
        self.skipped + index as u64 + 1
    }

    /// Time of an event since the first; `None` in logs without times.
    pub(super) fn since_start(&self, index: usize) -> Option<u64> {
        let first = self.events.first()?.time_ns;
        let time = self.events.get(index)?.time_ns;
        let timed = self.events.last().is_some_and(|last| last.time_ns > 0);
        timed.then(|| time.saturating_sub(first))
    }

    /// Whether the pair of events from this one on is a free that completes at once.
    pub(super) fn completes_at_once(&self, index: usize) -> bool {
        let pair = self.events.get(index).zip(self.events.get(index + 1));
        pair.is_some_and(|(free, next)| {
            free.action == Action::FreeRequested && next.action == Action::FreeCompleted && free.addr == next.addr
        })
    }

    /// The innermost annotation at an event.
    pub(super) fn annotation(&self, index: usize) -> Option<&str> {
        let time = self.events.get(index)?.time_ns;
        let before = self.ranges.partition_point(|(at, _)| *at <= time);
        let (_, name) = self.ranges.get(before.checked_sub(1)?)?;
        name.map(|name| self.origins.spelt(name))
    }

    /// The first event from the first annotation of a name on.
    pub(super) fn begins(&self, name: &str) -> Option<usize> {
        let mine = |device: Option<u16>| device.is_none_or(|device| device == self.device);
        let all = self.origins.annotations().iter().filter(|annotation| annotation.start && mine(annotation.device));
        let found =
            all.filter(|annotation| self.origins.spelt(annotation.name) == name).map(|found| found.time_ns).min()?;
        let index = self.events.at_time(found);
        (index < self.events.len()).then_some(index)
    }

    fn annotated(&self) -> Vec<(u64, Option<TextId>)> {
        let mine = |device: Option<u16>| device.is_none_or(|device| device == self.device);
        let mut all: Vec<_> = self.origins.annotations().iter().filter(|annotation| mine(annotation.device)).collect();
        all.sort_by_key(|annotation| annotation.time_ns);
        let mut open: Vec<TextId> = Vec::new();
        let step = |annotation: &&Annotation| {
            match annotation.start {
                true => open.push(annotation.name),
                false => {
                    if let Some(at) = open.iter().rposition(|name| *name == annotation.name) {
                        open.remove(at);
                    }
                }
            }
            (annotation.time_ns, open.last().copied())
        };
        all.iter().map(step).collect()
    }

    /// The pool of a segment by what was held at the end, which tells it of expandable segments.
    pub(super) fn is_small(&self, addr: u64, bytes: u64, mapped: bool) -> bool {
        // Parts for small requests are of 2 MiB, for others of multiples of 20 MiB.
        const SMALL: u64 = 2 << 20;
        const LARGE: u64 = 20 << 20;
        if !mapped {
            return bytes == SMALL;
        }
        let known = self.summary.ending().unwrap_or_default().iter().find(|segment| {
            segment.device == self.device && addr >= segment.address && addr < segment.address + segment.total_size
        });
        known.map_or(!bytes.is_multiple_of(LARGE), |segment| segment.segment_type == SegmentType::Small)
    }

    /// Tells what was there before the first event: what goes without having come, and what is held at the end without
    /// having come.
    fn look_back(&self) -> Before {
        let mut out = Before::default();
        let mut live: HashMap<u64, bool> = HashMap::new();
        let mut known: BTreeSet<u64> = BTreeSet::new();
        let mut made = Covered::default();
        let segment = |addr, bytes, stream, expandable| SegmentBefore {
            addr,
            bytes,
            stream,
            expandable,
            small: self.is_small(addr, bytes, expandable),
        };
        for event in self.events.iter() {
            let Recorded { addr, bytes, stream, .. } = event;
            match event.action {
                Action::Alloc => drop(live.insert(addr, false)),
                Action::FreeRequested | Action::FreeCompleted => {
                    let requested = event.action == Action::FreeRequested;
                    let there = live.contains_key(&addr);
                    if !there && bytes > 0 && known.insert(addr) {
                        let origin = Origin::default();
                        out.blocks.push(BlockBefore {
                            addr,
                            requested: bytes,
                            bytes: None,
                            stream,
                            pending: !requested,
                            origin,
                        });
                    }
                    if requested {
                        live.insert(addr, true);
                    } else {
                        live.remove(&addr);
                    }
                }
                Action::SegmentAlloc | Action::SegmentMap => made.insert(addr, addr + bytes),
                Action::SegmentFree | Action::SegmentUnmap => {
                    let mapped = event.action == Action::SegmentUnmap;
                    for (start, end) in made.missing(addr, addr + bytes) {
                        out.segments.push(segment(start, end - start, stream, mapped));
                    }
                    made.remove(addr, addr + bytes);
                }
                Action::RecordUse | Action::Snapshot | Action::Oom => {}
            }
        }
        let held = self.summary.ending().unwrap_or_default();
        for end in held.iter().filter(|segment| segment.device == self.device) {
            let small = end.segment_type == SegmentType::Small;
            for (start, stop) in made.missing(end.address, end.address.saturating_add(end.total_size)) {
                let (stream, expandable) = (end.stream, end.is_expandable);
                out.segments.push(SegmentBefore { addr: start, bytes: stop - start, stream, expandable, small });
            }
            for block in end.blocks.iter().filter(|block| block.state != BlockState::Free) {
                if !live.contains_key(&block.address) && known.insert(block.address) {
                    out.blocks.push(BlockBefore {
                        addr: block.address,
                        requested: block.requested_size,
                        bytes: Some(block.size),
                        stream: end.stream,
                        pending: block.state == BlockState::PendingFree,
                        origin: self.origins.block(self.device, block.address),
                    });
                }
            }
        }
        out.segments.sort_by_key(|segment| segment.addr);
        out.blocks.sort_by_key(|block| block.addr);
        out
    }
}

/// Ranges of addresses, none of which overlap.
#[derive(Debug, Default)]
struct Covered(BTreeMap<u64, u64>);

impl Covered {
    fn insert(&mut self, start: u64, end: u64) {
        self.remove(start, end);
        if start < end {
            self.0.insert(start, end);
        }
    }

    fn overlapping(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let first = self.0.range(..=start).next_back().map_or(start, |(at, _)| *at);
        self.0.range(first..end.max(first)).map(|(at, to)| (*at, *to)).filter(|(_, to)| *to > start).collect()
    }

    fn remove(&mut self, start: u64, end: u64) {
        for (at, to) in self.overlapping(start, end) {
            self.0.remove(&at);
            if at < start {
                self.0.insert(at, start);
            }
            if to > end {
                self.0.insert(end, to);
            }
        }
    }

    /// The parts of a range that are not covered.
    fn missing(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (mut out, mut at) = (Vec::new(), start);
        for (from, to) in self.overlapping(start, end) {
            if from > at {
                out.push((at, from.min(end)));
            }
            at = at.max(to);
        }
        if at < end {
            out.push((at, end));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_covered_is_missing() {
        let mut covered = Covered::default();
        covered.insert(10, 20);
        covered.insert(30, 40);
        assert_eq!(covered.missing(0, 50), [(0, 10), (20, 30), (40, 50)]);
        assert_eq!(covered.missing(12, 18), []);
        covered.remove(15, 35);
        assert_eq!(covered.missing(10, 40), [(15, 35)]);
        assert_eq!(covered.missing(40, 40), []);
    }
}
