//! Stacks of frames as a person reads them: the lines of the user's own code, with what lies in libraries folded.

use std::collections::HashMap;
use vramlab::histories::formats::{Frame, Origins, StackId};

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
    ids: HashMap<Frame, LineId>,
    frames: Vec<Frame>,
    folded: Vec<Option<Folded>>,
}

impl<'r> Lines<'r> {
    pub(super) fn new(origins: &'r Origins, all: bool) -> Self {
        let folded = vec![None; origins.stacks()];
        Self { origins, all, ids: HashMap::new(), frames: Vec::new(), folded }
    }

    fn id(&mut self, frame: Frame) -> LineId {
        // CAST: there are no more than frames, which have numbers of 32 bits.
        let next = LineId(self.frames.len() as u32);
        *self.ids.entry(frame).or_insert_with(|| {
            self.frames.push(frame);
            next
        })
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
                Kind::User => folded.path.push(self.id(frame)),
                Kind::Library if folded.path.is_empty() && folded.inside.is_none() => {
                    folded.inside = Some(self.id(frame));
                }
                Kind::PyTorch if folded.path.is_empty() && plumbing.is_none() => plumbing = Some(frame),
                _ => {}
            }
        }
        folded.path.reverse();
        if folded.inside.is_none() {
            folded.inside = plumbing.map(|frame| self.id(frame));
        }
        if let Some(slot) = self.folded.get_mut(stack.index()) {
            *slot = Some(folded.clone());
        }
        folded
    }

    /// A place in words: `train.py:14 gpt2`.
    pub(super) fn label(&self, line: LineId) -> String {
        place(self.origins, self.frames[line.0 as usize], short)
    }

    /// The user's line of a stack in words.
    pub(super) fn line_of(&mut self, stack: StackId) -> Option<String> {
        self.fold(stack).line().map(|line| self.label(line))
    }
}

/// The line that a stack is known by: the innermost of the user's code; where there is none, the innermost of a library, or
/// of PyTorch.
pub(crate) fn line_of(origins: &Origins, stack: StackId) -> Option<String> {
    let (mut library, mut plumbing) = (None, None);
    for frame in origins.frames(stack) {
        match Kind::of(origins.spelt(frame.filename)) {
            Kind::User => return Some(place(origins, frame, short)),
            Kind::Library => library = library.or(Some(frame)),
            Kind::PyTorch => plumbing = plumbing.or(Some(frame)),
        }
    }
    library.or(plumbing).map(|frame| place(origins, frame, short))
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

/// Whose code a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    User,
    Library,
    /// PyTorch, Python itself, and C++.
    PyTorch,
}

impl Kind {
    fn of(file: &str) -> Self {
        let packages = ["site-packages/", "dist-packages/"];
        if let Some(package) =
            packages.iter().find_map(|folder| file.rfind(folder).map(|at| &file[at + folder.len()..]))
        {
            let plumbing =
                ["torch/", "triton/", "functorch/", "torchgen/"].iter().any(|name| package.starts_with(name));
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

/// The end of a path that tells files apart: of a library from its package on, else the last two parts.
fn short(file: &str) -> &str {
    let file = ["site-packages/", "dist-packages/"]
        .iter()
        .find_map(|folder| file.rfind(folder).map(|at| &file[at + folder.len()..]))
        .unwrap_or(file);
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
