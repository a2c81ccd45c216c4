//! Compiles a recording: from events that name addresses and handles to a [`History`] of operations with numbers.
//!
//! The stages, in order. Each is one type or function, with one input and one output:
//!
//! | stage | file | in | out |
//! |---|---|---|---|
//! | 1 | `transcript`, with `slots`, `frees`, `segments`, `windows` | events, one at a time | operations, and windows of the allocator's events between them |
//! | 2 | `beginning` | the transcript, and the segments at the end | the memory before recording started |
//! | 3 | `memory` | the windows, the recorded memory | sizes of blocks with deferred frees |
//! | 4 | `causes` | the windows and the settings | why segments were released, and when frees completed |
//! | 5 | `streams` | deferred frees | the stream that delayed each |
//! | 6 | `sizes`, `ages` | the initial memory, and the placements | sizes of its blocks, ages of its segments |
//! | 7 | `pools` | the placements, and the known names of pools | the private pool of each allocation |
//! | 8 | `out_of_memory` | failed requests, the recorded memory | the memory state at each |
//!
//! [`HistoryBuilder::push`] is the first stage and [`HistoryBuilder::finish`] runs the others. The operations are in a
//! `timeline`, along which stages 3, 6, 7 and 8 follow the recorded placements. The first stage checks every event; the later
//! ones rely on it.

mod ages;
mod beginning;
mod causes;
mod memory;
mod out_of_memory;
mod pools;
mod room;
mod segments;
mod sizes;
mod slots;
mod streams;
mod timeline;
mod transcript;
mod windows;

use self::beginning::LookBack;
use self::transcript::Transcript;
use crate::formats::{Event, Segment, SegmentBlock, SegmentPool, Summary};
use crate::history::{Beginning, History, Kind, Op, ReplayError, SegmentEvent, StartBlock, StartSegment};
use std::sync::Arc;
use vramlab_device::budget::{Budget, OverBudget};
use vramlab_policies::backends::CachingSettings;

/// Takes events one at a time. Memory is proportional to live blocks, plus 16 to 40 bytes for each event, all claimed from a
/// [budget](Self::within).
#[derive(Debug)]
pub struct HistoryBuilder {
    transcript: Transcript,
    /// Segments after the last event, if known.
    ending: Option<Vec<Segment>>,
    /// Pools of the events of segments.
    segment_pools: Vec<SegmentPool>,
    /// Whether the recording begins with its program.
    complete: bool,
    /// Whether events are missing after the last one.
    breaks_off: bool,
}

impl HistoryBuilder {
    /// A compiler for the events of one device (`None`: the recording must have only one).
    #[must_use]
    pub fn new(device: Option<u16>) -> Self {
        let transcript = Transcript::new(device, &Budget::default());
        Self { transcript, ending: None, segment_pools: Vec::new(), complete: false, breaks_off: false }
    }

    /// Draws on this budget, which may be the reader's. The [`History`] keeps its claim until it is dropped. Without it the
    /// compilation has a separate budget, [`Budget::default`].
    #[must_use]
    pub fn within(mut self, budget: &Budget) -> Self {
        self.transcript.budget = budget.clone();
        self.transcript.claim = budget.claim();
        self.transcript.maps = budget.claim();
        self
    }

    /// Declares that events are missing after the last one, possibly the completion of a free: the file was truncated.
    pub fn breaks_off(&mut self) {
        self.breaks_off = true;
    }

    /// Lets [`finish`](Self::finish) refuse frees of blocks that the recording did not allocate: for logs that begin with their
    /// program. Otherwise such blocks were live before recording started.
    pub fn expect_complete(&mut self) {
        self.complete = true;
    }

    /// Sets the segments after the last event ([`Summary::segments`](crate::formats::Summary::segments); other devices are
    /// ignored). From these [`finish`](Self::finish) infers the memory before recording started, for recordings that began late
    /// or lost their beginning.
    ///
    /// # Errors
    /// [`ReplayError::TooLarge`] when the [budget](Self::within) is used up.
    pub fn ends_with(&mut self, segments: &[Segment]) -> Result<(), ReplayError> {
        let Transcript { device, claim, .. } = &mut self.transcript;
        let segments_of_device =
            || segments.iter().filter(|segment| device.is_none_or(|device| device == segment.device));
        let size = |segment: &Segment| size_of::<Segment>() + segment.blocks.len() * size_of::<SegmentBlock>();
        claim.add(segments_of_device().map(size).sum())?;
        self.ending = Some(segments_of_device().cloned().collect());
        Ok(())
    }

