//! PyTorch's memory snapshot as JSON: the dictionary of `torch.cuda.memory._snapshot()` through Python's `json.dump`.
//!
//! Events are handed out as they are read. Unknown keys are passed over without being kept.

use self::origins::{Annotations, OriginText, Printed, Stack};
use self::segments::{Host, Segments};
use self::settings::{Keep, Node};
use self::state::{Handle, Name, Part, Seed, State};
use super::error::{Place, Problem};
use super::input::Input;
use super::list::Reader;
use super::summary::{Receiver, Room};
use super::words::{RawEvent, Word};
use super::{Event, Format, Origin, ReadError, ReadOptions, StackId, Summary};
use crate::steps;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::io::{self, Read};

/// Expands to the part of a [`Visitor`] that says what it wants.
macro_rules! expecting {
    ($text:literal) => {
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str($text)
        }
    };
}

mod origins;
mod segments;
mod settings;
mod state;

/// The entry in the [list](super::list).
pub(super) const READER: Reader =
    Reader { name: "snapshot-json", begins: |start| start.text.starts_with('{'), read, snapshot: true };

/// Reads a snapshot.
fn read(input: &mut Input<'_>, options: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    let mut guarded = Guarded::new(input);
    let mut state = State {
        receiver,
        summary: Summary::new(Format::SnapshotJson),
        failed: None,
        over: None,
        traced: Part::Missing,
        segments: Part::Missing,
        settings: Part::Missing,
        claim: options.budget.claim(),
        room: Room::default(),
    };
    let mut json = serde_json::Deserializer::from_reader(&mut guarded);
    let result = Seed::Map(Top(&mut state)).deserialize(&mut json).and_then(|()| json.end());
    let place = Place::Byte(guarded.input.offset());
    match result {
        Ok(()) if state.traced == Part::Whole => {
            // The summary holds it.
            state.claim.keep();
            Ok(state.summary)
        }
        Ok(()) => Err(ReadError::content(place, "the snapshot has no 'device_traces'; it is none, or was cut by hand")),
        Err(error)
            if error.is_eof()
                && state.failed.is_none()
                && state.over.is_none()
                && guarded.fault.is_none()
                && state.summary.all_events() > 0 =>
        {
            Ok(state.cut(place))
        }
        Err(error) => Err(match (state.failed, state.over, guarded.fault) {
            (Some(failed), ..) => failed,
            (None, Some(over), _) => ReadError::over(place, over),
            (None, None, Some(fault)) => ReadError::content(place, fault),
            _ if error.is_eof() => ReadError::at(place, Problem::Truncated("the JSON document")),
            _ if error.is_io() => ReadError::at(place, Problem::Io(error.into())),
            _ => ReadError::content(place, format!("{error}; dump the snapshot again")),
        }),
    }
}

/// The outermost dictionary.
struct Top<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> Visitor<'de> for Top<'_, '_, '_> {
    type Value = ();

    expecting!("a snapshot's dictionary with 'segments' and 'device_traces'");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Name(key)) = map.next_key()? {
            self.0.found(key);
            match key {
                Some(Word::DeviceTraces) => {
                    self.0.traced = Part::Begun;
                    map.next_value_seed(Seed::List(Traces(self.0)))?;
                    self.0.traced = Part::Whole;
                }
                Some(Word::Segments) => {
                    map.next_value_seed(Seed::List(Segments(self.0)))?;
                    self.0.segments = Part::Whole;
                }
                Some(key @ (Word::HostSegments | Word::HostTraces)) => {
                    let events = key == Word::HostTraces;
                    map.next_value_seed(Seed::List(Host { state: self.0, events }))?;
                }
                Some(Word::AllocatorSettings) => {
                    let State { room, claim, over, .. } = &mut *self.0;
                    let mut keep = Keep { room, claim, over };
                    if let Value::Object(settings) = map.next_value_seed(Node::outermost(&mut keep))? {
                        self.0.summary.allocator_settings = settings;
                    }
                    self.0.settings = Part::Whole;
                }
                Some(Word::ExternalAnnotations) => {
                    self.0.summary.external_annotations = map.next_value_seed(Seed::List(Annotations(self.0)))?;
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

struct Traces<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> Visitor<'de> for Traces<'_, '_, '_> {
    type Value = ();

    expecting!("one list of events for each device");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut device = 0_u16;
        while seq.next_element_seed(Seed::List(Trace { state: self.0, device }))?.is_some() {
            self.0.summary.has_device(device);
            device = device.checked_add(1).ok_or_else(|| A::Error::custom("there are more than 65,535 devices"))?;
        }
        Ok(())
    }
}

/// The events of one device.
struct Trace<'a, 'r, 's> {
    state: &'a mut State<'r, 's>,
    device: u16,
}

impl<'de> Visitor<'de> for Trace<'_, '_, '_> {
    type Value = ();

    expecting!("a device's list of events");

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        let mut number = 0_u64;
        while let Some((raw, origin)) = seq.next_element_seed(Seed::Map(Fields(self.state)))? {
            steps::count(1);
            let event = raw.event(self.device).map_err(|field| {
                A::Error::custom(format_args!("event {number} of device {} has no '{field}'", self.device))
            })?;
            match event {
                Some(event) => self.emit::<A::Error>(event, origin)?,
                None => self.state.summary.unknown_actions += 1,
            }
            number += 1;
        }
        Ok(())
    }
}

