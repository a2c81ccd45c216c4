//! The recorded allocator's memory, followed from event to event.
//!
//! Blocks lie where the history says. They are as large as PyTorch's allocator makes them: a request takes the front of
//! a free block, and what is left of it is split off if it is large enough. Free blocks of a segment that touch are one.
//! Parts of an expandable segment that touch are one segment here, which grows and shrinks.

use super::beginning::Beginning;
use super::builder::HistoryBuilder;
use super::oom::{Completions, Held, OutOfMemory, Refusal, StreamHeld};
use super::op::{Kind, Op};
use super::windows::SegmentEvent;
use crate::backends::CachingSettings;
use crate::ordered::OrderedMap;
use crate::policy::size::torch::{MIN_BLOCK, SMALL_MAX, SMALL_SEGMENT, round_size};
use crate::steps;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Live,
    Pending,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    bytes: u64,
    requested: u64,
    state: State,
}

#[derive(Clone, Copy, Debug)]
struct Reserved {
    bytes: u64,
    stream: u64,
    /// Whether it is made of parts of an expandable segment.
    expandable: bool,
}

#[derive(Debug)]
pub(super) struct Memory {
    settings: CachingSettings,
    segments: OrderedMap<u64, Reserved>,
    /// Blocks by address; those of a segment fill it.
    parts: OrderedMap<u64, Part>,
    /// Bytes asked for in blocks that are in no segment, or not where a free block is.
    outside: BTreeMap<u64, u64>,
}

impl Memory {
    pub(super) fn new(settings: CachingSettings) -> Self {
        Self { settings, segments: OrderedMap::new(), parts: OrderedMap::new(), outside: BTreeMap::new() }
    }

    /// A segment comes from the device.
    pub(super) fn reserve(&mut self, addr: u64, bytes: u64, stream: u64) {
        self.segments.insert(addr, Reserved { bytes, stream, expandable: false });
        self.parts.insert(addr, Part { bytes, requested: 0, state: State::Free });
    }

    /// A segment goes back.
    pub(super) fn release(&mut self, addr: u64) {
        let Some(segment) = self.segments.remove(&addr) else { return };
        while let Some((&part, _)) = self.parts.range(addr..addr + segment.bytes).next() {
            self.parts.remove(&part);
        }
    }

    /// Memory comes behind a part of an expandable segment. It joins what touches it.
    fn map(&mut self, addr: u64, bytes: u64, stream: u64) {
        let joins = |segment: &Reserved| segment.expandable && segment.stream == stream;
        let (mut start, mut end) = (addr, addr + bytes);
        if let Some(behind) = self.segments.get(&end).copied().filter(joins) {
            self.segments.remove(&end);
            end += behind.bytes;
        }
        let front = self.segments.range(..addr).next_back().map(|(at, segment)| (*at, *segment));
        if let Some((at, _)) = front.filter(|(at, front)| at + front.bytes == addr && joins(front)) {
            start = at;
        }
        self.segments.insert(start, Reserved { bytes: end - start, stream, expandable: true });
        // As a free that completes, so that it joins the free blocks beside it.
        self.parts.insert(addr, Part { bytes, requested: 0, state: State::Pending });
        self.complete(addr);
    }

    /// A part of an expandable segment goes back, of which nothing is in use.
    fn unmap(&mut self, addr: u64, bytes: u64) {
        let end = addr + bytes;
        let Some((start, segment)) = self.segment_of(addr).filter(|(_, segment)| segment.expandable) else { return };
        let last = start + segment.bytes;
        self.segments.remove(&start);
        for (from, to) in [(start, addr), (end, last)] {
            if from < to {
                self.segments.insert(from, Reserved { bytes: to - from, ..segment });
            }
        }
        let first = self.parts.range(start..=addr).next_back().map_or(addr, |(at, _)| *at);
        let within: Vec<(u64, Part)> = self.parts.range(first..end).map(|(at, part)| (*at, *part)).collect();
        for (at, part) in within {
            self.parts.remove(&at);
            for (from, to) in [(at, addr.min(at + part.bytes)), (end.max(at), at + part.bytes)] {
                if from < to {
                    self.parts.insert(from, Part { bytes: to - from, ..part });
                }
            }
        }
    }

