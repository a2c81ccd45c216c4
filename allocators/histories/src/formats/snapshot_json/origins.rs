//! Where events came from: stack frames and annotations, which are numbered as they are read.

use super::state::{Name, Seed, State};
use crate::formats::words::Word;
use crate::formats::{Annotation, Frame, StackId, TextId};
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

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
