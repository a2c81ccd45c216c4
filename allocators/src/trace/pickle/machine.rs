//! The stack machine.

use super::snapshot::Spine;
use super::store::{Object, Store, Value};
use super::words::Word;
use crate::trace::input::Input;
use crate::trace::{Format, Place, Problem, ReadError, ReadOptions, Sink, Summary};
use std::collections::HashMap;

/// Longest string that is looked at; longer ones are passed over.
const LONGEST_TEXT: u64 = 1 << 12;

/// Instructions between two looks at the memory that is held.
const LOOK: u32 = 1 << 14;

/// Which part of the snapshot is under way: the value of a key of the outermost dictionary, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) key: Word,
    pub(super) at: usize,
}

/// The machine and what it has understood so far.
pub(super) struct Machine<'r, 'i, 's> {
    input: &'r mut Input<'i>,
    pub(super) limit: u64,
    pub(super) stack: Vec<Value>,
    /// Heights of the stack at which a MARK was set.
    pub(super) marks: Vec<usize>,
    memo: Vec<Value>,
    /// Memo entries whose numbers do not follow on.
    sparse: HashMap<u32, Value>,
    puts: usize,
    pub(super) store: Store,
    pub(super) part: Option<Part>,
    pub(super) spine: Spine<'r, 's>,
    /// Offset of the instruction that runs.
    at: u64,
}

