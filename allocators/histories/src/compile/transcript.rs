//! First stage: checks events one by one and turns addresses into slots.

use super::segments::Segments;
use super::slots::Slots;
use super::timeline::{Frees, Refusal, Refusals, Timeline, free_op};
use super::windows::{End, Windows};
use crate::formats::{Action, Event};
use crate::history::{BY_DEVICE, Kind, MAX_BYTES, NO_STREAM, Op, Release, ReplayError, SegmentEvent, StartBlock};
use crate::steps;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// A block of the client from before recording started that was freed later.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unknown {
    pub(super) block: StartBlock,
    /// The operation that frees it.
    pub(super) op: u32,
    /// The event that frees it.
    pub(super) number: u64,
}

/// Bytes that the client requested.
#[derive(Clone, Debug, Default)]
pub(super) struct Requested {
    /// In all allocations.
    total: u64,
    /// Whether the recording has any.
    shown: bool,
    /// In live blocks, beyond those from before recording started.
    live: i64,
    /// Maximum of that.
    pub(super) most_live: i64,
}

/// The events of one device, taken one at a time. Memory is proportional to live blocks, plus 16 to 40 bytes for each event, all
/// claimed.
#[derive(Debug)]
pub(super) struct Transcript {
    pub(super) device: Option<u16>,
    /// Whether events of other devices are ignored.
    chosen: bool,
    /// Number of the last event, among those of the device.
    pub(super) number: u64,
    pub(super) timeline: Timeline,
    pub(super) slots: Slots,
    pub(super) frees: Frees,
    pub(super) segments: Segments,
    pub(super) windows: Windows,
    pub(super) refusals: Refusals,
    /// Blocks from before recording started that were freed.
    pub(super) unknown: Vec<Unknown>,
    /// The first event outside every segment of the recording.
    pub(super) outside: Option<u64>,
    pub(super) requested: Requested,
    pub(super) budget: Budget,
    /// For the lists.
    pub(super) claim: Claim,
    /// For the maps.
    pub(super) maps: Claim,
}

pub(super) fn wrong(number: u64, problem: impl Into<String>) -> ReplayError {
    ReplayError::Event { number, what: problem.into() }
}

impl Transcript {
    pub(super) fn new(device: Option<u16>, budget: &Budget) -> Self {
        Self {
            device,
            chosen: device.is_some(),
            number: 0,
            timeline: Timeline::default(),
            slots: Slots::new(),
            frees: Frees::default(),
            segments: Segments::default(),
            windows: Windows::default(),
            refusals: Refusals::default(),
            unknown: Vec::new(),
            outside: None,
            requested: Requested::default(),
            budget: budget.clone(),
            claim: budget.claim(),
            maps: budget.claim(),
        }
    }

    /// A copy, which claims as much memory again. O(n).
    pub(super) fn copy(&self) -> Result<Self, OverBudget> {
        let again = |claim: &Claim| {
            let mut copy = self.budget.claim();
            // CAST: a size in memory.
            copy.add(claim.bytes() as usize).map(|()| copy)
        };
        let (claim, maps) = (again(&self.claim)?, again(&self.maps)?);
        Ok(Self {
            timeline: self.timeline.clone(),
            slots: self.slots.clone(),
            frees: self.frees.clone(),
            segments: self.segments.clone(),
            windows: self.windows.clone(),
            refusals: self.refusals.clone(),
            unknown: self.unknown.clone(),
            requested: self.requested.clone(),
            budget: self.budget.clone(),
            claim,
            maps,
            ..*self
        })
    }

    /// Takes the next event. O(log n) in the blocks that are live.
    pub(super) fn push(&mut self, event: &Event) -> Result<(), ReplayError> {
        steps::count(1);
        let device = *self.device.get_or_insert(event.device);
        if device != event.device {
            if self.chosen {
                return Ok(());
            }
            let problem =
                format!("the recording contains devices {device} and {}; choose one with --gpu N", event.device);
            return Err(wrong(self.number + 1, problem));
        }
        self.number += 1;
        self.make_room()?;
        let taken = self.check(event).and_then(|()| self.take(event));
        taken.map_err(|problem| wrong(self.number, problem))
    }

    /// Checks an event by itself.
    fn check(&self, event: &Event) -> Result<(), String> {
        if !self.timeline.has_room() {
            return Err("the recording has more than four billion operations".into());
        }
        if event.action != Action::Oom && event.addr.checked_add(event.bytes).is_none_or(|end| end > 1 << 63) {
            return Err(format!("{:#x} + {} is not a range of addresses", event.addr, event.bytes));
        }
        if event.bytes > MAX_BYTES && !matches!(event.action, Action::Snapshot | Action::Oom) {
            return Err(format!("{} of {} bytes: no device has more than 256 TiB", event.action, event.bytes));
        }
        Ok(())
    }

