//! Compiles a history: checks it event by event and turns addresses into slots.

use super::beginning::{Departed, Pending, Unknown};
use super::oom::{Completions, MOST, Refusal};
use super::op::{BY_DEVICE, Kind, MAX_STREAMS, NO_STREAM, Op, Release};
use super::parts::Mapped;
use super::pools::Named;
use super::windows::{Cause, Completion, End, SegmentEvent, Window};
use super::{MAX_BYTES, ReplayError};
use crate::budget::{Budget, Claim};
use crate::contract::{GUARANTEED_ALIGN, PoolKind};
use crate::histories::trace::{Action, Event, Segment, SegmentBlock};
use crate::ordered::OrderedMap;
use crate::ranges::Ranges;
use crate::steps;
use std::collections::{BTreeMap, HashMap};

#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    bytes: u64,
    stream: u32,
    slot: u32,
    /// The last stream whose use the history announces.
    user: u32,
}

/// A window in which segments went back; why is decided at the end.
#[derive(Debug)]
pub(super) struct OpenWindow {
    pub(super) window: Window,
    /// The operation that becomes `empty_cache`.
    pub(super) placeholder: u32,
    /// Where its segments are.
    pub(super) first: usize,
    pub(super) end: End,
}

/// Takes events one at a time. Memory is what the history makes live at once and 16 to 40 bytes for each
/// event, all of it claimed from a [budget](Self::within).
#[derive(Debug)]
pub struct HistoryBuilder {
    pub(super) device: Option<u16>,
    chosen: bool,
    pub(super) number: u64,
    pub(super) events: u64,
    pub(super) ops: Vec<Op>,
    pub(super) addresses: Vec<u64>,
    pub(super) segments: Vec<SegmentEvent>,
    /// Recorded handles in the order of appearance.
    pub(super) streams: HashMap<u64, u32>,
    pub(super) live: OrderedMap<u64, Live>,
    pub(super) seen: Ranges,
    pub(super) spare_slots: Vec<u32>,
    pub(super) slots: u32,
    /// Address and operation of the free that the last event requested.
    pub(super) just_freed: Option<(u64, u32)>,
    /// Frees that have not completed, by address.
    pub(super) waiting: HashMap<u64, u32>,
    /// Most of them at once, and most segments that the history made and held at once.
    pub(super) most_waiting: usize,
    pub(super) most_held: usize,
    /// Operations of all frees that did not complete at once, in order.
    pub(super) deferred: Vec<u32>,
    pub(super) window: Window,
    pub(super) open: Vec<OpenWindow>,
    /// Segments that the history made, by address.
    pub(super) held: BTreeMap<u64, u64>,
    /// Parts of expandable segments that are mapped, and the pool of each that ever was.
    pub(super) mapped: Mapped,
    pub(super) pools: OrderedMap<u64, PoolKind>,
    /// Where the history made segments.
    pub(super) made: Ranges,
    /// Segments that the history released without having made them.
    pub(super) departed: Vec<Departed>,
    /// Where those lay.
    pub(super) left: Ranges,
    /// Bytes reserved beyond those before the first event; below zero it wraps.
    reserved: u64,
    /// The most that it was.
    pub(super) most_reserved: i64,
    pub(super) unknown: Vec<Unknown>,
    /// Blocks whose free was requested before the first event.
    pub(super) pending: Vec<Pending>,
    /// What was held after the last event, if that was said.
    pub(super) ending: Option<Vec<Segment>>,
    /// Whose pool that says, if it says all.
    pub(super) pool_names: Option<Vec<Named>>,
    pub(super) complete: bool,
    pub(super) completes: bool,
    pub(super) breaks_off: bool,
    pub(super) expandable: bool,
    /// What shows that parts of expandable segments were mapped before the first event.
    pub(super) unseen: Option<String>,
    pub(super) outside: Option<u64>,
    pub(super) refused: u64,
    pub(super) completions: Completions,
    pub(super) allocated: u64,
    pub(super) current: i64,
    pub(super) highest: i64,
    /// For the lists.
    pub(super) claim: Claim,
    /// For the maps.
    pub(super) maps: Claim,
}

