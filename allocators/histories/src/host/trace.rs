//! The requests, frees and completions of a program's pinned memory.

use crate::formats::{Action, HostEvent, HostRecord, StackId};
use crate::history::{MAX_BYTES, ReplayError};
use std::collections::{BTreeMap, BTreeSet};
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// An operation; blocks are numbered in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostOp {
    /// A request.
    Allocate(u32),
    /// Work that was queued on a stream uses the block.
    Use {
        /// The block.
        block: u32,
        /// Stream as in the file.
        stream: u64,
    },
    /// The program's free.
    Free(u32),
    /// The last use of a freed block has completed.
    Complete(u32),
    /// The cache was emptied.
    Empty,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBlock {
    /// Recorded address.
    pub addr: u64,
    /// Bytes: of the request, or of the recorded block.
    pub bytes: u64,
    /// Whether the recorded allocator served it from its cache; `None` if the file does not show that.
    pub cached: Option<bool>,
    /// Frames of the request.
    pub stack: StackId,
}

/// What the sizes of a trace are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sizes {
    /// The requested bytes.
    Requested,
    /// Bytes of blocks after rounding: PyTorch records no others.
    Blocks,
}

/// A program's pinned memory.
#[derive(Debug)]
pub struct HostTrace {
    /// Operations in order.
    pub ops: Vec<HostOp>,
    /// Blocks by number.
    pub blocks: Vec<HostBlock>,
    /// What the sizes are.
    pub sizes: Sizes,
    /// The first blocks, which were pinned before recording started.
    pub prologue: u32,
    /// Blocks whose free completed later than it was requested.
    pub deferred: u64,
    /// Blocks that were freed and whose last use had not completed at the end.
    pub stuck: Vec<u32>,
    /// Most bytes that the recorded allocator had pinned at once; `None` where the file has no segments.
    pub recorded_peak: Option<u64>,
    /// Most bytes of blocks that were live, or freed and not completed, at once.
    pub peak_active: u64,
    /// Number of operations after which that was so.
    pub peak_op: usize,
    /// Most bytes that were live at once: no allocator pins less.
    pub peak_live: u64,
    /// Most bytes that the program had registered in place at once, where they differ from the allocator's blocks. No allocator
    /// has them.
    pub peak_registered: u64,
    /// Events that contradict earlier ones, such as a free of a block that is not live; they are left out.
    pub contradictions: u64,
    claim: Claim,
}

/// Builds a [`HostTrace`] from events in order.
#[derive(Debug)]
pub struct HostTraceBuilder {
    out: HostTrace,
    /// Blocks by address: live ones, and those that wait.
    live: BTreeMap<u64, u32>,
    waiting: BTreeMap<u64, u32>,
    /// New segments whose block was not requested yet.
    fresh: BTreeSet<u64>,
    segments: BTreeMap<u64, u64>,
    reserved: u64,
    /// Whether the file has events of completion; else a free completes immediately.
    completes: bool,
    live_bytes: u64,
    active_bytes: u64,
    limits: RecordedLimits,
    registered: u64,
    /// Number of the current event, from 1; 0 while blocks from before are added.
    number: u64,
    /// Bytes of all requests so far.
    requested: u64,
}

/// Bytes of all requests of a trace together, so that sums of rounded sizes cannot overflow.
const MAX_REQUESTED: u64 = 1 << 61;

/// Thresholds of the recorded allocator (PyTorch 2.13 on), in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordedLimits {
    /// Largest request that was rounded up; `None` if all were.
    pub max_round: Option<u64>,
    /// Largest block that was cached; `None` if all were.
    pub max_cached: Option<u64>,
}

impl RecordedLimits {
    /// Whether a block cannot be the allocator's: all its blocks are powers of two. From 2.15 on PyTorch also records memory that
    /// the program registered with `cudart().cudaHostRegister`.
    fn is_registered(self, bytes: u64) -> bool {
        self == Self::default() && !bytes.is_power_of_two()
    }
}