    /// Sets the pools of the events of segments ([`Summary::segment_pools`]; other devices are ignored). If every event of a
    /// segment has one, [`finish`](Self::finish) need not infer the private pools.
    ///
    /// # Errors
    /// [`ReplayError::TooLarge`] when the [budget](Self::within) is used up.
    pub fn names_pools(&mut self, pools: &[SegmentPool]) -> Result<(), ReplayError> {
        let Transcript { device, claim, .. } = &mut self.transcript;
        let pools = pools.iter().filter(|named| device.is_none_or(|device| device == named.device));
        // Some are copied again when the recording ends.
        claim.add(2 * pools.clone().count() * size_of::<SegmentPool>())?;
        self.segment_pools = pools.copied().collect();
        Ok(())
    }

    /// A copy with the same events, which [`finish`](Self::finish) can compile under other settings without a second pass over
    /// the events. O(n).
    ///
    /// # Errors
    /// [`OverBudget`] when the [budget](Self::within) has no room for the copy.
    pub fn copy(&self) -> Result<Self, OverBudget> {
        let Self { transcript, ending, segment_pools, complete, breaks_off } = self;
        let (ending, segment_pools) = (ending.clone(), segment_pools.clone());
        Ok(Self { transcript: transcript.copy()?, ending, segment_pools, complete: *complete, breaks_off: *breaks_off })
    }

    /// Takes the next event. O(log n) in the blocks that are live.
    ///
    /// # Errors
    /// [`ReplayError::Event`] for an event that contradicts earlier ones (blocks that overlap, a block freed twice or
    /// with another size), for a block or segment above [`MAX_BYTES`](crate::history::MAX_BYTES), and for more than
    /// [`MAX_STREAMS`](crate::history::MAX_STREAMS) streams. [`ReplayError::TooLarge`] when the [budget](Self::within)
    /// is used up.
    pub fn push(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.transcript.push(event)
    }

    /// Ends the recording. `settings` are the recorded ones: the limit distinguishes a retry from a call of `empty_cache`. O(n
    /// log n).
    ///
    /// # Errors
    /// [`ReplayError::Event`] for a free of a block that was never allocated, if that was [not expected](Self::expect_complete),
    /// and [`ReplayError::History`] when deferred frees need more than
    /// [`MAX_STREAMS`](crate::history::MAX_STREAMS) further streams. [`ReplayError::TooLarge`] when the
    /// [budget](Self::within) is used up.
    pub fn finish(self, settings: &CachingSettings) -> Result<History, ReplayError> {
        let Self { mut transcript, ending, segment_pools, complete, breaks_off } = self;
        transcript.end(breaks_off)?;
        transcript.make_room_to_finish(ending.as_deref())?;
        if complete {
            transcript.check_complete()?;
        }
        let pools = pools::named_by_events(segment_pools, &transcript.timeline.segments);
        // Stage 2: the memory before recording started.
        let LookBack { mut beginning, names, unseen, pending_at_end } = LookBack::of(&mut transcript, ending, pools)?;
        let names = names.as_ref();
        // Stages 3 and 4: why segments were released, and when frees completed.
        memory::find_held_up_sizes(&mut transcript, &beginning, settings)?;
        let before = beginning.reserved();
        let refused_from = transcript.refusals.refused_from(settings, before, transcript.segments.most_reserved);
        let windows = std::mem::take(&mut transcript.windows.closed);
        let Transcript { timeline, frees, slots, .. } = &mut transcript;
        // Without a single completion the log may lack those events. Then frees are pending only where the end shows it.
        if !frees.completes {
            let is_pending = |free: &u32| timeline.is_before(*free) || pending_at_end.binary_search(free).is_ok();
            frees.deferred.retain(is_pending);
        }
        // Only another stream delays a free.
        let delays = slots.streams().len() > 1 || !frees.deferred.is_empty();
        let device = causes::RecordedDevice { reserved: before, refused_from, delays };
        let retries = causes::decide(windows, settings, device, timeline, &mut frees.deferred);
        // Stage 5: streams of deferred frees.
        let streams = streams::sort(&slots.streams(), timeline, &mut beginning);
        // A log in which every free completes immediately does not show when those with announced uses completed.
        let tells = !frees.deferred.is_empty();
        let further_streams = if tells {
            streams::hold_up(&mut frees.deferred, streams.len(), timeline)?
        } else {
            timeline.leave_frees_to_device();
            0
        };
        let deferred = frees.deferred.iter().filter(|number| tells && !timeline.is_before(**number)).count() as u64;
        // Stage 6: sizes and ages of the initial memory.
        beginning::complete(&mut transcript, &mut beginning, names, settings)?;
        // Stage 7: private pools.
        let pools = pools::find(&mut transcript, names, &beginning, &streams, settings)?;
        causes::empty_before_private_pools(&retries, &mut transcript.timeline);
        // Stage 8: failed requests.
        let out_of_memory = out_of_memory::describe(&transcript, &beginning, &streams, names, settings)?;
        let not_comparable = unseen.or_else(|| not_comparable(&transcript, &beginning));
        let Transcript { timeline, refusals, requested, mut claim, number, .. } = transcript;
        // Releases the claims of the stages.
        let lists = timeline.ops.capacity() * size_of::<Op>()
            + timeline.addresses.capacity() * size_of::<u64>()
            + timeline.segments.capacity() * size_of::<SegmentEvent>()
            + beginning.blocks.capacity() * size_of::<StartBlock>()
            + beginning.segments.capacity() * size_of::<StartSegment>();
        // CAST: a size in memory.
        claim.sub((claim.bytes() as usize).saturating_sub(lists));
        let client = |op: &&Op| !matches!(op.kind(), Kind::Nothing | Kind::Refused);
        Ok(History {
            operations: timeline.ops.iter().filter(client).count() as u64,
            allocations: (timeline.addresses.len() + beginning.blocks.len()) as u64,
            max_live: (requested.most_live + beginning.requested().cast_signed()).cast_unsigned(),
            beginning,
            ops: timeline.ops,
            addresses: timeline.addresses,
            segments: timeline.segments,
            slots: timeline.slots,
            streams,
            further_streams,
            events: number,
            refused: refusals.count,
            impossible: refusals.impossible,
            out_of_memory,
            deferred,
            pools,
            not_comparable,
            _claim: Arc::new(claim),
        })
    }
}