    fn take(&mut self, event: &Event) -> Result<(), String> {
        // Other streams delay a free that the very next event does not complete.
        if let Some(op) = self.frees.completes_last(event) {
            self.frees.completes = true;
            self.windows.completed_at_once(op, event);
            return Ok(());
        }
        match event.action {
            Action::Alloc => self.alloc(event),
            Action::FreeRequested => self.free(event),
            Action::FreeCompleted => {
                self.frees.completes = true;
                self.complete(event)
            }
            Action::RecordUse => self.record_use(event),
            Action::SegmentAlloc | Action::SegmentMap | Action::SegmentFree | Action::SegmentUnmap => {
                self.change_segments(event)
            }
            Action::Snapshot => {
                self.close_window(End::Other);
                Ok(())
            }
            Action::Oom => self.refuse(event),
        }
    }

    fn close_window(&mut self, end: End) {
        if let Some(before) = self.windows.current.before.filter(|_| end != End::Other) {
            let (mut start, mut end) = self.slots.gap_at(before.addr);
            if let Some((segment, bytes)) = self.segments.held_in(before.addr, 1) {
                (start, end) = (start.max(segment), end.min(segment + bytes));
            }
            self.windows.current.before_room = end.saturating_sub(start);
        }
        self.windows.close(end, self.frees.waiting() > 0, &mut self.timeline, &mut self.frees.deferred);
    }

    fn alloc(&mut self, event: &Event) -> Result<(), String> {
        let Event { addr, bytes, .. } = *event;
        self.close_window(End::Alloc { bytes, stream: event.stream });
        // An empty tensor needs no memory; some logs contain it.
        if bytes == 0 {
            return Ok(());
        }
        if let Some((other, size)) = self.slots.overlapping(addr, bytes) {
            return Err(format!(
                "alloc of {bytes} bytes at {addr:#x} overlaps the live block of {size} bytes at {other:#x}"
            ));
        }
        if let Some((start, size)) = self.segments.cut_off(addr, bytes) {
            return Err(format!(
                "alloc of {bytes} bytes at {addr:#x} extends beyond the segment of {size} bytes at {start:#x}"
            ));
        }
        self.frees.stop_waiting(addr);
        if !self.segments.contain(addr, bytes) {
            self.outside.get_or_insert(self.number);
        }
        let stream = self.slots.stream(event.stream)?;
        let slot = self.slots.allocate(addr, bytes, stream, &mut self.timeline);
        self.count(bytes)?;
        self.requested.shown = true;
        self.requested.live += bytes.cast_signed();
        self.requested.most_live = self.requested.most_live.max(self.requested.live);
        self.timeline.ops.push(Op::new(Kind::Alloc, stream, slot, bytes));
        self.timeline.addresses.push(addr);
        Ok(())
    }

    fn count(&mut self, bytes: u64) -> Result<(), String> {
        self.requested.total += bytes;
        if self.requested.total > 1 << 62 {
            return Err("the recording allocates more than 4 EiB in total".into());
        }
        Ok(())
    }

    fn free(&mut self, event: &Event) -> Result<(), String> {
        let Event { addr, bytes, .. } = *event;
        self.close_window(End::Other);
        let op = self.timeline.next_op();
        let Some(live) = self.slots.free(addr) else { return self.free_unknown(event) };
        if bytes != 0 && bytes != live.bytes {
            return Err(format!("free of {bytes} bytes at {addr:#x}, where {} bytes were allocated", live.bytes));
        }
        self.requested.live -= live.bytes.cast_signed();
        let kind = if live.user == NO_STREAM { Kind::Free } else { Kind::Release };
        let value = Release { ready: BY_DEVICE, user: live.user }.pack();
        self.timeline.ops.push(Op::new(kind, live.stream, live.slot, value));
        self.slots.spare.push(live.slot);
        self.frees.request(addr, op);
        Ok(())
    }

    /// A free of a block that the recording did not allocate: from before recording started, unless an event contradicts that.
    fn free_unknown(&mut self, event: &Event) -> Result<(), String> {
        let Event { addr, bytes, .. } = *event;
        if bytes == 0 {
            return Ok(());
        }
        let why = if self.slots.was_used(addr, bytes) {
            Some("where no block is live")
        } else {
            self.segments.held_in(addr, bytes).map(|_| "in a segment from which they were never allocated")
        };
        if let Some(why) = why {
            let hint = match self.requested.shown {
                true => "",
                false => "; no alloc event precedes it, so record without skip_actions=[\"alloc\"]",
            };
            return Err(format!("free of {bytes} bytes at {addr:#x}, {why}{hint}"));
        }
        self.slots.note_used(addr, bytes);
        let stream = self.slots.stream(event.stream)?;
        let (slot, op) = (self.timeline.fresh_slot(), self.timeline.next_op());
        let block = StartBlock { addr, requested: bytes, bytes: None, stream, slot, freed: None };
        self.unknown.push(Unknown { block, op, number: self.number });
        self.count(bytes)?;
        self.requested.live -= bytes.cast_signed();
        self.timeline.ops.push(free_op(stream, slot));
        self.slots.spare.push(slot);
        self.frees.request(addr, op);
        Ok(())
    }

