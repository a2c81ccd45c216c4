//! PyTorch's memory snapshot as JSON: the dictionary of `torch.cuda.memory._snapshot()` through Python's `json.dump`.
//!
//! Events are handed out as they are read. Unknown keys are passed over without being kept.

/// Expands to the part of a [`Visitor`] that says what it wants.
macro_rules! expecting {
    ($text:literal) => {
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str($text)
        }
    };
}

mod guard;
mod segments;
mod settings;

use self::guard::Guarded;
use self::segments::Segments;
use self::settings::{Keep, Node};
use super::error::{Place, Problem};
use super::input::Input;
use super::pickle::RawEvent;
use super::settings::Room;
use super::{Action, Event, Format, ReadError, ReadOptions, Sink, Summary};
use crate::budget::{Claim, OverBudget};
use crate::steps;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// Reads a snapshot.
pub(super) fn read(input: &mut Input<'_>, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    let mut guarded = Guarded::new(input);
    let mut state = State {
        sink,
        summary: Summary::new(Format::SnapshotJson),
        failed: None,
        over: None,
        traced: false,
        claim: options.budget.claim(),
        room: Room::default(),
    };
    let mut json = serde_json::Deserializer::from_reader(&mut guarded);
    let result = Top(&mut state).deserialize(&mut json).and_then(|()| json.end());
    let place = Place::Byte(guarded.input.offset());
    match result {
        Ok(()) if state.traced => {
            // The summary holds it.
            state.claim.keep();
            Ok(state.summary)
        }
        Ok(()) => Err(ReadError::content(place, "the snapshot has no 'device_traces'; it is none, or was cut by hand")),
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

struct State<'r, 's> {
    sink: &'r mut Sink<'s>,
    summary: Summary,
    /// What the sink returned.
    failed: Option<ReadError>,
    /// A claim that was refused.
    over: Option<OverBudget>,
    traced: bool,
    /// For the summary.
    claim: Claim,
    /// What the settings may still take.
    room: Room,
}

impl State<'_, '_> {
    fn within<T, E: Error>(&mut self, claimed: Result<T, OverBudget>) -> Result<T, E> {
        claimed.map_err(|over| {
            self.over = Some(over);
            E::custom("too large")
        })
    }
}

/// The outermost dictionary.
struct Top<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> DeserializeSeed<'de> for Top<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Top<'_, '_, '_> {
    type Value = ();

    expecting!("a snapshot's dictionary with 'segments' and 'device_traces'");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key()? {
            match key {
                Key::DeviceTraces => {
                    self.0.traced = true;
                    map.next_value_seed(Traces(self.0))?;
                }
                Key::Segments => map.next_value_seed(Segments(self.0))?,
                Key::AllocatorSettings => {
                    let State { room, claim, over, .. } = &mut *self.0;
                    let mut keep = Keep { room, claim, over };
                    if let Value::Object(settings) = map.next_value_seed(Node::outermost(&mut keep))? {
                        self.0.summary.allocator_settings = settings;
                    }
                }
                Key::ExternalAnnotations => {
                    let count: Count = map.next_value()?;
                    self.0.summary.external_annotations = count.0;
                }
                Key::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Key {
    DeviceTraces,
    Segments,
    AllocatorSettings,
    ExternalAnnotations,
    #[serde(other)]
    Other,
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

struct Traces<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> DeserializeSeed<'de> for Traces<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Traces<'_, '_, '_> {
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
struct Trace<'a, 'r, 's> {
    state: &'a mut State<'r, 's>,
    device: u16,
}

impl<'de> DeserializeSeed<'de> for Trace<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Trace<'_, '_, '_> {
    type Value = ();

    expecting!("a device's list of events");

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        let mut number = 0_u64;
        while let Some(fields) = seq.next_element::<Fields>()? {
            steps::count(1);
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

impl Trace<'_, '_, '_> {
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
