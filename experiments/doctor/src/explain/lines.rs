//! Stacks of frames as a person reads them: the lines of the user's own code, with what lies in libraries folded.

use std::collections::HashMap;
use std::hash::Hash;
use vramlab::histories::formats::{Frame, Origins, StackId};

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

/// A place in a program, by its number in [`Lines`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LineId(u32);

/// A stack, folded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Folded {
    /// Lines of the user's code, from the outside in.
    pub(super) path: Vec<LineId>,
    /// The innermost place in a library below the last of them that says something: of a library beside PyTorch, if there
    /// is one.
    pub(super) inside: Option<LineId>,
}

impl Folded {
    /// The user's line that asked; where there is none, the library's.
    pub(super) fn line(&self) -> Option<LineId> {
        self.path.last().copied().or(self.inside)
    }
}

/// Folds stacks, each once.
pub(super) struct Lines<'r> {
    origins: &'r Origins,
    /// Whether nothing is folded.
    all: bool,
    frames: Numbered<Frame>,
    folded: Vec<Option<Folded>>,
}

impl<'r> Lines<'r> {
    pub(super) fn new(origins: &'r Origins, all: bool) -> Self {
        let folded = vec![None; origins.stacks()];
        Self { origins, all, frames: Numbered::default(), folded }
    }

    /// A stack, folded.
    pub(super) fn fold(&mut self, stack: StackId) -> Folded {
        if let Some(folded) = self.folded.get(stack.index()).and_then(Clone::clone) {
            return folded;
        }
        let origins = self.origins;
        let mut folded = Folded::default();
        // The innermost comes first.
        let mut plumbing = None;
        for frame in origins.frames(stack) {
            let kind = if self.all { Kind::User } else { Kind::of(origins.spelt(frame.filename)) };
            match kind {
                Kind::User => folded.path.push(LineId(self.frames.enter(frame))),
                Kind::Library if folded.path.is_empty() && folded.inside.is_none() => {
                    folded.inside = Some(LineId(self.frames.enter(frame)));
                }
                Kind::PyTorch if folded.path.is_empty() && plumbing.is_none() => plumbing = Some(frame),
                _ => {}
            }
        }
        folded.path.reverse();
        if folded.inside.is_none() {
            folded.inside = plumbing.map(|frame| LineId(self.frames.enter(frame)));
        }
        if let Some(slot) = self.folded.get_mut(stack.index()) {
            *slot = Some(folded.clone());
        }
        folded
    }

    /// A place in words: `train.py:14 gpt2`.
    pub(super) fn label(&self, line: LineId) -> String {
        place(self.origins, self.frames.list[line.0 as usize - 1], short)
    }

    /// The user's line of a stack in words.
    pub(super) fn line_of(&mut self, stack: StackId) -> Option<String> {
        self.fold(stack).line().map(|line| self.label(line))
    }
}

/// The line that a stack is known by: the innermost of the user's code; where there is none, the innermost of a library, or
/// of PyTorch.
pub(crate) fn line_of(origins: &Origins, stack: StackId) -> Option<String> {
    let frame = origins.frames(stack).min_by_key(|frame| Kind::of(origins.spelt(frame.filename)))?;
    Some(place(origins, frame, short))
}

/// A frame in words, with its whole path.
pub(crate) fn words(origins: &Origins, frame: Frame) -> String {
    place(origins, frame, |file| file)
}

fn place(origins: &Origins, frame: Frame, shown: fn(&str) -> &str) -> String {
    let (name, file) = (origins.spelt(frame.name), origins.spelt(frame.filename));
    match (file, frame.line) {
        ("" | "??", _) => name.to_owned(),
        // What has no lines, as a layer of a network.
        (file, 0) => format!("{} {name}", shown(file)),
        (file, line) => format!("{}:{line} {name}", shown(file)),
    }
}

/// Whose code a file is; what tells a reader most comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    User,
    Library,
    /// PyTorch, Python itself, and C++.
    PyTorch,
}

impl Kind {
    fn of(file: &str) -> Self {
        if let Some(path) = in_packages(file) {
            let plumbing = ["torch/", "triton/", "functorch/", "torchgen/"].iter().any(|name| path.starts_with(name));
            return if plumbing { Self::PyTorch } else { Self::Library };
        }
        let native = [".cpp", ".cc", ".c", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".so", ".inc"];
        let python = file.starts_with('<') || file.contains("/lib/python3") || file.contains("/lib64/python3");
        let torch = file.contains("/torch/") || file.starts_with("torch/") || file.contains("/triton/");
        if file.is_empty() || file == "??" || python || torch || native.iter().any(|end| file.ends_with(end)) {
            return Self::PyTorch;
        }
        Self::User
    }
}

/// The path of a library's file from its package on.
fn in_packages(file: &str) -> Option<&str> {
    let folders = ["site-packages/", "dist-packages/"];
    folders.iter().find_map(|folder| file.rsplit_once(folder)).map(|(_, path)| path)
}

/// The end of a path that tells files apart: of a library from its package on, else the last two parts.
fn short(file: &str) -> &str {
    let file = in_packages(file).unwrap_or(file);
    let mut parts = file.rmatch_indices(['/', '\\']);
    parts.nth(1).map_or(file, |(at, _)| &file[at + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart() {
        for (file, kind) in [
            ("train.py", Kind::User),
            ("/home/me/proj/torch_models/net.py", Kind::User),
            ("layer 3", Kind::User),
            ("/opt/venv/lib/python3.12/site-packages/transformers/models/gpt2.py", Kind::Library),
            ("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", Kind::PyTorch),
            ("site-packages/torch/_tensor.py", Kind::PyTorch),
            ("/usr/lib/python3.12/threading.py", Kind::PyTorch),
            ("<frozen importlib._bootstrap>", Kind::PyTorch),
            ("<eval_with_key>.3", Kind::PyTorch),
            ("/pytorch/aten/src/ATen/EmptyTensor.cpp", Kind::PyTorch),
            ("/build/torch/csrc/autograd/engine.cpp", Kind::PyTorch),
            ("??", Kind::PyTorch),
            ("", Kind::PyTorch),
        ] {
            assert_eq!(Kind::of(file), kind, "{file}");
        }
    }

    #[test]
    fn paths_are_short() {
        assert_eq!(short("/a/b/c/train.py"), "c/train.py");
        assert_eq!(short("train.py"), "train.py");
        assert_eq!(short("/x/site-packages/torch/optim/adam.py"), "optim/adam.py");
    }
}
