//! Frames and stacks by the numbers under which values name them.

use super::store::Value;
use crate::formats::{Frame, StackId};
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Frames and stacks that the file made, by the order in which it did.
#[derive(Debug)]
pub(super) struct Stacks {
    pub(super) frames: Vec<Made>,
    pub(super) stacks: Vec<StackId>,
    /// Frames of the list that is under way, by their numbers in [`Origins`](crate::formats::Origins).
    pub(super) under_way: Vec<u32>,
    /// Which list that is.
    pub(super) which: u32,
    pub(super) claim: Claim,
}

/// A frame as a dictionary of the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Made {
    pub(super) frame: Frame,
    /// Its number, once a stack has it.
    pub(super) number: Option<u32>,
}

impl Stacks {
    pub(super) fn new(budget: &Budget) -> Self {
        Self { frames: Vec::new(), stacks: Vec::new(), under_way: Vec::new(), which: u32::MAX, claim: budget.claim() }
    }

    pub(super) fn new_frame(&mut self) -> Result<Value, OverBudget> {
        self.claim.push(&mut self.frames, Made { frame: Frame::default(), number: None })?;
        // More than can be named is more than any budget has room for.
        u32::try_from(self.frames.len() - 1).map(Value::Frame).map_err(|_| self.claim.refuse())
    }

    pub(super) fn new_stack(&mut self) -> Result<Value, OverBudget> {
        self.claim.push(&mut self.stacks, StackId::default())?;
        u32::try_from(self.stacks.len() - 1).map(Value::Stack).map_err(|_| self.claim.refuse())
    }
}
