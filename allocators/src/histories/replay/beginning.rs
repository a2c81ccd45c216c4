//! What was held before the first event, of a history whose recording began late or whose ring buffer lost its beginning.
//!
//! It is told backwards from what was held after the last event. What the history releases and did not make was there
//! before, and so was what is held at the end and was not made by the history.

use super::ReplayError;
use super::builder::{HistoryBuilder, wrong};
use super::op::{BY_DEVICE, Kind, NO_STREAM, Op, Release};
use super::pools::Named;
use super::windows::{Completion, SegmentEvent};
use super::{ages, layout, pools};
use crate::backends::CachingSettings;
use crate::contract::GUARANTEED_ALIGN;
use crate::contract::PoolKind;
use crate::contract::{BlockInfo, BlockState, SegmentInfo, Snapshot};
use crate::device::{DeviceAddr, StreamId};
use crate::histories::trace::{Event, Segment, SegmentType};
use crate::policy::size::torch::SMALL_SEGMENT;
use std::collections::HashMap;

/// A block that the client had before the first event and freed after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unknown {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    stream: u32,
    slot: u32,
    /// The operation that frees it.
    op: u32,
    /// The event that frees it.
    pub(super) number: u64,
}

/// A block whose free had been requested before the first event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    /// Size, where the end of the history tells it.
    pub(super) size: Option<u64>,
    /// Its free, which a replay requests before the first event.
    pub(super) op: Op,
}

/// A segment that the history released without having made it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Departed {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    pub(super) stream: u64,
}

/// A segment that was held before the first event.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartSegment {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    pub(super) stream: u32,
    pub(super) pool: PoolKind,
    /// For how many searches of the large pool it had been idle, as far as that matters.
    pub(super) age: u64,
    /// The private pool that it serves, by number from 1; 0 for none, or where that is not told.
    pub(super) private: u32,
}

/// A block that was in use before the first event.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartBlock {
    pub(super) addr: u64,
    pub(super) requested: u64,
    /// Size, where the end of the history or the layout tells it.
    pub(super) bytes: Option<u64>,
    pub(super) stream: u32,
    pub(super) slot: u32,
    /// Number of its free, if that had been requested.
    pub(super) freed: Option<usize>,
}

/// The state from which a replay starts.
#[derive(Clone, Debug, Default)]
pub(super) struct Beginning {
    /// In address order; none if they are not known.
    pub(super) segments: Vec<StartSegment>,
    /// In address order; those whose free is pending come with their segments only.
    pub(super) blocks: Vec<StartBlock>,
    /// Frees that had been requested, in order.
    pub(super) frees: Vec<Op>,
    /// Blocks whose size the history does not tell.
    pub(super) undetermined: u64,
    /// Why the segments are not known, if something was held.
    pub(super) unknown: Option<String>,
}

impl Beginning {
    /// Bytes that the client held.
    pub(super) fn requested(&self) -> u64 {
        self.blocks.iter().filter(|block| block.freed.is_none()).map(|block| block.requested).sum()
    }

    /// Bytes of the segments.
    pub(super) fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// The segments as the allocator's first events: from the highest address downwards, as allocators restore them, and where
    /// those of private pools are `apart` one pool after another.
    pub(super) fn segment_events(&self, apart: bool) -> impl Iterator<Item = SegmentEvent> + use<> {
        let mut segments = self.segments.clone();
        segments.sort_by_key(|segment| (if apart { segment.private } else { 0 }, std::cmp::Reverse(segment.addr)));
        segments.into_iter().map(|segment| SegmentEvent {
            addr: segment.addr,
            bytes: segment.bytes,
            stream: 0,
            part: None,
            op: 0,
            released: false,
            refused: false,
        })
    }

    /// For how many searches the segment at an address had been idle.
    pub(super) fn age(&self, addr: u64) -> u64 {
        let found = self.segments.binary_search_by_key(&addr, |segment| segment.addr);
        found.map_or(0, |number| self.segments[number].age)
    }

    /// The private pool of what lies at an address.
    pub(super) fn private_at(&self, addr: u64) -> u32 {
        let before = self.segments.partition_point(|segment| segment.addr <= addr);
        before.checked_sub(1).map_or(0, |number| self.segments[number].private)
    }

