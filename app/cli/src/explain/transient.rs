//! Allocations that a change of the program avoids: intermediate tensors of optimizer steps, and copies of weights that autocast
//! caches. Each takes one pass over the events, by the evidence of [`purposes`](super::purposes).

use super::purposes::{Evidence, Purpose, Purposes};
use crate::recording::Recording;
use std::collections::{BTreeMap, BTreeSet};
use vramlab::histories::formats::{Action, StackId};

/// Allocations of one kind.
#[derive(Debug, Default)]
pub(crate) struct Avoidable {
    /// Numbers of the allocations, from 0 in recorded order.
    pub(crate) numbers: BTreeSet<u64>,
    /// Numbers of the failed requests, likewise.
    pub(crate) refused: BTreeSet<u64>,
    /// Stack of each allocation.
    pub(crate) stacks: Vec<StackId>,
    /// Maximum of their simultaneously live bytes.
    pub(crate) peak_bytes: u64,
}

/// A live block that may be avoidable.
#[derive(Clone, Copy, Debug)]
struct Live {
    number: u64,
    stack: StackId,
    /// Number of allocations of operators before it.
    operators: u64,
}

impl Avoidable {
    fn add(&mut self, live: &Live) {
        if self.numbers.insert(live.number) {
            self.stacks.push(live.stack);
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
pub(crate) fn optimizer_temporaries(recording: &Recording) -> Avoidable {
    let mut purposes = Purposes::new(recording, 0);
    let mut out = Avoidable::default();
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
                        step.values().for_each(|live| out.add(live));
                    }
                    refused += 1;
                    continue;
                }
                if in_step {
                    step.insert(event.addr, Live { number, stack, operators: 0 });
                } else if !purposes.in_step(index) && evidence != Evidence::For(Purpose::OptimizerState) {
                    // The step has ended: its other blocks are the optimizer's state.
                    step.clear();
                }
                number += 1;
            }
            Action::FreeRequested | Action::FreeCompleted => {
                step.remove(&event.addr).iter().for_each(|live| out.add(live));
            }
            _ => {}
        }
    }
    out.with_peak(recording)
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
                    casts.insert(event.addr, Live { number, stack, operators });
                } else {
                    operators += 1;
                }
                number += 1;
            }
            Action::FreeRequested | Action::FreeCompleted => {
                let copy = casts.remove(&event.addr).filter(|live| operators - live.operators >= ENDED);
                copy.iter().for_each(|live| out.add(live));
            }
            _ => {}
        }
    }
    casts.values().filter(|live| operators - live.operators >= ENDED).for_each(|live| out.add(live));
    out.with_peak(recording)
}
