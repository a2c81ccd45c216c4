//! Records of any kind as rows, and the differences between two records of one kind.

use crate::repository::entries;
use crate::study::figures::median;
use anyhow::{Context, Result, anyhow};
use liblzma::read::XzDecoder;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use vramlab::input::{DOCUMENT, open, read_text};

use super::parts::{Part, Record};

/// Size limit of a record.
const MOST_BYTES: u64 = 1 << 30;

/// A value of a new record and of the committed one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Difference {
    /// The part that made the new record.
    pub(super) part: String,
    /// The row and the name of the value.
    pub(super) figure: String,
    /// The committed record's median; absent where it has no such value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kept: Option<f64>,
    /// The new record's median; absent where it has no such value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) new: Option<f64>,
    /// `new / kept`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ratio: Option<f64>,
    /// How the making of the two records differed, if the values differ: the possible causes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) because: Vec<String>,
}

/// Relative difference up to which two values count as equal.
const SAME: f64 = 0.01;

/// The rows of a record: the runs of an experiment, the lines of a table, or the objects of an array, at a key if
/// given.
pub(super) fn read(path: &Path, key: &str) -> Result<Vec<Value>> {
    if path.is_dir() {
        return of_experiment(path);
    }
    let name = path.to_string_lossy();
    let text = text(path).with_context(|| format!("cannot read {name}"))?;
    let plain = name.strip_suffix(".xz").unwrap_or(&name);
    if plain.ends_with(".txt") {
        return Ok(of_tests(&text));
    }
    let broken = |error: &dyn std::fmt::Display| anyhow!("{name}: {error}");
    if plain.ends_with(".csv") {
        let rows = csv::Reader::from_reader(text.as_bytes()).into_deserialize::<BTreeMap<String, String>>();
        return rows.map(|row| Ok(of_cells(row.map_err(|error| broken(&error))?))).collect();
    }
    if plain.ends_with(".jsonl") {
        // A killed call may have left an incomplete line, which the next one removes.
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        return complete.lines().map(|line| serde_json::from_str(line).map_err(|error| broken(&error))).collect();
    }
    match serde_json::from_str(&text).map_err(|error| broken(&error))? {
        Value::Array(rows) => Ok(rows),
        Value::Object(mut document) => match document.remove(key) {
            Some(Value::Array(rows)) => Ok(rows),
            _ => Ok(vec![Value::Object(document)]),
        },
        _ => Err(broken(&"has no rows")),
    }
}

/// The outcomes of tests, as a test program prints them: `test NAME ... ok`.
fn of_tests(text: &str) -> Vec<Value> {
    let outcome = |line: &str| {
        let (name, outcome) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
        Some(serde_json::json!({"test": name, "passed": u8::from(outcome == "ok")}))
    };
    text.lines().filter_map(outcome).collect()
}

fn text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = open(path)?;
    if path.extension().is_some_and(|end| end == "xz") {
        XzDecoder::new(file).take(MOST_BYTES).read_to_string(&mut text)?;
    } else {
        file.take(MOST_BYTES).read_to_string(&mut text)?;
    }
    Ok(text)
}

/// A line of a CSV, with numbers where cells are numbers.
fn of_cells(row: BTreeMap<String, String>) -> Value {
    let value = |cell: String| {
        cell.parse::<f64>()
            .ok()
            .and_then(|number| serde_json::Number::from_f64(number).map(Value::Number))
            .unwrap_or(Value::String(cell))
    };
    row.into_iter().map(|(name, cell)| (name, value(cell))).collect::<Map<String, Value>>().into()
}

/// A JSON document of a run, if it has one.
fn of_run(run: &Path, name: &str) -> Option<Value> {
    serde_json::from_str(&read_text(&run.join(format!("{name}.json")), DOCUMENT).ok()?).ok()
}

/// The runs of an experiment that failed or were skipped, counted by the recorded reason. Other records have none.
pub(super) fn failures(path: &Path) -> Result<BTreeMap<String, usize>> {
    let mut all = BTreeMap::new();
    if path.is_dir() {
        for run in entries(&path.join("runs"))? {
            let Some(row) = of_run(&run, "run").filter(|row| row["status"] != "done") else { continue };
            let reason = row["error"].as_str().or_else(|| row["status"].as_str()).unwrap_or_default();
            // A program's error may have more lines.
            *all.entry(reason.lines().next().unwrap_or_default().to_owned()).or_default() += 1;
        }
    }
    Ok(all)
}

