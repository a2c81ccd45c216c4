//! The stack machine.

use super::Outcome;
use super::frames::Stacks;
use super::memo::Memo;
use super::store::{Store, Value};
use crate::formats::input::Input;
use crate::formats::summary::Receiver;
use crate::formats::words::Word;
use crate::formats::{Place, Problem, ReadError, ReadOptions, Summary};
use crate::steps;
use vramlab_device::budget::{Claim, OverBudget};

/// Longest string that is looked at; longer ones are passed over.
const LONGEST_TEXT: u64 = 1 << 12;

/// Which part of the snapshot is under way: the value of a key of the outermost dictionary, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) key: Word,
    pub(super) at: usize,
    /// Up to here every second value above the part's is known to be a key.
    pub(super) keys_until: usize,
}

/// The machine and what it has understood so far.
pub(super) struct Machine<'r, 'i, 's> {
    pub(super) input: &'r mut Input<'i>,
    pub(super) stack: Vec<Value>,
    /// Heights of the stack at which a MARK was set.
    pub(super) marks: Vec<usize>,
    pub(super) memo: Memo,
    /// For the stack.
    claim: Claim,
    pub(super) store: Store,
    pub(super) stacks: Stacks,
    pub(super) part: Option<Part>,
    pub(super) outcome: Outcome<'r, 's>,
    /// Offset of the instruction that runs.
    at: u64,
}

impl<'r, 'i, 's> Machine<'r, 'i, 's> {
    pub(super) fn new(input: &'r mut Input<'i>, options: &ReadOptions, receiver: &'r mut Receiver<'s>) -> Self {
        Self {
            input,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::new(&options.budget),
            claim: options.budget.claim(),
            store: Store::new(&options.budget, receiver.wants_origins),
            stacks: Stacks::new(&options.budget),
            part: None,
            outcome: Outcome::new(receiver, &options.budget),
            at: 0,
        }
    }

    /// Runs the program and returns what it built.
    pub(super) fn run(mut self) -> Result<Summary, ReadError> {
        let [first, protocol] = self.take::<2>("its first two bytes")?;
        if first != 0x80 {
            return Err(self.refuse("without PROTO", "only protocols 2 to 5 are read"));
        }
        self.protocol(protocol)?;
        match self.steps() {
            Err(ReadError { problem: Problem::Truncated(what), .. }) => self.keep_what_is_whole(what)?,
            stopped => {
                stopped?;
                let top = self.pop()?;
                self.finish(top)?;
            }
        }
        Ok(self.outcome.into_summary())
    }

    /// Runs up to STOP.
    fn steps(&mut self) -> Result<(), ReadError> {
        loop {
            self.run_ahead()?;
            steps::count(1);
            self.at = self.input.offset();
            let [opcode] = self.take::<1>("the pickle, before STOP")?;
            if opcode == b'.' {
                return Ok(());
            }
            self.step(opcode)?;
        }
    }