impl HostTrace {
    /// Memory of the trace: claimed from the reader's budget while it exists.
    #[must_use]
    pub fn claimed_bytes(&self) -> u64 {
        self.claim.bytes()
    }

    /// The pinned memory of a snapshot.
    ///
    /// # Errors
    /// Those of [`HostTraceBuilder::push`].
    pub fn of_record(record: &HostRecord, limits: RecordedLimits, budget: &Budget) -> Result<Self, ReplayError> {
        let mut builder = HostTraceBuilder::new(Sizes::Blocks, true, budget);
        builder.limits = limits;
        builder.begin(record)?;
        record.events.iter().try_for_each(|event| builder.push(event))?;
        Ok(builder.finish())
    }

    /// The number of requests, blocks from before recording started included.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.blocks.len()
    }

    /// The smallest request that a recorded block can have served: PyTorch rounds up to the next power of two. Any other size
    /// was not rounded.
    #[must_use]
    pub fn least(&self, block: &HostBlock) -> u64 {
        match self.sizes {
            Sizes::Blocks if block.bytes.is_power_of_two() => block.bytes / 2 + 1,
            _ => block.bytes,
        }
    }
}

impl HostTraceBuilder {
    /// Without events. `completes` says whether the file has events of completion.
    #[must_use]
    pub fn new(sizes: Sizes, completes: bool, budget: &Budget) -> Self {
        let out = HostTrace {
            ops: Vec::new(),
            blocks: Vec::new(),
            sizes,
            prologue: 0,
            deferred: 0,
            stuck: Vec::new(),
            recorded_peak: None,
            peak_active: 0,
            peak_op: 0,
            peak_live: 0,
            peak_registered: 0,
            contradictions: 0,
            claim: budget.claim(),
        };
        Self {
            out,
            live: BTreeMap::new(),
            waiting: BTreeMap::new(),
            fresh: BTreeSet::new(),
            segments: BTreeMap::new(),
            reserved: 0,
            completes,
            live_bytes: 0,
            active_bytes: 0,
            limits: RecordedLimits::default(),
            registered: 0,
            number: 0,
            requested: 0,
        }
    }

    fn op(&mut self, op: HostOp) -> Result<(), OverBudget> {
        self.out.claim.push(&mut self.out.ops, op)
    }

    /// Adds the blocks that were pinned before recording started: those whose first event is not the allocation of their segment,
    /// and those at the end that have no event. Which of them were cached shows in that event.
    fn begin(&mut self, record: &HostRecord) -> Result<(), ReplayError> {
        let mut first: BTreeMap<u64, &HostEvent> = BTreeMap::new();
        for event in &record.events {
            first.entry(event.addr).or_insert(event);
        }
        let mut before: Vec<(HostEvent, bool)> = Vec::new();
        for event in first.values().filter(|event| event.action != Action::SegmentAlloc) {
            before.push((**event, matches!(event.action, Action::FreeRequested | Action::FreeCompleted)));
        }
        for segment in &record.segments {
            let Some(addr) = segment.addr.filter(|addr| !first.contains_key(addr)) else { continue };
            let action = Action::Alloc;
            let (stream, time_ns, stack) = (0, 0, StackId::default());
            before.push((HostEvent { action, addr, bytes: segment.bytes, stream, time_ns, stack }, segment.active));
        }
        before.sort_unstable_by_key(|(event, _)| event.addr);
        for (event, _) in &before {
            self.take(&HostEvent { action: Action::SegmentAlloc, ..*event })?;
            self.take(&HostEvent { action: Action::Alloc, ..*event })?;
        }
        self.out.prologue = self.out.blocks.len().try_into().unwrap_or(u32::MAX);
        for (event, _) in before.iter().filter(|(_, live)| !live) {
            self.take(&HostEvent { action: Action::FreeRequested, ..*event })?;
            self.take(&HostEvent { action: Action::FreeCompleted, ..*event })?;
        }
        Ok(())
    }

