//! PyTorch's memory snapshot as JSON: the dictionary of `torch.cuda.memory._snapshot()` through Python's `json.dump`.
//!
//! Events are handed out as they are read. Unknown keys are passed over without being kept.

use super::error::{Place, Problem};
use super::input::Input;
use super::pickle::RawEvent;
use super::{Action, Event, Format, ReadError, ReadOptions, Segment, SegmentBlock, SegmentType, Sink, Summary};
use crate::snapshot::BlockState;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::cell::Cell;
use std::fmt;
use std::io::Read;

/// Longest string, in bytes, and longest stretch between two strings.
const LONGEST_RUN: u32 = 1 << 24;
/// Most bytes of the allocator settings, which are kept.
const MOST_SETTINGS: u64 = 1 << 20;

/// Reads a snapshot.
pub(super) fn read(input: &mut Input<'_>, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    let left = Cell::new(u64::MAX);
    let mut guarded = Guarded { input, run: 0, escaped: false, left: &left };
    let mut state = State {
        sink,
        summary: Summary::new(Format::SnapshotJson),
        failed: None,
        left: &left,
        traced: false,
        room: options.memory_limit,
    };
    let mut json = serde_json::Deserializer::from_reader(&mut guarded);
    let result = Top(&mut state).deserialize(&mut json).and_then(|()| json.end());
    let place = Place::Byte(guarded.input.offset());
    match result {
        Ok(()) if state.traced => Ok(state.summary),
        Ok(()) => Err(ReadError::content(place, "the snapshot has no 'device_traces'; it is none, or was cut by hand")),
        Err(error) => Err(match state.failed {
            Some(failed) if failed.place == Place::Whole && !matches!(failed.problem, Problem::Stopped(_)) => {
                ReadError { place, ..failed }
            }
            Some(failed) => failed,
            None if error.is_eof() => ReadError::at(place, Problem::Truncated("the JSON document")),
            None if error.is_io() => ReadError::at(place, Problem::Io(error.into())),
            None => ReadError::content(place, format!("{error}; dump the snapshot again")),
        }),
    }
}

/// Bytes with a bound on what the parser can be made to keep.
struct Guarded<'r, 'i, 'c> {
    input: &'r mut Input<'i>,
    /// Bytes since a string began or ended.
    run: u32,
    escaped: bool,
    /// Bytes that may still be read.
    left: &'c Cell<u64>,
}

impl Read for Guarded<'_, '_, '_> {
    #[inline]
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        // The parser asks for one byte at a time.
        let count = match (&mut *out, self.input.buffered().first()) {
            ([slot], Some(byte)) => {
                *slot = *byte;
                self.input.advance(1);
                1
            }
            _ => self.input.read(out)?,
        };
        for byte in &out[..count] {
            self.run += 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.run = 0,
                _ => {}
            }
        }
        // CAST: a length in memory.
        let left = self.left.get().saturating_sub(count as u64);
        self.left.set(left);
        if self.run > LONGEST_RUN || left == 0 {
            return Err(std::io::Error::other("a string or the settings are longer than any snapshot's"));
        }
        Ok(count)
    }
}

struct State<'r, 's, 'c> {
    sink: &'r mut Sink<'s>,
    summary: Summary,
    /// What the sink returned, or an error with a type.
    failed: Option<ReadError>,
    left: &'c Cell<u64>,
    traced: bool,
    /// Bytes that may still be kept.
    room: u64,
}

/// Expands to the part of a [`Visitor`] that says what it wants.
macro_rules! expecting {
    ($text:literal) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str($text)
        }
    };
}

/// The outermost dictionary.
struct Top<'a, 'r, 's, 'c>(&'a mut State<'r, 's, 'c>);

impl<'de> DeserializeSeed<'de> for Top<'_, '_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Top<'_, '_, '_, '_> {
    type Value = ();

    expecting!("a snapshot's dictionary with 'segments' and 'device_traces'");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "device_traces" => {
                    self.0.traced = true;
                    map.next_value_seed(Traces(self.0))?;
                }
                "segments" => map.next_value_seed(Segments(self.0))?,
                "allocator_settings" => {
                    self.0.left.set(MOST_SETTINGS);
                    self.0.summary.allocator_settings = map.next_value()?;
                    self.0.left.set(u64::MAX);
                }
                "external_annotations" => {
                    let count: Count = map.next_value()?;
                    self.0.summary.external_annotations = count.0;
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// Number of items of a list.
struct Count(u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Items;
        impl<'de> Visitor<'de> for Items {
            type Value = Count;

            expecting!("a list");

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Count, A::Error> {
                let mut count = 0;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Count(count))
            }
        }
        deserializer.deserialize_seq(Items)
    }
}

struct Traces<'a, 'r, 's, 'c>(&'a mut State<'r, 's, 'c>);

impl<'de> DeserializeSeed<'de> for Traces<'_, '_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Traces<'_, '_, '_, '_> {
    type Value = ();

    expecting!("one list of events for each device");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut device = 0_u16;
        while seq.next_element_seed(Trace { state: self.0, device })?.is_some() {
            self.0.summary.has_device(device);
            device = device.checked_add(1).ok_or_else(|| A::Error::custom("there are more than 65,535 devices"))?;
        }
        Ok(())
    }
}

