//! The origin of a record: what it says of its making, what it lacks, and how the origins of two records differ.

use super::rows;
use crate::study::record::EXPERIMENT;
use anyhow::Result;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use vramlab::input::{DOCUMENT, read_text};

/// What a record should say of its making.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fact {
    Command,
    Commit,
    /// Whether the sources differed from the commit.
    Clean,
    Driver,
    Host,
    Date,
}

impl Fact {
    const ALL: [Self; 6] = [Self::Command, Self::Commit, Self::Clean, Self::Driver, Self::Host, Self::Date];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Command => "command",
            Self::Commit => "commit",
            Self::Clean => "clean flag",
            Self::Driver => "driver",
            Self::Host => "host",
            Self::Date => "date",
        }
    }

    /// Keys under which the programs write it.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Command => &["command"],
            Self::Commit => &["git_commit", "build"],
            Self::Clean => &["git_dirty"],
            Self::Driver => &["driver_release", "driver"],
            Self::Host => &["host_hash", "host"],
            Self::Date => &["started_at", "recorded_at", "date"],
        }
    }
}

/// The values of a record that say where it is from.
#[derive(Debug)]
pub(super) struct Origin {
    /// The document around the rows: `experiment.json`, or the file itself.
    document: Value,
    rows: Vec<Value>,
}

impl Origin {
    /// Reads it from a record; `key` is that of its rows.
    pub(super) fn read(path: &Path, key: &str) -> Result<Self> {
        let of_file = || -> Option<Value> {
            let name = path.to_string_lossy();
            if path.is_dir() {
                return serde_json::from_str(&read_text(&path.join(EXPERIMENT), DOCUMENT).ok()?).ok();
            }
            if name.ends_with(".txt") {
                return Some(of_header(&read_text(path, DOCUMENT).ok()?));
            }
            let mut document: Value = name
                .ends_with(".json")
                .then(|| read_text(path, DOCUMENT).ok())?
                .and_then(|text| serde_json::from_str(&text).ok())?;
            // The rows are read below.
            document.as_object_mut()?.remove(key);
            Some(document)
        };
        let rows = if path.extension().is_some_and(|end| end == "txt") { Vec::new() } else { rows::read(path, key)? };
        Ok(Self { document: of_file().unwrap_or(Value::Null), rows })
    }

    /// The facts that the record lacks. A row may have its own; `on_gpu` records have a driver.
    pub(super) fn lacks(&self, on_gpu: bool) -> Vec<Fact> {
        let has = |fact: &Fact| {
            let says = |value: &Value| fact.keys().iter().any(|key| find(value, key).is_some());
            says(&self.document) || !self.rows.is_empty() && self.rows.iter().all(says)
        };
        Fact::ALL.into_iter().filter(|fact| (on_gpu || *fact != Fact::Driver) && !has(fact)).collect()
    }

    /// The different values that the document and the rows have at a key.
    fn values(&self, key: &str) -> BTreeSet<String> {
        let of_rows = self.rows.iter().filter_map(|row| find(row, key));
        let all = find(&self.document, key).into_iter().chain(of_rows);
        all.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned)).collect()
    }

    /// Values of all rows at a path of keys.
    fn at(&self, path: &[&str]) -> BTreeSet<String> {
        let step = |row: &Value| path.iter().try_fold(row.clone(), |value, key| value.get(key).cloned());
        self.rows.iter().filter_map(step).filter_map(|value| Some(value.as_str()?.to_owned())).collect()
    }

    /// How this new record's origin differs from a kept one's, in words: the possible causes of different values.
    pub(super) fn causes(&self, kept: &Self) -> Vec<String> {
        let mut causes = Vec::new();
        let changed = |name: &str| self.document.get(name) != kept.document.get(name);
        if changed("spec_sha256") {
            causes.push("the spec changed".to_owned());
        }
        if changed("profile_sha256") {
            causes.push("another profile of the simulated device".to_owned());
        }
        for (title, path) in [
            ("GPU", ["machine", "gpu"].as_slice()),
            ("GPU", &["summary", "device", "name"]),
            ("data set", &["summary", "dataset", "name"]),
            ("PyTorch", &["result", "torch"]),
        ] {
            let (new, kept) = (self.at(path), kept.at(path));
            if !new.is_empty() && !kept.is_empty() && new != kept {
                causes.push(format!("{title} {} instead of {}", words(&new), words(&kept)));
            }
        }
        for (title, fact) in [("driver", Fact::Driver), ("host", Fact::Host), ("build", Fact::Commit)] {
            let of = |origin: &Self| fact.keys().iter().map(|key| origin.values(key)).find(|all| !all.is_empty());
            match (of(self), of(kept)) {
                (Some(new), Some(kept)) if new != kept => {
                    causes.push(format!("{title} {} instead of {}", words(&new), words(&kept)));
                }
                (Some(_), None) => causes.push(format!("the kept record names no {title}")),
                _ => {}
            }
        }
        causes.dedup();
        causes
    }
}

