//! The purpose of memory (parameters, gradients, optimizer state, activations, workspaces), inferred from frames, PyTorch's
//! categories and annotations.

use super::frames::{CUBLAS_WORKSPACE, Kind, in_packages, slashes};
use crate::recording::{Recording, START};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use vramlab::histories::formats::{Action, FORWARD_PASS, Frame, Origins, StackId};
use vramlab::histories::memory::{BEFORE, Block};

/// The purpose of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Purpose {
    /// Parameters and buffers of modules: allocated by `Module.to`, `load_state_dict`, a module's `__init__` or `torch.nn.init`.
    Parameters,
    /// Allocated by the backward pass: gradients of parameters and intermediate gradients.
    Gradients,
    /// Allocated in `torch.optim` and live after the step.
    OptimizerState,
    /// Allocated in a module's `forward`.
    Activations,
    /// Allocated in an optimizer's step and not yet live after it: lists of intermediate tensors of `foreach` implementations.
    OptimizerTemporaries,
    /// Copies of weights in lower precision that autocast caches until its context ends; only C++ frames show them.
    AutocastCopies,
    /// Workspaces of cuBLAS and cuDNN; only C++ frames show them.
    Workspace,
    /// Unknown from the recording.
    Unknown,
}

/// Memory with one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PurposeShare {
    pub(crate) purpose: Purpose,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

impl Purpose {
    /// The name, and the evidence for it.
    pub(super) fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Parameters => {
                ("parameters", "allocated by Module.to, load_state_dict, a module's __init__ or torch.nn.init")
            }
            Self::Gradients => ("gradients", "allocated by the backward pass, intermediate gradients included"),
            Self::OptimizerState => ("optimizer state", "allocated in an optimizer's step and live after it"),
            Self::Activations => ("activations", "allocated in a module's forward"),
            Self::OptimizerTemporaries => {
                ("optimizer temporaries", "allocated in an optimizer's step that has not ended")
            }
            Self::AutocastCopies => {
                ("autocast copies", "allocated by autocast's cached_cast and live after the operator")
            }
            Self::Workspace => ("workspace", "allocated for cuBLAS or cuDNN"),
            Self::Unknown => ("unknown", "no evidence in the recording"),
        }
    }

    /// From PyTorch's name of a category.
    fn from_category(name: &str) -> Option<Self> {
        Some(match name.to_lowercase().as_str() {
            "parameter" => Self::Parameters,
            "gradient" => Self::Gradients,
            "optimizer_state" => Self::OptimizerState,
            "activation" => Self::Activations,
            _ => return None,
        })
    }
}

/// Evidence from a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Evidence {
    For(Purpose),
    /// Allocated in an optimizer's step: optimizer state if live after the step, else a temporary.
    InStep,
    /// Allocated by autocast's cast: a cached copy if live after the operator.
    InCast,
    None,
}

/// Sums by purpose at a moment.
pub(super) struct Purposes<'r> {
    recording: &'r Recording,
    index: usize,
    /// The evidence from each stack, once inferred.
    by_stack: Vec<Option<Evidence>>,
    /// Start and end of each optimizer step, from PyTorch's annotations.
    steps_ns: Vec<(u64, u64)>,
    /// The last request before the moment outside an optimizer's step, once searched.
    outside: Option<Option<usize>>,
    sums: BTreeMap<Purpose, (u64, u64)>,
}

