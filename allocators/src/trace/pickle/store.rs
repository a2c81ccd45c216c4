//! Values of the stack machine, and the objects that they refer to.

use super::words::Word;
use crate::trace::SegmentBlock;
use std::collections::HashMap;

/// A value. Containers are referred to, so that the memo shares them as Python does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// Beyond `i64`.
    Uint(u64),
    /// Beyond `u64`.
    Huge,
    Float(f64),
    /// A string with a meaning.
    Word(Word),
    /// Another string.
    Text(u32),
    /// A string that was not kept.
    LostText,
    Object(Handle),
    /// A container that nobody looks into.
    Opaque,
}

impl Value {
    pub(super) fn kind(self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) | Value::Uint(_) | Value::Huge => "an integer",
            Value::Float(_) => "a float",
            Value::Word(_) | Value::Text(_) | Value::LostText => "a string",
            Value::Object(_) | Value::Opaque => "a container",
        }
    }
}

/// Names an object until that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    slot: u32,
    generation: u32,
}

/// Keys and values in the order in which they were set.
pub(super) type Pairs = Vec<(Value, Value)>;

/// A list.
#[derive(Debug, Default)]
pub(super) struct List {
    /// Its items, but for those that were passed on.
    pub(super) items: Vec<Value>,
    /// Items that were passed on.
    pub(super) passed: u64,
    /// A segment's blocks.
    pub(super) blocks: Vec<SegmentBlock>,
}

#[derive(Debug)]
pub(super) enum Object {
    Taken,
    Dict(Pairs),
    List(Box<List>),
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    object: Object,
}

/// The objects. Places of those that were taken are used again, so that a long history takes no more than a short one.
#[derive(Debug, Default)]
pub(super) struct Store {
    slots: Vec<Slot>,
    free: Vec<u32>,
    spare: Vec<Pairs>,
    /// Pairs and items that are kept.
    pub(super) kept: usize,
    texts: Vec<Box<str>>,
    by_text: HashMap<Box<str>, u32>,
    text_bytes: usize,
}

/// Most bytes of strings without a meaning that are kept. Settings may refer to a string that was first seen in an
/// event, and those are few and short.
const MOST_TEXT: usize = 1 << 20;

impl Store {
    /// Roughly the bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.slots.len() * 48 + self.kept * size_of::<(Value, Value)>() + 3 * self.text_bytes
    }

    fn add(&mut self, object: Object) -> Option<Value> {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize].object = object;
                slot
            }
            None => {
                self.slots.push(Slot { generation: 0, object });
                u32::try_from(self.slots.len() - 1).ok()?
            }
        };
        Some(Value::Object(Handle { slot, generation: self.slots[slot as usize].generation }))
    }

    /// A new dictionary; `None` when there are 2^32 objects.
    pub(super) fn dict(&mut self) -> Option<Value> {
        let pairs = self.spare.pop().unwrap_or_default();
        self.add(Object::Dict(pairs))
    }

    /// A new list; `None` when there are 2^32 objects.
    pub(super) fn list(&mut self) -> Option<Value> {
        self.add(Object::List(Box::default()))
    }

    /// The object; `None` when it was taken.
    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut Object> {
        let slot = self.slots.get_mut(handle.slot as usize)?;
        (slot.generation == handle.generation).then_some(&mut slot.object)
    }

    /// The dictionary behind a value.
    pub(super) fn as_dict(&self, value: Value) -> Option<&Pairs> {
        match self.slot(value)?.object {
            Object::Dict(ref pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The list behind a value.
    pub(super) fn as_list(&self, value: Value) -> Option<&List> {
        match self.slot(value)?.object {
            Object::List(ref list) => Some(list),
            _ => None,
        }
    }

    /// The list behind a value.
    pub(super) fn as_list_mut(&mut self, value: Value) -> Option<&mut List> {
        let Value::Object(handle) = value else { return None };
        match self.get_mut(handle)? {
            Object::List(list) => Some(list),
            _ => None,
        }
    }

    fn slot(&self, value: Value) -> Option<&Slot> {
        let Value::Object(handle) = value else { return None };
        self.slots.get(handle.slot as usize).filter(|slot| slot.generation == handle.generation)
    }

    /// Takes an object away; whatever in the memo still names it finds nothing.
    pub(super) fn take(&mut self, handle: Handle) -> Option<Object> {
        let slot = self.slots.get_mut(handle.slot as usize).filter(|slot| slot.generation == handle.generation)?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(handle.slot);
        let object = std::mem::replace(&mut slot.object, Object::Taken);
        self.kept -= match &object {
            Object::Taken => 0,
            Object::Dict(pairs) => pairs.len(),
            Object::List(list) => list.items.len() + list.blocks.len(),
        };
        Some(object)
    }

    /// Keeps the memory of a dictionary that was taken for the next one.
    pub(super) fn recycle(&mut self, mut pairs: Pairs) {
        if self.spare.len() < 64 && pairs.capacity() <= 64 {
            pairs.clear();
            self.spare.push(pairs);
        }
    }

    /// A string; those that are long, or too many, are forgotten.
    pub(super) fn text(&mut self, text: &str) -> Value {
        if let Some(known) = self.by_text.get(text) {
            return Value::Text(*known);
        }
        let cost = text.len() + 32;
        if self.text_bytes + cost > MOST_TEXT {
            return Value::LostText;
        }
        self.text_bytes += cost;
        // CAST: below MOST_TEXT.
        let number = self.texts.len() as u32;
        self.texts.push(text.into());
        self.by_text.insert(text.into(), number);
        Value::Text(number)
    }

    /// What a string says, if that was kept.
    pub(super) fn spelling(&self, value: Value) -> Option<&str> {
        match value {
            Value::Word(word) => Some(word.text()),
            Value::Text(number) => self.texts.get(number as usize).map(|text| &**text),
            _ => None,
        }
    }
}
