//! `series.jsonl.xz`: the tables of the runs that are longer than a cell, a line a run and table.

use super::columns::Columns;
use super::{SERIES, flat};
use anyhow::{Context, Result, bail};
use liblzma::read::XzDecoder;
use liblzma::write::XzEncoder;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::io::{Read, Write};
use std::path::Path;

/// What a table was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum From {
    /// A list of objects in a document.
    Array,
    /// An object of objects in a document; their keys are the column `key`.
    Object,
    /// Any other list in a document; its items are the column `value`.
    List,
    /// A file of comma-separated values.
    Csv,
    /// A file of JSON objects, one a line.
    Lines,
    /// Any other text file, as it is.
    Text,
}

/// One table of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) run: String,
    /// A pointer, as `summary/epochs`, or a file, as `steps.csv`.
    pub(super) table: String,
    /// What it was: `array` of objects; `object` of objects, whose keys are the column `key`; any other `list`, as the
    /// column `value`; `csv`; `lines` of JSON; `text`.
    pub(super) from: From,
    #[serde(flatten)]
    pub(super) content: Content,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Content {
    Text { text: String },
    Columns(Columns),
}

/// The column with the keys of an object of objects.
const KEY: &str = "key";
/// The column with the items of a list.
const ITEM: &str = "value";

/// A value of a document as a table, if it is one.
pub(super) fn of_value(value: &Value) -> Option<(From, Columns)> {
    match value {
        Value::Array(rows) if !rows.is_empty() && rows.iter().all(Value::is_object) => {
            Some((From::Array, Columns::of_rows(rows)?))
        }
        Value::Array(items) if !items.is_empty() => {
            let row = |item: &Value| Value::Object(Map::from_iter([(ITEM.to_owned(), item.clone())]));
            Some((From::List, Columns::of_rows(&items.iter().map(row).collect::<Vec<Value>>())?))
        }
        Value::Object(fields) if flat::is_table(fields) && fields.values().all(|row| row.get(KEY).is_none()) => {
            let row = |(key, value): (&String, &Value)| {
                let mut row = Map::from_iter([(KEY.to_owned(), Value::from(key.as_str()))]);
                row.extend(value.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
                Value::Object(row)
            };
            let rows: Vec<Value> = fields.iter().map(row).collect();
            Some((From::Object, Columns::of_rows(&rows)?))
        }
        _ => None,
    }
}

/// The value that a table was; `None` where it was none or its columns do not fit together.
pub(super) fn to_value(from: From, columns: &Columns) -> Option<Value> {
    let rows = columns.rows()?;
    match from {
        From::Array => Some(Value::Array(rows)),
        From::List => {
            let item = |mut row: Value| row.as_object_mut()?.shift_remove(ITEM);
            rows.into_iter().map(item).collect::<Option<Vec<Value>>>().map(Value::Array)
        }
        From::Object => {
            let mut fields = Map::new();
            for row in rows {
                let Value::Object(mut row) = row else { return None };
                let key = row.shift_remove(KEY)?.as_str()?.to_owned();
                fields.insert(key, Value::Object(row));
            }
            Some(Value::Object(fields))
        }
        From::Csv | From::Lines | From::Text => None,
    }
}

/// A file of a run's record.
pub(super) fn of_file(name: &str, text: String) -> (From, Content) {
    let columns = if name.ends_with(".csv") {
        Columns::of_csv(&text).map(|columns| (From::Csv, columns))
    } else if name.ends_with(".jsonl") {
        let rows: Option<Vec<Value>> = text.lines().map(|line| serde_json::from_str(line).ok()).collect();
        rows.and_then(|rows| Columns::of_rows(&rows)).map(|columns| (From::Lines, columns))
    } else {
        None
    };
    columns.map_or((From::Text, Content::Text { text }), |(from, columns)| (from, Content::Columns(columns)))
}

/// The text of the file that a table was; `None` where it was none or its columns do not fit together.
pub(super) fn to_file(line: &Line) -> Option<String> {
    match (&line.content, line.from) {
        (Content::Text { text }, From::Text) => Some(text.clone()),
        (Content::Columns(columns), From::Csv) => columns.csv(),
        (Content::Columns(columns), From::Lines) => {
            Some(columns.rows()?.iter().map(|row| format!("{row}\n")).collect())
        }
        _ => None,
    }
}

/// The lines, compressed: the same bytes for the same lines.
pub(super) fn write(lines: &[Line]) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    for line in lines {
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
    }
    compress(&text)
}

