//! Compiles a recorded history: from events that name addresses and handles to a [`History`] of operations with numbers.
//!
//! The stages, in order. Each is a type or a function of its own, with one input and one output:
//!
//! | stage | file | in | out |
//! |---|---|---|---|
//! | 1 | `transcript`, with `slots`, `frees`, `segments`, `windows` | events, one at a time | operations, and windows of what the allocator did between them |
//! | 2 | `beginning` | the transcript, and what was held at the end | what was held before the first event |
//! | 3 | `memory` | the windows, the recorded memory | how large the blocks were whose frees were held up |
//! | 4 | `causes` | the windows and the settings | why segments went back, and when frees completed |
//! | 5 | `streams` | frees that did not complete at once | the stream that held up each |
//! | 6 | `sizes`, `ages` | what was held before, and the placements | sizes of its blocks, ages of its segments |
//! | 7 | `pools` | the placements, and the pools that the end names | the private pool of each allocation |
//! | 8 | `out_of_memory` | refused requests, the recorded memory | what was held at each |
//!
//! [`HistoryBuilder::push`] is the first stage and [`HistoryBuilder::finish`] the others. The operations are in a `timeline`, along
//! which stages 3, 6, 7 and 8 follow the recorded placements. What an event names is checked in the first stage. The later ones
//! work on a sound history.

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
use crate::formats::{Event, Segment, SegmentBlock, Summary};
use crate::history::{Beginning, History, Kind, Op, ReplayError, SegmentEvent, StartBlock, StartSegment};
use std::sync::Arc;
use vramlab_device::budget::Budget;
use vramlab_policies::backends::CachingSettings;

/// Takes events one at a time. Memory is what the history makes live at once and 16 to 40 bytes for each
/// event, all of it claimed from a [budget](Self::within).
#[derive(Debug)]
pub struct HistoryBuilder {
    transcript: Transcript,
    /// What was held after the last event, if that was said.
    ending: Option<Vec<Segment>>,
    /// Whether the history begins with its program.
    complete: bool,
    /// Whether events are missing after the last one.
    breaks_off: bool,
}

impl HistoryBuilder {
    /// A compiler for the events of one device (`None`: there must be only one).
    #[must_use]
    pub fn new(device: Option<u16>) -> Self {
        let transcript = Transcript::new(device, &Budget::default());
        Self { transcript, ending: None, complete: false, breaks_off: false }
    }

