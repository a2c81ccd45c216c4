//! Folded stacks: the lines of the user's code, with library frames folded.

use super::frames::{Code, Kind, is_program_source, place, short};
use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::Hash;
use vramlab::histories::formats::{FORWARD_PASS, Frame, Origins, StackId};

/// Values numbered from 1 in the order of their first use.
#[derive(Debug, Default)]
pub(crate) struct Numbered<T> {
    numbers: HashMap<T, u32>,
    pub(crate) list: Vec<T>,
}

impl<T: Clone + Eq + Hash> Numbered<T> {
    /// The number of a value; a new value gets the next number.
    pub(crate) fn enter(&mut self, value: T) -> u32 {
        *self.numbers.entry(value).or_insert_with_key(|value| {
            self.list.push(value.clone());
            // CAST: stacks, frames and texts have 32-bit numbers.
            self.list.len() as u32
        })
    }

    /// The number of a value; 0 for an unknown one.
    pub(crate) fn number(&self, value: T) -> u64 {
        self.numbers.get(&value).copied().map_or(0, u64::from)
    }
}

/// A line of a program, by its number in [`Lines`]. Lines with the same text share a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LineId(u32);

/// A line as text, and whose code it is; `None` where several lines are omitted.
type Text = (String, Option<Code>);

/// A folded stack: its lines by number, or as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Folded<P = LineId> {
    /// Lines of the user's code, outermost first. Allocations of the backward pass on an autograd thread have none; the path is
    /// then the autograd node.
    pub(super) path: Vec<P>,
    /// The most informative frame inside the innermost of these lines: of a library, an autograd node or an operator.
    pub(super) inside: Option<P>,
}

impl<P> Default for Folded<P> {
    fn default() -> Self {
        Self { path: Vec::new(), inside: None }
    }
}

impl<P: Clone + PartialEq> Folded<P> {
    /// The user's line; without one, the library's.
    pub(super) fn line(&self) -> Option<P> {
        self.path.last().or(self.inside.as_ref()).cloned()
    }
}

/// Folds stacks and caches the results.
pub(super) struct Lines<'r> {
    origins: &'r Origins,
    /// Whether to keep all frames.
    all: bool,
    texts: Numbered<Text>,
    folded: Vec<Option<Folded>>,
}

impl<'r> Lines<'r> {
    pub(super) fn new(origins: &'r Origins, all: bool) -> Self {
        let folded = vec![None; origins.stacks()];
        Self { origins, all, texts: Numbered::default(), folded }
    }

    /// Folds a stack.
    pub(super) fn fold(&mut self, stack: StackId) -> Folded {
        if let Some(folded) = self.folded.get(stack.index()).and_then(Clone::clone) {
            return folded;
        }
        let Folded { path, inside } = fold(self.origins, stack, self.all);
        let mut number = |text: Text| LineId(self.texts.enter(text));
        let folded = Folded { path: path.into_iter().map(&mut number).collect(), inside: inside.map(&mut number) };
        if let Some(slot) = self.folded.get_mut(stack.index()) {
            *slot = Some(folded.clone());
        }
        folded
    }

    /// A line as text: `train.py:14 gpt2`.
    pub(super) fn label(&self, line: LineId) -> String {
        self.texts.list[line.0 as usize - 1].0.clone()
    }

    /// Whose code a line is.
    pub(super) fn code(&self, line: LineId) -> Option<Code> {
        self.texts.list[line.0 as usize - 1].1
    }

    /// The user's line of a stack, as text.
    pub(super) fn line_of(&mut self, stack: StackId) -> Option<String> {
        self.fold(stack).line().map(|line| self.label(line))
    }
}

/// First entry of the path of the backward pass on a thread without user code.
pub(super) const BACKWARD: &str = "backward pass";

/// Kinds of frames inside the user's line, the most informative first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Workspace,
    Library,
    Compiled,
    PyTorch,
    Native,
    Operator,
    /// An operator that only allocates.
    Factory,
}

/// Number of outermost and innermost lines kept of a stack. Deeper recursion repeats the same lines, and many JSON readers refuse
/// deep trees: serde_json at 128 levels, of which a line takes two.
const OUTERMOST: usize = 28;
const INNERMOST: usize = 27;

/// A path whose middle is replaced by one entry, made from the number of omitted lines.
fn without_middle<T>(mut path: Vec<T>, middle: impl FnOnce(usize) -> T) -> Vec<T> {
    let omitted = path.len().saturating_sub(OUTERMOST + INNERMOST);
    if omitted > 1 {
        path.splice(OUTERMOST..OUTERMOST + omitted, [middle(omitted)]);
    }
    path
}

