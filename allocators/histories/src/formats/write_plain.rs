//! Plain data, dictionaries and lists, as a pickle or as JSON, written incrementally.

use super::write::{HistoryFile, WriteError};
use super::{Frame, StackId, TextId};
use std::collections::HashMap;
use std::io::Write;

/// Items in one APPENDS: as many as Python's pickler batches. PyTorch's viewer passes them as call arguments, whose number
/// browsers limit.
const BATCH: u32 = 1000;

/// Output syntax.
#[derive(Debug)]
enum Form {
    /// Protocol 4, with the instructions that PyTorch's viewer supports. Recurring values are memoized.
    Pickle(HashMap<Recurring, u32>),
    Json,
}

/// Values that a pickle writes once and refers to later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Recurring {
    Word(&'static str),
    Text(TextId),
    Frame(Frame),
    Stack(StackId),
}

/// Writes nested plain data.
#[derive(Debug)]
pub(super) struct Plain {
    pub(super) file: HistoryFile,
    form: Form,
    /// Number of items so far of each open container.
    open: Vec<u32>,
}

impl Plain {
    pub(super) fn pickle(mut file: HistoryFile) -> Result<Self, WriteError> {
        file.put(|out| out.write_all(b"\x80\x04"))?;
        Ok(Self { file, form: Form::Pickle(HashMap::new()), open: Vec::new() })
    }

    pub(super) fn json(file: HistoryFile) -> Self {
        Self { file, form: Form::Json, open: Vec::new() }
    }

    fn is_pickle(&self) -> bool {
        matches!(self.form, Form::Pickle(_))
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.file.put(|out| out.write_all(bytes))
    }

    /// Writes a value in the syntax's form.
    fn either(&mut self, pickle: &[u8], json: &[u8]) -> Result<(), WriteError> {
        let bytes = if self.is_pickle() { pickle } else { json };
        self.bytes(bytes)
    }

    pub(super) fn begin_dict(&mut self) -> Result<(), WriteError> {
        self.open.push(0);
        self.either(b"}(", b"{")
    }

    pub(super) fn end_dict(&mut self) -> Result<(), WriteError> {
        self.open.pop();
        self.either(b"u", b"}")
    }

    /// A key of the open dictionary; its value is next.
    pub(super) fn key(&mut self, key: &'static str) -> Result<&mut Self, WriteError> {
        self.separate()?;
        self.word(key)?;
        self.either(b"", b":")?;
        Ok(self)
    }

    fn separate(&mut self) -> Result<(), WriteError> {
        let json = !self.is_pickle();
        let Some(count) = self.open.last_mut() else { return Ok(()) };
        *count += 1;
        if json && *count > 1 { self.bytes(b",") } else { Ok(()) }
    }

    pub(super) fn begin_list(&mut self) -> Result<(), WriteError> {
        self.open.push(0);
        self.either(b"](", b"[")
    }

    /// Announces the next item of the open list.
    pub(super) fn item(&mut self) -> Result<&mut Self, WriteError> {
        let full = self.is_pickle() && self.open.last() == Some(&BATCH);
        if full {
            self.open.pop();
            self.open.push(0);
            self.bytes(b"e(")?;
        }
        self.separate()?;
        Ok(self)
    }

    pub(super) fn end_list(&mut self) -> Result<(), WriteError> {
        self.open.pop();
        self.either(b"e", b"]")
    }

    /// A recurring string.
    pub(super) fn word(&mut self, text: &'static str) -> Result<(), WriteError> {
        if self.again(Recurring::Word(text))? {
            return Ok(());
        }
        self.text(text)?;
        self.keep(Recurring::Word(text))
    }

    /// Refers to an earlier value; false if it was not written, or the syntax has no references.
    pub(super) fn again(&mut self, value: Recurring) -> Result<bool, WriteError> {
        let Form::Pickle(memo) = &self.form else { return Ok(false) };
        let Some(&index) = memo.get(&value) else { return Ok(false) };
        match u8::try_from(index) {
            Ok(index) => self.bytes(&[b'h', index])?,
            Err(_) => {
                self.bytes(b"j")?;
                self.bytes(&index.to_le_bytes())?;
            }
        }
        Ok(true)
    }

