//! The stack machine.

use super::memo::Memo;
use crate::formats::input::Input;
use crate::formats::snapshot::{Assembly, Value};
use crate::formats::summary::Receiver;
use crate::formats::words::Word;
use crate::formats::{Format, Place, Problem, ReadError, ReadOptions, Summary};
use crate::steps;

/// Longest string to keep; longer ones are skipped.
const LONGEST_TEXT: u64 = 1 << 12;

/// The machine: a program that builds values.
pub(super) struct Machine<'r, 'i, 's> {
    pub(super) input: &'r mut Input<'i>,
    pub(super) memo: Memo,
    pub(super) built: Assembly<'r, 's>,
}

impl<'r, 'i, 's> Machine<'r, 'i, 's> {
    pub(super) fn new(input: &'r mut Input<'i>, options: &ReadOptions, receiver: &'r mut Receiver<'s>) -> Self {
        let built = Assembly::new(Format::SnapshotPickle, options, receiver);
        Self { input, memo: Memo::new(&options.budget), built }
    }

    /// Runs the program and returns its result.
    pub(super) fn run(mut self) -> Result<Summary, ReadError> {
        let [first, protocol] = self.take::<2>("its first two bytes")?;
        if first != 0x80 {
            return Err(self.refuse("without PROTO", "only protocols 2 to 5 are read"));
        }
        self.protocol(protocol)?;
        match self.steps() {
            Err(ReadError { problem: Problem::Truncated(part), .. }) => {
                self.built.keep_complete_part(part, self.end())?
            }
            stopped => {
                stopped?;
                self.built.end()?;
            }
        }
        Ok(self.built.into_summary())
    }

    /// Runs up to STOP.
    fn steps(&mut self) -> Result<(), ReadError> {
        loop {
            self.run_ahead()?;
            steps::count(1);
            self.built.at = self.input.offset();
            let [opcode] = self.take::<1>("the pickle, before STOP")?;
            if opcode == b'.' || self.built.ends_wrapper(opcode) {
                return Ok(());
            }
            self.step(opcode)?;
        }
    }