/// Reads them from a folder's file with these bytes.
pub(super) fn read(folder: &Path, bytes: &[u8]) -> Result<Vec<Line>> {
    let path = folder.join(SERIES);
    let text = decompress(&path, bytes)?;
    let line = |(number, line): (usize, &str)| {
        serde_json::from_str(line).with_context(|| format!("{}: line {}", path.display(), number + 1))
    };
    text.lines().enumerate().map(line).collect()
}

// The tables' files, compressed: the same bytes for the same table.

/// Most bytes of a table when it is unpacked: no experiment comes near.
const MOST_BYTES: u64 = 1 << 30;
/// As `xz -6e`: the bytes of this level do not depend on the machine, and a reader needs 9 MiB.
const LEVEL: u32 = 6 | (1 << 31);

/// A table's file.
pub(super) fn compress(text: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = XzEncoder::new(Vec::new(), LEVEL);
    encoder.write_all(text)?;
    Ok(encoder.finish()?)
}

/// The text of a table, whose file `path` has these bytes.
///
/// # Errors
/// It is damaged, no text, or too long.
pub(super) fn decompress(path: &Path, bytes: &[u8]) -> Result<String> {
    let mut text = String::new();
    let mut decoder = XzDecoder::new(bytes).take(MOST_BYTES + 1);
    decoder.read_to_string(&mut text).with_context(|| format!("{} is damaged", path.display()))?;
    // CAST: a length in memory.
    if text.len() as u64 > MOST_BYTES {
        bail!("{} unpacks to more than 1 GiB, which no experiment does", path.display());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use serde_json::json;

    #[test]
    fn values_and_files_come_back() {
        let calls = json!({"mem_alloc": {"count": 1, "ns": 5}, "mem_free": {"count": 2}});
        for value in [calls, json!([{"a": 1}, {"b": {"c": 2}}]), json!(["a", "--b=1"]), json!([[1, 2], [3, 4]])] {
            let (from, columns) = of_value(&value).unwrap();
            assert_eq!(to_value(from, &columns).unwrap(), value);
        }
        for value in [json!([]), json!({}), json!({"a": {"key": 1}, "b": {"key": 2}}), json!({"a": {"b": 1}})] {
            assert_eq!(of_value(&value), None, "{value}");
        }
        for (name, text, from) in [
            ("steps.csv", "a,b\n1,2\n", From::Csv),
            ("steps.csv", "a,b\n1\n", From::Text),
            ("trace.jsonl", "{\"a\":1}\n{\"a\":2,\"b\":3}\n", From::Lines),
            ("trace.jsonl", "{\"a\":1}\n{\"a\":2,\"b\":null}\n", From::Text),
            ("trace.jsonl", "no JSON\n", From::Text),
            ("latency.hlog", "#[x]\n1,2\n", From::Text),
        ] {
            let (was, content) = of_file(name, text.to_owned());
            let line = Line { run: "00".to_owned(), table: name.to_owned(), from: was, content };
            assert_eq!((to_file(&line).unwrap().as_str(), was), (text, from));
            let bytes = write(std::slice::from_ref(&line)).unwrap();
            assert_eq!(read(Path::new("."), &bytes).unwrap(), [line]);
            assert!(read(Path::new("."), &bytes[..bytes.len() - 8]).is_err());
        }
    }
}
