//! Values of the stack machine, and the objects to which they refer.

use crate::formats::SegmentBlock;
use crate::formats::words::Word;
use indexmap::IndexSet;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// A value. Containers are references, so that the memo shares them as Python does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::formats) enum Value {
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
    /// A list of frames, by its number in [`Stacks`](super::frames::Stacks).
    Stack(u32),
    /// A frame, by its number there.
    Frame(u32),
    /// Two numbers that name a pool.
    Pair(u32, u32),
    /// A container that the reader skips.
    Opaque,
}

impl Value {
    pub(in crate::formats) fn kind(self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) | Value::Uint(_) | Value::Huge => "an integer",
            Value::Float(_) => "a float",
            Value::Word(_) | Value::Text(_) | Value::LostText => "a string",
            Value::Object(_) | Value::Stack(_) | Value::Frame(_) | Value::Pair(..) | Value::Opaque => "a container",
        }
    }

    pub(in crate::formats) fn unsigned(self) -> Option<u64> {
        match self {
            Value::Int(value) => u64::try_from(value).ok(),
            Value::Uint(value) => Some(value),
            _ => None,
        }
    }
}

/// Refers to an object until that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::formats) struct Handle {
    slot: u32,
    generation: u32,
}

/// Bits of a slot's number: no budget has room for more objects.
const SLOT_BITS: u32 = 28;

impl Handle {
    /// All of it in sixty bits.
    pub(in crate::formats) fn bits(self) -> u64 {
        u64::from(self.slot) | u64::from(self.generation) << SLOT_BITS
    }

    /// From [`bits`](Self::bits).
    pub(in crate::formats) fn from_bits(bits: u64) -> Self {
        // CAST: each part within its bits.
        Self { slot: (bits & ((1 << SLOT_BITS) - 1)) as u32, generation: (bits >> SLOT_BITS) as u32 }
    }
}

/// Keys and values in order.
pub(in crate::formats) type Pairs = Vec<(Value, Value)>;

/// The value of a key of a dictionary.
pub(in crate::formats) fn last_of(pairs: &Pairs, name: Word) -> Option<Value> {
    pairs.iter().rev().find(|(key, _)| *key == Value::Word(name)).map(|(_, value)| *value)
}

/// A list.
#[derive(Debug, Default)]
pub(in crate::formats) struct List {
    /// Its items, without processed ones.
    pub(in crate::formats) items: Vec<Value>,
    /// Number of processed items.
    pub(in crate::formats) passed: u64,
    /// A segment's blocks.
    pub(in crate::formats) blocks: Vec<SegmentBlock>,
}

#[derive(Debug)]
pub(in crate::formats) enum Object {
    Taken,
    Dict(Pairs),
    List(Box<List>),
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    object: Object,
}

/// The objects. Slots of taken objects are reused, so that a long recording takes no more than a short one.
#[derive(Debug)]
pub(in crate::formats) struct Store {
    slots: Vec<Slot>,
    free: Vec<u32>,
    spare: Vec<Pairs>,
    texts: IndexSet<Box<str>>,
    /// The last string of each [`slot_of`]: some keys have the same value in every event, written out each time.
    recent: [Value; RECENT],
    text_bytes: usize,
    most_text: usize,
    /// Claim for all of it, and for the objects' contents.
    claim: Claim,
}

/// Number of recent strings that are compared first.
const RECENT: usize = 16;

/// Slot of a string among the recent ones.
fn slot_of(bytes: &[u8]) -> usize {
    let last = bytes.last().copied().unwrap_or(0);
    (bytes.len() + usize::from(last)) % RECENT
}

