//! `analysis/schema.md` describes what runs write: every key, its type, whether it is always there, and nothing else.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Done, arms, digits, iris, train};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use trainer::Settings;
use trainer::arithmetic::{Dtype, FuseMode};
use trainer::settings::{LaunchMode, LoaderMode, ProfileSteps, SyncMode};
use vramlab::backends::{self, stream_ordered};
use vramlab::histories::formats::Export;
use vramlab::{CallKind, Path};

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../analysis/schema.md");

/// A row of the document about one key.
#[derive(Clone, Debug)]
struct Described {
    types: Vec<String>,
    always: bool,
    optional: bool,
}

/// The cells of the rows of all tables whose first header cell is `first`, below the heading `## section`.
fn rows(section: &str, first: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(DOCUMENT).unwrap();
    let (mut inside, mut wanted, mut out) = (false, false, Vec::new());
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            inside = heading == section;
        }
        let Some(cells) = line.strip_prefix("| ").filter(|_| inside) else {
            wanted &= line.starts_with('|');
            continue;
        };
        let cells: Vec<String> = cells.trim_end_matches('|').split(" |").map(|cell| cell.trim().to_owned()).collect();
        if wanted {
            out.push(cells);
        } else {
            wanted = cells[0] == first;
        }
    }
    assert!(!out.is_empty(), "no table of '{first}' under '{section}'");
    out
}

fn unquoted(cell: &str) -> &str {
    cell.strip_prefix('`').and_then(|cell| cell.strip_suffix('`')).unwrap_or_else(|| panic!("no code: {cell}"))
}

/// `a{b,c}d` is `abd` and `acd`.
fn expand(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let (choices, after) = rest.split_once('}').unwrap();
    choices.split(',').flat_map(|choice| expand(&format!("{before}{choice}{after}"))).collect()
}

fn described(section: &str) -> BTreeMap<String, Described> {
    let mut out = BTreeMap::new();
    // Records of every kind have one part in common, which has a section of its own.
    let shared = rows("Provenance", "path").into_iter().map(|row| ("provenance.", row));
    let shared = shared.filter(|_| section == "summary.json");
    for (before, row) in rows(section, "path").into_iter().map(|row| ("", row)).chain(shared) {
        assert_eq!(row.len(), 5, "{row:?}");
        for path in expand(unquoted(&row[0])).into_iter().map(|path| format!("{before}{path}")) {
            let types = row[1].split(" or ").map(str::to_owned).collect();
            let entry = Described { types, always: row[3] == "always", optional: row[3].starts_with("optional") };
            assert!(out.insert(path.clone(), entry).is_none(), "{path} is described twice");
        }
    }
    out
}

/// What was found at one path: JSON types, how often, and how many objects could have held it.
#[derive(Clone, Debug, Default)]
struct Found {
    types: BTreeSet<&'static str>,
    times: usize,
}

#[derive(Default)]
struct Walk {
    found: BTreeMap<String, Found>,
    /// Objects seen at each path; the root is the empty path.
    objects: BTreeMap<String, usize>,
}

impl Walk {
    fn visit(&mut self, path: &str, value: &Value) {
        if !path.is_empty() {
            let kind = match value {
                Value::Null => "null",
                Value::Bool(_) => "boolean",
                Value::Number(number) if number.is_u64() => "integer",
                Value::Number(_) => "number",
                Value::String(_) => "string",
                Value::Array(_) => "array",
                Value::Object(_) => "object",
            };
            let found = self.found.entry(path.to_owned()).or_default();
            found.types.insert(kind);
            found.times += 1;
        }
        match value {
            Value::Array(items) => items.iter().for_each(|item| self.visit(&format!("{path}[]"), item)),
            Value::Object(map) => {
                *self.objects.entry(path.to_owned()).or_default() += 1;
                map.iter().for_each(|(key, value)| self.visit(&below(path, key), value));
            }
            _ => {}
        }
    }
}

fn below(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        "allocator_stats" => format!("{path}[\"{key}\"]"),
        _ if path.ends_with("driver_calls") => format!("{path}.<call>"),
        "settings.allocator_settings" => format!("{path}.<setting>"),
        _ => format!("{path}.{key}"),
    }
}

/// The object that holds a path.
fn parent(path: &str) -> &str {
    path.split_once("[\"").map_or_else(|| path.rsplit_once('.').map_or("", |(parent, _)| parent), |(parent, _)| parent)
}

fn compare(section: &str, walk: &Walk) {
    let described = described(section);
    let mut problems = Vec::new();
    for (path, found) in &walk.found {
        // Elements of an array that are objects are described by their keys.
        if (path.ends_with("[]") || path.ends_with("[][]"))
            && found.types.iter().all(|kind| ["object", "array"].contains(kind))
        {
            continue;
        }
        let Some(row) = described.get(path) else {
            problems.push(format!("{path} is written and not described"));
            continue;
        };
        for kind in &found.types {
            // A number may happen to have no fraction, an integer never has one.
            let fits = row.types.iter().any(|name| name == kind || (name == "number" && *kind == "integer"));
            if !fits {
                problems.push(format!("{path} is described as {:?} and written as {kind}", row.types));
            }
        }
    }
    for (path, row) in &described {
        let times = walk.found.get(path).map_or(0, |found| found.times);
        if times == 0 && !row.optional {
            problems.push(format!("{path} is described and written by no run"));
        }
        let holders = walk.objects.get(parent(path)).copied().unwrap_or(0);
        if row.always && !path.ends_with("[]") && times != holders {
            problems.push(format!("{path} should always be there and was in {times} of {holders} objects"));
        }
        let known = ["string", "integer", "number", "boolean", "array", "object", "null"];
        if let Some(odd) = row.types.iter().find(|name| !known.contains(&name.as_str())) {
            problems.push(format!("{path} has an unknown type: {odd}"));
        }
    }
    assert!(problems.is_empty(), "{section} and analysis/schema.md differ:\n  {}", problems.join("\n  "));
}

