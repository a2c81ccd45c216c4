//! PyTorch's snapshots: recorded on a GPU, and small ones of the same form.

use super::{fixture, read_all, read_bytes};
use crate::facts::facts;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};
use vramlab_histories::formats::{
    Action, Ending, Event, Export, Format, Frame, Origin, ReadOptions, SegmentPool, StackId, TextId, read_origins_from,
};
use vramlab_policies::{BlockState, PoolKind};

/// Snapshots recorded on an H200, with their numbers of events: the repository's, and those that may be next to the checkout.
pub(crate) fn recorded() -> Vec<(PathBuf, u64)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut out = Vec::new();
    for entry in ["experiments/histories", "../shared/traces"]
        .into_iter()
        .flat_map(|at| std::fs::read_dir(root.join(at)).into_iter().flatten())
    {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.ends_with(".pickle.xz") {
            let events = facts(&path).unwrap()["events"].as_u64().unwrap();
            out.push((path, events));
        }
    }
    assert!(out.len() >= 4, "the repository has four recordings");
    out.sort();
    out
}

#[test]
fn small_snapshot_reads_as_written() {
    let (events, summary) = read_all(&fixture("small.p4.pickle")).unwrap();
    assert_eq!(summary.format, Format::SnapshotPickle);
    assert_eq!(summary.events, [40, 0]);
    assert_eq!(events.len(), 40);
    let first = Event {
        action: Action::SegmentAlloc,
        device: 0,
        addr: 0x7f20_0000_0000,
        bytes: 2 << 20,
        stream: 0x55d3_c0a1_b2c0,
        time_ns: 1_795_247_137_240_886_000,
    };
    assert_eq!(events[0], Event { stream: events[0].stream, time_ns: events[0].time_ns, ..first });
    assert!(events.windows(2).all(|pair| pair[0].time_ns < pair[1].time_ns));
    assert_eq!(events.iter().map(|event| event.stream).collect::<std::collections::BTreeSet<_>>().len(), 2);
    assert_eq!(summary.external_annotations, 2);
    assert_eq!(summary.unknown_actions, 0);
    let settings = serde_json::json!({
        "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
        "expandable_segments": false, "roundup_power2_divisions": {"1": 0, "2": 0, "4": 0},
    });
    assert_eq!(serde_json::Value::Object(summary.allocator_settings), settings);
    let made = events.iter().filter(|event| event.action == Action::SegmentAlloc).count();
    assert_eq!(summary.segments.len(), made);
    for segment in &summary.segments {
        assert_eq!((segment.total_size, segment.segment_type), (2 << 20, PoolKind::Small));
        assert_eq!(segment.blocks.len(), 1);
        assert_eq!(segment.blocks[0].address, segment.address);
    }
    assert!(summary.segments.iter().any(|segment| segment.blocks[0].state == BlockState::Allocated));
}

#[test]
fn all_protocols_and_picklers_read_alike() {
    let (events, summary) = read_all(&fixture("small.p4.pickle")).unwrap();
    for name in ["small.p2.pickle", "small.torch.pickle"] {
        let (other, also) = read_all(&fixture(name)).unwrap();
        assert_eq!(other, events, "{name}");
        assert_eq!(also.segments, summary.segments, "{name}");
        assert_eq!(also.allocator_settings, summary.allocator_settings, "{name}");
        assert_eq!(also.events, summary.events, "{name}");
    }
    // Protocols 3 and 5 differ from 2 and 4 in instructions that a snapshot does not use.
    for (name, protocol) in [("small.p2.pickle", 3), ("small.p4.pickle", 5)] {
        let mut bytes = std::fs::read(fixture(name)).unwrap();
        bytes[1] = protocol;
        assert_eq!(read_bytes(&bytes).unwrap().0, events);
    }
}

#[test]
fn compressed_files_are_detected_by_content() {
    use std::io::Write;
    let plain = std::fs::read(fixture("small.p4.pickle")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(&plain).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 6);
    xz.write_all(&plain).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.bin");
    let expected = read_bytes(&plain).unwrap();
    for packed in [gzip.finish().unwrap(), xz.finish().unwrap()] {
        assert!(packed.len() < plain.len() / 2);
        std::fs::write(&path, packed).unwrap();
        assert_eq!(read_all(&path).unwrap(), expected);
    }
}

