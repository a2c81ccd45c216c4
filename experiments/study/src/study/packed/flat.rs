//! Nested JSON as pairs of a pointer and a value: `settings/hidden`, 784. Pointers are those of RFC 6901 without the
//! slash in front, so a slash in a key is written `~1` and a tilde `~0`.

use anyhow::{Context, Result};
use serde_json::{Map, Value};

/// How deep objects are taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// To the last object.
    All,
    /// But for objects that are tables: each of their values is an object of plain values.
    Tables,
}

/// The values of an object with their pointers, in its order. Empty objects and lists are values; any other value is
/// itself, with the pointer `prefix`.
pub(super) fn flatten(value: &Value, prefix: &str, depth: Depth) -> Vec<(String, Value)> {
    let mut out = Vec::new();
    add(value, prefix.to_owned(), depth, &mut out);
    out
}

fn add(value: &Value, pointer: String, depth: Depth, out: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(fields) if !(fields.is_empty() || depth == Depth::Tables && is_table(fields)) => {
            for (key, value) in fields {
                add(value, join(&pointer, key), depth, out);
            }
        }
        other => out.push((pointer, other.clone())),
    }
}

/// Whether an object's values are objects of plain values, at least two.
pub(super) fn is_table(fields: &Map<String, Value>) -> bool {
    let plain = |value: &Value| !value.is_object() && !value.is_array();
    let row = |value: &Value| value.as_object().is_some_and(|fields| !fields.is_empty() && fields.values().all(plain));
    fields.len() > 1 && fields.values().all(row)
}

fn join(pointer: &str, key: &str) -> String {
    let key = key.replace('~', "~0").replace('/', "~1");
    if pointer.is_empty() { key } else { format!("{pointer}/{key}") }
}

/// Whether `pointer` is `of` or leads below it.
pub(super) fn is_at_or_below(pointer: &str, of: &str) -> bool {
    pointer.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Puts a value where its pointer leads, and makes the objects on the way. With the empty pointer it replaces all.
pub(super) fn insert(root: &mut Value, pointer: &str, value: Value) {
    let mut at = root;
    if !pointer.is_empty() {
        for part in pointer.split('/') {
            if !at.is_object() {
                *at = Value::Object(Map::new());
            }
            at = &mut at[part.replace("~1", "/").replace("~0", "~")];
        }
    }
    *at = value;
}

// Cells of `runs.csv.xz`: a text stands as it is unless it could be taken for JSON, and everything else is JSON.
//
// So no table of types is needed, and what a spreadsheet shows is what was recorded. An empty cell is a value that the
// run does not have.

/// A value as a cell.
pub(super) fn write_cell(value: &Value) -> String {
    match value {
        Value::String(text) if !text.is_empty() && !looks_like_json(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The value of a cell; `None` for an empty one.
///
/// # Errors
/// The cell begins like JSON and is none.
pub(super) fn read_cell(cell: &str) -> Result<Option<Value>> {
    if cell.is_empty() {
        return Ok(None);
    }
    if !looks_like_json(cell) {
        return Ok(Some(Value::String(cell.to_owned())));
    }
    serde_json::from_str(cell).map(Some).with_context(|| format!("the cell {cell:.60} is not JSON"))
}

/// Whether a cell with this text is read as JSON: a number, a word of JSON, or what begins as a string, list or object.
fn looks_like_json(text: &str) -> bool {
    matches!(text, "true" | "false" | "null") || text.starts_with(['"', '[', '{']) || is_number(text)
}

/// Whether a text is a number by JSON's grammar: `-0.5e3`, and not `007`, `.5` or `1.`.
pub(super) fn is_number(text: &str) -> bool {
    fn digits(text: &str) -> Option<&str> {
        let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
        (rest.len() < text.len()).then_some(rest)
    }
    let text = text.strip_prefix('-').unwrap_or(text);
    let Some(mut rest) = text.strip_prefix('0').or_else(|| digits(text)) else { return false };
    if let Some(fraction) = rest.strip_prefix('.') {
        let Some(after) = digits(fraction) else { return false };
        rest = after;
    }
    if let Some(power) = rest.strip_prefix(['e', 'E']) {
        let Some(after) = digits(power.strip_prefix(['+', '-']).unwrap_or(power)) else { return false };
        rest = after;
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use serde_json::json;

    #[test]
    fn pointers_lead_back() {
        let value = json!({
            "a": {"b.c": 1, "d/e": {"~": null}, "none": {}}, "list": [{"x": 1}], "calls": {"x": {"n": 1}, "y": {"n": 2}}
        });
        for depth in [Depth::All, Depth::Tables] {
            let flat = flatten(&value, "at", depth);
            let mut back = json!({});
            flat.iter().for_each(|(pointer, value)| insert(&mut back, pointer, value.clone()));
            assert_eq!(back, json!({"at": value}));
            assert!(flat.iter().any(|(pointer, _)| pointer == "at/a/d~1e/~0"), "{flat:?}");
            assert_eq!(flat.iter().any(|(pointer, _)| pointer == "at/calls"), depth == Depth::Tables);
        }
        assert_eq!(flatten(&json!([1]), "at", Depth::All), [("at".to_owned(), json!([1]))]);
    }

    #[test]
    fn below_is_below() {
        assert!(is_at_or_below("a", "a") && is_at_or_below("a/b", "a"));
        assert!(!is_at_or_below("ab", "a") && !is_at_or_below("a", "a/b"));
    }

    #[test]
    fn a_cell_is_read_as_what_was_written() {
        let texts =
            ["", "0", "00-naive-r0", "128M", "1e3", "1.", "null", "NaN", "[", "{\"a\"", "\"", "a,b\n\"c\"", "-"];
        let texts = texts.map(|text| json!(text));
        let others =
            [json!(0), json!(-1), json!(1.0), json!(0.1), json!(u64::MAX), json!(null), json!(true), json!([1])];
        for value in texts.iter().chain(&others) {
            assert_eq!(read_cell(&write_cell(value)).unwrap().as_ref(), Some(value), "{}", write_cell(value));
        }
        assert_eq!(read_cell("").unwrap(), None);
        assert_eq!(write_cell(&json!("00-naive-r0")), "00-naive-r0");
        assert_eq!(write_cell(&json!("0")), "\"0\"");
        assert!(read_cell("[1").is_err());
    }

    #[test]
    fn numbers_are_those_of_json() {
        for text in ["0", "-0", "10", "1.5", "1e5", "-1.25E-10"] {
            assert!(is_number(text) && serde_json::from_str::<Value>(text).is_ok(), "{text}");
        }
        for text in ["", "-", "01", "1.", ".5", "1e", "+1", "1x", "0x1", "inf"] {
            assert!(!is_number(text) && serde_json::from_str::<Value>(text).is_err(), "{text}");
        }
    }
}
