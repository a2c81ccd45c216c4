//! Stacks of frames: a list of small dictionaries under the key `frames`, most of which a snapshot references repeatedly through
//! the memo. Frames and stacks have numbers, which values refer to.

use super::Assembly;
use super::store::{Value, last_of};
use crate::formats::words::Word;
use crate::formats::{Annotation, Frame, Origin, ReadError, StackId, TextId};
use crate::steps;
use vramlab_device::budget::{Budget, Claim, OverBudget};

impl Assembly<'_, '_> {
    /// Whether the next list contains frames that the receiver needs.
    pub(in crate::formats) fn is_stack_next(&self) -> bool {
        self.receiver.wants_origins
            && matches!(self.stack.last(), Some(Value::Word(Word::Frames | Word::ForwardFrames)))
            && self.part.is_some_and(|part| matches!(part.key, Word::DeviceTraces | Word::Segments | Word::HostTraces))
    }

    /// Whether the next dictionary is a frame.
    pub(in crate::formats) fn is_frame_next(&self) -> bool {
        matches!(self.stack.last(), Some(Value::Stack(_) | Value::Frame(_)))
    }

    /// Adds a frame to the current list.
    pub(in crate::formats) fn add_frame(&mut self, frame: u32) -> Result<(), ReadError> {
        let number = self.frame_number(frame)?;
        let stored = self.stacks.claim.push(&mut self.stacks.under_way, number);
        self.within(stored)
    }

    /// The number of a frame.
    fn frame_number(&mut self, frame: u32) -> Result<u32, ReadError> {
        let made = self.stacks.frames[frame as usize];
        if let Some(number) = made.number {
            return Ok(number);
        }
        let number = self.receiver.origins.frame(made.frame);
        let number = self.within(number)?;
        self.stacks.frames[frame as usize].number = Some(number);
        Ok(number)
    }

    /// Sets the fields of a frame from the values above `from`.
    pub(in crate::formats) fn set_frame(&mut self, frame: u32, from: usize) -> Result<(), ReadError> {
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
    pub(in crate::formats) fn append_frames(&mut self, stack: u32, from: usize) -> Result<(), ReadError> {
        if self.stacks.which != stack {
            self.stacks.under_way.clear();
        }
        self.stacks.which = u32::MAX;
        let mut numbers = std::mem::take(&mut self.stacks.under_way);
        for at in from..self.stack.len() {
            let number = match self.stack[at] {
                Value::Frame(frame) => Some(self.frame_number(frame)?),
                // Frames of the forward pass are in Python's syntax.
                Value::Text(_) => {
                    let text = self.store.spelling(self.stack[at]).unwrap_or_default();
                    let number = self.receiver.origins.printed_frame(text);
                    self.within(number)?
                }
                _ => None,
            };
            if let Some(number) = number {
                let stored = self.stacks.claim.push(&mut numbers, number);
                self.within(stored)?;
            }
        }
        // A list longer than one batch is appended to more than once.
        let before = self.stacks.stacks[stack as usize];
        let origins = &mut self.receiver.origins;
        let stack_number = if before.is_empty() {
            origins.stack(&numbers)
        } else {
            let longer = [origins.frame_numbers(before), &numbers].concat();
            origins.stack(&longer)
        };
        self.stacks.stacks[stack as usize] = self.within(stack_number)?;
        self.stacks.under_way = numbers;
        Ok(())
    }

    /// The text of a value for origins; empty for other values and for strings that were too long.
    pub(in crate::formats) fn origin_text(&mut self, value: Value) -> Result<TextId, ReadError> {
        let text = self.store.spelling(value).unwrap_or_default();
        let text = self.receiver.origins.text(text);
        self.within(text)
    }

    /// Origin of an event, a block or a segment, from its dictionary.
    pub(in crate::formats) fn origin(&mut self, pairs: &[(Value, Value)]) -> Result<Origin, ReadError> {
        let mut origin = Origin::default();
        if !self.receiver.wants_origins {
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
        let stack_number = self.receiver.origins.with_forward(origin.stack, forward);
        origin.stack = self.within(stack_number)?;
        Ok(origin)
    }

    /// Keeps an annotation; other values are skipped.
    pub(in crate::formats) fn take_annotation(&mut self, value: Value) -> Result<(), ReadError> {
        self.summary.external_annotations += 1;
        let Some(pairs) = self.store.as_dict(value).filter(|_| self.receiver.wants_origins) else {
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
        let stored = self.receiver.origins.annotate(annotation);
        self.within(stored)?;
        if let Some(pairs) = self.store.take_dict(value) {
            self.store.recycle(pairs);
        }
        Ok(())
    }
}

/// Frames and stacks of the file, in order of appearance.
#[derive(Debug)]
pub(in crate::formats) struct Stacks {
    pub(in crate::formats) frames: Vec<Made>,
    pub(in crate::formats) stacks: Vec<StackId>,
    /// Frames of the current list, by their numbers in [`Origins`](crate::formats::Origins).
    pub(in crate::formats) under_way: Vec<u32>,
    /// The current list.
    pub(in crate::formats) which: u32,
    pub(in crate::formats) claim: Claim,
}

/// A frame as a dictionary of the file.
#[derive(Clone, Copy, Debug)]
pub(in crate::formats) struct Made {
    pub(in crate::formats) frame: Frame,
    /// Its number, once a stack contains it.
    pub(in crate::formats) number: Option<u32>,
}

impl Stacks {
    pub(in crate::formats) fn new(budget: &Budget) -> Self {
        Self { frames: Vec::new(), stacks: Vec::new(), under_way: Vec::new(), which: u32::MAX, claim: budget.claim() }
    }

    /// Number of frames and stacks so far.
    pub(in crate::formats) fn len(&self) -> (usize, usize) {
        (self.frames.len(), self.stacks.len())
    }

    /// Drops newer ones, to which nothing can refer any more.
    pub(in crate::formats) fn forget(&mut self, (frames, stacks): (usize, usize)) {
        self.frames.truncate(frames);
        self.stacks.truncate(stacks);
    }

    pub(in crate::formats) fn new_frame(&mut self) -> Result<Value, OverBudget> {
        self.claim.push(&mut self.frames, Made { frame: Frame::default(), number: None })?;
        // No budget has room for more entries than 32 bits can number.
        u32::try_from(self.frames.len() - 1).map(Value::Frame).map_err(|_| self.claim.refuse())
    }

    pub(in crate::formats) fn new_stack(&mut self) -> Result<Value, OverBudget> {
        self.claim.push(&mut self.stacks, StackId::default())?;
        u32::try_from(self.stacks.len() - 1).map(Value::Stack).map_err(|_| self.claim.refuse())
    }
}
