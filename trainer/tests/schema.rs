//! The files of runs match `analysis/schema.md`: every key, its type, whether it is always present, and no other keys.

use crate::common::{FinishedRun, arms, digits, iris, read_json, train};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use trainer::Settings;
use trainer::arithmetic::{Dtype, FuseMode};
use trainer::settings::{LaunchMode, LoaderMode, OffloadMode, PinMode, ProfileSteps, SyncMode};
use vramlab::Path;
use vramlab::backends::{self, stream_ordered};
use vramlab::histories::formats::Export;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../analysis/schema.md");

/// The document's description of one key.
#[derive(Clone, Debug)]
struct Described {
    types: Vec<String>,
    optional: bool,
}

/// Keys that a run does not have on the simulated device, outside of a checkout or of a job, or when all is well.
const ELSEWHERE: [&str; 29] = [
    "communication.version",
    "communication.library",
    "communication.library_bytes",
    "communication.context_bytes",
    "communication.counted_bytes",
    "communication.registered_buckets",
    "communication.refusal",
    "communication.sum_s[]",
    "provenance.git_commit",
    "provenance.git_dirty",
    "provenance.driver_release",
    "provenance.job",
    "provenance.job.id",
    "provenance.job.array_id",
    "provenance.job.array_task",
    "check.live[]",
    "idle_costs",
    "idle_costs.mem_alloc[]",
    "idle_costs.mem_alloc_in_page",
    "idle_costs.mem_free[]",
    "idle_costs.mem_free_in_page",
    "idle_costs.stream_synchronize",
    "idle_costs.device_synchronize",
    "idle_costs.kernel_launch",
    "device.driver_version",
    "device.compute_capability",
    "check.violations[]",
    "upper_bounds[]",
    "fragmentation.peak_reserved",
];

/// The cells of the rows of all tables whose first header cell is `first`, below `heading`.
fn rows(heading: &str, first: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(DOCUMENT).unwrap();
    let (mut inside, mut expected, mut out) = (false, false, Vec::new());
    for line in text.lines() {
        if line.starts_with('#') {
            inside = line.trim_start_matches('#').trim() == heading;
        }
        if !inside || !line.contains(" | ") {
            expected = false;
            continue;
        }
        let cells: Vec<String> = line.split(" |").map(|cell| cell.trim().to_owned()).collect();
        if expected {
            out.push(cells);
        } else {
            expected = cells[0] == first;
        }
    }
    assert!(!out.is_empty(), "no table of '{first}' under '{heading}'");
    out.retain(|row| !row[0].starts_with("---"));
    out
}

fn unquoted(cell: &str) -> &str {
    cell.strip_prefix('`').and_then(|cell| cell.strip_suffix('`')).unwrap_or_else(|| panic!("no code: {cell}"))
}

fn anchor(heading: &str) -> String {
    heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-").replace('.', "")
}

/// The heading to which a link inside the document leads.
fn heading(target: &str) -> String {
    let text = std::fs::read_to_string(DOCUMENT).unwrap();
    let actual = text.lines().filter(|line| line.starts_with('#')).find(|line| anchor(line) == target);
    actual.unwrap_or_else(|| panic!("#{target}")).trim_start_matches('#').trim().to_owned()
}

/// The keys of a table; those of objects with tables of their own stand below them.
fn describe(under: &str, before: &str, out: &mut BTreeMap<String, Described>) {
    for row in rows(under, "key") {
        let (kinds, optional) =
            row[1].strip_suffix(", optional").map_or((row[1].as_str(), false), |kinds| (kinds, true));
        for key in row[0].split(", ") {
            let path = format!("{before}{}", unquoted(key));
            let mut types: Vec<String> = kinds.split(" or ").map(str::to_owned).collect();
            if let Some((kind, target)) = types[0].clone().split_once("](#") {
                kind.trim_start_matches('[').clone_into(&mut types[0]);
                if types[0] == "object" {
                    describe(&heading(target.trim_end_matches(')')), &format!("{path}."), out);
                }
            } else if types[0] == "[integer, integer]" {
                out.insert(format!("{path}[]"), Described { types: vec!["integer".to_owned()], optional: true });
                types[0] = "array".to_owned();
            }
            // Containers: arrays and maps.
            for (end, kind) in [("[]", "array"), (".<call>", "object")] {
                if let Some(holder) = path.strip_suffix(end) {
                    out.insert(holder.to_owned(), Described { types: vec![kind.to_owned()], optional });
                }
            }
            assert!(out.insert(path.clone(), Described { types, optional }).is_none(), "{path} is described twice");
        }
    }
}

