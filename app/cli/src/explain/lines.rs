//! Stacks of frames as a person reads them: the lines of the user's own code, with what lies in libraries folded.

use super::frames::{Kind, place, short};
use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::Hash;
use vramlab::histories::formats::{FORWARD_PASS, Frame, Origins, StackId};

/// What comes up, numbered in that order from 1.
#[derive(Debug, Default)]
pub(crate) struct Numbered<T> {
    numbers: HashMap<T, u32>,
    pub(crate) list: Vec<T>,
}

impl<T: Clone + Eq + Hash> Numbered<T> {
    /// The number of what came up, or the next one.
    pub(crate) fn enter(&mut self, one: T) -> u32 {
        *self.numbers.entry(one).or_insert_with_key(|one| {
            self.list.push(one.clone());
            // CAST: stacks, frames and texts have numbers of 32 bits.
            self.list.len() as u32
        })
    }

    /// The number of what came up, 0 of others.
    pub(crate) fn number(&self, one: T) -> u64 {
        self.numbers.get(&one).copied().map_or(0, u64::from)
    }
}

/// A place in a program, by its number in [`Lines`]. Places that read alike are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LineId(u32);

/// A stack, folded: places by their numbers, or in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Folded<P = LineId> {
    /// Lines of the user's code, from the outside in. What the backward pass allocates on a thread of autograd's has no such
    /// lines, and is by node.
    pub(super) path: Vec<P>,
    /// What says most of where it was below the last of them: in a library's code, in a node of autograd, in an operator.
    pub(super) inside: Option<P>,
}

impl<P> Default for Folded<P> {
    fn default() -> Self {
        Self { path: Vec::new(), inside: None }
    }
}

impl<P: Clone + PartialEq> Folded<P> {
    /// The user's line that asked; where there is none, the library's.
    pub(super) fn line(&self) -> Option<P> {
        self.path.last().or(self.inside.as_ref()).cloned()
    }
}

/// Folds stacks, each once.
pub(super) struct Lines<'r> {
    origins: &'r Origins,
    /// Whether nothing is folded.
    all: bool,
    places: Numbered<String>,
    folded: Vec<Option<Folded>>,
}

impl<'r> Lines<'r> {
    pub(super) fn new(origins: &'r Origins, all: bool) -> Self {
        let folded = vec![None; origins.stacks()];
        Self { origins, all, places: Numbered::default(), folded }
    }

    /// A stack, folded.
    pub(super) fn fold(&mut self, stack: StackId) -> Folded {
        if let Some(folded) = self.folded.get(stack.index()).and_then(Clone::clone) {
            return folded;
        }
        let Folded { path, inside } = fold(self.origins, stack, self.all);
        let mut number = |place: String| LineId(self.places.enter(place));
        let folded = Folded { path: path.into_iter().map(&mut number).collect(), inside: inside.map(&mut number) };
        if let Some(slot) = self.folded.get_mut(stack.index()) {
            *slot = Some(folded.clone());
        }
        folded
    }

    /// A place in words: `train.py:14 gpt2`.
    pub(super) fn label(&self, line: LineId) -> String {
        self.places.list[line.0 as usize - 1].clone()
    }

    /// The user's line of a stack in words.
    pub(super) fn line_of(&mut self, stack: StackId) -> Option<String> {
        self.fold(stack).line().map(|line| self.label(line))
    }
}

/// What the path of the backward pass begins with, on a thread that has no other code of the user's.
pub(super) const BACKWARD: &str = "backward pass";

/// What says more of a place in a library comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Workspace,
    Library,
    Compiled,
    PyTorch,
    Native,
    Operator,
    /// An operator that does nothing but allocate.
    Factory,
}

/// Lines of a stack that are kept from the outside in, and from the inside out. What recurs more deeply says the same again, and many
/// readers of JSON refuse a tree of it: serde_json one of 128 levels, of which a line is two.
const OUTERMOST: usize = 28;
const INNERMOST: usize = 27;

/// A path without its middle, which one place stands for that counts the lines.
fn without_middle<T>(mut path: Vec<T>, middle: impl FnOnce(usize) -> T) -> Vec<T> {
    let left_out = path.len().saturating_sub(OUTERMOST + INNERMOST);
    if left_out > 1 {
        path.splice(OUTERMOST..OUTERMOST + left_out, [middle(left_out)]);
    }
    path
}

/// The place that stands for lines that are left out.
fn left_out(lines: usize) -> String {
    format!("… {lines} calls in between …")
}

/// A stack in words.
fn fold(origins: &Origins, stack: StackId, all: bool) -> Folded<String> {
    let frames: Vec<Frame> = origins.frames(stack).collect();
    if all {
        let told = frames.iter().filter(|frame| kind(origins, frame) != Kind::Recorder);
        let path = without_middle(told.rev().map(Ok).collect(), Err);
        let words = |place| match place {
            Ok(frame) => words_of(origins, frame, short),
            Err(lines) => left_out(lines),
        };
        return Folded { path: path.into_iter().map(words).collect(), inside: None };
    }
    let Folded { path, inside } = folded_by_kind(origins, &frames);
    Folded { path: without_middle(path, left_out), inside }
}

fn folded_by_kind(origins: &Origins, frames: &[Frame]) -> Folded<String> {
    // Behind the mark are the frames of the forward pass.
    let mark = frames.iter().position(|frame| origins.spelt(frame.name) == FORWARD_PASS);
    let (frames, forward) = frames.split_at(mark.unwrap_or(frames.len()));
    let (here, forward) = (Walk::over(origins, frames), Walk::over(origins, forward));
    // The user's code in the backward pass, that of an autograd.Function, says more than where the function was called.
    let called = if here.backward { here.lines_in_backward } else { here.lines.len() };
    if forward.lines.is_empty() || called > 0 {
        return here.folded();
    }
    let inside = here.inside.map(|(_, place)| place).filter(|_| here.node.is_none());
    let inside = here.node.or(inside).unwrap_or_else(|| BACKWARD.to_owned());
    Folded { path: forward.lines.into_iter().rev().collect(), inside: Some(inside) }
}

