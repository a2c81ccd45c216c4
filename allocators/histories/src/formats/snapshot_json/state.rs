//! What was understood of a document so far, and streams as documents name them.

use crate::formats::error::Place;
use crate::formats::summary::{Receiver, Room};
use crate::formats::words::Word;
use crate::formats::{Cut, ReadError, Summary};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, Visitor};
use vramlab_device::budget::{Claim, OverBudget};

/// How much there is of a value of the outermost dictionary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Missing,
    Begun,
    Whole,
}

pub(super) struct State<'r, 's> {
    pub(super) receiver: &'r mut Receiver<'s>,
    pub(super) summary: Summary,
    /// What the sink returned.
    pub(super) failed: Option<ReadError>,
    /// A claim that was refused.
    pub(super) over: Option<OverBudget>,
    pub(super) traced: Part,
    pub(super) segments: Part,
    pub(super) settings: Part,
    /// For the summary.
    pub(super) claim: Claim,
    /// What the settings may still take.
    pub(super) room: Room,
}

impl State<'_, '_> {
    /// What there is of a document that breaks off.
    pub(super) fn cut(mut self, place: Place) -> Summary {
        let cut = Cut {
            at: if let Place::Byte(at) = place { at } else { 0 },
            events: self.summary.all_events(),
            ends_known: (self.traced, self.segments) == (Part::Whole, Part::Whole),
            settings_known: self.settings == Part::Whole,
        };
        if !cut.ends_known {
            self.summary.segments.clear();
        }
        self.summary.cut = Some(cut);
        self.claim.keep();
        self.summary
    }

    /// Takes note of a key.
    pub(super) fn found(&mut self, key: Option<Word>) {
        if let Some(key) = key {
            self.summary.keys.add(key);
        }
    }

    pub(super) fn within<T, E: Error>(&mut self, claimed: Result<T, OverBudget>) -> Result<T, E> {
        claimed.map_err(|over| {
            self.over = Some(over);
            E::custom("too large")
        })
    }
}

/// What comes next in the document, for the visitor that takes it.
pub(super) enum Seed<V> {
    Map(V),
    List(V),
    Any(V),
}

impl<'de, V: Visitor<'de>> DeserializeSeed<'de> for Seed<V> {
    type Value = V::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        match self {
            Seed::Map(visitor) => deserializer.deserialize_map(visitor),
            Seed::List(visitor) => deserializer.deserialize_seq(visitor),
            Seed::Any(visitor) => deserializer.deserialize_any(visitor),
        }
    }
}

/// A key, or the name of something; `None` for one without a meaning.
pub(super) struct Name(pub(super) Option<Word>);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Spelt;
        impl Visitor<'_> for Spelt {
            type Value = Name;

            expecting!("a name");

            fn visit_str<E: Error>(self, name: &str) -> Result<Name, E> {
                Ok(Name(Word::named(name)))
            }
        }
        deserializer.deserialize_str(Spelt)
    }
}

/// A stream: a pointer, which as a signed integer may be negative.
#[derive(Default)]
pub(super) struct Handle(pub(super) u64);

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
