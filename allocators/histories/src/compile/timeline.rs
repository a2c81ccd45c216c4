//! The list of operations during compilation, and the traversal of the recorded placements.

use crate::formats::{Action, Event};
use crate::history::{BY_DEVICE, Beginning, DueFrees, ImpossibleRequests, Kind, NO_STREAM, Op, Release, SegmentEvent};
use crate::steps;
use std::collections::{HashMap, VecDeque};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::policy::size::torch::{round_size, segment_size};

/// A block whose free was requested before recording started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    /// Size, if the end of the recording contains it.
    pub(super) size: Option<u64>,
    /// Its free, which a replay requests before the first operation.
    pub(super) op: Op,
}

/// The number of the first free from before recording started; later ones count down from it.
const LAST: u32 = BY_DEVICE - 1;

/// Operations, with addresses of their blocks and segments.
#[derive(Clone, Debug, Default)]
pub(super) struct Timeline {
    pub(super) ops: Vec<Op>,
    /// Recorded address of each allocation, in order.
    pub(super) addresses: Vec<u64>,
    /// Segments that were allocated and released, in order.
    pub(super) segments: Vec<SegmentEvent>,
    /// Blocks whose free was requested before recording started. Their frees are operations too.
    pub(super) pending: Vec<Pending>,
    /// Number of slots in the operations.
    pub(super) slots: u32,
}

impl Timeline {
    /// Number of the next operation.
    pub(super) fn next_op(&self) -> u32 {
        // CAST: the number of operations is checked with each event.
        self.ops.len() as u32
    }

    /// A slot that was never used.
    pub(super) fn fresh_slot(&mut self) -> u32 {
        self.slots += 1;
        self.slots - 1
    }

    /// Whether the operations of another event fit.
    pub(super) fn has_room(&self) -> bool {
        self.ops.len() + self.pending.len() < BY_DEVICE as usize - 4
    }

    /// Adds a block whose free was requested before recording started; returns the number of that free.
    pub(super) fn add_pending(&mut self, addr: u64, bytes: u64, size: Option<u64>, stream: u32) -> u32 {
        let op = free_op(stream, self.fresh_slot());
        self.pending.push(Pending { addr, bytes, size, op });
        // CAST: `has_room` limits them together with the operations.
        LAST - (self.pending.len() - 1) as u32
    }

    /// An operation by its number.
    pub(super) fn op_mut(&mut self, number: u32) -> &mut Op {
        match self.ops.len() > number as usize {
            true => &mut self.ops[number as usize],
            false => &mut self.pending[(LAST - number) as usize].op,
        }
    }

    /// Whether a number belongs to a free from before recording started.
    pub(super) fn is_before(&self, number: u32) -> bool {
        number as usize >= self.ops.len()
    }

    /// Sets the operation from which on a freed block can be reused.
    pub(super) fn set_ready(&mut self, free: u32, ready: u32) {
        let op = self.op_mut(free);
        op.set_release(Release { ready, ..op.release() });
    }

    /// Every free completes when its announced uses do; the recording shows no more.
    pub(super) fn leave_frees_to_device(&mut self) {
        self.ops.iter_mut().filter(|op| op.kind() == Kind::Release).for_each(Op::complete_by_device);
    }

    /// Follows the placements from the initial memory. O(n log n).
    pub(super) fn follow(&self, beginning: &Beginning, placements: &mut impl Placements) {
        let mut slots = vec![0; self.slots as usize];
        for block in &beginning.blocks {
            slots[block.slot as usize] = block.addr;
        }
        let mut due = DueFrees::default();
        for op in &beginning.frees {
            if let Some(addr) = due.request(0, *op, slots[op.slot as usize]) {
                placements.free(addr);
            }
        }
        let (mut addresses, mut segments) = (self.addresses.iter(), &self.segments[..]);
        for (number, op) in (0u32..).zip(&self.ops) {
            steps::count(1);
            match op.kind() {
                Kind::Free | Kind::Release => {
                    if let Some(addr) = due.request(number, *op, slots[op.slot as usize]) {
                        placements.free(addr);
                    }
                }
                Kind::Use => {}
                Kind::Alloc | Kind::Trim | Kind::Refused | Kind::Nothing => {
                    while let Some(freed) = due.complete(number) {
                        freed.into_iter().for_each(|addr| placements.free(addr));
                    }
                    let here = segments.iter().take_while(|segment| segment.op <= number).count();
                    let (here, rest) = segments.split_at(here);
                    segments = rest;
                    let block = if op.kind() == Kind::Alloc { addresses.next().copied() } else { None };
                    if let Some(addr) = block {
                        slots[op.slot as usize] = addr;
                    }
                    if !placements.operation(Operation { number, op: *op, segments: here, block }) {
                        return;
                    }
                }
            }
        }
    }
}