    /// A segment or a part of one comes or goes.
    fn apply(&mut self, event: &SegmentEvent) {
        match (event.part, event.released) {
            (None, false) => self.reserve(event.addr, event.bytes, event.stream),
            (None, true) => self.release(event.addr),
            (Some(_), false) => self.map(event.addr, event.bytes, event.stream),
            (Some(_), true) => self.unmap(event.addr, event.bytes),
        }
    }

    pub(super) fn allocate(&mut self, addr: u64, requested: u64) {
        self.place(addr, requested, None);
    }

    /// A block of a size, or of the one that PyTorch gives it.
    pub(super) fn place(&mut self, addr: u64, requested: u64, size: Option<u64>) {
        // A free whose completion the history lacks.
        self.complete(addr);
        let found = self.parts.range(..=addr).next_back();
        let free = found.filter(|(start, part)| part.state == State::Free && *start + part.bytes > addr);
        let Some((&start, &part)) = free else {
            self.outside.insert(addr, requested);
            return;
        };
        // Other allocators hand out parts of a free block that are not its front.
        if addr > start {
            self.parts.insert(start, Part { bytes: addr - start, ..part });
        }
        let room = start + part.bytes - addr;
        let rounded = round_size(requested, &self.settings.roundup_power2_divisions);
        let (known, size) = (size.is_some(), size.unwrap_or(rounded).min(room));
        let left = room - size;
        let splits = if known {
            left > 0
        } else if self.segment_of(addr).is_some_and(|(_, of)| of.expandable || of.bytes == SMALL_SEGMENT) {
            left >= MIN_BLOCK
        } else {
            left > SMALL_MAX && self.settings.max_split_size.is_none_or(|bound| size < bound)
        };
        let bytes = if splits { size } else { room };
        self.parts.insert(addr, Part { bytes, requested, state: State::Live });
        if splits {
            self.parts.insert(addr + bytes, Part { bytes: left, requested: 0, state: State::Free });
        }
    }

    /// The client lets go of a block.
    pub(super) fn request_free(&mut self, addr: u64) {
        if let Some(part) = self.parts.get_mut(&addr) {
            part.state = State::Pending;
        }
    }

    /// A block becomes free, if its free was requested.
    pub(super) fn complete(&mut self, addr: u64) {
        if self.outside.remove(&addr).is_some() {
            return;
        }
        let Some(&part) = self.parts.get(&addr).filter(|part| part.state == State::Pending) else { return };
        let Some((segment, reserved)) = self.segment_of(addr) else { return };
        let (mut start, mut end) = (addr, addr + part.bytes);
        let before = self.parts.range(segment..addr).next_back();
        if let Some((&at, _)) = before.filter(|(_, before)| before.state == State::Free) {
            start = at;
        }
        let behind = self.parts.get(&end).filter(|_| end < segment + reserved.bytes).copied();
        if let Some(behind) = behind.filter(|behind| behind.state == State::Free) {
            self.parts.remove(&end);
            end += behind.bytes;
        }
        self.parts.remove(&addr);
        self.parts.insert(start, Part { bytes: end - start, requested: 0, state: State::Free });
    }

    /// Size of the block at an address, if that is in use or pending.
    pub(super) fn size_of(&self, addr: u64) -> Option<u64> {
        self.parts.get(&addr).filter(|part| part.state != State::Free).map(|part| part.bytes)
    }

    fn segment_of(&self, addr: u64) -> Option<(u64, Reserved)> {
        let (start, segment) = self.segments.range(..=addr).next_back()?;
        (addr - start < segment.bytes).then_some((*start, *segment))
    }