impl Trace<'_, '_, '_> {
    fn emit<E: Error>(&mut self, event: Event, origin: Origin) -> Result<(), E> {
        self.state.summary.count(event.device);
        self.state.receiver.take(event, origin).map_err(|error| {
            self.state.failed = Some(error);
            E::custom("stopped")
        })
    }
}

/// An event's fields.
struct Fields<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> Visitor<'de> for Fields<'_, '_, '_> {
    type Value = (RawEvent, Origin);

    expecting!("an event's dictionary");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut raw, mut origin, mut forward) = (RawEvent::default(), Origin::default(), StackId::default());
        let wanted = self.0.receiver.wants_origins;
        while let Some(Name(key)) = map.next_key()? {
            self.0.found(key);
            match key {
                Some(Word::Action) => {
                    raw.action = map.next_value::<Option<Name>>()?.map(|Name(name)| name.and_then(Word::action))
                }
                Some(Word::Addr) => raw.addr = map.next_value()?,
                Some(Word::DeviceFree) => raw.device_free = map.next_value()?,
                Some(Word::Size) => raw.size = map.next_value()?,
                Some(Word::Stream) => raw.stream = map.next_value::<Handle>()?.0,
                Some(Word::TimeUs) => raw.time_us = map.next_value()?,
                Some(Word::Frames) if wanted => origin.stack = map.next_value_seed(Seed::List(Stack(self.0)))?,
                Some(Word::ForwardFrames) if wanted => forward = map.next_value_seed(Seed::Any(Printed(self.0)))?,
                Some(Word::Category) if wanted => {
                    origin.category = map.next_value_seed(Seed::Any(OriginText(self.0)))?
                }
                Some(Word::UserMetadata) if wanted => {
                    origin.note = map.next_value_seed(Seed::Any(OriginText(self.0)))?
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        let whole = self.0.receiver.origins.with_forward(origin.stack, forward);
        origin.stack = self.0.within(whole)?;
        Ok((raw, origin))
    }
}

// Bounds on what the parser of JSON can be made to keep or to wait for.

/// Longest text in bytes; the parser keeps the one that it reads.
const LONGEST_TEXT: u32 = 1 << 18;
/// Longest stretch between two texts.
const LONGEST_STRETCH: u32 = 1 << 24;
/// Deepest nesting; the parser keeps a byte for each level that it passes over.
const DEEPEST: u32 = 128;

/// The bytes of an input, up to what no snapshot holds.
struct Guarded<'r, 'i> {
    input: &'r mut Input<'i>,
    /// Bytes since a text began or ended.
    run: u32,
    in_text: bool,
    escaped: bool,
    depth: u32,
    /// What ended the reading.
    fault: Option<&'static str>,
}

impl<'r, 'i> Guarded<'r, 'i> {
    fn new(input: &'r mut Input<'i>) -> Self {
        Self { input, run: 0, in_text: false, escaped: false, depth: 0, fault: None }
    }

    #[inline]
    fn look(&mut self, byte: u8) {
        self.run += 1;
        if self.in_text {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => (self.in_text, self.run) = (false, 0),
                _ => {}
            }
        } else {
            match byte {
                b'"' => (self.in_text, self.run) = (true, 0),
                b'[' | b'{' => self.depth += 1,
                b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        if self.run > if self.in_text { LONGEST_TEXT } else { LONGEST_STRETCH } {
            self.fault = Some("a text, or a stretch between two texts, is longer than any snapshot's");
        } else if self.depth > DEEPEST {
            self.fault = Some("its lists and dictionaries are nested deeper than any snapshot's");
        }
    }
}

impl Read for Guarded<'_, '_> {
    #[inline]
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        // The parser asks for one byte at a time.
        let count = match (&mut *out, self.input.buffered().first()) {
            ([slot], Some(byte)) => {
                *slot = *byte;
                self.input.advance(1);
                1
            }
            _ => self.input.read(out)?,
        };
        steps::count(count);
        out[..count].iter().for_each(|byte| self.look(*byte));
        match self.fault {
            Some(fault) => Err(io::Error::other(fault)),
            None => Ok(count),
        }
    }
}
