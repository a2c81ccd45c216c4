//! What the page shows of a history: lifetimes of blocks and segments, counted in events.

use super::data::Columns;
use crate::explain::lines::{Numbered, clipped, line_of, words};
use crate::recording::{Range, Recording, ranges};
use serde::Serialize;
use vramlab::Bytes;
use vramlab::contract::BlockState;
use vramlab::histories::formats::{Action, Frame, Origin, Origins, Segment, StackId, TextId};
use vramlab::histories::memory::{BlockLifetime, Lifetimes, SegmentLifetime};

/// Something that happened at an event, or between two.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Mark {
    pub(super) kind: &'static str,
    pub(super) text: String,
    pub(super) start: u32,
    pub(super) end: Option<u32>,
}

/// A history as the page shows it.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    /// Time of each event.
    pub(super) times_ns: Vec<u64>,
    /// Those from before the first event in address order, then the others in the order of their allocation.
    pub(super) blocks: Vec<BlockLifetime>,
    pub(super) segments: Vec<SegmentLifetime>,
    /// Handles of streams.
    pub(super) streams: Numbered<u64>,
    pub(super) marks: Vec<Mark>,
}

impl Timeline {
    /// That of a history. What blocks come from is entered into `known`.
    pub(super) fn of(recording: &Recording, known: &mut Known) -> Self {
        let mut out = Self::default();
        for (index, event) in recording.events.iter().enumerate() {
            out.times_ns.push(event.time_ns);
            out.streams.enter(event.stream);
            known.enter(event.origin);
            if event.action == Action::Oom {
                let text = format!("out of memory: a request of {} was refused", Bytes(event.bytes));
                // CAST: a recording has fewer than 2^32 events.
                out.marks.push(Mark { kind: "oom", text, start: index as u32, end: None });
            }
        }
        // What was held is drawn as one event.
        if out.times_ns.is_empty() {
            out.times_ns.push(0);
        }
        let of_gpu = recording.summary.segments.iter().filter(|segment| segment.device == recording.device);
        let ending: Vec<Segment> = of_gpu.cloned().collect();
        let before = &recording.before;
        for segment in &ending {
            out.streams.enter(segment.stream);
            for block in segment.blocks.iter().filter(|block| block.state != BlockState::Free) {
                let found = before.blocks.binary_search_by_key(&block.address, |block| block.addr);
                known.enter(found.map(|number| before.blocks[number].origin).unwrap_or_default());
            }
        }
        let Lifetimes { blocks, segments } = Lifetimes::of(&recording.events, before, &ending);
        (out.blocks, out.segments) = (blocks, segments);
        let annotations = annotations(recording, &out);
        out.marks.extend(annotations);
        out
    }

    /// Number of events.
    pub(super) fn events(&self) -> usize {
        self.times_ns.len()
    }

    /// Number of blocks from before the first event.
    pub(super) fn before(&self) -> usize {
        self.blocks.partition_point(|block| block.before)
    }
}

// Where in the program blocks come from: stacks of frames, each kept once.

/// Numbers of stacks and of categories; the empty ones have 0.
#[derive(Debug, Default)]
pub(super) struct Known {
    stacks: Numbered<StackId>,
    categories: Numbered<TextId>,
}

impl Known {
    pub(super) fn enter(&mut self, origin: Origin) {
        if !origin.stack.is_empty() {
            self.stacks.enter(origin.stack);
        }
        if !origin.category.is_empty() {
            self.categories.enter(origin.category);
        }
    }

    pub(super) fn stack(&self, origin: Origin) -> u64 {
        self.stacks.number(origin.stack)
    }

    pub(super) fn category(&self, origin: Origin) -> u64 {
        self.categories.number(origin.category)
    }
}

/// Stacks by number, from 1; 0 is that nothing is known.
#[derive(Debug, Default, Serialize)]
pub(super) struct Stacks {
    /// Lines of the user's code in words.
    lines: Vec<String>,
    /// Frames in words.
    frames: Vec<String>,
    /// PyTorch's categories of memory, from 1.
    categories: Vec<String>,
    /// The line that a stack is known by, from 1 (0: none), and its frames, the innermost first.
    #[serde(skip)]
    stacks: Vec<(u32, Vec<u32>)>,
}

impl Stacks {
    /// What is known, in words.
    pub(super) fn of(origins: &Origins, known: &Known) -> Self {
        let (mut lines, mut frames): (Numbered<String>, Numbered<Frame>) = Default::default();
        let mut stacks = Vec::new();
        for stack in &known.stacks.list {
            let line = line_of(origins, *stack).map_or(0, |line| lines.enter(line));
            stacks.push((line, origins.frames(*stack).map(|frame| frames.enter(frame) - 1).collect()));
        }
        Self {
            lines: lines.list,
            frames: frames.list.into_iter().map(|frame| words(origins, frame)).collect(),
            categories: known
                .categories
                .list
                .iter()
                .map(|category| clipped(origins.spelt(*category)).into_owned())
                .collect(),
            stacks,
        }
    }

    /// The columns that `data.js` reads, where there are stacks.
    pub(super) fn columns(&self) -> Option<Columns> {
        if self.stacks.is_empty() {
            return None;
        }
        let mut columns = Columns::default();
        columns.push(self.stacks.iter().map(|(line, _)| u64::from(*line)));
        columns.push(self.stacks.iter().map(|(_, frames)| frames.len() as u64));
        let frames: Vec<u32> = self.stacks.iter().flat_map(|(_, frames)| frames.iter().copied()).collect();
        columns.push(frames.into_iter().map(u64::from));
        Some(columns)
    }
}

/// Ranges that the program named, in the order of their beginnings. One that does not end lasts to the end.
pub(super) fn annotations(recording: &Recording, timeline: &Timeline) -> Vec<Mark> {
    // CAST: a history that can be replayed has fewer than 2^32 events.
    let event = |time_ns: u64| timeline.times_ns.partition_point(|time| *time < time_ns) as u32;
    let mark = |Range { start_ns, end_ns, name }| Mark {
        kind: "annotation",
        text: clipped(recording.origins.spelt(name)).into_owned(),
        start: event(start_ns),
        end: Some(event(end_ns.unwrap_or(u64::MAX))),
    };
    let mut out: Vec<Mark> = ranges(&recording.origins, Some(recording.device)).into_iter().map(mark).collect();
    out.sort_by_key(|mark| mark.start);
    out
}