    /// Takes the next event.
    ///
    /// # Errors
    /// [`ReplayError::Event`] for a size above [`MAX_BYTES`], and for requests that add up to more than 2 EiB;
    /// [`ReplayError::TooLarge`] when the budget is used up.
    pub fn push(&mut self, event: &HostEvent) -> Result<(), ReplayError> {
        self.number += 1;
        self.take(event)
    }

    fn take(&mut self, event: &HostEvent) -> Result<(), ReplayError> {
        let wrong = |number, what: &str| ReplayError::Event { number, what: what.to_owned() };
        if event.bytes > MAX_BYTES && event.action != Action::RecordUse {
            let what = format!("{} bytes of host memory are more than any machine has", event.bytes);
            return Err(wrong(self.number, &what));
        }
        if event.action == Action::Alloc {
            self.requested = self.requested.saturating_add(event.bytes);
            if self.requested > MAX_REQUESTED {
                return Err(wrong(self.number, "the requests so far add up to more than 2 EiB"));
            }
        }
        Ok(self.apply(event)?)
    }

    fn apply(&mut self, event: &HostEvent) -> Result<(), OverBudget> {
        let HostEvent { action, addr, bytes, stream, .. } = *event;
        let in_place = self.out.sizes == Sizes::Blocks && self.limits.is_registered(bytes);
        match action {
            Action::SegmentAlloc if in_place => {
                self.registered = self.registered.saturating_add(bytes);
                self.out.peak_registered = self.out.peak_registered.max(self.registered);
            }
            Action::SegmentFree if in_place => self.registered = self.registered.saturating_sub(bytes),
            _ if in_place => {}
            Action::SegmentAlloc => {
                self.fresh.insert(addr);
                if let Some(before) = self.segments.insert(addr, bytes) {
                    self.out.contradictions += 1;
                    self.reserved = self.reserved.saturating_sub(before);
                }
                self.reserved = self.reserved.saturating_add(bytes);
                self.out.recorded_peak = Some(self.out.recorded_peak.unwrap_or(0).max(self.reserved));
            }
            Action::Alloc => self.allocate(event)?,
            Action::RecordUse => match self.live.get(&addr).copied() {
                Some(block) => self.op(HostOp::Use { block, stream })?,
                None => self.out.contradictions += 1,
            },
            Action::FreeRequested => match self.live.remove(&addr) {
                Some(block) => self.free(addr, block)?,
                None => self.out.contradictions += 1,
            },
            Action::FreeCompleted => match self.waiting.remove(&addr) {
                Some(block) => self.complete(block)?,
                None => self.out.contradictions += 1,
            },
            Action::SegmentFree => {
                self.fresh.remove(&addr);
                self.reserved = self.reserved.saturating_sub(self.segments.remove(&addr).unwrap_or(0));
                // A block above the largest cached size is released with its free; anything else empties the cache.
                let with_its_free = self.limits.max_cached.is_some_and(|most| bytes > most);
                if !with_its_free && self.out.ops.last() != Some(&HostOp::Empty) {
                    self.op(HostOp::Empty)?;
                }
            }
            Action::SegmentMap | Action::SegmentUnmap | Action::Snapshot | Action::Oom => {}
        }
        Ok(())
    }

