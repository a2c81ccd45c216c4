//! PyTorch's memory snapshot as JSON: the dictionary of `torch.cuda.memory._snapshot()` through Python's `json.dump`, also as
//! `{"snapshot": ...}`, or the list of `torch.cuda.memory_snapshot()`, which has no events.
//!
//! The parser's values are interpreted as those of a [pickle](super::pickle). JSON has no references, so each item of a list is
//! processed as soon as it is complete.

use super::error::{Place, Problem};
use super::input::Input;
use super::list::Reader;
use super::snapshot::{Assembly, Value};
use super::summary::Receiver;
use super::{Format, ReadError, ReadOptions, Summary};
use crate::steps;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::io::{self, Read};

/// The entry in the [list](super::list).
pub(super) const READER: Reader =
    Reader { name: "snapshot-json", begins: |start| start.text.starts_with(['{', '[']), read, snapshot: true };

/// Reads a snapshot.
fn read(input: &mut Input<'_>, options: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    let mut reading = Reading { built: Assembly::new(Format::SnapshotJson, options, receiver), failed: None };
    let mut guarded = Guarded::new(input);
    let mut json = serde_json::Deserializer::from_reader(&mut guarded);
    let result = Next(&mut reading).deserialize(&mut json).and_then(|()| json.end());
    let end = guarded.input.offset();
    let place = Place::Byte(end);
    let Reading { mut built, failed } = reading;
    built.at = end;
    match (result, failed, guarded.fault) {
        (Ok(()), ..) => built.end()?,
        (_, Some(ReadError { place: Place::Byte(_), problem, .. }), _) => return Err(ReadError::at(place, problem)),
        (_, Some(stopped), _) => return Err(stopped),
        (_, _, Some(fault)) => return Err(ReadError::content(place, fault)),
        (Err(error), ..) if error.is_eof() => built.keep_complete_part("the JSON document", end)?,
        (Err(error), ..) if error.is_io() => return Err(ReadError::at(place, Problem::Io(error.into()))),
        (Err(error), ..) => return Err(ReadError::content(place, format!("{error}; dump the snapshot again"))),
    }
    Ok(built.into_summary())
}

/// The interpreted values, and the error that ended parsing.
struct Reading<'r, 's> {
    built: Assembly<'r, 's>,
    failed: Option<ReadError>,
}

impl<'r, 's> Reading<'r, 's> {
    /// Runs `act` on the interpreted values. Its error ends parsing.
    fn run<E: Error>(&mut self, act: impl FnOnce(&mut Assembly<'r, 's>) -> Result<(), ReadError>) -> Result<(), E> {
        act(&mut self.built).map_err(|error| {
            self.failed = Some(error);
            E::custom("stopped")
        })
    }

    /// Whether the container that just started is skipped.
    fn is_opaque(&self) -> bool {
        self.built.stack.last() == Some(&Value::Opaque)
    }
}

/// Pushes the next value.
struct Next<'a, 'r, 's>(&'a mut Reading<'r, 's>);

impl<'de> DeserializeSeed<'de> for Next<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Next<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        self.0.run(|built| built.push(Value::Bool(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.0.run(|built| built.push(Value::Int(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.0.run(|built| built.push(i64::try_from(value).map_or(Value::Uint(value), Value::Int)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        self.0.run(|built| built.push(Value::Float(value)))
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.0.run(|built| built.push(Value::None))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.0.run(|built| {
            let text = built.store.text(text);
            built.push_made(text)
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self(reading) = self;
        // JSON writes pairs as lists.
        let pair = matches!(reading.built.stack.last(), Some(Value::Word(key)) if key.is_pool_key());
        if !pair {
            reading.run(Assembly::list)?;
        }
        if reading.is_opaque() {
            while seq.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        let complete = pair || matches!(reading.built.stack.last(), Some(Value::Stack(_)));
        let made = reading.built.stacks.len();
        reading.run(Assembly::mark)?;
        while seq.next_element_seed(Next(&mut *reading))?.is_some() {
            if !complete {
                reading.run(|built| built.with_marked(Assembly::append).and_then(|()| built.mark()))?;
                reading.built.stacks.forget(made);
            }
        }
        reading.run(|built| built.with_marked(if pair { Assembly::tuple } else { Assembly::append }))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self(reading) = self;
        reading.run(Assembly::dict)?;
        if reading.is_opaque() {
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        reading.run(Assembly::mark)?;
        let was_wrapped = reading.built.is_wrapped;
        while map.next_key_seed(Next(&mut *reading))?.is_some() {
            if reading.built.wants_next() {
                map.next_value_seed(Next(&mut *reading))?;
                if reading.built.is_wrapped && !was_wrapped {
                    // That was the snapshot itself; this dictionary was dropped.
                    while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                    return Ok(());
                }
            } else {
                map.next_value::<IgnoredAny>()?;
                reading.run(|built| built.push(Value::Opaque))?;
            }
        }
        reading.run(|built| built.with_marked(Assembly::set_items))
    }
}

// Limits on the memory and time that the JSON parser can be made to use.

/// Longest text in bytes; the parser buffers the current one.
const LONGEST_TEXT: u32 = 1 << 18;
/// Longest distance between two texts.
const LONGEST_STRETCH: u32 = 1 << 24;
/// Deepest nesting; the parser itself stops one level deeper.
const DEEPEST: u32 = 127;

/// The bytes of an input, up to these limits.
struct Guarded<'r, 'i> {
    input: &'r mut Input<'i>,
    /// Bytes since a text started or ended, and their limit.
    run: u32,
    longest: u32,
    in_text: bool,
    escaped: bool,
    depth: u32,
    /// The error that ended reading.
    fault: Option<&'static str>,
}

impl<'r, 'i> Guarded<'r, 'i> {
    fn new(input: &'r mut Input<'i>) -> Self {
        Self { input, run: 0, longest: LONGEST_STRETCH, in_text: false, escaped: false, depth: 0, fault: None }
    }

    #[inline]
    fn look(&mut self, byte: u8) -> io::Result<()> {
        steps::count(1);
        self.run += 1;
        match byte {
            b'"' | b'\\' | b'[' | b'{' | b']' | b'}' => self.mark(byte),
            _ => self.escaped = false,
        }
        if self.run > self.longest {
            return self.refuse("a text, or a stretch between two texts, is longer than any snapshot's");
        }
        if self.depth > DEEPEST {
            return self.refuse("its lists and dictionaries are nested deeper than any snapshot's");
        }
        Ok(())
    }

    /// Processes structural characters outside of texts.
    fn mark(&mut self, byte: u8) {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'"' => {
                (self.in_text, self.run) = (!self.in_text, 0);
                self.longest = if self.in_text { LONGEST_TEXT } else { LONGEST_STRETCH };
            }
            _ if self.in_text => self.escaped = byte == b'\\',
            b'[' | b'{' => self.depth += 1,
            _ => self.depth = self.depth.saturating_sub(1),
        }
    }

    #[cold]
    fn refuse(&mut self, fault: &'static str) -> io::Result<()> {
        self.fault = Some(fault);
        Err(io::Error::other(fault))
    }
}

impl Read for Guarded<'_, '_> {
    #[inline]
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        // The parser requests one byte at a time.
        if let ([slot], Some(&byte)) = (&mut *out, self.input.buffered().first()) {
            *slot = byte;
            self.input.advance(1);
            return self.look(byte).map(|()| 1);
        }
        let count = self.input.read(out)?;
        out[..count].iter().try_for_each(|byte| self.look(*byte)).map(|()| count)
    }
}