/// The entry for omitted lines.
fn omission(lines: usize) -> Text {
    (format!("… {lines} calls in between …"), None)
}

/// Folds a stack, as text.
fn fold(origins: &Origins, stack: StackId, all: bool) -> Folded<Text> {
    let frames: Vec<Frame> = origins.frames(stack).collect();
    if all {
        let shown = frames.iter().filter(|frame| kind(origins, frame) != Kind::Recorder);
        let path = without_middle(shown.rev().map(Ok).collect(), Err);
        let text = |entry| match entry {
            Ok(frame) => line_text(origins, frame),
            Err(lines) => omission(lines),
        };
        return Folded { path: path.into_iter().map(text).collect(), inside: None };
    }
    let Folded { path, inside } = fold_by_kind(origins, &frames);
    Folded { path: without_middle(path, omission), inside }
}

/// The lines of a program without Python and PyTorch: all frames whose source is known. `None` for other stacks.
fn program_lines(origins: &Origins, frames: &[Frame]) -> Option<Vec<Text>> {
    let native = |frame: &Frame| matches!(kind(origins, frame), Kind::Native | Kind::Glue);
    let known = |frame: &&Frame| frame.line > 0 && is_program_source(origins.spelt(frame.filename));
    let text = |frame| (frame_text(origins, frame, short), Some(Code::Program));
    let shown = frames.iter().rev().filter(known).map(text);
    frames.iter().all(native).then(|| shown.collect::<Vec<_>>()).filter(|lines| !lines.is_empty())
}

fn fold_by_kind(origins: &Origins, frames: &[Frame]) -> Folded<Text> {
    if let Some(path) = program_lines(origins, frames) {
        return Folded { path, inside: None };
    }
    // The frames of the forward pass follow the mark.
    let mark = frames.iter().position(|frame| origins.spelt(frame.name) == FORWARD_PASS);
    let (frames, forward) = frames.split_at(mark.unwrap_or(frames.len()));
    let (current, forward) = (Walk::new(origins, frames), Walk::new(origins, forward));
    // User code that runs in the backward pass (an autograd.Function) is more informative than its forward call.
    let user_lines = if current.backward { current.lines_in_backward } else { current.lines.len() };
    if forward.lines.is_empty() || user_lines > 0 {
        return current.folded();
    }
    let inside = current.inside.map(|(_, text)| text).filter(|_| current.node.is_none());
    let inside = current.node.or(inside).unwrap_or_else(|| (BACKWARD.to_owned(), Some(Code::Torch)));
    Folded { path: forward.lines.into_iter().rev().collect(), inside: Some(inside) }
}

fn kind<'o>(origins: &'o Origins, frame: &Frame) -> Kind<'o> {
    Kind::new(origins.spelt(frame.name), origins.spelt(frame.filename))
}

fn line_text(origins: &Origins, frame: &Frame) -> Text {
    let code = Code::new(kind(origins, frame), origins.spelt(frame.filename));
    (frame_text(origins, frame, short), Some(code))
}

fn frame_text(origins: &Origins, frame: &Frame, shown: impl Fn(&str) -> String) -> String {
    let (name, file) = (origins.spelt(frame.name), origins.spelt(frame.filename));
    place(&clipped(name), &clipped_start(file), frame.line, shown)
}

/// Maximum bytes shown of a name. Real names are shorter; a longer one would fill every line.
const LONGEST: usize = 1024;

/// The shown start of a name, cut at a character boundary.
pub(crate) fn beginning(name: &str) -> &str {
    let end = (0..=LONGEST.min(name.len())).rev().find(|&at| name.is_char_boundary(at));
    &name[..end.unwrap_or(0)]
}

/// The shown end of a path, cut at a character boundary.
fn end(path: &str) -> &str {
    let start = (path.len().saturating_sub(LONGEST)..path.len()).find(|&at| path.is_char_boundary(at));
    &path[start.unwrap_or(path.len())..]
}

/// A name, shortened to its start if long.
pub(crate) fn clipped(name: &str) -> Cow<'_, str> {
    match name.len() > LONGEST {
        true => Cow::Owned(format!("{}…", beginning(name))),
        false => Cow::Borrowed(name),
    }
}

/// A path, shortened to its end if long.
fn clipped_start(path: &str) -> Cow<'_, str> {
    match path.len() > LONGEST {
        true => Cow::Owned(format!("…{}", end(path))),
        false => Cow::Borrowed(path),
    }
}

