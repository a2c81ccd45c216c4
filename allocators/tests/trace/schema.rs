//! The JSON export has the keys and the names that `analysis/schema/memory_snapshot.schema.json` lists.
//! `analysis/check_memory_viz.py` checks it against the whole schema.

use crate::common::{fixture, read_all};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use vramlab::BlockState;
use vramlab::PoolKind;
use vramlab::histories::formats::{Action, Ending, Event, Export};

fn schema() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../analysis/schema/memory_snapshot.schema.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn exported(events: &[Event], ending: &Ending<'_>) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot.json");
    let mut writer = Export::SnapshotJson.create(&path).unwrap();
    events.iter().for_each(|event| writer.event(event).unwrap());
    writer.finish(ending).unwrap();
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn keys(object: &Value) -> BTreeSet<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

fn names(list: &Value) -> BTreeSet<&str> {
    list.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect()
}

#[test]
fn json_exports_have_the_keys_of_the_schema() {
    let schema = schema();
    let (_, mut summary) = read_all(&fixture("small.p4.pickle")).unwrap();
    for (segment, state) in
        summary.segments.iter_mut().zip([BlockState::Allocated, BlockState::PendingFree, BlockState::Free])
    {
        segment.blocks[0].state = state;
        segment.segment_type = if state == BlockState::Free { PoolKind::Large } else { PoolKind::Small };
    }
    let event = |action| Event { action, device: 0, addr: 512, bytes: 512, stream: u64::MAX, time_ns: 1 };
    let events = Action::ALL.map(event);
    let document = exported(&events, &Ending { segments: &summary.segments, ..Ending::default() });
    assert_eq!(keys(&document), names(&schema["required"]));
    assert_eq!(keys(&document), keys(&schema["properties"]));
    let of = |list: &str| &schema["$defs"][list];
    let mut actions = BTreeSet::new();
    for event in document["device_traces"][0].as_array().unwrap() {
        let action = event["action"].as_str().unwrap();
        actions.insert(action);
        let mut expected = names(&of("event")["required"]);
        expected.insert(if action == "oom" { "device_free" } else { "addr" });
        assert_eq!(keys(event), expected, "{action}");
        assert!(expected.is_subset(&keys(&of("event")["properties"])));
    }
    assert_eq!(actions, names(&of("event")["properties"]["action"]["enum"]));
    let (mut states, mut types) = (BTreeSet::new(), BTreeSet::new());
    for segment in document["segments"].as_array().unwrap() {
        assert_eq!(keys(segment), names(&of("segment")["required"]));
        assert_eq!(keys(segment), keys(&of("segment")["properties"]));
        types.insert(segment["segment_type"].as_str().unwrap());
        for block in segment["blocks"].as_array().unwrap() {
            assert_eq!(keys(block), names(&of("block")["required"]));
            assert_eq!(keys(block), keys(&of("block")["properties"]));
            states.insert(block["state"].as_str().unwrap());
        }
    }
    assert_eq!(states, names(&of("block")["properties"]["state"]["enum"]));
    assert_eq!(types, names(&of("segment")["properties"]["segment_type"]["enum"]));
}
