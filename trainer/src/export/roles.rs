//! The origin of a tensor within a step, for exports: its role in its layer and the phase of the step as stack frames,
//! epochs and steps as annotations.
//!
//! Every tensor that an operation produces is allocated right before that operation (`mlp.rs`), so the first work that is queued
//! after an allocation writes it, and the ranges around that work identify its origin.

use super::CallLine;
use std::collections::BTreeMap;
use vramlab::budget::{Budget, OverBudget};
use vramlab::histories::formats::{Annotation, Event, Frame, Origin, Origins};

/// Known origins of tensors.
#[derive(Debug)]
pub(super) struct Roles {
    pub(super) origins: Origins,
    /// Live blocks.
    held: BTreeMap<u64, Origin>,
    /// Epoch and step that are open.
    open: Vec<String>,
}

/// Returns true for a call that queues work that writes memory.
pub(super) fn is_work(call: &CallLine) -> bool {
    call.kernel.is_some() || call.call.starts_with("copy") || call.call.starts_with("memset")
}

impl Roles {
    pub(super) fn new() -> Self {
        Self { origins: Origins::new(&Budget::default()), held: BTreeMap::new(), open: Vec::new() }
    }

    /// Origin of the block that `work` writes.
    pub(super) fn allocated(&mut self, event: &Event, work: Option<&CallLine>) -> Result<Origin, OverBudget> {
        let Some(work) = work else { return Ok(Origin::default()) };
        self.reach(&work.path, event.time_ns)?;
        let mut numbers = Vec::new();
        for (name, place) in places(&work.path, work.kernel.as_deref()) {
            let (name, filename) = (self.origins.text(&name)?, self.origins.text(&place)?);
            numbers.push(self.origins.frame(Frame { name, filename, line: 0 })?);
        }
        let origin = Origin { stack: self.origins.stack(&numbers)?, ..Origin::default() };
        self.held.insert(event.addr, origin);
        Ok(origin)
    }

    pub(super) fn freed(&mut self, addr: u64) {
        self.held.remove(&addr);
    }

    /// Ends and begins epochs and steps, so that those of a path are open.
    fn reach(&mut self, path: &str, time_ns: u64) -> Result<(), OverBudget> {
        let mut scopes: Vec<String> = Vec::new();
        for part in path.split('/').filter(|part| is_counted(part)) {
            let name = scopes.last().map_or_else(|| part.to_owned(), |outer| format!("{outer} {part}"));
            scopes.push(name);
        }
        while !scopes.starts_with(&self.open) {
            self.end(time_ns)?;
        }
        for name in scopes.into_iter().skip(self.open.len()) {
            let text = self.origins.text(&name)?;
            self.origins.annotate(Annotation { name: text, device: Some(0), start: true, time_ns })?;
            self.open.push(name);
        }
        Ok(())
    }

    fn end(&mut self, time_ns: u64) -> Result<(), OverBudget> {
        let Some(name) = self.open.pop() else { return Ok(()) };
        let name = self.origins.text(&name)?;
        self.origins.annotate(Annotation { name, device: Some(0), start: false, time_ns })
    }

    /// Ends open epochs and steps, and stores the origins of blocks that are still live.
    pub(super) fn finish(&mut self, time_ns: u64) -> Result<(), OverBudget> {
        while !self.open.is_empty() {
            self.end(time_ns)?;
        }
        for (addr, origin) in std::mem::take(&mut self.held) {
            self.origins.set_block(0, addr, origin)?;
        }
        Ok(())
    }
}

/// Returns true for an epoch or a step.
fn is_counted(range: &str) -> bool {
    ["epoch ", "step ", "steps "].iter().any(|start| range.starts_with(start))
}

