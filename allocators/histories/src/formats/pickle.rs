//! PyTorch's memory snapshot as a pickle, protocols 2 to 5.
//!
//! A pickle is a program for a stack machine that can call any Python function. This machine knows only the
//! instructions that build data; those that name or call something are refused by name. It runs through the file once:
//! an event becomes an [`Event`](super::Event) when it is appended to its device's list and is then forgotten. Stack frames
//! become numbers ([`Origins`](super::Origins)), or nothing where the receiver does not ask for them. What stays is the memo, eight bytes for
//! each thing that the file may refer back to, and it is claimed from the budget. A file that breaks off is read as far as
//! it is whole.
//!
//! Source: Python's `Lib/pickle.py` and `pickletools.py`; the structure is that of
//! `torch/csrc/cuda/Module.cpp`, whose two writers (Python's pickler and PyTorch's own) are both understood.

mod frames;
mod machine;
mod snapshot;
mod store;

use self::machine::Machine;
use self::store::Value;
use super::input::Input;
use super::list::Reader;
use super::summary::{Receiver, Room};
use super::words::Word;
use super::{Cut, Format, Origin, ReadError, ReadOptions, Summary};
use vramlab_device::budget::{Budget, Claim};

/// The entry in the [list](super::list).
pub(super) const READER: Reader =
    Reader { name: "snapshot", begins: |start| start.bytes.first() == Some(&0x80), read, snapshot: true };

/// Reads a snapshot.
fn read(input: &mut Input<'_>, options: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    machine::Machine::new(input, options, receiver).run()
}

/// What was understood, and the receiver of the events.
struct Outcome<'r, 's> {
    receiver: &'r mut Receiver<'s>,
    summary: Summary,
    /// For the summary.
    claim: Claim,
    /// What the settings may still take.
    room: Room,
    /// Where the blocks of the segment under way came from, by address. No more than its list of blocks has.
    block_origins: Vec<(u64, Origin)>,
}

impl<'r, 's> Outcome<'r, 's> {
    fn new(receiver: &'r mut Receiver<'s>, budget: &Budget) -> Self {
        let summary = Summary::new(Format::SnapshotPickle);
        Self { receiver, summary, claim: budget.claim(), room: Room::default(), block_origins: Vec::new() }
    }

    /// The summary, which stays claimed.
    fn into_summary(self) -> Summary {
        self.claim.keep();
        self.summary
    }
}

// What is kept of a pickle that breaks off.

impl Machine<'_, '_, '_> {
    /// Hands on what was whole when the file ended: the events up to the one that was under way, and what else came before.
    ///
    /// # Errors
    /// That the file ends `what`, if not even one event is whole.
    fn keep_what_is_whole(&mut self, what: &'static str) -> Result<(), ReadError> {
        let under_way = self.under_way().filter(|_| !self.marks.is_empty());
        while self.marks.len() > 1 {
            let Some(mark) = self.marks.pop() else { break };
            let Some(container) = mark.checked_sub(1) else { break };
            let list = self.part.is_some_and(|part| {
                part.key == Word::DeviceTraces && (part.at == container || self.is_trace(part.at, container))
                    || matches!(
                        part.key,
                        Word::Segments | Word::ExternalAnnotations | Word::HostSegments | Word::HostTraces
                    ) && part.at == container
            });
            if list {
                // Dictionaries are filled at one stroke, so one that has something in it has everything.
                let whole = |value: &Value| self.store.as_dict(*value).is_some_and(|pairs| !pairs.is_empty());
                let traces = self.store.as_list(self.stack[container]).is_some()
                    && self.stack[mark..].first().is_some_and(|first| self.store.as_list(*first).is_some());
                let count = if traces {
                    self.stack.len() - mark
                } else {
                    self.stack[mark..].iter().take_while(|value| whole(value)).count()
                };
                self.cut(mark + count);
                self.append(mark)?;
            } else {
                self.cut(container);
            }
        }
        if self.outcome.summary.all_events() == 0 {
            return Err(self.truncated(what));
        }
        // What is left are the outermost keys and their values, of which the last may be in pieces.
        let start = self.marks.pop().unwrap_or(self.stack.len());
        let keep = match (under_way, self.part.map(|part| part.at)) {
            // Its events were handed on, and a dictionary without traces is no snapshot.
            (Some(Word::DeviceTraces), Some(at)) => at + 1,
            (Some(_), Some(at)) => at - 1,
            _ => self.stack.len() - self.stack.len().saturating_sub(start) % 2,
        };
        self.cut(keep.min(self.stack.len()));
        self.set_items(start)?;
        let top = self.stack.first().copied().unwrap_or(Value::None);
        let pairs = self.store.as_dict(top);
        let has = |word: Word| pairs.is_some_and(|pairs| pairs.iter().any(|(key, _)| *key == Value::Word(word)));
        let whole = |word: Word| has(word) && under_way != Some(word);
        let cut = Cut {
            at: self.end(),
            events: self.outcome.summary.all_events(),
            ends_known: whole(Word::DeviceTraces) && whole(Word::Segments),
            settings_known: whole(Word::AllocatorSettings),
        };
        if !has(Word::DeviceTraces) {
            return Err(self.truncated(what));
        }
        self.finish(top)?;
        let summary = &mut self.outcome.summary;
        if !cut.ends_known {
            summary.segments.clear();
        }
        summary.cut = Some(cut);
        Ok(())
    }

    /// The outermost key whose value is not known to be whole.
    fn under_way(&self) -> Option<Word> {
        let part = self.part?;
        // A further key shows that the value before it is whole. Nothing that is inside of a part is a text.
        let followed = self.marks.len() <= 1
            && matches!(self.stack.get(part.at + 1), Some(Value::Word(_) | Value::Text(_) | Value::LostText));
        (!followed).then_some(part.key)
    }
}
