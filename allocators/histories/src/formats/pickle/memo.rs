//! The memo: values that a pickle may refer to again, eight bytes each.
//!
//! A pickler memoizes every container and every string, used again or not, so the memo dominates the memory for a long recording.
//! Most instructions of a snapshot only push or memoize a value: they run without a step of the machine.

use super::machine::Machine;
use crate::formats::snapshot::{Handle, Value};
use crate::formats::words::Word;
use crate::formats::{Place, ReadError};
use crate::steps;
use std::collections::HashMap;
use vramlab_device::budget::{Budget, Claim, LongList, OverBudget};

/// An entry in a hash table, which allocates both sizes while it doubles at seven eighths.
const SPARSE_COST: usize = 4 * (size_of::<(u32, Value)>() + 1);

/// Values by number.
#[derive(Debug)]
pub(super) struct Memo {
    entries: LongList<Packed>,
    /// Values that do not fit; picklers enter none.
    wide: LongList<Value>,
    /// Entries whose numbers are not consecutive.
    sparse: HashMap<u32, Value>,
    /// Claim for these.
    claim: Claim,
}

impl Memo {
    pub(super) fn new(budget: &Budget) -> Self {
        Self {
            entries: LongList::new(budget),
            wide: LongList::new(budget),
            sparse: HashMap::new(),
            claim: budget.claim(),
        }
    }

    /// Memoizes a value under the next number.
    #[inline]
    pub(super) fn add(&mut self, value: Value) -> Result<(), OverBudget> {
        let packed = self.packed(value)?;
        self.entries.push(packed)
    }

    /// Memoizes a value under a number.
    pub(super) fn put(&mut self, number: u32, value: Value) -> Result<(), OverBudget> {
        let at = number as usize;
        if at == self.entries.len() {
            return self.add(value);
        }
        if at < self.entries.len() {
            let packed = self.packed(value)?;
            self.entries.set(at, packed);
            return Ok(());
        }
        // A large number must not allocate all entries before it.
        if !self.sparse.contains_key(&number) {
            self.claim.add(SPARSE_COST)?;
        }
        self.sparse.insert(number, value);
        Ok(())
    }

    /// The value of a number.
    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<Value> {
        match self.entries.get(number as usize) {
            Some(packed) => packed.value(&self.wide),
            None => self.sparse.get(&number).copied(),
        }
    }

    #[inline]
    fn packed(&mut self, value: Value) -> Result<Packed, OverBudget> {
        if let Some(packed) = Packed::of(value) {
            return Ok(packed);
        }
        self.wide.push(value)?;
        // CAST: the number of an item in memory.
        Ok(Packed::new(WIDE, self.wide.len() as u64 - 1))
    }
}

/// A packed value: its kind in the lowest four bits, its number above them.
#[derive(Clone, Copy, Debug)]
struct Packed(u64);

const NONE: u64 = 0;
const BOOL: u64 = 1;
const WORD: u64 = 2;
const TEXT: u64 = 3;
const LOST_TEXT: u64 = 4;
const OBJECT: u64 = 5;
const STACK: u64 = 6;
const FRAME: u64 = 7;
const PAIR: u64 = 8;
const OPAQUE: u64 = 9;
const WIDE: u64 = 10;

impl Packed {
    fn new(kind: u64, which: u64) -> Self {
        Self(kind | which << 4)
    }

    /// `None` for integers of any size, and pairs of large ones.
    #[inline]
    fn of(value: Value) -> Option<Self> {
        let (kind, which) = match value {
            Value::None => (NONE, 0),
            Value::Bool(yes) => (BOOL, u64::from(yes)),
            // CAST: the number of the word.
            Value::Word(word) => (WORD, word as u64),
            Value::Text(text) => (TEXT, u64::from(text)),
            Value::LostText => (LOST_TEXT, 0),
            Value::Object(handle) => (OBJECT, handle.bits()),
            Value::Stack(stack) => (STACK, u64::from(stack)),
            Value::Frame(frame) => (FRAME, u64::from(frame)),
            Value::Pair(first, second) if second < 1 << 28 => (PAIR, u64::from(first) | u64::from(second) << 32),
            Value::Opaque => (OPAQUE, 0),
            Value::Pair(..) | Value::Int(_) | Value::Uint(_) | Value::Huge | Value::Float(_) => return None,
        };
        Some(Self::new(kind, which))
    }

    #[inline]
    fn value(self, wide: &LongList<Value>) -> Option<Value> {
        let which = self.0 >> 4;
        // CAST: each as it was packed.
        Some(match self.0 & 15 {
            NONE => Value::None,
            BOOL => Value::Bool(which != 0),
            WORD => Value::Word(*Word::ALL.get(which as usize)?),
            TEXT => Value::Text(which as u32),
            LOST_TEXT => Value::LostText,
            OBJECT => Value::Object(Handle::from_bits(which)),
            STACK => Value::Stack(which as u32),
            FRAME => Value::Frame(which as u32),
            PAIR => Value::Pair(which as u32, (which >> 32) as u32),
            OPAQUE => Value::Opaque,
            _ => wide.get(which as usize)?,
        })
    }
}