impl<'r> Purposes<'r> {
    pub(super) fn new(recording: &'r Recording, index: usize) -> Self {
        let by_stack = vec![None; recording.origins.stacks()];
        let steps_ns = recording.named("Optimizer.step#");
        Self { recording, index, by_stack, steps_ns, outside: None, sums: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, block: &Block) {
        let purpose = self.purpose(block);
        let (bytes, blocks) = self.sums.entry(purpose).or_default();
        (*bytes, *blocks) = (*bytes + block.bytes, *blocks + 1);
    }

    /// Rows, the largest first; empty if no purpose is known.
    pub(super) fn rows(self) -> Vec<PurposeShare> {
        if self.sums.keys().all(|purpose| *purpose == Purpose::Unknown) {
            return Vec::new();
        }
        let row = |(purpose, (bytes, blocks))| PurposeShare { purpose, bytes, blocks };
        let mut rows: Vec<PurposeShare> = self.sums.into_iter().map(row).collect();
        rows.sort_by_key(|row| (Reverse(row.bytes), row.purpose));
        rows
    }

    fn purpose(&mut self, block: &Block) -> Purpose {
        let origins = &self.recording.origins;
        if let Some(purpose) = Purpose::from_category(origins.spelt(block.origin.category)) {
            return purpose;
        }
        let evidence = match (self.evidence(block.origin.stack), block.born) {
            (Evidence::None, BEFORE) => Evidence::None,
            (Evidence::None, born) if self.in_step(born as usize) => Evidence::InStep,
            // The backward pass runs on a thread without Python frames.
            (Evidence::None, _) if block.origin.stack.is_empty() && calls_backward(origins, block.near) => {
                Evidence::For(Purpose::Gradients)
            }
            (evidence, _) => evidence,
        };
        match evidence {
            Evidence::For(purpose) => purpose,
            Evidence::InStep if self.is_live_after_step(block) => Purpose::OptimizerState,
            Evidence::InStep => Purpose::OptimizerTemporaries,
            Evidence::InCast if self.is_live_after_operator(block) => Purpose::AutocastCopies,
            Evidence::InCast => Purpose::Activations,
            Evidence::None => Purpose::Unknown,
        }
    }

    pub(super) fn evidence(&mut self, stack: StackId) -> Evidence {
        let origins = &self.recording.origins;
        match self.by_stack.get_mut(stack.index()) {
            Some(evidence) => *evidence.get_or_insert_with(|| by_frames(origins, stack)),
            None => Evidence::None,
        }
    }

    /// Whether an annotation shows that an optimizer's step runs at an event. Steps do not nest.
    pub(super) fn in_step(&self, index: usize) -> bool {
        let Some(event) = self.recording.events.get(index) else { return false };
        let begun = self.steps_ns.partition_point(|(start, _)| *start <= event.time_ns);
        begun.checked_sub(1).is_some_and(|last| event.time_ns < self.steps_ns[last].1)
    }

    /// Whether the step that allocated a block has ended: a request outside a step followed.
    fn is_live_after_step(&mut self, block: &Block) -> bool {
        if block.born == BEFORE || self.index == START {
            return true;
        }
        let outside = match self.outside {
            Some(outside) => outside,
            None => {
                let outside = (0..=self.index).rev().find(|index| self.is_outside(*index));
                *self.outside.insert(outside)
            }
        };
        outside.is_some_and(|outside| outside > block.born as usize)
    }

    /// Whether the operator for which a block was cast has ended. It allocates its result once, so a second allocation outside
    /// of casts belongs to a later operator.
    fn is_live_after_operator(&mut self, block: &Block) -> bool {
        if block.born == BEFORE || self.index == START {
            return true;
        }
        let is_other = |this: &mut Self, index: usize| {
            let event = this.recording.events.get(index).filter(|event| event.action == Action::Alloc);
            event.is_some_and(|event| this.evidence(event.origin.stack) != Evidence::InCast)
        };
        (block.born as usize + 1..=self.index).filter(|index| is_other(self, *index)).nth(1).is_some()
    }

    fn is_outside(&mut self, index: usize) -> bool {
        let event = self.recording.events.get(index).filter(|event| event.action == Action::Alloc);
        event.is_some_and(|event| self.evidence(event.origin.stack) != Evidence::InStep && !self.in_step(index))
    }
}

/// The evidence from the frames of a stack; the innermost frame with evidence decides.
fn by_frames(origins: &Origins, stack: StackId) -> Evidence {
    let mut frames = origins.frames(stack);
    let spelt = |frame: &Frame| (origins.spelt(frame.name), origins.spelt(frame.filename));
    let mark = frames.by_ref().map(|frame| spelt(&frame)).find_map(|(name, file)| match name == FORWARD_PASS {
        // Only the backward pass has frames of the forward pass.
        true => Some(Evidence::For(Purpose::Gradients)),
        false => by_frame(name, file),
    });
    match mark {
        Some(evidence) => evidence,
        None if calls_backward(origins, stack) => Evidence::For(Purpose::Gradients),
        None => Evidence::None,
    }
}

/// Whether a stack allocates a cuBLAS workspace.
pub(crate) fn is_cublas_workspace(origins: &Origins, stack: StackId) -> bool {
    origins.frames(stack).any(|frame| {
        Kind::new(origins.spelt(frame.name), origins.spelt(frame.filename)) == Kind::Workspace(CUBLAS_WORKSPACE)
    })
}

/// Whether a stack calls the backward pass, or belongs to a Python function that the backward pass called.
fn calls_backward(origins: &Origins, stack: StackId) -> bool {
    let outermost = origins.frames(stack).next_back();
    let called = outermost.is_some_and(|frame| origins.spelt(frame.filename).ends_with("torch/autograd/function.py"));
    called
        || origins.frames(stack).any(|frame| {
            let (name, file) = (origins.spelt(frame.name), &*slashes(origins.spelt(frame.filename)));
            let autograd_files = ["torch/_tensor.py", "torch/autograd/__init__.py", "torch/autograd/graph.py"];
            matches!(name, "backward" | "_make_grads" | "_engine_run_backward")
                && autograd_files.iter().any(|end| file.ends_with(end))
        })
}

/// Evidence from one frame; `None` if outer frames decide.
fn by_frame(name: &str, file: &str) -> Option<Evidence> {
    if name.contains("at::autocast::cached_cast") {
        return Some(Evidence::InCast);
    }
    match Kind::new(name, file) {
        Kind::Workspace(_) => return Some(Evidence::For(Purpose::Workspace)),
        Kind::Node(_) | Kind::Engine => return Some(Evidence::For(Purpose::Gradients)),
        Kind::Library | Kind::PyTorch => {}
        _ => return None,
    }
    let file = slashes(file);
    let path = in_packages(&file)
        .unwrap_or_else(|| file.rsplit_once("/torch/").map_or(&file, |(before, _)| &file[before.len() + 1..]));
    let is = |names: &[&str]| names.contains(&name);
    let contains = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
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
        // Buffers for timing kernels.
        "torch/_inductor/runtime/triton_heuristics.py" => return Some(Evidence::None),
        _ if path.starts_with("torch/optim/") && name == "_init_group" => Purpose::OptimizerState,
        _ if path.starts_with("torch/optim/") => return Some(Evidence::InStep),
        _ if path.contains("/optim") && is(&["step", "_init_group", "init_state"]) => return Some(Evidence::InStep),
        _ if path.starts_with("torch/nn/modules/") && is(&["__init__", "reset_parameters"]) => Purpose::Parameters,
        _ if path.starts_with("torch/nn/modules/") && name == "forward" => Purpose::Activations,
        _ if path.starts_with("torch/_functorch/_aot_autograd/") && contains(&["backward"]) => Purpose::Gradients,
        _ if path.starts_with("torch/_functorch/_aot_autograd/") && name == "forward" => Purpose::Activations,
        _ if path.starts_with("torch/distributed/fsdp/") && contains(&["all_gather", "unshard"]) => Purpose::Parameters,
        _ if path.starts_with("torch/distributed/fsdp/") && name.contains("reduce") => Purpose::Gradients,
        // Hooks that run in a forward pass but allocate none of its results.
        _ if path.starts_with("torch/distributed/fsdp/") || path.starts_with("deepspeed/") => {
            return Some(Evidence::None);
        }
        _ if path.starts_with("transformers/") && contains(&["from_pretrained", "_load_", "load_state_dict"]) => {
            Purpose::Parameters
        }
        _ => return None,
    };
    Some(Evidence::For(purpose))
}