    fn step(&mut self, opcode: u8) -> Result<(), ReadError> {
        match opcode {
            // By how often they occur in a snapshot.
            b'h' => self.get::<1>("BINGET"),
            b'j' => self.get::<4>("LONG_BINGET"),
            0x94 => {
                let value = self.peek()?;
                let grown = self.memo.add(value);
                self.within(grown)
            }
            b'K' => self.integer::<1>("BININT1"),
            b'M' => self.integer::<2>("BININT2"),
            b'J' => {
                let value = i32::from_le_bytes(self.take("BININT")?);
                self.push(Value::Int(i64::from(value)))
            }
            0x8a => {
                let length = self.number::<1>("LONG1")?;
                self.long(length)
            }
            b'(' => {
                let grown = self.claim.push(&mut self.marks, self.stack.len());
                self.within(grown)?;
                let in_trace = self.part.is_some_and(|part| part.key == Word::DeviceTraces);
                match self.stack.last() {
                    Some(Value::Opaque) if in_trace => self.skip_references(),
                    Some(Value::Stack(stack)) => self.refer_to_frames(*stack),
                    _ => Ok(()),
                }
            }
            b'}' if self.is_frame_next() => {
                let frame = self.stacks.new_frame();
                self.push_made(frame)
            }
            b']' if self.is_stack_next() => {
                let stack = self.stacks.new_stack();
                self.push_made(stack)
            }
            b'}' => self.push_container(Store::dict),
            b']' => self.push_container(Store::list),
            b'u' => self.with_marked(Self::set_items),
            b'e' => self.with_marked(Self::append),
            b'a' => self.with_top(1, Self::append),
            b's' => self.with_top(2, Self::set_items),
            0x8c => self.text::<1>("SHORT_BINUNICODE"),
            b'X' => self.text::<4>("BINUNICODE"),
            0x8d => self.text::<8>("BINUNICODE8"),
            // A frame's length is a hint for buffers.
            0x95 => self.number::<8>("FRAME").map(drop),
            b'q' => self.put::<1>("BINPUT"),
            b'r' => self.put::<4>("LONG_BINPUT"),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'N' => self.push(Value::None),
            b'G' => {
                let value = f64::from_be_bytes(self.take("BINFLOAT")?);
                self.push(Value::Float(value))
            }
            b')' => self.push(Value::Opaque),
            0x85..=0x87 => self.with_top(usize::from(opcode - 0x84), Self::tuple),
            b't' => self.with_marked(Self::tuple),
            b'l' => self.with_marked(Self::collect_list),
            b'd' => self.with_marked(Self::collect_dict),
            0x8b => {
                let length = i32::from_le_bytes(self.take("LONG4")?);
                let length = u64::try_from(length).map_err(|_| self.content("LONG4 has a negative length"))?;
                self.long(length)
            }
            0x80 => {
                let [protocol] = self.take("PROTO")?;
                self.protocol(protocol)
            }
            other => Err(self.refused(other)),
        }
    }

    fn protocol(&self, protocol: u8) -> Result<(), ReadError> {
        if (2..=5).contains(&protocol) {
            return Ok(());
        }
        Err(self.content(format!("pickle protocol {protocol} is not read, only 2 to 5: dump it with protocol=4")))
    }