fn described(under: &str) -> BTreeMap<String, Described> {
    let mut out = BTreeMap::new();
    describe(under, "", &mut out);
    out
}

/// Values observed at one path: JSON types, their number, and the number of objects that could contain it.
#[derive(Clone, Debug, Default)]
struct Found {
    types: BTreeSet<&'static str>,
    times: usize,
}

#[derive(Default)]
struct Walk {
    actual: BTreeMap<String, Found>,
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
            let actual = self.actual.entry(path.to_owned()).or_default();
            actual.types.insert(kind);
            actual.times += 1;
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
        _ if path.ends_with("driver_calls") => format!("{path}.<call>"),
        _ => format!("{path}.{key}"),
    }
}

/// The object that holds a path.
fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(parent, _)| parent)
}

fn compare(section: &str, walk: &Walk) {
    let described = described(section);
    let mut problems = Vec::new();
    for (path, actual) in &walk.actual {
        // The settings and statistics of an allocator are its own.
        if path.starts_with("allocator_stats.") || path.starts_with("settings.allocator_settings.") {
            continue;
        }
        let Some(row) = described.get(path) else {
            problems.push(format!("{path} is written and not described"));
            continue;
        };
        for kind in &actual.types {
            // A number may happen to have no fraction, an integer never has one.
            let fits =
                row.types.iter().any(|name| name == kind || name == "any" || (name == "number" && *kind == "integer"));
            if !fits {
                problems.push(format!("{path} is described as {:?} and written as {kind}", row.types));
            }
        }
    }
    for (path, row) in &described {
        let times = walk.actual.get(path).map_or(0, |actual| actual.times);
        let elsewhere = ELSEWHERE.iter().any(|key| key == path || key.trim_end_matches("[]") == path);
        if times == 0 && !elsewhere && !path.ends_with("[][]") {
            problems.push(format!("{path} is described and written by no run"));
        }
        let holders = walk.objects.get(parent(path)).copied().unwrap_or(0);
        if !row.optional && !path.ends_with("[]") && !path.ends_with('>') && times != holders {
            problems.push(format!("{path} should always be there and was in {times} of {holders} objects"));
        }
        let known = ["string", "integer", "number", "boolean", "array", "object", "null", "any"];
        if let Some(odd) = row.types.iter().find(|name| !known.contains(&name.as_str())) {
            problems.push(format!("{path} has an unknown type: {odd}"));
        }
    }
    assert!(problems.is_empty(), "{section} and analysis/schema.md differ:\n  {}", problems.join("\n  "));
}

