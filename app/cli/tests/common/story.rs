//! Builds snapshots.

use super::{Ran, TestDir};
use serde_json::{Value, json};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BASE: u64 = 1 << 40;

/// Builds a snapshot.
#[derive(Default)]
pub(crate) struct Story {
    pub(crate) events: Vec<Value>,
    pub(crate) segments: Vec<Value>,
    pub(crate) annotations: Vec<Value>,
    pub(crate) settings: Value,
}

/// A frame of the user's script.
pub(crate) fn script(line: u64, name: &str) -> Value {
    json!({"name": name, "filename": "/home/me/proj/train.py", "line": line})
}

/// A frame of a library.
pub(crate) fn library(line: u64, name: &str) -> Value {
    json!({"name": name, "filename": "/venv/lib/python3.12/site-packages/nets/blocks.py", "line": line})
}

pub(crate) fn torch(name: &str) -> Value {
    json!({"name": name, "filename": "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", "line": 1})
}

impl Story {
    pub(crate) fn event(&mut self, action: &str, addr: u64, bytes: u64, stream: u64, frames: Value) {
        let key = if action == "oom" { "device_free" } else { "addr" };
        let time = 1000 + self.events.len();
        self.events.push(json!({
            "action": action, key: addr, "size": bytes, "stream": stream, "time_us": time, "frames": frames,
        }));
    }

    /// Allocates a segment.
    pub(crate) fn segment(&mut self, at: u64, bytes: u64, stream: u64) {
        self.event("segment_alloc", BASE + at, bytes, stream, json!([]));
    }

    pub(crate) fn alloc(&mut self, at: u64, bytes: u64, stream: u64, frames: Value) {
        self.event("alloc", BASE + at, bytes, stream, frames);
    }

    pub(crate) fn free(&mut self, at: u64, bytes: u64, stream: u64) {
        self.event("free_requested", BASE + at, bytes, stream, json!([]));
        self.event("free_completed", BASE + at, bytes, stream, json!([]));
    }

    /// Adds a free segment of a pool to the final snapshot.
    pub(crate) fn held(&mut self, at: u64, bytes: u64, pool: Value) {
        self.segments.push(json!({
            "device": 0, "address": BASE + at, "total_size": bytes, "stream": 0, "segment_type": "small",
            "is_expandable": false, "segment_pool_id": pool,
            "blocks": [{"address": BASE + at, "size": bytes, "requested_size": 0, "state": "inactive", "frames": []}],
        }));
    }

    pub(crate) fn annotate(&mut self, name: &str, stage: &str, event: usize) {
        self.annotations.push(json!({"name": name, "stage": stage, "device": 0, "time_us": 1000 + event}));
    }

    pub(crate) fn text(&self) -> String {
        json!({
            "segments": self.segments, "device_traces": [self.events], "allocator_settings": self.settings,
            "external_annotations": self.annotations,
        })
        .to_string()
    }
}

// Shared code of the tests of `explain`.

pub(crate) fn explain(dir: &TestDir, arguments: &[&str]) -> Ran {
    dir.run(&[&["explain"], arguments].concat())
}

pub(crate) fn explain_json(dir: &TestDir, arguments: &[&str]) -> Value {
    let output = explain(dir, &[arguments, &["--json"]].concat()).ok();
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", output.stdout))
}

pub(crate) fn part(explanation: &Value, name: &str) -> u64 {
    let parts = explanation["reserved"]["parts"].as_array().unwrap();
    parts.iter().find(|part| part["name"] == name).unwrap()["bytes"].as_u64().unwrap()
}

/// Asserts that the peaks equal those of a replay that matches every recorded address. Returns the parts of the breakdown at the peak and
/// those of the replay; `None` if the breakdown is of another moment near the peak.
fn peaks_agree(dir: &TestDir, file: &str) -> Option<[Vec<Value>; 2]> {
    let explanation = explain_json(dir, &[file]);
    let arguments =
        ["replay", file, "--addresses", "recorded", "--alloc", "caching", "--device", "null", "--plan", "off"];
    let rows = dir.run(&[&arguments[..], &["--json"]].concat()).rows();
    assert_eq!((&rows[0]["address_mismatches"], &rows[0]["segment_mismatches"]), (&json!(0), &json!(0)), "{file}");
    assert_eq!(explanation["peak_reserved"]["reserved_bytes"], rows[0]["peak_reserved_bytes"], "{file}");
    assert_eq!(explanation["peak_active"]["active_bytes"], rows[0]["peak_active_bytes"], "{file}");
    let names = ["requested", "internal", "soft", "hard", "stream", "pending"];
    let parts: u64 =
        explanation["reserved"]["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(json!(parts), explanation["reserved"]["moment"]["reserved_bytes"], "{file}");
    let breakdown = names.map(|name| json!(part(&explanation, name)));
    let ledger = names.map(|name| rows[0]["ledger"][name].clone());
    (explanation["reserved"]["at"] == "peak_reserved").then_some([breakdown.to_vec(), ledger.to_vec()])
}

/// Asserts that peaks and breakdown equal those of a replay. The replay's breakdown is that of the first moment at the reserved peak, so
/// breakdowns are compared on the recording up to that moment.
pub(crate) fn agrees(dir: &TestDir, file: &str) {
    peaks_agree(dir, file);
    dir.run(&["convert", file, "--to", "snapshot-json", "-o", "first.json", "--force"]).ok();
    let mut snapshot: Value = serde_json::from_slice(&std::fs::read(dir.at("first.json")).unwrap()).unwrap();
    let events = snapshot["device_traces"][0].as_array_mut().unwrap();
    let (mut reserved, mut peak, mut length) = (0, 0, events.len());
    for (number, event) in events.iter().enumerate() {
        let bytes = event["size"].as_i64().unwrap();
        match event["action"].as_str().unwrap() {
            "segment_alloc" => reserved += bytes,
            "segment_free" => reserved -= bytes,
            // The request for which the segment was allocated.
            "alloc" if reserved > peak => (peak, length) = (reserved, number + 1),
            _ => {}
        }
    }
    events.truncate(length);
    snapshot["segments"] = json!([]);
    if let Some([breakdown, ledger]) = peaks_agree(dir, &dir.write("first.json", snapshot.to_string())) {
        assert_eq!(breakdown, ledger, "{file}: requested, internal, soft, hard, stream, pending");
    }
}