/// Runs that together write everything a simulated device can make them write.
fn runs() -> Vec<Done> {
    let full = Settings { trace: true, check: true, exports: Export::ALL.to_vec(), ..iris() };
    let mut runs: Vec<Done> = arms(&full).into_iter().map(|(_, settings)| train(&settings).finished()).collect();
    runs.push(
        train(&Settings {
            steps: Some(3),
            loader: LoaderMode::Pinned,
            sync: SyncMode::Op,
            profile_steps: Some(ProfileSteps { first: 2, last: 3 }),
            dtype: Dtype::F16,
            fuse: FuseMode::Update,
            ..digits()
        })
        .finished(),
    );
    let graph =
        Settings { allocator: (&stream_ordered::BACKEND).into(), launch: LaunchMode::Graph, batch: 7, ..iris() };
    runs.push(train(&graph).finished());
    let place = tempfile::TempDir::new().unwrap();
    let save_start = Some(place.path().join("start.safetensors"));
    runs.push(train(&Settings { latency: false, loader: LoaderMode::Copy, save_start, ..iris() }).finished());
    for kind in backends::all() {
        let failed = train(&Settings { allocator: kind.into(), memory_limit: Some(8 << 10), trace: true, ..iris() });
        assert!(failed.outcome.error.is_some());
        runs.push(failed);
    }
    runs
}

/// What an allocator's settings mean stands in the list of backends, so the document does not name them again.
fn lists_every_setting(summary: &Value) {
    let settings = &summary["settings"];
    let backend = backends::find(settings["allocator"].as_str().unwrap()).unwrap();
    let written: BTreeSet<&str> =
        settings["allocator_settings"].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(written, backend.settings().iter().map(|setting| setting.name).collect(), "{backend}");
}

#[test]
fn every_key_of_the_record_is_described_and_every_description_is_kept() {
    let (mut summaries, mut traces, mut calls) = (Walk::default(), Walk::default(), Walk::default());
    for done in runs() {
        let json = done.json();
        lists_every_setting(&json);
        summaries.visit("", &json);
        if let Ok(text) = std::fs::read_to_string(done.path().join("trace.jsonl")) {
            text.lines().for_each(|line| traces.visit("", &serde_json::from_str(line).unwrap()));
        }
        if let Ok(text) = std::fs::read_to_string(done.path().join("driver_calls.jsonl")) {
            text.lines().for_each(|line| calls.visit("", &serde_json::from_str(line).unwrap()));
        }
        let header = std::fs::read_to_string(done.path().join("steps.csv")).unwrap();
        let columns: Vec<&str> = header.lines().next().unwrap().split(',').collect();
        let listed = rows("steps.csv", "column");
        assert_eq!(columns, listed.iter().map(|row| unquoted(&row[0])).collect::<Vec<_>>());
    }
    compare("summary.json", &summaries);
    compare("trace.jsonl", &traces);
    compare("driver_calls.jsonl", &calls);
}

#[test]
fn every_export_is_listed() {
    for row in rows("Exports", "file") {
        let export = Export::ALL.into_iter().find(|export| export.file_name() == unquoted(&row[0])).unwrap();
        assert_eq!(unquoted(&row[1]), export.name());
    }
    assert_eq!(rows("Exports", "file").len(), Export::ALL.len());
}

#[test]
fn every_driver_call_is_listed() {
    let listed = rows("summary.json", "`<call>`");
    let names: Vec<&str> = listed.iter().map(|row| unquoted(&row[0])).collect();
    assert_eq!(names, CallKind::ALL.iter().map(|kind| kind.name()).collect::<Vec<_>>());
    let done = train(&iris()).finished();
    let json = done.json();
    for row in listed.iter().filter(|row| row[2] == "always") {
        assert!(json["epochs"][0]["driver_calls"].get(unquoted(&row[0])).is_some(), "{row:?}");
    }
    for name in json["driver_calls"].as_object().unwrap().keys() {
        assert!(names.contains(&name.as_str()), "{name}");
    }
}

#[test]
fn every_path_is_listed() {
    let listed = rows("summary.json", "name of a path");
    let names: Vec<&str> = listed.iter().map(|row| unquoted(&row[0])).collect();
    assert_eq!(names, Path::ALL.map(Path::name));
}

#[test]
fn every_statistic_is_explained() {
    let explained: BTreeSet<String> =
        rows("summary.json", "name").iter().map(|row| unquoted(&row[0]).to_owned()).collect();
    let written: BTreeSet<String> = described("summary.json")
        .keys()
        .filter_map(|path| path.strip_prefix("allocator_stats[\""))
        .map(|key| key.split(['.', '"']).next().unwrap().to_owned())
        .collect();
    assert_eq!(explained, written);
}

#[test]
fn links_inside_the_document_lead_somewhere() {
    let text = std::fs::read_to_string(DOCUMENT).unwrap();
    let anchors: BTreeSet<String> = text
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-").replace('.', ""))
        .collect();
    for target in text.split("](#").skip(1).map(|rest| rest.split(')').next().unwrap()) {
        assert!(anchors.contains(target), "#{target}");
    }
}