    /// The segments of a private pool (`None`: all of them) and their blocks with the streams of a replay; `None` if there are
    /// none that are known.
    pub(super) fn snapshot(&self, streams: &[StreamId], private: Option<u32>) -> Option<Snapshot> {
        let own = || self.segments.iter().filter(|segment| private.is_none_or(|private| private == segment.private));
        own().next()?;
        let mut blocks = self.blocks.iter().peekable();
        let segment = |segment: &StartSegment| {
            let (mut at, end) = (segment.addr, segment.addr + segment.bytes);
            while blocks.next_if(|block| block.addr < at).is_some() {}
            let mut parts = Vec::new();
            let mut part = |at: &mut u64, bytes: u64, requested: u64, state: BlockState| {
                parts.push(BlockInfo { addr: DeviceAddr::handed_out(*at), bytes, requested, state });
                *at += bytes;
            };
            while let Some(block) = blocks.next_if(|block| block.addr < end) {
                if block.addr > at {
                    let gap = block.addr - at;
                    part(&mut at, gap, 0, BlockState::Free);
                }
                part(&mut at, block.bytes.unwrap_or(block.requested), block.requested, BlockState::Allocated);
            }
            if end > at {
                let gap = end - at;
                part(&mut at, gap, 0, BlockState::Free);
            }
            SegmentInfo {
                addr: DeviceAddr::handed_out(segment.addr),
                bytes: segment.bytes,
                stream: streams[segment.stream as usize],
                pool: Some(segment.pool),
                blocks: parts,
            }
        };
        Some(Snapshot { segments: own().map(segment).collect() })
    }

    /// Changes the numbers of streams.
    pub(super) fn renumber(&mut self, rank: &[u32]) {
        let segments = self.segments.iter_mut().map(|segment| &mut segment.stream);
        let blocks = self.blocks.iter_mut().map(|block| &mut block.stream);
        segments.chain(blocks).for_each(|stream| *stream = rank[*stream as usize]);
    }
}

/// The number of the first free from before the first event; the others count down from it.
const LAST: u32 = BY_DEVICE - 1;

impl HistoryBuilder {
    /// A free of a block that the history did not allocate: one from before its first event, unless an event says
    /// that something else was there.
    pub(super) fn free_unknown(&mut self, event: &Event) -> Result<(), ReplayError> {
        let Event { addr, bytes, .. } = *event;
        if bytes == 0 {
            return Ok(());
        }
        if self.seen.overlaps(addr, addr + bytes) {
            return Err(wrong(self.number, format!("free of {bytes} bytes at {addr:#x}, where no block is live")));
        }
        if self.held.range(..addr + bytes).next_back().is_some_and(|(start, size)| start + size > addr) {
            let mut what =
                format!("free of {bytes} bytes at {addr:#x}, in a segment from which they were never allocated");
            if self.addresses.is_empty() {
                what += "; no alloc event comes before it, so record the history without skip_actions=[\"alloc\"]";
            }
            return Err(wrong(self.number, what));
        }
        self.seen.insert(addr, addr + bytes);
        let stream = self.stream(event.stream)?;
        let (slot, op) = (self.fresh_slot(), self.next_op());
        self.unknown.push(Unknown { addr, bytes, stream, slot, op, number: self.number });
        self.allocated += bytes;
        if self.allocated > 1 << 62 {
            return Err(wrong(self.number, "the history allocates more than 4 EiB in all"));
        }
        self.current -= bytes.cast_signed();
        self.ops.push(Op::new(Kind::Free, stream, slot, Release { ready: BY_DEVICE, user: NO_STREAM }.pack()));
        self.spare_slots.push(slot);
        self.just_freed = Some((addr, op));
        Ok(())
    }

    /// A free that completes and was not requested: it was before the first event, if nothing else was there since. Its
    /// number if it was held up.
    pub(super) fn completion_unknown(&mut self, event: &Event) -> Result<Option<u32>, ReplayError> {
        let Event { addr, bytes, stream, .. } = *event;
        if bytes == 0 || self.seen.overlaps(addr, addr + bytes) || self.inside_a_segment(addr, bytes) {
            return Ok(None);
        }
        let op = self.add_pending(addr, bytes, None, stream)?;
        if self.events == 1 {
            // The history may as well have been cut between a free's request and its completion.
            self.window.before = Some(Completion { op, addr, bytes, size: None, stream, after_release: false });
            return Ok(None);
        }
        self.deferred.push(op);
        Ok(Some(op))
    }

