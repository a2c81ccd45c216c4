//! A snapshot in the making.

use super::{Place, Ran};
use serde_json::{Value, json};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BASE: u64 = 1 << 40;

/// A snapshot in the making.
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

    /// A segment that one block fills in part.
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

    /// A free segment of a pool that is held when the snapshot is taken.
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

// What the tests of `explain` share.

pub(crate) fn explain(place: &Place, arguments: &[&str]) -> Ran {
    place.run(&[&["explain"], arguments].concat())
}

pub(crate) fn found(place: &Place, arguments: &[&str]) -> Value {
    let ran = explain(place, &[arguments, &["--json"]].concat()).ok();
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {}", ran.stdout))
}

pub(crate) fn part(found: &Value, name: &str) -> u64 {
    let parts = found["reserved"]["parts"].as_array().unwrap();
    parts.iter().find(|part| part["name"] == name).unwrap()["bytes"].as_u64().unwrap()
}

/// The ledger is that of a replay which put every block and segment where it was recorded.
pub(crate) fn agrees(place: &Place, file: &str) {
    let found = found(place, &[file]);
    let arguments =
        ["replay", file, "--addresses", "recorded", "--alloc", "caching", "--device", "null", "--plan", "off"];
    let rows = place.run(&[&arguments[..], &["--json"]].concat()).rows();
    assert_eq!((&rows[0]["address_mismatches"], &rows[0]["segment_mismatches"]), (&json!(0), &json!(0)), "{file}");
    assert_eq!(found["peak_reserved"]["reserved_bytes"], rows[0]["peak_reserved_bytes"], "{file}");
    assert_eq!(found["peak_active"]["active_bytes"], rows[0]["peak_active_bytes"], "{file}");
    if found["reserved"]["at"] == "peak_reserved" {
        for name in ["requested", "internal", "soft", "hard", "stream", "pending"] {
            assert_eq!(json!(part(&found, name)), rows[0]["ledger"][name], "{file}: {name}");
        }
    }
    let parts: u64 =
        found["reserved"]["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(json!(parts), found["reserved"]["moment"]["reserved_bytes"], "{file}");
}