    /// What is held now, for a request that is refused; `shown` says whether the history shows segments,
    /// `whole` whether it shows all of them. O(n) in the blocks.
    pub(super) fn describe(&self, refusal: &Refusal, shown: bool, whole: bool) -> OutOfMemory {
        let (mut all, mut streams) = (Held::default(), BTreeMap::new());
        let mut live_bytes: u64 = self.outside.values().sum();
        for (start, segment) in &self.segments {
            let own: &mut Held = streams.entry(segment.stream).or_default();
            for held in [&mut all, own] {
                held.reserved_bytes += segment.bytes;
                self.parts.range(start..&(start + segment.bytes)).for_each(|(_, part)| held.add(part));
            }
        }
        live_bytes +=
            self.parts.values().filter(|part| part.state == State::Live).map(|part| part.requested).sum::<u64>();
        let streams = streams.into_iter().map(|(stream, held)| StreamHeld { stream, held });
        let expandable = self.segments.values().any(|segment| segment.expandable);
        OutOfMemory {
            event: refusal.number,
            requested_bytes: refusal.bytes,
            stream: refusal.stream,
            device_free_bytes: Some(refusal.device_free).filter(|free| *free > 0),
            limit_bytes: self.settings.memory_limit,
            live_bytes,
            held: shown.then_some(all),
            streams: if shown { streams.collect() } else { Vec::new() },
            complete: shown && whole && self.outside.is_empty(),
            against_fragmentation: (!expandable)
                .then(|| self.settings.against_fragmentation(Some("expandable_segments")))
                .flatten(),
        }
    }
}

impl Held {
    fn add(&mut self, part: &Part) {
        match part.state {
            State::Live => self.allocated_bytes += part.bytes,
            State::Pending => self.pending_bytes += part.bytes,
            State::Free => {
                self.free_bytes += part.bytes;
                self.free_blocks += 1;
                self.largest_free_bytes = self.largest_free_bytes.max(part.bytes);
            }
        }
    }
}

/// When [`follow_memory`](HistoryBuilder::follow_memory) shows the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Before frees complete, and segments come and go, that did so right before the operation or inside it.
    Before,
    /// After that and before the operation's own block comes or goes.
    After,
}

impl HistoryBuilder {
    /// Follows the memory from the beginning up to operation `last`, and shows it twice for each operation. `streams` are
    /// the handles. O(n log n).
    pub(super) fn follow_memory(
        &self,
        beginning: &Beginning,
        streams: &[u64],
        settings: &CachingSettings,
        last: u32,
        mut look: impl FnMut(u32, When, &Memory),
    ) {
        let Completions { held_up, completed, .. } = &self.completions;
        let mut memory = Memory::new(*settings);
        for segment in &beginning.segments {
            memory.reserve(segment.addr, segment.bytes, streams[segment.stream as usize]);
        }
        let mut slots: Vec<Option<u64>> = vec![None; self.slots as usize];
        for block in &beginning.blocks {
            memory.place(block.addr, block.requested, block.bytes);
            if block.freed.is_some() {
                memory.request_free(block.addr);
            } else {
                slots[block.slot as usize] = Some(block.addr);
            }
        }
        // Those that are not a part of the beginning yet.
        for pending in &self.pending {
            memory.place(pending.addr, pending.bytes, pending.size);
            memory.request_free(pending.addr);
        }
        let mut addresses = self.addresses.iter();
        let mut held_up = held_up.iter().peekable();
        let mut completed = completed.iter().peekable();
        let mut segments = self.segments.iter().peekable();
        for at in 0..=last {
            steps::count(1);
            look(at, When::Before, &memory);
            while let Some((_, addr)) = completed.next_if(|(op, _)| *op <= at) {
                memory.complete(*addr);
            }
            while let Some(segment) = segments.next_if(|segment| segment.op <= at) {
                memory.apply(segment);
            }
            look(at, When::After, &memory);
            let Some(op) = self.ops.get(at as usize) else { break };
            let waits = held_up.next_if(|op| **op <= at).is_some() && self.completes;
            memory.follow(*op, &mut slots, &mut addresses, waits);
        }
    }
}

impl Memory {
    fn follow(&mut self, op: Op, slots: &mut [Option<u64>], addresses: &mut std::slice::Iter<'_, u64>, waits: bool) {
        match op.kind() {
            Kind::Alloc => {
                if let Some(addr) = addresses.next() {
                    self.allocate(*addr, op.value);
                    slots[op.slot as usize] = Some(*addr);
                }
            }
            Kind::Free | Kind::Release => {
                let Some(addr) = slots[op.slot as usize].take() else { return };
                self.request_free(addr);
                if !waits {
                    self.complete(addr);
                }
            }
            Kind::Use | Kind::Trim | Kind::Refused | Kind::Nothing => {}
        }
    }
}