/// The events of one device.
struct Trace<'a, 'r, 's, 'c> {
    state: &'a mut State<'r, 's, 'c>,
    device: u16,
}

impl<'de> DeserializeSeed<'de> for Trace<'_, '_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Trace<'_, '_, '_, '_> {
    type Value = ();

    expecting!("a device's list of events");

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        let mut number = 0_u64;
        while let Some(fields) = seq.next_element::<Fields>()? {
            let event = fields.raw().event(self.device).map_err(|field| {
                A::Error::custom(format_args!("event {number} of device {} has no '{field}'", self.device))
            })?;
            match event {
                Some(event) => self.emit::<A::Error>(event)?,
                None => self.state.summary.unknown_actions += 1,
            }
            number += 1;
        }
        Ok(())
    }
}

impl Trace<'_, '_, '_, '_> {
    fn emit<E: Error>(&mut self, event: Event) -> Result<(), E> {
        self.state.summary.count(event.device);
        (self.state.sink)(event).map_err(|error| {
            self.state.failed = Some(error);
            E::custom("stopped")
        })
    }
}

/// An event's fields.
#[derive(Deserialize)]
struct Fields {
    action: Option<Known>,
    addr: Option<u64>,
    device_free: Option<u64>,
    size: Option<u64>,
    #[serde(default)]
    stream: Handle,
    #[serde(default)]
    time_us: u64,
}

impl Fields {
    fn raw(&self) -> RawEvent {
        RawEvent {
            action: self.action.as_ref().map(|known| known.0),
            addr: self.addr,
            device_free: self.device_free,
            size: self.size,
            stream: self.stream.0,
            time_us: self.time_us,
        }
    }
}

/// An action, or one that has no counterpart.
struct Known(Option<Action>);

impl<'de> Deserialize<'de> for Known {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Known;

            expecting!("an action's name");

            fn visit_str<E: Error>(self, name: &str) -> Result<Known, E> {
                Ok(Known(name.parse().ok()))
            }
        }
        deserializer.deserialize_str(Name)
    }
}

/// A stream: a pointer, which as a signed integer may be negative.
#[derive(Default)]
struct Handle(u64);

impl<'de> Deserialize<'de> for Handle {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Handle;

            expecting!("a stream");

            fn visit_u64<E: Error>(self, value: u64) -> Result<Handle, E> {
                Ok(Handle(value))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Handle, E> {
                // CAST: the same 64 bits.
                Ok(Handle(value as u64))
            }
        }
        deserializer.deserialize_u64(Number)
    }
}

struct Segments<'a, 'r, 's, 'c>(&'a mut State<'r, 's, 'c>);

impl<'de> DeserializeSeed<'de> for Segments<'_, '_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Segments<'_, '_, '_, '_> {
    type Value = ();

    expecting!("a list of segments");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        loop {
            // A segment's blocks are kept before they can be counted, so it may not be longer than what may be kept.
            self.0.left.set(self.0.room);
            let next = seq.next_element::<SegmentFields>();
            if self.0.left.get() == 0 {
                self.0.failed = Some(ReadError::at(Place::Whole, Problem::TooLarge { limit: self.0.room }));
            }
            self.0.left.set(u64::MAX);
            let Some(fields) = next? else { return Ok(()) };
            let kept = size_of::<Segment>() + fields.blocks.len() * size_of::<SegmentBlock>();
            // CAST: a size in memory.
            self.0.room = self.0.room.saturating_sub(kept as u64);
            self.0.summary.segments.push(fields.segment());
        }
    }
}

#[derive(Deserialize)]
struct SegmentFields {
    #[serde(default)]
    device: u16,
    address: u64,
    total_size: u64,
    #[serde(default)]
    stream: Handle,
    #[serde(default)]
    segment_type: Pool,
    #[serde(default)]
    is_expandable: bool,
    blocks: Vec<BlockFields>,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pool {
    Small,
    #[default]
    #[serde(other)]
    Large,
}

#[derive(Deserialize)]
struct BlockFields {
    address: Option<u64>,
    size: u64,
    #[serde(default)]
    requested_size: u64,
    state: InBlock,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum InBlock {
    ActiveAllocated,
    #[serde(alias = "active_awaiting_free")]
    ActivePendingFree,
    Inactive,
}

impl SegmentFields {
    fn segment(self) -> Segment {
        let mut next = self.address;
        let mut block = |block: BlockFields| {
            let address = block.address.unwrap_or(next);
            next = next.wrapping_add(block.size);
            let state = match block.state {
                InBlock::ActiveAllocated => BlockState::Allocated,
                InBlock::ActivePendingFree => BlockState::PendingFree,
                InBlock::Inactive => BlockState::Free,
            };
            SegmentBlock { address, size: block.size, requested_size: block.requested_size, state }
        };
        Segment {
            device: self.device,
            address: self.address,
            total_size: self.total_size,
            stream: self.stream.0,
            segment_type: match self.segment_type {
                Pool::Small => SegmentType::Small,
                Pool::Large => SegmentType::Large,
            },
            is_expandable: self.is_expandable,
            blocks: self.blocks.into_iter().map(&mut block).collect(),
        }
    }
}