/// The longest instruction of the fast path: LONG1 with eight bytes.
const LONGEST: usize = 10;

impl Machine<'_, '_, '_> {
    /// Runs such instructions as long as they are in the buffer. Anything unexpected is left to the machine, which reports
    /// errors, so both together act as the machine alone.
    pub(super) fn run_ahead(&mut self) -> Result<(), ReadError> {
        let buffer = self.input.buffered();
        let floor = self.built.marks.last().copied().unwrap_or(0);
        let mut at = 0;
        while let Some(next) = buffer[at..].first_chunk::<LONGEST>() {
            let (value, length) = match *next {
                [b'h', index, ..] => (self.memo.get(u32::from(index)), 2),
                [b'j', a, b, c, d, ..] => (self.memo.get(u32::from_le_bytes([a, b, c, d])), 5),
                [b'K', value, ..] => (Some(Value::Int(i64::from(value))), 2),
                [b'M', a, b, ..] => (Some(Value::Int(i64::from(u16::from_le_bytes([a, b])))), 3),
                [b'J', a, b, c, d, ..] => (Some(Value::Int(i64::from(i32::from_le_bytes([a, b, c, d])))), 5),
                [0x8a, length @ 1..=8, a, b, c, d, e, f, g, h] => {
                    // Shifts out bytes behind the number, and sign-extends it.
                    let rest = 64 - 8 * u32::from(length);
                    let value = i64::from_le_bytes([a, b, c, d, e, f, g, h]) << rest >> rest;
                    (Some(Value::Int(value)), 2 + usize::from(length))
                }
                [0x94, ..] if self.built.stack.len() > floor => {
                    let grown = self.memo.add(self.built.stack[self.built.stack.len() - 1]);
                    // CAST: a place in the buffer.
                    let place = Place::Byte(self.input.offset() + at as u64);
                    grown.map_err(|over| ReadError::over(place, over))?;
                    at += 1;
                    steps::count(1);
                    continue;
                }
                _ => break,
            };
            let Some(value) = value.filter(|_| self.built.stack.len() < self.built.stack.capacity()) else { break };
            self.built.stack.push(value);
            at += length;
            steps::count(1);
        }
        self.input.advance(at);
        Ok(())
    }

    /// Skips consecutive references to the memo: most of a file with stack frames are these, in lists that the reader skips.
    pub(super) fn skip_references(&mut self) -> Result<(), ReadError> {
        self.references(|_, _| true)
    }

    /// Takes consecutive references to frames into a stack, without a step for each.
    pub(super) fn refer_to_frames(&mut self, stack: u32) -> Result<(), ReadError> {
        self.built.stacks.which = stack;
        self.built.stacks.under_way.clear();
        let mut failed = None;
        self.references(|machine, value| {
            let Value::Frame(frame) = value else { return false };
            match machine.built.add_frame(frame) {
                Ok(()) => true,
                Err(error) => {
                    failed = Some(error);
                    false
                }
            }
        })?;
        failed.map_or(Ok(()), Err)
    }

    /// Takes the next references to the memo, as long as `take` accepts them.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_as_they_were() {
        let mut memo = Memo::new(&Budget::default());
        let mut values: Vec<Value> = Word::ALL.iter().map(|word| Value::Word(*word)).collect();
        let numbers = [0, 1, 7, 1 << 27, (1 << 28) - 1, 1 << 28, u32::MAX];
        for first in numbers {
            values.extend([Value::Text(first), Value::Stack(first), Value::Frame(first)]);
            values.extend(numbers.map(|second| Value::Pair(first, second)));
            let bits = u64::from(first) << 28 | 0x0fff_ffff;
            values.extend([Value::Object(Handle::from_bits(bits)), Value::Int(-i64::from(first))]);
        }
        values.extend([Value::None, Value::Bool(true), Value::Bool(false), Value::LostText, Value::Opaque]);
        values.extend([Value::Huge, Value::Float(0.5), Value::Int(i64::MIN), Value::Uint(u64::MAX)]);
        for value in &values {
            memo.add(*value).unwrap();
        }
        let read = |memo: &Memo| (0..values.len() as u32).map(|at| memo.get(at).unwrap()).collect::<Vec<_>>();
        assert_eq!(read(&memo), values);
        // With several entries, and with a gap.
        for (at, value) in (0..).zip(&values) {
            memo.put(at, Value::Huge).unwrap();
            memo.put(at, *value).unwrap();
            memo.put(1_000_000 + 2 * at, *value).unwrap();
        }
        assert_eq!(read(&memo), values);
        assert_eq!(memo.get(1_000_000), Some(values[0]));
        assert_eq!((memo.get(values.len() as u32), memo.get(1_000_001)), (None, None));
    }
}