    /// Lets the compilation draw on this budget, which may be the one of the reader. What the [`History`]
    /// holds stays claimed until it is dropped. Without it the compilation has a budget of its own, [`Budget::default`].
    #[must_use]
    pub fn within(mut self, budget: &Budget) -> Self {
        self.transcript.budget = budget.clone();
        self.transcript.claim = budget.claim();
        self.transcript.maps = budget.claim();
        self
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

    /// Says what was held after the last event ([`Summary::segments`](crate::formats::Summary::segments); those of other
    /// devices are passed over). From that [`finish`](Self::finish) infers what was held before the first one, for a
    /// history whose recording began late or lost its beginning.
    ///
    /// # Errors
    /// [`ReplayError::TooLarge`] when the [budget](Self::within) is used up.
    pub fn ends_with(&mut self, segments: &[Segment]) -> Result<(), ReplayError> {
        let Transcript { device, claim, .. } = &mut self.transcript;
        let own = || segments.iter().filter(|segment| device.is_none_or(|device| device == segment.device));
        let size = |segment: &Segment| size_of::<Segment>() + segment.blocks.len() * size_of::<SegmentBlock>();
        claim.add(own().map(size).sum())?;
        self.ending = Some(own().cloned().collect());
        Ok(())
    }

    /// Takes the next event. O(log n) in the blocks that are live.
    ///
    /// # Errors
    /// [`ReplayError::Event`] for an event that contradicts earlier ones (blocks that overlap, a block freed twice or
    /// with another size), for a size above [`MAX_BYTES`](crate::history::MAX_BYTES), and for more than
    /// [`MAX_STREAMS`](crate::history::MAX_STREAMS) streams. [`ReplayError::TooLarge`] when the [budget](Self::within)
    /// is used up.
    pub fn push(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.transcript.push(event)
    }

    /// Ends the history. `settings` are those under which it was recorded: the limit tells a retry from a call of
    /// `empty_cache`. O(n log n).
    ///
    /// # Errors
    /// [`ReplayError::Event`] for a free of what was never allocated if that was [not
    /// expected](Self::expect_complete), and [`ReplayError::History`] when deferred frees need more than
    /// [`MAX_STREAMS`](crate::history::MAX_STREAMS) further streams. [`ReplayError::TooLarge`] when the
    /// [budget](Self::within) is used up.
    pub fn finish(self, settings: &CachingSettings) -> Result<History, ReplayError> {
        let Self { mut transcript, ending, complete, breaks_off } = self;
        transcript.end(breaks_off)?;
        transcript.make_room_to_finish(ending.as_deref())?;
        if complete {
            transcript.check_complete()?;
        }
        // Stage 2: what was held before the first event.
        let LookBack { mut beginning, names, unseen } = LookBack::of(&mut transcript, ending)?;
        let names = names.as_deref();
        // Stages 3 and 4: why segments went back, and when frees completed.
        memory::find_held_up_sizes(&mut transcript, &beginning, settings)?;
        let before = beginning.reserved();
        let refused_from = transcript.refusals.refused_from(settings, before, transcript.segments.most_reserved);
        let windows = std::mem::take(&mut transcript.windows.closed);
        let Transcript { timeline, frees, slots, .. } = &mut transcript;
        let retries = causes::decide(windows, settings, before, refused_from, timeline, &mut frees.deferred);
        // Stage 5: which streams held up frees.
        let streams = streams::sort(&slots.streams(), timeline, &mut beginning);
        // A log in which every free completes at once does not tell when those with announced uses did.
        let tells = frees.completes && !frees.deferred.is_empty();
        let further_streams = if tells {
            streams::hold_up(&mut frees.deferred, streams.len(), timeline)?
        } else {
            timeline.leave_frees_to_device();
            0
        };
        let deferred = frees.deferred.iter().filter(|number| tells && !timeline.is_before(**number)).count() as u64;
        // Stage 6: sizes and ages of what was held before.
        beginning::complete(&mut transcript, &mut beginning, names, settings)?;
        // Stage 7: private pools.
        let pools = pools::find(&mut transcript, names, &beginning, &streams, settings)?;
        causes::empty_before_private_pools(&retries, &mut transcript.timeline);
        // Stage 8: refused requests.
        let out_of_memory = out_of_memory::describe(&transcript, &beginning, &streams, settings)?;
        let not_comparable = unseen.or_else(|| not_comparable(&transcript, &beginning));
        let Transcript { timeline, refusals, requested, mut claim, number, .. } = transcript;
        // What only the stages held goes back.
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
        return Some("the history has no segments whose addresses could be used".into());
    }
    // What lies outside of the segments that the history makes lies in those from before.
    if why.is_empty() && !beginning.segments.is_empty() {
        return None;
    }
    if let Some(unknown) = transcript.unknown.first() {
        let number = unknown.number;
        return Some(format!(
            "the history is incomplete: event {number} frees a block from before its first event{why}"
        ));
    }
    transcript.outside.map(|number| {
        format!("the history is incomplete: event {number} lies in no segment whose allocation it shows{why}")
    })
}

/// Holds each event of one device to those before it, and refuses in the same words what a
/// [compilation](HistoryBuilder) refuses. Memory is what the history makes live at once.
#[derive(Debug)]
pub struct Soundness(Transcript);

impl Soundness {
    /// Before the first event. What it keeps is claimed from the budget.
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
        // What only the later stages read goes at once. Nothing asks for the numbers of operations that are gone: completions of
        // frees go with their windows.
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

    /// Ends the history with what its file says besides events.
    ///
    /// # Errors
    /// [`ReplayError::Event`] where a log that begins with its program names what was never there.
    pub fn finish(&self, summary: &Summary) -> Result<(), ReplayError> {
        if summary.begins_with_program() { self.0.check_complete() } else { Ok(()) }
    }
}
