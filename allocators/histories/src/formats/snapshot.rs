//! What the values of a snapshot's file are put together to, whichever form the file has.
//!
//! A reader pushes values in the order of the file, as the instructions of a pickle do: a container, a mark, and what the
//! container holds, which is then put into it. The file is gone through once: an event becomes an [`Event`](super::Event)
//! when it is appended to its device's list and is then forgotten. Stack frames become numbers ([`Origins`](super::Origins)),
//! or nothing where the receiver does not ask for them.

mod contents;
mod cut;
mod frames;
mod settings;
mod store;

use super::summary::{Receiver, Room};
use super::words::Word;
use super::{Format, Origin, Place, ReadError, ReadOptions, Summary};
use crate::steps;
use frames::Stacks;
use vramlab_device::budget::{Claim, OverBudget};

pub(super) use store::{Handle, Store, Value};

/// Which part of the snapshot is under way: the value of a key of the outermost dictionary, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) key: Word,
    at: usize,
    /// Up to here every second value above the part's is known to be a key.
    keys_until: usize,
}

/// What was understood so far, and the receiver of the events.
pub(super) struct Assembly<'r, 's> {
    pub(super) receiver: &'r mut Receiver<'s>,
    pub(super) summary: Summary,
    pub(super) stack: Vec<Value>,
    /// Heights of the stack at which a mark was set.
    pub(super) marks: Vec<usize>,
    pub(super) part: Option<Part>,
    pub(super) store: Store,
    pub(super) stacks: Stacks,
    /// For the stack.
    claim: Claim,
    /// For the summary.
    kept: Claim,
    /// What the settings may still take.
    room: Room,
    /// Where the blocks of the segment under way came from, by address. No more than its list of blocks has.
    block_origins: Vec<(u64, Origin)>,
    /// Offset of what comes next, for errors.
    pub(super) at: u64,
}

impl<'r, 's> Assembly<'r, 's> {
    pub(super) fn new(format: Format, options: &ReadOptions, receiver: &'r mut Receiver<'s>) -> Self {
        let budget = &options.budget;
        Self {
            summary: Summary::new(format),
            stack: Vec::new(),
            marks: Vec::new(),
            part: None,
            store: Store::new(budget, receiver.wants_origins),
            stacks: Stacks::new(budget),
            claim: budget.claim(),
            kept: budget.claim(),
            room: Room::default(),
            block_origins: Vec::new(),
            at: 0,
            receiver,
        }
    }

    /// The summary, which stays claimed.
    pub(super) fn into_summary(self) -> Summary {
        self.kept.keep();
        self.summary
    }

    /// Ends the file with the outermost value.
    pub(super) fn end(&mut self) -> Result<(), ReadError> {
        let top = self.pop()?;
        self.finish(top)
    }

    /// Sets a mark: what comes next goes into the container below it.
    pub(super) fn mark(&mut self) -> Result<(), ReadError> {
        let grown = self.claim.push(&mut self.marks, self.stack.len());
        self.within(grown)
    }

    /// Pushes a new dictionary.
    pub(super) fn dict(&mut self) -> Result<(), ReadError> {
        if self.is_frame_next() {
            let frame = self.stacks.new_frame();
            return self.push_made(frame);
        }
        self.push_container(Store::dict)
    }

    /// Pushes a new list.
    pub(super) fn list(&mut self) -> Result<(), ReadError> {
        if self.is_stack_next() {
            let stack = self.stacks.new_stack();
            return self.push_made(stack);
        }
        self.push_container(Store::list)
    }

    #[inline]
    pub(super) fn push(&mut self, value: Value) -> Result<(), ReadError> {
        let grown = self.claim.push(&mut self.stack, value);
        self.within(grown)
    }

    pub(super) fn push_made(&mut self, made: Result<Value, OverBudget>) -> Result<(), ReadError> {
        let value = self.within(made)?;
        self.push(value)
    }

    /// The error of a claim, at this place.
    #[inline]
    pub(super) fn within<T>(&self, claimed: Result<T, OverBudget>) -> Result<T, ReadError> {
        claimed.map_err(|over| ReadError::over(Place::Byte(self.at), over))
    }

    #[cold]
    pub(super) fn content(&self, text: impl Into<String>) -> ReadError {
        ReadError::content(Place::Byte(self.at), text)
    }

    pub(super) fn peek(&self) -> Result<Value, ReadError> {
        let at = self.below(1)?;
        Ok(self.stack[at])
    }

    pub(super) fn pop(&mut self) -> Result<Value, ReadError> {
        let at = self.below(1)?;
        let value = self.stack[at];
        self.cut(at);
        Ok(value)
    }

