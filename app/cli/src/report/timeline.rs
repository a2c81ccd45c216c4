//! Timeline of a recording on the page: lifetimes of blocks and segments in events.

use super::data::Columns;
use crate::explain::lines::{Numbered, clipped, line_of, words};
use crate::recording::{Range, Recording};
use serde::Serialize;
use vramlab::Bytes;
use vramlab::contract::BlockState;
use vramlab::histories::formats::{Action, Frame, Origin, Origins, Segment, StackId, TextId};
use vramlab::histories::memory::{BlockLifetime, Lifetimes, SegmentLifetime};

/// A mark at an event, or over a range of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Mark {
    pub(super) kind: &'static str,
    pub(super) text: String,
    pub(super) start: u32,
    pub(super) end: Option<u32>,
}

/// The timeline of a recording.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    /// Time of each event.
    pub(super) times_ns: Vec<u64>,
    /// Blocks from before recording started in address order, then the others in allocation order.
    pub(super) blocks: Vec<BlockLifetime>,
    pub(super) segments: Vec<SegmentLifetime>,
    /// Stream handles.
    pub(super) streams: Numbered<u64>,
    pub(super) marks: Vec<Mark>,
}

impl Timeline {
    /// From a recording. The blocks' stacks and categories are numbered in `origins`.
    pub(super) fn new(recording: &Recording, origins: &mut OriginNumbers) -> Self {
        let mut out = Self::default();
        for (index, event) in recording.events.iter().enumerate() {
            out.times_ns.push(if recording.is_timed() { event.time_ns } else { 0 });
            out.streams.enter(event.stream);
            origins.enter(event.origin);
            if event.action == Action::Oom {
                let text = format!("out of memory: a request of {} was refused", Bytes(event.bytes));
                // CAST: a recording has fewer than 2^32 events.
                out.marks.push(Mark { kind: "oom", text, start: index as u32, end: None });
            }
        }
        // A snapshot without events is drawn as one event.
        if out.times_ns.is_empty() {
            out.times_ns.push(0);
        }
        let segments = recording.summary.segments.iter().filter(|segment| segment.device == recording.device);
        let ending: Vec<Segment> = segments.cloned().collect();
        let before = &recording.initial;
        for segment in &ending {
            out.streams.enter(segment.stream);
            for block in segment.blocks.iter().filter(|block| block.state != BlockState::Free) {
                let number = before.blocks.binary_search_by_key(&block.address, |block| block.addr);
                origins.enter(number.map(|number| before.blocks[number].origin).unwrap_or_default());
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

    /// Number of blocks from before recording started.
    pub(super) fn before(&self) -> usize {
        self.blocks.partition_point(|block| block.before)
    }
}

/// Numbers of the blocks' stacks and categories; empty ones have 0.
#[derive(Debug, Default)]
pub(super) struct OriginNumbers {
    stacks: Numbered<StackId>,
    categories: Numbered<TextId>,
}

impl OriginNumbers {
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

/// Stacks by number, from 1; 0 stands for an unknown stack.
#[derive(Debug, Default, Serialize)]
pub(super) struct Stacks {
    /// Lines of the user's code.
    lines: Vec<String>,
    /// Frames as text.
    frames: Vec<String>,
    /// PyTorch's memory categories, numbered from 1.
    categories: Vec<String>,
    /// The line number of each stack in `lines`, from 1 (0: none), and its frames, innermost first.
    #[serde(skip)]
    stacks: Vec<(u32, Vec<u32>)>,
}

impl Stacks {
    /// The text of all numbered stacks.
    pub(super) fn new(origins: &Origins, numbers: &OriginNumbers) -> Self {
        let (mut lines, mut frames): (Numbered<String>, Numbered<Frame>) = Default::default();
        let mut stacks = Vec::new();
        for stack in &numbers.stacks.list {
            let line = line_of(origins, *stack).map_or(0, |line| lines.enter(line));
            stacks.push((line, origins.frames(*stack).map(|frame| frames.enter(frame) - 1).collect()));
        }
        Self {
            lines: lines.list,
            frames: frames.list.into_iter().map(|frame| words(origins, frame)).collect(),
            categories: numbers
                .categories
                .list
                .iter()
                .map(|category| clipped(origins.spelt(*category)).into_owned())
                .collect(),
            stacks,
        }
    }

    /// The columns for `data.js`; `None` without stacks.
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

/// The program's annotations, ordered by start. An open one lasts until the end.
pub(super) fn annotations(recording: &Recording, timeline: &Timeline) -> Vec<Mark> {
    // CAST: a replayable recording has fewer than 2^32 events.
    let event = |time_ns: u64| timeline.times_ns.partition_point(|time| *time < time_ns) as u32;
    let mark = |&Range { start_ns, end_ns, name }: &Range| Mark {
        kind: "annotation",
        text: clipped(recording.origins.spelt(name)).into_owned(),
        start: event(start_ns),
        end: Some(event(end_ns.unwrap_or(u64::MAX))),
    };
    let mut out: Vec<Mark> = recording.ranges().iter().map(mark).collect();
    out.sort_by_key(|mark| mark.start);
    out
}