    /// The next bytes of the file.
    #[inline]
    fn take<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], ReadError> {
        if !self.input.ensure(N)? {
            return Err(self.truncated(what));
        }
        let mut out = [0; N];
        out.copy_from_slice(&self.input.buffered()[..N]);
        self.input.advance(N);
        Ok(out)
    }

    /// A number of so many bytes.
    #[inline]
    fn number<const N: usize>(&mut self, what: &'static str) -> Result<u64, ReadError> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.take::<N>(what)?);
        Ok(u64::from_le_bytes(wide))
    }

    fn integer<const N: usize>(&mut self, what: &'static str) -> Result<(), ReadError> {
        let value = self.number::<N>(what)?;
        self.push(Value::Int(value.cast_signed()))
    }

    fn text<const N: usize>(&mut self, what: &'static str) -> Result<(), ReadError> {
        let length = self.number::<N>(what)?;
        if length > LONGEST_TEXT {
            if !self.input.skip(length)? {
                return Err(self.truncated("a string"));
            }
            return self.push(Value::LostText);
        }
        // CAST: at most LONGEST_TEXT.
        let length = length as usize;
        if !self.input.ensure(length)? {
            return Err(self.truncated("a string"));
        }
        let value = self.store.string(&self.input.buffered()[..length]);
        self.input.advance(length);
        self.push_made(value)
    }

    /// An integer in little-endian two's complement.
    fn long(&mut self, length: u64) -> Result<(), ReadError> {
        if length > 9 {
            if !self.input.skip(length)? {
                return Err(self.truncated("an integer"));
            }
            return self.push(Value::Huge);
        }
        // CAST: at most 9.
        let length = length as usize;
        if !self.input.ensure(length)? {
            return Err(self.truncated("an integer"));
        }
        let bytes = &self.input.buffered()[..length];
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide[..length].copy_from_slice(bytes);
        let wide = i128::from_le_bytes(wide);
        self.input.advance(length);
        let value = match (i64::try_from(wide), u64::try_from(wide)) {
            (Ok(value), _) => Value::Int(value),
            (_, Ok(value)) => Value::Uint(value),
            _ => Value::Huge,
        };
        self.push(value)
    }

    fn get<const N: usize>(&mut self, what: &'static str) -> Result<(), ReadError> {
        // CAST: at most four bytes.
        let index = self.number::<N>(what)? as u32;
        let Some(value) = self.memo.get(index) else {
            return Err(self.content(format!("memo entry {index} is used before it is made; the file is damaged")));
        };
        self.push(value)
    }

    fn put<const N: usize>(&mut self, what: &'static str) -> Result<(), ReadError> {
        let index = self.number::<N>(what)?;
        let value = self.peek()?;
        // CAST: at most four bytes.
        let kept = self.memo.put(index as u32, value);
        self.within(kept)
    }

    /// Does something with the values above the last MARK.
    fn with_marked(&mut self, act: fn(&mut Self, usize) -> Result<(), ReadError>) -> Result<(), ReadError> {
        let mark = self.marks.pop();
        act(self, mark.ok_or_else(|| self.content("an instruction finds no MARK; the file is damaged"))?)
    }

    /// Does something with the `count` uppermost values.
    fn with_top(&mut self, count: usize, act: fn(&mut Self, usize) -> Result<(), ReadError>) -> Result<(), ReadError> {
        act(self, self.below(count)?)
    }

    /// Height of the stack below the `count` uppermost values, all of them above the last MARK.
    fn below(&self, count: usize) -> Result<usize, ReadError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let from = self.stack.len().checked_sub(count).filter(|from| *from >= floor);
        from.ok_or_else(|| self.content("an instruction finds too few values; the file is damaged"))
    }

    #[inline]
    fn push(&mut self, value: Value) -> Result<(), ReadError> {
        let grown = self.claim.push(&mut self.stack, value);
        self.within(grown)
    }

    fn push_made(&mut self, made: Result<Value, OverBudget>) -> Result<(), ReadError> {
        let value = self.within(made)?;
        self.push(value)
    }

    /// The error of a claim, at this place.
    #[inline]
    pub(super) fn within<T>(&self, claimed: Result<T, OverBudget>) -> Result<T, ReadError> {
        claimed.map_err(|over| ReadError::over(Place::Byte(self.at), over))
    }

    fn peek(&self) -> Result<Value, ReadError> {
        let at = self.below(1)?;
        Ok(self.stack[at])
    }

    fn pop(&mut self) -> Result<Value, ReadError> {
        let at = self.below(1)?;
        let value = self.stack[at];
        self.cut(at);
        Ok(value)
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
    fn tuple(&mut self, from: usize) -> Result<(), ReadError> {
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

    fn push_container(&mut self, make: fn(&mut Store) -> Result<Value, OverBudget>) -> Result<(), ReadError> {
        self.enter_part();
        let value = if self.is_opaque_here() { Ok(Value::Opaque) } else { make(&mut self.store) };
        self.push_made(value)
    }

    fn collect_list(&mut self, mark: usize) -> Result<(), ReadError> {
        let list = self.store.list();
        let list = self.within(list)?;
        let kept = self.store.extend(list, &self.stack[mark..]);
        self.within(kept)?;
        self.cut(mark);
        self.push(list)
    }

    fn collect_dict(&mut self, mark: usize) -> Result<(), ReadError> {
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
    fn set_pairs(&mut self, dict: Value, target: usize, from: usize) -> Result<(), ReadError> {
        if !(self.stack.len() - from).is_multiple_of(2) {
            return Err(self.content("a dictionary is given a key without a value; the file is damaged"));
        }
        let in_trace = self.part.is_some_and(|part| part.key == Word::DeviceTraces && target > part.at);
        let found = match dict {
            Value::Object(handle) => self.store.dict_and_claim(handle),
            _ => None,
        };
        let Some((pairs, claim)) = found else {
            return Err(self.content("keys are set in what is no dictionary; the file is damaged"));
        };
        let (mut grown, origins) = (Ok(()), self.outcome.receiver.wants_origins);
        for pair in self.stack[from..].chunks_exact(2) {
            if let Value::Word(key) = pair[0] {
                self.outcome.summary.keys.add(key);
            }
            let wanted = match pair[0] {
                Value::Word(word) => !in_trace || word.is_event_key() || origins && word.is_origin_key(),
                _ => !in_trace,
            };
            if wanted && grown.is_ok() {
                grown = claim.push(pairs, (pair[0], pair[1]));
            }
        }
        self.within(grown)
    }

    #[cold]
    pub(super) fn truncated(&self, what: &'static str) -> ReadError {
        ReadError::at(Place::Byte(self.end()), Problem::Truncated(what))
    }

    /// Bytes of the input up to what is in the buffer.
    pub(super) fn end(&self) -> u64 {
        // CAST: a length of the buffer.
        self.input.offset() + self.input.buffered().len() as u64
    }

    #[cold]
    pub(super) fn content(&self, text: impl Into<String>) -> ReadError {
        ReadError::content(Place::Byte(self.at), text)
    }

    fn refuse(&self, name: &'static str, why: &'static str) -> ReadError {
        ReadError::at(Place::Byte(self.at), Problem::Refused { name, why })
    }

    #[cold]
    fn refused(&self, opcode: u8) -> ReadError {
        const RUNS: &str = "it makes Python run code";
        const NEEDLESS: &str = "no snapshot needs it";
        let (name, why) = match opcode {
            b'c' => ("GLOBAL", RUNS),
            0x93 => ("STACK_GLOBAL", RUNS),
            b'R' => ("REDUCE", RUNS),
            b'b' => ("BUILD", RUNS),
            b'i' => ("INST", RUNS),
            b'o' => ("OBJ", RUNS),
            0x81 => ("NEWOBJ", RUNS),
            0x92 => ("NEWOBJ_EX", RUNS),
            0x82 => ("EXT1", RUNS),
            0x83 => ("EXT2", RUNS),
            0x84 => ("EXT4", RUNS),
            b'P' => ("PERSID", RUNS),
            b'Q' => ("BINPERSID", RUNS),
            0x96 => ("BYTEARRAY8", NEEDLESS),
            0x97 => ("NEXT_BUFFER", NEEDLESS),
            0x98 => ("READONLY_BUFFER", NEEDLESS),
            b'0' => ("POP", NEEDLESS),
            b'1' => ("POP_MARK", NEEDLESS),
            b'2' => ("DUP", NEEDLESS),
            b'F' => ("FLOAT", NEEDLESS),
            b'I' => ("INT", NEEDLESS),
            b'L' => ("LONG", NEEDLESS),
            b'S' => ("STRING", NEEDLESS),
            b'T' => ("BINSTRING", NEEDLESS),
            b'U' => ("SHORT_BINSTRING", NEEDLESS),
            b'V' => ("UNICODE", NEEDLESS),
            b'B' => ("BINBYTES", NEEDLESS),
            b'C' => ("SHORT_BINBYTES", NEEDLESS),
            0x8e => ("BINBYTES8", NEEDLESS),
            0x8f => ("EMPTY_SET", NEEDLESS),
            0x90 => ("ADDITEMS", NEEDLESS),
            0x91 => ("FROZENSET", NEEDLESS),
            b'g' => ("GET", NEEDLESS),
            b'p' => ("PUT", NEEDLESS),
            other => return ReadError::at(Place::Byte(self.at), Problem::UnknownOpcode(other)),
        };
        self.refuse(name, why)
    }
}
