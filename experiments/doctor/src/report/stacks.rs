//! Where in the program blocks come from: stacks of frames, each kept once.

use super::columns::Columns;
use super::timeline::{Mark, Timeline};
use crate::explain::lines::{line_of, words};
use crate::recording::Recording;
use std::collections::HashMap;
use std::hash::Hash;
use vramlab::histories::formats::{Frame, Origin, Origins, StackId, TextId};

/// What comes up, numbered in that order from 1.
#[derive(Debug)]
struct Numbered<T> {
    numbers: HashMap<T, u32>,
    list: Vec<T>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { numbers: HashMap::new(), list: Vec::new() }
    }
}

impl<T: Copy + Eq + Hash> Numbered<T> {
    fn enter(&mut self, one: T) {
        self.numbers.entry(one).or_insert_with(|| {
            self.list.push(one);
            // CAST: stacks and texts have numbers of 32 bits.
            self.list.len() as u32
        });
    }

    /// The number of what came up, 0 of others.
    fn number(&self, one: T) -> u64 {
        self.numbers.get(&one).copied().map_or(0, u64::from)
    }
}

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
#[derive(Debug, Default)]
pub(super) struct Stacks {
    /// Lines of the user's code in words.
    pub(super) lines: Vec<String>,
    /// Frames in words.
    pub(super) frames: Vec<String>,
    /// The line that a stack is known by, from 1 (0: none), and its frames, the innermost first.
    pub(super) stacks: Vec<(u32, Vec<u32>)>,
    /// PyTorch's categories.
    pub(super) categories: Vec<String>,
}

impl Stacks {
    /// What is known, in words.
    pub(super) fn of(origins: &Origins, known: &Known) -> Self {
        let categories = known.categories.list.iter().map(|category| origins.spelt(*category).to_owned());
        let mut out = Self { categories: categories.collect(), ..Self::default() };
        let mut lines: HashMap<String, u32> = HashMap::new();
        let mut frames: HashMap<Frame, u32> = HashMap::new();
        for stack in &known.stacks.list {
            let line = line_of(origins, *stack).map_or(0, |line| {
                *lines.entry(line).or_insert_with_key(|line| {
                    out.lines.push(line.clone());
                    // CAST: no more than stacks.
                    out.lines.len() as u32
                })
            });
            let numbers = origins.frames(*stack).map(|frame| {
                *frames.entry(frame).or_insert_with(|| {
                    out.frames.push(words(origins, frame));
                    // CAST: frames have numbers of 32 bits.
                    (out.frames.len() - 1) as u32
                })
            });
            let numbers = numbers.collect();
            out.stacks.push((line, numbers));
        }
        out
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

/// Ranges that the program named, in the order of their beginnings. One that does not end lasts to the end; an end without
/// a beginning is left out.
pub(super) fn annotations(recording: &Recording, timeline: &Timeline) -> Vec<Mark> {
    let origins = &recording.origins;
    let mut out: Vec<Mark> = Vec::new();
    let mut open: HashMap<TextId, Vec<usize>> = HashMap::new();
    // CAST: a history that can be replayed has fewer than 2^32 events.
    let event = |time_ns: u64| timeline.times_ns.partition_point(|time| *time < time_ns) as u32;
    let elsewhere = |device: Option<u16>| device.is_some_and(|device| device != recording.device);
    for annotation in origins.annotations().iter().filter(|annotation| !elsewhere(annotation.device)) {
        let at = event(annotation.time_ns);
        if annotation.start {
            open.entry(annotation.name).or_default().push(out.len());
            let text = origins.spelt(annotation.name).to_owned();
            out.push(Mark { kind: "annotation", text, start: at, end: Some(event(u64::MAX)) });
        } else if let Some(begun) = open.get_mut(&annotation.name).and_then(Vec::pop) {
            out[begun].end = Some(at);
        }
    }
    out.sort_by_key(|mark| mark.start);
    out
}
