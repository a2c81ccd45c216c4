//! Stacks of frames: a list of small dictionaries under the key `frames`, most of which a snapshot refers to again and
//! again through the memo. Frames and stacks have numbers, under which values name them.

use super::machine::Machine;
use super::store::{Value, last_of};
use crate::formats::words::Word;
use crate::formats::{Annotation, Frame, Origin, ReadError, StackId, TextId};
use crate::steps;
use vramlab_device::budget::{Budget, Claim, OverBudget};

impl Machine<'_, '_, '_> {
    /// Whether the list that comes next is one of frames, and the receiver wants them.
    pub(super) fn is_stack_next(&self) -> bool {
        self.outcome.receiver.wants_origins
            && matches!(self.stack.last(), Some(Value::Word(Word::Frames | Word::ForwardFrames)))
            && self.part.is_some_and(|part| matches!(part.key, Word::DeviceTraces | Word::Segments))
    }

    /// Whether the dictionary that comes next is a frame.
    pub(super) fn is_frame_next(&self) -> bool {
        matches!(self.stack.last(), Some(Value::Stack(_) | Value::Frame(_)))
    }

    /// Passes over references to the memo that follow each other: most of a file with stack frames are these, in lists
    /// that the reader does not look into.
    pub(super) fn skip_references(&mut self) -> Result<(), ReadError> {
        self.references(|_, _| true)
    }

    /// Takes references to frames that follow each other into a stack, without a step for each.
    pub(super) fn refer_to_frames(&mut self, stack: u32) -> Result<(), ReadError> {
        self.stacks.which = stack;
        self.stacks.under_way.clear();
        let mut failed = None;
        self.references(|machine, value| {
            let Value::Frame(frame) = value else { return false };
            match machine.frame_number(frame).and_then(|number| {
                let kept = machine.stacks.claim.push(&mut machine.stacks.under_way, number);
                machine.within(kept)
            }) {
                Ok(()) => true,
                Err(error) => {
                    failed = Some(error);
                    false
                }
            }
        })?;
        failed.map_or(Ok(()), Err)
    }

    /// Takes the references to the memo that come next, as long as `take` wants them.
    fn references(&mut self, mut take: impl FnMut(&mut Self, Value) -> bool) -> Result<(), ReadError> {
        loop {
            let mut taken = 0;
            loop {
                let (index, bytes) = match self.input.buffered()[taken..] {
                    [b'h', index, ..] => (u32::from(index), 2),
                    [b'j', a, b, c, d, ..] => (u32::from_le_bytes([a, b, c, d]), 5),
                    _ => break,
                };
                let Some(value) = self.memo.get(index) else { break };
                if !take(self, value) {
                    self.input.advance(taken);
                    return Ok(());
                }
                taken += bytes;
            }
            let all = self.input.buffered().len() - taken < 5;
            self.input.advance(taken);
            if taken == 0 || !all || !self.input.ensure(5)? {
                return Ok(());
            }
        }
    }

    /// The number of a frame.
    fn frame_number(&mut self, frame: u32) -> Result<u32, ReadError> {
        let made = self.stacks.frames[frame as usize];
        if let Some(number) = made.number {
            return Ok(number);
        }
        let number = self.outcome.receiver.origins.frame(made.frame);
        let number = self.within(number)?;
        self.stacks.frames[frame as usize].number = Some(number);
        Ok(number)
    }

    /// Sets what the values above `from` say of a frame.
    pub(super) fn set_frame(&mut self, frame: u32, from: usize) -> Result<(), ReadError> {
        for at in (from..self.stack.len().saturating_sub(1)).step_by(2) {
            steps::count(1);
            let (key, value) = (self.stack[at], self.stack[at + 1]);
            let Value::Word(key) = key else { continue };
            match (key, value) {
                (Word::Name, _) => self.stacks.frames[frame as usize].frame.name = self.origin_text(value)?,
                (Word::Filename, _) => self.stacks.frames[frame as usize].frame.filename = self.origin_text(value)?,
                (Word::Line, Value::Int(line)) => {
                    self.stacks.frames[frame as usize].frame.line = u32::try_from(line).unwrap_or(0);
                }
                _ => continue,
            }
            self.stacks.frames[frame as usize].number = None;
        }
        Ok(())
    }

    /// Appends the values above `from` to a stack.
    pub(super) fn append_frames(&mut self, stack: u32, from: usize) -> Result<(), ReadError> {
        if self.stacks.which != stack {
            self.stacks.under_way.clear();
        }
        self.stacks.which = u32::MAX;
        let mut numbers = std::mem::take(&mut self.stacks.under_way);
        for at in from..self.stack.len() {
            let number = match self.stack[at] {
                Value::Frame(frame) => Some(self.frame_number(frame)?),
                // Those of the forward pass are as Python prints them.
                Value::Text(_) => {
                    let text = self.store.spelling(self.stack[at]).unwrap_or_default();
                    let number = self.outcome.receiver.origins.printed_frame(text);
                    self.within(number)?
                }
                _ => None,
            };
            if let Some(number) = number {
                let kept = self.stacks.claim.push(&mut numbers, number);
                self.within(kept)?;
            }
        }
        // A list that is longer than one batch is appended to more than once.
        let before = self.stacks.stacks[stack as usize];
        let origins = &mut self.outcome.receiver.origins;
        let whole = if before.is_empty() {
            origins.stack(&numbers)
        } else {
            let longer = [origins.frame_numbers(before), &numbers].concat();
            origins.stack(&longer)
        };
        self.stacks.stacks[stack as usize] = self.within(whole)?;
        self.stacks.under_way = numbers;
        Ok(())
    }

    /// The text of a value among those that origins refer to; nothing for what is none or was too long to be kept.
    pub(super) fn origin_text(&mut self, value: Value) -> Result<TextId, ReadError> {
        let text = self.store.spelling(value).unwrap_or_default();
        let text = self.outcome.receiver.origins.text(text);
        self.within(text)
    }

    /// Where an event, a block or a segment came from, by its dictionary.
    pub(super) fn origin(&mut self, pairs: &[(Value, Value)]) -> Result<Origin, ReadError> {
        let mut origin = Origin::default();
        if !self.outcome.receiver.wants_origins {
            return Ok(origin);
        }
        let mut forward = StackId::default();
        for (key, value) in pairs {
            match (key, value) {
                (Value::Word(Word::Frames), Value::Stack(stack)) => origin.stack = self.stacks.stacks[*stack as usize],
                (Value::Word(Word::ForwardFrames), Value::Stack(stack)) => {
                    forward = self.stacks.stacks[*stack as usize]
                }
                (Value::Word(Word::Category), _) => origin.category = self.origin_text(*value)?,
                (Value::Word(Word::UserMetadata), _) => origin.note = self.origin_text(*value)?,
                _ => {}
            }
        }
        let whole = self.outcome.receiver.origins.with_forward(origin.stack, forward);
        origin.stack = self.within(whole)?;
        Ok(origin)
    }

    /// Keeps an annotation; what is none is passed over.
    pub(super) fn take_annotation(&mut self, value: Value) -> Result<(), ReadError> {
        self.outcome.summary.external_annotations += 1;
        let Some(pairs) = self.store.as_dict(value).filter(|_| self.outcome.receiver.wants_origins) else {
            return Ok(());
        };
        let of = |key: Word| last_of(pairs, key).unwrap_or(Value::None);
        let [name, stage, device, time] = [Word::Name, Word::Stage, Word::Device, Word::TimeUs].map(of);
        let annotation = Annotation {
            name: self.origin_text(name)?,
            device: device.unsigned().and_then(|number| u16::try_from(number).ok()),
            start: stage == Value::Word(Word::Start),
            time_ns: time.unsigned().unwrap_or(0).saturating_mul(1000),
        };
        let kept = self.outcome.receiver.origins.annotate(annotation);
        self.within(kept)?;
        if let Some(pairs) = self.store.take_dict(value) {
            self.store.recycle(pairs);
        }
        Ok(())
    }
}

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