#[test]
fn recorded_snapshots_have_pytorchs_event_counts() {
    for (path, count) in recorded() {
        let (events, summary) = read_all(&path).unwrap();
        assert_eq!(events.len() as u64, count, "{}", path.display());
        assert_eq!(summary.all_events(), count);
        assert_eq!(summary.allocator_settings["max_split_size"], -1);
        // The blocks of a segment are consecutive and fill it.
        for segment in &summary.segments {
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at);
                at += block.size;
            }
            assert_eq!(at, segment.address + segment.total_size);
        }
        // Live at the end, by the events and by the segments.
        let mut live = BTreeMap::new();
        for event in &events {
            match event.action {
                Action::Alloc => assert_eq!(live.insert(event.addr, event.bytes), None),
                Action::FreeRequested => assert_eq!(live.remove(&event.addr), Some(event.bytes)),
                _ => {}
            }
        }
        let blocks = summary.segments.iter().flat_map(|segment| &segment.blocks);
        let expected: BTreeMap<u64, u64> = blocks
            .filter(|block| block.state == BlockState::Allocated)
            .map(|block| (block.address, block.requested_size))
            .collect();
        assert_eq!(live, expected, "{}", path.display());
    }
}

// The JSON export has the keys and names of `allocators/histories/schema/memory_snapshot.schema.json`.
// `analysis/check_memory_viz.py` checks it against the full schema.

fn schema() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/memory_snapshot.schema.json");
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

// Pickles that arrive byte by byte. The reader has shortcuts for its buffer, so here each instruction runs alone; complete files
// must give the same result.

/// Gives one byte at a time.
struct Bytewise<'a>(&'a [u8]);

impl Read for Bytewise<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = out.len().min(1);
        self.0.read(&mut out[..count])
    }
}

/// Everything that reading returns: events, stacks and texts, and the rest or the error.
#[derive(PartialEq)]
struct Reading {
    events: Vec<(Event, Origin)>,
    stacks: BTreeMap<StackId, Vec<Frame>>,
    texts: BTreeMap<TextId, String>,
    rest: String,
}

fn reading(source: impl Read) -> Reading {
    // Detecting the format would fill the buffer.
    let options = ReadOptions { format: Some(Format::SnapshotPickle), ..ReadOptions::default() };
    let mut events = Vec::new();
    let read = read_origins_from(Box::new(source), &options, &mut |event, origin, _| {
        events.push((event, origin));
        Ok(())
    });
    let (mut stacks, mut texts) = (BTreeMap::new(), BTreeMap::new());
    let rest = read.map(|(summary, origins)| {
        for (_, Origin { stack, category, note }) in &events {
            stacks.entry(*stack).or_insert_with(|| origins.frames(*stack).collect::<Vec<Frame>>());
            let frames = stacks[stack].iter().flat_map(|frame| [frame.name, frame.filename]);
            for text in frames.chain([*category, *note]) {
                texts.entry(text).or_insert_with(|| origins.spelt(text).to_owned());
            }
        }
        format!("{summary:?} {:?} {}", origins.annotations(), origins.stacks())
    });
    Reading { events, stacks, texts, rest: rest.unwrap_or_else(|error| error.to_string()) }
}

fn assert_same(what: &str, bytes: &[u8]) {
    let (at_once, bytewise) = (reading(Cursor::new(bytes)), reading(Bytewise(bytes)));
    assert_eq!(at_once.rest, bytewise.rest, "{what}");
    assert_eq!(at_once.events, bytewise.events, "{what}");
    assert!(at_once == bytewise, "{what}: stacks or texts differ");
}

#[test]
fn complete_files_read_alike_byte_by_byte() {
    let mut files = 0;
    for entry in std::fs::read_dir(fixture("")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let mut unpacked = Vec::new();
        if name.ends_with(".pickle.xz") {
            let packed = std::fs::File::open(&path).unwrap();
            liblzma::read::XzDecoder::new(packed).read_to_end(&mut unpacked).unwrap();
        } else if name.ends_with(".pickle") {
            unpacked = std::fs::read(&path).unwrap();
        } else {
            continue;
        }
        assert_same(&name, &unpacked);
        files += 1;
    }
    assert!(files > 10, "{files} files");
}

#[test]
fn damaged_files_read_alike_byte_by_byte() {
    // The instructions of a snapshot, and some that none has.
    const INSTRUCTIONS: &[u8] = b"hjKMJ\x8a\x94()}]uea\x8cXqr\x88N.st\x95\x850";
    let mut state = 1_u64;
    let mut below = |bound: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // CAST: below `bound`.
        ((state >> 33) % bound as u64) as usize
    };
    for name in ["small.p2.pickle", "small.p4.pickle", "small.torch.pickle"] {
        let original = std::fs::read(fixture(name)).unwrap();
        for number in 0..200 {
            let mut bytes = original.clone();
            let at = below(bytes.len());
            match number % 5 {
                0 => bytes.truncate(at),
                1 => bytes[at] = below(256) as u8,
                2 => bytes[at] = INSTRUCTIONS[below(INSTRUCTIONS.len())],
                3 => bytes.insert(at, INSTRUCTIONS[below(INSTRUCTIONS.len())]),
                _ => drop(bytes.remove(at)),
            }
            assert_same(&format!("{name}, damage {number} at {at}"), &bytes);
        }
    }
}

