//! Allocations that a change of the program avoids: intermediate tensors of optimizer steps, and copies of weights that autocast
//! caches. Each takes one pass over the events, by the evidence of [`purposes`](super::purposes).

use super::purposes::{Evidence, Purpose, Purposes};
use crate::recording::Recording;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use vramlab::histories::formats::{Action, Origins, StackId};

/// Allocations of one kind.
#[derive(Debug, Default)]
pub(crate) struct Avoidable {
    /// Numbers of the allocations, from 0 in recorded order.
    pub(crate) numbers: BTreeSet<u64>,
    /// Numbers of the failed requests, likewise.
    pub(crate) refused: BTreeSet<u64>,
    /// Number of allocations of each stack.
    pub(crate) stacks: BTreeMap<StackId, u64>,
    /// Maximum of their simultaneously live bytes.
    pub(crate) peak_bytes: u64,
}

/// A live block that may be avoidable.
#[derive(Clone, Copy, Debug)]
struct Live {
    number: u64,
    stack: StackId,
    bytes: u64,
    /// Number of allocations before it: of operators, or outside of optimizer steps.
    others: u64,
}

/// Temporaries of optimizer steps.
#[derive(Debug, Default)]
pub(crate) struct OptimizerTemporaries {
    /// All of them. A fused step needs none.
    pub(crate) all: Avoidable,
    /// Those of lists, without the largest of each list: a step for one parameter at a time does not need them.
    pub(crate) lists: Avoidable,
    /// Whether the optimizer has a fused step, as far as frames show.
    pub(crate) fused: bool,
}

impl Avoidable {
    fn add(&mut self, live: &Live) {
        if self.numbers.insert(live.number) {
            *self.stacks.entry(live.stack).or_default() += 1;
        }
    }

    fn with_peak(mut self, recording: &Recording) -> Self {
        let (mut live, mut bytes, mut number) = (BTreeMap::new(), 0, 0);
        for event in recording.events.iter() {
            match event.action {
                Action::Alloc if event.bytes > 0 => {
                    if self.numbers.contains(&number) {
                        live.insert(event.addr, event.bytes);
                        bytes += event.bytes;
                        self.peak_bytes = self.peak_bytes.max(bytes);
                    }
                    number += 1;
                }
                Action::FreeRequested | Action::FreeCompleted => bytes -= live.remove(&event.addr).unwrap_or(0),
                _ => {}
            }
        }
        self
    }
}

/// Allocations that are freed within the optimizer's step that made them. A step that runs out of memory has no end, so all its blocks
/// count.
pub(crate) fn optimizer_temporaries(recording: &Recording) -> OptimizerTemporaries {
    let mut purposes = Purposes::new(recording, 0);
    let (mut out, mut lists) = (Avoidable::default(), BTreeMap::<(u64, StackId), Vec<Live>>::new());
    let mut outside = 0;
    let mut add = |out: &mut Avoidable, live: &Live| {
        out.add(live);
        // Without frames nothing shows which tensors are of one list.
        if !live.stack.is_empty() {
            lists.entry((live.others, live.stack)).or_default().push(*live);
        }
    };
    let mut step = BTreeMap::<u64, Live>::new();
    let (mut number, mut refused) = (0, 0);
    for (index, event) in recording.events.iter().enumerate() {
        let stack = event.origin.stack;
        match event.action {
            Action::Alloc | Action::Oom if event.bytes > 0 => {
                let evidence = purposes.evidence(stack);
                let in_step = evidence == Evidence::InStep || evidence == Evidence::None && purposes.in_step(index);
                if event.action == Action::Oom {
                    if in_step {
                        out.refused.insert(refused);
                        step.values().for_each(|live| add(&mut out, live));
                    }
                    refused += 1;
                    continue;
                }
                if in_step {
                    step.insert(event.addr, Live { number, stack, bytes: event.bytes, others: outside });
                } else if !purposes.in_step(index) && evidence != Evidence::For(Purpose::OptimizerState) {
                    // The step has ended: its other blocks are the optimizer's state.
                    step.clear();
                    outside += 1;
                }
                number += 1;
            }
            Action::FreeRequested | Action::FreeCompleted => {
                step.remove(&event.addr).iter().for_each(|live| add(&mut out, live));
            }
            _ => {}
        }
    }
    let mut of_lists = Avoidable::default();
    for list in lists.values_mut() {
        list.sort_by_key(|live| (live.number, Reverse(live.bytes)));
        list.dedup_by_key(|live| live.number);
        let largest = list.iter().max_by_key(|live| live.bytes).map(|live| live.number);
        list.iter().filter(|live| Some(live.number) != largest).for_each(|live| of_lists.add(live));
    }
    // A request that failed for a further tensor of a list does not happen either.
    if !of_lists.numbers.is_empty() {
        of_lists.refused.clone_from(&out.refused);
    }
    let fused = has_fused_step(&recording.origins, out.stacks.keys());
    OptimizerTemporaries { all: out.with_peak(recording), lists: of_lists.with_peak(recording), fused }
}

/// Optimizers of PyTorch with `fused=True`.
const FUSED: [&str; 4] = ["adam.py", "adamw.py", "sgd.py", "adagrad.py"];

/// Whether an optimizer whose step has these stacks has a fused step; also true where no frame names the optimizer.
fn has_fused_step<'s>(origins: &Origins, stacks: impl Iterator<Item = &'s StackId>) -> bool {
    let frames = stacks.flat_map(|stack| origins.frames(*stack));
    let files = frames.filter_map(|frame| {
        let file = origins.spelt(frame.filename).replace('\\', "/");
        let (_, name) = file.rsplit_once("torch/optim/")?;
        (name != "optimizer.py").then(|| name.to_owned())
    });
    let files: BTreeSet<String> = files.collect();
    files.is_empty() || files.iter().any(|file| FUSED.contains(&file.as_str()))
}

/// Allocations of operators after a cast that show that the cast's operator has ended: the first may be its result.
const ENDED: u64 = 2;

/// Copies of weights that autocast made and that live longer than the operator.
pub(crate) fn autocast_copies(recording: &Recording) -> Avoidable {
    let mut purposes = Purposes::new(recording, 0);
    let mut out = Avoidable::default();
    let mut casts = BTreeMap::<u64, Live>::new();
    let (mut number, mut operators) = (0, 0);
    for event in recording.events.iter() {
        let stack = event.origin.stack;
        match event.action {
            Action::Alloc if event.bytes > 0 => {
                if purposes.evidence(stack) == Evidence::InCast {
                    casts.insert(event.addr, Live { number, stack, bytes: event.bytes, others: operators });
                } else {
                    operators += 1;
                }
                number += 1;
            }
            Action::FreeRequested | Action::FreeCompleted => {
                let copy = casts.remove(&event.addr).filter(|live| operators - live.others >= ENDED);
                copy.iter().for_each(|live| out.add(live));
            }
            _ => {}
        }
    }
    casts.values().filter(|live| operators - live.others >= ENDED).for_each(|live| out.add(live));
    out.with_peak(recording)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_counted_by_stack() {
        let mut temporaries = Avoidable::default();
        let live = |number| Live { number, stack: StackId::default(), bytes: 512, others: 0 };
        [0, 1, 1, 2].into_iter().for_each(|number| temporaries.add(&live(number)));
        assert_eq!(temporaries.stacks, BTreeMap::from([(StackId::default(), 3)]), "the text of a stack is made once");
    }
}