/// Why the recorded addresses cannot be compared with those of a replay.
fn not_comparable(transcript: &Transcript, beginning: &Beginning) -> Option<String> {
    let why = beginning.unknown.as_ref().map_or(String::new(), |why| format!(", and {why}"));
    if why.is_empty() && transcript.timeline.segments.is_empty() && beginning.segments.is_empty() {
        return Some("the recording has no segments whose addresses could be used".into());
    }
    // Blocks outside the recorded segments are in those from before.
    if why.is_empty() && !beginning.segments.is_empty() {
        return None;
    }
    if let Some(unknown) = transcript.unknown.first() {
        let number = unknown.number;
        return Some(format!(
            "the recording is incomplete: event {number} frees a block from before recording started{why}"
        ));
    }
    transcript.outside.map(|number| {
        format!("the recording is incomplete: event {number} is outside every segment that it shows{why}")
    })
}

/// Checks each event of one device against earlier ones, and refuses with the same errors as a [compilation](HistoryBuilder).
/// Memory is proportional to live blocks.
#[derive(Debug)]
pub struct Soundness(Transcript);

impl Soundness {
    /// Without events. Claims its memory from the budget.
    #[must_use]
    pub fn new(device: u16, budget: &Budget) -> Self {
        Self(Transcript::new(Some(device), budget))
    }

    /// Takes the next event. O(log n) in the blocks that are live.
    ///
    /// # Errors
    /// Those of [`HistoryBuilder::push`](HistoryBuilder::push).
    pub fn push(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.0.push(event)?;
        // Later stages are not run, so their lists are dropped. Nothing refers to the dropped operations: completions of frees
        // are dropped with their windows.
        let Transcript { timeline, frees, segments, windows, unknown, .. } = &mut self.0;
        timeline.ops.clear();
        timeline.addresses.clear();
        timeline.segments.clear();
        timeline.pending.clear();
        frees.deferred.clear();
        frees.held_up.clear();
        frees.completed.clear();
        segments.departed.clear();
        unknown.truncate(1);
        windows.clear();
        Ok(self.0.give_room_back()?)
    }

    /// Ends the recording with the rest of its file.
    ///
    /// # Errors
    /// [`ReplayError::Event`] where a log that begins with its program names an unknown block or segment.
    pub fn finish(&self, summary: &Summary) -> Result<(), ReplayError> {
        if summary.begins_with_program() { self.0.check_complete() } else { Ok(()) }
    }
}