/// Names and the places that they are in, from the inside out: `weights gradient` in `layer 3`, `backward` in `training`.
fn places(path: &str, kernel: Option<&str>) -> Vec<(String, String)> {
    let ranges: Vec<&str> = path.split('/').filter(|range| !range.is_empty() && !is_counted(range)).collect();
    let layer = ranges.iter().find(|range| range.starts_with("layer "));
    let validates = ranges.contains(&"validate");
    let whole = if validates { "validation" } else { "training" };
    // The innermost range has the name of the operation.
    let mut phases = ranges.iter().filter(|range| !range.starts_with("layer ") && Some(**range) != kernel);
    let phase = phases.rfind(|range| **range != "validate").copied();
    let role = role(kernel).unwrap_or(if path.is_empty() { "parameters or data" } else { "data" }).to_owned();
    match (layer, phase) {
        (Some(layer), Some(phase)) => {
            vec![(role, (*layer).to_owned()), (phase.to_owned(), whole.to_owned())]
        }
        (None, Some(phase)) => vec![(role, phase.to_owned()), (phase.to_owned(), whole.to_owned())],
        (Some(layer), None) => vec![(role, (*layer).to_owned())],
        (None, None) if path.is_empty() => vec![(role, "set-up".to_owned())],
        (None, None) => vec![(role, whole.to_owned())],
    }
}

/// Role of the tensor that an operation writes; the kernel's name if there is no specific one, `None` for a copy.
fn role(kernel: Option<&str>) -> Option<&str> {
    let kernel = kernel?;
    let roles = [
        ("gemm_tn", "weights gradient"),
        ("linear_gradient", "weights gradient"),
        ("bias_gradient", "bias gradient"),
        ("gemm_nn", "input gradient"),
        ("linear_input", "input gradient"),
        ("relu_backward", "activation gradient"),
        ("gemm_nt", "product"),
        ("add_bias", "product and bias"),
        ("linear_forward", "activation"),
        ("relu", "activation"),
        ("softmax", "loss and its gradient"),
        ("gather", "batch"),
    ];
    Some(roles.iter().find(|(start, _)| kernel.starts_with(start)).map_or(kernel, |(_, role)| role))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(path: &str, kernel: Option<&str>) -> String {
        let places = places(path, kernel).into_iter().map(|(name, place)| format!("{place} {name}"));
        places.collect::<Vec<String>>().join(" < ")
    }

    #[test]
    fn a_tensor_has_its_layer_and_role() {
        for (path, kernel, words) in [
            (
                "epoch 1/step 2/backward/layer 3/gemm_tn_sliced",
                Some("gemm_tn_sliced"),
                "layer 3 weights gradient < training backward",
            ),
            ("epoch 1/step 2/forward/layer 1/relu_f32", Some("relu_f32"), "layer 1 activation < training forward"),
            (
                "epoch 1/validate/forward/layer 1/add_bias",
                Some("add_bias"),
                "layer 1 product and bias < validation forward",
            ),
            ("epoch 1/step 1/load/gather_rows_f32", Some("gather_rows_f32"), "load batch < training load"),
            ("epoch 1", None, "training data"),
            ("", None, "set-up parameters or data"),
            ("epoch 1/step 1/whole", Some("something"), "whole something < training whole"),
        ] {
            assert_eq!(said(path, kernel), words);
        }
    }

    #[test]
    fn epochs_and_steps_begin_and_end() {
        let mut roles = Roles::new();
        for (path, time) in [("epoch 1", 1), ("epoch 1/step 1/x", 2), ("epoch 1/step 2/x", 3), ("epoch 2/step 1", 4)] {
            roles.reach(path, time).unwrap();
        }
        roles.finish(9).unwrap();
        let said: Vec<String> = roles
            .origins
            .annotations()
            .iter()
            .map(|of| format!("{}{}@{}", if of.start { "+" } else { "-" }, roles.origins.spelt(of.name), of.time_ns))
            .collect();
        let scopes = [
            "+epoch 1@1",
            "+epoch 1 step 1@2",
            "-epoch 1 step 1@3",
            "+epoch 1 step 2@3",
            "-epoch 1 step 2@4",
            "-epoch 1@4",
            "+epoch 2@4",
            "+epoch 2 step 1@4",
            "-epoch 2 step 1@9",
            "-epoch 2@9",
        ];
        assert_eq!(said, scopes);
    }
}