impl<'r, 'i, 's> Machine<'r, 'i, 's> {
    pub(super) fn new(input: &'r mut Input<'i>, options: &ReadOptions, sink: &'r mut Sink<'s>) -> Self {
        Self {
            input,
            limit: options.memory_limit,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            sparse: HashMap::new(),
            puts: 0,
            store: Store::default(),
            part: None,
            spine: Spine { sink, summary: Summary::new(Format::SnapshotPickle), bytes: 0 },
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
        let mut until_look = LOOK;
        loop {
            until_look -= 1;
            if until_look == 0 {
                until_look = LOOK;
                self.check_memory()?;
            }
            self.at = self.input.offset();
            let [opcode] = self.take::<1>("the pickle, before STOP")?;
            if opcode == b'.' {
                break;
            }
            self.step(opcode)?;
        }
        self.check_memory()?;
        let top = self.pop()?;
        self.finish(top)?;
        Ok(self.spine.summary)
    }

    fn step(&mut self, opcode: u8) -> Result<(), ReadError> {
        match opcode {
            // By how often they occur in a snapshot.
            b'h' => {
                let [index] = self.take::<1>("BINGET")?;
                self.get(u32::from(index))?;
            }
            b'j' => {
                let index = u32::from_le_bytes(self.take("LONG_BINGET")?);
                self.get(index)?;
            }
            0x94 => {
                let value = self.peek()?;
                self.memo.push(value);
                self.puts += 1;
            }
            b'K' => {
                let [value] = self.take::<1>("BININT1")?;
                self.stack.push(Value::Int(i64::from(value)));
            }
            b'M' => {
                let value = u16::from_le_bytes(self.take("BININT2")?);
                self.stack.push(Value::Int(i64::from(value)));
            }
            b'J' => {
                let value = i32::from_le_bytes(self.take("BININT")?);
                self.stack.push(Value::Int(i64::from(value)));
            }
            0x8a => {
                let [length] = self.take::<1>("LONG1")?;
                self.long(u64::from(length))?;
            }
            b'(' => {
                self.marks.push(self.stack.len());
                let in_trace = self.part.is_some_and(|part| part.key == Word::DeviceTraces);
                if in_trace && self.stack.last() == Some(&Value::Opaque) {
                    self.skip_references()?;
                }
            }
            b'}' => self.push_container(Store::dict)?,
            b']' => self.push_container(Store::list)?,
            b'u' => {
                let mark = self.pop_mark()?;
                self.set_items(mark)?;
            }
            b'e' => {
                let mark = self.pop_mark()?;
                self.append(mark)?;
            }
            b'a' => {
                let from = self.below(1)?;
                self.append(from)?;
            }
            b's' => {
                let from = self.below(2)?;
                self.set_items(from)?;
            }
            0x8c => {
                let [length] = self.take::<1>("SHORT_BINUNICODE")?;
                self.text(u64::from(length))?;
            }
            b'X' => {
                let length = u32::from_le_bytes(self.take("BINUNICODE")?);
                self.text(u64::from(length))?;
            }
            0x8d => {
                let length = u64::from_le_bytes(self.take("BINUNICODE8")?);
                self.text(length)?;
            }
            // A frame's length is a hint for buffers.
            0x95 => drop(self.take::<8>("FRAME")?),
            b'q' => {
                let [index] = self.take::<1>("BINPUT")?;
                self.put(u32::from(index))?;
            }
            b'r' => {
                let index = u32::from_le_bytes(self.take("LONG_BINPUT")?);
                self.put(index)?;
            }
            0x88 => self.stack.push(Value::Bool(true)),
            0x89 => self.stack.push(Value::Bool(false)),
            b'N' => self.stack.push(Value::None),
            b'G' => {
                let value = f64::from_be_bytes(self.take("BINFLOAT")?);
                self.stack.push(Value::Float(value));
            }
            b')' => self.stack.push(Value::Opaque),
            0x85..=0x87 => {
                let from = self.below(usize::from(opcode - 0x84))?;
                self.cut(from);
                self.stack.push(Value::Opaque);
            }
            b't' => {
                let mark = self.pop_mark()?;
                self.cut(mark);
                self.stack.push(Value::Opaque);
            }
            b'l' => {
                let mark = self.pop_mark()?;
                self.collect_list(mark)?;
            }
            b'd' => {
                let mark = self.pop_mark()?;
                self.collect_dict(mark)?;
            }
            0x8b => {
                let length = i32::from_le_bytes(self.take("LONG4")?);
                let length = u64::try_from(length).map_err(|_| self.content("LONG4 has a negative length"))?;
                self.long(length)?;
            }
            0x80 => {
                let [protocol] = self.take::<1>("PROTO")?;
                self.protocol(protocol)?;
            }
            other => return Err(self.refused(other)),
        }
        Ok(())
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

    fn text(&mut self, length: u64) -> Result<(), ReadError> {
        if length > LONGEST_TEXT {
            if !self.input.skip(length)? {
                return Err(self.truncated("a string"));
            }
            self.stack.push(Value::LostText);
            return Ok(());
        }
        // CAST: at most LONGEST_TEXT.
        let length = length as usize;
        if !self.input.ensure(length)? {
            return Err(self.truncated("a string"));
        }
        let bytes = &self.input.buffered()[..length];
        let value = match std::str::from_utf8(bytes) {
            Ok(text) => Word::of(text).map_or_else(|| self.store.text(text), Value::Word),
            // Python writes lone surrogates, which are no UTF-8; nobody needs such a string.
            Err(_) => Value::LostText,
        };
        self.input.advance(length);
        self.stack.push(value);
        Ok(())
    }

    /// An integer in little-endian two's complement.
    fn long(&mut self, length: u64) -> Result<(), ReadError> {
        if length > 9 {
            if !self.input.skip(length)? {
                return Err(self.truncated("an integer"));
            }
            self.stack.push(Value::Huge);
            return Ok(());
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
        self.stack.push(value);
        Ok(())
    }

    fn get(&mut self, index: u32) -> Result<(), ReadError> {
        let value = self.memo.get(index as usize).or_else(|| self.sparse.get(&index)).copied();
        let Some(value) = value else {
            return Err(self.content(format!("memo entry {index} is used before it is made; the file is damaged")));
        };
        self.stack.push(value);
        Ok(())
    }

    fn put(&mut self, index: u32) -> Result<(), ReadError> {
        let value = self.peek()?;
        self.puts += 1;
        let at = index as usize;
        if at < self.memo.len() {
            self.memo[at] = value;
        } else if at == self.memo.len() {
            self.memo.push(value);
        } else {
            // A large number must not take the memory of all those before it.
            self.sparse.insert(index, value);
        }
        Ok(())
    }

    /// Passes over references to the memo that follow each other: most of a file with stack frames are these, in lists
    /// that nobody looks into.
    fn skip_references(&mut self) -> Result<(), ReadError> {
        loop {
            let bytes = self.input.buffered();
            let mut at = 0;
            loop {
                match bytes[at..] {
                    [b'h', index, ..] if usize::from(index) < self.memo.len() => at += 2,
                    [b'j', a, b, c, d, ..] if (u32::from_le_bytes([a, b, c, d]) as usize) < self.memo.len() => at += 5,
                    _ => break,
                }
            }
            let all = bytes.len() - at < 5;
            self.input.advance(at);
            if at == 0 || !all || !self.input.ensure(5)? {
                return Ok(());
            }
        }
    }

    /// Height of the stack below the `count` uppermost values, all of them above the last MARK.
    fn below(&self, count: usize) -> Result<usize, ReadError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let from = self.stack.len().checked_sub(count).filter(|from| *from >= floor);
        from.ok_or_else(|| self.content("an instruction finds too few values; the file is damaged"))
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

    fn pop_mark(&mut self) -> Result<usize, ReadError> {
        self.marks.pop().ok_or_else(|| self.content("an instruction finds no MARK; the file is damaged"))
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
        self.stack.truncate(height);
        if self.part.is_some_and(|part| part.at >= height) {
            self.part = None;
        }
    }

    fn push_container(&mut self, make: fn(&mut Store) -> Option<Value>) -> Result<(), ReadError> {
        self.enter_part();
        let value = if self.is_opaque_here() {
            Value::Opaque
        } else {
            make(&mut self.store).ok_or_else(|| self.too_large())?
        };
        self.stack.push(value);
        Ok(())
    }

    fn collect_list(&mut self, mark: usize) -> Result<(), ReadError> {
        let items = self.stack[mark..].to_vec();
        self.cut(mark);
        let value = self.store.list().ok_or_else(|| self.too_large())?;
        self.store.kept += items.len();
        if let Some(list) = self.store.as_list_mut(value) {
            list.items = items;
        }
        self.stack.push(value);
        Ok(())
    }

    fn collect_dict(&mut self, mark: usize) -> Result<(), ReadError> {
        let value = self.store.dict().ok_or_else(|| self.too_large())?;
        self.stack.insert(mark, value);
        self.set_items(mark + 1)
    }

    /// Puts the values above `from` into the dictionary below them.
    fn set_items(&mut self, from: usize) -> Result<(), ReadError> {
        let target = self.container_below(from)?;
        if self.stack[target] == Value::Opaque {
            self.cut(from);
            return Ok(());
        }
        if !(self.stack.len() - from).is_multiple_of(2) {
            return Err(self.content("a dictionary is given a key without a value; the file is damaged"));
        }
        let in_trace = self.part.is_some_and(|part| part.key == Word::DeviceTraces && target > part.at);
        match self.stack[target] {
            Value::Object(handle) => match self.store.get_mut(handle) {
                Some(Object::Dict(pairs)) => {
                    let before = pairs.len();
                    for pair in self.stack[from..].chunks_exact(2) {
                        let wanted = match pair[0] {
                            Value::Word(word) => !in_trace || word.is_event_key(),
                            _ => !in_trace,
                        };
                        if wanted {
                            pairs.push((pair[0], pair[1]));
                        }
                    }
                    let more = pairs.len() - before;
                    self.store.kept += more;
                }
                _ => return Err(self.content("keys are set in what is no dictionary; the file is damaged")),
            },
            _ => return Err(self.content("keys are set in what is no dictionary; the file is damaged")),
        }
        self.cut(from);
        Ok(())
    }

    fn check_memory(&self) -> Result<(), ReadError> {
        let values = self.stack.len() + self.memo.len() + self.marks.len() / 2;
        let bytes = values * size_of::<Value>() + self.sparse.len() * 48 + self.store.bytes() + self.spine.bytes;
        // CAST: a size in memory.
        if bytes as u64 > self.limit { Err(self.too_large()) } else { Ok(()) }
    }

    pub(super) fn too_large(&self) -> ReadError {
        ReadError::at(Place::Byte(self.at), Problem::TooLarge { limit: self.limit })
    }

    #[cold]
    fn truncated(&self, what: &'static str) -> ReadError {
        // CAST: a length of the buffer.
        let end = self.input.offset() + self.input.buffered().len() as u64;
        ReadError::at(Place::Byte(end), Problem::Truncated(what))
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