/// Result of a walk over a stack, from the innermost frame outwards.
#[derive(Debug, Default)]
struct Walk {
    /// The user's lines, the innermost first.
    lines: Vec<Text>,
    /// The most informative frame inside the innermost of these lines.
    inside: Option<(Rank, Text)>,
    /// Whether autograd ran it, and the number of user lines that autograd called.
    backward: bool,
    lines_in_backward: usize,
    /// The node that the autograd engine ran.
    node: Option<Text>,
}

impl Walk {
    fn new(origins: &Origins, frames: &[Frame]) -> Self {
        let mut out = Self::default();
        let mut after_engine = false;
        for frame in frames {
            match kind(origins, frame) {
                Kind::User => out.lines.push(line_text(origins, frame)),
                Kind::Node(node) if !after_engine => {
                    // The outermost node is the one that the engine ran.
                    out.backward = true;
                    out.lines_in_backward = out.lines.len();
                    out.node = Some((node.to_owned(), Some(Code::Torch)));
                }
                Kind::Engine => {
                    if !out.backward || !after_engine {
                        out.lines_in_backward = out.lines.len();
                    }
                    (out.backward, after_engine) = (true, true);
                }
                kind => out.add_other(kind, || line_text(origins, frame)),
            }
        }
        out
    }

    /// Adds a frame outside the user's code.
    fn add_other(&mut self, kind: Kind<'_>, text: impl FnOnce() -> Text) {
        let rank = match kind {
            Kind::Workspace(_) => Rank::Workspace,
            Kind::Library => Rank::Library,
            Kind::Compiled => Rank::Compiled,
            Kind::PyTorch => Rank::PyTorch,
            Kind::Native => Rank::Native,
            Kind::Operator(name) if name.starts_with("empty") || name.starts_with("new_empty") => Rank::Factory,
            Kind::Operator(_) => Rank::Operator,
            _ => return,
        };
        if self.lines.is_empty() && self.inside.as_ref().is_none_or(|(before, _)| rank < *before) {
            let text = match kind {
                Kind::Workspace(name) => (name.to_owned(), Some(Code::Library)),
                Kind::Operator(name) => (format!("aten::{name}"), Some(Code::Torch)),
                _ => text(),
            };
            self.inside = Some((rank, text));
        }
    }

    fn folded(self) -> Folded<Text> {
        let Self { mut lines, inside, backward, lines_in_backward, node } = self;
        let backward_only = backward && lines.len() == lines_in_backward;
        if backward_only {
            lines.push((BACKWARD.to_owned(), Some(Code::Torch)));
        }
        lines.reverse();
        let node = node.filter(|_| lines_in_backward == 0);
        let inside = match (node, inside) {
            (Some(node), inside) if backward_only => {
                lines.push(node);
                inside.filter(|(rank, _)| *rank == Rank::Workspace)
            }
            (_, Some((Rank::Workspace, name))) => Some((Rank::Workspace, name)),
            (Some(node), _) => Some((Rank::Library, node)),
            (None, inside) => inside,
        };
        Folded { path: lines, inside: inside.map(|(_, text)| text) }
    }
}

/// The line of a stack: the innermost line of user code; without one, the autograd node, or the innermost frame of a library or of
/// PyTorch.
pub(crate) fn line_of(origins: &Origins, stack: StackId) -> Option<String> {
    fold(origins, stack, false).line().map(|(text, _)| text)
}

/// A frame as text, with its full path.
pub(crate) fn words(origins: &Origins, frame: Frame) -> String {
    frame_text(origins, &frame, str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_a_deep_path_is_replaced_by_a_count() {
        let path = |count: usize| without_middle((0..count).collect(), |lines| 1000 * lines);
        assert_eq!(path(56), (0..56).collect::<Vec<_>>());
        let deep = path(12_000);
        assert_eq!(
            (deep.len(), deep[27], deep[28], deep[29], deep.last()),
            (56, 27, 11_945_000, 11_973, Some(&11_999))
        );
    }

    #[test]
    fn long_names_are_cut_at_character_boundaries() {
        let long = "é".repeat(1 << 20);
        assert!(clipped(&long).len() < LONGEST + 8 && clipped(&long).ends_with("é…"));
        assert!(clipped_start(&long).len() < LONGEST + 8 && clipped_start(&long).starts_with("…é"));
        assert_eq!((clipped("step"), clipped_start("a/b.py")), (Cow::Borrowed("step"), Cow::Borrowed("a/b.py")));
    }
}