#[test]
fn numbers_of_every_length_read_alike_byte_by_byte() {
    // An event whose size is written as LONG1 of each length, with each sign, before bytes that could be taken for its rest.
    for length in 0..=9_u8 {
        for top in [0x00, 0x01, 0x7f, 0x80, 0xff] {
            let mut bytes =
                b"\x80\x04}(\x8c\x0ddevice_traces]](}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x10\x8c\x06stream"
                    .to_vec();
            bytes.extend([0x8a, length]);
            bytes.extend((0..length).map(|at| if at + 1 == length { top } else { 0xa5 }));
            bytes.extend(b"\x8c\x04sizeK\x20ueau.");
            assert_same(&format!("{length} bytes, the last {top:#x}"), &bytes);
        }
    }
}

/// A pickle of protocol 2 with the value of a JSON document; lists of two numbers are tuples.
pub(super) fn pickle(value: &Value) -> Vec<u8> {
    fn text(out: &mut Vec<u8>, text: &str) {
        out.push(b'X');
        out.extend((text.len() as u32).to_le_bytes());
        out.extend(text.as_bytes());
    }
    fn write(out: &mut Vec<u8>, value: &Value) {
        match value {
            Value::Null => out.push(b'N'),
            Value::Bool(value) => out.push(if *value { 0x88 } else { 0x89 }),
            Value::Number(value) => {
                out.extend([0x8a, 8]);
                out.extend(value.as_i64().unwrap().to_le_bytes());
            }
            Value::String(value) => text(out, value),
            Value::Array(pair) if pair.len() == 2 && pair.iter().all(Value::is_number) => {
                pair.iter().for_each(|value| write(out, value));
                out.push(0x86);
            }
            Value::Array(values) => {
                out.extend(b"](");
                values.iter().for_each(|value| write(out, value));
                out.push(b'e');
            }
            Value::Object(pairs) => {
                out.extend(b"}(");
                for (key, value) in pairs {
                    text(out, key);
                    write(out, value);
                }
                out.push(b'u');
            }
        }
    }
    let mut out = vec![0x80, 2];
    write(&mut out, value);
    out.push(b'.');
    out
}

/// Both files with the value.
pub(super) fn both(value: &Value) -> [Vec<u8>; 2] {
    [value.to_string().into_bytes(), pickle(value)]
}

#[test]
fn pools_of_segment_events_are_read() {
    let event = |action: &str, pool: Option<Value>| {
        let mut event = serde_json::json!({"action": action, "addr": 4096, "size": 512, "stream": 0, "time_us": 1});
        event.as_object_mut().unwrap().extend(pool.map(|pool| ("pool_id".to_owned(), pool)));
        event
    };
    let mine = || Some(serde_json::json!([0, 7]));
    let events = [
        event("segment_alloc", Some(serde_json::json!([0, 0]))),
        event("alloc", mine()),
        event("segment_free", None),
        event("segment_map", mine()),
        event("segment_unmap", Some(serde_json::json!("none"))),
    ];
    let snapshot = serde_json::json!({"segments": [], "device_traces": [[], events]});
    let [json, pickle] = both(&snapshot);
    // Python pickles the pairs of a JSON document as lists.
    let pair = [&b"\x8a\x08\0\0\0\0\0\0\0\0\x8a\x08\x07\0\0\0\0\0\0\0"[..], b"\x86"].concat();
    let list = [&b"](\x8a\x08\0\0\0\0\0\0\0\0\x8a\x08\x07\0\0\0\0\0\0\0"[..], b"e"].concat();
    let at: Vec<usize> = (0..pickle.len()).filter(|at| pickle[*at..].starts_with(&pair)).collect();
    let of_lists = [&pickle[..at[1]], &list, &pickle[at[1] + pair.len()..]].concat();
    for file in [json, pickle, of_lists] {
        let (events, summary) = read_bytes(&file).unwrap();
        assert_eq!((at.len(), events.len()), (2, 5));
        let named = |event, pool| SegmentPool { device: 1, event, pool: (0, pool) };
        assert_eq!(summary.segment_pools, [named(1, 0), named(4, 7)]);
    }
}
