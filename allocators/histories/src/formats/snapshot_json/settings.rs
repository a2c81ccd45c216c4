//! The allocator's settings, which are kept as they are.

use super::state::Seed;
use crate::formats::summary::{DEEPEST, Room, entry_cost};
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use vramlab_device::budget::{Claim, OverBudget};

/// What the settings of a file may take, and what refused it.
pub(super) struct Keep<'a> {
    pub(super) room: &'a mut Room,
    pub(super) claim: &'a mut Claim,
    pub(super) over: &'a mut Option<OverBudget>,
}

impl Keep<'_> {
    fn within<T, E: Error>(&mut self, claimed: Result<T, OverBudget>) -> Result<T, E> {
        claimed.map_err(|over| {
            *self.over = Some(over);
            E::custom("too large")
        })
    }

    fn text<E: Error>(&mut self, text: &str) -> Result<Option<String>, E> {
        let kept = self.room.take_text(text, self.claim);
        self.within(kept)
    }
}

/// A value at a depth. What there is no room for is `null`.
pub(super) struct Node<'k, 'a> {
    keep: &'k mut Keep<'a>,
    depth: usize,
}

impl<'k, 'a> Node<'k, 'a> {
    pub(super) fn outermost(keep: &'k mut Keep<'a>) -> Self {
        Self { keep, depth: DEEPEST }
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if !self.keep.room.take_node() || self.depth == 0 {
            return IgnoredAny::deserialize(deserializer).map(|_| Value::Null);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_, '_> {
    type Value = Value;

    expecting!("a setting");

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(self.keep.text(text)?.map_or(Value::Null, Value::String))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Node { keep: self.keep, depth: self.depth - 1 })? {
            let grown = self.keep.claim.push(&mut items, item);
            self.keep.within(grown)?;
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some(key) = map.next_key_seed(Seed::Any(Key(self.keep)))? {
            let Some(key) = key else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let claimed = self.keep.claim.add(entry_cost(out.len()));
            self.keep.within(claimed)?;
            out.insert(key, map.next_value_seed(Node { keep: self.keep, depth: self.depth - 1 })?);
        }
        Ok(Value::Object(out))
    }
}

/// A key, if there is room for it.
struct Key<'k, 'a>(&'k mut Keep<'a>);

impl Visitor<'_> for Key<'_, '_> {
    type Value = Option<String>;

    expecting!("a setting's name");

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        self.0.text(text)
    }
}