/// An operation in which the allocator may allocate or release segments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation<'a> {
    pub(super) number: u32,
    pub(super) op: Op,
    /// Segments allocated and released in it, in order.
    pub(super) segments: &'a [SegmentEvent],
    /// Address of the allocated block.
    pub(super) block: Option<u64>,
}

/// A visitor of the recorded placements.
pub(super) trait Placements {
    /// The block at an address becomes free.
    fn free(&mut self, addr: u64);

    /// An operation is next. Frees that complete before it have done so. Returning false ends the traversal.
    fn operation(&mut self, operation: Operation<'_>) -> bool;
}

/// A free whose completion the device decides.
pub(super) fn free_op(stream: u32, slot: u32) -> Op {
    Op::new(Kind::Free, stream, slot, Release { ready: BY_DEVICE, user: NO_STREAM }.pack())
}

// First stage: deferred frees.

/// Frees, from their request to their completion.
#[derive(Clone, Debug, Default)]
pub(super) struct Frees {
    /// Address and operation of the free that the last event requested.
    requested: Option<(u64, u32)>,
    /// Pending frees by address.
    waiting: HashMap<u64, u32>,
    /// Operations of all deferred frees in order. Those of a retry are added later.
    pub(super) deferred: Vec<u32>,
    /// Operations of deferred frees, in order.
    pub(super) held_up: Vec<u32>,
    /// Operation before which the free of the block at an address completed, in order.
    pub(super) completed: Vec<(u32, u64)>,
    /// Whether the recording has completions.
    pub(super) completes: bool,
}

impl Frees {
    /// Operation `op` requests the free of the block at an address.
    pub(super) fn request(&mut self, addr: u64, op: u32) {
        self.requested = Some((addr, op));
    }

    /// The operation of the free that the last event requested, if this event completes it. Otherwise other streams delay it.
    pub(super) fn completes_last(&mut self, event: &Event) -> Option<u32> {
        let (addr, op) = self.requested.take()?;
        if event.action == Action::FreeCompleted && event.addr == addr {
            return Some(op);
        }
        self.wait(addr, op);
        self.held_up.push(op);
        None
    }

    /// The operation of the free that was just requested, which completes with it.
    pub(super) fn complete_requested(&mut self) -> Option<u32> {
        self.requested.take().map(|(_, op)| op)
    }

    /// Ends the recording: a free that the last event requested is pending.
    pub(super) fn end(&mut self) {
        if let Some((addr, op)) = self.requested.take() {
            self.wait(addr, op);
        }
    }

    fn wait(&mut self, addr: u64, op: u32) {
        self.waiting.insert(addr, op);
        self.deferred.push(op);
    }

    /// The free of the block at an address completes, if it is pending.
    pub(super) fn stop_waiting(&mut self, addr: u64) -> Option<u32> {
        self.waiting.remove(&addr)
    }

    /// The operation that requested the pending free of the block at an address.
    pub(super) fn waiting_at(&self, addr: u64) -> Option<u32> {
        self.waiting.get(&addr).copied()
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

// Failed requests, and what they show about the device.

/// Number of failed requests to examine; the last ones show why a program ended.
const MOST: usize = 100;

/// A failed request as in the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    pub(super) number: u64,
    pub(super) bytes: u64,
    pub(super) stream: u64,
    /// Free bytes of the device; 0 if unknown.
    pub(super) device_free: u64,
    /// Bytes reserved beyond the initial memory; wraps below zero.
    pub(super) reserved: u64,
    /// The operation that follows it.
    pub(super) op: u32,
}

/// Failed requests.
#[derive(Clone, Debug, Default)]
pub(super) struct Refusals {
    /// Their number.
    pub(super) count: u64,
    /// The last of them.
    pub(super) last: VecDeque<Refusal>,
    /// Those above [`MAX_BYTES`](crate::history::MAX_BYTES), which are in neither.
    pub(super) impossible: Option<ImpossibleRequests>,
}

impl Refusals {
    pub(super) fn add(&mut self, refusal: Refusal) {
        self.count += 1;
        if self.last.len() == MOST {
            self.last.pop_front();
        }
        self.last.push_back(refusal);
    }

