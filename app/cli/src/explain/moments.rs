//! Memory at a moment, and its holders.

use super::View;
use super::explanation::{GrowthBetween, Holders, LineGrowth, Moment, NamedShare, Node, Share, SizeShare};
use super::frames::Code;
use super::lines::{LineId, Lines, clipped};
use super::purposes::Purposes;
use crate::recording::{Recording, START};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use vramlab::histories::formats::{StackId, TextId};
use vramlab::histories::memory::{BEFORE, Block, Memory, Pool, Totals};

/// Maximum rows of a list; a program has fewer lines.
const ROWS: usize = 1000;

/// Maximum calls of a tree.
const CALLS: usize = 4096;

/// The data from which a moment is described, stored for each candidate moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) index: usize,
    pub(super) totals: Totals,
    pub(super) largest_hole: u64,
    pub(super) near: StackId,
}

impl Sample {
    /// The memory after an event on a stream.
    pub(super) fn at(memory: &Memory, index: usize, stream: u64) -> Self {
        let largest_hole = memory.largest_hole(Pool { stream, small: false });
        Self { index, totals: memory.totals(), largest_hole, near: memory.near() }
    }
}

/// The moment after an event.
pub(super) fn moment(view: &mut View<'_>, memory: &Memory, index: usize) -> Moment {
    let stream = view.recording.events.get(index).map_or(0, |event| event.stream);
    describe(view, &Sample::at(memory, index, stream))
}

/// Describes a moment from its sample.
pub(super) fn describe(view: &mut View<'_>, sample: &Sample) -> Moment {
    let Sample { index, totals, largest_hole, near } = *sample;
    let recording = view.recording;
    let reserved = recording.reserved(totals);
    Moment {
        event: if index == START { 0 } else { recording.number(index) },
        time_ns: recording.since_start(index),
        reserved_bytes: reserved,
        active_bytes: totals.active,
        requested_bytes: totals.requested,
        pending_bytes: totals.pending,
        largest_hole_bytes: reserved.map(|_| largest_hole),
        annotation: recording.annotation(index).map(str::to_owned),
        line: if near.is_empty() { None } else { view.lines.line_of(near) },
        nearby: !near.is_empty() && recording.events.get(index).is_none_or(|event| event.origin.stack.is_empty()),
    }
}

/// The known origin of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Source {
    Line(LineId),
    /// No frames; the last recorded line before it.
    Nearby(LineId),
    /// Allocated before recording started.
    Before,
    /// Frames without a line of the program or of a library.
    NoLine,
    Unknown,
}

impl Source {
    fn label(self, lines: &Lines<'_>) -> String {
        match self {
            Self::Line(line) | Self::Nearby(line) => lines.label(line),
            Self::Before => BEFORE_RECORDING.to_owned(),
            Self::NoLine => NO_LINE.to_owned(),
            Self::Unknown => "no frames".to_owned(),
        }
    }

    fn code(self, lines: &Lines<'_>) -> Option<Code> {
        match self {
            Self::Line(line) | Self::Nearby(line) => lines.code(line),
            Self::Before | Self::NoLine | Self::Unknown => None,
        }
    }
}

const BEFORE_RECORDING: &str = "before recording started";
const NO_LINE: &str = "frames without a program line";

/// The line of a block, and whether it is only the last line before it.
pub(super) fn line_of(block: &Block, lines: &mut Lines<'_>) -> (String, bool) {
    let (source, _, _) = source(block, lines);
    (source.label(lines), matches!(source, Source::Nearby(_)))
}

/// The origin, the library frame, and the calls, outermost first.
fn source(block: &Block, lines: &mut Lines<'_>) -> (Source, Option<LineId>, Vec<LineId>) {
    if !block.origin.stack.is_empty() {
        let folded = lines.fold(block.origin.stack);
        let Some(line) = folded.line() else { return (Source::NoLine, None, Vec::new()) };
        let inside = folded.inside.filter(|inside| *inside != line);
        return (Source::Line(line), inside, folded.path);
    }
    if block.born == BEFORE {
        return (Source::Before, None, Vec::new());
    }
    let folded = if block.near.is_empty() { None } else { Some(lines.fold(block.near)) };
    match folded.and_then(|folded| Some((folded.line()?, folded.path))) {
        Some((line, path)) => (Source::Nearby(line), None, path),
        None => (Source::Unknown, None, Vec::new()),
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bytes: u64,
    blocks: u64,
    oldest: u64,
}

impl Sum {
    fn add(&mut self, block: &Block, age: u64) {
        self.bytes += block.bytes;
        self.blocks += 1;
        self.oldest = self.oldest.max(age);
    }
}

type Key = (Source, Option<LineId>);

/// A line, the library frame inside it, and whether it is only the last line before the block.
pub(crate) type Line = (String, Option<String>, bool);

/// Bytes and blocks held at a moment, by line and by size, for comparisons.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    pub(crate) moment: Moment,
    /// Whether the recording has stack frames.
    pub(crate) frames: bool,
    /// Whether it is a snapshot of PyTorch.
    pub(crate) of_pytorch: bool,
    pub(crate) lines: BTreeMap<Line, (u64, u64)>,
    pub(crate) sizes: BTreeMap<u64, (u64, u64)>,
}