    /// A free completes that the previous event did not request.
    fn complete(&mut self, event: &Event) -> Result<(), String> {
        let waits = self.frees.stop_waiting(event.addr);
        // If only one of a free's two events was recorded, it is the complete free.
        if waits.is_none() && self.slots.at(event.addr).is_some_and(|live| live.bytes == event.bytes) {
            self.free(event)?;
            if let Some(op) = self.frees.complete_requested() {
                self.windows.completed_at_once(op, event);
            }
            return Ok(());
        }
        let op = match waits {
            Some(op) => Some(op),
            None => self.complete_unknown(event)?,
        };
        if let Some(op) = op {
            self.frees.completed.push((self.timeline.next_op(), event.addr));
            self.windows.completed_late(op, event);
        }
        Ok(())
    }

    /// An unrequested free completes: it was requested before recording started, if its address was not used since. Returns its
    /// number if it was deferred.
    fn complete_unknown(&mut self, event: &Event) -> Result<Option<u32>, String> {
        let Event { addr, bytes, .. } = *event;
        if bytes == 0 || self.slots.was_used(addr, bytes) || self.segments.contain(addr, bytes) {
            return Ok(None);
        }
        let op = self.add_pending(addr, bytes, None, event.stream)?;
        if self.number == 1 {
            // The recording may also begin between a free's request and its completion.
            self.windows.completed_at_once(op, event);
            return Ok(None);
        }
        self.frees.deferred.push(op);
        Ok(Some(op))
    }

    /// Adds a block whose free was requested before recording started; returns the number of that free.
    pub(super) fn add_pending(&mut self, addr: u64, bytes: u64, size: Option<u64>, handle: u64) -> Result<u32, String> {
        let stream = self.slots.stream(handle)?;
        self.slots.note_used(addr, bytes);
        Ok(self.timeline.add_pending(addr, bytes, size, stream))
    }

    fn record_use(&mut self, event: &Event) -> Result<(), String> {
        self.close_window(End::Other);
        let stream = self.slots.stream(event.stream)?;
        if let Some(live) = self.slots.around(event.addr) {
            if stream != live.stream {
                live.user = stream;
                self.timeline.ops.push(Op::new(Kind::Use, stream, live.slot, 0));
            }
        } else if self.slots.was_used(event.addr, 1) {
            return Err(format!("use of {:#x}, where no block is live", event.addr));
        }
        // Blocks from before recording started have no known size, so the use cannot be attributed.
        Ok(())
    }

    fn change_segments(&mut self, event: &Event) -> Result<(), String> {
        let reserved = self.segments.reserved;
        // Segments are neither allocated nor released at the address of a live block.
        if let Some((block, size)) = self.slots.overlapping(event.addr, self.segments.changed(event)) {
            let Event { action, bytes, addr, .. } = *event;
            return Err(format!(
                "{action} of {bytes} bytes at {addr:#x}, where the block of {size} bytes at {block:#x} is live"
            ));
        }
        if self.segments.was_released_before(event) {
            return Err(format!(
                "segment_free of {} bytes at {:#x}, where no segment is reserved",
                event.bytes, event.addr
            ));
        }
        let (change, known) = match event.action {
            Action::SegmentAlloc => (self.segments.make(event)?, true),
            Action::SegmentMap => (self.segments.map(event)?, true),
            Action::SegmentFree => self.segments.release(event, self.number),
            _ => self.segments.unmap(event),
        };
        if !known {
            self.outside.get_or_insert(self.number);
        }
        self.windows.add_segment(SegmentEvent { event: self.number, ..change }, reserved);
        Ok(())
    }

    fn refuse(&mut self, event: &Event) -> Result<(), String> {
        if event.bytes > MAX_BYTES {
            self.close_window(End::Other);
            self.refusals.add_impossible(self.number, event.bytes);
            return Ok(());
        }
        self.close_window(End::Refused { bytes: event.bytes, stream: event.stream });
        let Event { bytes, stream, addr: device_free, .. } = *event;
        let (number, op, reserved) = (self.number, self.timeline.next_op(), self.segments.reserved);
        self.refusals.add(Refusal { number, bytes, stream, device_free, reserved, op });
        if bytes > 0 {
            let stream = self.slots.stream(stream)?;
            self.timeline.ops.push(Op::new(Kind::Refused, stream, 0, bytes));
        }
        Ok(())
    }

    /// Checks that the recording contains every block and segment that it names: logs that begin with their program do.
    pub(super) fn check_complete(&self) -> Result<(), ReplayError> {
        if let Some(Unknown { block: StartBlock { requested, addr, .. }, number, .. }) = self.unknown.first() {
            return Err(wrong(*number, format!("free of {requested} bytes at {addr:#x}, which were never allocated")));
        }
        // Not every allocator allocates segments from its device.
        match self.outside.filter(|_| self.segments.shows_some()) {
            Some(number) => Err(wrong(number, "it is outside every segment that the log shows as reserved")),
            None => Ok(()),
        }
    }

    /// Ends the recording. With `breaks_off`, events are missing after the last, one of which may complete a free.
    pub(super) fn end(&mut self, breaks_off: bool) -> Result<(), OverBudget> {
        self.make_room()?;
        if !breaks_off {
            self.frees.end();
        }
        self.close_window(End::Other);
        Ok(())
    }
}