pub(super) fn wrong(number: u64, what: impl Into<String>) -> ReplayError {
    ReplayError::Event { number, what: what.into() }
}

impl HistoryBuilder {
    /// A compiler for the events of one device (`None`: there must be only one).
    #[must_use]
    pub fn new(device: Option<u16>) -> Self {
        let budget = Budget::default();
        Self {
            device,
            chosen: device.is_some(),
            number: 0,
            events: 0,
            ops: Vec::new(),
            addresses: Vec::new(),
            segments: Vec::new(),
            streams: HashMap::new(),
            live: OrderedMap::new(),
            seen: Ranges::default(),
            spare_slots: Vec::new(),
            slots: 0,
            just_freed: None,
            waiting: HashMap::new(),
            most_waiting: 0,
            most_held: 0,
            deferred: Vec::new(),
            window: Window::default(),
            open: Vec::new(),
            held: BTreeMap::new(),
            mapped: Mapped::default(),
            pools: OrderedMap::new(),
            made: Ranges::default(),
            departed: Vec::new(),
            left: Ranges::default(),
            reserved: 0,
            most_reserved: 0,
            unknown: Vec::new(),
            pending: Vec::new(),
            ending: None,
            pool_names: None,
            complete: false,
            completes: false,
            breaks_off: false,
            expandable: false,
            unseen: None,
            outside: None,
            refused: 0,
            completions: Completions::default(),
            allocated: 0,
            current: 0,
            highest: 0,
            claim: budget.claim(),
            maps: budget.claim(),
        }
    }

    /// Says that events are missing after the last one, which may be the completion of a free: the file was cut short.
    pub fn breaks_off(&mut self) {
        self.breaks_off = true;
    }

    /// Lets [`finish`](Self::finish) refuse frees of blocks that the history did not allocate: for logs that begin with
    /// their program. Otherwise such blocks were live before the first event.
    pub fn expect_complete(&mut self) {
        self.complete = true;
    }

    /// Says what was held after the last event ([`Summary::segments`](crate::histories::trace::Summary::segments); those of other
    /// devices are passed over). From that [`finish`](Self::finish) tells what was held before the first one, for a
    /// history whose recording began late or lost its beginning.
    ///
    /// # Errors
    /// [`ReplayError::TooLarge`] when the [budget](Self::within) is used up.
    pub fn ends_with(&mut self, segments: &[Segment]) -> Result<(), ReplayError> {
        let own = || segments.iter().filter(|segment| self.device.is_none_or(|device| device == segment.device));
        let size = |segment: &Segment| size_of::<Segment>() + segment.blocks.len() * size_of::<SegmentBlock>();
        self.claim.add(own().map(size).sum())?;
        self.ending = Some(own().cloned().collect());
        Ok(())
    }