/// The completed runs of an experiment: the runner's record of each, together with its program's output.
fn of_experiment(folder: &Path) -> Result<Vec<Value>> {
    let mut rows = Vec::new();
    for run in entries(&folder.join("runs"))? {
        let document = |name: &str| of_run(&run, name);
        let Some(mut row) = document("run").filter(|row| row["status"] == "done") else { continue };
        for name in ["summary", "result"] {
            // Programs that accept several files print an array; here each was started for one.
            match document(name) {
                Some(Value::Array(mut all)) if !all.is_empty() => row[name] = all.swap_remove(0),
                Some(said) => row[name] = said,
                None => {}
            }
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Total duration of a record's runs in seconds; `None` where it has none.
pub(super) fn seconds(rows: &[Value]) -> Option<f64> {
    // `wall_s` of a run is that of its process; elsewhere it may cover only a part.
    let took =
        |row: &Value| row["took_s"].as_f64().or_else(|| row["wall_s"].as_f64().filter(|_| row["status"] == "done"));
    let durations: Vec<f64> = rows.iter().filter_map(took).collect();
    (!durations.is_empty()).then(|| durations.iter().sum())
}

/// Total duration of a part's committed records in seconds, if all of them contain it.
pub(super) fn recorded_s(part: &Part) -> Result<Option<f64>> {
    let mut all = 0.0;
    for record in &part.records {
        let Some(kept) = record.kept()? else { return Ok(None) };
        let Some(seconds) = seconds(&read(&kept, &record.rows)?) else { return Ok(None) };
        all += seconds;
    }
    Ok(Some(all))
}

/// The value at a pointer; a key may contain a dot but not a slash.
fn at<'a>(row: &'a Value, pointer: &str) -> Option<&'a Value> {
    let step = |value: &'a Value, key| match value {
        Value::Array(all) if key == "last" => all.last(),
        other => other.get(key),
    };
    pointer.split('/').try_fold(row, step).filter(|value| !value.is_null())
}

/// A key's value in words. A packed record orders its options differently from the original run.
fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(map) => {
            let mut words: Vec<String> = map.iter().map(|(key, value)| format!("{key}={}", word(value))).collect();
            words.sort_unstable();
            words.join(" ")
        }
        other => other.to_string(),
    }
}

/// The medians of a record's values, by row key and name.
fn medians(rows: &[Value], record: &Record) -> BTreeMap<String, f64> {
    let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for row in rows {
        let about: Vec<String> =
            record.key.iter().filter_map(|key| at(row, key)).map(word).filter(|word| !word.is_empty()).collect();
        for figure in &record.figures {
            if let Some(number) = at(row, figure).and_then(Value::as_f64) {
                let name = figure.rsplit('/').next().unwrap_or(figure);
                let name = if name == "median" { figure.as_str() } else { name };
                all.entry(format!("{}: {name}", about.join(", "))).or_default().push(number);
            }
        }
    }
    all.into_iter().map(|(figure, values)| (figure, median(&values))).collect()
}

/// Every value of two records, the largest difference first.
pub(super) fn differences(part: &str, record: &Record, kept: &[Value], new: &[Value]) -> Vec<Difference> {
    let (kept, new) = (medians(kept, record), medians(new, record));
    let mut figures: Vec<&String> = kept.keys().chain(new.keys()).collect();
    figures.sort();
    figures.dedup();
    let mut all: Vec<Difference> = figures
        .into_iter()
        .map(|figure| {
            let (kept, new) = (kept.get(figure).copied(), new.get(figure).copied());
            let ratio = kept.zip(new).filter(|(kept, _)| *kept != 0.0).map(|(kept, new)| new / kept);
            Difference { part: part.to_owned(), figure: figure.clone(), kept, new, ratio, because: Vec::new() }
        })
        .collect();
    all.sort_by(|one, other| other.distance().total_cmp(&one.distance()));
    all
}

impl Difference {
    /// Whether the two values count as equal.
    pub(super) fn is_none(&self) -> bool {
        self.distance() <= SAME
    }