    fn allocate(&mut self, event: &HostEvent) -> Result<(), OverBudget> {
        let HostEvent { addr, bytes, stack, .. } = *event;
        // A file whose beginning was lost may lack the free of an earlier block at the address.
        if let Some(block) = self.live.remove(&addr) {
            self.out.contradictions += 1;
            self.free(addr, block)?;
        }
        if let Some(block) = self.waiting.remove(&addr) {
            self.complete(block)?;
        }
        let Ok(number) = u32::try_from(self.out.blocks.len()) else { return Err(self.out.claim.refuse()) };
        let cached = (!self.segments.is_empty()).then(|| !self.fresh.remove(&addr));
        let block = HostBlock { addr, bytes, cached, stack };
        self.out.claim.push(&mut self.out.blocks, block)?;
        self.live.insert(addr, number);
        self.op(HostOp::Allocate(number))?;
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        self.active_bytes = self.active_bytes.saturating_add(bytes);
        self.out.peak_live = self.out.peak_live.max(self.live_bytes);
        if self.active_bytes > self.out.peak_active {
            (self.out.peak_active, self.out.peak_op) = (self.active_bytes, self.out.ops.len());
        }
        Ok(())
    }

    fn free(&mut self, addr: u64, block: u32) -> Result<(), OverBudget> {
        // CAST: a number of a block.
        self.live_bytes -= self.out.blocks[block as usize].bytes;
        self.op(HostOp::Free(block))?;
        if !self.completes {
            return self.complete(block);
        }
        self.waiting.insert(addr, block);
        Ok(())
    }

    fn complete(&mut self, block: u32) -> Result<(), OverBudget> {
        // CAST: a number of a block.
        self.active_bytes -= self.out.blocks[block as usize].bytes;
        if self.out.ops.last() != Some(&HostOp::Free(block)) {
            self.out.deferred += 1;
        }
        self.op(HostOp::Complete(block))
    }

    /// The trace.
    #[must_use]
    pub fn finish(mut self) -> HostTrace {
        self.out.stuck = self.waiting.into_values().collect();
        self.out.stuck.sort_unstable();
        self.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::HostSegment;

    fn event(action: Action, addr: u64, bytes: u64) -> HostEvent {
        HostEvent { action, addr, bytes, stream: 0, time_ns: 0, stack: StackId::default() }
    }

    fn limited(events: &[HostEvent], segments: &[HostSegment], limits: RecordedLimits) -> HostTrace {
        let record = HostRecord { events: events.to_vec(), segments: segments.to_vec() };
        HostTrace::of_record(&record, limits, &Budget::default()).unwrap()
    }

    fn trace(events: &[HostEvent], segments: &[HostSegment]) -> HostTrace {
        limited(events, segments, RecordedLimits::default())
    }

    #[test]
    fn misses_hits_and_deferred_frees_are_told_from_the_events() {
        use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
        let trace = trace(
            &[
                event(SegmentAlloc, 4096, 64),
                event(Alloc, 4096, 64),
                event(FreeRequested, 4096, 64),
                event(SegmentAlloc, 8192, 64),
                event(Alloc, 8192, 64),
                event(FreeCompleted, 4096, 64),
                event(Alloc, 4096, 64),
                event(FreeRequested, 8192, 64),
            ],
            &[],
        );
        use HostOp::{Allocate, Complete, Free};
        assert_eq!(trace.ops, [Allocate(0), Free(0), Allocate(1), Complete(0), Allocate(2), Free(1)]);
        let cached: Vec<Option<bool>> = trace.blocks.iter().map(|block| block.cached).collect();
        assert_eq!(cached, [false, false, true].map(Some));
        assert_eq!((trace.deferred, trace.stuck, trace.contradictions), (1, vec![1], 0));
        assert_eq!((trace.recorded_peak, trace.peak_active, trace.peak_live), (Some(128), 128, 128));
    }

    #[test]
    fn blocks_from_before_are_live_or_cached() {
        use Action::{Alloc, FreeCompleted, FreeRequested};
        let events = [event(FreeRequested, 4096, 64), event(FreeCompleted, 4096, 64), event(Alloc, 8192, 32)];
        let segment = HostSegment { addr: Some(1 << 20), bytes: 16, active: true };
        let trace = trace(&events, &[segment]);
        use HostOp::{Allocate, Complete, Free};
        let expected = [Allocate(0), Allocate(1), Allocate(2), Free(1), Complete(1), Free(0), Complete(0), Allocate(3)];
        assert_eq!((trace.prologue, &trace.ops[..]), (3, &expected[..]));
        assert_eq!(trace.blocks[3].cached, Some(true));
        assert_eq!((trace.recorded_peak, trace.contradictions), (Some(112), 0));
    }

    #[test]
    fn released_with_its_free_or_by_emptying() {
        use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree};
        let life = |addr, bytes| {
            [SegmentAlloc, Alloc, FreeRequested, FreeCompleted, SegmentFree].map(|action| event(action, addr, bytes))
        };
        let events = [life(4096, 64), life(8192, 1024)].concat();
        let empties = |limits| limited(&events, &[], limits).ops.iter().filter(|op| **op == HostOp::Empty).count();
        assert_eq!(empties(RecordedLimits::default()), 2);
        assert_eq!(empties(RecordedLimits { max_cached: Some(100), ..RecordedLimits::default() }), 1);
    }