    /// Takes the next event. O(log n) in the blocks that are live.
    ///
    /// # Errors
    /// [`ReplayError::Event`] for an event that contradicts earlier ones (blocks that overlap, a block freed twice or
    /// with another size), for a size above [`MAX_BYTES`], and for more than [`MAX_STREAMS`] streams.
    /// [`ReplayError::TooLarge`] when the [budget](Self::within) is used up.
    pub fn push(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.number += 1;
        steps::count(1);
        let device = *self.device.get_or_insert(event.device);
        if device != event.device {
            if self.chosen {
                return Ok(());
            }
            let what = format!("the history holds devices {device} and {}; choose one with --gpu N", event.device);
            return Err(wrong(self.number, what));
        }
        self.events += 1;
        self.make_room()?;
        if self.ops.len() + self.pending.len() >= BY_DEVICE as usize - 4 {
            return Err(wrong(self.number, "the history has more than four billion operations"));
        }
        if event.action != Action::Oom && event.addr.checked_add(event.bytes).is_none_or(|end| end > 1 << 63) {
            return Err(wrong(self.number, format!("{:#x} + {} is no range of addresses", event.addr, event.bytes)));
        }
        if event.bytes > MAX_BYTES && event.action != Action::Snapshot {
            let what = format!("{} of {} bytes: no device has more than 256 TiB", event.action, event.bytes);
            return Err(wrong(self.number, what));
        }
        // A free that the very next event does not complete was held up by other streams.
        if let Some((addr, op)) = self.just_freed.take() {
            if event.action == Action::FreeCompleted && event.addr == addr {
                self.completes = true;
                let Event { bytes, stream, .. } = *event;
                self.window.before = Some(Completion { op, addr, bytes, size: None, stream, after_release: false });
                return Ok(());
            }
            self.waiting.insert(addr, op);
            self.most_waiting = self.most_waiting.max(self.waiting.len());
            self.deferred.push(op);
            self.completions.held_up.push(op);
        }
        match event.action {
            Action::Alloc => self.alloc(event),
            Action::FreeRequested => self.free(event),
            // Where only this one of a free's two events was recorded, it is the whole free.
            Action::FreeCompleted if self.frees_unasked(event) => {
                self.completes = true;
                self.free(event)?;
                if let Some((addr, op)) = self.just_freed.take() {
                    let Event { bytes, stream, .. } = *event;
                    self.window.before = Some(Completion { op, addr, bytes, size: None, stream, after_release: false });
                }
                Ok(())
            }
            Action::FreeCompleted => {
                self.completes = true;
                let known = self.waiting.remove(&event.addr);
                let op = match known {
                    Some(op) => Some(op),
                    None => self.completion_unknown(event)?,
                };
                if let Some(op) = op {
                    self.completions.completed.push((self.next_op(), event.addr));
                    self.window.completions.push(Completion {
                        op,
                        addr: event.addr,
                        bytes: event.bytes,
                        size: None,
                        stream: event.stream,
                        after_release: self.window.released,
                    });
                }
                Ok(())
            }
            Action::RecordUse => self.record_use(event),
            Action::SegmentAlloc => self.segment_alloc(event),
            Action::SegmentFree => {
                self.segment_free(event);
                Ok(())
            }
            Action::SegmentMap => self.map_part(event),
            Action::SegmentUnmap => {
                self.unmap_part(event);
                Ok(())
            }
            Action::Snapshot => {
                self.close_window(End::Other);
                Ok(())
            }
            Action::Oom => self.oom(event),
        }
    }

    pub(super) fn stream(&mut self, handle: u64) -> Result<u32, ReplayError> {
        // CAST: at most `MAX_STREAMS`.
        let next = self.streams.len() as u32;
        if let Some(&known) = self.streams.get(&handle) {
            return Ok(known);
        }
        if self.streams.len() == MAX_STREAMS {
            return Err(wrong(self.number, format!("the history has more than {MAX_STREAMS} streams")));
        }
        self.streams.insert(handle, next);
        Ok(next)
    }

    /// Number of the operation that comes next.
    pub(super) fn next_op(&self) -> u32 {
        // CAST: `push` bounds the number of operations.
        self.ops.len() as u32
    }

    fn slot(&mut self) -> u32 {
        self.spare_slots.pop().unwrap_or_else(|| self.fresh_slot())
    }

    /// A slot that no block has been in.
    pub(super) fn fresh_slot(&mut self) -> u32 {
        self.slots += 1;
        self.slots - 1
    }

