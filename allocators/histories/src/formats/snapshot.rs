//! Interprets the values of a snapshot, in either file format.
//!
//! A reader pushes values in file order, as the instructions of a pickle do: a container, a mark, and the container's items,
//! which are then added to it. The file is read once: an event becomes an [`Event`](super::Event) when it is appended to its
//! device's list and is then dropped. Stack frames become numbers ([`Origins`](super::Origins)), or are skipped if the receiver
//! does not need them.

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

/// The current part of the snapshot: the value of a key of the outermost dictionary, and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) key: Word,
    at: usize,
    /// Up to here every second value above the part's is known to be a key.
    keys_until: usize,
}

/// Values interpreted so far, and the receiver of the events.
pub(super) struct Assembly<'r, 's> {
    pub(super) receiver: &'r mut Receiver<'s>,
    pub(super) summary: Summary,
    pub(super) stack: Vec<Value>,
    /// Stack heights of the marks.
    pub(super) marks: Vec<usize>,
    pub(super) part: Option<Part>,
    pub(super) store: Store,
    pub(super) stacks: Stacks,
    /// Claim for the stack.
    claim: Claim,
    /// Claim for the summary.
    retained: Claim,
    /// Remaining budget for the settings.
    room: Room,
    /// Origins of the current segment's blocks, by address; at most as many as blocks.
    block_origins: Vec<(u64, Origin)>,
    /// Offset of the next value, for errors.
    pub(super) at: u64,
    /// Whether the snapshot is the value of `snapshot` in another dictionary, which is dropped.
    pub(super) is_wrapped: bool,
    /// Whether the file contains only a list of segments.
    is_list: bool,
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
            retained: budget.claim(),
            room: Room::default(),
            block_origins: Vec::new(),
            at: 0,
            is_wrapped: false,
            is_list: false,
            receiver,
        }
    }

    /// The summary; its memory stays claimed.
    pub(super) fn into_summary(self) -> Summary {
        self.retained.keep();
        self.summary
    }

    /// Ends the file with the outermost value.
    pub(super) fn end(&mut self) -> Result<(), ReadError> {
        if self.is_wrapped {
            // Further keys of the dictionary around the snapshot.
            self.cut(self.stack.len().min(self.height()));
        }
        let top = self.pop()?;
        self.finish(top)
    }

    /// Drops the dictionary around a snapshot if the next container is its value of `snapshot`.
    fn unwrap(&mut self) {
        let first = matches!(self.stack.first(), Some(Value::Object(_))) && self.part.is_none() && !self.is_wrapped;
        let is_key = self.stack.last() == Some(&Value::Word(Word::Snapshot)) && self.stack.len().is_multiple_of(2);
        if first && is_key && matches!(self.marks[..], [] | [1]) {
            self.cut(0);
            self.marks.clear();
            self.is_wrapped = true;
        }
    }

    /// Whether an instruction completes the dictionary around the snapshot: it is set with one pair, or with all since its mark.
    pub(super) fn ends_wrapper(&self, opcode: u8) -> bool {
        self.is_wrapped
            && self.marks.is_empty()
            && (opcode == b'u' || opcode == b's' && self.stack.len() == self.height())
    }

    /// Height of the stack when the snapshot is complete.
    fn height(&self) -> usize {
        if self.is_list { 3 } else { 1 }
    }

    /// Pushes the list of segments that `torch.cuda.memory_snapshot()` returns as part of a snapshot without events.
    fn list_of_segments(&mut self) -> Result<(), ReadError> {
        self.is_list = true;
        self.push_container(Store::dict)?;
        self.push(Value::Word(Word::Segments))?;
        self.push_container(Store::list)
    }

    /// Sets a mark: later values belong to the container below it.
    pub(super) fn mark(&mut self) -> Result<(), ReadError> {
        let grown = self.claim.push(&mut self.marks, self.stack.len());
        self.within(grown)
    }

    /// Pushes a new dictionary.
    pub(super) fn dict(&mut self) -> Result<(), ReadError> {
        self.unwrap();
        if self.is_frame_next() {
            let frame = self.stacks.new_frame();
            return self.push_made(frame);
        }
        self.push_container(Store::dict)
    }

    /// Pushes a new list.
    pub(super) fn list(&mut self) -> Result<(), ReadError> {
        self.unwrap();
        if self.stack.is_empty() {
            return self.list_of_segments();
        }
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

    /// The error of a claim, at this location.
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

    /// Stack height below the `count` topmost values, all above the last MARK.
    pub(super) fn below(&self, count: usize) -> Result<usize, ReadError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let from = self.stack.len().checked_sub(count).filter(|from| *from >= floor);
        from.ok_or_else(|| self.content("an instruction finds too few values; the file is damaged"))
    }

    /// Runs `act` on the values above the last MARK.
    pub(super) fn with_marked(&mut self, act: fn(&mut Self, usize) -> Result<(), ReadError>) -> Result<(), ReadError> {
        let mark = self.marks.pop();
        act(self, mark.ok_or_else(|| self.content("an instruction finds no MARK; the file is damaged"))?)
    }

    /// Runs `act` on the `count` topmost values.
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

    /// Drops the topmost values.
    pub(super) fn cut(&mut self, height: usize) {
        steps::count(self.stack.len() - height);
        self.stack.truncate(height);
        match &mut self.part {
            Some(part) if part.at >= height => self.part = None,
            Some(part) => part.keys_until = part.keys_until.min(height),
            None => {}
        }
    }

    /// Builds a tuple of the values from `from` on.
    pub(super) fn tuple(&mut self, from: usize) -> Result<(), ReadError> {
        let tuple = self.pool_name(from, from).unwrap_or(Value::Opaque);
        self.cut(from);
        self.push(tuple)
    }

    /// The name of a pool, if it is the value at `value` and its items are those from `from` on: two numbers.
    fn pool_name(&self, value: usize, from: usize) -> Option<Value> {
        let Value::Word(key) = self.stack[value.checked_sub(1)?] else { return None };
        let [Value::Int(first), Value::Int(second)] = self.stack[from..] else { return None };
        // PyTorch counts pools from 1; larger values are not names of pools.
        let pair = u32::try_from(first).ok().zip(u32::try_from(second).ok()).filter(|_| key.is_pool_key())?;
        Some(Value::Pair(pair.0, pair.1))
    }

    pub(super) fn push_container(
        &mut self,
        make: fn(&mut Store) -> Result<Value, OverBudget>,
    ) -> Result<(), ReadError> {
        self.enter_part()?;
        let value = if self.is_opaque_here() { Ok(Value::Opaque) } else { make(&mut self.store) };
        self.push_made(value)
    }

    pub(super) fn collect_list(&mut self, mark: usize) -> Result<(), ReadError> {
        let list = self.store.list();
        let list = self.within(list)?;
        let extended = self.store.extend(list, &self.stack[mark..]);
        self.within(extended)?;
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

    /// Adds the values above `from` to the dictionary below them.
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

    /// Adds the values above `from` to a dictionary at `target`.
    pub(super) fn set_pairs(&mut self, dict: Value, target: usize, from: usize) -> Result<(), ReadError> {
        if !(self.stack.len() - from).is_multiple_of(2) {
            return Err(self.content("a dictionary is given a key without a value; the file is damaged"));
        }
        let in_trace = self.part.is_some_and(|part| part.key == Word::DeviceTraces && target > part.at);
        let Some((pairs, claim)) = self.store.dict_and_claim(dict) else {
            return Err(self.content("keys are set in a value that is not a dictionary; the file is damaged"));
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

    /// Whether the value of the last key is kept.
    pub(super) fn wants_next(&self) -> bool {
        let key = self.stack.last().copied().unwrap_or(Value::None);
        let dict = self.marks.last().map_or(0, |mark| mark - 1);
        let frame = matches!(self.stack[dict], Value::Frame(_));
        let in_trace = self.part.is_some_and(|part| part.key == Word::DeviceTraces && dict > part.at && !frame);
        is_wanted(key, in_trace, self.receiver.wants_origins)
    }
}

/// Whether a dictionary keeps the value of a key; dictionaries in a trace are events and their parts.
fn is_wanted(key: Value, in_trace: bool, origins: bool) -> bool {
    match key {
        Value::Word(word) => !in_trace || word.is_event_key() || origins && word.is_origin_key(),
        _ => !in_trace,
    }
}
