//! Second stage: the memory before recording started, if the recording began late or its ring buffer lost the beginning.
//!
//! It follows backwards from the segments after the last event. Segments that the recording releases and did not allocate existed
//! before, and so did segments at the end that it did not allocate.

use super::pools::PoolNames;
use super::timeline::Pending;
use super::transcript::{Transcript, wrong};
use super::{ages, sizes};
use crate::formats::{Origin, Segment, SegmentPool};
use crate::history::{Beginning, Kind, ReplayError, StartBlock, StartSegment};
use crate::memory::InitialBlock;
use std::collections::HashMap;
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::contract::{BlockState, GUARANTEED_ALIGN};

/// The memory before recording started, without sizes of blocks and ages of segments.
#[derive(Debug)]
pub(super) struct LookBack {
    pub(super) beginning: Beginning,
    /// The known private pools.
    pub(super) names: Option<PoolNames>,
    /// Error for ranges of expandable segments that were mapped before recording started.
    pub(super) unseen: Option<String>,
    /// Operations of frees whose blocks are pending at the end, in order.
    pub(super) pending_at_end: Vec<u32>,
}

impl LookBack {
    /// `ending` has the segments after the last event, if known, and `pools` the pools of segment events, if all have one. Adds blocks with pending frees from before recording started to
    /// the transcript's timeline.
    pub(super) fn of(
        transcript: &mut Transcript,
        ending: Option<Vec<Segment>>,
        pools: Option<Vec<SegmentPool>>,
    ) -> Result<Self, ReplayError> {
        let mut beginning = Beginning::default();
        let device = transcript.device;
        let ending = ending.map(|mut ending| {
            ending.retain(|segment| Some(segment.device) == device);
            ending.sort_by_key(|segment| segment.address);
            ending
        });
        let names = PoolNames::of(ending.as_deref(), pools);
        beginning.blocks.extend(transcript.unknown.iter().map(|unknown| unknown.block));
        for released in std::mem::take(&mut transcript.segments.departed) {
            let stream =
                transcript.slots.stream(released.stream).map_err(|problem| wrong(transcript.number, problem))?;
            let (addr, bytes, pool) = (released.addr, released.bytes, released.pool());
            let private = names.as_ref().map_or(0, |names| names.number_of_event(&released));
            beginning.segments.push(StartSegment { addr, bytes, stream, pool, age: 0, private });
        }
        let state = match &ending {
            Some(ending) => Ending::of(transcript, ending),
            None => Err("it lacks the segments at its end"),
        };
        let mut pending_at_end = Vec::new();
        let problem = match state {
            Ok(state) => {
                pending_at_end.extend(state.waiting.iter().map(|(free, _)| *free));
                pending_at_end.sort_unstable();
                let added = add_ending(transcript, &state, names.as_ref(), &mut beginning);
                added.map_err(|problem| wrong(transcript.number, problem))?;
                None
            }
            Err(problem) => Some(problem),
        };
        beginning.blocks.sort_unstable_by_key(|block| block.addr);
        beginning.segments.sort_unstable_by_key(|segment| segment.addr);
        let unseen = ending.as_deref().and_then(|ending| transcript.segments.mapped_before(ending));
        beginning.unknown = problem.filter(|_| !beginning.is_empty()).map(str::to_owned);
        Ok(Self { beginning, names, unseen, pending_at_end })
    }
}

/// Adds segments and blocks at the end that the recording did not allocate.
fn add_ending(
    transcript: &mut Transcript,
    state: &Ending<'_>,
    names: Option<&PoolNames>,
    beginning: &mut Beginning,
) -> Result<(), String> {
    for segment in &state.segments {
        let stream = transcript.slots.stream(segment.stream)?;
        let (addr, bytes, pool) = (segment.address, segment.total_size, segment.segment_type);
        let private = names.map_or(0, |names| names.number_at(addr));
        beginning.segments.push(StartSegment { addr, bytes, stream, pool, age: 0, private });
    }
    for &InitialBlock { addr, requested, bytes, stream, .. } in state.blocks.iter().filter(|block| !block.pending) {
        let (stream, slot) = (transcript.slots.stream(stream)?, transcript.timeline.fresh_slot());
        beginning.blocks.push(StartBlock { addr, requested, bytes, stream, slot, freed: None });
    }
    for block in state.blocks.iter().filter(|block| block.pending) {
        let free = transcript.add_pending(block.addr, block.requested, block.bytes, block.stream)?;
        transcript.frees.deferred.push(free);
    }
    let waiting: HashMap<u32, u64> = state.waiting.iter().copied().collect();
    for (block, unknown) in beginning.blocks.iter_mut().zip(&transcript.unknown) {
        block.bytes = waiting.get(&unknown.op).copied();
    }
    Ok(())
}