    fn alloc(&mut self, event: &Event) -> Result<(), ReplayError> {
        let Event { addr, bytes, .. } = *event;
        self.close_window(End::Alloc { bytes, stream: event.stream });
        // An empty tensor needs no memory; some logs have it all the same.
        if bytes == 0 {
            return Ok(());
        }
        if let Some((&other, block)) = self.live.range(..addr + bytes).next_back()
            && other + block.bytes > addr
        {
            let what = format!(
                "alloc of {bytes} bytes at {addr:#x} overlaps the live block of {} bytes at {other:#x}",
                block.bytes
            );
            return Err(wrong(self.number, what));
        }
        self.waiting.remove(&addr);
        if !self.inside_a_segment(addr, bytes) {
            self.outside.get_or_insert(self.number);
        }
        self.seen.insert(addr, addr + bytes);
        let (stream, slot) = (self.stream(event.stream)?, self.slot());
        self.live.insert(addr, Live { bytes, stream, slot, user: NO_STREAM });
        self.allocated += bytes;
        if self.allocated > 1 << 62 {
            return Err(wrong(self.number, "the history allocates more than 4 EiB in all"));
        }
        self.current += bytes.cast_signed();
        self.highest = self.highest.max(self.current);
        self.ops.push(Op::new(Kind::Alloc, stream, slot, bytes));
        self.addresses.push(addr);
        Ok(())
    }

    pub(super) fn inside_a_segment(&self, addr: u64, bytes: u64) -> bool {
        let plain = self.held.range(..=addr).next_back().is_some_and(|(start, size)| start + size >= addr + bytes);
        plain || self.mapped.contains(addr, addr + bytes)
    }

    fn free(&mut self, event: &Event) -> Result<(), ReplayError> {
        let Event { addr, bytes, .. } = *event;
        self.close_window(End::Other);
        let op = self.next_op();
        let Some(live) = self.live.remove(&addr) else { return self.free_unknown(event) };
        if bytes != 0 && bytes != live.bytes {
            let what = format!("free of {bytes} bytes at {addr:#x}, where {} bytes were allocated", live.bytes);
            return Err(wrong(self.number, what));
        }
        self.current -= live.bytes.cast_signed();
        let kind = if live.user == NO_STREAM { Kind::Free } else { Kind::Release };
        let value = Release { ready: BY_DEVICE, user: live.user }.pack();
        self.ops.push(Op::new(kind, live.stream, live.slot, value));
        self.spare_slots.push(live.slot);
        self.just_freed = Some((addr, op));
        Ok(())
    }

    /// Whether a completion is that of a live block, whose free was not requested.
    fn frees_unasked(&self, event: &Event) -> bool {
        !self.waiting.contains_key(&event.addr)
            && self.live.get(&event.addr).is_some_and(|live| live.bytes == event.bytes)
    }

    fn record_use(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.close_window(End::Other);
        let stream = self.stream(event.stream)?;
        match self.live.at_most_mut(&event.addr) {
            Some((&start, live)) if event.addr < start + live.bytes => {
                if stream != live.stream {
                    live.user = stream;
                    self.ops.push(Op::new(Kind::Use, stream, live.slot, 0));
                }
                Ok(())
            }
            // Without the size of a block from before the first event there is nothing to hold on to.
            _ if self.seen.overlaps(event.addr, event.addr + 1) => {
                Err(wrong(self.number, format!("use of {:#x}, where no block is live", event.addr)))
            }
            _ => Ok(()),
        }
    }

    fn segment_alloc(&mut self, event: &Event) -> Result<(), ReplayError> {
        let Event { addr, bytes, stream, .. } = *event;
        if bytes == 0 || addr == 0 {
            return Err(wrong(self.number, format!("a segment of {bytes} bytes at {addr:#x}")));
        }
        if !addr.is_multiple_of(GUARANTEED_ALIGN) {
            let what = format!(
                "the segment of {bytes} bytes at {addr:#x} does not begin at a multiple of {GUARANTEED_ALIGN}, as device \
                 memory does"
            );
            return Err(wrong(self.number, what));
        }
        if let Some((start, size)) = self.held.range(..addr + bytes).next_back()
            && start + size > addr
        {
            let what = format!("the segment of {bytes} bytes at {addr:#x} overlaps the one of {size} at {start:#x}");
            return Err(wrong(self.number, what));
        }
        self.held.insert(addr, bytes);
        self.most_held = self.most_held.max(self.held.len() + self.mapped.len());
        self.made.insert(addr, addr + bytes);
        self.note_segment(SegmentEvent { addr, bytes, stream, part: None, op: 0, released: false, refused: false });
        Ok(())
    }