    fn step(&mut self, opcode: u8) -> Result<(), ReadError> {
        match opcode {
            // Ordered by frequency in a snapshot.
            b'h' => self.get::<1>("BINGET"),
            b'j' => self.get::<4>("LONG_BINGET"),
            0x94 => {
                let value = self.built.peek()?;
                let grown = self.memo.add(value);
                self.built.within(grown)
            }
            b'K' => self.integer::<1>("BININT1"),
            b'M' => self.integer::<2>("BININT2"),
            b'J' => {
                let value = i32::from_le_bytes(self.take("BININT")?);
                self.built.push(Value::Int(i64::from(value)))
            }
            0x8a => {
                let length = self.number::<1>("LONG1")?;
                self.long(length)
            }
            b'(' => {
                self.built.mark()?;
                let in_trace = self.built.part.is_some_and(|part| part.key == Word::DeviceTraces);
                match self.built.stack.last() {
                    Some(Value::Opaque) if in_trace => self.skip_references(),
                    Some(Value::Stack(stack)) => self.refer_to_frames(*stack),
                    _ => Ok(()),
                }
            }
            b'}' => self.built.dict(),
            b']' => self.built.list(),
            b'u' => self.built.with_marked(Assembly::set_items),
            b'e' => self.built.with_marked(Assembly::append),
            b'a' => self.built.with_top(1, Assembly::append),
            b's' => self.built.with_top(2, Assembly::set_items),
            0x8c => self.text::<1>("SHORT_BINUNICODE"),
            b'X' => self.text::<4>("BINUNICODE"),
            0x8d => self.text::<8>("BINUNICODE8"),
            // A frame's length is a hint for buffers.
            0x95 => self.number::<8>("FRAME").map(drop),
            b'q' => self.put::<1>("BINPUT"),
            b'r' => self.put::<4>("LONG_BINPUT"),
            0x88 => self.built.push(Value::Bool(true)),
            0x89 => self.built.push(Value::Bool(false)),
            b'N' => self.built.push(Value::None),
            b'G' => {
                let value = f64::from_be_bytes(self.take("BINFLOAT")?);
                self.built.push(Value::Float(value))
            }
            b')' => self.built.push(Value::Opaque),
            0x85..=0x87 => self.built.with_top(usize::from(opcode - 0x84), Assembly::tuple),
            b't' => self.built.with_marked(Assembly::tuple),
            b'l' => self.built.with_marked(Assembly::collect_list),
            b'd' => self.built.with_marked(Assembly::collect_dict),
            0x8b => {
                let length = i32::from_le_bytes(self.take("LONG4")?);
                let length = u64::try_from(length).map_err(|_| self.built.content("LONG4 has a negative length"))?;
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
        Err(self.built.content(format!("pickle protocol {protocol} is not read, only 2 to 5: dump it with protocol=4")))
    }

    /// The next bytes of the file.
    #[inline]
    fn take<const N: usize>(&mut self, part: &'static str) -> Result<[u8; N], ReadError> {
        if !self.input.ensure(N)? {
            return Err(self.truncated(part));
        }
        let mut out = [0; N];
        out.copy_from_slice(&self.input.buffered()[..N]);
        self.input.advance(N);
        Ok(out)
    }

    /// A number of this many bytes.
    #[inline]
    fn number<const N: usize>(&mut self, part: &'static str) -> Result<u64, ReadError> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.take::<N>(part)?);
        Ok(u64::from_le_bytes(wide))
    }

    fn integer<const N: usize>(&mut self, part: &'static str) -> Result<(), ReadError> {
        let value = self.number::<N>(part)?;
        self.built.push(Value::Int(value.cast_signed()))
    }

    fn text<const N: usize>(&mut self, part: &'static str) -> Result<(), ReadError> {
        let length = self.number::<N>(part)?;
        if length > LONGEST_TEXT {
            if !self.input.skip(length)? {
                return Err(self.truncated("a string"));
            }
            return self.built.push(Value::LostText);
        }
        // CAST: at most LONGEST_TEXT.
        let length = length as usize;
        if !self.input.ensure(length)? {
            return Err(self.truncated("a string"));
        }
        let value = self.built.store.string(&self.input.buffered()[..length]);
        self.input.advance(length);
        self.built.push_made(value)
    }

    /// An integer in little-endian two's complement.
    fn long(&mut self, length: u64) -> Result<(), ReadError> {
        if length > 9 {
            if !self.input.skip(length)? {
                return Err(self.truncated("an integer"));
            }
            return self.built.push(Value::Huge);
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
        self.built.push(value)
    }

    fn get<const N: usize>(&mut self, part: &'static str) -> Result<(), ReadError> {
        // CAST: at most four bytes.
        let index = self.number::<N>(part)? as u32;
        let Some(value) = self.memo.get(index) else {
            return Err(self
                .built
                .content(format!("memo entry {index} is used before it is made; the file is damaged")));
        };
        self.built.push(value)
    }

    fn put<const N: usize>(&mut self, part: &'static str) -> Result<(), ReadError> {
        let index = self.number::<N>(part)?;
        let value = self.built.peek()?;
        // CAST: at most four bytes.
        let stored = self.memo.put(index as u32, value);
        self.built.within(stored)
    }

    #[cold]
    pub(super) fn truncated(&self, part: &'static str) -> ReadError {
        ReadError::truncated(part, self.end())
    }

    /// Position after the buffer's content.
    pub(super) fn end(&self) -> u64 {
        // CAST: a length of the buffer.
        self.input.offset() + self.input.buffered().len() as u64
    }

    fn refuse(&self, name: &'static str, why: &'static str) -> ReadError {
        ReadError::at(Place::Byte(self.built.at), Problem::Refused { name, why })
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
            other => return ReadError::at(Place::Byte(self.built.at), Problem::UnknownOpcode(other)),
        };
        self.refuse(name, why)
    }
}
