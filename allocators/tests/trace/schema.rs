//! The JSON export is what `analysis/schema/memory_snapshot.schema.json` says.

use crate::common::{fixture, read_all};
use crate::snapshots::recorded;
use allocators::trace::{Action, Ending, Event, Export};
use serde_json::{Value, json};
use std::path::Path;

fn validator() -> jsonschema::Validator {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../analysis/schema/memory_snapshot.schema.json");
    let schema: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    jsonschema::draft202012::meta::validate(&schema).unwrap();
    jsonschema::draft202012::new(&schema).unwrap()
}

fn problems(validator: &jsonschema::Validator, document: &Value) -> Vec<String> {
    validator.iter_errors(document).map(|error| format!("{}: {error}", error.instance_path)).take(5).collect()
}

fn exported(events: &[Event], ending: &Ending<'_>) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot.json");
    let mut writer = Export::SnapshotJson.create(&path).unwrap();
    events.iter().for_each(|event| writer.event(event).unwrap());
    writer.finish(ending).unwrap();
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn json_exports_follow_the_schema() {
    let validator = validator();
    let mut paths: Vec<_> = recorded().into_iter().map(|(path, _)| path).collect();
    paths.push(fixture("small.p4.pickle"));
    for path in paths {
        let (events, summary) = read_all(&path).unwrap();
        let settings = Some(&summary.allocator_settings);
        let document =
            exported(&events, &Ending { segments: &summary.segments, allocator_settings: settings, devices: 1 });
        assert_eq!(problems(&validator, &document), [""; 0], "{}", path.display());
    }
    // Every action there is, and nothing at all.
    let event = |action| Event { action, device: 0, addr: 512, bytes: 512, stream: u64::MAX, time_ns: 1 };
    for events in [Action::ALL.map(event).to_vec(), Vec::new()] {
        assert_eq!(problems(&validator, &exported(&events, &Ending::default())), [""; 0]);
    }
}

#[test]
fn the_schema_tells_what_is_wrong() {
    let validator = validator();
    let (events, summary) = read_all(&fixture("small.p4.pickle")).unwrap();
    let sound = exported(&events, &Ending { segments: &summary.segments, ..Ending::default() });
    for (pointer, wrong) in [
        ("/device_traces/0/0/action", json!("allot")),
        ("/device_traces/0/0/addr", json!(-1)),
        ("/device_traces/0/0/stream", json!("0x0")),
        ("/segments/0/blocks/0/state", json!("active_awaiting_free")),
        ("/segments/0/segment_type", json!("huge")),
        ("/segments/0/blocks", json!([])),
        ("/device_traces", json!({})),
    ] {
        let mut document = sound.clone();
        *document.pointer_mut(pointer).unwrap() = wrong;
        assert!(!problems(&validator, &document).is_empty(), "{pointer}");
    }
}