/// Limit on the bytes of other strings. Settings may refer to a string that first appeared in an event, and those are few and
/// short.
const MOST_TEXT: usize = 1 << 20;
/// The same if names of functions and files are needed.
const MOST_NAMES: usize = 1 << 26;
/// Overhead of a string: its entries in the list and the table, both of which double, and that of the system's allocator.
const TEXT_COST: usize = 160;
/// A boxed list, with the overhead of the system's allocator.
const LIST_COST: usize = size_of::<List>() + 16;
/// Number of dictionaries to reuse: as many as Python's pickler puts on the stack before it appends them.
const SPARE: usize = 1000;
/// Largest reused dictionary.
const SPARE_PAIRS: usize = 64;

/// The index of an object that exists.
fn slot_mut(slots: &mut [Slot], value: Value) -> Option<&mut Slot> {
    let Value::Object(handle) = value else { return None };
    slots.get_mut(handle.slot as usize).filter(|slot| slot.generation == handle.generation)
}

impl Store {
    pub(in crate::formats) fn new(budget: &Budget, names: bool) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            spare: Vec::with_capacity(SPARE),
            texts: IndexSet::new(),
            recent: [Value::None; RECENT],
            text_bytes: 0,
            most_text: if names { MOST_NAMES } else { MOST_TEXT },
            claim: budget.claim(),
        }
    }

    fn add(&mut self, object: Object) -> Result<Value, OverBudget> {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize].object = object;
                slot
            }
            None => {
                self.claim.push(&mut self.slots, Slot { generation: 0, object })?;
                // Each index may become free, and then the list of free ones must have room.
                self.claim.reserve(&mut self.free, self.slots.len())?;
                let slot = u32::try_from(self.slots.len() - 1).ok().filter(|slot| slot >> SLOT_BITS == 0);
                let Some(slot) = slot else { return Err(self.claim.refuse()) };
                slot
            }
        };
        Ok(Value::Object(Handle { slot, generation: self.slots[slot as usize].generation }))
    }

    /// A new dictionary.
    pub(in crate::formats) fn dict(&mut self) -> Result<Value, OverBudget> {
        let pairs = self.spare.pop().unwrap_or_default();
        self.add(Object::Dict(pairs))
    }

    /// A new list.
    pub(in crate::formats) fn list(&mut self) -> Result<Value, OverBudget> {
        self.claim.add(LIST_COST)?;
        self.add(Object::List(Box::default()))
    }

    /// Appends to a list.
    pub(in crate::formats) fn extend(&mut self, list: Value, items: &[Value]) -> Result<(), OverBudget> {
        if let Some((list, claim)) = self.list_and_claim(list) {
            claim.reserve(&mut list.items, items.len())?;
            list.items.extend_from_slice(items);
        }
        Ok(())
    }

    /// Appends a segment's block to a list.
    pub(in crate::formats) fn push_block(&mut self, list: Value, block: SegmentBlock) -> Result<(), OverBudget> {
        match self.list_and_claim(list) {
            Some((list, claim)) => claim.push(&mut list.blocks, block),
            None => Ok(()),
        }
    }

    fn list_and_claim(&mut self, value: Value) -> Option<(&mut List, &mut Claim)> {
        match &mut slot_mut(&mut self.slots, value)?.object {
            Object::List(list) => Some((list, &mut self.claim)),
            _ => None,
        }
    }

    /// The pairs of a dictionary and the claim for their growth; `None` for other values.
    pub(in crate::formats) fn dict_and_claim(&mut self, value: Value) -> Option<(&mut Pairs, &mut Claim)> {
        match &mut slot_mut(&mut self.slots, value)?.object {
            Object::Dict(pairs) => Some((pairs, &mut self.claim)),
            _ => None,
        }
    }

    /// The dictionary behind a value.
    pub(in crate::formats) fn as_dict(&self, value: Value) -> Option<&Pairs> {
        match self.slot(value)?.object {
            Object::Dict(ref pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The list behind a value.
    pub(in crate::formats) fn as_list(&self, value: Value) -> Option<&List> {
        match self.slot(value)?.object {
            Object::List(ref list) => Some(list),
            _ => None,
        }
    }

    /// The list behind a value.
    pub(in crate::formats) fn as_list_mut(&mut self, value: Value) -> Option<&mut List> {
        self.list_and_claim(value).map(|(list, _)| list)
    }

    fn slot(&self, value: Value) -> Option<&Slot> {
        let Value::Object(handle) = value else { return None };
        self.slots.get(handle.slot as usize).filter(|slot| slot.generation == handle.generation)
    }

    /// Removes an object; references in the memo then find nothing. Its content stays claimed until it is passed to
    /// [`recycle`](Self::recycle) or [`release`](Self::release).
    pub(in crate::formats) fn take(&mut self, value: Value) -> Option<Object> {
        let Value::Object(handle) = value else { return None };
        let slot = slot_mut(&mut self.slots, value)?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(handle.slot);
        let object = std::mem::replace(&mut slot.object, Object::Taken);
        if matches!(object, Object::List(_)) {
            self.claim.sub(LIST_COST);
        }
        Some(object)
    }

    /// Removes a dictionary, if the value refers to one.
    pub(in crate::formats) fn take_dict(&mut self, value: Value) -> Option<Pairs> {
        match self.take(value) {
            Some(Object::Dict(pairs)) => Some(pairs),
            _ => None,
        }
    }

    /// Keeps the memory of a removed dictionary for the next one.
    pub(in crate::formats) fn recycle(&mut self, mut pairs: Pairs) {
        if self.spare.len() < SPARE && pairs.capacity() <= SPARE_PAIRS {
            pairs.clear();
            self.spare.push(pairs);
        } else {
            self.claim.free(pairs);
        }
    }

    /// Frees the items or blocks of a removed list.
    pub(in crate::formats) fn release<T>(&mut self, items: Vec<T>) {
        self.claim.free(items);
    }

    /// Takes the items of a list; they stay claimed until they are [released](Self::release).
    pub(in crate::formats) fn take_items(&mut self, list: Value) -> Option<Vec<Value>> {
        self.as_list_mut(list).map(|list| std::mem::take(&mut list.items))
    }

    /// Passes the blocks of a removed list, with their claim, to the owner of `claim`.
    pub(in crate::formats) fn hand_over(
        &mut self,
        blocks: &Vec<SegmentBlock>,
        claim: &mut Claim,
    ) -> Result<(), OverBudget> {
        let bytes = blocks.capacity() * size_of::<SegmentBlock>();
        self.claim.sub(bytes);
        claim.add(bytes)
    }

    /// A string, as UTF-8 or Python's lone surrogates, which no reader needs.
    pub(in crate::formats) fn string(&mut self, bytes: &[u8]) -> Result<Value, OverBudget> {
        let slot = slot_of(bytes);
        let recent = self.recent[slot];
        if self.spelling(recent).is_some_and(|text| text.as_bytes() == bytes) {
            return Ok(recent);
        }
        let Ok(text) = std::str::from_utf8(bytes) else { return Ok(Value::LostText) };
        let value = self.text(text)?;
        self.recent[slot] = value;
        Ok(value)
    }

    /// A string. Too many or too long ones are dropped.
    pub(in crate::formats) fn text(&mut self, text: &str) -> Result<Value, OverBudget> {
        if let Some(word) = Word::named(text) {
            return Ok(Value::Word(word));
        }
        // CAST: below MOST_NAMES, and so below.
        if let Some(known) = self.texts.get_index_of(text) {
            return Ok(Value::Text(known as u32));
        }
        let cost = text.len() + 32;
        if self.text_bytes + cost > self.most_text {
            return Ok(Value::LostText);
        }
        self.claim.add(text.len() + TEXT_COST)?;
        self.text_bytes += cost;
        Ok(Value::Text(self.texts.insert_full(text.into()).0 as u32))
    }

    /// The text of a string, if it was kept.
    pub(in crate::formats) fn spelling(&self, value: Value) -> Option<&str> {
        match value {
            Value::Word(word) => Some(word.name()),
            Value::Text(number) => self.texts.get_index(number as usize).map(|text| &**text),
            _ => None,
        }
    }
}