    /// The ratio of the two values, the larger over the smaller; infinite for a value of only one record.
    pub(super) fn distance(&self) -> f64 {
        match (self.ratio, self.kept == self.new) {
            (_, true) => 0.0,
            (Some(ratio), false) if ratio > 0.0 => ratio.ln().abs(),
            _ => f64::INFINITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn record() -> Record {
        toml::from_str(
            "made = 'a'\nkept = 'b'\nkey = ['arm', 'options']\nfigures = ['stats/reserved.peak', 'arms/ours/median']",
        )
        .unwrap()
    }

    #[test]
    fn medians_are_compared_by_what_they_are_about() {
        let row = |arm: &str, peak: f64| json!({"arm": arm, "options": {"n": 1}, "stats": {"reserved.peak": peak}});
        let committed = [row("a", 10.0), row("a", 30.0), row("a", 20.0), row("b", 5.0), row("c", 1.0)];
        let new = [row("a", 40.0), row("b", 5.0), row("d", 1.0)];
        let differing = differences("part", &record(), &committed, &new);
        let ratios: Vec<(&str, Option<f64>)> =
            differing.iter().map(|difference| (difference.figure.as_str(), difference.ratio)).collect();
        assert_eq!(
            ratios,
            [
                ("c, n=1: reserved.peak", None),
                ("d, n=1: reserved.peak", None),
                ("a, n=1: reserved.peak", Some(2.0)),
                ("b, n=1: reserved.peak", Some(1.0)),
            ]
        );
    }

    #[test]
    fn the_last_of_an_array_can_be_named() {
        let row = json!({"epochs": [{"train_s": 2.0}, {"train_s": 1.5}], "none": [], "last": {"a": 1}});
        assert_eq!(at(&row, "epochs/last/train_s"), Some(&json!(1.5)));
        assert_eq!((at(&row, "none/last"), at(&row, "last/a")), (None, Some(&json!(1))));
    }

    #[test]
    fn every_kept_record_has_the_keys_and_figures_of_its_part() {
        // A pointer to nothing would compare nothing, in silence.
        let (mut records, mut wrong) = (0, Vec::new());
        for part in crate::campaign::parts::read(None).unwrap() {
            let kept = part.records.iter().filter_map(|record| Some((record, record.kept().unwrap()?)));
            let kept: Vec<_> = kept.map(|(record, path)| (record, read(&path, &record.rows).unwrap(), path)).collect();
            records += kept.len();
            let has = |rows: &[Value], pointer: &str| rows.iter().any(|row| at(row, pointer).is_some());
            for (record, rows, path) in &kept {
                if !record.figures.iter().any(|figure| has(rows, figure)) {
                    wrong.push(format!("{} has no figure of the part {}", path.display(), part.name));
                }
                let keys = record.key.iter().filter(|key| !has(rows, key));
                wrong.extend(keys.map(|key| format!("{} has no {key} (part {})", path.display(), part.name)));
            }
            // The records of a part's specs share its figures, and some spec has each of them.
            for figure in kept.iter().flat_map(|(record, ..)| &record.figures) {
                if !kept.iter().any(|(_, rows, _)| has(rows, figure)) {
                    wrong.push(format!("no record of the part {} has {figure}", part.name));
                }
            }
        }
        assert!(records > 50, "{records}");
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn the_rows_of_a_document_may_have_another_key() {
        let temp_dir = tempfile::tempdir().unwrap();
        let path = temp_dir.path().join("a.json");
        fs::write(&path, r#"{"rows": [1], "calls": [{"call": "a"}, {"call": "b"}]}"#).unwrap();
        let [rows, calls, none] = ["rows", "calls", "none"].map(|key| read(&path, key).unwrap().len());
        assert_eq!((rows, calls, none), (1, 2, 1), "without such a key the document is a row");
    }

    #[test]
    fn outcomes_of_tests_are_rows() {
        let temp_dir = tempfile::tempdir().unwrap();
        let path = temp_dir.path().join("gpu-tests.txt");
        fs::write(&path, "commit   abc\n\n== a\ntest a::b ... ok\ntest c ... FAILED\ntest result: FAILED. 1 passed\n")
            .unwrap();
        let rows = read(&path, "rows").unwrap();
        assert_eq!(rows, [json!({"test": "a::b", "passed": 1}), json!({"test": "c", "passed": 0})]);
    }

    #[test]
    fn a_line_that_was_cut_short_is_left_out_and_seconds_add_up() {
        let temp_dir = tempfile::tempdir().unwrap();
        let path = temp_dir.path().join("a.jsonl");
        fs::write(&path, "{\"took_s\": 1.5}\n{\"took_s\": 2.0}\n{\"took").unwrap();
        let rows = read(&path, "rows").unwrap();
        assert_eq!(seconds(&rows), Some(3.5));
        assert_eq!(seconds(&[json!({"ms": 1})]), None);
        fs::write(&path, "{\"took_s\": 1.5\n{}\n").unwrap();
        assert!(read(&path, "rows").unwrap_err().to_string().contains("a.jsonl"));
    }
}