    /// Takes note of a block whose free had been requested before the first event; the number of that free.
    fn add_pending(&mut self, addr: u64, bytes: u64, size: Option<u64>, handle: u64) -> Result<u32, ReplayError> {
        let (stream, slot) = (self.stream(handle)?, self.fresh_slot());
        let op = Op::new(Kind::Free, stream, slot, Release { ready: BY_DEVICE, user: NO_STREAM }.pack());
        self.seen.insert(addr, addr + bytes);
        self.pending.push(Pending { addr, bytes, size, op });
        // CAST: `push` bounds them together with the operations.
        Ok(LAST - (self.pending.len() - 1) as u32)
    }

    /// An operation by its number.
    pub(super) fn op_mut(&mut self, number: u32) -> &mut Op {
        match self.ops.len() > number as usize {
            true => &mut self.ops[number as usize],
            false => &mut self.pending[(LAST - number) as usize].op,
        }
    }

    /// Whether a number is that of a free from before the first event.
    pub(super) fn is_before(&self, number: u32) -> bool {
        number as usize >= self.ops.len()
    }

    /// Tells what was held before the first event, but for the sizes of blocks.
    pub(super) fn look_back(&mut self) -> Result<Beginning, ReplayError> {
        let mut beginning = Beginning::default();
        let device = self.device;
        let ending = self.ending.take().map(|mut ending| {
            ending.retain(|segment| Some(segment.device) == device);
            ending.sort_by_key(|segment| segment.address);
            ending
        });
        let freed = |unknown: &Unknown| StartBlock {
            addr: unknown.addr,
            requested: unknown.bytes,
            bytes: None,
            stream: unknown.stream,
            slot: unknown.slot,
            freed: None,
        };
        beginning.blocks = self.unknown.iter().map(freed).collect();
        for departed in std::mem::take(&mut self.departed) {
            let Departed { addr, bytes, stream } = departed;
            let pool = if bytes == SMALL_SEGMENT { PoolKind::Small } else { PoolKind::Large };
            beginning.segments.push(StartSegment {
                addr,
                bytes,
                stream: self.stream(stream)?,
                pool,
                age: 0,
                private: 0,
            });
        }
        self.pool_names = ending.as_deref().and_then(Named::of);
        let found = match &ending {
            Some(ending) => Ending::of(self, ending),
            None => Err("it does not say what was held at the end"),
        };
        let problem = match found {
            Ok(found) => {
                self.add_ending(&found, &mut beginning)?;
                None
            }
            Err(problem) => Some(problem),
        };
        beginning.blocks.sort_unstable_by_key(|block| block.addr);
        beginning.segments.sort_unstable_by_key(|segment| segment.addr);
        self.unseen = ending.as_deref().and_then(|ending| self.mapped_before(ending));
        let late = !beginning.segments.is_empty() || !beginning.blocks.is_empty();
        beginning.unknown = problem.filter(|_| late).map(str::to_owned);
        Ok(beginning)
    }

    /// Adds what was held at the end and was not made by the history.
    fn add_ending(&mut self, found: &Ending<'_>, beginning: &mut Beginning) -> Result<(), ReplayError> {
        for segment in &found.segments {
            let pool = match segment.segment_type {
                SegmentType::Small => PoolKind::Small,
                SegmentType::Large => PoolKind::Large,
            };
            let stream = self.stream(segment.stream)?;
            let (addr, bytes) = (segment.address, segment.total_size);
            let private = self.pool_names.as_deref().map_or(0, |names| pools::number_at(names, addr));
            beginning.segments.push(StartSegment { addr, bytes, stream, pool, age: 0, private });
        }
        for &(addr, requested, bytes, handle) in &found.blocks {
            let (stream, slot) = (self.stream(handle)?, self.fresh_slot());
            let bytes = Some(bytes);
            beginning.blocks.push(StartBlock { addr, requested, bytes, stream, slot, freed: None });
        }
        for &(addr, requested, bytes, handle) in &found.pending {
            let free = self.add_pending(addr, requested, Some(bytes), handle)?;
            self.deferred.push(free);
        }
        let waiting: HashMap<u32, u64> = found.waiting.iter().copied().collect();
        for (block, unknown) in beginning.blocks.iter_mut().zip(&self.unknown) {
            block.bytes = waiting.get(&unknown.op).copied();
        }
        Ok(())
    }

