//! Tables turned on their side: rows of objects, or a CSV, as an array for each column, and back.
//!
//! A column compresses where rows do not: the losses of two runs are the same text once the times between them are gone.
//! What would not come back as it was is not converted.

use super::flat::{Depth, flatten, insert, is_number};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Whole numbers that never fall and end beyond this are stored as differences.
const WORTH_DIFFERENCES: u64 = 1 << 20;

/// The columns of a table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Columns {
    /// Columns in which null is a key that the row did not have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    absent: Vec<String>,
    /// Columns that hold differences to the row before: a running sum gives the values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    differences: Vec<String>,
    /// A list for each column, all of one length; nested keys are pointers.
    columns: Map<String, Value>,
}

impl Columns {
    /// Rows that are objects, nested ones with pointers for keys; `None` where they would not come back the same.
    pub(super) fn of_rows(rows: &[Value]) -> Option<Self> {
        let flat: Vec<Vec<(String, Value)>> = rows.iter().map(|row| flatten(row, "", Depth::All)).collect();
        let mut found: Map<String, Value> = Map::new();
        for (pointer, _) in flat.iter().flatten() {
            found.entry(pointer.clone()).or_insert_with(|| Value::Array(vec![Value::Null; rows.len()]));
        }
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        for (number, row) in flat.into_iter().enumerate() {
            for (pointer, value) in row {
                *seen.entry(pointer.clone()).or_default() += 1;
                found[&pointer][number] = value;
            }
        }
        let absent = found.keys().filter(|name| seen[*name] < rows.len()).cloned().collect();
        let columns = Self { absent, differences: Vec::new(), columns: found };
        (columns.rows()? == rows).then(|| columns.shorter())
    }

    /// The rows again; `None` where the columns are of different lengths.
    pub(super) fn rows(&self) -> Option<Vec<Value>> {
        let columns = self.values()?;
        let length = columns.first().map_or(0, |(_, values)| values.len());
        if columns.iter().any(|(_, values)| values.len() != length) {
            return None;
        }
        let mut rows = vec![Value::Object(Map::new()); length];
        for (name, values) in columns {
            let optional = self.absent.contains(name);
            for (row, value) in rows.iter_mut().zip(values).filter(|(_, value)| !(optional && value.is_null())) {
                insert(row, name, value);
            }
        }
        Some(rows)
    }

    /// A CSV with a header; `None` where the same text would not come back.
    pub(super) fn of_csv(text: &str) -> Option<Self> {
        let mut reader = csv::ReaderBuilder::new().has_headers(true).from_reader(text.as_bytes());
        let names: Vec<String> = reader.headers().ok()?.iter().map(str::to_owned).collect();
        let mut values: Vec<Vec<Value>> = vec![Vec::new(); names.len()];
        for record in reader.records() {
            let record = record.ok()?;
            values.iter_mut().zip(&record).for_each(|(column, cell)| column.push(csv_value(cell)));
        }
        let count = names.len();
        let columns: Map<String, Value> = names.into_iter().zip(values.into_iter().map(Value::Array)).collect();
        let columns = Self { columns, ..Self::default() };
        (columns.columns.len() == count && columns.csv()? == text).then(|| columns.shorter())
    }

    /// The CSV again; `None` where the columns are of different lengths or hold what no cell does.
    pub(super) fn csv(&self) -> Option<String> {
        let columns = self.values()?;
        let mut writer = csv::WriterBuilder::new().from_writer(Vec::new());
        writer.write_record(columns.iter().map(|(name, _)| name.as_str())).ok()?;
        for number in 0..columns.first().map_or(0, |(_, values)| values.len()) {
            let row: Option<Vec<String>> = columns.iter().map(|(_, values)| csv_cell(values.get(number)?)).collect();
            writer.write_record(row?).ok()?;
        }
        String::from_utf8(writer.into_inner().ok()?).ok()
    }

    /// Takes columns away.
    pub(super) fn leave_out(&mut self, mut is_out: impl FnMut(&str) -> bool) {
        self.columns.retain(|name, _| !is_out(name));
        self.absent.retain(|name| self.columns.contains_key(name));
        self.differences.retain(|name| self.columns.contains_key(name));
    }

