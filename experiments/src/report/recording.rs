//! What the page shows of a history: lives of blocks and segments, counted in events.

use std::collections::{BTreeMap, HashMap};
use vramlab::histories::trace::{Action, Event, Segment, SegmentType, Summary};

/// The end of what is never given back.
pub(super) const NEVER: u32 = u32::MAX;

/// A block from its allocation until its memory is free again. Times are numbers of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) start: u32,
    /// The request to free it.
    pub(super) freed: u32,
    /// The completion of that free.
    pub(super) end: u32,
    pub(super) addr: u64,
    /// Bytes that were asked for.
    pub(super) bytes: u64,
    /// Position in [`Recording::streams`].
    pub(super) stream: u32,
    /// Where it came from.
    pub(super) came: Came,
    /// Whether it was there before the first event.
    pub(super) before: bool,
}

/// Where a block came from: numbers of a stack and of a category, 0 where that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Came {
    pub(super) stack: u32,
    pub(super) category: u32,
}

/// Memory held from the device. Times are numbers of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) addr: u64,
    pub(super) bytes: u64,
    /// Position in [`Recording::streams`], [`NEVER`] where nobody tells.
    pub(super) stream: u32,
    pub(super) pool: Pool,
    /// Whether it was there before the first event.
    pub(super) before: bool,
}

/// What a segment is for, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pool {
    /// Whether it serves small requests, or others.
    pub(super) small: Option<bool>,
    /// Whether it is a part of an expandable segment.
    pub(super) expandable: bool,
    /// The private pool that it belongs to, such as that of a CUDA graph. Only those that are held at the end are told.
    pub(super) private: Option<(u64, u64)>,
}

impl Pool {
    /// In a few words; empty where nothing is known.
    pub(super) fn words(self) -> String {
        let kind = self.small.map(|small| if small { "small requests" } else { "large requests" }.to_owned());
        let expandable = self.expandable.then(|| "expandable".to_owned());
        let private = self.private.map(|(major, minor)| format!("private pool {major}.{minor}"));
        kind.into_iter().chain(expandable).chain(private).collect::<Vec<String>>().join(", ")
    }
}

/// PyTorch's segments for small requests have this size, and no others are that small.
const SMALL_SEGMENT: u64 = 2 << 20;

/// Something that happened at an event, or between two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) kind: &'static str,
    pub(super) text: String,
    pub(super) start: u32,
    pub(super) end: Option<u32>,
}

/// A history as the page shows it.
#[derive(Debug, Default)]
pub(super) struct Recording {
    /// Time of each event.
    pub(super) times_ns: Vec<u64>,
    /// Those from before the first event in address order, then the others in the order of their allocation.
    pub(super) blocks: Vec<Life>,
    pub(super) segments: Vec<Held>,
    /// Stream handles in the order of appearance.
    pub(super) streams: Vec<u64>,
    pub(super) marks: Vec<Mark>,
}

impl Recording {
    /// Number of events.
    pub(super) fn events(&self) -> usize {
        self.times_ns.len()
    }

    /// Blocks from before the first event.
    pub(super) fn before(&self) -> usize {
        self.blocks.partition_point(|life| life.before)
    }
}

/// Ranges that are held, by address.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    now: BTreeMap<u64, Held>,
    past: Vec<Held>,
}

impl Ranges {
    pub(super) fn take(&mut self, held: Held) {
        // What a damaged log holds twice ends where the second begins.
        self.give_back(held.start, held.addr, held.bytes, None);
        if held.bytes > 0 {
            self.now.insert(held.addr, held);
        }
    }

    /// Ends what is held of a range. What is not held of it was there before, if the `stream` it had is known.
    pub(super) fn give_back(&mut self, at: u32, addr: u64, bytes: u64, stream: Option<u32>) {
        let end = addr.saturating_add(bytes);
        let first = self.now.range(..addr).next_back().filter(|(_, held)| held.addr + held.bytes > addr);
        let first = first.map_or(addr, |(addr, _)| *addr);
        let found: Vec<Held> = self.now.range(first..end).map(|(_, held)| *held).collect();
        let mut covered = addr;
        for held in found {
            self.now.remove(&held.addr);
            let (from, to) = (held.addr.max(addr), (held.addr + held.bytes).min(end));
            self.was_there(at, covered, from, stream);
            covered = to;
            self.past.push(Held { addr: from, bytes: to - from, end: at, ..held });
            for (from, to) in [(held.addr, from), (to, held.addr + held.bytes)] {
                if from < to {
                    self.now.insert(from, Held { addr: from, bytes: to - from, ..held });
                }
            }
        }
        self.was_there(at, covered, end, stream);
    }