    /// Adds the blocks whose free was pending, and tells the sizes of blocks. After [`defer`](Self::defer).
    ///
    /// # Errors
    /// [`ReplayError::TooLarge`] when the budget is used up.
    pub(super) fn complete_beginning(
        &mut self,
        beginning: &mut Beginning,
        settings: &CachingSettings,
    ) -> Result<(), ReplayError> {
        // In the order in which they complete, so that few streams hold them up.
        let mut pending: Vec<Pending> = std::mem::take(&mut self.pending);
        let segments = &beginning.segments;
        let inside = |addr: u64| {
            let before = segments.partition_point(|segment| segment.addr <= addr);
            before.checked_sub(1).is_some_and(|at| addr - segments[at].addr < segments[at].bytes)
        };
        pending.retain(|pending| pending.op.kind() == Kind::Release && inside(pending.addr));
        pending.sort_by_key(|pending| Release::unpack(pending.op.value).ready);
        for (number, Pending { addr, bytes, size, op }) in pending.into_iter().enumerate() {
            let (stream, slot) = (op.stream(), op.slot);
            let freed = Some(number);
            beginning.blocks.push(StartBlock { addr, requested: bytes, bytes: size, stream, slot, freed });
            beginning.frees.push(op);
        }
        beginning.blocks.sort_unstable_by_key(|block| block.addr);
        if beginning.unknown.is_none() && !beginning.segments.is_empty() {
            self.make_room_to_follow(beginning)?;
            beginning.unknown = layout::tell_sizes(self, beginning, settings).err();
            ages::tell_ages(self, beginning, settings);
        }
        if beginning.unknown.is_some() {
            beginning.segments.clear();
            beginning.blocks.retain(|block| block.freed.is_none());
            beginning.frees.clear();
        }
        Ok(())
    }
}

/// What was held after the last event and had been before the first.
#[derive(Debug, Default)]
struct Ending<'a> {
    segments: Vec<&'a Segment>,
    /// Address, bytes asked for, size, and handle of the stream.
    blocks: Vec<(u64, u64, u64, u64)>,
    /// Those whose free was pending all the time.
    pending: Vec<(u64, u64, u64, u64)>,
    /// Operation that requested the free of a block that is pending, and the block's size.
    waiting: Vec<(u32, u64)>,
}

const CONTRADICTION: &str = "what it says was held at the end does not follow from its events";

impl<'a> Ending<'a> {
    /// Takes from what was held at the end what the history made.
    fn of(history: &HistoryBuilder, ending: &'a [Segment]) -> Result<Self, &'static str> {
        let mut found = Self::default();
        let (mut made, mut allocated, mut last, mut total) = (0, 0, 0, 0u64);
        for segment in ending {
            let Segment { address: start, total_size: bytes, .. } = *segment;
            let end = start.checked_add(bytes).filter(|end| *end <= 1 << 63).ok_or(CONTRADICTION)?;
            total = total.saturating_add(bytes);
            if start == 0 || bytes == 0 || start < last || total > 1 << 62 || !start.is_multiple_of(GUARANTEED_ALIGN) {
                return Err(CONTRADICTION);
            }
            last = end;
            if segment.is_expandable {
                // Its parts come and go one by one; only the blocks matter.
            } else if history.held.get(&start) == Some(&bytes) {
                made += 1;
            } else if history.made.overlaps(start, end) || history.left.overlaps(start, end) {
                return Err(CONTRADICTION);
            } else {
                found.segments.push(segment);
            }
            let mut at = start;
            for block in &segment.blocks {
                let stop = block.address.checked_add(block.size).filter(|stop| *stop <= end).ok_or(CONTRADICTION)?;
                // A block that is free again may have been cut since its last owner asked for it.
                let too_small = block.state != BlockState::Free && block.requested_size > block.size;
                if block.address < at || too_small {
                    return Err(CONTRADICTION);
                }
                at = stop;
                let requested = if block.requested_size == 0 { block.size } else { block.requested_size };
                let (addr, stream) = (block.address, segment.stream);
                let unseen = requested > 0 && !history.seen.overlaps(addr, addr + requested);
                match block.state {
                    BlockState::Free => {}
                    BlockState::Allocated if history.live.contains_key(&addr) => allocated += 1,
                    BlockState::Allocated if unseen => found.blocks.push((addr, requested, block.size, stream)),
                    BlockState::PendingFree => match history.waiting.get(&addr) {
                        Some(&free) => found.waiting.push((free, block.size)),
                        None if unseen => found.pending.push((addr, requested, block.size, stream)),
                        None => return Err(CONTRADICTION),
                    },
                    BlockState::Allocated => return Err(CONTRADICTION),
                }
            }
        }
        if !history.expandable && made != history.held.len() || allocated != history.live.len() {
            return Err(CONTRADICTION);
        }
        Ok(found)
    }
}
