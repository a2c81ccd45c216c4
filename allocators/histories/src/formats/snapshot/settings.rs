//! The allocator's settings, which are kept unchanged.

use super::Assembly;
use super::store::Value;
use crate::formats::ReadError;
use crate::formats::summary::{DEEPEST, entry_cost};
use crate::steps;
use serde_json::{Map, Value as Json};
use vramlab_device::budget::OverBudget;

impl Assembly<'_, '_> {
    /// Keeps the allocator's settings, if they are a dictionary.
    pub(in crate::formats) fn take_settings(&mut self, value: Value) -> Result<(), ReadError> {
        let json = self.json(value, DEEPEST);
        if let Json::Object(settings) = self.within(json)? {
            self.summary.allocator_settings = settings;
        }
        Ok(())
    }

    fn json(&mut self, value: Value, depth: usize) -> Result<Json, OverBudget> {
        steps::count(1);
        if !self.room.take_node() || depth == 0 {
            return Ok(Json::Null);
        }
        Ok(match value {
            Value::Bool(value) => value.into(),
            Value::Int(value) => value.into(),
            Value::Uint(value) => value.into(),
            Value::Float(value) => value.into(),
            Value::Word(_) | Value::Text(_) => self.spelt(value)?.map_or(Json::Null, Json::String),
            Value::Object(_) => {
                if let Some(count) = self.store.as_dict(value).map(Vec::len) {
                    return self.json_object(value, count, depth).map(Json::Object);
                }
                let count = self.store.as_list(value).map_or(0, |list| list.items.len());
                if !self.room.fits(count) {
                    return Ok(Json::Null);
                }
                self.retained.add(count.saturating_mul(size_of::<Json>()))?;
                let mut items = Vec::with_capacity(count);
                for at in 0..count {
                    let item = self.store.as_list(value).and_then(|list| list.items.get(at).copied());
                    items.push(self.json(item.unwrap_or(Value::None), depth - 1)?);
                }
                Json::Array(items)
            }
            Value::None
            | Value::Huge
            | Value::LostText
            | Value::Stack(_)
            | Value::Frame(_)
            | Value::Pair(..)
            | Value::Opaque => Json::Null,
        })
    }

    fn json_object(&mut self, dict: Value, count: usize, depth: usize) -> Result<Map<String, Json>, OverBudget> {
        let mut out = Map::new();
        for at in 0..count {
            steps::count(1);
            // Keys count as well; otherwise a dictionary without texts could be traversed repeatedly.
            if !self.room.take_node() {
                break;
            }
            let Some((key, value)) = self.store.as_dict(dict).and_then(|pairs| pairs.get(at).copied()) else { break };
            let Some(key) = self.spelt(key)? else { continue };
            self.retained.add(entry_cost(out.len()))?;
            let value = self.json(value, depth - 1)?;
            out.insert(key, value);
        }
        Ok(out)
    }

    /// The text of a string, if it was kept and fits the budget.
    fn spelt(&mut self, value: Value) -> Result<Option<String>, OverBudget> {
        match self.store.spelling(value) {
            Some(text) => self.room.take_text(text, &mut self.retained),
            None => Ok(None),
        }
    }
}