/// Memory held at a moment, by line and by size.
pub(super) fn held(view: &mut View<'_>, memory: &Memory, index: usize) -> Held {
    let mut sums: HashMap<Key, (u64, u64)> = HashMap::new();
    let frames = view.recording.origins.has_frames();
    let of_pytorch = view.recording.summary.format.is_snapshot();
    let mut out = Held { moment: moment(view, memory, index), frames, of_pytorch, ..Held::default() };
    for block in memory.blocks().values() {
        let (source, inside, _) = source(block, &mut view.lines);
        for (bytes, blocks) in
            [sums.entry((source, inside)).or_default(), out.sizes.entry(block.requested).or_default()]
        {
            (*bytes, *blocks) = (*bytes + block.bytes, *blocks + 1);
        }
    }
    let lines = &view.lines;
    let line = |(source, inside): Key| {
        (source.label(lines), inside.map(|inside| lines.label(inside)), matches!(source, Source::Nearby(_)))
    };
    out.lines = sums.into_iter().map(|(key, sum)| (line(key), sum)).collect();
    out
}

/// Growth from one moment to another; `None` if no line grew.
pub(super) fn growth(from: Held, to: Held, named: Vec<String>) -> Option<GrowthBetween> {
    let mut rows = Vec::new();
    for (key, (after_bytes, after_blocks)) in to.lines {
        let (before_bytes, before_blocks) = from.lines.get(&key).copied().unwrap_or_default();
        let (line, inside, nearby) = key;
        if after_bytes > before_bytes {
            rows.push(LineGrowth { line, inside, nearby, before_bytes, after_bytes, before_blocks, after_blocks });
        }
    }
    rows.sort_by_key(|row| (Reverse(row.after_bytes - row.before_bytes), row.line.clone()));
    rows.truncate(ROWS);
    (!rows.is_empty()).then_some(GrowthBetween { from: from.moment, to: to.moment, named, lines: rows })
}

/// The holders of memory: lines, calls, purposes, sizes, categories and notes.
pub(super) fn holders(view: &mut View<'_>, memory: &Memory, index: usize, at: &'static str) -> Holders {
    let mut sums: HashMap<Key, Sum> = HashMap::new();
    let mut sizes: HashMap<u64, Sum> = HashMap::new();
    let (mut categories, mut notes): (HashMap<TextId, Sum>, HashMap<TextId, Sum>) = Default::default();
    let (mut root, mut purposes) = (Branch::default(), Purposes::new(view.recording, index));
    for block in memory.blocks().values() {
        // CAST: an index, which fits in 32 bits.
        let age = match (index, block.born) {
            (START, _) => 0,
            (_, BEFORE) => index as u64 + 1,
            (_, born) => index as u64 - u64::from(born),
        };
        let (source, inside, path) = source(block, &mut view.lines);
        sums.entry((source, inside)).or_default().add(block, age);
        purposes.add(block);
        sizes.entry(block.requested).or_default().add(block, age);
        categories.entry(block.origin.category).or_default().add(block, age);
        notes.entry(block.origin.note).or_default().add(block, age);
        let ends = match source {
            Source::Nearby(_) => Step::Unframed,
            Source::Line(_) => inside.map_or(Step::Here, Step::Call),
            Source::Before => Step::Before,
            Source::NoLine => Step::NoLine,
            Source::Unknown => Step::Unknown,
        };
        root.add(&path, ends, block);
    }
    let moment = moment(view, memory, index);
    let lines = &view.lines;
    let share = |((source, inside), sum): (Key, Sum)| Share {
        line: source.label(lines),
        code: source.code(lines),
        inside: inside.map(|inside| lines.label(inside)),
        nearby: matches!(source, Source::Nearby(_)),
        bytes: sum.bytes,
        blocks: sum.blocks,
        oldest_events: sum.oldest,
    };
    let size = |(requested_bytes, Sum { bytes, blocks, .. })| SizeShare { requested_bytes, blocks, bytes };
    Holders {
        at,
        moment,
        lines: largest(sums, share),
        tree: root.tree(lines),
        purposes: purposes.rows(),
        sizes: largest(sizes, size),
        categories: named(view.recording, categories),
        notes: named(view.recording, notes),
    }
}