fn kind<'o>(origins: &'o Origins, frame: &Frame) -> Kind<'o> {
    Kind::of(origins.spelt(frame.name), origins.spelt(frame.filename))
}

fn words_of(origins: &Origins, frame: &Frame, shown: impl Fn(&str) -> String) -> String {
    let (name, file) = (origins.spelt(frame.name), origins.spelt(frame.filename));
    place(&clipped(name), &clipped_start(file), frame.line, shown)
}

/// Bytes of a name beyond which it is not shown whole: no program's are so long, and one that is would fill every line.
const LONGEST: usize = 1024;

/// As much of a name as is shown, between characters.
pub(crate) fn beginning(name: &str) -> &str {
    let end = (0..=LONGEST.min(name.len())).rev().find(|&at| name.is_char_boundary(at));
    &name[..end.unwrap_or(0)]
}

/// As much of the end of a path as is shown, between characters.
fn end(path: &str) -> &str {
    let start = (path.len().saturating_sub(LONGEST)..path.len()).find(|&at| path.is_char_boundary(at));
    &path[start.unwrap_or(path.len())..]
}

/// The beginning of a long name.
pub(crate) fn clipped(name: &str) -> Cow<'_, str> {
    match name.len() > LONGEST {
        true => Cow::Owned(format!("{}…", beginning(name))),
        false => Cow::Borrowed(name),
    }
}

/// The end of a long path.
fn clipped_start(path: &str) -> Cow<'_, str> {
    match path.len() > LONGEST {
        true => Cow::Owned(format!("…{}", end(path))),
        false => Cow::Borrowed(path),
    }
}

/// What a walk over a stack from the innermost frame out came by.
#[derive(Debug, Default)]
struct Walk {
    /// The user's lines, the innermost first.
    lines: Vec<String>,
    /// What says most of what lies below the innermost of them.
    inside: Option<(Rank, String)>,
    /// Whether autograd ran it, and how many of the user's lines autograd called.
    backward: bool,
    lines_in_backward: usize,
    /// The node that autograd's engine ran.
    node: Option<String>,
}

impl Walk {
    fn over(origins: &Origins, frames: &[Frame]) -> Self {
        let mut out = Self::default();
        let mut ran = false;
        for frame in frames {
            match kind(origins, frame) {
                Kind::User => out.lines.push(words_of(origins, frame, short)),
                Kind::Node(node) if !ran => {
                    // The outermost is the one that the engine ran.
                    out.backward = true;
                    out.lines_in_backward = out.lines.len();
                    out.node = Some(node.to_owned());
                }
                Kind::Engine => {
                    if !out.backward || !ran {
                        out.lines_in_backward = out.lines.len();
                    }
                    (out.backward, ran) = (true, true);
                }
                kind => out.see(kind, || words_of(origins, frame, short)),
            }
        }
        out
    }

    /// Takes note of a place that is not in the user's code.
    fn see(&mut self, kind: Kind<'_>, words: impl FnOnce() -> String) {
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
            let words = match kind {
                Kind::Workspace(what) => what.to_owned(),
                Kind::Operator(name) => format!("aten::{name}"),
                _ => words(),
            };
            self.inside = Some((rank, words));
        }
    }

    fn folded(self) -> Folded<String> {
        let Self { mut lines, inside, backward, lines_in_backward, node } = self;
        let alone = backward && lines.len() == lines_in_backward;
        if alone {
            lines.push(BACKWARD.to_owned());
        }
        lines.reverse();
        let node = node.filter(|_| lines_in_backward == 0);
        let inside = match (node, inside) {
            (Some(node), inside) if alone => {
                lines.push(node);
                inside.filter(|(rank, _)| *rank == Rank::Workspace)
            }
            (_, Some((Rank::Workspace, what))) => Some((Rank::Workspace, what)),
            (Some(node), _) => Some((Rank::Library, node)),
            (None, inside) => inside,
        };
        Folded { path: lines, inside: inside.map(|(_, place)| place) }
    }
}

/// The line that a stack is known by: the innermost of the user's code; where there is none, the node of autograd, or the
/// innermost place of a library, or of PyTorch.
pub(crate) fn line_of(origins: &Origins, stack: StackId) -> Option<String> {
    fold(origins, stack, false).line()
}

/// A frame in words, with its whole path.
pub(crate) fn words(origins: &Origins, frame: Frame) -> String {
    words_of(origins, &frame, str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_a_deep_path_is_counted() {
        let path = |count: usize| without_middle((0..count).collect(), |lines| 1000 * lines);
        assert_eq!(path(56), (0..56).collect::<Vec<_>>());
        let deep = path(12_000);
        assert_eq!(
            (deep.len(), deep[27], deep[28], deep[29], deep.last()),
            (56, 27, 11_945_000, 11_973, Some(&11_999))
        );
    }

    #[test]
    fn long_names_are_cut_between_characters() {
        let long = "é".repeat(1 << 20);
        assert!(clipped(&long).len() < LONGEST + 8 && clipped(&long).ends_with("é…"));
        assert!(clipped_start(&long).len() < LONGEST + 8 && clipped_start(&long).starts_with("…é"));
        assert_eq!((clipped("step"), clipped_start("a/b.py")), (Cow::Borrowed("step"), Cow::Borrowed("a/b.py")));
    }
}