    /// Height of the stack below the `count` uppermost values, all of them above the last MARK.
    pub(super) fn below(&self, count: usize) -> Result<usize, ReadError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let from = self.stack.len().checked_sub(count).filter(|from| *from >= floor);
        from.ok_or_else(|| self.content("an instruction finds too few values; the file is damaged"))
    }

    /// Does something with the values above the last MARK.
    pub(super) fn with_marked(&mut self, act: fn(&mut Self, usize) -> Result<(), ReadError>) -> Result<(), ReadError> {
        let mark = self.marks.pop();
        act(self, mark.ok_or_else(|| self.content("an instruction finds no MARK; the file is damaged"))?)
    }

    /// Does something with the `count` uppermost values.
    pub(super) fn with_top(
        &mut self,
        count: usize,
        act: fn(&mut Self, usize) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        act(self, self.below(count)?)
    }

    /// Index of the container below `from`.
    pub(super) fn container_below(&self, from: usize) -> Result<usize, ReadError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        from.checked_sub(1)
            .filter(|at| *at >= floor)
            .ok_or_else(|| self.content("an instruction finds no container; the file is damaged"))
    }

    /// Drops the uppermost values.
    pub(super) fn cut(&mut self, height: usize) {
        steps::count(self.stack.len() - height);
        self.stack.truncate(height);
        match &mut self.part {
            Some(part) if part.at >= height => self.part = None,
            Some(part) => part.keys_until = part.keys_until.min(height),
            None => {}
        }
    }

    /// Makes a tuple of the values from `from` on.
    pub(super) fn tuple(&mut self, from: usize) -> Result<(), ReadError> {
        let key = from.checked_sub(1).map(|key| self.stack[key]);
        let tuple = match self.stack[from..] {
            [Value::Int(first), Value::Int(second)] if key == Some(Value::Word(Word::SegmentPoolId)) => {
                // PyTorch counts pools from 1. What is larger is no name of one.
                let pair = u32::try_from(first).ok().zip(u32::try_from(second).ok());
                pair.map_or(Value::Opaque, |(first, second)| Value::Pair(first, second))
            }
            _ => Value::Opaque,
        };
        self.cut(from);
        self.push(tuple)
    }

    pub(super) fn push_container(
        &mut self,
        make: fn(&mut Store) -> Result<Value, OverBudget>,
    ) -> Result<(), ReadError> {
        self.enter_part();
        let value = if self.is_opaque_here() { Ok(Value::Opaque) } else { make(&mut self.store) };
        self.push_made(value)
    }

    pub(super) fn collect_list(&mut self, mark: usize) -> Result<(), ReadError> {
        let list = self.store.list();
        let list = self.within(list)?;
        let kept = self.store.extend(list, &self.stack[mark..]);
        self.within(kept)?;
        self.cut(mark);
        self.push(list)
    }

    pub(super) fn collect_dict(&mut self, mark: usize) -> Result<(), ReadError> {
        let dict = self.store.dict();
        let dict = self.within(dict)?;
        self.set_pairs(dict, mark, mark)?;
        self.cut(mark);
        self.push(dict)
    }

    /// Puts the values above `from` into the dictionary below them.
    pub(super) fn set_items(&mut self, from: usize) -> Result<(), ReadError> {
        let target = self.container_below(from)?;
        match self.stack[target] {
            Value::Opaque => {}
            Value::Frame(frame) => self.set_frame(frame, from)?,
            dict => self.set_pairs(dict, target, from)?,
        }
        self.cut(from);
        Ok(())
    }

    /// Puts the values above `from` into a dictionary that lies, or will lie, at `target`.
    pub(super) fn set_pairs(&mut self, dict: Value, target: usize, from: usize) -> Result<(), ReadError> {
        if !(self.stack.len() - from).is_multiple_of(2) {
            return Err(self.content("a dictionary is given a key without a value; the file is damaged"));
        }
        let in_trace = self.part.is_some_and(|part| part.key == Word::DeviceTraces && target > part.at);
        let Some((pairs, claim)) = self.store.dict_and_claim(dict) else {
            return Err(self.content("keys are set in what is no dictionary; the file is damaged"));
        };
        let (mut grown, origins) = (Ok(()), self.receiver.wants_origins);
        for pair in self.stack[from..].chunks_exact(2) {
            if let Value::Word(key) = pair[0] {
                self.summary.keys.add(key);
            }
            if is_wanted(pair[0], in_trace, origins) && grown.is_ok() {
                grown = claim.push(pairs, (pair[0], pair[1]));
            }
        }
        self.within(grown)
    }

    /// Whether the value of the key that was pushed last is kept.
    pub(super) fn wants_next(&self) -> bool {
        let key = self.stack.last().copied().unwrap_or(Value::None);
        let dict = self.marks.last().map_or(0, |mark| mark - 1);
        let frame = matches!(self.stack[dict], Value::Frame(_));
        let in_trace = self.part.is_some_and(|part| part.key == Word::DeviceTraces && dict > part.at && !frame);
        is_wanted(key, in_trace, self.receiver.wants_origins)
    }
}

/// Whether a dictionary keeps what it has under a key; the dictionaries in a trace are events and what lies in them.
fn is_wanted(key: Value, in_trace: bool, origins: bool) -> bool {
    match key {
        Value::Word(word) => !in_trace || word.is_event_key() || origins && word.is_origin_key(),
        _ => !in_trace,
    }
}