    #[test]
    fn memory_that_was_registered_in_place_is_no_allocators() {
        use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree};
        let life =
            [SegmentAlloc, Alloc, FreeRequested, FreeCompleted, SegmentFree].map(|action| event(action, 4096, 100));
        let registered = trace(&life, &[]);
        assert_eq!((registered.peak_registered, registered.ops.len(), registered.recorded_peak), (100, 0, None));
        let exact = limited(&life, &[], RecordedLimits { max_round: Some(64), max_cached: None });
        assert_eq!((exact.peak_registered, exact.recorded_peak), (0, Some(100)), "sizes above a threshold are exact");
    }

    #[test]
    fn contradictions_are_counted_and_left_out() {
        use Action::{Alloc, FreeCompleted, FreeRequested, RecordUse};
        let budget = Budget::default();
        let mut builder = HostTraceBuilder::new(Sizes::Requested, false, &budget);
        for event in [
            event(FreeRequested, 64, 8),
            event(Alloc, 64, 8),
            event(Alloc, 64, 8),
            event(RecordUse, 128, 0),
            event(FreeRequested, 64, 8),
            event(FreeRequested, 64, 8),
            event(FreeCompleted, 64, 8),
        ] {
            builder.push(&event).unwrap();
        }
        let trace = builder.finish();
        use HostOp::{Allocate, Complete, Free};
        assert_eq!(trace.ops, [Allocate(0), Free(0), Complete(0), Allocate(1), Free(1), Complete(1)]);
        assert_eq!((trace.contradictions, trace.peak_live), (5, 8));
        assert_eq!(budget.held(), trace.claimed_bytes());
    }

    #[test]
    fn sizes_that_no_machine_has_are_refused() {
        let budget = Budget::default();
        let mut builder = HostTraceBuilder::new(Sizes::Requested, false, &budget);
        builder.push(&event(Action::Alloc, 64, MAX_BYTES)).unwrap();
        let error = builder.push(&event(Action::Alloc, 128, MAX_BYTES + 1)).unwrap_err();
        assert!(error.is_bad_input() && error.to_string().starts_with("event 2: "), "{error}");
        let mut pushed = 1..;
        let error = pushed.find_map(|at| builder.push(&event(Action::Alloc, at * 4096, MAX_BYTES)).err()).unwrap();
        assert!(error.to_string().contains("more than 2 EiB"), "{error}");
    }

    #[test]
    fn a_rounded_block_bounds_its_request() {
        let limits = RecordedLimits { max_round: Some(64), max_cached: None };
        let trace = limited(&[event(Action::Alloc, 64, 64), event(Action::Alloc, 128, 100)], &[], limits);
        let least: Vec<u64> = trace.blocks.iter().map(|block| trace.least(block)).collect();
        assert!(least.contains(&33) && least.contains(&100), "{least:?}");
    }
}