    /// Adds a segment or part to the window, and counts its bytes.
    pub(super) fn note_segment(&mut self, event: SegmentEvent) {
        if self.window.segments.is_empty() {
            self.window.reserved = self.reserved;
        }
        self.window.released |= event.released;
        let change = if event.released { event.bytes.wrapping_neg() } else { event.bytes };
        self.reserved = self.reserved.wrapping_add(change);
        self.most_reserved = self.most_reserved.max(self.reserved.cast_signed());
        self.window.segments.push(event);
    }

    fn segment_free(&mut self, event: &Event) {
        let Event { addr, bytes, stream, .. } = *event;
        let segment = SegmentEvent { addr, bytes, stream, part: None, op: 0, released: true, refused: false };
        let held = self.held.remove(&addr);
        let (start, end) = (addr, addr + bytes);
        let strange = held.is_none();
        let departed =
            strange && bytes > 0 && addr > 0 && !self.made.overlaps(start, end) && !self.left.overlaps(start, end);
        if strange {
            self.outside.get_or_insert(self.number);
        }
        if departed {
            self.left.insert(start, end);
            self.departed.push(Departed { addr, bytes, stream });
        }
        // What went is what had come, whatever the event says; of what was never there nothing goes.
        let before = self.reserved;
        self.note_segment(segment);
        self.reserved = before.wrapping_sub(held.unwrap_or(if departed { bytes } else { 0 }));
    }

    fn oom(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.close_window(End::Refused { bytes: event.bytes, stream: event.stream });
        self.refused += 1;
        let Event { bytes, stream, addr: device_free, .. } = *event;
        if self.completions.refusals.len() == MOST {
            self.completions.refusals.pop_front();
        }
        let (number, op, reserved) = (self.number, self.next_op(), self.reserved);
        let refusal = Refusal { number, bytes, stream, device_free, reserved, op };
        self.completions.refusals.push_back(refusal);
        if event.bytes > 0 {
            let stream = self.stream(event.stream)?;
            self.ops.push(Op::new(Kind::Refused, stream, 0, event.bytes));
        }
        Ok(())
    }

    /// Says when frees completed that the allocator found since the client's last event. Where segments went back the
    /// reason depends on the settings, which snapshots name after the events, so that waits for the end.
    pub(super) fn close_window(&mut self, end: End) {
        if self.window.is_empty() && !(matches!(end, End::Refused { .. }) && self.window.before.is_some()) {
            self.window.before = None;
            return;
        }
        let window = std::mem::take(&mut self.window);
        let open = window.may_be_trim(end).then(|| self.next_op());
        if open.is_some() {
            // Where `empty_cache` stands, if that is what it was.
            self.ops.push(Op::new(Kind::Nothing, 0, 0, 0));
        }
        let op = self.next_op();
        let first = self.segments.len();
        self.segments.extend(window.segments.iter().map(|segment| SegmentEvent { op, ..*segment }));
        match open {
            Some(placeholder) => self.open.push(OpenWindow { window, placeholder, first, end }),
            None => {
                let cause = if matches!(end, End::Refused { .. }) { Cause::Retry } else { Cause::Nothing };
                self.complete(&window, cause, op);
                self.reuse(window);
            }
        }
    }

    /// Says that a window's frees completed in operation `op`.
    pub(super) fn complete(&mut self, window: &Window, cause: Cause, op: u32) {
        // In a retry the free right before is taken for one that was waited for: had its block been free, the request
        // may have got it. If it was, nothing changes, since the request did not get it.
        let waits = matches!(cause, Cause::Retry | Cause::Full | Cause::Device);
        let before = window.before.filter(|_| waits).map(|done| done.op);
        self.deferred.extend(before);
        steps::count(window.completions.len());
        for (free, waited) in window.waited_for(cause).chain(before.map(|free| (free, true))) {
            // What was waited for is not ready yet when the operation asks.
            let ready = op + u32::from(waited);
            let value = &mut self.op_mut(free).value;
            *value = Release { ready, ..Release::unpack(*value) }.pack();
        }
    }
}