    fn was_there(&mut self, at: u32, from: u64, to: u64, stream: Option<u32>) {
        if let (true, Some(stream)) = (from < to, stream) {
            let pool = Pool::default();
            self.past.push(Held { start: 0, end: at, addr: from, bytes: to - from, stream, pool, before: true });
        }
    }

    /// What is held at the end and was not taken was there all the time.
    fn ends_with(&mut self, addr: u64, bytes: u64, stream: u32, pool: Pool) {
        let (mut from, end) = (addr, addr.saturating_add(bytes));
        let held = Held { start: 0, end: NEVER, addr, bytes, stream, pool, before: true };
        let there = |from: u64, to: u64| Held { addr: from, bytes: to - from, ..held };
        for held in self.now.range_mut(..end).map(|(_, held)| held).filter(|held| held.addr + held.bytes > addr) {
            held.pool = pool;
            if from < held.addr {
                self.past.push(there(from, held.addr));
            }
            from = from.max(held.addr + held.bytes);
        }
        if from < end {
            self.past.push(there(from, end));
        }
    }

    pub(super) fn finish(self) -> Vec<Held> {
        let mut all = self.past;
        all.extend(self.now.into_values());
        all.sort_by_key(|held| (held.start, held.addr, held.end));
        all
    }
}

/// Takes the events of one GPU and makes a [`Recording`] of them.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    gpu: Option<u16>,
    recording: Recording,
    /// Found by a free of theirs only.
    before: Vec<Life>,
    /// Where the block at an address is: in the recording, or of those from before.
    live: HashMap<u64, (bool, usize)>,
    ranges: Ranges,
    numbers: HashMap<u64, u32>,
}

impl Recorder {
    /// Takes the events of a GPU (`None`: of the only one).
    pub(super) fn new(gpu: Option<u16>) -> Self {
        Self { gpu, ..Self::default() }
    }

    /// Takes the next event, and where it came from.
    pub(super) fn take(&mut self, event: &Event, came: Came) {
        if self.gpu.is_some_and(|gpu| gpu != event.device) {
            return;
        }
        self.gpu.get_or_insert(event.device);
        let stream = self.stream(event.stream);
        // CAST: a history that can be replayed has fewer than 2^32 events.
        let at = self.recording.events() as u32;
        self.recording.times_ns.push(event.time_ns);
        let Event { addr, bytes, .. } = *event;
        match event.action {
            Action::Alloc => {
                if let Some(lost) = self.live.insert(addr, (false, self.recording.blocks.len())) {
                    self.life(lost).end = at;
                }
                let life = Life { start: at, freed: NEVER, end: NEVER, addr, bytes, stream, came, before: false };
                self.recording.blocks.push(life);
            }
            Action::FreeRequested => {
                let found = self.live.get(&addr).copied();
                let place = found.unwrap_or_else(|| self.was_there(Life::before(addr, bytes, stream)));
                self.live.insert(addr, place);
                let life = self.life(place);
                life.freed = life.freed.min(at);
            }
            Action::FreeCompleted => {
                let place = self.live.remove(&addr);
                let place =
                    place.unwrap_or_else(|| self.was_there(Life { freed: 0, ..Life::before(addr, bytes, stream) }));
                let life = self.life(place);
                (life.freed, life.end) = (life.freed.min(at), at);
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                let expandable = event.action == Action::SegmentMap;
                let pool = Pool { small: Some(bytes <= SMALL_SEGMENT), expandable, private: None };
                self.ranges.take(Held { start: at, end: NEVER, addr, bytes, stream, pool, before: false });
            }
            Action::SegmentFree | Action::SegmentUnmap => self.ranges.give_back(at, addr, bytes, Some(stream)),
            Action::Oom => {
                let text = format!("out of memory: a request of {} was refused", vramlab::Bytes(bytes));
                self.recording.marks.push(Mark { kind: "oom", text, start: at, end: None });
            }
            Action::RecordUse | Action::Snapshot => {}
        }
    }

    fn was_there(&mut self, life: Life) -> (bool, usize) {
        self.before.push(life);
        (true, self.before.len() - 1)
    }

    fn life(&mut self, (before, number): (bool, usize)) -> &mut Life {
        if before { &mut self.before[number] } else { &mut self.recording.blocks[number] }
    }

    fn stream(&mut self, handle: u64) -> u32 {
        let streams = &mut self.recording.streams;
        *self.numbers.entry(handle).or_insert_with(|| {
            streams.push(handle);
            // CAST: a number of streams.
            (streams.len() - 1) as u32
        })
    }

    /// The whole, with what the file says was held at the end; `came` says where a block came from that is held then.
    pub(super) fn finish(mut self, summary: &Summary, mut came: impl FnMut(u16, u64) -> Came) -> Recording {
        let gpu = self.gpu;
        for segment in summary.segments.iter().filter(|segment| gpu.is_none_or(|gpu| gpu == segment.device)) {
            self.held_at_the_end(segment, &mut came);
        }
        let mut recording = self.recording;
        self.before.sort_by_key(|life| life.addr);
        recording.blocks.splice(0..0, self.before);
        recording.segments = self.ranges.finish();
        recording
    }

