//! Where events came from: stack frames and annotations, which are numbered as they are read.

use crate::formats::error::Place;
use crate::formats::summary::{Receiver, Room};
use crate::formats::words::Word;
use crate::formats::{Annotation, Cut, Frame, ReadError, StackId, Summary, TextId};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use vramlab_device::budget::{Claim, OverBudget};

/// A list of frames.
pub(super) struct Stack<'a, 'r, 's>(pub(super) &'a mut State<'r, 's>);

impl<'de> Visitor<'de> for Stack<'_, '_, '_> {
    type Value = StackId;

    expecting!("a list of frames");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<StackId, A::Error> {
        let mut numbers = Vec::new();
        while let Some(frame) = seq.next_element_seed(Seed::Map(One(self.0)))? {
            let number = self.0.receiver.origins.frame(frame);
            let number = self.0.within(number)?;
            let kept = self.0.claim.push(&mut numbers, number);
            self.0.within(kept)?;
        }
        let stack = self.0.receiver.origins.stack(&numbers);
        self.0.claim.free(numbers);
        self.0.within(stack)
    }
}

/// One frame.
struct One<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> Visitor<'de> for One<'_, '_, '_> {
    type Value = Frame;

    expecting!("a frame's dictionary");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Frame, A::Error> {
        let mut frame = Frame::default();
        while let Some(Name(key)) = map.next_key()? {
            match key {
                Some(Word::Name) => frame.name = map.next_value_seed(Seed::Any(OriginText(self.0)))?,
                Some(Word::Filename) => frame.filename = map.next_value_seed(Seed::Any(OriginText(self.0)))?,
                Some(Word::Line) => {
                    let line = map.next_value::<Option<i64>>()?.unwrap_or(0);
                    frame.line = u32::try_from(line).unwrap_or(0);
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(frame)
    }
}

/// Frames of the forward pass, as Python prints them.
pub(super) struct Printed<'a, 'r, 's>(pub(super) &'a mut State<'r, 's>);

impl<'de> Visitor<'de> for Printed<'_, '_, '_> {
    type Value = StackId;

    expecting!("a list of lines of a traceback");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<StackId, A::Error> {
        let mut numbers = Vec::new();
        while let Some(text) = seq.next_element_seed(Seed::Any(OriginText(self.0)))? {
            let text = self.0.receiver.origins.spelt(text).to_owned();
            let number = self.0.receiver.origins.printed_frame(&text);
            if let Some(number) = self.0.within(number)? {
                let kept = self.0.claim.push(&mut numbers, number);
                self.0.within(kept)?;
            }
        }
        let stack = self.0.receiver.origins.stack(&numbers);
        self.0.claim.free(numbers);
        self.0.within(stack)
    }

    fn visit_unit<E: Error>(self) -> Result<StackId, E> {
        Ok(StackId::default())
    }
}

/// A text; nothing for what is none.
pub(super) struct OriginText<'a, 'r, 's>(pub(super) &'a mut State<'r, 's>);

impl Visitor<'_> for OriginText<'_, '_, '_> {
    type Value = TextId;

    expecting!("a text");

    fn visit_str<E: Error>(self, text: &str) -> Result<TextId, E> {
        let text = self.0.receiver.origins.text(text);
        self.0.within(text)
    }

    fn visit_unit<E: Error>(self) -> Result<TextId, E> {
        Ok(TextId::default())
    }
}

/// The list of annotations; their number is its value.
pub(super) struct Annotations<'a, 'r, 's>(pub(super) &'a mut State<'r, 's>);

impl<'de> Visitor<'de> for Annotations<'_, '_, '_> {
    type Value = u64;

    expecting!("a list of annotations");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<u64, A::Error> {
        let mut count = 0;
        if !self.0.receiver.wants_origins {
            while seq.next_element::<IgnoredAny>()?.is_some() {
                count += 1;
            }
            return Ok(count);
        }
        while let Some(annotation) = seq.next_element_seed(Seed::Any(OneAnnotation(self.0)))? {
            count += 1;
            if let Some(annotation) = annotation {
                let kept = self.0.receiver.origins.annotate(annotation);
                self.0.within(kept)?;
            }
        }
        Ok(count)
    }
}

/// One annotation; `None` for what is none.
struct OneAnnotation<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> Visitor<'de> for OneAnnotation<'_, '_, '_> {
    type Value = Option<Annotation>;

    expecting!("an annotation's dictionary");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut annotation = Annotation { name: TextId::default(), device: None, start: false, time_ns: 0 };
        let wanted = self.0.receiver.wants_origins;
        while let Some(Name(key)) = map.next_key()? {
            match key {
                Some(Word::Name) if wanted => annotation.name = map.next_value_seed(Seed::Any(OriginText(self.0)))?,
                Some(Word::Stage) if wanted => {
                    let stage = map.next_value_seed(Seed::Any(OriginText(self.0)))?;
                    annotation.start = self.0.receiver.origins.spelt(stage) == "START";
                }
                Some(Word::Device) if wanted => {
                    let device = map.next_value::<Option<i64>>()?;
                    annotation.device = device.and_then(|device| u16::try_from(device).ok());
                }
                Some(Word::TimeUs) if wanted => {
                    annotation.time_ns = map.next_value::<u64>()?.saturating_mul(1000);
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Some(annotation))
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}

// What was understood of a document so far, and streams as documents name them.

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
                Ok(Name(Word::of(name)))
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
