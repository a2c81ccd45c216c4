//! Nested JSON as pairs of a pointer and a value: `settings/hidden`, 784. Pointers are those of RFC 6901 without the
//! slash in front, so a slash in a key is written `~1` and a tilde `~0`.

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

#[cfg(test)]
mod tests {
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
}