    fn held_at_the_end(&mut self, segment: &Segment, came: &mut impl FnMut(u16, u64) -> Came) {
        use vramlab::contract::BlockState;
        let stream = self.stream(segment.stream);
        let pool = Pool {
            small: Some(segment.segment_type == SegmentType::Small),
            expandable: segment.is_expandable,
            private: segment.pool_id.filter(|pool| *pool != (0, 0)),
        };
        self.ranges.ends_with(segment.address, segment.total_size, stream, pool);
        for block in segment.blocks.iter().filter(|block| block.state != BlockState::Free) {
            if self.live.contains_key(&block.address) {
                continue;
            }
            let freed = if block.state == BlockState::PendingFree { 0 } else { NEVER };
            let bytes = if block.requested_size == 0 { block.size } else { block.requested_size };
            let came = came(segment.device, block.address);
            self.was_there(Life { freed, came, ..Life::before(block.address, bytes, stream) });
        }
    }
}

impl Life {
    fn before(addr: u64, bytes: u64, stream: u32) -> Self {
        Self { start: 0, freed: NEVER, end: NEVER, addr, bytes, stream, came: Came::default(), before: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::contract::BlockState;
    use vramlab::histories::trace::{ReadOptions, SegmentBlock, read_from};

    fn recorder(events: &[(Action, u64, u64)]) -> Recorder {
        let mut recorder = Recorder::new(None);
        for (time_ns, &(action, addr, bytes)) in (0..).zip(events) {
            recorder.take(&Event { action, device: 0, addr, bytes, stream: 7, time_ns }, Came::default());
        }
        recorder
    }

    fn summary(segments: Vec<Segment>) -> Summary {
        let line = br#"{"time_ns":0,"action":"alloc","addr":512,"size":1,"block":1,"stream":0,"path":"hit"}"#;
        let read = read_from(Box::new(&line[..]), &ReadOptions::default(), &mut |_| Ok(()));
        Summary { segments, ..read.unwrap() }
    }

    #[test]
    fn lives_are_counted_in_events_and_what_was_there_before_is_found() {
        let events = [
            (Action::SegmentAlloc, 4096, 4096),
            (Action::Alloc, 4096, 100),
            (Action::FreeRequested, 1024, 50),
            (Action::FreeRequested, 4096, 100),
            (Action::FreeCompleted, 1024, 50),
            (Action::FreeCompleted, 2048, 60),
            (Action::FreeCompleted, 4096, 100),
            (Action::Alloc, 4096, 200),
        ];
        let block = |address, state| SegmentBlock { address, size: 512, requested_size: 500, state };
        let end = Segment {
            address: 0,
            total_size: 8192,
            stream: 7,
            blocks: vec![block(512, BlockState::Allocated), block(4096, BlockState::Allocated)],
            ..Segment::default()
        };
        let found = recorder(&events).finish(&summary(vec![end]), |_, _| Came::default());
        let lives: Vec<(u32, u32, u32, u64, bool)> =
            found.blocks.iter().map(|life| (life.start, life.freed, life.end, life.addr, life.before)).collect();
        let expected = [
            (0, NEVER, NEVER, 512, true),
            (0, 2, 4, 1024, true),
            (0, 0, 5, 2048, true),
            (1, 3, 6, 4096, false),
            (7, NEVER, NEVER, 4096, false),
        ];
        assert_eq!(lives, expected);
        assert_eq!((found.before(), found.events()), (3, 8));
        let held: Vec<(u32, u32, u64, u64)> =
            found.segments.iter().map(|held| (held.start, held.end, held.addr, held.bytes)).collect();
        assert_eq!(held, [(0, NEVER, 0, 4096), (0, NEVER, 4096, 4096)]);
    }

    #[test]
    fn parts_of_an_expandable_segment_go_back_in_other_sizes_than_they_came() {
        let events = [
            (Action::SegmentMap, 100, 50),
            (Action::SegmentMap, 150, 50),
            (Action::SegmentUnmap, 120, 60),
            (Action::SegmentUnmap, 20, 30),
        ];
        let found = recorder(&events).finish(&summary(Vec::new()), |_, _| Came::default());
        let held: Vec<(u32, u32, u64, u64)> =
            found.segments.iter().map(|held| (held.start, held.end, held.addr, held.bytes)).collect();
        let expected = [(0, 3, 20, 30), (0, NEVER, 100, 20), (0, 2, 120, 30), (1, 2, 150, 30), (1, NEVER, 180, 20)];
        assert_eq!(held, expected);
    }
}
