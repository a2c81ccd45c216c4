//! What memory is for: parameters, gradients, the optimizer's state, activations, workspaces, as far as frames, PyTorch's
//! categories and annotations tell it.

use super::frames::{CUBLAS_WORKSPACE, Kind, in_packages, slashes};
use crate::recording::{Recording, START};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use vramlab::histories::formats::{Action, FORWARD_PASS, Frame, Origins, StackId};
use vramlab::histories::memory::{BEFORE, Block};

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Purpose {
    /// Parameters and buffers of modules: made by `Module.to`, `load_state_dict`, a module's `__init__` or `torch.nn.init`.
    Parameters,
    /// Made by the backward pass: gradients of parameters, and those on the way to them.
    Gradients,
    /// Made in `torch.optim` and held after the step.
    OptimizerState,
    /// Made in a module's `forward`.
    Activations,
    /// What cuBLAS and cuDNN work in. Only C++ frames tell it.
    Workspace,
    /// The history does not tell.
    Unknown,
}

/// Bytes for a purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Purposed {
    pub(crate) purpose: Purpose,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

impl Purpose {
    /// In words, and by what it was told.
    pub(super) fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Parameters => {
                ("parameters", "made by Module.to, load_state_dict, a module's __init__ or torch.nn.init")
            }
            Self::Gradients => ("gradients", "made by the backward pass, of parameters and on the way to them"),
            Self::OptimizerState => ("optimizer state", "made in an optimizer's step, and held after it"),
            Self::Activations => ("activations", "made in a module's forward"),
            Self::Workspace => ("workspace", "made for cuBLAS or cuDNN"),
            Self::Unknown => ("unknown", "the recording does not tell"),
        }
    }

    /// By PyTorch's name of a category.
    fn of_category(name: &str) -> Option<Self> {
        Some(match name.to_lowercase().as_str() {
            "parameter" => Self::Parameters,
            "gradient" => Self::Gradients,
            "optimizer_state" => Self::OptimizerState,
            "activation" => Self::Activations,
            _ => return None,
        })
    }
}

/// What a stack tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    For(Purpose),
    /// An optimizer's step made it: its state if it is held after the step.
    InStep,
    Nothing,
}

/// Sums by purpose at a moment.
pub(super) struct Purposes<'r> {
    recording: &'r Recording,
    index: usize,
    told: Vec<Option<Told>>,
    /// When an optimizer's step ran, as PyTorch's annotations say.
    steps_ns: Vec<(u64, u64)>,
    /// The last request before the moment that was not in an optimizer's step, once it was looked for.
    outside: Option<Option<usize>>,
    sums: BTreeMap<Purpose, (u64, u64)>,
}

