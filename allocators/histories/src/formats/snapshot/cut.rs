//! Reading a truncated file.

use super::Assembly;
use super::store::Value;
use crate::formats::words::Word;
use crate::formats::{Cut, ReadError};

impl Assembly<'_, '_> {
    /// Passes on the complete part of a truncated file: its events up to the last complete one, and everything before.
    ///
    /// # Errors
    /// The file, of `end` bytes, ends within `part`, and not even one event is complete.
    pub(in crate::formats) fn keep_complete_part(&mut self, part: &'static str, end: u64) -> Result<(), ReadError> {
        let under_way = self.under_way().filter(|_| !self.marks.is_empty());
        while self.marks.len() > 1 {
            let Some(mark) = self.marks.pop() else { break };
            let Some(container) = mark.checked_sub(1) else { break };
            let list = self.part.is_some_and(|part| {
                part.key == Word::DeviceTraces && (part.at == container || self.is_trace(part.at, container))
                    || Self::taker(part.key).is_some() && part.at == container
            });
            if list {
                // Dictionaries are filled in one step, so one with items is complete.
                let complete = |value: &Value| self.store.as_dict(*value).is_some_and(|pairs| !pairs.is_empty());
                let traces = self.store.as_list(self.stack[container]).is_some()
                    && self.stack[mark..].first().is_some_and(|first| self.store.as_list(*first).is_some());
                let count = if traces {
                    self.stack.len() - mark
                } else {
                    self.stack[mark..].iter().take_while(|value| complete(value)).count()
                };
                self.cut(mark + count);
                self.append(mark)?;
            } else {
                self.cut(container);
            }
        }
        if self.summary.all_events() == 0 {
            return Err(ReadError::truncated(part, end));
        }
        // The remaining values are the outermost keys and their values, the last of which may be incomplete.
        let start = self.marks.pop().unwrap_or(self.stack.len());
        let keep = match (under_way, self.part.map(|part| part.at)) {
            // Its events were passed on, and a dictionary without traces is not a snapshot.
            (Some(Word::DeviceTraces), Some(at)) => at + 1,
            (Some(_), Some(at)) => at - 1,
            _ => self.stack.len() - self.stack.len().saturating_sub(start) % 2,
        };
        self.cut(keep.min(self.stack.len()));
        self.set_items(start)?;
        let top = self.stack.first().copied().unwrap_or(Value::None);
        let pairs = self.store.as_dict(top);
        let has = |word: Word| pairs.is_some_and(|pairs| pairs.iter().any(|(key, _)| *key == Value::Word(word)));
        let complete = |word: Word| has(word) && under_way != Some(word);
        let cut = Cut {
            at: end,
            events: self.summary.all_events(),
            ends_known: complete(Word::DeviceTraces) && complete(Word::Segments),
            settings_known: complete(Word::AllocatorSettings),
        };
        if !has(Word::DeviceTraces) {
            return Err(ReadError::truncated(part, end));
        }
        self.finish(top)?;
        let summary = &mut self.summary;
        if !cut.ends_known {
            summary.segments.clear();
        }
        summary.cut = Some(cut);
        Ok(())
    }

    /// The outermost key whose value may be incomplete.
    fn under_way(&self) -> Option<Word> {
        let part = self.part?;
        // A later key shows that the value before it is complete. Values inside a part are not texts.
        let followed = self.marks.len() <= 1
            && matches!(self.stack.get(part.at + 1), Some(Value::Word(_) | Value::Text(_) | Value::LostText));
        (!followed).then_some(part.key)
    }
}
