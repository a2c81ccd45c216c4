//! What the page shows of a history: lifetimes of blocks and segments, counted in events.

use super::stacks::{Known, annotations};
use crate::explain::lines::Numbered;
use crate::recording::Recording;
use serde::Serialize;
use vramlab::Bytes;
use vramlab::contract::BlockState;
use vramlab::histories::formats::{Action, Segment};
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