/// Rows of the largest sums, the largest first.
fn largest<K: Ord, T>(sums: impl IntoIterator<Item = (K, Sum)>, row: impl FnMut((K, Sum)) -> T) -> Vec<T> {
    let mut sums: Vec<(K, Sum)> = sums.into_iter().collect();
    sums.sort_by(|(a, first), (b, second)| second.bytes.cmp(&first.bytes).then_with(|| a.cmp(b)));
    sums.truncate(ROWS);
    sums.into_iter().map(row).collect()
}

/// Sums by text; empty if all texts are empty.
fn named(recording: &Recording, sums: HashMap<TextId, Sum>) -> Vec<NamedShare> {
    if sums.keys().all(|text| text.is_empty()) {
        return Vec::new();
    }
    let name = |text: TextId| {
        if text.is_empty() { "none".to_owned() } else { clipped(recording.origins.spelt(text)).into_owned() }
    };
    let sums = sums.into_iter().map(|(text, sum)| (name(text), sum));
    largest(sums, |(name, Sum { bytes, blocks, .. })| NamedShare { name, bytes, blocks })
}

/// A child of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Step {
    Call(LineId),
    /// The block itself.
    Here,
    Unframed,
    Before,
    NoLine,
    Unknown,
}

#[derive(Debug, Default)]
struct Branch {
    sum: Sum,
    below: BTreeMap<Step, Branch>,
}

impl Branch {
    fn add(&mut self, path: &[LineId], ends: Step, block: &Block) {
        let mut at = self;
        at.sum.add(block, 0);
        for step in path.iter().map(|line| Step::Call(*line)).chain([ends]).filter(|step| *step != Step::Here) {
            at = at.below.entry(step).or_default();
            at.sum.add(block, 0);
        }
    }

    /// The whole tree, or its largest [`CALLS`] calls.
    fn tree(&self, lines: &Lines<'_>) -> Node {
        let mut bytes = Vec::new();
        self.list(&mut bytes);
        // A parent holds at least as much as its child and precedes it, so the parents of kept calls are kept.
        let mut order: Vec<usize> = (0..bytes.len()).collect();
        order.sort_by_key(|&at| (Reverse(bytes[at]), at));
        let mut kept = vec![false; bytes.len()];
        order.iter().take(CALLS).for_each(|&at| kept[at] = true);
        self.node(("all".to_owned(), None), lines, &kept, &mut 0)
    }

    /// Bytes of each branch, before those below it.
    fn list(&self, bytes: &mut Vec<u64>) {
        bytes.push(self.sum.bytes);
        self.below.values().for_each(|branch| branch.list(bytes));
    }

    /// Number of branches in this one, including itself.
    fn count(&self) -> usize {
        1 + self.below.values().map(Self::count).sum::<usize>()
    }

    /// `at` is this branch's number in the [list](Self::list); afterwards the number of the next branch.
    fn node(&self, (name, code): (String, Option<Code>), lines: &Lines<'_>, kept: &[bool], at: &mut usize) -> Node {
        *at += 1;
        let (mut children, mut omitted, mut remainder) = (Vec::new(), 0_u64, Sum::default());
        for (step, branch) in &self.below {
            if !kept[*at] {
                *at += branch.count();
                omitted += 1;
                remainder.bytes += branch.sum.bytes;
                remainder.blocks += branch.sum.blocks;
                continue;
            }
            let name = match step {
                Step::Call(line) => lines.label(*line),
                Step::Unframed => "without frames, after this line".to_owned(),
                Step::Before => BEFORE_RECORDING.to_owned(),
                Step::NoLine => NO_LINE.to_owned(),
                Step::Here | Step::Unknown => "no frames".to_owned(),
            };
            let code = if let Step::Call(line) = step { lines.code(*line) } else { None };
            children.push(branch.node((name, code), lines, kept, at));
        }
        children.sort_by_key(|child| (Reverse(child.bytes), child.name.clone()));
        if omitted > 0 {
            let name = format!("… {omitted} smaller …");
            let (bytes, blocks) = (remainder.bytes, remainder.blocks);
            children.push(Node { name, code: None, bytes, blocks, children: Vec::new() });
        }
        Node { name, code, bytes: self.sum.bytes, blocks: self.sum.blocks, children }
    }
}