    /// Memoizes the value just written.
    pub(super) fn keep(&mut self, value: Recurring) -> Result<(), WriteError> {
        let Form::Pickle(memo) = &mut self.form else { return Ok(()) };
        // CAST: no disk has room for a pickle of four billion different values.
        let next = memo.len() as u32;
        memo.insert(value, next);
        self.bytes(b"\x94")
    }

    pub(super) fn text(&mut self, text: &str) -> Result<(), WriteError> {
        if !self.is_pickle() {
            return self.file.put(|out| Ok(serde_json::to_writer(out, text)?));
        }
        match (u8::try_from(text.len()), u32::try_from(text.len())) {
            (Ok(length), _) => self.bytes(&[0x8c, length])?,
            (_, Ok(length)) => {
                self.bytes(b"X")?;
                self.bytes(&length.to_le_bytes())?;
            }
            _ => return Err(self.file.unfit("a string of more than 4 GiB cannot be written")),
        }
        self.bytes(text.as_bytes())
    }

    pub(super) fn int(&mut self, value: i64) -> Result<(), WriteError> {
        if !self.is_pickle() {
            return self.file.put(|out| write!(out, "{value}"));
        }
        if let Ok(value) = u8::try_from(value) {
            return self.bytes(&[b'K', value]);
        }
        if let Ok(value) = u16::try_from(value) {
            self.bytes(b"M")?;
            return self.bytes(&value.to_le_bytes());
        }
        if let Ok(value) = i32::try_from(value) {
            self.bytes(b"J")?;
            return self.bytes(&value.to_le_bytes());
        }
        // The fewest bytes that represent the value and its sign.
        let bytes = value.to_le_bytes();
        let length = (1..8).find(|length| value >> (8 * length - 1) == value >> 63).unwrap_or(8);
        // CAST: at most 8.
        self.bytes(&[0x8a, length as u8])?;
        self.bytes(&bytes[..length])
    }

    /// A value that PyTorch's readers parse as a signed 64-bit integer.
    pub(super) fn size(&mut self, name: &str, value: u64) -> Result<(), WriteError> {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => Err(self.file.unfit(format!("{name} {value} is beyond 2^63, which a snapshot cannot hold"))),
        }
    }

    pub(super) fn bool(&mut self, value: bool) -> Result<(), WriteError> {
        if value { self.either(b"\x88", b"true") } else { self.either(b"\x89", b"false") }
    }

    /// A pair, which is a list in JSON.
    pub(super) fn pair(&mut self, first: i64, second: i64) -> Result<(), WriteError> {
        if self.is_pickle() {
            self.int(first)?;
            self.int(second)?;
            return self.bytes(b"\x86");
        }
        self.file.put(|out| write!(out, "[{first},{second}]"))
    }

    pub(super) fn value(&mut self, value: &serde_json::Value) -> Result<(), WriteError> {
        use serde_json::Value;
        if !self.is_pickle() {
            return self.file.put(|out| Ok(serde_json::to_writer(out, value)?));
        }
        match value {
            Value::Null => self.bytes(b"N"),
            Value::Bool(value) => self.bool(*value),
            Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(value), ..) => self.int(value),
                (None, Some(value), _) => {
                    // Nine bytes: the highest is for the sign.
                    self.bytes(&[0x8a, 9])?;
                    self.bytes(&value.to_le_bytes())?;
                    self.bytes(&[0])
                }
                (None, None, Some(value)) => {
                    self.bytes(b"G")?;
                    self.bytes(&value.to_be_bytes())
                }
                (None, None, None) => self.bytes(b"N"),
            },
            Value::String(text) => self.text(text),
            Value::Array(items) => {
                self.begin_list()?;
                for item in items {
                    self.item()?.value(item)?;
                }
                self.end_list()
            }
            Value::Object(map) => {
                self.begin_dict()?;
                for (key, value) in map {
                    self.text(key)?;
                    self.value(value)?;
                }
                self.end_dict()
            }
        }
    }

    /// Completes the file.
    pub(super) fn finish(mut self) -> Result<(), WriteError> {
        self.either(b".", b"\n")?;
        self.file.finish()
    }
}
