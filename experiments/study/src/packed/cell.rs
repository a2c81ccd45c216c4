//! Cells of `runs.csv.xz`: a text stands as it is unless it could be taken for JSON, and everything else is JSON.
//!
//! So no table of types is needed, and what a spreadsheet shows is what was recorded. An empty cell is a value that the
//! run does not have.

use anyhow::{Context, Result};
use serde_json::Value;

/// A value as a cell.
pub(super) fn write(value: &Value) -> String {
    match value {
        Value::String(text) if !text.is_empty() && !looks_like_json(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The value of a cell; `None` for an empty one.
///
/// # Errors
/// The cell begins like JSON and is none.
pub(super) fn read(cell: &str) -> Result<Option<Value>> {
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
    fn a_cell_is_read_as_what_was_written() {
        let texts =
            ["", "0", "00-naive-r0", "128M", "1e3", "1.", "null", "NaN", "[", "{\"a\"", "\"", "a,b\n\"c\"", "-"];
        let texts = texts.map(|text| json!(text));
        let others =
            [json!(0), json!(-1), json!(1.0), json!(0.1), json!(u64::MAX), json!(null), json!(true), json!([1])];
        for value in texts.iter().chain(&others) {
            assert_eq!(read(&write(value)).unwrap().as_ref(), Some(value), "{}", write(value));
        }
        assert_eq!(read("").unwrap(), None);
        assert_eq!(write(&json!("00-naive-r0")), "00-naive-r0");
        assert_eq!(write(&json!("0")), "\"0\"");
        assert!(read("[1").is_err());
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