/// The header of a text file as an object: lines of a word and its value, up to the first empty line after them.
fn of_header(text: &str) -> Value {
    let header = text.split("\n== ").next().unwrap_or_default();
    let value = |name: &str| header.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let mut object = serde_json::Map::new();
    for (key, name) in [("command", "command"), ("git_commit", "commit"), ("host", "machine")] {
        if let Some(value) = value(name) {
            object.insert(key.to_owned(), json!(value));
        }
    }
    if let Some(commit) = value("commit") {
        object.insert("git_dirty".to_owned(), json!(commit.contains("changed")));
    }
    for word in header.split([' ', ',', ';', '\n']) {
        let is_digits = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let key = match (word.split('-').filter(is_digits).count(), word.split('.').filter(is_digits).count()) {
            (3, _) => "date",
            (_, 3) => "driver",
            _ => continue,
        };
        object.insert(key.to_owned(), json!(word));
    }
    Value::Object(object)
}

/// A value that is not empty, at a key of an object or of the objects in it, except below arrays.
fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    let object = value.as_object()?;
    let is_said = |value: &&Value| match value {
        Value::Null | Value::Object(_) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(all) => !all.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    };
    object.get(key).filter(is_said).or_else(|| object.values().find_map(|inner| find(inner, key)))
}

/// Values in one line, commits and hashes shortened.
fn words(values: &BTreeSet<String>) -> String {
    const SHOWN: usize = 3;
    let short = |value: &String| {
        let is_hash = value.len() >= 16 && value.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hash { value[..8].to_owned() } else { value.clone() }
    };
    let mut shown: Vec<String> = values.iter().take(SHOWN).map(short).collect();
    if values.len() > SHOWN {
        shown.push(format!("{} more", values.len() - SHOWN));
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(document: Value, rows: impl IntoIterator<Item = Value>) -> Origin {
        Origin { document, rows: rows.into_iter().collect() }
    }

    #[test]
    fn what_a_row_lacks_the_record_lacks() {
        let provenance = json!({"git_commit": "a", "git_dirty": false, "host_hash": "b", "driver_release": "1"});
        let whole = json!({"provenance": provenance, "command": ["x"], "started_at": "2026"});
        assert_eq!(origin(whole.clone(), []).lacks(true), []);
        assert_eq!(origin(Value::Null, [whole.clone(), whole.clone()]).lacks(true), []);
        let part = json!({"build": "a", "command": [], "host": ""});
        let lacking = [Fact::Command, Fact::Clean, Fact::Driver, Fact::Host, Fact::Date];
        assert_eq!(origin(Value::Null, [whole, part]).lacks(true), lacking);
        assert!(!origin(Value::Null, []).lacks(false).contains(&Fact::Driver), "a simulated device has none");
    }

    #[test]
    fn the_header_of_a_text_says_its_origin() {
        let text =
            "Tests.\n\nmachine  NVIDIA H200, 580.159.04, 16 cores, 2026-11-27\ncommit   abc\ncommand  a.sh\n\n== a\n";
        assert_eq!(origin(of_header(text), []).lacks(true), []);
        let older = text.replace("commit   abc\n", "").replace(", 2026-11-27", "");
        assert_eq!(origin(of_header(&older), []).lacks(true), [Fact::Commit, Fact::Clean, Fact::Date]);
    }

    #[test]
    fn causes_are_what_differs() {
        let run = |data: &str, commit: &str| json!({"summary": {"dataset": {"name": data}}, "provenance": {"git_commit": commit}});
        let kept = origin(json!({"spec_sha256": "1", "profile_sha256": "2"}), [run("mnist", "a")]);
        assert_eq!(kept.causes(&kept), Vec::<String>::new());
        let new = origin(json!({"spec_sha256": "3"}), [run("digits", "b")]);
        let causes = [
            "the spec changed",
            "another profile of the simulated device",
            "data set digits instead of mnist",
            "build b instead of a",
        ];
        assert_eq!(new.causes(&kept), causes);
    }
}