/// Adds the blocks with pending frees, and finds the sizes of blocks and the ages of segments. Deferred frees have their streams
/// by then.
///
/// # Errors
/// [`ReplayError::TooLarge`] when the budget is used up.
pub(super) fn complete(
    transcript: &mut Transcript,
    beginning: &mut Beginning,
    names: Option<&PoolNames>,
    settings: &CachingSettings,
) -> Result<(), ReplayError> {
    // In the order of their completion, which keeps the number of streams low.
    let mut pending: Vec<Pending> = std::mem::take(&mut transcript.timeline.pending);
    pending.retain(|pending| pending.op.kind() == Kind::Release && beginning.has_segment_at(pending.addr));
    pending.sort_by_key(|pending| pending.op.release().ready);
    for (number, Pending { addr, bytes, size, op }) in pending.into_iter().enumerate() {
        let (stream, slot) = (op.stream(), op.slot);
        let freed = Some(number);
        beginning.blocks.push(StartBlock { addr, requested: bytes, bytes: size, stream, slot, freed });
        beginning.frees.push(op);
    }
    beginning.blocks.sort_unstable_by_key(|block| block.addr);
    if beginning.unknown.is_none() && !beginning.segments.is_empty() {
        transcript.make_room_to_follow(beginning)?;
        beginning.unknown = sizes::find(&transcript.timeline, beginning, names, settings).err();
        ages::find(&transcript.timeline, beginning, settings);
    }
    if beginning.unknown.is_some() {
        beginning.segments.clear();
        beginning.blocks.retain(|block| block.freed.is_none());
        beginning.frees.clear();
    }
    Ok(())
}

/// Memory after the last event that also existed before recording started.
#[derive(Debug, Default)]
struct Ending<'a> {
    segments: Vec<&'a Segment>,
    /// Pending blocks were pending all the time.
    blocks: Vec<InitialBlock>,
    /// Operation that requested the free of a pending block, and the block's size.
    waiting: Vec<(u32, u64)>,
}

const CONTRADICTION: &str = "the segments at its end contradict its events";

impl<'a> Ending<'a> {
    /// Subtracts the recording's allocations from the segments at the end.
    fn of(history: &Transcript, ending: &'a [Segment]) -> Result<Self, &'static str> {
        let mut state = Self::default();
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
                // Its mapped ranges change one by one; only the blocks matter.
            } else if history.segments.holds(start, bytes) {
                made += 1;
            } else if history.segments.knows(start, end) {
                return Err(CONTRADICTION);
            } else {
                state.segments.push(segment);
            }
            let mut at = start;
            for block in &segment.blocks {
                let stop = block.address.checked_add(block.size).filter(|stop| *stop <= end).ok_or(CONTRADICTION)?;
                // A block that is free again may have been split since its last request.
                let too_small = block.state != BlockState::Free && block.requested_size > block.size;
                if block.address < at || too_small {
                    return Err(CONTRADICTION);
                }
                at = stop;
                let initial = InitialBlock::at_end(block, segment.stream, Origin::default());
                let InitialBlock { addr, requested, .. } = initial;
                let unseen = requested > 0 && !history.slots.was_used(addr, requested);
                match block.state {
                    BlockState::Free => {}
                    BlockState::Allocated if history.slots.at(addr).is_some() => allocated += 1,
                    BlockState::Allocated if unseen => state.blocks.push(initial),
                    BlockState::PendingFree => match history.frees.waiting_at(addr) {
                        Some(free) => state.waiting.push((free, block.size)),
                        None if unseen => state.blocks.push(initial),
                        None => return Err(CONTRADICTION),
                    },
                    BlockState::Allocated => return Err(CONTRADICTION),
                }
            }
        }
        if !history.segments.expandable && made != history.segments.count() || allocated != history.slots.live() {
            return Err(CONTRADICTION);
        }
        Ok(state)
    }
}