    /// Whether it has no columns.
    pub(super) fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// The columns with their true values.
    fn values(&self) -> Option<Vec<(&String, Vec<Value>)>> {
        let value = |(name, values): (&'_ String, &'_ Value)| -> Option<Vec<Value>> {
            let values = values.as_array()?;
            if !self.differences.contains(name) {
                return Some(values.clone());
            }
            let mut sum = 0_u64;
            let add = |value: &Value| {
                sum = sum.checked_add(value.as_u64()?)?;
                Some(Value::from(sum))
            };
            values.iter().map(add).collect()
        };
        self.columns.iter().map(|(name, values)| Some((name, value((name, values))?))).collect()
    }

    /// With differences where they are worth it.
    fn shorter(mut self) -> Self {
        for (name, values) in &mut self.columns {
            let Value::Array(values) = values else { continue };
            let Some(whole) = values.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>() else { continue };
            if !whole.is_sorted() || whole.last().is_none_or(|last| *last < WORTH_DIFFERENCES) {
                continue;
            }
            let mut before = 0;
            for (value, whole) in values.iter_mut().zip(whole) {
                *value = Value::from(whole - before);
                before = whole;
            }
            self.differences.push(name.clone());
        }
        self
    }
}

/// A cell of a CSV: a number where its text is the one that JSON has for it, null where it is empty, else text.
fn csv_value(cell: &str) -> Value {
    if cell.is_empty() {
        return Value::Null;
    }
    let number = is_number(cell).then(|| serde_json::from_str::<Value>(cell).ok()).flatten();
    let same = |number: &Value| csv_cell(number).as_deref() == Some(cell);
    number.filter(same).unwrap_or_else(|| Value::String(cell.to_owned()))
}

fn csv_cell(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some(String::new()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(text) => Some(text.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use serde_json::json;

    #[test]
    fn rows_come_back() {
        let rows =
            [json!({"at": 1 << 21, "calls": {"x": {"n": 1}}, "none": {}}), json!({"at": 1 << 22, "more": [1, "2"]})];
        let columns = Columns::of_rows(&rows).unwrap();
        assert_eq!(columns.rows().unwrap(), rows);
        assert_eq!(columns.differences, ["at"]);
        assert_eq!(columns.columns["at"], json!([1 << 21, 1 << 21]));
        assert_eq!(columns.absent, ["calls/x/n", "none", "more"]);
        assert_eq!(Columns::of_rows(&[]).unwrap().rows().unwrap(), Vec::<Value>::new());
    }

    #[test]
    fn what_would_not_come_back_is_not_converted() {
        // A null beside a row without the key, and a row without any.
        assert_eq!(Columns::of_rows(&[json!({"a": null, "b": 1}), json!({"b": 2})]), None);
        assert_eq!(
            Columns::of_rows(&[json!({"a": 1}), json!({})]).map(|columns| columns.rows().unwrap().len()),
            Some(2)
        );
        for text in ["", "a,a\n1,2\n", "a\r\n1\r\n", "a,b\n1\n", "a\n1", "a\n\"1\"\n"] {
            assert_eq!(Columns::of_csv(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_csv_comes_back_to_the_byte() {
        let text = "step,loss,name\n1,2.4151874,\"a,b\"\n2,1e-7,\n3,0.10,x\n4,NaN,0\n";
        let columns = Columns::of_csv(text).unwrap();
        assert_eq!(columns.csv().unwrap(), text);
        assert_eq!(columns.columns["loss"], json!([2.4151874, 1e-7, "0.10", "NaN"]));
        assert_eq!(columns.columns["name"], json!(["a,b", null, "x", 0]));
        assert_eq!(Columns::of_csv("a,b\n").unwrap().csv().unwrap(), "a,b\n");
    }

    #[test]
    fn columns_can_be_left_out() {
        let mut columns = Columns::of_csv("a,b\n1,9000000\n2,9000001\n").unwrap();
        columns.leave_out(|name| name == "b");
        assert_eq!(columns.csv().unwrap(), "a\n1\n2\n");
        assert!(columns.differences.is_empty() && !columns.is_empty());
    }
}