    /// Counts a request that no device could serve.
    pub(super) fn add_impossible(&mut self, last_event: u64, last_bytes: u64) {
        let count = self.impossible.map_or(1, |others| others.count + 1);
        self.impossible = Some(ImpossibleRequests { count, last_event, last_bytes });
    }

    /// Reserved size from which the device refused, as far as failed requests show: their lowest need, and more than
    /// `most_reserved`, which fitted at one time. `before` bytes were reserved before recording started.
    pub(super) fn refused_from(&self, settings: &CachingSettings, before: u64, most_reserved: i64) -> Option<u64> {
        let lacked = |refusal: &Refusal| {
            let needed = segment_size(round_size(refusal.bytes, &settings.roundup_power2_divisions));
            let free = Some(refusal.device_free).filter(|free| *free > 0);
            refusal.reserved.wrapping_add(before).saturating_add(free.map_or(needed, |free| needed.min(free + 1)))
        };
        let least = self.last.iter().map(lacked).min()?;
        Some(least.max(most_reserved.wrapping_add_unsigned(before).cast_unsigned().saturating_add(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Visits(Vec<String>);

    impl Placements for Visits {
        fn free(&mut self, addr: u64) {
            self.0.push(format!("free {addr}"));
        }

        fn operation(&mut self, Operation { number, segments, block, .. }: Operation<'_>) -> bool {
            self.0.push(format!("{number}: {} segments, block {block:?}", segments.len()));
            true
        }
    }

    #[test]
    fn visits_frees_at_completion_and_segments_before_blocks() {
        let mut timeline = Timeline::default();
        let (slot, other) = (timeline.fresh_slot(), timeline.fresh_slot());
        let late = Op::new(Kind::Release, 0, slot, Release { ready: 3, user: 1 }.pack());
        let [alloc, again] = [slot, other].map(|slot| Op::new(Kind::Alloc, 0, slot, 512));
        let nothing = Op::new(Kind::Nothing, 0, 0, 0);
        timeline.ops = vec![alloc, late, again, nothing, free_op(0, other)];
        timeline.addresses = vec![64, 128];
        let segment = |addr, op| SegmentEvent { op, ..SegmentEvent::made(addr, 64, 0) };
        timeline.segments = vec![segment(64, 0), segment(128, 2), segment(192, 2)];
        let mut visits = Visits::default();
        timeline.follow(&Beginning::default(), &mut visits);
        assert_eq!(
            visits.0,
            [
                "0: 1 segments, block Some(64)",
                "2: 2 segments, block Some(128)",
                "free 64",
                "3: 0 segments, block None",
                "free 128"
            ]
        );
    }

    #[test]
    fn frees_from_before_the_first_event_have_numbers_of_their_own() {
        let mut timeline = Timeline { ops: vec![free_op(0, 0)], ..Timeline::default() };
        let before = timeline.add_pending(64, 512, None, 3);
        assert!(timeline.is_before(before) && !timeline.is_before(0));
        timeline.set_ready(before, 7);
        assert_eq!((timeline.op_mut(before).release().ready, timeline.op_mut(before).stream()), (7, 3));
        assert_eq!(timeline.op_mut(0).release().ready, BY_DEVICE);
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn refused_from_is_the_lowest_refused_above_the_peak() {
        let refusal =
            |bytes, device_free, reserved| Refusal { number: 1, bytes, stream: 0, device_free, reserved, op: 0 };
        let mut refusals = Refusals::default();
        assert_eq!(refusals.refused_from(&CachingSettings::default(), 0, 0), None);
        refusals.add(refusal(100 * MIB, 0, 900 * MIB));
        let from = |refusals: &Refusals, most| refusals.refused_from(&CachingSettings::default(), 0, most).unwrap();
        assert_eq!(from(&refusals, 0), 1000 * MIB);
        refusals.add(refusal(100 * MIB, 10 * MIB, 960 * MIB));
        assert_eq!(from(&refusals, 0), 970 * MIB + 1, "the free bytes are known");
        assert_eq!(from(&refusals, (980 * MIB).cast_signed()), 980 * MIB + 1, "that much fitted at one time");
        (0..200).for_each(|_| refusals.add(refusal(MIB, 0, 0)));
        assert_eq!((refusals.count, refusals.last.len()), (202, MOST));
    }
}