/// Runs that together write everything a simulated device can make them write.
fn runs() -> Vec<FinishedRun> {
    let full = Settings { trace: true, check: true, exports: Export::ALL.to_vec(), ..iris() };
    let mut runs: Vec<FinishedRun> = arms(&full).into_iter().map(|(_, settings)| train(&settings).finished()).collect();
    runs.push(
        train(&Settings {
            steps: Some(8),
            loader: LoaderMode::Pinned,
            pin: Some(PinMode::Pooled),
            offload: Some(OffloadMode::Optimizer),
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
    let test_dir = tempfile::TempDir::new().unwrap();
    let save_start = Some(test_dir.path().join("start.safetensors"));
    runs.push(train(&Settings { latency: false, loader: LoaderMode::Copy, save_start, ..iris() }).finished());
    for kind in backends::all() {
        let failed = train(&Settings { allocator: kind.into(), memory_limit: Some(8 << 10), trace: true, ..iris() });
        assert!(failed.outcome.error.is_some());
        runs.push(failed);
    }
    runs
}

/// The records of a run on two simulated GPUs with every option of one, and no kernel's cost in their profile: that of
/// rank 0, and that of rank 1.
fn ranks() -> Vec<Value> {
    let test_dir = tempfile::TempDir::new().unwrap();
    let mut profile = serde_json::to_value(vramlab::Profile::h200()).unwrap();
    profile["kernels"].as_object_mut().unwrap().clear();
    std::fs::write(test_dir.path().join("gpu.json"), profile.to_string()).unwrap();
    let base = ["--device", "sim:gpu.json", "--dataset", "iris", "--batch", "12", "--epochs", "1", "--hidden", "16"];
    let ranks = ["--gpus", "2", "--bucket", "1K", "--overlap", "off", "--buffers", "events", "--rank-alloc", "0=naive"];
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.args(base).args(ranks).args(["--out", "record"]).current_dir(test_dir.path()).env_remove("RANK");
    command.timeout(std::time::Duration::from_secs(60)).assert().success();
    ["record", "record/rank1"].map(|path| read_json(&test_dir.path().join(path).join("summary.json"))).into()
}

/// The list of backends documents an allocator's settings, so the document does not repeat them.
fn lists_every_setting(summary: &Value) {
    let settings = &summary["settings"];
    let backend = backends::find(settings["allocator"].as_str().unwrap()).unwrap();
    let written: BTreeSet<&str> =
        settings["allocator_settings"].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(written, backend.settings().iter().map(|setting| setting.name).collect(), "{backend}");
}

#[test]
fn record_keys_and_their_descriptions_match() {
    let (mut summaries, mut traces, mut calls) = (Walk::default(), Walk::default(), Walk::default());
    let mut statistics = BTreeSet::new();
    for run in runs() {
        let json = run.json();
        lists_every_setting(&json);
        let keys = json["allocator_stats"].as_object().unwrap().keys();
        statistics.extend(keys.map(|key| key.split('.').next().unwrap().to_owned()));
        summaries.visit("", &json);
        if let Ok(text) = std::fs::read_to_string(run.path().join("trace.jsonl")) {
            text.lines().for_each(|line| traces.visit("", &serde_json::from_str(line).unwrap()));
        }
        if let Ok(text) = std::fs::read_to_string(run.path().join("driver_calls.jsonl")) {
            text.lines().for_each(|line| calls.visit("", &serde_json::from_str(line).unwrap()));
        }
        let header = std::fs::read_to_string(run.path().join("steps.csv")).unwrap();
        let columns: Vec<&str> = header.lines().next().unwrap().split(',').collect();
        let listed = rows("steps.csv", "key");
        let listed: Vec<&str> = listed.iter().flat_map(|row| row[0].split(", ")).map(unquoted).collect();
        assert_eq!(columns, listed);
    }
    ranks().iter().for_each(|json| summaries.visit("", json));
    let listed = rows("Allocator statistics", "name");
    let explained = listed.iter().map(|row| unquoted(row[0].trim_end_matches(" *")).to_owned());
    // Counters that stay absent in these runs.
    statistics.extend(["num_planned", "num_unplanned", "stranded_bytes"].map(str::to_owned));
    assert_eq!(statistics, explained.collect(), "names of statistics");
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
fn five_driver_calls_are_always_there() {
    let json = train(&iris()).finished().json();
    for name in ["mem_alloc", "mem_free", "mem_alloc_async", "mem_free_async", "stream_synchronize"] {
        assert!(json["epochs"][0]["driver_calls"].get(name).is_some(), "{name}");
    }
}

#[test]
fn every_path_is_listed() {
    let listed = rows("Paths", "value");
    let names: Vec<&str> = listed.iter().map(|row| unquoted(&row[0])).collect();
    assert_eq!(names, Path::ALL.map(Path::name));
}

#[test]
fn links_inside_the_document_lead_somewhere() {
    let text = std::fs::read_to_string(DOCUMENT).unwrap();
    let anchors: BTreeSet<String> = text.lines().filter(|line| line.starts_with('#')).map(anchor).collect();
    for target in text.split("](#").skip(1).map(|rest| rest.split(')').next().unwrap()) {
        assert!(anchors.contains(target), "#{target}");
    }
}
