//! Options of a spec: tables whose keys are a program's long options, each with its place in the file.

use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use toml::{Spanned, Value};

/// A value on a command line.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum OptionValue {
    /// A switch, or `on` and `off` where an option takes those.
    Switch(bool),
    Integer(i64),
    Number(f64),
    Text(String),
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(on) => f.write_str(if *on { "on" } else { "off" }),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Number(value) => write!(f, "{value}"),
            Self::Text(value) => f.write_str(value),
        }
    }
}

impl OptionValue {
    fn of(value: &Value) -> Option<Self> {
        match value {
            Value::Boolean(on) => Some(Self::Switch(*on)),
            Value::Integer(value) => Some(Self::Integer(*value)),
            Value::Float(value) if value.is_finite() => Some(Self::Number(*value)),
            // No command line holds a zero byte.
            Value::String(text) if !text.contains('\0') => Some(Self::Text(text.clone())),
            _ => None,
        }
    }
}

/// One key of a table and what stands there.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Where the key begins in the file.
    pub(crate) offset: usize,
    value: Value,
}

impl Entry {
    /// The values of an axis, or the one of an option.
    pub(crate) fn values(&self, axis: bool) -> Result<Vec<OptionValue>, String> {
        let name = &self.name;
        let one = |value| OptionValue::of(value).ok_or_else(|| format!("'{name}' takes text, numbers, true or false"));
        match (&self.value, axis) {
            (Value::Array(values), true) if values.is_empty() => Err(format!("the axis '{name}' has no value")),
            (Value::Array(values), true) => {
                let out = values.iter().map(one).collect::<Result<Vec<OptionValue>, String>>()?;
                let twice = (1..out.len()).find(|at| out[..*at].contains(&out[*at]));
                twice.map_or(Ok(out.clone()), |at| Err(format!("the axis '{name}' has the value {} twice", out[at])))
            }
            (_, true) => {
                Err(format!("an axis is a list, as {name} = [{}, …]; a single value is an option", self.value))
            }
            (Value::Array(_), false) => Err(format!("an option has one value; put the list '{name}' under [matrix]")),
            (value, false) => Ok(vec![one(value)?]),
        }
    }
}

/// A table in the order of the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "BTreeMap<Spanned<String>, Value>")]
pub(crate) struct Entries(pub(crate) Vec<Entry>);

impl Entries {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<BTreeMap<Spanned<String>, Value>> for Entries {
    fn from(table: BTreeMap<Spanned<String>, Value>) -> Self {
        let entry =
            |(key, value): (Spanned<String>, Value)| Entry { offset: key.span().start, name: key.into_inner(), value };
        let mut entries: Vec<Entry> = table.into_iter().map(entry).collect();
        entries.sort_by_key(|entry| entry.offset);
        Self(entries)
    }
}

impl Serialize for Entries {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|entry| (&entry.name, &entry.value)))
    }
}