impl<'r> Purposes<'r> {
    pub(super) fn new(recording: &'r Recording, index: usize) -> Self {
        let told = vec![None; recording.origins.stacks()];
        let steps_ns = recording.named("Optimizer.step#");
        Self { recording, index, told, steps_ns, outside: None, sums: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, block: &Block) {
        let purpose = self.purpose(block);
        let (bytes, blocks) = self.sums.entry(purpose).or_default();
        (*bytes, *blocks) = (*bytes + block.bytes, *blocks + 1);
    }

    /// The largest first; none where nothing is told.
    pub(super) fn rows(self) -> Vec<Purposed> {
        if self.sums.keys().all(|purpose| *purpose == Purpose::Unknown) {
            return Vec::new();
        }
        let row = |(purpose, (bytes, blocks))| Purposed { purpose, bytes, blocks };
        let mut rows: Vec<Purposed> = self.sums.into_iter().map(row).collect();
        rows.sort_by_key(|row| (Reverse(row.bytes), row.purpose));
        rows
    }

    fn purpose(&mut self, block: &Block) -> Purpose {
        let origins = &self.recording.origins;
        if let Some(purpose) = Purpose::of_category(origins.spelt(block.origin.category)) {
            return purpose;
        }
        let told = match (self.told(block.origin.stack), block.born) {
            (Told::Nothing, BEFORE) => Told::Nothing,
            (Told::Nothing, born) if self.in_step(born as usize) => Told::InStep,
            // The backward pass runs on a thread without Python.
            (Told::Nothing, _) if block.origin.stack.is_empty() && calls_backward(origins, block.near) => {
                Told::For(Purpose::Gradients)
            }
            (told, _) => told,
        };
        match told {
            Told::For(purpose) => purpose,
            Told::InStep if self.is_held_after_step(block) => Purpose::OptimizerState,
            Told::InStep | Told::Nothing => Purpose::Unknown,
        }
    }

    fn told(&mut self, stack: StackId) -> Told {
        let origins = &self.recording.origins;
        match self.told.get_mut(stack.index()) {
            Some(told) => *told.get_or_insert_with(|| by_frames(origins, stack)),
            None => Told::Nothing,
        }
    }

    /// Whether an annotation says that an optimizer's step runs at an event. Steps do not lie in each other.
    fn in_step(&self, index: usize) -> bool {
        let Some(event) = self.recording.events.get(index) else { return false };
        let begun = self.steps_ns.partition_point(|(start, _)| *start <= event.time_ns);
        begun.checked_sub(1).is_some_and(|last| event.time_ns < self.steps_ns[last].1)
    }

    /// Whether the step that made a block was over at the moment: a request came since that is not of a step.
    fn is_held_after_step(&mut self, block: &Block) -> bool {
        if block.born == BEFORE || self.index == START {
            return true;
        }
        let outside = match self.outside {
            Some(outside) => outside,
            None => {
                let found = (0..=self.index).rev().find(|index| self.is_outside(*index));
                *self.outside.insert(found)
            }
        };
        outside.is_some_and(|outside| outside > block.born as usize)
    }

    fn is_outside(&mut self, index: usize) -> bool {
        let event = self.recording.events.get(index).filter(|event| event.action == Action::Alloc);
        event.is_some_and(|event| self.told(event.origin.stack) != Told::InStep && !self.in_step(index))
    }
}

/// What the frames of a stack tell; the innermost that tells something decides.
fn by_frames(origins: &Origins, stack: StackId) -> Told {
    let mut frames = origins.frames(stack);
    let spelt = |frame: &Frame| (origins.spelt(frame.name), origins.spelt(frame.filename));
    let mark = frames.by_ref().map(|frame| spelt(&frame)).find_map(|(name, file)| match name == FORWARD_PASS {
        // Only the backward pass has frames of the forward pass.
        true => Some(Told::For(Purpose::Gradients)),
        false => by_frame(name, file),
    });
    match mark {
        Some(told) => told,
        None if calls_backward(origins, stack) => Told::For(Purpose::Gradients),
        None => Told::Nothing,
    }
}

/// Whether a stack allocates a workspace of cuBLAS.
pub(crate) fn is_cublas_workspace(origins: &Origins, stack: StackId) -> bool {
    origins.frames(stack).any(|frame| {
        Kind::of(origins.spelt(frame.name), origins.spelt(frame.filename)) == Kind::Workspace(CUBLAS_WORKSPACE)
    })
}

/// Whether a stack is of a call of the backward pass, or of a function in Python that the backward pass called.
fn calls_backward(origins: &Origins, stack: StackId) -> bool {
    let outermost = origins.frames(stack).next_back();
    let called = outermost.is_some_and(|frame| origins.spelt(frame.filename).ends_with("torch/autograd/function.py"));
    called
        || origins.frames(stack).any(|frame| {
            let (name, file) = (origins.spelt(frame.name), &*slashes(origins.spelt(frame.filename)));
            let of_autograd = ["torch/_tensor.py", "torch/autograd/__init__.py", "torch/autograd/graph.py"];
            matches!(name, "backward" | "_make_grads" | "_engine_run_backward")
                && of_autograd.iter().any(|end| file.ends_with(end))
        })
}

/// What one frame tells; `None` where those around it may.
fn by_frame(name: &str, file: &str) -> Option<Told> {
    match Kind::of(name, file) {
        Kind::Workspace(_) => return Some(Told::For(Purpose::Workspace)),
        Kind::Node(_) | Kind::Engine => return Some(Told::For(Purpose::Gradients)),
        Kind::Library | Kind::PyTorch => {}
        _ => return None,
    }
    let file = slashes(file);
    let path = in_packages(&file)
        .unwrap_or_else(|| file.rsplit_once("/torch/").map_or(&file, |(before, _)| &file[before.len() + 1..]));
    let is = |names: &[&str]| names.contains(&name);
    let says = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let purpose = match path {
        "torch/nn/init.py" | "torch/nn/parameter.py" => Purpose::Parameters,
        "torch/nn/functional.py" => Purpose::Activations,
        "torch/nn/modules/module.py" if is(&["_call_impl", "_wrapped_call_impl", "_slow_forward"]) => {
            Purpose::Activations
        }
        "torch/nn/modules/module.py" if is(&["_apply", "to", "to_empty", "cuda", "load_state_dict"]) => {
            Purpose::Parameters
        }
        "torch/nn/parallel/distributed.py" if name == "_ddp_init_helper" => Purpose::Gradients,
        // Memory in which kernels are timed.
        "torch/_inductor/runtime/triton_heuristics.py" => return Some(Told::Nothing),
        _ if path.starts_with("torch/optim/") && name == "_init_group" => Purpose::OptimizerState,
        _ if path.starts_with("torch/optim/") => return Some(Told::InStep),
        _ if path.contains("/optim") && is(&["step", "_init_group", "init_state"]) => return Some(Told::InStep),
        _ if path.starts_with("torch/nn/modules/") && is(&["__init__", "reset_parameters"]) => Purpose::Parameters,
        _ if path.starts_with("torch/nn/modules/") && name == "forward" => Purpose::Activations,
        _ if path.starts_with("torch/_functorch/_aot_autograd/") && says(&["backward"]) => Purpose::Gradients,
        _ if path.starts_with("torch/_functorch/_aot_autograd/") && name == "forward" => Purpose::Activations,
        _ if path.starts_with("torch/distributed/fsdp/") && says(&["all_gather", "unshard"]) => Purpose::Parameters,
        _ if path.starts_with("torch/distributed/fsdp/") && name.contains("reduce") => Purpose::Gradients,
        // Hooks that run in a forward and make none of its results.
        _ if path.starts_with("torch/distributed/fsdp/") || path.starts_with("deepspeed/") => {
            return Some(Told::Nothing);
        }
        _ if path.starts_with("transformers/") && says(&["from_pretrained", "_load_", "load_state_dict"]) => {
            Purpose::Parameters
        }
        _ => return None,
    };
    Some(Told::For(purpose))
}
